"""Times the layer on the presets: whole and by stage, eager and in a CUDA graph, with two floors.

Protocol: random unit-scale data, uniform routing, a seed; weights come cold, since calls rotate
over sets of weights whose active experts exceed the L2 cache together; a GPU backlog hides the
host; medians of calls back to back.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import moe_ep_jit as moe
from moe_ep_jit import reference, variants
from moe_ep_jit.problem import Problem, check
from moe_ep_jit.tools.presets import Preset

#: Ceilings measured on one H200, 2026-11-30.
READ_BYTES_PER_S = 4.39e12
COPY_BYTES_PER_S = 4.28e12
FLOPS_PER_S = {"e4m3": 1415e12, "bf16": 779e12}

#: Bits that a weight takes in memory, its scale included, by kind of prepared weights.
WEIGHT_BITS = {"mxfp8_row": 8.0, "mxfp8_group128": 8.25, "mxfp8_exact": 8.25, "nvfp4": 4.5}

STAGES = ("dispatch", "gate_up", "down", "combine")
_WARMUP_CALLS = 5
_BACKLOG_CYCLES = 30_000_000  # about 15 ms: longer than the host needs to queue one measurement
_L2_MULTIPLE = 3
_REFERENCE_TOKENS = 256


@dataclass(frozen=True)
class Floors:
    """What the machine cannot beat, and what it follows from.

    gemm_ms       the active experts' weights at the read rate, or the multiply-adds at the tensor
                  cores' rate, whichever is longer
    layer_ms      dispatch and combine traffic at the copy rate on top
    weight_bytes  of the active experts
    flops         of both GEMMs, a multiply-add counting two
    """

    gemm_ms: float
    layer_ms: float
    weight_bytes: float
    flops: float


def floors(
    problem: Problem, kind: str, operand: str, tokens: int, rows: int, active: int
) -> Floors:
    """The floors of one call.

    kind     of the prepared weights: a key of ``WEIGHT_BITS``
    operand  "e4m3" or "bf16": what the MMA's token side is
    rows     (token, k) pairs that reach an expert
    active   experts with at least one
    """
    size = problem.hidden * problem.intermediate
    weight_bytes = active * 3 * size * WEIGHT_BITS[kind] / 8
    flops = 6.0 * rows * size
    gemm_s = max(weight_bytes / READ_BYTES_PER_S, flops / FLOPS_PER_S[operand])
    row_bytes = problem.hidden * (1 if operand == "e4m3" else 2)
    # x read, rows written; y rows read, out written. What the GEMMs move overlaps with their math.
    traffic = rows * (row_bytes + 2 * problem.hidden) + 4 * tokens * problem.hidden
    layer_s = gemm_s + traffic / COPY_BYTES_PER_S
    return Floors(gemm_s * 1e3, layer_s * 1e3, weight_bytes, flops)


def uniform_ids(tokens: int, problem: Problem, generator: torch.Generator) -> torch.Tensor:
    """int32 [tokens, top_k]: distinct experts for each token, every choice equally likely."""
    draw = torch.rand(tokens, problem.num_experts, generator=generator, device=generator.device)
    return draw.topk(problem.top_k, dim=1).indices.to(torch.int32)


class Layer:
    """One preset in one format on the GPU: weights, workspace, inputs and the expected output."""

    def __init__(self, problem: Problem, device: torch.device, seed: int) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.source = self._random_weights(problem, device)
        self.weights = [self._prepare(problem)]
        self.problem = self.weights[0].problem
        self.ws = moe.Workspace(self.problem, device=device, operand=self.weights[0].operand)
        tokens = self.problem.max_tokens
        self.x = self._normal(tokens, self.problem.hidden)
        self.ids = uniform_ids(tokens, self.problem, self.generator)
        scores = torch.rand(self.ids.shape, generator=self.generator, device=device)
        self.topk_weights = scores / scores.sum(dim=1, keepdim=True)
        checked = min(tokens, _REFERENCE_TOKENS)
        inputs = self.inputs(checked)
        self.expected = reference.moe_forward(*inputs, self.weights[0]).clone()
        self.dense = reference.dense_bf16(*inputs, activation=problem.activation, **self.source)

    def _normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.empty(shape, dtype=torch.bfloat16, device=self.generator.device)
        return values.normal_(0, scale, generator=self.generator)

    def _random_weights(self, p: Problem, device: torch.device) -> dict[str, Any]:
        experts, hidden, inner = p.num_local_experts, p.hidden, p.intermediate
        source = {
            "w13": self._normal(experts, 2 * inner, hidden, scale=hidden**-0.5),
            "w2": self._normal(experts, hidden, inner, scale=inner**-0.5),
        }
        if p.bias:
            source["w13_bias"] = self._normal(experts, 2 * inner, scale=0.1)
            source["w2_bias"] = self._normal(experts, hidden, scale=0.1)
        return source

    def _prepare(self, problem: Problem) -> moe.PreparedWeights:
        return moe.prepare_weights(problem=problem, **self.source)

    def inputs(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, topk_ids and topk_weights of a call with ``tokens`` tokens."""
        return self.x[:tokens], self.ids[:tokens], self.topk_weights[:tokens]

    def cold_sets(self, active_bytes: float) -> list[Any]:
        """Sets of weights whose active experts exceed the L2 cache threefold together."""
        l2 = torch.cuda.get_device_properties(self.x.device).L2_cache_size
        need = max(1, math.ceil(_L2_MULTIPLE * l2 / active_bytes))
        while len(self.weights) < need:
            self.weights.append(self._prepare(self.problem))
        return self.weights[:need]

    def close(self) -> None:
        """Give the workspace's memory back."""
        self.ws.close()


