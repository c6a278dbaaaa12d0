"""The layer's objects under the emulator: ``Workspace(..., backend="emulator")`` on CPU tensors.

A call on a workspace runs its launches to their end at once. Several ranks, or several streams of a
rank, run together like this, in one process::

    emulators = ranks(2, seed=3)
    for rank, ws in enumerate(workspaces):
        ws.emulator = emulators[rank]  # before its first call
    with together(*emulators):
        for rank, ws in enumerate(workspaces):
            moe.moe_forward(x[rank], ids[rank], topk_weights[rank], weights[rank], ws)

Inside, calls only queue what they launch; at the end all ranks' launches run interleaved, in an
order drawn from the seed, and results are there behind the block. Memory is one flat space: a peer
pointer is the address that the peer's own workspace has. A rank's weights, arguments and private
regions (``_PRIVATE``) are its own, and a peer that touches them is a Fault; the rest of a workspace
is symmetric memory. What one rank writes is seen by another behind release and acquire at system
scope alone (``.sys``, on both sides), and by the async proxy behind a proxy fence too.

Loops that poll let others run. %globaltimer goes on by a microsecond in each step in which anything
changed and stands still otherwise; where nobody can go on but by the time, it leaps ahead until a
bounded wait runs out. Where nobody reads it either, that is a deadlock, with its table.

``emulator.stream`` says which of its rank's streams calls queue to; ``record`` and ``wait`` order
them as events do. Without ``together`` a call is over when it returns, whatever its stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from moe_ep_jit import entries, layout
from moe_ep_jit.formats import BlockScaled
from moe_ep_jit.problem import Problem
from moe_ep_jit.tools.emulator import ptx
from moe_ep_jit.tools.emulator.host import HostFunction
from moe_ep_jit.tools.emulator.launches import Event, Kernel, Stream
from moe_ep_jit.tools.emulator.machine import Machine

#: Regions whose bytes have different writers: block scales of one byte.
_BYTEWISE = ("recv_block_sf", "h_sf")
#: Regions that no peer touches.
_PRIVATE = ("expert_info", "tiles", "h", "h_sf")

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
    rank     whose launches these are, where several ranks share a machine
    """

    def __init__(
        self, num_sms: int = 2, seed: int = 0, machine: Machine | None = None, rank: int = 0
    ) -> None:
        self.num_sms, self.seed, self.rank = num_sms, seed, rank
        self.machine = Machine(seed) if machine is None else machine
        self.stream = 0
        #: By stream, while ``together`` gathers them; and what must live until they have run.
        self.queued: dict[int, Stream] | None = None
        self.kept: list[Any] = []

    def record(self) -> Event:
        """What has been queued to the current stream until now."""
        return self._queue().record()

    def wait(self, event: Event) -> None:
        """What comes to the current stream from now on starts once ``event`` is over."""
        self._queue().wait(event)

    def _queue(self) -> Stream:
        if self.queued is None:
            raise RuntimeError("events: expected a block of together(emulator), got none")
        return self.queued.setdefault(self.stream, Stream(self.rank))

    def submit(self, function: Object, args: list[Any], keep: Any) -> None:
        """Run one call's launches, or queue them."""
        stream = Stream(self.rank) if self.queued is None else self._queue()
        for request in function.host.requests(*args):
            stream.launch(function.kernels[request.kernel], request)
        if self.queued is None:
            self.machine.seed = self.seed
            self.machine.run_streams([stream])
        else:
            self.kept.append(keep)

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
        #: Workspaces of ranks in other processes: nobody keeps count of writes from there.
        self.others = [] if ws.symmetric is None else ws.symmetric.others
        if self.others:
            emulator.machine.is_shared = True
        self.error = ws.error_address
        self.fixed = {**weights.tensors, "load": weights.topology.load}

    def run(self, args: list[Any], tensors: tuple[Any, ...]) -> None:
        """Carry out one call's launches and wait for their end. Raises the first Fault."""
        memory, rank = self.emulator.machine.memory, self.emulator.rank
        if args[_STAGES] & layout.STAGE_DISPATCH:
            # A round begins: nothing that a call before has left behind may be read.
            for number, (address, size) in enumerate(self.others):
                memory.add(f"another rank ({number})", address, size, written=True)
            for name, (address, size) in self.regions.items():
                elsewhere = bool(self.others) and name in layout.PEER_WRITTEN
                memory.add(
                    name, address, size, written=name == "control" or elsewhere,
                    granule=1 if name in _BYTEWISE else 4, rank=rank if name in _PRIVATE else None,
                )  # fmt: skip
        for name, tensor in self.fixed.items():
            _add(memory, name, tensor, rank)
        memory.add("error record", self.error, layout.ERROR_WORDS * 4, written=True, rank=rank)
        for number, tensor in enumerate(tensors):
            _add(memory, f"argument {number}", tensor, rank)
        self.emulator.submit(self.function, args, (self, args, tensors))


def ranks(count: int, num_sms: int = 2, seed: int = 0) -> list[Emulator]:
    """The emulators of ``count`` ranks that share one machine."""
    machine = Machine(seed)
    return [Emulator(num_sms, seed, machine, rank) for rank in range(count)]


@contextmanager
def together(*emulators: Emulator) -> Iterator[None]:
    """Gather the launches of the block's calls; at its end run them interleaved, to their end."""
    machines = {emulator.machine for emulator in emulators}
    if len(machines) != 1:
        raise ValueError(f"emulators: expected those of one machine, got {len(machines)}")
    (machine,) = machines
    for emulator in emulators:
        emulator.queued = {}
    try:
        yield
        machine.seed = emulators[0].seed
        machine.run_streams([s for e in emulators for s in e.queued.values() if s.work])
    finally:
        for emulator in emulators:
            emulator.queued, emulator.kept = None, []


def _add(memory: Any, name: str, tensor: Any, rank: int) -> None:
    """A tensor's bytes, which are this rank's alone unless another rank was given them too.

    Where they do not begin on 16 bytes, its whole storage.
    """
    if tensor is None:
        return
    if isinstance(tensor, BlockScaled):
        for part in ("data", "sf", "global_scale"):
            _add(memory, f"{name}.{part}", getattr(tensor, part), rank)
        return
    if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
        return
    begin = tensor.data_ptr()
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    size = (last + 1) * tensor.element_size()
    if begin % 16:
        storage = tensor.untyped_storage()
        begin, size = storage.data_ptr(), storage.nbytes()
    known = memory.find(begin)
    shared = known is not None and known.size == size and known.rank != rank
    memory.add(name, begin, size, written=True, rank=None if shared else rank)
