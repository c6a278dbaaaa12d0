"""What the tests of the cache share: an empty folder, loads of the fake object, processes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_ep_jit import jit

FORK = multiprocessing.get_context("fork")
NAME = "toy-h64"
BUILD = "fake_build:compile_op"


@pytest.fixture(name="cache")
def cache_fixture(tmp_path, monkeypatch):
    """An empty cache folder, a process that has loaded nothing, and a log of the compiles."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("MOE_EP_JIT_CACHE", str(folder))
    monkeypatch.setenv("FAKE_BUILD_LOG", str(tmp_path / "compiles.log"))
    monkeypatch.setattr(jit, "_memory", {})
    monkeypatch.setattr(jit, "_warned", set())
    monkeypatch.setattr(jit, "_counts", dict.fromkeys(jit.stats(), 0))
    return folder


def load(bias=3, name=NAME, compile=True, announce=True, **facts):
    facts = {"bias": bias, **facts}
    options = {"compile": compile, "announce": announce}
    return jit.load("toy", facts, arch="sm_90a", build=BUILD, name=name, **options)


def compiles(cache: Path) -> int:
    log = cache.parent / "compiles.log"
    return len(log.read_text().split()) if log.exists() else 0


def the_entry(cache: Path) -> Path:
    (folder,) = cache.glob("sm_90a/*/*")
    return folder


def run_forked(*targets) -> list[int]:
    """Run each target in a forked process; their exit codes."""
    processes = [FORK.Process(target=target) for target in targets]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]


def replace(path: Path, content: bytes) -> None:
    """A new file under the old name: this process has the old one mapped."""
    fresh = path.with_name("fresh")
    fresh.write_bytes(content)
    fresh.chmod(0o600)
    fresh.replace(path)


def python(code: str, **environment: str) -> str:
    """Run code in a fresh interpreter; its standard output."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
