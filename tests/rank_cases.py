"""Cases that ``rank_pool`` runs in every process of a group, and the unsharded layer beside them.

Each process draws the inputs of all ranks from one seed, so that it knows the unsharded result of
the whole batch; what the ranks agree on bit for bit is compared where it is.
"""

from __future__ import annotations

import os
import random
import time
from datetime import timedelta
from types import SimpleNamespace

import torch

import moe_ep_jit as moe
from moe_ep_jit import formats, reference

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, MAX_TOKENS = 128, 64, 12, 3, 16


def make_problem(ranks, **facts):
    sizes = {
        "hidden": HIDDEN,
        "intermediate": INTERMEDIATE,
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "max_tokens": MAX_TOKENS,
        "format": "mxfp8",
    }
    return moe.Problem(**{**sizes, "num_ranks": ranks, **facts})


def source_weights(problem):
    """w13, w2 and biases of all experts, the same on every call."""
    generator = torch.Generator().manual_seed(7)
    experts, hidden, inter = problem.num_experts, problem.hidden, problem.intermediate
    w13 = torch.randn(experts, 2 * inter, hidden, generator=generator) * hidden**-0.5
    w2 = torch.randn(experts, hidden, inter, generator=generator) * inter**-0.5
    bias = {}
    if problem.bias:
        bias["w13_bias"] = torch.randn(experts, 2 * inter, generator=generator)
        bias["w2_bias"] = torch.randn(experts, hidden, generator=generator)
    return w13, w2, bias


def make_weights(problem, rank):
    """(this rank's weights, those of the unsharded layer), the same on every call."""
    w13, w2, bias = source_weights(problem)
    own = slice(rank * problem.num_local_experts, (rank + 1) * problem.num_local_experts)
    shard = moe.prepare_weights(
        w13[own], w2[own], problem, rank=rank, **{n: t[own] for n, t in bias.items()}
    )
    alone = problem.with_(num_ranks=1, wire="auto", combine_wire="bf16", max_recv_rows=None)
    return shard, moe.prepare_weights(w13, w2, alone, **bias)


def draw_ids(tokens, problem, how, generator):
    """[tokens, top_k] of one rank."""
    shape = (tokens, problem.top_k)
    ids = torch.randint(0, problem.num_experts, shape, generator=generator)
    if how == "one rank":
        ids %= problem.num_local_experts
    elif how == "last rank":
        ids = problem.num_experts - 1 - ids % problem.num_local_experts
    elif how == "one expert":
        ids[:] = problem.num_experts - 1
    elif how == "skips":
        ids[torch.rand(shape, generator=generator) < 0.4] = -1
        ids[torch.rand(shape, generator=generator) < 0.1] = problem.num_experts
        ids[:, 0:1][torch.rand(tokens, 1, generator=generator) < 0.2] = -(2**31)
    elif how == "repeats":
        ids[:] = ids[:, :1]
    elif how == "nowhere":
        ids[:] = -1
    return ids.int()


HOWS = ("uniform", "skips", "repeats", "one rank", "one expert", "last rank", "nowhere")


