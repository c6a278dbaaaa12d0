"""Compiled objects: memory -> disk -> compile under a lock -> rename whole. Knows no MoE.

What an entry on disk is made of: ``entries``. What its key says: ``cache_key``.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from moe_ep_jit import cache_key, entries
from moe_ep_jit.cache_key import SYMBOL, canonical
from moe_ep_jit.cubin import kernel_resources
from moe_ep_jit.entries import (
    KEY,
    LAUNCH,
    LIBRARY,
    LOCKS,
    OBJECT,
    PTX,
    TEMPORARY,
    BrokenEntryError,
    Entry,
)
from moe_ep_jit.problem import check

logger = logging.getLogger("moe_ep_jit")

_FIRST_COMPILE = (
    "compiling kernels on first use (seconds each); `moe-ep-jit precompile` does it ahead of time"
)

_memory: dict[tuple[str, str, str, str], Callable] = {}
_counts = {"compiles": 0, "disk_hits": 0, "memory_hits": 0}
_frozen = 0
_warned: set[str] = set()
# One thread at a time: cute.compile is not thread-safe.
_lock = threading.RLock()


def _new_lock() -> None:
    """A child forked while another thread held the lock would wait for that thread for ever."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)


def load(
    op: str,
    facts: dict[str, Any],
    *,
    arch: str,
    build: str,
    name: str,
    compile: bool = True,
    announce: bool = True,
) -> Callable:
    """The compiled function of ``op`` for these facts; it takes ints, floats and a stream handle.

    op        what is built, e.g. "moe"
    facts     JSON values that decide the object
    arch      exact target, e.g. "sm_90a"
    build     "module:function", imported on a miss only and called as ``function(facts)``, or
              ``function(facts, options)`` if it takes two: ``options`` is what ``cute.compile``
              needs (TVM-FFI, arch, PTX and cubin kept in a temporary folder). Returns an object
              with ``export_to_c(path, function_name=...)`` and ``artifacts.PTX/CUBIN``; its
              ``moe_launch`` dict, if any, is added to launch.json (``dynamic_shared_bytes`` is
              what `cache list` shows).
    name      readable folder name, e.g. "nvfp4-h7168-i2048-e32-n64"
    compile   False: a missing object is a ``RuntimeError`` that names it, as in ``freeze()``
    announce  the process's first compile is a warning, since it takes seconds where a call takes
              microseconds; False: the caller shows what is compiled by itself

    ``TypeError`` for facts that JSON cannot say, ``ValueError`` for an unknown arch or a bad name,
    ``RuntimeError`` for a cache folder that others can write, a lock held too long, a missing
    library; whatever ``build`` raises passes through and leaves no entry behind.
    """
    memory_key = (op, arch, build, canonical(facts))
    function = _memory.get(memory_key)
    if function is not None:
        _counts["memory_hits"] += 1
        return function
    check(
        re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,199}", name) is not None,
        f"name: expected letters, digits and . _ + = - (at most 200), got {name!r}",
    )
    with _lock:
        function = _memory.get(memory_key)
        if function is None:
            key = cache_key.full_key(op, facts, arch, build)
            entry = Entry(key, cache_key.fingerprint(key), name)
            function = _load_or_compile(entry, compile and not _frozen, announce)
            _memory[memory_key] = function
        else:
            _counts["memory_hits"] += 1
        return function


def entry_folder(op: str, facts: dict[str, Any], *, arch: str, build: str, name: str) -> Path:
    """Where an object that ``load`` has loaded lies on disk; RuntimeError where it does not."""
    key = cache_key.full_key(op, facts, arch, build)
    entry = Entry(key, cache_key.fingerprint(key), name)
    for cache in cache_dirs():
        if entry.folder(cache).is_dir():
            return entry.folder(cache)
    raise RuntimeError(
        f"{entry.title} is in no cache folder;"
        " run: export MOE_EP_JIT_CACHE=/a/writable/folder/of/your/own"
    )


@contextmanager
def freeze() -> Iterator[None]:
    """While inside, in every thread, ``load`` raises ``RuntimeError`` where it would compile."""
    global _frozen
    with _lock:
        _frozen += 1
    try:
        yield
    finally:
        with _lock:
            _frozen -= 1


def stats() -> dict[str, int]:
    """How many loads of this process compiled, came from disk, came from memory."""
    return dict(_counts)


def forget() -> None:
    """Empty the memory of loaded functions, so that the next ``load`` looks at the disk again."""
    with _lock:
        _memory.clear()


