"""The machine: grids in flight, on streams of one rank or several, and who runs next."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from moe_ep_jit.tools.emulator import memory as mem
from moe_ep_jit.tools.emulator.clocks import STREAM_SHIFT, View, describe
from moe_ep_jit.tools.emulator.cta import CTA
from moe_ep_jit.tools.emulator.fault import DeadlockFault, Fault
from moe_ep_jit.tools.emulator.launches import Event, Kernel, Launch, Request, Stream
from moe_ep_jit.tools.emulator.threads import Threads

#: What %globaltimer gains in a step of the machine in which something changed.
STEP_NS = 1000
_MOST_STREAMS = 32


class Machine:
    """Global memory, grids in flight, and the order in which things happen, drawn from a seed.

    seed  0: asynchronous copies land as late as they may, warps that stand together stay together.
          Else: copies, warps, CTAs and sides of a branch take random turns.
    """

    def __init__(self, seed: int = 0) -> None:
        self.memory = mem.GlobalMemory()
        self.seed, self.random = seed, random.Random(seed)
        self.under_way: list[Any] = []
        #: Address -> (rank that released, "to other ranks too") -> what it released there.
        self.published: dict[int, dict[tuple[int, bool], View]] = {}
        self.launches: list[Launch] = []
        self.changes = 0  # what anybody has done that another could notice
        self.time, self.timer_read = 0, False  # %globaltimer; whether anybody read it since
        self._leap = STEP_NS
        #: Whether other processes write to this memory: then time is the clock's, and who waits
        #: for them is no deadlock.
        self.is_shared = False
        self.tracer: Callable[[Threads, int, Any], None] | None = None

    def choose(self, count: int) -> int:
        return self.random.randrange(count) if self.seed else 0

    def later(self, copy: Any) -> None:
        """An asynchronous copy; it lands when its turn comes."""
        self.under_way.append(copy)
        self.changes += 1

    def timer(self) -> int:
        """%globaltimer in ns. It stands still while nothing changes, so that spinning shows."""
        self.timer_read = True
        return time.monotonic_ns() if self.is_shared else self.time

    def descriptor(self, address: int) -> bytes:
        """The 64 bytes of a TMA descriptor among a grid's parameters."""
        for launch in self.launches:
            begin = launch.param_address
            if begin <= address <= begin + launch.entry.param_bytes - 64:
                if address % 64:
                    raise Fault(f"a TMA descriptor at {address:#x}, not aligned to 64")
                at = launch.align + address - begin
                return launch.params[at : at + 64].tobytes()
        raise Fault(f"a TMA descriptor at {address:#x}, which is no kernel parameter")

    def is_foreign(self, record: int, rank: int) -> bool:
        """Whether another rank's thread left a record."""
        uid, _ = describe(record)
        owners = (
            launch.rank for launch in self.launches if launch.first_uid <= uid < launch.end_uid
        )
        return next(owners, rank) != rank

    def writer(self, uid: int, thread: int) -> str:
        for launch in self.launches:
            for cta in launch.ctas:
                if cta.uid == uid:
                    who = f"thread {thread}" if thread < cta.threads else "an asynchronous copy"
                    return f"{who} of {cta.name}"
        return "somebody"

    def run(self, work: Iterable[tuple[Kernel, Request]]) -> None:
        """Run launches of one stream to their end. A Fault is the first thing found wrong."""
        stream = Stream()
        for kernel, request in work:
            stream.launch(kernel, request)
        self.run_streams([stream])

    def run_streams(self, streams: list[Stream]) -> None:
        """Run launches of several streams, of one rank or more, interleaved, to their end."""
        if len(streams) > _MOST_STREAMS:
            raise ValueError(f"streams: expected at most {_MOST_STREAMS}, got {len(streams)}")
        self.launches, self.under_way, self.published = [], [], {}
        self.random = random.Random(self.seed)
        self.changes = self.time = 0
        self._place(streams)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
            while not all(launch.complete for launch in self.launches):
                self._step()
        self.memory.settle()

    def _place(self, streams: list[Stream]) -> None:
        """Each launch with its numbers and what it follows."""
        several = len({stream.rank for stream in streams}) > 1
        # CTA 0: what no kernel has written; 1: the host's side of a dependent first grid.
        host = np.arange(len(streams)) << STREAM_SHIFT
        host[:1] = 1
        chains: dict[Stream, list[Launch]] = {}
        for number, stream in enumerate(streams):
            chain = chains[stream] = []
            for kernel, request, _ in stream.work:
                title = f"rank {stream.rank}, " if several else ""
                title += f"stream {number}, " if len(streams) > 1 and not several else ""
                title += f"launch {len(chain)}"
                launch = Launch(self, kernel, request, title, number << STREAM_SHIFT)
                launch.rank = stream.rank
                chain.append(launch)
            self.launches += chain
        done: set[Launch] = set()

        def follow(stream: Stream, place: int) -> Launch:
            launch = chains[stream][place]
            if launch not in done:
                done.add(launch)
                before = follow(stream, place - 1) if place else None
                after = [found for e in stream.work[place][2] for found in last(e)]
                launch.follow(before, after, host)
            return launch

        def last(event: Event) -> list[Launch]:
            if event.stream not in chains:
                raise ValueError("an event of a stream that is not run")
            own = [follow(event.stream, event.length - 1)] if event.length else []
            return own + [found for e in event.waits for found in last(e)]

        for stream, chain in chains.items():
            for place in range(len(chain)):
                follow(stream, place)

    def _step(self) -> None:
        """Give every one who can run a turn."""
        before = self.changes
        for launch in self.launches:
            if not launch.started and launch.may_start():
                launch.start()
                self.changes += 1
        moved = False
        if self.seed:
            self._land_some()
        for launch in self._turns():
            if launch.started and not launch.complete:
                moved |= self._run_launch(launch)
        if self.changes != before:
            self._pass_time(STEP_NS)
            self._leap = STEP_NS
        elif not moved:
            if self.under_way:
                self._land(self.under_way.pop(self.choose(len(self.under_way))))
            elif self.is_shared:
                time.sleep(1e-3)
                self.changes += 1  # perhaps, by another process: ask again
            elif self.timer_read:
                # Whoever still runs asks for the time again and again: let waits run out.
                self._pass_time(self._leap)
                self._leap *= 2
            else:
                raise DeadlockFault(self._deadlock())

    def _turns(self) -> list[Launch]:
        """The order of grids in a step: of several streams, drawn from the seed."""
        launches = list(self.launches)
        if self.seed and launches[0].base != launches[-1].base:
            self.random.shuffle(launches)
        return launches

    def _pass_time(self, ns: int) -> None:
        self.time += ns
        self.timer_read = False

    def _land(self, copy: Any) -> None:
        copy.land()
        self.changes += 1

    def _land_some(self) -> None:
        self.random.shuffle(self.under_way)
        for _ in range(self.random.randrange(len(self.under_way) + 1)):
            self._land(self.under_way.pop())

    def _run_launch(self, launch: Launch) -> bool:
        moved = False
        ctas = [cta for cta in launch.ctas if not cta.done]
        if self.seed:
            self.random.shuffle(ctas)
        for cta in ctas:
            groups = list(cta.groups)
            if self.seed:
                self.random.shuffle(groups)
            for threads in groups:
                moved |= threads.run()
                if threads.done:
                    cta.groups.remove(threads)
            moved |= self._merge(cta)
            if not cta.groups:
                cta.end()
        if all(cta.done for cta in launch.ctas) and launch.before_is_complete():
            mine = set(launch.ctas)
            for copy in [c for c in self.under_way if c.cta in mine]:
                self.under_way.remove(copy)
                self._land(copy)
            launch.end()
            moved = True
            self.changes += 1
        return moved

    def _merge(self, cta: CTA) -> bool:
        """Threads that stand at the same place run together again; with a seed, some part.

        Whether any came together.
        """
        groups, merged = cta.groups, False
        if len(groups) > 1:
            # Parts of a warpgroup that wait for each other always meet.
            all_meet = not self.seed or self.random.random() < 0.5
            kept: list[Threads] = []
            for threads in groups:
                twin = None
                if all_meet or threads.wait is not None:
                    twin = next((k for k in kept if k.may_merge(threads)), None)
                if twin is None:
                    kept.append(threads)
                else:
                    twin.merge(threads)
                    merged = True
            cta.groups = kept
        if self.seed:
            for threads in list(cta.groups):
                if threads.may_part() and self.random.random() < 0.25:
                    cut = 128 * self.random.randrange(1, threads.count // 128)
                    threads.split_off(np.arange(cut, threads.count), threads.pc)
                    threads.keep_only(np.arange(cut))
        return merged

    def _deadlock(self) -> str:
        rows = ["nothing can go on:"]
        for launch in self.launches:
            if not launch.started:
                rows.append(f"  {launch.title}: waits for the grid before")
            for cta in launch.ctas:
                for threads in cta.groups:
                    rows.append(f"  {threads.place()}\n    waits on {threads.describe_wait()}")
        return "\n".join(rows)
