"""Care of the cache folders: list, verify, prune, pack, unpack. Loading is the work of ``jit``."""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from moe_ep_jit import cache_key, entries, jit, tuned
from moe_ep_jit.entries import (
    BROKEN,
    KEY,
    LAUNCH,
    LIBRARY,
    OBJECT,
    PTX,
    TEMPORARY,
    BrokenEntryError,
)
from moe_ep_jit.problem import ARCHES, check

_FILES = (OBJECT, LIBRARY, PTX, KEY, LAUNCH)

#: No file of an entry comes near this; an archive that claims more is refused before it is read.
_MAX_FILE_BYTES = 256 << 20

#: A temporary folder older than this was left by a process that is gone.
_ABANDONED_S = 3600.0


def list_entries() -> list[dict[str, Any]]:
    """One dict per entry of every cache folder, in the order folder, arch, name (n8 before n16),
    fingerprint:

    arch, op, name (readable: the shape), facts, fingerprint, path, layer (0: the user's own),
    bytes, compile_s, registers (most of its kernels, per thread), shared_bytes (static plus
    dynamic, most of its kernels, per CTA), spill_bytes (local memory per thread, where spills go),
    kernels (one dict each), used (seconds since the epoch), usable (this process would load it),
    state ("usable", "stale": other sources or versions, "other_cpu", "broken", "untrusted": others
    can write it), reason (in words, with the command where there is one).
    """
    current: dict[tuple[str, str], dict[str, Any]] = {}
    return [_describe(layer, folder, current) for layer, folder in _folders()]


def _folders() -> Iterator[tuple[int, Path]]:
    """(layer, entry folder) of every entry. A cache folder that others can write is refused."""
    for layer, cache in enumerate(jit.cache_dirs()):
        entries.check_is_folder(cache)
        if cache.is_dir():
            entries.check_trusted(cache)
            yield from ((layer, folder) for folder in entries.in_cache(cache))


def _describe(layer: int, folder: Path, current: dict) -> dict[str, Any]:
    row: dict[str, Any] = {
        "arch": folder.parent.parent.name,
        "op": "",
        "name": folder.parent.name,
        "facts": {},
        "fingerprint": folder.name,
        "path": str(folder),
        "layer": layer,
        "bytes": _size(folder),
        "compile_s": 0.0,
        "registers": 0,
        "shared_bytes": 0,
        "spill_bytes": 0,
        "kernels": [],
        "used": 0.0,
    }
    try:
        row["used"] = folder.stat().st_mtime
        key = json.loads((folder / KEY).read_text())
        row |= {"op": key["op"], "facts": key["facts"]}
        launch = entries.verified(folder, (OBJECT, LIBRARY), None)
        row |= {
            "compile_s": launch["compile_s"],
            "registers": launch["registers"],
            "shared_bytes": _shared_bytes(launch),
            "spill_bytes": launch["stack_bytes"],
            "kernels": launch["kernels"],
        }
        state, reason = _trust(folder) or _state(key, current)
    except BrokenEntryError as error:
        state, reason = "broken", str(error)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        state, reason = "broken", f"unreadable ({error!r})"
    return row | {"usable": state == "usable", "state": state, "reason": reason}


def _trust(folder: Path) -> tuple[str, str] | None:
    """("untrusted", the command that helps) where loading would refuse the entry."""
    try:
        entries.check_trusted_entry(folder)
    except RuntimeError as error:
        return "untrusted", str(error)
    return None


def _state(key: dict[str, Any], current: dict[tuple[str, str], dict[str, Any]]) -> tuple[str, str]:
    """(state, why not usable); ``current`` keeps what each (arch, build) is made from now."""
    made_of = (key["arch"], key["build"])
    if made_of not in current:
        try:
            current[made_of] = cache_key.version_facts(*made_of)
        except (ValueError, KeyError, ImportError):
            return "stale", f"its build function {key['build']} is not installed"
    differs = [field for field, value in current[made_of].items() if key.get(field) != value]
    if differs:
        return "stale", f"made with other {', '.join(differs)}"
    why = cache_key.other_cpu(key, key | cache_key.host_facts())
    return ("other_cpu", why) if why else ("usable", "")


def _shared_bytes(launch: dict[str, Any]) -> int:
    """Most shared memory of one CTA: ``dynamic_shared_bytes`` is one number, or one per kernel."""
    dynamic = launch.get("dynamic_shared_bytes", 0)
    if not isinstance(dynamic, dict):
        return launch["static_shared_bytes"] + dynamic
    static = {kernel["name"]: kernel["static_shared_bytes"] for kernel in launch["kernels"]}
    # The DSL mangles a kernel's name: a part of it is enough.
    return max(
        (
            size + max((b for name, b in static.items() if part in name), default=0)
            for part, size in dynamic.items()
        ),
        default=launch["static_shared_bytes"],
    )


