"""Threads of a CTA that run in lock step: one array element a thread, whole warps only.

Where the threads of a ``Threads`` part at a branch, a mask says who runs, and a stack where they
come together again. Where something between may wait, warps that differ become ``Threads`` of
their own, so that one role never holds up another.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_ep_jit.tools.emulator import wgmma
from moe_ep_jit.tools.emulator.codegen import Code
from moe_ep_jit.tools.emulator.copies import Copies
from moe_ep_jit.tools.emulator.fault import Fault, UnsupportedError
from moe_ep_jit.tools.emulator.memory_access import MemoryAccess, wide
from moe_ep_jit.tools.emulator.synchronize import Synchronize
from moe_ep_jit.tools.emulator.warp_wide import WarpWide

END = -1
_BLOCKS_A_TURN = 400


class Spin:
    """Whether threads run in circles: their state comes again and nobody has changed anything."""

    def __init__(self) -> None:
        self.now: tuple[int, int] | None = None
        self.state: list[Any] = []
        self.turns, self.most = 0, 1
        self.proven = False

    def stands(self, machine: Any) -> bool:
        return self.proven and self.now == (machine.changes, machine.time)

    def again(self, machine: Any, threads: Threads) -> bool:
        """At the end of a turn; the state that is looked for is taken anew ever more rarely."""
        now, state = (machine.changes, machine.time), threads.state()
        if now != self.now:
            self.now, self.state, self.turns, self.most, self.proven = now, state, 0, 1, False
            return False
        self.proven = len(state) == len(self.state) and all(map(_same, state, self.state))
        self.turns += 1
        if self.turns == self.most:
            self.state, self.turns, self.most = state, 0, 2 * self.most
        return self.proven


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a is b or (a.shape == b.shape and bool((a == b).all()))
    return a is b or (isinstance(a, int) and a == b)


class Threads(MemoryAccess, WarpWide, Synchronize, Copies):
    """Some warps of a CTA with their registers.

    tids      thread numbers in the CTA, a multiple of 32, in ascending order
    R         registers: unsigned arrays by index; None: nothing has written it
    pc        the next block; ``join`` is where it ends and the stack's top goes on
    mask      who runs, None for all
    stack     (mask, pc, join) of who waits
    """

    def __init__(self, cta: Any, code: Code, tids: np.ndarray, registers: list[Any]) -> None:
        self.cta, self.code, self.R = cta, code, registers
        self.tids, self.count = tids, len(tids)
        self.pc, self.join, self.mask = 0, -2, None
        self.stack: list[tuple[np.ndarray | None, int, int]] = []
        self.gone: np.ndarray | None = None
        self.constants: dict[tuple[str, int], np.ndarray] = {}
        self.specials: dict[str, np.ndarray] = {}
        self.wait: Any = None  # what a special instruction waits on: synchronize.py
        self._warpgroups: tuple[Any, bool] = (None, False)
        self.wgmma = wgmma.Groups()
        self.done = False
        #: What a poll has just looked at: (instruction, allocation, offset) or words.
        self.polled: Any = None
        self.spin = Spin()

    # Running

    def run(self) -> bool:
        """Run until something waits, the end, or the end of this turn; whether anything ran."""
        if self.wait is not None and self.still_waits():
            return False
        machine = self.cta.machine
        if self.spin.stands(machine):
            return False
        code, program = self.code, self.code.program
        self.polled = None
        for turn in range(_BLOCKS_A_TURN):
            while self.pc == self.join:
                self._pop()
            if self.pc == END:
                self._pop_after_exit()
                if self.done:
                    return True
                continue
            at = self.pc
            block = program.blocks[at]
            special = block.special
            if special is not None:
                if not self._special(special):
                    return turn > 0
                machine.changes += 1
                if code.traced:
                    self.trace(special.line, None)
                self.pc = block.successors[0]
                continue
            function = code.function(at, self.mask is not None)
            try:
                self.pc = function(self, self.R, self.mask)
            except (UnsupportedError, KeyboardInterrupt):
                raise
            except Exception as error:
                raise self._fault(error, code.line_of(error)) from error
            if self.polled is not None and self.pc <= at:
                break  # a loop around a poll: the turn of those that it waits for
        return not self.spin.again(machine, self)

    def _special(self, instruction: Any) -> bool:
        try:
            if instruction.guard is not None:
                raise instruction.unsupported("guard on an instruction that can wait")
            return self.special_instruction(instruction)
        except (UnsupportedError, KeyboardInterrupt):
            raise
        except Exception as error:
            raise self._fault(error, instruction.line) from error

    def _fault(self, error: Exception, line: int | None) -> Exception:
        if isinstance(error, Fault):
            return error.locate(self.place(line))
        if isinstance(error, (TypeError, AttributeError)) and "NoneType" in str(error):
            return Fault("a register is read that nothing has written").locate(self.place(line))
        error.add_note(self.place(line)) if hasattr(error, "add_note") else None
        return error

    def place(self, line: int | None = None) -> str:
        """Where these threads are, in words."""
        if line is None and self.pc >= 0:
            line = self.code.program.blocks[self.pc].instructions[0].line
        text = self.cta.launch.text_of(line)
        warps = sorted({int(t) // 32 for t in self.tids})
        return f"{self.cta.name}, warps {_ranges(warps)}, PTX line {line}: {text}"

    def active(self) -> np.ndarray:
        """Thread numbers of who runs now."""
        return self.tids if self.mask is None else self.tids[self.mask]

    def state(self) -> list[Any]:
        """All that decides how these threads go on, but for memory and the time."""
        places = {
            self.pc,
            self.join,
            *(p for _, p, _ in self.stack),
            *(j for _, _, j in self.stack),
        }
        live = set().union(*(self.code.program.blocks[p].live_in for p in places if p >= 0))
        registers = [self.R[index] for index in sorted(live)]
        return [self.tids, self.pc, self.join, self.mask, *sum(self.stack, ()), *registers]

    # Branches

    def branch(self, taken: Any, mask: np.ndarray | None, index: int) -> int:
        """The next block after a conditional branch at the end of block ``index``."""
        block = self.code.program.blocks[index]
        target, following = block.successors
        taken = wide(taken, self.count)
        if mask is None:
            goes = np.count_nonzero(taken)
            if goes == self.count:
                return target
            if not goes:
                return following
            here, there = taken, ~taken
        else:
            here, there = taken & mask, mask & ~taken
            if not here.any():
                return following
            if not there.any():
                return target
        if target == following:
            return target
        if block.waits:
            return self._part(here, there, block)
        return self._diverge(here, there, block)

    def _diverge(self, here: np.ndarray, there: np.ndarray, block: Any) -> int:
        """Run one side up to the join, then the other, then go on together."""
        target, following = block.successors
        self.stack.append((self.mask, block.join, self.join))
        first, second = (here, target), (there, following)
        if self.cta.machine.choose(2):
            first, second = second, first
        self.stack.append((*second, block.join))
        self.mask, self.join = first[0], block.join
        return first[1]

    def _part(self, here: np.ndarray, there: np.ndarray, block: Any) -> int:
        """Warps that go whole ways become ``Threads`` of their own, for something on the way may
        wait; threads that part within a warp stay together.
        """
        target, following = block.successors
        takes = here.reshape(-1, 32).any(axis=1)
        leaves = there.reshape(-1, 32).any(axis=1)
        idle = self.join if self.join >= 0 else END
        ways = [
            (takes & leaves, None),
            (takes & ~leaves, target),
            (~takes & leaves, following),
            (~takes & ~leaves, idle),
        ]
        groups = [(np.flatnonzero(np.repeat(warps, 32)), pc) for warps, pc in ways if warps.any()]
        for lanes, pc in groups[1:]:
            self.split_off(lanes, pc)
        lanes, pc = groups[0]
        if len(groups) > 1:
            self.keep_only(lanes)
        return self._diverge(here[lanes], there[lanes], block) if pc is None else pc

    def split_off(self, lanes: np.ndarray, pc: int) -> Threads:
        """New ``Threads`` of these lanes (whole warps), going on at ``pc``."""
        untouched = self.wgmma.untouched(self.R)
        other = Threads(self.cta, self.code, self.tids[lanes], [
            r if r is None or not isinstance(r, np.ndarray) else r[lanes] for r in self.R
        ])  # fmt: skip
        other.pc, other.join = pc, self.join
        other.mask = _some(self.mask, lanes)
        other.stack = [(_some(m, lanes), p, j) for m, p, j in self.stack]
        other.gone = _some(self.gone, lanes)
        other.wgmma = self.wgmma.part(lanes)
        other.wgmma.left = {r: other.R[r] for r in untouched}
        other._tidy()
        self.cta.groups.append(other)
        return other

    def keep_only(self, lanes: np.ndarray) -> None:
        """Drop all lanes but these."""
        untouched = self.wgmma.untouched(self.R)
        self.R[:] = [r if r is None or not isinstance(r, np.ndarray) else r[lanes] for r in self.R]
        self.tids, self.count = self.tids[lanes], len(lanes)
        self.mask = _some(self.mask, lanes)
        self.stack = [(_some(m, lanes), p, j) for m, p, j in self.stack]
        self.gone = _some(self.gone, lanes)
        self.wgmma = self.wgmma.part(lanes)
        self.wgmma.left = {r: self.R[r] for r in untouched}
        self.constants, self.specials = {}, {}
        self._tidy()

    def _tidy(self) -> None:
        """A mask of all is none; what nobody waits for is dropped."""
        if self.mask is not None and self.mask.all():
            self.mask = None
        self.stack = [
            (None if m is not None and m.all() else m, p, j)
            for m, p, j in self.stack
            if m is None or m.any()
        ]

    def _pop(self) -> None:
        mask, pc, join = self.stack.pop()
        if self.gone is not None:
            alive = ~self.gone
            mask = alive if mask is None else mask & alive
            if not mask.any():
                self.pc, self.join = END, -2
                self.mask = mask
                return
        self.mask, self.pc, self.join = mask, pc, join

    def _pop_after_exit(self) -> None:
        """Who ran has ended; others may still wait."""
        if self.stack and not (self.gone is None or self.gone.all()):
            self._pop()
        else:
            self.done = True

    def leave(self, mask: np.ndarray | None) -> int:
        """``ret``: these threads have ended."""
        self.wgmma.must_be_empty("threads end")
        lanes = np.ones(self.count, bool) if mask is None else mask
        self.gone = lanes.copy() if self.gone is None else self.gone | lanes
        self.cta.threads_end(self.tids[lanes])
        return END

    def trap(self) -> int:
        raise Fault("trap")

    # Merging

    def may_merge(self, other: Threads) -> bool:
        return (
            self.pc == other.pc
            and self.mask is None
            and other.mask is None
            and not self.stack
            and not other.stack
            and self.gone is None
            and other.gone is None
            and self.join == other.join
            and self._only_waits_for_warps()
            and other._only_waits_for_warps()
            and self.wgmma.shape() == other.wgmma.shape()
        )

    def _only_waits_for_warps(self) -> bool:
        return self.wait is None or (isinstance(self.wait, tuple) and self.wait[0] == "warpgroup")

    def whole_warpgroups(self) -> bool:
        """Whether these threads are all of some warpgroups."""
        known, whole = self._warpgroups
        if known is not self.tids:
            whole = self.count % 128 == 0
            if whole:
                groups = self.tids.reshape(-1, 128)
                first, last = groups[:, 0], groups[:, -1]
                whole = bool((first % 128 == 0).all() and (last == first + 127).all())
            self._warpgroups = self.tids, whole
        return whole

    def merge(self, other: Threads) -> None:
        """Take in the threads of ``other``, which stand at the same place."""
        tids = np.concatenate((self.tids, other.tids))
        order = np.argsort(tids, kind="stable")
        live = self.code.program.blocks[self.pc].live_in
        theirs_too = set(other.wgmma.untouched(other.R))
        untouched = [r for r in self.wgmma.untouched(self.R) if r in theirs_too]
        for index in range(len(self.R)):
            mine, theirs = self.R[index], other.R[index]
            if isinstance(mine, wgmma.InFlight):
                continue
            if index in live and mine is not None and theirs is not None:
                self.R[index] = np.concatenate((mine, theirs))[order]
            else:
                self.R[index] = None
        self.wgmma.merge(other.wgmma, order)
        self.wgmma.left = {r: self.R[r] for r in untouched}
        self.wait = None
        self.tids, self.count = tids[order], len(tids)
        self.constants, self.specials = {}, {}

    def may_part(self) -> bool:
        """Whether warpgroups may go apart here, so that a seed shows what that changes."""
        return (
            self.count > 128
            and self.mask is None
            and not self.stack
            and self.wait is None
            and self.whole_warpgroups()
            and self.pc >= 0
        )

    # What generated code calls

    def full(self, value: Any) -> np.ndarray:
        """An array of one constant, shared: arrays are never written in place."""
        key = (type(value).__name__, value.tobytes() if hasattr(value, "tobytes") else int(value))
        found = self.constants.get(key)
        if found is None:
            found = self.constants[key] = np.full(self.count, value)
            found.flags.writeable = False
        return found

    def special(self, name: str) -> np.ndarray:
        if name == "%globaltimer":
            self.polled = "the time"
            return np.full(self.count, self.cta.machine.timer(), np.uint64)
        found = self.specials.get(name)
        if found is None:
            found = self.specials[name] = self.cta.special_register(name, self.tids)
        return found

    def symbol(self, name: str, kind: type) -> np.ndarray:
        return self.full(kind(self.cta.symbol(name)))

    def rewritten(self, register: int, value: Any) -> Any:
        """A wgmma operand is about to be written: not while one runs on it."""
        if not self.wgmma.empty:
            self.wgmma.check_write(register)
        return value

    def trace(self, line: int, value: Any) -> None:
        tracer = self.cta.machine.tracer
        if tracer is not None:
            tracer(self, line, value)


def _some(mask: np.ndarray | None, lanes: np.ndarray) -> np.ndarray | None:
    return None if mask is None else mask[lanes]


def _ranges(numbers: list[int]) -> str:
    parts, start = [], numbers[0]
    for number, following in zip(numbers, [*numbers[1:], -2], strict=True):
        if following != number + 1:
            parts.append(f"{start}" if start == number else f"{start}-{number}")
            start = following
    return ", ".join(parts)
