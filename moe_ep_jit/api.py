"""The layer's forward and its stages: every check of a call starts here.

``moe_forward`` is quantize -> dispatch -> gate_up -> down -> combine. On CUDA the five run as one
call of one compiled host function; called apart, each stage runs its part of that same object. On
the CPU, or with ``backend="reference"``, they are the functions of ``reference``.

A message costs more than the check itself, so the checks of a call are an ``if`` and a ``raise``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moe_ep_jit import formats, layout, reference
from moe_ep_jit.formats import BlockScaled, check_rows
from moe_ep_jit.launch import SLOT, Binding, Launch, accepts, bind, check_config, warmup, x_kind_of
from moe_ep_jit.problem import Problem, check, check_problem
from moe_ep_jit.transport import Route
from moe_ep_jit.weights import PreparedWeights, check_prepared
from moe_ep_jit.workspace import Workspace, check_workspace

_ID_WORDS = {torch.int32: 1, torch.int64: 2}
_WEIGHT_TYPES = {getattr(torch, name): code for name, code in layout.TOPK_WEIGHT_TYPES.items()}

_STAGES = SLOT["stages"]
_TOKENS = SLOT["tokens"]
_NUM_TOKENS = SLOT["num_tokens"]
_X, _X_STRIDE, _X_SF = SLOT["x"], SLOT["x_stride"], SLOT["x_sf"]
_X_GLOBAL_SCALE, _X_GLOBAL_STRIDE = SLOT["x_global_scale"], SLOT["x_global_stride"]
_IDS, _IDS_STRIDE, _IDS_WORDS = SLOT["ids"], SLOT["ids_stride"], SLOT["ids_words"]
_WEIGHTS, _WEIGHTS_STRIDE = SLOT["topk_weights"], SLOT["topk_weights_stride"]
_WEIGHTS_TYPE = SLOT["topk_weights_type"]
_OUT, _OUT_STRIDE = SLOT["out"], SLOT["out_stride"]
_STREAM = SLOT["stream"]


@dataclass
class Round:
    """What dispatch leaves in the workspace for the stages after it, until combine has run.

    num_tokens    as dispatch had it; held, since the kernels of every stage read its memory
    next          the stage that is due
    launch, args  the compiled object and its arguments; None and [] where the reference serves
    route         with several ranks: transport.Route, which way the rows went; else None
    """

    binding: Binding
    weights: PreparedWeights
    tokens: int
    num_tokens: torch.Tensor | None
    next: str
    launch: Launch | None
    args: list[Any]
    route: Route | None = None


def moe_forward(
    x: torch.Tensor | BlockScaled,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: PreparedWeights,
    ws: Workspace,
    *,
    out: torch.Tensor | None = None,
    num_tokens: torch.Tensor | None = None,
    config: Any = None,
) -> torch.Tensor:
    """One MoE layer: the experts' weighted sum for each token, bf16 [tokens, hidden].

    x             [tokens, hidden] bf16, or BlockScaled with linear scales; 0..max_tokens rows, rows
                  on 16-byte boundaries. Its format must be the layer's ``act``, or that bf16
    topk_ids      [tokens, top_k] int32 or int64; an id that is no expert's (-1) adds nothing,
                  repeats are summed. Logical experts, once ``update_topology`` has placed them
    topk_weights  [tokens, top_k] fp32, bf16, fp16 or fp64
    out           None: the result is a view of ``ws.output`` and dies with the next call of any
                  layer that shares ``ws``. Else bf16 [>= tokens, hidden]: written to and returned
                  as it is; it may alias x. Nothing is copied in either case
    num_tokens    int32 tensor of one element on the same device: rows at and beyond it are neither
                  read nor written. None: all rows count
    config        a rung of ``variants.ladder``; None: chosen from the number of tokens. The
                  reference has none and looks at none

    With several ranks every rank calls, with 0 tokens too. With transport "collective" it waits on
    the host for the others, a BlockScaled x must be what crosses the wire (``problem.payload``),
    and temporaries, a few times the result in size, come from torch's allocator. With "symm" the
    kernels wait, and what they find wrong (too many rows, another layer on another rank, a rank
    that does not come) makes the result NaN and the next call, or ``ws.check()``, raise.

    A live row whose ids are all -1 is zero. Runs on ``torch.cuda.current_stream`` of the tensors'
    device, waits for nothing, allocates nothing (with a map of experts: a few temporaries from
    torch's allocator); capturable once ``warmup`` has run.
    ValueError, TypeError: a mistake of the caller, nothing has changed. RuntimeError: a closed
    workspace, one that two streams used at once, kernels missing under a capture, a rank that did
    not come within the workspace's timeout.
    """
    binding = _enter(weights, ws)
    problem = binding.problem
    tokens = _check_x(x, binding, ws)
    _check_routing("topk_ids", topk_ids, tokens, problem, ws)
    _check_routing("topk_weights", topk_weights, tokens, problem, ws)
    if out is not None:
        _check_out(out, tokens, problem, ws)
    if num_tokens is not None:
        _check_num_tokens(num_tokens, ws)
    topk_ids = _places(topk_ids, binding, weights)

    if ws.arch is not None:
        launch = binding.launch(ws, weights, x_kind_of(x), tokens, config)
        args = launch.args.copy()
        _put_input(args, x, topk_ids, tokens, num_tokens)
        stale = ws.next_output()
        result = _result(binding, ws, tokens, out)
        _put_output(args, topk_weights, result)
        _run(launch, args, layout.STAGE_ALL, ws, x, topk_ids, topk_weights, num_tokens, result)
        _poison(stale, out)
        return result

    if ws.exchange is not None:
        _check_local_config(config, binding, ws)
        route, rows = _send(x, topk_ids, num_tokens, binding, ws, weights)
        ones = _ones(route)
        y = moe_forward(rows, route.expert_ids, ones, binding.local, ws.local, config=config)
        stale = ws.next_output()
        result = _result(binding, ws, tokens, out)
        ws.exchange.combine(route, y, topk_weights, result)
        _poison(stale, out)
        return result

    stale = ws.next_output()
    result = _result(binding, ws, tokens, out)
    operand = reference.quantize(x, problem)
    reference.dispatch(operand, topk_ids, ws, weights, num_tokens=num_tokens)
    _poison(stale, out)
    reference.gate_up(ws, weights)
    reference.down(ws, weights)
    reference.combine(topk_ids, topk_weights, ws, weights, out=result, num_tokens=num_tokens)
    ws.reference = None
    return result


def quantize(x: torch.Tensor | BlockScaled, problem: Problem) -> torch.Tensor | BlockScaled:
    """x [tokens, hidden] bf16 -> what the experts read: x itself (act "bf16") or BlockScaled.

    With several ranks, what crosses the wire (``problem.payload``).

    Optional: ``dispatch`` and ``moe_forward`` take bf16 and round it alike, bit for bit, in the
    kernel that moves it. A BlockScaled x passes. ValueError for an unresolved ``problem.act``
    (``weights.problem`` has it), a wrong size or format.
    """
    check_problem(problem)
    check(
        problem.is_resolved,
        'problem: act or format is "auto" until prepare_weights has decided; pass weights.problem',
    )
    if not isinstance(x, (torch.Tensor, BlockScaled)):
        raise TypeError(f"x: expected a tensor or BlockScaled, got {type(x).__name__}")
    _check_x_form(x, problem)
    if isinstance(x, BlockScaled) or problem.payload == "bf16":
        return x
    return formats.quantize(x, problem.payload)


def dispatch(
    x: torch.Tensor | BlockScaled,
    topk_ids: torch.Tensor,
    ws: Workspace,
    weights: PreparedWeights,
    *,
    num_tokens: torch.Tensor | None = None,
    config: Any = None,
) -> None:
    """Begin a round: bring each live row of x to its experts. Arguments as in ``moe_forward``.

    ``gate_up``, ``down`` and ``combine`` follow, in that order and on the same workspace.
    """
    binding = _enter(weights, ws)
    tokens = _check_x(x, binding, ws)
    _check_routing("topk_ids", topk_ids, tokens, binding.problem, ws)
    if num_tokens is not None:
        _check_num_tokens(num_tokens, ws)
    topk_ids = _places(topk_ids, binding, weights)

    launch, args, route = None, [], None
    if ws.arch is not None:
        launch = binding.launch(ws, weights, x_kind_of(x), tokens, config)
        args = launch.args.copy()
        _put_input(args, x, topk_ids, tokens, num_tokens)
        _run(launch, args, layout.STAGE_DISPATCH, ws, x, topk_ids, num_tokens)
    elif ws.exchange is not None:
        _check_local_config(config, binding, ws)
        route, rows = _send(x, topk_ids, num_tokens, binding, ws, weights)
        dispatch(rows, route.expert_ids, ws.local, binding.local, config=config)
    else:
        operand = reference.quantize(x, binding.problem)
        reference.dispatch(operand, topk_ids, ws, weights, num_tokens=num_tokens)
    _poison(ws.next_output(), None)
    ws.round = Round(binding, weights, tokens, num_tokens, "gate_up", launch, args, route)


def gate_up(ws: Workspace, weights: PreparedWeights) -> None:
    """First grouped GEMM of the round, its bias, activation and requantization.

    ValueError out of order, or with other weights than ``dispatch`` had.
    """
    _stage("gate_up", "down", layout.STAGE_GATE_UP, ws, weights, reference.gate_up)


def down(ws: Workspace, weights: PreparedWeights) -> None:
    """Second grouped GEMM of the round and its bias, each row to its token's slot.

    ValueError as in ``gate_up``.
    """
    _stage("down", "combine", layout.STAGE_DOWN, ws, weights, reference.down)


def combine(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    ws: Workspace,
    weights: PreparedWeights,
    *,
    out: torch.Tensor | None = None,
    num_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """End the round: each token's weighted sum, k = 0..top_k-1 in fp32, bf16 [tokens, hidden].

    topk_ids    as ``dispatch`` had them
    num_tokens  None: what ``dispatch`` had; else the same count
    topk_weights, out and the result are as in ``moe_forward``.
    """
    round_ = _round("combine", ws, weights)
    problem, tokens = round_.binding.problem, round_.tokens
    _check_routing("topk_ids", topk_ids, tokens, problem, ws)
    _check_routing("topk_weights", topk_weights, tokens, problem, ws)
    if out is not None:
        _check_out(out, tokens, problem, ws)
    if num_tokens is not None:
        _check_num_tokens(num_tokens, ws)
    topk_ids = _places(topk_ids, round_.binding, weights)

    result = _result(round_.binding, ws, tokens, out)
    if round_.launch is not None:
        _put_ids(round_.args, topk_ids)
        _put_output(round_.args, topk_weights, result)
        if num_tokens is not None:
            round_.args[_NUM_TOKENS] = num_tokens.data_ptr()
        given = (topk_ids, topk_weights, num_tokens, round_.num_tokens, result)
        _run(round_.launch, round_.args, layout.STAGE_COMBINE, ws, *given)
    elif round_.route is not None:
        route, local = round_.route, round_.binding.local
        y = combine(route.expert_ids, _ones(route), ws.local, local)
        ws.exchange.combine(route, y, topk_weights, result)
    else:
        num_tokens = round_.num_tokens if num_tokens is None else num_tokens
        reference.combine(topk_ids, topk_weights, ws, weights, out=result, num_tokens=num_tokens)
        ws.reference = None
    ws.round = None
    return result


def _enter(weights: PreparedWeights, ws: Workspace) -> Binding:
    """The checks before a round begins, and the binding of weights and workspace."""
    check_workspace(ws)
    ws.begin()
    if ws.round is not None:
        raise ValueError(
            f"workspace: expected no round in progress, got one that waits for {ws.round.next}; "
            "finish it with combine, or drop it with ws.reset()"
        )
    check_prepared(weights)
    binding = bind(ws, weights)
    if not binding.is_warm:
        # Every rank comes here in its first call: nobody's kernels wait for one that compiles.
        warmup(ws, weights, x_kinds=("bf16", binding.problem.act))
    return binding


def _round(stage: str, ws: Workspace, weights: PreparedWeights) -> Round:
    """The round that ``stage`` continues; ValueError out of order or with other weights."""
    check_workspace(ws)
    ws.begin()
    round_ = ws.round
    if round_ is None or round_.next != stage:
        due = "dispatch" if round_ is None else round_.next
        raise ValueError(
            f"{stage}: expected dispatch, gate_up, down, combine in that order, but {due} is due"
        )
    if round_.weights is not weights:
        raise ValueError(f"{stage}: expected the weights that dispatch was called with, got others")
    return round_


def _stage(
    name: str, following: str, bit: int, ws: Workspace, weights: PreparedWeights, plain: Any
) -> None:
    round_ = _round(name, ws, weights)
    if round_.launch is not None:
        _run(round_.launch, round_.args, bit, ws)
    elif round_.route is not None:
        _stage(name, following, bit, ws.local, round_.binding.local, plain)
    else:
        plain(ws, weights)
    round_.next = following


def _places(topk_ids: torch.Tensor, binding: Binding, weights: PreparedWeights) -> torch.Tensor:
    """``topk_ids`` of logical experts as those of places; the same tensor without a map."""
    return weights.topology.physical_ids(topk_ids, weights.rank, binding.problem.max_tokens)


def _send(
    x: torch.Tensor | BlockScaled,
    topk_ids: torch.Tensor,
    num_tokens: torch.Tensor | None,
    binding: Binding,
    ws: Workspace,
    weights: PreparedWeights,
) -> tuple[Route, torch.Tensor | BlockScaled]:
    """Agree with the other ranks on a round and exchange its rows: (route, rows received)."""
    problem = binding.problem
    if isinstance(x, BlockScaled) and x.format.name != problem.payload:
        raise ValueError(
            f"x: expected bf16 or BlockScaled in {problem.payload} (what crosses the wire), got "
            f"BlockScaled in {x.format.name}; dequantize it to bf16, or build the Problem with "
            f'wire="{x.format.name}"'
        )
    ws.local.begin()  # what it has to say must come before the others are made to wait
    live = reference.live_tokens(len(topk_ids), num_tokens)
    route = ws.exchange.route(problem, topk_ids, live)
    weights.topology.load.add_(route.counts)
    return route, ws.exchange.dispatch(route, x)


def _check_local_config(config: Any, binding: Binding, ws: Workspace) -> None:
    """Refuse or load a rung that the caller chose, before the other ranks count on this one."""
    if config is not None and ws.local.arch is not None:
        check_config(ws.local.arch, config)
        local = bind(ws.local, binding.local)
        local.rung(ws.local, binding.local, binding.problem.payload, config)


def _ones(route: Route) -> torch.Tensor:
    """Weights of the local layer: a received row is its own token, weighted where it came from."""
    return torch.ones(route.expert_ids.shape, device=route.expert_ids.device)


def _check_x(x: torch.Tensor | BlockScaled, binding: Binding, ws: Workspace) -> int:
    """Check x and return its number of rows."""
    if isinstance(x, BlockScaled):
        _check_x_form(x, binding.problem)
        data = x.data
        if not x.sf.is_contiguous():
            raise ValueError("x.sf: expected contiguous scales; pass x.sf.contiguous()")
        scale = x.global_scale
        if scale is not None and scale.numel() > 1 and not scale.is_contiguous():
            raise ValueError("x.global_scale: expected contiguous; pass it through .contiguous()")
        if scale is not None and scale.requires_grad:
            raise ValueError(_grad_message("x.global_scale"))
    elif isinstance(x, torch.Tensor):
        _check_x_form(x, binding.problem)
        data = x
    else:
        raise TypeError(
            f"x: expected a bf16 tensor [tokens, hidden] or BlockScaled, got {type(x).__name__}"
        )
    tokens = data.shape[0]
    if data.device != ws.device:
        raise ValueError(_device_message("x", data, ws))
    if tokens > binding.max_tokens:
        problem = binding.problem
        if tokens > problem.max_tokens:
            raise ValueError(
                f"x: expected at most max_tokens={problem.max_tokens} rows, got {tokens}; build "
                "the workspace for more, or split the batch"
            )
        raise ValueError(
            f"x: expected at most max_recv_rows={problem.recv_rows} rows of (token, k), got "
            f"{tokens * problem.top_k} for {tokens} tokens; raise it, or split the batch"
        )
    check_rows("x", data, tokens)
    return tokens


def _check_x_form(x: torch.Tensor | BlockScaled, problem: Problem) -> None:
    """Type, format and shape of x, wherever it is."""
    if isinstance(x, BlockScaled):
        if not accepts(problem.act, x.format.name):
            raise ValueError(
                f"x: expected bf16 or BlockScaled in {problem.act} (the layer's act), got "
                f"BlockScaled in {x.format.name}; dequantize it to bf16 first"
            )
    else:
        if x.dtype is not torch.bfloat16:
            raise TypeError(
                f"x: expected torch.bfloat16 (or BlockScaled), got {x.dtype}; pass "
                "x.to(torch.bfloat16)"
            )
        if x.requires_grad:
            raise ValueError(_grad_message("x"))
    shape = x.shape
    if len(shape) != 2 or shape[1] != problem.hidden:
        raise ValueError(
            f"x: expected [tokens, hidden={problem.hidden}], got {list(shape)}; flatten leading "
            "dimensions with x.reshape(-1, x.shape[-1])"
        )


def _check_routing(
    name: str, tensor: torch.Tensor, tokens: int, problem: Problem, ws: Workspace
) -> None:
    """topk_ids or topk_weights: [tokens, top_k] of a known dtype, rows of any stride."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    known = _ID_WORDS if name == "topk_ids" else _WEIGHT_TYPES
    if tensor.dtype not in known:
        raise TypeError(
            f"{name}: expected one of {', '.join(map(str, known))}, got {tensor.dtype}; pass "
            f"{name}.to({next(iter(known))})"
        )
    shape = tensor.shape
    if len(shape) != 2 or shape[0] != tokens or shape[1] != problem.top_k:
        raise ValueError(
            f"{name}: expected [tokens={tokens}, top_k={problem.top_k}], got {list(shape)}"
        )
    if tensor.device != ws.device:
        raise ValueError(_device_message(name, tensor, ws))
    if tensor.requires_grad:
        raise ValueError(_grad_message(name))
    if tensor.stride(1) != 1 and problem.top_k > 1 and tokens > 0:
        raise ValueError(
            f"{name}: expected a token's entries next to each other (inner stride 1), got stride "
            f"{tensor.stride(1)}; pass {name}.contiguous()"
        )


def _check_out(out: torch.Tensor, tokens: int, problem: Problem, ws: Workspace) -> None:
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out: expected a bf16 tensor, got {type(out).__name__}")
    if out.dtype is not torch.bfloat16:
        raise TypeError(
            f"out: expected torch.bfloat16, got {out.dtype}; pass a bf16 buffer, convert it after"
        )
    shape = out.shape
    if len(shape) != 2 or shape[0] < tokens or shape[1] != problem.hidden:
        raise ValueError(
            f"out: expected [at least tokens={tokens}, hidden={problem.hidden}], got {list(shape)}"
        )
    if out.device != ws.device:
        raise ValueError(_device_message("out", out, ws))
    if out.requires_grad:
        raise ValueError(_grad_message("out"))
    check_rows("out", out, tokens)
    if tokens > 1 and out.stride(0) < problem.hidden:
        raise ValueError(
            f"out: expected rows that do not overlap (row stride at least {problem.hidden}), got "
            f"row stride {out.stride(0)}; pass a buffer that is not expanded"
        )


def _check_num_tokens(num_tokens: torch.Tensor, ws: Workspace) -> None:
    if not isinstance(num_tokens, torch.Tensor) or num_tokens.dtype is not torch.int32:
        got = getattr(num_tokens, "dtype", type(num_tokens).__name__)
        raise TypeError(
            f"num_tokens: expected an int32 tensor of one element, got {got}; pass "
            "torch.tensor([n], dtype=torch.int32, device=x.device), or slice x, topk_ids and "
            "topk_weights to n rows"
        )
    if num_tokens.numel() != 1:
        raise ValueError(f"num_tokens: expected one element, got shape {list(num_tokens.shape)}")
    if num_tokens.device != ws.device:
        raise ValueError(_device_message("num_tokens", num_tokens, ws))


def _device_message(name: str, tensor: torch.Tensor, ws: Workspace) -> str:
    return (
        f"{name}: expected on the workspace's device {ws.device}, got {tensor.device}; move it, or "
        f'build Workspace(problem, device="{tensor.device}")'
    )


def _grad_message(name: str) -> str:
    return (
        f"{name}: expected a tensor that requires no grad (the layer is inference only), got one "
        f"that does; pass {name}.detach()"
    )


def _put_input(
    args: list[Any],
    x: torch.Tensor | BlockScaled,
    topk_ids: torch.Tensor,
    tokens: int,
    num_tokens: torch.Tensor | None,
) -> None:
    """The arguments that dispatch reads."""
    args[_TOKENS] = tokens
    if num_tokens is not None:
        args[_NUM_TOKENS] = num_tokens.data_ptr()
    if isinstance(x, BlockScaled):
        args[_X] = x.data.data_ptr()
        args[_X_STRIDE] = x.data.stride(0)
        args[_X_SF] = x.sf.data_ptr()
        if x.global_scale is not None:
            args[_X_GLOBAL_SCALE] = x.global_scale.data_ptr()
            args[_X_GLOBAL_STRIDE] = int(x.global_scale.numel() > 1)
    else:
        args[_X] = x.data_ptr()
        args[_X_STRIDE] = x.stride(0)
    _put_ids(args, topk_ids)


def _put_ids(args: list[Any], topk_ids: torch.Tensor) -> None:
    args[_IDS] = topk_ids.data_ptr()
    args[_IDS_STRIDE] = topk_ids.stride(0)
    args[_IDS_WORDS] = _ID_WORDS[topk_ids.dtype]


def _put_output(args: list[Any], topk_weights: torch.Tensor, result: torch.Tensor) -> None:
    """The arguments that combine reads beyond those of dispatch."""
    args[_WEIGHTS] = topk_weights.data_ptr()
    args[_WEIGHTS_STRIDE] = topk_weights.stride(0)
    args[_WEIGHTS_TYPE] = _WEIGHT_TYPES[topk_weights.dtype]
    args[_OUT] = result.data_ptr()
    args[_OUT_STRIDE] = result.stride(0)


def _run(launch: Launch, args: list[Any], stages: int, ws: Workspace, *tensors: Any) -> None:
    """Launch stages on the device's current stream. tensors: what the call brought along."""
    args[_STAGES] = stages
    if ws.on_gpu:
        # The handle of torch.cuda.current_stream without its wrapper, which costs 2 us.
        args[_STREAM] = torch._C._cuda_getCurrentRawStream(ws.device.index)
        ws.note_stream(args[_STREAM])
    launch.run(args, tensors)


def _result(binding: Binding, ws: Workspace, tokens: int, out: torch.Tensor | None) -> torch.Tensor:
    """Where the round ends: the caller's ``out``, or the first rows of the workspace's buffer."""
    return binding.outputs[ws.turn][:tokens] if out is None else out


def _poison(stale: torch.Tensor | None, out: torch.Tensor | None) -> None:
    """Debug mode: NaN over the result before this one, unless the caller has this one put there.

    Comes after the launch, since x may be that very view.
    """
    if stale is None:
        return
    if out is None or out.untyped_storage().data_ptr() != stale.untyped_storage().data_ptr():
        stale.fill_(float("nan"))
