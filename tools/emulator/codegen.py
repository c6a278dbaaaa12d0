"""Basic blocks as Python functions over arrays: one element a thread.

A block's function is ``block(c, R, m)``: the threads ``c``, their registers ``R`` (unsigned arrays
by register index) and the mask of those that take part, None for all. It returns the next block.
Registers live in local names while a block runs, one for each type they are seen as; what is still
needed afterwards goes back to ``R``. Masked blocks keep the other threads' values.

One line of Python stands for one instruction, so that the line of a traceback names it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from moe_ep_jit.tools.emulator import floats
from moe_ep_jit.tools.emulator.program import Block, Program
from moe_ep_jit.tools.emulator.ptx import TYPE_BYTES, Instruction, Operand

#: NumPy type by the name that the generated code uses.
KINDS = {
    "u8": np.uint8, "i8": np.int8, "u16": np.uint16, "i16": np.int16, "u32": np.uint32,
    "i32": np.int32, "u64": np.uint64, "i64": np.int64, "f16": np.float16, "f32": np.float32,
    "f64": np.float64,
}  # fmt: skip


def kind_of(ptx_type: str) -> str:
    """The kind in which a PTX type is computed with: "s32" -> "i32", "b32" -> "u32"."""
    if ptx_type == "pred":
        return "p"
    if ptx_type == "bf16":
        return "u16"
    letter = {"b": "u", "u": "u", "s": "i", "f": "f"}[ptx_type[0]]
    return letter + ptx_type[1:]


def unsigned(kind: str) -> str:
    return kind if kind == "p" else "u" + kind[1:]


class Writer:
    """The source of one block."""

    def __init__(self, program: Program, block: Block, masked: bool, traced: bool) -> None:
        self.entry, self.block = program.entry, block
        self.masked, self.traced = masked, traced
        self.lines: list[str] = []
        self.instruction: Instruction | None = None
        self.forms: dict[int, dict[str, str]] = {}  # register -> kind -> local name
        self.written: set[int] = set()
        self.constants: dict[str, Any] = {}
        self.pending: list[str] = []
        self.guard = ""

    # Operands

    def register_kind(self, index: int) -> str:
        kind = self.entry.registers[index]
        return "p" if kind == "pred" else f"u{TYPE_BYTES[kind] * 8}"

    def constant(self, kind: str, bits: int) -> str:
        """The name of a constant, given by its bits."""
        if kind == "p":
            return "True" if bits else "False"
        width = int(kind[1:])
        bits &= (1 << width) - 1
        name = f"K{kind}_{bits:x}"
        self.constants[name] = np.array([bits], f"u{width // 8}").view(KINDS[kind])[0]
        return name

    def form(self, index: int, kind: str) -> str:
        """The local name of a register seen as ``kind``, of the register's own width."""
        own = self.register_kind(index)
        forms = self.forms.setdefault(index, {})
        if not forms:
            name = f"v{index}{own}"
            self.emit(f"{name} = R[{index}]")
            forms[own] = name
        if kind not in forms:
            name = f"v{index}{kind}"
            source = forms.get(own) or next(iter(forms.values()))
            self.emit(f"{name} = {source}.view({kind})")
            forms[kind] = name
        return forms[kind]

    def source(self, operand: Operand, kind: str) -> str:
        """An expression for an operand as ``kind``; a wider register gives its low bits."""
        if operand.kind == "reg":
            own = self.register_kind(operand.value)
            if kind == "p" or own == "p" or own[1:] == kind[1:]:
                return self.form(operand.value, kind)
            if int(own[1:]) > int(kind[1:]) and kind[0] != "f":
                return f"{self.form(operand.value, own)}.astype({kind})"
            raise self.instruction.unsupported("register narrower than the instruction's type")
        if operand.kind == "not":
            return f"~{self.form(operand.value, 'p')}"
        if operand.kind == "imm":
            return self.constant(kind, operand.value)
        if operand.kind == "special":
            if operand.value.startswith("%globaltimer") and kind != "u64":
                raise self.instruction.unsupported("width of a time")
            return f"c.special({operand.value!r})"
        if operand.kind == "sym":
            return f"c.symbol({operand.value!r}, {kind})"
        raise self.instruction.unsupported(f"operand of kind {operand.kind}")

    def address(self, operand: Operand) -> tuple[str, int]:
        """(base, offset) of an address operand; the base as unsigned integers."""
        base, (offset, _) = operand.value, operand.extra
        if base.kind == "reg":
            return self.form(base.value, self.register_kind(base.value)), offset
        if base.kind == "sym":
            return f"c.symbol({base.value!r}, u32)", offset
        if base.kind == "imm":
            return self.constant("u64", base.value), offset
        raise self.instruction.unsupported("address")

    def destination(self, operand: Operand, kind: str, expression: str) -> None:
        """``operand = expression``, whose value is an array of ``kind``."""
        if operand.kind == "sink":
            self.emit(expression)
            return
        if operand.kind != "reg":
            raise self.instruction.unsupported("destination")
        index = operand.value
        own = self.register_kind(index)
        if own != "p" and own[1:] != kind[1:]:
            if int(own[1:]) < int(kind[1:]):
                raise self.instruction.unsupported("register narrower than the result")
            wide = ("i" if kind[0] == "i" else "u") + own[1:]
            expression, kind = f"({expression}).astype({wide})", wide
        if index in self.block_operands:
            expression = f"c.rewritten({index}, {expression})"
        if self.guard:
            old = self.form(index, own)
            view = "" if own == kind else f".view({own})"
            expression, kind = f"blend({self.guard}, ({expression}){view}, {old})", own
        name = f"v{index}{kind}"
        self.emit(f"{name} = {expression}")
        self.forms[index] = {kind: name}
        self.written.add(index)

    def emit(self, line: str) -> None:
        self.pending.append(line)

    @property
    def mask(self) -> str:
        """The threads that an instruction acts for."""
        if self.guard:
            return f"both(m, {self.guard})"
        return "m" if self.masked else "None"

    # Blocks

    def write(self, emitters: dict[str, Callable], operands: frozenset[int]) -> list[int]:
        """Fill ``lines``; the PTX line of each."""
        self.block_operands = operands
        numbers = []
        instructions = list(self.block.instructions)
        last = instructions[-1]
        branch = last.op.partition(".")[0] in ("bra", "ret", "exit", "trap")
        for instruction in instructions[: -1 if branch else None]:
            self.instruction = instruction
            self.guard = ""
            if instruction.guard:
                index, negated = instruction.guard
                self.guard = f"{'~' if negated else ''}{self.form(index, 'p')}"
            name = instruction.op.partition(".")[0]
            emitter = emitters.get(name)
            if emitter is None:
                raise instruction.unsupported("unknown instruction")
            emitter(self, instruction)
            self.guard = ""
            if self.traced:
                shown = [o.value for o in instruction.operands[:1] if o.kind == "reg"]
                value = self.form(shown[0], self.register_kind(shown[0])) if shown else "None"
                self.emit(f"c.trace({instruction.line}, {value})")
            self._flush(numbers, instruction.line)
        self.instruction = last
        tail = self._tail(last, branch)
        for index in sorted(self.written & self.block.live_out):
            own = self.register_kind(index)
            value = self.form(index, own)
            if self.masked:
                value = f"keep(m, {value}, R[{index}])"
            self.emit(f"R[{index}] = {value}")
        self.emit(tail)
        self._flush(numbers, last.line)
        return numbers

    def _tail(self, last: Instruction, branch: bool) -> str:
        successors = self.block.successors
        if not branch:
            return f"return {successors[0]}"
        kind = last.op.partition(".")[0]
        if kind == "trap":
            return "return c.trap()"
        if kind in ("ret", "exit") and last.guard is None:
            return f"return c.leave({self.mask})"
        if last.guard is None:
            return f"return {successors[0]}"
        index, negated = last.guard
        taken = f"{'~' if negated else ''}{self.form(index, 'p')}"
        return f"return c.branch({taken}, m, {self.block.index})"

    def _flush(self, numbers: list[int], line: int) -> None:
        """What one instruction needed, on one line."""
        if self.pending:
            self.lines.append("; ".join(self.pending))
            numbers.append(line)
            self.pending = []


