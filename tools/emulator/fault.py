"""What the emulator finds wrong."""

from __future__ import annotations


class Fault(RuntimeError):
    """A kernel did what the hardware forbids, or what no ordering allows.

    The message names the kernel, the PTX line and the thread once ``locate`` has added them.
    """

    located = False

    def locate(self, where: str) -> Fault:
        """The same fault with its place in the PTX; the innermost place stays."""
        if self.located:
            return self
        fault = type(self)(f"{self.args[0]}\n  {where}")
        fault.located = True
        return fault


class DeadlockFault(Fault):
    """Nothing can go on; the message is a table of who waits on what."""


class UnsupportedError(NotImplementedError):
    """An instruction, a modifier or a layout that the emulator does not know."""
