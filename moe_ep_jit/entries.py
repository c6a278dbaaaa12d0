"""The files of one compiled object on disk: names, checks, lock, writing whole.

An entry is a folder ``<cache>/<arch>/<name>/<fingerprint>/`` with

    kernel.o     host code that launches the cubin inside it, as the DSL exported it
    kernel.so    the same, linked where a C compiler is: loads in a millisecond without the DSL
    kernel.ptx   for reading
    key.json     the full key, compared field by field at load
    launch.json  registers, shared memory, stack, compile time; sizes and digests of the files

An arch's folder may hold ``tuned.json`` besides, which is no entry (``tuned``). Beside the arches
lie ``.locks`` (one file a key), ``.tmp`` (what is being written) and ``.broken`` (what was set
aside). Objects are native code, so whatever others can write is refused.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from moe_ep_jit import cache_key
from moe_ep_jit.problem import ARCHES

logger = logging.getLogger("moe_ep_jit")

#: The longest wait for another process that compiles the same key, in seconds.
LOCK_TIMEOUT_S = 600.0

OBJECT, LIBRARY, PTX, KEY, LAUNCH = "kernel.o", "kernel.so", "kernel.ptx", "key.json", "launch.json"
LOCKS, TEMPORARY, BROKEN = ".locks", ".tmp", ".broken"


class BrokenEntryError(Exception):
    """An entry that must not be used, with the reason."""


@dataclass(frozen=True)
class Entry:
    """One key and where its files belong inside any cache folder."""

    key: dict[str, Any]
    fingerprint: str
    name: str

    @property
    def title(self) -> str:
        return f"{self.key['op']} {self.name} ({self.key['arch']})"

    def folder(self, cache: Path) -> Path:
        return cache / self.key["arch"] / self.name / self.fingerprint


def check_trusted(path: Path) -> None:
    """``RuntimeError`` unless only the user, root or the package's owner can write ``path``."""
    info = path.stat()
    # Whoever owns the package's files decides already what runs here.
    if info.st_uid not in (os.geteuid(), 0, cache_key.PACKAGE.stat().st_uid):
        raise RuntimeError(
            f"{path} belongs to user {info.st_uid}, and what lies there would run as user"
            f" {os.geteuid()}; run: export MOE_EP_JIT_CACHE=/a/folder/of/your/own"
        )
    if info.st_mode & 0o022:
        raise RuntimeError(
            f"{path} holds native code and can be written by others"
            f" (mode {info.st_mode & 0o7777:04o}); run: chmod -R go-w {path}"
        )


def check_trusted_entry(folder: Path) -> None:
    """``check_trusted`` on an entry, what it lies in (name and arch) and each of its files."""
    for part in (folder.parent.parent, folder.parent, folder):
        check_trusted(part)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        with suppress(FileNotFoundError):  # a link to nothing: `verified` says so
            check_trusted(path)


def check_is_folder(cache: Path) -> None:
    """``RuntimeError`` where a cache folder should be and something else is."""
    if cache.exists() and not cache.is_dir():
        raise RuntimeError(
            f"{cache} is a file, expected the cache folder; run: export"
            " MOE_EP_JIT_CACHE=/a/folder/of/your/own (or remove the file)"
        )


def in_cache(cache: Path) -> list[Path]:
    """Every entry of a cache folder, by arch and name (n8 before n16), and what is in its place."""
    found = (path for arch in ARCHES for path in (cache / arch).glob("*/*"))
    return sorted(found, key=lambda path: [_natural(part) for part in path.parts[-3:]])


def _natural(text: str) -> list[str | int]:
    """A sort key that takes runs of digits as numbers."""
    return [int(p) if p.isdecimal() else p for p in re.split(r"([0-9]+)", text)]


def delete(path: Path) -> None:
    """Remove a folder, or the file that was in its place, as far as that is allowed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def verified(folder: Path, files: tuple[str, ...], wanted: dict[str, Any] | None) -> dict[str, Any]:
    """An entry's launch.json after ``verified_files`` on what lies in ``folder``."""
    return verified_files(
        str(folder), folder.name, lambda name: (folder / name).read_bytes(), files, wanted
    )


