"""The dispatcher: which arch, which format and activations, and which rung of the ladder.

Formats are decided once, when weights are prepared; per call only the rung is chosen, on the host.
The arch is a folder under ``kernels/``; this file is the one place that turns one into the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from moe_ep_jit.problem import ACTS, ARCHES, Problem, check, check_problem

#: What a checkpoint may hold, by the names that ``choose_variant`` takes -> what it counts as.
SOURCES = {
    "mxfp8": "mxfp8",
    "fp8": "mxfp8",
    "nvfp4": "nvfp4",
    **dict.fromkeys(("float", "bf16", "fp16", "fp32", "fp64"), "float"),
    **dict.fromkeys(("bfloat16", "float16", "float32", "float64"), "float"),
}

#: CUDA compute capability -> exact arch, for the arches that have kernels.
_CAPABILITIES = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}

_NO_KERNELS = (
    'pass backend="reference" to run the PyTorch reference there, or use one of the GPUs that have '
    f"kernels ({', '.join(ARCHES)})"
)


#: Why an act is an arch's default.
_ACT_REASONS = {
    "mxfp8": "mxfp8 activations: the FP8 tensor cores take both sides",
    "bf16": "bf16 activations: 4-bit weights expand to 16 bits exactly, as accurate as any",
    "nvfp4": "nvfp4 activations: the tensor cores take 4-bit blocks on both sides or neither",
}


@dataclass(frozen=True)
class Variant:
    """What ``choose_variant`` decided.

    problem  with ``format`` and ``act`` resolved
    name     "<arch folder or reference>-<format>-<act>", as in "sm90-nvfp4-bf16"
    reason   why, in one line
    """

    problem: Problem
    name: str
    reason: str


def detect_arch(device: torch.device | str | None = None) -> str | None:
    """The exact arch whose kernels ``device`` runs ("sm_90a"); None where there are none (CPU).

    ``MOE_EP_JIT_ARCH`` overrides what a CUDA device says of itself; ValueError for an unknown one.
    """
    device = default_device() if device is None else torch.device(device)
    if device.type != "cuda":
        return None
    override = os.environ.get("MOE_EP_JIT_ARCH")
    if override:
        check_arch(override, "MOE_EP_JIT_ARCH")
        return override
    return _CAPABILITIES.get(torch.cuda.get_device_capability(device))


def default_device() -> torch.device:
    """The current CUDA device where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def usable_device(device: torch.device | str | None = None) -> torch.device:
    """``device`` with its index, None being ``default_device``.

    ValueError for what names no device; RuntimeError for CUDA where torch or the machine has none.
    """
    if device is None:
        return default_device()
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f'device: expected a torch.device or a name such as "cuda:0" or "cpu", got {device!r}'
        ) from error
    if device.type != "cuda":
        return device
    if torch.version.cuda is None or not torch.cuda.is_available():
        why = "torch finds no GPU" if torch.version.cuda else "this torch is built without CUDA"
        raise RuntimeError(
            f'device: expected one that torch can use, got "{device}", but {why}; run: moe-ep-jit '
            'doctor (or pass device="cpu" for the reference)'
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    count = torch.cuda.device_count()
    check(index < count, f"device: expected cuda:0 to cuda:{count - 1}, got {device}")
    return torch.device("cuda", index)


def check_arch(arch: str, name: str = "arch") -> None:
    """ValueError unless ``arch`` has kernels; the message lists those that do."""
    check(
        arch in ARCHES,
        f"{name}: expected one of {', '.join(ARCHES)} (exact, and with kernels), got {arch!r}",
    )


def resolve_backend(device: torch.device, backend: str = "auto") -> str | None:
    """The arch whose kernels serve ``device``, or None for the reference.

    backend  "auto": kernels on CUDA, the reference on the CPU; "reference": the reference anywhere;
             "emulator": on the CPU, the kernels of MOE_EP_JIT_ARCH, else of the first arch
    RuntimeError on a CUDA device whose arch has no kernels.
    """
    check(
        backend in ("auto", "reference", "emulator"),
        f'backend: expected "auto", "reference" or "emulator", got {backend!r}',
    )
    if backend == "emulator":
        check(
            device.type == "cpu",
            f'backend: expected CPU tensors for "emulator", got {device}; pass device="cpu"',
        )
        arch = os.environ.get("MOE_EP_JIT_ARCH", "").strip() or next(iter(ARCHES))
        check_arch(arch, "MOE_EP_JIT_ARCH")
        return arch
    if backend == "reference" or device.type == "cpu":
        return None
    arch = detect_arch(device) if device.type == "cuda" else None
    if arch is None:
        raise RuntimeError(f"{describe_device(device)}: no kernels for it; {_NO_KERNELS}")
    return arch


def describe_device(device: torch.device) -> str:
    """The device in words, for messages: "cuda:0 (NVIDIA H200, sm_90)"."""
    if device.type != "cuda":
        return str(device)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device} ({torch.cuda.get_device_name(device)}, sm_{major}{minor})"


def kernels_folder(arch: str) -> str:
    """The folder under ``kernels/`` that holds ``arch``'s code: "sm_90a" -> "sm90"."""
    check_arch(arch)
    return ARCHES[arch]


def kernels_module(arch: str, name: str) -> ModuleType:
    """Module ``name`` of the arch's folder, as in ``kernels_module("sm_90a", "config")``."""
    return import_module(f"moe_ep_jit.kernels.{kernels_folder(arch)}.{name}")


def acts(arch: str | None, fmt: str) -> tuple[str, ...]:
    """What the experts' activations may be for weights of ``fmt`` on ``arch``, its default first;
    for the reference (None) what any arch takes, Hopper's default first.
    """
    return ACTS[fmt] if arch is None else kernels_module(arch, "config").ACTS[fmt]


