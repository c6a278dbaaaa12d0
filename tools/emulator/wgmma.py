"""wgmma: shared memory descriptors, fragments, products, and what runs until it is waited for.

A group's products are carried out when it is waited for, in order: until then its accumulators are
``InFlight``, which nothing may read, and the shared memory that it reads may still be spoilt by
who writes it too early.
"""

from __future__ import annotations

import re
from copy import copy
from functools import cache, lru_cache
from typing import Any

import numpy as np

from moe_ep_jit.tools.emulator import floats
from moe_ep_jit.tools.emulator.fault import Fault
from moe_ep_jit.tools.emulator.program import registers_of
from moe_ep_jit.tools.emulator.ptx import Instruction

_OPCODE = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.f32\.(\w+)\.(\w+)$")
#: Bytes of an element, and how its bits become fp32.
_TYPES = {
    "bf16": (2, lambda raw: floats.bf16_to_f32(raw.view(np.uint16))),
    "f16": (2, lambda raw: raw.view(np.float16).astype(np.float32)),
    "e4m3": (1, lambda raw: floats.E4M3[raw]),
    "e5m2": (1, lambda raw: floats.E5M2[raw]),
}
#: Multiplications up to which OpenBLAS takes one thread.
_ONE_THREAD = 1 << 18
_SWIZZLE_BYTES = {0: 16, 1: 128, 2: 64, 3: 32}


class InFlight:
    """An accumulator register that a wgmma still writes."""

    __slots__ = ("register",)
    #: NumPy asks this before it takes the object for an array.
    __array_ufunc__ = None

    def __init__(self, register: str) -> None:
        self.register = register

    def _touched(self, *_: Any) -> Any:
        raise Fault(
            f"accumulator {self.register} of a wgmma is read before wgmma.wait_group has waited"
        )

    view = astype = reshape = __getitem__ = __array__ = __invert__ = __neg__ = _touched
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __and__ = __rand__ = _touched
    __or__ = __ror__ = __xor__ = __rxor__ = __lshift__ = __rshift__ = __lt__ = __gt__ = _touched
    __eq__ = __ne__ = __le__ = __ge__ = _touched
    __hash__ = None


class Product:
    """One wgmma of all warpgroups of a ``Threads``."""

    def __init__(self, i: Instruction, n: int, k: int, kind_a: str, kind_b: str) -> None:
        self.instruction, self.n, self.k = i, n, k
        self.kind_a, self.kind_b = kind_a, kind_b
        self.registers: list[int] = []
        self.a: Any = None  # registers of A as [4, threads], or descriptors as [threads]
        self.a_registers: list[int] = []
        self.b: np.ndarray | None = None
        self.accumulate: np.ndarray | None = None
        self.negate = (False, False)

    def part(self, lanes: np.ndarray) -> Product:
        other = copy(self)
        other.a, other.b = self.a[..., lanes], self.b[lanes]
        other.accumulate = self.accumulate[lanes]
        return other

    def merge(self, other: Product, order: np.ndarray) -> None:
        for name in ("a", "b", "accumulate"):
            both = np.concatenate((getattr(self, name), getattr(other, name)), axis=-1)
            setattr(self, name, both[..., order])


