"""Loads, stores and atomics of threads, each checked before it is carried out."""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_ep_jit.tools.emulator import clocks
from moe_ep_jit.tools.emulator.fault import Fault
from moe_ep_jit.tools.emulator.memory import Memory

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def wide(value: Any, count: int) -> np.ndarray:
    """``value`` as one element a thread; ``np.broadcast_to`` costs more than most instructions."""
    if isinstance(value, np.ndarray) and value.shape == (count,):
        return value
    return np.broadcast_to(value, count)


class MemoryAccess:
    """The part of ``Threads`` that reads and writes memory.

    unit, count  bytes of an element and elements of a vector; addresses are aligned to all of it
    strong       a relaxed, acquire, release or atomic access: it races with nothing
    order        "" of an ordinary access, else e.g. "acquire", or "acquire.sys" at that scope
    """

    # Places

    def lanes(self, mask: Any) -> np.ndarray:
        if mask is None:
            found = self.constants.get("lanes")
            if found is None:
                found = self.constants["lanes"] = np.arange(self.count)
            return found
        return wide(mask, self.count).nonzero()[0]

    def global_places(
        self, base: Any, offset: int, size: int, lanes: np.ndarray, what: str
    ) -> list[tuple[Memory, np.ndarray, Any]]:
        """(allocation, byte offsets, places in ``lanes``) of the addresses of ``lanes``."""
        where = self._addresses(base, offset, size, lanes, what)
        memory, rank = self.cta.machine.memory, self.cta.launch.rank
        low, high = int(where.min()), int(where.max())
        part = memory.find(low)
        if part is not None and high + size <= part.base + part.size:
            part.check_rank(rank, what)
            return [(part, where - part.base, slice(None))]
        groups: dict[int, tuple[Memory, list[int]]] = {}
        for place, address in enumerate(where.tolist()):
            try:
                part = memory.at(address, size, what, rank)
            except Fault as fault:
                raise Fault(f"{fault.args[0]}, thread {self.tids[lanes[place]]}") from None
            groups.setdefault(part.base, (part, []))[1].append(place)
        return [
            (part, where[places] - part.base, np.array(places)) for part, places in groups.values()
        ]

    def shared_places(
        self, base: Any, offset: int, size: int, lanes: np.ndarray, what: str
    ) -> list[tuple[Memory, np.ndarray, Any]]:
        """Likewise for shared addresses, whose bits 24 and up are the CTA's rank in its cluster."""
        where = self._addresses(base, offset, size, lanes, what)
        low, high = int(where.min()), int(where.max())
        if low >> 24 == high >> 24:
            cta = self.cta.peer(low >> 24, what)
            low, high = low & 0xFFFFFF, high & 0xFFFFFF
            if low >= cta.shared_begin and high + size <= cta.shared.size:
                return [(cta.shared, where & 0xFFFFFF, slice(None))]
        ranks, offsets = where >> 24, where & 0xFFFFFF
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

    def _addresses(
        self, base: Any, offset: int, size: int, lanes: np.ndarray, what: str
    ) -> np.ndarray:
        """Addresses of ``lanes``, checked to be multiples of ``size``."""
        base = wide(base, self.count)
        if len(lanes) != self.count:
            base = base[lanes]
        where = base.astype(np.int64)
        if offset:
            where += offset
        odd = where & (size - 1)
        if np.count_nonzero(odd):
            place = int(np.flatnonzero(odd)[0])
            raise Fault(
                f"{what} of {size} bytes at {int(where[place]):#x}, not aligned to {size}, by "
                f"thread {self.tids[lanes[place]]}"
            )
        return where

    # Checks

    def check_read(
        self,
        part: Memory,
        offsets: np.ndarray,
        unit: int,
        count: int,
        tids: np.ndarray,
        verb: str = "reads",
    ) -> None:
        """A Fault unless every byte was written, by a write that these threads may see.

        A strong read races with no strong write, whose record is 0; with an ordinary one it does.
        """
        bad = part.first_unwritten(offsets, unit, count)
        if bad is not None:
            raise Fault(
                f"thread {tids[bad]} reads {part.name} + {int(offsets[bad])}, which nothing has "
                "written"
            )
        self.check_order(part, offsets, unit * count, tids, verb)

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
        if len(lanes) == 0:
            return list(np.zeros((count, self.count), _UNSIGNED[unit]))
        places = self.global_places if space == "global" else self.shared_places
        tids = self.tids if len(lanes) == self.count else self.tids[lanes]
        found = places(base, offset, unit * count, lanes, f"ld.{space}")
        if len(lanes) == self.count and len(found) == 1 and not order:
            ((part, offsets, _),) = found
            self.check_read(part, offsets, unit, count, tids)
            values = part.load(offsets, unit, count)
            return [values.reshape(-1)] if count == 1 else list(np.ascontiguousarray(values.T))
        whole = np.zeros((count, self.count), _UNSIGNED[unit])
        for part, offsets, at in found:
            if order:
                self.synchronizes(part, offsets, tids[at], reads=True, order=order)
                self.polled = f"ld.{order}", part, int(offsets[0])
            self.check_read(part, offsets, unit, count, tids[at])
            whole[:, lanes[at]] = part.load(offsets, unit, count).T
        return list(whole)

    def store(
        self, space: str, base: Any, offset: int, values: list[Any], mask: Any, order: str = ""
    ) -> None:
        """Store one vector a thread."""
        lanes = self.lanes(mask)
        if len(lanes) == 0:
            return
        values = [wide(v, self.count) for v in values]
        unit = values[0].dtype.itemsize
        stacked = np.empty((len(lanes), len(values)), values[0].dtype)
        everyone = len(lanes) == self.count
        for n, value in enumerate(values):
            stacked[:, n] = value if everyone else value[lanes]
        places = self.global_places if space == "global" else self.shared_places
        found = places(base, offset, unit * len(values), lanes, f"st.{space}")
        self.cta.machine.changes += 1
        for part, offsets, at in found:
            tids = self.tids if everyone and isinstance(at, slice) else self.tids[lanes[at]]
            if space == "global":
                self.check_global_write(part, offsets, tids)
                if order:
                    self.synchronizes(part, offsets, tids, reads=False, order=order)
                else:
                    self.check_order(part, offsets, unit * len(values), tids, "overwrites")
            records = np.zeros(len(tids), np.int64) if order else self.cta.clock.records(tids)
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
        operands, changed = [wide(v, self.count) for v in values], False
        for part, offsets, at in found:
            tids = self.tids[lanes[at]]
            self.check_read(part, offsets, unit, 1, tids, "adds to or exchanges")
            self.check_global_write(part, offsets, tids)
            for position, lane in zip(offsets.tolist(), lanes[at].tolist(), strict=True):
                cell = part.data[position : position + unit].view(kind)
                old = cell[0]
                result[lane] = old
                cell[0] = _combined(operation, old, [o[lane] for o in operands])
                changed |= bool(cell[0] != old)
                self.cta.synchronizes(
                    part.base + position, int(self.tids[lane]), True, True, order or "relaxed"
                )
            part.record(offsets, unit, np.zeros(len(tids), np.int64))
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
                self.check_read(part, offsets, 8, 2, self.tids[lanes[at]])
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
