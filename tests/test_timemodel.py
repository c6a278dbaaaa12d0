"""Predicted traffic against a simulation of real routing, and predicted times against the rates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moe_ep_jit import Problem
from moe_ep_jit.problem import FORMATS
from moe_ep_jit.tools import presets, routing, timemodel

RESULTS = Path(__file__).resolve().parents[1] / "tools" / "results" / "h200.jsonl"


def dsv3(ranks, **facts):
    problem = Problem(7168, 2048, 256, 8, 8192, **{"format": "mxfp8", "act": "mxfp8", **facts})
    return timemodel.spread(problem, ranks)


def simulate(problem, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return [routing.uniform(tokens, problem, generator) for _ in range(problem.num_ranks)]


@pytest.mark.parametrize("tokens", [8, 100, 2048])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 36, 72])
def test_bytes_by_link_and_phase_are_those_of_simulated_routing(ranks, tokens, seed):
    if ranks * tokens > 2**16:
        tokens = 2**16 // ranks
    problem = dsv3(ranks)
    assert problem.num_experts % ranks == 0
    ids = simulate(problem, tokens, seed)
    moved = timemodel.traffic(problem, ids)
    expected = timemodel.expected_out(problem, tokens)
    width = timemodel.row_bytes(problem)
    assert width == {"dispatch": 7168 + 224, "combine": 14336}
    assert not any(bool(table.diagonal().any()) for table in moved.values())
    if ranks == 1:
        assert expected == {"counts": 0, "dispatch": 0, "combine": 0}
        return
    assert torch.equal(
        moved["dispatch"] * width["combine"], moved["combine"].t() * width["dispatch"]
    )
    rows = tokens * 8
    share = 1 / ranks
    for phase, bytes_a_row in width.items():
        total = moved[phase].sum() / ranks
        deviation = (rows * share * (1 - share) / ranks) ** 0.5 * bytes_a_row
        assert abs(total - expected[phase]) < 6 * deviation, phase
        links = moved[phase][~torch.eye(ranks, dtype=torch.bool)].double()
        mean = expected[phase] / (ranks - 1)
        deviation = (rows * share) ** 0.5 * bytes_a_row
        assert float((links - mean).abs().max()) < 7 * deviation + 3 * bytes_a_row, phase
    assert (moved["counts"].sum(1) == expected["counts"]).all()


def test_traffic_counts_one_row_for_each_token_and_k():
    problem = Problem(128, 64, 6, 3, 16, format="nvfp4", act="nvfp4", num_ranks=3)
    problem = problem.with_(combine_wire="mxfp8")
    # Two experts a rank; a repeat counts twice, what is no expert's not at all.
    ids = [
        torch.tensor([[0, 2, 2], [5, -1, 6]]),
        torch.empty(0, 3, dtype=torch.int32),
        torch.tensor([[3, 3, 3]], dtype=torch.int32),
    ]
    rows = torch.tensor([[0, 2, 1], [0, 0, 0], [0, 3, 0]])
    moved = timemodel.traffic(problem, ids)
    assert torch.equal(moved["dispatch"], rows * (64 + 8 + 4))
    assert torch.equal(moved["combine"], rows.t() * (128 + 4))
    assert torch.equal(moved["counts"], 4096 * (1 - torch.eye(3, dtype=torch.int64)))


@pytest.mark.parametrize("ranks", [1, 2, 8, 32, 72])
def test_a_token_once_per_rank_saves_what_simulation_counts(ranks, seed):
    problem = dsv3(ranks)
    (ids,) = simulate(problem.with_(num_ranks=1), 20_000, seed)
    owners = torch.nn.functional.one_hot((ids // problem.num_local_experts).long(), ranks)
    copies = (owners.sum(1)[:, 1:] > 0).sum() if ranks > 1 else 1
    rows = owners.sum(1)[:, 1:].sum() if ranks > 1 else 1
    saved = timemodel.once_per_rank(problem)
    assert saved == pytest.approx(float(rows / copies), rel=0.01)
    if ranks == 8:
        assert round(saved, 1) == 1.5


@pytest.mark.parametrize("ranks", range(1, 73))
def test_times_follow_from_the_rates_for_every_number_of_ranks(ranks):
    rows = timemodel.table(dsv3(ranks, act="auto"))
    gpus = ["H200"] * (ranks <= 8) + ["B200"]
    assert [row["gpu"] for row in rows] == [gpu for gpu in gpus for _ in timemodel.TOKENS]
    assert (timemodel.TOKENS[0], timemodel.TOKENS[-1]) == (8, 8192)
    for row in rows:
        link = {"H200": 380e9, "B200": 760e9}[row["gpu"]]
        for phase in timemodel.PHASES:
            assert row[f"{phase}_ms"] >= 1e3 * row["out"][phase] / link
            assert (row["out"][phase] == 0) == (ranks == 1)
        parts = sum(row[f"{part}_ms"] for part in ("counts", "dispatch", "gemm", "combine"))
        assert row["layer_ms"] == pytest.approx(parts + 0.015)
        assert row["gemm_ms"] > 0
        if ranks >= 4 and row["tokens"] >= 1024:  # there the link rules, not memory
            for phase in ("dispatch", "combine"):
                want = 1e3 * row["out"][phase] / link + timemodel.LATENCY_MS
                assert row[f"{phase}_ms"] == pytest.approx(want)
    for gpu in gpus:
        layers = [row["layer_ms"] for row in rows if row["gpu"] == gpu]
        assert layers == sorted(layers)


def test_one_rank_is_near_what_the_h200_took():
    """Rows of the results file: within 30 per cent, the worst where memory and math rule alike."""
    measured = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    (preset,) = presets.load(["dsv3-ep8"])
    compared = 0
    for row in measured:
        if row["preset"] != preset.name or row["tokens"] not in timemodel.TOKENS:
            continue
        if row.get("routing", "uniform") != "uniform" or row["format"] not in FORMATS:
            continue  # skewed, or a peer's
        times = timemodel.table(preset.problem(row["format"], row["act"]))
        (found,) = (t for t in times if (t["gpu"], t["tokens"]) == ("H200", row["tokens"]))
        assert found["layer_ms"] == pytest.approx(row["ms"], rel=0.3), (
            row["format"],
            row["tokens"],
        )
        compared += 1
    assert compared >= 8
