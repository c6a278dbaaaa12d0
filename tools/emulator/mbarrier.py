"""mbarriers: arrivals, transaction bytes, phases, and what they pass on."""

from __future__ import annotations

from moe_ep_jit.tools.emulator.clocks import View, add_view
from moe_ep_jit.tools.emulator.fault import Fault

_MOST_BYTES = (1 << 20) - 1


class MBarrier:
    """One mbarrier object of a CTA's shared memory."""

    def __init__(self, offset: int, expected: int) -> None:
        if not 0 < expected < 1 << 20:
            raise Fault(f"mbarrier.init with a count of {expected}, expected 1 to 2^20 - 1")
        self.offset, self.expected = offset, expected
        self.pending, self.bytes, self.phase = expected, 0, 0
        #: What arrivals of past and current phases released, by CTA.
        self.views: dict[int, View] = {}

    def describe(self) -> str:
        return (
            f"mbarrier at shared {self.offset:#x}: phase {self.phase}, {self.pending} of "
            f"{self.expected} arrivals missing, {self.bytes} bytes pending"
        )

    def tell(self, view: View) -> None:
        """Pass on a view beside an arrival that brings another."""
        add_view(self.views, view)

    def expect(self, count: int) -> None:
        """expect_tx: the current phase waits for ``count`` more bytes."""
        self.bytes += count
        if self.bytes > _MOST_BYTES:
            raise Fault(f"{self.describe()}: more bytes than an mbarrier counts")

    def arrive(self, count: int, view: View) -> None:
        if count > self.pending:
            raise Fault(f"{self.describe()}: {count} arrivals are more than are expected")
        add_view(self.views, view)
        self.pending -= count
        self._check()

    def complete(self, count: int, view: View) -> None:
        """complete_tx: ``count`` bytes have landed."""
        add_view(self.views, view)
        self.bytes -= count
        if self.bytes < -_MOST_BYTES:
            raise Fault(f"{self.describe()}: more bytes than an mbarrier counts")
        self._check()

    def _check(self) -> None:
        if self.pending == 0 and self.bytes < 0:
            raise Fault(
                f"{self.describe()}: more bytes have landed than were expected, and every arrival "
                "has been made"
            )
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.expected

    def is_done(self, parity: int) -> bool:
        """Whether the phase of this parity is over."""
        return self.phase & 1 != parity & 1
