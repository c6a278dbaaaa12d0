"""``moe-ep-jit demo``: the layer in both formats on this machine, with its time and its error.

With a GPU the kernels run. Without one they are compiled for the first arch of the list all the
same and run on the PTX emulator; where no C compiler is, which that needs, the reference runs on
the weights as packed for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import moe_ep_jit as moe
from moe_ep_jit import jit, reference, variants
from moe_ep_jit.problem import FORMATS, Problem
from moe_ep_jit.tools import presets, routing, timing
from moe_ep_jit.tools.emulator.host import c_compiler

#: Bounds on rel-L2 against the reference; the worst row and block may have three times as much.
REFERENCE_BOUNDS = {"mxfp8": 1e-2, "nvfp4": 2e-2}
#: Against a bf16 dense layer on unit Gaussian data, by (format, act).
DENSE_BOUNDS = {
    ("mxfp8", "mxfp8"): 0.070,
    ("nvfp4", "bf16"): 0.175,
    ("nvfp4", "mxfp8"): 0.180,
    ("nvfp4", "nvfp4"): 0.240,
}

#: One rank's problem by device type: a real model's on a GPU, a small one for two CPU cores.
_SIZES = {
    "cuda": {"hidden": 2048, "intermediate": 768, "num_experts": 128, "top_k": 8},
    "cpu": {"hidden": 512, "intermediate": 256, "num_experts": 8, "top_k": 2},
}
_TOKENS = 64
_TITLE = "The forward of one mixture-of-experts layer on random data, in both weight formats.\n"
_NAMES = {"mxfp8": "MXFP8", "nvfp4": "NVFP4", "bf16": "bf16"}


def run(console: Console, seed: int, as_json: bool) -> int:
    """Show both formats on ``console``; 0 when every error is within its bound, else 1."""
    device = variants.default_device()
    arch = variants.detect_arch(device)
    if device.type == "cuda" and arch is None:
        console.print(
            f"{variants.describe_device(device)} has no kernels; showing what a CPU shows",
            highlight=False,
        )
        device = torch.device("cpu")
    notes = Console(stderr=True)
    if not as_json:
        console.print(_TITLE, highlight=False, soft_wrap=True)
    shown = []
    for fmt in FORMATS:
        with notes.status(fmt) as status:
            result = _show(fmt, device, arch, seed, status.update)
        shown.append(result)
        if not as_json:
            _print(result, console)
    good = all(result["ok"] for result in shown)
    if as_json:
        console.print_json(data={"ok": good, "formats": shown})
    else:
        for result in shown:
            console.print(_sentence(result), highlight=False, soft_wrap=True)
    return 0 if good else 1


def _show(
    fmt: str, device: torch.device, arch: str | None, seed: int, note: Callable[[str], None]
) -> dict[str, Any]:
    """Everything about one format, as the JSON has it."""
    target = arch or variants.resolve_backend(torch.device("cpu"), "emulator")
    problem = Problem(**_SIZES[device.type], max_tokens=_TOKENS, format=fmt)
    note(f"{fmt}: weights")
    x, ids, topk_weights, w13, w2 = _data(problem, device, seed)
    weights = moe.prepare_weights(w13, w2, problem, arch=target)
    problem = weights.problem
    note(f"{fmt}: reference")
    want = reference.moe_forward(
        x, ids, topk_weights, moe.prepare_weights(w13, w2, problem, backend="reference")
    )
    dense = reference.dense_bf16(x, ids, topk_weights, w13, w2, problem.activation)
    kernels = _kernels(problem, target, weights.kind, note)
    ran_on = "gpu" if arch else "emulator" if c_compiler() else "reference"
    note(f"{fmt}: forward on the {ran_on}")
    backend = "auto" if arch else ran_on
    start = time.perf_counter()
    with moe.Workspace(problem, device=device, backend=backend, operand=weights.operand) as ws:
        got = moe.moe_forward(x, ids, topk_weights, weights, ws)
        seconds = time.perf_counter() - start
        errors = reference.error(got, want)._asdict()
        dense_error = reference.error(got, dense).whole
        ms = None
        if arch:
            call = [lambda: moe.moe_forward(x, ids, topk_weights, weights, ws)]
            (ms,) = timing.medians_ms(lambda i: call, timing.LEAST_CALLS)
    bound = REFERENCE_BOUNDS[fmt]
    dense_bound = DENSE_BOUNDS[fmt, problem.act]
    return {
        "format": fmt,
        "act": problem.act,
        "variant": weights.variant.name,
        "reason": weights.variant.reason,
        "device": variants.describe_device(device) if arch else "CPU (no GPU with kernels)",
        "arch": target,
        "on_gpu": bool(arch),
        "ran_on": ran_on,
        "emulated_s": round(seconds, 2) if ran_on == "emulator" else None,
        "sizes": {**_SIZES[device.type], "tokens": _TOKENS},
        "kernels": kernels,
        "ms": ms,
        "error": errors,
        "bound": bound,
        "dense_error": dense_error,
        "dense_bound": dense_bound,
        "ok": errors["whole"] < bound
        and max(errors["worst_row"], errors["worst_block"]) < 3 * bound
        and dense_error < dense_bound,
    }


def _data(problem: Problem, device: torch.device, seed: int) -> tuple[torch.Tensor, ...]:
    """x, ids, topk_weights, w13, w2: unit Gaussian activations, weights that keep the scale."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return values.normal_(0, scale, generator=generator)

    experts, hidden, inner = problem.num_experts, problem.hidden, problem.intermediate
    x = normal(_TOKENS, hidden)
    w13 = normal(experts, 2 * inner, hidden, scale=hidden**-0.5)
    w2 = normal(experts, hidden, inner, scale=inner**-0.5)
    ids = routing.uniform(_TOKENS, problem, generator)
    scores = torch.rand(ids.shape, generator=generator, device=device)
    return x, ids, scores / scores.sum(dim=1, keepdim=True), w13, w2


