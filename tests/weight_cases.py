"""Layers' weights and small helpers that the tests of preparing share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moe_ep_jit import formats
from moe_ep_jit.formats import MXFP8, NVFP4, BlockScaled
from moe_ep_jit.problem import Problem

ARCHES = pytest.mark.parametrize("arch", [None, "sm_90a"], ids=["plain", "sm90"])
FORMATS = pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
#: Both formats and every kind of activations that changes what is prepared.
ACTS = pytest.mark.parametrize(
    ("fmt", "act"), [("mxfp8", "mxfp8"), ("mxfp8", "bf16"), ("nvfp4", "nvfp4")], ids=str
)


@pytest.fixture
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


def random_biases(problem: Problem) -> dict[str, torch.Tensor]:
    """``w13_bias`` and ``w2_bias`` as ``prepare_weights`` takes them."""
    experts, hidden, inter = problem.num_local_experts, problem.hidden, problem.intermediate
    return {"w13_bias": torch.randn(experts, 2 * inter), "w2_bias": torch.randn(experts, hidden)}


def copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in tensors.items()}


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
