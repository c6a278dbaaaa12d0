"""Epilogues of a grouped GEMM: one warpgroup's 64 weight rows x its columns, registers to global
memory.

A warp holds 16 weight rows x 8 token columns of each n8 (8 tokens) in four accumulators a thread:

                 columns 2 c, 2 c + 1      c = column_pair = lane % 4
    row r        acc 4 n8,     4 n8 + 1    r = row_in_8 = lane / 4
    row r + 8    acc 4 n8 + 2, 4 n8 + 3

Packed gate/up weights have a gate in row r and its up in row r + 8, so that a thread makes its
features alone: warp w of the four makes features 8 w .. 8 w + 7 of the strip's 32. ``thread`` is
the thread's place in the warpgroup throughout.

``gemm`` is the arch's GroupedGemm. Of it are used: gate_up, act, m, strips, tile_n, chunk_n,
staging_bytes, has_weight_sf, has_row_sf, has_expert_sf, ranks (exchange.Ranks or None) and

h_values      what the intermediate's rows hold: "e4m3", "e2m1" (packed) or "bf16"
store_scales  where their block scales go, ``f(gemm, scales, column, tile, strip, args)``: the UE8M0
              byte of a column's 32 features, or the E4M3 bytes of both 16; None: nowhere
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute, select_

from moe_ep_jit import layout
from moe_ep_jit.kernels.common import exchange, ptx
from moe_ep_jit.kernels.common import quantize as q
from moe_ep_jit.kernels.common.activation import clamp, swiglu

#: Bytes between gate/up's staged rows of 64 bytes: keeps 16-byte alignment and puts the 8 rows that
#: a matrix is stored to into different banks.
PITCH = 64 + 16


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


def fetch_slot(gemm, args, token_row):
    """The slot of a row, and with several ranks its rank above.

    A round that has failed may lack rows, whose slots are anything: then -1, which nobody writes.
    """
    slot = ptx.load(Int32, args.row_slot + token_row)
    if gemm.ranks is None:
        return slot
    return select_(exchange.has_failed(args.control), Int32(-1), slot)


def fetch(gemm, n, tile, strip, thread, args):
    """Begin to read what ``finish`` needs."""
    row = cutlass.min(strip, gemm.strips - 1) * 64 + (thread >> 5) * 16 + ((thread & 31) >> 2)
    at = (Int64(tile.expert) * (gemm.strips * 64) + row) * 4  # the second row is 8 behind
    scales = [Float32(1.0)] * 2  # none, or the main loop has applied them
    if gemm.has_weight_sf:
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
                None if gemm.gate_up else fetch_slot(gemm, args, token_row),
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
        shared.staging + wg * gemm.staging_bytes,
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
    for chunk in cutlass.range_constexpr(0, n, gemm.chunk_n):
        columns = min(gemm.chunk_n, n - chunk)
        features = gated(gemm, acc, chunk, columns, place, constants, buffers, args)
        if const_expr(gemm.act != "bf16"):
            share_maxima(gemm, features, place, buffers)
            barrier(place.wg)
            share_scales(gemm, columns, chunk, tile, strip, place, buffers, args)
            barrier(place.wg)
            features = requantized(gemm, features, place, buffers)
        if const_expr(gemm.h_values != "bf16"):
            stage_bytes(gemm, features, place, buffers)
        else:
            stage_halves(features, place, buffers)
        barrier(place.wg)
        if const_expr(gemm.h_values != "bf16"):
            copy_byte_rows(gemm, columns, chunk, tile, strip, place, buffers, args)
        else:
            copy_half_rows(gemm, columns, chunk, tile, strip, place, buffers, args)
        barrier(place.wg)


@cute.jit
def gated(
    gemm: cutlass.Constexpr, acc, chunk: cutlass.Constexpr, columns: cutlass.Constexpr,
    place: cutlass.Constexpr, constants: cutlass.Constexpr, buffers, args
):  # fmt: skip
    """This thread's features of the chunk's columns: of each n8, columns 2 c and 2 c + 1."""
    gates = [v for first in range(chunk, chunk + columns, 8) for v in (first // 2, first // 2 + 1)]
    for i in cutlass.range_constexpr(len(gates)):
        x_sf = column_scales(gemm, chunk + i // 2 * 8 + (place.thread & 3) * 2, buffers)[i % 2]
        for row in cutlass.range_constexpr(2):
            v = gates[i] + 2 * row
            acc[v] = scaled(acc[v], constants.scales[row], x_sf, constants.biases[row])
    if args.limit < Float32(float("inf")):
        for i in cutlass.range_constexpr(len(gates)):
            v = gates[i]
            acc[v], acc[v + 2] = clamp(acc[v], acc[v + 2], args.limit)
    return [swiglu(acc[v], acc[v + 2], args.alpha, args.beta) for v in gates]


@cute.jit
def share_maxima(gemm: cutlass.Constexpr, features: cutlass.Constexpr, place, buffers):
    """Maxima over a warp's 8 features to shared memory: [entry][warp].

    An entry is a column, and for MXFP8, whose scales ask for no more, a pair of columns as halves.
    """
    lane, warp = place.lane, place.warp
    if const_expr(gemm.act == "mxfp8"):
        pairs = zip(features[::2], features[1::2], strict=True)
        maxima = [q.finite_halves(low, high) for low, high in pairs]
        largest = ptx.max_u16x2
    else:
        maxima = [q.finite_or_nan_bits(feature) for feature in features]
        largest = cutlass.max
    for distance in (4, 8, 16):
        maxima = [largest(m, cute.arch.shuffle_sync_bfly(m, distance)) for m in maxima]
    if lane < 4:
        for i in cutlass.range_constexpr(len(maxima)):
            entry = i * 4 + lane
            if const_expr(gemm.act != "mxfp8"):
                entry = i // 2 * 8 + lane * 2 + i % 2
            ptx.store_shared(Int32, buffers.amax + entry * 16 + warp * 4, maxima[i])


@cute.jit
def share_scales(
    gemm: cutlass.Constexpr, columns: cutlass.Constexpr, chunk: cutlass.Constexpr, tile, strip,
    place: cutlass.Constexpr, buffers, args
):  # fmt: skip
    """Each entry's maxima become what its features are multiplied by, computed once.

    mxfp8  inverse scale of both columns, then both scales
    nvfp4  factor of both blocks of 16, then both scales
    """
    store = gemm.store_scales
    entries = columns // 2 if const_expr(gemm.act == "mxfp8") else columns
    for first in cutlass.range_constexpr(0, entries, 128):
        entry = first + place.thread
        if entry < entries:
            at = ptx.vector(Int32, buffers.amax + entry * 16, 4, ptx.SMEM)
            words = cute.make_rmem_tensor(4, Int32)
            cute.autovec_copy(at, words)
            if const_expr(gemm.act == "mxfp8"):
                largest = words[0]
                for i in cutlass.range_constexpr(1, 4):
                    largest = ptx.max_u16x2(largest, words[i])
                halves = (ptx.mul_const(largest, 1 << 16), ptx.and_const(largest, 0xFFFF0000))
                scales = [q.mxfp8_byte(half) for half in halves]
                for i in cutlass.range_constexpr(2):
                    scale = q.exp2_of_byte(scales[i])
                    words[i] = ptx.bits(q.mxfp8_inverse(scales[i]))
                    words[2 + i] = ptx.bits(scale)
                    if const_expr(store is not None):
                        store(gemm, scales[i], chunk + entry * 2 + i, tile, strip, args)
            else:
                expert_sf = args.expert_sf + Int64(tile.expert) * 4
                inverse_g = q.nvfp4_row_inverse(ptx.load(Float32, expert_sf))
                scales = []
                for i in cutlass.range_constexpr(2):
                    block = cutlass.max(words[2 * i], words[2 * i + 1])
                    s, factor, saturated = q.nvfp4_block(block, inverse_g)
                    count_saturated(saturated, chunk + entry, tile, args)
                    words[2 * i], words[2 * i + 1] = ptx.bits(factor), ptx.bits(s)
                    scales.append(s)
                if const_expr(store is not None):
                    store(gemm, ptx.pack_e4m3x2(*scales), chunk + entry, tile, strip, args)
            cute.autovec_copy(words, at)


@cute.jit
def count_saturated(saturated, column, tile, args):
    if saturated and column < tile.rows:
        counter = args.control + layout.CONTROL_SATURATED * 4
        cute.arch.atomic_add(ptx.ptr(Int32, counter), Int32(1))


def requantized(gemm, features, place, buffers):
    """Features as the intermediate holds them: scaled for E4M3 and E2M1, for bf16 in real units."""
    out = []
    for n8 in range(len(features) // 2):
        pair = n8 * 4 + (place.lane & 3)
        for column in range(2):
            feature = features[2 * n8 + column]
            if gemm.act == "mxfp8":
                words = load_scales(buffers, pair, 0, 4)
                element = ptx.mul(feature, words[column])
                if gemm.h_values == "bf16":
                    element = ptx.mul(ptx.round_to_e4m3(element), words[2 + column])
            else:
                # A block of 16 is two warps' features.
                block = place.warp >> 1
                words = load_scales(buffers, pair * 2 + column, block * 8, 2)
                element = ptx.mul(feature, words[0])
                if gemm.h_values == "bf16":
                    element = ptx.mul(q.round_to_e2m1(element), words[1])
            out.append(element)
    return out


def load_scales(buffers, entry, offset, count):
    """Float32 words of an entry from ``share_scales``."""
    words = cute.make_rmem_tensor(count, Float32)
    at = buffers.amax + entry * 16 + offset
    cute.autovec_copy(ptx.vector(Float32, at, count, ptx.SMEM), words)
    return words


def stage_bytes(gemm, features, place, buffers):
    """E4M3 or E2M1 features to shared memory, a byte each: rows of 32 features of a pair of
    columns, byte by byte in turns.

    One stmatrix element is a feature of both columns of a pair, so that a transposed matrix has the
    8 features of a warp in each row, and two n8 in its rows by turns.
    """
    pack = ptx.pack_e4m3x2 if gemm.h_values == "e4m3" else ptx.pack_e2m1_bytes
    packed = [pack(low, high) for low, high in zip(features[::2], features[1::2], strict=True)]
    if len(packed) % 2:
        packed.append(Int32(0))
    words = [ptx.permute(a, b, 0x5410) for a, b in zip(packed[::2], packed[1::2], strict=True)]
    lane, warp = place.lane, place.warp
    row = (lane & 24) + (lane & 1) * 4 + ((lane & 7) >> 1)
    store_matrices(words, buffers.staging + row * PITCH + warp * 16, 8)


def stage_halves(features, place, buffers):
    """bf16 features to shared memory: a row of 32 a column."""
    pairs = zip(features[::2], features[1::2], strict=True)
    words = [ptx.pack_bf16x2(low, high) for low, high in pairs]
    store_matrices(words, buffers.staging + place.lane * PITCH + place.warp * 16, 8)


def store_matrices(words, address, rows):
    """Transposed matrices, as many at once as there are; each has ``rows`` rows of PITCH bytes."""
    first = 0
    while first < len(words):
        count = next(c for c in (4, 2, 1) if c <= len(words) - first)
        ptx.stmatrix_trans(address + first * rows * PITCH, words[first : first + count])
        first += count


@cute.jit
def copy_byte_rows(
    gemm: cutlass.Constexpr, columns: cutlass.Constexpr, chunk: cutlass.Constexpr, tile, strip,
    place: cutlass.Constexpr, buffers, args
):  # fmt: skip
    """Staged pairs of rows to the intermediate, 16 features of both a thread."""
    for first in cutlass.range_constexpr(0, columns, 128):
        item = first + place.thread
        pair, half = item >> 1, item & 1
        column = chunk + pair * 2
        if item < columns and column < tile.rows:
            words = cute.make_rmem_tensor(8, Int32)
            at = buffers.staging + pair * PITCH + half * 32
            for i in cutlass.range_constexpr(2):
                four = cute.make_rmem_tensor(4, Int32)
                cute.autovec_copy(ptx.vector(Int32, at + i * 16, 4, ptx.SMEM), four)
                for j in cutlass.range_constexpr(4):
                    words[4 * i + j] = four[j]
            packing = 1 if const_expr(gemm.h_values == "e4m3") else 2  # features a byte
            row_bytes = gemm.m // 2 // packing
            place_in_row = strip * (32 // packing) + half * (16 // packing)
            to = args.out + Int64(tile.first_row + column) * row_bytes + place_in_row
            store_every_second(words, to, 0x6420, packing)
            if column + 1 < tile.rows:
                store_every_second(words, to + row_bytes, 0x7531, packing)


def store_every_second(words, address, selector, packing):
    """Every second byte of 8 words, as 16 bytes; packing 2: their low nibbles, as 8."""
    found = [ptx.permute(words[2 * i], words[2 * i + 1], selector) for i in range(4)]
    if packing == 2:
        # Byte 0 of a half takes both nibbles.
        pairs = [word | ptx.shift_right(word, 4) for word in found]
        found = [ptx.permute(pairs[2 * i], pairs[2 * i + 1], 0x6420) for i in range(2)]
    out = cute.make_rmem_tensor(len(found), Int32)
    for i, word in enumerate(found):
        out[i] = word
    cute.autovec_copy(out, ptx.vector(Int32, address, len(found)))


@cute.jit
def copy_half_rows(
    gemm: cutlass.Constexpr, columns: cutlass.Constexpr, chunk: cutlass.Constexpr, tile, strip,
    place: cutlass.Constexpr, buffers, args
):  # fmt: skip
    """Staged rows to the intermediate, 16 bytes a thread."""
    for first in cutlass.range_constexpr(0, columns * 4, 128):
        local, piece = (first + place.thread) >> 2, place.thread & 3
        column = chunk + local
        if local < columns and column < tile.rows:
            words = cute.make_rmem_tensor(4, Int32)
            at = buffers.staging + local * PITCH + piece * 16
            cute.autovec_copy(ptx.vector(Int32, at, 4, ptx.SMEM), words)
            to = args.out + Int64(tile.first_row + column) * gemm.m + strip * 64 + piece * 16
            cute.autovec_copy(words, ptx.vector(Int32, to, 4))


@cute.jit
def finish_down(
    gemm: cutlass.Constexpr, n: cutlass.Constexpr, acc, tile, strip, place: cutlass.Constexpr,
    constants: cutlass.Constexpr, buffers, args
):  # fmt: skip
    """Scale, add the bias, round to bf16; each row's 64 columns to the slot that the row came from.

    The accumulators hold the output transposed; stmatrix turns it, into rows of 128 bytes whose
    16-byte pieces are swizzled by the row, so that neither side meets bank conflicts.
    """
    lane, warp = place.lane, place.warp
    for chunk in cutlass.range_constexpr(0, n, gemm.chunk_n):
        columns = min(gemm.chunk_n, n - chunk)
        packed = []
        for first in cutlass.range_constexpr(chunk, chunk + columns, 8):
            x_sf = column_scales(gemm, first + (lane & 3) * 2, buffers)
            for row in cutlass.range_constexpr(2):
                v = first // 2 + 2 * row
                low, high = (
                    scaled(acc[v + i], constants.scales[row], x_sf[i], constants.biases[row])
                    for i in range(2)
                )
                packed.append(ptx.pack_bf16x2(low, high))
        piece = ((warp * 2 + ((lane >> 3) & 1)) ^ (lane & 7)) * 16
        at = buffers.staging + ((lane >> 4) * 8 + (lane & 7)) * 128 + piece
        for i in cutlass.range_constexpr(0, len(packed), 4):
            ptx.stmatrix_trans(at + i * 4 * 128, packed[i : i + 4])
        barrier(place.wg)
        scatter_rows(gemm, columns, chunk, tile, strip, place.thread, buffers, args)
        barrier(place.wg)


@cute.jit
def scatter_rows(
    gemm: cutlass.Constexpr, columns: cutlass.Constexpr, chunk: cutlass.Constexpr, tile, strip,
    thread, buffers, args
):  # fmt: skip
    """Staged rows to their slots, 16 bytes a thread, 16 rows at once."""
    my_row, piece = thread >> 3, thread & 7
    row = my_row & (columns - 1) if const_expr(columns < 16) else my_row
    staged = buffers.staging + row * 128 + (piece ^ (row & 7)) * 16
    slots = buffers.slots + (chunk + row) * 4
    out = args.out + (strip * 64 + piece * 8) * 2
    live = cutlass.min(tile.rows, chunk + columns)
    # Four rows' loads at once hide one another; those behind the live rows are harmless.
    for batch in cutlass.range_constexpr(0, columns, 64):
        firsts = list(range(batch, min(batch + 64, columns), 16))
        words = cute.make_rmem_tensor((4, len(firsts)), Int32)
        addresses, found = [], []
        for i in cutlass.range_constexpr(len(firsts)):
            at = ptx.vector(Int32, staged + firsts[i] * 128, 4, ptx.SMEM)
            cute.autovec_copy(at, words[None, i])
            slot = ptx.load_shared(Int32, slots + firsts[i] * 4)
            addresses.append(slot_address(gemm, out, slot, args))
            found.append(slot)
        for i in cutlass.range_constexpr(len(firsts)):
            four = [words[j, i] for j in range(4)]
            is_live = chunk + firsts[i] + my_row < live
            if const_expr(gemm.ranks is not None):
                is_live = is_live & (found[i] >= 0)
            ptx.store_words_if(is_live, addresses[i], four)


def slot_address(gemm, out, slot, args):
    """Where a slot's row is, from the address of the first one's: with several ranks, on its
    rank.
    """
    if gemm.ranks is None:
        return out + Int64(slot) * (gemm.m * 2)
    bits = layout.slot_bits(gemm.ranks.num_ranks)
    there = exchange.delta(gemm.ranks, args.control, cutlass.max(slot >> bits, 0))
    return out + there + Int64(slot & ((1 << bits) - 1)) * (gemm.m * 2)