def medians_ms(steps: Callable[[int], Sequence[Callable[[], Any]]], iterations: int) -> list[float]:
    """The median time of each of ``steps(i)``, run in order for i = 0, 1, ... back to back."""
    for i in range(_WARMUP_CALLS):
        for step in steps(i):
            step()
    count = len(steps(0))
    marks = [
        [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)] for _ in range(iterations)
    ]
    torch.cuda.synchronize()
    torch.cuda._sleep(_BACKLOG_CYCLES)
    for i, row in enumerate(marks):
        row[0].record()
        for step, mark in zip(steps(i), row[1:], strict=True):
            step()
            mark.record()
    torch.cuda.synchronize()
    return [
        statistics.median(row[j].elapsed_time(row[j + 1]) for row in marks) for j in range(count)
    ]


def host_us(call: Callable[[int], Any], iterations: int) -> float:
    """The median time that the host spends in ``call(i)``, with the GPU busy elsewhere."""
    torch.cuda.synchronize()
    torch.cuda._sleep(_BACKLOG_CYCLES)
    spent = []
    for i in range(iterations):
        start = time.perf_counter()
        call(i)
        spent.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(spent) * 1e6


def measure(layer: Layer, tokens: int, iterations: int) -> dict[str, Any]:
    """Times, floors and error of calls with ``tokens`` tokens."""
    problem, ws = layer.problem, layer.ws
    x, ids, topk_weights = layer.inputs(tokens)
    active, rows = int(ids.unique().numel()), ids.numel()
    first = layer.weights[0]
    floor = floors(problem, first.kind, first.operand, tokens, rows, active)
    sets = layer.cold_sets(floor.weight_bytes)

    def call(i: int) -> torch.Tensor:
        return moe.moe_forward(x, ids, topk_weights, sets[i % len(sets)], ws)

    def stages(i: int) -> list[Callable[[], Any]]:
        weights = sets[i % len(sets)]
        return [
            lambda: moe.dispatch(x, ids, ws, weights),
            lambda: moe.gate_up(ws, weights),
            lambda: moe.down(ws, weights),
            lambda: moe.combine(ids, topk_weights, ws, weights),
        ]

    checked = min(tokens, len(layer.expected))
    got = call(0)[:checked].clone()
    error = reference.error(got, layer.expected[:checked])
    dense = reference.error(got, layer.dense[:checked])
    for i in range(len(sets)):
        call(i)
    graphs = [_capture(call, i) for i in range(len(sets))]
    (ms,) = medians_ms(lambda i: [graphs[i % len(graphs)].replay], iterations)
    (eager_ms,) = medians_ms(lambda i: [lambda: call(i)], iterations)
    by_stage = dict(zip(STAGES, medians_ms(stages, iterations), strict=True))
    return {
        "tokens": tokens,
        "rows": rows,
        "active_experts": active,
        "weight_sets": len(sets),
        "kind": first.kind,
        "config": str(variants.choose_rung(problem, ws.arch, tokens, first.operand)),
        "ms": ms,
        "eager_ms": eager_ms,
        "stage_ms": by_stage,
        "host_us": host_us(call, iterations),
        "floor_gemm_ms": floor.gemm_ms,
        "floor_layer_ms": floor.layer_ms,
        "tflops": floor.flops / ms / 1e9,
        "gbps": floor.weight_bytes / ms / 1e6,
        "rel_l2": error.whole,
        "worst_row": error.worst_row,
        "worst_block": error.worst_block,
        "dense_rel_l2": dense.whole,
    }


