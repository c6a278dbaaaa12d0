"""The layer on Blackwell."""

from __future__ import annotations

from functools import partial
from typing import Any

from moe_ep_jit.kernels.common.forward import compile_forward, layer
from moe_ep_jit.kernels.sm100.config import Config
from moe_ep_jit.kernels.sm100.grouped_gemm import GroupedGemm
from moe_ep_jit.kernels.sm100.packing import OPERANDS


def compile_op(facts: dict[str, Any], options: str) -> Any:
    """Compile the object that ``facts`` (from ``facts.facts``) describes."""
    config, kind = Config(**facts["config"]), facts["kind"]
    local = facts["num_experts"] // facts.get("num_ranks", 1)
    gemm = partial(GroupedGemm, kind=kind, num_experts=local, config=config)
    return compile_forward(layer(facts, OPERANDS[kind], gemm), options)
