"""Several ranks over torch's symmetric memory, as processes that share one GPU, against the
unsharded kernels, bit for bit.

Ranks that wait for each other take turns on the GPU, a few milliseconds each: about 10 ms a round
with two, more with more.
"""

from __future__ import annotations

import pytest
import rank_gpu as cases
from rank_pool import Pool

pytestmark = pytest.mark.sm90

VARIANTS = [("mxfp8", {}), ("nvfp4", {}), ("nvfp4", {"act": "nvfp4"}), ("mxfp8", {"hidden": 1024})]


@pytest.fixture(scope="module", params=[2, 4, 8])
def ranks(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        pool = Pool(request.param, tmp_path_factory.mktemp("ranks"))
    yield request.param, pool
    pool.close()


@pytest.mark.parametrize(("fmt", "facts"), VARIANTS, ids=str)
def test_sharded_equals_unsharded(ranks, fmt, facts, seed):
    size, pool = ranks
    assert pool.run(cases.rounds, fmt, facts, seed % 1000, 125) == [[]] * size


def test_graphs_and_eager_calls_mix(ranks):
    size, pool = ranks
    assert pool.run(cases.graphs, "mxfp8") == [[]] * size


def test_layer_warms_up_by_itself(ranks):
    size, pool = ranks
    assert pool.run(cases.layer) == [True] * size


def test_fleet_serves_own_experts(ranks):
    size, pool = ranks
    assert pool.run(cases.fleet) == [[True] * 3] * size


def test_workspaces_come_and_go(ranks):
    size, pool = ranks
    for early, after in pool.run(cases.create_and_close, 20 if size == 2 else 4):
        assert early - after < 64 << 20


def test_a_late_rank_is_named_and_all_go_on(ranks):
    size, pool = ranks
    for rank, (error, lost, took, right, closing) in enumerate(pool.run(cases.late, 2.0)):
        assert right
        assert closing is None
        if rank != 1:
            assert error[0] == "RuntimeError"
            text = f"rank {rank} of {size}, phase 'count exchange': waited 2 s for rank 1"
            assert text in error[1]
            assert lost
            assert 1.9 < took < 6


@pytest.mark.parametrize(("stage", "phase"), [("none", "count exchange"), ("dispatch", "combine")])
def test_a_dead_rank_is_named_and_the_others_drain(tmp_path, monkeypatch, stage, phase):
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    pool = Pool(3, tmp_path)
    try:
        found = pool.run(cases.dies, 1, stage, 2.0)
    finally:
        pool.close()
    assert found[1] is None
    for rank in (0, 2):
        lost, took, checked, closing = found[rank]
        assert lost
        assert 1.9 < took < 8
        assert f"rank {rank} of 3, phase {phase!r}: waited 2 s for rank 1" in checked[1]
        assert closing == checked
