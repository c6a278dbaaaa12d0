"""The command line, the presets, the doctor, and tools/dev's own behaviour."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from moe_ep_jit import cli, doctor
from moe_ep_jit.problem import FORMATS, Problem, SwiGLU
from moe_ep_jit.tools import demo, precompile, presets
from moe_ep_jit.workspace import Workspace

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder of the test's own."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("MOE_EP_JIT_CACHE", str(folder))
    return folder


def run_json(capsys, *argv):
    """Exit code and parsed JSON of one command."""
    code = cli.main(argv)
    return code, json.loads(capsys.readouterr().out)


# Presets

#: experts, hidden, intermediate, top_k, activation, bias: from the models' public configs.
PUBLIC_SIZES = {
    "dsv3-ep8": (256 // 8, 7168, 2048, 8, SwiGLU(), False),
    "dsv4flash-ep4": (256 // 4, 4096, 2048, 6, SwiGLU(10.0), False),
    "dsv4pro-ep8": (384 // 8, 7168, 3072, 6, SwiGLU(10.0), False),
    "kimi-k2-ep8": (384 // 8, 7168, 2048, 8, SwiGLU(), False),
    "qwen3-30b": (128, 2048, 768, 8, SwiGLU(), False),
    "qwen35-397b-ep8": (512 // 8, 4096, 1024, 10, SwiGLU(), False),
    "gptoss-120b": (128, 2880, 2880, 4, SwiGLU(7.0, 1.702, 1.0), True),
}


def test_presets_are_the_public_models():
    found = {
        preset.name: (
            (p := preset.problem("mxfp8")).num_experts,
            p.hidden,
            p.intermediate,
            p.top_k,
            p.activation,
            p.bias,
        )
        for preset in presets.load()
    }
    assert found == PUBLIC_SIZES


def test_preset_selection_keeps_the_order_asked_for():
    names = ["qwen3-30b", "dsv3-ep8", "qwen3-30b"]
    assert [p.name for p in presets.load(names)] == ["qwen3-30b", "dsv3-ep8"]


def test_unknown_preset_lists_those_there_are():
    with pytest.raises(ValueError, match="expected one of dsv3-ep8, .*got 'dsv3'"):
        presets.load(["dsv3"])


@pytest.mark.parametrize("fmt", FORMATS)
def test_jobs_are_distinct_and_ignore_capacity(fmt):
    (preset,) = presets.load(["qwen3-30b"])
    jobs = presets.jobs(preset.problem(fmt, max_tokens=8), "sm_90a")
    assert jobs == presets.jobs(preset.problem(fmt, max_tokens=4096), "sm_90a")
    assert len({job.name for job in jobs}) == len(jobs) > 1
    json.dumps([job.facts for job in jobs])


def test_jobs_of_several_ranks_are_those_of_the_experts_layer():
    (preset,) = presets.load(["dsv3-ep8"])
    jobs = presets.jobs(preset.problem("mxfp8", ranks=8), "sm_90a")
    for job in jobs:
        facts = (job.facts["num_experts"], job.facts["top_k"], job.facts["x_kind"])
        assert facts == (32, 1, "mxfp8")
    assert len(jobs) == len(presets.jobs(preset.problem("mxfp8"), "sm_90a"))


# Commands


def test_version_and_help(capsys):
    for flag in ("--version", "--help"):
        with pytest.raises(SystemExit) as stop:
            cli.main([flag])
        assert stop.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("demo", "precompile", "cache", "plan", "bench", "tune"))


def test_module_runs_the_command_line():
    done = subprocess.run(
        [sys.executable, "-m", "moe_ep_jit", "cache", "path", "--json"],
        env={**os.environ, "MOE_EP_JIT_CACHE": "/a/b"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, json.loads(done.stdout)) == (0, ["/a/b"]), done.stderr


@pytest.mark.parametrize(
    "command", [["cache", "list"], ["precompile", "--preset", "qwen3-30b", "--jobs", "1"]]
)
def test_a_cache_that_is_a_file_is_said(tmp_path, monkeypatch, capsys, command):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOE_EP_JIT_CACHE", str(tmp_path / "file"))
    assert cli.main(command) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"{tmp_path / 'file'} is a file, expected the cache folder; run: export" in said


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["cache"],
        ["cache", "prune", "--older-than", "soon"],
        ["cache", "prune", "--max-size", "5X"],
        ["bench", "--tokens", "0"],
        ["bench", "--format", "fp8"],
        ["bench", "--skew", "normal"],
        ["bench", "--peer", "vllm"],
        ["bench", "--ladder", "--from", "rows"],
        ["tune", "--sizes", "64", "64", "4"],
        ["precompile", "--arch", "sm_80"],
    ],
    ids=" ".join,
)
def test_bad_usage_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"), [("60s", 60), ("90m", 5400), ("12h", 43200), ("1.5d", 129600)]
)
def test_durations(text, value):
    assert cli._duration(text) == value


@pytest.mark.parametrize(("text", "value"), [("17", 17), ("4K", 4096), ("1.5M", 1572864)])
def test_sizes(text, value):
    assert cli._size(text) == value


def test_empty_cache(cache, capsys):
    assert run_json(capsys, "cache", "list", "--json") == (0, [])
    assert run_json(capsys, "cache", "verify", "--json") == (0, [])
    assert run_json(capsys, "cache", "prune", "--json") == (0, [])
    assert run_json(capsys, "cache", "path", "--json") == (0, [str(cache)])
    assert cli.main(["cache", "list"]) == 0
    assert "moe-ep-jit precompile" in capsys.readouterr().out
    assert cli.main(["cache", "path"]) == 0
    assert capsys.readouterr().out == f"{cache}\n"


def test_pack_of_nothing_says_what_to_run(cache, tmp_path, capsys):
    assert cli.main(["cache", "pack", str(tmp_path / "kernels.tar")]) == 1
    assert "run: moe-ep-jit precompile" in capsys.readouterr().err
    assert not (tmp_path / "kernels.tar").exists()


def test_unpack_of_rubbish_changes_nothing(cache, tmp_path, capsys):
    rubbish = tmp_path / "kernels.tar"
    rubbish.write_bytes(b"rubbish" * 1000)
    assert cli.main(["cache", "unpack", str(rubbish)]) == 1
    assert "not a whole tar file" in capsys.readouterr().err
    assert list(cache.iterdir()) == []


def test_precompile_passes_every_rung_on(cache, capsys, monkeypatch):
    seen = []

    def fake(jobs, num_workers, progress):
        jobs = list(jobs)
        seen.append((jobs, num_workers))
        results = []
        for index, job in enumerate(jobs):
            status = "failed" if index == 0 else "compiled"
            results.append({"name": job.name, "status": status, "error": "no luck" * (index == 0)})
            progress(index + 1, len(jobs), results[-1])
        counts = {"compiled": len(jobs) - 1, "cached": 0, "failed": 1}
        return {**counts, "seconds": 1.0, "workers": 2, "results": results}

    monkeypatch.setattr(precompile, "run", fake)
    argv = ["precompile", "--preset", "gptoss-120b", "--format", "nvfp4", "--jobs", "2"]
    assert cli.main(argv) == 1
    said = capsys.readouterr()
    assert "no luck" in said.out
    assert "1 failed" in said.out
    assert said.err == ""  # a progress bar is for a terminal
    ((jobs, workers),) = seen
    assert workers == 2
    (preset,) = presets.load(["gptoss-120b"])
    assert jobs == presets.jobs(preset.problem("nvfp4"), "sm_90a")


def test_act_that_no_format_has_is_refused(capsys):
    assert cli.main(["precompile", "--format", "mxfp8", "--act", "nvfp4"]) == 1
    assert "--act nvfp4" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [1, 8])
def test_plan_adds_up_to_what_a_workspace_takes(ranks, capsys):
    argv = ["plan", "--preset", "dsv3-ep8", "--ranks", str(ranks), "--tokens", "512", "--json"]
    code, plans = run_json(capsys, *argv)
    assert code == 0
    assert [(p["format"], p["ranks"], p["local_experts"]) for p in plans] == [
        (fmt, ranks, 256 // ranks) for fmt in FORMATS
    ]
    for plan in plans:
        sizes = (7168, 2048, 256, 8, 512)
        problem = Problem(*sizes, format=plan["format"], act=plan["act"], num_ranks=ranks)
        assert plan["bytes"] == Workspace.bytes_needed(problem)
        assert plan["bytes"] == sum(row["bytes"] for row in plan["regions"])
        assert plan["max_rows"] == ranks * 512 * 8
        by_name = {(row["for"], row["region"]): row for row in plan["regions"]}
        assert by_name["result", "output"]["bytes"] == 512 * 7168 * 2
        assert 0 <= by_name["all", "alignment"]["bytes"] < 32 * 1024
        assert (("exchange", "recv_rows") in by_name) == (ranks > 1)


def test_plan_over_symmetric_memory_adds_up(capsys):
    argv = ["plan", "--preset", "dsv3-ep8", "--ranks", "8", "--tokens", "4096", "--json"]
    code, plans = run_json(capsys, *argv, "--transport", "symm")
    assert code == 0
    for plan in plans:
        sizes = (7168, 2048, 256, 8, 4096)
        problem = Problem(*sizes, format=plan["format"], act=plan["act"], num_ranks=8)
        assert plan["bytes"] == Workspace.bytes_needed(problem, transport="symm")
        assert plan["bytes"] == sum(row["bytes"] for row in plan["regions"])
        names = [row["region"] for row in plan["regions"]]
        assert "recv_x" in names
        assert "send_rows" not in names
    # 262,144 rows at most: values, scale, slot, count of each; rows of the intermediate; rows back.
    assert [plan["wire"]["dispatch"] for plan in plans] == [7168 + 12, 2 * 7168 + 8]
    assert 2.9e9 < plans[0]["bytes"] < 3.1e9


def test_plan_prints_a_table_and_bounds_what_is_received(capsys):
    argv = ["plan", "--preset", "dsv3-ep8", "--format", "mxfp8", "--max-recv-rows", "40000"]
    assert cli.main(argv) == 0
    said = capsys.readouterr().out
    assert "8 rank(s) of 32 experts, 4096 tokens, at most 40000 rows received" in said
    assert "7392 bytes of mxfp8 there, 14336 of bf16 back" in said
    assert "a token sent once per rank would be 1.51 times fewer rows there" in said
    assert re.search(r"^ H200 +4096 +623.01 +0.566 +2.914 +1.086 +4.580 *$", said, re.MULTILINE)
    assert re.search(r"^ B200 +8 +1.25 ", said, re.MULTILINE)
    assert cli.main(["plan", "--preset", "qwen3-30b", "--ranks", "3"]) == 1
    assert "expected a multiple of num_ranks=3" in capsys.readouterr().err


def test_smoke_says_pass_or_what_is_wrong():
    def run(*argv, under=("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")):
        command = [sys.executable, *under, "-m", "moe_ep_jit.tools.smoke", *argv]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    done = run("--rounds", "4")
    assert done.returncode == 0, done.stderr
    assert "2 ranks, collective over gloo, 8 rounds: pass" in done.stdout
    alone = run(under=())
    assert alone.returncode == 1
    assert "got a process on its own; run: torchrun" in alone.stderr
    other = run("--transport", "nccl", under=())
    assert other.returncode == 1
    assert 'transport: expected "collective"' in other.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_bench_without_gpu_says_so(capsys):
    for command in ("bench", "tune"):
        assert cli.main([command]) == 1
        assert f"{command}: expected a GPU with kernels, got cpu" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_demo_compiles_then_loads(cache):
    statuses = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "moe_ep_jit", "demo", "--json"],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert [shown["format"] for shown in result["formats"]] == list(FORMATS)
        assert all(shown["ms"] is None for shown in result["formats"])
        assert all(shown["ran_on"] == "emulator" for shown in result["formats"])
        assert all(0 <= shown["error"]["whole"] < 2e-3 for shown in result["formats"])
        # Zero would mean that nothing was quantized.
        assert all(shown["dense_error"] > 0.02 for shown in result["formats"])
        kernels = [kernel for shown in result["formats"] for kernel in shown["kernels"]]
        assert len(kernels) >= 2 * len(FORMATS)
        statuses.append({kernel["status"] for kernel in kernels})
    assert statuses == [{"compiled"}, {"loaded"}]


@pytest.mark.parametrize("ran_on", ["reference", "emulator", "gpu"])
def test_demo_says_what_ran(ran_on, capsys):
    on_gpu = ran_on == "gpu"
    result = {
        "format": "nvfp4",
        "act": "bf16",
        "variant": "v",
        "reason": "r",
        "device": "d",
        "arch": "sm_90a",
        "on_gpu": on_gpu,
        "sizes": {"tokens": 64},
        "ran_on": ran_on,
        "emulated_s": 2.5 if ran_on == "emulator" else None,
        "kernels": [
            {"name": "moe-n8", "called": False, "status": "compiled", "seconds": 1.5},
            {"name": "moe-n64", "called": True, "status": "loaded", "seconds": 0.5},
        ],
        "ms": 0.25 if on_gpu else None,
        "error": {"whole": 0.0, "worst_row": 0.0, "worst_block": 0.0},
        "bound": 0.02,
        "dense_error": 0.16,
        "dense_bound": 0.175,
        "ok": True,
    }
    demo._print(result, Console(width=200))
    table, sentence = capsys.readouterr().out, demo._sentence(result)
    assert "moe-n8 compiled in 1.50 s" in table
    assert ("moe-n8 compiled in 1.50 s, not run: no GPU" in table) is not on_gpu
    emulated = "moe-n64 loaded in 0.50 s, run on the PTX emulator in 2.5 s" in table
    assert emulated is (ran_on == "emulator")
    assert ("the kernels ran on d in 0.250 ms" in sentence) is on_gpu
    assert ("no GPU here runs them" in sentence) is (ran_on == "reference")
    assert ("the PTX emulator ran one on the CPU" in sentence) is (ran_on == "emulator")


def test_readme_sample_runs_as_it_stands():
    """On a small layer, and on the CPU."""
    # The second sample is for several ranks: test_ranks.py.
    sample, _ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for large, small in (("7168", "256"), ("2048", "128"), ("4096", "16"), ('"cuda"', '"cpu"')):
        assert large in sample
        sample = sample.replace(large, small)
    names = {}
    exec(sample, names)
    assert names["y"] is names["buf"]
    assert 1e-3 < names["y"].float().std() < 1


@pytest.mark.sm90
def test_demo_on_the_gpu(capsys):
    code, result = run_json(capsys, "demo", "--json")
    assert code == 0
    assert all(shown["on_gpu"] and shown["ms"] > 0 for shown in result["formats"])


@pytest.mark.sm90
def test_bench_line_on_the_gpu(capsys):
    argv = ["bench", "--preset", "qwen3-30b", "--format", "nvfp4", "--tokens", "8", "--json"]
    code, row = run_json(capsys, *argv)
    assert code == 0
    documented = {
        "preset", "format", "act", "tokens", "ms", "floor_gemm_ms", "floor_layer_ms", "tflops",
        "gbps", "rel_l2", "gpu", "commit", "date", "routing", "sm_mhz", "stage_gbps",
        "stage_tflops", "copy_pct", "tuned",
    }  # fmt: skip
    assert documented - row.keys() == set()
    assert row["ms"] > row["floor_gemm_ms"] > 0
    assert row["rel_l2"] < 2e-2
    assert row["weight_sets"] > 1  # 64 rows reach fewer weights than three times the L2


# Doctor


@pytest.mark.parametrize(
    ("version", "spec", "good"),
    [
        ("4.8.1", ">=4.8.1,<4.9", True),
        ("4.8.0", ">=4.8.1,<4.9", False),
        ("4.9.0", ">=4.8.1,<4.9", False),
        ("0.1.15.post2", ">=0.1.15.post2,<0.2", True),
        ("0.1.15", ">=0.1.15.post2,<0.2", False),
        ("2.13.0+cpu", ">=2.9", True),
        ("2.8.1", ">=2.9", False),
        ("0.17.6", "==0.17.6", True),
        ("1.0", "", True),
    ],
)
def test_version_ranges(version, spec, good):
    assert doctor.in_range(version, spec) is good


def test_wanted_range_reads_requirements():
    requires = [
        "nvidia-cutlass-dsl<4.9,>=4.8.1",
        "torch>=2.9",
        'tomli>=2; python_version < "3.11"',
        'ruff==0.17.6; extra == "test"',
    ]
    assert doctor.wanted_range("nvidia-cutlass-dsl", requires) == "<4.9,>=4.8.1"
    assert doctor.wanted_range("tomli", requires) == ">=2"
    assert doctor.wanted_range("ruff", requires) == ""
    assert doctor.wanted_range("tom", requires) == ""


def test_doctor_is_content_here(cache, capsys):
    code, report = run_json(capsys, "doctor", "--json")
    problems = [finding for finding in report["findings"] if finding["problem"]]
    assert (code, report["ok"], problems) == (0, True, [])
    names = {finding["name"] for finding in report["findings"]}
    assert {"python", "torch", "nvidia-cutlass-dsl", "dsl wheels", "driver", "cache"} <= names


def test_doctor_without_torch(cache):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from moe_ep_jit.cli import main; sys.exit(main(['doctor', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["torch"]["fix"].startswith("pip install")


def fake_wheel(folder, name, version, files):
    """A dist-info as pip leaves it; ``files``: path -> (bytes on disk, bytes in RECORD)."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for path, (real, recorded) in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(b"x" * real)
        lines.append(f"{path},,{recorded}\n")
    (info / "RECORD").write_text("".join(lines))


