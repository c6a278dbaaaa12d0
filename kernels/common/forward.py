"""The layer: every kernel of one forward call behind one host function, whatever the arch."""

from __future__ import annotations

import inspect
import json
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr, cute

from moe_ep_jit import layout
from moe_ep_jit.kernels.common.combine import Combine, CombineArgs
from moe_ep_jit.kernels.common.dispatch import Dispatch, TokenArgs
from moe_ep_jit.kernels.common.exchange import Ranks
from moe_ep_jit.kernels.common.fold import Fold, FoldArgs
from moe_ep_jit.kernels.common.route import Route, RouteArgs


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
    token_sf: Int64  # block scales of the token operand, where the MMA takes them
    block_sf: Int64  # block scales of the intermediate: gate/up writes them
    sf_stride: Int32  # of fp32 block scales: rows of the workspace's
    control: Int64
    limit: Float32
    alpha: Float32
    beta: Float32


class Forward:
    """route -> dispatch -> gate/up -> (fold) -> down -> combine, each launched while the one before
    it drains.

    gate_up, down  the arch's GroupedGemm: called with the token operand's address, its rows,
                   GemmArgs, the number of SMs and the stream
    fold           between them, or None
    num_experts    of all ranks
    row_elements   of a row that dispatch moves, where that is not ``hidden``
    """

    def __init__(
        self, *, hidden: int, num_experts: int, top_k: int, operand: str, act: str, x_kind: str,
        tile_n: int, gate_up: Any, down: Any, fold: Fold | None = None, ranks: Ranks | None = None,
        row_elements: int | None = None
    ):  # fmt: skip
        self.ranks = ranks
        self.num_local = num_experts if ranks is None else ranks.local
        # What ranks have to agree on: the layer, but neither the rung nor what x is.
        layer = [hidden, row_elements, gate_up.m, num_experts, top_k, operand, act]
        signature = zlib.crc32(json.dumps(layer).encode()) & 0x7FFFFFFF
        self.route = Route(
            num_experts=num_experts, top_k=top_k, tile_n=tile_n, ranks=ranks, signature=signature
        )
        self.dispatch = Dispatch(
            hidden=row_elements or hidden,
            num_experts=num_experts,
            top_k=top_k,
            operand=operand,
            act=act,
            x_kind=x_kind,
            tile_n=tile_n,
            ranks=ranks,
        )
        self.gate_up, self.fold, self.down = gate_up, fold, down
        self.combine = Combine(hidden=hidden, top_k=top_k, ranks=ranks)

    @cute.jit
    def __call__(
        self,
        stages: Int32,
        num_sms: Int32,
        tokens: Int32,
        num_tokens: Int64,
        x: Int64,
        x_stride: Int64,
        x_sf: Int64,
        x_global_scale: Int64,
        x_global_stride: Int32,
        ids: Int64,
        ids_stride: Int64,
        ids_words: Int32,
        topk_weights: Int64,
        topk_weights_stride: Int64,
        topk_weights_type: Int32,
        out: Int64,
        out_stride: Int64,
        limit: Float32,
        alpha: Float32,
        beta: Float32,
        w13: Int64,
        w13_sf: Int64,
        w13_bias: Int64,
        w2: Int64,
        w2_sf: Int64,
        w2_bias: Int64,
        h_global_scale: Int64,
        control: Int64,
        chunk_counts: Int64,
        slot_rank: Int64,
        expert_info: Int64,
        tiles: Int64,
        row_slot: Int64,
        recv_x: Int64,
        recv_sf: Int64,
        recv_block_sf: Int64,
        h: Int64,
        h_sf: Int64,
        y: Int64,
        recv_rows: Int32,
        error: Int64,
        load: Int64,
        stream: CUstream,
    ):
        sf_stride = layout.sf_pitch(recv_rows, self.num_local)
        route = RouteArgs(
            tokens, num_tokens, ids, ids_stride, ids_words, control, chunk_counts, slot_rank,
            expert_info, tiles, row_slot, error, load,
        )  # fmt: skip
        shared = (tiles, expert_info, row_slot)
        swiglu = (control, limit, alpha, beta)
        if (stages & layout.STAGE_DISPATCH) != 0:
            bound = None
            if const_expr(self.ranks is not None):
                bound = recv_rows
            self.route(route, bound, stream)
            source = TokenArgs(
                x, x_stride, x_sf, x_global_scale, x_global_stride, recv_x, recv_sf, recv_block_sf
            )
            self.dispatch(route, source, num_sms, stream)
        if (stages & layout.STAGE_GATE_UP) != 0:
            gate_up = GemmArgs(
                w13, w13_sf, w13_bias, recv_sf, h_global_scale, *shared, h, recv_block_sf, h_sf,
                sf_stride, *swiglu,
            )  # fmt: skip
            self.gate_up(recv_x, recv_rows, gate_up, num_sms, stream)
        if (stages & layout.STAGE_DOWN) != 0:
            if const_expr(self.fold is not None):
                self.fold(
                    FoldArgs(tiles, expert_info, h, h_sf, sf_stride, recv_sf), num_sms, stream
                )
            down = GemmArgs(
                w2, w2_sf, w2_bias, recv_sf, h_global_scale, *shared, y, h_sf, h_sf, sf_stride,
                *swiglu,
            )  # fmt: skip
            self.down(h, recv_rows, down, num_sms, stream)
        if (stages & layout.STAGE_COMBINE) != 0:
            target = CombineArgs(
                topk_weights, topk_weights_stride, topk_weights_type, y, out, out_stride
            )
            self.combine(route, target, num_sms, stream)


def layer(
    facts: dict[str, Any], operand: str, gemm: Callable[..., Any], fold: Fold | None = None
) -> Forward:
    """The kernels of one rung, from ``facts.facts``.

    operand  what the MMA's token side is
    gemm     makes the arch's GroupedGemm of ``gate_up``, ``k``, ``m`` and ``ranks``
    """
    hidden, intermediate = facts["hidden"], facts["intermediate"]
    ranks = None
    if "num_ranks" in facts:
        ranks = Ranks(facts["num_ranks"], facts["num_experts"])
    return Forward(
        hidden=hidden,
        num_experts=facts["num_experts"],
        top_k=facts["top_k"],
        operand=operand,
        act=facts["act"],
        x_kind=facts["x_kind"],
        tile_n=facts["config"]["tile_n"],
        gate_up=gemm(gate_up=True, k=hidden, m=2 * intermediate, ranks=ranks),
        down=gemm(gate_up=False, k=intermediate, m=hidden, ranks=ranks),
        fold=fold,
        ranks=ranks,
    )


def compile_forward(forward: Forward, options: str) -> Any:
    """Compile a layer into one object; needs no GPU.

    options  of ``cute.compile``: the ABI, the arch and what to keep
    """
    parameters = list(inspect.signature(Forward.__call__).parameters)[1:]
    assert parameters == list(layout.LAUNCH_ARGS), (
        "forward's parameters and layout.LAUNCH_ARGS differ"
    )
    example = {"ptr": Int64(0), "i32": Int32(1), "i64": Int64(1), "f32": Float32(0.0)}
    example["stream"] = cute.runtime.make_fake_stream()
    arguments = [example[kind] for kind in layout.LAUNCH_ARGS.values()]
    compiled = cute.compile(forward, *arguments, options=options)
    # Dynamic shared memory is a launch's, not in the object: what `cache list` shows.
    compiled.moe_launch = {
        "dynamic_shared_bytes": {
            "GroupedGemm": max(forward.gate_up.smem_bytes, forward.down.smem_bytes)
        }
    }
    return compiled