def draw_round(problem, seed, how=None, sizes=None):
    """Inputs of every rank, [(x, ids, topk_weights), ...], from one seed."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    how = how or rng.choice(HOWS)
    out = []
    for rank in range(problem.num_ranks):
        tokens = sizes[rank] if sizes else rng.choice((0, 1, problem.max_tokens, None))
        tokens = rng.randint(0, problem.max_tokens) if tokens is None else tokens
        x = torch.randn(tokens, problem.hidden, generator=generator).bfloat16()
        ids = draw_ids(tokens, problem, how, generator)
        out.append((x, ids, torch.rand(tokens, problem.top_k, generator=generator)))
    return out


def unsharded(inputs, rank, full, wire, combine_wire="bf16"):
    """The rows of ``rank`` of one call with the tokens of all ranks.

    wire          None, or the format that x is rounded to before
    combine_wire  what the experts' rows are rounded to
    """
    x, ids, topk_weights = (torch.cat(parts) for parts in zip(*inputs, strict=True))
    x = x if wire is None else formats.quantize(x, wire)
    first = sum(len(inputs[r][0]) for r in range(rank))
    ws = SimpleNamespace()
    reference.dispatch(reference.quantize(x, full.problem), ids, ws, full)
    reference.gate_up(ws, full)
    reference.down(ws, full)
    ws.reference.y = reference.carried(ws.reference.y, combine_wire)
    y = torch.empty(len(ids), full.problem.hidden, dtype=torch.bfloat16)
    reference.combine(ids, topk_weights, ws, full, out=y)
    return y[first : first + len(inputs[rank][0])]


def caught(function, *args, **options):
    """(type name, message) of what a call raises, None if it does not."""
    try:
        function(*args, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def agree(env, name, facts, seed, rounds):
    """Rounds of random sizes, routings and delays; (rounds with a difference, bytes of results)."""
    rank = env.rank_in(name)
    if rank < 0:
        return None
    size = torch.distributed.get_world_size(env.groups[name])
    problem = make_problem(size, **facts)
    shard, full = make_weights(problem, rank)
    ws = moe.Workspace(shard.problem, env.groups[name], device="cpu")
    moe.warmup(ws, shard)
    lossy = problem.wire not in ("auto", "bf16") and problem.act == "bf16"
    wrong = []
    delay = random.Random(seed * 100 + rank)
    for index in range(rounds):
        inputs = draw_round(problem, seed * 1000 + index, HOWS[index % len(HOWS)])
        time.sleep(delay.choice((0, 0, 0.003, 0.01)))
        ws.output.fill_(float("nan"))
        ws.exchange._memory.fill_(0xFF)
        y = moe.moe_forward(*inputs[rank], shard, ws)
        wire = problem.wire if lossy else None
        if not torch.equal(y, unsharded(inputs, rank, full, wire, problem.combine_wire)):
            wrong.append((index, HOWS[index % len(HOWS)]))
    ws.close()
    return wrong


def rounded_way_back(env, fmt):
    """Relative L2 errors of combine_wire="mxfp8" against "bf16", and the fleet's alone."""
    inputs = draw_round(make_problem(env.size), 17, "uniform", [16] * env.size)
    x, ids, topk_weights = inputs[env.rank]
    results = []
    for combine_wire in ("bf16", "mxfp8"):
        problem = make_problem(env.size, format=fmt, combine_wire=combine_wire)
        shard, _ = make_weights(problem, env.rank)
        with moe.Workspace(problem, env.groups["all"], device="cpu") as ws:
            results.append(moe.moe_forward(x, ids, topk_weights, shard, ws).float())
    with moe.create_fleet(problem, env.groups["all"], device="cpu") as own:
        handle = own.handle(ids[:, :3])
        rows = torch.randn(handle.num_rows, HIDDEN).bfloat16()
        back = handle.combine(rows)
        rounded = formats.dequantize(formats.quantize(rows, "mxfp8")).bfloat16()
        same = torch.equal(back, handle.combine(rounded))
    return tuple(reference.error(results[1], results[0])), same


def repeat(env, times):
    """The same call again and again under delays gives the same bits."""
    problem = make_problem(env.size, format="nvfp4", act="nvfp4")
    shard, _ = make_weights(problem, env.rank)
    inputs = draw_round(problem, 5, "uniform", sizes=[16, 3, 0, 9])[env.rank]
    delay = random.Random(env.rank)
    with moe.Workspace(problem, device="cpu") as ws:
        first = moe.moe_forward(*inputs, shard, ws).clone()
        same = True
        for _ in range(times):
            time.sleep(delay.choice((0, 0.005)))
            same &= torch.equal(moe.moe_forward(*inputs, shard, ws), first)
    return same


