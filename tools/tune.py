"""``moe-ep-jit tune``: times every rung of the ladder for a layer and keeps the winners.

Offline, on the GPU at hand, under uniform routing. Each rung's numbers are checked first; the rungs
of one token count are interleaved launch by launch, each in a CUDA graph, with cold weights. The
winners go to ``tuned.json`` beside the cache's entries, where new bindings find them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import moe_ep_jit as moe
from moe_ep_jit import jit, tuned, variants
from moe_ep_jit.tools import timing
from moe_ep_jit.tools.bench import Case, Data, Layer, Request, gpu_with_kernels
from moe_ep_jit.tools.demo import REFERENCE_BOUNDS

#: A rung must be this much faster than the ladder's own to win: less is noise between runs.
LEAST_GAIN = 0.02
_MANY_TOKENS = 64


def run(request: Request, console: Console, as_json: bool) -> int:
    """Tune every preset in every format; JSON lines as they come, or one table at the end.

    1 when a rung gave wrong numbers (it never wins), else 0. RuntimeError where there is no GPU
    with kernels, or no cache folder that can keep winners.
    """
    device = gpu_with_kernels("tune")
    own = jit.require_writable()
    notes = Console(stderr=True)
    gpu = torch.cuda.get_device_properties(device).name
    rows = []
    for row in _tune_all(request, device, gpu, notes):
        rows.append(row)
        if as_json:
            console.print(json.dumps(row), soft_wrap=True, markup=False, highlight=False)
    if not as_json:
        console.print(table(rows))
        console.print(f"winners are in {escape(str(own))}", soft_wrap=True, highlight=False)
    wrong = [(row, rung) for row in rows for rung in row["rungs"] if not rung["ok"]]
    for row, rung in wrong:
        notes.print(
            f"{row['preset']} {row['format']} at {row['tokens']} tokens: {rung['config']} is wrong "
            f"by {rung['rel_l2']:.2e} (worst row {rung['worst_row']:.2e}, worst block "
            f"{rung['worst_block']:.2e}), which is a bug: run `bash tools/dev test -m sm90 --arch "
            "sm90`",
            markup=False,
            soft_wrap=True,
        )
    return int(bool(wrong))


def _tune_all(
    request: Request, device: torch.device, gpu: str, notes: Console
) -> Iterator[dict[str, Any]]:
    """One row for each (preset, format, token count); winners are stored layer by layer."""
    for preset in request.presets:
        counts = sorted(set(request.tokens)) or octaves(max(preset.tokens))
        with notes.status(f"{preset.name}: weights") as status:
            data = Data(preset.problem(max_tokens=max(counts)), device, request.seed)
            for fmt in request.formats:
                status.update(f"{preset.name} {fmt}: weights")
                layer = Layer(data, fmt, request.act)
                moe.warmup(layer.ws, layer.weights[0])
                found = {}
                for count in counts:
                    status.update(f"{preset.name} {fmt}: {count} tokens")
                    row = _tune_count(Case(layer, count, "uniform"), request.iterations)
                    if row["ms"] is not None:
                        found[str(count)] = stored(row)
                    yield {"preset": preset.name, "gpu": gpu} | row
                name = tuned.layer_name(layer.problem, layer.weights[0].kind)
                tuned.store(layer.ws.arch, {gpu: {name: found}})
                layer.close()
                del layer
            del data
        torch.cuda.empty_cache()


def octaves(most: int) -> list[int]:
    """1, 2, 4, ... and ``most``: with a winner at each, every count up to it has one."""
    return [2**i for i in range(most.bit_length()) if 2**i < most] + [most]


def _tune_count(case: Case, iterations: int) -> dict[str, Any]:
    """The row of one layer at one token count."""
    layer = case.layer
    rungs = variants.ladder(layer.ws.arch, layer.operand)
    errors = {rung: case.error(rung) for rung in rungs}
    bound = REFERENCE_BOUNDS[layer.problem.format]
    right = {rung: within(error, bound, case.tokens) for rung, error in errors.items()}
    graphs = {
        rung: timing.captured(lambda i, rung=rung: case.call(i, rung), len(case.sets))
        for rung in rungs
    }
    times = timing.medians_ms(interleaved(list(graphs.values())), iterations)
    ms = dict(zip(rungs, times, strict=True))
    ladder = variants.choose_rung(layer.problem, layer.ws.arch, case.tokens, layer.operand)
    best = winner({rung: ms[rung] for rung in rungs if right[rung]}, ladder)
    return {
        "format": layer.problem.format,
        "act": layer.problem.act,
        "tokens": case.tokens,
        "kind": layer.weights[0].kind,
        "ladder": str(ladder),
        "ladder_ms": ms[ladder],
        "config": None if best is None else asdict(best),
        "ms": None if best is None else ms[best],
        "rungs": [
            {"config": str(rung), "ms": ms[rung], "ok": right[rung], **_figures(errors[rung])}
            for rung in rungs
        ],
    }


def _figures(error: Any) -> dict[str, float]:
    return {
        "rel_l2": error.whole,
        "worst_row": error.worst_row,
        "worst_block": error.worst_block,
    }


def within(error: Any, bound: float, tokens: int) -> bool:
    """Whether a rung's numbers hold. A row or a block that is wrong is off by about 1; one whose
    intermediate was rounded the other way, by up to 5 %, and few rows do not average that out."""
    whole = bound if tokens >= _MANY_TOKENS else 3 * bound
    return error.whole < whole and max(error.worst_row, error.worst_block) < 10 * bound


def interleaved(
    graphs: Sequence[Sequence[Any]],
) -> Callable[[int], list[Callable[[], Any]]]:
    """Steps for ``timing``: one replay of each rung, every launch on the next set of weights."""

    def steps(i: int) -> list[Callable[[], Any]]:
        first = i * len(graphs)
        return [own[(first + j) % len(own)].replay for j, own in enumerate(graphs)]

    return steps


def winner(ms: Mapping[Any, float], ladder: Any) -> Any | None:
    """The fastest rung; the ladder's own unless another is ``LEAST_GAIN`` faster. None: no time."""
    timed = {rung: time for rung, time in ms.items() if math.isfinite(time) and time > 0}
    if not timed:
        return None
    best = min(timed, key=timed.__getitem__)
    if ladder in timed and timed[best] > (1 - LEAST_GAIN) * timed[ladder]:
        return ladder
    return best


def stored(row: Mapping[str, Any]) -> dict[str, Any]:
    """What ``tuned`` keeps of a row."""
    return {
        "config": row["config"],
        "ms": row["ms"],
        "ladder_ms": row["ladder_ms"],
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The rows for people."""
    out = Table("preset", "format", "act", box=None)
    for name in ("tokens", "ladder ms", "winner ms", "gain"):
        out.add_column(name, justify="right")
    out.add_column("winner")
    for row in rows:
        names = (row["preset"], row["format"], row["act"], str(row["tokens"]))
        if row["ms"] is None:
            out.add_row(*names, f"{row['ladder_ms']:.4f}", "-", "-", "none: wrong numbers")
            continue
        gain = 100 * (row["ladder_ms"] / row["ms"] - 1)
        config = ", ".join(f"{name} {value}" for name, value in row["config"].items())
        out.add_row(*names, f"{row['ladder_ms']:.4f}", f"{row['ms']:.4f}", f"{gain:.1f} %", config)
    return out
