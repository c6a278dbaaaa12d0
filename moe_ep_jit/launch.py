"""Compiled objects bound to memory: the argument list of the one host function that runs a layer.

A ``Binding`` is one set of weights in one workspace; a ``Launch`` is one rung of it, with every
argument in place but those of the call. ``warmup`` loads or compiles all that calls can need.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from moe_ep_jit import jit, layout, tuned, variants
from moe_ep_jit.formats import BlockScaled
from moe_ep_jit.problem import Problem, check
from moe_ep_jit.transport import Peers
from moe_ep_jit.weights import PreparedWeights, check_prepared
from moe_ep_jit.workspace import Workspace, check_workspace

logger = logging.getLogger("moe_ep_jit")

#: Position of each launch argument.
SLOT = {name: index for index, name in enumerate(layout.LAUNCH_ARGS)}

#: What x may be: bf16, or BlockScaled in one of the formats.
X_KINDS = ("bf16", "mxfp8", "nvfp4")

#: Weight tensors that are launch arguments under their own name.
_WEIGHT_ARGS = ("w13", "w13_sf", "w13_bias", "w2", "w2_sf", "w2_bias", "h_global_scale")

#: Token counts whose rung a binding remembers before it starts over.
_MAX_REMEMBERED = 4096


class Launch:
    """One compiled object with the arguments of one workspace and one set of weights.

    ``args`` is in the order of ``layout.LAUNCH_ARGS``; a call patches its own entries and runs.
    """

    __slots__ = ("args", "device", "function")

    def __init__(self, function: Callable[..., Any], args: list[Any], device: torch.device) -> None:
        self.function = function
        self.args = args
        self.device = device

    def run(self, args: list[Any], tensors: tuple[Any, ...]) -> None:
        """Call the host function on the device that the memory is on.

        tensors  what a call's addresses point into: the emulator's bounds
        """
        index = self.device.index
        if torch.cuda.current_device() == index:
            self.function(*args)
        else:
            with torch.cuda.device(index):
                self.function(*args)


class Binding:
    """Weights checked against a workspace, and the launches that they have had there.

    problem     the workspace's problem for these weights, format and act resolved
    max_tokens  the most rows of x that the workspace holds
    outputs     its output buffers as bf16 [problem.max_tokens, hidden]
    local       with several ranks: the weights as ``ws.local`` takes them, else None
    is_warm     transport="symm": whether all ranks have warmed up for these weights
    """

    def __init__(self, ws: Workspace, weights: PreparedWeights) -> None:
        ws.check_weights(weights)
        self.problem = ws.problem_of(weights)
        self.outputs = ws.outputs_of(self.problem)
        self.max_tokens = self.problem.max_tokens
        if self.problem.num_ranks == 1:  # else only the counts of all ranks tell
            self.max_tokens = min(self.max_tokens, self.problem.recv_rows // self.problem.top_k)
        self.local = None if ws.local is None else weights.local
        self.is_warm = ws.peers is None or ws.is_warm
        key, bindings = id(weights), ws.bindings
        # Weights that go take their binding along: no pointer to freed memory is left behind.
        self.weights = weakref.ref(weights, lambda _: bindings.pop(key, None))
        # Read here and never in a call: what `moe-ep-jit tune` has found on this GPU.
        self._winners = _winners(ws, self.problem, weights)
        self._launches: dict[tuple[str, Any], Launch] = {}
        self._by_tokens: dict[tuple[str, int], Launch] = {}

    def launch(
        self, ws: Workspace, weights: PreparedWeights, x_kind: str, tokens: int, config: Any
    ) -> Launch:
        """The launch for a call of ``tokens`` rows; ``config`` None: what ``choose`` says."""
        if config is not None:
            check_config(ws.arch, config)
            return self.rung(ws, weights, x_kind, config)
        launch = self._by_tokens.get((x_kind, tokens))
        if launch is None:
            launch = self.rung(ws, weights, x_kind, self.choose(ws, weights, tokens))
            if len(self._by_tokens) >= _MAX_REMEMBERED:
                self._by_tokens.clear()
            self._by_tokens[x_kind, tokens] = launch
        return launch

    def choose(self, ws: Workspace, weights: PreparedWeights, tokens: int) -> Any:
        """The rung for a call of ``tokens`` rows: a winner (``tuned.pick``), else the ladder's."""
        winner = tuned.pick(self._winners, tokens)
        if winner is not None:
            return winner
        return variants.choose_rung(self.problem, ws.arch, tokens, weights.operand)

    def rung(self, ws: Workspace, weights: PreparedWeights, x_kind: str, config: Any) -> Launch:
        """The launch of one rung. RuntimeError where it is not loaded and a graph is captured."""
        launch = self._launches.get((x_kind, config))
        if launch is None:
            function = _function(ws, self.problem, weights.kind, x_kind, config)
            args = bound_args(ws, self.problem, weights)
            if ws.emulator is not None:
                launch = ws.emulator.bind(ws, weights, self.problem, function, args)
            else:
                launch = Launch(function, args, ws.device)
            self._launches[x_kind, config] = launch
        return launch


