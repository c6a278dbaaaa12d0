"""Which expert each place holds, how many rows each place has had, and how ranks agree on a change.

A layer has ``num_experts`` places: rank r holds those from r * num_experts / num_ranks on. Routers
name logical experts; a busy one may sit in several places (redundant experts), so a token's row
goes to one of them. Places are called physical experts, as load balancers (EPLB) call them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from moe_ep_jit.problem import check

if TYPE_CHECKING:
    from moe_ep_jit.transport import Peers

#: 2^32 over the golden ratio: the multiples' high bits spread any run of numbers evenly.
_SPREAD = 0x9E3779B1

_STAYS = "nothing has changed on any rank"


class Topology:
    """The places of one layer's experts.

    load                 int64 [num_experts] on the device: rows (token, k) of this rank's tokens
                         that calls have sent to each place. Calls add to it, captured ones too; a
                         call with several ranks counts on each of them its own tokens alone
    physical_to_logical  the logical expert of each place; None: place e holds expert e
    """

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self.num_experts = num_experts
        self.device = device
        self.physical_to_logical: list[int] | None = None
        # Memory made under inference_mode could not be written outside of it.
        with torch.inference_mode(False):
            self.load = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self._tables: torch.Tensor | None = None

    def place(self, physical_to_logical: list[int]) -> None:
        """Take a checked map on the current stream, and count anew.

        Addresses stay from the first map on, so that a captured call uses the newest; one that was
        captured before the first must be captured again.
        """
        self.physical_to_logical = physical_to_logical
        self.load.zero_()
        held = torch.tensor(physical_to_logical)
        count = torch.bincount(held, minlength=self.num_experts)
        first = count.cumsum(0) - count
        tables = torch.stack([count, first, torch.argsort(held, stable=True)])
        if self._tables is None:
            with torch.inference_mode(False):
                self._tables = torch.empty_like(tables, device=self.device)
        self._tables.copy_(tables)

    def physical_ids(self, topk_ids: torch.Tensor, rank: int, max_tokens: int) -> torch.Tensor:
        """topk_ids [tokens, top_k] of logical experts -> the place of each, -1 for no expert.

        Without a map ``topk_ids`` itself. Of several places a row's number among those of all ranks
        decides, (rank * max_tokens + token) * top_k + k: equal calls choose alike, whatever else
        the router says, and neighbouring rows of one expert are spread over its places.
        """
        if self._tables is None:
            return topk_ids
        count, first, order = self._tables
        tokens, top_k = topk_ids.shape
        ids = topk_ids.long()
        valid = (ids >= 0) & (ids < self.num_experts)
        ids = torch.where(valid, ids, 0)
        row = torch.arange(tokens * top_k, device=self.device).view(tokens, top_k)
        row = (row + rank * max_tokens * top_k) & 0x7FFFFFFF
        spread = (row * _SPREAD & 0xFFFFFFFF) >> 16
        places = count[ids]
        chosen = order[(first[ids] + (spread * places >> 16)).clamp_(max=self.num_experts - 1)]
        return torch.where(valid & (places > 0), chosen, -1).int()

    def snapshot(self) -> ExpertLoad:
        """A copy of the counters, on its way to the host. Waits for nothing."""
        done = None
        if self.device.type == "cuda":
            host = torch.empty(self.num_experts, dtype=torch.int64, pin_memory=True)
            host.copy_(self.load, non_blocking=True)
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(self.device))
        else:
            host = self.load.clone()
        return ExpertLoad(host, self.physical_to_logical, done)

    def reset_load(self) -> None:
        """Count from zero again, on the current stream."""
        self.load.zero_()


class ExpertLoad:
    """The counters of a ``Topology`` at one moment of its stream."""

    def __init__(self, host: torch.Tensor, held: list[int] | None, done: Any) -> None:
        self._host, self._held, self._done = host, held, done

    def ready(self) -> bool:
        """Whether the copy has arrived, so that ``physical`` and ``logical`` do not wait."""
        return self._done is None or self._done.query()

    @property
    def physical(self) -> torch.Tensor:
        """int64 [num_experts] on the CPU: rows by place. Waits until ``ready``."""
        if self._done is not None:
            self._done.synchronize()
        return self._host

    @property
    def logical(self) -> torch.Tensor:
        """int64 on the CPU: rows by logical expert, as ``physical_to_logical`` was."""
        if self._held is None:
            return self.physical
        held = torch.tensor(self._held)
        return torch.zeros(int(held.max()) + 1, dtype=torch.int64).index_add_(
            0, held, self.physical
        )


def checked_map(physical_to_logical: Any, num_experts: int) -> list[int]:
    """The map as a list; ValueError unless it gives each place an expert and each expert a place.

    physical_to_logical  integers, a tensor or a sequence, [num_experts]
    """
    if isinstance(physical_to_logical, torch.Tensor):
        physical_to_logical = physical_to_logical.tolist()
    name = "physical_to_logical"
    fits = isinstance(physical_to_logical, Sequence) and all(
        isinstance(expert, int) and not isinstance(expert, bool) for expert in physical_to_logical
    )
    if not fits:
        raise TypeError(
            f"{name}: expected integers [num_experts={num_experts}], got {physical_to_logical!r}; "
            "pass one layer's row of the balancer's map"
        )
    held = list(physical_to_logical)
    check(
        len(held) == num_experts,
        f"{name}: expected [num_experts={num_experts}], a logical expert for each place, got "
        f"{len(held)}; redundant experts count as places: build the Problem with num_experts="
        f"{len(held)}",
    )
    check(min(held) >= 0, f"{name}: expected experts from 0 on, got {min(held)}; fill every place")
    missing = sorted(set(range(max(held) + 1)) - set(held))
    check(
        not missing,
        f"{name}: expected a place for every logical expert up to {max(held)}, got none for "
        f"{', '.join(map(str, missing[:8]))}; give each at least one",
    )
    return held


def map_facts(held: list[int] | None) -> dict[str, Any]:
    """What ranks compare of a map."""
    if held is None:
        return {"physical_to_logical": None}
    digest = hashlib.sha256(str(held).encode()).hexdigest()[:16]
    return {"physical_to_logical": f"a map of digest {digest}"}


def agree(peers: Peers | None, facts: dict[str, Any], error: Exception | None) -> None:
    """All ranks or none: raise unless every rank comes without an error and with equal ``facts``.

    peers  None: one rank alone
    error  what this rank cannot do; it raises that, the others what it says
    """
    if peers is None:
        if error is not None:
            raise error
        return
    words = None
    if error is not None:
        # What fails by itself on one rank is no argument of the others.
        kind = "ValueError" if isinstance(error, (ValueError, TypeError)) else "RuntimeError"
        words = [kind, f"{type(error).__name__}: {error}"]
    told = peers.tell({**facts, "failed": words}, "update_topology")
    if error is not None:
        raise error
    failed = {rank: theirs["failed"] for rank, theirs in enumerate(told) if theirs["failed"]}
    if failed:
        rank, (kind, why) = next(iter(failed.items()))
        message = f"update_topology: rank {rank} could not ({why}); {_STAYS}"
        raise ValueError(message) if kind == "ValueError" else RuntimeError(message)
    peers.check_same(told, f"make the same call on every rank; {_STAYS}")
