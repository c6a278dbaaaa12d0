"""Combine: the weighted sum of each token's rows, in fp32 and in the order of k, straight into the
output.

A product is rounded before it is added, as ``reference.weighted_sum`` does: what sums the rows that
other ranks return, kernel or torch, then agrees with this bit for bit.
"""

from typing import NamedTuple

import cutlass
from cutlass import (
    BFloat16,
    Float16,
    Float32,
    Float64,
    Int32,
    Int64,
    const_expr,
    cute,
    memory,
    select_,
)

from moe_ep_jit import layout
from moe_ep_jit.kernels.common import exchange, ptx
from moe_ep_jit.kernels.common.route import RouteArgs, live_tokens

#: Two bf16 NaNs.
NAN_PAIR = 0x7FC07FC0


class CombineArgs(NamedTuple):
    """Weights, rows and output of a call; addresses are Int64."""

    topk_weights: Int64
    topk_weights_stride: Int64
    topk_weights_type: Int32
    y: Int64
    out: Int64
    out_stride: Int64


class Combine:
    """One CTA for 1024 elements of a token at a time, 8 a thread: the rows of all k in flight
    together.

    A skipped slot's row was never written and is never read; a token without rows becomes zeros.

    ranks  exchange.Ranks of several ranks, else None: says that this rank's rows have gone to their
           sources, and waits for those that owe it some. A round that has failed becomes NaN
    """

    threads = 128
    rows_in_flight = 8

    def __init__(self, *, hidden: int, top_k: int, ranks: exchange.Ranks | None = None):
        self.hidden, self.top_k, self.ranks = hidden, top_k, ranks
        self.parts = layout.ceil_div(hidden, 8 * self.threads)
        # The compiler reads them four at once, also where top_k ends among the four.
        self.slots = layout.round_up(top_k, 4)

    @cute.jit
    def __call__(self, route: RouteArgs, args: CombineArgs, num_sms: Int32, stream):
        grid = cutlass.max(
            cutlass.min(Int64(route.tokens) * self.parts, Int64(num_sms) * 8), Int64(1)
        )
        self.kernel(route, args).launch(
            grid=(Int32(grid), 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, route: RouteArgs, args: CombineArgs):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        smem = memory.SmemAllocator()
        # Two: an item's are read while the next one's come.
        weights = smem.allocate_tensor(Float32, cute.make_layout((self.slots, 2)), 16)
        ranks = smem.allocate_tensor(Int32, cute.make_layout(self.slots), 16)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        failed = None
        if const_expr(self.ranks is not None):
            lost = smem.allocate_tensor(Int32, cute.make_layout(1), 16)
            self.meet(route.control, lost, thread, block)
            failed = lost[0] != 0
        num_items = Int64(live_tokens(route)) * self.parts
        item, turn = Int64(block), Int32(0)
        while item < num_items:
            token = Int32(item // self.parts)
            column = (Int32(item % self.parts) * self.threads + thread) * 8
            if thread < self.slots:
                rank, weight = Int32(-1), Float32(0.0)
                if thread < self.top_k:
                    slot = Int64(token) * self.top_k + thread
                    rank = ptx.load(Int32, route.slot_rank + slot * 4)
                    if const_expr(failed is not None):
                        rank = select_(failed, Int32(-1), rank)  # rows may be missing
                    weight = self.weight(args, token, thread)
                ranks[thread], weights[thread, turn] = rank, weight
            cute.arch.sync_threads()
            self.sum(args, token, column, weights[None, turn], ranks, failed)
            item += grid
            turn = turn ^ 1
        self.leave(route, thread, grid)

    @cute.jit
    def meet(self, control, lost, thread, block):
        """Tell each rank that its rows are there, wait for one's own; ``lost``, shared: whether the
        round has failed, by one reading, since another CTA's wait may end it at any moment.
        """
        ranks = self.ranks
        epoch = exchange.word(control, layout.CONTROL_EPOCH)
        if thread < ranks.num_ranks:
            if (block == 0) & (not exchange.has_failed(control)):
                rank = exchange.word(control, layout.CONTROL_RANK)
                flag = exchange.place(ranks, control, "done_flags", rank)
                # release: what the down GEMM, complete before this grid's wait, has written to the
                # peer's combine region, to the wait below, over there
                there = exchange.delta(ranks, control, thread)
                ptx.store_release_system(flag + there, epoch)
            if ptx.load(Int32, exchange.place(ranks, control, "expects", thread)) > 0:
                # acquire: the store above, by this thread's peer
                exchange.wait(ranks, control, "combine", "done_flags", thread, thread, epoch)
        cute.arch.sync_threads()
        if thread == 0:
            lost[0] = Int32(exchange.has_failed(control))
        cute.arch.sync_threads()

    @cute.jit
    def weight(self, args, token, k):
        """A top-k weight, of whichever type the call's are, as Float32."""
        types = layout.TOPK_WEIGHT_TYPES
        kind = args.topk_weights_type
        # One address for all types: of each its own, ptxas carries four around the loop and spills.
        is_half = (kind == types["bfloat16"]) | (kind == types["float16"])
        size = select_(kind == types["float64"], Int32(8), select_(is_half, Int32(2), Int32(4)))
        at = args.topk_weights + (Int64(token) * args.topk_weights_stride + k) * size
        weight = Float32(0.0)
        if kind == types["float32"]:
            weight = ptx.load(Float32, at)
        elif kind == types["bfloat16"]:
            weight = Float32(ptx.load(BFloat16, at))
        elif kind == types["float16"]:
            weight = Float32(ptx.load(Float16, at))
        else:
            weight = Float32(ptx.load(Float64, at))
        return weight

    @cute.jit
    def sum(self, args, token, column, weights, ranks, failed):
        """8 elements of a token's output."""
        total = cute.make_rmem_tensor(8, Float32)
        total.fill(0.0)
        words = cute.make_rmem_tensor((4, self.rows_in_flight), Int32)
        words.fill(0)  # a skipped row's are moved about, if never used
        inside = column < self.hidden
        for first in cutlass.range_constexpr(0, self.top_k, self.rows_in_flight):
            ks = list(range(first, min(first + self.rows_in_flight, self.top_k)))
            live = [inside & (ranks[k] >= 0) for k in ks]
            for i in cutlass.range_constexpr(len(ks)):
                if live[i]:
                    row = Int64(token) * self.top_k + ks[i]
                    at = args.y + (row * self.hidden + column) * 2
                    cute.autovec_copy(ptx.vector(Int32, at, 4), words[None, i])
            # The next item's ranks may come. And the rows are in flight together: without it ptxas
            # moves each row's load down to its sums.
            cute.arch.sync_threads()
            for i in cutlass.range_constexpr(len(ks)):
                if live[i]:
                    self.add_row(total, weights[ks[i]], words[None, i])
        if inside:
            packed = cute.make_rmem_tensor(4, Int32)
            for i in cutlass.range_constexpr(4):
                packed[i] = ptx.pack_bf16x2(total[2 * i], total[2 * i + 1])
                if const_expr(failed is not None):
                    packed[i] = select_(failed, Int32(NAN_PAIR), packed[i])
            address = args.out + (Int64(token) * args.out_stride + column) * 2
            cute.autovec_copy(packed, ptx.vector(Int32, address, 4))

    @cute.jit
    def add_row(self, total, weight, words):
        for i in cutlass.range_constexpr(4):
            low, high = ptx.low_bf16(words[i]), ptx.high_bf16(words[i])
            total[2 * i] = ptx.add(total[2 * i], ptx.mul(weight, low))
            total[2 * i + 1] = ptx.add(total[2 * i + 1], ptx.mul(weight, high))

    @cute.jit
    def leave(self, route, thread, grid):
        """The CTA that finishes last marks the workspace free for the next call.

        No fences: who reads these words, the next call's route, waits for this whole grid first.
        """
        cute.arch.sync_threads()
        if thread == 0:
            tickets = route.control + layout.CONTROL_COMBINE_TICKET * 4
            if cute.arch.atomic_add(ptx.ptr(Int32, tickets), Int32(1)) == grid - 1:
                ptx.store(Int32, tickets, Int32(0))
                ptx.store(Int32, route.control + layout.CONTROL_IN_FLIGHT * 4, Int32(0))
