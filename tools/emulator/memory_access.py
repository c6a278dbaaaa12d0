"""Loads, stores and atomics of threads, each checked before it is carried out."""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_ep_jit.tools.emulator import clocks
from moe_ep_jit.tools.emulator.fault import Fault
from moe_ep_jit.tools.emulator.memory import Memory

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class MemoryAccess:
    """The part of ``Threads`` that reads and writes memory.

    unit, count  bytes of an element and elements of a vector; addresses are aligned to all of it
    strong       a relaxed, acquire, release or atomic access: it races with nothing
    order        "" of an ordinary access, else e.g. "acquire", or "acquire.sys" at that scope
    """

    # Places

    def lanes(self, mask: Any) -> np.ndarray:
        if mask is None:
            return np.arange(self.count)
        return np.flatnonzero(np.broadcast_to(mask, self.count))

    def global_places(
        self, base: Any, offset: int, size: int, lanes: np.ndarray, what: str
    ) -> list[tuple[Memory, np.ndarray, np.ndarray]]:
        """(allocation, byte offsets, places in ``lanes``) of the addresses of ``lanes``."""
        wide = np.broadcast_to(base, self.count)[lanes].astype(np.int64) + offset
        self._check_alignment(wide, size, lanes, what)
        memory, rank = self.cta.machine.memory, self.cta.launch.rank
        low, high = int(wide.min()), int(wide.max())
        part = memory.find(low)
        if part is not None and high + size <= part.base + part.size:
            part.check_rank(rank, what)
            return [(part, wide - part.base, np.arange(len(lanes)))]
        groups: dict[int, tuple[Memory, list[int]]] = {}
        for place, address in enumerate(wide.tolist()):
            try:
                part = memory.at(address, size, what, rank)
            except Fault as fault:
                raise Fault(f"{fault.args[0]}, thread {self.tids[lanes[place]]}") from None
            groups.setdefault(part.base, (part, []))[1].append(place)
        return [
            (part, wide[places] - part.base, np.array(places)) for part, places in groups.values()
        ]

    def shared_places(
        self, base: Any, offset: int, size: int, lanes: np.ndarray, what: str
    ) -> list[tuple[Memory, np.ndarray, np.ndarray]]:
        """Likewise for shared addresses, whose bits 24 and up are the CTA's rank in its cluster."""
        wide = np.broadcast_to(base, self.count)[lanes].astype(np.int64) + offset
        self._check_alignment(wide, size, lanes, what)
        ranks, offsets = wide >> 24, wide & 0xFFFFFF
        found = []
        for rank in np.unique(ranks):
            places = np.flatnonzero(ranks == rank)
            cta = self.cta.peer(int(rank), what)
            mine = offsets[places]
            wrong = (mine < cta.shared_begin) | (mine + size > cta.shared.size)
            if wrong.any():
                place = places[np.flatnonzero(wrong)[0]]
                raise Fault(
                    f"{what} of {size} bytes at shared {int(offsets[place]):#x} by thread "
                    f"{self.tids[lanes[place]]}: the CTA has {cta.shared_begin:#x} to "
                    f"{cta.shared.size:#x}"
                )
            found.append((cta.shared, mine, places))
        return found

    def _check_alignment(self, wide: np.ndarray, size: int, lanes: np.ndarray, what: str) -> None:
        odd = wide & (size - 1)
        if odd.any():
            place = int(np.flatnonzero(odd)[0])
            raise Fault(
                f"{what} of {size} bytes at {int(wide[place]):#x}, not aligned to {size}, by "
                f"thread {self.tids[lanes[place]]}"
            )

    # Checks

    def check_read(
        self,
        part: Memory,
        offsets: np.ndarray,
        unit: int,
        count: int,
        tids: np.ndarray,
        strong: bool,
    ) -> None:
        """A Fault unless every byte was written, by a write that these threads may see."""
        bad = part.first_unwritten(offsets, unit, count)
        if bad is not None:
            raise Fault(
                f"thread {tids[bad]} reads {part.name} + {int(offsets[bad])}, which nothing has "
                "written"
            )
        if not strong:
            self.check_order(part, offsets, unit * count, tids, "reads")

    def check_order(
        self, part: Memory, offsets: np.ndarray, size: int, tids: np.ndarray, verb: str
    ) -> None:
        records = part.records_at(offsets, size)
        if records is None:
            return
        hidden = self.cta.clock.hidden(tids, records, False)
        if hidden is not None:
            place, record, _ = hidden
            raise Fault(self.race(part, int(offsets[place]), int(tids[place]), record, verb))

    def race(self, part: Memory, offset: int, tid: int, record: int, verb: str) -> str:
        writer = self.cta.machine.writer(*clocks.describe(record))
        return (
            f"thread {tid} {verb} {part.name} + {offset}, which {writer} has written with no"
            " barrier, release and acquire, or grid dependency between the two"
        )

    # Global and shared

    def load(
        self, space: str, base: Any, offset: int, unit: int, count: int, mask: Any, order: str = ""
    ) -> list[np.ndarray]:  # fmt: skip
        """``count`` arrays of elements; zeros for threads that take no part."""
        lanes = self.lanes(mask)
        whole = np.zeros((count, self.count), _UNSIGNED[unit])
        if len(lanes) == 0:
            return list(whole)
        places = self.global_places if space == "global" else self.shared_places
        tids = self.tids[lanes]
        found = places(base, offset, unit * count, lanes, f"ld.{space}")
        for part, offsets, at in found:
            if order:
                self.synchronizes(part, offsets, tids[at], reads=True, order=order)
                self.polled = f"ld.{order}", part, int(offsets[0])
            self.check_read(part, offsets, unit, count, tids[at], bool(order))
            whole[:, lanes[at]] = part.load(offsets, unit, count).T
        return list(whole)

    def store(
        self, space: str, base: Any, offset: int, values: list[Any], mask: Any, order: str = ""
    ) -> None:
        """Store one vector a thread."""
        lanes = self.lanes(mask)
        if len(lanes) == 0:
            return
        stacked = np.stack([np.broadcast_to(v, self.count)[lanes] for v in values], axis=1)
        unit = stacked.dtype.itemsize
        places = self.global_places if space == "global" else self.shared_places
        found = places(base, offset, unit * len(values), lanes, f"st.{space}")
        self.cta.machine.changes += 1
        for part, offsets, at in found:
            tids = self.tids[lanes[at]]
            if space == "global":
                self.check_global_write(part, offsets, tids)
                if order:
                    self.synchronizes(part, offsets, tids, reads=False, order=order)
                else:
                    self.check_order(part, offsets, unit * len(values), tids, "overwrites")
            records = np.zeros(len(at), np.int64) if order else self.cta.clock.records(tids)
            part.store(offsets, stacked[at], unit, records)

    def check_global_write(self, part: Memory, offsets: np.ndarray, tids: np.ndarray) -> None:
        """Before griddepcontrol.wait the grids before may still use what is written."""
        for view, places in self.cta.clock.groups(tids):
            if not self.cta.launch.waited(view):
                offset = int(offsets[places][0])
                raise Fault(
                    f"thread {int(tids[places][0])} writes {part.name} + {offset} before its "
                    "griddepcontrol.wait, while the grid before may still run"
                )

    def synchronizes(
        self, part: Memory, offsets: np.ndarray, tids: np.ndarray, reads: bool, order: str
    ) -> None:
        """A strong access to an address: what it passes on, and what it learns."""
        for offset, tid in zip(offsets.tolist(), tids.tolist(), strict=True):
            self.cta.synchronizes(part.base + offset, tid, reads, not reads, order)

    def atomic(
        self, operation: str, kind: type, base: Any, offset: int, values: list[Any], mask: Any,
        order: str,
    ) -> np.ndarray:  # fmt: skip
        """Read, modify, write, one thread after the other; what was there before."""
        lanes = self.lanes(mask)
        unit = np.dtype(kind).itemsize
        result = np.zeros(self.count, kind)
        if len(lanes) == 0:
            return result
        found = self.global_places(base, offset, unit, lanes, "atom")
        operands, changed = [np.broadcast_to(v, self.count) for v in values], False
        for part, offsets, at in found:
            tids = self.tids[lanes[at]]
            self.check_read(part, offsets, unit, 1, tids, True)
            self.check_global_write(part, offsets, tids)
            for position, place in zip(offsets.tolist(), at.tolist(), strict=True):
                lane = lanes[place]
                cell = part.data[position : position + unit].view(kind)
                old = cell[0]
                result[lane] = old
                cell[0] = _combined(operation, old, [o[lane] for o in operands])
                changed |= bool(cell[0] != old)
                self.cta.synchronizes(
                    part.base + position, int(self.tids[lane]), True, True, order or "relaxed"
                )
            part.record(offsets, unit, np.zeros(len(at), np.int64))
            if changed:
                self.cta.machine.changes += 1
            else:
                self.polled = f"atom.{operation}", part, int(offsets[0])
        return result

    def param(self, name: str, offset: int, kind: type) -> np.ndarray:
        return self.full(self.cta.launch.param(name, offset, kind))

    # Matrices

    def stmatrix(
        self, base: Any, offset: int, registers: list[np.ndarray], transposed: bool, mask: Any
    ) -> None:
        """8x8 matrices of 16-bit elements; lane 8 i + r gives the address of row r of matrix i."""
        self.whole_warps(mask, "stmatrix")
        warps = self.warps_of(mask)
        self.cta.machine.changes += 1
        for number, register in enumerate(registers):
            halves = np.ascontiguousarray(register.reshape(-1, 32)[warps]).view(np.uint16)
            matrix = halves.reshape(-1, 8, 8)  # [warp, lane // 4, 2 (lane % 4) + half]
            if transposed:
                matrix = matrix.transpose(0, 2, 1)
            rows = np.ascontiguousarray(matrix).reshape(-1, 8).view(np.uint64)
            lanes = (warps[:, None] * 32 + 8 * number + np.arange(8)).reshape(-1)
            for part, offsets, at in self.shared_places(base, offset, 16, lanes, "stmatrix"):
                tids = self.tids[lanes[at]]
                part.store(offsets, rows[at], 8, self.cta.clock.records(tids))

    def ldmatrix(
        self, base: Any, offset: int, count: int, transposed: bool, mask: Any
    ) -> list[np.ndarray]:
        """The inverse of ``stmatrix``."""
        self.whole_warps(mask, "ldmatrix")
        warps = self.warps_of(mask)
        results = np.zeros((count, self.count), np.uint32)
        for number in range(count):
            lanes = (warps[:, None] * 32 + 8 * number + np.arange(8)).reshape(-1)
            rows = np.zeros((len(lanes), 2), np.uint64)
            for part, offsets, at in self.shared_places(base, offset, 16, lanes, "ldmatrix"):
                self.check_read(part, offsets, 8, 2, self.tids[lanes[at]], False)
                rows[at] = part.load(offsets, 8, 2)
            matrix = rows.view(np.uint16).reshape(-1, 8, 8)
            if transposed:
                matrix = matrix.transpose(0, 2, 1)
            words = np.ascontiguousarray(matrix).reshape(-1, 64).view(np.uint32)
            results[number].reshape(-1, 32)[warps] = words
        return list(results)

    def warps_of(self, mask: Any) -> np.ndarray:
        """Numbers of the warps that take part."""
        if mask is None:
            return np.arange(self.count // 32)
        return np.flatnonzero(np.asarray(mask).reshape(-1, 32).any(axis=1))

    def whole_warps(self, mask: Any, what: str) -> None:
        if mask is not None:
            warps = np.asarray(mask).reshape(-1, 32)
            if (warps.any(axis=1) != warps.all(axis=1)).any():
                raise Fault(f"{what} by part of a warp")


def _combined(operation: str, old: Any, operands: list[Any]) -> Any:
    if operation == "add":
        with np.errstate(over="ignore"):
            return old + operands[0]
    if operation == "exch":
        return operands[0]
    if operation == "cas":
        return operands[1] if old == operands[0] else old
    if operation in ("min", "max"):
        return min(old, operands[0]) if operation == "min" else max(old, operands[0])
    if operation in ("and", "or", "xor"):
        return {"and": old & operands[0], "or": old | operands[0], "xor": old ^ operands[0]}[
            operation
        ]
    raise Fault(f"atom.{operation} is not known")