def _kernels(
    problem: Problem, arch: str, kind: str, note: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Compile or load the objects for one token and for this call; each is a whole layer."""
    rungs = [variants.choose_rung(problem, arch, tokens) for tokens in (1, _TOKENS)]
    found = []
    for job in presets.jobs(problem, arch, dict.fromkeys(rungs)):
        if job.facts["kind"] != kind:
            continue
        note(f"{job.name}: compiling or loading")
        before = jit.stats()["compiles"]
        start = time.perf_counter()
        jit.load(**asdict(job))
        found.append(
            {
                "name": job.name,
                "called": job.facts["config"] == asdict(rungs[-1]),
                "status": "compiled" if jit.stats()["compiles"] > before else "loaded",
                "seconds": round(time.perf_counter() - start, 3),
            }
        )
    return found


def _print(result: dict[str, Any], console: Console) -> None:
    sizes = ", ".join(f"{name} {value}" for name, value in result["sizes"].items())
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_row("device", escape(result["device"]))
    table.add_row("variant", f"{result['variant']}: {result['reason']}")
    table.add_row("layer", sizes)
    for kernel in result["kernels"]:
        ran = "" if result["on_gpu"] else ", not run: no GPU"
        if result["ran_on"] == "emulator" and kernel["called"]:
            ran = f", run on the PTX emulator in {result['emulated_s']:.1f} s"
        how = f"{kernel['status']} in {kernel['seconds']:.2f} s{ran}"
        table.add_row("kernels", f"{kernel['name']} {how}")
    timing = "not timed: no GPU" if result["ms"] is None else f"{result['ms']:.3f} ms a call"
    table.add_row("time", timing)
    bound = result["bound"]
    parts = [
        f"{name.replace('_', ' ')} {_percent(value)} (bound {_percent(limit)})"
        for (name, value), limit in zip(
            result["error"].items(), (bound, 3 * bound, 3 * bound), strict=True
        )
    ]
    table.add_row("error to reference", ", ".join(parts))
    dense = f"{_percent(result['dense_error'])} (bound {_percent(result['dense_bound'])})"
    table.add_row("error to dense bf16", dense)
    console.print(f"[bold]{_NAMES[result['format']]}[/], {_NAMES[result['act']]} activations")
    console.print(table, highlight=False)
    console.print()


def _sentence(result: dict[str, Any]) -> str:
    name = _NAMES[result["format"]]
    errors = f"{_percent(result['error']['whole'])} from the reference"
    dense = f"{_percent(result['dense_error'])} from a dense bf16 layer"
    verdict = "within the bounds" if result["ok"] else "OUTSIDE THE BOUNDS"
    if result["on_gpu"]:
        return (
            f"{name}: the kernels ran on {result['device']} in {result['ms']:.3f} ms a call, "
            f"{errors} and {dense}, {verdict}."
        )
    count = len(result["kernels"])
    compiled = sum(kernel["status"] == "compiled" for kernel in result["kernels"])
    how = "compiled" if compiled == count else "loaded from the cache"
    if 0 < compiled < count:
        how = "compiled or loaded from the cache"
    if result["ran_on"] == "emulator":
        return (
            f"{name}: {count} objects for {result['arch']} were {how}; no GPU here, so the PTX "
            f"emulator ran one on the CPU: {errors}, {dense}, {verdict}."
        )
    return (
        f"{name}: {count} objects for {result['arch']} were {how}; no GPU here runs them, so the "
        f"reference ran on the weights packed for them: {errors} on unpacked weights, {dense}, "
        f"{verdict}."
    )


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"