class Groups:
    """The wgmmas of a ``Threads`` that have not been waited for."""

    def __init__(self) -> None:
        self.open: list[Product] = []
        self.committed: list[list[Product]] = []
        self.values: dict[int, np.ndarray] = {}  # of accumulators in flight, before their products
        self.fenced = self.ever_fenced = False
        #: What wgmmas have left in their accumulators: as long as it is there nothing wrote them.
        self.left: dict[int, np.ndarray] = {}

    @property
    def empty(self) -> bool:
        return not self.open and not self.committed

    def must_be_empty(self, when: str) -> None:
        if not self.empty:
            raise Fault(f"{when} while a wgmma runs that nobody has waited for")

    def part(self, lanes: np.ndarray) -> Groups:
        """What runs for these lanes alone."""
        other = Groups()
        other.open = [p.part(lanes) for p in self.open]
        other.committed = [[p.part(lanes) for p in group] for group in self.committed]
        other.values = {r: v[lanes] for r, v in self.values.items()}
        other.fenced, other.ever_fenced = self.fenced, self.ever_fenced
        return other

    def shape(self) -> list[list[int]]:
        """Which wgmmas run, by their lines: groups of the same shape can be merged."""
        return [[p.instruction.line for p in g] for g in (*self.committed, self.open)]

    def merge(self, other: Groups, order: np.ndarray) -> None:
        """Take in what runs for other threads at the same place."""
        for mine, theirs in zip(self._running(), other._running(), strict=True):
            mine.merge(theirs, order)
        for register, value in other.values.items():
            self.values[register] = np.concatenate((self.values[register], value))[order]

    def _running(self) -> list[Product]:
        return [p for group in (*self.committed, self.open) for p in group]

    def check_write(self, register: int) -> None:
        for product in self._running():
            if register in product.registers or register in product.a_registers:
                raise Fault(
                    "a register of the wgmma at PTX line "
                    f"{product.instruction.line} is written before wgmma.wait_group has waited"
                )

    def instruction(self, threads: Any, i: Instruction) -> bool:
        if threads.mask is not None:
            raise Fault(f"{i.parts[0]}.{i.parts[1]} by part of a warp")
        if not threads.whole_warpgroups():
            # The other warps of the warpgroup come to the same place, or nothing goes on.
            threads.wait = ("warpgroup", "the rest of it")
            return False
        threads.wait = None
        if i.op.startswith("wgmma.fence"):
            self.fenced = self.ever_fenced = True
        elif i.op.startswith("wgmma.commit_group"):
            self.committed.append(self.open)
            self.open = []
        elif i.op.startswith("wgmma.wait_group"):
            keep = i.operands[0].value
            while len(self.committed) > keep:
                for product in self.committed.pop(0):
                    self._carry_out(threads, product)
            self._settle(threads)
        elif i.op.startswith("wgmma.mma_async"):
            self._issue(threads, i)
        else:
            raise i.unsupported("unknown instruction")
        return True

    def _issue(self, threads: Any, i: Instruction) -> None:
        found = _OPCODE.match(i.op)
        if found is None or found.group(3) not in _TYPES or found.group(4) not in _TYPES:
            raise i.unsupported("shape or type of wgmma")
        product = Product(i, int(found[1]), int(found[2]), found[3], found[4])
        d, a, b, scale, *rest = i.operands
        immediates = [o.value for o in rest]
        from_registers = a.kind == "vec"
        major = immediates[2:] + ([0] if from_registers else [])
        if immediates[0] not in (1, -1) or immediates[1] not in (1, -1) or any(major):
            raise i.unsupported("operand that is not K-major, or a scale but 1 and -1")
        product.negate = immediates[0] == -1, immediates[1] == -1
        product.registers = registers_of(d)
        if len(product.registers) != product.n // 2:
            raise i.unsupported("accumulators")
        if not self.ever_fenced:
            raise Fault("no wgmma.fence before a warpgroup's first wgmma")
        if not self.fenced:
            self._check_unwritten(threads, product.registers)
        if from_registers:
            product.a_registers = registers_of(a)
            product.a = np.stack([threads.value(o) for o in a.value])
        else:
            product.a = threads.value(a)
        product.b = threads.value(b)
        product.accumulate = np.broadcast_to(threads.value(scale), threads.count).astype(bool)
        for register in product.registers:
            value = threads.R[register]
            if not isinstance(value, InFlight):
                if value is None:
                    if product.accumulate.any():
                        raise Fault("a wgmma adds to a register that nothing has written")
                    value = threads.full(np.uint32(0))
                self.values[register] = value
                threads.R[register] = InFlight(threads.code.program.entry.names[register])
        threads.cta.check_operands(threads, product)
        self.open.append(product)

    def _check_unwritten(self, threads: Any, registers: list[int]) -> None:
        """Without a fence, accumulators must be as a wgmma has left them, or in flight."""
        for register in registers:
            value = threads.R[register]
            if not isinstance(value, InFlight) and value is not self.left.get(register):
                name = threads.code.program.entry.names[register]
                raise Fault(f"no wgmma.fence between a write of {name} and the wgmma that uses it")

    def untouched(self, registers: list[Any]) -> list[int]:
        """Accumulators that nothing has written since a wgmma did."""
        return [r for r, value in self.left.items() if registers[r] is value]

    def _settle(self, threads: Any) -> None:
        """Accumulators that nothing in flight writes become registers again."""
        running = {r for p in self._running() for r in p.registers}
        for register in [r for r in self.values if r not in running]:
            threads.R[register] = self.left[register] = self.values.pop(register)
        if self.empty:
            self.fenced = False

    def _carry_out(self, threads: Any, product: Product) -> None:
        """D of all warpgroups; those that share B in one product of matrices."""
        sums = np.stack([self.values[r] for r in product.registers])
        leaders = product.b[::128]
        for descriptor in set(leaders.tolist()):
            lanes = slice(None)
            if len(leaders) > 1 and (leaders != descriptor).any():
                lanes = np.flatnonzero(product.b == descriptor)
            sums[:, lanes] = self._product(threads, product, descriptor, lanes, sums)
        for register, row in zip(product.registers, sums, strict=True):
            self.values[register] = row

    def _product(
        self, threads: Any, product: Product, descriptor: int, lanes: Any, sums: np.ndarray
    ) -> np.ndarray:
        b = self._matrix(threads, descriptor, product.n, product, product.kind_b)
        if product.a.ndim == 2:
            a = _fragment_a(product.a[:, lanes], product.kind_a)
        else:
            parts = [
                self._matrix(threads, int(at), 64, product, product.kind_a)
                for at in product.a[lanes][::128]
            ]
            a = parts[0] if len(parts) == 1 else np.concatenate(parts)
        with np.errstate(invalid="ignore", over="ignore"):
            d = _times(a, b.T)
            if product.negate[0] != product.negate[1]:
                d = -d
            d = _fragment_d(d)
            adds = product.accumulate[lanes]
            if adds.all():
                d = d + sums[:, lanes].view(np.float32)
            elif adds.any():
                d = np.where(adds, d + sums[:, lanes].view(np.float32), d)
        return floats.canonical_nan(d).view(np.uint32)

    def _matrix(
        self, threads: Any, descriptor: int, rows: int, product: Product, kind: str
    ) -> np.ndarray:
        """[rows, k] fp32 of a K-major operand in shared memory."""
        unit, decode = _TYPES[kind]
        offsets = operand_offsets(descriptor, rows, product.k * unit)
        raw = threads.cta.tensor_core_bytes(offsets)
        return decode(raw.reshape(-1)).reshape(rows, product.k)