def verified_files(
    title: str,
    fingerprint: str,
    read: Callable[[str], bytes],
    files: tuple[str, ...],
    wanted: dict[str, Any] | None,
) -> dict[str, Any]:
    """launch.json, after a check of key.json (against ``wanted``, else against the fingerprint) and
    of the digests of those of ``files`` that it names; ``BrokenEntryError`` with the reason."""
    try:
        key, launch = json.loads(read(KEY)), json.loads(read(LAUNCH))
        if wanted is None and cache_key.fingerprint(key) != fingerprint:
            raise BrokenEntryError(f"{title}: {KEY} is of another entry")
        if wanted is not None and key != wanted:
            why = cache_key.other_cpu(key, wanted)
            why = why or f"{KEY} differs in {', '.join(cache_key.difference(key, wanted))}"
            raise BrokenEntryError(f"{title}: {why}")
        if OBJECT not in launch["files"]:
            raise BrokenEntryError(f"{title}: {LAUNCH} names no {OBJECT}")
        for name in files:
            if name not in launch["files"]:
                continue
            content, said = read(name), launch["files"][name]
            if len(content) != said["bytes"]:
                raise BrokenEntryError(
                    f"{title}: {name} has {len(content)} bytes, expected {said['bytes']}"
                )
            if hashlib.sha256(content).hexdigest() != said["sha256"]:
                raise BrokenEntryError(f"{title}: {name} has another digest than when written")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenEntryError(f"{title}: unreadable ({error!r})") from error
    return launch


def lock_path(own: Path, fingerprint: str) -> Path:
    return own / LOCKS / f"{fingerprint}.lock"


@contextmanager
def lock(own: Path, fingerprint: str, title: str, timeout_s: float | None = None) -> Iterator[None]:
    """The key's exclusive lock. The kernel frees it when its holder dies, by kill -9 too.

    ``RuntimeError`` with the lock's path after ``timeout_s`` (default ``LOCK_TIMEOUT_S``).
    """
    timeout_s = LOCK_TIMEOUT_S if timeout_s is None else timeout_s
    path = lock_path(own, fingerprint)
    exclusive = filelock.FileLock(str(path), mode=0o600)
    patience = min(5.0, timeout_s)
    try:
        try:
            exclusive.acquire(timeout=patience, poll_interval=0.02)
        except filelock.Timeout:
            logger.info("%s: waiting for the process that holds %s", title, path)
            exclusive.acquire(timeout=timeout_s - patience, poll_interval=0.1)
    except filelock.Timeout:
        raise RuntimeError(
            f"{title}: another process has held {path} for {timeout_s:.0f} s;"
            f" to see which, run: fuser -v {path}"
        ) from None
    except NotImplementedError:
        # Without flock the rename still keeps entries whole; two processes may compile the same.
        logger.warning("%s: no locks on this file system; processes may compile the same", own)
        yield
        return
    try:
        yield
    finally:
        exclusive.release()


# Writing: every change of an entry happens under its lock and by one rename


def store(own: Path, folder: Path, files: dict[str, bytes]) -> None:
    """Write ``files`` beside and rename them to ``folder`` at once. ``OSError`` leaves nothing."""
    work = own / TEMPORARY / f"{folder.name}-{os.getpid()}-{time.monotonic_ns()}"
    try:
        work.mkdir(mode=0o700)
        for name, content in files.items():
            _write(work / name, content)
        _sync_folder(work)
        for part in (folder.parent.parent, folder.parent):
            _make_folder(own, part)
        try:
            work.rename(folder)
        except OSError as error:
            # Only without locks: another process has stored the same meanwhile.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        _sync_folder(folder.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def replace_file(own: Path, path: Path, content: bytes) -> None:
    """Write ``content`` beside and rename it to ``path``, a file in an arch's folder, over what is
    there. ``OSError`` leaves that as it is."""
    work = own / TEMPORARY / f"{path.name}-{os.getpid()}-{time.monotonic_ns()}"
    try:
        _write(work, content)
        _make_folder(own, path.parent)
        work.replace(path)
        _sync_folder(path.parent)
    finally:
        work.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _make_folder(own: Path, folder: Path) -> None:
    """An arch's or a name's folder; what else is in its place is set aside."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        # Locked, so that nobody moves the folder that another process has made meanwhile.
        with lock(own, folder.name, str(folder)):
            if not folder.is_dir():
                logger.warning("%s: expected a folder, got something else; set aside", folder)
                set_aside(own, folder)
            folder.mkdir(mode=0o700, exist_ok=True)


def set_aside(own: Path, folder: Path) -> None:
    """Move a broken entry, or what is in its place, out of every reader's way; who has it open
    keeps its files."""
    (own / BROKEN).mkdir(mode=0o700, exist_ok=True)
    folder.rename(own / BROKEN / f"{folder.name}-{os.getpid()}-{time.monotonic_ns()}")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
