"""Preparing weights: sources, orders and kinds against values computed apart; refusals; files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_ep_jit import formats
from moe_ep_jit.checkpoint import DEFAULT_H_GLOBAL_SCALE
from moe_ep_jit.formats import MXFP8, NVFP4, BlockScaled
from moe_ep_jit.kernels.sm90 import packing
from moe_ep_jit.problem import Problem
from moe_ep_jit.weights import (
    PreparedWeights,
    load_prepared,
    prepare_weights,
    save_prepared,
    update_weights,
)

pytestmark = pytest.mark.cpu

ARCHES = pytest.mark.parametrize("arch", [None, "sm_90a"], ids=["plain", "sm90"])
FORMATS = pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine take far longer than one alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_problem(experts: int = 2, hidden: int = 192, intermediate: int = 128, **facts) -> Problem:
    return Problem(
        hidden=hidden,
        intermediate=intermediate,
        num_experts=experts,
        top_k=1,
        max_tokens=16,
        **{"format": "mxfp8", **facts},
    )


def row_values(experts: int, rows: int, k: int) -> torch.Tensor:
    """[E, rows, K] fp32 whose magnitude names expert and row and whose pattern names k.

    Every row is its own power-of-two-free multiple of one pattern, so no two rows are alike.
    """
    row = torch.arange(experts * rows).view(experts, rows, 1)
    column = torch.arange(k)
    pattern = ((column * 37 + row * 11) % 13 - 6).float()
    return pattern * (1 + row / 64)


def sources(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    experts, hidden, inter = problem.num_local_experts, problem.hidden, problem.intermediate
    return row_values(experts, 2 * inter, hidden), row_values(experts, hidden, inter)


def quantized(w: torch.Tensor, fmt: str) -> BlockScaled:
    """A checkpoint in ``fmt``; NVFP4 with a scale an expert."""
    if fmt == "mxfp8":
        return formats.quantize(w, MXFP8)
    scale = w.abs().amax((1, 2), keepdim=True)[:, :, 0] / 2688
    return formats.quantize(w, NVFP4, scale)


def in_order(w: torch.Tensor, gate_up: str | int) -> torch.Tensor:
    """Gate-first [E, 2I, ..] -> the checkpoint's order, one row after the other."""
    inter = w.shape[1] // 2
    gate, up = [w[:, i] for i in range(inter)], [w[:, inter + i] for i in range(inter)]
    if gate_up == "gate_first":
        rows = gate + up
    elif gate_up == "up_first":
        rows = up + gate
    else:
        rows = []
        for first in range(0, inter, gate_up):
            rows += gate[first : first + gate_up] + up[first : first + gate_up]
    return torch.stack(rows, 1)


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8))
        for n in a
    )


