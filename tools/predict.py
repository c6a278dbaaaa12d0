"""What Blackwell's kernels should take on a B200: computed, never measured.

``python -m moe_ep_jit.tools.predict`` prints the tables of docs/blackwell.md. Tiles are counted as
the kernels cut them under uniform routing, the padding that is multiplied included; rates are the
data sheet's times what Hopper's kernels reach of theirs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_ep_jit import variants
from moe_ep_jit.kernels.sm100 import packing
from moe_ep_jit.layout import ceil_div
from moe_ep_jit.problem import Problem
from moe_ep_jit.tools import floors, presets

ARCH = "sm_100a"
NUM_SMS = 148  # of a B200

#: Of the data sheet's rates, what the H200 gives of its own: 4.39 of 4.8 TB/s read; 1,979 TFLOP/s
#: of which cuBLAS reaches 1,415 and these kernels four fifths of that.
MEMORY_SHARE, MATH_SHARE = 0.91, 0.57
#: Columns below which an MMA gains nothing: reading 128 rows x 32 bytes of weights from shared
#: memory at 128 bytes a clock takes the 32 clocks that 64 columns take to multiply.
LEAST_COLUMNS = 64
#: A layer's five grids beyond their work: dsv3-ep8 and qwen3-30b at few tokens on the H200.
FIXED_MS = 0.015

#: FlashInfer's published NVFP4 times on a GB200, DeepSeek-V3's sizes over 4 ranks, us by tokens a
#: rank. They hold the exchange between ranks, which the prediction does not.
PEER_US = {8: 222, 64: 288, 512: 359, 1024: 429, 2048: 622, 4096: 1002, 8192: 1896}
PEER_SIZES = {"hidden": 7168, "intermediate": 2048, "num_experts": 64, "top_k": 8}


@dataclass(frozen=True)
class Prediction:
    """Of one call.

    stages, in_flight  of the gate/up GEMM; bytes that an SM's stages hold
    moved_gb           weights as they are packed, and every row that the five kernels read or write
    tflop              of the active experts, without padding
    gemm_ms            both GEMMs; ``bound`` says by what: "memory" or "math"
    l2_tbps            what the GEMMs' loads then ask of the L2 cache
    """

    tile_n: int
    cluster: int
    stages: int
    in_flight: int
    moved_gb: float
    tflop: float
    floor_ms: float
    gemm_ms: float
    bound: str
    layer_ms: float
    l2_tbps: float


def predict(problem: Problem, tokens: int) -> Prediction:
    """``problem`` with its format; uniform routing: every expert gets the mean."""
    from moe_ep_jit.kernels.sm100.grouped_gemm import GroupedGemm  # needs the DSL

    kind = problem.format
    config = variants.choose_rung(problem.with_(act=kind), ARCH, tokens, kind)
    rows = tokens * problem.top_k
    active = round(problem.num_experts * -math.expm1(rows * math.log1p(-1 / problem.num_experts)))
    per_expert = ceil_div(rows, active)
    tiles = active * ceil_div(per_expert, config.tile_n)
    ceilings = floors.CEILINGS[kind]
    gemms = [
        GroupedGemm(
            kind=kind, gate_up=gate_up, k=k, m=m, num_experts=problem.num_experts, config=config
        )
        for gate_up, k, m in (
            (True, problem.hidden, 2 * problem.intermediate),
            (False, problem.intermediate, problem.hidden),
        )
    ]
    token_bytes = floors.TOKEN_BITS[kind] / 8
    # Each GEMM's rows: x and h in, h and bf16 out.
    gemm_bytes = rows * (
        (problem.hidden + 2 * problem.intermediate) * token_bytes + 2 * problem.hidden
    )
    math_s = loaded = 0.0
    for gemm in gemms:
        gemm_bytes += active * gemm.m_tiles * gemm.k_stages * gemm.w_bytes
        widths = [config.tile_n] * (per_expert // config.tile_n)
        widths += [gemm.width(per_expert % config.tile_n)] if per_expert % config.tile_n else []
        columns = sum(max(width, LEAST_COLUMNS) for width in widths) / len(widths)
        # The busiest CTAs decide: whole waves of tiles.
        workers = NUM_SMS // config.cluster
        waves = ceil_div(tiles * gemm.m_steps, workers)
        flops = 2.0 * packing.TILE_M * config.cluster * columns * gemm.k * workers * waves
        math_s += flops / (ceilings.flops * MATH_SHARE)
        # A pair's scales of tokens come once for both.
        stage = config.cluster * (gemm.w_bytes + gemm.token_bytes) + gemm.sf_bytes
        loaded += tiles * gemm.m_steps * gemm.k_stages * stage
    memory_s = gemm_bytes / (ceilings.read * MEMORY_SHARE)
    floor = floors.floors(problem, kind, kind, tokens, rows, active)
    copies_s = (floor.dispatch_bytes + floor.combine_bytes) / (ceilings.copy * MEMORY_SHARE)
    gemm_ms = max(memory_s, math_s) * 1e3
    return Prediction(
        config.tile_n,
        config.cluster,
        gemms[0].num_stages,
        gemms[0].num_stages * gemms[0].loaded_bytes // config.cluster,
        (gemm_bytes + floor.dispatch_bytes + floor.combine_bytes) / 1e9,
        floor.flops / 1e12,
        floor.layer_ms,
        gemm_ms,
        "memory" if memory_s >= math_s else "math",
        gemm_ms + copies_s * 1e3 + FIXED_MS,
        loaded / gemm_ms / 1e9,
    )


def table() -> str:
    """All presets and token counts, as Markdown."""
    lines = [
        "| preset | tokens | format | tile x CTAs | stages, KB in flight | GB moved | TFLOP |"
        " floor ms | predicted ms | ruled by | L2 TB/s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for preset in presets.load(()):
        for fmt in ("mxfp8", "nvfp4"):
            for tokens in preset.tokens:
                p = predict(preset.problem(fmt), tokens)
                lines.append(
                    f"| {preset.name} | {tokens} | {fmt} | {p.tile_n} x {p.cluster} |"
                    f" {p.stages}, {p.in_flight // 1024} | {p.moved_gb:.2f} | {p.tflop:.3g} |"
                    f" {p.floor_ms:.3f} | {p.layer_ms:.3f} | {p.bound} | {p.l2_tbps:.1f} |"
                )
    return "\n".join(lines)


def peer_table() -> str:
    """The peer's geometry, as Markdown."""
    lines = [
        "| tokens a rank | predicted here, one rank's work, ms | published peer, ms |",
        "|---|---|---|",
    ]
    for tokens, us in PEER_US.items():
        problem = Problem(**PEER_SIZES, max_tokens=tokens, format="nvfp4")
        lines.append(f"| {tokens} | {predict(problem, tokens).layer_ms:.3f} | {us / 1e3:.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(f"{table()}\n\n{peer_table()}")  # noqa: T201
