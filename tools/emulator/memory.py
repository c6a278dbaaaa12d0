"""Memory as bytes with shadows: what has been written, and by whom.

``valid`` has a byte for each byte: 0 nobody has written it, 1 written, 3 copied from memory that
nobody has written (it reads as 0xFF, a NaN in every float format). ``records`` (``clocks``) has
an entry for each byte of shared memory and each word of global memory.
"""

from __future__ import annotations

import bisect
import ctypes

import numpy as np

from moe_ep_jit.tools.emulator.fault import Fault

UNWRITTEN, WRITTEN, POISON = 0, 1, 3
_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Memory:
    """A stretch of bytes that one allocation or one CTA's shared memory is."""

    def __init__(
        self, name: str, base: int, data: np.ndarray, *, written: bool, granule: int,
        rank: int | None = None,
    ) -> None:  # fmt: skip
        self.name, self.base, self.size, self.data = name, base, len(data), data
        self.granule, self.rank = granule, rank
        self.valid = None if written else np.zeros(len(data), np.uint8)
        self.records: np.ndarray | None = None
        self._views: dict[tuple[int, int, bool], np.ndarray] = {}

    def _view(self, unit: int, count: int, shadow: bool = False) -> np.ndarray:
        """[elements, count] of ``unit`` bytes each."""
        key = unit, count, shadow
        view = self._views.get(key)
        if view is None:
            total = unit * count
            source = self.valid if shadow else self.data
            whole = source[: self.size // total * total]
            view = self._views[key] = whole.view(_UNITS[unit]).reshape(-1, count)
        return view

    def forget(self) -> None:
        """From here on nobody has written any of it."""
        self.valid = np.zeros(self.size, np.uint8)
        self._views = {key: view for key, view in self._views.items() if not key[2]}

    def check_rank(self, rank: int, what: str) -> None:
        """A Fault where the memory is another rank's own."""
        if self.rank not in (None, rank):
            raise Fault(f"{what} by rank {rank} at {self.name}, which is rank {self.rank}'s alone")

    def load(self, offsets: np.ndarray, unit: int, count: int) -> np.ndarray:
        """[threads, count] elements at byte offsets, aligned to unit * count and inside."""
        return self._view(unit, count)[offsets // (unit * count)]

    def first_unwritten(self, offsets: np.ndarray, unit: int, count: int) -> int | None:
        """The first of the offsets at which a byte was never written."""
        if self.valid is None:
            return None
        ones = _UNITS[unit](int.from_bytes(b"\1" * unit, "little"))
        found = self._view(unit, count, True)[offsets // (unit * count)]
        if np.count_nonzero(found == ones) == found.size:
            return None
        bad = (found & ones != ones).any(axis=1)
        return int(np.flatnonzero(bad)[0]) if bad.any() else None

    def store(
        self, offsets: np.ndarray, values: np.ndarray, unit: int, records: np.ndarray | None
    ) -> None:
        """``values`` [threads, count] at byte offsets; ``records`` one a thread."""
        count = values.shape[1]
        places = offsets // (unit * count)
        self._view(unit, count)[places] = values
        if self.valid is not None:
            self._view(unit, count, True)[places] = int.from_bytes(b"\1" * unit, "little")
        if records is not None:
            self.record(offsets, unit * count, records)

    def record(self, offsets: np.ndarray, size: int, records: np.ndarray) -> None:
        if self.records is None:
            self.records = np.zeros(-(-self.size // self.granule), np.int64)
        if size <= self.granule:
            self.records[offsets // self.granule] = records
        else:
            steps = size // self.granule
            whole = self.records[: len(self.records) // steps * steps].reshape(-1, steps)
            whole[offsets // size] = records[:, None]

    def records_at(self, offsets: np.ndarray, size: int) -> np.ndarray | None:
        """[threads, granules] of the records of what is at byte offsets; None where there are none.

        Offsets are aligned to ``size``, or to the granule where that is larger.
        """
        if self.records is None:
            return None
        if size <= self.granule:
            return self.records[offsets // self.granule][:, None]
        steps = size // self.granule
        whole = self.records[: len(self.records) // steps * steps].reshape(-1, steps)
        return whole[offsets // size]


def host_bytes(address: int, size: int) -> np.ndarray:
    """The process's own memory as bytes."""
    if size == 0:
        return np.zeros(0, np.uint8)
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


class GlobalMemory:
    """Every allocation that kernels may touch, by address."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._parts: list[Memory] = []

    def add(
        self, name: str, address: int, size: int, *, written: bool, granule: int = 4,
        rank: int | None = None,
    ) -> Memory | None:  # fmt: skip
        """Let kernels use ``size`` bytes of this process; replaces what overlaps.

        granule  bytes that share one record of who wrote them
        rank     whose kernels alone may use them; None: all ranks' may
        """
        if size == 0:
            return None
        if address % 16:
            raise ValueError(f"{name}: expected an address on 16 bytes, got {address:#x}")
        self.remove(address, size)
        part = Memory(
            name, address, host_bytes(address, size), written=written, granule=granule, rank=rank
        )
        at = bisect.bisect(self._bases, address)
        self._bases.insert(at, address)
        self._parts.insert(at, part)
        return part

    def remove(self, address: int, size: int) -> None:
        """Forget every allocation that overlaps these bytes."""
        keep = [p for p in self._parts if p.base + p.size <= address or address + size <= p.base]
        self._parts, self._bases = keep, [p.base for p in keep]

    def find(self, address: int) -> Memory | None:
        at = bisect.bisect(self._bases, address) - 1
        if at >= 0 and address < self._parts[at].base + self._parts[at].size:
            return self._parts[at]
        return None

    def at(self, address: int, size: int, what: str, rank: int) -> Memory:
        """The allocation that holds all these bytes; a Fault where ``rank`` has none."""
        part = self.find(address)
        if part is None:
            raise Fault(f"{what} at {address:#x}, which no allocation holds{self._near(address)}")
        if address + size > part.base + part.size:
            raise Fault(
                f"{what} of {size} bytes at {part.name} + {address - part.base} runs past its end "
                f"({part.size} bytes)"
            )
        part.check_rank(rank, what)
        return part

    def _near(self, address: int) -> str:
        at = bisect.bisect(self._bases, address) - 1
        if at < 0:
            return ""
        part = self._parts[at]
        return f" ({address - part.base - part.size} bytes behind {part.name})"

    def settle(self) -> None:
        """Every grid is complete: what was written is visible to all that comes."""
        for part in self._parts:
            part.records = None
