"""Grouped GEMM over experts on Blackwell: weights are M, the rows of one expert are N."""

from typing import NamedTuple

import cutlass
from cutlass import Int16, Int32, Int64, Uint8, const_expr, cute, memory, select_
from cutlass.cute.nvgpu import cpasync, tcgen05

from moe_ep_jit import layout
from moe_ep_jit.kernels.common import exchange, ptx
from moe_ep_jit.kernels.common.epilogue import PITCH
from moe_ep_jit.kernels.common.forward import GemmArgs
from moe_ep_jit.kernels.common.schedule import share_num_tiles, step_at, sync_cluster
from moe_ep_jit.kernels.sm100 import epilogue, mainloop, packing, tmem
from moe_ep_jit.kernels.sm100.config import Config
from moe_ep_jit.layout import ceil_div, round_up

SMEM_BYTES = 232_448  # of one CTA; more fails only at launch
MAX_STAGES = 12
RING = 8  # tiles that the schedule is ahead of the role that is last
RESERVED_BYTES = 3072  # barriers, alignment of the buffers: a few hundred are used
LINE = 128  # bytes of a row in shared memory, and of what TMA counts weights and scales in


class Tile(NamedTuple):
    """One tile of the schedule; the epilogue takes it apart by columns."""

    expert: Int32
    m_tile: Int32
    n_tile: Int32
    first_row: Int32
    rows: Int32  # live ones from there on
    column: Int32  # of the n-tile, that first_row is at


class Place(NamedTuple):
    """Where an epilogue thread works."""

    wg: Int32  # epilogue warpgroup: which 64 of the tile's packed rows
    thread: Int32  # in the warpgroup
    warp: Int32
    lane: Int32


class Shared(NamedTuple):
    """Shared tensors that TMA fills, and addresses (Int32)."""

    w: cute.Tensor  # [lines of a blob, 128, stages]
    x: cute.Tensor  # [tile_n / cluster, 128, stages], swizzled
    x_sf: cute.Tensor  # [lines of one copy, 128, stages x copies]
    staging: Int32  # warpgroups x rows that the epilogue stages at once
    amax: Int32  # warpgroups x chunk_n x 4 warps
    columns: Int32  # warpgroups x tile_n x (fp32 scale, then int32 slot)
    ring: Int32  # RING tiles, all but their column
    num_tiles: Int32  # n-tiles of this call
    base: Int32  # first column of tensor memory
    full: cute.Pointer
    empty: cute.Pointer
    acc_full: cute.Pointer
    acc_empty: cute.Pointer
    tile_full: cute.Pointer
    tile_empty: cute.Pointer


class Copies(NamedTuple):
    """TMA atoms and the tensors that they read, in lines of 128 bytes."""

    w: cute.CopyAtom
    mW: cute.Tensor
    x: cute.CopyAtom
    mX: cute.Tensor
    x_sf: cute.CopyAtom
    mSF: cute.Tensor


