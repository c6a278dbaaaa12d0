"""PTX text to instructions: modules, entries, parameters, registers, inline-assembly scopes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from moe_ep_jit.tools.emulator.fault import UnsupportedError

#: Bytes of each PTX type; predicates have none in memory.
TYPE_BYTES = {
    "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4,
    "u32": 4, "s32": 4, "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "pred": 0,
}  # fmt: skip

_SPECIAL = re.compile(
    r"%(n?tid|n?ctaid|n?clusterid|cluster_n?ctaid)\.[xyz]$|%(laneid|warpid|nwarpid|smid|nsmid|"
    r"gridid|lanemask_(lt|le|gt|ge|eq)|cluster_n?ctarank|clock|clock64|globaltimer|"
    r"dynamic_smem_size|total_smem_size)$"
)
_INTEGER = re.compile(r"-?(0[xX][0-9a-fA-F]+|\d+)U?$")


class Operand(NamedTuple):
    """One operand.

    kind   reg (value: register index), imm (value: integer; floats as their bits), vec (value: list
           of operands), addr (value: base operand, extra: (offset, coordinates)), sym (value:
           name), special (value: name), pair (value: first, extra: second), not (value: register
           index), sink
    """

    kind: str
    value: object = None
    extra: object = None


@dataclass(frozen=True)
class Instruction:
    """``op`` in full, e.g. "ld.global.v4.b32"; ``guard`` is (predicate register, negated)."""

    op: str
    operands: tuple[Operand, ...]
    guard: tuple[int, bool] | None
    line: int
    text: str

    @property
    def parts(self) -> list[str]:
        return self.op.split(".")

    def unsupported(self, why: str) -> UnsupportedError:
        return UnsupportedError(f"PTX line {self.line}: {why}: {self.text}")


class Param(NamedTuple):
    name: str
    offset: int
    size: int


@dataclass
class Entry:
    """One kernel: its parameters, register types by index, instructions and label positions."""

    name: str
    params: list[Param] = field(default_factory=list)
    param_bytes: int = 0
    registers: list[str] = field(default_factory=list)  # type by index
    names: list[str] = field(default_factory=list)  # name by index
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)  # static arrays: name -> offset
    static_shared: int = 0
    threads: tuple[int, int, int] | None = None


@dataclass
class Module:
    target: str
    entries: dict[str, Entry]
    dynamic_shared: set[str]
    lines: list[str]


def parse(text: str) -> Module:
    """The module of a PTX file. UnsupportedError for what the emulator does not know."""
    lines = text.splitlines()
    target = re.search(r"\.target\s+(\w+)", text)
    dynamic = set(re.findall(r"\.extern\s+\.shared\s+\.align\s+\d+\s+\.b8\s+([\w$]+)\[\]", text))
    entries = {}
    clean = "\n".join(_without_comment(line) for line in lines)
    unknown = re.search(r"^\s*(?:\.visible\s+)?\.(?:global|const|func)\b.*", clean, re.MULTILINE)
    if unknown:
        raise UnsupportedError(f"module-scope declaration: {unknown.group().strip()[:100]}")
    for match in re.finditer(r"\.entry\s+([\w$]+)\s*\(", clean):
        entry = _entry(clean, match, lines)
        entries[entry.name] = entry
    return Module(target.group(1) if target else "", entries, dynamic, lines)


def _without_comment(line: str) -> str:
    at = line.find("//")
    return line if at < 0 else line[:at]


def _entry(text: str, match: re.Match[str], lines: list[str]) -> Entry:
    entry = Entry(match.group(1))
    close = text.index(")", match.end())
    for declaration in filter(None, map(str.strip, text[match.end() : close].split(","))):
        found = re.match(
            r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?$", declaration
        )
        if found is None:
            raise UnsupportedError(f"parameter of {entry.name}: {declaration}")
        align, kind, name, count = found.groups()
        size = TYPE_BYTES[kind] * int(count or 1)
        align = int(align or TYPE_BYTES[kind])
        offset = -(-entry.param_bytes // align) * align
        entry.params.append(Param(name, offset, size))
        entry.param_bytes = offset + size
    begin = text.index("{", close)
    threads = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", text[close:begin])
    if threads:
        entry.threads = tuple(int(n or 1) for n in threads.groups())
    _Body(entry, text, begin + 1, lines).parse()
    return entry


class _Body:
    """Splits a kernel's body into statements, with a dictionary of names for each scope."""

    def __init__(self, entry: Entry, text: str, at: int, lines: list[str]) -> None:
        self.entry, self.text, self.at, self.lines = entry, text, at, lines
        self.scopes: list[dict[str, int]] = [{}]
        self.label_scopes: list[str] = [""]
        self.number = 0
        self.line = text.count("\n", 0, at) + 1
        self.counted = at

    def parse(self) -> None:
        while True:
            self._skip_space()
            char = self.text[self.at]
            if char == "{":
                self.number += 1
                self.scopes.append({})
                self.label_scopes.append(f"#{self.number}")
                self.at += 1
            elif char == "}":
                self.at += 1
                self.scopes.pop()
                self.label_scopes.pop()
                if not self.scopes:
                    break
            else:
                label = re.compile(r"([\w$]+)\s*:(?!:)").match(self.text, self.at)
                if label:
                    name = label.group(1) + self.label_scopes[-1]
                    self.entry.labels[name] = len(self.entry.instructions)
                    self.at = label.end()
                    continue
                end = self.text.index(";", self.at)
                statement = " ".join(self.text[self.at : end].split())
                self.at = end + 1
                if statement:
                    self._statement(statement)
        self._resolve_labels()

    def _skip_space(self) -> None:
        while self.text[self.at].isspace() or self.text[self.at] == ";":
            self.at += 1
        self.line += self.text.count("\n", self.counted, self.at)
        self.counted = self.at

    def _statement(self, text: str) -> None:
        if text.startswith(".reg"):
            self._registers(text)
        elif text.startswith(".shared"):
            self._shared(text)
        elif text.startswith((".pragma", ".loc", ".file")):
            return
        elif text.startswith("."):
            raise UnsupportedError(f"PTX line {self.line}: directive: {text}")
        else:
            self._instruction(text)

    def _registers(self, text: str) -> None:
        kind, names = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text).groups()
        if kind not in TYPE_BYTES:
            raise UnsupportedError(f"PTX line {self.line}: register type: {text}")
        for name in map(str.strip, names.split(",")):
            counted = re.match(r"(%?[\w$]+)<(\d+)>$", name)
            wanted = [name]
            if counted:
                wanted = [f"{counted.group(1)}{i}" for i in range(int(counted.group(2)))]
            for register in wanted:
                self.scopes[-1][register] = len(self.entry.registers)
                self.entry.registers.append(kind)
                self.entry.names.append(register)

    def _shared(self, text: str) -> None:
        found = re.match(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)\[(\d+)\]$", text)
        if found is None:
            raise UnsupportedError(f"PTX line {self.line}: shared array: {text}")
        align, kind, name, count = found.groups()
        align = int(align or TYPE_BYTES[kind])
        offset = -(-self.entry.static_shared // align) * align
        self.entry.shared[name] = offset
        self.entry.static_shared = offset + TYPE_BYTES[kind] * int(count)

    def _instruction(self, text: str) -> None:
        guard = None
        found = re.match(r"@(!?)(%?[\w$]+)\s+(.*)", text)
        body = text
        if found:
            guard = (self._register(found.group(2)), found.group(1) == "!")
            body = found.group(3)
        op, _, rest = body.partition(" ")
        operands = tuple(self._operand(part) for part in _split(rest))
        self.entry.instructions.append(Instruction(op, operands, guard, self.line, text))

    def _register(self, name: str) -> int:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        raise UnsupportedError(f"PTX line {self.line}: register {name} is not declared")

    def _operand(self, text: str) -> Operand:
        if text == "_":
            return Operand("sink")
        if text.startswith("{"):
            return Operand("vec", [self._operand(part) for part in _split(text[1:-1])])
        if text.startswith("["):
            return self._address(text[1:-1].strip())
        if "|" in text:
            first, second = (self._operand(part.strip()) for part in text.split("|"))
            return Operand("pair", first, second)
        if text.startswith("!"):
            return Operand("not", self._register(text[1:]))
        if _INTEGER.match(text):
            return Operand("imm", int(text.rstrip("U"), 0))
        if re.match(r"0[fF][0-9a-fA-F]{8}$", text):
            return Operand("imm", int(text[2:], 16), "float")
        if re.match(r"0[dD][0-9a-fA-F]{16}$", text):
            return Operand("imm", int(text[2:], 16), "float")
        if _SPECIAL.match(text):
            return Operand("special", text)
        for scope in reversed(self.scopes):
            if text in scope:
                return Operand("reg", scope[text])
        if re.match(r"[\w$]+$", text):
            return Operand("sym", text, self.label_scopes[-1])
        raise UnsupportedError(f"PTX line {self.line}: operand {text}")

    def _address(self, text: str) -> Operand:
        parts = _split(text)
        base, _, offset = parts[0].partition("+")
        value = self._operand(base.strip())
        rest = tuple(self._operand(part) for part in parts[1:])
        return Operand("addr", value, (int(offset.strip() or "0", 0), rest))

    def _resolve_labels(self) -> None:
        """Branch targets by their name, the innermost scope's first."""
        for index, instruction in enumerate(self.entry.instructions):
            if instruction.op.partition(".")[0] != "bra":
                continue
            target = instruction.operands[0]
            scoped = f"{target.value}{target.extra}"
            name = scoped if scoped in self.entry.labels else target.value
            if name not in self.entry.labels:
                raise instruction.unsupported("no such label")
            self.entry.instructions[index] = Instruction(
                instruction.op,
                (Operand("sym", name),),
                instruction.guard,
                instruction.line,
                instruction.text,
            )


def _split(text: str) -> list[str]:
    """Parts between commas that stand in no bracket."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        if char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts
