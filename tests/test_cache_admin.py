"""Listing, verifying, pruning, packing and unpacking a cache; filling it ahead of time."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import shutil
import tarfile
import time
from pathlib import Path

import filelock
import pytest
from cache_tools import BUILD, FORK, NAME, compiles, load, replace, the_entry
from cache_tools import cache_fixture as cache_fixture

from moe_ep_jit import cache_admin, cache_key, cli, doctor, entries, jit
from moe_ep_jit.tools import precompile


def test_list(cache):
    assert cache_admin.list_entries() == []
    load(1)
    load(2, name="toy-z")
    first, second = cache_admin.list_entries()
    assert (first["name"], second["name"]) == (NAME, "toy-z")
    assert first["arch"] == "sm_90a"
    assert first["op"] == "toy"
    assert first["facts"] == {"bias": 1}
    assert first["shared_bytes"] == 1001
    assert first["usable"] is True
    assert first["reason"] == ""
    files = the_entry_named(cache, NAME).iterdir()
    assert first["bytes"] == sum(path.stat().st_size for path in files)
    json.dumps(cache_admin.list_entries())


def the_entry_named(cache: Path, name: str) -> Path:
    (folder,) = cache.glob(f"sm_90a/{name}/*")
    return folder


def test_list_says_why_an_entry_is_not_usable(cache, monkeypatch):
    here = cache_key.host_facts()
    with monkeypatch.context() as patch:
        patch.setattr(cache_key, "installed_version", lambda name: "0.1")
        load(1, name="old")
    with monkeypatch.context() as patch:
        patch.setattr(cache_key, "host_facts", lambda: {**here, "machine": "riscv64"})
        load(2, name="cpu")
    load(3, name="bad")
    replace(the_entry_named(cache, "bad") / "kernel.o", b"")
    load(4, name="key")
    (the_entry_named(cache, "key") / "key.json").unlink()
    load(5, name="good")
    states = {row["name"]: (row["state"], row["reason"]) for row in cache_admin.list_entries()}
    assert {name: state for name, (state, _) in states.items()} == {
        "old": "stale",
        "cpu": "other_cpu",
        "bad": "broken",
        "key": "broken",
        "good": "usable",
    }
    assert "dsl_version" in states["old"][1]
    assert "riscv64" in states["cpu"][1]
    assert "kernel.o" in states["bad"][1]


@pytest.mark.parametrize("file", ["kernel.o", "kernel.so", "kernel.ptx", "key.json", "launch.json"])
def test_verify(cache, file):
    load(1)
    load(2, name="good")
    assert [row["ok"] for row in cache_admin.verify()] == [True, True]
    path = the_entry_named(cache, NAME) / file
    replace(path, path.read_bytes()[:-2])
    rows = {Path(row["path"]).parent.name: row for row in cache_admin.verify()}
    assert rows["good"]["ok"]
    assert not rows[NAME]["ok"]
    assert rows[NAME]["reason"]


def test_list_sorts_numbers_as_numbers(cache):
    for number, name in enumerate(("k-n128", "k-n16", "k-n8", "j-n64")):
        load(number, name=name)
    assert names() == ["j-n64", "k-n8", "k-n16", "k-n128"]


@pytest.mark.parametrize("part", ["sm_90a", NAME, "entry", "kernel.so", "key.json"])
def test_what_others_can_write_is_reported_with_the_command(cache, part):
    load(1)
    entry = the_entry(cache)
    path = {"sm_90a": cache / part, NAME: entry.parent, "entry": entry}.get(part, entry / part)
    path.chmod(0o777)
    command = f"run: chmod -R go-w {path}"
    (row,) = cache_admin.list_entries()
    assert (row["state"], row["usable"]) == ("untrusted", False)
    assert row["reason"].endswith(command)
    (said,) = cache_admin.verify()
    assert not said["ok"]
    assert said["reason"].endswith(command)
    finding = next(f for f in doctor._cache() if f.name == "cache")
    assert "can be written by others" in finding.problem
    assert finding.fix == command
    assert cache_admin.prune() == []
    with pytest.raises(RuntimeError, match="no usable entry"):
        cache_admin.pack(cache.parent / "p.tar")


def test_doctor_looks_into_layers_too(cache, tmp_path, monkeypatch):
    load(1)
    the_entry(cache).chmod(0o777)
    monkeypatch.setenv("MOE_EP_JIT_CACHE", os.pathsep.join((str(tmp_path / "own"), str(cache))))
    own, layer = doctor._cache()
    assert (own.name, own.problem) == ("cache", "")
    assert layer.fix == f"run: chmod -R go-w {the_entry(cache)}"


def test_a_file_in_an_entrys_place_is_broken_and_pruned(cache):
    load(1)
    entry = the_entry(cache)
    shutil.rmtree(entry)
    entry.write_text("no folder")
    (row,) = cache_admin.list_entries()
    assert (row["state"], row["bytes"]) == ("broken", 9)
    assert not cache_admin.verify()[0]["ok"]
    assert len(cache_admin.prune()) == 1
    assert not entry.exists()
    assert not list((cache / ".broken").iterdir())


def test_a_cache_that_is_a_file_is_named_with_the_fix(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("MOE_EP_JIT_CACHE", str(file))
    message = f"{file} is a file, expected the cache folder; run: export MOE_EP_JIT_CACHE="
    for call in (
        cache_admin.list_entries,
        cache_admin.verify,
        cache_admin.prune,
        lambda: precompile.run([job(1)]),
        lambda: cache_admin.pack(tmp_path / "p.tar"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()
    (finding,) = doctor._cache()
    assert "not a folder" in finding.problem


# Prune


def names() -> list[str]:
    return [row["name"] for row in cache_admin.list_entries()]


def test_prune_keeps_what_is_current(cache, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(cache_key, "installed_version", lambda name: "0.1")
        load(1, name="old")
    load(2, name="current")
    (cache / ".broken" / "x").mkdir(parents=True)
    abandoned, fresh = cache / ".tmp" / "abandoned", cache / ".tmp" / "fresh"
    abandoned.mkdir()
    fresh.mkdir()
    os.utime(abandoned, (1, 1))
    would = cache_admin.prune(dry_run=True)
    assert names() == ["current", "old"]
    assert cache_admin.prune() == would
    assert names() == ["current"]
    assert len(would) == 3
    assert not list((cache / ".broken").iterdir())
    assert [path.name for path in (cache / ".tmp").iterdir()] == ["fresh"]
    assert not (cache / "sm_90a" / "old").exists()
    assert cache_admin.prune() == []


def test_prune_by_age_and_size(cache):
    for age, name in ((300, "a"), (200, "b"), (100, "c")):
        load(age, name=name)
        used = time.time() - age
        os.utime(the_entry_named(cache, name), (used, used))
    assert cache_admin.prune(older_than=0) == []
    assert len(cache_admin.prune(older_than=250, keep_current=False)) == 1
    assert names() == ["b", "c"]
    size = cache_admin.list_entries()[0]["bytes"]
    cache_admin.prune(max_bytes=size + 100, keep_current=False)
    assert names() == ["c"]
    jit.forget()
    before = cache_admin.list_entries()[0]["used"]
    load(100, name="c")
    assert cache_admin.list_entries()[0]["used"] > before + 50
    with pytest.raises(ValueError, match="older_than"):
        cache_admin.prune(older_than=-1)


def test_prune_leaves_an_entry_that_is_locked(cache):
    load()
    path = entries.lock_path(cache, the_entry(cache).name)
    with filelock.FileLock(str(path)):
        assert cache_admin.prune(keep_current=False) == []
    assert len(cache_admin.prune(keep_current=False)) == 1
    assert names() == []


# Pack and unpack


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.xz"])
def test_pack_and_unpack(cache, tmp_path, monkeypatch, suffix):
    load(1)
    load(2, name="toy-z")
    packed = tmp_path / f"cache.{suffix}"
    assert cache_admin.pack(packed)["entries"] == 2
    other = tmp_path / "other"
    monkeypatch.setenv("MOE_EP_JIT_CACHE", str(other))
    said = cache_admin.unpack(packed)
    assert len(said["added"]) == 2
    assert said["present"] == said["foreign"] == []
    jit.forget()
    assert load(1)(0) == 1
    assert compiles(cache) == 2
    assert len(cache_admin.unpack(packed)["present"]) == 2
    replace(the_entry_named(other, NAME) / "kernel.o", b"")
    assert len(cache_admin.unpack(packed)["added"]) == 1
    assert all(row["ok"] for row in cache_admin.verify())


def test_pack_of_nothing(cache, tmp_path):
    with pytest.raises(RuntimeError, match="precompile"):
        cache_admin.pack(tmp_path / "cache.tar")
    assert not (tmp_path / "cache.tar").exists()


def test_pack_names_the_path_that_was_given(cache, tmp_path):
    load()
    missing = tmp_path / "no" / "p.tar"
    with pytest.raises(RuntimeError, match=f"^{missing}: .*run: mkdir -p {missing.parent}$"):
        cache_admin.pack(missing)
    with pytest.raises(RuntimeError, match=f"^{tmp_path}: .*got a folder"):
        cache_admin.pack(tmp_path)


def test_pack_on_a_full_disk(cache, tmp_path, monkeypatch):
    load()

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "addfile", no_space)
    with pytest.raises(RuntimeError, match=f"^{tmp_path / 'p.tar'}: .*No space left"):
        cache_admin.pack(tmp_path / "p.tar")
    assert [path.name for path in tmp_path.iterdir() if "tar" in path.name] == []


def test_unpack_takes_nothing_foreign(cache, tmp_path, monkeypatch):
    load()
    cache_admin.pack(tmp_path / "cache.tar")
    monkeypatch.setenv("MOE_EP_JIT_CACHE", str(tmp_path / "other"))
    here = cache_key.host_facts()
    monkeypatch.setattr(cache_key, "host_facts", lambda: {**here, "cpu_flags": "sse2"})
    said = cache_admin.unpack(tmp_path / "cache.tar")
    assert len(said["foreign"]) == 1
    assert said["added"] == []
    assert names() == []


@pytest.mark.parametrize("part", ["sm_90a", NAME, "entry", "kernel.so"])
def test_unpack_says_what_loading_will_refuse(cache, tmp_path, capsys, part):
    load()
    packed = str(tmp_path / "cache.tar")
    cache_admin.pack(packed)
    entry = the_entry(cache)
    path = {"sm_90a": cache / part, NAME: entry.parent, "entry": entry}.get(part, entry / part)
    path.chmod(0o777)
    said = cache_admin.unpack(packed)
    assert (len(said["untrusted"]), said["added"], said["present"]) == (1, [], [])
    assert cli.main(["cache", "unpack", packed]) == 1
    assert "loading refuses them; run: moe-ep-jit cache verify" in capsys.readouterr().out


def test_unpack_replaces_a_link_to_nothing(cache, tmp_path):
    load()
    cache_admin.pack(tmp_path / "cache.tar")
    entry = the_entry(cache)
    shutil.rmtree(entry)
    entry.symlink_to(cache / "nowhere")
    assert len(cache_admin.unpack(tmp_path / "cache.tar")["added"]) == 1
    assert cache_admin.verify()[0]["ok"]


def rewrite(path: Path, change) -> None:
    """Pass every member's (info, content) through ``change``, which returns a list of such."""
    with tarfile.open(path) as archive:
        members = [(m, archive.extractfile(m).read()) for m in archive]
    with tarfile.open(path, "w") as archive:
        for number, member in enumerate(members):
            for info, content in change(number, *member):
                if content is not None:
                    info.size = len(content)
                archive.addfile(info, io.BytesIO(content or b""))