def bind(ws: Workspace, weights: PreparedWeights) -> Binding:
    """The binding of ``weights`` in ``ws``, made and checked the first time."""
    binding = ws.bindings.get(id(weights))
    if binding is None or binding.weights() is not weights:
        binding = ws.bindings[id(weights)] = Binding(ws, weights)
    return binding


def _winners(ws: Workspace, problem: Problem, weights: PreparedWeights) -> dict[int, Any]:
    if not ws.on_gpu:
        return {}
    gpu = torch.cuda.get_device_properties(ws.device).name
    layer = tuned.layer_name(problem, weights.kind)
    return tuned.winners(ws.arch, gpu, layer, weights.operand)


def x_kind_of(x: torch.Tensor | BlockScaled) -> str:
    """ "bf16" for a tensor, the format's name for a ``BlockScaled``."""
    return x.format.name if isinstance(x, BlockScaled) else "bf16"


def check_config(arch: str, config: Any) -> None:
    """TypeError unless ``config`` is a rung of the arch."""
    expected = variants.kernels_module(arch, "config").Config
    if not isinstance(config, expected):
        raise TypeError(
            f"config: expected {expected.__module__}.{expected.__qualname__} or None, got "
            f"{type(config).__name__}; take one of moe_ep_jit.variants.ladder(arch, operand)"
        )


def weights_kinds(arch: str, problem: Problem, operand: str) -> tuple[str, ...]:
    """The kinds of prepared weights that fit an operand; what preparation measures decides among
    them.
    """
    packing = variants.kernels_module(arch, "packing")
    kinds = packing.OPERANDS.items()
    return tuple(k for k, o in kinds if o == operand and k.startswith(problem.format))


def warmup(
    ws: Workspace,
    weights: PreparedWeights | None = None,
    *,
    x_kinds: Iterable[str] = ("bf16",),
    configs: Iterable[Any] | None = None,
) -> None:
    """Compile or load all that calls on ``ws`` can need; afterwards they never compile.

    weights  None: every kind that the workspace's problems can come to, where format="auto" counts
             as "mxfp8"; else these alone
    x_kinds  what x will be: "bf16", and "mxfp8" or "nvfp4" for ``BlockScaled``
    configs  None: every rung of the ladder (``variants.ladder``)
    Runs nothing on the GPU; compiles nothing where the reference serves. With several ranks
    every rank calls, and they leave together, however long one compiles (up to the group's own
    timeout); with transport "collective" x_kinds is what crosses the wire, whatever is passed.
    ValueError, TypeError: a mistake of the caller. RuntimeError: a closed workspace, a cache folder
    that others can write, a library that is missing, kernels to load while a graph is captured.
    """
    check_workspace(ws)
    if weights is not None:
        check_prepared(weights)
    ws.begin()
    x_kinds = tuple(x_kinds)
    for kind in x_kinds:
        check(kind in X_KINDS, f"x_kinds: expected names out of {X_KINDS}, got {kind!r}")
    if ws.local is not None:
        _warmup_ranks(ws, weights, configs)
        return
    if ws.peers is not None:
        _warmup_peers(ws, weights, x_kinds, configs)
        return
    if ws.arch is None:
        if weights is not None:
            bind(ws, weights)
        return
    _warmup_kernels(ws, weights, x_kinds, configs)