# Folders


def cache_dir() -> Path:
    """The user's own cache folder; it need not exist yet. ``RuntimeError`` where there is none."""
    return cache_dirs()[0]


def cache_dirs() -> list[Path]:
    """All cache folders: the user's own first, then layers that are only read.

    ``MOE_EP_JIT_CACHE`` lists them (``os.pathsep`` between). Without it: ``cache/`` of the checkout
    that the package runs from, if it can be written, else ``~/.cache/moe_ep_jit``, and then the
    checkout's as a layer.
    """
    named = [part for part in os.environ.get("MOE_EP_JIT_CACHE", "").split(os.pathsep) if part]
    if named:
        return [_named_folder(part) for part in named]
    checkout = cache_key.PACKAGE.parent
    layers = []
    if (checkout / "pyproject.toml").is_file():
        layers = [checkout / "cache"]
        if os.access(layers[0] if layers[0].exists() else checkout, os.W_OK | os.X_OK):
            return layers
    try:
        return [Path.home() / ".cache" / "moe_ep_jit", *layers]
    except RuntimeError:
        raise RuntimeError(
            "no home folder for the cache; run: export MOE_EP_JIT_CACHE=/a/folder/of/your/own"
        ) from None


def _named_folder(part: str) -> Path:
    try:
        return Path(part).expanduser().absolute()
    except RuntimeError:
        raise RuntimeError(
            f"MOE_EP_JIT_CACHE: expected a folder, got {part}, and there is no such home folder;"
            " run: export MOE_EP_JIT_CACHE=/a/folder/of/your/own"
        ) from None


def require_writable() -> Path:
    """The user's own cache folder, made if need be; ``RuntimeError`` where it cannot be written."""
    own = cache_dir()
    entries.check_is_folder(own)
    try:
        _open(own)
    except OSError as error:
        raise RuntimeError(
            f"cannot write the cache folder {own} ({error.strerror or error});"
            " run: export MOE_EP_JIT_CACHE=/a/writable/folder/of/your/own"
        ) from error
    return own


def _own_folder(fingerprint: str) -> Path | None:
    """The user's own folder, made, checked and able to take a lock; else None and one warning."""
    try:
        own = cache_dir()
        entries.check_is_folder(own)
    except RuntimeError as error:
        _warn_once(f"compiled kernels are kept in memory only: {error}")
        return None
    try:
        _open(own)
        entries.lock_path(own, fingerprint).touch(mode=0o600)
    except OSError as error:
        _warn_unwritable(own, error)
        return None
    return own


def _open(own: Path) -> None:
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    _tighten_checkout(own)
    entries.check_trusted(own)
    for part in (LOCKS, TEMPORARY):
        (own / part).mkdir(mode=0o700, exist_ok=True)
        if not os.access(own / part, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "not writable", str(own / part))


def _tighten_checkout(own: Path) -> None:
    """A clone under umask 002 leaves its cache/ writable by the group, which nobody asked for."""
    if os.environ.get("MOE_EP_JIT_CACHE") or own != cache_key.PACKAGE.parent / "cache":
        return
    info = own.stat()
    if info.st_uid == os.geteuid() and info.st_mode & 0o022 == 0o020:
        own.chmod(info.st_mode & 0o7755)


def _warn_unwritable(own: Path, error: OSError) -> None:
    _warn_once(
        f"cannot write the cache folder {own} ({error.strerror or error}); compiled kernels are"
        " kept in memory only, so that every process compiles anew."
        " To keep them: export MOE_EP_JIT_CACHE=/a/writable/folder/of/your/own"
    )


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)


# Disk


def _load_or_compile(entry: Entry, may_compile: bool, announce: bool) -> Callable:
    function, why = _from_layers(entry)
    if function is not None:
        return function
    if not may_compile:
        raise RuntimeError(
            f"{entry.title}, fingerprint {entry.fingerprint}, is not in the cache"
            f"{f' ({why})' if why else ''} and compiling is switched off here;"
            f" run: moe-ep-jit precompile --arch {entry.key['arch']}"
        )
    if why:
        logger.info("%s: %s; compiling", entry.title, why)
    own = _own_folder(entry.fingerprint)
    if own is None:
        return _load_once(entry, _build(entry, announce))
    with entries.lock(own, entry.fingerprint, entry.title):
        return _compile_into(own, entry, announce)