def _named(name):
    def change(number, info, content):
        if number == 0:
            info.name = name
        return [(info, content)]

    return change


def _linked(number, info, content):
    if number == 0:
        info.type, info.linkname, content = tarfile.SYMTYPE, "/etc/passwd", b""
    return [(info, content)]


def _flipped(number, info, content):
    if info.name.endswith("kernel.so"):
        content = content[:-1] + bytes([content[-1] ^ 1])
    return [(info, content)]


def _twice(number, info, content):
    return [(info, content)] * (2 if number == 0 else 1)


def _without_key(number, info, content):
    return [] if info.name.endswith("key.json") else [(info, content)]


def _renamed_entry(number, info, content):
    parts = info.name.split("/")
    info.name = "/".join((*parts[:2], "0" * 20, parts[3]))
    return [(info, content)]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_named("../../evil"), id="parent"),
        pytest.param(_named("/sm_90a/a/b/kernel.o"), id="absolute"),
        pytest.param(_named("sm_90a/../../kernel.o"), id="climbing"),
        pytest.param(_named("sm_90a/a/kernel.o"), id="shallow"),
        pytest.param(_named("sm_90a/a/b/c/kernel.o"), id="deep"),
        pytest.param(_named("sm_90a/a/b/evil.so"), id="other-file"),
        pytest.param(_named("sm_12/a/b/kernel.o"), id="other-arch"),
        pytest.param(_linked, id="link"),
        pytest.param(_flipped, id="digest"),
        pytest.param(_twice, id="twice"),
        pytest.param(_without_key, id="no-key"),
        pytest.param(_renamed_entry, id="fingerprint"),
    ],
)
def test_bad_archive_places_nothing(cache, tmp_path, monkeypatch, change):
    load(1)
    load(2, name="toy-z")
    packed = tmp_path / "cache.tar"
    cache_admin.pack(packed)
    rewrite(packed, change)
    other = tmp_path / "other"
    monkeypatch.setenv("MOE_EP_JIT_CACHE", str(other))
    with pytest.raises(ValueError, match=str(packed)):
        cache_admin.unpack(packed)
    assert not other.exists()


