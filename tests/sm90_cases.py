"""Layers, inputs and comparisons of the tests on a Hopper GPU, or on the emulator (smaller).

Every workspace is poisoned (0xFF bytes, all but the control words) before a call whose numbers are
looked at. ``want`` comes from weights in the reference's own layout, so that what the kernels'
layouts lose (folding) counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from unittest import mock

import pytest
import torch
from conftest import DEVICE, EMULATED, FULL, poison_bytes
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import moe_ep_jit as moe
from moe_ep_jit import reference, variants
from moe_ep_jit.kernels.sm90.packing import OPERANDS
from moe_ep_jit.tools.emulator.machine import Machine

# Odd multiples of 64. Where an intermediate value lies close to the middle of two E4M3, the kernel
# may round it to the other one: 6 to 12 % of that value, which shows in narrow rows (832: 3.3 %).
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, MAX_TOKENS = 576, 4032, 8, 4, 300
if EMULATED:
    HIDDEN, INTERMEDIATE, MAX_TOKENS = 192, 320, 200
BACKEND = "emulator" if EMULATED else "auto"
#: Tokens of tests that are not about them.
FEW, MANY = (24, 40) if EMULATED else (64, 200)
GPT_OSS = moe.SwiGLU(limit=7.0, alpha=1.702, beta=1.0)

#: Relative L2 of the whole against the reference; worst row and block may reach three times that.
BOUNDS = {"mxfp8": 1e-2, "nvfp4": 2e-2}


@dataclass(frozen=True)
class Case:
    """fmt, act, the kind that preparation must come to, and the K elements that share a magnitude.

    spread  0: weights of one magnitude; 128 or 32: every other group of so many is 2^-20 smaller
    """

    fmt: str
    act: str
    kind: str
    spread: int = 0
    bias: bool = False


CASES = {
    "mxfp8": Case("mxfp8", "mxfp8", "mxfp8_row"),
    "mxfp8-bias": Case("mxfp8", "mxfp8", "mxfp8_row", bias=True),
    "mxfp8-group128": Case("mxfp8", "mxfp8", "mxfp8_group128", spread=128),
    "mxfp8-exact": Case("mxfp8", "mxfp8", "mxfp8_exact", spread=32),
    "mxfp8-act-bf16": Case("mxfp8", "bf16", "mxfp8_exact"),
    "nvfp4": Case("nvfp4", "bf16", "nvfp4"),
    "nvfp4-bias": Case("nvfp4", "bf16", "nvfp4", bias=True),
    "nvfp4-act-nvfp4": Case("nvfp4", "nvfp4", "nvfp4"),
    "nvfp4-act-mxfp8": Case("nvfp4", "mxfp8", "nvfp4"),
}
MAIN = ["mxfp8", "nvfp4"]
ACTS = ["mxfp8", "mxfp8-act-bf16", "nvfp4", "nvfp4-act-nvfp4", "nvfp4-act-mxfp8"]


def _rungs():
    """Every rung of every case. On the emulator each case meets two of them and each rung two or
    three cases; the others need --full.
    """
    for number, (name, case) in enumerate(CASES.items()):
        ladder = variants.ladder("sm_90a", OPERANDS[case.kind])
        chosen = number % len(ladder), (number + 3) % len(ladder)
        for index, config in enumerate(ladder):
            marks = () if index in chosen else pytest.mark.full
            yield pytest.param(name, config, id=f"{name}-n{config.tile_n}", marks=marks)


RUNGS = list(_rungs())


def chosen(values, *on_emulator, ids=str):
    """Parameters of which the emulator takes these alone unless --full is given."""
    return [
        pytest.param(v, marks=() if v in on_emulator else pytest.mark.full, id=ids(v))
        for v in values
    ]


def synchronize():
    if not EMULATED:
        torch.cuda.synchronize()


@dataclass
class Layer:
    weights: moe.PreparedWeights
    plain: moe.PreparedWeights
    source: tuple[torch.Tensor, torch.Tensor]
    ws: moe.Workspace

    def __call__(self, *inputs, **options):
        y = moe.moe_forward(*inputs, self.weights, self.ws, **options)
        if EMULATED:
            # Another order of everything for the next call; with --full, five for each.
            for _ in range(4 if FULL else 0):
                self.ws.emulator.seed += 1
                before = y.clone()
                y = moe.moe_forward(*inputs, self.weights, self.ws, **options)
                assert torch.equal(bits(y), bits(before)), self.ws.emulator.seed
            self.ws.emulator.seed = (self.ws.emulator.seed + 1) % 5
        return y

    def poison(self):
        for name, tensor in self.ws.views(self.weights.problem, self.weights.operand).items():
            if name != "control":
                poison_bytes(tensor)

    def want(self, x, ids, topk_weights):
        return reference.moe_forward(x, ids, topk_weights, self.plain)


@cache
def make_layer(name):
    case = CASES[name]
    problem = moe.Problem(
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        num_experts=EXPERTS,
        top_k=TOP_K,
        max_tokens=MAX_TOKENS,
        format=case.fmt,
        act=case.act,
        bias=case.bias,
        activation=GPT_OSS if case.bias else moe.SwiGLU(),
    )
    generator = torch.Generator(DEVICE).manual_seed(7)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=DEVICE)

    w13 = normal(EXPERTS, 2 * INTERMEDIATE, HIDDEN) * HIDDEN**-0.5
    w2 = normal(EXPERTS, HIDDEN, INTERMEDIATE) * INTERMEDIATE**-0.5
    if case.spread:
        for w in (w13, w2):
            group = torch.arange(w.shape[-1], device=DEVICE) // case.spread
            w *= torch.where(group % 2 == 1, 2.0**-20, 1.0)
    biases = {}
    if case.bias:
        biases = {
            "w13_bias": normal(EXPERTS, 2 * INTERMEDIATE),
            "w2_bias": normal(EXPERTS, HIDDEN),
        }
    w13, w2 = w13.bfloat16(), w2.bfloat16()
    weights = moe.prepare_weights(w13, w2, problem, backend=BACKEND, **biases)
    assert weights.kind == case.kind
    plain = moe.prepare_weights(w13, w2, problem, backend="reference", **biases)
    return Layer(weights, plain, (w13, w2), make_workspace(weights))


def make_workspace(weights, **options):
    options = {"debug": False, "device": DEVICE, "backend": BACKEND, **options}
    ws = moe.Workspace(weights.problem, operand=weights.operand, **options)
    if not EMULATED:  # which rungs a test needs shows as it runs
        moe.warmup(ws, weights)
    return ws


def make_inputs(tokens):
    x = torch.randn(tokens, HIDDEN, device=DEVICE).bfloat16()
    ids = torch.randint(0, EXPERTS, (tokens, TOP_K), device=DEVICE, dtype=torch.int32)
    return x, ids, torch.rand(tokens, TOP_K, device=DEVICE)


def normal_weights(problem):
    """Gaussian w13 and w2 in bf16 of unit gain, expert by expert."""
    hidden, intermediate = problem.hidden, problem.intermediate
    w13 = torch.empty(
        problem.num_experts, 2 * intermediate, hidden, device=DEVICE, dtype=torch.bfloat16
    )
    w2 = torch.empty(problem.num_experts, hidden, intermediate, device=DEVICE, dtype=torch.bfloat16)
    for e in range(problem.num_experts):
        w13[e].normal_(std=hidden**-0.5)
        w2[e].normal_(std=intermediate**-0.5)
    return w13, w2


def make_inputs_of(problem, tokens, ids=None):
    x = torch.randn(tokens, problem.hidden, device=DEVICE, dtype=torch.bfloat16)
    if ids is None:
        ids = torch.randint(problem.num_experts, (tokens, problem.top_k), device=DEVICE)
    return x, ids.int(), torch.rand(tokens, problem.top_k, device=DEVICE)


def uneven_ids(tokens):
    """Expert 0 gets most rows, expert 1 none, some slots are skipped, some ids repeat."""
    ids = torch.randint(2, EXPERTS, (tokens, TOP_K), device=DEVICE, dtype=torch.int32)
    ids[torch.rand(tokens, TOP_K, device=DEVICE) < 0.6] = 0
    ids[torch.rand(tokens, TOP_K, device=DEVICE) < 0.1] = -1
    return ids


def assert_close(got, want, fmt):
    """README's bounds; the whole of a few rows is bounded as a row is."""
    errors = reference.error(got, want)
    bound = BOUNDS[fmt]
    assert errors.whole < (bound if len(got) >= 32 else 3 * bound), errors
    assert errors.worst_row < 3 * bound, errors
    assert errors.worst_block < 3 * bound, errors


