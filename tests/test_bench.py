"""The measuring tool without a GPU: floors, routing patterns, timing protocol, peers, rows."""

from __future__ import annotations

import json
import re

import pytest
import torch
from rich.console import Console

from moe_ep_jit import reference, variants
from moe_ep_jit.problem import Problem, SwiGLU
from moe_ep_jit.tools import bench, nvml, peers, presets, results, routing, timing
from moe_ep_jit.tools.floors import floors, stage_figures

# Floors and figures


@pytest.mark.parametrize(
    ("name", "kind", "tokens", "active", "gemm_ms"),
    [
        ("dsv3-ep8", "mxfp8_group128", 512, 32, 0.33),
        ("dsv3-ep8", "nvfp4", 64, 32, 0.18),
        ("dsv3-ep8", "nvfp4", 512, 32, 0.46),
        ("dsv3-ep8", "mxfp8_row", 4096, 32, 2.04),
        ("dsv3-ep8", "nvfp4", 4096, 32, 3.70),
        ("qwen3-30b", "mxfp8_exact", 1, 8, 0.009),
        ("qwen3-30b", "nvfp4", 1, 8, 0.005),
    ],
)
def test_floor_gemm(name, kind, tokens, active, gemm_ms):
    problem = presets.load([name])[0].problem("auto")
    operand = "bf16" if kind in ("nvfp4", "mxfp8_exact") else "e4m3"
    floor = floors(problem, kind, operand, tokens, tokens * problem.top_k, active)
    assert floor.gemm_ms == pytest.approx(gemm_ms, rel=0.06)


@pytest.mark.parametrize(
    ("operand", "kind", "ms"), [("e4m3", "mxfp8_row", 0.19), ("bf16", "nvfp4", 0.25)]
)
def test_floor_layer_adds_dispatch_and_combine(operand, kind, ms):
    problem = presets.load(["dsv3-ep8"])[0].problem("auto")
    floor = floors(problem, kind, operand, 4096, 4096 * 8, 32)
    assert floor.layer_ms - floor.gemm_ms == pytest.approx(ms, rel=0.03)


def test_routing_is_distinct_and_uniform():
    problem = presets.load(["qwen3-30b"])[0].problem("mxfp8")
    ids = routing.uniform(4096, problem, torch.Generator().manual_seed(0))
    assert all(len(set(row)) == problem.top_k for row in ids[:64].tolist())
    counts = ids.flatten().bincount(minlength=problem.num_experts).float()
    expected = ids.numel() / problem.num_experts
    assert (counts - expected).abs().max() < 6 * expected**0.5


def test_bench_table_shows_every_row():
    row = dict.fromkeys(("ms", "eager_ms", "floor_gemm_ms", "floor_layer_ms", "rel_l2"), 0.2)
    row |= {"preset": "p", "format": "nvfp4", "act": "bf16", "tokens": 8, "host_us": 20.0}
    row |= {"stage_ms": dict.fromkeys(results.STAGES, 0.05), "tflops": 10.0, "gbps": 4000.0}
    assert results.table([row, row]).row_count == 2


def test_stage_figures_are_the_stages_own_work():
    """A stage at its ceiling is at 100 %, and the GEMMs share weights and math two to one."""
    problem = presets.load(["dsv3-ep8"])[0].problem("auto")
    floor = floors(problem, "mxfp8_row", "e4m3", 4096, 4096 * 8, 32)
    hidden, inner = problem.hidden, problem.intermediate
    moved = {"dispatch": 4096 * 8 * hidden + 4096 * hidden * 2}
    moved["combine"] = 4096 * 8 * hidden * 2 + 4096 * hidden * 2
    ms = {name: size / floor.copy_rate * 1e3 for name, size in moved.items()}
    figures = stage_figures(floor, ms | {"gate_up": 2.0, "down": 1.0})
    assert figures["copy_pct"] == pytest.approx({"dispatch": 100, "combine": 100})
    gate_up_flops = 2 * 4096 * 8 * hidden * 2 * inner
    assert figures["stage_tflops"]["gate_up"] == pytest.approx(gate_up_flops / 2e-3 / 1e12)
    assert figures["stage_tflops"]["down"] == pytest.approx(gate_up_flops / 2 / 1e-3 / 1e12)
    assert figures["stage_gbps"]["gate_up"] == pytest.approx(32 * hidden * 2 * inner / 2e-3 / 1e9)
    assert figures["stage_gbps"]["down"] == pytest.approx(32 * hidden * inner / 1e-3 / 1e9)


