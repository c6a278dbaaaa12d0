"""Asynchronous bulk copies: linear ones and TMA tiles, with the descriptor's limits checked.

A copy is carried out some time after it was issued (``Machine`` says when): until then its source
may still be spoilt and its destination still shows what was there.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from moe_ep_jit.tools.emulator import clocks, floats
from moe_ep_jit.tools.emulator.fault import Fault
from moe_ep_jit.tools.emulator.memory import POISON, WRITTEN, Memory
from moe_ep_jit.tools.emulator.ptx import Instruction
from moe_ep_jit.tools.emulator.wgmma import swizzled

#: Type code of a descriptor -> bits of an element.
_ELEMENT_BITS = {0: 8, 1: 16, 2: 32, 3: 32, 4: 64, 5: 64, 6: 16, 7: 32, 8: 64, 10: 16, 11: 4}
#: Type of a reduction -> its code in a descriptor (-1: none), NumPy type. bf16: by its bits.
REDUCED = {
    "u32": (2, np.uint32), "s32": (3, np.int32), "u64": (4, np.uint64), "s64": (5, np.int64),
    "f16": (6, np.float16), "f32": (7, np.float32), "f64": (8, np.float64), "bf16": (10, np.uint16),
    "b32": (-1, np.uint32), "b64": (-1, np.uint64),
}  # fmt: skip
_SWIZZLE_BYTES = {0: 16, 1: 32, 2: 64, 3: 128}


@dataclass(frozen=True)
class Descriptor:
    """A tiled TMA descriptor; dimensions fastest first, strides in bytes from the second on."""

    address: int
    bits: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    code: int

    @property
    def row_bytes(self) -> int:
        return self.box[0] * self.bits // 8

    @property
    def box_bytes(self) -> int:
        return int(np.prod(self.box[1:], dtype=np.int64)) * self.row_bytes


@cache
def decode(raw: bytes) -> Descriptor:
    """The first 64 bytes of a descriptor. A Fault where a limit of TMA is not kept."""
    q = struct.unpack("<8Q", raw)

    def halves(*words: int) -> list[int]:
        return [q[w // 2] >> 32 * (w % 2) & 0xFFFFFFFF for w in words]

    rank = (q[1] >> 4 & 7) + 1
    code, swizzle = q[1] >> 7 & 15, q[1] >> 13 & 3 if not q[1] >> 13 & 4 else None
    if code not in _ELEMENT_BITS or rank > 5 or swizzle is None:
        raise Fault(f"a TMA descriptor of unknown form: type {code}, rank {rank}")
    high = halves(7)[0]
    strides = [(low | (high >> 4 * n & 15) << 32) << 4 for n, low in enumerate(halves(3, 4, 5, 6))][
        : rank - 1
    ]
    dims = [n + 1 for n in halves(8, 9, 10, 11, 12)][:rank]
    sizes = (q[6] >> 56 & 0xFF, *(q[7] >> 8 * n & 0xFF for n in range(4)))
    box = [n + 1 for n in sizes][:rank]
    found = Descriptor(
        q[0],
        _ELEMENT_BITS[code],
        tuple(dims),
        tuple(strides),
        tuple(box),
        _SWIZZLE_BYTES[swizzle],
        code,
    )
    _check(found)
    return found


def _check(d: Descriptor) -> None:
    if d.address % 16:
        raise Fault(f"TMA descriptor: address {d.address:#x} is not a multiple of 16")
    for stride in d.strides:
        if not 0 < stride < 1 << 40:
            raise Fault(f"TMA descriptor: a stride of {stride} bytes, expected 16 to 2^40")
    if d.row_bytes % 16:
        raise Fault(f"TMA descriptor: box rows of {d.row_bytes} bytes, not a multiple of 16")
    if d.swizzle > 16 and d.row_bytes > d.swizzle:
        raise Fault(f"TMA descriptor: box rows of {d.row_bytes} bytes in a swizzle of {d.swizzle}")


class Copy:
    """One asynchronous copy under way."""

    def __init__(self, cta: Any, instruction: Instruction) -> None:
        self.cta, self.instruction = cta, instruction
        self.has_read = self.is_done = False

    def land(self) -> None:
        try:
            self.move()
        except Fault as fault:
            raise fault.locate(self.place()) from None
        self.has_read = self.is_done = True

    def move(self) -> None:
        raise NotImplementedError

    def place(self) -> str:
        i = self.instruction
        return f"{self.cta.name}, PTX line {i.line}: {i.text}"


class Load(Copy):
    """Global to shared memory of one or more CTAs; their mbarriers count the bytes."""

    def __init__(
        self, cta: Any, instruction: Instruction, pieces: Any, dst: int, mbarrier: int, ctas: list
    ) -> None:
        super().__init__(cta, instruction)
        self.pieces, self.dst, self.mbarrier, self.ctas = pieces, dst, mbarrier, ctas

    def move(self) -> None:
        data, valid, offsets = self.pieces()
        for target in self.ctas:
            shared = target.shared
            base = self.dst & 0xFFFFFF
            places = (base + offsets) // 16
            end = base + int(offsets.max()) + 16
            if base < target.shared_begin or end > shared.size:
                raise Fault(f"a copy to shared {base:#x} to {end:#x} leaves the CTA's memory")
            shared.data[: shared.size // 16 * 16].view(np.uint64).reshape(-1, 2)[places] = data
            flags = shared.valid[: shared.size // 16 * 16].reshape(-1, 16)
            flags[places] = valid
            record, view = target.clock.asynchronous()
            shared.record(places * 16, 16, np.full(len(places), record))
            rank = target.rank
            if "cta_group::2" in self.instruction.parts:
                # The mbarrier of the pair's CTA that the address names.
                rank = rank & ~1 | self.mbarrier >> 24 & 1
            barrier = target.mbarrier(self.mbarrier & 0xFFFFFF | rank << 24)
            barrier.complete(len(places) * 16, view)


class Store(Copy):
    """Shared memory to global, in a bulk group of its thread."""

    def __init__(self, cta: Any, instruction: Instruction, write: Any) -> None:
        super().__init__(cta, instruction)
        self.write = write
        self.view: clocks.View | None = None  # what the wait for it tells

    def move(self) -> None:
        self.view = self.write()


def issue(cta: Any, tid: int, i: Instruction, values: dict[str, Any]) -> None:
    """One thread's cp.async.bulk. ``values``: dst, src, size, mbar, coords, multicast."""
    to_shared = i.op.startswith(("cp.async.bulk.shared", "cp.async.bulk.tensor")) and (
        ".global.shared" not in i.op
    )
    if not to_shared:
        _issue_store(cta, tid, i, values)
        return
    if "multicast" in values:
        ranks = [r for r in range(16) if values["multicast"] >> r & 1]
        ctas = [cta.peer(rank, "multicast") for rank in ranks]
    else:
        ctas = [cta.peer(values["dst"] >> 24, "bulk copy")]
    if values["mbar"] & 7:
        raise Fault(f"mbarrier address {values['mbar']:#x} is not a multiple of 8")
    if "coords" in values:
        descriptor = decode(cta.machine.descriptor(values["src"]))
        if values["dst"] % 128:
            raise Fault(f"TMA to shared {values['dst']:#x}, not aligned to 128 bytes")
        reader = _tile_reader(cta, tid, descriptor, values["coords"], values["dst"])
    else:
        reader = _linear_reader(cta, tid, values)
    cta.machine.later(Load(cta, i, reader, values["dst"], values["mbar"], ctas))


