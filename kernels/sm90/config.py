"""The ladder of Hopper tile shapes and the host rule that picks a rung."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_ep_jit.problem import Problem


@dataclass(frozen=True)
class Config:
    """One rung. Weights are the MMA's M side, tokens its N side.

    tile_n               tokens of a tile: 8, 16, 32, 64, 128, 160 or 192; tiles above 64 with at
                         most half of them multiply half
    num_math_warpgroups  4 or 2, each with 64 weight rows at a time
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
        # Arithmetic rules: the accumulators of a wider tile leave registers for two math
        # warpgroups, and tokens take more of the L2 cache's rate than weights do. Scaling 32-blocks
        # in the loop would cost as much as the MMA, so FP8 folds the intermediate first.
        Config(128, 2, cluster=2, fold_intermediate=fp8),
        Config(160, 2, cluster=2, fold_intermediate=fp8),
        Config(192, 2, cluster=2, fold_intermediate=fp8),
    )


def choose_config(problem: Problem, operand: str, tokens: int) -> Config:
    """The rung for a call of ``tokens`` tokens, from host facts alone.

    The smallest tile that holds the mean rows of an expert and two standard deviations more: under
    uniform routing few experts get more, and each tile beyond the first reads the expert's weights
    again.
    """
    mean_rows = problem.num_ranks * tokens * problem.top_k / problem.num_experts
    rungs = ladder(operand)
    needed = mean_rows + 2 * math.sqrt(mean_rows)
    return next((c for c in rungs[:-1] if c.tile_n >= needed), rungs[-1])
