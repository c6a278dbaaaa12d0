"""``moe-ep-jit plan``: one rank's memory, region by region, and the times that calls of all ranks
should take; needs no GPU.
"""

from __future__ import annotations

from math import prod
from typing import Any

from rich.console import Console
from rich.table import Table

from moe_ep_jit import layout, variants
from moe_ep_jit.problem import Problem
from moe_ep_jit.tools import timemodel
from moe_ep_jit.workspace import Workspace

_MIB = 2**20


def make(name: str, problem: Problem, transport: str = "collective") -> dict[str, Any]:
    """The plan of a layer called ``name``, JSON-able; format "auto" counts as "mxfp8".

    ``bytes`` is ``Workspace.bytes_needed``; the bytes of ``regions`` add up to it. ``wire`` is what
    a row of (token, k) costs on its way to another rank and back; ``times`` is ``timemodel.table``.
    """
    times = timemodel.table(problem.with_(format="mxfp8") if problem.format == "auto" else problem)
    problem = variants.choose_variant(problem, None).problem
    several = problem.num_ranks > 1
    symmetric = several and transport == "symm"
    own = problem.local if several and not symmetric else problem
    operand = variants.operand_of(problem)
    regions = [
        _row("experts", region.name, region.shape, region.dtype)
        for region in layout.regions(own, operand).values()
    ]
    if several and not symmetric:
        shape = (own.max_tokens, own.hidden)
        regions.append(_row("experts", "output", shape, "bf16"))
        regions += [
            _row("exchange", region.name, region.shape, region.dtype)
            for region in layout.exchange_regions(problem).values()
        ]
    regions.append(_row("result", "output", (problem.max_tokens, problem.hidden), "bf16"))
    total = Workspace.bytes_needed(problem, transport=transport)
    rest = total - sum(row["bytes"] for row in regions)
    regions.append(_row("all", "alignment", (rest,), "u8"))
    wire = {
        "payload": problem.payload,
        "back": problem.combine_wire,
        **timemodel.row_bytes(problem),
        "once_per_rank": timemodel.once_per_rank(problem),
    }
    if symmetric:
        wire |= {"payload": f"{operand} rows", "dispatch": _row_bytes(problem, operand)}
    return {
        "name": name,
        "format": problem.format,
        "act": problem.act,
        "ranks": problem.num_ranks,
        "local_experts": problem.num_local_experts,
        "max_tokens": problem.max_tokens,
        "max_rows": problem.recv_rows,
        "bytes": total,
        "regions": regions,
        "wire": wire if several else None,
        "times": times,
    }


def _row_bytes(problem: Problem, operand: str) -> int:
    """Of a row over symmetric memory: values, scales, its slot and its count."""
    values = {"bf16": 16, "nvfp4": 4}.get(operand, 8) * problem.hidden // 8
    blocks = {"mxfp8": 32, "nvfp4": 16}.get(operand)
    has_row_scale = operand == "e4m3" or problem.act == "nvfp4"
    return values + (problem.hidden // blocks if blocks else 0) + 4 * has_row_scale + 4 + 4


def show(plans: list[dict[str, Any]], console: Console, as_json: bool) -> None:
    """Print the plans, a table each."""
    if as_json:
        console.print_json(data=plans)
        return
    for plan in plans:
        console.print(
            f"{plan['name']} {plan['format']}, act {plan['act']}: {plan['ranks']} rank(s) of "
            f"{plan['local_experts']} experts, {plan['max_tokens']} tokens, at most "
            f"{plan['max_rows']} rows received",
            soft_wrap=True,
        )
        table = Table("for", "region", "shape", "type", box=None)
        table.add_column("MiB", justify="right")
        for row in plan["regions"]:
            shape = " x ".join(map(str, row["shape"]))
            table.add_row(
                row["for"], row["region"], shape, row["dtype"], f"{row['bytes'] / _MIB:.2f}"
            )
        table.add_row("all", "total", "", "", f"{plan['bytes'] / _MIB:.2f}")
        console.print(table)
        if plan["wire"] is not None:
            wire = plan["wire"]
            console.print(
                f"a row of (token, k) between ranks: {wire['dispatch']} bytes of {wire['payload']} "
                f"there, {wire['combine']} of {wire['back']} back; a token sent once per rank "
                f"would be {wire['once_per_rank']:.2f} times fewer rows there",
                soft_wrap=True,
            )
        if plan["times"]:
            _show_times(plan["times"], console)
        console.print()


def _show_times(times: list[dict[str, Any]], console: Console) -> None:
    table = Table("predicted for", box=None)
    names = ("tokens a rank", "MB sent", "dispatch", "GEMMs", "combine", "layer ms")
    for name in names:
        table.add_column(name, justify="right")
    for row in times:
        # The counts are the first part of dispatch.
        stages = (row["counts_ms"] + row["dispatch_ms"], row["gemm_ms"], row["combine_ms"])
        table.add_row(
            row["gpu"],
            str(row["tokens"]),
            f"{sum(row['out'].values()) / 1e6:.2f}",
            *(f"{ms:.3f}" for ms in (*stages, row["layer_ms"])),
        )
    console.print(table)


def _row(what: str, name: str, shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    size = prod(shape) * layout.ITEM_BYTES[dtype]
    return {"for": what, "region": name, "shape": list(shape), "dtype": dtype, "bytes": size}