# Routing


def sizes(experts=32, top_k=8):
    return Problem(hidden=64, intermediate=64, num_experts=experts, top_k=top_k, max_tokens=4096)


def ids_of(pattern, problem, tokens=2048, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = routing.make_ids(pattern, tokens, problem, generator)
    assert (ids.dtype, ids.shape) == (torch.int32, (tokens, problem.top_k))
    assert ids.is_contiguous()
    return ids


@pytest.mark.parametrize("pattern", ["uniform", "zipf", "hot"])
@pytest.mark.parametrize(("experts", "top_k"), [(32, 8), (4, 4), (8, 1)])
def test_patterns_give_a_token_distinct_experts(pattern, experts, top_k):
    ids = ids_of(pattern, sizes(experts, top_k))
    assert ids.min() >= 0
    assert ids.max() < experts
    assert all(len(set(row)) == top_k for row in ids.tolist())
    assert torch.equal(ids, ids_of(pattern, sizes(experts, top_k)))


def test_zipf_counts_fall_as_rank_to_the_exponent():
    ids = ids_of("zipf", sizes(32, 1), tokens=200_000)
    counts = ids.flatten().bincount(minlength=32).sort(descending=True).values.double()
    weights = torch.arange(1, 33, dtype=torch.float64) ** -1.2
    torch.testing.assert_close(counts / counts.sum(), weights / weights.sum(), rtol=0.1, atol=1e-3)


def test_zipf_ranks_the_experts_in_another_order_for_each_seed():
    favorites = {
        ids_of("zipf", sizes(32, 1), seed=s).flatten().mode().values.item() for s in (1, 2)
    }
    assert len(favorites) == 2


def test_hot_has_every_token_on_one_expert_and_the_rest_even():
    ids = ids_of("hot", sizes(), tokens=4096)
    counts = ids.flatten().bincount(minlength=32).float()
    assert counts[0] == 4096  # four times the mean of 32 experts at top-8
    expected = 4096 * 7 / 31
    assert (counts[1:] - expected).abs().max() < 6 * expected**0.5


def test_one_is_top_1_on_one_expert():
    ids = ids_of("one", sizes())
    assert ids[:, 0].unique().tolist() == [0]
    assert ids[:, 1:].unique().tolist() == [-1]
    assert bench.count_rows(ids) == (2048, 1)


def test_count_rows():
    assert bench.count_rows(torch.tensor([[0, 3], [3, -1]])) == (3, 2)
    assert bench.count_rows(torch.full((2, 2), -1)) == (0, 0)


def test_unknown_pattern_lists_those_there_are():
    with pytest.raises(ValueError, match="routing: expected one of uniform, zipf, .*got 'pareto'"):
        routing.make_ids("pareto", 1, sizes(), torch.Generator())


# Timing


class FakeCuda:
    """A GPU whose launches take what they say, in order."""

    def __init__(self, monkeypatch):
        self.now, self.slept, self.log = 0.0, [], []
        fake = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = fake.now

            def elapsed_time(self, other):
                return other.at - self.at

            def query(self):
                return True

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "_sleep", self.slept.append)

    def launch(self, name, ms):
        def run():
            self.log.append(name)
            self.now += ms

        return run


class FakeSensors:
    missing = ""

    def __init__(self, mhz=1500.0):
        self.mhz, self.energy = mhz, 0.0

    def sm_mhz(self):
        return self.mhz

    def joules(self):
        self.energy += 700.0
        return self.energy


