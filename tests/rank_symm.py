"""Cases of ``rank_pool`` over symmetric memory: the kernels of every rank, by the PTX emulator."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import torch
from rank_cases import HOWS, caught, draw_round, make_problem, source_weights

import moe_ep_jit as moe
from moe_ep_jit import formats, layout, variants

EMULATOR = {"device": "cpu", "backend": "emulator"}
SHARED = Path("/dev/shm")


def build(env, name, fmt, tile_n, **facts):
    """(this rank's weights, those of all experts, the rung)."""
    rank, size = env.rank_in(name), torch.distributed.get_world_size(env.groups[name])
    sizes = {"num_experts": 2 * size, "top_k": 2, "max_tokens": 8, "format": fmt}
    problem = make_problem(size, **{**sizes, **facts})
    w13, w2, bias = source_weights(problem)
    per_rank = problem.num_local_experts
    own = slice(per_rank * rank, per_rank * (rank + 1))
    part = {name: tensor[own] for name, tensor in bias.items()}
    shard = moe.prepare_weights(w13[own], w2[own], problem, rank=rank, backend="emulator", **part)
    alone = problem.with_(num_ranks=1, max_tokens=problem.max_tokens * size, max_recv_rows=None)
    full = moe.prepare_weights(w13, w2, alone, backend="emulator", **bias)
    return shard, full, rung(shard, tile_n)


def rung(weights, tile_n):
    rungs = variants.ladder(weights.arch, weights.operand)
    return next(rung for rung in rungs if rung.tile_n == tile_n)


def workspace(env, name, shard, **options):
    return moe.Workspace(
        shard.problem,
        env.groups[name],
        operand=shard.operand,
        transport="symm",
        **EMULATOR,
        **options,
    )


class Alone:
    """The unsharded kernels, in the same rung."""

    def __init__(self, full, config):
        self.full, self.config = full, config
        self.ws = moe.Workspace(full.problem, operand=full.operand, **EMULATOR)

    def rows(self, inputs, rank):
        """Those of ``rank`` of one call with the tokens of all ranks."""
        whole = [torch.cat(parts) for parts in zip(*inputs, strict=True)]
        y = moe.moe_forward(*whole, self.full, self.ws, config=self.config)
        first = sum(len(inputs[r][0]) for r in range(rank))
        return y[first : first + len(inputs[rank][0])]


def poison(ws, control):
    """0xFF into everything that is this rank's but its control words; a result that nobody made."""
    ws._regions[layout.round_up(control.nbytes, layout.REGION_ALIGN) :].fill_(0xFF)
    ws.output.fill_(float("nan"))


def agree(env, name, fmt, tile_n, rounds, facts):
    """Rounds of random sizes, routings, delays and schedules; those with a difference."""
    rank = env.rank_in(name)
    if rank < 0:
        return None
    shard, full, config = build(env, name, fmt, tile_n, **facts)
    ws = workspace(env, name, shard)
    moe.warmup(ws, shard, configs=[config])
    alone, wrong, delay = Alone(full, config), [], random.Random(rank)
    # Poison before anybody's first rows can come.
    poison(ws, ws.control())
    torch.distributed.barrier(env.groups[name])
    for seed in range(rounds):
        inputs = draw_round(shard.problem, seed, HOWS[seed % len(HOWS)])
        ws.emulator.seed = seed * 7 + rank
        ws.output.fill_(float("nan"))
        time.sleep(delay.choice((0, 0, 0.05)))
        y = moe.moe_forward(*inputs[rank], shard, ws, config=config)
        if not torch.equal(y, alone.rows(inputs, rank)):
            wrong.append((seed, HOWS[seed % len(HOWS)]))
    ws.check()
    ws.close()
    return wrong


def other_rungs(env, fmt, tiles):
    """Each rank in another rung: the rows of the rank's experts are those of the rung."""
    shard, full, config = build(env, "all", fmt, tiles[env.rank])
    inputs = draw_round(shard.problem, 3, "uniform", sizes=[8, 5])
    with workspace(env, "all", shard) as ws:
        moe.warmup(ws, shard, configs=[rung(shard, tile_n) for tile_n in tiles])
        y = moe.moe_forward(*inputs[env.rank], shard, ws, config=config)
    want = Alone(full, config).rows(inputs, env.rank)
    error = (y.float() - want.float()).norm() / want.float().norm()
    return float(error)


def surfaces(env):
    """Stages, MoELayer, out=, num_tokens=, BlockScaled x, int64 ids, two layers in a workspace."""
    done = {}
    shard, full, config = build(env, "all", "mxfp8", 8, bias=True)
    wide, wide_full, _ = build(env, "all", "mxfp8", 8, hidden=192, num_experts=6, top_k=3)
    inputs = draw_round(shard.problem, 11, "skips", sizes=[8, 3])
    x, ids, topk_weights = inputs[env.rank]
    want = Alone(full, config).rows(inputs, env.rank)
    ws = moe.Workspace(
        [shard.problem, wide.problem], env.groups["all"], transport="symm", **EMULATOR
    )
    for weights in (shard, wide):
        moe.warmup(ws, weights, x_kinds=("bf16", "mxfp8"), configs=[config])
    options = {"config": config}
    done["whole"] = torch.equal(moe.moe_forward(x, ids, topk_weights, shard, ws, **options), want)
    moe.dispatch(formats.quantize(x, "mxfp8"), ids.long(), ws, shard, config=config)
    moe.gate_up(ws, shard)
    moe.down(ws, shard)
    done["stages"] = torch.equal(moe.combine(ids.long(), topk_weights, ws, shard), want)

    moe.dispatch(x, ids, ws, shard, config=config)
    ws.reset()
    out = torch.full((len(x) + 2, x.shape[1]), 5.0, dtype=torch.bfloat16)
    moe.moe_forward(x, ids, topk_weights, shard, ws, out=out, **options)
    done["out"] = torch.equal(out[: len(x)], want) and bool((out[len(x) :] == 5).all())

    wide_inputs = draw_round(wide.problem, 12, "uniform", sizes=[1, 5])
    wide_want = Alone(wide_full, config).rows(wide_inputs, env.rank)
    for turn in range(3):
        y = moe.moe_forward(*wide_inputs[env.rank], wide, ws, **options)
        done["wide", turn] = torch.equal(y, wide_want)
        y = moe.moe_forward(x, ids, topk_weights, shard, ws, **options)
        done["narrow", turn] = torch.equal(y, want)

    # Rows behind the live count are neither read nor written, nor sent.
    live = torch.tensor([len(x) - 2], dtype=torch.int32)
    few = [tuple(t[: len(t) - 2] for t in of_rank) for of_rank in inputs]
    padded, bad_ids = x.clone(), ids.clone()
    padded[-2:], bad_ids[-2:] = float("nan"), 0
    out = torch.full((len(x), x.shape[1]), 5.0, dtype=torch.bfloat16)
    moe.moe_forward(padded, bad_ids, topk_weights, shard, ws, out=out, num_tokens=live, **options)
    few_want = Alone(full, config).rows(few, env.rank)
    done["num_tokens"] = torch.equal(out[:-2], few_want) and bool((out[-2:] == 5).all())

    layer = moe.MoELayer.from_prepared(shard, workspace=ws)
    done["layer"] = layer.problem == shard.problem
    done["bytes"] = ws.symmetric.tensor.nbytes + sum(o.nbytes for o in ws._outputs) == (
        moe.Workspace.bytes_needed([shard.problem, wide.problem], transport="symm")
    )
    ws.close()
    ws.close()
    done["closed"] = "it is closed" in caught(moe.moe_forward, x, ids, topk_weights, shard, ws)[1]
    return done


def overflow(env):
    """One rank would get too much: both hear of it, nothing has moved, and both go on."""
    shard, full, config = build(env, "all", "mxfp8", 8, max_recv_rows=9)
    ws = workspace(env, "all", shard)
    moe.warmup(ws, shard, configs=[config])
    poison(ws, ws.control())
    torch.distributed.barrier()
    inputs = draw_round(shard.problem, 3, "one rank", sizes=[3, 2])
    y = moe.moe_forward(*inputs[env.rank], shard, ws, config=config)
    lost = bool(y.isnan().all())
    views = ws.views()
    untouched = all(bool((views[name].view(torch.uint8) == 0xFF).all()) for name in ("recv_x", "y"))
    untouched &= not shard.topology.load.any()
    error = caught(moe.moe_forward, *inputs[env.rank], shard, ws, config=config)
    checked = caught(ws.check)
    ws.reset()
    inputs = draw_round(shard.problem, 4, "one rank", sizes=[3, 1])
    y = moe.moe_forward(*inputs[env.rank], shard, ws, config=config)
    right = torch.equal(y, Alone(full, config).rows(inputs, env.rank))
    closing = caught(ws.close)
    return error, checked == error, lost, untouched, right, closing


def different_layers(env):
    """Rank 0 calls another layer of the workspace than the other."""
    shard, _, config = build(env, "all", "mxfp8", 8)
    other, _, _ = build(env, "all", "mxfp8", 8, top_k=1)
    ws = moe.Workspace(
        [shard.problem, other.problem], env.groups["all"], transport="symm", **EMULATOR
    )
    for weights in (shard, other):
        moe.warmup(ws, weights, configs=[config])
    weights = other if env.rank == 0 else shard
    inputs = draw_round(weights.problem, 9, "uniform", sizes=[2, 2])[env.rank]
    y = moe.moe_forward(*inputs, weights, ws, config=config)
    return bool(y.isnan().all()), caught(ws.check), caught(ws.close)


def refused(env):
    """What is decided at the door, on every rank alike, before anything is allocated."""
    group, found = env.groups["all"], {}

    def build_workspace(**options):
        problem = make_problem(env.size, **options.pop("facts", {}))
        options = {"device": "cpu", "transport": "symm", "backend": "emulator", **options}
        return moe.Workspace(problem, group, **options)

    second = env.rank == 1
    before = shared_files()
    for name, options in {
        "top_k": {"facts": {"top_k": 2} if second else {}},
        "transport": {"transport": "collective"} if second else {},
        "reference": {"backend": "reference"} if second else {},
        "operand": {"operand": "bf16"} if second else {},
        "wire": {"facts": {"act": "bf16", "wire": "mxfp8"}},
        "combine_wire": {"facts": {"combine_wire": "mxfp8"}},
    }.items():
        found[name] = caught(build_workspace, **options)
    found["files"] = shared_files() - before
    return found


def shared_files():
    return {path.name for path in SHARED.glob("moe_ep_jit-*")}


def cold(env):
    """Without a warm-up the first call is one, of all ranks; who compiles is waited for."""
    shard, full, config = build(env, "all", "mxfp8", 8)
    inputs = draw_round(shard.problem, 5, "uniform", sizes=[4, 4])
    ladder = variants.kernels_module(shard.arch, "config")
    whole, ladder.ladder = ladder.ladder, lambda operand: (config,)
    try:
        ws = workspace(env, "all", shard, timeout=3)
        time.sleep(4 * env.rank)  # as if it compiled
        y = moe.moe_forward(*inputs[env.rank], shard, ws, config=config)
        right = torch.equal(y, Alone(full, config).rows(inputs, env.rank))
        ws.close()
    finally:
        ladder.ladder = whole
    return right


def topology(env):
    """Four logical experts in six places: results are those of the four, and rows are counted."""
    done, group = {}, env.groups["all"]
    logical = make_problem(env.size, num_experts=4, top_k=2, max_tokens=8)
    w13, w2, _ = source_weights(logical)
    problem = logical.with_(num_experts=6)
    alone = logical.with_(num_ranks=1, max_tokens=8 * env.size)
    first, second = [0, 1, 2, 3, 1, 0], [3, 3, 2, 1, 1, 0]
    own, later = (held[3 * env.rank :][:3] for held in (first, second))
    shard = moe.prepare_weights(w13[own], w2[own], problem, rank=env.rank, backend="emulator")
    config = rung(shard, 8)
    full = Alone(moe.prepare_weights(w13, w2, alone, backend="emulator"), config)
    inputs = draw_round(logical, 13, "skips", sizes=[8, 5])
    ids = inputs[env.rank][1]
    counts = torch.bincount(ids[(ids >= 0) & (ids < 4)], minlength=4)
    ws = workspace(env, "all", shard)
    moe.warmup(ws, shard, configs=[config])

    def counted(times):
        load = shard.topology.snapshot()
        physical = shard.topology.physical_ids(ids, env.rank, 8)
        places = torch.bincount(physical[physical >= 0], minlength=6)
        return torch.equal(load.physical, places * times) and torch.equal(
            load.logical, counts * times
        )

    moe.update_topology(ws, shard, first)
    for turn in (1, 2):
        y = moe.moe_forward(*inputs[env.rank], shard, ws, config=config)
        done["first", turn] = torch.equal(y, full.rows(inputs, env.rank))
        done["load", turn] = counted(turn)
    wrong = caught(moe.update_topology, ws, shard, second[1:] if env.rank else second)
    done["refused"] = "nothing has changed on any rank" in wrong[1] or env.rank == 1
    done["refused"] &= wrong[0] == "ValueError" and counted(2)
    moe.update_topology(ws, shard, second, w13[later], w2[later])
    y = moe.moe_forward(*inputs[env.rank], shard, ws, config=config)
    done["second"] = torch.equal(y, full.rows(inputs, env.rank)) and counted(1)
    moved = caught(ws.update_topology, group)
    done["group"] = moved[0] == "ValueError" and "close this and build anew" in moved[1]
    y = moe.moe_forward(*inputs[env.rank], shard, ws, config=config)
    done["still"] = torch.equal(y, full.rows(inputs, env.rank))
    ws.close()
    return done


def late(env, seconds):
    """Rank 1 comes too late for one round; then both meet and go on."""
    shard, full, config = build(env, "all", "mxfp8", 8)
    inputs = draw_round(shard.problem, 6, "uniform", sizes=[8, 8])
    ws = workspace(env, "all", shard, timeout=seconds)
    moe.warmup(ws, shard, configs=[config])
    call = (*inputs[env.rank], shard, ws)
    moe.moe_forward(*call, config=config)  # translated: from here on times are times
    torch.distributed.barrier()
    error = again = lost = took = None
    if env.rank == 0:
        began = time.monotonic()
        lost = bool(moe.moe_forward(*call, config=config).isnan().all())
        took = time.monotonic() - began
        error = caught(moe.moe_forward, *call, config=config)
        again = caught(ws.check)
    else:
        time.sleep(3 * seconds)
    ws.reset()
    y = moe.moe_forward(*call, config=config)
    right = torch.equal(y, Alone(full, config).rows(inputs, env.rank))
    return error, again == error, lost, took, right, caught(ws.close)


def stops(env, who, stage, seconds):
    """One rank ends after a stage of a round: what the others are told, and their new workspace."""
    shard, _, config = build(env, "all", "mxfp8", 8)
    inputs = draw_round(shard.problem, 7, "uniform", sizes=[8] * env.size)[env.rank]
    ws = workspace(env, "all", shard, timeout=seconds)
    moe.warmup(ws, shard, configs=[config])
    moe.moe_forward(*inputs, shard, ws, config=config)
    torch.distributed.barrier()
    if env.rank == who:
        if stage == "dispatch":
            moe.dispatch(*inputs[:2], ws, shard, config=config)
        os._exit(3)
    began = time.monotonic()
    y = moe.moe_forward(*inputs, shard, ws, config=config)
    took = time.monotonic() - began
    return bool(y.isnan().all()), took, caught(ws.check), caught(ws.close)


def create_and_close(env, times):
    """Bytes that this process has mapped from the shared memory, after each workspace."""
    shard, _, _ = build(env, "all", "mxfp8", 8)
    for _ in range(times):
        workspace(env, "all", shard).close()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in maps if str(SHARED) in line], sorted(shared_files())


