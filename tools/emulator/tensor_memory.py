"""tcgen05: tensor memory, matrix products into it, and the reads that bring results back.

Products are carried out when a commit that covers them lands (``machine`` says when), in the order
in which they were issued; a commit then arrives at its mbarrier. M is 128 with one CTA and 256 with
two, each CTA holding 128 rows of D as lanes, one fp32 column of N a column.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from moe_ep_jit.tools.emulator import floats, tma
from moe_ep_jit.tools.emulator.clocks import View, add_view
from moe_ep_jit.tools.emulator.fault import Fault
from moe_ep_jit.tools.emulator.ptx import Instruction
from moe_ep_jit.tools.emulator.wgmma import relative_offsets, swizzled

LANES, COLUMNS = 128, 512
#: Field of a shared memory descriptor -> bytes of the swizzle.
_SWIZZLES = {0: 16, 2: 128, 4: 64, 6: 32}
_HALVES = {
    0: lambda raw: raw.view(np.float16).astype(np.float32),
    1: lambda raw: floats.bf16_to_f32(raw.view(np.uint16)),
}


def _nibbles(raw: np.ndarray) -> np.ndarray:
    return floats.E2M1[np.stack((raw & 15, raw >> 4), axis=1).reshape(-1)]


_FP8 = {0: lambda raw: floats.E4M3[raw], 1: lambda raw: floats.E5M2[raw]}
_FP4 = {1: _nibbles}


class TensorMemory:
    """The tensor memory of one CTA, and what its tensor core has been asked for."""

    def __init__(self) -> None:
        self.data = np.zeros((LANES, COLUMNS), np.uint32)
        self.records = np.zeros((LANES, COLUMNS), np.int64)
        self.written = np.zeros((LANES, COLUMNS), bool)
        self.owner = np.zeros(COLUMNS, bool)
        self.relinquished = False
        self.asked: list[Any] = []  # products, not committed yet
        self.views: dict[int, View] = {}  # what products have written until now, by CTA

    def allocate(self, columns: int) -> int:
        if self.relinquished:
            raise Fault("tcgen05.alloc after relinquish_alloc_permit")
        if columns < 32 or columns > COLUMNS or columns & (columns - 1):
            raise Fault(f"tcgen05.alloc of {columns} columns, expected 32 to 512, a power of two")
        for first in range(0, COLUMNS, columns):
            if not self.owner[first : first + columns].any():
                self.owner[first : first + columns] = True
                return first
        raise Fault(f"tcgen05.alloc of {columns} columns: none are free")

    def free(self, first: int, columns: int) -> None:
        if not self.owner[first : first + columns].all():
            raise Fault(f"tcgen05.dealloc of columns {first} to {first + columns}, not allocated")
        self.owner[first : first + columns] = False

    def check(self, first: int, columns: int, what: str) -> None:
        if first < 0 or first + columns > COLUMNS or not self.owner[first : first + columns].all():
            raise Fault(f"{what} of columns {first} to {first + columns}, which are not allocated")


class Commit(tma.Copy):
    """The products before a tcgen05.commit, then its arrivals."""

    def __init__(
        self, cta: Any, instruction: Instruction, work: list[Any], before: Any, targets: list[Any]
    ) -> None:
        super().__init__(cta, instruction)
        self.work, self.before, self.targets = work, before, targets

    def move(self) -> None:
        if self.is_done:
            return
        if self.before is not None and not self.before.is_done:
            self.before.land()
        done = self.cta.tensor_memory.views
        for product in self.work:
            for view in product():
                add_view(done, view)
        for barrier in self.targets:
            # One arrival that tells of all products until now, in each CTA's tensor memory.
            for view in done.values():
                barrier.tell(view)
            barrier.arrive(1, self.cta.clock.asynchronous()[1])
        self.before = None


def instruction(threads: Any, i: Instruction) -> bool:
    """One tcgen05 instruction of ``threads``; all are done at once."""
    kind = i.parts[1]
    if kind == "alloc":
        _allocate(threads, i)
    elif kind == "dealloc":
        base, columns = (threads.value(o)[0] for o in i.operands)
        threads.cta.tensor_memory.free(int(base) & 0xFFFF, int(columns))
    elif kind == "relinquish_alloc_permit":
        threads.cta.tensor_memory.relinquished = True
    elif kind == "mma":
        for lane in threads.lanes(threads.mask):
            _product(threads, i, int(lane))
    elif kind == "cp":
        for lane in threads.lanes(threads.mask):
            _copy(threads, i, int(lane))
    elif kind == "commit":
        for lane in threads.lanes(threads.mask):
            _commit(threads, i, int(lane))
    elif kind == "ld":
        _load(threads, i)
    elif kind not in ("wait::ld", "wait::st", "fence::before_thread_sync",
                      "fence::after_thread_sync"):  # fmt: skip
        raise i.unsupported("unknown instruction")
    return True


def _allocate(threads: Any, i: Instruction) -> None:
    address, columns = (threads.value(o) for o in i.operands)
    if threads.mask is not None or threads.count != 32:
        raise Fault("tcgen05.alloc by other than one whole warp")
    first = threads.cta.tensor_memory.allocate(int(columns[0]))
    lanes = np.array([0])
    value = np.full(threads.count, first, np.uint32)
    only = np.zeros(threads.count, bool)
    only[lanes] = True
    threads.store("shared", address.astype(np.uint32), 0, [value], only)


def _pair(threads: Any, i: Instruction) -> list[Any]:
    """The CTAs that a cta_group names, the issuing one's pair in order."""
    cta = threads.cta
    if "cta_group::1" in i.parts:
        return [cta]
    if cta.rank % 2:
        raise Fault(f"{i.parts[1]} for two CTAs by the odd one of the pair")
    return [cta, cta.peer(cta.rank + 1, "cta_group::2")]


