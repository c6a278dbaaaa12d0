"""The layer in plain PyTorch, on any device: what the kernels are compared with.

It follows the format: dequantize -> fp32 matmul -> bias and activation -> requantize -> dequantize
-> fp32 matmul -> rows in bf16 -> weighted fp32 sum in the order of k -> bf16. Names and signatures
are those of ``api``, without its checks. Written for clarity, one expert after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import torch

from moe_ep_jit import formats
from moe_ep_jit.formats import BlockScaled
from moe_ep_jit.problem import Problem, SwiGLU, check

if TYPE_CHECKING:
    from moe_ep_jit.weights import PreparedWeights
    from moe_ep_jit.workspace import Workspace

#: Columns of the blocks that ``error`` looks at, and the part of the row's norm below which a block
#: is compared absolutely.
BLOCK_COLUMNS = 64
SMALL_BLOCK = 1e-3


@dataclass
class Stages:
    """What one stage leaves for the next, kept as ``ws.reference``.

    slots[e]  int64: the (token * top_k + k) that expert e works on, in rising order
    x         fp32 [live tokens, hidden]: the operand as GEMM 1 sees it
    h[e]      fp32 [rows, intermediate]: the operand as GEMM 2 sees it
    y         bf16 [live tokens * top_k, hidden]: the experts' rows; a skipped slot's row is zero
    """

    slots: list[torch.Tensor]
    x: torch.Tensor
    h: dict[int, torch.Tensor] = field(default_factory=dict)
    y: torch.Tensor | None = None


def moe_forward(
    x: torch.Tensor | BlockScaled,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: PreparedWeights,
    ws: Workspace | None = None,
    *,
    out: torch.Tensor | None = None,
    num_tokens: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """One MoE layer: x [tokens, hidden] bf16 or BlockScaled -> bf16 [tokens, hidden].

    topk_ids, topk_weights  [tokens, top_k]; an id that is no expert's contributes nothing. The
                            stages take the places of a layer that has a map of them
    ws, out, num_tokens     as ``combine`` has them; ws may be None
    """
    ws = SimpleNamespace() if ws is None else ws
    topk_ids = weights.topology.physical_ids(topk_ids, weights.rank, weights.problem.max_tokens)
    x = quantize(x, weights.problem)
    dispatch(x, topk_ids, ws, weights, num_tokens=num_tokens)
    gate_up(ws, weights)
    down(ws, weights)
    return combine(topk_ids, topk_weights, ws, weights, out=out, num_tokens=num_tokens)


def quantize(x: torch.Tensor | BlockScaled, problem: Problem) -> torch.Tensor | BlockScaled:
    """x [tokens, hidden] -> the operand of GEMM 1 for ``problem.act``: x itself or BlockScaled.

    A BlockScaled x passes as it is; its format must be ``problem.act``, or that "bf16".
    """
    if isinstance(x, BlockScaled):
        check(
            problem.act in ("bf16", x.format.name),
            f"x: expected bf16 or {problem.act} (the layer's act), got BlockScaled "
            f"{x.format.name}; dequantize it to bf16 first",
        )
        return x
    return x if problem.act == "bf16" else formats.quantize(x, problem.act)


def dispatch(
    x: torch.Tensor | BlockScaled,
    topk_ids: torch.Tensor,
    ws: Workspace,
    weights: PreparedWeights,
    *,
    num_tokens: torch.Tensor | int | None = None,
) -> None:
    """Sort the live (token, k) slots by expert, count them, and expand the live rows of x."""
    live = live_tokens(topk_ids.shape[0], num_tokens)
    ids = topk_ids[:live].flatten()
    slots = [torch.nonzero(ids == e).flatten() for e in range(weights.problem.num_experts)]
    weights.topology.load += torch.tensor([len(s) for s in slots], device=ids.device)
    ws.reference = Stages(slots, _expand(x, live))


def gate_up(ws: Workspace, weights: PreparedWeights) -> None:
    """GEMM 1, bias, activation, and the rounding of its result to ``problem.act``."""
    stages, problem = ws.reference, weights.problem
    bias = weights.bias("w13")
    for expert, slots in _busy(stages):
        rows = stages.x[slots // problem.top_k]
        z = _matmul(rows, weights.dequantize("w13", expert=expert))
        if bias is not None:
            z += bias[expert]
        gate, up = z.chunk(2, dim=-1)
        h = swiglu(gate, up, problem.activation)
        if problem.act == "bf16":
            h = h.bfloat16().float()
        elif problem.act == "nvfp4":
            scale = weights.h_global_scale[expert]
            h = formats.dequantize(formats.quantize(h, "nvfp4", scale))
        else:
            h = formats.dequantize(formats.quantize(h, problem.act))
        stages.h[expert] = h


def down(ws: Workspace, weights: PreparedWeights) -> None:
    """GEMM 2 and its bias, each row rounded to bf16."""
    stages, problem = ws.reference, weights.problem
    bias = weights.bias("w2")
    num_slots = len(stages.x) * problem.top_k
    stages.y = torch.zeros(num_slots, problem.hidden, dtype=torch.bfloat16, device=stages.x.device)
    for expert, slots in _busy(stages):
        y = _matmul(stages.h.pop(expert), weights.dequantize("w2", expert=expert))
        if bias is not None:
            y += bias[expert]
        stages.y[slots] = y.bfloat16()


def combine(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    ws: Workspace,
    weights: PreparedWeights,
    *,
    out: torch.Tensor | None = None,
    num_tokens: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Weighted sum of each token's rows, k = 0 .. top_k - 1 in fp32 -> bf16 [tokens, hidden].

    Written to ``out``, else to ``ws.output``, else to a new tensor of zeros. Rows at and beyond
    ``num_tokens`` are not written; a live row whose ids are all skipped is zero.
    """
    problem, y = weights.problem, ws.reference.y
    tokens = topk_ids.shape[0]
    live = live_tokens(tokens, num_tokens)
    if out is None:
        out = getattr(ws, "output", None)
    if out is None:
        out = torch.zeros(tokens, problem.hidden, dtype=torch.bfloat16, device=y.device)
    y = y.view(-1, problem.top_k, problem.hidden)[:live]
    ids, scales = topk_ids[:live], topk_weights[:live].float()
    valid = (ids >= 0) & (ids < problem.num_experts)
    out[:live] = weighted_sum(y.unbind(1), valid, scales).to(out.dtype)
    return out[:tokens]


