"""Rows between ranks and nothing else: what stands where the experts' GEMMs do in a layer, for
experts of one's own.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute, select_

from moe_ep_jit.kernels.common import epilogue, exchange, ptx
from moe_ep_jit.kernels.common.forward import Forward, GemmArgs, compile_forward


class Await:
    """In gate/up's place: one CTA waits until all rows have come."""

    threads = 128
    smem_bytes = 0

    def __init__(self, *, ranks: exchange.Ranks):
        self.ranks, self.m = ranks, 0

    @cute.jit
    def __call__(self, x: Int64, rows: Int32, args: GemmArgs, num_sms: Int32, stream):
        self.kernel(args).launch(
            grid=(1, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, args: GemmArgs):
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        for expert in cutlass.range(thread // 32, self.ranks.local, self.threads // 32):
            exchange.await_rows(self.ranks, args.control, expert, thread % 32)


class Return:
    """In the down GEMM's place: the caller's rows to the slots, and ranks, that they are of.

    One CTA a row at a time, 16 bytes a thread.
    """

    threads = 128
    smem_bytes = 0

    def __init__(self, *, hidden: int, ranks: exchange.Ranks):
        self.m, self.ranks = hidden, ranks
        self.gate_up = False

    @cute.jit
    def __call__(self, x: Int64, rows: Int32, args: GemmArgs, num_sms: Int32, stream):
        self.kernel(x, args).launch(
            grid=(num_sms * 8, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, y: Int64, args: GemmArgs):
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        # Rows of the last expert end where all do; of a round that has failed there are none.
        last = args.expert_info + (self.ranks.local - 1) * 16
        num_rows = ptx.load(Int32, last + 8) + ptx.load(Int32, last + 12)
        words = cute.make_rmem_tensor(4, Int32)
        while row < num_rows:
            slot = epilogue.fetch_slot(self, args, Int64(row) * 4)
            to = epilogue.slot_address(self, args.out, slot, args)
            pieces = select_(slot < 0, Int32(0), Int32(self.m // 8))
            for piece in cutlass.range(thread, pieces, self.threads):
                of = y + Int64(row) * (self.m * 2) + piece * 16
                cute.autovec_copy(ptx.vector(Int32, of, 4), words)
                cute.autovec_copy(words, ptx.vector(Int32, to + piece * 16, 4))
            row += step


def compile_op(facts: dict[str, Any], options: str) -> Any:
    """Compile the object that ``facts`` describes.

    row_elements  of a row on its way to its expert, in units of 2 bytes, whatever they hold
    """
    ranks = exchange.Ranks(facts["num_ranks"], facts["num_experts"])
    forward = Forward(
        hidden=facts["hidden"],
        row_elements=facts["row_elements"],
        num_experts=facts["num_experts"],
        top_k=facts["top_k"],
        operand="bf16",
        act="bf16",
        x_kind="bf16",
        tile_n=8,
        gate_up=Await(ranks=ranks),
        down=Return(hidden=facts["hidden"], ranks=ranks),
        ranks=ranks,
    )
    return compile_forward(forward, options)
