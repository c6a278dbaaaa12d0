"""reference against a slow second definition in fp64, token by token, and the formats' accuracy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from moe_ep_jit import formats, reference
from moe_ep_jit.formats import BlockScaled
from moe_ep_jit.problem import ACTS, Problem, SwiGLU
from moe_ep_jit.topology import Topology

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.sm90)]
PAIRS = [(fmt, act) for fmt, acts in ACTS.items() for act in acts]
FORMAT_AND_ACT = pytest.mark.parametrize(("fmt", "act"), PAIRS, ids=[f"{f}-{a}" for f, a in PAIRS])
GPT_OSS = SwiGLU(limit=7.0, alpha=1.702, beta=1.0)


@dataclass
class Weights:
    """What the reference reads of prepared weights."""

    problem: Problem
    tensors: dict[str, torch.Tensor]
    biases: dict[str, torch.Tensor | None]
    h_global_scale: torch.Tensor
    topology: Topology
    rank: int = 0

    def dequantize(self, name: str, expert: int | None = None) -> torch.Tensor:
        return self.tensors[name] if expert is None else self.tensors[name][expert]

    def bias(self, name: str) -> torch.Tensor | None:
        return self.biases[name]


def weights_of(
    w13: torch.Tensor, w2: torch.Tensor, problem: Problem, h_scale: float = 2.0**-8
) -> Weights:
    def quantized(w: torch.Tensor) -> torch.Tensor:
        g = None
        if problem.format == "nvfp4":
            g = formats.global_scale_of(formats.finite_amax(w.flatten(1)))[:, None]
        return formats.dequantize(formats.quantize(w, problem.format, g))

    experts, device = len(w13), w13.device
    biases = dict.fromkeys(("w13", "w2"))
    if problem.bias:
        biases = {
            name: torch.randn(experts, rows, device=device)
            for name, rows in (("w13", 2 * problem.intermediate), ("w2", problem.hidden))
        }
    scales = torch.full((experts,), h_scale, device=device) * torch.arange(1, experts + 1).to(
        device
    )
    tensors = {"w13": quantized(w13), "w2": quantized(w2)}
    topology = Topology(problem.num_experts, device)
    return Weights(problem, tensors, biases, scales, topology)


def make(fmt: str, act: str, tokens: int = 9, device: str = "cpu", **changes) -> SimpleNamespace:
    """A small layer with unit-scale data: problem, weights, x, ids, topk_weights."""
    facts = {"hidden": 128, "intermediate": 64, "num_experts": 6, "top_k": 3} | changes
    problem = Problem(**facts, max_tokens=max(tokens, 1), format=fmt, act=act)
    experts, h, i = problem.num_experts, problem.hidden, problem.intermediate
    w13 = torch.randn(experts, 2 * i, h) / math.sqrt(h)
    w2 = torch.randn(experts, h, i) / math.sqrt(i)
    ids = torch.rand(tokens, experts).argsort(-1)[:, : problem.top_k].to(torch.int32)
    return SimpleNamespace(
        problem=problem,
        weights=weights_of(w13.to(device), w2.to(device), problem),
        x=torch.randn(tokens, h).bfloat16().to(device),
        ids=ids.to(device),
        topk_weights=torch.rand(tokens, problem.top_k).to(device),
        w13=w13.to(device),
        w2=w2.to(device),
    )


def forward(case: SimpleNamespace, **options) -> torch.Tensor:
    return reference.moe_forward(case.x, case.ids, case.topk_weights, case.weights, **options)


def requantized(row: torch.Tensor, act: str, g: torch.Tensor | None = None) -> torch.Tensor:
    """One row as ``act`` holds it, fp64."""
    if act == "bf16":
        return row.float().bfloat16().double()
    return formats.dequantize(formats.quantize(row.float(), act, g)).double()


def slow_forward(case: SimpleNamespace) -> torch.Tensor:
    """Token by token, slot by slot, in fp64 on the CPU -> fp64 [tokens, hidden]."""
    problem, weights = case.problem, case.weights
    act, swiglu = problem.act, problem.activation
    x = formats.dequantize(case.x) if isinstance(case.x, BlockScaled) else case.x
    matrices = [weights.tensors[name].cpu().double() for name in ("w13", "w2")]
    out = torch.zeros(len(case.ids), problem.hidden, dtype=torch.float64)
    for token, ids in enumerate(case.ids.tolist()):
        row = x[token].cpu()
        row = row.double() if isinstance(case.x, BlockScaled) else requantized(row, act)
        for k, expert in enumerate(ids):
            if not 0 <= expert < problem.num_experts:
                continue
            w13, w2 = (w[expert] for w in matrices)
            b13, b2 = (
                0.0 if weights.biases[n] is None else weights.biases[n][expert].cpu().double()
                for n in ("w13", "w2")
            )
            z = w13 @ row + b13
            h = torch.empty(problem.intermediate, dtype=torch.float64)
            for i in range(problem.intermediate):
                g, u = z[i].item(), z[problem.intermediate + i].item()
                if swiglu.limit is not None:
                    g, u = min(g, swiglu.limit), max(-swiglu.limit, min(u, swiglu.limit))
                h[i] = g / (1 + math.exp(-swiglu.alpha * g)) * (u + swiglu.beta)
            scale = weights.h_global_scale[expert].cpu() if act == "nvfp4" else None
            y = w2 @ requantized(h, act, scale) + b2
            out[token] += y.bfloat16().double() * case.topk_weights[token, k].double().item()
    return out


def assert_agrees(got: torch.Tensor, case: SimpleNamespace) -> None:
    """fp32 sums may put single elements of h on the other side of a rounding boundary."""
    errors = reference.error(got.cpu(), slow_forward(case))
    assert errors.whole < 4e-3
    assert errors.worst_row < 1.5e-2


@pytest.mark.parametrize("device", DEVICES)
@FORMAT_AND_ACT
class TestAgainstSlowDefinition:
    def test_plain(self, fmt, act, device):
        case = make(fmt, act, device=device)
        got = forward(case)
        assert got.dtype == torch.bfloat16
        assert got.device == case.x.device
        assert_agrees(got, case)

    def test_gpt_oss_activation_and_bias(self, fmt, act, device):
        case = make(fmt, act, device=device, activation=GPT_OSS, bias=True)
        case.x *= 6  # beyond the limit
        assert_agrees(forward(case), case)
        plain = case.weights.problem.with_(activation=SwiGLU())
        case.weights.problem = plain
        assert reference.error(forward(case).double().cpu(), slow_forward(case)).whole > 0.1

    def test_skipped_repeated_and_foreign_ids(self, fmt, act, device):
        case = make(fmt, act, device=device)
        case.ids = torch.tensor(
            [
                [-1, -1, -1],
                [0, -1, 5],
                [2, 2, 2],
                [5, 5, 0],
                [6, 1, 2**31 - 1],
                [-(2**31), 1, 1],
                [3, -1, -1],
                [-1, 3, 3],
                [0, 1, 2],
            ],
            dtype=torch.int64,
            device=device,
        )
        case.topk_weights[0] = float("nan")  # of skipped slots: never read
        case.topk_weights[4, 0] = float("inf")
        got = forward(case)
        assert got[0].eq(0).all()
        assert got.isfinite().all()
        assert_agrees(got, case)

    def test_quantized_x(self, fmt, act, device):
        case = make(fmt, act, device=device)
        kinds = ("mxfp8", "nvfp4") if act == "bf16" else (act,)
        plain = case.x
        for kind in kinds:
            case.x = formats.quantize(plain * 3, kind)
            assert_agrees(forward(case), case)
        if act != "bf16":
            whole = forward(case)
            case.x = plain * 3
            assert torch.equal(whole, forward(case))


@FORMAT_AND_ACT
class TestRouting:
    @pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
    def test_no_tokens(self, fmt, act, ids_dtype):
        case = make(fmt, act, tokens=0)
        case.ids = case.ids.to(ids_dtype)
        assert forward(case).shape == (0, 128)

    def test_all_tokens_to_one_expert(self, fmt, act):
        case = make(fmt, act)
        case.ids.fill_(4)
        assert_agrees(forward(case), case)

    def test_expert_with_no_tokens_is_not_read(self, fmt, act, poison):
        case = make(fmt, act)
        case.ids[case.ids == 2] = -1
        want = forward(case)
        poison(case.weights.tensors["w13"][2], case.weights.tensors["w2"][2])
        assert torch.equal(forward(case), want)

    @pytest.mark.parametrize("live", [0, 1, 5, 9, 100, -3])
    def test_live_count(self, fmt, act, live, poison):
        case = make(fmt, act)
        want, rows = forward(case), min(max(live, 0), 9)
        poison(case.x[rows:], case.topk_weights[rows:])
        case.ids[rows:] = 2**30
        out = torch.full((9, 128), 7.0).bfloat16()
        got = forward(case, out=out, num_tokens=torch.tensor([live], dtype=torch.int32))
        assert got.data_ptr() == out.data_ptr()
        assert torch.equal(got[:rows], want[:rows])
        assert got[rows:].eq(7).all()

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
    def test_bad_row_stays_alone(self, fmt, act, bad):
        case = make(fmt, act)
        want = forward(case)
        case.x[3, 17] = bad
        case.x[6] = bad
        case.topk_weights[7, 1] = float("nan")
        got, others = forward(case), [0, 1, 2, 4, 5, 8]
        assert torch.equal(got[others], want[others])
        assert got[7].isnan().all()
        if math.isnan(bad):
            assert got[[3, 6]].isnan().all()

    def test_rows_do_not_depend_on_each_other(self, fmt, act):
        case = make(fmt, act)
        whole = forward(case)
        order = torch.randperm(9)
        case.x, case.ids, case.topk_weights = (
            t[order] for t in (case.x, case.ids, case.topk_weights)
        )
        errors = reference.error(forward(case), whole[order])
        assert errors.worst_row < 1e-2


class TestOutput:
    def test_out_may_alias_x(self):
        case = make("mxfp8", "mxfp8")
        want = forward(case)
        got = forward(case, out=case.x)
        assert got.data_ptr() == case.x.data_ptr()
        assert torch.equal(got, want)

    def test_output_of_the_workspace(self):
        case = make("nvfp4", "bf16")
        want = forward(case)
        ws = SimpleNamespace(output=torch.full((20, 128), 3.0).bfloat16())
        got = reference.moe_forward(case.x, case.ids, case.topk_weights, case.weights, ws)
        assert got.data_ptr() == ws.output.data_ptr()
        assert torch.equal(got, want)
        assert ws.output[9:].eq(3).all()

    def test_stages_apart_are_the_whole(self):
        case = make("mxfp8", "mxfp8")
        ws = SimpleNamespace(output=None)
        x = reference.quantize(case.x, case.problem)
        assert isinstance(x, BlockScaled)
        reference.dispatch(x, case.ids, ws, case.weights)
        reference.gate_up(ws, case.weights)
        reference.down(ws, case.weights)
        got = reference.combine(case.ids, case.topk_weights, ws, case.weights)
        assert torch.equal(got, forward(case))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
    def test_types_of_topk_weights(self, dtype):
        case = make("mxfp8", "mxfp8")
        case.topk_weights = case.topk_weights.to(dtype)
        got = forward(case)
        case.topk_weights = case.topk_weights.float()
        assert torch.equal(got, forward(case))

    def test_foreign_format_of_x_is_refused(self):
        case = make("mxfp8", "mxfp8")
        case.x = formats.quantize(case.x, "nvfp4")
        with pytest.raises(ValueError, match="expected bf16 or mxfp8"):
            forward(case)


@pytest.mark.parametrize(
    ("fmt", "act", "low", "high", "bound"),
    [
        ("mxfp8", "mxfp8", 0.063, 0.067, 0.07),
        ("nvfp4", "nvfp4", 0.225, 0.235, 0.24),
        ("nvfp4", "bf16", 0.158, 0.168, 0.175),
        ("nvfp4", "mxfp8", 0.166, 0.175, 0.18),
    ],
    ids=["mxfp8", "nvfp4-both", "nvfp4-bf16", "nvfp4-mxfp8"],
)
def test_accuracy_against_dense_bf16(fmt, act, low, high, bound):
    sizes = {"hidden": 1024, "intermediate": 512, "num_experts": 8, "top_k": 4}
    case = make(fmt, act, tokens=128, **sizes)
    case.weights.h_global_scale.fill_(2.0**-8)
    got = forward(case)
    want = reference.dense_bf16(case.x, case.ids, case.topk_weights, case.w13, case.w2)
    whole = reference.error(got, want).whole
    assert low < whole < high
    assert whole < bound


@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_static_scale_of_h_serves_small_inputs(scale):
    sizes = {"hidden": 512, "intermediate": 256, "num_experts": 4, "top_k": 2}
    case = make("nvfp4", "nvfp4", tokens=64, **sizes)
    case.weights.h_global_scale.fill_(2.0**-8)
    case.x = (case.x.float() * scale).bfloat16()
    want = reference.dense_bf16(case.x, case.ids, case.topk_weights, case.w13, case.w2)
    assert reference.error(forward(case), want).whole < 0.24


def test_dense_bf16_is_the_plain_layer():
    case = make("mxfp8", "bf16", activation=GPT_OSS, bias=True)
    case.weights.tensors = {"w13": case.w13.bfloat16().float(), "w2": case.w2.bfloat16().float()}
    biases = case.weights.biases
    got = reference.dense_bf16(
        case.x, case.ids, case.topk_weights, case.w13, case.w2, GPT_OSS, biases["w13"], biases["w2"]
    )
    assert reference.error(got, slow_forward(case)).whole < 4e-3


class TestError:
    def test_by_hand(self):
        want = torch.ones(3, 192)
        got = want.clone()
        got[1, 64:128] += 0.1
        errors = reference.error(got, want)
        assert errors.whole == pytest.approx(0.1 / 3, rel=1e-5)
        assert errors.worst_row == pytest.approx(0.1 / math.sqrt(3), rel=1e-5)
        assert errors.worst_block == pytest.approx(0.1, rel=1e-5)

    def test_small_block_is_compared_absolutely(self):
        want = torch.ones(1, 128)
        want[:, 64:] = 1e-4
        got = want.clone()
        got[:, 64:] = 1e-3
        assert reference.error(got, want).worst_block < 2e-3

    def test_ragged_columns(self):
        want = torch.ones(2, 70)
        got = want.clone()
        got[0, 69] = 3.0
        assert reference.error(got, want).worst_block == pytest.approx(2 / math.sqrt(6))

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
    def test_not_finite(self, bad):
        want = torch.ones(2, 64)
        got = want.clone()
        got[0, 3] = bad
        assert reference.error(got, want) == (math.inf, math.inf, math.inf)
        assert reference.error(want, got).worst_row == math.inf
        assert reference.error(got, got) == (0, 0, 0)

    def test_zero_row(self):
        want = torch.ones(2, 64)
        want[1] = 0
        assert reference.error(want, want) == (0, 0, 0)
        got = want.clone()
        got[1, 0] = 1e-6
        assert reference.error(got, want).worst_row == math.inf

    def test_empty(self):
        assert reference.error(torch.ones(0, 64), torch.ones(0, 64)) == (0, 0, 0)


@pytest.mark.cpu
def test_rows_carried_back_in_mxfp8_stay_within_the_bounds():
    y = (torch.randn(64, 256) * 2.0 ** torch.randint(-20, 20, (64, 256))).bfloat16()
    assert torch.equal(reference.carried(y, "bf16"), y.float())
    difference = (reference.carried(y, "mxfp8") - y.float()).abs().view(64, 8, 32)
    size = y.float().abs().view(64, 8, 32)
    largest = size.amax(-1, keepdim=True)
    assert bool((difference <= torch.maximum(size / 16, largest * 2.0**-17)).all())
    assert bool((difference > largest * 2.0**-19).any())
    y = torch.randn(256, 1024).bfloat16()
    whole = reference.error(reference.carried(y, "mxfp8"), y.float()).whole
    assert 2.6e-2 < whole < 2.7e-2
