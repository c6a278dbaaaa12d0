"""Preparing weights: sources, orders and kinds against values computed apart; memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from weight_cases import (
    ARCHES,
    FORMATS,
    far_groups,
    in_order,
    make_problem,
    one_thread,  # noqa: F401  a fixture
    quantized,
    same_bits,
    sources,
    spread_weights,
)

from moe_ep_jit import formats
from moe_ep_jit.checkpoint import DEFAULT_H_GLOBAL_SCALE
from moe_ep_jit.formats import MXFP8, NVFP4, BlockScaled
from moe_ep_jit.kernels.sm90 import packing
from moe_ep_jit.weights import fold_is_small, prepare_weights

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


# Values


@ARCHES
@FORMATS
@pytest.mark.parametrize("source", ["fp32", "bf16", "fp16", "mxfp8", "nvfp4"])
def test_dequantized_weights_are_the_quantized_source(
    arch: str | None, fmt: str, source: str
) -> None:
    problem = make_problem(format=fmt)
    want, given = [], []
    for w in sources(problem):
        if source in formats.BY_NAME:
            given.append(quantized(w, source))
            w = formats.dequantize(given[-1])
        else:
            given.append(
                w.to({"fp32": torch.float, "bf16": torch.bfloat16, "fp16": torch.half}[source])
            )
            w = given[-1].float()
        if source != fmt:
            g = formats.global_scale_of(w.abs().amax((1, 2)))[:, None]
            w = formats.dequantize(formats.quantize(w, fmt, g if fmt == "nvfp4" else None))
        want.append(w)
    prepared = prepare_weights(*given, problem, arch=arch)
    # Exponents of one row are close here, so that folding changes nothing.
    assert prepared.kind == (None if arch is None else {"mxfp8": "mxfp8_row"}.get(fmt, fmt))
    assert torch.equal(prepared.dequantize("w13"), want[0])
    assert torch.equal(prepared.dequantize("w2"), want[1])
    assert torch.equal(prepared.dequantize("w2", 1), want[1][1])
    foreign = source in formats.BY_NAME and source != fmt
    assert len(prepared.report["warnings"]) == foreign
    json.dumps(prepared.report)


@ARCHES
@FORMATS
@pytest.mark.parametrize("is_quantized", [False, True], ids=["float", "quantized"])
@pytest.mark.parametrize("gate_up", ["gate_first", "up_first", 1, 2, 8, 16, 64])
def test_one_permutation_for_weights_scales_and_biases(
    arch: str | None, fmt: str, is_quantized: bool, gate_up: str | int
) -> None:
    problem = make_problem(hidden=64, format=fmt, bias=True)
    w13, w2 = sources(problem)
    w13[:, : problem.intermediate] *= 64  # a swap of gate and up would show at once
    bias13 = torch.arange(2 * 256).view(2, 256).float()
    bias2 = torch.arange(2 * 64).view(2, 64).float()
    given = in_order(w13, gate_up)
    if is_quantized:
        given = quantized(given, fmt)
    got = prepare_weights(
        given, w2, problem, w13_bias=in_order(bias13, gate_up), w2_bias=bias2, gate_up=gate_up,
        arch=arch,
    )  # fmt: skip
    first = prepare_weights(w13, w2, problem, w13_bias=bias13, w2_bias=bias2, arch=arch)
    assert torch.equal(got.bias("w13"), bias13)
    assert torch.equal(got.bias("w2"), bias2)
    for e in range(2):
        a, b = got.block_scaled("w13", e), first.block_scaled("w13", e)
        assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
        assert torch.equal(a.sf.view(torch.uint8), b.sf.view(torch.uint8))
    if not is_quantized:
        assert same_bits(got.tensors, first.tensors)


def test_packed_rows_alternate_by_eight() -> None:
    """Scales and biases of packed rows, read off the tensors: 8 gate rows, then their up rows."""
    problem = make_problem(format="mxfp8", hidden=64, intermediate=64, bias=True)
    exponent = torch.arange(128) % 50 - 25
    w13 = torch.exp2(exponent.float())[None, :, None].expand(2, 128, 64)
    bias = (torch.arange(2 * 128).view(2, 128)).half()
    got = prepare_weights(
        w13, torch.ones(2, 64, 64), problem, w13_bias=bias, w2_bias=torch.zeros(2, 64),
        arch="sm_90a",
    )  # fmt: skip
    assert got.kind == "mxfp8_row"
    for j in range(8):
        for r in range(8):
            for place, row in ((16 * j + r, 8 * j + r), (16 * j + 8 + r, 64 + 8 * j + r)):
                # amax 2^e is stored as 256 * 2^(e - 8).
                assert float(got.tensors["w13_sf"][1, place]) == 2.0 ** (int(exponent[row]) - 8)
                assert float(got.tensors["w13_bias"][1, place]) == 128 + row
    assert got.tensors["w2_bias"].shape == (2, 128)


@FORMATS
@pytest.mark.parametrize("experts", [1, 2, 6, 7, 36], ids=lambda e: f"e{e}")
def test_any_number_of_experts(experts: int, fmt: str) -> None:
    problem = make_problem(experts, hidden=64, intermediate=64, format=fmt)
    w13, w2 = sources(problem)
    got = prepare_weights(w13, w2, problem, arch="sm_90a")
    for e in {0, experts - 1}:
        one = prepare_weights(
            w13[e : e + 1], w2[e : e + 1], make_problem(1, 64, 64, format=fmt), arch="sm_90a"
        )
        assert got.kind == one.kind
        assert same_bits({n: t[e] for n, t in got.tensors.items()},
                         {n: t[0] for n, t in one.tensors.items()})  # fmt: skip


@pytest.mark.parametrize(
    ("fmt", "act"), [("mxfp8", "mxfp8"), ("mxfp8", "bf16"), ("nvfp4", "bf16")], ids=str
)
@pytest.mark.parametrize(("hidden", "intermediate"), [(2880, 64), (64, 2880), (192, 704)], ids=str)
def test_multiples_of_64_are_padded_with_zeros(
    fmt: str, act: str, hidden: int, intermediate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "empty", _poisoned_empty)
    problem = make_problem(1, hidden, intermediate, format=fmt, act=act)
    w13, w2 = sources(problem)
    got = prepare_weights(w13.bfloat16(), w2.bfloat16(), problem, arch="sm_90a")
    plain = prepare_weights(w13.bfloat16(), w2.bfloat16(), problem)
    for name, m, k in (("w13", 2 * intermediate, hidden), ("w2", hidden, intermediate)):
        assert torch.equal(got.dequantize(name, 0), plain.dequantize(name, 0))
        rows, _ = packing.unpack_rows(got.kind, got.tensors[name][0], got.tensors[f"{name}_sf"][0])
        assert len(rows.data) % 128 == 0
        assert not rows.data[m:].any()
        assert not rows.data[:, k // (2 if fmt == "nvfp4" else 1) :].any()
        assert not got.tensors[f"{name}_sf"][0, m:].any()


def _poisoned_empty(*shape: Any, **facts: Any) -> torch.Tensor:
    out = torch.zeros(*shape, **facts)
    out.view(-1).view(torch.uint8).fill_(0xFF)
    return out


@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (3, 256)], ids=str)
def test_nvfp4_global_scale_of_any_granularity(shape: tuple[int, ...]) -> None:
    problem = make_problem(3, 64, 128, format="nvfp4")
    w13, w2 = (quantized(w, "nvfp4") for w in sources(problem))
    scale = 2.0 ** -torch.arange(torch.Size(shape).numel()).remainder(7).float().view(shape)
    w13 = BlockScaled(NVFP4, w13.data, w13.sf, scale)
    got = prepare_weights(w13, w2, problem, arch="sm_90a")
    assert torch.equal(got.dequantize("w13"), formats.dequantize(w13))


@ARCHES
def test_zero_experts_blocks_and_negative_zero_scales(arch: str | None) -> None:
    """Zeros dequantize to zeros in every form that they come in."""
    problem = make_problem(3, 64, 64, format="nvfp4")
    w13, w2 = sources(problem)
    w13[1] = 0
    w13[0, 5] = 0
    w13[2, 7, 16:32] = -0.0
    got = prepare_weights(w13, w2, problem, arch=arch)
    d = got.dequantize("w13")
    assert not d[1].any()
    assert not d[0, 5].any()
    assert not d[2, 7, 16:32].any()
    q = quantized(w2, "nvfp4")
    q.sf.view(torch.uint8)[0, 3, 1] = 0x80
    d = prepare_weights(w13, q, problem, arch=arch).dequantize("w2")
    assert not d[0, 3, 16:32].any()
    assert d[0, 3, :16].any()


# Kind


def test_kinds_by_spread_of_exponents() -> None:
    wide = {"hidden": 256, "intermediate": 256}
    cases = [
        (make_problem(**wide), far_groups, 4, "mxfp8_row", "e4m3", "row"),
        (make_problem(**wide), far_groups, 20, "mxfp8_group128", "e4m3", "group128"),
        (make_problem(**wide), spread_weights, 20, "mxfp8_exact", "bf16", "exact"),
        (make_problem(**wide, act="bf16"), far_groups, 0, "mxfp8_exact", "bf16", "exact"),
        (make_problem(**wide, format="nvfp4"), spread_weights, 20, "nvfp4", "bf16", None),
        (make_problem(**wide, format="nvfp4", act="mxfp8"), far_groups, 0, "nvfp4", "bf16", None),
    ]
    for problem, make, shift, kind, operand, fold in cases:
        w13, w2 = make(problem, shift)
        got = prepare_weights(w13, w2, problem, arch="sm_90a")
        assert (got.kind, got.operand, got.fold) == (kind, operand, fold)
        assert got.report["kind"] == kind


@pytest.mark.parametrize("make", [far_groups, spread_weights], ids=lambda f: f.__name__)
@pytest.mark.parametrize("shift", [2, 8, 12, 20])
def test_measured_fold_loss_and_folded_bits(make: Callable, shift: int) -> None:
    """The report against fp64 on whole matrices; the packed bits against fold(quantize(w))."""
    problem = make_problem(hidden=320, intermediate=256)
    given = dict(zip(("w13", "w2"), make(problem, shift), strict=True))
    got = prepare_weights(given["w13"], given["w2"], problem, arch="sm_90a")
    for kind, group in (("mxfp8_row", None), ("mxfp8_group128", 128)):
        if kind not in got.report["fold"]:
            continue
        small = True
        for name, w in given.items():
            q = formats.quantize(w, MXFP8)
            before = formats.dequantize(q).double()
            after = formats.dequantize(formats.fold(q, group)).double()
            blocks = (*q.sf.shape, 32)
            lost = (after - before).view(blocks).norm(dim=-1) / before.view(blocks).norm(dim=-1)
            whole = float((after - before).norm() / before.norm())
            report = got.report["fold"][kind][name]
            assert report["worst_block"] == pytest.approx(float(lost.max()), rel=1e-4, abs=1e-9)
            assert report["whole"] == pytest.approx(whole, rel=1e-4, abs=1e-9)
            small &= float(lost.max()) <= 2.65e-2 and whole < 1e-4
        assert small == (got.kind == kind)
        if not small:
            continue
        for name, w in given.items():
            for e in range(2):
                q = formats.quantize(w[e], MXFP8)
                folded, held = formats.fold(q, group), got.block_scaled(name, e)
                assert torch.equal(held.data.view(torch.uint8), folded.data.view(torch.uint8))
                per_block = folded.sf.repeat_interleave((group or q.shape[1]) // 32, 1)
                assert torch.equal(held.sf, per_block[:, : q.shape[1] // 32])
    if got.kind == "mxfp8_exact":
        for name, w in given.items():
            assert torch.equal(got.dequantize(name), formats.dequantize(formats.quantize(w, MXFP8)))


@pytest.mark.parametrize(
    ("worst_block", "whole", "is_small"),
    [(2.6e-2, 9.9e-5, True), (2.7e-2, 1e-6, False), (1e-3, 1.1e-4, False), (0.0, 0.0, True)],
)
def test_rule_of_folding(worst_block: float, whole: float, is_small: bool) -> None:
    none = {"worst_block": 0.0, "whole": 0.0}
    loss = {"worst_block": worst_block, "whole": whole}
    assert fold_is_small({"w13": none, "w2": loss}) == is_small
    assert fold_is_small({"w13": loss, "w2": none}) == is_small


def test_the_worse_matrix_decides() -> None:
    problem = make_problem(hidden=256, intermediate=256)
    near, far = far_groups(problem, 0), spread_weights(problem, 20)
    assert prepare_weights(near[0], far[1], problem, arch="sm_90a").kind == "mxfp8_exact"
    assert prepare_weights(far[0], near[1], problem, arch="sm_90a").kind == "mxfp8_exact"


def test_automatic_format_follows_the_source() -> None:
    problem = make_problem(format="auto")
    w13, w2 = sources(problem)
    for fmt, act in (("nvfp4", "bf16"), ("mxfp8", "mxfp8")):
        got = prepare_weights(quantized(w13, fmt), quantized(w2, fmt), problem, arch="sm_90a")
        assert (got.problem.format, got.problem.act) == (fmt, act)
        assert got.problem.is_resolved
        assert got.report["reason"] == got.variant.reason
    assert prepare_weights(w13, w2, problem).layout == "plain"


def test_intermediate_scale() -> None:
    problem = make_problem(format="nvfp4", act="nvfp4")
    w = sources(problem)
    default = prepare_weights(*w, problem, arch="sm_90a").h_global_scale
    assert torch.equal(default, torch.full((2,), DEFAULT_H_GLOBAL_SCALE))
    assert torch.equal(
        prepare_weights(*w, problem, h_global_scale=0.5).h_global_scale, torch.tensor([0.5, 0.5])
    )
    each = torch.tensor([0.5, 0.25], dtype=torch.bfloat16)
    assert torch.equal(
        prepare_weights(*w, problem, h_global_scale=each).h_global_scale, each.float()
    )
    assert prepare_weights(*w, make_problem()).h_global_scale is None


# Memory


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of living storages that operations return, all but those of ``sources``."""

    def __init__(self, *sources: torch.Tensor) -> None:
        super().__init__()
        self.sources = {t.untyped_storage()._cdata for t in sources}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                if storage._cdata not in self.sources:
                    self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.alive = {k: v for k, v in self.alive.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return out


@ARCHES
@FORMATS
@pytest.mark.parametrize("source", ["fp32", "bf16", "mxfp8", "nvfp4"])
def test_peak_memory_is_one_expert_above_source_and_result(
    arch: str | None, fmt: str, source: str
) -> None:
    problem = make_problem(2, 1536, 1024, format=fmt)
    w13, w2 = torch.randn(2, 2048, 1536), torch.randn(2, 1536, 1024)
    if source == "bf16":
        w13, w2 = w13.bfloat16(), w2.bfloat16()
    elif source in formats.BY_NAME:
        w13, w2 = quantized(w13, source), quantized(w2, source)
    expert = (w13.nbytes + w2.nbytes) / 2
    with LiveBytes(*_tensors_of(w13, w2)) as memory:
        got = prepare_weights(w13, w2, problem, arch=arch)
    temporaries = memory.peak - got.nbytes
    assert 0 < temporaries <= expert, f"{temporaries / expert:.2f} experts"


def _tensors_of(*weights: torch.Tensor | BlockScaled) -> list[torch.Tensor]:
    out = []
    for w in weights:
        parts = (w.data, w.sf, w.global_scale) if isinstance(w, BlockScaled) else (w,)
        out += [t for t in parts if t is not None]
    return out


def test_parameters_and_strided_sources_are_taken() -> None:
    problem = make_problem()
    w13, w2 = sources(problem)
    want = prepare_weights(w13, w2, problem, arch="sm_90a")
    strided = w13.transpose(1, 2).contiguous().transpose(1, 2)
    got = prepare_weights(strided, torch.nn.Parameter(w2), problem, arch="sm_90a")
    assert same_bits(got.tensors, want.tensors)
    assert not any(t.requires_grad for t in got.tensors.values())


def test_moved_and_measured() -> None:
    problem = make_problem()
    prepared = prepare_weights(*sources(problem), problem, arch="sm_90a")
    assert prepared.nbytes == sum(t.numel() * t.element_size() for t in prepared.tensors.values())
    assert prepared.device == torch.device("cpu")
    assert prepared.to("meta").device == torch.device("meta")
    with pytest.raises(ValueError, match="name: expected"):
        prepared.dequantize("w3")
    with pytest.raises(ValueError, match=r"expert: expected 0\.\.1"):
        prepared.dequantize("w2", 2)
