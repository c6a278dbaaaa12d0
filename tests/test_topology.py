"""Experts in places: maps, the choice among replicas, load counters; one rank."""

from __future__ import annotations

import pytest
import torch

import moe_ep_jit as moe
from moe_ep_jit import layout, reference
from moe_ep_jit.tools.emulator.host import c_compiler
from moe_ep_jit.topology import Topology, checked_map

HIDDEN, INTERMEDIATE, TOP_K, MAX_TOKENS = 128, 64, 2, 16
#: Four logical experts in six places.
MAP = [2, 0, 1, 3, 2, 0]

BACKENDS = [
    pytest.param("reference", marks=pytest.mark.cpu),
    pytest.param(
        "emulator",
        marks=[
            pytest.mark.emulated,
            pytest.mark.skipif(c_compiler() is None, reason="no C compiler for the stand-in"),
        ],
    ),
]


def make_layer(backend, places):
    """(weights and workspace of one place for each entry of ``places``, the logical weights)."""
    experts = max(places) + 1
    generator = torch.Generator().manual_seed(3)
    w13 = torch.randn(experts, 2 * INTERMEDIATE, HIDDEN, generator=generator) * HIDDEN**-0.5
    w2 = torch.randn(experts, HIDDEN, INTERMEDIATE, generator=generator) * INTERMEDIATE**-0.5
    sizes = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "top_k": TOP_K, "format": "mxfp8"}
    problem = moe.Problem(**sizes, num_experts=len(places), max_tokens=MAX_TOKENS)
    weights = moe.prepare_weights(w13[places], w2[places], problem, backend=backend)
    ws = moe.Workspace(weights.problem, device="cpu", backend=backend, operand=weights.operand)
    return weights, ws, w13, w2


def draw(tokens, experts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=generator).bfloat16()
    ids = torch.randint(-1, experts + 2, (tokens, TOP_K), generator=generator)
    ids[ids == experts + 1] = 2**40  # no expert's, and no int32
    return x, ids, torch.rand(tokens, TOP_K, generator=generator)