def _from_layers(entry: Entry) -> tuple[Callable | None, str]:
    """(function, "") from the first folder that has it, else (None, why it was not taken)."""
    why = ""
    try:
        folders = cache_dirs()
    except RuntimeError:
        folders = []
    for index, cache in enumerate(folders):
        try:
            function = _read(cache, entry)
        except BrokenEntryError as error:
            why = str(error)
            if index:
                _warn_once(f"{why}; the layer is only read, so that the entry stays as it is")
            continue
        if function is not None:
            _counts["disk_hits"] += 1
            # Last use decides what `cache prune` drops first; another user's entry stays as it is.
            with suppress(OSError):
                os.utime(entry.folder(cache))
            return function, ""
        why = why or _other_cpu(cache, entry)
    return None, why


def _other_cpu(cache: Path, entry: Entry) -> str:
    """If the same object is there for another CPU: which and how it differs."""
    for folder in entry.folder(cache).parent.glob("*"):
        try:
            why = cache_key.other_cpu(json.loads((folder / KEY).read_text()), entry.key)
        except (OSError, ValueError, AttributeError):
            continue
        if why:
            return f"{folder} was {why}"
    return ""


def _read(cache: Path, entry: Entry) -> Callable | None:
    """The function of a good entry, None where there is none, else ``BrokenEntryError``."""
    folder = entry.folder(cache)
    if not os.path.lexists(folder):
        return None
    try:
        entries.check_trusted(cache)
        entries.check_trusted_entry(folder)
    except FileNotFoundError:
        if not folder.is_symlink():
            return None  # set aside by another process just now
        raise BrokenEntryError(f"{folder} is a link to nothing") from None
    except OSError as error:
        raise BrokenEntryError(f"{folder}: unreadable ({error})") from error
    launch = entries.verified(folder, (OBJECT, LIBRARY), entry.key)
    _preload_runtime()
    try:
        return _function(folder, LIBRARY in launch["files"])
    except (OSError, AttributeError, RuntimeError, ValueError) as error:
        raise BrokenEntryError(f"{folder} does not load: {error}") from error


def _preload_runtime() -> None:
    """The DSL's runtime, by path: objects carry only its name, so that no path is baked in."""
    library = cache_key.runtime_library()
    try:
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise RuntimeError(
            f"{library} does not load: {error};"
            " run: pip install --force-reinstall nvidia-cutlass-dsl"
        ) from error


def _function(folder: Path, linked: bool) -> Callable:
    """Load the object. The module stays for the life of the process: functions may outlive all."""
    if linked:
        import tvm_ffi

        try:
            return tvm_ffi.load_module(str(folder / LIBRARY))[SYMBOL]
        except (OSError, RuntimeError) as error:
            # On a file system mounted noexec, for one, the object can still be loaded.
            _warn_once(f"{folder / LIBRARY} does not load ({error}); loading {OBJECT} instead")
    from cutlass.cute.runtime import load_module

    return getattr(load_module(str(folder / OBJECT), enable_tvm_ffi=True), SYMBOL)


# Compiling


def _compile_into(own: Path, entry: Entry, announce: bool) -> Callable:
    """Under the key's lock: look again, set a broken entry aside, build, rename, load."""
    folder = entry.folder(own)
    try:
        function = _read(own, entry)
    except BrokenEntryError as error:
        logger.warning("%s; set aside and built again", error)
        try:
            entries.set_aside(own, folder)
        except OSError as denied:
            _warn_unwritable(own, denied)
            return _load_once(entry, _build(entry, announce))
        function = None
    if function is not None:
        _counts["disk_hits"] += 1
        return function
    for leftover in (own / TEMPORARY).glob(f"{entry.fingerprint}-*"):
        shutil.rmtree(leftover, ignore_errors=True)  # of a process that was killed
    files = _build(entry, announce)
    key = entry.key
    if cache_key.source_fingerprint(key["arch"], key["build"]) != key["sources"]:
        _warn_once("kernel sources changed while this process ran; what it compiled is not kept")
        return _load_once(entry, files)
    try:
        entries.store(own, folder, files)
    except OSError as error:
        _warn_unwritable(own, error)
        return _load_once(entry, files)
    try:
        function = _read(own, entry)
    except BrokenEntryError as error:
        raise RuntimeError(f"a fresh object cannot be used: {error}") from error
    if function is None:
        raise RuntimeError(f"{folder} vanished as soon as it was written; who else cleans {own}?")
    return function


