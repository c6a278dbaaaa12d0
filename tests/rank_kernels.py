"""Cases of ``rank_pool`` that look below the numbers: what kernels are given, what is sent."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from unittest import mock

import torch
from rank_cases import (
    EXPERTS,
    HIDDEN,
    HOWS,
    TOP_K,
    caught,
    draw_round,
    make_problem,
    make_weights,
    source_weights,
)

import moe_ep_jit as moe
from moe_ep_jit import jit, launch, layout, variants, workspace
from moe_ep_jit.tools import timemodel


def at(address, dtype, *shape):
    """A tensor over memory at an address."""
    size = torch.Size(shape).numel() * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    buffer = (ctypes.c_uint8 * size).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


class FakeGpu:
    """CPU memory for a GPU's, and one host function whose experts multiply by their number + 1."""

    def __init__(self):
        self.facts, self.stages = [], []

    def load(self, op, facts, *, arch, build, name, compile=True):
        self.facts.append((facts["num_experts"], facts["top_k"], facts["x_kind"]))
        return self.run

    def run(self, *values):
        args = dict(zip(layout.LAUNCH_ARGS, values, strict=True))
        self.stages.append(args["stages"])
        if args["stages"] & layout.STAGE_DISPATCH:
            rows = args["tokens"]
            assert (args["x_stride"], args["ids_stride"], args["ids_words"]) == (HIDDEN, 1, 1)
            x = at(args["x"], torch.bfloat16, rows, HIDDEN).float()
            self.y = x * (at(args["ids"], torch.int32, rows, 1) + 1)
        if args["stages"] & layout.STAGE_COMBINE:
            assert args["topk_weights_type"] == 0
            weights = at(args["topk_weights"], torch.float32, *self.y[:, :1].shape)
            out = at(args["out"], torch.bfloat16, *self.y.shape)
            out.copy_(self.y.bfloat16() * weights)

    def patched(self):
        stack = ExitStack()
        stream = mock.Mock(cuda_stream=0)
        properties = mock.Mock(multi_processor_count=132)
        properties.name = "Some GPU"
        cuda = {
            "current_stream": lambda device=None: stream,
            "current_device": lambda: None,
            "is_current_stream_capturing": lambda: False,
            "get_device_properties": lambda device: properties,
            "synchronize": lambda device: None,
        }
        record = torch.zeros(layout.ERROR_WORDS, dtype=torch.int32)
        for owner, name, value in (
            *((torch.cuda, name, function) for name, function in cuda.items()),
            (torch.Tensor, "record_stream", lambda tensor, stream: None),
            (variants, "resolve_backend", lambda device, backend="auto": "sm_90a"),
            (workspace, "_error_record", lambda pinned: record.clone()),
            (jit, "load", self.load),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        name, options = "_cuda_getCurrentRawStream", {"return_value": 0, "create": True}
        stack.enter_context(mock.patch.object(torch._C, name, **options))
        return stack


def compiled(env):
    """The road to compiled experts, with a recorder in the kernels' place."""
    problem = make_problem(env.size, format="nvfp4", act="bf16")
    inputs = draw_round(problem, 61, "skips", sizes=[4, 0, 9, 1])
    x, ids, topk_weights = inputs[env.rank]
    per_rank = problem.num_local_experts
    want = torch.zeros(len(x), HIDDEN)
    for k in range(TOP_K):
        e = ids[:, k, None]
        term = (x.float() * (e % per_rank + 1)).bfloat16().float() * topk_weights[:, k, None]
        want += torch.where((e >= 0) & (e < EXPERTS), term, 0.0)
    want = want.bfloat16()
    gpu, done = FakeGpu(), {}
    with gpu.patched():
        shard, _ = make_weights(problem, env.rank)
        ws = moe.Workspace(shard.problem, env.groups["all"], device="cpu")
        moe.warmup(ws, shard)
        rungs = len(variants.ladder("sm_90a", shard.operand))
        done["loaded"] = gpu.facts == [(per_rank, 1, "bf16")] * rungs
        done["whole"] = torch.equal(moe.moe_forward(x, ids, topk_weights, shard, ws), want)
        moe.dispatch(x, ids, ws, shard)
        moe.gate_up(ws, shard)
        moe.down(ws, shard)
        done["stages"] = torch.equal(moe.combine(ids, topk_weights, ws, shard), want)
        done["calls"] = gpu.stages == [15, 1, 2, 4, 8]
        taken = ws.local.nbytes_regions + layout.REGION_ALIGN + ws.exchange._memory.nbytes
        taken += sum(t.nbytes for held in (ws, ws.local) for t in held._outputs)
        done["bytes"] = taken == moe.Workspace.bytes_needed(shard.problem, shard.operand)
        ws.close()
    return done


def emulated(env, name, fmt, tile_n, seeds):
    """Sharded kernels against unsharded ones, both by the PTX emulator, in several schedules: the
    sum over k included, which is a kernel's in one case and torch's in the other.

    Every other token has one expert twice, weighted w and -w: nothing may be left, as it would be
    were a product not rounded before it is added.
    """
    rank = env.rank_in(name)
    if rank < 0:
        return None
    problem = make_problem(2, num_experts=4, top_k=2, max_tokens=8, format=fmt)
    w13, w2, _ = source_weights(problem)
    own = slice(2 * rank, 2 * rank + 2)
    shard = moe.prepare_weights(w13[own], w2[own], problem, rank=rank, backend="emulator")
    alone = problem.with_(num_ranks=1, max_tokens=16)
    full = moe.prepare_weights(w13, w2, alone, backend="emulator")
    rungs = variants.ladder("sm_90a", shard.operand)
    config = next(rung for rung in rungs if rung.tile_n == tile_n)
    emulator = {"device": "cpu", "backend": "emulator"}
    for _ in range(2):  # the second loads what the first has compiled
        ws = moe.Workspace(shard.problem, env.groups[name], operand=shard.operand, **emulator)
        moe.warmup(ws, shard, configs=[config])
    full_ws = moe.Workspace(full.problem, operand=full.operand, **emulator)
    wrong = []
    if rank == 0:  # alone, and before the other rank counts on it
        refused = caught(
            moe.moe_forward,
            *draw_round(problem, 0, "skips", sizes=[4, 4])[0],
            shard,
            ws,
            config="n8",
        )
        if refused is None or refused[0] != "TypeError" or shard.topology.load.any():
            wrong.append(refused)
    for seed in seeds:
        inputs = draw_round(problem, seed, HOWS[seed % len(HOWS)], sizes=[seed % 9, 8 - seed % 5])
        for _, ids, topk_weights in inputs:
            ids[::2, 1] = ids[::2, 0]
            topk_weights[::2, 1] = -topk_weights[::2, 0]
        ws.local.emulator.seed = seed
        y = moe.moe_forward(*inputs[rank], shard, ws, config=config)
        whole = [torch.cat(parts) for parts in zip(*inputs, strict=True)]
        want = moe.moe_forward(*whole, full, full_ws, config=config)
        first = rank * len(inputs[0][0])
        if not torch.equal(y, want[first : first + len(y)]):
            wrong.append(seed)
    ws.close()
    return wrong


def failed_warmup(env, name):
    """What each rank is told when the last one cannot load its kernels, and then can."""
    rank = env.rank_in(name)
    if rank < 0:
        return None
    problem = make_problem(2, num_experts=4, top_k=2, max_tokens=8)
    shard, _ = make_weights(problem, rank)
    ws = moe.Workspace(shard.problem, env.groups[name])
    broken = mock.Mock(side_effect=OSError("no space left"))
    with mock.patch.object(launch, "warmup", broken if rank == 1 else lambda *args, **kw: None):
        told = caught(launch._warmup_ranks, ws, shard, None)
    again = caught(moe.warmup, ws, shard)
    ws.close()
    return told, again


def traffic(env, combine_wire):
    """Bytes that this rank sends to others in a round, and what routing alone says."""
    problem = make_problem(env.size, act="bf16", wire="nvfp4", combine_wire=combine_wire)
    inputs = draw_round(problem, 71, "skips", sizes=[3, 16, 0, 7])
    shard, _ = make_weights(problem, env.rank)
    dist = torch.distributed
    sent = {"counts": 0, "rows": []}
    all_to_all, swap = dist.all_to_all_single, dist.batch_isend_irecv

    def counted_all_to_all(out, rows, out_rows, in_rows, **options):
        others = sum(in_rows) - in_rows[env.rank]
        sent["rows"].append(others * rows[:1].numel() if len(rows) else 0)
        return all_to_all(out, rows, out_rows, in_rows, **options)

    def counted_swap(ops):
        sent["counts"] += sum(op.tensor.nbytes for op in ops if op.op is dist.isend)
        return swap(ops)

    with (
        moe.Workspace(shard.problem, env.groups["all"], device="cpu") as ws,
        mock.patch.object(dist, "all_to_all_single", counted_all_to_all),
        mock.patch.object(dist, "batch_isend_irecv", counted_swap),
    ):
        moe.moe_forward(*inputs[env.rank], shard, ws)
    owner = [ids[(ids >= 0) & (ids < EXPERTS)] for _, ids, _ in inputs]
    owner = [ids // problem.num_local_experts for ids in owner]
    leave = int((owner[env.rank] != env.rank).sum())
    back = sum(int((owner[r] == env.rank).sum()) for r in range(env.size) if r != env.rank)
    rows = [leave * n for n in (HIDDEN // 2, HIDDEN // 16, 4)]
    widths = (2 * HIDDEN,) if combine_wire == "bf16" else (HIDDEN, HIDDEN // 32)
    rows += [back * n for n in widths]
    model = timemodel.traffic(problem, [ids for _, ids, _ in inputs])
    model = {phase: int(table[env.rank].sum()) for phase, table in model.items()}
    return sent, {"counts": 4096 * (env.size - 1), "rows": rows}, model
