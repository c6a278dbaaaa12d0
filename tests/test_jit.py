"""The cache: what is built when, and that nothing broken, foreign or half written is ever loaded.

The objects are ``fake_build``'s (gcc, no DSL); ``test_jit_dsl`` has the real compiler.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import fake_build
import filelock
import pytest
import torch
from cache_tools import FORK, NAME, compiles, load, replace, run_forked, the_entry
from cache_tools import cache_fixture as cache_fixture

from moe_ep_jit import cache_key, entries, jit


def test_cold_then_memory_then_disk(cache, caplog):
    caplog.set_level(logging.INFO, "moe_ep_jit")
    assert load()(1, 2) == 6
    assert load()(10) == 13
    jit.forget()
    assert load()(4, 5) == 12
    assert jit.stats() == {"compiles": 1, "disk_hits": 1, "memory_hits": 1}
    said = [r.getMessage() for r in caplog.records if "compiled" in r.getMessage()]
    assert len(said) == 1
    assert NAME in said[0]
    assert " s" in said[0]


def test_two_objects_do_not_mix(cache):
    first, second = load(1), load(2, name="toy-other")
    assert (first(0), second(0), first(0)) == (1, 2, 1)


def test_entry_files_and_modes(cache):
    load()
    folder = the_entry(cache)
    assert folder.parent.name == NAME
    names = {"kernel.o", "kernel.so", "kernel.ptx", "key.json", "launch.json"}
    assert {path.name for path in folder.iterdir()} == names
    key = json.loads((folder / "key.json").read_text())
    assert key == cache_key.full_key("toy", {"bias": 3}, "sm_90a", "fake_build:compile_op")
    assert cache_key.fingerprint(key) == folder.name
    launch = json.loads((folder / "launch.json").read_text())
    assert launch["dynamic_shared_bytes"] == 1003
    assert launch["files"]["kernel.so"]["bytes"] == (folder / "kernel.so").stat().st_size
    for path in (cache, *cache.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path
    assert not list((cache / ".tmp").iterdir())


def test_objects_hold_no_path(cache):
    """A cache can move, and so can the environment that uses it."""
    load()
    texts = [path.read_bytes() for path in the_entry(cache).iterdir()]
    roots = [str(cache_key.PACKAGE.parent), str(cache), tempfile.gettempdir(), sys.prefix]
    for text in texts:
        assert not any(root.encode() in text for root in roots if len(root) > 4)


def test_key_fields(monkeypatch):
    def fingerprint(op="toy", facts=None, build="fake_build:compile_op"):
        return cache_key.fingerprint(
            cache_key.full_key(op, facts or {"a": 1, "b": [1, 2]}, "sm_90a", build)
        )

    base = fingerprint()
    assert fingerprint(facts={"b": (1, 2), "a": 1}) == base
    assert fingerprint(facts={"a": 1, "b": [2, 1]}) != base
    assert fingerprint(op="other") != base
    assert fingerprint(build="fake_build:FakeCompiled") != base
    for name, value in (
        ("COMPILE_OPTIONS", "--enable-tvm-ffi"),
        ("ENTRY_VERSION", 99),
        ("installed_version", lambda name: "9.9"),
        ("host_facts", lambda: {"machine": "x86_64", "cpu_flags": "avx512f"}),
        ("runtime_library", lambda: Path("/x/cu99/lib/libcute_dsl_runtime.so")),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(cache_key, name, value)
            assert fingerprint() != base, name
    assert fingerprint() == base


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"bias": object()}, TypeError, "JSON"),
        ({"bias": float("nan")}, TypeError, "JSON"),
        ({"name": "../evil"}, ValueError, "name"),
        ({"name": ".hidden"}, ValueError, "name"),
    ],
    ids=["object", "nan", "path", "hidden"],
)
def test_bad_arguments(cache, arguments, error, words):
    with pytest.raises(error, match=words):
        load(**arguments)
    assert not cache.exists()


def test_unknown_arch(cache):
    with pytest.raises(ValueError, match="sm_90a"):
        jit.load("toy", {}, arch="sm_12", build="fake_build:compile_op", name=NAME)


def test_build_error_leaves_nothing(cache):
    with pytest.raises(ValueError, match="tile does not fit"):
        load(trouble="raise")
    assert not list(cache.glob("sm_90a/*/*"))
    assert not list((cache / ".tmp").iterdir())


# Broken and foreign entries


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "random":
        replace(path, os.urandom(len(content)))
    else:
        replace(path, content[: len(content) // 2 if how == "half" else 0])


@pytest.mark.parametrize("how", ["empty", "half", "random", "missing"])
@pytest.mark.parametrize("file", ["kernel.so", "kernel.o", "key.json", "launch.json"])
def test_broken_entry_is_set_aside_and_rebuilt(cache, caplog, file, how):
    load()
    damage(the_entry(cache) / file, how)
    jit.forget()
    with caplog.at_level(logging.WARNING, "moe_ep_jit"):
        assert load()(1) == 4
    assert "set aside" in caplog.text
    assert compiles(cache) == 2
    assert len(list((cache / ".broken").iterdir())) == 1
    jit.forget()
    assert load()(1) == 4
    assert compiles(cache) == 2


@pytest.mark.parametrize("how", ["file", "dangling-link"])
def test_something_else_in_an_entrys_place_is_set_aside(cache, caplog, how):
    load()
    entry = the_entry(cache)
    shutil.rmtree(entry)
    if how == "file":
        entry.write_text("no folder")
    else:
        entry.symlink_to(cache / "nowhere")
    jit.forget()
    assert load()(1) == 4
    assert "set aside and built again" in caplog.text
    assert entry.is_dir()
    assert compiles(cache) == 2
    jit.forget()
    assert load()(1) == 4
    assert compiles(cache) == 2


@pytest.mark.parametrize("how", ["file", "dangling-link"])
@pytest.mark.parametrize("part", ["sm_90a", f"sm_90a/{NAME}"])
def test_something_else_in_an_arch_or_names_place_is_set_aside(cache, caplog, part, how):
    load()
    place = cache / part
    shutil.rmtree(place)
    if how == "file":
        place.write_text("no folder")
    else:
        place.symlink_to(cache / "nowhere")
    jit.forget()
    assert load()(1) == 4
    assert f"{place}: expected a folder, got something else; set aside" in caplog.text
    assert len(list((cache / ".broken").iterdir())) == 1
    jit.forget()
    assert load()(1) == 4
    assert compiles(cache) == 2


def test_first_compile_of_a_process_is_a_warning(cache, caplog):
    load(1, name="quiet", announce=False)
    assert not caplog.records
    load(2)
    load(3)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.name == "moe_ep_jit"
    assert "`moe-ep-jit precompile` does it ahead of time" in record.getMessage()
    jit.forget()
    jit._warned.clear()
    load(2)  # from disk: nothing is compiled
    assert len(caplog.records) == 1


def test_foreign_key(cache, caplog):
    load(1)
    mine = the_entry(cache)
    load(2, name="toy-other")
    (other,) = cache.glob("sm_90a/toy-other/*")
    for path in other.iterdir():
        replace(mine / path.name, path.read_bytes())
    jit.forget()
    assert load(1)(0) == 1
    assert "differs in facts" in caplog.text


def test_entry_of_another_cpu_is_a_miss_that_says_so(cache, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "moe_ep_jit")
    here = cache_key.host_facts()
    with monkeypatch.context() as patch:
        other = {**here, "cpu_flags": here["cpu_flags"] + " zz_matrix"}
        patch.setattr(cache_key, "host_facts", lambda: other)
        load()
    jit.forget()
    assert load()(1) == 4
    assert compiles(cache) == 2
    assert "another CPU" in caplog.text
    assert "zz_matrix" in caplog.text
    assert len(list(cache.glob("sm_90a/*/*"))) == 2


def test_readers_of_a_set_aside_entry_keep_their_files(cache):
    load()
    with open(the_entry(cache) / "kernel.o", "rb") as reader:
        entries.set_aside(cache, the_entry(cache))
        assert reader.read(4) == b"\x7fELF"


# Sources


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A copy of the device code that a test can edit."""
    copy = tmp_path / "kernels"
    shutil.copytree(cache_key.kernels_folder(), copy)
    (copy / "sm90").mkdir(exist_ok=True)
    (copy / "sm90" / "toy.py").write_text("TILE = 64\n")
    monkeypatch.setattr(cache_key, "kernels_folder", lambda: copy)
    return copy