def _load_once(entry: Entry, files: dict[str, bytes]) -> Callable:
    """Load from a private temporary folder that is gone afterwards."""
    _preload_runtime()
    try:
        with tempfile.TemporaryDirectory(prefix="moe_ep_jit-") as folder:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            return _function(Path(folder), LIBRARY in files)
    except OSError as error:
        raise RuntimeError(
            f"{entry.title}: compiled, but neither the cache nor the temporary folder"
            f" {_temporary_root()} can take it ({error}); free some space or set TMPDIR"
        ) from error


def _temporary_root() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:
        return os.environ.get("TMPDIR", "/tmp")


def _build(entry: Entry, announce: bool) -> dict[str, bytes]:
    """Compile, export and link: name -> content of every file of the entry."""
    if announce:
        _warn_once(_FIRST_COMPILE)
    module, _, function = entry.key["build"].partition(":")
    build = getattr(import_module(module), function)
    started = time.perf_counter()
    try:
        dumps = tempfile.TemporaryDirectory(prefix="moe_ep_jit-", ignore_cleanup_errors=True)
    except OSError as error:
        raise RuntimeError(
            f"{entry.title}: no temporary folder to compile in ({error}); free some space or set"
            " TMPDIR"
        ) from error
    with dumps as work:
        options = f"{cache_key.COMPILE_OPTIONS} --gpu-arch={entry.key['arch']} --dump-dir='{work}'"
        arguments = (entry.key["facts"], options)[: len(signature(build).parameters)]
        with _dsl_arch(entry.key["arch"]):
            compiled = build(*arguments)
            compiled.export_to_c(os.path.join(work, OBJECT), function_name=SYMBOL)
        ptx, cubin = compiled.artifacts.PTX or "", compiled.artifacts.CUBIN
        _counts["compiles"] += 1
        files = {
            OBJECT: (Path(work) / OBJECT).read_bytes(),
            PTX: ptx.encode() if isinstance(ptx, str) else ptx,
            KEY: json.dumps(entry.key, indent=1, sort_keys=True).encode(),
        }
        library = _link(Path(work))
        if library is not None:
            files[LIBRARY] = library
    seconds = time.perf_counter() - started
    launch = _launch_facts(entry, files, cubin, seconds, getattr(compiled, "moe_launch", None))
    files[LAUNCH] = json.dumps(launch, indent=1, sort_keys=True).encode()
    logger.info("compiled %s in %.1f s", entry.title, seconds)
    return files


@contextmanager
def _dsl_arch(arch: str) -> Iterator[None]:
    """The DSL takes its arch from the GPU, if there is one, or from this variable."""
    before = os.environ.get("CUTE_DSL_ARCH")
    os.environ["CUTE_DSL_ARCH"] = arch
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUTE_DSL_ARCH"]
        else:
            os.environ["CUTE_DSL_ARCH"] = before


def _link(work: Path) -> bytes | None:
    """kernel.o as a shared library, or None where there is no compiler that can make one."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        logger.info("no C compiler: kernels load through the DSL, which takes a second at start")
        return None
    command = [compiler, "-shared", "-nostdlib", "-o", LIBRARY, OBJECT]
    # Every object defines the same names: each must find its own first. The runtime is needed by
    # name only, and `now` shows a missing symbol when loading rather than at a launch.
    command += ["-Wl,--as-needed", str(cache_key.runtime_library())]
    command += ["-Wl,-Bsymbolic", "-Wl,-z,now", "-Wl,-z,noexecstack"]
    try:
        subprocess.run(command, cwd=work, check=True, capture_output=True, timeout=120)
        return (work / LIBRARY).read_bytes()
    except subprocess.CalledProcessError as error:
        logger.warning("%s failed: %s", compiler, error.stderr.decode(errors="replace")[:500])
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("%s failed: %s", compiler, error)
    return None


def _launch_facts(
    entry: Entry,
    files: dict[str, bytes],
    cubin: bytes | None,
    seconds: float,
    extra: dict[str, Any] | None,
) -> dict[str, Any]:
    kernels = []
    if cubin:
        try:
            kernels = kernel_resources(cubin)
        except ValueError as error:
            logger.warning("%s: no resource figures: %s", entry.title, error)
    return {
        **(extra or {}),
        "kernels": kernels,
        "registers": max((k["registers"] for k in kernels), default=0),
        "static_shared_bytes": max((k["static_shared_bytes"] for k in kernels), default=0),
        "stack_bytes": max((k["stack_bytes"] for k in kernels), default=0),
        "compile_s": round(seconds, 3),
        "dsl_version": entry.key["dsl_version"],
        "files": {
            name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in files.items()
        },
    }
