"""Winners of tune: which call they serve, the file that keeps them, how they are found."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from cache_tools import cache_fixture as cache_fixture
from cache_tools import load
from rich.console import Console

import moe_ep_jit as moe
from moe_ep_jit import cache_admin, cli, entries, tuned, variants
from moe_ep_jit.tools import bench, presets, timing, tune

ARCH, GPU, LAYER = "sm_90a", "Some GPU", "mxfp8_row-mxfp8-h64-i64-e4-k2-r1"
LADDER = variants.ladder(ARCH, "e4m3")


@pytest.fixture(autouse=True)
def _warnings_again(monkeypatch):
    monkeypatch.setattr(tuned, "_warned", set())


def winner(rung=LADDER[2], ms=0.5):
    return {"config": asdict(rung), "ms": ms}


def gpus(counts, gpu=GPU, layer=LAYER):
    return {gpu: {layer: counts}}


def found(gpu=GPU, layer=LAYER):
    return tuned.winners(ARCH, gpu, layer, "e4m3")


def file_of(cache):
    return cache / ARCH / tuned.FILE


def write(cache, text):
    file_of(cache).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    cache.chmod(0o700)
    file_of(cache).write_text(text)
    file_of(cache).chmod(0o600)


# The rule


@pytest.mark.parametrize(
    ("tokens", "count"),
    [
        (0, None),
        (1, 1),
        (2, None),  # 4 is twice of it
        (3, 4),
        (4, 4),
        (5, None),
        (32, None),
        (33, 64),
        (64, 64),
        (65, None),
        (4096, None),
    ],
)
def test_a_winner_serves_from_above_half_of_its_count_up_to_it(tokens, count):
    assert tuned.pick({1: 1, 4: 4, 64: 64}, tokens) == count
    assert tuned.pick({}, tokens) is None


def test_octaves_leave_no_count_without_a_winner():
    for most in (1, 2, 3, 4, 100, 4096):
        counts = tune.octaves(most)
        assert counts == sorted(set(counts))
        assert counts[-1] == most
        served = dict.fromkeys(counts, "rung")
        assert all(tuned.pick(served, tokens) == "rung" for tokens in range(1, most + 1))


def test_layer_name_holds_what_an_object_depends_on():
    problem = moe.Problem(
        hidden=64, intermediate=64, num_experts=4, top_k=2, max_tokens=8, format="mxfp8"
    ).with_(act="mxfp8")
    assert tuned.layer_name(problem, "mxfp8_row") == LAYER
    assert tuned.layer_name(problem.with_(max_tokens=9), "mxfp8_row") == LAYER
    others = [
        tuned.layer_name(problem, "mxfp8_group128"),
        tuned.layer_name(problem.with_(act="bf16"), "mxfp8_row"),
        tuned.layer_name(problem.with_(top_k=1), "mxfp8_row"),
        tuned.layer_name(problem.with_(num_experts=8), "mxfp8_row"),
    ]
    assert len({LAYER, *others}) == 5


# The file


def test_round_trip(cache):
    counts = {"8": winner(LADDER[0]), "512": winner(LADDER[-1])}
    assert tuned.store(ARCH, gpus(counts)) == gpus(counts)
    assert found() == {8: LADDER[0], 512: LADDER[-1]}
    assert found(gpu="Another GPU") == found(layer="another-layer") == {}
    assert oct(file_of(cache).stat().st_mode & 0o777) == "0o600"
    assert list((cache / entries.TEMPORARY).iterdir()) == []


def test_storing_keeps_what_is_there_and_says_what_changed(cache):
    tuned.store(ARCH, gpus({"8": winner(LADDER[0]), "64": winner(LADDER[1])}))
    tuned.store(ARCH, gpus({"8": winner()}, gpu="Another GPU"))
    change = gpus({"64": winner(LADDER[3])})
    assert tuned.store(ARCH, change) == change
    assert tuned.store(ARCH, change) == {}
    assert found() == {8: LADDER[0], 64: LADDER[3]}
    assert found(gpu="Another GPU") == {8: LADDER[2]}
    kept = gpus({"64": winner(LADDER[0]), "128": winner(LADDER[4])})
    assert tuned.store(ARCH, kept, replace=False) == gpus({"128": winner(LADDER[4])})
    assert found()[64] == LADDER[3]


def test_no_file_is_no_warning(cache, caplog):
    assert found() == {}
    assert caplog.records == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ('{"version": 1, "gpus": {"Some', "Unterminated"),
        ("[]", "expected an object"),
        ('{"version": 2, "gpus": {}}', "expected version 1, got 2"),
        ('{"version": 1}', "expected an object of GPUs"),
        ('{"version": 1, "gpus": {"G": []}}', "expected an object of layers"),
        ('{"version": 1, "gpus": {"G": {"L": 3}}}', "expected an object of token counts"),
        ('{"version": 1, "gpus": {"G": {"L": {"x": {}}}}}', "token counts above 0, got 'x'"),
        ('{"version": 1, "gpus": {"G": {"L": {"0": {}}}}}', "token counts above 0, got '0'"),
        ('{"version": 1, "gpus": {"G": {"L": {"8": {"ms": 1}}}}}', "with a config at 8 tokens"),
        (json.dumps({"version": 1, "gpus": gpus({"8": winner(ms=math.nan)})}), "ms at 8 tokens"),
        ("[" * 100_000, "recursion|Expecting value"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_warning(cache, caplog, text, why):
    write(cache, text)
    for _ in range(2):
        assert found() == {}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    said = record.getMessage()
    assert "the ladder decides" in said
    assert "to measure again: moe-ep-jit tune" in said
    assert any(part in said for part in why.split("|"))


def test_a_broken_file_is_set_aside_when_winners_come(cache):
    write(cache, "torn")
    tuned.store(ARCH, gpus({"8": winner()}))
    assert found() == {8: LADDER[2]}
    (aside,) = (cache / entries.BROKEN).iterdir()
    assert aside.read_text() == "torn"
    assert cache_admin.prune()[0]["reason"] == "set aside as broken"
    assert found() == {8: LADDER[2]}


def test_what_others_can_write_is_not_used(cache, caplog):
    tuned.store(ARCH, gpus({"8": winner()}))
    file_of(cache).chmod(0o666)
    assert found() == {}
    assert "can be written by others" in caplog.text


def test_rungs_that_the_ladder_lost_are_left_out_one_by_one(cache, caplog):
    gone = {"config": {"tile_n": 7, "num_math_warpgroups": 9}, "ms": 0.1}
    tuned.store(ARCH, gpus({"8": gone, "64": winner()}))
    with caplog.at_level(logging.INFO, logger="moe_ep_jit"):
        assert found() == {64: LADDER[2]}
    assert "the ladder no longer has; run: moe-ep-jit tune" in caplog.text


def test_a_folder_that_cannot_be_written_is_said(cache, monkeypatch):
    def no_space(*_):
        raise OSError(28, "No space left on device")

    tuned.store(ARCH, gpus({"8": winner()}))
    monkeypatch.setattr(entries, "_write", no_space)
    with pytest.raises(RuntimeError, match=r"cannot write .*tuned.json \(No space left.*export"):
        tuned.store(ARCH, gpus({"9": winner()}))
    assert found() == {8: LADDER[2]}


def test_read_only_cache_in_place_of_the_users_own(cache, monkeypatch, tmp_path):
    cache.mkdir(mode=0o700)
    monkeypatch.setattr("moe_ep_jit.jit.os.access", lambda *_: False)
    with pytest.raises(RuntimeError, match=r"cannot write the cache folder .*run: export"):
        tuned.store(ARCH, gpus({"8": winner()}))


def test_layers_behind_the_users_own_are_read_and_come_second(cache, monkeypatch, tmp_path):
    layer = tmp_path / "layer"
    monkeypatch.setenv("MOE_EP_JIT_CACHE", str(layer))
    tuned.store(ARCH, gpus({"8": winner(LADDER[0]), "64": winner(LADDER[1])}))
    monkeypatch.setenv("MOE_EP_JIT_CACHE", f"{cache}:{layer}")
    tuned.store(ARCH, gpus({"8": winner(LADDER[3])}))
    assert found() == {8: LADDER[3], 64: LADDER[1]}
    assert json.loads(file_of(layer).read_text())["gpus"][GPU][LAYER]["8"] == winner(LADDER[0])


# Care of the cache


def test_the_file_is_no_entry_and_travels_with_a_packed_cache(cache, tmp_path, monkeypatch, capsys):
    load(1)
    tuned.store(ARCH, gpus({"8": winner(LADDER[0]), "64": winner(LADDER[1])}))
    assert len(cache_admin.list_entries()) == len(cache_admin.verify()) == 1
    assert cache_admin.prune() == []
    packed = tmp_path / "cache.tar.gz"
    assert cache_admin.pack(packed)["entries"] == 1
    monkeypatch.setenv("MOE_EP_JIT_CACHE", str(tmp_path / "other"))
    tuned.store(ARCH, gpus({"8": winner(LADDER[5])}))
    said = cache_admin.unpack(packed)
    assert (len(said["added"]), said["tuned"]) == (1, [f"{ARCH}/{GPU}/{LAYER}"])
    assert found() == {8: LADDER[5], 64: LADDER[1]}  # what was measured here stays
    assert cache_admin.unpack(packed)["tuned"] == []
    file_of(tmp_path / "other").unlink()
    assert cli.main(["cache", "unpack", str(packed)]) == 0
    assert "1 were there" in (said := " ".join(capsys.readouterr().out.split()))
    assert "1 tuned layers added" in said
    assert len(cache_admin.prune(keep_current=False)) == 1
    assert found()


def test_a_broken_file_does_not_stop_packing(cache, tmp_path):
    load(1)
    write(cache, "torn")
    assert cache_admin.pack(tmp_path / "cache.tar")["entries"] == 1
    assert cache_admin.unpack(tmp_path / "cache.tar")["tuned"] == []


def test_an_archive_with_broken_winners_changes_nothing(cache, tmp_path, monkeypatch):
    load(1)
    tuned.store(ARCH, gpus({"8": winner()}))
    monkeypatch.setattr(tuned, "dump", lambda gpus: b"torn")
    cache_admin.pack(tmp_path / "cache.tar")
    monkeypatch.setenv("MOE_EP_JIT_CACHE", str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"sm_90a/tuned.json: .*pack it again"):
        cache_admin.unpack(tmp_path / "cache.tar")
    assert not (tmp_path / "other").exists()


# Tuning, with fake times


@pytest.mark.parametrize(
    ("ms", "ladder", "best"),
    [
        ({"a": 1.0, "b": 2.0}, "a", "a"),
        ({"a": 1.0, "b": 2.0}, "b", "a"),
        ({"a": 0.99, "b": 1.0}, "b", "b"),  # less than 2 % is noise
        ({"a": 0.98, "b": 1.0}, "b", "a"),
        ({"a": 1.0, "c": 2.0}, "b", "a"),  # the ladder's own gave wrong numbers
        ({"a": math.nan, "b": 1.0}, "b", "b"),
        ({"a": math.nan, "b": 0.0}, "b", None),
        ({}, "b", None),
    ],
)
def test_winner(ms, ladder, best):
    assert tune.winner(ms, ladder) == best


def test_every_launch_takes_the_next_set_of_weights():
    seen = []
    rungs = [
        [SimpleNamespace(replay=lambda j=j, s=s: seen.append((j, s))) for s in range(5)]
        for j in range(3)
    ]
    steps = tune.interleaved(rungs)
    for i in range(5):
        for step in steps(i):
            step()
    assert [j for j, _ in seen] == [0, 1, 2] * 5
    assert [s for _, s in seen] == [n % 5 for n in range(15)]


@pytest.mark.parametrize(
    ("whole", "worst", "tokens", "good"),
    [
        (0.009, 0.03, 64, True),
        (0.011, 0.03, 64, False),
        (0.029, 0.03, 1, True),
        (0.031, 0.04, 1, False),
        (0.005, 0.11, 64, False),
        (math.nan, 0.03, 64, False),
    ],
)
def test_wrong_numbers(whole, worst, tokens, good):
    error = SimpleNamespace(whole=whole, worst_row=worst, worst_block=worst)
    assert tune.within(error, 0.01, tokens) is good


def test_tune_stores_the_winners_and_names_wrong_rungs(cache, monkeypatch, capsys):
    """The reference stands in for the kernels: it is right for every rung, one of them apart."""
    wrong, fast = LADDER[1], LADDER[4]

    class Device:
        name = GPU

    def captured(call, count):
        return [SimpleNamespace(replay=lambda: call(0))] * count

    def medians(steps, iterations):
        return [0.1 if r == wrong else 0.5 if r == fast else 1.0 for r in LADDER]

    def error(case, config):
        size = 1.0 if config == wrong else 0.001
        return SimpleNamespace(whole=size, worst_row=size, worst_block=size)

    class Layer(bench.Layer):
        def __init__(self, data, fmt, act):
            super().__init__(data, fmt, act)
            self.operand = "e4m3"
            self.ws.arch = ARCH

    monkeypatch.setattr(tune, "Layer", Layer)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(tune, "gpu_with_kernels", lambda command: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Device)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(bench.Data, "sets_needed", lambda data, size: 2)
    monkeypatch.setattr(bench, "floors", lambda *_: SimpleNamespace(weight_bytes=1))
    monkeypatch.setattr(tune.moe, "warmup", lambda ws, weights: None)
    monkeypatch.setattr(timing, "captured", captured)
    monkeypatch.setattr(timing, "medians_ms", medians)
    monkeypatch.setattr(bench.Case, "error", error)
    preset = presets.of_sizes(64, 64, 4, 2)
    request = bench.Request([preset], ["mxfp8"], tokens=[8, 2, 8])
    assert tune.run(request, Console(width=200), False) == 1
    said = capsys.readouterr()
    assert "100.0 %" in said.out
    assert "tile_n=16" in said.err
    assert "which is a bug" in said.err
    layer = tuned.layer_name(preset.problem("mxfp8", "mxfp8"), None)
    assert found(layer=layer) == {2: fast, 8: fast}


def test_sizes_or_presets(cache, capsys):
    argv = ["tune", "--sizes", "64", "64", "4", "2", "--preset", "qwen3-30b"]
    assert cli.main(argv) == 1
    assert "--sizes: expected none beside --preset" in capsys.readouterr().err
    assert cli.main(["tune", "--sizes", "65", "64", "4", "2"]) == 1
    assert "hidden" in capsys.readouterr().err