def want_from_intermediate(ws, weights, plain, inputs, config):
    """The layer's end in fp32, from the intermediate that the kernels of a finished call left.

    No value is requantized behind it, so that the result must agree far closer than the whole
    layer, where a rounding of the intermediate may fall the other way.
    """
    problem = weights.problem
    x, ids, topk_weights = inputs
    views = ws.views(problem, weights.operand)
    w2 = plain.dequantize("w2")
    y = torch.zeros(ids.numel(), problem.hidden, device=x.device)
    for expert, (_, _, first, rows) in enumerate(views["expert_info"].tolist()):
        piece = slice(first, first + rows)
        h = views["h"][piece]
        if weights.operand == "bf16":
            h = h.float()
            if problem.act == "nvfp4":
                h = h * weights.h_global_scale[expert]
        elif config.fold_intermediate:
            h = h.view(torch.float8_e4m3fn).float() * views["recv_sf"][piece, None]
        else:
            column = -(-first // 4) * 4 + 4 * expert  # an expert's scales begin on a multiple of 4
            sf = views["h_sf"][:, column : column + rows].T
            h = h.view(torch.float8_e4m3fn).float() * sf.repeat_interleave(32, 1)
        rows_y = h @ w2[expert].T
        if problem.bias:
            rows_y += plain.bias("w2")[expert]
        y[views["row_slot"][piece].long()] = rows_y.bfloat16().float()
    y = y.view(*ids.shape, problem.hidden)
    valid = (ids >= 0) & (ids < problem.num_experts)
    scale = torch.where(valid, topk_weights.float(), 0.0)
    return (y * scale[..., None]).sum(1).bfloat16()


def assert_end_is_exact(got, want):
    """Rounding to bf16, twice, is all that may differ."""
    errors = reference.error(got, want)
    assert errors.whole < 2e-3, errors
    assert errors.worst_row < 6e-3, errors
    assert errors.worst_block < 6e-3, errors


def same_numbers(got, want):
    """Equal bits, where any NaN equals any other."""
    assert got.dtype == want.dtype
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.itemsize]
    equal = got.contiguous().view(word) == want.contiguous().view(word)
    return bool((equal | (got.isnan() & want.isnan())).all())


