"""Several ranks on CPUs: processes over gloo against the unsharded layer, bit for bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import rank_cases as cases
import rank_kernels as kernels
from rank_pool import Pool

from moe_ep_jit.tools.emulator.host import c_compiler

VARIANTS = [
    {"format": "mxfp8"},
    {"format": "mxfp8", "act": "bf16", "bias": True},
    {"format": "mxfp8", "act": "mxfp8", "wire": "bf16"},
    {"format": "mxfp8", "act": "bf16", "wire": "mxfp8"},
    {"format": "nvfp4"},
    {"format": "nvfp4", "act": "nvfp4"},
    {"format": "nvfp4", "act": "mxfp8", "bias": True},
    {"format": "nvfp4", "act": "bf16", "wire": "nvfp4"},
    {"format": "mxfp8", "combine_wire": "mxfp8"},
    {"format": "nvfp4", "wire": "mxfp8", "act": "bf16", "combine_wire": "mxfp8"},
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    pool = Pool(4, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.mark.parametrize("group", ["all", "pair", "three"])
@pytest.mark.parametrize("facts", VARIANTS, ids=lambda f: "-".join(map(str, f.values())))
def test_sharded_equals_unsharded(ranks, group, facts, seed):
    found = ranks.run(cases.agree, group, facts, seed % 10_000, 14)
    assert [wrong for wrong in found if wrong] == []


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
def test_rows_rounded_for_the_way_back_stay_within_the_formats_error(ranks, fmt):
    for (whole, worst_row, worst_block), same in ranks.run(cases.rounded_way_back, fmt):
        assert 2e-2 < whole < 3e-2
        assert worst_row < 4e-2
        assert worst_block < 8e-2
        assert same  # what MXFP8 holds crosses it unchanged


def test_equal_inputs_give_equal_bits_under_delays(ranks):
    assert all(ranks.run(cases.repeat, 20))


def test_ranks_without_tokens_and_ranks_that_receive_none(ranks):
    assert ranks.run(cases.idle_ranks) == [[]] * 4


def test_every_way_to_call(ranks):
    for done in ranks.run(cases.surfaces):
        assert all(done.values()), done


def test_overflow_is_the_same_error_on_every_rank_before_a_row_moves(ranks):
    found = ranks.run(cases.overflow)
    errors = {error for error, _, _ in found}
    assert errors == {
        (
            "ValueError",
            "max_recv_rows: expected at most 20 rows of (token, k) for a rank, got 24 for rank 0; "
            "raise it, or split the batch (no row has moved)",
        )
    }
    assert all(unchanged and right for _, unchanged, right in found)


def test_problems_that_differ_are_refused_everywhere(ranks):
    for found in ranks.run(cases.different_problems):
        assert found.pop("resolved") is None
        for name, value in (("top_k", "3 on ranks 0, 2, 3 and 2 on rank 1"), ("max_tokens", "8")):
            kind, message = found.pop(name)
            assert kind == "ValueError"
            assert message.startswith(f"problem.{name}: expected the same on every rank, got ")
            assert value in message
        assert "problem.format: expected the same" in found["format"][1]
        assert "problem.wire: expected the same" in found["wire"][1]
        assert "number of problems: expected the same" in found["number"][1]


def test_ranks_that_call_different_layers_all_hear_of_it(ranks):
    for kind, message in ranks.run(cases.different_layers):
        assert kind == "ValueError"
        assert "expected every rank to call the same layer" in message
        assert "[1, 0, 0, 0]" in message


def test_ranks_that_make_different_calls_all_hear_of_it(ranks):
    for (kind, message), right in ranks.run(cases.different_calls):
        assert kind == "ValueError"
        assert "got warm-up, count exchange, count exchange, count exchange by rank" in message
        assert right


def test_any_number_of_layers_is_compared(ranks):
    for good, (kind, message) in ranks.run(cases.many_layers):
        assert good is None
        assert kind == "ValueError"
        assert message.startswith("problem[39].max_tokens: expected the same on every rank, got ")


def test_what_does_not_fit_is_said(ranks):
    for rank, found in enumerate(ranks.run(cases.bad_arguments)):
        kind, message = found["rank"]
        assert kind == "ValueError"
        assert f"rank {rank}, got rank {(rank + 1) % 4}; pass rank=" in message
        assert "expected num_ranks=2 ranks, got a group of 4" in found["size"][1]
        assert "expected num_ranks=1 ranks, got a group of 4" in found["one"][1]
        for name in ("transport", "fleet"):
            assert found[name][0] == "ValueError"
            assert 'transport: expected "collective"' in found[name][1]
        for name in ("symm", "symm fleet"):
            assert found[name][0] == "RuntimeError"
            assert 'on a CPU backend="emulator"' in found[name][1]
        assert found["timeout"][1].startswith("timeout: expected seconds")
        assert "expected one num_ranks for all layers, got [2, 4]" in found["mixed"][1]
        assert found["stranger"][0] == "ValueError"
        assert "this process belongs to" in found["stranger"][1]


def test_groups_in_one_job_do_not_meet(ranks):
    assert ranks.run(cases.two_groups) == [[]] * 4


def test_fleet_serves_own_experts(ranks):
    for done in ranks.run(cases.fleet):
        assert all(done.values()), done


def test_readme_sample_runs_as_it_stands(ranks):
    text = (Path(__file__).resolve().parents[1] / "README.md").read_text()
    _, sample = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    changes = {
        "torch.distributed.init_process_group()\n": "",
        "7168": "128",
        "2048": "64",
        "num_experts=256": "num_experts=12",
        "top_k=8": "top_k=3",
        "4096": "16",
        "num_ranks=8": "num_ranks=4",
    }
    for large, small in changes.items():
        assert large in sample
        sample = sample.replace(large, small)
    assert all(ranks.run(cases.sample, sample))


def test_compiled_experts_take_the_same_road(ranks):
    for done in ranks.run(kernels.compiled):
        assert all(done.values()), done


@pytest.mark.skipif(c_compiler() is None, reason="no C compiler for the emulator's stand-in")
@pytest.mark.parametrize(("fmt", "tile_n"), [("mxfp8", 8), ("nvfp4", 32)])
def test_emulated_kernels_agree_sharded_and_unsharded(ranks, fmt, tile_n):
    found = ranks.run(kernels.emulated, "pair", fmt, tile_n, [0, 1, 2, 3, 4])
    assert found == [[], [], None, None]


def test_a_rank_that_cannot_load_its_kernels_tells_the_others(ranks):
    (first, again), (own, own_again), *_ = ranks.run(kernels.failed_warmup, "pair")
    assert own == ("OSError", "no space left")
    assert first[0] == "RuntimeError"
    assert "rank 1: OSError: no space left; mend it there and call again" in first[1]
    assert (again, own_again) == (None, None)


@pytest.mark.parametrize("combine_wire", ["bf16", "mxfp8"])
def test_bytes_on_the_wire_are_those_of_the_routed_rows(ranks, combine_wire):
    for sent, want, model in ranks.run(kernels.traffic, combine_wire):
        assert sent == want
        # What ``plan`` predicts times from.
        there, back = sum(sent["rows"][:3]), sum(sent["rows"][3:])
        assert model == {"counts": sent["counts"], "dispatch": there, "combine": back}


def test_workspaces_come_and_go(ranks):
    assert all(ranks.run(cases.create_and_close, 20))


def test_a_late_rank_is_named_with_phase_and_timeout(tmp_path):
    pool = Pool(3, tmp_path)
    try:
        found = pool.run(cases.late, 1, 1.0)
    finally:
        pool.close()
    for rank in (0, 2):
        (kind, message), again, took, closing = found[rank]
        assert kind == "RuntimeError"
        assert f"rank {rank} of 3, phase 'count exchange'" in message
        assert "(timeout 1 s) for rank 1 (" in message
        assert "make a new group" in message
        assert 0.9 < took < 3
        assert again[0] == "RuntimeError"
        assert "an earlier call failed" in again[1]
        assert closing is None


def test_a_rank_that_builds_its_workspace_late_is_named(tmp_path):
    pool = Pool(2, tmp_path)
    try:
        (kind, message), _ = pool.run(cases.late_to_build, 1, 0.5)
    finally:
        pool.close()
    assert kind == "RuntimeError"
    assert "rank 0 of 2, phase 'comparing problems'" in message
    assert "(timeout 0.5 s) for rank 1 (" in message


@pytest.mark.parametrize(("who", "phase"), [(0, "count exchange"), (2, "dispatch")])
def test_a_dead_rank_is_named_and_the_others_go_on(tmp_path, who, phase):
    pool = Pool(3, tmp_path)
    try:
        found = pool.run(cases.dies, who, str(tmp_path), phase)
    finally:
        pool.close()
    for rank, answer in enumerate(found):
        if rank == who:
            assert answer is None
            continue
        (kind, message), checked, same = answer
        assert kind == "RuntimeError"
        assert f"rank {rank} of 3, phase {phase!r}: waited" in message
        assert f"rank {who} (" in message or "one of ranks" in message
        assert "(timeout 20 s)" in message
        assert checked[0] == "RuntimeError"
        assert same
