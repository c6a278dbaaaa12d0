"""Experts that move and groups that change, over gloo: all ranks or none."""

from __future__ import annotations

import pytest
import rank_topology as cases
from rank_pool import Pool

from moe_ep_jit.tools.emulator.host import c_compiler


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    pool = Pool(4, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "facts",
    [{"format": "mxfp8"}, {"format": "nvfp4", "act": "nvfp4"}],
    ids=lambda facts: facts["format"],
)
def test_moved_experts_give_the_unsharded_logical_layer(ranks, facts):
    assert ranks.run(cases.moved, facts) == [[]] * 4


@pytest.mark.skipif(c_compiler() is None, reason="no C compiler for the emulator's stand-in")
def test_emulated_kernels_with_redundant_experts_agree_with_the_unsharded_layer(ranks):
    assert ranks.run(cases.emulated, "pair") == [[], [], None, None]


def test_what_one_rank_cannot_do_changes_nothing_on_any(ranks):
    answers = ranks.run(cases.all_or_nothing)
    stays = "nothing has changed on any rank"
    for rank, found in enumerate(answers):
        assert all(same for _, same in found.values()), (rank, found)
        for name, who, why in (
            ("short map", 2, "expected [num_experts=12], a logical expert for each place, got 11"),
            ("weights", 3, "NaN"),
        ):
            kind, message = found[name][0]
            assert kind == "ValueError"
            assert why in message
            if rank != who:
                assert message.startswith(f"update_topology: rank {who} could not (ValueError: ")
                assert stays in message
        kind, message = found["other map"][0]
        assert kind == "ValueError"
        assert message.startswith("physical_to_logical: expected the same on every rank, got ")
        assert stays in message
        assert "with new weights: expected the same" in found["without weights"][0][1]
        kind, message = found["other call"][0]
        assert kind == "ValueError"
        assert "got update_topology, count exchange, update_topology" in message


def test_a_workspace_moves_to_another_group(ranks):
    for rank, done in enumerate(ranks.run(cases.new_group)):
        kind, message = done.pop("error")
        if rank == 1:
            assert (kind, message) == ("OutOfMemoryError", "Workspace: no memory left")
        else:
            assert kind == "RuntimeError"
            assert "rank 1 could not (OutOfMemoryError: Workspace: no memory left)" in message
        kind, message = done.pop("stranger")
        assert kind == "ValueError"
        assert "this process belongs to" in message
        if rank < 3:
            assert done.pop("other weights")[0] == "ValueError"
        assert all(done.values()), (rank, done)


def test_a_fleet_moves_experts_and_group(ranks):
    for rank, done in enumerate(ranks.run(cases.moved_fleet)):
        kind, message = done.pop("error")
        assert kind == "ValueError"
        assert "got none for" in message
        assert (rank == 3) != message.startswith("update_topology: rank 3 could not")
        kind, message = done.pop("no memory")
        assert kind == ("OutOfMemoryError" if rank == 0 else "RuntimeError")
        assert all(done.values()), (rank, done)


def test_a_rank_that_does_not_come_to_an_update_is_named(tmp_path):
    pool = Pool(3, tmp_path)
    try:
        found = pool.run(cases.absent, 1, 1.0)
    finally:
        pool.close()
    for rank in (0, 2):
        (kind, message), held = found[rank]
        assert kind == "RuntimeError"
        assert f"rank {rank} of 3, phase 'update_topology'" in message
        assert "for rank 1 (" in message
        assert held is None


def test_those_that_are_left_take_their_workspace_to_a_new_group(tmp_path):
    pool = Pool(3, tmp_path)
    try:
        found = pool.run(cases.survivors, 1, str(tmp_path))
    finally:
        pool.close()
    for rank in (0, 2):
        (kind, message), right = found[rank]
        assert kind == "RuntimeError"
        assert "phase 'count exchange'" in message
        assert right
