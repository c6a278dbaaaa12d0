"""What the machine cannot beat: the floors of a call, and each stage as a part of its ceiling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_ep_jit.problem import Problem


@dataclass(frozen=True)
class Ceilings:
    """Bytes and operations a second."""

    read: float
    copy: float
    flops: float


#: By operand, which says the arch too. Hopper's were measured on one H200, 2026-11-30; Blackwell's
#: are a B200's by its data sheet, never measured.
CEILINGS = {
    "e4m3": Ceilings(4.39e12, 4.28e12, 1415e12),
    "bf16": Ceilings(4.39e12, 4.28e12, 779e12),
    "mxfp8": Ceilings(8e12, 8e12, 4500e12),
    "nvfp4": Ceilings(8e12, 8e12, 9000e12),
}

#: Bits that a weight takes in memory, its scale included, by kind of prepared weights.
WEIGHT_BITS = {
    "mxfp8_row": 8.0,
    "mxfp8_group128": 8.25,
    "mxfp8_exact": 8.25,
    "mxfp8": 8.25,
    "nvfp4": 4.5,
}

#: Bits that an element of a token's row takes, its scale included.
TOKEN_BITS = {"e4m3": 8.0, "bf16": 16.0, "mxfp8": 8.25, "nvfp4": 4.5}

#: Gate and up are two of the three matrices that an expert has.
_GEMM_SHARES = {"gate_up": 2 / 3, "down": 1 / 3}


@dataclass(frozen=True)
class Floors:
    """What the machine cannot beat, and what it follows from.

    gemm_ms         the active experts' weights at the read rate, or the multiply-adds at the tensor
                    cores' rate, whichever is longer
    layer_ms        dispatch and combine traffic at the copy rate on top
    weight_bytes    of the active experts
    flops           of both GEMMs, a multiply-add counting two
    copy_rate       bytes a second that dispatch and combine are held against
    dispatch_bytes  x read, rows written
    combine_bytes   rows read, output written
    """

    gemm_ms: float
    layer_ms: float
    weight_bytes: float
    flops: float
    copy_rate: float
    dispatch_bytes: float
    combine_bytes: float


def floors(
    problem: Problem, kind: str, operand: str, tokens: int, rows: int, active: int
) -> Floors:
    """The floors of one call.

    kind     of the prepared weights: a key of ``WEIGHT_BITS``
    operand  what the MMA's token side is: a key of ``CEILINGS``
    rows     (token, k) pairs that reach an expert
    active   experts with at least one
    """
    size = problem.hidden * problem.intermediate
    weight_bytes = active * 3 * size * WEIGHT_BITS[kind] / 8
    flops = 6.0 * rows * size
    ceilings = CEILINGS[operand]
    gemm_s = max(weight_bytes / ceilings.read, flops / ceilings.flops)
    row_bytes = problem.hidden * TOKEN_BITS[operand] / 8
    # What the GEMMs move besides weights overlaps with their math.
    dispatch_bytes = rows * row_bytes + 2 * tokens * problem.hidden
    combine_bytes = 2 * rows * problem.hidden + 2 * tokens * problem.hidden
    copied = (dispatch_bytes, combine_bytes)
    layer_s = gemm_s + sum(copied) / ceilings.copy
    return Floors(gemm_s * 1e3, layer_s * 1e3, weight_bytes, flops, ceilings.copy, *copied)


def stage_figures(floor: Floors, stage_ms: Mapping[str, float]) -> dict[str, Any]:
    """The rates behind stage times: ``stage_gbps`` and ``stage_tflops`` of the two GEMMs alone, and
    ``copy_pct``: dispatch and combine as per cent of the copy ceiling."""
    gemms = {name: share / (stage_ms[name] / 1e3) for name, share in _GEMM_SHARES.items()}
    moved = {"dispatch": floor.dispatch_bytes, "combine": floor.combine_bytes}
    return {
        "stage_gbps": {name: floor.weight_bytes * rate / 1e9 for name, rate in gemms.items()},
        "stage_tflops": {name: floor.flops * rate / 1e12 for name, rate in gemms.items()},
        "copy_pct": {
            name: 100 * size / (stage_ms[name] / 1e3) / floor.copy_rate
            for name, size in moved.items()
        },
    }
