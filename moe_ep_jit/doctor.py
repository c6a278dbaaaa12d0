"""``moe-ep-jit doctor``: what this machine has, what is wrong with it, and the fix for each.

Imports nothing heavy at the top: it has to work where torch or the DSL is missing or broken.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import sys
from collections import defaultdict
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

_DISTRIBUTION = "moe-ep-jit"
_DSL = "nvidia-cutlass-dsl"
_DSL_PARTS = tuple(f"{_DSL}-libs-{part}" for part in ("base", "core", "cu12", "cu13"))
_TORCH_FIX = "pip install 'torch>=2.9' (any build; a CUDA build to run on a GPU)"
_ELSEWHERE = "run: export MOE_EP_JIT_CACHE=/a/folder/of/your/own"
_DRIVER_FIX = "update the NVIDIA driver, or install packages built for its CUDA version"


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``problem`` and ``fix`` are empty where all is well."""

    name: str
    value: str
    problem: str = ""
    fix: str = ""


def examine() -> list[Finding]:
    """Everything worth knowing about this machine, in the order to read it."""
    dsl_version = _version(_DSL)
    driver = driver_version()
    return [
        _python(),
        *_torch(driver),
        _package(_DSL),
        *_dsl_parts(dsl_version, driver),
        _dsl_import(dsl_version),
        _package("apache-tvm-ffi"),
        _package("cuda-python"),
        _package("filelock"),
        Finding(
            "driver", _cuda(driver) if driver else "none (kernels compile, the reference runs)"
        ),
        *_arch(),
        _compiler(),
        *_cache(),
    ]