def carried(y: torch.Tensor, combine_wire: str) -> torch.Tensor:
    """The experts' rows, bf16 [rows, hidden], as they come back between ranks: fp32.

    combine_wire  "bf16": as they are. "mxfp8": every row rounded, a rank's own too, so that results
                  do not depend on where an expert is. An element is then off by at most 1/16 of
                  itself or 2^-17 of its block's largest, whichever is more; Gaussian rows, and
                  with them the layer's result, by 2.65 % (relative L2). Errors add in quadrature:
                  7.1 instead of 6.6 % against a dense bf16 layer for MXFP8, 23.5 instead of
                  23.3 % for NVFP4 on both sides
    """
    if combine_wire == "bf16":
        return y.float()
    return formats.dequantize(formats.quantize(y, combine_wire))


def weighted_sum(
    rows: Iterable[torch.Tensor], valid: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """The k-th rows [tokens, hidden] times ``scales[:, k]`` in the order of k -> fp32 sum.

    valid, scales  [tokens, top_k]; a slot that is not valid adds nothing, whatever it holds
    """
    total = 0.0
    for k, y in enumerate(rows):
        # not even a weight that is NaN
        total = total + torch.where(valid[:, k, None], y.float() * scales[:, k, None], 0.0)
    return total


def swiglu(gate: torch.Tensor, up: torch.Tensor, activation: SwiGLU) -> torch.Tensor:
    """gate, up fp32 of one shape -> g * sigmoid(alpha * g) * (u + beta), clamped by the limit."""
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
    return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.beta)


