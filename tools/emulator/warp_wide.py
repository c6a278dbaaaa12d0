"""Instructions in which the lanes of a warp look at each other."""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_ep_jit.tools.emulator.fault import Fault
from moe_ep_jit.tools.emulator.memory_access import wide

_LANES = np.arange(32)
_BITS = np.uint64(1) << np.arange(32, dtype=np.uint64)


class WarpWide:
    """The part of ``Threads`` that works on [warps, 32]."""

    def active_lanes(self, mask: Any) -> np.ndarray:
        """[warps, 32] bool: who takes part."""
        if mask is None:
            return self.full(np.True_).reshape(-1, 32)
        return wide(mask, self.count).reshape(-1, 32)

    def members(self, member: Any, mask: Any, what: str) -> np.ndarray:
        """Who takes part in a ``.sync`` instruction; all lanes that it names must."""
        active = self.active_lanes(mask)
        if mask is None:
            return active
        named = wide(member, self.count).reshape(-1, 32).astype(np.uint64)
        bits = (named[:, :, None] & _BITS).astype(bool)  # [warp, lane, named lane]
        missing = bits & ~active[:, None, :] & active[:, :, None]
        if missing.any():
            warp, lane, other = np.argwhere(missing)[0]
            if not self.has_ended(int(warp) * 32 + int(other)):
                raise Fault(
                    f"{what}: lane {lane} of warp {self.tids[warp * 32] // 32} names lane {other}, "
                    "which does not take part"
                )
        absent = active & ~bits[:, _LANES, _LANES]
        if absent.any():
            raise Fault(f"{what}: a lane takes part that its own member mask lacks")
        return active

    def has_ended(self, lane: int) -> bool:
        return self.gone is not None and bool(self.gone[lane])

    def shuffle(
        self, mode: str, value: np.ndarray, distance: Any, control: Any, member: Any, mask: Any
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """shfl.sync: (values, whether the source was in range)."""
        active = self.active_lanes(mask)
        if mask is not None:
            active = self.members(member, mask, f"shfl.sync.{mode}")
        values = wide(value, self.count).reshape(-1, 32)
        step = wide(distance, self.count).reshape(-1, 32).astype(np.int64) & 31
        packed = wide(control, self.count).reshape(-1, 32).astype(np.int64)
        clamp, segment = packed & 31, packed >> 8 & 31
        most = (_LANES & segment) | (clamp & ~segment)
        least = _LANES & segment
        if mode == "up":
            source = _LANES - step
            good = source >= most
        elif mode == "down":
            source = _LANES + step
            good = source <= most
        elif mode == "bfly":
            source = _LANES ^ step
            good = source <= most
        else:
            source = least | (step & ~segment)
            good = source <= most
        source = np.where(good, source, _LANES)
        flat = source + (np.arange(len(source)) * 32)[:, None]
        if mask is not None and (active & ~active.reshape(-1)[flat]).any():
            taken = np.take_along_axis(active, source, axis=1)
            warp, lane = np.argwhere(active & ~taken)[0]
            raise Fault(
                f"shfl.sync.{mode}: lane {lane} of warp {self.tids[warp * 32] // 32} reads lane "
                f"{source[warp, lane]}, which does not take part"
            )
        return values.reshape(-1)[flat.reshape(-1)], good.reshape(-1)

    def elect(self, member: Any, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """elect.sync: (the leader's lane, who is it)."""
        active = self.active_lanes(mask)
        leader = active.argmax(axis=1)
        leads = (leader[:, None] == _LANES) & active
        return np.repeat(leader, 32).astype(np.uint32), leads.reshape(-1)

    def _mask_of(self, bits: np.ndarray) -> np.ndarray:
        """[.., 32] bool to a uint32 mask."""
        return (bits * _BITS).sum(axis=-1, dtype=np.uint64).astype(np.uint32)

    def match_any(self, value: np.ndarray, member: Any, mask: Any) -> np.ndarray:
        active = self.members(member, mask, "match.any.sync")
        values = wide(value, self.count).reshape(-1, 32)
        same = (values[:, :, None] == values[:, None, :]) & active[:, None, :]
        return self._mask_of(same).reshape(-1)

    def vote(self, mode: str, predicate: Any, member: Any, mask: Any) -> np.ndarray:
        """vote.sync: bool for any, all, uni; a mask for ballot."""
        active = self.members(member, mask, f"vote.sync.{mode}")
        holds = wide(predicate, self.count).reshape(-1, 32) & active
        if mode == "ballot":
            return np.repeat(self._mask_of(holds), 32)
        if mode == "any":
            return np.repeat(holds.any(axis=1), 32)
        everyone = (holds == active).all(axis=1)
        return np.repeat(everyone if mode == "all" else everyone | ~holds.any(axis=1), 32)

    def active_mask(self, mask: Any) -> np.ndarray:
        return np.repeat(self._mask_of(self.active_lanes(mask)), 32)

    def reduce(self, operation: str, value: np.ndarray, member: Any, mask: Any) -> np.ndarray:
        """redux.sync over the lanes that take part."""
        active = self.members(member, mask, f"redux.sync.{operation}")
        values = wide(value, self.count).reshape(-1, 32)
        out = np.zeros(len(values), values.dtype)
        for warp in np.flatnonzero(active.any(axis=1)):
            mine = values[warp][active[warp]]
            function = {
                "max": np.max, "min": np.min, "add": np.sum, "or": np.bitwise_or.reduce,
                "and": np.bitwise_and.reduce, "xor": np.bitwise_xor.reduce,
            }[operation]  # fmt: skip
            out[warp] = function(mine)
        return np.repeat(out, 32)
