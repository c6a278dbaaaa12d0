"""What the machine cannot beat: the floors of a call, and each stage as a part of its ceiling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_ep_jit.problem import Problem

#: Ceilings measured on one H200, 2026-11-30.
READ_BYTES_PER_S = 4.39e12
COPY_BYTES_PER_S = 4.28e12
FLOPS_PER_S = {"e4m3": 1415e12, "bf16": 779e12}

#: Bits that a weight takes in memory, its scale included, by kind of prepared weights.
WEIGHT_BITS = {"mxfp8_row": 8.0, "mxfp8_group128": 8.25, "mxfp8_exact": 8.25, "nvfp4": 4.5}

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
    dispatch_bytes  x read, rows written
    combine_bytes   rows read, output written
    """

    gemm_ms: float
    layer_ms: float
    weight_bytes: float
    flops: float
    dispatch_bytes: float
    combine_bytes: float


def floors(
    problem: Problem, kind: str, operand: str, tokens: int, rows: int, active: int
) -> Floors:
    """The floors of one call.

    kind     of the prepared weights: a key of ``WEIGHT_BITS``
    operand  "e4m3" or "bf16": what the MMA's token side is
    rows     (token, k) pairs that reach an expert
    active   experts with at least one
    """
    size = problem.hidden * problem.intermediate
    weight_bytes = active * 3 * size * WEIGHT_BITS[kind] / 8
    flops = 6.0 * rows * size
    gemm_s = max(weight_bytes / READ_BYTES_PER_S, flops / FLOPS_PER_S[operand])
    row_bytes = problem.hidden * (1 if operand == "e4m3" else 2)
    # What the GEMMs move besides weights overlaps with their math.
    dispatch_bytes = rows * row_bytes + 2 * tokens * problem.hidden
    combine_bytes = 2 * rows * problem.hidden + 2 * tokens * problem.hidden
    layer_s = gemm_s + (dispatch_bytes + combine_bytes) / COPY_BYTES_PER_S
    return Floors(gemm_s * 1e3, layer_s * 1e3, weight_bytes, flops, dispatch_bytes, combine_bytes)


def stage_figures(floor: Floors, stage_ms: Mapping[str, float]) -> dict[str, Any]:
    """The rates behind stage times: ``stage_gbps`` and ``stage_tflops`` of the two GEMMs alone, and
    ``copy_pct``: dispatch and combine as per cent of the copy ceiling."""
    gemms = {name: share / (stage_ms[name] / 1e3) for name, share in _GEMM_SHARES.items()}
    moved = {"dispatch": floor.dispatch_bytes, "combine": floor.combine_bytes}
    return {
        "stage_gbps": {name: floor.weight_bytes * rate / 1e9 for name, rate in gemms.items()},
        "stage_tflops": {name: floor.flops * rate / 1e12 for name, rate in gemms.items()},
        "copy_pct": {
            name: 100 * size / (stage_ms[name] / 1e3) / COPY_BYTES_PER_S
            for name, size in moved.items()
        },
    }