def dense_bf16(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    activation: SwiGLU | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The layer without quantization: fp32 math on bf16 operands -> fp32 [tokens, hidden].

    x [tokens, hidden]; w13 [experts, 2 * intermediate, hidden], gate rows first; w2 [experts,
    hidden, intermediate]; biases [experts, ...]. The yardstick for a format's accuracy.
    """
    activation = SwiGLU() if activation is None else activation
    x = x.bfloat16().float()
    out = torch.zeros_like(x)
    for expert in range(len(w13)):
        tokens, ks = torch.nonzero(topk_ids == expert, as_tuple=True)
        if len(tokens) == 0:
            continue
        z = _matmul(x[tokens], w13[expert].bfloat16().float())
        z = z if w13_bias is None else z + w13_bias[expert].float()
        h = swiglu(*z.chunk(2, dim=-1), activation)
        y = _matmul(h, w2[expert].bfloat16().float())
        y = y if w2_bias is None else y + w2_bias[expert].float()
        out.index_add_(0, tokens, y * topk_weights[tokens, ks, None].float())
    return out


class Errors(NamedTuple):
    """Relative L2 errors: of the whole, of the worst row, of the worst (row, 64 columns) block."""

    whole: float
    worst_row: float
    worst_block: float


def error(got: torch.Tensor, want: torch.Tensor) -> Errors:
    """got, want [rows, columns] -> Errors, relative to ``want``.

    A block below 1e-3 of its row's norm is compared absolutely: its error is taken relative to the
    row's mean (root mean square) block. Elements that are NaN, or the same Inf, in both agree; NaN
    or Inf in one of them alone is an infinite error.
    """
    check(
        got.shape == want.shape and got.dim() == 2,
        f"error: expected two tensors of one shape [rows, columns], got {tuple(got.shape)} and "
        f"{tuple(want.shape)}",
    )
    columns = want.shape[1]
    num_blocks = -(-columns // BLOCK_COLUMNS)
    pad = (0, num_blocks * BLOCK_COLUMNS - columns)
    difference, norm, worst_row, worst_block = 0.0, 0.0, 0.0, 0.0
    step = max(1, (1 << 24) // max(1, columns))
    for first in range(0, len(want), step):
        g, w = got[first : first + step].double(), want[first : first + step].double()
        same = (g == w) | (g.isnan() & w.isnan())
        d = (g - w).masked_fill_(same, 0.0).nan_to_num_(nan=float("inf"))
        w = w.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        d2, w2 = (
            torch.nn.functional.pad(t, pad).view(len(t), num_blocks, -1).square().sum(-1)
            for t in (d, w)
        )
        row_d2, row_w2 = d2.sum(-1), w2.sum(-1)
        small = w2 < SMALL_BLOCK**2 * row_w2[:, None]
        block_w2 = torch.where(small, row_w2[:, None] / num_blocks, w2)
        worst_row = max(worst_row, _largest_ratio(row_d2, row_w2))
        worst_block = max(worst_block, _largest_ratio(d2, block_w2))
        difference += row_d2.sum().item()
        norm += row_w2.sum().item()
    whole = _largest_ratio(torch.tensor([difference]), torch.tensor([norm]))
    return Errors(whole, worst_row, worst_block)


def _largest_ratio(d2: torch.Tensor, w2: torch.Tensor) -> float:
    """The largest sqrt(d2 / w2), where 0 / 0 is 0 and anything else over 0 is infinite."""
    ratio = torch.where(d2 == 0, 0.0, d2 / w2)
    return ratio.max().sqrt().item()


def live_tokens(tokens: int, num_tokens: torch.Tensor | int | None) -> int:
    """Rows that count: ``num_tokens`` within 0..tokens, or all. Waits where it is on a device."""
    return tokens if num_tokens is None else min(max(int(num_tokens), 0), tokens)


def _expand(x: torch.Tensor | BlockScaled, live: int) -> torch.Tensor:
    """The first ``live`` rows of x in fp32."""
    if not isinstance(x, BlockScaled):
        return x[:live].float()
    g = x.global_scale
    if g is not None:
        g = g.expand(x.shape[:-1])[:live]
    return formats.dequantize(BlockScaled(x.format, x.data[:live], x.sf[:live], g))


def _busy(stages: Stages) -> Iterator[tuple[int, torch.Tensor]]:
    """The experts that have rows."""
    return ((expert, slots) for expert, slots in enumerate(stages.slots) if len(slots))


def _matmul(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """rows [n, K] times weight [m, K] -> [n, m], all fp32, never tf32."""
    with _full_precision():
        return rows @ weight.t()


@contextmanager
def _full_precision() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    name = "fp32_precision" if hasattr(matmul, "fp32_precision") else "allow_tf32"
    before = getattr(matmul, name)
    setattr(matmul, name, "ieee" if name == "fp32_precision" else False)
    try:
        yield
    finally:
        setattr(matmul, name, before)