def test_doctor_sees_mixed_wheels(tmp_path, monkeypatch):
    fake_wheel(tmp_path, "nvidia-cutlass-dsl", "4.8.1", {})
    fake_wheel(tmp_path, "nvidia-cutlass-dsl-libs-base", "4.7.0", {})
    monkeypatch.syspath_prepend(str(tmp_path))
    (finding,) = doctor._dsl_parts("4.8.1", None)
    assert "nvidia-cutlass-dsl-libs-base 4.7.0" in finding.problem
    assert finding.fix == "pip install --force-reinstall 'nvidia-cutlass-dsl==4.8.1'"


def test_doctor_sees_overwritten_files(tmp_path, monkeypatch):
    base, cu13 = "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-cu13"
    fake_wheel(tmp_path, base, "4.8.1", {"dsl/_ir.so": (5, 5)})
    fake_wheel(tmp_path, cu13, "4.8.1", {"dsl/_ir.so": (7, 7)})
    monkeypatch.syspath_prepend(str(tmp_path))
    complaints = doctor.overwritten_files([base, cu13])
    assert any(f"1 files of {base}" in text for text in complaints)
    assert any("both write dsl/_ir.so" in text for text in complaints)


def test_doctor_sees_an_old_driver(monkeypatch):
    (finding,) = doctor._dsl_parts(doctor._version("nvidia-cutlass-dsl"), (11, 8))
    assert "older than every DSL wheel" in finding.problem
    assert "update the NVIDIA driver" in finding.fix


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a CPU build of torch")
def test_doctor_sees_a_cpu_torch_beside_a_driver():
    (finding,) = doctor._torch((13, 0))
    assert "CUDA build" in finding.fix


