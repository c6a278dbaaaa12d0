"""One-time preparation of a layer's expert weights, from a checkpoint's form to the kernels' own.

A source is read in slabs of rows: selected (which undoes the checkpoint's gate/up order), brought
to the problem's format, folded where the kind asks for it, and packed straight into the result, so
that the memory in use stays below one expert above source and result.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch

from moe_ep_jit import formats, variants
from moe_ep_jit.checkpoint import (
    MATRICES,
    Source,
    as_bytes,
    as_operand,
    check_matrices,
    device_of,
    format_name,
    gate_first_rows,
    matrix_shape,
    open_sources,
    scan,
    small_tensors,
)
from moe_ep_jit.formats import MXFP8, NVFP4, BlockScaled
from moe_ep_jit.kernels.common.packing import Rows
from moe_ep_jit.problem import ARCHES, Problem, check
from moe_ep_jit.topology import Topology

#: Folding is accepted while no 32-block loses more than the format's own rounding ...
FOLD_BLOCK_LIMIT = 2.65e-2
#: ... and the whole matrix loses less than this (relative L2).
FOLD_WHOLE_LIMIT = 1e-4

_FOLDS = {"mxfp8_row": "row", "mxfp8_group128": "group128", "mxfp8_exact": "exact"}


@dataclass(eq=False)
class PreparedWeights:
    """The weights of one rank's experts as the kernels (or the reference) read them.

    problem  with ``format`` and ``act`` resolved
    layout   "sm90", "sm100" (``kernels/<layout>/packing.py``) or "plain" (the reference's:
             block-scaled, gate rows first)
    arch     exact arch of the kernels, None for "plain"
    kind     of the arch's packing: "mxfp8_row", "mxfp8_group128", "mxfp8_exact" or "nvfp4" on sm90,
             "mxfp8" or "nvfp4" on sm100; None for "plain"
    variant  what the dispatcher chose: name and reason
    tensors  by name; their addresses stay for the object's life, ``update_weights`` included
    report   JSON-able: kind, reason, fold (measured losses), warnings (requantized sources)
    rank     whose experts they are
    topology which experts those are, and the rows that calls have sent to each (``load``)
    """

    problem: Problem
    layout: str
    arch: str | None
    kind: str | None
    variant: variants.Variant
    tensors: dict[str, torch.Tensor]
    report: dict[str, Any] = field(default_factory=dict)
    rank: int = 0
    topology: Topology | None = None

    def __post_init__(self) -> None:
        if self.topology is None:
            self.topology = Topology(self.problem.num_experts, self.device)

    @property
    def operand(self) -> str:
        """What the MMA's token side is: "e4m3" or "bf16", on Blackwell "mxfp8" or "nvfp4"."""
        if self.kind is None:
            return variants.operand_of(self.problem)
        return packing_of(self.arch).OPERANDS[self.kind]

    @property
    def fold(self) -> str | None:
        """How MXFP8 scales were folded: "row", "group128", "exact" (not at all); else None."""
        return _FOLDS.get(self.kind)

    @property
    def device(self) -> torch.device:
        """Where all tensors are."""
        return self.tensors["w13"].device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def h_global_scale(self) -> torch.Tensor | None:
        """fp32 [E/R]: second-level scale of the NVFP4 intermediate; None unless act is "nvfp4"."""
        return self.tensors.get("h_global_scale")

    @property
    def local(self) -> PreparedWeights:
        """The same tensors as the weights of ``problem.local``, this rank's experts as a layer."""
        return replace(self, problem=self.problem.local, rank=0, topology=None)

    def block_scaled(self, name: str, expert: int) -> BlockScaled:
        """One expert's "w13" [2I, H] (gate rows, then up rows) or "w2" [H, I], as multiplied.

        Folded MXFP8 comes with the folded exponent repeated for each 32-block.
        """
        rows, k = matrix_shape(self.problem, name)
        check(
            isinstance(expert, int) and 0 <= expert < self.problem.num_local_experts,
            f"expert: expected 0..{self.problem.num_local_experts - 1}, got {expert!r}",
        )
        data, sf = self.tensors[name][expert], self.tensors.get(f"{name}_sf")
        sf = None if sf is None else sf[expert]
        if self.layout == "plain":
            global_scale = self.tensors.get(f"{name}_global_scale")
            global_scale = None if global_scale is None else global_scale[expert]
            return as_operand(self.problem.format, Rows(data, sf), global_scale)
        packing = packing_of(self.arch)
        packed, global_scale = packing.unpack_rows(self.kind, data, sf)
        order = gate_first_rows(self.problem, name, self.device)
        data, sf = packed.data[order], packed.sf[order]
        if self.kind in packing.FOLD_GROUPS:
            sf = sf.repeat_interleave((packing.FOLD_GROUPS[self.kind] or k) // MXFP8.sf_block, 1)
        if self.kind == "nvfp4":
            data, sf = data[:, : k // 2], sf[:, : k // NVFP4.sf_block]
            return as_operand("nvfp4", Rows(data, sf), global_scale[order])
        return as_operand("mxfp8", Rows(data[:, :k], sf[:, : k // MXFP8.sf_block]), None)

    def dequantize(self, name: str, expert: int | None = None) -> torch.Tensor:
        """fp32 "w13" [E/R, 2I, H] (gate rows, then up rows) or "w2" [E/R, H, I].

        expert  None: all; else that one alone, without the first dimension
        """
        if expert is not None:
            return formats.dequantize(self.block_scaled(name, expert))
        experts = self.problem.num_local_experts
        out = torch.empty(experts, *matrix_shape(self.problem, name), device=self.device)
        for e in range(experts):
            out[e] = self.dequantize(name, e)
        return out

    def bias(self, name: str) -> torch.Tensor | None:
        """fp32 bias of "w13" [E/R, 2I] (gate, then up) or "w2" [E/R, H]; None without one."""
        matrix_shape(self.problem, name)
        packed = self.tensors.get(f"{name}_bias")
        if packed is None or self.layout == "plain":
            return packed
        return packed[:, gate_first_rows(self.problem, name, self.device)]

    def to(self, device: torch.device | str) -> PreparedWeights:
        """The same weights with every tensor on ``device``."""
        device = variants.usable_device(device)
        tensors = {name: t.to(device) for name, t in self.tensors.items()}
        report = copy.deepcopy(self.report)
        moved = replace(self, tensors=tensors, report=report, topology=None)
        if self.topology.physical_to_logical is not None:
            moved.topology.place(self.topology.physical_to_logical)
        return moved


def prepare_weights(
    w13: torch.Tensor | BlockScaled,
    w2: torch.Tensor | BlockScaled,
    problem: Problem,
    *,
    rank: int = 0,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    gate_up: str | int = "gate_first",
    h_global_scale: float | torch.Tensor | None = None,
    arch: str | None = None,
    backend: str = "auto",
    expected_tokens: int | None = None,
) -> PreparedWeights:
    """Bring one rank's experts into the form that the arch's kernels read; once per layer.

    Eleven parameters, because a checkpoint differs in that many ways; all but three have defaults.
    Of the shapes, E/R is the rank's experts, H hidden, I intermediate.

    w13              [E/R, 2I, H] bf16, fp16 or fp32, or BlockScaled of either format
    w2               [E/R, H, I], the same
    w13_bias         [E/R, 2I] any float type, when problem.bias; rows in w13's order
    w2_bias          [E/R, H]
    gate_up          order of w13's rows: "gate_first", "up_first", or n: n gate, n up rows, ...
    h_global_scale   act "nvfp4" only: fp32 [] or [E/R], the checkpoint's input_scale of w2;
                     None: 2^-8
    arch             exact arch to pack for ("sm_90a"), CPU tensors too; None: the device's own
    backend          "auto", "reference" for the PyTorch reference's plain layout, or "emulator" for
                     the kernels' layout on CPU tensors
    expected_tokens  tokens of a typical call, for format="auto"
    ValueError, TypeError: what does not fit; NaN or Inf in the weights, naming the experts.
    RuntimeError: CUDA tensors on an arch without kernels.
    """
    check_matrices(w13, w2, problem)
    check_rank(rank, problem)
    device = device_of(w13)
    if arch is None:
        arch = variants.resolve_backend(device, backend)
    else:
        variants.check_arch(arch)
        check(
            backend == "auto",
            f'backend: expected "auto" together with arch={arch!r}, got {backend!r}; drop one',
        )
    held = tuple(format_name(w) for w in (w13, w2))
    variant = variants.choose_variant(problem, arch, held, expected_tokens)
    problem = variant.problem
    layout = "plain" if arch is None else ARCHES[arch]
    sources = open_sources(w13, w2, problem, gate_up, layout)
    small = small_tensors(problem, w13_bias, w2_bias, gate_up, h_global_scale, layout, device)
    scan(sources, problem.format)
    kind, losses = _choose_kind(sources, problem, arch)

    tensors = _allocate(problem, arch, kind, device)
    for name, value in small.items():
        tensors[name].copy_(value)
    for source in sources:
        _write(source, problem.format, arch, kind, tensors)
    report = {"kind": kind, "reason": variant.reason, "fold": losses, "warnings": []}
    _report_requantized(report, held, problem.format)
    return PreparedWeights(problem, layout, arch, kind, variant, tensors, report, rank)


def update_weights(
    prepared: PreparedWeights, w13: torch.Tensor | BlockScaled, w2: torch.Tensor | BlockScaled,
    **small: Any,
) -> None:  # fmt: skip
    """Replace prepared weights in place: addresses stay, so captured graphs use the new values.

    small  w13_bias, w2_bias, gate_up and h_global_scale as in ``prepare_weights``, the others too;
           ``h_global_scale=None`` keeps the present one
    Everything is checked before the first byte changes. ValueError as there, and where the new
    weights' exponents spread too far for the present fold kind.
    """
    checked_update(prepared, w13, w2, **small)()


def checked_update(
    prepared: PreparedWeights,
    w13: torch.Tensor | BlockScaled,
    w2: torch.Tensor | BlockScaled,
    *,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    gate_up: str | int = "gate_first",
    h_global_scale: float | torch.Tensor | None = None,
) -> Callable[[], None]:
    """All checks of ``update_weights``, and what then replaces the weights."""
    check_prepared(prepared, "prepared")
    problem, kind = prepared.problem, prepared.kind
    check_matrices(w13, w2, problem)
    check(
        device_of(w13) == prepared.device,
        f"w13: expected on {prepared.device} like the prepared weights, got {device_of(w13)}; "
        "move it there first",
    )
    if h_global_scale is None:
        h_global_scale = prepared.h_global_scale
    sources = open_sources(w13, w2, problem, gate_up, prepared.layout)
    small = small_tensors(
        problem, w13_bias, w2_bias, gate_up, h_global_scale, prepared.layout, prepared.device
    )
    scan(sources, problem.format)
    group, losses = _folds(prepared.arch), None
    if kind in group:
        losses = {
            source.name: _measure_fold(source, problem.format, group[kind]) for source in sources
        }
        check(
            fold_is_small(losses),
            f"weights: folding as {kind} would lose too much on the new values ({losses}; allowed "
            f"{FOLD_BLOCK_LIMIT} a block, {FOLD_WHOLE_LIMIT} on the whole), and the kernels in use "
            "are built for that kind; call prepare_weights, then warmup, and capture graphs again",
        )

    def replace_all() -> None:
        if losses is not None:
            prepared.report.setdefault("fold", {})[kind] = losses
        for name, value in small.items():
            prepared.tensors[name].copy_(value)
        for source in sources:
            _write(source, problem.format, prepared.arch, kind, prepared.tensors)
        prepared.report["warnings"] = []
        held = tuple(format_name(w) for w in (w13, w2))
        _report_requantized(prepared.report, held, problem.format)

    return replace_all


# Kind and fold


def packing_of(arch: str) -> ModuleType:
    """The arch's weight layouts: plain Python and torch."""
    return variants.kernels_module(arch, "packing")


def _folds(arch: str | None) -> dict[str, int | None]:
    """The arch's kinds that fold MXFP8 scales, and what each folds over."""
    return {} if arch is None else packing_of(arch).FOLD_GROUPS


def _choose_kind(
    sources: tuple[Source, ...], problem: Problem, arch: str | None
) -> tuple[str | None, dict[str, Any]]:
    """The kind of both matrices and the fold losses measured on the way, by kind and matrix."""
    if arch is None:
        return None, {}
    losses = {}
    folds = _folds(arch)
    for kind in packing_of(arch).kinds(problem):
        if kind not in folds:
            return kind, losses
        losses[kind] = {
            source.name: _measure_fold(source, problem.format, folds[kind]) for source in sources
        }
        if fold_is_small(losses[kind]):
            return kind, losses
    raise AssertionError("the last of an arch's kinds folds nothing")


def fold_is_small(losses: dict[str, dict[str, float]]) -> bool:
    """True if folding may be used: measured losses by matrix, all within both limits."""
    return all(
        loss["worst_block"] <= FOLD_BLOCK_LIMIT and loss["whole"] < FOLD_WHOLE_LIMIT
        for loss in losses.values()
    )


def _measure_fold(source: Source, fmt: str, group: int | None) -> dict[str, float]:
    """Relative L2 error that folding over ``group`` elements (None: a row) adds: of the worst
    32-block, and of the whole matrix.
    """
    device = device_of(source.tensor)
    worst = torch.zeros((), device=device)
    lost, total = torch.zeros(2, dtype=torch.float64, device=device)
    for expert in range(source.tensor.shape[0]):
        for start, end in source.slabs():
            rows, _ = source.block_scaled(expert, start, end, fmt)
            q = as_operand(fmt, rows, None)
            loss = formats.fold_loss(q, formats.fold(q, group))
            worst = torch.maximum(worst, loss.amax())
            values = q.data.float().view(*rows.sf.shape, MXFP8.sf_block)
            energy = values.square_().sum(2).double() * torch.exp2(2 * (rows.sf.double() - 127))
            lost += (loss.double().square() * energy).sum()
            total += energy.sum()
    whole = (lost / total).sqrt().nan_to_num(0.0)
    return {"worst_block": float(worst), "whole": float(whole)}


def _write(
    source: Source,
    fmt: str,
    arch: str | None,
    kind: str | None,
    tensors: dict[str, torch.Tensor],
) -> None:
    """Bring every row of one matrix into the prepared tensors."""
    out, out_sf = tensors[source.name], tensors.get(f"{source.name}_sf")
    packing, folds = None if arch is None else packing_of(arch), _folds(arch)
    for expert in range(source.tensor.shape[0]):
        for start, end in source.slabs():
            rows, scale = source.block_scaled(expert, start, end, fmt)
            if kind is None:
                out[expert, start:end].view(torch.uint8).copy_(rows.data)
                out_sf[expert, start:end].view(torch.uint8).copy_(rows.sf)
                if scale is not None:
                    tensors[f"{source.name}_global_scale"][expert, start:end] = scale
                continue
            if kind in folds:
                q = as_operand(fmt, rows, None)
                folded = formats.fold(q, folds[kind])
                rows = Rows(as_bytes(folded.data), as_bytes(folded.sf))
            blobs, scales = packing.pack_rows(kind, rows, scale)
            first = start // packing.TILE_M
            out[expert, first : first + len(blobs)] = blobs
            if out_sf is not None:
                out_sf[expert][..., start : start + scales.shape[-1]] = scales


def _report_requantized(report: dict[str, Any], held: tuple[str, ...], fmt: str) -> None:
    foreign = [
        f"{name} from {source}"
        for name, source in zip(MATRICES, held, strict=True)
        if source in formats.BY_NAME and source != fmt
    ]
    if foreign:
        report["warnings"].append(
            f"requantized to {fmt}: {', '.join(foreign)}; both formats' rounding errors add up"
        )


# Tensors


def tensor_specs(
    problem: Problem, arch: str | None, kind: str | None
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> (shape, dtype) of every prepared tensor; kind None: the plain layout."""
    if kind is not None:
        return packing_of(arch).tensor_specs(problem, kind)
    experts, fmt = problem.num_local_experts, formats.BY_NAME[problem.format]
    specs = {}
    for name in MATRICES:
        rows, k = matrix_shape(problem, name)
        if fmt is NVFP4:
            specs[name] = ((experts, rows, k // 2), torch.uint8)
            specs[f"{name}_global_scale"] = ((experts, rows), torch.float32)
        else:
            specs[name] = ((experts, rows, k), torch.float8_e4m3fn)
        specs[f"{name}_sf"] = ((experts, rows, k // fmt.sf_block), fmt.sf_dtype)
        if problem.bias:
            specs[f"{name}_bias"] = ((experts, rows), torch.float32)
    if problem.act == "nvfp4":
        specs["h_global_scale"] = ((experts,), torch.float32)
    return specs


def _allocate(
    problem: Problem, arch: str | None, kind: str | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """The prepared tensors, uninitialised but for their padding rows."""
    tensors = {
        name: torch.empty(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in tensor_specs(problem, arch, kind).items()
    }
    if kind is not None:
        for name in MATRICES:
            rows, _ = matrix_shape(problem, name)
            tensors[name][:, rows // packing_of(arch).TILE_M :] = 0
            if f"{name}_sf" in tensors:
                tensors[f"{name}_sf"][..., rows:] = 0
    return tensors


def check_prepared(weights: object, name: str = "weights") -> None:
    """``TypeError`` unless ``weights``, an argument called ``name``, is a ``PreparedWeights``."""
    if not isinstance(weights, PreparedWeights):
        raise TypeError(
            f"{name}: expected PreparedWeights, got {type(weights).__name__}; pass what "
            "prepare_weights or load_prepared returned"
        )


def check_rank(rank: int, problem: Problem) -> None:
    check(
        isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < problem.num_ranks,
        f"rank: expected 0..{problem.num_ranks - 1}, got {rank!r}; pass this process's rank as an "
        "int",
    )
