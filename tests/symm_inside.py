"""Ranks over symmetric memory in one process, their emulators on one machine: every read of what
another rank wrote is checked, in schedules drawn from a seed.
"""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import torch
from rank_cases import HOWS, draw_round, make_problem, source_weights
from rank_symm import EMULATOR, Alone, poison, rung

import moe_ep_jit as moe
from moe_ep_jit import symmetric, workspace
from moe_ep_jit.tools.emulator.layer import ranks, together

ALIGN = 4096


class Here:
    """``transport.Peers`` of ranks that say the same."""

    def __init__(self, rank, size):
        self.rank, self.size, self.device = rank, size, torch.device("cpu")

    def compare(self, facts, phase="", timeout=None):
        return [facts] * self.size


class Ranks:
    """The workspaces of all ranks, and one for the unsharded layer."""

    def __init__(self, size, fmt, tile_n, timeout=60.0, **facts):
        sizes = {"num_experts": 2 * size, "top_k": 2, "max_tokens": 8, "format": fmt}
        problem = make_problem(size, **{**sizes, **facts})
        w13, w2, _ = source_weights(problem)
        self.weights, self.workspaces = [], []
        for rank in range(size):
            own = slice(2 * rank, 2 * rank + 2)
            shard = moe.prepare_weights(w13[own], w2[own], problem, rank=rank, backend="emulator")
            self.weights.append(shard)
        parts: dict[int, list[torch.Tensor]] = {}

        def part(nbytes, peers, device):
            if not parts:
                raw = [torch.zeros(nbytes + ALIGN, dtype=torch.uint8) for _ in range(size)]
                parts[0] = [r[-r.data_ptr() % ALIGN :][:nbytes] for r in raw]
            own = symmetric.Symmetric.__new__(symmetric.Symmetric)
            own.tensor, own.others = parts[0][peers.rank], []
            own.deltas = [p.data_ptr() - own.tensor.data_ptr() for p in parts[0]]
            return own

        self.emulators = ranks(size)
        for rank, shard in enumerate(self.weights):
            with ExitStack() as stack:
                here = Here(rank, size)
                stack.enter_context(
                    mock.patch.object(workspace, "host_peers", lambda *_, here=here: here)
                )
                stack.enter_context(mock.patch.object(workspace, "Symmetric", part))
                ws = moe.Workspace(
                    shard.problem,
                    operand=shard.operand,
                    transport="symm",
                    timeout=timeout,
                    **EMULATOR,
                )
            ws.emulator = self.emulators[rank]
            self.workspaces.append(ws)
        #: By rank: one rung for all, or each another.
        tiles = [tile_n] * size if isinstance(tile_n, int) else tile_n
        self.configs = [rung(self.weights[0], n) for n in tiles]
        for ws, shard in zip(self.workspaces, self.weights, strict=True):
            moe.warmup(ws, shard, configs=self.configs)
        alone = problem.with_(num_ranks=1, max_tokens=problem.max_tokens * size, max_recv_rows=None)
        full = moe.prepare_weights(w13, w2, alone, backend="emulator")
        self.alone = Alone(full, self.configs[0])

    @property
    def problem(self):
        return self.weights[0].problem

    def forward(self, inputs, seed=0, who=None):
        """Every rank's rows (of ``who`` alone, where given), run together."""
        self.emulators[0].seed = seed
        found = {}
        with together(*self.emulators):
            for rank in range(len(inputs)) if who is None else who:
                ws = self.workspaces[rank]
                ws.output.fill_(float("nan"))
                found[rank] = moe.moe_forward(
                    *inputs[rank], self.weights[rank], ws, config=self.configs[rank]
                )
        return found

    def wrong(self, rounds, seeds):
        """Random rounds in several schedules each; those with a difference."""
        bad = []
        for ws in self.workspaces:
            poison(ws, ws.control())
        for index in range(rounds):
            how = HOWS[index % len(HOWS)]
            inputs = draw_round(self.problem, index, how)
            want = [self.alone.rows(inputs, rank).clone() for rank in range(len(inputs))]
            for seed in seeds:
                found = self.forward(inputs, seed)
                same = all(torch.equal(found[rank], rows) for rank, rows in enumerate(want))
                bad += [] if same else [(index, how, seed)]
        return bad
