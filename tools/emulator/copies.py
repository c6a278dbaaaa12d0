"""cp.async: copies of 4 to 16 bytes a thread from global to shared memory.

A copy lands when its turn comes. What it has written belongs to its thread, but is hidden from all,
that thread too, until the thread has waited for its group, or its arrival at an mbarrier has come.
It is written by the generic proxy: tensor cores and bulk copies need a proxy fence to read it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_ep_jit.tools.emulator.clocks import NOT_YET, View
from moe_ep_jit.tools.emulator.mbarrier import MBarrier
from moe_ep_jit.tools.emulator.memory import Memory
from moe_ep_jit.tools.emulator.memory_access import wide
from moe_ep_jit.tools.emulator.ptx import Instruction
from moe_ep_jit.tools.emulator.tma import Copy


class SmallCopy(Copy):
    """One cp.async of several threads."""

    def __init__(
        self, cta: Any, i: Instruction, tids: np.ndarray, shared: Memory, places: np.ndarray
    ) -> None:
        super().__init__(cta, i)
        self.tids, self.shared, self.places = tids, shared, places
        self.size = 0
        #: (allocation, byte offsets, rows) of what is read, and how many bytes of each.
        self.sources: list[tuple[Memory, np.ndarray, Any]] = []
        self.lengths = np.zeros(0, np.int64)

    def move(self) -> None:
        data = np.zeros((len(self.tids), self.size), np.uint8)
        for part, offsets, rows in self.sources:
            data[rows] = part.load(offsets, 1, self.size)
        data[np.arange(self.size) >= self.lengths[:, None]] = 0
        records = self.cta.clock.bases[self.tids] + NOT_YET
        self.shared.store(self.places, data, 1, None)
        for n in range(self.size):
            self.shared.record(self.places + n, 1, records)

    def show(self, tid: int, time: int) -> None:
        """What was copied for a thread is as if it had stored it at ``time``."""
        base = int(self.cta.clock.bases[tid])
        for place in self.places[self.tids == tid].tolist():
            records = self.shared.records[place : place + self.size]
            records[records == base + NOT_YET] = base + time


class Arrival(Copy):
    """cp.async.mbarrier.arrive of one thread: behind the copies that it has issued before."""

    def __init__(
        self, cta: Any, i: Instruction, tid: int, barrier: MBarrier, copies: list[SmallCopy],
    ) -> None:  # fmt: skip
        super().__init__(cta, i)
        self.tid, self.barrier, self.copies = tid, barrier, copies
        self.time = cta.clock.time
        self.view: View = cta.clock.release(np.array([tid]))

    def move(self) -> None:
        for copy in self.copies:
            if not copy.is_done:
                self.cta.machine.under_way.remove(copy)
                copy.land()
            copy.show(self.tid, self.time)
        self.barrier.arrive(1, self.view)


class Copies:
    """The part of ``Threads`` that issues cp.async and waits for it."""

    def copy(self, i: Instruction, dst: Any, src: Any, size: int, length: Any, mask: Any) -> None:
        """``size`` bytes a thread, of which ``length`` are read and the rest is zeros."""
        lanes = self.lanes(mask)
        if not len(lanes):
            return
        lengths = wide(length, self.count)[lanes].astype(np.int64)
        reads = lanes[lengths > 0]
        sources = self.global_places(src, 0, size, reads, i.op) if len(reads) else []
        rows = np.flatnonzero(lengths > 0)
        for shared, places, at in self.shared_places(dst, 0, size, lanes, i.op):
            tids = self.tids[lanes[at]]
            copy = SmallCopy(self.cta, i, tids, shared, places)
            copy.size, copy.lengths = size, lengths[at]
            for part, offsets, where in sources:
                self.check_read(part, offsets, 1, size, self.tids[reads[where]])
                copy.sources.append((part, offsets, rows[where]))
            for tid in tids.tolist():
                self.cta.copies.setdefault(tid, [[]])[-1].append(copy)
            self.cta.machine.later(copy)

    def copy_commit(self, mask: Any) -> None:
        for tid in self.tids[self.lanes(mask)].tolist():
            self.cta.copies.setdefault(tid, [[]]).append([])

    def copy_arrive(self, i: Instruction, base: Any, offset: int, mask: Any) -> None:
        """Unless .noinc, the arrival is one that the mbarrier's count did not foresee."""
        addresses = wide(base, self.count).astype(np.int64) + offset
        for lane in self.lanes(mask).tolist():
            tid = int(self.tids[lane])
            barrier = self.cta.mbarrier(int(addresses[lane]))
            if "noinc" not in i.parts:
                barrier.pending += 1
            mine = [copy for group in self.cta.copies.get(tid, []) for copy in group]
            self.cta.machine.later(Arrival(self.cta, i, tid, barrier, mine))

    def copy_wait(self, i: Instruction) -> bool:
        """wait_group N: at most so many of a thread's groups are under way; wait_all: nothing."""
        tids = self.active().tolist()
        waited = []
        for tid in tids:
            groups = self.cta.copies.get(tid, [[]])
            older = groups
            if i.op == "cp.async.wait_group":
                older = groups[: max(len(groups) - 1 - i.operands[0].value, 0)]
            if any(not copy.is_done for group in older for copy in group):
                self.wait = ("cp.async", tid)
                return False
            waited.append((tid, older))
        self.wait = None
        for tid, older in waited:
            for group in older:
                for copy in group:
                    copy.show(tid, self.cta.clock.time)
                group.clear()
        return True