class GroupedGemm:
    """One persistent CTA an SM, or pair of CTAs on two; a tile is 128 weight rows a CTA x tile_n
    rows of an expert x all of K. Of a pair, CTA 0 leads: it alone issues MMAs.

    Roles: warp 0 load; warp 1 scale copy and mma, in one thread; warp 2 tensor memory; warp 3
    schedule; warps 4-7 and 8-11 epilogue, each warpgroup 64 of the packed rows.

    full       load -> mma        leader's: 1 arrive + the bytes that TMA brings to all its CTAs
    empty      mma -> load        each CTA's: 1 commit of the stage's MMAs
    acc_full   mma -> epilogue    each CTA's: 1 commit of the tile's MMAs
    acc_empty  epilogue -> mma    leader's: 1 arrive of each epilogue warp of all its CTAs, once it
                                  has read its part of the accumulator
    tile_full  schedule -> all    each CTA's: 1 arrive
    tile_empty all -> schedule    each CTA's: 1 arrive of each warp that has read the tile: load,
                                  epilogue, and mma in the leader

    schedule:  reads the tile list ahead of the others, who would each wait for global memory.
    load:      before the grid before has ended: the first tile's weights. Then for each stage of
               each tile: wait empty, expect bytes, copy. Runs on into the next tile. A pair's CTAs
               load their own weights and half of the tokens, and multicast half of the tokens'
               scales each.
    mma:       wait acc_empty, then for each stage: wait full, copy scales to tensor memory, four
               MMAs, commit empty; commit acc_full. Two accumulators take turns. An expert's last
               tile multiplies only as many columns as the epilogue reads (``width``).
    epilogue:  fetch scales, biases and slots; wait acc_full; the tile's live columns in chunks from
               tensor memory to registers and on to memory, while the next tile is multiplied.

    Tensor memory, in columns: two accumulators, then for each stage, or two by turns, the weights'
    scales and the tokens'. The order of the tiles is ``common/schedule.py``'s.
    """

    threads = 384
    epilogue_warps = 8

    def __init__(
        self, *, kind: str, gate_up: bool, k: int, m: int, num_experts: int, config: Config,
        ranks: exchange.Ranks | None = None
    ):  # fmt: skip
        self.ranks = ranks
        self.awaits_rows = gate_up and ranks is not None
        self.kind, self.gate_up, self.k, self.m = kind, gate_up, k, m
        self.num_experts = num_experts
        self.tile_n, self.cluster = config.tile_n, config.cluster
        blob_k = packing.BLOB_K[kind]
        self.k_stages = ceil_div(k, blob_k)
        # MMAs of a stage; of the last, those that K reaches.
        self.steps = packing.ROW_BYTES // tmem.MMA_K_BYTES
        self.last_steps = ceil_div(k - (self.k_stages - 1) * blob_k, blob_k // self.steps)
        self.atoms = packing.atoms(kind)
        self.steps_per_atom = self.steps // self.atoms
        self.m_tiles = ceil_div(m, packing.TILE_M)
        self.m_steps = ceil_div(self.m_tiles, self.cluster)
        # What common/epilogue reads.
        self.act, self.strips = kind, 2 * self.m_tiles
        self.chunk_n = min(self.tile_n, 64)
        self.has_weight_sf = kind == "nvfp4"
        self.has_row_sf = kind == "nvfp4" and gate_up
        self.has_expert_sf = kind == "nvfp4" and not gate_up
        self.h_values = {"mxfp8": "e4m3", "nvfp4": "e2m1"}[kind]
        self.store_scales = epilogue.store_scales
        rows = max(self.chunk_n // 2, 8)  # staged two in one
        self.staging_bytes = rows * PITCH if gate_up else self.chunk_n * 128
        self.plan_scales()
        self.plan_memory()

    def chunk(self, n):
        """Columns that the epilogue stages at once of ``n``."""
        return min(n, self.chunk_n)

    def plan_scales(self):
        """The tokens' block scales: in memory k-atoms of a tile (``layout.sf_atom_bytes``), in a
        stage blocks of 512 bytes, of which narrow tiles fill the first lanes.
        """
        self.k_atoms = layout.sf_atoms(self.k, self.kind)
        self.h_atoms = layout.sf_atoms(self.m // 2, self.kind)  # of what gate/up writes
        self.sf_atom_bytes = layout.sf_atom_bytes(self.tile_n)
        self.sf_blocks = ceil_div(self.tile_n, 128)  # of 128 rows
        self.is_narrow = self.sf_atom_bytes < packing.ATOM_BYTES
        self.sf_copies = self.atoms if self.is_narrow else 1
        self.sf_lines = self.sf_atom_bytes // LINE * (self.atoms // self.sf_copies)
        self.sf_pitch = self.atoms * self.sf_blocks * packing.ATOM_BYTES
        self.sf_bytes = self.sf_copies * self.sf_lines * LINE

    def plan_memory(self):
        """Stages: as many as fit beside the epilogue's buffers; columns of tensor memory."""
        self.value_bytes = packing.TILE_M * packing.ROW_BYTES
        self.w_bytes = packing.blob_bytes(self.kind)
        self.w_pitch = round_up(self.w_bytes, 1024)  # where a swizzled operand may begin
        self.token_rows = self.tile_n // self.cluster
        self.token_bytes = self.token_rows * LINE
        self.stage_bytes = self.w_pitch + self.token_bytes + self.sf_pitch
        epilogue_bytes = 2 * (self.staging_bytes + self.chunk_n * 16 + self.tile_n * 8)
        self.num_stages = min(
            MAX_STAGES, (SMEM_BYTES - epilogue_bytes - RESERVED_BYTES) // self.stage_bytes
        )
        assert self.num_stages >= 3, f"{self.stage_bytes} bytes a stage leave no room for three"
        barriers = (2 * self.num_stages + 4 + 2 * RING) * 8 + RING * 32 + 32
        self.smem_bytes = self.num_stages * self.stage_bytes + epilogue_bytes + barriers
        # What a full stage has received, in all its CTAs.
        self.loaded_bytes = self.cluster * (self.w_bytes + self.token_bytes + self.sf_bytes)

        # An accumulator begins on a multiple of 32 columns, as in all published kernels.
        self.acc_pitch = round_up(self.tile_n, 32)
        self.sfa_column = 2 * self.acc_pitch
        # The scales of each stage have columns of their own where there are as many, else two
        # stages by turns: why is in docs/blackwell.md.
        self.sf_columns = 4 * self.atoms * (1 + self.sf_blocks)
        fits = self.sfa_column + self.num_stages * self.sf_columns <= tmem.COLUMNS
        self.sf_slots = self.num_stages if fits else 2
        used = self.sfa_column + self.sf_slots * self.sf_columns
        self.tmem_columns = max(32, 1 << (used - 1).bit_length())
        assert self.tmem_columns <= tmem.COLUMNS, f"{used} columns of tensor memory"

    @cute.jit
    def __call__(self, x: Int64, rows: Int32, args: GemmArgs, num_sms: Int32, stream):
        group = tcgen05.CtaGroup.ONE if const_expr(self.cluster == 1) else tcgen05.CtaGroup.TWO
        one = cpasync.CopyBulkTensorTileG2SOp(group)
        both = one
        if const_expr(self.cluster > 1):
            both = cpasync.CopyBulkTensorTileG2SMulticastOp(group)
        row_bytes = self.k * (4 if self.kind == "nvfp4" else 8) // 8
        w_lines = self.num_experts * self.m_tiles * self.k_stages * (self.w_bytes // LINE)
        sf_lines = layout.sf_lines(rows, self.num_experts, self.k_atoms)
        sW, sX, sSF = self.shared_layouts()
        w, mW = cpasync.make_tiled_tma_atom(
            one, lines(args.w, w_lines, LINE), cute.slice_(sW, (None, None, 0)),
            (self.w_bytes // LINE, LINE),
        )  # fmt: skip
        x, mX = cpasync.make_tiled_tma_atom(
            one, lines(x, rows, row_bytes), cute.slice_(sX, (None, None, 0)),
            (self.token_rows, LINE),
        )  # fmt: skip
        x_sf, mSF = cpasync.make_tiled_tma_atom(
            both, lines(args.token_sf, sf_lines, LINE), cute.slice_(sSF, (None, None, 0)),
            (self.sf_lines, LINE), num_multicast=self.cluster,
        )  # fmt: skip
        self.kernel(Copies(w, mW, x, mX, x_sf, mSF), args).launch(
            grid=(num_sms // self.cluster * self.cluster, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    def shared_layouts(self):
        """Of weights, tokens and the tokens' scales, all their stages."""
        stages = self.num_stages
        w = cute.make_layout((self.w_bytes // LINE, LINE, stages), stride=(LINE, 1, self.w_pitch))
        atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, Uint8)
        x = cute.tile_to_shape(atom, (self.token_rows, LINE, stages), order=(0, 1, 2))
        copies = stages * self.sf_copies
        pitch = self.sf_pitch // self.sf_copies
        sf = cute.make_layout((self.sf_lines, LINE, copies), stride=(LINE, 1, pitch))
        return w, x, sf

    @cute.kernel
    def kernel(self, copies: Copies, args: GemmArgs):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, _, _ = cute.arch.block_idx()
        rank = block % self.cluster
        shared = self.allocate()
        if warp == 0:
            for atom in (copies.w, copies.x, copies.x_sf):
                cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(self.num_stages):
                    cute.arch.mbarrier_init(shared.full + i, 1)
                    cute.arch.mbarrier_init(shared.empty + i, 1)
                for i in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(shared.acc_full + i, 1)
                    arrivals = self.epilogue_warps * self.cluster
                    cute.arch.mbarrier_init(shared.acc_empty + i, arrivals)
                for i in cutlass.range_constexpr(RING):
                    cute.arch.mbarrier_init(shared.tile_full + i, 1)
                    readers = self.epilogue_warps + select_(rank == 0, Int32(2), Int32(1))
                    cute.arch.mbarrier_init(shared.tile_empty + i, readers)
        if warp == 2:
            tmem.allocate(shared.base, self.tmem_columns, self.cluster)
            tmem.fence_before()
        if const_expr(self.is_narrow):
            self.clear_scales(shared, thread)
        cute.arch.mbarrier_init_fence()
        sync_cluster(self.cluster)
        share_num_tiles(self.cluster, shared.num_tiles, thread, args.tiles)
        sync_cluster(self.cluster)
        tmem.fence_after()
        base = ptx.load_shared(Int32, shared.base)
        if warp == 0:
            self.load(copies, shared, rank, thread, args)
        elif warp == 1:
            if rank == 0:
                self.mma(shared, base, thread)
        elif warp == 3:
            self.schedule(shared, rank, args)
        elif warp >= 4:
            cute.arch.griddepcontrol_wait()
            self.finish(shared, base, thread, args)
        # The other CTA may still arrive at this one's barriers, or multiply from its memory.
        tmem.fence_before()
        sync_cluster(self.cluster)
        if warp == 2:
            tmem.fence_after()
            tmem.free(base, self.tmem_columns, self.cluster)

    def allocate(self):
        """Shared memory of one CTA; equal in both CTAs of a pair, which name it by address."""
        smem = memory.SmemAllocator()
        sW, sX, sSF = self.shared_layouts()
        w = smem.allocate_tensor(Uint8, sW, 1024)
        # A layout ends where its last element does: keep the next buffer off the last stage's end.
        x = smem.allocate_tensor(Uint8, sX.outer, 1024, swizzle=sX.inner)
        x_sf = cute.make_tensor(
            ptx.ptr(Uint8, Int32(smem.allocate(self.num_stages * self.sf_pitch, 128).toint()),
                    128, ptx.SMEM),
            sSF,
        )  # fmt: skip
        epilogue_sizes = (2 * self.staging_bytes, 2 * self.chunk_n * 16, 2 * self.tile_n * 8)
        sizes = (*epilogue_sizes, RING * 32, 16, 16)
        addresses = [Int32(smem.allocate(size, 128).toint()) for size in sizes]
        counts = (self.num_stages, self.num_stages, 2, 2, RING, RING)
        barriers = [smem.allocate_array(Int64, count) for count in counts]
        return Shared(w, x, x_sf, *addresses, *barriers)

    @cute.jit
    def clear_scales(self, shared, thread):
        """Lanes behind a narrow tile's rows, which no copy fills and every copy to tensor memory
        reads.
        """
        zeros = cute.make_rmem_tensor(4, Int32)
        zeros.fill(0)
        first = Int32(shared.x_sf.iterator.toint())
        for i in cutlass.range(thread * 16, self.num_stages * self.sf_pitch, self.threads * 16):
            cute.autovec_copy(zeros, ptx.vector(Int32, first + i, 4, ptx.SMEM))
        # release: to TMA and the tensor core, behind the barrier that follows
        cute.arch.fence_proxy("async.shared", space="cta")

    def steps_of(self, shared):
        """This CTA's (or pair's) first entry of the schedule, the step to its next, and the end."""
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        end = ptx.load_shared(Int32, shared.num_tiles) * self.m_steps
        return block // self.cluster, grid // self.cluster, end

    @cute.jit
    def schedule(self, shared, rank, args):
        """The role of warp 3. It reads what route wrote, past L1, and waits for no grid."""
        count = Int32(0)
        index, step, end = self.steps_of(shared)
        while index < end:
            tile = self.tile_at(index, rank, args)
            slot = count & (RING - 1)
            # acquire: all roles have read what the slot held; the first pass finds it free
            cute.arch.mbarrier_wait(shared.tile_empty + slot, ((count // RING) & 1) ^ 1)
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(len(tile) - 1):
                    ptx.store_shared(Int32, shared.ring + slot * 32 + 4 * i, tile[i])
                # release: the tile is visible to all roles of this CTA
                cute.arch.mbarrier_arrive(shared.tile_full + slot)
            count += 1
            index += step

    @cute.jit
    def read_tile(self, shared, count):
        """This CTA's tile number ``count``, from the ring."""
        slot = count & (RING - 1)
        # acquire: schedule has written the tile
        cute.arch.mbarrier_wait(shared.tile_full + slot, (count // RING) & 1)
        at = shared.ring + slot * 32
        fields = [ptx.load_shared(Int32, at + 4 * i) for i in range(len(Tile._fields) - 1)]
        return Tile(*fields, Int32(0))

    @cute.jit
    def release_tile(self, shared, count, thread):
        """By one warp, which has read the tile."""
        cute.arch.sync_warp()
        if (thread & 31) == 0:
            # release: schedule may overwrite the slot
            cute.arch.mbarrier_arrive(shared.tile_empty + (count & (RING - 1)))

    def width(self, rows):
        """Columns that the MMAs of a tile with ``rows`` live ones multiply: whole chunks of the
        epilogue, which reads no others. Fewer than 64 would not be faster (docs/blackwell.md).
        """
        return (rows + (self.chunk_n - 1)) & ~(self.chunk_n - 1)

    @cute.jit
    def load(self, copies, shared, rank, thread, args):
        """The role of warp 0."""
        stage, phase, count = Int32(0), Int32(1), Int32(0)  # the first pass finds every stage free
        index, step, end = self.steps_of(shared)
        # The first tile's weights, while the kernel before still makes its rows.
        ahead = min(self.num_stages, self.k_stages)
        awaited, lane = Int32(-1), cute.arch.lane_idx()
        if index < end:
            tile = self.read_tile(shared, count)
            for k_stage in cutlass.range_constexpr(ahead):
                self.load_weights(copies, tile, Int32(k_stage), Int32(k_stage), rank, shared)
        # Everything but the prepared weights comes from the kernels before.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        while index < end:
            tile = self.read_tile(shared, count)
            self.release_tile(shared, count, thread)
            if const_expr(self.awaits_rows):
                if tile.expert != awaited:
                    exchange.await_rows(self.ranks, args.control, tile.expert, lane)
                    awaited = tile.expert
            for k_stage in cutlass.range(self.k_stages, unroll=1):
                # acquire: the MMAs that read the stage are done
                cute.arch.mbarrier_wait(shared.empty + stage, phase)
                if (count > 0) | (k_stage >= ahead):
                    self.load_weights(copies, tile, k_stage, stage, rank, shared)
                self.load_tokens(copies, tile, k_stage, stage, rank, shared)
                stage, phase = mainloop.advance(self, stage, phase)
            count += 1
            index += step

    @cute.jit
    def load_weights(self, copies, tile, k_stage, stage, rank, shared):
        """Announce a stage's bytes, all of them, and copy its blob of weights."""
        full = shared.full + stage
        if rank == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, self.loaded_bytes)
        # The padding tile of an odd number loads the last one once more.
        m_tile = cutlass.min(tile.m_tile, self.m_tiles - 1)
        blob = (tile.expert * self.m_tiles + m_tile) * self.k_stages + k_stage
        # Narrow rungs expect one n-tile an expert, whose weights are read once; wide ones several,
        # which read them again from L2.
        policy = Int64(ptx.EVICT_FIRST if self.tile_n <= 64 else ptx.EVICT_NORMAL)
        gW = cute.local_tile(copies.mW, (self.w_bytes // LINE, LINE), (blob, 0))
        source, target = self.one_copy(copies.w, 0, 1, gW, shared.w, stage)
        cute.copy(copies.w, source, target, tma_bar_ptr=full, cache_policy=policy)

    @cute.jit
    def load_tokens(self, copies, tile, k_stage, stage, rank, shared):
        """Copy this CTA's tokens of a stage, and its share of their block scales."""
        full = shared.full + stage
        # Each CTA of a pair holds half of the columns that are multiplied.
        first_row = tile.first_row + rank * (self.width(tile.rows) // self.cluster)
        mX = cute.domain_offset((first_row, 0), copies.mX)
        gX = cute.local_tile(mX, (self.token_rows, LINE), (0, k_stage))
        source, target = self.one_copy(copies.x, 0, 1, gX, shared.x, stage)
        cute.copy(copies.x, source, target, tma_bar_ptr=full)
        multicast = Int16((1 << self.cluster) - 1)  # both CTAs; one alone takes no notice
        line = (tile.n_tile * self.k_atoms + k_stage * self.atoms) * (self.sf_atom_bytes // LINE)
        for i in cutlass.range_constexpr(self.sf_copies):
            # Beyond K: what lies behind, of the next tile or none; nothing is multiplied by it.
            mSF = cute.domain_offset((line + i * self.sf_lines, 0), copies.mSF)
            gSF = cute.local_tile(mSF, (self.sf_lines, LINE), (0, 0))
            to = stage * self.sf_copies + i
            source, target = self.one_copy(copies.x_sf, rank, self.cluster, gSF, shared.x_sf, to)
            cute.copy(copies.x_sf, source, target, tma_bar_ptr=full, mcast_mask=multicast)

    def one_copy(self, atom, rank, ctas, source, target, stage):
        """One tile of memory and its place in shared memory, as TMA wants them."""
        to, of = cpasync.tma_partition(
            atom,
            rank,
            cute.make_layout(ctas),
            cute.group_modes(target, 0, 2),
            cute.group_modes(source, 0, 2),
        )
        return of, to[(None, stage)]

    @cute.jit
    def tile_at(self, index, rank, args):
        step = step_at(index, self.m_steps, self.tile_n, args, ptx.load_relaxed)
        rows = cutlass.min(step.expert_rows - step.first, self.tile_n)
        m_tile = step.m_step * self.cluster + rank
        first_row = step.expert_row + step.first
        return Tile(step.expert, m_tile, step.n_tile, first_row, rows, Int32(0))

    @cute.jit
    def mma(self, shared, base, thread):
        """The role of warp 1 of the leading CTA. The whole warp waits and counts, one thread,
        always the same, asks the tensor core: a loop of MMAs in one thread's branch crashes ptxas.
        """
        stage, phase, count = Int32(0), Int32(0), Int32(0)
        index, step, end = self.steps_of(shared)
        while index < end:
            width = self.width(self.read_tile(shared, count).rows)
            self.release_tile(shared, count, thread)
            buffer = count & 1
            # acquire: every epilogue warp has read the accumulator; the first two find it free
            cute.arch.mbarrier_wait(shared.acc_empty + buffer, ((count >> 1) & 1) ^ 1)
            tmem.fence_after()
            accumulator = base + buffer * self.acc_pitch
            stage, phase = mainloop.k_loop(self, accumulator, width, base, stage, phase, shared)
            # release: the tile's product is visible to the epilogue warps, of both CTAs
            with cute.arch.elect_one():
                tmem.commit(self.cluster, shared.acc_full + buffer)
            count += 1
            index += step

    @cute.jit
    def finish(self, shared, base, thread, args):
        """The role of the epilogue warpgroups."""
        wg = cute.arch.make_warp_uniform(thread // 128) - 1
        thread, lane = ptx.keep(thread & 127), ptx.keep(thread & 31)
        place = Place(wg, thread, thread >> 5, lane)
        count, awaited = Int32(0), Int32(-1)
        index, step, end = self.steps_of(shared)
        while index < end:
            tile = self.read_tile(shared, count)
            self.release_tile(shared, count, thread)
            if const_expr(self.awaits_rows and self.has_row_sf):
                # Their scales are read before the tile's MMAs are waited for.
                if tile.expert != awaited:
                    exchange.await_rows(self.ranks, args.control, tile.expert, lane)
                    awaited = tile.expert
            buffer, parity = count & 1, (count >> 1) & 1
            accumulator = base + buffer * self.acc_pitch
            epilogue.finish_tile(self, tile, accumulator, buffer, parity, place, shared, args)
            count += 1
            index += step


def lines(address, count, width):
    """``count`` rows of ``width`` bytes from an address on."""
    return cute.make_tensor(
        ptx.ptr(Uint8, address, 128), cute.make_layout((count, width), stride=(width, 1))
    )
