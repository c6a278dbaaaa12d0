"""Who may see whose writes: happens-before, kept for each thread of a CTA.

Each write leaves a record (CTA, thread, time). A thread may read it if the writer is itself, a grid
that it has waited for, or a thread whose clock it has learnt, by barrier, mbarrier or release and
acquire, at that time or later. ``fenced`` is the same for the async proxy: what TMA and the tensor
cores may read needs a proxy fence between the write and them.

Slot ``threads`` of each clock belongs to the CTA's asynchronous copies.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_TIME_BITS, _THREAD_BITS = 30, 11
_TIME_MASK = (1 << _TIME_BITS) - 1
_THREAD_MASK = (1 << _THREAD_BITS) - 1
#: The time of a write that its own thread may not read yet, having not waited for it.
NOT_YET = _TIME_MASK
UID_SHIFT = _TIME_BITS + _THREAD_BITS
#: CTA numbers: which stream, then which of it.
STREAM_SHIFT = 16


class View:
    """What one thread knows: immutable, shared by all threads that know the same."""

    __slots__ = ("fenced", "horizon", "other", "own", "uid")

    def __init__(
        self,
        uid: int,
        own: np.ndarray,
        fenced: np.ndarray,
        other: dict[int, tuple[np.ndarray, np.ndarray]],
        horizon: np.ndarray,
    ) -> None:
        self.uid, self.own, self.fenced = uid, own, fenced
        self.other = other  # CTA -> its (own, fenced)
        self.horizon = horizon  # by stream: CTAs with a smaller uid are complete and visible

    def joined(self, view: View) -> View:
        """All that this thread knows and all that ``view`` does."""
        if view is self:
            return self
        own, fenced, other = self.own, self.fenced, self.other
        if view.uid == self.uid:
            own = np.maximum(own, view.own)
            fenced = np.maximum(fenced, view.fenced)
            theirs = view.other
        else:
            theirs = {**view.other, view.uid: (view.own, view.fenced)}
            if self.uid in theirs:
                clock = theirs.pop(self.uid)
                own, fenced = np.maximum(own, clock[0]), np.maximum(fenced, clock[1])
        if theirs:
            other = dict(other)
            for uid, clock in theirs.items():
                other[uid] = _later(other[uid], clock) if uid in other else clock
        horizon = self.horizon
        if horizon is not view.horizon:
            horizon = np.maximum(horizon, view.horizon)
        return View(self.uid, own, fenced, other, horizon)


def _later(a: tuple[np.ndarray, ...], b: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    return a if a is b else (np.maximum(a[0], b[0]), np.maximum(a[1], b[1]))


class Clock:
    """The views of all threads of one CTA."""

    def __init__(self, uid: int, threads: int, horizon: np.ndarray) -> None:
        self.uid, self.threads, self.time = uid, threads, 1
        self._no_grids = np.zeros_like(horizon)
        zeros = np.zeros(threads + 1, np.int64)
        self.views: dict[int, View] = {0: View(uid, zeros, zeros, {}, horizon)}
        self.view_of = np.zeros(threads, np.int64)
        self._next = 1
        #: The last threads asked for, the number of views then, and the answer: most ask again.
        self._asked: tuple[Any, int, list[Any]] = (None, 0, [])
        self.bases = (uid << UID_SHIFT) | np.arange(threads + 1, dtype=np.int64) << _TIME_BITS

    def records(self, tids: np.ndarray) -> np.ndarray:
        """The records of writes that these threads make now."""
        return self.bases[tids] + self.time

    def groups(self, tids: np.ndarray | int) -> list[tuple[View, np.ndarray | slice]]:
        """(view, places in ``tids`` of the threads that have it)."""
        if isinstance(tids, int):
            return [(self.views[int(self.view_of[tids])], slice(None))]
        asked, number, found = self._asked
        if asked is not tids or number != self._next:
            found = self._groups(self.view_of[tids])
            self._asked = tids, self._next, found
        return found

    def _groups(self, ids: np.ndarray) -> list[tuple[View, np.ndarray | slice]]:
        if len(ids) == 0:
            return []
        if np.count_nonzero(ids == ids[0]) == len(ids):
            return [(self.views[int(ids[0])], slice(None))]
        return [(self.views[int(i)], np.flatnonzero(ids == i)) for i in np.unique(ids)]

    def _assign(self, tids: np.ndarray, view: View) -> None:
        self.views[self._next] = view
        self.view_of[tids] = self._next
        self._next += 1
        if len(self.views) > 4 * self.threads + 64:
            used = set(self.view_of.tolist())
            self.views = {i: v for i, v in self.views.items() if i in used}

    def release(self, tids: np.ndarray) -> View:
        """What these threads know and have written until now."""
        joined: View | None = None
        for view, _ in self.groups(tids):
            joined = view if joined is None else joined.joined(view)
        own = joined.own.copy()
        own[tids] = self.time
        self.time += 1
        return View(self.uid, own, joined.fenced, joined.other, joined.horizon)

    def acquire(self, tids: np.ndarray, *views: View) -> None:
        """These threads learn all that the views know."""
        if not views:
            return
        for mine, places in self.groups(tids):
            for view in views:
                mine = mine.joined(view)  # noqa: PLW2901
            self._assign(tids[places], mine)

    def meet(self, tids: np.ndarray) -> None:
        """A barrier: each of these threads learns what the others know."""
        self._assign(tids, self.release(tids))

    def fence_proxy(self, tids: np.ndarray) -> None:
        """What these threads know becomes readable for the async proxy."""
        for view, places in self.groups(tids):
            fenced = np.maximum(view.fenced, view.own)
            fenced[tids[places]] = self.time
            other = {uid: (own, own) for uid, (own, _) in view.other.items()}
            new = View(self.uid, view.own, fenced, other, view.horizon)
            self._assign(tids[places], new)
        self.time += 1

    def see_grids(self, tids: np.ndarray, horizon: np.ndarray) -> None:
        """griddepcontrol.wait: the grids before are complete and visible."""
        for view, places in self.groups(tids):
            seen = np.maximum(view.horizon, horizon)
            new = View(self.uid, view.own, view.fenced, view.other, seen)
            self._assign(tids[places], new)

    def asynchronous(self) -> tuple[int, View]:
        """(record of an asynchronous write that lands now, the view of who is told of it)."""
        record = int(self.bases[self.threads]) + self.time
        own = np.zeros(self.threads + 1, np.int64)
        own[self.threads] = self.time
        self.time += 1
        return record, View(self.uid, own, np.zeros_like(own), {}, self._no_grids)

    def nothing(self) -> View:
        zeros = np.zeros(self.threads + 1, np.int64)
        return View(self.uid, zeros, zeros, {}, self._no_grids)

    def hidden(
        self, tids: np.ndarray | int, records: np.ndarray, fenced: bool
    ) -> tuple[int, int, bool] | None:
        """The first (place, record, "a proxy fence is all that lacks") that may not be read.

        tids     of the readers, one for each row of ``records``, or the one reader of all
        records  [readers, bytes or words]
        fenced   the reader is the async proxy
        """
        if not np.count_nonzero(records):
            return None
        largest, smallest = int(records.max()), int(records.min())
        own_alone = smallest >> UID_SHIFT == largest >> UID_SHIFT == self.uid
        for view, places in self.groups(tids):
            if largest >> UID_SHIFT < view.horizon[0]:
                continue
            rows = records[places]
            if own_alone:
                # The common case, shared memory: fewer steps to the same answer.
                thread, time = rows >> _TIME_BITS & _THREAD_MASK, rows & _TIME_MASK
                good = time <= view.own[thread]
                if fenced:
                    good &= (thread == self.threads) | (time <= view.fenced[thread])
                if np.count_nonzero(good) == good.size:
                    continue
            uid = rows >> UID_SHIFT
            writer = rows >> _TIME_BITS & _THREAD_MASK
            thread = np.minimum(writer, self.threads)
            time = rows & _TIME_MASK
            mine = uid == self.uid
            good = mine & (time <= view.own[thread])
            reader = tids if isinstance(tids, int) else tids[places][:, None]
            good |= mine & (thread == reader) & (time != NOT_YET)
            good |= uid < view.horizon[uid >> STREAM_SHIFT]
            ordered = good
            if fenced:
                copied = thread == self.threads
                good = good & (~mine | copied | (time <= view.fenced[thread]))
            if good.all():
                continue
            for other in np.unique(uid[~ordered]):
                clock = view.other.get(int(other))
                if clock is not None:
                    slot = np.minimum(writer, len(clock[0]) - 1)
                    known = (uid == other) & (time <= clock[0][slot])
                    ordered = ordered | known
                    if fenced:
                        known &= (slot == len(clock[0]) - 1) | (time <= clock[1][slot])
                    good = good | known
            if not good.all():
                row, column = np.argwhere(~good)[0]
                numbers = np.arange(len(records))[places]
                only_fence = bool(ordered[row, column])
                return int(numbers[row]), int(rows[row, column]), only_fence
        return None


def describe(record: int) -> tuple[int, int]:
    """(uid of the CTA, thread) of a record."""
    return record >> UID_SHIFT, record >> _TIME_BITS & _THREAD_MASK


def add_view(views: dict[int, View], view: View) -> None:
    """Views of different CTAs stay apart: joining them would lose what each knows of its fences."""
    known = views.get(view.uid)
    views[view.uid] = view if known is None else known.joined(view)