def _warmup_kernels(
    ws: Workspace,
    weights: PreparedWeights | None,
    x_kinds: tuple[str, ...],
    configs: Iterable[Any] | None,
) -> None:
    """Load or compile every object that calls can need on this process's own device."""
    if weights is not None:
        wanted = [(bind(ws, weights).problem, weights.kind, weights.operand)]
    else:
        problems = [variants.choose_variant(p, ws.arch).problem for p in ws.problems]
        operands = [ws.operand or variants.operand_of(p, ws.arch) for p in problems]
        wanted = [
            (p, kind, operand)
            for p, operand in zip(problems, operands, strict=True)
            for kind in weights_kinds(ws.arch, p, operand)
        ]
    configs = None if configs is None else tuple(configs)
    for config in configs or ():
        check_config(ws.arch, config)
    rungs = [
        (problem, kind, x_kind, config)
        for problem, kind, operand in wanted
        for config in (variants.ladder(ws.arch, operand) if configs is None else configs)
        for x_kind in x_kinds
        if accepts(problem.act, x_kind)
    ]
    start = time.perf_counter()
    _load_all(ws, rungs)
    if weights is not None:
        for _, _, x_kind, config in rungs:
            bind(ws, weights).rung(ws, weights, x_kind, config)
    logger.info("warm-up: %d objects ready in %.2f s", len(rungs), time.perf_counter() - start)


def _warmup_peers(
    ws: Workspace,
    weights: PreparedWeights | None,
    x_kinds: tuple[str, ...],
    configs: Iterable[Any] | None,
) -> None:
    """Warm up, then wait for the other ranks, however long one compiles: from then on kernels wait
    for each other, and not for ever. What one rank cannot load, or has otherwise, is an error on
    all.
    """
    configs = None if configs is None else tuple(configs)
    said = {"configs": str(configs)}
    if weights is not None:
        said |= {"weights' operand": weights.operand, "format": weights.problem.format}
    load_together(ws.peers, lambda: _warmup_kernels(ws, weights, x_kinds, configs), said)
    if weights is None:
        ws.is_warm = True
    else:
        bind(ws, weights).is_warm = True


def _warmup_ranks(
    ws: Workspace, weights: PreparedWeights | None, configs: Iterable[Any] | None
) -> None:
    """Warm up the experts' own workspace, then wait for the other ranks."""
    if weights is not None:
        binding = bind(ws, weights)
        kinds, local = {binding.problem.payload}, binding.local
    else:
        problems = [variants.choose_variant(p, ws.local.arch).problem for p in ws.problems]
        kinds, local = {p.payload for p in problems}, None
    load_together(
        ws.exchange.peers, lambda: warmup(ws.local, local, x_kinds=sorted(kinds), configs=configs)
    )


def load_together(
    peers: Peers, load: Callable[[], Any], facts: dict[str, Any] | None = None
) -> Any:
    """``load()``, and then wait for the other ranks, however long one compiles (up to the group's
    own timeout). What one rank cannot load, and ``facts`` that differ, are an error on all.
    """
    failure, loaded = None, None
    try:
        loaded = load()
    except Exception as error:  # whatever it is, the others wait for this rank's word
        failure = error
    said = "" if failure is None else f"{type(failure).__name__}: {failure}"
    told = peers.compare((facts or {}) | {"_failure": said}, "warm-up", timeout=0)
    if failure is not None:
        raise failure
    others = [f"rank {r}: {t['_failure']}" for r, t in enumerate(told) if t["_failure"]]
    if others:
        raise RuntimeError(
            f"warm-up: expected every rank to load its kernels, got {'; '.join(others)}; mend it "
            "there and call again on every rank"
        )
    return loaded


def accepts(act: str, x_kind: str) -> bool:
    """Whether experts with activations ``act`` take x of a kind: never requantized silently."""
    return x_kind == "bf16" or act in ("bf16", x_kind)