def idle_ranks(env):
    """Each rank in turn has no tokens, then receives none, then all have none."""
    problem = make_problem(env.size)
    shard, full = make_weights(problem, env.rank)
    bad = []
    with moe.Workspace(problem, env.groups["all"], device="cpu") as ws:
        for idle in (*range(env.size), None):
            sizes = [0 if idle in (r, None) else 1 + r for r in range(env.size)]
            inputs = draw_round(problem, 40 + sum(sizes), "uniform", sizes)
            for x, ids, w in (inputs[env.rank],):
                y = moe.moe_forward(x, ids, w, shard, ws)
                bad += [] if torch.equal(y, unsharded(inputs, env.rank, full, None)) else [idle]
            for _, ids, _ in inputs:  # nothing for the idle one's experts
                mine = ids // problem.num_local_experts == idle
                ids[mine] = -1
            y = moe.moe_forward(*inputs[env.rank], shard, ws)
            bad += [] if torch.equal(y, unsharded(inputs, env.rank, full, None)) else [(idle,)]
    return bad


def surfaces(env):
    """Stages, MoELayer, out=, num_tokens=, BlockScaled x and two layers in one workspace."""
    problem = make_problem(env.size)
    wide = make_problem(env.size, hidden=192, top_k=2, max_tokens=5, format="nvfp4", bias=True)
    shard, full = make_weights(problem, env.rank)
    wide_shard, wide_full = make_weights(wide, env.rank)
    ws = moe.Workspace([problem, wide], env.groups["all"], device="cpu")
    inputs = draw_round(problem, 11, "skips", sizes=[5, 0, 16, 2])
    x, ids, topk_weights = inputs[env.rank]
    want = unsharded(inputs, env.rank, full, None)
    done = {}

    moe.dispatch(moe.quantize(x, shard.problem), ids, ws, shard)
    done["out of order"] = "gate_up is due" in caught(moe.down, ws, shard)[1]
    moe.gate_up(ws, shard)
    moe.down(ws, shard)
    done["stages"] = torch.equal(moe.combine(ids, topk_weights, ws, shard), want)

    moe.dispatch(x, ids, ws, shard)
    ws.reset()
    out = torch.full((len(x) + 2, HIDDEN), 5.0, dtype=torch.bfloat16)
    moe.moe_forward(x, ids, topk_weights, shard, ws, out=out)
    done["out"] = torch.equal(out[: len(x)], want) and bool((out[len(x) :] == 5).all())

    wide_inputs = draw_round(wide, 12, "uniform", sizes=[1, 5, 0, 4])
    y = moe.moe_forward(*wide_inputs[env.rank], wide_shard, ws)
    done["two layers"] = torch.equal(y, unsharded(wide_inputs, env.rank, wide_full, None))

    layer = moe.MoELayer.from_prepared(shard, workspace=ws)
    layer.warmup()
    done["layer"] = torch.equal(layer(x, ids.long(), topk_weights), want)
    own = moe.MoELayer.from_prepared(shard, group=env.groups["all"])
    done["own workspace"] = torch.equal(own(x, ids, topk_weights), want)
    own.close()

    # Rows behind the live count are neither read nor written, nor sent.
    padded = torch.cat([x[:14], torch.full((2, HIDDEN), float("nan"), dtype=torch.bfloat16)])
    bad_ids = torch.cat([ids[:14], torch.zeros(2, TOP_K, dtype=torch.int32)])
    bad_weights = torch.cat([topk_weights[:14], torch.full((2, TOP_K), float("nan"))])
    few = [tuple(t[:14] for t in of_rank) for of_rank in inputs]
    out = torch.full((len(padded), HIDDEN), 5.0, dtype=torch.bfloat16)
    live = torch.tensor([len(padded) - 2], dtype=torch.int32)
    moe.moe_forward(padded, bad_ids, bad_weights, shard, ws, out=out, num_tokens=live)
    want_few = unsharded(few, env.rank, full, None)
    done["num_tokens"] = torch.equal(out[:-2], want_few) and bool((out[-2:] == 5).all())

    wrong = formats.quantize(x, "nvfp4")
    done["wrong wire"] = "what crosses the wire" in str(
        caught(moe.moe_forward, wrong, ids, topk_weights, shard, ws)
    ) or "BlockScaled in mxfp8" in str(caught(moe.moe_forward, wrong, ids, topk_weights, shard, ws))
    ws.close()
    done["closed"] = "it is closed" in caught(moe.moe_forward, x, ids, topk_weights, shard, ws)[1]
    return done


