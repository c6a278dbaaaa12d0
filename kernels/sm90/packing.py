"""Hopper's weight layouts as pure torch functions: an unpack reverses each pack bit for bit.

A weight matrix [M, K] becomes blobs of 64 rows x 128 k, uint8 [M/64, K/128, B], M and K padded
with zeros to multiples of 128. Inside a blob row = 16*warp + 8*rh + g (4 warps x 16 rows) and
k = 64*h + 16*b + 8*kh + 2*c + half, which is where wgmma's register operand wants its elements
(lane = 4*g + c, register = rh + 2*kh). Words are 32 bits, little-endian.

kind            operand  B     blob
mxfp8_row       e4m3     8192  row r, 16-byte chunk c at r*128 + ((c ^ (r % 8)) * 16),
                               the 128-byte swizzle
mxfp8_group128  e4m3     8192  the same
mxfp8_exact     bf16     8448  v[h][warp][g][c][b][rh]: bytes (kh, half) = (0,0) (1,0) (0,1) (1,1);
                               then s[warp][g][rh]: byte q scales k 32*q .. 32*q+31
nvfp4           bf16     4608  w[h][warp][g][c][b]: bit planes; then s[warp][g][q]:
                               16 bits for each rh, two bytes each, for k 32*q .. 32*q+31

Beside the blobs is an fp32 scale a row (group128: a row and 128 of K) that the epilogue (the
promotion) applies. Gate and up rows alternate in steps of 8, so that a gate row and its up row,
8 apart in a warp's 16, meet in one thread.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from moe_ep_jit.kernels.common import packing
from moe_ep_jit.kernels.common.packing import (
    PAD,
    Rows,
    Specs,
    pack_swizzled,
    pad,
    unpack_swizzled,
)
from moe_ep_jit.layout import round_up
from moe_ep_jit.problem import Problem

TILE_M = 64  # rows of a blob: one warpgroup's m64
TILE_K = 128

#: What the MMA's token side is, for each kind.
OPERANDS = {
    "mxfp8_row": "e4m3",
    "mxfp8_group128": "e4m3",
    "mxfp8_exact": "bf16",
    "nvfp4": "bf16",
}

BLOB_BYTES = {"mxfp8_row": 8192, "mxfp8_group128": 8192, "mxfp8_exact": 8448, "nvfp4": 4608}

#: K elements that one exponent serves after folding; None: the whole row.
FOLD_GROUPS = {"mxfp8_row": None, "mxfp8_group128": TILE_K}

#: NVFP4's decoder puts E2M1 at bf16 bits 8..6 (value * 2^-126) and multiplies by the bf16 whose
#: exponent field is 0b111 and the byte's five bits, which is scale * 2^106: value * scale * 2^-20.
NVFP4_SCALE_BIAS = 9
NVFP4_EPILOGUE = 2.0**20

#: The exact decoder puts E4M3 at bf16 bits 10..4 (value * 2^-120); a byte of 247 is 2^120.
EXACT_UNIT_BYTE = 247

#: Where sign and 3 magnitude bits of code j = rh + 2*kh go in a 16-bit half: (sign, magnitude).
NVFP4_PLANES = ((15, 6), (12, 3), (14, 0), (13, 9))


def kinds(problem: Problem) -> tuple[str, ...]:
    """The kinds that weights of a resolved problem may take, in the order to try them: those that
    fold while folding costs little, the last in any case.
    """
    if problem.format == "nvfp4":
        return ("nvfp4",)
    folding = tuple(FOLD_GROUPS) if problem.act == "mxfp8" else ()
    return (*folding, "mxfp8_exact")


def tensor_specs(problem: Problem, kind: str) -> Specs:
    """Name -> (shape, dtype) of every tensor that prepared weights of this kind hold."""

    def matrix(m: int, k: int) -> Specs:
        blobs = (m // TILE_M, k // TILE_K, BLOB_BYTES[kind])
        scales = (k // TILE_K, m) if kind == "mxfp8_group128" else (m,)
        return {"": (blobs, torch.uint8), "_sf": (scales, torch.float32)}

    return packing.tensor_specs(problem, matrix)


def power_of_two(byte: torch.Tensor) -> torch.Tensor:
    """UE8M0 bytes 0..254 -> 2^(byte - 127) as fp32, 2^-127 (a denormal) included."""
    bits = byte.to(torch.int32) << 23
    return torch.where(byte == 0, 1 << 22, bits).view(torch.float32)


def exponent_of(scale: torch.Tensor) -> torch.Tensor:
    """fp32 powers of two -> UE8M0 bytes: reverses ``power_of_two``."""
    return (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)


# MXFP8 expanded exactly into bf16


def exact_scales(sf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """UE8M0 [M, K/32] -> (decoder's bytes [M, K/32], the row's largest exponent byte [M]), uint8.

    A block more than 246 below the row's largest gets byte 0; its codes must become zeros.
    """
    row = sf.amax(1)
    byte = EXACT_UNIT_BYTE + sf.to(torch.int16) - row.to(torch.int16)[:, None]
    return byte.clamp_(min=0).to(torch.uint8), row


def pack_exact(data: torch.Tensor, byte: torch.Tensor) -> torch.Tensor:
    """E4M3 uint8 [M, K] and decoder's bytes [M, K/32] -> uint8 [M/64, K/128, 8448]."""
    m, k = data.shape
    mt, kt = m // 64, k // 128
    # mt, warp, rh, g, kt, h, b, kh, c, half -> mt, kt, h, warp, g, c, b, rh, half, kh
    values = data.view(mt, 4, 2, 8, kt, 2, 4, 2, 4, 2).permute(0, 4, 5, 1, 3, 8, 6, 2, 9, 7)
    # mt, warp, rh, g, kt, q -> mt, kt, warp, g, rh, q
    scales = byte.view(mt, 4, 2, 8, kt, 4).permute(0, 4, 1, 3, 2, 5)
    return _join(values, scales, BLOB_BYTES["mxfp8_exact"])


