"""The math warpgroups' way through K: FP8 products promoted to fp32, or weights decoded to bf16.

``gemm`` is the GroupedGemm whose tile it is, ``place`` the thread's; ``acc`` are a thread's part of
64 weight rows x the tile's columns, four of each n8 (``epilogue`` shows which).
"""

import cutlass
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, const_expr, cute, select_
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from moe_ep_jit.kernels.common import ptx


@cute.jit
def advance(gemm: cutlass.Constexpr, stage, phase):
    """The stage after this one, and the parity that its barriers are waited for with."""
    stage += 1
    if stage == gemm.num_stages:
        stage = Int32(0)
        phase = phase ^ 1
    return stage, phase


@cute.jit
def release(gemm: cutlass.Constexpr, empty, lane):
    """This warp is done with a stage: tell load, in a cluster of both CTAs."""
    if lane < gemm.cluster:
        if const_expr(gemm.cluster == 1):
            cute.arch.mbarrier_arrive(empty)
        else:
            cute.arch.mbarrier_arrive(empty, lane)


def accumulators(n):
    """A thread's part of 64 x n."""
    return cute.make_rmem_tensor(((2, 2, n // 8), 1, 1), Float32)


@cute.jit
def begin(gemm: cutlass.Constexpr, temporary, stage, place: cutlass.Constexpr, shared):
    """Issue the next tile's first k-block, all its columns; its stage is full."""
    operands = operands_e4m3(gemm, gemm.tile_n, place, shared)
    a_stage = stage * gemm.num_wgs + place.wg
    issue_e4m3(gemm, operands, [temporary], 0, 4, a_stage, stage)


@cute.jit
def end_begun(
    gemm: cutlass.Constexpr, acc: cutlass.Constexpr, stage, phase, place: cutlass.Constexpr, shared
):  # fmt: skip
    """The first k-block's sums are the accumulators that the tile goes on with."""
    warpgroup.wait_group(0)
    # release: this warp's wgmmas on the stage are done
    release(gemm, shared.empty + stage, place.lane)
    stage, phase = advance(gemm, stage, phase)
    for v in cutlass.range_constexpr(cute.size(acc[0])):
        acc[0][v] = acc[1][v] + Float32(0.0)
    return stage, phase


def partial_address(gemm, shared, strip, k_slice, thread, i):
    """Of 16 bytes of a slice's accumulators, those of a warp side by side."""
    wg = strip * gemm.k_slices + k_slice
    return shared.partials + wg * (256 * gemm.tile_n) + (i * 128 + thread) * 16


@cute.jit
def share_partial(gemm: cutlass.Constexpr, acc, count, place: cutlass.Constexpr, shared):
    """This slice's accumulators to shared memory, once those of the tile before were read."""
    # acquire: sum_partials of the tile before, in another slice; the first finds it free
    cute.arch.mbarrier_wait(shared.partials_empty + place.strip, (count & 1) ^ 1)
    words = cute.make_rmem_tensor(4, Float32)
    for i in cutlass.range_constexpr(gemm.tile_n // 8):
        for j in cutlass.range_constexpr(4):
            words[j] = acc[4 * i + j]
        at = partial_address(gemm, shared, place.strip, place.k_slice, place.thread, i)
        cute.autovec_copy(words, ptx.vector(Float32, at, 4, ptx.SMEM))
    cute.arch.sync_warp()
    if place.lane == 0:
        # release: to sum_partials of the slice whose turn it is
        cute.arch.mbarrier_arrive(shared.partials_full + place.strip)


@cute.jit
def sum_partials(gemm: cutlass.Constexpr, acc, count, place: cutlass.Constexpr, shared):
    """All slices' accumulators, summed in the order of the slices whoever's turn it is."""
    cute.arch.mbarrier_wait(shared.partials_full + place.strip, count & 1)
    words = cute.make_rmem_tensor(4, Float32)
    for i in cutlass.range_constexpr(gemm.tile_n // 8):
        for k_slice in cutlass.range_constexpr(gemm.k_slices):
            at = partial_address(gemm, shared, place.strip, k_slice, place.thread, i)
            cute.autovec_copy(ptx.vector(Float32, at, 4, ptx.SMEM), words)
            for j in cutlass.range_constexpr(4):
                before = Float32(0.0) if const_expr(k_slice == 0) else acc[4 * i + j]
                acc[4 * i + j] = before + words[j]
    cute.arch.sync_warp()
    if place.lane == 0:
        # release: to share_partial of every slice
        cute.arch.mbarrier_arrive(shared.partials_empty + place.strip)


def token_fragments(gemm, tiled_mma, n, shared, thread):
    """The first ``n`` rows of every token tile as wgmma's B."""
    x = shared.x
    if n != gemm.tile_n:
        x = cute.local_tile(x, (n, gemm.token_k, cute.size(x, mode=[2])), (0, 0, 0))
    return tiled_mma.make_fragment_B(tiled_mma.get_slice(thread).partition_B(x))


def operands_e4m3(gemm, n, place, shared):
    """The MMA of ``n`` columns and its operands."""
    major = OperandMajorMode.K
    op = warpgroup.MmaF8Op(
        Float8E4M3FN, Float8E4M3FN, Float32, (64, n, 32), warpgroup.OperandSource.SMEM,
        major, major,
    )  # fmt: skip
    tiled_mma = cute.make_tiled_mma(op)
    thr_mma = tiled_mma.get_slice(place.thread)
    tA = tiled_mma.make_fragment_A(thr_mma.partition_A(shared.a))
    return tiled_mma, tA, token_fragments(gemm, tiled_mma, n, shared, place.thread)


@cute.jit
def k_loop_e4m3(
    gemm: cutlass.Constexpr, n: cutlass.Constexpr, acc, tile, strip, stage, phase,
    place: cutlass.Constexpr, shared, args
):  # fmt: skip
    """Add a tile's products of FP8 weights and tokens in shared memory to the accumulators."""
    operands = operands_e4m3(gemm, n, place, shared)
    # k32 steps a drain: all four, or where each has its own scale as many as have registers for
    # a temporary each.
    steps = 4 if const_expr(not gemm.loop_sf or n <= 16) else max(1, 64 // n)
    temporaries = [accumulators(n) for _ in range(steps if gemm.loop_sf else 1)]
    begun = 1 if const_expr(gemm.begins_next) else 0
    if const_expr(gemm.begins_next):
        # acquire: the copies of load
        cute.arch.mbarrier_wait(shared.full + stage, phase)
    for k_stage in cutlass.range(begun, gemm.my_stages(place.k_slice), unroll=1):
        k_block = k_stage * gemm.k_slices + place.k_slice
        row_scales = group_scales(gemm, tile, strip, k_block, place.thread, args)
        if const_expr(not gemm.begins_next):
            # acquire: the copies of load
            cute.arch.mbarrier_wait(shared.full + stage, phase)
        a_stage = stage * gemm.num_wgs + place.wg
        b_stage = stage * gemm.k_slices + place.k_slice
        for first in cutlass.range_constexpr(0, 4, steps):
            issue_e4m3(gemm, operands, temporaries, first, steps, a_stage, b_stage)
            scales = loop_scales(gemm, shared.sf, b_stage, first, steps, place.lane)
            warpgroup.wait_group(0)
            if const_expr(first + steps == 4):
                # release: this warp's wgmmas and scale reads on the stage are done
                release(gemm, shared.empty + stage, place.lane)
                stage, phase = advance(gemm, stage, phase)
                if const_expr(gemm.begins_next):
                    # Before the additions, which then share a basic block with the next issue.
                    cute.arch.mbarrier_wait(shared.full + stage, phase)
            promote(gemm, acc, temporaries, scales, row_scales)
    return stage, phase


@cute.jit
def issue_e4m3(
    gemm: cutlass.Constexpr, operands: cutlass.Constexpr, temporaries: cutlass.Constexpr, first,
    steps, a_stage, b_stage
):  # fmt: skip
    tiled_mma, tA, tB = operands
    mma = cute.make_mma_atom(tiled_mma.op)
    mma.set(warpgroup.Field.ACCUMULATE, False)
    warpgroup.fence()
    for i in cutlass.range_constexpr(steps):
        out = temporaries[i if const_expr(gemm.loop_sf) else 0]
        k32 = first + i
        cute.gemm(mma, out, tA[(None, None, k32, a_stage)], tB[(None, None, k32, b_stage)], out)
        mma.set(warpgroup.Field.ACCUMULATE, not gemm.loop_sf)
    warpgroup.commit_group()


def group_scales(gemm, tile, strip, k_block, thread, args):
    """Weight scales of this thread's two rows for 128 of K, where rows could not fold whole."""
    if not gemm.group128:
        return None
    row = cutlass.min(strip, gemm.strips - 1) * 64 + thread // 32 * 16 + thread % 32 // 4
    at = (Int64(tile.expert) * gemm.k_blocks + k_block) * (gemm.strips * 64) + row
    return [ptx.load(Float32, args.w_sf + (at + 8 * i) * 4) for i in range(2)]


def loop_scales(gemm, sf, k_block, first, steps, lane):
    """Scales of this thread's token rows for each k32 step, in pairs of neighbouring rows.

    k_block  of those in shared memory
    """
    if not gemm.loop_sf:
        return None
    base = sf + k_block * (16 * gemm.tile_n)
    pairs = []
    for i in range(steps):
        for n8 in range(gemm.tile_n // 8):
            offset = ((first + i) * gemm.tile_n + n8 * 8) * 4 + (lane % 4) * 8
            pair = cute.make_rmem_tensor(2, Float32)
            cute.autovec_copy(ptx.vector(Float32, base + offset, 2, ptx.SMEM), pair)
            pairs.append(pair)
    return pairs


def promote(gemm, acc, temporaries, scales, row_scales):
    """Add the temporaries to the accumulators, scaled where their part of K has scales."""
    for i, temporary in enumerate(temporaries):
        for v in range(cute.size(temporary)):
            n8, row, column = v // 4, v // 2 % 2, v % 2
            scale = None
            if gemm.loop_sf:
                scale = scales[i * (gemm.tile_n // 8) + n8][column]
            if gemm.group128:
                scale = row_scales[row] if scale is None else scale * row_scales[row]
            acc[v] = acc[v] + (temporary[v] if scale is None else temporary[v] * scale)


@cute.jit
def k_loop_bf16(
    gemm: cutlass.Constexpr, n: cutlass.Constexpr, acc, tile, strip, stage, phase,
    place: cutlass.Constexpr, shared, args
):  # fmt: skip
    """Add a tile's products of weights decoded in registers and bf16 tokens."""
    major = OperandMajorMode.K
    op = warpgroup.MmaF16BF16Op(
        BFloat16, Float32, (64, n, 16), warpgroup.OperandSource.RMEM, major, major
    )
    tiled_mma = cute.make_tiled_mma(op)
    thr_mma = tiled_mma.get_slice(place.thread)
    tB = token_fragments(gemm, tiled_mma, n, shared, place.thread)
    a_shape = thr_mma.partition_shape_A((64, 64))
    a_buffers = [cute.make_rmem_tensor(a_shape, BFloat16) for _ in range(2)]
    a_words = [cute.recast_tensor(a, Int32) for a in a_buffers]
    words = cute.make_rmem_tensor(gemm.decoder.words_per_half, Int32)
    scales = cute.make_rmem_tensor(gemm.decoder.scale_words, Int32)
    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
    load_scales, load_words, decode = (
        gemm.decoder.load_scales, gemm.decoder.load_words, gemm.decoder.decode
    )  # fmt: skip
    last_stage = Int32(0)
    for k_stage in cutlass.range(gemm.my_stages(place.k_slice), unroll=1):
        cute.arch.mbarrier_wait(shared.full + stage, phase)
        base = shared.w + (stage * gemm.num_wgs + place.wg) * gemm.slice_bytes
        first_tokens = (stage * gemm.k_slices + place.k_slice) * gemm.tokens_per_slice
        for half in cutlass.range_constexpr(2 * gemm.blocks_per_slice):
            blob = base + half // 2 * gemm.blob_bytes
            if const_expr(half % 2 == 0):
                load_scales(blob, place.thread, scales)
            load_words(blob, half % 2, place.thread, words)
            # One group may still run; the one before has left the A buffer filled next.
            warpgroup.wait_group(1)
            if const_expr(half == 1):
                # release: this warp's wgmmas on the stage before are done. One predicate: a
                # branch here would serialise the wgmmas (C7513).
                lane = select_(k_stage > 0, place.lane, Int32(32))
                release(gemm, shared.empty + last_stage, lane)
            for b in cutlass.range_constexpr(4):
                decode(words, scales, half % 2 * 4 + b, a_words[half % 2], b)
            warpgroup.fence()
            for b in cutlass.range_constexpr(4):
                a = a_buffers[half % 2][None, None, b]
                cute.gemm(tiled_mma, acc, a, tB[None, None, b, first_tokens + half], acc)
            warpgroup.commit_group()
        last_stage = stage
        stage, phase = advance(gemm, stage, phase)
    warpgroup.wait_group(0)
    if gemm.my_stages(place.k_slice) > 0:
        # release: this warp's wgmmas on the tile's last stage are done
        release(gemm, shared.empty + last_stage, place.lane)
    return stage, phase
