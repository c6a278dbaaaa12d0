"""Grouped GEMM over experts on Hopper: weights are M, the rows of one expert are N."""

from typing import Any, NamedTuple

import cutlass
from cutlass import (
    BFloat16,
    Float8E4M3FN,
    Float32,
    Int16,
    Int32,
    Int64,
    const_expr,
    cute,
    memory,
    select_,
)
from cutlass.cute.nvgpu import cpasync, warpgroup

from moe_ep_jit import layout
from moe_ep_jit.kernels.common import epilogue, exchange, ptx
from moe_ep_jit.kernels.common import quantize as q
from moe_ep_jit.kernels.common.forward import GemmArgs
from moe_ep_jit.kernels.common.schedule import share_num_tiles, step_at, sync_cluster
from moe_ep_jit.kernels.sm90 import mainloop
from moe_ep_jit.kernels.sm90.config import Config
from moe_ep_jit.kernels.sm90.upconvert import DECODERS
from moe_ep_jit.layout import ceil_div, round_up

SMEM_BYTES = 232_448  # of one CTA; more fails only at launch
MAX_STAGES = 8
#: Columns that a wide rung can multiply, the least that hold a tile's rows, by whether it is FP8:
#: an expert's last tile often has few. Multiples of 16, as the epilogue wants. 160 columns serve
#: one tile an expert, the others several. A fourth in bf16 would serialise the wgmmas (C7512).
WIDTHS = {
    True: {128: (128, 96, 64), 160: (160, 144, 128, 64), 192: (192, 96)},
    False: {128: (128, 96, 48), 160: (160, 128, 64), 192: (192, 128, 64)},
}
RESERVED_BYTES = 4096  # tile ring, barriers, alignment of the buffers: a few hundred are used


class Tile(NamedTuple):
    """One tile of the schedule."""

    expert: Int32
    m_tile: Int32
    first_row: Int32
    first_sf_row: Int32  # in block_sf, whose rows are padded expert by expert
    rows: Int32  # live rows of the tile, at most tile_n


class Shared(NamedTuple):
    """Shared addresses (Int32) and, where the DSL partitions them, tensors."""

    x: cute.Tensor  # [tile_n, one swizzle row of K, stages x token tiles]
    a: Any  # e4m3: [64, 128, stages x math warpgroups] of the same memory as w; bf16: None
    w: Int32  # stages x math warpgroups x packed blobs
    sf: Int32  # stages x 4 a k-block x tile_n fp32: loop_sf only
    staging: Int32  # warpgroups x rows that the epilogue stages at once
    amax: Int32  # warpgroups x chunk_n x 4 warps
    columns: Int32  # warpgroups x tile_n x (fp32 scale, then int32 slot)
    partials: Int32  # k_slices > 1: warpgroups x 64 x tile_n fp32
    ring: Int32  # tiles that load has begun
    num_tiles: Int32  # n-tiles of this call
    full: cute.Pointer
    empty: cute.Pointer
    partials_full: cute.Pointer  # one a strip
    partials_empty: cute.Pointer


class Place(NamedTuple):
    """Where a math thread works."""

    wg: Int32  # math warpgroup
    strip: Int32  # of the tile's strips
    k_slice: Int32
    thread: Int32  # in the warpgroup
    warp: Int32
    lane: Int32


@cute.jit
def store_scales(gemm: cutlass.Constexpr, byte, column, tile, strip, args):
    """The fp32 scale of a row's 32 features."""
    if column < tile.rows:
        at = Int64(strip) * args.sf_stride + tile.first_sf_row + column
        ptx.store(Float32, args.block_sf + at * 4, q.exp2_of_byte(byte))