def operand_of(problem: Problem, arch: str | None = None) -> str:
    """What the MMA's token side is for the problem's format and act on ``arch`` (None: Hopper), as
    ``layout.regions`` names it.

    act="auto" counts as the arch's default. ValueError while ``format`` is "auto".
    """
    check(
        problem.format != "auto",
        'format: "auto" is decided by prepare_weights; use weights.problem (or pass operand="e4m3" '
        'or "bf16" to size memory before that)',
    )
    arch = arch or next(iter(ARCHES))
    act = acts(arch, problem.format)[0] if problem.act == "auto" else problem.act
    return kernels_module(arch, "config").operand_of(problem.format, act)


def choose_variant(
    problem: Problem,
    arch: str | None,
    source_formats: Iterable[str] = (),
    expected_tokens: int | None = None,
) -> Variant:
    """Resolve ``format`` and ``act`` and say why.

    arch             an exact arch ("sm_100a"), or None for the reference, which takes Hopper's
                     defaults
    source_formats   what the checkpoint holds: names out of ``SOURCES``; () counts as "float"
    expected_tokens  tokens of a typical call; only words the reason, accuracy decides
    ValueError for a source or an arch that is not known.
    """
    check_problem(problem)
    check(
        expected_tokens is None
        or (
            isinstance(expected_tokens, int)
            and not isinstance(expected_tokens, bool)
            and expected_tokens >= 0
        ),
        f"expected_tokens: expected None or an int >= 0, got {expected_tokens!r}; pass the tokens "
        "of a typical call",
    )
    if arch is not None:
        check_arch(arch)
    sources = [str(name).removeprefix("torch.") for name in source_formats] or ["float"]
    for name in sources:
        check(
            name in SOURCES,
            f"source_formats: expected names out of {', '.join(SOURCES)}, got {name!r}",
        )
    held = {SOURCES[name] for name in sources}
    reasons = []
    fmt = problem.format
    if fmt == "auto":
        fmt, why = _choose_format(problem, arch, held, expected_tokens)
        reasons.append(why)
    else:
        reasons.append(f"{fmt} weights as the problem says" + _requantized(fmt, held))
    act = problem.act
    if act == "auto":
        act = acts(arch, fmt)[0]
        reasons.append(_ACT_REASONS[act])
    else:
        allowed = acts(arch, fmt)
        where = "" if arch is None else f" on {arch}"
        check(
            act in allowed,
            f"act: expected one of {allowed} for {fmt} weights{where}, got {act!r}; its tensor "
            'cores take no other pair, so pass act="auto"',
        )
        reasons.append(f"{act} activations as the problem says")
    folder = "reference" if arch is None else ARCHES[arch]
    return Variant(
        problem=problem.with_(format=fmt, act=act),
        name=f"{folder}-{fmt}-{act}",
        reason="; ".join(reasons),
    )


def _choose_format(
    problem: Problem, arch: str | None, held: set[str], expected_tokens: int | None
) -> tuple[str, str]:
    """The format for format="auto" and the reason, from what the checkpoint holds."""
    if held == {"nvfp4"}:
        return "nvfp4", "nvfp4 weights: the checkpoint's own format, nothing is requantized"
    if held == {"mxfp8"}:
        return "mxfp8", "mxfp8 weights: the checkpoint's own format, nothing is requantized"
    if held != {"float"}:
        mixed = " and ".join(sorted(held))
        return "mxfp8", f"mxfp8 weights: the checkpoint mixes {mixed}, and mxfp8 loses least"
    why = "mxfp8 weights: a float checkpoint keeps most accuracy so"
    if expected_tokens is not None:
        rows = expected_tokens * problem.top_k / problem.num_experts
        if rows < kernels_module(arch or next(iter(ARCHES)), "config").MXFP8_FASTER_ABOVE:
            why += f' (at about {rows:.3g} rows an expert format="nvfp4" would read half the bytes)'
        else:
            why += f" and is the faster one at about {rows:.3g} rows an expert"
    return "mxfp8", why


def _requantized(fmt: str, held: set[str]) -> str:
    foreign = sorted(held - {fmt, "float"})
    return f", requantized from {' and '.join(foreign)}" if foreign else ""


def ladder(arch: str, operand: str) -> tuple[Any, ...]:
    """Every rung that a call can get for an operand (``operands(arch)``) on ``arch``."""
    check_operand(arch, operand)
    return tuple(kernels_module(arch, "config").ladder(operand))


def operands(arch: str | None = None) -> tuple[str, ...]:
    """What the MMA's token side may be on ``arch`` (None: Hopper)."""
    return kernels_module(arch or next(iter(ARCHES)), "config").OPERANDS


def check_operand(arch: str | None, operand: str) -> None:
    """ValueError unless ``arch`` (None: Hopper) has kernels for ``operand``."""
    known = operands(arch)
    names = " or ".join(f'"{name}"' for name in known)
    check(operand in known, f"operand: expected {names}, got {operand!r}")


def rung_reason(arch: str, operand: str, rung: Any) -> str:
    """Why ``rung`` is on the ladder, with its measured number."""
    return kernels_module(arch, "config").REASONS[operand][rung.tile_n]


def choose_rung(problem: Problem, arch: str, tokens: int, operand: str | None = None) -> Any:
    """The rung (``kernels/<folder>/config.py``'s Config) that the ladder gives a call of ``tokens``
    rows, where ``tuned`` has no winner for it.

    Arithmetic on tokens, top_k and the local experts alone: every rung is right for any counts.
    operand  None: what the problem's format and act give
    """
    operand = operand_of(problem, arch) if operand is None else operand
    return kernels_module(arch, "config").choose_config(problem, operand, tokens)
