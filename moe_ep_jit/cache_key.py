"""The key of a compiled object: every fact that decides its bytes, and no path, mtime or count."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from moe_ep_jit.problem import ARCHES, check

#: The exported function's name inside every object.
SYMBOL = "moe_ep_jit_entry"

#: Options of every compile; a build function also gets the arch and a folder for the dumps.
COMPILE_OPTIONS = "--enable-tvm-ffi --keep-ptx --keep-cubin"

#: Raised when the files of an entry, or the way they are linked, change.
ENTRY_VERSION = 1

#: The key's fields that tell one host CPU from another.
CPU_FIELDS = ("machine", "cpu_flags")

#: The key's fields that say "made by this version of the package, with these libraries".
VERSION_FIELDS = (
    "entry_version",
    "compile_options",
    "dsl_version",
    "tvm_ffi_version",
    "library_variant",
    "sources",
)

RUNTIME_LIBRARY = "libcute_dsl_runtime.so"

PACKAGE = Path(__file__).parent

_SHARED_SOURCES = ("formats.py", "problem.py", "layout.py")


def canonical(value: Any) -> str:
    """``value`` as JSON, one spelling for equal values. ``TypeError`` for what JSON cannot say."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"facts: expected JSON values (str, int, float, bool, None, list, dict), got {error};"
            " pass names and numbers, not objects"
        ) from error


def full_key(op: str, facts: dict[str, Any], arch: str, build: str) -> dict[str, Any]:
    """The whole key of one object, as it is written to key.json."""
    check(arch in ARCHES, f"arch: expected one of {sorted(ARCHES)}, got {arch!r}")
    key = {"op": op, "facts": facts, "arch": arch, "build": build}
    key |= host_facts()
    key |= version_facts(arch, build)
    return json.loads(canonical(key))


def fingerprint(key: dict[str, Any]) -> str:
    """20 hex digits that name the key's folder."""
    return hashlib.sha256(canonical(key).encode()).hexdigest()[:20]


def version_facts(arch: str, build: str) -> dict[str, Any]:
    """The ``VERSION_FIELDS`` of an object that this process would build now."""
    return {
        "entry_version": ENTRY_VERSION,
        "compile_options": COMPILE_OPTIONS,
        "dsl_version": installed_version("nvidia-cutlass-dsl"),
        "tvm_ffi_version": installed_version("apache-tvm-ffi"),
        "library_variant": runtime_library().parent.parent.name,
        "sources": source_fingerprint(arch, build),
    }


@lru_cache(maxsize=1)
def host_facts() -> dict[str, str]:
    """The host part: an object holds host code for the very CPU that built it."""
    flags = ""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        cpuinfo = ""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            flags = " ".join(sorted(set(value.split())))
            break
    return {"machine": platform.machine(), "cpu_flags": flags}


@lru_cache(maxsize=8)
def installed_version(distribution: str) -> str:
    """Its version, without importing it. ``RuntimeError`` with the command where it is missing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError(
            f"{distribution} is not installed; run: pip install {distribution}"
        ) from None


@lru_cache(maxsize=1)
def runtime_library() -> Path:
    """The DSL's runtime library that an object needs at load time, found without importing the DSL.

    Wheels for CUDA 12 and 13 can be installed side by side. The DSL then takes the newest one that
    the driver can run, and the newest of all where there is no driver; so does this function.
    """
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    found: dict[int, Path] = {}
    for root in roots:
        for library in root.glob(f"cu*/lib/{RUNTIME_LIBRARY}"):
            match = re.fullmatch(r"cu(\d+)", library.parent.parent.name)
            if match:
                found[int(match[1])] = library
    if not found:
        raise RuntimeError(
            f"{RUNTIME_LIBRARY} is in none of {[str(root) for root in roots]};"
            " run: pip install --force-reinstall nvidia-cutlass-dsl"
        )
    driver = _driver_major() if len(found) > 1 else None
    fitting = [major for major in found if driver is None or major <= driver]
    if not fitting:
        raise RuntimeError(
            f"nvidia-cutlass-dsl is installed for CUDA {sorted(found)}, the driver runs up to"
            f" CUDA {driver}; update the driver or run: pip install nvidia-cutlass-dsl"
        )
    return found[max(fitting)]


def _driver_major() -> int | None:
    """The CUDA major version of the driver, asked without making a context; None without one."""
    try:
        version = ctypes.c_int(0)
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value // 1000


def source_fingerprint(arch: str, build: str) -> str:
    """Digest of the source bytes that an object of ``arch`` is made from: its arch's folder,
    ``common``, the shared host files, and ``build``'s own file where it lies elsewhere."""
    digest = hashlib.sha256()
    for name, path in _source_files(arch, build):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _source_files(arch: str, build: str) -> list[tuple[str, Path]]:
    """(name in the digest, file), sorted by name: no absolute path enters the digest."""
    kernels = kernels_folder()
    files = {f"moe_ep_jit/{name}": PACKAGE / name for name in _SHARED_SOURCES}
    for folder in (ARCHES[arch], "common"):
        for path in (kernels / folder).rglob("*.py"):
            files[f"kernels/{path.relative_to(kernels).as_posix()}"] = path
    module = build.partition(":")[0]
    if not module.startswith("moe_ep_jit."):
        spec = importlib.util.find_spec(module)
        check(
            spec is not None and spec.origin is not None,
            f"build: expected an importable 'module:function', got {build!r}",
        )
        files[f"build/{module}"] = Path(spec.origin)
    return sorted((name, path) for name, path in files.items() if path.is_file())


def kernels_folder() -> Path:
    """Where the device code lies, installed or in a checkout, found without importing it."""
    spec = importlib.util.find_spec("moe_ep_jit.kernels")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        return Path(location)
    raise RuntimeError("moe_ep_jit.kernels is not installed; run: pip install -e . in the checkout")


def difference(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Names of the fields in which two keys differ."""
    return sorted(f for f in found.keys() | wanted.keys() if found.get(f) != wanted.get(f))


def other_cpu(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Why ``found`` is of another CPU, in words, if that is the only difference; else ``""``."""
    differs = difference(found, wanted)
    if not differs or not set(differs) <= set(CPU_FIELDS):
        return ""
    if found.get("machine") != wanted["machine"]:
        return f"built for {found.get('machine')}, this is {wanted['machine']}"
    theirs = set(str(found.get("cpu_flags")).split())
    ours = set(wanted["cpu_flags"].split())
    more, less = sorted(theirs - ours)[:6], sorted(ours - theirs)[:6]
    return f"built for another CPU (it has {more or 'nothing'} more, {less or 'nothing'} less)"
