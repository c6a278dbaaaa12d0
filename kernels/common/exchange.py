"""Ranks over symmetric memory: where their words are, bounded waits, what a failed one leaves.

Every rank's workspace has the same layout, so a rank writes to a peer at its own address plus the
peer's delta. What ranks tell each other is behind the control words (``layout.exchange_parts``):

count_flags  route of every rank -> route: the counts of an epoch are in its slot of that parity
arrived      dispatch of every rank -> gate/up: rows of one expert from one source
done_flags   combine of every rank -> combine: the down GEMM has sent back what it owes

A wait that outlasts the limit records what it waited for in host memory, marks the workspace as
failed and counts as satisfied, so that every pipeline drains. A failed rank posts nothing any more
and its output is NaN: what its peers still expect of it times out there.
"""

from typing import NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from moe_ep_jit import layout
from moe_ep_jit.kernels.common import ptx


class Ranks(NamedTuple):
    """Static facts of several ranks."""

    num_ranks: int
    num_experts: int  # of all ranks

    @property
    def local(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.num_ranks


def place(ranks, control, part, index=0):
    """The address of word ``index`` of a part, on this rank."""
    first, _ = layout.exchange_parts(ranks.num_ranks)[part]
    return control + first * 4 + Int64(index) * 4


def delta(ranks, control, peer):
    """From an address of this rank to the same place of ``peer``."""
    return ptx.load(Int64, place(ranks, control, "deltas", 2 * peer))


def word(control, index):
    """A control word that grids before this one wrote, or the host."""
    return ptx.load(Int32, control + index * 4)


def has_failed(control):
    """Whether this or an earlier round of the workspace is lost."""
    return ptx.load_relaxed(control + layout.CONTROL_FAILED * 4) != 0


def count_slot(ranks, epoch, source):
    """The slot of a rank's post of an epoch, among headers and counts."""
    return (epoch & 1) * ranks.num_ranks + source


def count_at(ranks, control, slot, expert):
    """The address of a rank's rows for an expert of all."""
    return place(ranks, control, "counts", slot * layout.EXCHANGE_EXPERTS + expert)


def tile_rows(ranks, control, epoch, owner):
    """Rows of an n-tile of the rung that a rank has posted; of a round that has failed, anything
    above 0.
    """
    index = count_slot(ranks, epoch, owner) * layout.HEADER_WORDS + layout.HEADER_TILE_N
    return cutlass.max(ptx.load(Int32, place(ranks, control, "headers", index)), 1)


@cute.jit
def fail(control, code: cutlass.Constexpr, phase: cutlass.Constexpr, peer, flag, expected, seen):
    """Mark the workspace as failed; who is first says in host memory why."""
    failed = control + layout.CONTROL_FAILED * 4
    if cute.arch.atomic_exch(ptx.ptr(Int32, failed), Int32(1)) == 0:
        error = ptx.load(Int64, control + layout.CONTROL_ERROR * 4)
        ptx.store_system(error + layout.ERROR_RANK * 4, word(control, layout.CONTROL_RANK))
        ptx.store_system(error + layout.ERROR_PEER * 4, peer)
        ptx.store_system(error + layout.ERROR_PHASE * 4, Int32(layout.PHASES.index(phase)))
        ptx.store_system(error + layout.ERROR_FLAG * 4, flag)
        ptx.store_system(error + layout.ERROR_EXPECTED * 4, expected)
        ptx.store_system(error + layout.ERROR_SEEN * 4, seen)
        # release: to the host, which reads the code first
        ptx.store_release_system(error + layout.ERROR_CODE * 4, Int32(code))


@cute.jit
def wait(
    ranks: cutlass.Constexpr, control, phase: cutlass.Constexpr, part: cutlass.Constexpr, index,
    peer, expected
):  # fmt: skip
    """Wait until a word of ``part`` has come to ``expected``, which only rises; not for ever.

    acquire: what the partner, named where this is called, released before it wrote the word
    """
    address = place(ranks, control, part, index)
    seen = ptx.load_acquire_system(address)
    if seen - expected < 0:
        began = ptx.global_timer()
        limit = ptx.load(Int64, control + layout.CONTROL_TIMEOUT * 4)
        while (seen - expected < 0) & (not has_failed(control)):
            seen = ptx.load_acquire_system(address)
            if (seen - expected < 0) & (ptx.global_timer() - began > limit):
                flag = Int32(layout.exchange_parts(ranks.num_ranks)[part][0] + index)
                fail(control, layout.ERROR_TIMEOUT, phase, peer, flag, expected, seen)


@cute.jit
def await_rows(ranks: cutlass.Constexpr, control, expert, lane):
    """A whole warp: wait until every row of a local expert has come, from whichever rank.

    acquire: dispatch of each source released its rows, scales and slots with the count
    """
    for source in cutlass.range(lane, ranks.num_ranks, 32):
        index = expert * ranks.num_ranks + source
        expected = ptx.load(Int32, place(ranks, control, "expected", index))
        wait(ranks, control, "dispatch", "arrived", index, source, expected)
    cute.arch.sync_warp()
    # TMA reads the rows: each lane may issue, and each has learnt of all sources
    ptx.fence_proxy_async()
