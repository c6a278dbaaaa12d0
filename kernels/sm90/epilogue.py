"""Epilogues of the grouped GEMM: one warpgroup's 64 weight rows x tile_n, registers to global
memory.

A warp holds 16 weight rows x 8 token columns of each n8 (8 tokens) in four accumulators a thread:

                 columns 2 c, 2 c + 1      c = column_pair = lane % 4
    row r        acc 4 n8,     4 n8 + 1    r = row_in_8 = lane / 4
    row r + 8    acc 4 n8 + 2, 4 n8 + 3

Packed gate/up weights have a gate in row r and its up in row r + 8, so that a thread makes its
features alone: warp w of the four makes features 8 w .. 8 w + 7 of the strip's 32. ``thread`` is
the thread's place in the warpgroup throughout.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint16, const_expr, cute, select_

from moe_ep_jit import layout
from moe_ep_jit.kernels.common import ptx
from moe_ep_jit.kernels.common import quantize as q
from moe_ep_jit.kernels.common.activation import swiglu

# Bytes between staged rows of 32 features: 16 more than they take, which keeps 16-byte alignment
# and puts the four columns that a warp writes at once into different banks.
PITCH_8BIT = 32 + 16
PITCH_16BIT = 64 + 16


class Constants(NamedTuple):
    """What the epilogue needs from global memory, fetched before the main loop hides the latency.

    scales, biases  of this thread's two weight rows
    columns         (scale, slot) of token rows thread, thread + 128, ...: shared out in ``finish``
    """

    scales: Any
    biases: Any
    columns: Any


class Buffers(NamedTuple):
    """Shared addresses of one warpgroup."""

    staging: Int32
    amax: Int32
    scales: Int32
    slots: Int32


def barrier(wg):
    """All threads of one math warpgroup: its shared buffers are written, or read."""
    cute.arch.barrier(barrier_id=1 + wg, number_of_threads=128)


@cute.jit
def load_or_zero(base, offset):
    """Float32 at base + offset, 0 where there is no base."""
    value = Float32(0.0)
    if base != 0:
        value = ptx.load(Float32, base + offset)
    return value


def fetch(gemm, n, tile, strip, thread, args):
    """Begin to read what ``finish`` needs."""
    row = cutlass.min(strip, gemm.strips - 1) * 64 + thread // 32 * 16 + thread % 32 // 4
    at = (Int64(tile.expert) * (gemm.strips * 64) + row) * 4  # the second row is 8 behind
    scales = [Float32(1.0)] * 2  # of groups of 128: the main loop has applied them
    if not gemm.group128:
        scales = [ptx.load(Float32, args.w_sf + at + 8 * 4 * i) for i in range(2)]
    if gemm.has_expert_sf:
        expert_sf = ptx.load(Float32, args.expert_sf + Int64(tile.expert) * 4)
        scales = [s * expert_sf for s in scales]
    biases = [load_or_zero(args.bias, at + 8 * 4 * i) for i in range(2)]
    columns = []
    for first in range(0, n, 128):
        # Columns beyond the live rows take the last one's; nobody sees what becomes of them.
        token_row = Int64(tile.first_row + cutlass.min(first + thread, tile.rows - 1)) * 4
        columns.append(
            (
                ptx.load(Float32, args.row_sf + token_row) if gemm.has_row_sf else None,
                None if gemm.gate_up else ptx.load(Int32, args.row_slot + token_row),
            )
        )
    return Constants(scales, biases, columns)


@cute.jit
def finish(
    gemm: cutlass.Constexpr, n: cutlass.Constexpr, acc, tile, strip, place: cutlass.Constexpr,
    constants: cutlass.Constexpr, shared, args
):  # fmt: skip
    """Scale, add the bias and write ``n`` columns; the last tile's padding strips write nothing."""
    wg, thread = place.wg, place.thread
    columns = shared.columns + wg * (gemm.tile_n * 8)
    buffers = Buffers(
        shared.staging + wg * (gemm.chunk_n * 128),
        shared.amax + wg * (gemm.chunk_n * 16),
        columns,
        columns + gemm.tile_n * 4,
    )
    if strip * 64 < gemm.m:
        for i in cutlass.range_constexpr(len(constants.columns)):
            share_column(constants.columns[i], i * 128 + thread, n, buffers)
        barrier(wg)
        if const_expr(gemm.gate_up):
            finish_gate_up(gemm, n, acc, tile, strip, place, constants, buffers, args)
        else:
            finish_down(gemm, n, acc, tile, strip, place, constants, buffers, args)


@cute.jit
def share_column(column: cutlass.Constexpr, index, n: cutlass.Constexpr, buffers):
    scale, slot = column
    if index < n:
        if const_expr(scale is not None):
            ptx.store_shared(Float32, buffers.scales + index * 4, scale)
        if const_expr(slot is not None):
            ptx.store_shared(Int32, buffers.slots + index * 4, slot)