def test_doctor_sees_an_unknown_arch(cache, monkeypatch):
    monkeypatch.setenv("MOE_EP_JIT_ARCH", "sm_99")
    found = {finding.name: finding for finding in doctor.examine()}
    assert "expected one of sm_90a" in found["MOE_EP_JIT_ARCH"].problem


def test_doctor_sees_what_is_wrong_with_a_cache_folder(tmp_path):
    good, open_to_all, file = tmp_path / "new", tmp_path / "open", tmp_path / "file"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    file.touch()
    assert doctor.folder_problem(good) == ("", "")
    problem, fix = doctor.folder_problem(open_to_all)
    assert "written by others" in problem
    assert fix == f"run: chmod -R go-w {open_to_all}"
    assert "not a folder" in doctor.folder_problem(file)[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_doctor_sees_a_read_only_cache(tmp_path):
    tmp_path.chmod(0o555)
    assert "not writable" in doctor.folder_problem(tmp_path / "cache")[0]


# tools/dev


def dev(root, *argv, timeout=300, **environment):
    """Run tools/dev of a checkout from another folder and without the caller's environment."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    return subprocess.run(
        ["bash", str(root / "tools" / "dev"), *argv],
        cwd="/",
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_dev_without_a_command_is_bad_usage():
    assert dev(ROOT).stdout.startswith("bash tools/dev demo")
    assert dev(ROOT, "tset").returncode == 2
    assert dev(ROOT, "run").returncode == 1


def test_dev_refuses_another_python(tmp_path):
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\necho "Python 3.9.18"\nexit 1\n')
    old.chmod(0o755)
    done = dev(ROOT, "run", "true", PYTHON=str(old))
    assert done.returncode == 1
    assert "expected a Python 3.10 to 3.13, got Python 3.9.18" in done.stderr


def test_dev_leaves_a_foreign_venv_alone(tmp_path):
    root = tmp_path / "checkout"
    copy_checkout(root)
    (root / ".venv").mkdir()
    (root / ".venv" / "mine").touch()
    done = dev(root, "run", "true", PYTHON=sys.executable)
    assert done.returncode == 1
    assert "was not made by tools/dev" in done.stderr
    assert (root / ".venv" / "mine").exists()


def copy_checkout(root):
    root.mkdir()
    for name in ("moe_ep_jit", "kernels", "tools"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "cache").mkdir()
    shutil.copy(ROOT / "cache" / "shapes.toml", root / "cache")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root)


def test_dev_keeps_the_torch_that_is_there_without_a_registry(tmp_path):
    """A path with a space, no HOME, no registry; then again, after a failure, and after that."""
    root = tmp_path / "a checkout"
    copy_checkout(root)
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PYTHON": sys.executable}
    probe = "import sys, torch, moe_ep_jit.cli as m; print(torch.__file__, m.__file__, sys.prefix)"

    first = dev(root, "run", "python", "-c", probe, **offline)
    assert first.returncode == 0, first.stderr
    expected = f"{torch.__file__} {root}/moe_ep_jit/cli.py {root}/.venv\n"
    assert first.stdout == expected

    stamp = root / ".venv" / ".stamp"
    made = stamp.stat().st_mtime_ns
    second = dev(root, "run", "python", "-c", probe, timeout=60, **offline)
    assert (second.stdout, second.stderr) == (expected, "")
    assert stamp.stat().st_mtime_ns == made

    project = root / "pyproject.toml"
    text = project.read_text()
    project.write_text(text.replace('"rich>=13",', '"rich>=13",\n    "moe-ep-jit-no-such-wheel",'))
    failed = dev(root, "run", "true", **offline)
    assert failed.returncode == 1
    assert "could not install moe-ep-jit-no-such-wheel" in failed.stderr
    assert not stamp.exists()

    project.write_text(text)
    again = dev(root, "run", "python", "-c", probe, **offline)
    assert (again.returncode, again.stdout) == (0, expected), again.stderr
    assert stamp.exists()
