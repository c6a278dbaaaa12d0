"""The transport alone: tokens to the ranks of their experts and back, for one's own experts."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch

from moe_ep_jit import reference, variants
from moe_ep_jit.formats import BlockScaled, check_rows
from moe_ep_jit.problem import Problem, check, check_problem
from moe_ep_jit.symmetric_exchange import SymmetricExchange
from moe_ep_jit.topology import Topology, agree, checked_map, map_facts
from moe_ep_jit.transport import (
    TIMEOUT,
    Exchange,
    Peers,
    Route,
    check_may_move,
    check_transport,
    group_size,
)

_IDS = (torch.int32, torch.int64)


def create_fleet(
    problem: Problem,
    group: object | None = None,
    transport: str = "collective",
    *,
    device: torch.device | str | None = None,
    timeout: float = TIMEOUT,
    backend: str = "auto",
) -> Fleet:
    """The ranks of ``group`` as one fleet; every rank calls this, and everything else, together.

    problem    alike on every rank; of it hidden, num_experts, num_ranks, top_k, max_tokens,
               max_recv_rows and the payload (``wire``, by default ``act``, which for "auto" is the
               format's own; format "auto" sends bf16) matter
    group      a torch.distributed group of ``num_ranks``; None: the default group
    transport  "collective": torch.distributed; "symm": kernels over symmetric memory, in one NVLink
               domain
    device     where the tensors are; None: the current CUDA device where there is one, else the CPU
    timeout    seconds that a rank waits for the others in one phase; 0: the group's own timeout
    backend    of "symm": as ``Workspace`` takes it ("emulator" for CPU tensors)
    ValueError, TypeError: a caller's mistake, on every rank where problems differ. RuntimeError: a
    rank that does not come, or no such device.
    """
    check_problem(problem)
    check_transport(transport)
    if problem.payload == "auto":
        if problem.format == "auto":
            problem = problem.with_(act="bf16")
        else:
            problem = variants.choose_variant(problem, None).problem
    device = variants.usable_device(device)
    if transport == "symm" and problem.num_ranks > 1:
        exchange = SymmetricExchange(problem, group, device, timeout, backend)
    else:
        exchange = Exchange([problem], group, device, timeout)
    return Fleet(problem, exchange, transport, timeout)


class Fleet:
    """What ``create_fleet`` returns: the buffers of one rank.

    problem   with the payload decided
    rank      this one, 0..problem.num_ranks - 1
    topology  which expert each place holds, and the rows that handles have sent to each (``load``)
    """

    def __init__(
        self, problem: Problem, exchange: Exchange, transport: str, timeout: float
    ) -> None:
        self.problem = problem
        self.device = exchange.device
        self.rank = exchange.peers.rank
        self.topology = Topology(problem.num_experts, self.device)
        self._transport, self._timeout = transport, timeout
        self._generation = 0  # of the topology; handles of an older one are void
        self._exchange: Exchange | None = exchange

    @property
    def closed(self) -> bool:
        """True once ``close`` has given the buffers back."""
        return self._exchange is None

    def handle(self, topk_ids: torch.Tensor, *, num_tokens: torch.Tensor | None = None) -> Handle:
        """Agree with all ranks on where the tokens of ``topk_ids`` go.

        topk_ids    [tokens, top_k] int32 or int64; an id that is no expert's (-1) goes nowhere
        num_tokens  int32 tensor of one element: rows at and beyond it are not read; None: all count
        ValueError, TypeError: a caller's mistake; on every rank and before any row moves where one
        would receive more than ``max_recv_rows``. RuntimeError: a closed fleet, a rank that does
        not come.
        """
        exchange, problem = self._open(), self.problem
        if not isinstance(topk_ids, torch.Tensor) or topk_ids.dtype not in _IDS:
            got = getattr(topk_ids, "dtype", type(topk_ids).__name__)
            raise TypeError(
                f"topk_ids: expected an int32 or int64 tensor, got {got}; pass it through "
                ".to(torch.int32)"
            )
        shape = tuple(topk_ids.shape)
        check(
            len(shape) == 2 and shape[0] <= problem.max_tokens and shape[1] == problem.top_k,
            f"topk_ids: expected [at most max_tokens={problem.max_tokens}, top_k={problem.top_k}], "
            f"got {list(shape)}; create the fleet for more, or split the batch",
        )
        self._check_device("topk_ids", topk_ids)
        if num_tokens is not None:
            check(
                isinstance(num_tokens, torch.Tensor) and num_tokens.numel() == 1,
                f"num_tokens: expected an int32 tensor of one element, got {num_tokens!r}; pass "
                "torch.tensor([n], dtype=torch.int32)",
            )
        live = reference.live_tokens(shape[0], num_tokens)
        topk_ids = self.topology.physical_ids(topk_ids, self.rank, problem.max_tokens)
        route = exchange.route(problem, topk_ids, live)
        self.topology.load.add_(route.counts)
        return Handle(self, route, shape[0])

    def update_topology(
        self,
        physical_to_logical: torch.Tensor | Sequence[int] | None = None,
        *,
        group: object | None = None,
    ) -> None:
        """Say which logical expert each place holds, or move to another group, or both.

        physical_to_logical  integers, the same on every rank: a logical expert may have several
                             places (redundant experts), and each has one. topk_ids then name
                             logical experts. None: place e holds expert e
        group                None: the present one, and the only one with transport "symm". With
                             another the places are spread over as many ranks as it has, and there
                             may be more or fewer of them

        Every rank (of the new group, those of the old need not) calls it; moving the experts is the
        caller's. Handles made before are void. The load counters start anew. All or nothing: where
        one rank cannot, that is an error on every rank, and the fleet stays as it was. ValueError,
        TypeError for a caller's mistake; RuntimeError for a rank that does not come.
        """
        old = self._open()
        check_may_move(group is None, self._transport)
        problem, peers, fresh, held, error = self.problem, old.peers, None, None, None
        if group is not None:
            peers = Peers(group, group_size(group), self.device, self._timeout)
        try:
            places = problem.num_experts
            if group is not None and physical_to_logical is not None:
                places = len(physical_to_logical)
            if physical_to_logical is not None:
                held = checked_map(physical_to_logical, places)
            problem = problem.with_(num_ranks=peers.size, num_experts=places)
        except Exception as failure:  # whatever it is, the others wait for this rank's word
            error = failure
        agree(peers, map_facts(held), error)
        if group is not None:
            try:
                fresh = Exchange([problem], group, self.device, self._timeout)
            except Exception as failure:
                error = failure
            try:
                agree(peers, {}, error)
            except Exception:
                if fresh is not None:
                    fresh.close()
                raise
            old.close()
            self._exchange = fresh
        self._generation += 1
        self.problem, self.rank = problem, peers.rank
        if len(self.topology.load) != problem.num_experts:
            self.topology = Topology(problem.num_experts, self.device)
        self.topology.place(list(range(problem.num_experts)) if held is None else held)

    def close(self) -> None:
        """Give the buffers back; further calls raise. Twice is fine; waits for no other rank."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except RuntimeError:  # what the body met comes first
            if error is None:
                raise

    def _open(self) -> Exchange:
        if self._exchange is None:
            raise RuntimeError("fleet: it is closed; call create_fleet again on every rank")
        return self._exchange

    def _check_device(self, name: str, tensor: torch.Tensor) -> None:
        check(
            tensor.device == self.device,
            f"{name}: expected on the fleet's device {self.device}, got {tensor.device}; move it",
        )


class Handle:
    """One routing, agreed by all ranks; ``dispatch`` and ``combine`` may be called repeatedly.

    num_rows         rows that this rank receives, one per (token, k) of any rank
    expert_ids       int32 [num_rows]: local expert of each, ordered by source rank, then expert;
                     over symmetric memory by expert, then source rank
    rows_per_expert  rows of each local expert
    """

    def __init__(self, fleet: Fleet, route: Route, tokens: int) -> None:
        self._fleet: Fleet | None = fleet
        self._generation = fleet._generation
        self._route = route
        self._tokens = tokens
        self.expert_ids = route.expert_ids.view(-1)
        self.rows_per_expert = route.rows_per_expert
        self.num_rows = len(self.expert_ids)

    def dispatch(self, x: torch.Tensor | BlockScaled) -> torch.Tensor | BlockScaled:
        """x [tokens, hidden] bf16 -> the rows that this rank's experts get, [num_rows, hidden].

        Rounded once, before the wire, to ``problem.payload``: bf16, or BlockScaled in it. An x that
        is BlockScaled in it goes as it is. The result is a view that dies with the fleet's next
        dispatch, and over symmetric memory with a combine that is not the first after this.
        ValueError, TypeError for another x; RuntimeError for a rank that does not come.
        """
        fleet, exchange = self._open()
        problem = fleet.problem
        if isinstance(x, BlockScaled):
            check(
                x.format.name == problem.payload,
                f"x: expected bf16 or BlockScaled in {problem.payload} (what crosses the wire), "
                f'got {x.format.name}; create the fleet with act="bf16", wire="{x.format.name}"',
            )
            fleet._check_device("x", x.data)
        else:
            _check_bf16("x", x)
            fleet._check_device("x", x)
        check(
            tuple(x.shape) == (self._tokens, problem.hidden),
            f"x: expected [tokens={self._tokens}, hidden={problem.hidden}], got {list(x.shape)}; "
            "pass the tokens that the handle's topk_ids route",
        )
        if isinstance(x, torch.Tensor):
            x = _walkable(x)
        return exchange.dispatch(self._route, x)

    def combine(
        self,
        y: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The experts' rows back to their tokens: the sum over k, in fp32, bf16 [tokens, hidden].

        y             bf16 [num_rows, hidden] in the order of ``expert_ids``
        topk_weights  [tokens, top_k] of any float type; None: 1 each
        out           None: a new tensor; else bf16 [>= tokens, hidden], returned as it is. Rows
                      behind the live count are not written (of a new tensor: zeros)
        ValueError, TypeError for a caller's mistake; RuntimeError for a rank that does not come.
        """
        fleet, exchange = self._open()
        hidden, tokens = fleet.problem.hidden, self._tokens
        _check_bf16("y", y)
        fleet._check_device("y", y)
        check(
            tuple(y.shape) == (self.num_rows, hidden),
            f"y: expected [num_rows={self.num_rows}, hidden={hidden}], got {list(y.shape)}; pass a "
            "row for each row that dispatch gave",
        )
        if topk_weights is not None:
            want = (tokens, fleet.problem.top_k)
            check(
                isinstance(topk_weights, torch.Tensor) and tuple(topk_weights.shape) == want,
                f"topk_weights: expected None or a tensor {list(want)}, got "
                f"{list(getattr(topk_weights, 'shape', ()))}",
            )
            fleet._check_device("topk_weights", topk_weights)
        if out is None:
            out = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device=fleet.device)
        _check_bf16("out", out)
        fleet._check_device("out", out)
        check(
            out.dim() == 2 and len(out) >= tokens and out.shape[1] == hidden,
            f"out: expected [at least tokens={tokens}, hidden={hidden}], got {list(out.shape)}; "
            "pass a larger buffer",
        )
        check_rows("out", out, tokens)
        check(
            tokens < 2 or out.stride(0) >= hidden,
            f"out: expected rows that do not overlap (row stride at least {hidden}), got row "
            f"stride {out.stride(0)}; pass a buffer that is not expanded",
        )
        exchange.combine(self._route, _walkable(y), topk_weights, out)
        return out

    def close(self) -> None:
        """Let go of the fleet; further calls raise. Twice is fine; waits for no other rank."""
        self._fleet = None

    def _open(self) -> tuple[Fleet, Exchange]:
        if self._fleet is None:
            raise RuntimeError("handle: it is closed; call fleet.handle again on every rank")
        if self._generation != self._fleet._generation:
            raise RuntimeError(
                "handle: update_topology has moved the experts since; call fleet.handle again on "
                "every rank"
            )
        return self._fleet, self._fleet._open()


def _walkable(rows: torch.Tensor) -> torch.Tensor:
    """bf16 [rows, hidden] in one piece, on 16 bytes: ``rows`` itself where it is so."""
    if rows.is_contiguous() and rows.data_ptr() % 16 == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def _check_bf16(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype is not torch.bfloat16:
        got = getattr(tensor, "dtype", type(tensor).__name__)
        raise TypeError(f"{name}: expected a bf16 tensor, got {got}; convert it to torch.bfloat16")
    check(not tensor.requires_grad, f"{name}: expected no grad, got one; pass {name}.detach()")
