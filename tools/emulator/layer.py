"""The layer's objects under the emulator: ``Workspace(..., backend="emulator")`` on CPU tensors."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from moe_ep_jit import entries, layout
from moe_ep_jit.formats import BlockScaled
from moe_ep_jit.problem import Problem
from moe_ep_jit.tools.emulator import ptx
from moe_ep_jit.tools.emulator.host import HostFunction
from moe_ep_jit.tools.emulator.machine import Kernel, Machine

#: Regions whose bytes have different writers: block scales of one byte.
_BYTEWISE = ("recv_block_sf", "h_sf")

_STAGES = list(layout.LAUNCH_ARGS).index("stages")


class Object:
    """One cache entry: its host code behind the launch stand-in, its kernels as programs."""

    def __init__(self, folder: Path, text: str | None = None, traced: bool = False) -> None:
        """text: PTX to run in place of the entry's; traced: the machine's tracer sees each line."""
        self.folder = folder
        self.text = (folder / entries.PTX).read_text() if text is None else text
        self.module = ptx.parse(self.text)
        self.host = HostFunction(folder / entries.OBJECT, self.module)
        self.kernels = {name: Kernel(self.module, name, traced) for name in self.module.entries}


@cache
def load(folder: Path) -> Object:
    """The object of a cache entry; it stays for the life of the process."""
    return Object(folder)


class Emulator:
    """What a workspace runs its calls on.

    num_sms  SMs that the kernels are told of: a persistent grid has a CTA or two for each
    seed     0: one fixed order; else the order in which everything happens is drawn from it
    """

    def __init__(self, num_sms: int = 2, seed: int = 0) -> None:
        self.num_sms, self.seed = num_sms, seed
        self.machine = Machine(seed)

    def function(self, folder: Path) -> Object:
        return load(folder)

    def bind(
        self, ws: Any, weights: Any, problem: Problem, function: Object, args: list[Any]
    ) -> EmulatedLaunch:
        return EmulatedLaunch(self, ws, weights, problem, function, args)


class EmulatedLaunch:
    """``launch.Launch`` for the emulator."""

    def __init__(
        self, emulator: Emulator, ws: Any, weights: Any, problem: Problem, function: Object,
        args: list[Any],
    ) -> None:  # fmt: skip
        self.emulator, self.function, self.args = emulator, function, args
        self.regions = {
            name: (ws.base_address + region.offset, region.nbytes)
            for name, region in layout.regions(problem, weights.operand).items()
        }
        #: Workspaces of other ranks, in other processes: nobody keeps count of writes there.
        self.ranks = [] if ws.symmetric is None else ws.symmetric.others
        self.error = ws.error_address
        self.fixed = dict(weights.tensors)

    def run(self, args: list[Any], tensors: tuple[Any, ...]) -> None:
        """Carry out one call's launches and wait for their end. Raises the first Fault."""
        emulator = self.emulator
        machine = emulator.machine
        machine.seed = emulator.seed
        memory = machine.memory
        if args[_STAGES] & layout.STAGE_DISPATCH:
            # A round begins: nothing that a call before has left behind may be read.
            for number, (address, size) in enumerate(self.ranks):
                memory.add(f"rank {number}", address, size, written=True)
            for name, (address, size) in self.regions.items():
                written = name == "control" or bool(self.ranks and name in layout.PEER_WRITTEN)
                granule = 1 if name in _BYTEWISE else 4
                memory.add(name, address, size, written=written, granule=granule)
        for name, tensor in self.fixed.items():
            _add(memory, name, tensor)
        memory.add("error record", self.error, layout.ERROR_WORDS * 4, written=True)
        for number, tensor in enumerate(tensors):
            _add(memory, f"argument {number}", tensor)
        requests = self.function.host.requests(*args)
        machine.run([(self.function.kernels[r.kernel], r) for r in requests])


def _add(memory: Any, name: str, tensor: Any) -> None:
    """A tensor's bytes; where they do not begin on 16 bytes, its whole storage."""
    if tensor is None:
        return
    if isinstance(tensor, BlockScaled):
        for part in ("data", "sf", "global_scale"):
            _add(memory, f"{name}.{part}", getattr(tensor, part))
        return
    if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
        return
    begin = tensor.data_ptr()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    size = (last + 1) * tensor.element_size()
    if begin % 16:
        storage = tensor.untyped_storage()
        begin, size = storage.data_ptr(), storage.nbytes()
    memory.add(name, begin, size, written=True)
