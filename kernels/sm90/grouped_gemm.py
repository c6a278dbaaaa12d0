"""Grouped GEMM over experts on Hopper: weights are M, the rows of one expert are N."""

from typing import NamedTuple

import cutlass
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, const_expr, cute, memory
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from moe_ep_jit import layout
from moe_ep_jit.kernels.common import ptx
from moe_ep_jit.kernels.sm90 import epilogue
from moe_ep_jit.kernels.sm90.config import Config
from moe_ep_jit.kernels.sm90.upconvert import DECODERS
from moe_ep_jit.layout import ceil_div, round_up

SMEM_BYTES = 232_448  # of one CTA; more fails only at launch
MAX_STAGES = 8
RESERVED_BYTES = 4096  # tile ring, barriers, alignment of the buffers: a few hundred are used


class GemmArgs(NamedTuple):
    """Run-time facts of one GEMM launch; addresses are Int64, 0 where absent."""

    w: Int64
    w_sf: Int64
    bias: Int64
    row_sf: Int64  # fp32 a row of the token operand
    expert_sf: Int64  # fp32 an expert: static scale of the intermediate
    tiles: Int64
    expert_info: Int64
    row_slot: Int64
    out: Int64
    block_sf: Int64  # fp32 a 32-block and row of the intermediate: written by gate/up, read by down
    sf_stride: Int32
    control: Int64
    limit: Float32
    alpha: Float32
    beta: Float32


class Tile(NamedTuple):
    """One tile of the schedule."""

    expert: Int32
    m_tile: Int32
    first_row: Int32
    first_sf_row: Int32  # in block_sf, whose rows are padded expert by expert
    rows: Int32  # live rows of the tile, at most tile_n


class Shared(NamedTuple):
    """Shared addresses (Int32) and, where the DSL partitions them, tensors."""

    x: cute.Tensor  # [tile_n, one swizzle row of K, stages]
    w: Int32  # stages x math warpgroups x packed blobs
    sf: Int32  # stages x 4 x tile_n fp32: loop_sf only
    staging: Int32  # warpgroups x chunk_n x 128 bytes of the epilogue
    amax: Int32  # warpgroups x chunk_n x 4 warps
    columns: Int32  # warpgroups x tile_n x (fp32 scale, then int32 slot)
    ring: Int32  # tiles that load has begun
    num_tiles: Int32  # n-tiles of this call
    full: cute.Pointer
    empty: cute.Pointer


