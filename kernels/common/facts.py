"""What one compiled object of the layer depends on, without importing the compiler."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from moe_ep_jit.problem import Problem


def facts(problem: Problem, kind: str, x_kind: str, config: Any) -> dict[str, Any]:
    """Everything that selects the code of one object; JSON-able.

    kind    layout of the prepared weights, one of the arch's ``packing.OPERANDS``
    x_kind  what a call passes as x: "bf16", or BlockScaled "mxfp8" or "nvfp4"
    config  the arch's Config
    """
    found = {
        "hidden": problem.hidden,
        "intermediate": problem.intermediate,
        "num_experts": problem.num_experts,
        "top_k": problem.top_k,
        "kind": kind,
        "act": problem.act,
        "x_kind": x_kind,
        "config": asdict(config),
    }
    if problem.num_ranks > 1:  # over symmetric memory
        found["num_ranks"] = problem.num_ranks
    return found


def name(facts: dict[str, Any]) -> str:
    """A readable folder name for an object."""
    config = facts["config"]
    parts = [
        f"{facts['kind']}-{facts['act']}",
        f"h{facts['hidden']}-i{facts['intermediate']}-e{facts['num_experts']}-k{facts['top_k']}",
        f"n{config['tile_n']}",
    ]
    if "num_ranks" in facts:
        parts.append(f"r{facts['num_ranks']}")
    if facts["x_kind"] != "bf16":
        parts.append(f"x_{facts['x_kind']}")
    return "moe-" + "-".join(parts)
