"""Epilogues of the grouped GEMM: a warpgroup's 64 weight rows x tile_n rows, from registers to global memory.

A thread holds, per 8 rows of the token side (n8), two weight rows (g and g + 8 of its warp's 16) x two neighbouring
columns: accumulator 4 * n8 + 2 * row + column. Packed gate/up weights put a gate and its up there, so a thread makes its
features alone: warp w of the four makes features 8 w .. 8 w + 7 of the strip's 32.
"""

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint16, const_expr, cute, select_

from moe_ep_jit import layout
from moe_ep_jit.kernels.common import ptx
from moe_ep_jit.kernels.common import quantize as q
from moe_ep_jit.kernels.common.activation import swiglu

# Bytes between staged rows of 32 features, so that the four columns a warp writes at once fall into different banks.
PITCH_8BIT = 48
PITCH_16BIT = 80


def barrier(wg):
    """All 128 threads of one math warpgroup: its staged rows are written, or read."""
    cute.arch.barrier(barrier_id=1 + wg, number_of_threads=128)


def row_constants(gemm, tile, strip, warp, g, args):
    """Scale and bias of this thread's two weight rows."""
    row = strip * 64 + warp * 16 + g
    at = (Int64(tile.expert) * (gemm.strips * 64) + row) * 4
    if gemm.group128:  # applied in the main loop
        scales = [Float32(1.0)] * 2
    else:
        scales = [ptx.load(Float32, args.w_sf + at + 32 * i) for i in range(2)]
    return scales, at


@cute.jit
def load_bias(args, at):
    low, high = Float32(0.0), Float32(0.0)
    if args.bias != 0:
        low = ptx.load(Float32, args.bias + at)
        high = ptx.load(Float32, args.bias + at + 32)
    return low, high


def column_scale(gemm, tile, column, args):
    """The token operand's scale of one row of the tile; columns beyond the live rows take the last one's."""
    if gemm.has_row_sf:
        row = tile.first_row + cutlass.min(column, tile.rows - 1)
        return ptx.load(Float32, args.row_sf + Int64(row) * 4)
    if gemm.has_expert_sf:
        return ptx.load(Float32, args.expert_sf + Int64(tile.expert) * 4)
    return None