@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
@pytest.mark.parametrize("kept", [0.0, 0.2, 0.5, 0.8])
def test_cut_archive(cache, tmp_path, monkeypatch, suffix, kept):
    load()
    packed = tmp_path / f"cache.{suffix}"
    cache_admin.pack(packed)
    content = packed.read_bytes()
    # A plain tar's end is 10 KiB of zeros at most; its cuts fall on block borders, the worst case.
    end = len(content.rstrip(b"\0")) if suffix == "tar" else len(content)
    packed.write_bytes(content[: int(end * kept) // 512 * 512])
    monkeypatch.setenv("MOE_EP_JIT_CACHE", str(tmp_path / "other"))
    with pytest.raises(ValueError, match="pack it again"):
        cache_admin.unpack(packed)
    assert not (tmp_path / "other").exists()


# Precompile


def job(bias, **facts):
    return precompile.Job("toy", {"bias": bias, **facts}, "sm_90a", BUILD, f"toy-{bias}")


def test_precompile_fills_the_cache(cache, capfd):
    seen = []
    jobs = [job(1), job(2), job(1), job(3, trouble="print")]
    said = precompile.run(jobs, 2, lambda done, total, result: seen.append((done, total)))
    assert (said["compiled"], said["cached"], said["failed"]) == (3, 0, 0)
    assert said["workers"] == 2
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert [result["name"] for result in said["results"]] == ["toy-1", "toy-2", "toy-3"]
    assert compiles(cache) == 3
    assert "on first use" not in capfd.readouterr().err
    again = precompile.run([job(1)], num_workers=1)
    assert (again["compiled"], again["cached"]) == (0, 1)
    with jit.freeze():
        assert load(2, name="toy-2")(0) == 2


def test_precompile_goes_on_after_failures(cache):
    jobs = [job(1, trouble="raise"), job(2, trouble="die"), job(3), job(4)]
    said = precompile.run(jobs, num_workers=1)
    raised, died, *good = said["results"]
    assert (raised["status"], died["status"]) == ("failed", "failed")
    assert "tile does not fit" in raised["error"]
    assert "-9" in died["error"]
    assert [result["status"] for result in good] == ["compiled", "compiled"]
    assert (said["compiled"], said["failed"]) == (2, 2)


def test_precompile_from_a_daemonic_process(cache):
    def work():
        assert multiprocessing.current_process().daemon
        os._exit(precompile.run([job(1)])["compiled"])

    process = FORK.Process(target=work, daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == 1


def test_precompile_stops_when_progress_raises(cache):
    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        precompile.run([job(1), job(2), job(3)], 1, stop)
    assert compiles(cache) == 1


def test_precompile_without_a_folder(cache, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOE_EP_JIT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(RuntimeError, match="export MOE_EP_JIT_CACHE"):
        precompile.run([job(1)])
    with pytest.raises(ValueError, match="num_workers"):
        precompile.run([job(1)], 0)


def test_precompile_with_no_job(cache):
    assert precompile.run([])["results"] == []


def test_default_workers_follow_memory(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(precompile, "_free_bytes", lambda: 3 << 30)
    assert precompile.default_workers() == 6
    monkeypatch.setattr(precompile, "_free_bytes", lambda: 1)
    assert precompile.default_workers() == 1
    monkeypatch.setattr(precompile, "_free_bytes", lambda: None)
    assert precompile.default_workers() == 64