@cache
def relative_offsets(
    rows: int, row_bytes: int, width: int, leading: int, stride: int
) -> np.ndarray:
    """Byte offsets [rows, row_bytes / 16] of 16-byte pieces before a swizzle of ``width``."""
    row, piece = np.arange(rows)[:, None], np.arange(row_bytes // 16)[None]
    if width == 16:
        return row // 8 * stride + row % 8 * 16 + piece * leading
    if row_bytes > width:
        raise Fault(f"a row of {row_bytes} bytes in a swizzle of {width}")
    return row // 8 * stride + row % 8 * width + piece * 16


@lru_cache(maxsize=4096)
def operand_offsets(descriptor: int, rows: int, row_bytes: int) -> np.ndarray:
    """Byte offsets in shared memory of a K-major operand's 16-byte pieces, row by row."""
    start = (descriptor & 0x3FFF) << 4
    leading = (descriptor >> 16 & 0x3FFF) << 4
    stride = (descriptor >> 32 & 0x3FFF) << 4
    swizzle = descriptor >> 62 & 3
    if descriptor >> 49 & 7:
        raise Fault("a shared memory descriptor with a base offset: its tile is not aligned")
    width = _SWIZZLE_BYTES[swizzle]
    offsets = start + relative_offsets(rows, row_bytes, width, leading, stride)
    return swizzled(offsets, width).reshape(-1)


def swizzled(offsets: np.ndarray, width: int) -> np.ndarray:
    """Address bits 4 and up exclusive-or the bits of the 128-byte row."""
    pieces = {16: 0, 32: 1, 64: 3, 128: 7}[width]
    return offsets ^ (offsets >> 7 & pieces) << 4


def _times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A product whose sums are rounded to fp32 once, so that they do not depend on the shape.

    In pieces for which a BLAS library starts no threads: starting them costs more.
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    out = np.empty((len(a), b.shape[1]))
    step = max(_ONE_THREAD // b.size // 16 * 16, 16)
    for first in range(0, len(a), step):
        np.matmul(a[first : first + step], b, out=out[first : first + step])
    return out.astype(np.float32)


def _fragment_a(registers: np.ndarray, kind: str) -> np.ndarray:
    """[64 a warpgroup, k] of A in registers: 4 a thread, each two 16-bit or four 8-bit elements."""
    unit, decode = _TYPES[kind]
    per = 4 // unit
    raw = np.ascontiguousarray(registers).view(np.uint8 if unit == 1 else np.uint16)
    # register (k half, row half), thread (warp, row, column), element
    parts = decode(raw.reshape(-1)).reshape(2, 2, -1, 8, 4, per)
    return parts.transpose(2, 1, 3, 0, 4, 5).reshape(-1, 8 * per)


def _fragment_d(d: np.ndarray) -> np.ndarray:
    """[n / 2, threads]: the accumulators of each thread from a product [64 a warpgroup, n]."""
    n = d.shape[1]
    parts = d.reshape(-1, 2, 8, n // 8, 4, 2)  # warp, row half, row, n8, column pair, element
    return np.ascontiguousarray(parts.transpose(3, 1, 5, 0, 2, 4)).reshape(n // 2, -1)


def element_bytes(kind: str) -> int:
    return _TYPES[kind][0]
