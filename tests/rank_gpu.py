"""Cases of ``rank_pool`` on one GPU that several processes share: the kernels take turns on it."""

from __future__ import annotations

import os
import random
import time

import torch
from rank_cases import HOWS, caught, draw_round, make_problem, source_weights

import moe_ep_jit as moe
from moe_ep_jit import formats, variants

SIZES = {"hidden": 512, "intermediate": 256, "top_k": 4, "max_tokens": 64}
TILES = (8, 64, 192)
#: Rounds that are compared together: the unsharded layers of all processes take turns too.
BATCH = 25


def build(env, fmt, **facts):
    """(this rank's weights, those of all experts)."""
    sizes = {**SIZES, "num_experts": 4 * env.size, "format": fmt, **facts}
    problem = make_problem(env.size, **sizes)
    w13, w2, _ = source_weights(problem)
    w13, w2 = w13.cuda(), w2.cuda()
    own = slice(4 * env.rank, 4 * env.rank + 4)
    shard = moe.prepare_weights(w13[own], w2[own], problem, rank=env.rank)
    alone = problem.with_(num_ranks=1, max_tokens=problem.max_tokens * env.size, max_recv_rows=None)
    return shard, moe.prepare_weights(w13, w2, alone)


def rungs(weights):
    ladder = variants.ladder(weights.arch, weights.operand)
    return [rung for rung in ladder if rung.tile_n in TILES]


def on_gpu(inputs):
    return [[t.cuda() for t in of_rank] for of_rank in inputs]


def unsharded(inputs, rank, full, full_ws, config):
    """The rows of ``rank`` of one call with the tokens of all ranks."""
    whole = [torch.cat(parts) for parts in zip(*inputs, strict=True)]
    y = moe.moe_forward(*whole, full, full_ws, config=config)
    first = sum(len(inputs[r][0]) for r in range(rank))
    return y[first : first + len(inputs[rank][0])]


