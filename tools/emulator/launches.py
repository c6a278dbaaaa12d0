"""Launches: what the host asked for, streams of them, and grids under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moe_ep_jit.tools.emulator.clocks import STREAM_SHIFT, View
from moe_ep_jit.tools.emulator.codegen import Code
from moe_ep_jit.tools.emulator.cta import CTA, Cluster
from moe_ep_jit.tools.emulator.fault import Fault, UnsupportedError
from moe_ep_jit.tools.emulator.operations import EMITTERS
from moe_ep_jit.tools.emulator.program import Program
from moe_ep_jit.tools.emulator.ptx import Module

if TYPE_CHECKING:
    from moe_ep_jit.tools.emulator.machine import Machine

#: Shared memory that a CTA may ask for.
SHARED_LIMIT = 232_448


class Request:
    """One launch as the host asked for it."""

    def __init__(
        self, kernel: str, grid: tuple[int, int, int], block: tuple[int, int, int],
        cluster: tuple[int, int, int], shared_bytes: int, dependent: bool, params: bytes,
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.block, self.cluster = kernel, grid, block, cluster
        self.shared_bytes, self.dependent, self.params = shared_bytes, dependent, params


class Kernel:
    """One entry of a module, with its code."""

    def __init__(self, module: Module, name: str, traced: bool = False) -> None:
        self.module, self.entry = module, module.entries[name]
        self.code = Code(Program(self.entry), EMITTERS, traced)


class Event:
    """A place in a stream: what was put in before it."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.length = stream, len(stream.work)
        self.waits = list(stream.waits)