def test_source_edit_without_version_bump(cache, sources):
    load()
    (sources / "sm90" / "toy.py").write_text("TILE = 32\n")
    jit.forget()
    load()
    (sources / "common" / "new.py").write_text("")
    jit.forget()
    load()
    assert compiles(cache) == 3


def test_touched_files_other_arch_and_moved_cache(cache, sources, monkeypatch):
    load()
    os.utime(sources / "sm90" / "toy.py", (1, 1))
    for path in the_entry(cache).iterdir():
        os.utime(path, (1, 1))
    (sources / "sm100").mkdir(exist_ok=True)
    (sources / "sm100" / "toy.py").write_text("TILE = 128\n")
    moved = cache.rename(cache.with_name("elsewhere"))
    monkeypatch.setenv("MOE_EP_JIT_CACHE", str(moved))
    jit.forget()
    assert load()(1) == 4
    assert compiles(cache) == 1


def test_source_edit_during_the_compile_is_not_kept(cache, sources, monkeypatch, caplog):
    original = fake_build.compile_op

    def edit_and_compile(facts):
        (sources / "sm90" / "toy.py").write_text("TILE = 16\n")
        return original(facts)

    monkeypatch.setattr(fake_build, "compile_op", edit_and_compile)
    assert load()(1) == 4
    assert "sources changed" in caplog.text
    assert not list(cache.glob("sm_90a/*/*"))


