"""The cache's folders: which are used, whose they may be, and what happens where none can be."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from cache_tools import cache_fixture as cache_fixture
from cache_tools import compiles, load, replace, run_forked, the_entry

from moe_ep_jit import cache_key, jit


def test_no_cache_folder_means_memory_only_and_one_warning(cache, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOE_EP_JIT_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "tmp").mkdir()
    assert load(1)(0) == 1
    assert load(2)(0) == 2
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    first_compile, folder = sorted(warnings, key=lambda text: "MOE_EP_JIT_CACHE" in text)
    assert "on first use" in first_compile
    assert "MOE_EP_JIT_CACHE" in folder
    assert not list((tmp_path / "tmp").iterdir())


def test_cache_folder_that_is_a_file_or_nobodys_home(cache, tmp_path, monkeypatch, caplog):
    file = tmp_path / "file"
    file.write_text("mine")
    monkeypatch.setenv("MOE_EP_JIT_CACHE", str(file))
    assert load(1)(0) == 1
    assert f"in memory only: {file} is a file" in caplog.text
    assert file.read_text() == "mine"
    monkeypatch.setenv("MOE_EP_JIT_CACHE", "~nosuch/x")
    with pytest.raises(RuntimeError, match="^MOE_EP_JIT_CACHE: .*~nosuch/x.* run: export MOE_EP"):
        jit.cache_dir()
    assert load(2)(0) == 2
    assert "in memory only: MOE_EP_JIT_CACHE: expected a folder, got ~nosuch/x" in caplog.text


def as_nobody(work) -> int:
    """Run ``work`` as a user that owns nothing; its exit code."""

    def drop_and_work():
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        work()

    return run_forked(drop_and_work)[0]


@pytest.fixture
def open_folder():
    """A folder that any user can reach."""
    folder = Path(tempfile.mkdtemp(prefix="moe_ep_jit-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_read_only_folder_without_root(open_folder, cache, monkeypatch, caplog):
    ours = open_folder / "ro"
    monkeypatch.setenv("MOE_EP_JIT_CACHE", str(ours))
    monkeypatch.setenv("FAKE_BUILD_LOG", os.devnull)
    load(1)
    for path in (ours, *ours.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)

    def work():
        jit.forget()
        assert load(1)(0) == 1  # from disk
        assert load(2)(0) == 2  # in memory only
        assert jit.stats()["compiles"] == 2  # one of them before the fork
        assert caplog.text.count("in memory only") == 1
        os._exit(9)

    assert as_nobody(work) == 9
    assert len(list(ours.glob("sm_90a/*/*"))) == 1
    for path in (ours, *ours.rglob("*")):
        path.chmod(0o700)


def test_home_unset_and_unknown(cache, monkeypatch, tmp_path, caplog):
    monkeypatch.delenv("MOE_EP_JIT_CACHE")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(cache_key, "PACKAGE", tmp_path / "site-packages" / "moe_ep_jit")
    assert jit.cache_dir().parts[-2:] == (".cache", "moe_ep_jit")

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(RuntimeError, match="export MOE_EP_JIT_CACHE"):
        jit.cache_dir()
    monkeypatch.undo()
    monkeypatch.setattr(jit, "cache_dirs", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    monkeypatch.setattr(jit, "_memory", {})
    assert load()(1) == 4
    assert "memory only: no home" in caplog.text


def test_checkout_folder_is_the_default(cache, monkeypatch, tmp_path):
    monkeypatch.delenv("MOE_EP_JIT_CACHE")
    checkout = tmp_path / "checkout"
    package = checkout / "moe_ep_jit"
    package.mkdir(parents=True)
    for name in ("formats.py", "problem.py", "layout.py"):
        shutil.copy(cache_key.PACKAGE / name, package / name)
    (checkout / "pyproject.toml").write_text("")
    (checkout / "cache").mkdir(mode=0o775)
    (checkout / "cache").chmod(0o775)
    monkeypatch.setattr(cache_key, "PACKAGE", package)
    assert jit.cache_dirs() == [checkout / "cache"]
    load()
    # As git leaves it under umask 002; nobody asked for it, so that it is put right.
    assert (checkout / "cache").stat().st_mode & 0o777 == 0o755
    assert len(list((checkout / "cache").glob("sm_90a/*/*"))) == 1


@pytest.mark.parametrize("full", ["cache", "both"])
def test_disk_full(cache, monkeypatch, caplog, full):
    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    if full == "both":
        monkeypatch.setattr(Path, "write_bytes", no_space)
        with pytest.raises(RuntimeError, match="free some space or set TMPDIR"):
            load()
    else:
        assert load()(1) == 4
        assert "No space left" in caplog.text
    assert not list(cache.glob("sm_90a/*/*"))
    assert not list((cache / ".tmp").iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_folder_that_others_can_write_is_refused(cache, mode):
    load()
    cache.chmod(mode)
    jit.forget()
    with pytest.raises(RuntimeError, match=f"chmod -R go-w {cache}"):
        load()
    with pytest.raises(RuntimeError, match="chmod -R go-w"):
        load(2)


PARTS = ["arch", "name", "entry", "kernel.o", "kernel.so", "key.json", "launch.json"]


def part_of_an_entry(cache, part):
    entry = the_entry(cache)
    return {"arch": cache / "sm_90a", "name": entry.parent, "entry": entry}.get(part, entry / part)


@pytest.mark.parametrize("part", PARTS)
def test_part_of_an_entry_that_others_can_write_is_refused(cache, part):
    load()
    jit.forget()
    path = part_of_an_entry(cache, part)
    path.chmod(0o777)
    with pytest.raises(RuntimeError, match=f"chmod -R go-w {path}$"):
        load()
    assert compiles(cache) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_folder_of_another_user_is_refused(cache):
    load()
    os.chown(cache, 4711, 4711)
    jit.forget()
    with pytest.raises(RuntimeError, match="belongs to user 4711"):
        load()


def test_layers(cache, monkeypatch, tmp_path, caplog):
    load(1)
    own = tmp_path / "own"
    monkeypatch.setenv("MOE_EP_JIT_CACHE", os.pathsep.join((str(own), str(cache))))
    jit.forget()
    assert load(1)(0) == 1
    assert compiles(cache) == 1
    assert not own.exists()
    entry = the_entry(cache)
    replace(entry / "kernel.so", b"")
    jit.forget()
    assert load(1)(0) == 1
    assert (entry / "kernel.so").stat().st_size == 0
    assert len(list(own.glob("sm_90a/*/*"))) == 1
    assert "only read" in caplog.text