class Stream:
    """Launches of one rank that run one after the other.

    Launches of different streams run interleaved, whether of one rank or of several.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        #: (kernel, request, events that it waits for)
        self.work: list[tuple[Kernel, Request, list[Event]]] = []
        self.waits: list[Event] = []

    def launch(self, kernel: Kernel, request: Request) -> None:
        check_request(kernel, request)
        self.work.append((kernel, request, self.waits))
        self.waits = []

    def record(self) -> Event:
        return Event(self)

    def wait(self, event: Event) -> None:
        """Whatever comes next starts once all that was put in before ``event`` is complete."""
        self.waits = [*self.waits, event]


class Launch:
    """A grid under way.

    base     the first CTA number of its stream
    horizon  what is complete and visible behind its griddepcontrol.wait, or from the start where
             it is no dependent launch: for each stream, the CTAs with a smaller number
    """

    def __init__(
        self, machine: Machine, kernel: Kernel, request: Request, title: str, base: int
    ) -> None:
        self.machine, self.kernel, self.request = machine, kernel, request
        self.entry, self.base = kernel.entry, base
        self.title = f"{title} ({short_name(self.entry.name)})"
        self.rank = self.first_uid = 0
        self.before: Launch | None = None
        self.after: list[Launch] = []
        self.horizon = np.zeros(1, np.int64)
        self.started = self.complete = False
        #: What its threads, and those of the grids before, have learnt of other ranks.
        self.learnt: View | None = None
        # The kernel's parameters live at an address of this process, as descriptors must.
        self.params = np.zeros(self.entry.param_bytes + 64, np.uint8)
        self.align = -self.params.ctypes.data % 64
        self.params[self.align : self.align + len(request.params)] = np.frombuffer(
            request.params, np.uint8
        )
        self.offsets = {p.name: p.offset for p in self.entry.params}
        self.ctas: list[CTA] = []

    def follow(self, before: Launch | None, after: list[Launch], horizon: np.ndarray) -> None:
        """Its place: behind ``before`` in its stream and behind launches of others.

        horizon  what the host has written, for each stream
        """
        self.before, self.after = before, after
        self.first_uid = self.base + 2 if before is None else before.end_uid
        if self.end_uid - self.base > 1 << STREAM_SHIFT:
            raise UnsupportedError(f"more than {1 << STREAM_SHIFT} CTAs in a stream")
        earlier = [x.horizon for x in (before, *after) if x is not None]
        self.horizon = np.maximum.reduce([horizon, *earlier])
        for launch in after:
            stream = launch.base >> STREAM_SHIFT
            self.horizon[stream] = max(self.horizon[stream], launch.end_uid)
        self.horizon[self.base >> STREAM_SHIFT] = self.first_uid

    def end(self) -> None:
        """Every CTA has ended: what they have learnt of other ranks goes on to the grids behind."""
        self.complete = True
        self.learnt = None if self.before is None else self.before.learnt
        stream = self.base >> STREAM_SHIFT
        for cta in self.ctas:
            for view in cta.clock.views.values():
                other = {u: c for u, c in view.other.items() if u >> STREAM_SHIFT != stream}
                if other:
                    nothing = cta.clock.nothing()
                    view = View(view.uid, nothing.own, nothing.fenced, other, nothing.horizon)
                    self.learnt = view if self.learnt is None else self.learnt.joined(view)

    @property
    def end_uid(self) -> int:
        grid = self.request.grid
        return self.first_uid + grid[0] * grid[1] * grid[2]

    @property
    def param_address(self) -> int:
        return self.params.ctypes.data + self.align

    def param(self, name: str, offset: int, kind: type) -> Any:
        at = self.align + self.offsets[name] + offset
        return self.params[at : at + np.dtype(kind).itemsize].view(kind)[0]

    def before_is_complete(self) -> bool:
        return self.before is None or self.before.complete

    def may_start(self) -> bool:
        """Behind the grid before; dependent launch: once all its CTAs have said so or ended."""
        if not all(launch.complete for launch in self.after):
            return False
        if self.before_is_complete():
            return True
        before = self.before
        return (
            self.request.dependent
            and before.started
            and all(cta.triggered or cta.done for cta in before.ctas)
        )

    def start(self) -> None:
        self.started = True
        r = self.request
        # What a dependent grid may see before its griddepcontrol.wait leaves the grid before out,
        # however far that has come here: on hardware it may have only begun.
        lowest, earlier = self.first_uid, self.before
        if r.dependent:
            lowest = self.base + 1 if earlier is None else earlier.first_uid
        while earlier is not None and not earlier.complete:
            lowest, earlier = min(lowest, earlier.first_uid), earlier.before
        horizon = self.horizon.copy()
        horizon[self.base >> STREAM_SHIFT] = lowest
        clusters: dict[tuple[int, ...], Cluster] = {}
        uid = self.first_uid
        for z in range(r.grid[2]):
            for y in range(r.grid[1]):
                for x in range(r.grid[0]):
                    place = (x, y, z)
                    key = tuple(a // b for a, b in zip(place, r.cluster, strict=True))
                    cluster = clusters.setdefault(key, Cluster(key))
                    cta = CTA(self, uid, place, cluster, horizon)
                    self.ctas.append(cta)
                    uid += 1

    def waited(self, view: View) -> bool:
        """Whether who knows ``view`` has waited for the grids before."""
        return bool(view.horizon[self.base >> STREAM_SHIFT] >= self.first_uid)

    def text_of(self, line: int | None) -> str:
        if line is None:
            return ""
        text = " ".join(self.kernel.module.lines[line - 1].split())
        return text.replace(f"{self.entry.name}_", "")


def short_name(name: str) -> str:
    """The words of a mangled kernel name that say which it is."""
    head = name.removeprefix("kernel_cutlass_kernel_").split("_object_at_")[0]
    return f"{head[-40:]} {name.rpartition('_')[2]}"


def check_request(kernel: Kernel, request: Request) -> None:
    """The limits of a launch, which the driver would refuse."""
    threads = request.block[0] * request.block[1] * request.block[2]
    wanted = kernel.entry.threads
    if threads == 0 or threads > 1024 or 0 in request.grid:
        raise Fault(f"launch of {request.grid} CTAs of {threads} threads")
    if wanted is not None and tuple(wanted) != request.block:
        raise Fault(f"launch with {request.block} threads, the kernel requires {wanted}")
    if request.shared_bytes + kernel.entry.static_shared > SHARED_LIMIT:
        raise Fault(f"{request.shared_bytes} bytes of shared memory, {SHARED_LIMIT} is the most")
    if any(g % c for g, c in zip(request.grid, request.cluster, strict=True)):
        raise Fault(f"a grid of {request.grid} does not divide into clusters of {request.cluster}")
    if len(request.params) != kernel.entry.param_bytes:
        raise Fault("parameter bytes do not fit the kernel")
