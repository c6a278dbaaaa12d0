"""Hopper's weight layouts against a scalar re-implementation of their addresses and decoders.

Nothing here asks the packing code where something belongs: rows, k, bytes and bits are walked one
by one, from the layouts as they are written down.
"""

from __future__ import annotations

import math
import struct

import pytest
import torch

from moe_ep_jit import formats
from moe_ep_jit.formats import MXFP8, NVFP4, BlockScaled
from moe_ep_jit.kernels.common.packing import (
    Rows,
    interleave_rows,
    pack_swizzled,
    unpack_swizzled,
)
from moe_ep_jit.kernels.sm90 import packing
from moe_ep_jit.problem import Problem

pytestmark = pytest.mark.cpu

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIZES = [(128, 128), (64, 256), (192, 384), (256, 128)]
SIZE_IDS = [f"m{m}-k{k}" for m, k in SIZES]


def e4m3_value(byte: int) -> float:
    """E4M3 by its definition; no NaN here."""
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -value if byte & 0x80 else value


def bf16_value(bits: int) -> float:
    """bf16 bit pattern -> its value, denormals kept."""
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def bf16_bits(value: float) -> int:
    """A value that bf16 holds exactly -> its bits; an assertion where it does not."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    assert bits & 0xFFFF == 0, f"{value} is not a bf16"
    assert struct.unpack("<f", struct.pack("<I", bits))[0] == value, f"{value} is not an fp32"
    return bits >> 16


def coordinates() -> list[tuple[int, ...]]:
    """Every (warp, rh, g, h, b, kh, c, half) of a blob of 64 rows x 128 k."""
    sizes = (4, 2, 8, 2, 4, 2, 4, 2)
    return list(torch.cartesian_prod(*(torch.arange(s) for s in sizes)).tolist())


def blob_words(blob: torch.Tensor) -> list[int]:
    raw = bytes(blob.tolist())
    return list(struct.unpack(f"<{len(raw) // 4}I", raw))


def random_bytes(shape: tuple[int, ...], gen: torch.Generator, high: int = 256) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=gen, dtype=torch.int32).to(torch.uint8)


def e4m3_bytes(shape: tuple[int, ...], gen: torch.Generator) -> torch.Tensor:
    """Any E4M3 but NaN."""
    data = random_bytes(shape, gen)
    return torch.where((data & 0x7F) == 0x7F, data - 1, data)


def nvfp4_rows(m: int, k: int, gen: torch.Generator) -> Rows:
    """Random codes and scales 0..126, in the form that preparing brings them to."""
    data = random_bytes((m, k // 2), gen)
    sf = random_bytes((m, k // 16), gen, 127)
    sf[torch.rand(sf.shape, generator=gen) < 0.1] = 0
    groups = data.view(m, k // 16, 8)
    groups[sf == 0] = 0
    sf[(groups & 0x77).amax(2) == 0] = 0
    groups[sf == 0] = 0
    return Rows(data, sf)


@pytest.fixture
def gen(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# The decoders, instruction by instruction


def decode_nvfp4_word(q: int) -> list[int]:
    """A value word -> four bf16x2 registers, by the kernel's own operations."""
    return [
        q & 0x81C081C0,
        ((q * 8) & 0xFFFFFFFF) & 0x81C081C0,
        (((q & 0x40074007) * 66) & 0xFFFFFFFF) & 0x81C081C0,
        ((q >> 3) & 0x01C001C0) | ((q * 4) & 0x80008000),
    ]


def decode_nvfp4_scales(w: int) -> tuple[int, int]:
    """A scale word -> bf16x2 (rh 0, rh 1) of the even and of the odd k16 group."""
    swapped = ((w & 0x00FF00FF) << 8) | ((w >> 8) & 0x00FF00FF)
    return (w & 0x0FF00FF0) | 0x70007000, (swapped & 0x0FF00FF0) | 0x70007000