def _capture(call: Callable[[int], Any], i: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(i)
    return graph


@dataclass(frozen=True)
class Request:
    """What to time.

    presets     layers, in the order of their rows
    formats     of the weights: "mxfp8", "nvfp4"
    act         the experts' activations; "auto": the format's own
    tokens      () for each preset's own counts
    iterations  calls behind a median, at least 30
    seed        of the random data
    """

    presets: Sequence[Preset]
    formats: Sequence[str]
    act: str = "auto"
    tokens: Sequence[int] = ()
    iterations: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        check(
            self.iterations >= 30,
            f"iterations: expected at least 30 for a median, got {self.iterations}",
        )


def run(request: Request, console: Console, as_json: bool, commit_id: str | None = None) -> int:
    """Time every preset in every format; JSON lines as they come, or one table at the end.

    commit_id  for a copy of the checkout that came without its history; None: git says
    RuntimeError where there is no GPU with kernels.
    """
    device = variants.default_device()
    if device.type != "cuda" or variants.detect_arch(device) is None:
        raise RuntimeError(
            f"bench: expected a GPU with kernels, got {variants.describe_device(device)}; run it "
            "where `moe-ep-jit doctor` finds one (elsewhere, `moe-ep-jit demo` checks the numbers)"
        )
    notes = Console(stderr=True)
    facts = machine(device)
    facts["commit"] = commit_id or facts["commit"]
    rows = []
    for row in _measure_all(request, device, notes):
        row |= facts
        rows.append(row)
        if as_json:
            console.print(json.dumps(row), soft_wrap=True, markup=False, highlight=False)
    if not as_json:
        console.print(table(rows))
        console.print(
            "ms: whole layer in a CUDA graph; x floor: ms over the layer's floor; GB/s: active "
            "experts' weights over ms; stages from eager calls.",
            highlight=False,
        )
    return 0


def _measure_all(
    request: Request, device: torch.device, notes: Console
) -> Iterator[dict[str, Any]]:
    """One row for each (preset, format, token count)."""
    for preset in request.presets:
        for fmt in request.formats:
            counts = tuple(request.tokens) or preset.tokens
            with notes.status(f"{preset.name} {fmt}: weights") as status:
                problem = preset.problem(fmt, request.act, max(counts))
                layer = Layer(problem, device, request.seed)
                for count in counts:
                    status.update(f"{preset.name} {fmt}: {count} tokens")
                    head = {"preset": preset.name, "format": fmt, "act": layer.problem.act}
                    yield head | measure(layer, count, request.iterations)
                layer.close()
                del layer  # before the next one's weights are made
            torch.cuda.empty_cache()


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows for people."""
    out = Table(box=None)
    left = ("preset", "format", "act")
    right = ("tokens", "ms", "eager", *STAGES, "floor gemm", "layer", "x floor")
    for name in left:
        out.add_column(name)
    for name in (*right, "TFLOP/s", "GB/s", "host us", "rel-L2"):
        out.add_column(name, justify="right")
    for row in rows:
        times = [row["ms"], row["eager_ms"], *(row["stage_ms"][name] for name in STAGES)]
        times += [row["floor_gemm_ms"], row["floor_layer_ms"]]
        out.add_row(
            *(row[name] for name in left),
            str(row["tokens"]),
            *(f"{ms:.3f}" for ms in times),
            f"{row['ms'] / row['floor_layer_ms']:.2f}",
            f"{row['tflops']:.0f}",
            f"{row['gbps']:.0f}",
            f"{row['host_us']:.0f}",
            f"{row['rel_l2']:.1e}",
        )
    return out


def machine(device: torch.device) -> dict[str, Any]:
    """What a row needs to be compared with others: GPU, commit, date, versions."""
    return {
        "gpu": torch.cuda.get_device_name(device),
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "dsl": metadata.version("nvidia-cutlass-dsl"),
        "torch": torch.__version__,
    }


def commit() -> str | None:
    """The checkout's commit, with "+" when files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parents[1]
    if not (root / "pyproject.toml").is_file():  # installed, maybe below somebody else's checkout
        return None
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
