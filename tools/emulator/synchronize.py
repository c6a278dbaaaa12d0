"""Barriers, mbarriers, fences, grid dependencies: the part of ``Threads`` that orders things.

An instruction that may wait is asked again each time its threads' turn comes, until it is done.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_ep_jit.tools.emulator import tensor_memory, tma
from moe_ep_jit.tools.emulator.fault import Fault
from moe_ep_jit.tools.emulator.mbarrier import MBarrier
from moe_ep_jit.tools.emulator.memory_access import wide
from moe_ep_jit.tools.emulator.ptx import Instruction, Operand


class NamedBarrier:
    """One of a CTA's sixteen barriers."""

    def __init__(self, number: int) -> None:
        self.number, self.generation = number, 0
        self.arrived: list[np.ndarray] = []
        self.expected: int | None = None  # None: every thread of the CTA that has not ended

    def count(self) -> int:
        return sum(map(len, self.arrived))


class Synchronize:
    """The part of ``Threads`` that waits and orders."""

    def value(self, operand: Operand) -> np.ndarray:
        """An operand as integers, one a thread."""
        if operand.kind == "reg":
            found = self.R[operand.value]
            if found is None:
                raise TypeError("NoneType register")
            return wide(found, self.count)
        if operand.kind == "imm":
            return np.full(self.count, operand.value, np.int64)
        if operand.kind == "addr":
            base = self.value(operand.value).astype(np.int64)
            return base + operand.extra[0]
        if operand.kind == "sym":
            return np.full(self.count, self.cta.symbol(operand.value), np.int64)
        raise Fault(f"operand of kind {operand.kind}")

    def still_waits(self) -> bool:
        """Whether what these threads wait for is as it was, so that asking again is in vain."""
        if isinstance(self.wait, list):
            return all(b.generation == g for b, g, _ in self.wait)
        kind, what = self.wait
        if kind == "mbarrier":
            return all(barrier.phase == phase for barrier, phase in what)
        return kind == "warpgroup"

    def special_instruction(self, i: Instruction) -> bool:
        """Carry out an instruction that may wait; whether it is done."""
        if i.op.startswith("wgmma."):
            return self.wgmma.instruction(self, i)
        if i.op.startswith("tcgen05."):
            return tensor_memory.instruction(self, i)
        if i.op.startswith("mbarrier.try_wait"):
            return self._try_wait(i)
        if i.op.startswith("bar") and not i.op.startswith("barrier.cluster"):
            return self._barrier(i)
        if i.op.startswith("barrier.cluster.wait"):
            return self._cluster_wait(i)
        if i.op.startswith("griddepcontrol.wait"):
            return self._grid_wait()
        if i.op.startswith("cp.async.bulk.wait_group"):
            return self._bulk_wait(i)
        if i.op in ("cp.async.wait_group", "cp.async.wait_all"):
            return self.copy_wait(i)
        raise i.unsupported("unknown instruction")

    # Barriers of a CTA

    def _barrier(self, i: Instruction) -> bool:
        if self.wait is None:
            self._arrive(i)
            if "arrive" in i.parts:
                self.wait = None
                return True
        return self._barrier_over()

    def _arrive(self, i: Instruction) -> None:
        self.whole_warps(self.mask, i.parts[0])
        numbers = self.value(i.operands[0])
        expected = self.value(i.operands[1]) if len(i.operands) > 1 else None
        lanes = self.lanes(self.mask)
        self.wait = []
        for number in np.unique(numbers[lanes]):
            mine = lanes[numbers[lanes] == number]
            barrier = self.cta.named_barrier(int(number))
            count = None if expected is None else int(expected[mine[0]])
            if barrier.arrived and barrier.expected != count:
                raise Fault(
                    f"barrier {number}: some expect {barrier.expected} threads, others {count}"
                )
            barrier.expected = count
            barrier.arrived.append(self.tids[mine])
            self.wait.append((barrier, barrier.generation, self.tids[mine]))
            self.cta.check_barrier(barrier)

    def _barrier_over(self) -> bool:
        open_ = [(b, g, t) for b, g, t in self.wait if b.generation == g]
        if not open_:
            self.wait = None
            return True
        over = [t for b, g, t in self.wait if b.generation != g]
        if over:
            passed = np.isin(self.tids, np.concatenate(over))
            self.wait = None
            self.split_off(np.flatnonzero(passed), self.code.program.blocks[self.pc].successors[0])
            self.keep_only(np.flatnonzero(~passed))
            self.wait = open_
        return False

    def sync_warp(self, member: Any, mask: Any) -> None:
        """bar.warp.sync: the lanes of each warp learn what the others did."""
        active = self.members(member, mask, "bar.warp.sync")
        for warp in np.flatnonzero(active.any(axis=1)):
            self.cta.clock.meet(self.tids[warp * 32 : warp * 32 + 32][active[warp]])

    # Clusters

    def cluster_arrive(self, relaxed: bool, mask: Any) -> None:
        tids = self.tids[self.lanes(mask)]
        self.cta.cluster.arrive(self.cta, tids, relaxed)
        self.cta.machine.changes += 1

    def _cluster_wait(self, i: Instruction) -> bool:
        tids = self.active()
        if self.wait is None:
            self.wait = ("cluster", self.cta.cluster.ticket(self.cta, tids))
        if self.cta.cluster.generation <= self.wait[1]:
            return False
        self.wait = None
        self.cta.clock.acquire(tids, *self.cta.cluster.views.values())
        return True

    # mbarriers

    def _mbarriers(self, addresses: np.ndarray, lanes: np.ndarray) -> list[tuple[MBarrier, Any]]:
        """(mbarrier, places in ``lanes``) of shared addresses."""
        found = []
        wanted = addresses[lanes]
        if len(wanted) and wanted.min() == wanted.max():
            return [(self.cta.mbarrier(int(wanted[0])), slice(None))]
        for address in np.unique(wanted):
            places = np.flatnonzero(wanted == address)
            found.append((self.cta.mbarrier(int(address)), places))
        return found

    def mbarrier_init(self, base: Any, offset: int, count: Any, mask: Any) -> None:
        addresses = wide(base, self.count).astype(np.int64) + offset
        counts = wide(count, self.count)
        self.cta.machine.changes += 1
        for lane in self.lanes(mask):
            self.cta.new_mbarrier(int(addresses[lane]), int(counts[lane]))

    def mbarrier_inval(self, base: Any, offset: int, mask: Any) -> None:
        addresses = wide(base, self.count).astype(np.int64) + offset
        for lane in self.lanes(mask):
            self.cta.mbarrier(int(addresses[lane]))
            del self.cta.mbarriers[int(addresses[lane]) & 0xFFFFFF]

    def mbarrier_arrive(
        self, base: Any, offset: int, count: Any, expected_bytes: Any, mask: Any
    ) -> np.ndarray:  # fmt: skip
        """arrive, or arrive.expect_tx where ``expected_bytes`` is not None."""
        addresses = wide(base, self.count).astype(np.int64) + offset
        counts = wide(count, self.count)
        lanes = self.lanes(mask)
        for barrier, places in self._mbarriers(addresses, lanes):
            mine = lanes[places]
            if expected_bytes is not None:
                barrier.expect(int(wide(expected_bytes, self.count)[mine].sum()))
            barrier.arrive(int(counts[mine].sum()), self.cta.clock.release(self.tids[mine]))
        self.cta.machine.changes += 1
        return self.full(np.uint64(0))

    def mbarrier_expect(self, base: Any, offset: int, expected_bytes: Any, mask: Any) -> None:
        addresses = wide(base, self.count).astype(np.int64) + offset
        wanted = wide(expected_bytes, self.count)
        lanes = self.lanes(mask)
        for barrier, places in self._mbarriers(addresses, lanes):
            barrier.expect(int(wanted[lanes[places]].sum()))
        self.cta.machine.changes += 1

    def mbarrier_test(self, base: Any, offset: int, parity: Any, mask: Any) -> np.ndarray:
        """test_wait.parity: whether the phase is over; who sees it over learns."""
        addresses = wide(base, self.count).astype(np.int64) + offset
        parities = wide(parity, self.count)
        lanes = self.lanes(mask)
        over = np.zeros(self.count, bool)
        for barrier, places in self._mbarriers(addresses, lanes):
            mine = lanes[places]
            done = np.array([barrier.is_done(int(p)) for p in parities[mine]])
            over[mine] = done
            if done.any():
                self.cta.clock.acquire(self.tids[mine[done]], *barrier.views.values())
            self.polled = barrier.describe()
        return over

    def _try_wait(self, i: Instruction) -> bool:
        if "parity" not in i.parts:
            raise i.unsupported("wait by a state")
        d, address, parity, *_ = i.operands
        addresses, parities = self.value(address), self.value(parity)
        lanes = self.lanes(self.mask)
        done = np.zeros(self.count, bool)
        barriers = self._mbarriers(addresses, lanes)
        for barrier, places in barriers:
            mine = lanes[places]
            done[mine] = barrier.phase & 1 != parities[mine].astype(np.int64) & 1
        waits = np.zeros(self.count, bool)
        waits[lanes] = ~done[lanes]
        if waits.any():
            open_ = [b for b, places in barriers if waits[lanes[places]].any()]
            self.wait = ("mbarrier", [(barrier, barrier.phase) for barrier in open_])
            passes = done.reshape(-1, 32).any(axis=1)
            waits = waits.reshape(-1, 32).any(axis=1)
            apart = np.flatnonzero(np.repeat(passes & ~waits, 32))
            if len(apart):
                held, self.wait = self.wait, None
                self.split_off(apart, self.pc)
                self.keep_only(np.flatnonzero(np.repeat(~(passes & ~waits), 32)))
                self.wait = held
            return False
        self.wait = None
        for barrier, places in barriers:
            self.cta.clock.acquire(self.tids[lanes[places]], *barrier.views.values())
        if d.kind == "reg":
            self.R[d.value] = self.full(np.True_)
        return True

    # Fences and grids

    def fence_proxy(self, mask: Any) -> None:
        self.cta.clock.fence_proxy(self.tids[self.lanes(mask)])

    def fence(self, system: bool, mask: Any) -> None:
        """fence.acq_rel, fence.sc: orders strong accesses before it with those behind."""
        for tid in self.tids[self.lanes(mask)].tolist():
            self.cta.fence(tid, system)

    def _grid_wait(self) -> bool:
        tids = self.active()
        if not self.cta.launch.before_is_complete():
            self.wait = ("grid", self.cta.launch)
            return False
        self.wait = None
        launch = self.cta.launch
        self.cta.clock.see_grids(tids, launch.horizon)
        if launch.before is not None and launch.before.learnt is not None:
            self.cta.clock.acquire(tids, launch.before.learnt)
        return True

    def launch_dependents(self, mask: Any) -> None:
        if len(self.lanes(mask)) and not self.cta.triggered:
            self.cta.triggered = True
            self.cta.machine.changes += 1

    def pause(self) -> None:
        """nanosleep: others' turn, where it stands in a loop."""
        self.polled = self.polled or "nanosleep"

    # Bulk copies

    def bulk(self, i: Instruction, operands: dict[str, Any], mask: Any) -> None:
        """cp.async.bulk of any kind, by each thread that takes part."""
        for lane in self.lanes(mask):
            values = {
                name: [int(wide(v, self.count)[lane]) for v in value]
                if isinstance(value, list)
                else int(wide(value, self.count)[lane])
                for name, value in operands.items()
            }
            tma.issue(self.cta, int(self.tids[lane]), i, values)

    def bulk_commit(self, mask: Any) -> None:
        for tid in self.tids[self.lanes(mask)].tolist():
            self.cta.bulk_groups.setdefault(tid, [[]]).append([])

    def _bulk_wait(self, i: Instruction) -> bool:
        """Wait until at most so many committed groups are under way; .read: their reading."""
        (most,) = i.operands
        reading = "read" in i.parts
        over = []
        for tid in self.active().tolist():
            groups = self.cta.bulk_groups.get(tid, [[]])[:-1]
            older = groups[: max(len(groups) - most.value, 0)]
            if any(not (c.has_read if reading else c.is_done) for g in older for c in g):
                self.wait = ("bulk copies", tid)
                return False
            over.append((tid, older))
        self.wait = None
        if not reading:
            for tid, older in over:
                self.cta.clock.acquire(np.array([tid]), *(c.view for g in older for c in g))
                for group in older:
                    group.clear()
        return True

    def describe_wait(self) -> str:
        """What these threads wait on, for the table of a deadlock."""
        if isinstance(self.wait, list):
            return ", ".join(
                f"barrier {b.number}: {b.count()} of {b.expected or self.cta.alive} threads arrived"
                for b, _, _ in self.wait
            )
        if self.wait is None:
            return self._describe_poll()
        kind, what = self.wait
        if kind == "mbarrier":
            return ", ".join(barrier.describe() for barrier, _ in what)
        if kind == "grid":
            return "the grid before"
        return f"{kind} ({what})" if kind != "cluster" else self.cta.cluster.describe()

    def _describe_poll(self) -> str:
        if self.polled is None:
            return "nothing: it runs in circles"
        if isinstance(self.polled, str):
            return f"{self.polled}, in a loop"
        what, part, offset = self.polled
        word = part.data[offset : offset + 4].tobytes().hex(" ")
        return f"{part.name} + {offset}, by {what} in a loop; its first bytes are {word}"