def two_groups(env):
    """Pairs that run different numbers of rounds at once, in one job."""
    name = "pair" if env.rank < 2 else "other pair"
    shard, full, config = build(env, name, "mxfp8", 8)
    ws = workspace(env, name, shard)
    moe.warmup(ws, shard, configs=[config])
    alone, wrong, rank = Alone(full, config), [], env.rank_in(name)
    for index in range(2 + env.rank // 2):
        inputs = draw_round(shard.problem, 100 * (env.rank // 2) + index)
        y = moe.moe_forward(*inputs[rank], shard, ws, config=config)
        wrong += [] if torch.equal(y, alone.rows(inputs, rank)) else [index]
    ws.close()
    return wrong


def fleet(env):
    """Own experts over symmetric memory: each multiplies its rows by its own number plus one."""
    done, group = {}, env.groups["all"]
    problem = make_problem(env.size, act="bf16", num_experts=6, max_tokens=8)
    x, ids, topk_weights = draw_round(problem, 21, "skips", sizes=[7, 3])[env.rank]
    first = env.rank * problem.num_local_experts

    def want_of(order):
        total = torch.zeros(len(x), x.shape[1])
        for k in range(problem.top_k):
            e = order[:, k, None]
            term = (x.float() * (e + 1)).bfloat16().float() * topk_weights[:, k, None]
            total += torch.where((e >= 0) & (e < problem.num_experts), term, 0.0)
        return total

    with moe.create_fleet(problem, group, "symm", **EMULATOR) as own:
        handle, other = own.handle(ids), own.handle(ids.flip(0).long())
        for h, order in ((handle, ids), (other, ids.flip(0)), (handle, ids)):
            rows = h.dispatch(x)
            y = (rows.float() * (h.expert_ids[:, None] + first + 1)).bfloat16()
            done[len(done)] = torch.equal(h.combine(y, topk_weights), want_of(order).bfloat16())
        # A round that another one replaces, and rows that are their own result, twice.
        first_rows = handle.dispatch(x).clone()
        other.dispatch(x)
        y = (first_rows.float() * (handle.expert_ids[:, None] + first + 1)).bfloat16()
        done["dropped"] = torch.equal(handle.combine(y, topk_weights), want_of(ids).bfloat16())
        handle.dispatch(x)
        rows = handle.dispatch(x)
        once = handle.combine(rows, topk_weights)
        done["twice"] = torch.equal(handle.combine(rows, topk_weights), once)
        odd = torch.zeros(len(x), x.shape[1] + 1, dtype=torch.bfloat16)[:, 1:].copy_(x)
        rows = handle.dispatch(odd)
        done["odd"] = torch.equal(handle.combine(rows, topk_weights), once)
        wide = torch.zeros(len(x), 2 * x.shape[1], dtype=torch.bfloat16)
        refused = caught(handle.combine, rows, topk_weights, out=wide[:, ::2])
        done["strided"] = refused[0] == "ValueError" and "inner stride 1" in refused[1]
        done["sorted"] = bool((handle.expert_ids.diff() >= 0).all())
        counts = torch.bincount(handle.expert_ids, minlength=problem.num_local_experts)
        done["counts"] = handle.rows_per_expert == counts.tolist()
        out = torch.full((len(x) + 1, x.shape[1]), 5.0, dtype=torch.bfloat16)
        zeros = torch.zeros(handle.num_rows, x.shape[1], dtype=torch.bfloat16)
        done["out"] = handle.combine(zeros, out=out) is out and bool((out[-1] == 5).all())
        done["zeros"] = bool((out[:-1] == 0).all())
        few = own.handle(ids, num_tokens=torch.tensor([2], dtype=torch.int32))
        back = few.combine(few.dispatch(x))
        times = ((ids >= 0) & (ids < problem.num_experts)).sum(1, keepdim=True)
        done["num_tokens"] = torch.equal(back[:2], (x.float() * times).bfloat16()[:2])
        own.update_topology([0, 1, 2, 3, 1, 0])
        few = ids.clamp(max=3)
        h = own.handle(few)
        back = h.combine(h.dispatch(x))
        done["map"] = torch.equal(back, (x.float() * (few >= 0).sum(1, keepdim=True)).bfloat16())
        counts = torch.bincount(few[few >= 0], minlength=4)
        done["load"] = torch.equal(own.topology.snapshot().logical, counts)
        done["void"] = "has moved the experts since" in caught(handle.dispatch, x)[1]
        moved = caught(own.update_topology, None, group=group)
        done["group"] = moved[0] == "ValueError" and "close this and build anew" in moved[1]
    done["closed"] = "fleet: it is closed" in caught(h.dispatch, x)[1]
    for wire in ("mxfp8", "nvfp4"):
        with moe.create_fleet(problem.with_(wire=wire), group, "symm", **EMULATOR) as quantized:
            h = quantized.handle(ids)
            rows = formats.dequantize(h.dispatch(x))
            back = h.combine(rows.bfloat16())
            want = formats.dequantize(formats.quantize(x, wire)).bfloat16().float()
            done[wire] = torch.equal(back, (want * times).bfloat16())
    return done