def rounds(env, fmt, facts, seed, count):
    """Random rounds with delays, sizes, routings and rungs from a seed; the wrong ones."""
    shard, full = build(env, fmt, **facts)
    configs = rungs(shard)
    rng, delay = random.Random(seed), random.Random(seed + env.rank)
    ws = moe.Workspace(shard.problem, operand=shard.operand, transport="symm")
    moe.warmup(ws, shard, configs=configs)
    full_ws = moe.Workspace(full.problem, operand=full.operand)
    moe.warmup(full_ws, full, configs=configs)
    words = ws.control().nbytes
    ws._regions[(words + 1023) // 1024 * 1024 :].fill_(0xFF)
    torch.cuda.synchronize()
    torch.distributed.barrier()
    wrong = []
    for first in range(0, count, BATCH):
        done = []
        for index in range(first, min(first + BATCH, count)):
            how, config = rng.choice(HOWS), rng.choice(configs)
            inputs = on_gpu(draw_round(shard.problem, seed * 1000 + index, how))
            out = torch.full_like(inputs[env.rank][0], float("nan"))
            if delay.random() < 0.1:
                time.sleep(delay.choice((0.002, 0.01)))
            moe.moe_forward(*inputs[env.rank], shard, ws, out=out, config=config)
            done.append((index, how, inputs, config, out))
        ws.check()
        for index, how, inputs, config, out in done:
            if not torch.equal(out, unsharded(inputs, env.rank, full, full_ws, config)):
                wrong.append((index, how, config.tile_n))
    ws.close()
    return wrong


def graphs(env, fmt):
    """Graphs of two sizes and eager calls, mixed, with other ids and live counts each time."""
    shard, full = build(env, fmt)
    config = rungs(shard)[0]
    ws = moe.Workspace(shard.problem, operand=shard.operand, transport="symm")
    moe.warmup(ws, shard, configs=[config])
    full_ws = moe.Workspace(full.problem, operand=full.operand)
    moe.warmup(full_ws, full, configs=[config])
    captured = {}
    for tokens in (64, 8):
        x = torch.zeros(tokens, SIZES["hidden"], dtype=torch.bfloat16, device="cuda")
        ids = torch.zeros(tokens, SIZES["top_k"], dtype=torch.int32, device="cuda")
        topk_weights = torch.zeros(tokens, SIZES["top_k"], device="cuda")
        live = torch.zeros(1, dtype=torch.int32, device="cuda")
        out = torch.zeros_like(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            moe.moe_forward(
                x, ids, topk_weights, shard, ws, out=out, num_tokens=live, config=config
            )
        captured[tokens] = graph, x, ids, topk_weights, live, out
    rng, wrong = random.Random(3), []
    for index in range(30):
        kind = rng.choice((64, 8, 0))
        most = kind or 64
        sizes = [rng.choice((0, 1, most, rng.randint(0, most))) for _ in range(env.size)]
        inputs = on_gpu(draw_round(shard.problem, index, rng.choice(HOWS), sizes))
        mine = inputs[env.rank]
        if kind:
            graph, *buffers, live, out = captured[kind]
            for buffer, given in zip(buffers, mine, strict=True):
                buffer[: len(given)] = given
            live.fill_(len(mine[0]))
            out.fill_(float("nan"))
            graph.replay()
            y = out[: len(mine[0])].clone()
        else:
            y = moe.moe_forward(*mine, shard, ws, config=config).clone()
        ws.check()
        if not torch.equal(y, unsharded(inputs, env.rank, full, full_ws, config)):
            wrong.append((index, kind, sizes))
    del captured
    ws.close()
    return wrong


def layer(env):
    """A layer with a workspace of its own, not warmed up: the first call warms every rank up."""
    shard, full = build(env, "mxfp8")
    config = rungs(shard)[0]
    ladder = variants.kernels_module(shard.arch, "config")
    whole, ladder.ladder = ladder.ladder, lambda operand: (config,)
    try:
        own = moe.MoELayer.from_prepared(shard, transport="symm")
        inputs = on_gpu(draw_round(shard.problem, 9, "skips"))
        y = own(*inputs[env.rank])
        own.workspace.check()
        own.close()
        full_ws = moe.Workspace(full.problem, operand=full.operand)
        return torch.equal(y, unsharded(inputs, env.rank, full, full_ws, config))
    finally:
        ladder.ladder = whole


def fleet(env):
    """Own experts, each of which multiplies its rows by a power of two."""
    done = []
    problem = make_problem(env.size, **{**SIZES, "num_experts": 4 * env.size, "act": "bf16"})
    for index, wire in enumerate(("bf16", "mxfp8", "nvfp4")):
        x, ids, topk_weights = on_gpu(draw_round(problem, 30 + index, "skips"))[env.rank]
        with moe.create_fleet(problem.with_(wire=wire), transport="symm", device="cuda") as own:
            handle = own.handle(ids)
            for _ in range(2):
                rows = handle.dispatch(x)
                rows = rows if wire == "bf16" else formats.dequantize(rows)
                y = (rows.float() * (1 << handle.expert_ids[:, None] % 4)).bfloat16()
                got = handle.combine(y, topk_weights).float()
            sent = x if wire == "bf16" else formats.dequantize(formats.quantize(x, wire))
            want = torch.zeros(x.shape, device="cuda")
            for k in range(problem.top_k):
                e = ids[:, k, None]
                term = (sent.float() * (1 << e % 4)).bfloat16().float() * topk_weights[:, k, None]
                want += torch.where((e >= 0) & (e < problem.num_experts), term, 0.0)
            # The kernel adds in one rounding with the product, the sum here in two.
            done.append(bool(((got - want).abs() <= want.abs() * 2**-7 + 1e-5).all()))
    return done


def late(env, seconds):
    """Rank 1 misses a round; the others are told, all meet again and go on."""
    shard, full = build(env, "mxfp8")
    config = rungs(shard)[0]
    ws = moe.Workspace(shard.problem, operand=shard.operand, transport="symm", timeout=seconds)
    moe.warmup(ws, shard, configs=[config])
    full_ws = moe.Workspace(full.problem, operand=full.operand)
    moe.warmup(full_ws, full, configs=[config])
    inputs = on_gpu(draw_round(shard.problem, 6, "uniform", [8] * env.size))
    call = (*inputs[env.rank], shard, ws)
    moe.moe_forward(*call, config=config)
    ws.check()
    torch.distributed.barrier()
    error = lost = took = None
    if env.rank != 1:
        began = time.monotonic()
        y = moe.moe_forward(*call, config=config)
        torch.cuda.synchronize()
        took = time.monotonic() - began
        lost = bool(y.isnan().all())
        error = caught(moe.moe_forward, *call, config=config)
    torch.distributed.barrier()
    ws.reset()
    y = moe.moe_forward(*call, config=config).clone()
    ws.check()
    right = torch.equal(y, unsharded(inputs, env.rank, full, full_ws, config))
    return error, lost, took, right, caught(ws.close)


def dies(env, who, stage, seconds):
    """One rank ends before or in a round: what the others are told, and that they can close."""
    shard, _ = build(env, "mxfp8")
    config = rungs(shard)[0]
    ws = moe.Workspace(shard.problem, operand=shard.operand, transport="symm", timeout=seconds)
    moe.warmup(ws, shard, configs=[config])
    inputs = on_gpu(draw_round(shard.problem, 7, "uniform", [8] * env.size))[env.rank]
    moe.moe_forward(*inputs, shard, ws, config=config)
    ws.check()
    torch.distributed.barrier()
    if env.rank == who:
        if stage == "dispatch":
            moe.dispatch(*inputs[:2], ws, shard, config=config)
            torch.cuda.synchronize()
        os._exit(3)
    began = time.monotonic()
    y = moe.moe_forward(*inputs, shard, ws, config=config)
    torch.cuda.synchronize()
    took = time.monotonic() - began
    return bool(y.isnan().all()), took, caught(ws.check), caught(ws.close)


def create_and_close(env, times):
    """Free memory of the GPU after the first and after the last workspace; all ranks' together."""
    shard, _ = build(env, "mxfp8")
    free = []
    for _ in range(times):
        moe.Workspace(shard.problem, operand=shard.operand, transport="symm").close()
        torch.distributed.barrier()
        free.append(torch.cuda.mem_get_info()[0])
        torch.distributed.barrier()
    return free[1], free[-1]