def rows_of(ids, experts):
    return [int((ids == e).sum()) for e in range(experts)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_count_their_rows_by_expert(backend):
    weights, ws, _, _ = make_layer(backend, [0, 1, 2, 3])
    load = weights.topology.load
    address = load.data_ptr()
    want = torch.zeros(4, dtype=torch.int64)
    for seed, tokens in enumerate((16, 0, 1, 9)):
        x, ids, topk_weights = draw(tokens, 4, seed)
        live = tokens - tokens // 3
        num_tokens = torch.tensor([live], dtype=torch.int32)
        moe.moe_forward(x, ids, topk_weights, weights, ws, num_tokens=num_tokens)
        want += torch.tensor(rows_of(ids[:live], 4))
        assert load.tolist() == want.tolist()
    before = weights.topology.snapshot()
    x, ids, topk_weights = draw(5, 4)
    moe.dispatch(x, ids, ws, weights)
    moe.gate_up(ws, weights)
    moe.down(ws, weights)
    moe.combine(ids, topk_weights, ws, weights)
    assert before.ready()
    assert before.physical.tolist() == before.logical.tolist() == want.tolist()
    want += torch.tensor(rows_of(ids, 4))
    assert load.tolist() == want.tolist()
    assert load.data_ptr() == address
    assert want.min() > 0
    weights.topology.reset_load()
    assert load.tolist() == [0] * 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_counters_pass_what_32_bits_hold(backend):
    weights, ws, _, _ = make_layer(backend, [0, 1])
    weights.topology.load.fill_(2**32 - 1)
    x, ids, topk_weights = draw(16, 2)
    moe.moe_forward(x, ids, topk_weights, weights, ws)
    assert weights.topology.load.tolist() == [2**32 - 1 + n for n in rows_of(ids, 2)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_moved_and_redundant_experts_give_the_logical_layer(backend):
    weights, ws, w13, w2 = make_layer(backend, MAP)
    plain, plain_ws, _, _ = make_layer(backend, [0, 1, 2, 3])
    moe.update_topology(ws, weights, torch.tensor(MAP))
    other = [3, 3, 2, 0, 1, 0]
    for places in (MAP, other):
        if places is other:  # ids that the first map knew go on to mean the same experts
            moe.update_topology(ws, weights, other, w13[other], w2[other])
        x, ids, topk_weights = draw(16, 4)
        want = moe.moe_forward(x, ids, topk_weights, plain, plain_ws)
        for _ in range(2):
            assert torch.equal(moe.moe_forward(x, ids, topk_weights, weights, ws), want)
        moe.dispatch(x, ids, ws, weights)
        moe.gate_up(ws, weights)
        moe.down(ws, weights)
        assert torch.equal(moe.combine(ids, topk_weights, ws, weights), want)
        load = weights.topology.snapshot()
        assert load.logical.tolist() == [3 * n for n in rows_of(ids, 4)]
        rows = dict.fromkeys(range(4), 0)
        for place, expert in enumerate(places):
            rows[expert] += int(load.physical[place])
            assert load.physical[place] > 0
        assert list(rows.values()) == load.logical.tolist()


@pytest.mark.cpu
def test_reference_knows_places():
    weights, ws, _, _ = make_layer("reference", MAP)
    moe.update_topology(ws, weights, MAP)
    x, ids, topk_weights = draw(16, 4)
    want = moe.moe_forward(x, ids, topk_weights, weights, ws).clone()
    assert torch.equal(reference.moe_forward(x, ids, topk_weights, weights), want)


@pytest.mark.cpu
@pytest.mark.parametrize("replicas", [2, 3, 5])
@pytest.mark.parametrize("top_k", [1, 6, 8])
def test_rows_of_a_busy_expert_are_spread_over_its_places(replicas, top_k):
    """Whichever k it has, over many tokens of one rank and over one token of many ranks."""
    topology = Topology(replicas + 1, torch.device("cpu"))
    topology.place([1, *[0] * replicas])
    places = range(1, replicas + 1)
    tokens = 512
    for k in range(top_k):
        ids = torch.full((tokens, top_k), -1)
        ids[:, k] = 0
        got = topology.physical_ids(ids, 3, tokens)
        assert torch.equal(got, topology.physical_ids(ids.int(), 3, tokens))
        assert bool((got[:, :k] == -1).all())
        share = [int((got[:, k] == place).sum()) / tokens for place in places]
        assert sum(share) == 1
        assert max(share) < 1.15 / replicas
    one = torch.zeros(1, 1, dtype=torch.int64)
    got = [topology.physical_ids(one, rank, 4096).item() for rank in range(64)]
    assert max(got.count(place) for place in places) < 1.3 * 64 / replicas
    # Neighbours, where few tokens choose it.
    ids = torch.zeros(2 * replicas, 1, dtype=torch.int64)
    assert set(topology.physical_ids(ids, 0, 4096).flatten().tolist()) == set(places)


@pytest.mark.cpu
def test_ids_that_are_no_experts_go_nowhere():
    topology = Topology(6, torch.device("cpu"))
    ids = torch.tensor([[-1, 4], [5, 6], [2**40, -(2**40)], [3, 1]])
    assert topology.physical_ids(ids, 0, 4) is ids
    topology.place(MAP)
    assert topology.physical_ids(ids, 0, 4).tolist() == [[-1, -1], [-1, -1], [-1, -1], [3, 2]]
    assert topology.physical_ids(ids[:0], 0, 4).shape == (0, 2)


@pytest.mark.cpu
def test_a_new_map_stays_where_the_old_one_was():
    """A captured call reads the tables again at each replay."""
    topology = Topology(6, torch.device("cpu"))
    topology.place(MAP)
    tables = topology._tables
    topology.load.fill_(7)
    topology.place([0, 1, 2, 3, 4, 5])
    assert topology._tables is tables
    assert topology.load.tolist() == [0] * 6
    ids = torch.arange(6).view(3, 2)
    assert torch.equal(topology.physical_ids(ids, 0, 3), ids.int())


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([0, 1, 2], "got 3; redundant experts count as places"),
        ([0, 1, 2, -1], "expected experts from 0 on, got -1"),
        ([0, 0, 3, 1], "up to 3, got none for 2"),
        ([0, 1, 2, 2.0], "expected integers"),
        ([[0, 1, 2, 3]], "expected integers"),
        (torch.zeros(2, 2), "expected integers"),
        (None, "expected integers"),
    ],
    ids=str,
)
def test_bad_maps_are_refused_and_change_nothing(given, message):
    weights, ws, w13, w2 = make_layer("reference", [0, 1, 2, 3])
    weights.topology.load.fill_(5)
    before = {name: t.clone() for name, t in weights.tensors.items()}
    with pytest.raises((ValueError, TypeError), match=message):
        moe.update_topology(ws, weights, given, -w13, -w2)
    assert weights.topology.physical_to_logical is None
    assert weights.topology.load.tolist() == [5] * 4
    assert all(torch.equal(before[name], t) for name, t in weights.tensors.items())


@pytest.mark.cpu
def test_weights_that_do_not_fit_leave_the_map():
    weights, ws, w13, w2 = make_layer("reference", [0, 1, 2, 3])
    with pytest.raises(ValueError, match="NaN"):
        moe.update_topology(ws, weights, [3, 2, 1, 0], w13 * float("nan"), w2)
    with pytest.raises(ValueError, match="expected both"):
        moe.update_topology(ws, weights, [3, 2, 1, 0], w13)
    x, ids, topk_weights = draw(2, 4)
    moe.dispatch(x, ids, ws, weights)
    with pytest.raises(ValueError, match="expected no round in progress"):
        moe.update_topology(ws, weights, [3, 2, 1, 0])
    with pytest.raises(ValueError, match="expected no round in progress"):
        ws.update_topology(None)
    assert weights.topology.physical_to_logical is None
    assert checked_map(torch.tensor([1, 0]), 2) == [1, 0]


@pytest.mark.cpu
def test_a_workspace_is_built_anew_for_the_same_single_rank():
    weights, ws, _, _ = make_layer("reference", [0, 1, 2, 3])
    x, ids, topk_weights = draw(3, 4)
    old = moe.moe_forward(x, ids, topk_weights, weights, ws)
    ws._record[layout.ERROR_CODE] = layout.ERROR_TWO_STREAMS
    wide = weights.problem.with_(max_tokens=MAX_TOKENS + 8)
    with pytest.raises(RuntimeError, match="one stream at a time"):
        ws.update_topology(None, wide)
    assert ws.output.data_ptr() == old.data_ptr()
    ws.update_topology(None, wide)
    assert ws.output.shape == (MAX_TOKENS + 8, HIDDEN)
    assert torch.equal(moe.moe_forward(x, ids, topk_weights, weights, ws), old)
    ws.close()
    assert ws.closed
