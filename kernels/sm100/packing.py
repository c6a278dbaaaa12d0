"""Blackwell's weight layouts as pure torch functions: an unpack reverses each pack bit for bit.

A weight matrix [M, K] becomes blobs of 128 rows x 128 bytes of K with their block scales, uint8
[M/128, K/blob_k, B], M and K padded with zeros; one copy brings a blob.

kind   blob_k  B      blob
mxfp8  128     16896  values, then one k-atom of scales
nvfp4  256     18432  values, two a byte, then four k-atoms

values  row r, 16-byte chunk c at r*128 + ((c ^ (r % 8)) * 16): the 128-byte swizzle
k-atom  the scales of four blocks of K, a word a row: row r is word r / 32 of the 16 bytes of lane
        r % 32, which is what tcgen05.cp brings to tensor memory

Row 32*w + 16*h + i of a blob is the matrix's packed row 64*h + 16*w + i: in tensor memory, where a
warp reads 32 lanes, 16 at a time, warp w of epilogue warpgroup h finds the rows that warp w of 64
rows has in a Hopper accumulator, so that one epilogue serves both. Gate and up alternate as there.
"""

from __future__ import annotations

import torch

from moe_ep_jit.kernels.common import packing
from moe_ep_jit.kernels.common.packing import Rows, Specs, pack_swizzled, pad, unpack_swizzled
from moe_ep_jit.layout import ceil_div, round_up
from moe_ep_jit.problem import Problem

TILE_M = 128  # rows of a blob: the lanes of tensor memory
ROW_BYTES = 128  # of K in a blob: one swizzle row
ATOM_BYTES = 512  # the scales of 128 rows and four blocks
FOUR = 4  # blocks of a k-atom

#: What the MMA's token side is, for each kind.
OPERANDS = {"mxfp8": "mxfp8", "nvfp4": "nvfp4"}

#: No scale is folded: the MMA applies them.
FOLD_GROUPS: dict[str, int | None] = {}

#: K elements of a blob, and of a block scale.
BLOB_K = {"mxfp8": 128, "nvfp4": 256}
SF_BLOCK = {"mxfp8": 32, "nvfp4": 16}


def kinds(problem: Problem) -> tuple[str, ...]:
    """The kinds that weights of a resolved problem may take: one."""
    return (problem.format,)


def atoms(kind: str) -> int:
    """K-atoms of a blob."""
    return BLOB_K[kind] // (FOUR * SF_BLOCK[kind])


def blob_bytes(kind: str) -> int:
    return TILE_M * ROW_BYTES + atoms(kind) * ATOM_BYTES


def tensor_specs(problem: Problem, kind: str) -> Specs:
    """Name -> (shape, dtype) of every tensor that prepared weights of this kind hold."""

    def matrix(m: int, k: int) -> Specs:
        blobs = (m // TILE_M, ceil_div(k, BLOB_K[kind]), blob_bytes(kind))
        specs = {"": (blobs, torch.uint8)}
        return specs | ({"_sf": ((m,), torch.float32)} if kind == "nvfp4" else {})

    return packing.tensor_specs(problem, matrix)


def _blob_order(rows: torch.Tensor) -> torch.Tensor:
    """Rows in packed order [128*n, ...] -> in a blob's, tile by tile."""
    return rows.view(-1, 2, 4, 16, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _packed_order(rows: torch.Tensor) -> torch.Tensor:
    """Reverses ``_blob_order``."""
    return rows.view(-1, 4, 2, 16, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def pack_scales(sf: torch.Tensor, kind: str) -> torch.Tensor:
    """uint8 [M, K/block] in blob order -> uint8 [M/128, K/blob_k, atoms * 512]."""
    count = atoms(kind)
    words = sf.view(len(sf) // TILE_M, 4, 32, -1, count, FOUR)
    return words.permute(0, 3, 4, 2, 1, 5).reshape(len(sf) // TILE_M, -1, count * ATOM_BYTES)


def unpack_scales(packed: torch.Tensor, kind: str) -> torch.Tensor:
    """Reverses ``pack_scales``."""
    tiles, blobs, _ = packed.shape
    words = packed.view(tiles, blobs, atoms(kind), 32, 4, FOUR).permute(0, 4, 3, 1, 2, 5)
    return words.reshape(tiles * TILE_M, -1)


def pack_rows(
    kind: str, q: Rows, global_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows of any number and K -> (blobs [ceil(rows/128), k/blob_k, B], fp32 scales [rows] or
    None), both sides padded.

    global_scale  fp32 [rows], NVFP4 only
    """
    m, k_bytes = round_up(q.data.shape[0], TILE_M), round_up(q.data.shape[1], ROW_BYTES)
    values = pack_swizzled(_blob_order(pad(q.data, m, k_bytes)), TILE_M)
    blocks = k_bytes // ROW_BYTES * atoms(kind) * FOUR
    scales = pack_scales(_blob_order(pad(q.sf, m, blocks)), kind)
    return torch.cat((values, scales), 2), global_scale


def unpack_rows(
    kind: str, blobs: torch.Tensor, scales: torch.Tensor | None
) -> tuple[Rows, torch.Tensor | None]:
    """Reverses ``pack_rows``: (rows with all padding, global scale fp32 [rows] or None)."""
    split = TILE_M * ROW_BYTES
    data = unpack_swizzled(blobs[..., :split].contiguous(), TILE_M)
    sf = unpack_scales(blobs[..., split:].contiguous(), kind)
    return Rows(_packed_order(data), _packed_order(sf)), scales