def test_build_file_outside_the_package_counts(tmp_path, monkeypatch):
    (tmp_path / "my_build.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = cache_key.source_fingerprint("sm_90a", "my_build:f")
    (tmp_path / "my_build.py").write_text("x = 2\n")
    assert cache_key.source_fingerprint("sm_90a", "my_build:f") != before
    with pytest.raises(ValueError, match="importable"):
        cache_key.source_fingerprint("sm_90a", "no_such_module:f")


# Processes and threads


def test_eight_processes_one_compile_then_many_warm_loads(cache):
    def work():
        for _ in range(101):
            jit.forget()
            assert load(sleep=0.2)(1) == 4
        os._exit(0)

    assert run_forked(*[work] * 8) == [0] * 8
    assert compiles(cache) == 1
    assert len(list(cache.glob("sm_90a/*/*"))) == 1
    assert not list((cache / ".tmp").iterdir())


def test_eight_threads_one_compile(cache):
    results = []
    threads = [threading.Thread(target=lambda: results.append(load()(1))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [4] * 8
    assert jit.stats()["compiles"] == 1


def test_daemonic_process_compiles(cache):
    process = FORK.Process(target=lambda: os._exit(load()(1)), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == 4


def test_one_reader_loads_while_another_repairs(cache):
    load()
    entry = the_entry(cache)

    def read():
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            jit.forget()
            assert load()(1) == 4
        os._exit(0)

    def spoil():
        for _ in range(5):
            time.sleep(0.1)
            replace(entry / "kernel.so", b"")
            jit.forget()
            assert load()(1) == 4
        os._exit(0)

    assert run_forked(read, read, spoil) == [0, 0, 0]


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def test_killed_compiler_frees_its_lock(cache, monkeypatch):
    process = FORK.Process(target=lambda: load(sleep=60))
    process.start()
    wait_for(lambda: compiles(cache) == 1)
    # What a process killed while it wrote would leave, under the key that is asked for below.
    key = cache_key.full_key("toy", {"bias": 3, "sleep": 60}, "sm_90a", "fake_build:compile_op")
    leftover = cache / ".tmp" / f"{cache_key.fingerprint(key)}-1-1"
    leftover.mkdir()
    (leftover / "kernel.o").write_bytes(b"half")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    monkeypatch.setattr(fake_build, "time", SimpleNamespace(sleep=lambda seconds: None))
    started = time.monotonic()
    assert load(sleep=60)(1) == 4
    assert time.monotonic() - started < 5
    assert not leftover.exists()


def test_lock_wait_is_bounded_and_names_the_path(cache, monkeypatch):
    monkeypatch.setattr(entries, "LOCK_TIMEOUT_S", 0.3)
    key = cache_key.full_key("toy", {"bias": 3}, "sm_90a", "fake_build:compile_op")
    path = entries.lock_path(cache, cache_key.fingerprint(key))
    path.parent.mkdir(parents=True, mode=0o700)
    cache.chmod(0o700)
    with filelock.FileLock(str(path)), pytest.raises(RuntimeError, match=str(path)):
        load()
    assert load()(1) == 4


def test_fork_while_a_thread_compiles(cache):
    thread = threading.Thread(target=lambda: load(sleep=1.0))
    thread.start()
    wait_for(lambda: compiles(cache) == 1)
    assert run_forked(lambda: os._exit(load(7, name="toy-child")(0))) == [7]
    thread.join()


# Frozen


def test_frozen(cache):
    with jit.freeze():
        with pytest.raises(RuntimeError, match="moe-ep-jit precompile"):
            load()
        seen = []
        thread = threading.Thread(target=lambda: seen.append(pytest.raises(RuntimeError, load)))
        thread.start()
        thread.join()
        assert NAME in str(seen[0].value)
    with pytest.raises(RuntimeError, match=NAME):
        load(compile=False)
    load()
    jit.forget()
    with jit.freeze():
        assert load()(1) == 4
    assert compiles(cache) == 1


def test_loads_inside_a_custom_op(cache):
    @torch.library.custom_op("moe_ep_jit_test::add", mutates_args=())
    def add(x: torch.Tensor) -> torch.Tensor:
        return x + load()(1)

    assert add(torch.zeros(1)).item() == 4
    jit.forget()
    assert add(torch.zeros(1)).item() == 4
    assert jit.stats()["disk_hits"] == 1
