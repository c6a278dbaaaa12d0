"""The ladder of Hopper tile shapes and the host rule that picks a rung."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_ep_jit.problem import Problem


@dataclass(frozen=True)
class Config:
    """One rung. Weights are the MMA's M side, tokens its N side.

    tile_n               tokens of a tile: 8, 16, 32, 64, 128, 160 or 192; tiles above 64 multiply
                         in quarters of it, as many as hold their rows
    num_math_warpgroups  4, 3 or 2, each with 64 weight rows at a time
    k_slices             math warpgroups that share 64 weight rows and split K, where K is long
    cluster              CTAs that share the loads of their tokens: 1 or 2
    fold_intermediate    e4m3 only: fold the intermediate to one scale a row before the down GEMM,
                         so that its main loop adds unscaled; False: the loop scales 32-blocks
    """

    tile_n: int
    num_math_warpgroups: int
    k_slices: int = 1
    cluster: int = 1
    fold_intermediate: bool = False

    @property
    def tile_m(self) -> int:
        return 64 * self.num_math_warpgroups // self.k_slices


#: What the experts' activations may be, for each weight format; the default first.
ACTS = {"mxfp8": ("mxfp8", "bf16"), "nvfp4": ("bf16", "nvfp4", "mxfp8")}

#: Rows an expert above which arithmetic rules and not the weights' bytes, and MXFP8 is faster than
#: NVFP4, which multiplies in 16 bits.
MXFP8_FASTER_ABOVE = 90

#: What the MMA's token side may be.
OPERANDS = ("e4m3", "bf16")


def operand_of(fmt: str, act: str) -> str:
    """The MMA's token side: NVFP4 weights are expanded to 16 bits whatever the activations are."""
    return "e4m3" if fmt == "mxfp8" and act == "mxfp8" else "bf16"


#: Why each rung is there: operand -> tile_n -> a whole layer's time on it, and on the rung that
#: would serve instead, in one run. One H200, uniform routing, 2026-11-30, graphs or eager calls
#: behind a backlog, on the kernels of that day, which were being tuned: the order counts.
REASONS = {
    "e4m3": {
        8: "dsv3-ep8, 8 tokens: 0.306 ms, 4.4 TB/s of weights",
        16: "dsv3-ep8, 32 tokens: 0.325 ms, 4.4 TB/s of weights",
        32: "dsv3-ep8, 64 tokens: 0.343 ms, 0.392 with 16 columns",
        64: "dsv4flash-ep4, 512 tokens: 0.418 ms, 0.441 with 128 columns",
        128: "dsv4flash-ep4, 4096 tokens: 1.31 ms, 1.39 with 192 columns and two warpgroups",
        160: "dsv3-ep8, 512 tokens: 0.471 ms, 0.521 with 128 columns",
        192: "qwen3-30b, 8192 tokens: 0.831 ms, 0.855 with 128 columns",
    },
    "bf16": {
        8: "nvfp4 dsv3-ep8, 8 tokens: 0.203 ms, 0.209 with K in one slice",
        16: "nvfp4 dsv3-ep8, 32 tokens: 0.218 ms, 0.226 with K in two slices",
        32: "nvfp4 dsv3-ep8, 64 tokens: 0.249 ms, 0.317 with K in two slices",
        64: "nvfp4 dsv4flash-ep4, 512 tokens: 0.376 ms, 0.433 with 128 columns",
        128: "nvfp4 qwen3-30b, 1024 tokens: 0.231 ms, 0.234 with 64 columns",
        160: "nvfp4 dsv3-ep8, 512 tokens: 0.641 ms, 0.758 with 192 columns",
        192: "nvfp4 qwen3-30b, 8192 tokens: 1.10 ms, 1.12 with 128 columns",
    },
}


def ladder(operand: str) -> tuple[Config, ...]:
    """Every rung for an operand ("e4m3" or "bf16"), smallest first. Each is right for any token
    count.
    """
    fp8 = operand == "e4m3"
    return (
        # Memory rules: four warpgroups stream the most weight bytes an SM, and a tile of tokens
        # costs nothing.
        Config(8, 4, k_slices=2),
        Config(16, 4),
        Config(32, 4),
        Config(64, 4),
        # Arithmetic rules: the accumulators of a wider tile leave registers for fewer math
        # warpgroups, and tokens take more of the L2 cache's rate than weights do. Scaling 32-blocks
        # in the loop would cost as much as the MMA, so FP8 folds the intermediate first.
        Config(128, 3 if fp8 else 2, cluster=2, fold_intermediate=fp8),
        Config(160, 2, cluster=2, fold_intermediate=fp8),
        Config(192, 2, cluster=2, fold_intermediate=fp8),
    )


def choose_config(problem: Problem, operand: str, tokens: int) -> Config:
    """The rung for a call of ``tokens`` tokens, from host facts alone.

    The smallest tile that holds the mean rows of an expert and two standard deviations more: under
    uniform routing few experts get more, and each tile beyond the first reads the expert's weights
    again. Where no tile holds them, three warpgroups, whose epilogues hide behind one another, if
    their 384 rows a cluster leave little of the weights' rows over; else the widest.
    """
    mean_rows = problem.num_ranks * tokens * problem.top_k / problem.num_experts
    rungs = ladder(operand)
    needed = mean_rows + 2 * math.sqrt(mean_rows)
    for config in rungs[:-1]:
        if config.tile_n >= needed:
            return config
    for config in rungs:
        if config.num_math_warpgroups == 3 and _padding(problem, config) < 1.035:
            return config
    return rungs[-1]


def _padding(problem: Problem, config: Config) -> float:
    """Weight rows that both GEMMs multiply, over those that there are, each by its K."""
    step = config.tile_m * config.cluster
    gemms = (
        (2 * problem.intermediate, problem.hidden),
        (problem.hidden, problem.intermediate),
    )
    padded = sum(math.ceil(rows / step) * step * k for rows, k in gemms)
    return padded / sum(rows * k for rows, k in gemms)