def unpack_exact(blobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [M/64, K/128, 8448] -> E4M3 uint8 [M, K] and decoder's bytes [M, K/32]."""
    mt, kt, _ = blobs.shape
    values = blobs[..., :8192].reshape(mt, kt, 2, 4, 8, 4, 4, 2, 2, 2)
    data = values.permute(0, 3, 7, 4, 1, 2, 6, 9, 5, 8).reshape(mt * 64, kt * 128)
    scales = blobs[..., 8192:].reshape(mt, kt, 4, 8, 2, 4)
    return data, scales.permute(0, 2, 4, 3, 1, 5).reshape(mt * 64, kt * 4)


def _join(values: torch.Tensor, scales: torch.Tensor, blob_bytes: int) -> torch.Tensor:
    """Permuted views [mt, kt, ...] of bytes -> blobs [mt, kt, blob_bytes], values first."""
    mt, kt = values.shape[:2]
    blobs = values.new_empty(mt, kt, blob_bytes)
    num_values = values[0, 0].numel()
    # A view of the blobs of the values' own shape: one strided copy and no temporary.
    blobs[..., :num_values].view(values.shape).copy_(values)
    blobs[..., num_values:].view(scales.shape).copy_(scales)
    return blobs


# NVFP4: bit planes and recoded scales


@lru_cache
def _recode_table(device: torch.device) -> torch.Tensor:
    """uint8 [256]: E4M3 byte of 2^E0 * (1 + M0/8), normalised -> ((E0 + bias) << 3) | M0."""
    table = [0] * 256
    for byte in range(1, 127):
        exponent, mantissa = (byte >> 3) - 7, byte & 7
        if byte < 8:
            top = mantissa.bit_length() - 1
            exponent, mantissa = top - 9, (mantissa << (3 - top)) & 7
        table[byte] = ((exponent + NVFP4_SCALE_BIAS) << 3) | mantissa
    return torch.tensor(table, dtype=torch.uint8, device=device)


@lru_cache
def _unrecode_table(device: torch.device) -> torch.Tensor:
    """uint8 [256]: reverses ``_recode_table`` for scales 1..126 (2^-9 has byte 0)."""
    forward = _recode_table(torch.device("cpu")).tolist()
    table = [0] * 256
    for byte in range(1, 127):
        table[forward[byte]] = byte
    return torch.tensor(table, dtype=torch.uint8, device=device)


def recode_scales(sf: torch.Tensor) -> torch.Tensor:
    """E4M3 bytes 0..126 -> the decoder's; 0 and 2^-9 share byte 0, so scale 0 needs zero codes."""
    return _recode_table(sf.device)[sf.to(torch.int32)]


def pack_nvfp4(data: torch.Tensor, sf: torch.Tensor) -> torch.Tensor:
    """E2M1 pairs uint8 [M, K/2] and E4M3 bytes [M, K/16] -> uint8 [M/64, K/128, 4608].

    Groups of scale 0 must hold zero codes and the reverse, and no scale may be negative or NaN.
    """
    m, k = data.shape[0], 2 * data.shape[1]
    mt, kt = m // 64, k // 128
    # A byte holds half 0 and half 1 of one (rh, kh): mt, warp, rh, g, kt, h, b, kh, c
    pairs = data.view(mt, 4, 2, 8, kt, 2, 4, 2, 4)
    words = torch.zeros(mt, 4, 8, kt, 2, 4, 4, dtype=torch.int32, device=data.device)
    for j, (sign_bit, magnitude_bit) in enumerate(NVFP4_PLANES):
        rh, kh = j & 1, j >> 1
        code = pairs[:, :, rh, :, :, :, :, kh].to(torch.int32)
        code = (code & 0xF) | ((code >> 4) << 16)
        words |= (code & 0x00070007) << magnitude_bit
        words |= (code & 0x00080008) << (sign_bit - 3)
    # mt, warp, g, kt, h, b, c -> mt, kt, h, warp, g, c, b
    words = words.permute(0, 3, 4, 1, 2, 6, 5)
    # mt, warp, rh, g, kt, q, odd
    byte = recode_scales(sf).view(mt, 4, 2, 8, kt, 4, 2).to(torch.int32)
    even, odd = byte[..., 0] << 4, byte[..., 1] << 4
    half = even | (odd >> 8) | ((odd & 0xFF) << 8)
    # mt, warp, g, kt, q -> mt, kt, warp, g, q
    scales = (half[:, :, 0] | (half[:, :, 1] << 16)).permute(0, 3, 1, 2, 4)
    return _join(words, scales, BLOB_BYTES["nvfp4"] // 4).view(torch.uint8)


def unpack_nvfp4(blobs: torch.Tensor) -> Rows:
    """uint8 [M/64, K/128, 4608] -> E2M1 pairs uint8 [M, K/2] and E4M3 bytes [M, K/16]."""
    mt, kt, _ = blobs.shape
    blob_words = blobs.contiguous().view(torch.int32)
    words = blob_words[..., :1024].reshape(mt, kt, 2, 4, 8, 4, 4)
    planes = []
    for sign_bit, magnitude_bit in NVFP4_PLANES:
        code = (words >> magnitude_bit) & 0x00070007
        code |= (words >> (sign_bit - 3)) & 0x00080008
        planes.append(((code & 0xF) | ((code >> 12) & 0xF0)).to(torch.uint8))
    # kh, rh, mt, kt, h, warp, g, c, b -> mt, warp, rh, g, kt, h, b, kh, c
    pairs = torch.stack(planes).view(2, 2, *words.shape).permute(2, 5, 1, 6, 3, 4, 8, 0, 7)
    data = pairs.reshape(mt * 64, kt * 64)

    scales = blob_words[..., 1024:].reshape(mt, kt, 4, 8, 4)
    half = torch.stack((scales & 0xFFFF, (scales >> 16) & 0xFFFF))
    swapped = (half >> 8) | ((half & 0xFF) << 8)
    byte = torch.stack(((half >> 4) & 0xFF, (swapped >> 4) & 0xFF))
    # odd, rh, mt, kt, warp, g, q -> mt, warp, rh, g, kt, q, odd
    byte = byte.permute(2, 4, 1, 5, 3, 6, 0).reshape(mt * 64, kt * 8)
    sf = _unrecode_table(byte.device)[byte]
    # Byte 0 with any code in its group is the scale 2^-9, else a zero group.
    is_zero = data.view(mt * 64, kt * 8, 8).amax(2) == 0
    return Rows(data, torch.where(is_zero & (byte == 0), 0, sf))


# One slab of rows, whatever the kind


def pack_rows(
    kind: str, q: Rows, global_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """64*n rows of any K -> (blobs [n, k/128, B], fp32 scales [rows] or [k/128, rows]), K padded.

    q             for the e4m3 kinds already folded: sf [rows, 1] (mxfp8_row) or [rows, ceil(K/128)]
    global_scale  fp32 [rows], NVFP4 only
    """
    m = q.data.shape[0]
    assert m % TILE_M == 0, f"{m} rows do not fill blobs of {TILE_M}"
    per_byte = 2 if kind == "nvfp4" else 1
    k = round_up(q.data.shape[1] * per_byte, PAD)
    data = pad(q.data, m, k // per_byte)
    if kind == "mxfp8_row":
        return pack_swizzled(data, TILE_M), power_of_two(q.sf)[:, 0]
    if kind == "mxfp8_group128":
        return pack_swizzled(data, TILE_M), power_of_two(q.sf).T
    if kind == "mxfp8_exact":
        byte, row = exact_scales(pad(q.sf, m, k // 32))
        lost = (byte == 0)[:, :, None]
        data = data.view(m, k // 32, 32).masked_fill(lost, 0).view(m, k)
        return pack_exact(data, byte), power_of_two(row)
    assert kind == "nvfp4" and global_scale is not None, f"kind {kind!r} without its global scale"
    return pack_nvfp4(data, pad(q.sf, m, k // 16)), global_scale * NVFP4_EPILOGUE


def unpack_rows(
    kind: str, blobs: torch.Tensor, scales: torch.Tensor
) -> tuple[Rows, torch.Tensor | None]:
    """Reverses ``pack_rows``: (rows with K's padding, global scale fp32 [rows] or None)."""
    if kind == "mxfp8_row":
        return Rows(unpack_swizzled(blobs, TILE_M), exponent_of(scales[:, None])), None
    if kind == "mxfp8_group128":
        return Rows(unpack_swizzled(blobs, TILE_M), exponent_of(scales.T)), None
    if kind == "mxfp8_exact":
        data, byte = unpack_exact(blobs)
        row = exponent_of(scales).to(torch.int16)[:, None]
        sf = torch.where(byte == 0, 0, byte.to(torch.int16) - EXACT_UNIT_BYTE + row)
        return Rows(data, sf.to(torch.uint8)), None
    return unpack_nvfp4(blobs), scales / NVFP4_EPILOGUE
