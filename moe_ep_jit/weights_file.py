"""Files of prepared weights: ``save_prepared`` and ``load_prepared``."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from moe_ep_jit import variants
from moe_ep_jit.problem import ARCHES, Problem, SwiGLU, check, check_problem
from moe_ep_jit.topology import checked_map
from moe_ep_jit.weights import (
    PreparedWeights,
    check_prepared,
    check_rank,
    packing_of,
    tensor_specs,
)

#: Version of the files of ``save_prepared``; raised when the tensors' meaning changes.
FILE_VERSION = 2
_FILE_MARK = "moe_ep_jit prepared weights"


def save_prepared(prepared: PreparedWeights, path: str | os.PathLike) -> None:
    """Write prepared weights to one file; an older file is replaced whole or not at all.

    RuntimeError where the file cannot be written.
    """
    check_prepared(prepared, "prepared")
    path = Path(path)
    elsewhere = "save_prepared: expected the path of a file in a folder that exists"
    if path.is_dir():
        raise RuntimeError(f"{elsewhere}, got the folder {path}; add a file name")
    if not path.parent.is_dir():
        raise RuntimeError(f"{elsewhere}, got {path}; run: mkdir -p {path.parent}")
    state = {
        "mark": _FILE_MARK,
        "version": FILE_VERSION,
        "problem": asdict(prepared.problem),
        "layout": prepared.layout,
        "arch": prepared.arch,
        "kind": prepared.kind,
        "variant": {"name": prepared.variant.name, "reason": prepared.variant.reason},
        "report": prepared.report,
        "rank": prepared.rank,
        "physical_to_logical": prepared.topology.physical_to_logical,
        "tensors": {name: t.cpu() for name, t in prepared.tensors.items()},
    }
    state["sha256"] = _digests(state)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        torch.save(state, temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError on a full disk
        raise RuntimeError(
            f"{path}: could not be written ({error}); pass a path on a disk with "
            f"{prepared.nbytes} bytes free where this user may write"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def load_prepared(
    path: str | os.PathLike,
    device: torch.device | str = "cpu",
    problem: Problem | None = None,
) -> PreparedWeights:
    """Read a file of ``save_prepared`` onto ``device``.

    problem  None: the file's; else it must describe the same weights, and its max_tokens, top_k and
             activation constants are taken
    ValueError for a file that is truncated, damaged, foreign, of another version, or does not fit.
    FileNotFoundError for none; RuntimeError for a CUDA device where there is none.
    """
    device = variants.usable_device(device)
    if problem is not None:
        check_problem(problem)
    path = Path(path)
    again = "run prepare_weights and save_prepared again"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; {again}")
    try:
        # Mapped, so that no second copy is in memory on the way to the device.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises whatever its zip and pickle readers do
        why = str(error).split("\n", 1)[0][:200]
        raise ValueError(
            f"{path}: truncated, or not a file of save_prepared ({why}); {again}"
        ) from error
    check(
        isinstance(state, dict) and state.get("mark") == _FILE_MARK,
        f"{path}: expected a file of save_prepared, got other torch data; {again}",
    )
    check(
        state.get("version") == FILE_VERSION,
        f"{path}: expected version {FILE_VERSION}, got {state.get('version')!r}; {again}",
    )
    try:
        held = _checked_state(state)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{path}: damaged ({error}); {again}") from error
    if problem is not None:
        held.problem = _matching_problem(held.problem, problem)
        held.variant = variants.Variant(held.problem, held.variant.name, held.variant.reason)
    # A copy also on the CPU: the mapping must not outlive the file's name.
    tensors = {name: t.to(device, copy=True) for name, t in held.tensors.items()}
    held = replace(held, tensors=tensors, topology=None)
    if state["physical_to_logical"] is not None:
        held.topology.place(state["physical_to_logical"])
    return held


def _checked_state(state: dict[str, Any]) -> PreparedWeights:
    """A loaded file's content as PreparedWeights, every fact compared; else ValueError."""
    facts = dict(state["problem"])
    problem = Problem(**{**facts, "activation": SwiGLU(**facts["activation"])})
    layout, arch, kind = state["layout"], state["arch"], state["kind"]
    check(problem.is_resolved, "its problem is not resolved")
    if layout == "plain":
        check(arch is None and kind is None, f"plain layout with arch={arch!r}, kind={kind!r}")
    else:
        check(ARCHES.get(arch) == layout, f"layout {layout!r} for arch {arch!r}")
        fitting = packing_of(arch).kinds(problem)
        check(kind in fitting, f"kind: expected one of {fitting}, got {kind!r}")
    check_rank(state["rank"], problem)
    if state["physical_to_logical"] is not None:
        checked_map(state["physical_to_logical"], problem.num_experts)
    tensors, specs = state["tensors"], tensor_specs(problem, arch, kind)
    check(
        tensors.keys() == specs.keys(),
        f"tensors: expected {sorted(specs)}, got {sorted(tensors)}",
    )
    for name, (shape, dtype) in specs.items():
        held = tensors[name]
        check(
            tuple(held.shape) == shape and held.dtype == dtype,
            f"{name}: expected {list(shape)} {dtype}, got {list(held.shape)} {held.dtype}",
        )
        check(
            held.layout is torch.strided and held.is_contiguous() and held.device.type == "cpu",
            f"{name}: expected a contiguous, strided tensor, got strides "
            f"{list(held.stride()) if held.layout is torch.strided else held.layout}",
        )
        check(not _has_nan(name, held), f"{name}: expected finite numbers, got NaN or Inf")
    said, found = state["sha256"], _digests(state)
    differs = sorted(
        name for name in said.keys() | found.keys() if said.get(name) != found.get(name)
    )
    check(not differs, f"{', '.join(differs)}: another digest than when written")
    variant = variants.Variant(problem, state["variant"]["name"], state["variant"]["reason"])
    return PreparedWeights(
        problem, layout, arch, kind, variant, dict(tensors), state["report"], state["rank"]
    )


def _has_nan(name: str, tensor: torch.Tensor) -> bool:
    """Whether a bias or a scale is no number; the elements themselves are left to the digest."""
    if tensor.dtype is torch.float32:
        return not bool(tensor.isfinite().all())
    if not name.endswith("_sf"):
        return False
    if tensor.dtype is torch.uint8:  # UE8M0
        return bool((tensor == 0xFF).any())
    return bool((tensor.view(torch.uint8) & 0x7F == 0x7F).any())


def _digests(state: dict[str, Any]) -> dict[str, str]:
    """sha256 of each tensor's bytes by its name, and "facts" for all else that a file says."""
    found = {
        name: hashlib.sha256(t.detach().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
        for name, t in state["tensors"].items()
    }
    facts = {name: value for name, value in state.items() if name not in ("tensors", "sha256")}
    found["facts"] = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return found


def _matching_problem(held: Problem, wanted: Problem) -> Problem:
    """``wanted`` with the file's format and act; ValueError where they are for another problem."""
    for name in ("hidden", "intermediate", "num_experts", "num_ranks", "bias"):
        check(
            getattr(held, name) == getattr(wanted, name),
            f"problem.{name}: expected {getattr(wanted, name)}, the file holds weights for "
            f"{getattr(held, name)}; load the right file or prepare the weights again",
        )
    for name in ("format", "act"):
        check(
            getattr(wanted, name) in ("auto", getattr(held, name)),
            f"problem.{name}: expected {getattr(wanted, name)!r}, the file holds "
            f"{getattr(held, name)!r}; prepare the weights again",
        )
    return wanted.with_(format=held.format, act=held.act)
