"""``python -m moe_ep_jit.tools.emulator KEY ...``: one cache entry on the emulator, on random data.

KEY is part of an entry's name or fingerprint, as ``moe-ep-jit cache list`` shows them. The layer is
made for the entry's own sizes, so take a small one; its result is compared with the reference.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import moe_ep_jit as moe
from moe_ep_jit import cache_admin, entries, formats, launch, reference, variants
from moe_ep_jit.problem import Problem, check
from moe_ep_jit.tools.emulator.fault import Fault, UnsupportedError
from moe_ep_jit.tools.emulator.launches import short_name
from moe_ep_jit.tools.emulator.layer import Object


def main(argv: list[str] | None = None) -> int:
    """0 when the numbers are within 2 % of the reference's, 1 when not or at a fault."""
    args = _arguments(argv)
    try:
        folder = find(args.key)
        return run(folder, args)
    except (ValueError, RuntimeError, UnsupportedError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        return 1


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m moe_ep_jit.tools.emulator")
    parser.add_argument("key", help="part of the name or fingerprint of a cache entry")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0, help="of the order; 0 is a fixed one")
    parser.add_argument("--data-seed", type=int, default=0, help="of the random data")
    parser.add_argument("--sms", type=int, default=2, help="SMs that persistent kernels count on")
    parser.add_argument("--ptx", type=Path, help="run this PTX in place of the entry's own")
    parser.add_argument(
        "--trace", metavar="KERNEL:CTA:WARP", help="print a warp's instructions, e.g. Route:0:3"
    )
    return parser.parse_args(argv)


def find(key: str) -> Path:
    """The one cache entry that ``key`` names; among several, the one made with today's sources."""
    rows = [r for r in cache_admin.list_entries() if key in f"{r['name']}/{r['fingerprint']}"]
    found = [r for r in rows if r["usable"]] if len(rows) > 1 else rows
    names = ", ".join(f"{r['name']}/{r['fingerprint']}" for r in (found or rows)[:8])
    check(
        len(found) == 1,
        f"key: expected part of one entry, as moe-ep-jit cache list shows them; {key!r} is in "
        f"{len(rows)}, {len(found)} of them of today's sources: {names}",
    )
    return Path(found[0]["path"])


def run(folder: Path, args: argparse.Namespace) -> int:
    """Build the layer of an entry, run a call, compare, report."""
    facts = json.loads((folder / entries.KEY).read_text())["facts"]
    arch = folder.parent.parent.name
    torch.manual_seed(args.data_seed)
    problem, weights, plain = _weights(facts, arch, args.tokens)
    config = variants.kernels_module(arch, "config").Config(**facts["config"])
    ws = moe.Workspace(problem, device="cpu", backend="emulator", operand=weights.operand)
    ws.emulator.seed, ws.emulator.num_sms = args.seed, args.sms
    text = args.ptx.read_text() if args.ptx else None
    function = Object(folder, text, traced=args.trace is not None)
    binding = launch.bind(ws, weights)
    ws.functions[binding.problem, weights.kind, facts["x_kind"], config] = function
    if args.trace:
        ws.emulator.machine.tracer = tracer(args.trace)
    x = torch.randn(args.tokens, problem.hidden).bfloat16()
    if facts["x_kind"] != "bf16":
        x = formats.quantize(x, facts["x_kind"])
    ids = torch.rand(args.tokens, problem.num_experts).topk(problem.top_k).indices.int()
    topk_weights = torch.rand(args.tokens, problem.top_k)
    start = time.perf_counter()
    try:
        y = moe.moe_forward(x, ids, topk_weights, weights, ws, config=config)
    except Fault as fault:
        print(f"fault: {fault}", file=sys.stderr)  # noqa: T201
        return 1
    seconds = time.perf_counter() - start
    error = reference.error(y, reference.moe_forward(x, ids, topk_weights, plain))
    print(  # noqa: T201
        f"{folder.parent.name}: {args.tokens} tokens in {seconds:.2f} s, relative error to the "
        f"reference {error.whole:.2e} (worst row {error.worst_row:.2e})"
    )
    return 0 if error.whole < 2e-2 else 1


def _weights(facts: dict[str, Any], arch: str, tokens: int) -> tuple[Problem, Any, Any]:
    """Gaussian weights whose magnitudes come to the entry's kind of prepared weights."""
    kind = facts["kind"]
    problem = moe.Problem(
        hidden=facts["hidden"],
        intermediate=facts["intermediate"],
        num_experts=facts["num_experts"],
        top_k=facts["top_k"],
        max_tokens=max(tokens, 1),
        format="nvfp4" if kind == "nvfp4" else "mxfp8",
        act=facts["act"],
    )
    experts, hidden, inner = problem.num_experts, problem.hidden, problem.intermediate
    w13 = torch.randn(experts, 2 * inner, hidden) * hidden**-0.5
    w2 = torch.randn(experts, hidden, inner) * inner**-0.5
    spread = {"mxfp8_group128": 128, "mxfp8_exact": 32}.get(kind)
    if spread and problem.act == "mxfp8":
        for w in (w13, w2):
            w *= torch.where(torch.arange(w.shape[-1]) // spread % 2 == 1, 2.0**-20, 1.0)
    weights = moe.prepare_weights(w13.bfloat16(), w2.bfloat16(), problem, arch=arch)
    check(
        weights.kind == kind, f"weights: expected kind {kind}, preparation came to {weights.kind}"
    )
    plain = moe.prepare_weights(w13.bfloat16(), w2.bfloat16(), problem, backend="reference")
    return weights.problem, weights, plain


def tracer(where: str) -> Any:
    """What prints the instructions of "KERNEL:CTA:WARP" with the first lane's result."""
    kernel, cta, warp = where.split(":")

    def show(threads: Any, line: int, value: Any) -> None:
        launch_ = threads.cta.launch
        if kernel not in short_name(launch_.entry.name) or threads.cta.place[0] != int(cta):
            return
        lanes = np.flatnonzero(threads.tids // 32 == int(warp))
        if not len(lanes):
            return
        active = lanes if threads.mask is None else lanes[threads.mask[lanes]]
        if len(active):
            result = (
                "" if value is None else f"  = {np.broadcast_to(value, threads.count)[active[0]]}"
            )
            text = launch_.text_of(line)
            print(f"{line:6d} {len(active):2d} lanes  {text}{result}")  # noqa: T201

    return show


if __name__ == "__main__":
    sys.exit(main())