def spread_weights(problem: Problem, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of 32 alternate between 1 and 2^-shift: a row's exponents spread by ``shift``."""
    w13, w2 = sources(problem)
    out = []
    for w in (w13, w2):
        block = torch.arange(w.shape[2]) // 32 % 2
        w = torch.randn(w.shape)
        out.append(w * torch.exp2(-shift * block.float()))
    return out[0], out[1]


def far_groups(problem: Problem, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups of 128 of K are 2^-shift apart from the first, 32-blocks inside them alike."""
    out = []
    for w in sources(problem):
        group = (torch.arange(w.shape[2]) // 128 > 0).float()
        out.append(torch.randn(w.shape) * torch.exp2(-shift * group))
    return out[0], out[1]


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
@pytest.mark.parametrize("source", ["bf16", "mxfp8", "nvfp4"])
def test_peak_memory_is_one_expert_above_source_and_result(
    arch: str | None, fmt: str, source: str
) -> None:
    problem = make_problem(2, 1536, 1024, format=fmt)
    w13, w2 = torch.randn(2, 2048, 1536), torch.randn(2, 1536, 1024)
    if source == "bf16":
        w13, w2 = w13.bfloat16(), w2.bfloat16()
    else:
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


# In place


@ARCHES
@pytest.mark.parametrize(
    ("fmt", "act"), [("mxfp8", "mxfp8"), ("mxfp8", "bf16"), ("nvfp4", "nvfp4")], ids=str
)
def test_update_gives_what_preparing_gives_at_the_same_addresses(
    arch: str | None, fmt: str, act: str
) -> None:
    problem = make_problem(format=fmt, act=act, bias=True)
    old, new = sources(problem), tuple(-3 * w for w in sources(problem))
    biases = {"w13_bias": torch.randn(2, 256), "w2_bias": torch.randn(2, 192)}
    prepared = prepare_weights(*old, problem, arch=arch, **biases)
    pointers = {n: t.data_ptr() for n, t in prepared.tensors.items()}
    biases = {"w13_bias": torch.randn(2, 256), "w2_bias": torch.randn(2, 192).bfloat16()}
    given = in_order(new[0], 4)
    order_bias = {**biases, "w13_bias": in_order(biases["w13_bias"], 4)}
    update_weights(prepared, given, new[1], gate_up=4, **order_bias)
    want = prepare_weights(*new, problem, arch=arch, **biases)
    assert same_bits(prepared.tensors, want.tensors)
    assert {n: t.data_ptr() for n, t in prepared.tensors.items()} == pointers


def test_update_keeps_or_replaces_the_intermediate_scale() -> None:
    problem = make_problem(format="nvfp4", act="nvfp4")
    w = sources(problem)
    prepared = prepare_weights(*w, problem, h_global_scale=0.5)
    update_weights(prepared, *w)
    assert prepared.h_global_scale.tolist() == [0.5, 0.5]
    update_weights(prepared, *w, h_global_scale=0.25)
    assert prepared.h_global_scale.tolist() == [0.25, 0.25]


def test_update_refuses_another_fold_kind_and_takes_a_better_one() -> None:
    problem = make_problem(hidden=256, intermediate=256)
    near, mid, far = far_groups(problem, 0), far_groups(problem, 20), spread_weights(problem, 20)
    row = prepare_weights(*near, problem, arch="sm_90a")
    before = {n: t.clone() for n, t in row.tensors.items()}
    for worse in (mid, far):
        with pytest.raises(ValueError, match="call prepare_weights, then warmup"):
            update_weights(row, *worse)
        assert same_bits(row.tensors, before)
    group = prepare_weights(*mid, problem, arch="sm_90a")
    update_weights(group, *near)
    assert group.kind == "mxfp8_group128"
    q = formats.quantize(near[1][1], MXFP8)
    assert torch.equal(group.dequantize("w2", 1), formats.dequantize(formats.fold(q, 128)))
    exact = prepare_weights(*far, problem, arch="sm_90a")
    update_weights(exact, *near)
    assert exact.kind == "mxfp8_exact"
    assert torch.equal(exact.dequantize("w2", 1), formats.dequantize(q))


@FORMATS
@pytest.mark.parametrize("bad", ["nan", "shape", "bias", "last_expert_of_w2", "bias_nan"])
def test_update_changes_nothing_when_it_refuses(fmt: str, bad: str) -> None:
    problem = make_problem(format=fmt, bias=True)
    w13, w2 = sources(problem)
    biases = {"w13_bias": torch.randn(2, 256), "w2_bias": torch.randn(2, 192)}
    prepared = prepare_weights(w13, w2, problem, arch="sm_90a", **biases)
    before = {n: t.clone() for n, t in prepared.tensors.items()}
    w13, w2 = 2 * w13, 2 * w2
    biases["w13_bias"] = biases["w13_bias"] + 1
    if bad == "nan":
        w13[1, 3, 5] = float("nan")
    elif bad == "shape":
        w2 = w2[:, :64]
    elif bad == "bias":
        biases["w2_bias"] = None
    elif bad == "bias_nan":
        biases["w2_bias"][1, 7] = float("inf")
    else:
        w2[-1, -1, -1] = float("inf")
    with pytest.raises(ValueError, match="expected"):
        update_weights(prepared, w13, w2, **biases)
    assert same_bits(prepared.tensors, before)


# Files


@ARCHES
@pytest.mark.parametrize(
    ("fmt", "act"), [("mxfp8", "mxfp8"), ("mxfp8", "bf16"), ("nvfp4", "nvfp4")], ids=str
)
def test_saved_and_loaded(arch: str | None, fmt: str, act: str, tmp_path: Path) -> None:
    problem = make_problem(format=fmt, act=act, bias=True)
    w13, w2 = sources(problem)
    prepared = prepare_weights(
        w13, w2, problem, arch=arch, w13_bias=torch.randn(2, 256), w2_bias=torch.randn(2, 192)
    )
    path = tmp_path / "layer.pt"
    save_prepared(prepared, path)
    assert [p.name for p in tmp_path.iterdir()] == ["layer.pt"]
    loaded = load_prepared(path)
    path.write_bytes(b"")  # the loaded tensors are copies
    assert same_bits(loaded.tensors, prepared.tensors)
    for f in dataclasses.fields(PreparedWeights):
        if f.name != "tensors":
            assert getattr(loaded, f.name) == getattr(prepared, f.name), f.name
    update_weights(loaded, w13, w2, w13_bias=torch.zeros(2, 256), w2_bias=torch.zeros(2, 192))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    problem = make_problem()
    path = tmp_path / "layer.pt"
    save_prepared(prepare_weights(*sources(problem), problem, arch="sm_90a"), path)
    return path


def test_load_takes_a_fitting_problem(saved: Path) -> None:
    wanted = make_problem(format="auto").with_(max_tokens=99)
    loaded = load_prepared(saved, problem=wanted)
    assert loaded.problem == wanted.with_(format="mxfp8", act="mxfp8")
    for changes in ({"hidden": 256}, {"bias": True}, {"format": "nvfp4"}, {"num_experts": 4}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            load_prepared(saved, problem=wanted.with_(**changes))


@pytest.mark.parametrize("size", [0, 100, -1000], ids=["empty", "head", "tail_cut"])
def test_load_refuses_truncated_files(saved: Path, size: int) -> None:
    saved.write_bytes(saved.read_bytes()[:size])
    with pytest.raises(ValueError, match="truncated, or not a file of save_prepared"):
        load_prepared(saved)


def _foreign(state: dict) -> Any:
    return {"weight": torch.zeros(3)}


def _old_version(state: dict) -> Any:
    return {**state, "version": 0}


def _no_tensor(state: dict) -> Any:
    del state["tensors"]["w2_sf"]
    return state


def _wrong_shape(state: dict) -> Any:
    state["tensors"]["w2"] = state["tensors"]["w2"][:1].clone()
    return state


def _wrong_dtype(state: dict) -> Any:
    state["tensors"]["w2_sf"] = state["tensors"]["w2_sf"].half()
    return state


def _wrong_kind(state: dict) -> Any:
    return {**state, "kind": "nvfp4"}


def _wrong_arch(state: dict) -> Any:
    return {**state, "arch": "sm_100a"}


def _wrong_problem(state: dict) -> Any:
    return {**state, "problem": {**state["problem"], "hidden": 100}}


def _unknown_fact(state: dict) -> Any:
    return {**state, "problem": {**state["problem"], "colour": 1}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_foreign, "other torch data"),
        (_old_version, "expected version 1, got 0"),
        (_no_tensor, "w2_sf"),
        (_wrong_shape, "w2: expected"),
        (_wrong_dtype, "w2_sf: expected"),
        (_wrong_kind, "kind: expected"),
        (_wrong_arch, "layout 'sm90' for arch 'sm_100a'"),
        (_wrong_problem, "hidden: expected"),
        (_unknown_fact, "colour"),
    ],
    ids=lambda v: v.__name__.strip("_") if callable(v) else "",
)
def test_load_refuses_foreign_files(saved: Path, change: Callable, message: str) -> None:
    torch.save(change(torch.load(saved, weights_only=True)), saved)
    with pytest.raises(ValueError, match=message) as caught:
        load_prepared(saved)
    assert "run prepare_weights and save_prepared again" in str(caught.value)


def test_load_runs_no_code(tmp_path: Path) -> None:
    path = tmp_path / "layer.pt"
    torch.save({"mark": Path("x")}, path)
    with pytest.raises(ValueError, match="not a file of save_prepared"):
        load_prepared(path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_prepared(tmp_path / "missing.pt")


# Bad input


@FORMATS
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_float_sources_must_be_finite(fmt: str, value: float) -> None:
    problem = make_problem(7, 64, 64, format=fmt)
    for name in ("w13", "w2"):
        w = dict(zip(("w13", "w2"), sources(problem), strict=True))
        w[name] = w[name].bfloat16()
        w[name][5, 60, 60] = value
        for arch in (None, "sm_90a"):
            with pytest.raises(ValueError, match=rf"{name}: .* NaN or Inf in expert\(s\) \[5\]"):
                prepare_weights(w["w13"], w["w2"], problem, arch=arch)


@pytest.mark.parametrize(
    ("fmt", "byte", "what"),
    [
        ("mxfp8", 0xFF, "NaN scales"),
        ("nvfp4", 0x7F, "NaN scales"),
        ("nvfp4", 0xFF, "NaN scales"),
        ("nvfp4", 0xB0, "negative scales"),
    ],
    ids=lambda v: f"{v:02x}" if isinstance(v, int) else v.split()[0],
)
@pytest.mark.parametrize("target", ["mxfp8", "nvfp4"])
def test_bad_scale_bytes(fmt: str, byte: int, what: str, target: str) -> None:
    problem = make_problem(3, 64, 64, format=target)
    w13, w2 = (quantized(w, fmt) for w in sources(problem))
    w2.sf.view(torch.uint8)[2, 60, 1] = byte
    for arch in (None, "sm_90a"):
        with pytest.raises(ValueError, match=rf"w2: .* {what} in expert\(s\) \[2\]"):
            prepare_weights(w13, w2, problem, arch=arch)


def test_nan_elements() -> None:
    problem = make_problem(3, 64, 64)
    w13, w2 = (quantized(w, "mxfp8") for w in sources(problem))
    w13.data.view(torch.uint8)[1, 0, 0] = 0xFF
    with pytest.raises(ValueError, match=r"w13: .* NaN elements in expert\(s\) \[1\]"):
        prepare_weights(w13, w2, problem)


@pytest.mark.parametrize("value", [float("nan"), -1.0, 2.0**110], ids=str)
def test_bad_global_scale(value: float) -> None:
    problem = make_problem(3, 64, 64, format="nvfp4")
    w13, w2 = (quantized(w, "nvfp4") for w in sources(problem))
    w13.global_scale[1] = value
    with pytest.raises(ValueError, match=r"w13\.global_scale: expected"):
        prepare_weights(w13, w2, problem)


def _bad_arguments() -> list:
    f = torch.zeros
    w13, w2 = (2, 256, 192), (2, 192, 128)
    good = {"w13": f(w13), "w2": f(w2)}
    return [
        ("transposed", {**good, "w13": f(2, 192, 256)}, ValueError, "w13: expected .*256, 192"),
        ("experts", {**good, "w2": f(3, 192, 128)}, ValueError, "w2: expected"),
        ("two_dims", {**good, "w2": f(192, 128)}, ValueError, "w2: expected"),
        ("int_dtype", {**good, "w13": f(w13, dtype=torch.int8)}, TypeError, "BlockScaled"),
        ("fp64", {**good, "w13": f(w13, dtype=torch.float64)}, TypeError, "float64"),
        ("fp8", {**good, "w13": f(w13).to(torch.float8_e4m3fn)}, TypeError, "BlockScaled"),
        ("not_a_tensor", {**good, "w13": [1]}, TypeError, "list"),
        ("device", {**good, "w2": f(w2, device="meta")}, ValueError, "w2: expected on cpu"),
        ("bias_given", {**good, "w13_bias": f(2, 256)}, ValueError, "w13_bias: expected None"),
        ("gate_up_name", {**good, "gate_up": "both"}, ValueError, "gate_up: expected"),
        ("gate_up_step", {**good, "gate_up": 3}, ValueError, "divisor of intermediate=128"),
        ("gate_up_bool", {**good, "gate_up": True}, ValueError, "gate_up: expected"),
        ("gate_up_zero", {**good, "gate_up": 0}, ValueError, "gate_up: expected"),
        ("h_scale", {**good, "h_global_scale": 1.0}, ValueError, "h_global_scale: expected None"),
        ("rank", {**good, "rank": 1}, ValueError, "rank: expected 0..0"),
        ("arch", {**good, "arch": "sm_80"}, ValueError, "sm_90a"),
        ("backend", {**good, "backend": "cuda"}, ValueError, "backend: expected"),
        ("arch_and_reference", {**good, "arch": "sm_90a", "backend": "reference"}, ValueError,
         "drop one"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [pytest.param(*case[1:], id=case[0]) for case in _bad_arguments()],
)
def test_bad_arguments(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        prepare_weights(problem=make_problem(), **arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"w13_bias": None}, ValueError, "w13_bias: expected a tensor"),
        ({"w2_bias": None}, ValueError, "w2_bias: expected a tensor"),
        ({"w2_bias": torch.zeros(2, 256)}, ValueError, "w2_bias: expected shape"),
        ({"w2_bias": torch.zeros(2, 192, dtype=torch.int32)}, TypeError, "floating-point"),
        ({"w2_bias": torch.zeros(2, 192, device="meta")}, ValueError, "expected on cpu"),
        ({"w13_bias": torch.full((2, 256), float("nan"))}, ValueError, "finite"),
        ({"h_global_scale": 0.0}, ValueError, "positive"),
        ({"h_global_scale": float("nan")}, ValueError, "finite"),
        ({"h_global_scale": torch.ones(3)}, ValueError, "expected shape"),
    ],
    ids=["no13", "no2", "shape", "dtype", "device", "nan", "h_zero", "h_nan", "h_shape"],
)
def test_bad_small_tensors(changes: dict, error: type[Exception], message: str) -> None:
    problem = make_problem(format="nvfp4", act="nvfp4", bias=True)
    arguments = {"w13_bias": torch.zeros(2, 256), "w2_bias": torch.zeros(2, 192), **changes}
    with pytest.raises(error, match=message):
        prepare_weights(*sources(problem), problem, arch="sm_90a", **arguments)


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