def overflow(env):
    """One rank would get too much: the error of every rank, and whether the next call is right."""
    problem = make_problem(env.size, max_recv_rows=20)
    shard, full = make_weights(problem, env.rank)
    with moe.Workspace(problem, env.groups["all"], device="cpu", debug=True) as ws:
        inputs = draw_round(problem, 3, "one rank", sizes=[4, 4, 0, 0])
        turn = ws.turn
        error = caught(moe.moe_forward, *inputs[env.rank], shard, ws)
        unchanged = ws.turn == turn and ws.round is None
        inputs = draw_round(problem, 4, "one rank", sizes=[0, 4, 2, 0])
        y = moe.moe_forward(*inputs[env.rank], shard, ws)
        return error, unchanged, torch.equal(y, unsharded(inputs, env.rank, full, None))


def different_problems(env):
    """Errors of construction, and that the group is usable afterwards."""
    found = {}
    group = env.groups["all"]
    for name, value in (("top_k", 2), ("max_tokens", 8), ("format", "nvfp4"), ("wire", "bf16")):
        problem = make_problem(env.size, **({name: value} if env.rank == 1 else {}))
        found[name] = caught(moe.Workspace, problem, group, device="cpu")
    problem = make_problem(env.size)
    problems = [problem, problem.with_(hidden=64)] if env.rank == 2 else [problem]
    found["number"] = caught(moe.Workspace, problems, group, device="cpu")
    # what "auto" comes to is no difference
    problem = problem.with_(act="mxfp8") if env.rank == 0 else problem
    found["resolved"] = caught(moe.Workspace(problem, group, device="cpu").close)
    return found


def different_layers(env):
    """Rank 0 calls another layer of the workspace than the rest."""
    a, b = make_problem(env.size), make_problem(env.size, top_k=1)
    problem = b if env.rank == 0 else a
    shard, _ = make_weights(problem, env.rank)
    inputs = draw_round(problem, 9, "uniform", sizes=[2] * env.size)[env.rank]
    with moe.Workspace([a, b], env.groups["all"], device="cpu") as ws:
        return caught(moe.moe_forward, *inputs, shard, ws)


def different_calls(env):
    """Rank 0 warms up while the rest compute; then all do the same."""
    problem = make_problem(env.size)
    shard, full = make_weights(problem, env.rank)
    inputs = draw_round(problem, 9, "uniform", sizes=[2] * env.size)
    with moe.Workspace(problem, env.groups["all"], device="cpu") as ws:
        if env.rank == 0:
            error = caught(moe.warmup, ws, shard)
        else:
            error = caught(moe.moe_forward, *inputs[env.rank], shard, ws)
        y = moe.moe_forward(*inputs[env.rank], shard, ws)
        return error, torch.equal(y, unsharded(inputs, env.rank, full, None))


def many_layers(env):
    """More layers than one message describes, of which one differs on one rank, in the last."""
    problems = [make_problem(env.size, max_tokens=n) for n in range(1, 41)]
    good = caught(moe.Workspace(problems, env.groups["all"], device="cpu").close)
    problems[-1] = make_problem(env.size, max_tokens=7 if env.rank == 3 else 40)
    return good, caught(moe.Workspace, problems, env.groups["all"], device="cpu")


