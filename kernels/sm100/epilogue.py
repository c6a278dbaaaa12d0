"""The epilogue warps' way from an accumulator in tensor memory to ``common/epilogue``."""

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, Uint16, const_expr, cute

from moe_ep_jit import layout
from moe_ep_jit.kernels.common import epilogue, ptx
from moe_ep_jit.kernels.sm100 import tmem


@cute.jit
def store_scales(gemm: cutlass.Constexpr, scales, column, tile, strip, args):
    """The scale bytes of a row's 32 features, where the down GEMM's tile has them.

    A strip has one MXFP8 byte of four in a word, or two NVFP4 bytes.
    """
    if column < tile.rows:
        count = 1 if const_expr(gemm.kind == "mxfp8") else 2
        block = strip * count
        atom = Int64(tile.n_tile) * gemm.h_atoms + (block >> 2)
        at = args.block_sf + atom * gemm.sf_atom_bytes + (block & 3)
        at += layout.sf_place(tile.column + column)
        if const_expr(gemm.kind == "mxfp8"):
            ptx.store(Uint8, at, Uint8(scales))
        else:
            ptx.store(Uint16, at, Uint16(scales))


@cute.jit
def finish_tile(
    gemm: cutlass.Constexpr, tile, accumulator, buffer, parity, place: cutlass.Constexpr, shared,
    args
):  # fmt: skip
    """One warpgroup's 64 weight rows of a tile: all its live columns, a chunk at a time."""
    n, strip = gemm.tile_n, tile.m_tile * 2 + place.wg
    constants = epilogue.fetch(gemm, n, tile, strip, place.thread, args)
    columns = shared.columns + place.wg * (n * 8)
    whole = buffers(gemm, columns, 0, place, shared)
    for i in cutlass.range_constexpr(len(constants.columns)):
        epilogue.share_column(constants.columns[i], i * 128 + place.thread, n, whole)
    epilogue.barrier(place.wg)
    # acquire: the MMAs of the tile
    cute.arch.mbarrier_wait(shared.acc_full + buffer, parity)
    tmem.fence_after()
    # A warp reads the quarter of the lanes that its number in the warpgroup names, half of it each.
    lanes = accumulator + (place.warp * 32 + place.wg * 16) * 65536
    chunks = (tile.rows + (gemm.chunk_n - 1)) // gemm.chunk_n
    for chunk in cutlass.range(chunks, unroll=1):
        first = chunk * gemm.chunk_n
        acc = cute.make_rmem_tensor(gemm.chunk_n // 2, Float32)
        values = tmem.load(lanes + first, gemm.chunk_n)
        for i in cutlass.range_constexpr(gemm.chunk_n // 2):
            acc[i] = values[i]
        if chunk == chunks - 1:
            # release: the MMA warp may overwrite the accumulator
            tmem.fence_before()
            if place.lane == 0:
                arrive(gemm, shared.acc_empty + buffer)
        part = tile._replace(first_row=tile.first_row + first, column=first, rows=tile.rows - first)
        mine = buffers(gemm, columns, first, place, shared)
        if strip * 64 < gemm.m:
            if const_expr(gemm.gate_up):
                epilogue.finish_gate_up(
                    gemm, gemm.chunk_n, acc, part, strip, place, constants, mine, args
                )
            else:
                epilogue.finish_down(
                    gemm, gemm.chunk_n, acc, part, strip, place, constants, mine, args
                )


def buffers(gemm, columns, first, place, shared):
    """This warpgroup's shared addresses, for columns from ``first`` on."""
    return epilogue.Buffers(
        shared.staging + place.wg * gemm.staging_bytes,
        shared.amax + place.wg * (gemm.chunk_n * 16),
        columns + first * 4,
        columns + (gemm.tile_n + first) * 4,
    )


@cute.jit
def arrive(gemm: cutlass.Constexpr, barrier):
    """At the barrier of the CTA that issues the MMAs."""
    if const_expr(gemm.cluster == 1):
        cute.arch.mbarrier_arrive(barrier)
    else:
        cute.arch.mbarrier_arrive(barrier, Int32(0))