@pytest.mark.parametrize("byte", range(127), ids=lambda b: f"sf{b:02x}")
def test_nvfp4_decoder_is_exact_for_every_code_and_scale(byte: int) -> None:
    """value * scale * 2^-20 as bf16, from the bits that packing writes, for all 16 codes."""
    m, k = 64, 128
    # Code j of row r and k: all 16 codes meet the scale in every half, plane and k16 group.
    codes = (torch.arange(m)[:, None] + torch.arange(k)[None]) % 16
    if byte == 0:
        codes = torch.zeros_like(codes)
    data = (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    sf = torch.full((m, k // 16), byte, dtype=torch.uint8)
    words = blob_words(packing.pack_nvfp4(data, sf)[0, 0])
    values, scales = words[:1024], words[1024:]
    seen = set()
    for index in range(0, 1024, 7):
        b = index % 4
        warp, g, h = index // 128 % 4, index // 16 % 8, index // 512
        registers = decode_nvfp4_word(values[index])
        k16 = 4 * h + b
        pair = decode_nvfp4_scales(scales[(warp * 8 + g) * 4 + k16 // 2])[k16 % 2]
        for j, register in enumerate(registers):
            scale = bf16_value((pair >> (16 * (j % 2))) & 0xFFFF)
            for half in range(2):
                bits = (register >> (16 * half)) & 0xFFFF
                row = 16 * warp + 8 * (j % 2) + g
                column = 64 * h + 16 * b + 8 * (j // 2) + 2 * (index // 4 % 4) + half
                code = int(codes[row, column])
                want = E2M1[code & 7] * e4m3_value(byte) * 2.0**-20 * (-1 if code & 8 else 1)
                product = bf16_value(bits) * scale
                assert product == want
                assert math.copysign(1, product) == math.copysign(1, want)
                bf16_bits(product)
                seen.add(code)
    assert seen == ({0} if byte == 0 else set(range(16)))


def test_nvfp4_every_bit_is_where_the_layout_says(gen: torch.Generator) -> None:
    rows = nvfp4_rows(64, 128, gen)
    words = blob_words(packing.pack_nvfp4(*rows)[0, 0])
    assert len(words) == 1152
    want = [0] * 1152
    planes = {0: (15, 6), 1: (12, 3), 2: (14, 0), 3: (13, 9)}
    for warp, rh, g, h, b, kh, c, half in coordinates():
        row, k = 16 * warp + 8 * rh + g, 64 * h + 16 * b + 8 * kh + 2 * c + half
        code = (int(rows.data[row, k // 2]) >> (4 * (k % 2))) & 15
        sign_bit, magnitude_bit = planes[rh + 2 * kh]
        field = ((code >> 3) << sign_bit) | ((code & 7) << magnitude_bit)
        want[(((h * 4 + warp) * 8 + g) * 4 + c) * 4 + b] |= field << (16 * half)
    for row in range(64):
        warp, rh, g = row // 16, row // 8 % 2, row % 8
        for q in range(4):
            half_word = 0
            for odd in range(2):
                byte = int(rows.sf[row, 2 * q + odd])
                recoded = 0
                if byte:
                    mantissa, exponent = math.frexp(e4m3_value(byte))  # 0.5 <= mantissa < 1
                    recoded = ((exponent - 1 + 9) << 3) | int((mantissa * 2 - 1) * 8)
                shifted = recoded << 4
                half_word |= ((shifted & 0xFF) << 8) | (shifted >> 8) if odd else shifted
            want[1024 + (warp * 8 + g) * 4 + q] |= half_word << (16 * rh)
    assert words == want


def test_exact_every_byte_is_where_the_layout_says(gen: torch.Generator) -> None:
    """... and the decoder's product is value * 2^(block - row's largest), for every element."""
    data = e4m3_bytes((64, 128), gen)
    sf = (100 + torch.randint(0, 40, (64, 4), generator=gen)).to(torch.uint8)
    byte, row_max = packing.exact_scales(sf)
    blob = packing.pack_exact(data, byte)[0, 0].tolist()
    assert len(blob) == 8448
    seen = set()
    for warp, rh, g, h, b, kh, c, half in coordinates():
        row, k = 16 * warp + 8 * rh + g, 64 * h + 16 * b + 8 * kh + 2 * c + half
        word = ((((h * 4 + warp) * 8 + g) * 4 + c) * 4 + b) * 2 + rh
        at = 4 * word + {(0, 0): 0, (1, 0): 1, (0, 1): 2, (1, 1): 3}[kh, half]
        assert blob[at] == int(data[row, k])
        seen.add(at)
        scale_byte = blob[8192 + ((warp * 8 + g) * 2 + rh) * 4 + k // 32]
        assert scale_byte == 247 + int(sf[row, k // 32]) - int(sf[row].max())
        bits = ((blob[at] & 0x80) << 8) | ((blob[at] & 0x7F) << 4)
        product = bf16_value(bits) * bf16_value(scale_byte << 7)
        assert product == e4m3_value(blob[at]) * 2.0 ** (int(sf[row, k // 32]) - int(row_max[row]))
        bf16_bits(product)
    assert len(seen) == 8192


def test_e4m3_every_byte_is_where_the_swizzle_says(gen: torch.Generator) -> None:
    data = random_bytes((128, 256), gen)
    blobs = pack_swizzled(data, 64)
    assert blobs.shape == (2, 2, 8192)
    flat = blobs.tolist()
    for row in range(0, 128, 3):
        for k in range(256):
            r, chunk = row % 64, k % 128 // 16
            at = r * 128 + ((chunk ^ (r % 8)) * 16) + k % 16
            assert flat[row // 64][k // 128][at] == int(data[row, k])


def test_blobs_lie_by_row_then_k(gen: torch.Generator) -> None:
    """Blob (i, j) of a large matrix is the packing of its 64 x 128 part alone."""
    m, k = 192, 384
    e4m3, nvfp4 = e4m3_bytes((m, k), gen), nvfp4_rows(m, k, gen)
    byte = random_bytes((m, k // 32), gen, 248)
    whole = (
        pack_swizzled(e4m3, 64),
        packing.pack_exact(e4m3, byte),
        packing.pack_nvfp4(*nvfp4),
    )
    for i in range(m // 64):
        for j in range(k // 128):
            rows = slice(64 * i, 64 * i + 64)
            part = e4m3[rows, 128 * j : 128 * j + 128].contiguous()
            assert torch.equal(whole[0][i, j], pack_swizzled(part, 64)[0, 0])
            scales = byte[rows, 4 * j : 4 * j + 4].contiguous()
            assert torch.equal(whole[1][i, j], packing.pack_exact(part, scales)[0, 0])
            pairs = nvfp4.data[rows, 64 * j : 64 * j + 64].contiguous()
            scales = nvfp4.sf[rows, 8 * j : 8 * j + 8].contiguous()
            assert torch.equal(whole[2][i, j], packing.pack_nvfp4(pairs, scales)[0, 0])


# Reversing


@pytest.mark.parametrize(("m", "k"), SIZES, ids=SIZE_IDS)
def test_reversed_bit_for_bit(m: int, k: int, gen: torch.Generator) -> None:
    data, byte = random_bytes((m, k), gen), random_bytes((m, k // 32), gen)
    assert torch.equal(unpack_swizzled(pack_swizzled(data, 64), 64), data)
    got_data, got_byte = packing.unpack_exact(packing.pack_exact(data, byte))
    assert torch.equal(got_data, data)
    assert torch.equal(got_byte, byte)
    rows = nvfp4_rows(m, k, gen)
    got = packing.unpack_nvfp4(packing.pack_nvfp4(*rows))
    assert torch.equal(got.data, rows.data)
    assert torch.equal(got.sf, rows.sf)


def test_smallest_nvfp4_scale_is_not_taken_for_zero() -> None:
    """2^-9 and zero share a byte; the codes tell them apart."""
    data = torch.zeros(64, 64, dtype=torch.uint8)
    data[:, 3] = 0x08  # one -0 in the first group
    data[:, 60] = 0x70  # a 6 in the last
    sf = torch.zeros(64, 8, dtype=torch.uint8)
    sf[:, 0] = sf[:, 7] = 1
    got = packing.unpack_nvfp4(packing.pack_nvfp4(data, sf))
    assert torch.equal(got.data, data)
    assert torch.equal(got.sf, sf)


@pytest.mark.parametrize("byte", [0, 1, 126, 127, 128, 254])
def test_power_of_two(byte: int) -> None:
    scale = packing.power_of_two(torch.tensor([byte], dtype=torch.uint8))
    assert float(scale) == 2.0 ** (byte - 127)
    assert int(packing.exponent_of(scale)) == byte


@pytest.mark.parametrize("k", [64, 128, 192, 320], ids=lambda k: f"k{k}")
@pytest.mark.parametrize("m", [64, 128, 320], ids=lambda m: f"m{m}")
@pytest.mark.parametrize("kind", packing.OPERANDS)
def test_pack_rows_pads_k_with_zeros_and_reverses(
    kind: str, m: int, k: int, gen: torch.Generator
) -> None:
    """Sizes that are multiples of 64 alone; exact kinds give q, folded kinds fold(q)."""
    x = torch.randn(m, k, generator=gen) * torch.exp2(
        torch.randint(-6, 6, (m, k // 64), generator=gen).repeat_interleave(64, 1).float()
    )
    x[3] = 0
    x[5, 32:64] = 0
    q = formats.quantize(x, NVFP4 if kind == "nvfp4" else MXFP8)
    want = q
    if kind in packing.FOLD_GROUPS:
        want = formats.fold(q, packing.FOLD_GROUPS[kind])
    rows = Rows(want.data.view(torch.uint8), want.sf.view(torch.uint8))
    blobs, scales = packing.pack_rows(kind, rows, q.global_scale)
    padded_k = -(-k // 128) * 128
    assert blobs.shape == (m // 64, padded_k // 128, packing.BLOB_BYTES[kind])
    group = (padded_k // 128,) if kind == "mxfp8_group128" else ()
    assert scales.shape == (*group, m)
    assert scales.dtype == torch.float32
    got, global_scale = packing.unpack_rows(kind, blobs, scales)
    width = rows.data.shape[1]
    assert torch.equal(got.data[:, :width], rows.data)
    assert torch.equal(got.sf[:, : rows.sf.shape[1]], rows.sf)
    assert not got.data[:, width:].any()
    if kind == "nvfp4":
        assert torch.equal(global_scale, q.global_scale)
        assert torch.equal(scales, q.global_scale * 2.0**20)


def test_exact_drops_only_blocks_that_nothing_can_show(gen: torch.Generator) -> None:
    """247 below the row's largest exponent is out of the decoder's reach, 246 is not."""
    data = e4m3_bytes((64, 128), gen) | 1
    sf = torch.tensor([254, 8, 7, 0], dtype=torch.uint8).expand(64, 4).contiguous()
    blobs, scales = packing.pack_rows("mxfp8_exact", Rows(data, sf))
    got, _ = packing.unpack_rows("mxfp8_exact", blobs, scales)
    assert torch.equal(got.data[:, :64], data[:, :64])
    assert not got.data[:, 64:].any()
    assert torch.equal(got.sf, torch.tensor([254, 8, 0, 0], dtype=torch.uint8).expand(64, 4))


def test_interleave_rows() -> None:
    order = interleave_rows(24).tolist()
    for j in range(3):
        for r in range(8):
            assert order[16 * j + r] == 8 * j + r
            assert order[16 * j + 8 + r] == 24 + 8 * j + r


@pytest.mark.parametrize("kind", packing.OPERANDS)
def test_tensor_specs(kind: str) -> None:
    fmt = "nvfp4" if kind == "nvfp4" else "mxfp8"
    problem = Problem(
        hidden=2880, intermediate=320, num_experts=7, top_k=2, max_tokens=4, format=fmt,
        act=fmt, bias=True,
    )  # fmt: skip
    specs = packing.tensor_specs(problem, kind)
    blob = {"mxfp8_exact": 8448, "nvfp4": 4608}.get(kind, 8192)
    assert specs["w13"] == ((7, 10, 23, blob), torch.uint8)
    assert specs["w2"] == ((7, 46, 3, blob), torch.uint8)
    w2_sf = (7, 3, 2944) if kind == "mxfp8_group128" else (7, 2944)
    assert specs["w2_sf"] == (w2_sf, torch.float32)
    assert specs["w13_bias"] == ((7, 640), torch.float32)
    assert specs["w2_bias"] == ((7, 2944), torch.float32)
    assert ("h_global_scale" in specs) == (kind == "nvfp4")


def test_dequantizing_blobs_by_hand_gives_the_weights(gen: torch.Generator) -> None:
    """decoder's product * row scale == e2m1 * sf * global scale, for a whole packed matrix."""
    q = formats.quantize(torch.randn(64, 128, generator=gen), NVFP4, torch.tensor(1 / 2688.0))
    q = BlockScaled(NVFP4, q.data, q.sf, torch.tensor(0.0009765625))
    rows = Rows(q.data, q.sf.view(torch.uint8))
    blobs, scales = packing.pack_rows("nvfp4", rows, q.global_scale.expand(64))
    want = formats.dequantize(q)
    words = blob_words(blobs[0, 0])
    for index in range(1024):
        b, c, g, warp, h = (
            index % 4, index // 4 % 4, index // 16 % 8, index // 128 % 4, index // 512,
        )  # fmt: skip
        k16 = 4 * h + b
        pair = decode_nvfp4_scales(words[1024 + (warp * 8 + g) * 4 + k16 // 2])[k16 % 2]
        for j, register in enumerate(decode_nvfp4_word(words[index])):
            row = 16 * warp + 8 * (j % 2) + g
            scale = bf16_value((pair >> (16 * (j % 2))) & 0xFFFF)
            for half in range(2):
                k = 64 * h + 16 * b + 8 * (j // 2) + 2 * c + half
                value = bf16_value((register >> (16 * half)) & 0xFFFF) * scale
                assert value * float(scales[row]) == float(want[row, k])