@cute.jit
def gate_up(gemm: cutlass.Constexpr, acc, tile, strip, wg, thread, staging, amax, args):
    """Scale, bias, SwiGLU, requantize; rows of 32 features to the intermediate.

    staging  shared address, chunk_n * 128 bytes of this warpgroup
    amax     shared address, 4 warps' maxima for each of chunk_n rows
    """
    lane, warp = thread % 32, thread % 128 // 32
    g, pair = lane // 4, lane % 4
    scales, at = row_constants(gemm, tile, strip, warp, g, args)
    gate_bias, up_bias = load_bias(args, at)
    pitch = PITCH_8BIT if gemm.fp8 else PITCH_16BIT
    for chunk in cutlass.range_constexpr(gemm.tile_n // gemm.chunk_n):
        features = []
        for i in cutlass.range_constexpr(gemm.chunk_n // 4):
            n8, column = i // 2, i % 2
            v = 4 * (chunk * gemm.chunk_n // 8 + n8) + column
            x_sf = column_scale(gemm, tile, chunk * gemm.chunk_n + n8 * 8 + pair * 2 + column, args)
            gate_sf, up_sf = (s if x_sf is None else s * x_sf for s in scales)
            features.append(
                swiglu(
                    acc[v] * gate_sf + gate_bias,
                    acc[v + 2] * up_sf + up_bias,
                    args.limit,
                    args.alpha,
                    args.beta,
                )
            )
        if const_expr(gemm.act != "bf16"):
            share_maxima(gemm, features, warp, g, pair, amax, wg)
        for i in cutlass.range_constexpr(gemm.chunk_n // 4):
            local = i // 2 * 8 + pair * 2 + i % 2
            column = chunk * gemm.chunk_n + local
            value = requantize(gemm, features[i], local, column, tile, strip, warp, g, amax, args)
            at_shared = staging + local * pitch + (warp * 8 + g) * (1 if gemm.fp8 else 2)
            if const_expr(gemm.fp8):
                cute.make_tensor(ptx.ptr(Uint8, at_shared, 1, ptx.SMEM), cute.make_layout(1))[0] = (
                    Uint8(value)
                )
            else:
                cute.make_tensor(ptx.ptr(Uint16, at_shared, 2, ptx.SMEM), cute.make_layout(1))[
                    0
                ] = Uint16(value)
        barrier(wg)
        copy_rows(gemm, tile, strip, chunk, thread % 128, staging, pitch, args)
        barrier(wg)


def share_maxima(gemm, features, warp, g, pair, amax, wg):
    """Maximum of each row over a warp's 8 features, to shared memory."""
    bits = q.finite_bits if gemm.act == "mxfp8" else q.finite_or_nan_bits
    for i, feature in enumerate(features):
        mine = bits(feature)
        for distance in (4, 8, 16):
            mine = cutlass.max(mine, cute.arch.shuffle_sync_bfly(mine, distance))
        store_maximum(mine, i // 2 * 8 + pair * 2 + i % 2, warp, g, amax)
    barrier(wg)


@cute.jit
def store_maximum(value, local, warp, g, amax):
    if g == 0:
        at = ptx.ptr(Int32, amax + local * 16 + warp * 4, 4, ptx.SMEM)
        cute.make_tensor(at, cute.make_layout(1))[0] = value


def requantize(gemm, feature, local, column, tile, strip, warp, g, amax, args):
    """One feature as the bits that the intermediate stores."""
    if gemm.act == "bf16":
        return ptx.pack_bf16x2(feature, Float32(0.0))
    warps = cute.make_rmem_tensor(4, Int32)
    cute.autovec_copy(ptx.vector(Int32, amax + local * 16, 4, ptx.SMEM), warps)
    if gemm.act == "mxfp8":
        byte = q.mxfp8_byte(q.maximum([warps[i] for i in range(4)]))
        scaled = ptx.mul(feature, q.mxfp8_inverse(byte))
        if not gemm.fp8:
            return ptx.pack_bf16x2(
                ptx.mul(ptx.round_to_e4m3(scaled), q.exp2_of_byte(byte)), Float32(0.0)
            )
        store_block_scale(gemm, q.exp2_of_byte(byte), column, tile, strip, warp, g, args)
        return ptx.pack_e4m3x2(scaled, Float32(0.0))
    # A block of 16 is two warps' features.
    block = select_(warp < 2, cutlass.max(warps[0], warps[1]), cutlass.max(warps[2], warps[3]))
    inverse_g = q.nvfp4_row_inverse(ptx.load(Float32, args.expert_sf + Int64(tile.expert) * 4))
    s, factor, saturated = q.nvfp4_block(block, inverse_g)
    count_saturated(saturated, column, tile, warp, g, args)
    return ptx.pack_bf16x2(ptx.mul(q.round_to_e2m1(ptx.mul(feature, factor)), s), Float32(0.0))


@cute.jit
def store_block_scale(gemm: cutlass.Constexpr, scale, column, tile, strip, warp, g, args):
    if warp == 0 and g == 0 and column < tile.rows:
        at = Int64(strip) * args.sf_stride + tile.first_sf_row + column
        ptx.store(Float32, args.block_sf + at * 4, scale)


@cute.jit
def count_saturated(saturated, column, tile, warp, g, args):
    if saturated and warp % 2 == 0 and g == 0 and column < tile.rows:
        cute.arch.atomic_add(ptx.ptr(Int32, args.control + layout.CONTROL_SATURATED * 4), Int32(1))


@cute.jit
def copy_rows(gemm: cutlass.Constexpr, tile, strip, chunk: cutlass.Constexpr, thread, staging, pitch: cutlass.Constexpr, args):  # fmt: skip
    """Staged rows of 32 features to the intermediate, 16 bytes a thread."""
    row_bytes = 32 if gemm.fp8 else 64
    pieces = row_bytes // 16
    for first in cutlass.range_constexpr(0, gemm.chunk_n * pieces, 128):
        index = first + thread
        local, piece = index // pieces, index % pieces
        column = chunk * gemm.chunk_n + local
        if local < gemm.chunk_n and column < tile.rows:
            words = cute.make_rmem_tensor(4, Int32)
            cute.autovec_copy(
                ptx.vector(Int32, staging + local * pitch + piece * 16, 4, ptx.SMEM), words
            )
            row = Int64(tile.first_row + column)
            address = args.out + row * (gemm.m // 64 * row_bytes) + strip * row_bytes + piece * 16
            cute.autovec_copy(words, ptx.vector(Int32, address, 4))


@cute.jit
def down(gemm: cutlass.Constexpr, acc, tile, strip, wg, thread, staging, args):
    """Scale, bias, round to bf16; each row's 64 columns to the slot that the row came from.

    The accumulators hold the output transposed; stmatrix turns it, into rows of 128 bytes whose 16-byte pieces are
    swizzled by the row so that neither side meets bank conflicts.
    """
    lane, warp = thread % 32, thread % 128 // 32
    g, pair = lane // 4, lane % 4
    scales, at = row_constants(gemm, tile, strip, warp, g, args)
    biases = load_bias(args, at)
    for chunk in cutlass.range_constexpr(gemm.tile_n // gemm.chunk_n):
        packed = []
        for n8 in cutlass.range_constexpr(gemm.chunk_n // 8):
            column = chunk * gemm.chunk_n + n8 * 8 + pair * 2
            x_sf = [column_scale(gemm, tile, column + i, args) for i in range(2)]
            for row in cutlass.range_constexpr(2):
                v = 4 * (chunk * gemm.chunk_n // 8 + n8) + 2 * row
                low, high = (
                    acc[v + i] * (scales[row] if x_sf[i] is None else scales[row] * x_sf[i])
                    + biases[row]
                    for i in range(2)
                )
                packed.append(ptx.pack_bf16x2(low, high))
        for n8 in cutlass.range_constexpr(0, gemm.chunk_n // 8, 2):
            local = n8 * 8 + lane // 16 * 8 + lane % 8
            piece = warp * 2 + lane // 8 % 2
            if const_expr(gemm.chunk_n == 8):
                local = lane % 8
                ptx.stmatrix_x2_trans(staging + local * 128 + (piece ^ (lane % 8)) * 16, *packed)
            else:
                ptx.stmatrix_x4_trans(
                    staging + local * 128 + (piece ^ (lane % 8)) * 16, *packed[2 * n8 : 2 * n8 + 4]
                )
        barrier(wg)
        scatter_rows(gemm, tile, strip, chunk, thread % 128, staging, args)
        barrier(wg)


@cute.jit
def scatter_rows(gemm: cutlass.Constexpr, tile, strip, chunk: cutlass.Constexpr, thread, staging, args):  # fmt: skip
    """Staged rows to their slots, 16 bytes a thread."""
    for first in cutlass.range_constexpr(0, gemm.chunk_n * 8, 128):
        index = first + thread
        local, piece = index // 8, index % 8
        column = chunk * gemm.chunk_n + local
        if local < gemm.chunk_n and column < tile.rows:
            words = cute.make_rmem_tensor(4, Int32)
            at = staging + local * 128 + (piece ^ (local % 8)) * 16
            cute.autovec_copy(ptx.vector(Int32, at, 4, ptx.SMEM), words)
            slot = ptx.load(Int32, args.row_slot + Int64(tile.first_row + column) * 4)
            address = args.out + (Int64(slot) * gemm.m + strip * 64 + piece * 8) * 2
            cute.autovec_copy(words, ptx.vector(Int32, address, 4))
