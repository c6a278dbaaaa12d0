"""The ladder of Blackwell tile shapes and the host rule that picks a rung."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_ep_jit.problem import Problem


@dataclass(frozen=True)
class Config:
    """One rung. Weights are the MMA's M side, 128 rows a CTA; tokens its N side.

    tile_n   tokens of a tile: 8, 16, 32, 64, 128 or 192
    cluster  CTAs of one MMA: 1, or 2 that multiply 256 weight rows and hold half of the tokens each
    """

    tile_n: int
    cluster: int = 1


#: What the experts' activations may be, for each weight format: the MMA that scales blocks takes
#: one format on both sides, and 16-bit activations with 4-bit weights not at all.
ACTS = {"mxfp8": ("mxfp8",), "nvfp4": ("nvfp4",)}

#: Rows an expert above which MXFP8 is faster than NVFP4: none, whose bytes are half and whose rate
#: is twice MXFP8's.
MXFP8_FASTER_ABOVE = math.inf

#: What the MMA's token side may be.
OPERANDS = ("mxfp8", "nvfp4")


def operand_of(fmt: str, act: str) -> str:
    """The MMA's token side."""
    return fmt


#: Why each rung is there: computed from a B200's data sheet, never measured (docs/blackwell.md).
_REASONS = {
    8: "few rows an expert: weights alone decide, 11 or more stages of them in flight",
    16: "the same at 9 to 16 rows an expert",
    32: "the same at 17 to 32 rows an expert",
    64: "up to 64 rows an expert, where weights still decide",
    128: "two CTAs to an MMA: half of the tokens' shared memory traffic in each",
    192: "the widest of whole 64s of which two accumulators and the scales fit into 512 columns",
}
REASONS = dict.fromkeys(OPERANDS, _REASONS)


def ladder(operand: str) -> tuple[Config, ...]:
    """Every rung for an operand ("mxfp8" or "nvfp4"), smallest first. Each is right for any token
    count.
    """
    return (
        # Memory rules: a tile of tokens costs nothing, and whole stages of weights are in flight.
        Config(8),
        Config(16),
        Config(32),
        Config(64),
        # Arithmetic rules: 256 x N halves what each tensor core reads of the tokens.
        Config(128, cluster=2),
        Config(192, cluster=2),
    )


def choose_config(problem: Problem, operand: str, tokens: int) -> Config:
    """The rung for a call of ``tokens`` tokens, from host facts alone.

    The smallest tile that holds the mean rows of an expert and two standard deviations more, since
    each tile beyond the first reads the expert's weights again; else the widest.
    """
    mean_rows = problem.num_ranks * tokens * problem.top_k / problem.num_experts
    needed = mean_rows + 2 * math.sqrt(mean_rows)
    rungs = ladder(operand)
    return next((config for config in rungs if config.tile_n >= needed), rungs[-1])