def bad_arguments(env):
    problem = make_problem(env.size)
    shard, _ = make_weights(problem, (env.rank + 1) % env.size)
    group = env.groups["all"]
    x, ids, topk_weights = draw_round(problem, 1, "uniform", sizes=[2] * env.size)[env.rank]
    with moe.Workspace(problem, group, device="cpu") as ws:
        other_rank = caught(moe.moe_forward, x, ids, topk_weights, shard, ws)
    return {
        "rank": other_rank,
        "size": caught(moe.Workspace, make_problem(2), group, device="cpu"),
        "one": caught(moe.Workspace, make_problem(1), group, device="cpu"),
        "transport": caught(moe.Workspace, problem, group, device="cpu", transport="nccl"),
        "symm": caught(moe.Workspace, problem, group, device="cpu", transport="symm"),
        "timeout": caught(moe.Workspace, problem, group, device="cpu", timeout=-1),
        "fleet": caught(moe.create_fleet, problem, group, "nccl", device="cpu"),
        "symm fleet": caught(moe.create_fleet, problem, group, "symm", device="cpu"),
        "mixed": caught(moe.Workspace, [problem, make_problem(2)], group, device="cpu"),
        "stranger": caught(
            moe.Workspace,
            make_problem(2),
            env.groups["other pair" if env.rank < 2 else "pair"],
            device="cpu",
        ),
    }