class GroupedGemm:
    """One persistent CTA an SM; a tile is tile_m weight rows x tile_n rows of an expert x all of K.

    Roles: warp 0: load (warps 1-3 idle: setmaxregister takes whole warpgroups); warpgroups 1..W:
    mma and epilogue, 64 weight rows each.

    full   load -> mma   1 arrive + the bytes of weights and scales (bulk copies) and tokens (TMA)
    empty  mma -> load   one arrive a math warp, once its wgmmas on the stage have retired
    ring   load -> mma   the tile's coordinates; ordered by the full barrier of its first stage

    load: for each stage of each tile: wait empty, expect bytes, copy. Runs on into the next tile.
    mma:  e4m3: four wgmmas of k32 into a temporary, drain, add to the accumulators (FP8 wgmma keeps
          about 13 bits of a sum, so every 128 of K moves to fp32); where each 32 of K has a scale,
          a temporary each. The warpgroups fall out of step by themselves and fill each other's
          gaps. bf16: decode 64 of K into one of two A buffers while the wgmmas on the other run.
    epilogue: in the math warpgroups, from values that were fetched before the main loop.

    The n-tiles of an expert are neighbours in the schedule: their CTAs share weights through L2.
    """

    def __init__(
        self, *, kind: str, act: str, gate_up: bool, k: int, m: int, config: Config
    ):  # fmt: skip
        self.kind, self.act, self.gate_up, self.k, self.m = kind, act, gate_up, k, m
        self.tile_n = config.tile_n
        self.num_wgs = config.num_math_warpgroups
        self.decoder = DECODERS.get(kind)
        self.fp8 = self.decoder is None
        self.group128 = kind == "mxfp8_group128"
        self.blob_bytes = 8192 if self.fp8 else self.decoder.blob_bytes
        self.k_blocks = ceil_div(k, 128)
        self.strips = round_up(m, 128) // 64
        self.m_tiles = ceil_div(self.strips, self.num_wgs)
        # Scales of the token operand: in the loop (32-blocks of the intermediate) or one a row.
        self.loop_sf = self.fp8 and not gate_up and not config.fold_intermediate
        self.has_row_sf = (self.fp8 and not self.loop_sf) or (gate_up and act == "nvfp4")
        self.has_expert_sf = not gate_up and act == "nvfp4"
        # Two k-blocks a stage halve the barrier work where decoding leaves little time for it.
        small = self.tile_n <= 32
        self.blocks_per_stage = 2 if not self.fp8 and self.k_blocks % 2 == 0 and small else 1
        # Rows that the epilogue stages at once: few barriers in wide tiles, little memory else.
        self.chunk_n = min(self.tile_n, 64 if self.num_wgs == 2 else 32)
        self.threads = 128 * (self.num_wgs + 1)
        self.plan_memory()

    def plan_memory(self):
        """Stages: as many as fit beside the epilogue's buffers."""
        self.token_type = Float8E4M3FN if self.fp8 else BFloat16
        self.token_k = 128 if self.fp8 else 64  # one 128-byte swizzle row
        self.weight_bytes = self.num_wgs * self.blob_bytes * self.blocks_per_stage
        self.token_tiles = self.blocks_per_stage * 128 // self.token_k
        self.token_bytes = self.token_tiles * self.tile_n * 128
        self.sf_bytes = 4 * self.tile_n * 4 if self.loop_sf else 0
        self.stage_bytes = self.weight_bytes + self.token_bytes + self.sf_bytes
        epilogue_bytes = self.num_wgs * (self.chunk_n * (128 + 16) + self.tile_n * 8)
        self.num_stages = min(
            MAX_STAGES, (SMEM_BYTES - epilogue_bytes - RESERVED_BYTES) // self.stage_bytes
        )
        assert self.num_stages >= 2, f"{self.stage_bytes} bytes a stage leave no room for two"
        # load runs at most num_stages tiles ahead of the slowest warpgroup, which has read its own.
        self.ring_slots = self.num_stages + 2
        ring_and_barriers = self.ring_slots * 32 + self.num_stages * 16 + 16
        self.smem_bytes = self.num_stages * self.stage_bytes + epilogue_bytes + ring_and_barriers

    @cute.jit
    def __call__(self, x: Int64, rows: Int32, args: GemmArgs, num_sms: Int32, stream):
        mX = cute.make_tensor(
            ptx.ptr(self.token_type, x, 128),
            cute.make_layout((rows, self.k), stride=(self.k, 1)),
        )
        sX_layout = self.swizzled(self.tile_n, self.token_k, self.num_stages * self.token_tiles)
        tma_x, mX = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            mX,
            cute.slice_(sX_layout, (None, None, 0)),
            (self.tile_n, self.token_k),
        )
        major = OperandMajorMode.K
        if const_expr(self.fp8):
            op = warpgroup.MmaF8Op(
                Float8E4M3FN, Float8E4M3FN, Float32, (64, self.tile_n, 32),
                warpgroup.OperandSource.SMEM, major, major,
            )  # fmt: skip
        else:
            op = warpgroup.MmaF16BF16Op(
                BFloat16, Float32, (64, self.tile_n, 16), warpgroup.OperandSource.RMEM, major, major
            )
        self.kernel(tma_x, mX, sX_layout, cute.make_tiled_mma(op), args).launch(
            grid=(num_sms, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    def swizzled(self, rows, k, count):
        """K-major tiles of rows of 128 bytes, in the 128-byte swizzle."""
        kind = warpgroup.SmemLayoutAtomKind.K_SW128
        atom = warpgroup.make_smem_layout_atom(kind, self.token_type)
        return cute.tile_to_shape(atom, (rows, k, count), order=(0, 1, 2))

    @cute.kernel
    def kernel(
        self,
        tma_x: cute.CopyAtom,
        mX: cute.Tensor,
        sX_layout: cute.ComposedLayout,
        tiled_mma: cute.TiledMma,
        args: GemmArgs,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = memory.SmemAllocator()
        sX = smem.allocate_tensor(self.token_type, sX_layout.outer, 1024, swizzle=sX_layout.inner)
        sA = None
        if const_expr(self.fp8):
            sA_layout = self.swizzled(64, 128, self.num_stages * self.num_wgs)
            sA = smem.allocate_tensor(Float8E4M3FN, sA_layout.outer, 1024, swizzle=sA_layout.inner)
            w = Int32(sA.iterator.toint())
        else:
            w = Int32(smem.allocate(self.num_stages * self.weight_bytes, 1024).toint())
        sizes = (
            max(self.num_stages * self.sf_bytes, 16),
            self.num_wgs * self.chunk_n * 128,
            self.num_wgs * self.chunk_n * 16,
            self.num_wgs * self.tile_n * 8,
            self.ring_slots * 32,
            16,
        )
        addresses = [Int32(smem.allocate(size, 128).toint()) for size in sizes]
        full = smem.allocate_array(Int64, self.num_stages)
        empty = smem.allocate_array(Int64, self.num_stages)
        shared = Shared(sX, w, *addresses, full, empty)
        if warp == 0:
            cpasync.prefetch_descriptor(tma_x)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.num_stages):
                    cute.arch.mbarrier_init(full + i, 1)
                    cute.arch.mbarrier_init(empty + i, 4 * self.num_wgs)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # Everything but the prepared weights comes from the kernels before.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        # All roles go by one reading of the count, or a second stream's call could split them.
        if thread == 0:
            ptx.store_shared(Int32, shared.num_tiles, ptx.load(Int32, args.tiles))
        cute.arch.sync_threads()
        if warp < 4:
            cute.arch.setmaxregister_decrease(32 if const_expr(self.num_wgs == 4) else 40)
            if warp == 0:
                self.load(tma_x, mX, shared, args)
        else:
            cute.arch.setmaxregister_increase(112 if const_expr(self.num_wgs == 4) else 232)
            if const_expr(self.fp8):
                self.mma_e4m3(tiled_mma, sA, shared, thread, args)
            else:
                self.mma_bf16(tiled_mma, shared, thread, args)

    @cute.jit
    def load(self, tma_x, mX, shared, args):
        stage, phase = Int32(0), Int32(1)  # the first pass finds every stage free
        slot = Int32(0)
        index, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        num_tiles = ptx.load_shared(Int32, shared.num_tiles) * self.m_tiles
        # Narrow rungs expect one n-tile an expert, whose weights are read once; wide ones several,
        # which read them again from L2.
        policy = Int64(ptx.EVICT_FIRST if self.tile_n <= 64 else ptx.EVICT_NORMAL)
        strip_bytes = self.blob_bytes * self.blocks_per_stage
        while index < num_tiles:
            tile = self.tile_at(index, args)
            gX = cute.local_tile(
                cute.domain_offset((tile.first_row, 0), mX), (self.tile_n, self.token_k), (0, None)
            )
            tXsX, tXgX = cpasync.tma_partition(
                tma_x,
                0,
                cute.make_layout(1),
                cute.group_modes(shared.x, 0, 2),
                cute.group_modes(gX, 0, 2),
            )
            for k_stage in cutlass.range(self.k_blocks // self.blocks_per_stage, unroll=1):
                cute.arch.mbarrier_wait(shared.empty + stage, phase)
                full = shared.full + stage
                with cute.arch.elect_one():
                    if k_stage == 0:
                        self.write_tile(shared.ring + slot * 32, tile)
                    # release: the tile's coordinates above are visible to who sees the stage full
                    cute.arch.mbarrier_arrive_and_expect_tx(full, self.stage_bytes)
                    for w in cutlass.range_constexpr(self.num_wgs):
                        # Padding strips of the last tile load the last strip once more.
                        strip = cutlass.min(tile.m_tile * self.num_wgs + w, self.strips - 1)
                        block = (Int64(tile.expert) * self.strips + strip) * self.k_blocks
                        block += k_stage * self.blocks_per_stage
                        ptx.bulk_load(
                            shared.w + (stage * self.num_wgs + w) * strip_bytes,
                            args.w + block * self.blob_bytes,
                            strip_bytes,
                            full.toint(),
                            policy,
                        )
                    for k32 in cutlass.range_constexpr(4 if self.loop_sf else 0):
                        # Beyond K the tokens are zeros and any scale does.
                        block = cutlass.min(4 * k_stage + k32, self.k // layout.SF_BLOCK - 1)
                        ptx.bulk_load(
                            shared.sf + (stage * 4 + k32) * (4 * self.tile_n),
                            args.block_sf + (Int64(block) * args.sf_stride + tile.first_sf_row) * 4,
                            4 * self.tile_n,
                            full.toint(),
                            policy,
                        )
                for i in cutlass.range_constexpr(self.token_tiles):
                    cute.copy(
                        tma_x,
                        tXgX[(None, k_stage * self.token_tiles + i)],
                        tXsX[(None, stage * self.token_tiles + i)],
                        tma_bar_ptr=full,
                    )
                stage, phase = self.advance(stage, phase)
            slot = self.next_slot(slot)
            index += step

    @cute.jit
    def tile_at(self, index, args):
        """The schedule: n-tiles of an expert fastest, then its m-tiles, then the experts."""
        expert = ptx.load(Int32, args.tiles + Int64(1 + index // self.m_tiles) * 4)
        info = cute.make_rmem_tensor(4, Int32)
        cute.autovec_copy(ptx.vector(Int32, args.expert_info + Int64(expert) * 16, 4), info)
        local = index - info[0] * self.m_tiles
        m_tile = local // info[1]
        first = (local - m_tile * info[1]) * self.tile_n
        first_sf_row = layout.first_sf_row(info[2], expert) + first
        rows = cutlass.min(info[3] - first, self.tile_n)
        return Tile(expert, m_tile, info[2] + first, first_sf_row, rows)

    def write_tile(self, address, tile):
        for i, value in enumerate(tile):
            ptx.store_shared(Int32, address + 4 * i, value)

    def read_tile(self, address):
        return Tile(*(ptx.load_shared(Int32, address + 4 * i) for i in range(len(Tile._fields))))

    @cute.jit
    def advance(self, stage, phase):
        """The stage after this one, and the parity that its barriers are waited for with."""
        stage += 1
        if stage == self.num_stages:
            stage = Int32(0)
            phase = phase ^ 1
        return stage, phase

    @cute.jit
    def next_slot(self, slot):
        slot += 1
        if slot == self.ring_slots:
            slot = Int32(0)
        return slot

    @cute.jit
    def mma_e4m3(self, tiled_mma, sA, shared, thread, args):
        wg = cute.arch.make_warp_uniform(thread // 128) - 1
        lane = thread % 32
        thr_mma = tiled_mma.get_slice(thread % 128)
        tA = tiled_mma.make_fragment_A(thr_mma.partition_A(sA))
        tB = tiled_mma.make_fragment_B(thr_mma.partition_B(shared.x))
        acc_shape = thr_mma.partition_shape_C((64, self.tile_n))
        acc = cute.make_rmem_tensor(acc_shape, Float32)
        # k32 steps a drain: all four, or where each has its own scale as many as have registers for
        # a temporary each.
        steps = (
            4 if const_expr(not self.loop_sf or self.tile_n <= 16) else max(1, 64 // self.tile_n)
        )
        temporaries = [
            cute.make_rmem_tensor(acc_shape, Float32)
            for _ in range(steps if const_expr(self.loop_sf) else 1)
        ]
        stage, phase, slot = Int32(0), Int32(0), Int32(0)
        index, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        num_tiles = ptx.load_shared(Int32, shared.num_tiles) * self.m_tiles
        while index < num_tiles:
            # acquire: load wrote the tile before it released the tile's first stage
            cute.arch.mbarrier_wait(shared.full + stage, phase)
            tile = self.read_tile(shared.ring + slot * 32)
            strip = tile.m_tile * self.num_wgs + wg
            constants = epilogue.fetch(self, tile, strip, thread % 128, args)
            acc.fill(0.0)
            for k_block in cutlass.range(self.k_blocks, unroll=1):
                row_scales = self.group_scales(tile, strip, k_block, thread, args)
                cute.arch.mbarrier_wait(shared.full + stage, phase)
                for first in cutlass.range_constexpr(0, 4, steps):
                    a_stage = stage * self.num_wgs + wg
                    self.issue_e4m3(tiled_mma, tA, tB, temporaries, first, steps, a_stage, stage)
                    scales = self.loop_scales(shared.sf, stage, first, steps, lane)
                    warpgroup.wait_group(0)
                    if const_expr(first + steps == 4):
                        if lane == 0:
                            # release: this warp's wgmmas and scale reads on the stage are done
                            cute.arch.mbarrier_arrive(shared.empty + stage)
                    self.promote(acc, temporaries, scales, row_scales)
                stage, phase = self.advance(stage, phase)
            epilogue.finish(self, acc, tile, strip, wg, thread % 128, constants, shared, args)
            slot = self.next_slot(slot)
            index += grid

    @cute.jit
    def issue_e4m3(self, tiled_mma, tA, tB, temporaries, first, steps, a_stage, b_stage):
        mma = cute.make_mma_atom(tiled_mma.op)
        mma.set(warpgroup.Field.ACCUMULATE, False)
        warpgroup.fence()
        for i in cutlass.range_constexpr(steps):
            out = temporaries[i if const_expr(self.loop_sf) else 0]
            k32 = first + i
            cute.gemm(mma, out, tA[(None, None, k32, a_stage)], tB[(None, None, k32, b_stage)], out)
            mma.set(warpgroup.Field.ACCUMULATE, not self.loop_sf)
        warpgroup.commit_group()

    def group_scales(self, tile, strip, k_block, thread, args):
        """Weight scales of this thread's two rows for 128 of K, where rows could not fold whole."""
        if not self.group128:
            return None
        row = cutlass.min(strip, self.strips - 1) * 64 + thread % 128 // 32 * 16 + thread % 32 // 4
        at = (Int64(tile.expert) * self.k_blocks + k_block) * (self.strips * 64) + row
        return [ptx.load(Float32, args.w_sf + (at + 8 * i) * 4) for i in range(2)]

    def loop_scales(self, sf, stage, first, steps, lane):
        """Scales of this thread's token rows for each k32 step, in pairs of neighbouring rows."""
        if not self.loop_sf:
            return None
        base = sf + stage * (16 * self.tile_n)
        pairs = []
        for i in range(steps):
            for n8 in range(self.tile_n // 8):
                offset = ((first + i) * self.tile_n + n8 * 8) * 4 + (lane % 4) * 8
                pair = cute.make_rmem_tensor(2, Float32)
                cute.autovec_copy(ptx.vector(Float32, base + offset, 2, ptx.SMEM), pair)
                pairs.append(pair)
        return pairs

    def promote(self, acc, temporaries, scales, row_scales):
        """Add the temporaries to the accumulators, scaled where their part of K has scales."""
        for i, temporary in enumerate(temporaries):
            for v in range(cute.size(acc)):
                n8, row, column = v // 4, v // 2 % 2, v % 2
                scale = None
                if self.loop_sf:
                    scale = scales[i * (self.tile_n // 8) + n8][column]
                if self.group128:
                    scale = row_scales[row] if scale is None else scale * row_scales[row]
                acc[v] = acc[v] + (temporary[v] if scale is None else temporary[v] * scale)

    @cute.jit
    def mma_bf16(self, tiled_mma, shared, thread, args):
        wg = cute.arch.make_warp_uniform(thread // 128) - 1
        lane = thread % 32
        wg_thread = thread % 128
        thr_mma = tiled_mma.get_slice(wg_thread)
        tB = tiled_mma.make_fragment_B(thr_mma.partition_B(shared.x))
        acc = cute.make_rmem_tensor(thr_mma.partition_shape_C((64, self.tile_n)), Float32)
        a_shape = thr_mma.partition_shape_A((64, 64))
        a_buffers = [cute.make_rmem_tensor(a_shape, BFloat16) for _ in range(2)]
        a_words = [cute.recast_tensor(a, Int32) for a in a_buffers]
        words = cute.make_rmem_tensor(self.decoder.words_per_half, Int32)
        scales = cute.make_rmem_tensor(self.decoder.scale_words, Int32)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        stage, phase, last_stage, slot = Int32(0), Int32(0), Int32(0), Int32(0)
        index, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        num_tiles = ptx.load_shared(Int32, shared.num_tiles) * self.m_tiles
        halves = 2 * self.blocks_per_stage
        strip_bytes = self.blob_bytes * self.blocks_per_stage
        while index < num_tiles:
            # acquire: load wrote the tile before it released the tile's first stage
            cute.arch.mbarrier_wait(shared.full + stage, phase)
            tile = self.read_tile(shared.ring + slot * 32)
            strip = tile.m_tile * self.num_wgs + wg
            constants = epilogue.fetch(self, tile, strip, wg_thread, args)
            acc.fill(0.0)
            for k_stage in cutlass.range(self.k_blocks // self.blocks_per_stage, unroll=1):
                cute.arch.mbarrier_wait(shared.full + stage, phase)
                strip_base = shared.w + (stage * self.num_wgs + wg) * strip_bytes
                for half in cutlass.range_constexpr(halves):
                    blob = strip_base + half // 2 * self.blob_bytes
                    if const_expr(half % 2 == 0):
                        self.decoder.load_scales(blob, wg_thread, scales)
                    self.decoder.load_words(blob, half % 2, wg_thread, words)
                    # One group may still run; the one before has left the A buffer filled next.
                    warpgroup.wait_group(1)
                    if const_expr(half == 1):
                        if k_stage > 0:
                            if lane == 0:
                                # release: this warp's wgmmas on the stage before are done
                                cute.arch.mbarrier_arrive(shared.empty + last_stage)
                    for b in cutlass.range_constexpr(4):
                        self.decoder.decode(words, scales, half % 2 * 4 + b, a_words[half % 2], b)
                    warpgroup.fence()
                    for b in cutlass.range_constexpr(4):
                        a = a_buffers[half % 2][None, None, b]
                        cute.gemm(tiled_mma, acc, a, tB[None, None, b, stage * halves + half], acc)
                    warpgroup.commit_group()
                last_stage = stage
                stage, phase = self.advance(stage, phase)
            warpgroup.wait_group(0)
            if lane == 0:
                # release: this warp's wgmmas on the tile's last stage are done
                cute.arch.mbarrier_arrive(shared.empty + last_stage)
            epilogue.finish(self, acc, tile, strip, wg, wg_thread, constants, shared, args)
            slot = self.next_slot(slot)
            index += grid