class Form:
    """What an instruction descriptor and the opcode say of a product."""

    def __init__(self, i: Instruction, word: int) -> None:
        self.scale_block, self.scale_bytes = 0, (0, 0)
        self.n = (word >> 17 & 63) * 8
        formats = word >> 7 & 7, word >> 10 & 7
        if "kind::f16" in i.parts:
            self.m, self.k, self.decoders = (word >> 24 & 31) * 16, 16, _HALVES
            wrong = word & 0xE001E00F or word >> 4 & 3 != 1
        elif "kind::mxf8f6f4" in i.parts or "kind::mxf4nvf4" in i.parts:
            fp4 = "kind::mxf4nvf4" in i.parts
            self.m, self.k = (word >> 27 & 3) * 128, 64 if fp4 else 32
            self.decoders = _FP4 if fp4 else _FP8
            self.scale_block = 16 if i.op.find("block16") > 0 or "4X" in i.op else 32
            self.scale_bytes = word >> 29 & 3, word >> 4 & 3
            self.scales = floats.UE8M0 if word >> 23 & 1 else np.abs(floats.E4M3)
            formats = formats[0], formats[1] & (3 if fp4 else 7)
            wrong = word & 0x8001E00F
        else:
            raise i.unsupported("kind of product")
        if wrong or any(f not in self.decoders for f in formats):
            raise i.unsupported(f"instruction descriptor {word:#x}")
        self.formats = formats

    def scaled(self, memory: TensorMemory, values: np.ndarray, side: int, column: int) -> Any:
        """[rows, k] times the block scales of a side, from columns of ``memory``.

        Row r's scales are the bytes of lane r % 32, column r / 32 (from the first), one for each
        block of K, from the byte on that the descriptor names.
        """
        if not self.scale_block:
            return values
        rows, blocks = len(values), self.k // self.scale_block
        place = slice(0, min(rows, 32)), slice(column, column + -(-rows // 32))
        if not memory.written[place].all():
            raise Fault(f"tcgen05.mma reads scales in column {column}, which nothing has written")
        cells = np.ascontiguousarray(memory.data[place].T).reshape(-1)[:rows].view(np.uint8)
        first = self.scale_bytes[side]
        codes = cells.reshape(rows, 4)[:, first : first + blocks]
        return values * np.repeat(self.scales[codes], self.scale_block, axis=1)


def _product(threads: Any, i: Instruction, lane: int) -> None:
    """Issue ``D = A B^T (+ D)``; operands in shared memory, K-major."""
    d, a, b, descriptor, *rest = i.operands
    if rest[0].kind == "vec":
        if any(threads.value(o)[lane] for o in rest[0].value):
            raise i.unsupported("disabled output lanes")
        rest = rest[1:]
    *scales, accumulate = rest
    ctas = _pair(threads, i)
    form = Form(i, int(threads.value(descriptor)[lane]))
    if form.m != 128 * len(ctas) or len(scales) != (2 if form.scale_block else 0):
        raise i.unsupported(f"M {form.m} with {len(ctas)} CTAs, {len(scales)} scale operands")
    n, column = form.n, _column(threads, d, lane)
    scale_columns = [_column(threads, o, lane) for o in scales] or [0, 0]
    pieces = []
    tid = int(threads.tids[lane])
    for cta in ctas:
        cta.tensor_memory.check(column, n, "tcgen05.mma into")
        for operand, rows in ((a, 128), (b, n // len(ctas))):
            offsets = operand_offsets(int(threads.value(operand)[lane]), rows, 32)
            _check_operand(threads.cta, tid, cta, offsets)
            pieces.append((cta, offsets, rows))
    adds = bool(threads.value(accumulate)[lane])

    def carry_out() -> list[Any]:
        parts = []
        for number, (cta, offsets, rows) in enumerate(pieces):
            decode = form.decoders[form.formats[number % 2]]
            raw = cta.tensor_core_bytes(offsets).reshape(-1)
            parts.append(decode(raw).reshape(rows, form.k))
        right = np.concatenate(parts[1::2])
        views = []
        for cta, left in zip(ctas, parts[0::2], strict=True):
            memory = cta.tensor_memory
            left = form.scaled(memory, left, 0, scale_columns[0])  # noqa: PLW2901
            with np.errstate(invalid="ignore", over="ignore"):
                result = left @ form.scaled(memory, right, 1, scale_columns[1]).T
                place = memory.data[:, column : column + n]
                if adds:
                    if not memory.written[:, column : column + n].all():
                        raise Fault("tcgen05.mma adds to columns that nothing has written")
                    result = result + place.view(np.float32)
            place[:] = floats.canonical_nan(result).view(np.uint32)
            views.append(_written(cta, slice(column, column + n)))
        return views

    threads.cta.tensor_memory.asked.append(carry_out)


def _column(threads: Any, operand: Any, lane: int) -> int:
    address = int(threads.value(operand)[lane])
    if address >> 16 & 0x3FFF:
        raise Fault(f"tensor memory address {address:#x} does not begin at lane 0")
    return address & 0xFFFF


def _written(cta: Any, columns: slice) -> View:
    """Record a write of whole columns; the view of who is told of it."""
    record, view = cta.clock.asynchronous()
    cta.tensor_memory.records[:, columns] = record
    cta.tensor_memory.written[:, columns] = True
    return view


def _copy(threads: Any, i: Instruction, lane: int) -> None:
    """tcgen05.cp 32x128b.warpx4: 32 rows of 16 bytes to four columns, in each quarter of lanes."""
    if i.op.partition("cta_group::")[2][2:] != "32x128b.warpx4":
        raise i.unsupported("shape of tcgen05.cp")
    target, source = i.operands
    column = _column(threads, target, lane)
    ctas, tid = _pair(threads, i), int(threads.tids[lane])
    offsets = operand_offsets(int(threads.value(source)[lane]), 32, 16)
    for cta in ctas:
        cta.tensor_memory.check(column, 4, "tcgen05.cp into")
        _check_operand(threads.cta, tid, cta, offsets)

    def carry_out() -> list[Any]:
        views = []
        for cta in ctas:
            rows = cta.tensor_core_bytes(offsets).reshape(32, 16).view(np.uint32)
            cta.tensor_memory.data[:, column : column + 4] = np.tile(rows, (4, 1))
            views.append(_written(cta, slice(column, column + 4)))
        return views

    threads.cta.tensor_memory.asked.append(carry_out)


def _check_operand(issuer: Any, tid: int, cta: Any, offsets: np.ndarray) -> None:
    if offsets.min() < cta.shared_begin or offsets.max() + 16 > cta.shared.size:
        raise Fault("an operand of tcgen05.mma lies outside the CTA's shared memory")
    bad = cta.shared.first_unwritten(offsets, 8, 2)
    if bad is not None:
        raise Fault(f"tcgen05.mma reads shared {int(offsets[bad]):#x}, which nothing has written")
    tma.check_order(issuer, tid, cta.shared, offsets)


def operand_offsets(descriptor: int, rows: int, row_bytes: int) -> np.ndarray:
    """Byte offsets in shared memory of a K-major operand's 16-byte pieces, row by row."""
    swizzle = descriptor >> 61 & 7
    if descriptor >> 46 & 7 != 1 or swizzle not in _SWIZZLES or descriptor >> 49 & 15:
        raise Fault(f"a shared memory descriptor of unknown form: {descriptor:#x}")
    start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    width = _SWIZZLES[swizzle]
    offsets = start + relative_offsets(rows, row_bytes, width, leading, stride)
    return swizzled(offsets, width).reshape(-1)


def _commit(threads: Any, i: Instruction, lane: int) -> None:
    address, *mask = i.operands
    cta, target = threads.cta, int(threads.value(address)[lane])
    if "multicast::cluster" in i.parts:
        bits = int(threads.value(mask[0])[lane])
        ranks = [rank for rank in range(16) if bits >> rank & 1]
    else:
        ranks = [target >> 24]
    targets = [cta.mbarrier(target & 0xFFFFFF | rank << 24) for rank in ranks]
    memory = cta.tensor_memory
    commit = Commit(cta, i, memory.asked, cta.last_commit, targets)
    memory.asked, cta.last_commit = [], commit
    cta.machine.later(commit)


def _load(threads: Any, i: Instruction) -> None:
    """Lanes of a warp's own quarter.

    32x32b   register j of thread t is row t, column j
    16x256b  16 rows, from the quarter's first or 16 behind; of each 8 columns a thread has four:
             row t / 4, columns 2 c and 2 c + 1 (c = t % 4), then the same of row t / 4 + 8
    """
    found = re.match(r"tcgen05\.ld\.sync\.aligned\.(32x32b|16x256b)\.x(\d+)\.b32$", i.op)
    if found is None:
        raise i.unsupported("shape of tcgen05.ld")
    threads.whole_warps(threads.mask, "tcgen05.ld")
    d, address = i.operands
    rows = int(found[1][:2])
    columns = int(found[2]) * (1 if rows == 32 else 8)
    count = columns * rows // 32
    base = threads.value(address).astype(np.int64)
    memory = threads.cta.tensor_memory
    out = np.zeros((count, threads.count), np.uint32)
    for warp in threads.warps_of(threads.mask):
        lanes = slice(warp * 32, warp * 32 + 32)
        tids = threads.tids[lanes]
        row, column = int(base[lanes][0]) >> 16, int(base[lanes][0]) & 0xFFFF
        if row - tids[0] // 32 % 4 * 32 not in range(0, 32, rows):
            raise Fault(f"tcgen05.ld of lane {row} by warp {tids[0] // 32}")
        memory.check(column, columns, "tcgen05.ld")
        place = slice(row, row + rows), slice(column, column + columns)
        if not memory.written[place].all():
            raise Fault(f"tcgen05.ld of columns from {column}, which nothing has written")
        records = _by_thread(memory.records[place])
        if threads.cta.clock.hidden(tids, records, False) is not None:
            raise Fault("tcgen05.ld of a product that no commit and mbarrier has waited for")
        out[:, lanes] = _by_thread(memory.data[place]).T
    registers = d.value if d.kind == "vec" else [d]
    for register, row in zip(registers, out, strict=True):
        threads.R[register.value] = row


def _by_thread(cells: np.ndarray) -> np.ndarray:
    """[rows, columns] of a load -> [thread, register]."""
    if len(cells) == 32:
        return cells
    # half, row in 8, block of columns, pair, in pair -> row in 8, pair | block, half, in pair
    return cells.reshape(2, 8, -1, 4, 2).transpose(1, 3, 2, 0, 4).reshape(32, -1)