def driver_version() -> tuple[int, int] | None:
    """The newest CUDA version that the driver serves; None where there is no driver."""
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if libcuda.cuDriverGetVersion(ctypes.byref(version)) != 0 or version.value == 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def _python() -> Finding:
    good = (3, 10) <= sys.version_info[:2] <= (3, 13)
    return Finding(
        "python",
        f"{platform.python_version()} ({sys.executable}, {platform.machine()})",
        "" if good else "expected Python 3.10 to 3.13",
        "" if good else "make the environment with one of them",
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version in order; a local part ("+cpu") does not count."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0]))


def wanted_range(name: str, requires: list[str] | None = None) -> str:
    """What the package's metadata asks of ``name``, as in ">=4.8.1,<4.9"; "" for nothing."""
    if requires is None:
        try:
            requires = metadata.requires(_DISTRIBUTION) or []
        except metadata.PackageNotFoundError:
            return ""
    for line in requires:
        found = re.match(rf"{re.escape(name)}\s*([<>=!~][^;]*)?(;|$)", line)
        if found and "extra" not in line:
            return (found[1] or "").strip()
    return ""


def in_range(version: str, spec: str) -> bool:
    """Whether ``version`` satisfies every ">=", "<" and "==" of ``spec``."""
    have = _numbers(version)
    for bound in filter(None, (part.strip() for part in spec.split(","))):
        operator, number = re.match(r"([<>=!~]+)\s*(.*)", bound).groups()
        want = _numbers(number)
        if operator == ">=" and have < want or operator == "<" and have >= want:
            return False
        if operator == "==" and have != want:
            return False
    return True


def _package(name: str) -> Finding:
    version = _version(name)
    spec = wanted_range(name)
    fix = f"pip install '{name}{spec}'"
    if version is None:
        return Finding(name, "missing", f"{name} is not installed", fix)
    if not in_range(version, spec):
        return Finding(name, version, f"expected {name}{spec} (the tested range)", fix)
    return Finding(name, version)


def _torch(driver: tuple[int, int] | None) -> list[Finding]:
    try:
        import torch
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return [Finding("torch", "missing", "torch is not installed", _TORCH_FIX)]
        return [Finding("torch", "broken", f"import torch fails: {_first(error)}", _TORCH_FIX)]
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    value = f"{torch.__version__} ({build})"
    if not in_range(torch.__version__, ">=2.9"):
        return [Finding("torch", value, "expected torch 2.9 or newer", _TORCH_FIX)]
    if driver and not torch.version.cuda:
        problem = "the machine has an NVIDIA driver, but this torch cannot use it"
        return [Finding("torch", value, problem, "install a CUDA build of torch")]
    if driver and not torch.cuda.is_available():
        if _numbers(torch.version.cuda)[0] > driver[0]:
            problem = f"the driver serves CUDA {_cuda(driver)}, torch is built for a newer one"
            return [Finding("torch", value, problem, _DRIVER_FIX)]
        problem = "the machine has an NVIDIA driver, but torch sees no GPU"
        fix = "check nvidia-smi, CUDA_VISIBLE_DEVICES and the container's GPU options"
        return [Finding("torch", value, problem, fix)]
    return [Finding("torch", value)]


def _dsl_parts(version: str | None, driver: tuple[int, int] | None) -> list[Finding]:
    """The wheels that make up the DSL: one version, each file as its own wheel wrote it."""
    parts = {name: found for name in _DSL_PARTS if (found := _version(name))}
    if version is None and not parts:
        return []
    value = ", ".join(f"{name.rsplit('-', 1)[1]} {found}" for name, found in parts.items())
    reinstall = f"pip install --force-reinstall '{_DSL}=={version or next(iter(parts.values()))}'"
    problems = []
    odd = [f"{name} {found}" for name, found in parts.items() if found != version]
    if odd:
        problems.append(f"{', '.join(odd)} beside {_DSL} {version or '(missing)'}: mixed versions")
    flavors = [name.rsplit("-", 1)[1] for name in parts if name[-4:-2] == "cu"]
    if not flavors:
        problems.append("neither the cu12 nor the cu13 wheel is there")
    elif driver and all(int(flavor[2:]) > driver[0] for flavor in flavors):
        problems.append(f"the driver serves CUDA {_cuda(driver)}, older than every DSL wheel here")
        reinstall = f"update the NVIDIA driver, or {reinstall}"
    problems += overwritten_files([_DSL, *parts])
    fix = reinstall if problems else ""
    return [Finding("dsl wheels", value or "none", "; ".join(problems), fix)]


def overwritten_files(names: list[str]) -> list[str]:
    """Complaints about files of these distributions that are missing or another wheel's."""
    owners: dict[str, list[str]] = defaultdict(list)
    complaints = []
    for name in names:
        try:
            files = metadata.files(name) or []
        except metadata.PackageNotFoundError:
            continue
        damaged = []
        for file in files:
            if file.size is None:
                continue
            owners[str(file)].append(name)
            path = Path(file.locate())
            if not path.is_file() or path.stat().st_size != file.size:
                damaged.append(str(file))
        if damaged:
            complaints.append(
                f"{len(damaged)} files of {name} are missing or not its own ({damaged[0]})"
            )
    shared = [path for path, claims in owners.items() if len(claims) > 1]
    if shared:
        complaints.append(
            f"{' and '.join(owners[shared[0]])} both write {shared[0]}: the last one installed wins"
        )
    return complaints


def _dsl_import(version: str | None) -> Finding:
    fix = f"pip install --force-reinstall '{_DSL}{wanted_range(_DSL)}'"
    if version is None:
        return Finding("dsl import", "not tried")
    try:
        import cutlass.cute  # noqa: F401
    except Exception as error:
        return Finding("dsl import", "fails", f"import cutlass.cute fails: {_first(error)}", fix)
    return Finding("dsl import", "works")


def _arch() -> list[Finding]:
    """The GPUs and which kernels they get; MOE_EP_JIT_ARCH included."""
    from moe_ep_jit.problem import ARCHES

    known = ", ".join(ARCHES)
    override = os.environ.get("MOE_EP_JIT_ARCH")
    findings = []
    if override:
        good = override in ARCHES
        findings.append(
            Finding(
                "MOE_EP_JIT_ARCH",
                override,
                "" if good else f"expected one of {known}",
                "" if good else "unset MOE_EP_JIT_ARCH or set it to one of them",
            )
        )
    try:
        import torch

        from moe_ep_jit import variants

        for index in range(torch.cuda.device_count()):
            device = torch.device("cuda", index)
            arch = None if findings and findings[0].problem else variants.detect_arch(device)
            serves = f"no kernels (have {known}): backend='reference' only"
            if arch:
                serves = f"kernels for {arch}"
            memory = torch.cuda.get_device_properties(device).total_memory / 2**30
            value = f"{torch.cuda.get_device_name(device)}, {memory:.0f} GiB, {serves}"
            findings.append(Finding(f"gpu {index}", value))
    except Exception as error:
        if not isinstance(error, ModuleNotFoundError):
            findings.append(
                Finding("gpu", "unknown", f"torch.cuda fails: {_first(error)}", "check nvidia-smi")
            )
    if not any(finding.name.startswith("gpu") for finding in findings):
        findings.append(Finding("gpu", f"none; kernels can be compiled for {known}"))
    return findings


def _compiler() -> Finding:
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    return Finding("c compiler", found or "none (optional: cached objects load faster with one)")


def _cache() -> list[Finding]:
    """The cache folders: where, whose, who may write, how much is in them."""
    try:
        from moe_ep_jit import jit

        own, *layers = jit.cache_dirs()
    except Exception as error:
        return [Finding("cache", "unknown", _first(error), _ELSEWHERE)]
    said = folder_problem(own)
    findings = [Finding("cache", f"{own} ({_describe(own)})", *(said if said[0] else _trust(own)))]
    for layer in layers:
        findings.append(Finding("cache layer", f"{layer} ({_describe(layer)})", *_trust(layer)))
    return findings


def _trust(cache: Path) -> tuple[str, str]:
    """The first thing in a cache folder that loading would refuse, and the fix."""
    from moe_ep_jit import entries

    try:
        entries.check_is_folder(cache)
        if cache.is_dir():
            if not _is_own_clone(cache):
                entries.check_trusted(cache)
            for folder in entries.in_cache(cache):
                entries.check_trusted_entry(folder)
    except RuntimeError as error:
        return _problem_and_fix(error)
    except OSError as error:
        return _first(error), "run: moe-ep-jit cache verify"
    return "", ""


def _problem_and_fix(error: RuntimeError) -> tuple[str, str]:
    """The two halves of a message of ``entries``."""
    problem, _, fix = str(error).partition("; run: ")
    return problem, f"run: {fix}"


def _is_own_clone(cache: Path) -> bool:
    """A clone under umask 002 is the group's; the first use takes that away by itself."""
    from moe_ep_jit import cache_key

    return cache == cache_key.PACKAGE.parent / "cache" and cache.stat().st_mode & 0o022 == 0o020


def folder_problem(folder: Path) -> tuple[str, str]:
    """Why objects cannot be kept in ``folder`` or must not be loaded from it, and the fix."""
    from moe_ep_jit import entries

    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return f"{existing} is not a folder", _ELSEWHERE
    if folder.exists():
        try:
            entries.check_trusted(folder)
        except RuntimeError as error:
            if not _is_own_clone(folder):
                return _problem_and_fix(error)
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} is not writable: every process compiles anew", _ELSEWHERE
    return "", ""


