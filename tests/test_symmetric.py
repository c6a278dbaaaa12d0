"""Several ranks over symmetric memory: processes that share memory, kernels under the emulator,
against the unsharded kernels, bit for bit."""

from __future__ import annotations

import re

import pytest
import rank_symm as cases
import torch
from rank_cases import draw_round, make_problem
from rank_pool import Pool
from symm_inside import Ranks

import moe_ep_jit as moe
from moe_ep_jit import entries, layout
from moe_ep_jit.symmetric import check_problems
from moe_ep_jit.tools.emulator import layer
from moe_ep_jit.tools.emulator.fault import Fault
from moe_ep_jit.tools.emulator.host import c_compiler

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(c_compiler() is None, reason="no C compiler for the emulator's stand-in"),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    pool = Pool(2, tmp_path_factory.mktemp("pair"))
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("fmt", "tile_n", "facts"),
    [
        ("mxfp8", 8, {}),
        ("nvfp4", 32, {}),
        pytest.param("mxfp8", 192, {"bias": True}, marks=pytest.mark.full),
        pytest.param("mxfp8", 8, {"act": "bf16"}, marks=pytest.mark.full),
        pytest.param("nvfp4", 8, {"act": "nvfp4"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_sharded_equals_unsharded(pair, fmt, tile_n, facts):
    assert pair.run(cases.agree, "all", fmt, tile_n, 7, facts) == [[], []]


def test_ranks_in_different_rungs(pair):
    assert max(pair.run(cases.other_rungs, "mxfp8", [8, 64])) < 1e-2


def test_every_way_to_call(pair):
    for done in pair.run(cases.surfaces):
        assert all(done.values()), done


def test_fleet_serves_own_experts(pair):
    for done in pair.run(cases.fleet):
        assert all(done.values()), done


def test_experts_move_and_rows_are_counted(pair):
    for done in pair.run(cases.topology):
        assert all(done.values()), done


def test_overflow_is_the_same_error_on_every_rank_before_a_row_moves(pair):
    for error, checked, lost, untouched, right, closing in pair.run(cases.overflow):
        assert error[0] == "RuntimeError"
        assert error[1].startswith(
            "max_recv_rows: expected at most 9 rows of (token, k) for a rank, got 10 for rank 0"
        )
        assert checked
        assert lost
        assert untouched
        assert right
        assert closing is None


def test_ranks_that_call_different_layers_all_hear_of_it(pair):
    for rank, (lost, checked, closing) in enumerate(pair.run(cases.different_layers)):
        assert lost
        assert checked[0] == "RuntimeError"
        assert f"got another on rank {1 - rank} than on rank {rank}" in checked[1]
        assert closing == checked


def test_what_does_not_fit_is_refused_on_every_rank(pair):
    for found in pair.run(cases.refused):
        assert found.pop("files") == set()
        for name, (kind, text) in {
            "top_k": ("ValueError", "problem.top_k: expected the same on every rank, got 3 on"),
            "transport": (
                "ValueError",
                "transport: expected the same on every rank, got 'symm' on",
            ),
            "reference": ("RuntimeError", "rank 1: the reference runs on cpu"),
            "operand": ("ValueError", "operands: expected the same on every rank, got ['e4m3'] on"),
            "wire": ("ValueError", 'pass transport="collective"'),
            "combine_wire": ("ValueError", 'combine_wire: expected "bf16" with transport="symm"'),
        }.items():
            assert found[name][0] == kind, found[name]
            assert text in found[name][1]


def test_what_the_kernels_have_no_room_for_is_refused():
    problem = make_problem(8, num_experts=16)
    for facts, text in (
        ({"num_experts": 2048}, "num_experts: expected at most 1024"),
        ({"max_tokens": 1 << 28, "max_recv_rows": 64}, "max_tokens * top_k: expected at most"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            check_problems([problem.with_(**facts)])


def test_a_cold_call_warms_every_rank_up(pair):
    assert pair.run(cases.cold) == [True, True]


def test_workspaces_come_and_go(pair):
    assert pair.run(cases.create_and_close, 20) == [([], [])] * 2


def test_a_late_rank_is_named_and_both_go_on(pair):
    first, second = pair.run(cases.late, 1.0)
    error, again, lost, took, right, closing = first
    assert error[0] == "RuntimeError"
    assert "rank 0 of 2, phase 'count exchange': waited 1 s for rank 1" in error[1]
    assert "(flag count_flags[1]: expected 2, seen 1)" in error[1]
    assert again
    assert lost
    assert 0.9 < took < 2.5
    assert right
    assert closing is None
    assert second[4:] == (True, None)


@pytest.mark.parametrize(("stage", "phase"), [("none", "count exchange"), ("dispatch", "combine")])
def test_a_dead_rank_is_named_and_the_others_drain(tmp_path, stage, phase):
    pool = Pool(3, tmp_path)
    try:
        found = pool.run(cases.stops, 1, stage, 2.0)
    finally:
        pool.close()
    assert found[1] is None
    for rank in (0, 2):
        lost, took, checked, closing = found[rank]
        assert lost
        assert 1.9 < took < 6
        assert f"rank {rank} of 3, phase {phase!r}: waited 2 s for rank 1" in checked[1]
        assert closing == checked


def test_four_ranks_and_groups_that_do_not_meet(tmp_path):
    pool = Pool(4, tmp_path)
    try:
        assert pool.run(cases.two_groups) == [[]] * 4
        assert pool.run(cases.agree, "all", "mxfp8", 8, 3, {}) == [[]] * 4
        assert pool.run(cases.agree, "three", "nvfp4", 8, 3, {}) == [[]] * 3 + [None]
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("size", "fmt", "tile_n", "facts"),
    [
        (2, "mxfp8", 8, {}),
        (2, "nvfp4", 8, {"act": "nvfp4"}),
        (2, "nvfp4", 32, {}),
        pytest.param(3, "mxfp8", 64, {}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_every_schedule_gives_the_same_bits(size, fmt, tile_n, facts):
    assert Ranks(size, fmt, tile_n, **facts).wrong(3, range(5)) == []


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
def test_blackwell_ranks_in_different_rungs(fmt, monkeypatch):
    """Block scales go where the rung of the expert's rank has them; rungs give equal bits there."""
    monkeypatch.setenv("MOE_EP_JIT_ARCH", "sm_100a")
    assert Ranks(2, fmt, [8, 64]).wrong(3, [0, 1]) == []


def test_rows_that_do_not_come_end_in_an_error_and_nan(monkeypatch):
    def silent(folder):
        text = (folder / entries.PTX).read_text()
        counts = re.compile(r"(red\.release\.sys\.global\.add\.s32 \[%rd\d+\]), %r\d+;")
        assert len(counts.findall(text)) == ("-r2" in str(folder))
        return layer.Object(folder, counts.sub(r"\1, 0;", text))

    monkeypatch.setattr(layer, "load", silent)
    ranks = Ranks(2, "mxfp8", 8, timeout=0.01)  # of the emulator's own time
    inputs = draw_round(ranks.problem, 1, "uniform", sizes=[8, 8])
    for rank, y in ranks.forward(inputs).items():
        assert y.isnan().all()
        with pytest.raises(
            RuntimeError, match=r"phase 'dispatch': waited 0\.01 s for rank"
        ) as error:
            ranks.workspaces[rank].check()
        assert re.search(r"flag arrived\[\d\]: expected [1-9]\d*, seen 0\)", str(error.value))


def test_a_failed_rank_that_runs_on_leaves_its_peers_alone():
    """Its host may have launched more before it hears: a late peer still reads an older post."""
    ranks = Ranks(2, "mxfp8", 8, timeout=0.01)
    inputs = draw_round(ranks.problem, 1, "uniform", sizes=[8, 8])
    ranks.forward(inputs)
    late = ranks.workspaces[1].control()
    first, count = layout.exchange_parts(2)["counts"]
    odd = late[first : first + count].view(2, 2, -1)[1].clone()  # of epoch 1, by source
    with layer.together(*ranks.emulators):
        for seed in (2, 3):  # epochs 2 and 3
            x, ids, topk_weights = draw_round(ranks.problem, seed, "uniform", sizes=[8, 8])[0]
            y = moe.moe_forward(
                x, ids, topk_weights, ranks.weights[0], ranks.workspaces[0], config=ranks.configs[0]
            )
    assert y.isnan().all()
    assert torch.equal(late[first : first + count].view(2, 2, -1)[1], odd)


#: What orders ranks, as PTX -> without it.
ORDERS = {
    "arrivals released": ("red.release.sys.", "red.relaxed.sys."),
    "posts released": ("st.release.sys.", "st.relaxed.sys."),
    "flags acquired": ("ld.acquire.sys.", "ld.relaxed.sys."),
    "at system scope": ("ld.acquire.sys.", "ld.acquire.gpu."),
    "rows fenced for TMA": ("fence.proxy.async.global;", ""),
}


@pytest.mark.parametrize("name", ORDERS)
def test_the_emulator_sees_a_missing_order(name, monkeypatch):
    there, instead = ORDERS[name]

    def mutated(folder):
        text = (folder / entries.PTX).read_text()
        return layer.Object(folder, text.replace(there, instead) if "-r2" in str(folder) else text)

    monkeypatch.setattr(layer, "load", mutated)
    ranks = Ranks(2, "mxfp8", 8)
    with pytest.raises(Fault, match="barrier, release and acquire|no fence.proxy.async"):
        ranks.wrong(1, range(2))
