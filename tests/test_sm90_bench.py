"""bench and tune on a Hopper GPU: that rows are whole and winners are used, never how fast."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from importlib.util import find_spec

import pytest
import torch

from moe_ep_jit import cli, jit, tuned, variants
from moe_ep_jit.tools import nvml, presets

pytestmark = pytest.mark.sm90

QWEN = ["--preset", "qwen3-30b", "--json"]


def rows_of(capsys, *argv):
    """Exit code and rows of one command."""
    code = cli.main(argv)
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_sensors_find_this_gpu():
    sensors = nvml.Sensors(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    assert sensors.missing == ""
    assert 100 < sensors.sm_mhz() < 3000
    before = sensors.joules()
    assert before > 0
    assert sensors.joules() >= before


def test_sustained_rows_of_both_formats_in_turn(capsys):
    code, rows = rows_of(capsys, "bench", *QWEN, "--tokens", "8", "1024", "--sustained")
    assert code == 0
    names = [(row["tokens"], row["format"]) for row in rows]
    assert names == [(t, f) for t in (8, 1024) for f in ("mxfp8", "nvfp4")]
    for row in rows:
        assert 100 < row["sm_mhz"] < 3000
        assert 100 < row["sustained_sm_mhz"] < 3000
        assert 50 < row["sustained_watts"] < 1200
        assert 0.5 < row["sustained_ms"] / row["ms"] < 2
        assert all(0 < pct < 120 for pct in row["copy_pct"].values())
        assert all(0 < rate < 5500 for rate in row["stage_gbps"].values())


def test_skewed_rows_are_right(capsys):
    patterns = ("uniform", "zipf", "hot", "one")
    code, rows = rows_of(capsys, "bench", *QWEN, "--tokens", "256", "--skew", *patterns)
    assert code == 0
    assert [row["routing"] for row in rows[::2]] == list(patterns)
    assert [row["rows"] for row in rows[::2]] == [2048, 2048, 2048, 256]
    assert rows[-1]["active_experts"] == 1
    assert all(row["rel_l2"] < 2e-2 for row in rows)


@pytest.mark.parametrize("peer", ["torch", "flashinfer"])
def test_a_peer_computes_the_layer(capsys, peer):
    if peer == "flashinfer" and find_spec("flashinfer") is None:
        pytest.skip("needs flashinfer-python")
    argv = ["--format", "nvfp4", "--tokens", "64", "--peer", peer, "--skew", "uniform", "one"]
    code, rows = rows_of(capsys, "bench", *QWEN, *argv)
    assert code == 0
    for row in rows[1::2]:
        assert row["format"].startswith(peer)
        assert row["dense_rel_l2"] < (1e-2 if peer == "torch" else 0.08)
        assert row["ms"] > 0


def test_tuned_winners_are_used(capsys, monkeypatch, tmp_path):
    behind = os.pathsep.join(map(str, jit.cache_dirs()))
    monkeypatch.setenv("MOE_EP_JIT_CACHE", f"{tmp_path / 'own'}{os.pathsep}{behind}")
    argv = [*QWEN, "--format", "mxfp8", "--tokens", "64"]
    code, (row,) = rows_of(capsys, "tune", *argv)
    ladder = variants.ladder("sm_90a", "e4m3")
    assert code == 0
    assert all(rung["ok"] and rung["ms"] > 0 for rung in row["rungs"])
    assert len(row["rungs"]) == len(ladder)
    (preset,) = presets.load(["qwen3-30b"])
    problem = preset.problem("mxfp8", "mxfp8")
    layer = tuned.layer_name(problem, row["kind"])
    won = tuned.winners("sm_90a", row["gpu"], layer, "e4m3")[64]
    assert asdict(won) == row["config"]
    # Whoever wins here: the last rung is never the ladder's own at 64 tokens.
    other = {"config": asdict(ladder[-1]), "ms": 1.0}
    tuned.store("sm_90a", {row["gpu"]: {layer: {"64": other}}})
    code, (timed,) = rows_of(capsys, "bench", *argv)
    assert code == 0
    assert (timed["tuned"], timed["config"]) == (True, str(ladder[-1]))
    assert timed["rel_l2"] < 1e-2