def column_scales(gemm, column, buffers):
    """The token operand's scales of two neighbouring rows of the tile, None where it has none."""
    if not gemm.has_row_sf:
        return None, None
    pair = cute.make_rmem_tensor(2, Float32)
    cute.autovec_copy(ptx.vector(Float32, buffers.scales + column * 4, 2, ptx.SMEM), pair)
    return pair[0], pair[1]


def scaled(value, row_scale, column_scale, bias):
    """An accumulator in real units."""
    return value * (row_scale if column_scale is None else row_scale * column_scale) + bias


@cute.jit
def finish_gate_up(
    gemm: cutlass.Constexpr, n: cutlass.Constexpr, acc, tile, strip, place: cutlass.Constexpr,
    constants: cutlass.Constexpr, buffers, args
):  # fmt: skip
    """Scale, bias, SwiGLU, requantize; each row's 32 features to the intermediate."""
    wg, thread = place.wg, place.thread
    warp, row_in_8, column_pair = thread // 32, thread % 32 // 4, thread % 4
    pitch = PITCH_8BIT if gemm.fp8 else PITCH_16BIT
    for chunk in cutlass.range_constexpr(n // gemm.chunk_n):
        features = []
        for n8 in cutlass.range_constexpr(gemm.chunk_n // 8):
            first = chunk * gemm.chunk_n + n8 * 8
            x_sf = column_scales(gemm, first + column_pair * 2, buffers)
            for column in cutlass.range_constexpr(2):
                v = first // 2 + column
                gate, up = (
                    scaled(acc[v + 2 * row], constants.scales[row], x_sf[column],
                    constants.biases[row])
                    for row in range(2)
                )  # fmt: skip
                features.append(swiglu(gate, up, args.limit, args.alpha, args.beta))
        if const_expr(gemm.act != "bf16"):
            share_maxima(gemm, features, warp, row_in_8, column_pair, buffers)
            barrier(wg)
        for i in cutlass.range_constexpr(gemm.chunk_n // 4):
            local = i // 2 * 8 + column_pair * 2 + i % 2
            column = chunk * gemm.chunk_n + local
            bits = requantize(
                gemm, features[i], local, column, tile, strip, warp, row_in_8, buffers, args
            )
            at = buffers.staging + local * pitch + (warp * 8 + row_in_8) * (1 if gemm.fp8 else 2)
            if const_expr(gemm.fp8):
                ptx.store_shared(Uint8, at, Uint8(bits))
            else:
                ptx.store_shared(Uint16, at, Uint16(bits))
        barrier(wg)
        copy_rows(gemm, tile, strip, chunk, thread, buffers, pitch, args)
        barrier(wg)


def share_maxima(gemm, features, warp, row_in_8, column_pair, buffers):
    """Maximum of each row over a warp's 8 features, to shared memory."""
    bits = q.finite_bits if gemm.act == "mxfp8" else q.finite_or_nan_bits
    for i, feature in enumerate(features):
        largest = bits(feature)
        for distance in (4, 8, 16):
            largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, distance))
        store_maximum(largest, i // 2 * 8 + column_pair * 2 + i % 2, warp, row_in_8, buffers)


@cute.jit
def store_maximum(value, local, warp, row_in_8, buffers):
    if row_in_8 == 0:
        ptx.store_shared(Int32, buffers.amax + local * 16 + warp * 4, value)


def requantize(gemm, feature, local, column, tile, strip, warp, row_in_8, buffers, args):
    """One feature as the bits that the intermediate stores."""
    zero = Float32(0.0)
    if gemm.act == "bf16":
        return ptx.pack_bf16x2(feature, zero)
    warps = cute.make_rmem_tensor(4, Int32)
    cute.autovec_copy(ptx.vector(Int32, buffers.amax + local * 16, 4, ptx.SMEM), warps)
    if gemm.act == "mxfp8":
        byte = q.mxfp8_byte(q.maximum([warps[i] for i in range(4)]))
        element = ptx.mul(feature, q.mxfp8_inverse(byte))
        if not gemm.fp8:
            value = ptx.mul(ptx.round_to_e4m3(element), q.exp2_of_byte(byte))
            return ptx.pack_bf16x2(value, zero)
        store_block_scale(q.exp2_of_byte(byte), column, tile, strip, warp, row_in_8, args)
        return ptx.pack_e4m3x2(element, zero)
    # A block of 16 is two warps' features.
    low, high = cutlass.max(warps[0], warps[1]), cutlass.max(warps[2], warps[3])
    inverse_g = q.nvfp4_row_inverse(ptx.load(Float32, args.expert_sf + Int64(tile.expert) * 4))
    s, factor, saturated = q.nvfp4_block(select_(warp < 2, low, high), inverse_g)
    count_saturated(saturated, column, tile, warp, row_in_8, args)
    return ptx.pack_bf16x2(ptx.mul(q.round_to_e2m1(ptx.mul(feature, factor)), s), zero)


@cute.jit
def store_block_scale(scale, column, tile, strip, warp, row_in_8, args):
    """The scale of a row's 32 features, by one of the threads that know it."""
    if warp == 0 and row_in_8 == 0 and column < tile.rows:
        at = Int64(strip) * args.sf_stride + tile.first_sf_row + column
        ptx.store(Float32, args.block_sf + at * 4, scale)


@cute.jit
def count_saturated(saturated, column, tile, warp, row_in_8, args):
    if saturated and warp % 2 == 0 and row_in_8 == 0 and column < tile.rows:
        counter = args.control + layout.CONTROL_SATURATED * 4
        cute.arch.atomic_add(ptx.ptr(Int32, counter), Int32(1))


@cute.jit
def copy_rows(
    gemm: cutlass.Constexpr, tile, strip, chunk: cutlass.Constexpr, thread, buffers,
    pitch: cutlass.Constexpr, args,
):  # fmt: skip
    """Staged rows of 32 features to the intermediate, 16 bytes a thread."""
    row_bytes = 32 if gemm.fp8 else 64
    pieces = row_bytes // 16
    for first in cutlass.range_constexpr(0, gemm.chunk_n * pieces, 128):
        local, piece = (first + thread) // pieces, thread % pieces
        column = chunk * gemm.chunk_n + local
        if local < gemm.chunk_n and column < tile.rows:
            words = cute.make_rmem_tensor(4, Int32)
            at = buffers.staging + local * pitch + piece * 16
            cute.autovec_copy(ptx.vector(Int32, at, 4, ptx.SMEM), words)
            row = Int64(tile.first_row + column) * (gemm.m // 64 * row_bytes)
            address = args.out + row + strip * row_bytes + piece * 16
            cute.autovec_copy(words, ptx.vector(Int32, address, 4))


@cute.jit
def finish_down(
    gemm: cutlass.Constexpr, n: cutlass.Constexpr, acc, tile, strip, place: cutlass.Constexpr,
    constants: cutlass.Constexpr, buffers, args
):  # fmt: skip
    """Scale, bias, round to bf16; each row's 64 columns to the slot that the row came from.

    The accumulators hold the output transposed; stmatrix turns it, into rows of 128 bytes whose
    16-byte pieces are swizzled by the row, so that neither side meets bank conflicts.
    """
    wg, thread, lane = place.wg, place.thread, place.lane
    warp, column_pair = thread // 32, thread % 4
    for chunk in cutlass.range_constexpr(n // gemm.chunk_n):
        packed = []
        for n8 in cutlass.range_constexpr(gemm.chunk_n // 8):
            first = chunk * gemm.chunk_n + n8 * 8
            x_sf = column_scales(gemm, first + column_pair * 2, buffers)
            for row in cutlass.range_constexpr(2):
                v = first // 2 + 2 * row
                low, high = (
                    scaled(acc[v + i], constants.scales[row], x_sf[i], constants.biases[row])
                    for i in range(2)
                )
                packed.append(ptx.pack_bf16x2(low, high))
        piece = ((warp * 2 + lane // 8 % 2) ^ (lane % 8)) * 16
        for n8 in cutlass.range_constexpr(0, gemm.chunk_n // 8, 2):
            matrices = packed[2 * n8 : 2 * n8 + 4]
            if const_expr(gemm.chunk_n == 8):
                at = buffers.staging + lane % 8 * 128 + piece
                ptx.stmatrix_x2_trans(at, *matrices)
            else:
                at = buffers.staging + (n8 * 8 + lane // 16 * 8 + lane % 8) * 128 + piece
                ptx.stmatrix_x4_trans(at, *matrices)
        barrier(wg)
        scatter_rows(gemm, tile, strip, chunk, thread, buffers, args)
        barrier(wg)


@cute.jit
def scatter_rows(
    gemm: cutlass.Constexpr, tile, strip, chunk: cutlass.Constexpr, thread, buffers, args
):
    """Staged rows to their slots, 16 bytes a thread."""
    for first in cutlass.range_constexpr(0, gemm.chunk_n * 8, 128):
        local, piece = (first + thread) // 8, thread % 8
        column = chunk * gemm.chunk_n + local
        if local < gemm.chunk_n and column < tile.rows:
            words = cute.make_rmem_tensor(4, Int32)
            at = buffers.staging + local * 128 + (piece ^ (local % 8)) * 16
            cute.autovec_copy(ptx.vector(Int32, at, 4, ptx.SMEM), words)
            slot = ptx.load_shared(Int32, buffers.slots + column * 4)
            address = args.out + (Int64(slot) * gemm.m + strip * 64 + piece * 8) * 2
            cute.autovec_copy(words, ptx.vector(Int32, address, 4))