def _describe(folder: Path) -> str:
    from moe_ep_jit import entries

    if not folder.exists():
        return "not made yet"
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    count = len(entries.in_cache(folder))
    mode, free = folder.stat().st_mode & 0o777, shutil.disk_usage(folder).free / 2**30
    return f"{mode:o}, {count} objects, {size / 2**20:.1f} MiB, {free:.0f} GiB free"


def _cuda(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _first(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def run(console: Any, as_json: bool) -> int:
    """Print the report on ``console`` (a rich Console); 1 when something is wrong, else 0."""
    findings = examine()
    problems = [finding for finding in findings if finding.problem]
    if as_json:
        rows = [vars(finding) for finding in findings]
        console.print_json(data={"ok": not problems, "findings": rows})
        return int(bool(problems))
    from rich.table import Table

    table = Table("", "what", "found", box=None)
    for finding in findings:
        mark = "[red]✗[/]" if finding.problem else "[green]✓[/]"
        table.add_row(mark, finding.name, finding.value)
    console.print(table)
    for finding in problems:
        console.print(f"\n[red]{finding.name}[/]: {finding.problem}", highlight=False)
        console.print(f"  fix: {finding.fix}", highlight=False)
    if not problems:
        console.print("Nothing is wrong.")
    return int(bool(problems))