def keep(mask: np.ndarray, new: Any, old: Any) -> Any:
    """``new`` where ``mask``, else what was there; a register that nothing wrote takes all."""
    if old is None or not isinstance(old, np.ndarray):
        return new
    return np.where(mask, new, old)


def blend(guard: np.ndarray, new: Any, old: Any) -> Any:
    """``new`` where the guard holds, else ``old``."""
    if old is None:
        return new
    return np.where(guard, new, old)


def both(mask: np.ndarray | None, guard: np.ndarray) -> np.ndarray:
    return guard if mask is None else mask & guard


class Code:
    """The compiled blocks of one program, made when first run."""

    def __init__(
        self, program: Program, emitters: dict[str, Callable], traced: bool = False
    ) -> None:
        self.program, self.emitters, self.traced = program, emitters, traced
        self.functions: dict[tuple[int, bool], Callable] = {}
        self.lines: dict[str, list[int]] = {}
        # Registers that a wgmma reads or writes while it runs: writes to them are looked at.
        self.in_flight = frozenset(
            register
            for block in program.blocks
            for instruction in block.instructions
            if instruction.op.startswith("wgmma.mma_async")
            for operand in instruction.operands[:2]
            if operand.kind == "vec"
            for register in (o.value for o in operand.value)
        )

    def function(self, block: int, masked: bool) -> Callable:
        key = block, masked
        function = self.functions.get(key)
        if function is None:
            function = self.functions[key] = self._compile(block, masked)
        return function

    def _compile(self, block: int, masked: bool) -> Callable:
        writer = Writer(self.program, self.program.blocks[block], masked, self.traced)
        numbers = writer.write(self.emitters, self.in_flight)
        filename = f"<ptx {self.program.entry.name} block {block} {masked} {self.traced}>"
        text = "def block(c, R, m):\n " + "\n ".join(writer.lines) + "\n"
        self.lines[filename] = [0, *numbers]
        names: dict[str, Any] = {
            **KINDS, **writer.constants, "np": np, "fl": floats, "keep": keep, "blend": blend,
            "both": both,
        }  # fmt: skip
        exec(compile(text, filename, "exec"), names)  # noqa: S102
        return names["block"]

    def line_of(self, error: BaseException) -> int | None:
        """The PTX line whose code raised ``error``."""
        found, trace = None, error.__traceback__
        while trace is not None:
            numbers = self.lines.get(trace.tb_frame.f_code.co_filename)
            if numbers and trace.tb_lineno - 1 < len(numbers):
                found = numbers[trace.tb_lineno - 1]
            trace = trace.tb_next
        return found
