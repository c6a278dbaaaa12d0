"""What the arches' weight layouts share, as pure torch functions.

Gate and up rows alternate in steps of 8, so that a gate row and its up row, 8 apart in the 16 rows
that a warp gets of an accumulator, meet in one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch

from moe_ep_jit.layout import round_up
from moe_ep_jit.problem import Problem

PAD = 128  # M and K are padded to multiples of this
PAIR_ROWS = 8  # gate rows, then as many up rows


#: Name -> (shape, dtype).
Specs = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Rows(NamedTuple):
    """Rows of a block-scaled matrix, as bytes.

    data  uint8 [rows, K] E4M3, or [rows, K/2] E2M1 pairs with the even k in the low nibble
    sf    uint8: UE8M0 [rows, K/block], or E4M3 [rows, K/16]
    """

    data: torch.Tensor
    sf: torch.Tensor


def interleave_rows(intermediate: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """int64 [2I]: packed row p is row interleave_rows[p] of gate rows first, then up rows."""
    packed = torch.arange(2 * intermediate, device=device)
    pair, r = packed // (2 * PAIR_ROWS), packed % (2 * PAIR_ROWS)
    is_up = r >= PAIR_ROWS
    return pair * PAIR_ROWS + r % PAIR_ROWS + is_up * intermediate


def padded_shape(rows: int, k: int) -> tuple[int, int]:
    """Rows and K after padding."""
    return round_up(rows, PAD), round_up(k, PAD)


def pad(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """``x`` [M, C] with zeros below and to the right; ``x`` itself where nothing is missing."""
    if x.shape == (rows, columns):
        return x
    out = x.new_zeros(rows, columns)
    out[: x.shape[0], : x.shape[1]] = x
    return out


def tensor_specs(problem: Problem, matrix: Callable[[int, int], Specs]) -> Specs:
    """Every tensor that prepared weights hold.

    matrix  what a weight matrix of an expert becomes, from its M and K after padding: suffix of the
            matrix's name -> (shape, dtype)
    """
    experts, specs = problem.num_local_experts, {}
    for name, rows, k in (
        ("w13", 2 * problem.intermediate, problem.hidden),
        ("w2", problem.hidden, problem.intermediate),
    ):
        m, k = padded_shape(rows, k)
        for suffix, (shape, dtype) in matrix(m, k).items():
            specs[name + suffix] = ((experts, *shape), dtype)
        if problem.bias:
            specs[f"{name}_bias"] = ((experts, m), torch.float32)
    if problem.act == "nvfp4":
        specs["h_global_scale"] = ((experts,), torch.float32)
    return specs


@lru_cache
def _swizzle(device: torch.device) -> torch.Tensor:
    """int64 [64]: place (r, p) of 8 rows x 8 chunks takes chunk p ^ r of row r; its own inverse."""
    r, p = torch.arange(8, device=device)[:, None], torch.arange(8, device=device)[None]
    return (8 * r + (p ^ r)).flatten()


def pack_swizzled(data: torch.Tensor, tile_m: int) -> torch.Tensor:
    """Bytes [M, K] -> uint8 [M/tile_m, K/128, tile_m * 128]: rows of 128, swizzled."""
    m, k = data.shape
    tiles, eights = m // tile_m, tile_m // 8
    # Row = 8*i + r; two int64 words are a 16-byte chunk.
    chunks = data.contiguous().view(torch.int64).view(tiles, eights, 8, k // 128, 8, 2)
    chunks = chunks.permute(0, 3, 1, 2, 4, 5).reshape(tiles, k // 128, eights, 64, 2)
    chunks = chunks.index_select(3, _swizzle(data.device))
    return chunks.view(tiles, k // 128, tile_m * 16).view(torch.uint8)


def unpack_swizzled(blobs: torch.Tensor, tile_m: int) -> torch.Tensor:
    """Reverses ``pack_swizzled``."""
    mt, kt, _ = blobs.shape
    eights = tile_m // 8
    chunks = blobs.contiguous().view(torch.int64).view(mt, kt, eights, 64, 2)
    chunks = chunks.index_select(3, _swizzle(blobs.device)).view(mt, kt, eights, 8, 8, 2)
    return chunks.permute(0, 2, 3, 1, 4, 5).reshape(mt * tile_m, kt * 16).view(torch.uint8)