def _size(folder: Path) -> int:
    """Bytes of a folder's files, or of a file in its place."""
    total = 0
    for path in (folder,) if folder.is_file() else folder.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_size
    return total


def verify() -> list[dict[str, Any]]:
    """Check every file of every entry against its digest: one dict each, ``path`` (str), ``ok``
    (bool), ``reason`` (str). Nothing is changed: the next load sets a broken entry aside."""
    result = []
    for _, folder in _folders():
        reason = ""
        try:
            entries.check_trusted_entry(folder)
            entries.verified(folder, _FILES, None)
        except (BrokenEntryError, RuntimeError, OSError) as error:
            reason = str(error)
        result.append({"path": str(folder), "ok": not reason, "reason": reason})
    return result


def prune(
    *,
    older_than: float | None = None,
    max_bytes: int | None = None,
    keep_current: bool = True,
    dry_run: bool = False,
) -> list[dict[str, Any]]:
    """Remove entries of the user's own folder and say which: ``path``, ``bytes``, ``reason``.

    What goes without asking: entries set aside as broken, and leftovers of killed processes. Then,
    least recently used first, entries that are broken or were made from other sources or versions
    than the installed ones; with ``keep_current=False`` also those in use now.
    older_than  only entries that were not used for this many seconds
    max_bytes   only until the folder's entries together fit
    dry_run     say what would go and leave it
    An entry that another process is compiling or replacing stays.
    """
    check(older_than is None or older_than >= 0, f"older_than: expected >= 0 s, got {older_than}")
    check(max_bytes is None or max_bytes >= 0, f"max_bytes: expected >= 0, got {max_bytes}")
    own = jit.cache_dir()
    removed = _leftovers(own, dry_run)
    rows = sorted((r for r in list_entries() if r["layer"] == 0), key=lambda row: row["used"])
    total = sum(row["bytes"] for row in rows)
    now = time.time()
    for row in rows:
        # An entry for another CPU is current: several machines may share the folder.
        stale = row["reason"] if row["state"] in ("stale", "broken") else ""
        if keep_current and not stale:
            continue
        if older_than is not None and now - row["used"] < older_than:
            continue
        if max_bytes is not None and total <= max_bytes:
            break
        if not dry_run and not _remove(own, Path(row["path"])):
            continue
        total -= row["bytes"]
        reason = stale or "asked for"
        removed.append({"path": row["path"], "bytes": row["bytes"], "reason": reason})
    return removed


