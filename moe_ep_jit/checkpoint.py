"""A rank's experts as a checkpoint holds them: what is accepted, its row orders, reading by slabs.

A slab is some rows of one expert, selected in the order that the prepared weights want and brought
to the problem's format. ``weights.py`` packs slabs; of packed layouts only the row order is known
here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from moe_ep_jit import formats
from moe_ep_jit.formats import MXFP8, NVFP4, BlockScaled
from moe_ep_jit.kernels.common.packing import PAD, Rows, interleave_rows, pad, padded_shape
from moe_ep_jit.problem import Problem, check, check_problem

MATRICES = ("w13", "w2")

#: Float types that a source may have, and their names for the dispatcher.
FLOATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

#: Static second-level scale of the NVFP4 intermediate where the checkpoint has none: as accurate as
#: a dynamic one for inputs of scale 1 and 0.05 (measured: the layer's error is 23.4 and 23.1 %).
DEFAULT_H_GLOBAL_SCALE = 2.0**-8

#: Second-level scales are below this: Hopper's decoder leaves 2^20 to its epilogue.
_GLOBAL_SCALE_LIMIT = 2.0**107
_NVFP4_HEADROOM = 2.0**20

#: Slabs that an expert is cut into, by source, so that a slab's temporaries (up to 30 bytes an
#: element from floats, 16 for folding, 6 for 4 bits) are less than one expert of the source.
_SLABS = {"fp32": 9, "bf16": 18, "fp16": 18, "mxfp8": 20, "nvfp4": 14}
_SLABS_WHEN_REQUANTIZING = 48
_SLAB_ROWS = PAD  # whole blobs on every arch
_REQUANTIZED_ROWS = 32

# What the arguments must be


def matrix_shape(problem: Problem, name: str) -> tuple[int, int]:
    """[rows, K] of one expert's matrix."""
    check(name in MATRICES, f'name: expected "w13" or "w2", got {name!r}')
    if name == "w13":
        return 2 * problem.intermediate, problem.hidden
    return problem.hidden, problem.intermediate


def device_of(w: torch.Tensor | BlockScaled) -> torch.device:
    return w.data.device if isinstance(w, BlockScaled) else w.device


def format_name(w: torch.Tensor | BlockScaled) -> str:
    return w.format.name if isinstance(w, BlockScaled) else FLOATS[w.dtype]


def check_matrices(
    w13: torch.Tensor | BlockScaled, w2: torch.Tensor | BlockScaled, problem: Problem
) -> None:
    """Types, shapes and devices of both matrices; the problem's type."""
    check_problem(problem)
    for name, w in (("w13", w13), ("w2", w2)):
        if not isinstance(w, (torch.Tensor, BlockScaled)):
            raise TypeError(
                f"{name}: expected a torch.Tensor or BlockScaled, got {type(w).__name__}"
            )
        if isinstance(w, torch.Tensor) and w.dtype not in FLOATS:
            raise TypeError(
                f"{name}: expected bfloat16, float16 or float32, got {w.dtype}; pass quantized "
                "weights as BlockScaled(format, data, sf, global_scale)"
            )
        want = (problem.num_local_experts, *matrix_shape(problem, name))
        letters = (
            "[experts, 2*intermediate, hidden]"
            if name == "w13"
            else "[experts, hidden, intermediate]"
        )
        check(
            tuple(w.shape) == want,
            f"{name}: expected {letters} = {list(want)}, got {list(w.shape)}; "
            "pass this rank's experts in the checkpoint's own orientation [.., out, in]",
        )
    check(
        device_of(w13) == device_of(w2),
        f"w2: expected on {device_of(w13)} like w13, got {device_of(w2)}; move one of them",
    )


