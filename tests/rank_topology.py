"""Cases of ``rank_pool`` in which experts move, or the group changes under a layer or a fleet."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from unittest import mock

import torch
from rank_cases import caught, draw_round, make_problem, make_weights, source_weights, unsharded

import moe_ep_jit as moe
from moe_ep_jit import layout, reference, variants, workspace

LOGICAL = 8
#: Twelve places for eight experts: one with three places, two with two.
MAPS = ([0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 5, 3], [7, 7, 7, 7, 7, 0, 1, 2, 3, 4, 5, 6])


def logical(**facts):
    """(w13, w2 of the logical experts, the unsharded layer's weights)."""
    problem = make_problem(1, num_experts=LOGICAL, **facts)
    w13, w2, _ = source_weights(problem)
    return w13, w2, moe.prepare_weights(w13, w2, problem)


def places_of(places, rank, size):
    own = len(places) // size
    return places[rank * own : (rank + 1) * own]


def draw(problem, seed, sizes):
    """Inputs of every rank that name logical experts."""
    return draw_round(problem.with_(num_experts=LOGICAL), seed, "skips", sizes)


def moved(env, facts):
    """Two maps in turn, through the layer and through the function.

    Against the unsharded layer within rounding: a CPU's matrix product may sum in another order for
    another number of rows, which places share. The kernels' does not (``emulated``).
    """
    w13, w2, full = logical(**facts)
    problem = make_problem(env.size, **facts)
    own = places_of(MAPS[0], env.rank, env.size)
    shard = moe.prepare_weights(w13[own], w2[own], problem, rank=env.rank)
    layer = moe.MoELayer.from_prepared(shard, group=env.groups["all"])
    pointers = [t.data_ptr() for t in shard.tensors.values()]
    wrong = []
    for turn, places in enumerate((*MAPS, MAPS[0])):
        own = places_of(places, env.rank, env.size)
        if turn == 0:
            layer.update_topology(places)
        elif turn == 1:
            layer.update_topology(torch.tensor(places), w13[own], w2[own])
        else:
            moe.update_topology(layer.workspace, shard, places, w13[own], w2[own])
        sent = torch.zeros(LOGICAL, dtype=torch.int64)
        for seed in range(3):
            inputs = draw(problem, 10 * turn + seed, [16, 0, 5, 9])
            ids = inputs[env.rank][1]
            sent += torch.bincount(ids[(ids >= 0) & (ids < LOGICAL)].long(), minlength=LOGICAL)
            want = unsharded(inputs, env.rank, full, None)
            y = layer(*inputs[env.rank])
            wrong += [] if torch.equal(layer(*inputs[env.rank]), y) else [(turn, seed)]
            if len(y) and reference.error(y.float(), want.float()).whole > 1e-2:
                wrong.append((turn, seed, "numbers"))
        load = shard.topology.snapshot()
        if load.logical.tolist() != (2 * sent).tolist():
            wrong.append((turn, "logical load"))
        everywhere = load.physical.clone()
        torch.distributed.all_reduce(everywhere)
        if not bool((everywhere > 0).all()):
            wrong.append((turn, "an idle place", everywhere.tolist()))
    if pointers != [t.data_ptr() for t in shard.tensors.values()]:
        wrong.append("weights at other addresses")
    layer.close()
    return wrong


def emulated(env, name):
    """Kernels, by the PTX emulator: redundant experts over two ranks give the unsharded layer's
    bits, and the counters are right.
    """
    rank = env.rank_in(name)
    if rank < 0:
        return None
    places, experts = [2, 0, 1, 2, 2, 0], 3
    problem = make_problem(2, num_experts=6, top_k=2, max_tokens=8)
    alone = problem.with_(num_ranks=1, num_experts=experts, max_tokens=16)
    w13, w2, _ = source_weights(alone)
    own = places_of(places, rank, 2)
    options = {"backend": "emulator"}
    shard = moe.prepare_weights(w13[own], w2[own], problem, rank=rank, **options)
    full = moe.prepare_weights(w13, w2, alone, **options)
    options["device"] = "cpu"
    ws = moe.Workspace(shard.problem, env.groups[name], operand=shard.operand, **options)
    full_ws = moe.Workspace(full.problem, operand=full.operand, **options)
    moe.update_topology(ws, shard, places)
    # One rung on both sides, whatever the number of rows.
    config = variants.ladder("sm_90a", shard.operand)[0]
    wrong, sent = [], torch.zeros(experts, dtype=torch.int64)
    for seed in range(3):
        inputs = draw_round(problem.with_(num_experts=4), seed, "uniform", [8, 5])
        y = moe.moe_forward(*inputs[rank], shard, ws, config=config)
        whole = [torch.cat(parts) for parts in zip(*inputs, strict=True)]
        want = moe.moe_forward(*whole, full, full_ws, config=config)
        wrong += [] if torch.equal(y, want[8 * rank : 8 * rank + len(y)]) else [seed]
        sent += torch.bincount(inputs[rank][1].flatten().long(), minlength=4)[:experts]
    load = shard.topology.snapshot()
    wrong += [] if load.logical.tolist() == sent.tolist() else ["load"]
    wrong += [] if full.topology.load.sum() > load.physical.sum() else ["load of all"]
    ws.close()
    return wrong


def all_or_nothing(env):
    """What one rank alone does wrong: every rank's error, and whether the old map still serves."""
    w13, w2, full = logical()
    problem = make_problem(env.size)
    first, second = MAPS
    own, new = (places_of(m, env.rank, env.size) for m in MAPS)
    shard = moe.prepare_weights(w13[own], w2[own], problem, rank=env.rank)
    inputs = draw(problem, 5, [4, 4, 0, 7])
    want = unsharded(inputs, env.rank, full, None)
    found = {}
    nan = w13[new] * float("nan")
    with moe.Workspace(problem, env.groups["all"], device="cpu") as ws:
        moe.update_topology(ws, shard, first)

        def attempt(name, bad, call):
            moe.moe_forward(*inputs[env.rank], shard, ws)
            load = shard.topology.load.clone()
            error = caught(call, env.rank == bad)
            same = torch.equal(shard.topology.load, load)
            same &= shard.topology.physical_to_logical == first
            same &= torch.equal(moe.moe_forward(*inputs[env.rank], shard, ws), want)
            found[name] = error, same

        def update(places, w13=w13[new]):
            moe.update_topology(ws, shard, places, w13, w2[new])

        attempt("short map", 2, lambda bad: update(second[:-1] if bad else second))
        attempt("other map", 1, lambda bad: update(first if bad else second))
        attempt("weights", 3, lambda bad: update(second, nan if bad else w13[new]))
        attempt(
            "without weights",
            0,
            lambda bad: moe.update_topology(ws, shard, second) if bad else update(second),
        )
        attempt(
            "other call",
            1,
            lambda bad: moe.moe_forward(*inputs[env.rank], shard, ws) if bad else update(second),
        )
        update(second)
        after = torch.equal(moe.moe_forward(*inputs[env.rank], shard, ws), want)
        found["after"] = None, after and shard.topology.physical_to_logical == second
    return found


def new_group(env):
    """From four ranks to three, to one of the present size, and back; a rank fails in between."""
    problem = make_problem(env.size)
    shard, full = make_weights(problem, env.rank)
    done = {}
    ws = moe.Workspace(problem, env.groups["all"], device="cpu")
    inputs = draw_round(problem, 5, "uniform", [4, 4, 0, 7])
    want = unsharded(inputs, env.rank, full, None)
    view = moe.moe_forward(*inputs[env.rank], shard, ws)
    done["before"] = torch.equal(view, want)

    # No memory on one rank.
    allocate = workspace.Workspace._allocate

    def fails(self):
        if env.rank == 1 and self.local is not None:
            raise torch.OutOfMemoryError("Workspace: no memory left")
        allocate(self)

    with mock.patch.object(workspace.Workspace, "_allocate", fails):
        done["error"] = caught(ws.update_topology, env.groups["all"])
    done["stays"] = torch.equal(moe.moe_forward(*inputs[env.rank], shard, ws), want)

    ws.update_topology(env.groups["all"], problem.with_(max_tokens=20))
    done["again"] = ws.output.shape[0] == 20 and torch.equal(view, want)
    done["again"] &= torch.equal(moe.moe_forward(*inputs[env.rank], shard, ws), want)
    if env.rank < 3:
        ws.update_topology(env.groups["three"])
        three = make_problem(3, max_tokens=20)
        done["other weights"] = caught(moe.moe_forward, *inputs[env.rank], shard, ws)
        own, three_full = make_weights(three, env.rank)
        inputs = draw_round(three, 6, "uniform", [4, 3, 9])
        y = moe.moe_forward(*inputs[env.rank], own, ws)
        done["three"] = torch.equal(y, unsharded(inputs, env.rank, three_full, None))
        done["size"] = ws.problems[0].num_ranks == 3
    done["stranger"] = caught(
        ws.update_topology, env.groups["pair" if env.rank > 1 else "other pair"]
    )
    ws.close()
    return done


def moved_fleet(env):
    """A fleet's places, its group, both, and what one rank does wrong."""
    problem = make_problem(env.size, act="bf16")
    inputs = draw(problem, 21, [4, 0, 7, 16])
    x, ids, _ = inputs[env.rank]
    done = {}

    def right(own, x, ids, places):
        """Each expert multiplies its rows by its logical number plus one."""
        handle = own.handle(ids)
        rows = handle.dispatch(x)
        per_rank = own.problem.num_local_experts
        held = torch.tensor(places)[own.rank * per_rank :][handle.expert_ids.long()]
        got = handle.combine((rows.float() * (held[:, None] + 1)).bfloat16())
        want = torch.zeros(len(x), problem.hidden)
        for k in range(problem.top_k):
            e = ids[:, k, None]
            term = (x.float() * (e + 1)).bfloat16().float()
            want += torch.where((e >= 0) & (e < LOGICAL), term, 0.0)
        valid = int(((ids >= 0) & (ids < LOGICAL)).sum())
        counted = int(own.topology.load.sum())
        own.topology.reset_load()
        return torch.equal(got, want.bfloat16()) and counted == valid

    own = moe.create_fleet(problem, env.groups["all"], device="cpu")
    old = own.handle(ids)
    own.update_topology(MAPS[0])
    done["void handle"] = "call fleet.handle again" in caught(old.dispatch, x)[1]
    done["map"] = right(own, x, ids, MAPS[0])
    bad = [*MAPS[1][:-1], 99] if env.rank == 3 else MAPS[1]
    done["error"] = caught(own.update_topology, bad)
    done["stays"] = right(own, x, ids, MAPS[0])

    def fails(facts):
        raise torch.OutOfMemoryError("exchange between ranks: no memory left")

    bytes_of = fails if env.rank == 0 else layout.exchange_bytes
    with mock.patch.object(layout, "exchange_bytes", bytes_of):
        done["no memory"] = caught(own.update_topology, MAPS[1], group=env.groups["all"])
    done["stays again"] = right(own, x, ids, MAPS[0])
    own.update_topology(MAPS[1], group=env.groups["all"])
    done["new group"] = right(own, x, ids, MAPS[1])
    if env.rank < 3:  # three ranks with places for five each
        places = [*MAPS[0], 1, 2, 6]
        own.update_topology(places, group=env.groups["three"])
        done["three"] = right(own, x, ids, places) and own.problem.num_experts == 15
        own.update_topology(group=env.groups["three"])
        done["plain"] = own.topology.physical_to_logical == list(range(15))
    own.close()
    return done


def absent(env, who, seconds):
    """One rank does not come to an update: the others' error, and that their map stays."""
    problem = make_problem(env.size)
    shard, _ = make_weights(problem, env.rank)
    ws = moe.Workspace(problem, device="cpu", timeout=seconds)
    if env.rank == who:
        time.sleep(3 * seconds)
        return None
    error = caught(moe.update_topology, ws, shard, list(range(12)))
    return error, shard.topology.physical_to_logical


def survivors(env, who, folder):
    """One rank ends; the others form a new group and take their workspace there."""
    problem = make_problem(env.size)
    shard, _ = make_weights(problem, env.rank)
    inputs = draw_round(problem, 1, "uniform", sizes=[2] * env.size)[env.rank]
    ws = moe.Workspace(problem, env.groups["all"], device="cpu", timeout=20)
    moe.moe_forward(*inputs, shard, ws)
    if env.rank == who:
        os._exit(3)
    error = caught(moe.moe_forward, *inputs, shard, ws)
    dist = torch.distributed
    dist.destroy_process_group()
    left = [rank for rank in range(env.size) if rank != who]
    rank = left.index(env.rank)
    again = {"init_method": f"file://{folder}/again", "rank": rank, "world_size": len(left)}
    dist.init_process_group("gloo", timeout=timedelta(seconds=20), **again)
    ws.update_topology(None)
    problem = make_problem(len(left))
    shard, full = make_weights(problem, rank)
    inputs = draw_round(problem, 2, "uniform", sizes=[3] * len(left))
    y = moe.moe_forward(*inputs[rank], shard, ws)
    return error, torch.equal(y, unsharded(inputs, rank, full, None))