def _load_all(ws: Workspace, rungs: list[tuple[Problem, str, str, Any]]) -> None:
    """Load every rung into ``ws.functions``; several that are not cached compile in parallel."""
    missing = []
    for rung in rungs:
        if rung in ws.functions:
            continue
        _check_not_capturing(ws)
        try:
            ws.functions[rung] = _load(ws, _what(ws, *rung), compile=False)
        except RuntimeError:
            missing.append(rung)
    if missing:
        logger.info("warm-up: %d of %d objects are not cached", len(missing), len(rungs))
        # The first compiles here: what is wrong (a frozen cache, no compiler) shows before any
        # process is started for the others.
        _function(ws, *missing[0])
    if len(missing) > 2:
        _precompile([_what(ws, *rung) for rung in missing[1:]])
    for rung in missing:
        _function(ws, *rung)


def _precompile(objects: list[dict[str, Any]]) -> None:
    """Compile objects (arguments of ``jit.load``) into the disk cache, on several processes."""
    from moe_ep_jit.tools import precompile  # on a cache miss only

    jobs = [precompile.Job("moe", **what) for what in objects]
    try:
        result = precompile.run(jobs)
    except RuntimeError as error:
        logger.info("warm-up: compiling in this process, one by one: %s", error)
        return
    # What failed there fails again in this process, with its own error.
    logger.info(
        "warm-up: compiled %d objects with %d processes in %.1f s",
        result["compiled"],
        result["workers"],
        result["seconds"],
    )


def _what(ws: Workspace, problem: Problem, kind: str, x_kind: str, config: Any) -> dict[str, Any]:
    """The arguments of ``jit.load`` for one object."""
    module = variants.kernels_module(ws.arch, "facts")
    facts = module.facts(problem, kind, x_kind, config)
    return {
        "facts": facts,
        "arch": ws.arch,
        "build": module.BUILD,
        "name": module.name(facts),
    }


def _function(ws: Workspace, problem: Problem, kind: str, x_kind: str, config: Any) -> Callable:
    """The exported host function of one object, loaded or compiled the first time."""
    key = (problem, kind, x_kind, config)
    function = ws.functions.get(key)
    if function is None:
        _check_not_capturing(ws)
        function = ws.functions[key] = _load(ws, _what(ws, *key))
    return function


def _load(ws: Workspace, what: dict[str, Any], **options: Any) -> Callable[..., Any]:
    """``jit.load`` of one object, or that object as the emulator runs it."""
    function = jit.load("moe", **what, **options)
    if ws.emulator is not None:
        return ws.emulator.function(jit.entry_folder("moe", **what))
    return function


def _check_not_capturing(ws: Workspace) -> None:
    if ws.on_gpu and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "moe_forward: kernels are not loaded and a CUDA graph is being captured; call "
            "moe_ep_jit.warmup(ws, weights) before the capture (with x_kinds= for BlockScaled x, "
            "configs= for rungs off the ladder)"
        )


def bound_args(ws: Workspace, problem: Problem, weights: PreparedWeights) -> list[Any]:
    """The launch arguments with everything in place that no call changes; absent pointers are 0."""
    activation = problem.activation
    values: dict[str, Any] = dict.fromkeys(layout.LAUNCH_ARGS, 0)
    if ws.emulator is not None:
        values["num_sms"] = ws.emulator.num_sms
    else:
        values["num_sms"] = torch.cuda.get_device_properties(ws.device).multi_processor_count
    values["limit"] = math.inf if activation.limit is None else float(activation.limit)
    values["alpha"], values["beta"] = float(activation.alpha), float(activation.beta)
    values["recv_rows"] = problem.recv_rows
    values["error"] = ws.error_address
    values["load"] = weights.topology.load.data_ptr()
    for name, region in layout.regions(problem, weights.operand).items():
        values[name] = ws.base_address + region.offset
    for name in _WEIGHT_ARGS:
        tensor = weights.tensors.get(name)
        values[name] = 0 if tensor is None else tensor.data_ptr()
    return list(values.values())