def small_tensors(
    problem: Problem,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    gate_up: str | int,
    h_global_scale: float | torch.Tensor | None,
    layout: str,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Biases in packed order and the intermediate's scales, checked; by tensor name."""
    out = {}
    experts = problem.num_local_experts
    for name, bias in (("w13", w13_bias), ("w2", w2_bias)):
        rows, k = matrix_shape(problem, name)
        check(
            (bias is not None) == problem.bias,
            f"{name}_bias: expected {'a tensor' if problem.bias else 'None'} with problem.bias="
            f"{problem.bias}, got {'None' if bias is None else 'a tensor'}; "
            "set Problem(bias=...) to what the checkpoint holds",
        )
        if bias is None:
            continue
        _check_vector(f"{name}_bias", bias, (experts, rows), device)
        order = _packed_rows(problem, name, gate_up, layout, device)
        value = bias.detach().float()[:, order]
        if layout != "plain":
            value = pad(value, experts, padded_shape(rows, k)[0])
        out[f"{name}_bias"] = value
    if problem.act != "nvfp4":
        check(
            h_global_scale is None,
            f"h_global_scale: expected None with act={problem.act!r} (it scales the NVFP4 "
            'intermediate), got a value; drop it or set Problem(act="nvfp4")',
        )
        return out
    scale = DEFAULT_H_GLOBAL_SCALE if h_global_scale is None else h_global_scale
    out["h_global_scale"] = _intermediate_scale(scale, experts, device)
    return out


def _intermediate_scale(
    scale: float | torch.Tensor, experts: int, device: torch.device
) -> torch.Tensor:
    """fp32 [experts] out of a number or a tensor, finite, positive and below 2^107."""
    name = "h_global_scale"
    if isinstance(scale, torch.Tensor):
        _check_vector(name, scale, () if scale.ndim == 0 else (experts,), device)
    elif isinstance(scale, (int, float)) and not isinstance(scale, bool):
        # An int beyond all floats could not be made a tensor.
        scale = float(scale) if abs(scale) < 2**128 else math.inf
        scale = torch.tensor(scale, dtype=torch.float32, device=device)
        _check_vector(name, scale, (), device)
    else:
        raise TypeError(
            f"{name}: expected None, a number or a floating-point torch.Tensor, got "
            f"{type(scale).__name__}; pass the checkpoint's input_scale of w2"
        )
    scale = scale.detach().float().expand(experts)
    check(
        bool(((scale > 0) & (scale < _GLOBAL_SCALE_LIMIT)).all()),
        f"{name}: expected positive numbers below 2^107, got {scale.tolist()}; pass the "
        "checkpoint's input_scale (value = e2m1 * block scale * this), not its inverse",
    )
    return scale


def _check_vector(
    name: str, value: torch.Tensor, shape: tuple[int, ...], device: torch.device
) -> None:
    """A small float tensor: type, shape, device, finite."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        got = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(f"{name}: expected a floating-point torch.Tensor, got {got}")
    check(
        tuple(value.shape) == shape,
        f"{name}: expected shape {list(shape)}, got {list(value.shape)}; pass this rank's experts",
    )
    check(
        value.device == device,
        f"{name}: expected on {device} like w13, got {value.device}; move it there",
    )
    check(
        bool(value.isfinite().all()),
        f"{name}: expected finite numbers, got NaN or Inf; the checkpoint is damaged",
    )


# Row orders


def _checkpoint_rows(gate_up: str | int, intermediate: int) -> torch.Tensor:
    """int64 [2I]: where row r of gate-first order is in the checkpoint."""
    row = torch.arange(2 * intermediate)
    if gate_up == "gate_first":
        return row
    if gate_up == "up_first":
        return row.roll(intermediate)
    check(
        isinstance(gate_up, int)
        and not isinstance(gate_up, bool)
        and gate_up >= 1
        and intermediate % gate_up == 0,
        'gate_up: expected "gate_first", "up_first" or the interleaving step, a divisor of '
        f"intermediate={intermediate}, got {gate_up!r}",
    )
    return row.view(intermediate // gate_up, 2, gate_up).transpose(0, 1).flatten()


def _packed_rows(
    problem: Problem, name: str, gate_up: str | int, layout: str, device: torch.device
) -> torch.Tensor:
    """int64 [rows]: packed row -> checkpoint's row, one order for weights, scales and biases."""
    if name == "w2":
        return torch.arange(problem.hidden, device=device)
    rows = _checkpoint_rows(gate_up, problem.intermediate)
    if layout != "plain":
        rows = rows[interleave_rows(problem.intermediate)]
    return rows.to(device)


def gate_first_rows(problem: Problem, name: str, device: torch.device) -> torch.Tensor:
    """int64 [rows]: gate-first row -> packed row; undoes the interleaving and drops padding."""
    if name == "w2":
        return torch.arange(problem.hidden, device=device)
    return interleave_rows(problem.intermediate, device).argsort()


# Reading a source slab by slab


@dataclass(eq=False)
class Source:
    """One matrix of the checkpoint, and how its rows are reached.

    tensor        float tensor or BlockScaled, [E, rows, K]
    order         int64 [rows]: packed row -> source row
    source_scale  fp32 [E, rows] view: second-level scale of an NVFP4 source
    global_scale  fp32 [E]: second-level scale that scan chose for a source to be quantized to NVFP4
    slab_rows     rows read at a time
    """

    name: str
    tensor: torch.Tensor | BlockScaled
    order: torch.Tensor
    source_scale: torch.Tensor | None
    slab_rows: int
    global_scale: torch.Tensor | None = None

    def slabs(self) -> Iterator[tuple[int, int]]:
        """(first row, end) of every slab of an expert."""
        rows = len(self.order)
        for start in range(0, rows, self.slab_rows):
            yield start, min(start + self.slab_rows, rows)

    def raw(self, expert: int, start: int, end: int) -> torch.Tensor | BlockScaled:
        """Packed rows start..end of one expert, as the checkpoint has them: a copy."""
        rows = self.order[start:end]
        if isinstance(self.tensor, torch.Tensor):
            return self.tensor[expert].detach().index_select(0, rows)
        data = as_bytes(self.tensor.data[expert]).index_select(0, rows)
        sf = as_bytes(self.tensor.sf[expert]).index_select(0, rows)
        scale = self.source_scale
        scale = None if scale is None else scale[expert].index_select(0, rows)
        return as_operand(self.tensor.format.name, Rows(data, sf), scale)

    def block_scaled(
        self, expert: int, start: int, end: int, fmt: str
    ) -> tuple[Rows, torch.Tensor | None]:
        """The same rows in ``fmt``, zero blocks in one form; NVFP4: and fp32 [end - start]."""
        slab = self.raw(expert, start, end)
        if isinstance(slab, BlockScaled) and slab.format.name == fmt:
            q, scale = slab, slab.global_scale
        else:
            scale = None
            if fmt == "nvfp4":
                scale = self.global_scale[expert].expand(end - start)
            convert = _requantize if isinstance(slab, BlockScaled) else formats.quantize
            q = convert(slab, fmt, scale)
        return _canonical(fmt, as_bytes(q.data), as_bytes(q.sf)), scale


def _requantize(slab: BlockScaled, fmt: str, scale: torch.Tensor | None) -> BlockScaled:
    """Rows in another format, through fp32, a few at a time: fp32 is much larger than both."""
    step, parts = _REQUANTIZED_ROWS, []
    for start in range(0, slab.shape[0], step):
        end = start + step
        source_scale = None if slab.global_scale is None else slab.global_scale[start:end]
        part = BlockScaled(slab.format, slab.data[start:end], slab.sf[start:end], source_scale)
        part_scale = None if scale is None else scale[start:end]
        parts.append(formats.quantize(formats.dequantize(part), fmt, part_scale))
    data = torch.cat([as_bytes(part.data) for part in parts])
    sf = torch.cat([as_bytes(part.sf) for part in parts])
    return as_operand(fmt, Rows(data, sf), scale)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def as_operand(fmt: str, rows: Rows, global_scale: torch.Tensor | None) -> BlockScaled:
    """Bytes [rows, ..] -> BlockScaled."""
    if fmt == "nvfp4":
        return BlockScaled(
            NVFP4, rows.data, rows.sf.contiguous().view(NVFP4.sf_dtype), global_scale
        )
    return BlockScaled(MXFP8, rows.data.contiguous().view(torch.float8_e4m3fn), rows.sf)


def _canonical(fmt: str, data: torch.Tensor, sf: torch.Tensor) -> Rows:
    """Blocks of zeros get scale 0, blocks of scale 0 zero codes: only a zero's sign may change."""
    block = sf.shape[1]
    blocks = data.view(len(data), block, -1)
    is_zero = (blocks & (0x77 if fmt == "nvfp4" else 0x7F)).amax(2) == 0
    if fmt == "nvfp4":
        is_zero |= (sf & 0x7F) == 0
    sf = sf.masked_fill(is_zero, 0)
    return Rows(blocks.masked_fill(is_zero[:, :, None], 0).view(data.shape), sf)


def open_sources(
    w13: torch.Tensor | BlockScaled,
    w2: torch.Tensor | BlockScaled,
    problem: Problem,
    gate_up: str | int,
    layout: str,
) -> tuple[Source, Source]:
    """Both matrices, ready to be read in packed row order; ``check_matrices`` has accepted them."""
    elements = 3 * problem.hidden * problem.intermediate
    sources = []
    for name, w in (("w13", w13), ("w2", w2)):
        rows, k = matrix_shape(problem, name)
        foreign = isinstance(w, BlockScaled) and w.format.name != problem.format
        slabs = _SLABS_WHEN_REQUANTIZING if foreign else _SLABS[format_name(w)]
        slab = elements // (slabs * k) // _SLAB_ROWS * _SLAB_ROWS
        order = _packed_rows(problem, name, gate_up, layout, device_of(w))
        scale = _source_scale(name, w, problem.num_local_experts, rows)
        sources.append(Source(name, w, order, scale, max(slab, _SLAB_ROWS)))
    return tuple(sources)


def _source_scale(
    name: str, w: torch.Tensor | BlockScaled, experts: int, rows: int
) -> torch.Tensor | None:
    """The second-level scale of an NVFP4 source, fp32 [E, rows] (a view); None for others."""
    if not isinstance(w, BlockScaled) or w.global_scale is None:
        return None
    scale = w.global_scale.detach()
    fix = f"pass the factor of value = e2m1 * sf * global_scale as [] or [{experts}, 1]"
    check(
        scale.ndim != 1 or scale.numel() == 1 or experts != rows,
        f"{name}.global_scale: [{experts}] could mean experts or rows here; {fix}",
    )
    check(
        bool((scale.isfinite() & (scale >= 0)).all()),
        f"{name}.global_scale: expected finite numbers, none negative; {fix}",
    )
    check(
        bool((scale < _GLOBAL_SCALE_LIMIT).all()),
        f"{name}.global_scale: expected below 2^107, got {float(scale.max()):g}; {fix}",
    )
    return scale.expand(experts, rows)


def scan(sources: tuple[Source, ...], fmt: str) -> None:
    """Refuse NaN, Inf and bad scales, by expert; set ``global_scale`` where it is needed."""
    for source in sources:
        experts = source.tensor.shape[0]
        amax = torch.zeros(experts, device=device_of(source.tensor))
        found: dict[str, torch.Tensor] = {}
        needs_amax = fmt == "nvfp4" and format_name(source.tensor) != "nvfp4"
        for expert in range(experts):
            if isinstance(source.tensor, torch.Tensor):
                low, high = source.tensor[expert].detach().aminmax()
                amax[expert] = torch.maximum(high, -low)
                continue
            for start, end in source.slabs():
                q = source.raw(expert, start, end)
                for what, is_bad in _bad_bytes(q).items():
                    found.setdefault(what, torch.zeros_like(amax, dtype=torch.bool))[expert] |= (
                        is_bad
                    )
                if needs_amax:
                    amax[expert] = torch.maximum(amax[expert], formats.dequantize(q).abs().amax())
        found.setdefault("NaN or Inf", ~amax.isfinite())
        for what, is_bad in found.items():
            experts_hit = is_bad.nonzero().flatten().tolist()
            check(
                not experts_hit,
                f"{source.name}: expected finite weights with valid scales, got {what} in "
                f"expert(s) {experts_hit[:8]}{' ...' if len(experts_hit) > 8 else ''}; "
                "the checkpoint is damaged or its tensors are mixed up",
            )
        if fmt == "nvfp4":
            source.global_scale = formats.global_scale_of(amax)
            check(
                bool((source.global_scale * _NVFP4_HEADROOM).isfinite().all()),
                f"{source.name}: expected weights below 2^118, got {float(amax.max()):g}; "
                "the checkpoint is damaged",
            )


def _bad_bytes(q: BlockScaled) -> dict[str, torch.Tensor]:
    """What is wrong with a quantized slab -> bool []."""
    sf = as_bytes(q.sf)
    if q.format.name == "nvfp4":
        return {
            "NaN scales": ((sf & 0x7F) == 0x7F).any(),
            "negative scales": ((sf > 0x80) & (sf != 0xFF)).any(),
        }
    data = as_bytes(q.data)
    return {"NaN scales": (sf == 0xFF).any(), "NaN elements": ((data & 0x7F) == 0x7F).any()}
