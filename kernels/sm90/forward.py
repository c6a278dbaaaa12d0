"""The layer on Hopper."""

from __future__ import annotations

from functools import partial
from typing import Any

from moe_ep_jit.kernels.common.fold import Fold
from moe_ep_jit.kernels.common.forward import compile_forward, layer
from moe_ep_jit.kernels.sm90.config import Config
from moe_ep_jit.kernels.sm90.grouped_gemm import GroupedGemm
from moe_ep_jit.kernels.sm90.packing import OPERANDS


def compile_op(facts: dict[str, Any], options: str) -> Any:
    """Compile the object that ``facts`` (from ``facts.facts``) describes."""
    config, kind = Config(**facts["config"]), facts["kind"]
    gemm = partial(GroupedGemm, kind=kind, act=facts["act"], config=config)
    fold = None
    if config.fold_intermediate:
        fold = Fold(intermediate=facts["intermediate"], tile_n=config.tile_n)
    return compile_forward(layer(facts, OPERANDS[kind], gemm, fold), options)
