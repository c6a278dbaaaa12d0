"""Winners of ``moe-ep-jit tune``: the rung that was fastest for a layer at a token count on a GPU.

Facts of a GPU, not builds: they lie in ``<cache>/<arch>/tuned.json`` beside the entries and are
part of no key. A winner is a rung of the ladder, and each of those is right for any counts and
loaded by ``warmup``, so that the worst a wrong file does is a slower call. What is broken, of
another version or writable by others is a warning and counts as absent.

    {"version": 1, "gpus": {GPU name: {``layer_name``: {"64": {"config": {...}, "ms": 0.1}}}}}
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_ep_jit import entries, jit, variants
from moe_ep_jit.problem import Problem, check

logger = logging.getLogger("moe_ep_jit")

FILE = "tuned.json"
VERSION = 1

#: GPU name -> layer name -> token count -> {"config": fields of the rung, "ms": its time, ...}.
Gpus = dict[str, dict[str, dict[str, dict[str, Any]]]]

_warned: set[str] = set()


def layer_name(problem: Problem, kind: str) -> str:
    """What winners are kept under: the facts of a compiled object but for its rung."""
    sizes = f"h{problem.hidden}-i{problem.intermediate}-e{problem.num_experts}-k{problem.top_k}"
    return f"{kind}-{problem.act}-{sizes}-r{problem.num_ranks}"


def winners(arch: str, gpu: str, layer: str, operand: str) -> dict[int, Any]:
    """Token count -> rung, from every cache folder, the user's own first.

    Read once when weights meet a workspace. A rung that the ladder no longer has is left out.
    """
    counts = collect(arch).get(gpu, {}).get(layer, {})
    rungs = {_spelled(asdict(rung)): rung for rung in variants.ladder(arch, operand)}
    found = {}
    for tokens, winner in counts.items():
        rung = rungs.get(_spelled(winner["config"]))
        if rung is None:
            logger.info(
                "%s at %s tokens: tuned for %s, which the ladder no longer has; run: moe-ep-jit "
                "tune",
                layer,
                tokens,
                winner["config"],
            )
        else:
            found[int(tokens)] = rung
    return found


def _spelled(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


def pick(found: Mapping[int, Any], tokens: int) -> Any | None:
    """The winner for a call of ``tokens`` tokens: that of the smallest tuned count at or above
    ``tokens`` and below twice of it; None where there is none, for the ladder to decide.

    Beyond twice the count a tile is sized for other rows an expert, which the ladder does know.
    """
    count = min((count for count in found if count >= tokens), default=None)
    return found[count] if count is not None and count < 2 * tokens else None


# Files


def collect(arch: str) -> Gpus:
    """All winners of ``arch``; where folders differ, the earlier one counts."""
    merged: Gpus = {}
    try:
        folders = jit.cache_dirs()
    except RuntimeError:
        return merged
    for cache in folders:
        merged = merge(merged, _read_or_warn(cache, arch))
    return merged


def merge(first: Gpus, second: Gpus) -> Gpus:
    """Both; where they speak about the same layer and count, ``first``."""
    merged: Gpus = {}
    for gpus in (second, first):
        for gpu, layers in gpus.items():
            for layer, counts in layers.items():
                merged.setdefault(gpu, {}).setdefault(layer, {}).update(counts)
    return merged


def parse(text: str | bytes) -> Gpus:
    """The winners of a file's text. ValueError with the reason for any other text."""
    content = json.loads(text)
    check(isinstance(content, dict), "expected an object")
    version = content.get("version")
    check(version == VERSION, f"expected version {VERSION}, got {version!r}")
    gpus = content.get("gpus")
    for name, level in _levels(gpus):
        check(isinstance(level, dict), f"expected an object {name}, got {level!r:.40}")
    for layers in gpus.values():
        for counts in layers.values():
            for tokens, winner in counts.items():
                _check_winner(tokens, winner)
    return gpus


def _levels(gpus: Any) -> list[tuple[str, Any]]:
    found = [("of GPUs", gpus)]
    for layers in gpus.values() if isinstance(gpus, dict) else ():
        found.append(("of layers", layers))
        for counts in layers.values() if isinstance(layers, dict) else ():
            found.append(("of token counts", counts))
    return found


def _check_winner(tokens: str, winner: Any) -> None:
    check(
        tokens.isascii() and tokens.isdecimal() and int(tokens) > 0,
        f"expected token counts above 0, got {tokens!r}",
    )
    check(
        isinstance(winner, dict) and isinstance(winner.get("config"), dict),
        f"expected an object with a config at {tokens} tokens, got {winner!r:.40}",
    )
    ms = winner.get("ms")
    check(
        type(ms) in (int, float) and math.isfinite(ms) and ms > 0,
        f"expected a time in ms at {tokens} tokens, got {ms!r}",
    )


def dump(gpus: Gpus) -> bytes:
    """A file's bytes; equal winners give equal bytes."""
    content = {"version": VERSION, "gpus": gpus}
    return (json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _read_or_warn(cache: Path, arch: str) -> Gpus:
    """The winners in one cache folder; a file that cannot be used is one warning."""
    path = cache / arch / FILE
    if not os.path.lexists(path):
        return {}
    try:
        for part in (cache, path.parent, path):
            entries.check_trusted(part)
        return parse(path.read_bytes())
    except (OSError, ValueError, RuntimeError, RecursionError) as error:
        message = (
            f"{path}: not used, the ladder decides ({error}); to measure again: moe-ep-jit tune"
        )
        if message not in _warned:
            _warned.add(message)
            logger.warning(message)
        return {}


def store(arch: str, gpus: Gpus, *, replace: bool = True) -> Gpus:
    """Put winners into the user's own folder under the file's lock, written whole; what was added
    or changed.

    replace  False: winners that are there stay
    A file that is there and cannot be used is set aside. RuntimeError where the folder cannot be
    written.
    """
    own = jit.require_writable()
    path = own / arch / FILE
    with entries.lock(own, f"{arch}-tuned", str(path)):
        there = _read_or_warn(own, arch)
        merged = merge(gpus, there) if replace else merge(there, gpus)
        if merged == there:
            return {}
        try:
            if not there and os.path.lexists(path):
                entries.set_aside(own, path)
            entries.replace_file(own, path, dump(merged))
        except OSError as error:
            raise RuntimeError(
                f"cannot write {path} ({error.strerror or error}); run: export"
                " MOE_EP_JIT_CACHE=/a/writable/folder/of/your/own"
            ) from error
    return _difference(merged, there)


def _difference(new: Gpus, old: Gpus) -> Gpus:
    """What of ``new`` is not so in ``old``."""
    changed: Gpus = {}
    for gpu, layers in new.items():
        for layer, counts in layers.items():
            before = old.get(gpu, {}).get(layer, {})
            fresh = {tokens: w for tokens, w in counts.items() if before.get(tokens) != w}
            if fresh:
                changed.setdefault(gpu, {})[layer] = fresh
    return changed