def _leftovers(own: Path, dry_run: bool) -> list[dict[str, Any]]:
    found = [(path, "set aside as broken") for path in (own / BROKEN).glob("*")]
    for path in (own / TEMPORARY).glob("*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                found.append((path, "left by a process that is gone"))
    rows = [{"path": str(p), "bytes": _size(p), "reason": reason} for p, reason in found]
    if not dry_run:
        for path, _ in found:
            entries.delete(path)
    return rows


def _remove(own: Path, folder: Path) -> bool:
    """Remove one entry under its lock, by a rename first; False where another process has it."""
    try:
        (own / entries.LOCKS).mkdir(mode=0o700, exist_ok=True)
        with entries.lock(own, folder.name, str(folder), timeout_s=1.0):
            entries.set_aside(own, folder)
    except (RuntimeError, FileNotFoundError):
        return False
    for path in (own / BROKEN).glob(f"{folder.name}-*"):
        entries.delete(path)
    with suppress(OSError):
        folder.parent.rmdir()
    return True


def pack(path: str | os.PathLike) -> dict[str, Any]:
    """Write every usable entry to the tar file ``path`` (.tar, .tar.gz, .tar.xz): ``path``,
    ``entries`` (count), ``bytes`` of the file. It serves machines with this CPU and these versions.
    What ``tune`` has found goes along, for machines with that GPU.
    ``RuntimeError`` if there is nothing to pack or no place for it; the file appears whole or not
    at all."""
    path = Path(path)
    if path.is_dir():
        raise RuntimeError(f"{path}: expected a file to write, got a folder; add a file name")
    if not path.parent.is_dir():
        raise RuntimeError(
            f"{path}: expected a file in a folder that exists; run: mkdir -p {path.parent}"
        )
    suffix = path.suffix.lstrip(".")
    mode = f"w:{suffix}" if suffix in ("gz", "xz", "bz2") else "w"
    chosen: dict[str, Path] = {}
    for row in list_entries():
        member = f"{row['arch']}/{row['name']}/{row['fingerprint']}"
        if row["usable"]:
            chosen.setdefault(member, Path(row["path"]))
    if not chosen:
        raise RuntimeError(
            f"no usable entry in {', '.join(map(str, jit.cache_dirs()))};"
            " run: moe-ep-jit precompile"
        )
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with tarfile.open(partial, mode) as archive:
            for member, folder in chosen.items():
                entries.verified(folder, _FILES, None)
                for name in _FILES:
                    if (folder / name).is_file():
                        _add(archive, f"{member}/{name}", (folder / name).read_bytes())
            for arch in ARCHES:
                if gpus := tuned.collect(arch):
                    _add(archive, f"{arch}/{tuned.FILE}", tuned.dump(gpus))
        partial.replace(path)
    except BrokenEntryError as error:
        raise RuntimeError(f"{error}; run: moe-ep-jit cache verify") from error
    except OSError as error:
        raise RuntimeError(
            f"{path}: could not be written ({error.strerror or error}); pass a path where this user"
            " may write and there is space"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return {"path": str(path), "entries": len(chosen), "bytes": path.stat().st_size}


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    """Without owner and time, so that equal entries give equal archives."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o600
    archive.addfile(info, io.BytesIO(content))


def unpack(path: str | os.PathLike) -> dict[str, Any]:
    """Put the entries of a packed cache into the user's own folder: ``added``, ``present`` (were
    there and good), ``foreign`` (for another CPU or version; not taken), ``untrusted`` (there now,
    but in a folder or a file that others can write, so that loading refuses them; ``verify`` has
    the command), ``tuned`` (layers with winners of ``tune`` that were not there), each a list of
    names.

    The whole archive is checked before the first entry is placed: names, sizes, kinds, the key
    against the folder's name, and every digest. ``ValueError`` for an archive that fails. Digests
    find damage, not malice: an archive holds native code, so take it only from where you trust.
    """
    contents, winners = _contents(Path(path))
    own = jit.require_writable()
    result: dict[str, Any] = {name: [] for name in ("added", "present", "foreign", "untrusted")}
    result["tuned"] = [
        f"{arch}/{gpu}/{layer}"
        for arch, gpus in winners.items()
        for gpu, layers in tuned.store(arch, gpus, replace=False).items()
        for layer in layers
    ]
    current: dict[tuple[str, str], dict[str, Any]] = {}
    for member, files in contents.items():
        state, _ = _state(json.loads(files[KEY]), current)
        if state != "usable":
            result["foreign"].append(member)
            continue
        placed = _place(own, member, files)
        result["untrusted" if _trust(own / member) else placed].append(member)
    return result


def _place(own: Path, member: str, files: dict[str, bytes]) -> str:
    """Store one entry unless it is there and whole: "added" or "present"."""
    folder = own / member
    with entries.lock(own, folder.name, member):
        if os.path.lexists(folder):
            try:
                entries.verified(folder, _FILES, None)
                return "present"
            except BrokenEntryError:
                entries.set_aside(own, folder)
        entries.store(own, folder, files)
    return "added"


def _contents(path: Path) -> tuple[dict[str, dict[str, bytes]], dict[str, tuned.Gpus]]:
    """(arch/name/fingerprint -> file name -> content, arch -> winners of ``tune``), all checked;
    ``ValueError`` otherwise."""
    found: dict[str, dict[str, bytes]] = {}
    winners: dict[str, tuned.Gpus] = {}
    try:
        with tarfile.open(path, "r:*") as archive:
            for info in archive:
                parts = PurePosixPath(info.name).parts
                check(_packable(info), f"{path}: {info.name!r} is no part of a packed cache")
                check(
                    info.size <= _MAX_FILE_BYTES,
                    f"{path}: {info.name}: expected at most {_MAX_FILE_BYTES} bytes,"
                    f" got {info.size}",
                )
                reader = archive.extractfile(info)
                content = reader.read() if reader else b""
                if parts[1:] == (tuned.FILE,):
                    winners[parts[0]] = _parsed_winners(path, info.name, content)
                    continue
                files = found.setdefault("/".join(parts[:3]), {})
                check(parts[3] not in files, f"{path}: {info.name} is there twice")
                files[parts[3]] = content
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ValueError(f"{path}: not a whole tar file ({error}); pack it again") from error
    check(bool(found), f"{path}: holds no entry; pack it again")
    for member, files in found.items():
        arch, _, fingerprint = member.split("/")
        try:
            launch = entries.verified_files(member, fingerprint, files.__getitem__, _FILES, None)
            named = {*launch["files"], LAUNCH}
            if set(files) != named or json.loads(files[KEY])["arch"] != arch:
                raise BrokenEntryError(f"{member}: expected the files {sorted(named)} of {arch}")
        except BrokenEntryError as error:
            raise ValueError(f"{path}: {error}; pack it again") from error
    return found, winners


def _packable(info: tarfile.TarInfo) -> bool:
    """Whether a member can be part of an entry, or what ``tune`` has found."""
    parts = PurePosixPath(info.name).parts
    if not info.isreg() or parts[:1] not in [(arch,) for arch in ARCHES]:
        return False
    if any(part.startswith((".", "/")) for part in parts):
        return False
    return parts[1:] == (tuned.FILE,) or (len(parts) == 4 and parts[3] in _FILES)


def _parsed_winners(path: Path, name: str, content: bytes) -> tuned.Gpus:
    try:
        return tuned.parse(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {name}: {error}; pack it again") from error
