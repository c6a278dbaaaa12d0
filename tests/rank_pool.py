"""Processes that form a gloo group and run cases, each in all of them at once."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from datetime import timedelta
from typing import Any

import torch

#: Groups of the pool's ranks by name; every rank builds all of them, in this order.
GROUPS = {"all": None, "pair": (0, 1), "other pair": (2, 3), "three": (0, 1, 2)}
GROUP_TIMEOUT = timedelta(seconds=30)
_CASE_TIMEOUT = 90


class Env:
    """What a case gets: this process's rank in the world and the groups."""

    def __init__(self, rank: int, size: int, groups: dict[str, Any]) -> None:
        self.rank = rank
        self.size = size
        self.groups = groups

    def rank_in(self, name: str) -> int:
        """This rank's number in a group, -1 outside of it."""
        members = GROUPS[name]
        if members is None:
            return self.rank
        return members.index(self.rank) if self.rank in members else -1


class Pool:
    """``size`` processes; ``run(case, *args)`` calls ``case(env, *args)`` in each of them."""

    def __init__(self, size: int, folder: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            args = (there, rank, size, f"file://{folder}/store")
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        self.run(_ready)

    def run(self, case: Any, *args: Any) -> list[Any]:
        """What the case returned, by rank; None of one that ended, AssertionError if one raised."""
        for pipe in self.pipes:
            pipe.send((case, args))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(_CASE_TIMEOUT), f"rank {rank}: no answer in {_CASE_TIMEOUT} s"
            try:
                answers.append(pipe.recv())
            except EOFError:
                answers.append(("ended", None))
        wrong = [f"rank {r}:\n{value}" for r, (how, value) in enumerate(answers) if how == "raised"]
        assert not wrong, "\n".join(wrong)
        return [value for _, value in answers]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _ready(env: Env) -> int:
    return env.rank


def _serve(pipe: Any, rank: int, size: int, store: str) -> None:
    torch.set_num_threads(1)
    dist = torch.distributed
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=size, timeout=GROUP_TIMEOUT
    )
    groups = {"all": dist.group.WORLD}
    for name, members in GROUPS.items():
        if members is not None and max(members) < size:
            groups[name] = dist.new_group(list(members), timeout=GROUP_TIMEOUT)
    env = Env(rank, size, groups)
    while True:
        try:
            case, args = pipe.recv()
        except EOFError:
            os._exit(0)  # whatever a failed group's threads still wait for
        torch.manual_seed(0)
        try:
            answer = ("returned", case(env, *args))
        except Exception:
            answer = ("raised", traceback.format_exc())
        pipe.send(answer)
