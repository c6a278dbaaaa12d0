"""Times the layer on the presets: whole and by stage, eager and in a CUDA graph, with two floors.

Protocol: random unit-scale data, a seed; weights come cold, since calls rotate over sets of weights
whose active experts exceed the L2 cache together; a GPU backlog hides the host; each format and
peer alone after a rest, medians of 30 calls back to back after 10 others. ``--sustained`` adds a
longer run of each, at the clock that the power allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console

import moe_ep_jit as moe
from moe_ep_jit import launch, reference, variants
from moe_ep_jit.problem import Problem, check
from moe_ep_jit.tools import peers, results, routing, timing
from moe_ep_jit.tools.floors import floors, stage_figures
from moe_ep_jit.tools.nvml import Sensors
from moe_ep_jit.tools.presets import Preset

_L2_MULTIPLE = 3
_REFERENCE_TOKENS = 256


class Data:
    """One preset's weights in bf16 and inputs on the GPU, which all formats and peers share."""

    def __init__(self, problem: Problem, device: torch.device, seed: int) -> None:
        self.problem = problem
        self.seed = seed
        self.generator = torch.Generator(device).manual_seed(seed)
        self.source = self._random_weights(problem)
        tokens = problem.max_tokens
        self.x = self._normal(tokens, problem.hidden)
        self._ids = {"uniform": routing.make_ids("uniform", tokens, problem, self.generator)}
        scores = torch.rand(self._ids["uniform"].shape, generator=self.generator, device=device)
        self.topk_weights = scores / scores.sum(dim=1, keepdim=True)
        self._dense: dict[str, torch.Tensor] = {}

    def _normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.empty(shape, dtype=torch.bfloat16, device=self.generator.device)
        return values.normal_(0, scale, generator=self.generator)

    def _random_weights(self, p: Problem) -> dict[str, Any]:
        experts, hidden, inner = p.num_local_experts, p.hidden, p.intermediate
        source = {
            "w13": self._normal(experts, 2 * inner, hidden, scale=hidden**-0.5),
            "w2": self._normal(experts, hidden, inner, scale=inner**-0.5),
        }
        if p.bias:
            source["w13_bias"] = self._normal(experts, 2 * inner, scale=0.1)
            source["w2_bias"] = self._normal(experts, hidden, scale=0.1)
        return source

    def inputs(
        self, tokens: int, pattern: str = "uniform"
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, topk_ids and topk_weights of a call with ``tokens`` tokens."""
        if pattern not in self._ids:
            generator = torch.Generator(self.x.device).manual_seed(self.seed)
            self._ids[pattern] = routing.make_ids(
                pattern, self.problem.max_tokens, self.problem, generator
            )
        return self.x[:tokens], self._ids[pattern][:tokens], self.topk_weights[:tokens]

    def checked(self, tokens: int) -> int:
        """How many of a call's first tokens are compared with the reference."""
        return min(tokens, _REFERENCE_TOKENS)

    def dense(self, pattern: str) -> torch.Tensor:
        """What the layer gives without quantization, for the checked tokens of the longest call."""
        if pattern not in self._dense:
            inputs = self.inputs(self.checked(self.problem.max_tokens), pattern)
            activation = self.problem.activation
            dense = reference.dense_bf16(*inputs, activation=activation, **self.source)
            self._dense[pattern] = dense
        return self._dense[pattern]

    def sets_needed(self, active_bytes: float) -> int:
        """How many sets of weights exceed the L2 cache threefold with their active experts."""
        l2 = torch.cuda.get_device_properties(self.x.device).L2_cache_size
        return max(1, math.ceil(_L2_MULTIPLE * l2 / active_bytes))


class Layer:
    """One preset in one format on the GPU: sets of equal weights, and a workspace."""

    def __init__(self, data: Data, fmt: str, act: str) -> None:
        self.data = data
        self.weights = [self._prepare(data.problem.with_(format=fmt, act=act))]
        self.problem = self.weights[0].problem
        self.operand = self.weights[0].operand
        self.ws = moe.Workspace(self.problem, device=data.x.device, operand=self.operand)
        self._expected: dict[str, torch.Tensor] = {}

    def _prepare(self, problem: Problem) -> moe.PreparedWeights:
        return moe.prepare_weights(problem=problem, **self.data.source)

    def expected(self, pattern: str) -> torch.Tensor:
        """What the reference gives, for the checked tokens of the longest call."""
        if pattern not in self._expected:
            inputs = self.data.inputs(self.data.checked(self.problem.max_tokens), pattern)
            self._expected[pattern] = reference.moe_forward(*inputs, self.weights[0]).clone()
        return self._expected[pattern]

    def cold_sets(self, count: int) -> list[moe.PreparedWeights]:
        """``count`` sets of equal weights."""
        first = self.weights[0]
        while len(self.weights) < count:
            tensors = {name: tensor.clone() for name, tensor in first.tensors.items()}
            self.weights.append(replace(first, tensors=tensors))
        return self.weights[:count]

    def close(self) -> None:
        """Give the workspace's memory back."""
        self.ws.close()


class Case:
    """A layer at one token count under one routing pattern, ready to be called.

    call(i)    the whole layer with the i-th set of weights, in turn; ``config`` None: as users get
    stages(i)  the same as steps, one for each of ``results.STAGES``
    """

    def __init__(self, layer: Layer, tokens: int, pattern: str) -> None:
        self.layer, self.tokens, self.pattern = layer, tokens, pattern
        self.x, self.ids, self.topk_weights = layer.data.inputs(tokens, pattern)
        self.rows, self.active = count_rows(self.ids)
        kind = layer.weights[0].kind
        self.floor = floors(layer.problem, kind, layer.operand, tokens, self.rows, self.active)
        self.sets = layer.cold_sets(layer.data.sets_needed(self.floor.weight_bytes))

    def call(self, i: int, config: Any = None) -> torch.Tensor:
        weights = self.sets[i % len(self.sets)]
        return moe.moe_forward(
            self.x, self.ids, self.topk_weights, weights, self.layer.ws, config=config
        )

    def stages(self, i: int) -> list[Callable[[], Any]]:
        weights, ws = self.sets[i % len(self.sets)], self.layer.ws
        return [
            lambda: moe.dispatch(self.x, self.ids, ws, weights),
            lambda: moe.gate_up(ws, weights),
            lambda: moe.down(ws, weights),
            lambda: moe.combine(self.ids, self.topk_weights, ws, weights),
        ]

    def error(self, config: Any = None) -> reference.Errors:
        """Of the first tokens against the reference."""
        checked = self.layer.data.checked(self.tokens)
        got = self.call(0, config)[:checked]
        return reference.error(got, self.layer.expected(self.pattern)[:checked])

    def facts(self) -> dict[str, Any]:
        """The row without times."""
        layer, ws = self.layer, self.layer.ws
        first = layer.weights[0]
        error = self.error()
        checked = layer.data.checked(self.tokens)
        dense = reference.error(self.call(0)[:checked], layer.data.dense(self.pattern)[:checked])
        rung = launch.bind(ws, first).choose(ws, first, self.tokens)
        ladder = variants.choose_rung(layer.problem, ws.arch, self.tokens, layer.operand)
        return {
            "format": layer.problem.format,
            "act": layer.problem.act,
            "tokens": self.tokens,
            "routing": self.pattern,
            "rows": self.rows,
            "active_experts": self.active,
            "weight_sets": len(self.sets),
            "kind": first.kind,
            "config": str(rung),
            "tuned": rung != ladder,
            "floor_gemm_ms": self.floor.gemm_ms,
            "floor_layer_ms": self.floor.layer_ms,
            "rel_l2": error.whole,
            "worst_row": error.worst_row,
            "worst_block": error.worst_block,
            "dense_rel_l2": dense.whole,
        }


class PeerCase:
    """A peer at one token count under one routing pattern, ready to be called."""

    def __init__(self, name: str, data: Data, tokens: int, pattern: str) -> None:
        self.peer, self.data = peers.PEERS[name], data
        self.tokens, self.pattern = tokens, pattern
        inputs = data.inputs(tokens, pattern)
        self.rows, self.active = count_rows(inputs[1])
        size = 3 * data.problem.hidden * data.problem.intermediate
        self.weight_bytes = self.active * size * self.peer.weight_bits / 8
        self.flops = 2.0 * self.rows * size
        w13, w2 = data.source["w13"], data.source["w2"]
        self.sets = [self.peer.weights(w13, w2)]
        while len(self.sets) < data.sets_needed(self.weight_bytes):
            self.sets.append(self.peer.weights(w13.clone(), w2.clone()))
        self.prepared = self.peer.prepare(data.problem, *inputs)

    def call(self, i: int) -> torch.Tensor:
        return self.prepared.run(self.sets[i % len(self.sets)])

    def facts(self) -> dict[str, Any]:
        """The row without times. Only the error against the layer without quantization is known,
        and without biases not even that."""
        row = {
            "format": self.peer.format,
            "act": "bf16",
            "tokens": self.tokens,
            "routing": self.pattern,
            "rows": self.rows,
            "active_experts": self.active,
            "weight_sets": len(self.sets),
        }
        if not self.data.problem.bias:
            checked = self.data.checked(self.tokens)
            got = self.prepared.output(self.call(0))[:checked]
            dense = self.data.dense(self.pattern)[:checked]
            row["dense_rel_l2"] = reference.error(got, dense).whole
        return row


def count_rows(ids: torch.Tensor) -> tuple[int, int]:
    """(rows that reach an expert, experts with at least one) of topk_ids."""
    live = ids[ids >= 0]
    return live.numel(), int(live.unique().numel())


def measure(
    cases: Sequence[Case], others: Sequence[PeerCase], request: Request, sensors: Sensors
) -> list[dict[str, Any]]:
    """One row a case and peer."""
    rows = []
    for case in [*cases, *others]:
        graphs = timing.captured(case.call, len(case.sets))
        replays = [graph.replay for graph in graphs]
        whole = timing.timed(
            lambda i, own=replays: [own[i % len(own)]], request.iterations, sensors
        )
        (ms,) = whole.ms
        row = case.facts() | {"ms": ms, "sm_mhz": whole.sm_mhz}
        if isinstance(case, Case):
            row |= _own_figures(case, ms, request.iterations)
        else:
            row |= _rates(case.flops, case.weight_bytes, ms)
        if request.sustained:
            row |= _sustained(graphs, ms, sensors)
        rows.append(row)
    return rows


def _own_figures(case: Case, ms: float, iterations: int) -> dict[str, Any]:
    """What peers do not have: eager calls, the host's part, stages."""
    (eager_ms,) = timing.medians_ms(lambda i: [lambda: case.call(i)], iterations)
    stage_ms = timing.medians_ms(case.stages, iterations)
    by_stage = dict(zip(results.STAGES, stage_ms, strict=True))
    row = {"eager_ms": eager_ms, "stage_ms": by_stage}
    row |= stage_figures(case.floor, by_stage)
    row["host_us"] = timing.host_us(case.call, iterations)
    return row | _rates(case.floor.flops, case.floor.weight_bytes, ms)


def _rates(flops: float, weight_bytes: float, ms: float) -> dict[str, float]:
    return {"tflops": flops / ms / 1e9, "gbps": weight_bytes / ms / 1e6}


def _sustained(
    graphs: Sequence[torch.cuda.CUDAGraph], ms: float, sensors: Sensors
) -> dict[str, float | None]:
    run = timing.sustained(lambda i: graphs[i % len(graphs)].replay(), ms, sensors)
    return {
        "sustained_ms": run.ms,
        "sustained_sm_mhz": run.sm_mhz,
        "sustained_watts": run.watts,
    }


@dataclass(frozen=True)
class Request:
    """What to time.

    presets     layers, in the order of their rows
    formats     of the weights: "mxfp8", "nvfp4"
    act         the experts' activations; "auto": the format's own
    tokens      () for each preset's own counts
    iterations  calls behind a median, at least 30
    seed        of the random data
    patterns    routing: names out of ``routing.PATTERNS``
    others      peers beside it: names out of ``peers.PEERS``
    sustained   also time 1.5 s back to back
    """

    presets: Sequence[Preset]
    formats: Sequence[str]
    act: str = "auto"
    tokens: Sequence[int] = ()
    iterations: int = timing.LEAST_CALLS
    seed: int = 0
    patterns: Sequence[str] = ("uniform",)
    others: Sequence[str] = ()
    sustained: bool = False

    def __post_init__(self) -> None:
        check(
            self.iterations >= timing.LEAST_CALLS,
            f"iterations: expected at least {timing.LEAST_CALLS} for a median, got "
            f"{self.iterations}",
        )


def run(
    request: Request, output: results.Output, console: Console, commit_id: str | None = None
) -> int:
    """Time every preset in every format and show the rows; 1 where ``output`` compares and fails.

    commit_id  for a copy of the checkout that came without its history; None: git says
    RuntimeError where there is no GPU with kernels, or a peer cannot run.
    """
    device = gpu_with_kernels("bench")
    output.check()
    for preset in request.presets:
        peers.check_usable(request.others, preset.problem(), preset.name)
    notes = Console(stderr=True)
    sensors = gpu_sensors(device, notes)
    facts = results.machine(device, commit_id)
    rows = (row | facts for row in _measure_all(request, device, sensors, notes))
    return results.show(rows, output, console)


def gpu_with_kernels(command: str) -> torch.device:
    """The current GPU; RuntimeError where there is none with kernels."""
    device = variants.default_device()
    if device.type != "cuda" or variants.detect_arch(device) is None:
        raise RuntimeError(
            f"{command}: expected a GPU with kernels, got {variants.describe_device(device)}; run "
            "it where `moe-ep-jit doctor` finds one (elsewhere, `moe-ep-jit demo` checks the "
            "numbers)"
        )
    return device


def gpu_sensors(device: torch.device, notes: Console) -> Sensors:
    """The GPU's sensors; says so where there are none."""
    sensors = Sensors(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    if sensors.missing:
        notes.print(f"SM clock and power stay unknown: {sensors.missing}", markup=False)
    return sensors


def _measure_all(
    request: Request, device: torch.device, sensors: Sensors, notes: Console
) -> Iterator[dict[str, Any]]:
    """One row for each (preset, token count, pattern, format or peer)."""
    for preset in request.presets:
        counts = tuple(request.tokens) or preset.tokens
        with notes.status(f"{preset.name}: weights") as status:
            data = Data(preset.problem(max_tokens=max(counts)), device, request.seed)
            layers = [Layer(data, fmt, request.act) for fmt in request.formats]
            for count in counts:
                for pattern in request.patterns:
                    status.update(f"{preset.name}: {count} tokens, {pattern}")
                    cases = [Case(layer, count, pattern) for layer in layers]
                    others = [PeerCase(name, data, count, pattern) for name in request.others]
                    for row in measure(cases, others, request, sensors):
                        yield {"preset": preset.name} | row
                    del cases, others  # graphs and peers' weights, before the next ones are made
            for layer in layers:
                layer.close()
            del layers, data
        torch.cuda.empty_cache()


def ladder_rows(arch: str) -> list[dict[str, Any]]:
    """Every rung that calls on ``arch`` can get, with its reason."""
    return [
        {
            "arch": arch,
            "operand": operand,
            "config": str(rung),
            "reason": variants.rung_reason(arch, operand, rung),
        }
        for operand in variants.operands(arch)
        for rung in variants.ladder(arch, operand)
    ]
