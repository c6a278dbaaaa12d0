"""What a call over R GPUs of one NVLink domain should move and take. Computed, not measured.

``plan`` prints it. Routing is uniform, every token's experts distinct; ranks that hold more places
than the model has experts (R that does not divide them) hold redundant ones. Phases follow one
another: count exchange, dispatch, GEMMs, combine; each takes what its link, memory or tensor cores
need at the rates of ``MACHINES``. With several ranks payloads go once over the link and once
through memory, as where kernels write to their peers; torch.distributed copies more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb
from typing import Any

import torch

from moe_ep_jit import layout, variants
from moe_ep_jit.problem import Problem
from moe_ep_jit.tools import predict
from moe_ep_jit.tools.floors import CEILINGS, floors
from moe_ep_jit.transport import message_words

PHASES = ("counts", "dispatch", "combine")
TOKENS = tuple(2**n for n in range(3, 14))  # 8 to 8192


@dataclass(frozen=True)
class Machine:
    """A GPU among its peers.

    domain        GPUs that NVLink joins, at most
    link          bytes a second and direction
    read, flops   parts of ``floors.CEILINGS`` that the GEMMs reach, by operand
    copy          part of the copy ceiling
    """

    name: str
    arch: str
    domain: int
    link: float
    read: dict[str, float]
    flops: dict[str, float]
    copy: float


#: What copy engines reach of NVLink 4's 450 GB/s a direction; NVLink 5 has twice that.
_NVLINK4 = 380e9

MACHINES = (
    # Stage times of tools/results/h200.jsonl, dsv3-ep8, over their floors.
    Machine(
        "H200",
        "sm_90a",
        8,
        _NVLINK4,
        {"e4m3": 0.94, "bf16": 0.78},
        {"e4m3": 0.7, "bf16": 0.84},
        0.9,
    ),
    Machine(
        "B200",
        predict.ARCH,
        72,
        2 * _NVLINK4,
        dict.fromkeys(("mxfp8", "nvfp4"), predict.MEMORY_SHARE),
        dict.fromkeys(("mxfp8", "nvfp4"), predict.MATH_SHARE),
        predict.MEMORY_SHARE,
    ),
)

#: Of prepared weights on Hopper, where nothing keeps them from folding.
_HOPPER_KINDS = {"mxfp8": "mxfp8_row", "nvfp4": "nvfp4"}

#: Of one exchange between ranks, beyond its bytes: a flag's way and the wait for the last. Assumed.
LATENCY_MS = 0.004


@dataclass(frozen=True)
class Times:
    """One call of every rank with ``tokens`` of its own.

    out           bytes that a GPU sends to its peers, by phase; as many come in
    once_per_rank how many times more rows dispatch sends than if a token went to each rank once
    layer_ms      the phases' sum; their times hold the exchange's wait
    """

    tokens: int
    out: dict[str, float]
    once_per_rank: float
    counts_ms: float
    dispatch_ms: float
    gemm_ms: float
    combine_ms: float
    layer_ms: float


def spread(problem: Problem, ranks: int) -> Problem:
    """The layer over ``ranks``: with redundant experts where they do not divide its own."""
    places = layout.round_up(problem.num_experts, ranks)
    return problem.with_(num_ranks=ranks, num_experts=places)


def row_bytes(problem: Problem) -> dict[str, int]:
    """Bytes of a row of (token, k) by phase: payload with its scales, and the way back."""
    hidden = problem.hidden
    return {
        "dispatch": sum(layout.wire_parts(hidden, problem.payload).values()),
        "combine": sum(layout.wire_parts(hidden, problem.combine_wire).values()),
    }


def traffic(problem: Problem, ids: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Bytes that real routing moves, int64 [from, to] by phase.

    ids  topk_ids of each rank; a row for each (token, k) whose id is an expert's
    """
    ranks = problem.num_ranks
    rows = torch.zeros(ranks, ranks, dtype=torch.int64)
    for rank, of_rank in enumerate(ids):
        valid = of_rank[(of_rank >= 0) & (of_rank < problem.num_experts)].long()
        owner = valid // problem.num_local_experts
        rows[rank] = torch.bincount(owner, minlength=ranks)
    width = row_bytes(problem)
    counts = torch.full((ranks, ranks), 4 * message_words([problem]))
    moved = {
        "counts": counts,
        "dispatch": rows * width["dispatch"],
        "combine": rows.t() * width["combine"],
    }
    return {phase: table.fill_diagonal_(0) for phase, table in moved.items()}


def expected_out(problem: Problem, tokens: int) -> dict[str, float]:
    """Bytes that each rank sends to its peers by phase, in the mean of uniform routing."""
    ranks = problem.num_ranks
    rows = tokens * problem.top_k * (ranks - 1) / ranks
    width = row_bytes(problem)
    return {
        "counts": 4.0 * message_words([problem]) * (ranks - 1),
        "dispatch": rows * width["dispatch"],
        "combine": rows * width["combine"],
    }


def once_per_rank(problem: Problem) -> float:
    """Rows of (token, k) over the copies of a token if each rank got one, uniform routing."""
    if problem.num_ranks == 1:
        return 1.0
    experts, own, top_k = problem.num_experts, problem.num_local_experts, problem.top_k
    hit = 1 - comb(experts - own, top_k) / comb(experts, top_k)
    return top_k / (problem.num_ranks * hit)


def predict_times(problem: Problem, machine: Machine, tokens: int) -> Times:
    """``problem`` with format and act resolved for the machine, its ranks within the domain."""
    ranks, top_k = problem.num_ranks, problem.top_k
    kind = problem.format if machine.arch == predict.ARCH else _HOPPER_KINDS[problem.format]
    operand = variants.operand_of(problem, machine.arch)
    # As many rows arrive as leave; an expert is idle if no token of any rank chose it.
    rows = tokens * top_k
    idle = (1 - top_k / problem.num_experts) ** (ranks * tokens)
    floor = floors(problem, kind, operand, tokens, rows, 1)
    weights = floor.weight_bytes * problem.num_local_experts * (1 - idle)
    ceilings = CEILINGS[operand]
    gemm_s = max(
        weights / (ceilings.read * machine.read[operand]),
        floor.flops / (ceilings.flops * machine.flops[operand]),
    )
    out = expected_out(problem, tokens)
    wait = LATENCY_MS if ranks > 1 else 0.0
    copy = ceilings.copy * machine.copy
    moved = {"dispatch": floor.dispatch_bytes, "combine": floor.combine_bytes}
    phases = {
        phase: 1e3 * max(moved.get(phase, 0) / copy, out[phase] / machine.link) + wait
        for phase in PHASES
    }
    gemm_ms = gemm_s * 1e3
    return Times(
        tokens,
        out,
        once_per_rank(problem),
        phases["counts"],
        phases["dispatch"],
        gemm_ms,
        phases["combine"],
        sum(phases.values()) + gemm_ms + predict.FIXED_MS,
    )


def table(problem: Problem) -> list[dict[str, Any]]:
    """Times of every machine whose domain holds the ranks, at 8 to 8192 tokens; JSON-able.

    problem  as the caller wants it, format named; an act that a machine has no kernels for leaves
             the machine out
    """
    found = []
    for machine in MACHINES:
        acts = variants.acts(machine.arch, problem.format)
        if problem.num_ranks > machine.domain or problem.act not in ("auto", *acts):
            continue
        resolved = variants.choose_variant(problem, machine.arch).problem
        for tokens in TOKENS:
            found.append({"gpu": machine.name, **asdict(predict_times(resolved, machine, tokens))})
    return found