def two_groups(env):
    """Pairs that run different numbers of rounds, interleaved with rounds of all."""
    name = "pair" if env.rank < 2 else "other pair"
    rank = env.rank_in(name)
    small, large = make_problem(2), make_problem(4, format="nvfp4")
    shard, full = make_weights(small, rank)
    large_shard, large_full = make_weights(large, env.rank)
    wrong = []
    with (
        moe.Workspace(small, env.groups[name], device="cpu") as ws,
        moe.Workspace(large, env.groups["all"], device="cpu") as large_ws,
    ):
        for turn in range(3):
            for index in range(1 + turn + 3 * (env.rank // 2)):
                inputs = draw_round(small, 100 * (env.rank // 2) + index)
                y = moe.moe_forward(*inputs[rank], shard, ws)
                wrong += [] if torch.equal(y, unsharded(inputs, rank, full, None)) else [index]
            inputs = draw_round(large, 500 + turn)
            y = moe.moe_forward(*inputs[env.rank], large_shard, large_ws)
            same = torch.equal(y, unsharded(inputs, env.rank, large_full, None))
            wrong += [] if same else [("all", turn)]
    return wrong


def fleet(env):
    """Own experts: each multiplies its rows by its own number plus one."""
    done = {}
    problem = make_problem(env.size, act="bf16")
    inputs = draw_round(problem, 21, "skips", sizes=[4, 0, 7, 16])
    x, ids, topk_weights = inputs[env.rank]
    first = env.rank * problem.num_local_experts
    with moe.create_fleet(problem, env.groups["all"], device="cpu") as own:
        handle, other = own.handle(ids), own.handle(ids.flip(0))
        for h, order in ((handle, ids), (other, ids.flip(0)), (handle, ids)):
            rows = h.dispatch(x)
            y = (rows.float() * (h.expert_ids[:, None] + first + 1)).bfloat16()
            got = h.combine(y, topk_weights)
            want = torch.zeros(len(x), HIDDEN)
            for k in range(TOP_K):
                e = order[:, k, None]
                term = (x.float() * (e + 1)).bfloat16().float() * topk_weights[:, k, None]
                want += torch.where((e >= 0) & (e < EXPERTS), term, 0.0)
            done[len(done)] = torch.equal(got, want.bfloat16())
        counts = torch.bincount(handle.expert_ids, minlength=problem.num_local_experts)
        done["counts"] = handle.rows_per_expert == counts.tolist()
        total = sum(int((i // problem.num_local_experts == env.rank).sum()) for _, i, _ in inputs)
        done["rows"] = handle.num_rows == total == len(handle.dispatch(x))
        out = torch.full((len(x) + 1, HIDDEN), 5.0, dtype=torch.bfloat16)
        zeros = torch.zeros(handle.num_rows, HIDDEN, dtype=torch.bfloat16)
        done["out"] = handle.combine(zeros, out=out) is out and bool((out[-1] == 5).all())
        done["shape"] = (
            "num_rows" in caught(handle.combine, zeros.repeat(2, 1)[:-1].repeat(2, 1))[1]
        )
        handle.close()
        handle.close()
        done["closed handle"] = "handle: it is closed" in caught(handle.dispatch, x)[1]
    own.close()
    done["closed fleet"] = "fleet: it is closed" in caught(other.dispatch, x)[1]
    for wire in ("mxfp8", "nvfp4"):
        with moe.create_fleet(problem.with_(wire=wire), device="cpu") as quantized:
            h = quantized.handle(ids)
            rows = formats.dequantize(h.dispatch(x))
            back = h.combine(rows.bfloat16())
            want = formats.dequantize(formats.quantize(x, wire)).bfloat16().float()
            times = ((ids >= 0) & (ids < EXPERTS)).sum(1, keepdim=True)
            done[wire] = torch.equal(back, (want * times).bfloat16())
            again = formats.dequantize(h.dispatch(formats.quantize(x, wire)))
            done[wire, "given"] = torch.equal(again, rows)
    return done


def sample(env, code):
    """The README's sample gives this rank's rows of the unsharded layer."""
    problem = make_problem(env.size)
    w13, w2, _ = source_weights(problem)
    own = slice(env.rank * 3, env.rank * 3 + 3)
    inputs = draw_round(problem, 31, "uniform", sizes=[3, 1, 0, 2])
    x, topk_ids, topk_weights = inputs[env.rank]
    names = {"torch": torch, "moe": moe, "w13": w13[own], "w2": w2[own], "x": x}
    names |= {"topk_ids": topk_ids, "topk_weights": topk_weights}
    exec(code, names)
    _, full = make_weights(problem, env.rank)
    return torch.equal(names["y"], unsharded(inputs, env.rank, full, None))


def create_and_close(env, times):
    problem = make_problem(env.size)
    for _ in range(times):
        moe.Workspace(problem, env.groups["all"], device="cpu").close()
    return True


def late_to_build(env, who, seconds):
    """One rank builds its workspace too late."""
    if env.rank == who:
        time.sleep(2 * seconds)
        return None
    return caught(moe.Workspace, make_problem(env.size), device="cpu", timeout=seconds)


def late(env, who, seconds):
    """One rank comes too late: what the others raise, then and at the next call, and at close."""
    problem = make_problem(env.size)
    shard, _ = make_weights(problem, env.rank)
    inputs = draw_round(problem, 1, "uniform", sizes=[2] * env.size)[env.rank]
    ws = moe.Workspace(problem, env.groups["all"], device="cpu", timeout=seconds)
    if env.rank == who:
        time.sleep(3 * seconds)
        return None
    began = time.monotonic()
    error = caught(moe.moe_forward, *inputs, shard, ws)
    took = time.monotonic() - began
    again = caught(moe.moe_forward, *inputs, shard, ws)
    return error, again, took, caught(ws.close)


def dies(env, who, folder, phase):
    """One rank ends before a phase: the others' error, and a new group and workspace of them."""
    problem = make_problem(env.size)
    shard, _ = make_weights(problem, env.rank)
    inputs = draw_round(problem, 1, "uniform", sizes=[2] * env.size)[env.rank]
    ws = moe.Workspace(problem, env.groups["all"], device="cpu", timeout=20)
    moe.moe_forward(*inputs, shard, ws)
    if env.rank == who:
        if phase == "dispatch":
            ws.exchange.route(ws.problem_of(shard), inputs[1], len(inputs[1]))
        os._exit(3)
    error = caught(moe.moe_forward, *inputs, shard, ws)
    checked = caught(ws.check)
    ws.close()

    dist = torch.distributed
    dist.destroy_process_group()
    left = [rank for rank in range(env.size) if rank != who]
    rank = left.index(env.rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/again",
        rank=rank,
        world_size=len(left),
        timeout=timedelta(seconds=20),
    )
    problem = make_problem(len(left))
    shard, full = make_weights(problem, rank)
    inputs = draw_round(problem, 2, "uniform", sizes=[3] * len(left))
    with moe.Workspace(problem, device="cpu") as ws:
        y = moe.moe_forward(*inputs[rank], shard, ws)
        same = torch.equal(y, unsharded(inputs, rank, full, None))
    return error, checked, same
