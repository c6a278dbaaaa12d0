"""Route: count the rows of each expert and give each slot its place.

A slot is a (token, k) pair, numbered token * top_k + k; each slot with a valid id becomes one row.
Rows of an expert are neighbours, in the order of their slots. Ids below 0 or beyond the experts,
and every slot at or beyond the live token count, are skipped.

With several ranks the rows are those of all of them, an expert's in the order of its sources.
"""

from typing import NamedTuple

import cutlass
from cutlass import Int16, Int32, Int64, const_expr, cute, memory, select_

from moe_ep_jit import layout
from moe_ep_jit.kernels.common import exchange, ptx


class RouteArgs(NamedTuple):
    """Run-time facts of a call's routing; addresses are Int64, 0 where absent."""

    tokens: Int32
    num_tokens: Int64
    ids: Int64
    ids_stride: Int64
    ids_words: Int32
    control: Int64
    chunk_counts: Int64
    slot_rank: Int64
    expert_info: Int64
    tiles: Int64
    row_slot: Int64
    error: Int64
    load: Int64


@cute.jit
def live_tokens(args):
    """Rows of x that count: the device's number where one is given, never beyond x.

    Dispatch asks before its wait, where L1 may hold the number of an earlier call.
    """
    live = args.tokens
    if args.num_tokens != 0:
        live = cutlass.max(cutlass.min(ptx.load_relaxed(args.num_tokens), live), 0)
    return live


@cute.jit
def expert_of(args, token, k, num_experts: cutlass.Constexpr):
    """The expert of a slot, -1 if it is to be skipped."""
    address = args.ids + (Int64(token) * args.ids_stride + k) * (4 * args.ids_words)
    expert = ptx.load(Int32, address)
    if args.ids_words == 2:
        # An int64 that is no int32 is out of range.
        if ptx.load(Int32, address + 4) != 0:
            expert = Int32(-1)
    if expert >= num_experts:
        expert = Int32(-1)
    return cutlass.max(expert, Int32(-1))


