"""The layer on Hopper."""

from __future__ import annotations

from typing import Any

from moe_ep_jit.kernels.common.exchange import Ranks
from moe_ep_jit.kernels.common.fold import Fold
from moe_ep_jit.kernels.common.forward import Forward, compile_forward
from moe_ep_jit.kernels.sm90.config import Config
from moe_ep_jit.kernels.sm90.grouped_gemm import GroupedGemm
from moe_ep_jit.kernels.sm90.packing import OPERANDS


def forward(
    *, hidden: int, intermediate: int, num_experts: int, top_k: int, kind: str, act: str,
    x_kind: str, config: Config, num_ranks: int = 1
) -> Forward:  # fmt: skip
    """The kernels of one rung; the arguments are ``facts.facts``."""
    ranks = Ranks(num_ranks, num_experts) if num_ranks > 1 else None
    common = {"kind": kind, "act": act, "config": config, "ranks": ranks}
    folds = config.fold_intermediate
    return Forward(
        hidden=hidden,
        num_experts=num_experts,
        top_k=top_k,
        operand=OPERANDS[kind],
        act=act,
        x_kind=x_kind,
        tile_n=config.tile_n,
        gate_up=GroupedGemm(gate_up=True, k=hidden, m=2 * intermediate, **common),
        down=GroupedGemm(gate_up=False, k=intermediate, m=hidden, **common),
        fold=Fold(intermediate=intermediate, tile_n=config.tile_n) if folds else None,
        ranks=ranks,
    )


def compile_op(facts: dict[str, Any], options: str) -> Any:
    """Compile the object that ``facts`` (from ``facts.facts``) describes."""
    facts = dict(facts)
    config = Config(**facts.pop("config"))
    return compile_forward(forward(**facts, config=config), options)
