"""Control flow of one kernel: basic blocks, live registers, where branches come together again."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from moe_ep_jit.tools.emulator.ptx import Entry, Instruction, Operand

#: Instructions that can wait, or that need whole warps: each is a block of its own.
SPECIAL = (
    "bar.sync", "barrier.sync", "barrier.cta.sync", "bar.arrive", "barrier.cta.arrive",
    "barrier.cluster.wait", "mbarrier.try_wait", "griddepcontrol.wait", "wgmma.",
    "cp.async.bulk.wait_group", "cp.async.wait_group", "cp.async.wait_all", "tcgen05.",
)  # fmt: skip

#: Instructions whose every operand is read.
_NO_DESTINATION = (
    "st.", "red.", "bra", "ret", "exit", "bar.", "barrier.", "fence.", "cp.", "prefetch",
    "griddepcontrol.", "setmaxnreg.", "mbarrier.init", "mbarrier.inval", "mbarrier.expect_tx",
    "mbarrier.complete_tx", "stmatrix.", "membar.", "nanosleep.", "cvta.discard", "trap", "brkpt",
    "tcgen05.st", "tcgen05.mma", "tcgen05.cp", "tcgen05.commit", "tcgen05.alloc", "tcgen05.dealloc",
    "tcgen05.relinquish", "tcgen05.fence", "tcgen05.wait", "wgmma.fence", "wgmma.commit",
    "wgmma.wait", "discard.", "applypriority.", "st.async",
)  # fmt: skip


def is_special(instruction: Instruction) -> bool:
    return instruction.op.startswith(SPECIAL)


def polls(instruction: Instruction) -> bool:
    """Whether it looks at what other threads change: in a loop it may be a wait."""
    op = instruction.op
    if op.startswith(
        ("ld.acquire", "ld.relaxed", "ld.volatile", "atom.", "nanosleep", "mbarrier.test")
    ):
        return True
    return any(o.kind == "special" and o.value == "%globaltimer" for o in instruction.operands)


def registers_of(operand: Operand) -> list[int]:
    """Every register that an operand names."""
    if operand.kind in ("reg", "not"):
        return [operand.value]
    if operand.kind == "vec":
        return [r for part in operand.value for r in registers_of(part)]
    if operand.kind == "addr":
        offset, rest = operand.extra
        return registers_of(operand.value) + [r for part in rest for r in registers_of(part)]
    if operand.kind == "pair":
        return registers_of(operand.value) + registers_of(operand.extra)
    return []


def uses_and_definitions(instruction: Instruction) -> tuple[list[int], list[int]]:
    """Registers that an instruction reads, and those that it writes."""
    op, operands = instruction.op, instruction.operands
    if op.startswith(_NO_DESTINATION) or not operands:
        uses, definitions = [r for o in operands for r in registers_of(o)], []
    else:
        definitions = registers_of(operands[0])
        uses = [r for o in operands[1:] for r in registers_of(o)]
        if op.startswith("wgmma.mma_async"):
            uses += definitions
    if instruction.guard:
        # Where the guard is false the register keeps what it had.
        uses = [*uses, instruction.guard[0], *definitions]
    return uses, definitions


@dataclass
class Block:
    """Instructions that run one after the other; ``join`` is where a branch at its end rejoins."""

    index: int
    instructions: list[Instruction]
    successors: list[int] = field(default_factory=list)
    live_in: set[int] = field(default_factory=set)
    live_out: set[int] = field(default_factory=set)
    join: int = -1
    #: Something between the branch and the join can wait: warps that differ go separate ways.
    waits: bool = False

    @cached_property
    def special(self) -> Instruction | None:
        """The instruction of a block that may wait."""
        only = len(self.instructions) == 1 and is_special(self.instructions[0])
        return self.instructions[0] if only else None


class Program:
    """The blocks of an entry. Block -1 stands for the end."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.blocks: list[Block] = []
        self._cut()
        self._liveness()
        self._joins()
        self._waits()

    def _cut(self) -> None:
        instructions = self.entry.instructions
        leaders = {0, *self.entry.labels.values()}
        for index, instruction in enumerate(instructions):
            if is_special(instruction):
                leaders.update((index, index + 1))
            elif instruction.op.partition(".")[0] in ("bra", "ret", "exit", "trap"):
                leaders.add(index + 1)
        starts = sorted(leader for leader in leaders if leader < len(instructions))
        block_at = {start: number for number, start in enumerate(starts)}
        ends = [*starts[1:], len(instructions)]
        for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
            block = Block(number, instructions[start:end])
            last = block.instructions[-1]
            following = number + 1 if number + 1 < len(starts) else -1
            kind = last.op.partition(".")[0]
            if kind == "bra":
                target = self.entry.labels[last.operands[0].value]
                block.successors = [block_at.get(target, -1)]
                if last.guard:
                    block.successors.append(following)
            elif kind in ("ret", "exit", "trap"):
                block.successors = [-1, following] if last.guard else [-1]
            else:
                block.successors = [following]
            self.blocks.append(block)

    def _liveness(self) -> None:
        used, defined = [], []
        for block in self.blocks:
            uses, definitions = set(), set()
            for instruction in block.instructions:
                reads, writes = uses_and_definitions(instruction)
                uses.update(r for r in reads if r not in definitions)
                definitions.update(writes)
            used.append(uses)
            defined.append(definitions)
        changed = True
        while changed:
            changed = False
            for block in reversed(self.blocks):
                out = set().union(*(self.blocks[s].live_in for s in block.successors if s >= 0))
                into = used[block.index] | (out - defined[block.index])
                if into != block.live_in or out != block.live_out:
                    block.live_in, block.live_out, changed = into, out, True

    def _joins(self) -> None:
        """Immediate post-dominators: dominators of the graph turned around, -1 its root."""
        order, seen = [], set()
        predecessors: dict[int, list[int]] = {}
        for block in self.blocks:
            for successor in block.successors:
                predecessors.setdefault(successor, []).append(block.index)
        stack = [(-1, iter(predecessors.get(-1, [])))]
        seen.add(-1)
        while stack:
            node, children = stack[-1]
            child = next((c for c in children if c not in seen), None)
            if child is None:
                order.append(node)
                stack.pop()
            else:
                seen.add(child)
                stack.append((child, iter(predecessors.get(child, []))))
        rank = {node: number for number, node in enumerate(order)}
        joins = {-1: -1}
        changed = True
        while changed:
            changed = False
            for node in reversed(order[:-1]):
                known = [s for s in self.blocks[node].successors if s in joins]
                new = known[0]
                for other in known[1:]:
                    new = _common(new, other, joins, rank)
                if joins.get(node, -2) != new:
                    joins[node], changed = new, True
        for block in self.blocks:
            block.join = joins.get(block.index, -1)

    def _waits(self) -> None:
        spins = self._spins()
        for block in self.blocks:
            if len(block.successors) < 2:
                continue
            todo, seen = list(block.successors), set()
            while todo and not block.waits:
                index = todo.pop()
                if index in seen or index in (-1, block.join):
                    continue
                seen.add(index)
                block.waits = self.blocks[index].special is not None or index in spins
                todo.extend(self.blocks[index].successors)

    def _spins(self) -> set[int]:
        """Blocks that poll and can come again."""
        found = set()
        for block in self.blocks:
            if any(map(polls, block.instructions)):
                todo, seen = list(block.successors), set()
                while todo:
                    index = todo.pop()
                    if index >= 0 and index not in seen:
                        seen.add(index)
                        todo.extend(self.blocks[index].successors)
                if block.index in seen:
                    found.add(block.index)
        return found


def _common(a: int, b: int, joins: dict[int, int], rank: dict[int, int]) -> int:
    while a != b:
        while rank[a] < rank[b]:
            a = joins[a]
        while rank[b] < rank[a]:
            b = joins[b]
    return a
