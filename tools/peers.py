"""Other people's layers on the same data, for comparison: one function each, which says what it
times. A peer runs in the same process, in a CUDA graph, its weights as cold as ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from moe_ep_jit import reference
from moe_ep_jit.problem import Problem, SwiGLU, check

#: Rows and columns of a weight block that shares a scale in FlashInfer's FP8 layer.
_BLOCK = 128
_E4M3_MAX = 448.0


@dataclass(frozen=True)
class Call:
    """One peer ready to be timed.

    run           ``run(weights)`` is what is timed
    output        what ``run`` returned -> bf16 or fp32 [tokens, hidden], outside of the timing
    """

    run: Callable[[Any], torch.Tensor]
    output: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Peer:
    """One peer.

    format       of its rows: its name and what its weights are
    weight_bits  that a weight takes in memory
    refuses      problem -> why it cannot run here, with the way out; "" if it can
    weights      (w13, w2) in bf16 -> its weights; called once for each cold set
    prepare      (problem, x, ids, topk_weights) -> ``Call``
    """

    format: str
    weight_bits: float
    refuses: Callable[[Problem], str]
    weights: Callable[[torch.Tensor, torch.Tensor], Any]
    prepare: Callable[[Problem, torch.Tensor, torch.Tensor, torch.Tensor], Call]


def check_usable(names: list[str], problem: Problem, title: str) -> None:
    """RuntimeError with the way out where a peer cannot run ``problem`` here."""
    for name in names:
        check(name in PEERS, f"peer: expected one of {', '.join(PEERS)}, got {name!r}")
        why = PEERS[name].refuses(problem)
        if why:
            raise RuntimeError(f"--peer {name}, {title}: {why}")


# torch


def torch_layer(
    problem: Problem, x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor
) -> Call:
    """PyTorch's grouped GEMM in bf16.

    Timed: ``torch._grouped_mm`` for gate/up, the gated activation in torch operators (eager, each a
    pass over memory), ``torch._grouped_mm`` for down. Not timed, and done beforehand or afterwards:
    routing, gathering the rows by expert, the weighted sum. Biases are left out.
    """
    token, k = (ids >= 0).nonzero(as_tuple=True)
    order = ids[token, k].argsort(stable=True)
    token, k = token[order], k[order]
    rows = x[token]
    counts = ids[token, k].bincount(minlength=problem.num_experts)
    offsets = counts.cumsum(0).to(torch.int32)

    def run(weights: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        w13, w2 = weights
        gate, up = torch._grouped_mm(rows, w13.transpose(1, 2), offs=offsets).chunk(2, dim=-1)
        hidden = _swiglu(gate, up, problem.activation)
        return torch._grouped_mm(hidden, w2.transpose(1, 2), offs=offsets)

    def output(y: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return out.index_add_(0, token, y.float() * topk_weights[token, k, None].float())

    return Call(run, output)


def _swiglu(gate: torch.Tensor, up: torch.Tensor, activation: SwiGLU) -> torch.Tensor:
    """bf16 [rows, intermediate], with as few operators as the constants allow."""
    if activation == SwiGLU():
        return torch.nn.functional.silu(gate) * up
    return reference.swiglu(gate, up, activation).bfloat16()


def _torch_refuses(problem: Problem) -> str:
    if not hasattr(torch, "_grouped_mm"):
        return f"expected a torch with _grouped_mm, got {torch.__version__}; install a newer one"
    return ""


# FlashInfer


def flashinfer_layer(
    problem: Problem, x: torch.Tensor, ids: torch.Tensor, topk_weights: torch.Tensor
) -> Call:
    """FlashInfer's ``cutlass_fused_moe`` on Hopper with FP8 block scales (128 x 128 weight blocks,
    activations quantized by the kernels in blocks of 128).

    Timed: the whole call from bf16 x to bf16 output: permutation, quantization, both GEMMs,
    activation and weighted sum. Not timed: the routing scores. A clamp of the activation is left
    out. It is FlashInfer's released layer, not its mega-kernel.
    """
    fused = import_module("flashinfer.fused_moe").cutlass_fused_moe
    live = (ids >= 0).all(dim=0)  # it takes no -1: fewer experts a token then
    experts, scores = ids[:, live].contiguous(), topk_weights[:, live].float().contiguous()
    out = torch.empty_like(x)

    def run(weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
        w13, w2, w13_sf, w2_sf = weights
        fused(
            input=x,
            token_selected_experts=experts,
            token_final_scales=scores,
            fc1_expert_weights=w13,
            fc2_expert_weights=w2,
            output_dtype=torch.bfloat16,
            quant_scales=[w13_sf, w2_sf],
            use_deepseek_fp8_block_scale=True,
            output=out,
        )
        return out

    return Call(run, lambda y: y)


def _flashinfer_weights(w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """E4M3 and its fp32 block scales; FlashInfer wants the up rows before the gate rows."""
    gate, up = w13.chunk(2, dim=1)
    w13, w13_sf = _block_quantized(torch.cat([up, gate], dim=1))
    w2, w2_sf = _block_quantized(w2)
    return w13, w2, w13_sf, w2_sf


def _block_quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[experts, N, K] -> E4M3 of that shape and fp32 [experts, N / 128, K / 128]."""
    experts, n, k = weight.shape
    data = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    sf = torch.empty(experts, n // _BLOCK, k // _BLOCK, device=weight.device)
    for expert in range(experts):  # fp32 of one expert at a time
        blocks = weight[expert].float().view(n // _BLOCK, _BLOCK, k // _BLOCK, _BLOCK)
        scale = blocks.abs().amax(dim=(1, 3)).clamp_(min=1e-12) / _E4M3_MAX
        data[expert] = (blocks / scale[:, None, :, None]).view(n, k).to(data.dtype)
        sf[expert] = scale
    return data, sf


def _flashinfer_refuses(problem: Problem) -> str:
    if find_spec("flashinfer") is None:
        return "expected FlashInfer to be importable, it is not; run: pip install flashinfer-python"
    sizes = (problem.hidden, problem.intermediate)
    if any(size % _BLOCK for size in sizes):
        return f"expected sizes in multiples of {_BLOCK}, got {sizes}; leave out the peer here"
    if problem.bias or (problem.activation.alpha, problem.activation.beta) != (1.0, 0.0):
        return "expected SwiGLU without bias, alpha and beta; leave out the peer here"
    return ""


PEERS: Mapping[str, Peer] = {
    "torch": Peer("torch-bf16", 16.0, _torch_refuses, lambda w13, w2: (w13, w2), torch_layer),
    "flashinfer": Peer(
        "flashinfer-fp8", 8.0, _flashinfer_refuses, _flashinfer_weights, flashinfer_layer
    ),
}