def byte_scales(sf):
    """UE8M0 bytes -> fp32, computed as a float and not by its bits."""
    return torch.exp2(sf.double() - 127).float()


def edge_rows(rows, hidden):
    """bf16 rows with every special value: each kind alone, then any bits at all."""
    x = torch.randn(rows, hidden, device=DEVICE).bfloat16()
    block = torch.arange(hidden, device=DEVICE) // 16
    n = (block % 41 - 20).float()
    x[0] = 0
    x[1] = -0.0
    x[2] = torch.randn(hidden, device=DEVICE) * 1e-39  # denormals
    x[3] = torch.randn(hidden, device=DEVICE) * torch.exp2(-120 - n.abs())
    for row, (top, ulp) in enumerate([(t, u) for t in (448.0, 6.0) for u in (-1, 0, 1)], start=4):
        # Blocks of 16 and of 32 whose largest element is a format's largest times 2^n, or next.
        largest = (top * torch.exp2(n)).bfloat16().view(torch.int16) + ulp
        is_first = torch.arange(hidden, device=DEVICE) % 16 == 3
        small = torch.randn(hidden, device=DEVICE).clamp(-3, 3) * torch.exp2(n)
        x[row] = torch.where(is_first, largest.view(torch.bfloat16), small.bfloat16())
    x[10, 5] = float("inf")
    x[11, hidden - 1] = float("-inf")
    x[12] = float("inf")
    x[13, 40] = float("nan")
    x[14] = float("nan")
    x[15, 7], x[15, 8] = float("nan"), float("inf")
    x[16] = torch.finfo(torch.bfloat16).max
    x[17] = torch.randn(hidden, device=DEVICE) * torch.exp2(6 * n)  # blocks far apart
    x[18] = torch.randn(hidden, device=DEVICE) * 1e-30
    x[18, 0] = 3e38
    x[19, :16] = 0
    any_bits = torch.randint(-(2**15), 2**15, (rows - 20, hidden), device=DEVICE)
    x[20::2] = any_bits.short().view(torch.bfloat16)[: len(x[20::2])]
    return x


def expected_operand(x, act, operand):
    """Rows and their scales as dispatch stores them, from formats alone."""
    if act == "bf16":
        return x, None
    q = moe.formats.quantize(x, act)
    if operand == "e4m3":
        folded = moe.formats.fold(q)
        return folded.data, byte_scales(folded.sf[:, 0])
    if act == "mxfp8":
        return moe.formats.dequantize(q).bfloat16(), None
    one = torch.ones((), device=x.device)
    return moe.formats.dequantize(replace(q, global_scale=one)).bfloat16(), q.global_scale


def bits(tensor):
    """For comparisons in which NaN equals NaN."""
    return tensor.contiguous().view(torch.int16)


def device_events(call):
    """Names of what a warm call puts on the GPU: kernels, copies, fills. On the
    emulator: kernels.
    """
    call()
    if EMULATED:
        return _emulated_kernels(call)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return [e.name for e in profiled.events() if e.device_type == DeviceType.CUDA]


def _emulated_kernels(call):
    names, run = [], Machine.run_streams

    def noting(machine, streams):
        names.extend(kernel.entry.name for stream in streams for kernel, _, _ in stream.work)
        run(machine, streams)

    with mock.patch.object(Machine, "run_streams", noting):
        call()
    return names


def num_kernels(config):
    """route, dispatch, gate/up, down, combine; and one that folds the intermediate."""
    return 5 + int(config.fold_intermediate)