class GroupedGemm:
    """One persistent CTA an SM; a tile is tile_m weight rows x tile_n rows of an expert x all of K.

    Roles: warp 0: load (warps 1-3 idle: setmaxregister takes whole warpgroups); warpgroups 1..W:
    mma and epilogue. Each owns 64 weight rows (a strip), or k_slices of them share a strip and
    take its k-blocks by turns.

    full      load -> mma   1 arrive + the bytes of weights and scales (bulk copies), tokens (TMA);
                            gate/up of several ranks: another arrive, once the rows have come
    empty     mma -> load   one arrive a math warp, once its wgmmas on the stage have retired; in a
                            cluster the math warps of both CTAs arrive at both CTAs' barriers
    ring      load -> mma   the tile's coordinates; ordered by the full barrier of its first stage
    partials  mma -> mma    k_slices > 1: full: all slices' accumulators of a strip are in shared
                            memory; empty: the slice whose turn the epilogue is has read them

    load: before the grid before has ended: the first tile's weights. Then for each stage of each
          tile: wait empty, expect bytes, copy. Runs on into the next tile.
          The two CTAs of a cluster take neighbouring m-tiles of the same rows: each loads half of
          the tokens into both.
    mma:  e4m3: four wgmmas of k32 into a temporary, drain, add to the accumulators (FP8 wgmma keeps
          about 13 bits of a sum, so every 128 of K moves to fp32); where each 32 of K has a scale,
          a temporary each. The warpgroups fall out of step by themselves and fill each other's
          gaps; wide tiles begin the next tile before their epilogue. bf16: decode 64 of K into one
          of two A buffers while the wgmmas on the other run.
    epilogue: in the math warpgroups, from values that were fetched before the main loop.

    The order of the tiles is ``common/schedule.py``'s.
    """

    def __init__(
        self, *, kind: str, act: str, gate_up: bool, k: int, m: int, config: Config,
        ranks: exchange.Ranks | None = None
    ):  # fmt: skip
        self.ranks = ranks
        self.awaits_rows = gate_up and ranks is not None
        self.kind, self.act, self.gate_up, self.k, self.m = kind, act, gate_up, k, m
        self.tile_n, self.cluster = config.tile_n, config.cluster
        self.num_wgs = config.num_math_warpgroups
        self.k_blocks = ceil_div(k, 128)
        # Shorter slices cost more for their sum than they save.
        self.k_slices = config.k_slices if self.k_blocks >= 8 * config.k_slices else 1
        self.strips_per_tile = self.num_wgs // self.k_slices
        self.decoder = DECODERS.get(kind)
        self.fp8 = self.decoder is None
        self.group128 = kind == "mxfp8_group128"
        self.blob_bytes = 8192 if self.fp8 else self.decoder.blob_bytes
        self.strips = round_up(m, 128) // 64
        # A cluster's m-tiles are one step of the schedule.
        self.m_steps = ceil_div(self.strips, self.strips_per_tile * self.cluster)
        self.widths = WIDTHS[self.fp8].get(self.tile_n, (self.tile_n,))
        # Scales of the token operand: in the loop (32-blocks of the intermediate) or one a row.
        self.loop_sf = self.fp8 and not gate_up and not config.fold_intermediate
        self.has_row_sf = (self.fp8 and not self.loop_sf) or (gate_up and act == "nvfp4")
        self.has_expert_sf = not gate_up and act == "nvfp4"
        self.has_weight_sf = not self.group128  # a row; the main loop applies those of groups
        self.h_values = "e4m3" if self.fp8 else "bf16"
        self.store_scales = store_scales if self.fp8 else None
        # Wide FP8 tiles issue the next tile's first k-block before the epilogue, which it hides; a
        # loop over the one block left of two would be no loop, and its registers spill.
        wide = len(self.widths) > 1
        self.begins_next = self.fp8 and wide and not self.group128 and self.k_blocks > 2
        # Two k-blocks a stage halve the barrier work where decoding leaves little time for it.
        small = self.tile_n <= 32
        self.blocks_per_slice = 2 if not self.fp8 and self.k_blocks % 2 == 0 and small else 1
        self.blocks_per_stage = self.blocks_per_slice * self.k_slices
        self.k_stages = ceil_div(self.k_blocks, self.blocks_per_stage)
        # Rows that the epilogue stages at once: whole tiles where rows take little, or stages much.
        half = self.tile_n // 2 if wide else min(self.tile_n, 32)
        self.chunk_n = self.tile_n if self.fp8 and (gate_up or self.tile_n > 64) else half
        if gate_up:
            # FP8 stages two rows in one.
            rows = max(self.chunk_n // 2, 8) if self.fp8 else self.chunk_n
            self.staging_bytes = rows * epilogue.PITCH
        else:
            self.staging_bytes = self.chunk_n * 128
        self.threads = 128 * (self.num_wgs + 1)
        # Of 65,536: what the math warpgroups need, and load does without.
        self.load_registers, self.math_registers = {2: (40, 232), 3: (32, 160), 4: (32, 112)}[
            self.num_wgs
        ]
        self.plan_memory()

    def plan_memory(self):
        """Stages: as many as fit beside the epilogue's buffers."""
        self.token_type = Float8E4M3FN if self.fp8 else BFloat16
        self.token_k = 128 if self.fp8 else 64  # one 128-byte swizzle row
        self.slice_bytes = self.blocks_per_slice * self.blob_bytes
        self.weight_bytes = self.num_wgs * self.slice_bytes
        self.tokens_per_slice = self.blocks_per_slice * 128 // self.token_k
        self.token_tiles = self.k_slices * self.tokens_per_slice
        self.token_bytes = self.token_tiles * self.tile_n * 128
        self.stage_blocks_sf = 4 * self.blocks_per_stage if self.loop_sf else 0
        self.sf_bytes = self.stage_blocks_sf * self.tile_n * 4
        self.stage_bytes = self.weight_bytes + self.token_bytes + self.sf_bytes
        epilogue_bytes = self.num_wgs * (self.staging_bytes + self.chunk_n * 16 + self.tile_n * 8)
        self.partial_bytes = self.num_wgs * 256 * self.tile_n if self.k_slices > 1 else 0
        epilogue_bytes += self.partial_bytes
        self.num_stages = min(
            MAX_STAGES, (SMEM_BYTES - epilogue_bytes - RESERVED_BYTES) // self.stage_bytes
        )
        assert self.num_stages >= 2, f"{self.stage_bytes} bytes a stage leave no room for two"
        # load runs at most num_stages tiles ahead of the slowest warpgroup, which has read its own.
        self.ring_slots = self.num_stages + 2
        ring_and_barriers = self.ring_slots * 32 + self.num_stages * 16 + 16 + 64
        self.smem_bytes = self.num_stages * self.stage_bytes + epilogue_bytes + ring_and_barriers

    @cute.jit
    def __call__(self, x: Int64, rows: Int32, args: GemmArgs, num_sms: Int32, stream):
        mX = cute.make_tensor(
            ptx.ptr(self.token_type, x, 128),
            cute.make_layout((rows, self.k), stride=(self.k, 1)),
        )
        sX_layout = self.swizzled(self.tile_n, self.token_k, self.num_stages * self.token_tiles)
        op = (
            cpasync.CopyBulkTensorTileG2SOp()
            if const_expr(self.cluster == 1)
            else cpasync.CopyBulkTensorTileG2SMulticastOp()
        )
        tma_x, mX = cpasync.make_tiled_tma_atom(
            op,
            mX,
            cute.slice_(sX_layout, (None, None, 0)),
            (self.tile_n, self.token_k),
            num_multicast=self.cluster,
        )
        self.kernel(tma_x, mX, sX_layout, args).launch(
            grid=(num_sms // self.cluster * self.cluster, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1),
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
        args: GemmArgs,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self.allocate(sX_layout)
        if warp == 0:
            cpasync.prefetch_descriptor(tma_x)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.num_stages):
                    cute.arch.mbarrier_init(shared.full + i, 2 if self.awaits_rows else 1)
                    cute.arch.mbarrier_init(shared.empty + i, 4 * self.num_wgs * self.cluster)
                for i in cutlass.range_constexpr(self.strips_per_tile):
                    cute.arch.mbarrier_init(shared.partials_full + i, 4 * self.k_slices)
                    cute.arch.mbarrier_init(shared.partials_empty + i, 4)
        cute.arch.mbarrier_init_fence()
        sync_cluster(self.cluster)
        share_num_tiles(self.cluster, shared.num_tiles, thread, args.tiles)
        sync_cluster(self.cluster)
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.load_registers)
            if warp == 0:
                self.load(tma_x, mX, shared, args)
        else:
            cute.arch.setmaxregister_increase(self.math_registers)
            cute.arch.griddepcontrol_wait()
            self.math(shared, thread, args)
        if const_expr(self.cluster > 1):
            # The other CTA may still arrive at this one's barriers.
            sync_cluster(self.cluster)

    def allocate(self, sX_layout):
        """Shared memory of one CTA; equal in both CTAs of a cluster, which name it by address."""
        smem = memory.SmemAllocator()
        x = smem.allocate_tensor(self.token_type, sX_layout.outer, 1024, swizzle=sX_layout.inner)
        a = None
        if self.fp8:
            a_layout = self.swizzled(64, 128, self.num_stages * self.num_wgs)
            a = smem.allocate_tensor(Float8E4M3FN, a_layout.outer, 1024, swizzle=a_layout.inner)
            w = Int32(a.iterator.toint())
        else:
            w = Int32(smem.allocate(self.num_stages * self.weight_bytes, 1024).toint())
        sizes = (
            max(self.num_stages * self.sf_bytes, 16),
            self.num_wgs * self.staging_bytes,
            self.num_wgs * self.chunk_n * 16,
            self.num_wgs * self.tile_n * 8,
            max(self.partial_bytes, 16),
            self.ring_slots * 32,
            16,
        )
        addresses = [Int32(smem.allocate(size, 128).toint()) for size in sizes]
        counts = (self.num_stages, self.num_stages, self.strips_per_tile, self.strips_per_tile)
        barriers = [smem.allocate_array(Int64, count) for count in counts]
        return Shared(x, a, w, *addresses, *barriers)

    @cute.jit
    def load(self, tma_x, mX, shared, args):
        stage, phase = Int32(0), Int32(1)  # the first pass finds every stage free
        slot, awaited = Int32(0), Int32(-1)
        lane = cute.arch.lane_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        rank = block % self.cluster
        index, step = block // self.cluster, grid // self.cluster
        num_steps = ptx.load_shared(Int32, shared.num_tiles) * self.m_steps
        # Narrow rungs expect one n-tile an expert, whose weights are read once; wide ones several,
        # which read them again from L2.
        policy = Int64(ptx.EVICT_FIRST if self.tile_n <= 64 else ptx.EVICT_NORMAL)
        multicast = Int16((1 << self.cluster) - 1)  # both CTAs; one alone takes no notice
        # The first tile's weights, while the kernel before still makes its rows.
        ahead = min(self.num_stages, self.k_stages)
        if index < num_steps:
            tile = self.tile_at(index, rank, args, ptx.load_relaxed)
            with cute.arch.elect_one():
                self.write_tile(shared.ring, tile)
                for k_stage in cutlass.range_constexpr(ahead):
                    self.load_weights(tile, Int32(k_stage), Int32(k_stage), policy, shared, args)
        first, end = index, num_steps
        if const_expr(self.begins_next):
            # One more stage, which the math warpgroups begin a tile with that never comes.
            end = select_(index < num_steps, num_steps + step, Int32(0))
        # Everything but the prepared weights comes from the kernels before.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        while index < end:
            tile = self.tile_at(cutlass.min(index, num_steps - 1), rank, args, ptx.load_global)
            if const_expr(self.awaits_rows):
                if tile.expert != awaited:
                    exchange.await_rows(self.ranks, args.control, tile.expert, lane)
                    awaited = tile.expert
            gX = cute.local_tile(
                cute.domain_offset((tile.first_row, 0), mX), (self.tile_n, self.token_k), (0, None)
            )
            tXsX, tXgX = cpasync.tma_partition(
                tma_x,
                rank,
                cute.make_layout(self.cluster),
                cute.group_modes(shared.x, 0, 2),
                cute.group_modes(gX, 0, 2),
            )
            k_stages = self.k_stages
            if const_expr(self.begins_next):
                k_stages = select_(index < num_steps, Int32(self.k_stages), Int32(1))
            for k_stage in cutlass.range(k_stages, unroll=1):
                # acquire: nobody, in a cluster neither CTA's warps, reads the stage any more
                cute.arch.mbarrier_wait(shared.empty + stage, phase)
                full = shared.full + stage
                with cute.arch.elect_one():
                    if (index != first) | (k_stage >= ahead):
                        if k_stage == 0:
                            self.write_tile(shared.ring + slot * 32, tile)
                        self.load_weights(tile, k_stage, stage, policy, shared, args)
                    if const_expr(self.awaits_rows):
                        # release: what await_rows has learnt, to the math warps, which read the
                        # rows' scales
                        cute.arch.mbarrier_arrive(full)
                    for i in cutlass.range_constexpr(self.stage_blocks_sf):
                        # Beyond K the tokens are zeros and any scale does.
                        block32 = cutlass.min(
                            self.stage_blocks_sf * k_stage + i, self.k // layout.SF_BLOCK - 1
                        )
                        at = Int64(block32) * args.sf_stride + tile.first_sf_row
                        ptx.bulk_load(
                            shared.sf + (stage * self.stage_blocks_sf + i) * (4 * self.tile_n),
                            args.block_sf + at * 4,
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
                        mcast_mask=multicast,
                    )
                stage, phase = mainloop.advance(self, stage, phase)
            slot = self.next_slot(slot)
            index += step

    @cute.jit
    def load_weights(self, tile, k_stage, stage, policy, shared, args):
        """Announce a stage's bytes and copy its weights, a strip's k-blocks at once."""
        full = shared.full + stage
        size = Int32(self.k_slices * self.slice_bytes)
        if const_expr(self.k_blocks % self.blocks_per_stage != 0):
            left = self.k_blocks - k_stage * self.blocks_per_stage
            size = cutlass.min(left, self.blocks_per_stage) * self.blob_bytes
        rest = self.token_bytes + self.sf_bytes
        # release: the tile's coordinates are visible to who sees the stage full
        cute.arch.mbarrier_arrive_and_expect_tx(full, self.strips_per_tile * size + rest)
        for i in cutlass.range_constexpr(self.strips_per_tile):
            # Padding strips of the last tile load the last strip once more.
            strip = cutlass.min(tile.m_tile * self.strips_per_tile + i, self.strips - 1)
            block = (Int64(tile.expert) * self.strips + strip) * self.k_blocks
            block += k_stage * self.blocks_per_stage
            ptx.bulk_load(
                shared.w + (stage * self.num_wgs + i * self.k_slices) * self.slice_bytes,
                args.w + block * self.blob_bytes,
                size,
                full.toint(),
                policy,
            )

    @cute.jit
    def tile_at(self, index, rank, args, load: cutlass.Constexpr):
        step = step_at(index, self.m_steps, self.tile_n, args, load)
        first_sf_row = layout.first_sf_row(step.expert_row, step.expert) + step.first
        rows = cutlass.min(step.expert_rows - step.first, self.tile_n)
        m_tile = step.m_step * self.cluster + rank
        return Tile(step.expert, m_tile, step.expert_row + step.first, first_sf_row, rows)

    def write_tile(self, address, tile):
        for i, value in enumerate(tile):
            ptx.store_shared(Int32, address + 4 * i, value)

    def read_tile(self, address):
        return Tile(*(ptx.load_shared(Int32, address + 4 * i) for i in range(len(Tile._fields))))

    @cute.jit
    def next_slot(self, slot):
        slot += 1
        if slot == self.ring_slots:
            slot = Int32(0)
        return slot

    @cute.jit
    def math(self, shared, thread, args):
        """The role of a math warpgroup."""
        wg = cute.arch.make_warp_uniform(thread // 128) - 1
        thread, lane = ptx.keep(thread & 127), ptx.keep(thread & 31)
        place = Place(wg, wg // self.k_slices, wg % self.k_slices, thread, thread >> 5, lane)
        stage, phase, slot, count = Int32(0), Int32(0), Int32(0), Int32(0)
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        index, step = block // self.cluster, grid // self.cluster
        num_steps = ptx.load_shared(Int32, shared.num_tiles) * self.m_steps
        acc = [mainloop.accumulators(self.tile_n) for _ in range(2 if self.begins_next else 0)]
        if const_expr(self.begins_next):
            if index < num_steps:
                # acquire: the copies of load
                cute.arch.mbarrier_wait(shared.full + stage, phase)
                mainloop.begin(self, acc[1], stage, place, shared)
                stage, phase = mainloop.end_begun(self, acc, stage, phase, place, shared)
        while index < num_steps:
            if const_expr(not self.begins_next):
                # acquire: load wrote the tile before it released the tile's first stage
                cute.arch.mbarrier_wait(shared.full + stage, phase)
            tile = self.read_tile(shared.ring + slot * 32)
            stage, phase = self.tile_in_width(
                self.widths, acc, tile, stage, phase, count, place, shared, args
            )
            slot = self.next_slot(slot)
            count += 1
            index += step

    @cute.jit
    def tile_in_width(
        self, widths: cutlass.Constexpr, acc: cutlass.Constexpr, tile, stage, phase, count,
        place: cutlass.Constexpr, shared, args
    ):  # fmt: skip
        """One tile in the least of ``widths``, the widest first, that holds its rows."""
        if const_expr(len(widths) == 1):
            stage, phase = self.tile(widths[0], acc, tile, stage, phase, count, place, shared, args)
        else:
            half = len(widths) // 2
            if tile.rows > widths[half]:
                stage, phase = self.tile_in_width(
                    widths[:half], acc, tile, stage, phase, count, place, shared, args
                )
            else:
                stage, phase = self.tile_in_width(
                    widths[half:], acc, tile, stage, phase, count, place, shared, args
                )
        return stage, phase

    @cute.jit
    def tile(
        self, n: cutlass.Constexpr, acc: cutlass.Constexpr, tile, stage, phase, count,
        place: cutlass.Constexpr, shared, args
    ):  # fmt: skip
        """One tile in ``n`` columns: all of K, then the epilogue."""
        # What follows from these anew for each width: registers would not hold it all.
        place = place._replace(thread=ptx.keep(place.thread), lane=ptx.keep(place.lane))
        strip = tile.m_tile * self.strips_per_tile + place.strip
        constants = epilogue.fetch(self, n, tile, strip, place.thread, args)
        k_loop = mainloop.k_loop_e4m3 if const_expr(self.fp8) else mainloop.k_loop_bf16
        if const_expr(self.begins_next):
            sums = acc[0]
        else:
            sums = mainloop.accumulators(n)
            sums.fill(0.0)
        stage, phase = k_loop(self, n, sums, tile, strip, stage, phase, place, shared, args)
        if const_expr(self.k_blocks % self.blocks_per_stage != 0):
            if self.my_stages(place.k_slice) < self.k_stages:
                # No k-block of the last stage is this slice's.
                cute.arch.mbarrier_wait(shared.full + stage, phase)
                mainloop.release(self, shared.empty + stage, place.lane)
                stage, phase = mainloop.advance(self, stage, phase)
        if const_expr(self.begins_next):
            mainloop.begin(self, acc[1], stage, place, shared)
        if const_expr(self.k_slices == 1):
            epilogue.finish(self, n, sums, tile, strip, place, constants, shared, args)
        else:
            mainloop.share_partial(self, sums, count, place, shared)
            if place.k_slice == count % self.k_slices:
                mainloop.sum_partials(self, sums, count, place, shared)
                epilogue.finish(self, n, sums, tile, strip, place, constants, shared, args)
        if const_expr(self.begins_next):
            stage, phase = mainloop.end_begun(self, acc, stage, phase, place, shared)
        return stage, phase

    def my_stages(self, k_slice):
        """Stages of a tile that hold k-blocks of this slice."""
        if self.k_blocks % self.blocks_per_stage == 0:
            return self.k_stages
        blocks = self.k_blocks // self.blocks_per_slice
        return (blocks - k_slice + (self.k_slices - 1)) // self.k_slices