def test_steps_are_interleaved_and_each_has_its_own_median(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    # One launch of b is slow: a median does not see it, a mean would.
    steps = [[cuda.launch("a", 1.0), cuda.launch("b", 50.0 if i == 15 else 2.0)] for i in range(40)]
    timed = timing.timed(lambda i: steps[i], 30, FakeSensors())
    assert cuda.log == ["a", "b"] * 40  # 10 to warm up, 30 timed
    assert timed.ms == [1.0, 2.0]
    assert timed.sm_mhz == 1500.0
    (cycles,) = cuda.slept
    assert cycles >= 30_000_000
    assert timing.medians_ms(lambda i: steps[i], 30) == [1.0, 2.0]


def test_a_measurement_begins_with_a_rest(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: cuda.log.append(seconds))
    timing.medians_ms(lambda i: [cuda.launch("a", 1.0)], 30)
    assert cuda.log[0] >= 0.3
    assert cuda.log[1:] == ["a"] * 40


def test_clock_without_sensor_is_none(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    assert timing.timed(lambda i: [cuda.launch("a", 1.0)], 30, FakeSensors(None)).sm_mhz is None
    assert timing.timed(lambda i: [cuda.launch("a", 1.0)], 30).sm_mhz is None


def test_sustained_fills_the_time_and_takes_the_power_from_the_energy(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    times = iter([10.0, 11.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(timing, "_SAMPLE_S", 1e-4)
    calls = []

    def call(i):
        calls.append(i)
        if len(calls) % 100 == 0:
            timing.time.sleep(1e-3)  # lets the sampling thread run
        cuda.now += 2.0

    run = timing.sustained(call, 1.0, FakeSensors(1400.0))
    assert len(calls) == 10 + 1500
    assert (run.ms, run.sm_mhz, run.watts) == (2.0, 1400.0, 700.0)


def test_missing_library_and_missing_gpu_are_said():
    absent = nvml.Sensors("GPU-0", library="libno-such-thing.so.1")
    assert "libno-such-thing.so.1" in absent.missing
    assert (absent.sm_mhz(), absent.joules()) == (None, None)
    other = nvml.Sensors("GPU-0", library="libc.so.6")  # loads, and knows no NVML
    assert "nvmlInit_v2" in other.missing


# Peers


def test_torch_peer_is_the_dense_layer():
    problem = sizes(8, 2).with_(activation=SwiGLU(limit=1.0))
    torch.manual_seed(0)
    w13, w2 = torch.randn(8, 128, 64).bfloat16() / 8, torch.randn(8, 64, 64).bfloat16() / 8
    x, topk_weights = torch.randn(33, 64).bfloat16(), torch.rand(33, 2)
    ids = ids_of("uniform", problem, 33)
    ids[3, 1] = ids[5] = -1
    peer = peers.PEERS["torch"]
    call = peer.prepare(problem, x, ids, topk_weights)
    got = call.output(call.run(peer.weights(w13, w2)))
    want = reference.dense_bf16(x, ids, topk_weights, w13, w2, problem.activation)
    assert reference.error(got, want).whole < 1e-2
    assert got[5].abs().max() == 0


def test_flashinfer_weights_are_up_first_in_128_blocks():
    torch.manual_seed(0)
    w13 = torch.randn(2, 2 * 128, 256).bfloat16() * torch.tensor([1.0, 40.0])[:, None, None]
    w2 = torch.randn(2, 256, 128).bfloat16()
    got13, got2, sf13, sf2 = peers.PEERS["flashinfer"].weights(w13.bfloat16(), w2)
    assert (got13.dtype, sf13.shape, sf2.shape) == (torch.float8_e4m3fn, (2, 2, 2), (2, 2, 1))
    scales = sf13.repeat_interleave(128, 1).repeat_interleave(128, 2)
    up_first = torch.cat([w13[:, 128:], w13[:, :128]], dim=1).float()
    error = (got13.float() * scales - up_first).norm() / up_first.norm()
    assert error < 0.04


@pytest.mark.parametrize(
    ("installed", "change", "why"),
    [
        (False, {}, "pip install flashinfer-python"),
        (True, {"hidden": 192}, "multiples of 128, got"),
        (True, {"bias": True}, "leave out the peer"),
        (True, {"activation": SwiGLU(7.0, 1.702, 1.0)}, "leave out the peer"),
    ],
    ids=["missing", "sizes", "bias", "alpha"],
)
def test_flashinfer_says_why_it_cannot(monkeypatch, installed, change, why):
    monkeypatch.setattr(peers, "find_spec", lambda name: object() if installed else None)
    problem = sizes().with_(hidden=256, intermediate=128)
    if installed:
        peers.check_usable(["flashinfer"], problem, "p")
    with pytest.raises(RuntimeError, match=f"--peer flashinfer, p: expected .*{why}"):
        peers.check_usable(["flashinfer"], problem.with_(**change), "p")


def test_the_command_line_offers_all_there_is(capsys):
    from moe_ep_jit import cli

    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    said = "".join(capsys.readouterr().out.split())
    assert "{" + ",".join(routing.PATTERNS) + "}" in said
    assert "{" + ",".join(peers.PEERS) + "}" in said


# Rows, with the reference in the kernels' place and a clock that counts


@pytest.fixture
def no_gpu_needed(monkeypatch):
    """What ``bench`` asks of a GPU, answered on the CPU."""
    monkeypatch.setattr(bench.Data, "sets_needed", lambda data, size: 2)
    monkeypatch.setattr(variants, "choose_rung", lambda *_: "rung")
    # The reference's weights have no kind.
    monkeypatch.setattr(bench, "floors", lambda p, kind, *args: floors(p, "mxfp8_row", *args))
    monkeypatch.setattr(timing, "captured", lambda call, count: [Graph(call, i) for i in (0, 1)])
    monkeypatch.setattr(timing, "timed", fake_timed)
    monkeypatch.setattr(timing, "medians_ms", lambda steps, n: fake_timed(steps, n).ms)
    monkeypatch.setattr(timing, "host_us", lambda call, n: 25.0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


class Graph:
    def __init__(self, call, i):
        self.call, self.i = call, i

    def replay(self):
        self.call(self.i)


def fake_timed(steps, iterations, sensors=None):
    for i in range(2):
        for step in steps(i):
            step()
    return timing.Timed([float(j + 1) for j in range(len(steps(0)))], 1500.0)


def small_request(**changes):
    preset = presets.of_sizes(128, 64, 4, 2)
    preset = presets.Preset("small", preset.sizes, (3, 9))
    return bench.Request([preset], ["mxfp8", "nvfp4"], **changes)


def test_rows_of_two_formats_and_a_peer(no_gpu_needed, monkeypatch):
    monkeypatch.setattr(timing, "sustained", lambda *_: timing.Sustained(0.5, 1400.0, 650.0))
    request = small_request(patterns=("uniform", "one"), others=("torch",), sustained=True)
    notes = Console(stderr=True)
    rows = list(bench._measure_all(request, torch.device("cpu"), FakeSensors(), notes))
    names = [(row["tokens"], row["routing"], row["format"]) for row in rows]
    formats = ("mxfp8", "nvfp4", "torch-bf16")
    assert names == [(t, r, f) for t in (3, 9) for r in ("uniform", "one") for f in formats]
    assert [row["ms"] for row in rows[:3]] == [1.0] * 3  # each alone
    assert [row["rows"] for row in rows[::3]] == [6, 3, 18, 9]
    for row in rows:
        assert row["sustained_watts"] == 650.0
        assert row["sm_mhz"] == 1500.0
        assert 0 < row["dense_rel_l2"] < 0.3  # wrong experts or scales: about 1
    assert rows[1]["stage_ms"] == dict(zip(results.STAGES, (1.0, 2.0, 3.0, 4.0), strict=True))
    assert rows[1]["stage_gbps"].keys() == {"gate_up", "down"}
    assert all(row["rel_l2"] == 0 for row in rows if "rel_l2" in row)
    assert "stage_ms" not in rows[2]
    assert rows[2]["dense_rel_l2"] < 1e-2
    json.dumps(rows)
    assert results.table(rows).row_count == len(rows)


def test_uniform_inputs_are_those_of_earlier_rows():
    """Seed and order of the draws decide them: earlier rows were timed on the same ids."""
    problem = sizes(8, 2)
    data = bench.Data(problem, torch.device("cpu"), 5)
    generator = torch.Generator().manual_seed(5)
    for shape in ((8, 128, 64), (8, 64, 64), (4096, 64)):
        torch.empty(shape, dtype=torch.bfloat16).normal_(generator=generator)
    want = torch.rand(4096, 8, generator=generator).topk(2, dim=1).indices
    assert torch.equal(data.inputs(16)[1], want[:16].to(torch.int32))


def test_least_iterations():
    with pytest.raises(ValueError, match="iterations: expected at least 30 for a median, got 29"):
        small_request(iterations=29)


def test_every_rung_says_why_with_a_number(capsys):
    from moe_ep_jit import cli

    assert cli.main(["bench", "--ladder", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    count = sum(
        len(variants.ladder(arch, o)) for arch in variants.ARCHES for o in variants.operands(arch)
    )
    assert len(rows) == count
    hopper = [row["reason"] for row in rows if row["arch"] == "sm_90a"]
    assert all(re.search(r"\d ms\b", reason) for reason in hopper)
    assert len(set(hopper)) == len(hopper)
    assert all(row["reason"] for row in rows)
    assert cli.main(["bench", "--ladder"]) == 0
    assert rows[0]["reason"].split()[0] in capsys.readouterr().out
    assert cli.main(["bench", "--ladder", "--plot", "pictures"]) == 1
    assert "--ladder: expected no --compare and no --plot" in capsys.readouterr().err