def _linear_reader(cta: Any, tid: int, values: dict[str, int]) -> Any:
    src, dst, size = values["src"], values["dst"], values["size"]
    for name, number in (("source", src), ("destination", dst), ("size", size)):
        if number % 16:
            raise Fault(f"cp.async.bulk: {name} {number:#x} is not a multiple of 16")
    if size <= 0:
        raise Fault("cp.async.bulk of no bytes")
    part = cta.machine.memory.at(src, size, "cp.async.bulk", cta.launch.rank)
    offsets = np.arange(size // 16) * 16
    check_order(cta, tid, part, src - part.base + offsets)

    def read() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return (*_read(part, src - part.base + offsets), offsets)

    return read


def _tile_reader(cta: Any, tid: int, d: Descriptor, coords: list[int], dst: int) -> Any:
    """What reads a tile: 16-byte pieces, zeros out of bounds, at swizzled places."""
    if len(coords) != len(d.dims):
        raise Fault(f"TMA of {len(coords)} coordinates on a descriptor of rank {len(d.dims)}")
    coords = [c - (1 << 32) if c >= 1 << 31 else c for c in coords]
    if coords[0] * d.bits % 128:
        raise Fault(f"TMA: the innermost coordinate {coords[0]} is not on 16 bytes")
    if d.dims[0] * d.bits % 128:
        raise Fault(f"TMA: rows of {d.dims[0]} elements do not end on 16 bytes")
    linear, index = _box(d)
    inside = np.ones(len(linear), bool)
    at = np.full(len(linear), d.address, np.int64)
    steps = (16, *d.strides)
    per_piece = 128 // d.bits
    for n, step in enumerate(steps):
        first, end = (
            (coords[n], d.dims[n]) if n else (coords[0] // per_piece, d.dims[0] // per_piece)
        )
        position = index[n] + first
        inside &= (position >= 0) & (position < end)
        at += position * step
    base = dst & 0xFFFFFF
    offsets = swizzled(base + linear, d.swizzle) - base
    part, live, early = None, at[inside], None
    if len(live):
        low, high = int(live.min()), int(live.max()) + 16
        part = cta.machine.memory.at(low, high - low, "TMA load", cta.launch.rank)
        live = live - part.base
        early = _from_peers(cta, tid, part, live)
        check_order(cta, tid, part, live if early is None else live[~early])

    def read() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        data = np.zeros((len(linear), 2), np.uint64)
        valid = np.full((len(linear), 16), WRITTEN, np.uint8)
        if part is not None:
            data[inside], valid[inside] = _read(part, live)
            if early is not None:
                lost = np.flatnonzero(inside)[early]
                data[lost], valid[lost] = ~np.uint64(0), POISON
        return data, valid, offsets

    return read


def _from_peers(cta: Any, tid: int, part: Memory, offsets: np.ndarray) -> np.ndarray | None:
    """Which pieces of a tile another rank may still be writing; None: none.

    A tile may reach beyond its live rows into those that have not arrived yet: they come as NaN.
    """
    records = part.records_at(offsets, 16)
    if records is None or cta.clock.hidden(np.full(len(offsets), tid), records, True) is None:
        return None
    one = np.array([tid])
    early = np.zeros(len(offsets), bool)
    for place in range(len(offsets)):
        hidden = cta.clock.hidden(one, records[place : place + 1], True)
        if hidden is not None:
            _, record, lacks_fence = hidden
            foreign = cta.machine.is_foreign(record, cta.launch.rank)
            early[place] = foreign and not lacks_fence
    return early


@cache
def _box(d: Descriptor) -> tuple[np.ndarray, list[np.ndarray]]:
    """(offsets of the box's pieces in shared memory, their coordinates; innermost in pieces)."""
    shape = (*reversed(d.box[1:]), d.row_bytes // 16)
    index = np.indices(shape).reshape(len(shape), -1)[::-1]
    return np.arange(index.shape[1]) * 16, list(index)


def _read(part: Memory, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """16-byte pieces and their flags; what nobody has written comes as 0xFF."""
    data = part.load(offsets, 8, 2)
    if part.valid is None:
        return data, np.uint8(WRITTEN)
    flags = part.valid[: part.size // 16 * 16].reshape(-1, 16)[offsets // 16]
    if (flags == WRITTEN).all():
        return data, flags
    raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1, 16).copy()
    raw[flags != WRITTEN] = 0xFF
    flags = np.where(flags == WRITTEN, WRITTEN, POISON).astype(np.uint8)
    return raw.view(np.uint64), flags


def check_order(cta: Any, tid: int, part: Memory, offsets: np.ndarray) -> None:
    """The async proxy may read what the issuing thread may, behind a proxy fence."""
    records = part.records_at(offsets, 16)
    if records is None:
        return
    hidden = cta.clock.hidden(tid, records, True)
    if hidden is not None:
        place, record, only_fence = hidden
        if only_fence:
            raise Fault(
                f"the async proxy reads {part.name} + {int(offsets[place])}, written by ordinary "
                "stores with no fence.proxy.async between"
            )
        raise Fault(_race(cta, part, int(offsets[place]), tid, record))


def _race(cta: Any, part: Memory, offset: int, tid: int, record: int) -> str:
    uid, thread = clocks.describe(record)
    return (
        f"a copy that thread {tid} issues reads {part.name} + {offset}, which "
        f"{cta.machine.writer(uid, thread)} has written with no barrier, release and acquire, or "
        "grid dependency between the two"
    )


def _issue_store(cta: Any, tid: int, i: Instruction, values: dict[str, Any]) -> None:
    shared = cta.shared
    src = values["src"] & 0xFFFFFF
    kind = next((p for p in i.parts if p in REDUCED), "")
    if "coords" in values:
        d = decode(cta.machine.descriptor(values["dst"]))
        if "reduce" in i.parts:
            kind = next((name for name, (code, _) in REDUCED.items() if code == d.code), None)
            if kind is None:
                raise i.unsupported(f"reduction of descriptor type {d.code}")
        if src % 128:
            raise Fault(f"TMA from shared {src:#x}, not aligned to 128 bytes")
        coords = [c - (1 << 32) if c >= 1 << 31 else c for c in values["coords"]]
        linear, index = _box(d)
        per_piece = 128 // d.bits
        if coords[0] % per_piece or d.dims[0] % per_piece:
            raise Fault("TMA store: rows or coordinates that are not on 16 bytes")
        inside, at = np.ones(len(linear), bool), np.full(len(linear), d.address, np.int64)
        for n, step in enumerate((16, *d.strides)):
            unit = 1 if n else per_piece
            position = index[n] + coords[n] // unit
            inside &= (position >= 0) & (position < d.dims[n] // unit)
            at += position * step
        places, at = swizzled(src + linear, d.swizzle)[inside], at[inside]
    else:
        size = values["size"]
        if src % 16 or values["dst"] % 16 or size % 16 or size <= 0:
            raise Fault("cp.async.bulk: addresses and size must be multiples of 16")
        places = src + np.arange(size // 16) * 16
        at = values["dst"] + np.arange(size // 16) * 16
    if len(at) == 0:
        return
    if places.min() < cta.shared_begin or places.max() + 16 > shared.size:
        raise Fault("a bulk store reads outside the CTA's shared memory")
    bad = shared.first_unwritten(places, 8, 2)
    if bad is not None:
        raise Fault(f"a bulk store reads shared {int(places[bad]):#x}, which nothing has written")
    check_order(cta, tid, shared, places)
    low, high = int(at.min()), int(at.max()) + 16
    part = cta.machine.memory.at(low, high - low, "bulk store", cta.launch.rank)
    ((view, _),) = cta.clock.groups(np.array([tid]))
    if not cta.launch.waited(view):
        raise Fault(
            f"a bulk store of thread {tid} to {part.name} comes before its griddepcontrol.wait, "
            "while the grid before may still run"
        )

    if kind:
        operation = next(p for p in i.parts if p in ("add", "min", "max", "and", "or", "xor"))
        bad = part.first_unwritten(at - part.base, 8, 2)
        if bad is not None:
            where = int(at[bad]) - part.base
            raise Fault(f"a reduction into {part.name} + {where}, which nothing has written")
        check_order(cta, tid, part, at - part.base)

    def write() -> clocks.View:
        record, view = cta.clock.asynchronous()
        if kind:
            _reduce(part, at - part.base, shared.load(places, 8, 2), operation, kind)
        else:
            part.store(at - part.base, shared.load(places, 8, 2), 8, np.full(len(at), record))
        return view

    copy = Store(cta, i, write)
    cta.bulk_groups.setdefault(tid, [[]])[-1].append(copy)
    cta.machine.later(copy)


def _reduce(
    part: Memory, offsets: np.ndarray, values: np.ndarray, operation: str, kind: str
) -> None:
    """16-byte pieces combined with what is there, element by element: atomic, so it races with
    none.
    """
    number = REDUCED[kind][1]
    old = part.load(offsets, 8, 2).view(number)
    new = np.ascontiguousarray(values).view(number)
    if kind == "bf16":
        old, new = floats.bf16_to_f32(old), floats.bf16_to_f32(new)
    combine = {
        "add": np.add, "min": np.fmin, "max": np.fmax, "and": np.bitwise_and,
        "or": np.bitwise_or, "xor": np.bitwise_xor,
    }[operation]  # fmt: skip
    result = combine(old, new)
    if kind == "bf16":
        result = floats.f32_to_bf16(result)
    raw = np.ascontiguousarray(result).view(np.uint64).reshape(-1, 2)
    part.store(offsets, raw, 8, np.zeros(len(offsets), np.int64))