class Route:
    """One CTA a chunk of slots; a warp's lanes are neighbouring slots.

    Each warp finds the lanes with equal ids, so that a slot's rank in its chunk is its rank in the
    warp plus the counts of the warps before: deterministic, without atomics. The CTA that finishes
    last turns the chunks' counts into prefix sums, the experts' first rows and the list of n-tiles;
    nobody waits for it but the next kernel. With several ranks that CTA first posts this rank's
    counts to all ranks and waits for theirs: the round's one wait of everybody for everybody.

    ranks      exchange.Ranks of several ranks, else None
    signature  of the layer's facts, which ranks compare in each round
    """

    def __init__(
        self, *, num_experts: int, top_k: int, tile_n: int,
        ranks: exchange.Ranks | None = None, signature: int = 0
    ):  # fmt: skip
        self.num_experts, self.top_k, self.tile_n = num_experts, top_k, tile_n
        self.ranks, self.signature = ranks, signature
        self.threads = layout.ROUTE_CHUNK
        self.num_warps = self.threads // 32
        #: Of this rank.
        self.num_local = num_experts if ranks is None else ranks.local

    @cute.jit
    def __call__(self, args: RouteArgs, recv_rows, stream):
        slots = args.tokens * self.top_k
        chunks = cutlass.max((slots + layout.ROUTE_CHUNK - 1) // layout.ROUTE_CHUNK, 1)
        self.kernel(args, recv_rows).launch(
            grid=(chunks, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, args: RouteArgs, recv_rows):
        """recv_rows: what a rank's receive regions hold, with several ranks; else None"""
        thread, _, _ = cute.arch.thread_idx()
        chunk, _, _ = cute.arch.block_idx()
        smem = memory.SmemAllocator()
        counts = smem.allocate_tensor(
            Int16, cute.make_layout(self.num_warps * self.num_experts), 16
        )
        first_rows = smem.allocate_tensor(Int32, cute.make_layout(self.num_experts + 1), 16)
        first_tiles = smem.allocate_tensor(Int32, cute.make_layout(self.num_experts + 1), 16)
        is_last = smem.allocate_tensor(Int32, cute.make_layout(1), 16)
        for i in cutlass.range(thread, self.num_warps * self.num_experts, self.threads):
            counts[i] = Int16(0)
        # The call before may still read the regions that are written below.
        cute.arch.griddepcontrol_wait()
        if const_expr(self.ranks is None):
            cute.arch.griddepcontrol_launch_dependents()
        if chunk == 0 and thread == 0:
            self.enter(args)
        cute.arch.sync_threads()
        self.count(args, counts, thread, chunk)
        if thread == 0:
            # release: the counts and ranks of this chunk are visible to the CTA that finishes last
            cute.arch.fence_acq_rel_gpu()
            grid, _, _ = cute.arch.grid_dim()
            tickets = args.control + layout.CONTROL_ROUTE_TICKET * 4
            ticket = cute.arch.atomic_add(ptx.ptr(Int32, tickets), Int32(1))
            # acquire: the counts of every chunk, released before its ticket
            cute.arch.fence_acq_rel_gpu()
            is_last[0] = Int32(ticket == grid - 1)
        cute.arch.sync_threads()
        if is_last[0] != 0:
            self.place(args, recv_rows, first_rows, first_tiles, thread)

    @cute.jit
    def enter(self, args):
        """Mark the workspace taken, until this round's combine; say so if it was already."""
        in_flight = args.control + layout.CONTROL_IN_FLIGHT * 4
        if cute.arch.atomic_exch(ptx.ptr(Int32, in_flight), Int32(1)) != 0:
            ptx.store_system(args.error + layout.ERROR_CODE * 4, Int32(layout.ERROR_TWO_STREAMS))

    @cute.jit
    def count(self, args, counts, thread, chunk):
        """Rank this chunk's slots within their experts and store the chunk's counts."""
        slot = chunk * layout.ROUTE_CHUNK + thread
        token = slot // self.top_k
        warp = thread // 32
        expert = Int32(-1)
        if token < live_tokens(args):
            expert = expert_of(args, token, slot - token * self.top_k, self.num_experts)
        same = ptx.match_any(expert)
        rank = cute.arch.popc(same & ptx.lanemask_lt())
        if expert >= 0 and rank == 0:
            counts[warp * self.num_experts + expert] = Int16(cute.arch.popc(same))
        cute.arch.sync_threads()
        for e in cutlass.range(thread, self.num_experts, self.threads):
            total = Int32(0)
            for w in cutlass.range(self.num_warps):
                mine = Int32(counts[w * self.num_experts + e])
                counts[w * self.num_experts + e] = Int16(total)
                total += mine
            ptx.store(Int32, args.chunk_counts + (Int64(chunk) * self.num_experts + e) * 4, total)
        cute.arch.sync_threads()
        if token < args.tokens:
            if expert >= 0:
                rank += Int32(counts[warp * self.num_experts + expert])
            ptx.store(
                Int32, args.slot_rank + Int64(slot) * 4, select_(expert >= 0, rank, Int32(-1))
            )
        cute.arch.sync_threads()

    @cute.jit
    def place(self, args, recv_rows, first_rows, first_tiles, thread):
        """Prefix sums over chunks and experts, the experts' rows and the list of n-tiles."""
        chunks, _, _ = cute.arch.grid_dim()
        for e in cutlass.range(thread, self.num_experts, self.threads):
            total = Int32(0)
            for c in cutlass.range(chunks, unroll=4):
                address = args.chunk_counts + (Int64(c) * self.num_experts + e) * 4
                mine = ptx.load(Int32, address)
                ptx.store(Int32, address, total)
                total += mine
            first_rows[e] = total
        cute.arch.sync_threads()
        if const_expr(self.ranks is not None):
            self.meet(args.control, recv_rows, first_rows, thread)
        if thread < 32:
            self.scan(args.control, first_rows, first_tiles, thread)
        cute.arch.sync_threads()
        if const_expr(self.ranks is not None):
            self.share_out(args, recv_rows, first_rows, first_tiles, thread)
        for e in cutlass.range(thread, self.num_local, self.threads):
            info = cute.make_rmem_tensor(4, Int32)
            info[0] = first_tiles[e]
            info[1] = first_tiles[e + 1] - first_tiles[e]
            info[2] = first_rows[e]
            info[3] = first_rows[e + 1] - first_rows[e]
            cute.autovec_copy(info, ptx.vector(Int32, args.expert_info + Int64(e) * 16, 4))
            if const_expr(self.ranks is None):
                # Atomic: the same weights may be in use in another workspace at this moment.
                ptx.reduce_add(args.load + Int64(e) * 8, Int64(info[3]))
        num_tiles = first_tiles[self.num_local]
        for i in cutlass.range(thread, num_tiles, self.threads):
            # The expert of n-tile i: the last whose first tile is at or before it.
            low, high = Int32(0), Int32(self.num_local)
            while high - low > 1:
                middle = (low + high) // 2
                if first_tiles[middle] <= i:
                    low = middle
                else:
                    high = middle
            ptx.store(Int32, args.tiles + Int64(1 + i) * 4, low)
        if thread == 0:
            ptx.store(Int32, args.tiles, num_tiles)
            ptx.store(Int32, args.control + layout.CONTROL_ROUTE_TICKET * 4, Int32(0))

    @cute.jit
    def meet(self, control, recv_rows, rows, thread):
        """Post this rank's rows of each expert to all ranks and wait for theirs; ``rows`` become
        those of all ranks.
        """
        ranks = self.ranks
        rank = exchange.word(control, layout.CONTROL_RANK)
        epoch = exchange.word(control, layout.CONTROL_EPOCH) + 1
        mine = exchange.count_slot(ranks, epoch, rank)
        for e in cutlass.range(thread, self.num_experts, self.threads):
            ptx.store(Int32, exchange.place(ranks, control, "arrived", e), Int32(0))
        # A rank that has failed leaves its peers alone: they may not have read an older post yet.
        failed = exchange.has_failed(control)
        num_counts = select_(failed, Int32(0), Int32(ranks.num_ranks * self.num_experts))
        for i in cutlass.range(thread, num_counts, self.threads):
            peer = i // self.num_experts
            expert = i - peer * self.num_experts
            to = exchange.count_at(ranks, control, mine, expert)
            ptx.store(Int32, to + exchange.delta(ranks, control, peer), rows[expert])
        if (thread < ranks.num_ranks) & (not failed):
            there = exchange.delta(ranks, control, thread)
            header = exchange.place(ranks, control, "headers", mine * layout.HEADER_WORDS) + there
            ptx.store(Int32, header + layout.HEADER_SIGNATURE * 4, Int32(self.signature))
            ptx.store(Int32, header + layout.HEADER_RECV_ROWS * 4, recv_rows)
            ptx.store(Int32, header + layout.HEADER_TILE_N * 4, Int32(self.tile_n))
            sent = Int32(0)
            for e in cutlass.range(ranks.local):
                sent += rows[thread * ranks.local + e]
            ptx.store(Int32, exchange.place(ranks, control, "expects", thread), sent)
        cute.arch.sync_threads()
        if thread < ranks.num_ranks:
            if not failed:
                flag = exchange.place(ranks, control, "count_flags", rank)
                # release: this rank's counts and header, and that its receive and combine regions
                # are free (this grid came after the combine before), to the wait below, over there
                there = exchange.delta(ranks, control, thread)
                ptx.store_release_system(flag + there, epoch)
            # acquire: the store above, by this thread's peer
            exchange.wait(ranks, control, "count exchange", "count_flags", thread, thread, epoch)
            if not exchange.has_failed(control):
                self.compare(control, recv_rows, exchange.count_slot(ranks, epoch, thread), thread)
        cute.arch.sync_threads()
        # Not before: dispatch's CTAs would hold the GPU while this one waits for other ranks.
        cute.arch.griddepcontrol_launch_dependents()
        for e in cutlass.range(thread, self.num_experts, self.threads):
            total, before = Int32(0), Int32(0)
            for source in cutlass.range(ranks.num_ranks, unroll=4):
                slot = exchange.count_slot(ranks, epoch, source)
                count = ptx.load(Int32, exchange.count_at(ranks, control, slot, e))
                before += select_(source < rank, count, Int32(0))
                total += count
                if e // ranks.local == rank:
                    index = (e - rank * ranks.local) * ranks.num_ranks + source
                    ptx.store(Int32, exchange.place(ranks, control, "expected", index), count)
            rows[e] = total
            ptx.store(Int32, exchange.place(ranks, control, "rows_before", e), before)
        cute.arch.sync_threads()

    @cute.jit
    def compare(self, control, recv_rows, slot, peer):
        """A peer's header against this rank's own."""
        header = exchange.place(self.ranks, control, "headers", slot * layout.HEADER_WORDS)
        mine = {
            layout.HEADER_SIGNATURE: Int32(self.signature),
            layout.HEADER_RECV_ROWS: recv_rows,
        }
        for i, want in mine.items():
            seen = ptx.load(Int32, header + i * 4)
            if seen != want:
                flag, phase = Int32(i), "count exchange"
                exchange.fail(control, layout.ERROR_DIFFERENT, phase, peer, flag, want, seen)

    @cute.jit
    def share_out(self, args, recv_rows, first_rows, first_tiles, thread):
        """Sums over all experts become, for each rank, sums over its own: where this rank's rows
        go, and in ``first_rows`` and ``first_tiles`` those of this rank's experts. Zeros, and
        nothing is sent or counted, where a rank would get too many or the round has failed.
        """
        ranks, control = self.ranks, args.control
        if thread < ranks.num_ranks:
            begin, end = first_rows[thread * ranks.local], first_rows[(thread + 1) * ranks.local]
            if (end - begin > recv_rows) & (not exchange.has_failed(control)):
                exchange.fail(
                    control, layout.ERROR_OVERFLOW, "count exchange", thread, Int32(0), recv_rows,
                    end - begin,
                )  # fmt: skip
        for e in cutlass.range(thread, self.num_experts, self.threads):
            owner_first = e // ranks.local * ranks.local
            for part, sums in (("first_row", first_rows), ("first_tile", first_tiles)):
                first = sums[e] - sums[owner_first]
                ptx.store(Int32, exchange.place(ranks, control, part, e), first)
        cute.arch.sync_threads()
        failed = exchange.has_failed(control)
        rank = exchange.word(control, layout.CONTROL_RANK)
        if not failed:
            epoch = exchange.word(control, layout.CONTROL_EPOCH) + 1
            mine = exchange.count_slot(ranks, epoch, rank)
            for e in cutlass.range(thread, self.num_experts, self.threads):
                sent = ptx.load(Int32, exchange.count_at(ranks, control, mine, e))
                # Atomic: the same weights may be in use in another workspace at this moment.
                ptx.reduce_add(args.load + Int64(e) * 8, Int64(sent))
        own = rank * ranks.local
        # One thread an expert at most: every sum is read before any is overwritten.
        row, tile = Int32(0), Int32(0)
        if (thread <= ranks.local) & (not failed):
            row = first_rows[own + thread] - first_rows[own]
            tile = first_tiles[own + thread] - first_tiles[own]
        cute.arch.sync_threads()
        if thread <= ranks.local:
            first_rows[thread], first_tiles[thread] = row, tile
        if thread == 0:
            epoch = control + layout.CONTROL_EPOCH * 4
            ptx.store(Int32, epoch, ptx.load(Int32, epoch) + 1)
        cute.arch.sync_threads()

    @cute.jit
    def scan(self, control, first_rows, first_tiles, lane):
        """One warp: counts in ``first_rows`` become exclusive sums; those of the n-tiles go to
        ``first_tiles``.
        """
        row_base, tile_base = Int32(0), Int32(0)
        for group in cutlass.range((self.num_experts + 31) // 32):
            e = group * 32 + lane
            rows = Int32(0)
            if e < self.num_experts:
                rows = first_rows[e]
            tile_n = self.tile_n
            if const_expr(self.ranks is not None):
                # Ranks may run different rungs.
                epoch = exchange.word(control, layout.CONTROL_EPOCH) + 1
                owner = cutlass.min(e, self.num_experts - 1) // self.ranks.local
                tile_n = exchange.tile_rows(self.ranks, control, epoch, owner)
            tiles = (rows + tile_n - 1) // tile_n
            row_sum, tile_sum = rows, tiles
            for power in cutlass.range_constexpr(5):
                distance = 1 << power
                row_before = cute.arch.shuffle_sync_up(row_sum, distance, mask_and_clamp=0)
                tile_before = cute.arch.shuffle_sync_up(tile_sum, distance, mask_and_clamp=0)
                if lane >= distance:
                    row_sum += row_before
                    tile_sum += tile_before
            cute.arch.sync_warp()
            if e < self.num_experts:
                first_rows[e] = row_base + row_sum - rows
                first_tiles[e] = tile_base + tile_sum - tiles
            row_base += cute.arch.shuffle_sync(row_sum, 31)
            tile_base += cute.arch.shuffle_sync(tile_sum, 31)
        if lane == 0:
            first_rows[self.num_experts] = row_base
            first_tiles[self.num_experts] = tile_base
