"""The collective transport: rows to the ranks of their experts and back, over torch.distributed.

A round is the exchange of the count matrix, which every rank waits for, an all-to-all of payload
rows, and an all-to-all of the experts' rows back. Any process group that moves the tensors' device
serves: gloo for CPUs, NCCL for GPUs. Every rank takes part in every round, with 0 tokens too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from typing import Any, NoReturn

import torch

from moe_ep_jit import formats, layout, reference
from moe_ep_jit.formats import BlockScaled
from moe_ep_jit.problem import ACTS, FORMATS, TRANSPORTS, WIRES, Problem, check

#: Seconds that a rank waits for the others in one phase, unless told otherwise.
TIMEOUT = 60.0

#: Where all ranks meet, by what messages and errors call it.
_PHASES = ("comparing problems", "warm-up", "count exchange", "update_topology", "reset")

#: What a rank posts in front of its counts.
_POST = ("layer (of those that share the buffers)", "format", "act", "payload")

#: int32 words of a message, at least: its phase, then what the phase says. Those that can meet are
#: of one size, since gloo ends the process where a message is longer than what waits for it.
_MESSAGE_WORDS = 1024

_MAX_TIMEOUT = 10.0**9
#: A word of JSON's white space.
_SPACES = 0x20202020
_AGAIN = (
    "The round is lost; see why that rank failed or is late, close this and make a new group and a "
    "new Workspace or Fleet"
)


def check_transport(transport: object) -> None:
    """ValueError unless this version has ``transport``."""
    check(
        transport in TRANSPORTS,
        f'transport: expected "collective" (torch.distributed) or "symm" (kernels over symmetric '
        f"memory, one NVLink domain), got {transport!r}",
    )


class Peers:
    """A torch.distributed group whose waits are bounded and whose failures name rank and phase.

    group    None: the default group, or no group at all for one rank
    timeout  seconds in one phase; 0: as long as the group's own timeout
    words    of a message; alike on every rank
    broken   what went wrong for good; None while the group is usable
    """

    def __init__(
        self, group: object | None, num_ranks: int, device: torch.device, timeout: float
    ) -> None:
        check(
            type(timeout) in (int, float) and 0 <= timeout <= _MAX_TIMEOUT,
            f"timeout: expected seconds (0: as long as the group waits), got {timeout!r}; leave it "
            f"out for {TIMEOUT:g}",
        )
        self.group = check_group(group, num_ranks)
        self.size = num_ranks
        self.rank = 0
        self.device = device
        self.timeout = timeout
        self.words = _MESSAGE_WORDS
        self.broken: str | None = None
        if self.group is not None:
            self.rank = torch.distributed.get_rank(self.group)

    def begin(self) -> None:
        """RuntimeError once a phase has failed: what is on the way could be taken for another."""
        if self.broken is not None:
            raise RuntimeError(f"expert parallelism: an earlier call failed: {self.broken}")

    def swap(self, said: torch.Tensor, phase: str, timeout: float | None = None) -> torch.Tensor:
        """said, int32 [n] with n below ``words`` -> what every rank said, [ranks, n] on the CPU.

        Returns once every rank has called. timeout None: ``self.timeout``.
        ValueError on every rank where they are in different phases.
        """
        self.begin()
        gathered = said.new_zeros(self.size, self.words)
        message = gathered[self.rank]
        message[0] = _PHASES.index(phase)
        message[1 : 1 + len(said)] = said
        others = [peer for peer in range(self.size) if peer != self.rank]
        if others:
            self._trade(gathered, message, others, phase, timeout)
        gathered = gathered.cpu()
        phases = [_PHASES[number] for number in gathered[:, 0].tolist()]
        check(
            len(set(phases)) == 1,
            f"{phase}: expected every rank to come to it, got {', '.join(phases)} by rank; make "
            "the same calls in the same order on every rank",
        )
        return gathered[:, 1 : 1 + len(said)]

    def _trade(
        self,
        gathered: torch.Tensor,
        message: torch.Tensor,
        others: Sequence[int],
        phase: str,
        timeout: float | None,
    ) -> None:
        """Send ``message`` to the others, and receive theirs into the rows of ``gathered``."""
        dist = torch.distributed
        ops = [
            (peer, dist.P2POp(op, tensor, group=self.group, group_peer=peer))
            for op, of in ((dist.irecv, gathered.__getitem__), (dist.isend, lambda _: message))
            for peer in others
            for tensor in (of(peer),)
        ]
        # One by one where that is allowed, so that each failure has a name; NCCL wants one batch.
        batches = [[op] for op in ops] if self.device.type == "cpu" else [ops]
        starts = [
            (
                [peer for peer, _ in batch],
                lambda batch=batch: dist.batch_isend_irecv([op for _, op in batch]),
            )
            for batch in batches
        ]
        self._finish(starts, phase, self.timeout if timeout is None else timeout)

    def all_to_all(
        self,
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
        recv_rows: Sequence[int],
        send_rows: Sequence[int],
        phase: str,
    ) -> None:
        """Each (received, sent), contiguous uint8 [rows, width]: the r-th rows go to rank r."""
        self.begin()
        if self.group is None:
            for received, sent in pairs:
                received.copy_(sent)
            return
        involved = [
            peer
            for peer in range(self.size)
            if peer != self.rank and (recv_rows[peer] or send_rows[peer])
        ]
        starts = [
            (
                involved,
                lambda pair=pair: [
                    torch.distributed.all_to_all_single(
                        *pair, list(recv_rows), list(send_rows), group=self.group, async_op=True
                    )
                ],
            )
            for pair in pairs
        ]
        self._finish(starts, phase, self.timeout)

    def compare(
        self,
        facts: dict[str, Any],
        phase: str = "comparing problems",
        timeout: float | None = None,
    ) -> list[dict[str, Any]]:
        """ValueError on every rank where ``facts``, JSON-able, differ, naming the fields.

        What begins with "_" may differ. Returns every rank's.
        """
        told = self.tell(facts, phase, timeout)
        self.check_same(told, "pass the same Problem on every rank")
        return told

    def tell(
        self, facts: dict[str, Any], phase: str, timeout: float | None = None
    ) -> list[dict[str, Any]]:
        """``facts``, JSON-able and of any length, to all ranks -> those of every rank."""
        text = json.dumps(facts).encode()
        text += b" " * (-len(text) % 4)
        words = torch.frombuffer(bytearray(text), dtype=torch.int32)
        room = self.words - 1
        length = torch.tensor([len(words)], dtype=torch.int32, device=self.device)
        longest = int(self.swap(length, phase, timeout).max())
        padded = words.new_full((layout.round_up(longest, room),), _SPACES)
        padded[: len(words)] = words
        pieces = [self.swap(part.to(self.device), phase, timeout) for part in padded.split(room)]
        return [json.loads(row.numpy().tobytes()) for row in torch.cat(pieces, 1)]

    def check_same(self, told: list[dict[str, Any]], fix: str) -> None:
        """ValueError naming the facts in which the ranks differ, with what to do."""
        different = []
        names = (name for theirs in told for name in theirs if not name.startswith("_"))
        for name in dict.fromkeys(names):
            ranks: dict[str, list[int]] = {}
            for rank, theirs in enumerate(told):
                ranks.setdefault(repr(theirs.get(name)), []).append(rank)
            if len(ranks) > 1:
                values = " and ".join(f"{value} on {_ranks(on)}" for value, on in ranks.items())
                different.append(f"{name}: expected the same on every rank, got {values}")
        check(not different, "; ".join(different) + f"; {fix}")

    def _finish(
        self,
        starts: list[tuple[list[int], Callable[[], list[Any]]]],
        phase: str,
        timeout: float,
    ) -> None:
        """Start every operation, each with the ranks that it needs, and wait for all of them."""
        began = time.monotonic()
        works, failures = [], []
        for peers, start in starts:
            try:
                works += [(peers, work) for work in start()]
            except RuntimeError as error:  # torch.distributed's own errors are RuntimeErrors
                failures.append((peers, error))
        for peers, work in works:
            left = began + timeout - time.monotonic()
            try:
                if timeout:
                    # Not below a millisecond: what has arrived meanwhile must still be taken.
                    work.wait(timedelta(seconds=max(left, 0.001)))
                else:
                    work.wait()
            except RuntimeError as error:
                failures.append((peers, error))
        if failures:
            self._fail(failures, phase, time.monotonic() - began, timeout)

    def _fail(
        self,
        failures: list[tuple[list[int], Exception]],
        phase: str,
        seconds: float,
        timeout: float,
    ) -> NoReturn:
        peers = sorted({peer for peers, _ in failures for peer in peers})
        exact = all(len(peers) == 1 for peers, _ in failures)
        who = _ranks(peers) if exact else f"one of {_ranks(peers)}"
        limit = f"timeout {timeout:g} s" if timeout else "the group's own timeout"
        error = failures[0][1]
        cause = " ".join(str(error).split())[:200]
        self.broken = (
            f"rank {self.rank} of {self.size}, phase {phase!r}: waited {seconds:.1f} s ({limit}) "
            f"for {who} ({cause}). {_AGAIN}"
        )
        raise RuntimeError(f"expert parallelism: {self.broken}") from error


@dataclass
class Route:
    """One round's routing, agreed by all ranks.

    problem       the layer's
    live          rows of x that count
    counts        int32 [num_experts]: of them to each expert
    slots         int64 [rows sent]: token * top_k + k of each, by expert, then in rising order
    row_of        int64 [live, top_k]: where a slot's row is among those sent; 0 where skipped
    valid         bool [live, top_k]: whether the id is an expert's
    expert_ids    int32 [rows received, 1]: the local expert of each, by source rank, then expert
    send_rows, recv_rows  rows to and from each rank
    topk_ids      over symmetric memory: those of the live rows, for the kernels
    """

    problem: Problem
    live: int
    counts: torch.Tensor
    slots: torch.Tensor
    row_of: torch.Tensor
    valid: torch.Tensor
    expert_ids: torch.Tensor
    rows_per_expert: list[int]
    send_rows: list[int]
    recv_rows: list[int]
    topk_ids: torch.Tensor | None = None


class Exchange:
    """The buffers and the phases of one rank's rounds.

    problems  of every layer that shares the buffers; alike on every rank
    ValueError, TypeError for a group that does not fit and, on every rank and before anything is
    allocated, for problems that differ; RuntimeError for a rank that does not come.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        group: object | None,
        device: torch.device,
        timeout: float = TIMEOUT,
    ) -> None:
        self.problems = tuple(problems)
        self.device = device
        self.peers = Peers(group, problems[0].num_ranks, device, timeout)
        self.peers.compare(layer_facts(self.problems))
        self.peers.words = message_words(self.problems)
        need = max(map(layout.exchange_bytes, self.problems))
        try:
            # Memory made under inference_mode could not be written outside of it.
            with torch.inference_mode(False):
                self._memory = torch.empty(need, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"exchange between ranks: {need} bytes do not fit on {device}; lower max_tokens or "
                "bound max_recv_rows"
            ) from error

    def route(self, problem: Problem, topk_ids: torch.Tensor, live: int) -> Route:
        """Agree on a round: the count matrix of all ranks. Each rank calls it, whatever ``live``.

        problem   one of the layers that share the buffers, format and act resolved
        topk_ids  [tokens, top_k] int32 or int64, of which the first ``live`` rows are read
        ValueError on every rank, before any row moves, where one would receive more than
        ``max_recv_rows``, and where the ranks call different layers.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "expert parallelism: the collective transport waits on the host for the counts and "
                "cannot be captured in a CUDA graph; call it outside of the capture"
            )
        experts, top_k = problem.num_experts, problem.top_k
        ids = topk_ids[:live].reshape(-1).long()
        valid = (ids >= 0) & (ids < experts)
        key = torch.where(valid, ids, experts)
        counts = torch.bincount(key, minlength=experts + 1)[:experts].int()
        matrix = self.peers.swap(self._words(problem, counts), "count exchange")
        by_expert = self._checked(problem, matrix)

        first = self.peers.rank * problem.num_local_experts
        to_rank = by_expert.view(len(matrix), problem.num_ranks, -1).sum(-1)
        mine = by_expert[:, first : first + problem.num_local_experts]
        send_rows = to_rank[self.peers.rank].tolist()
        slots = torch.argsort(key, stable=True)[: sum(send_rows)]
        row_of = torch.zeros_like(key)
        row_of[slots] = torch.arange(len(slots), device=self.device)
        local = torch.arange(problem.num_local_experts, dtype=torch.int32)
        expert_ids = local.repeat(len(mine)).repeat_interleave(mine.flatten())
        return Route(
            problem=problem,
            live=live,
            counts=counts,
            slots=slots,
            row_of=row_of.view(live, top_k),
            valid=valid.view(live, top_k),
            expert_ids=expert_ids.view(-1, 1).to(self.device),
            rows_per_expert=mine.sum(0).tolist(),
            send_rows=send_rows,
            recv_rows=to_rank[:, self.peers.rank].tolist(),
        )

    def dispatch(self, route: Route, x: torch.Tensor | BlockScaled) -> torch.Tensor | BlockScaled:
        """x [tokens, hidden] bf16, or BlockScaled in the payload's format -> rows received.

        Rounded to the payload once, before the wire. The result is [rows, hidden] in the order of
        ``route.expert_ids``: a view that dies with the next dispatch.
        """
        problem, payload = route.problem, route.problem.payload
        if isinstance(x, torch.Tensor) and payload != "bf16":
            x = formats.quantize(x[: route.live], payload)
        token = route.slots // problem.top_k
        sent = self._arrays("send_rows", problem, payload, len(token))
        received = self._arrays("recv_rows", problem, payload, sum(route.recv_rows))
        for array, out in zip(bytes_of(x, route.live), sent, strict=True):
            torch.index_select(array, 0, token, out=out)
        pairs = zip(received, sent, strict=True)
        self.peers.all_to_all(pairs, route.recv_rows, route.send_rows, "dispatch")
        return operand_from(payload, received)

    def combine(
        self, route: Route, y: torch.Tensor, topk_weights: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """y bf16 [rows received, hidden], contiguous -> ``out[:live]``, bf16 [live, hidden].

        Each token's rows, as ``reference.carried`` has them, times their weights (None: 1),
        k = 0..top_k-1 in fp32.
        """
        problem, wire = route.problem, route.problem.combine_wire
        returned = self._arrays("returned", problem, wire, problem.max_tokens * problem.top_k)
        sent = bytes_of(y if wire == "bf16" else formats.quantize(y, wire), len(y))
        received = [array[: len(route.slots)] for array in returned]
        pairs = zip(received, sent, strict=True)
        self.peers.all_to_all(pairs, route.send_rows, route.recv_rows, "combine")
        if topk_weights is None:
            scales = torch.ones(route.valid.shape, device=self.device)
        else:
            scales = topk_weights[: route.live].float()
        rows = (
            _values(operand_from(wire, [a.index_select(0, route.row_of[:, k]) for a in returned]))
            for k in range(problem.top_k)
        )
        out[: route.live] = reference.weighted_sum(rows, route.valid, scales).to(out.dtype)

    def close(self) -> None:
        """Wait for the device and give the buffers back. Views that were returned stay valid."""
        # After a failure the device may be waiting for a rank that does not come.
        if self.device.type == "cuda" and self.peers.broken is None:
            torch.cuda.synchronize(self.device)
        self._memory = None

    def _words(self, problem: Problem, counts: torch.Tensor) -> torch.Tensor:
        """What a rank posts: which layer it calls and how, then its rows for each expert."""
        layer = next(i for i, held in enumerate(self.problems) if _same_layer(held, problem))
        fmt, act = (*FORMATS, "auto").index(problem.format), (*WIRES, "auto").index(problem.act)
        wire = WIRES.index(problem.payload)
        facts = torch.tensor([layer, fmt, act, wire], dtype=torch.int32, device=self.device)
        return torch.cat([facts, counts])

    def _checked(self, problem: Problem, matrix: torch.Tensor) -> torch.Tensor:
        """The posts of all ranks -> int64 counts [ranks, experts]; the errors that all see."""
        for column, name in enumerate(_POST):
            values = matrix[:, column].tolist()
            check(
                len(set(values)) == 1,
                f"round: expected every rank to call the same {name}, got numbers {values} by "
                "rank; call the layers in the same order, prepared alike, on every rank",
            )
        by_expert = matrix[:, len(_POST) :].long()
        rows = by_expert.sum(0).view(problem.num_ranks, -1).sum(-1).tolist()
        over = {rank: n for rank, n in enumerate(rows) if n > problem.recv_rows}
        check(
            not over,
            f"max_recv_rows: expected at most {problem.recv_rows} rows of (token, k) for a rank, "
            f"got {', '.join(f'{n} for rank {rank}' for rank, n in over.items())}; raise it, or "
            "split the batch (no row has moved)",
        )
        return by_expert

    def _region(self, name: str, problem: Problem) -> torch.Tensor:
        if self._memory is None:
            raise RuntimeError("exchange between ranks: it is closed; build a new one")
        region = layout.exchange_regions(problem)[name]
        return self._memory[region.offset : region.offset + region.nbytes]

    def _arrays(self, name: str, problem: Problem, payload: str, rows: int) -> list[torch.Tensor]:
        """uint8 [rows, width] for each array of the payload, in region ``name``."""
        region, found, start = self._region(name, problem), [], 0
        for width in layout.wire_parts(problem.hidden, payload).values():
            found.append(region[start : start + rows * width].view(rows, width))
            start += layout.round_up(rows * width, layout.WIRE_ALIGN)
        return found


def message_words(problems: Sequence[Problem]) -> int:
    """int32 words of every message of layers that share buffers: as the longest post, so that ranks
    that call different ones meet.
    """
    return max(_MESSAGE_WORDS, 1 + len(_POST) + max(p.num_experts for p in problems))


def layer_facts(problems: Sequence[Problem]) -> dict[str, Any]:
    """What must be alike on every rank, by the name that a message gives it."""
    facts: dict[str, Any] = {"number of problems": len(problems)}
    for index, problem in enumerate(problems):
        prefix = "problem." if len(problems) == 1 else f"problem[{index}]."
        values = asdict(problem)
        if problem.format != "auto" and problem.act == "auto":
            values["act"] = ACTS[problem.format][0]
        if problem.wire == "auto":
            values["wire"] = values["act"]
        facts |= {prefix + name: value for name, value in values.items()}
    return facts


def _same_layer(held: Problem, problem: Problem) -> bool:
    """Whether ``problem`` is ``held``, perhaps with format and act resolved."""
    names = (f.name for f in fields(Problem) if f.name not in ("format", "act"))
    return all(getattr(held, name) == getattr(problem, name) for name in names)


def check_may_move(stays: bool, transport: str) -> None:
    """ValueError for another group where the memory belongs to the one at construction."""
    check(
        stays or transport == "collective",
        'update_topology: expected transport="collective" for another group (symmetric memory '
        f"belongs to the group that it was made in), got {transport!r}; close this and build anew "
        "with the other group",
    )


def group_size(group: object | None) -> int:
    """Ranks of a group, None being the default group; 1 where there is none."""
    dist = torch.distributed
    there = dist.is_available() and dist.is_initialized()
    if not there or not (group is None or isinstance(group, dist.ProcessGroup)):
        return 1
    return dist.get_world_size(group)


def check_group(group: object | None, num_ranks: int) -> Any:
    """The group to use, None where one rank needs none; TypeError, ValueError for a wrong one."""
    import torch.distributed as dist  # not built into every torch

    if group is None and num_ranks == 1:
        return None
    if not dist.is_available():
        raise RuntimeError(
            "group: expected a torch with torch.distributed for several ranks, got one without; "
            "run: pip install torch"
        )
    if group is None:
        check(
            dist.is_initialized(),
            f"group: expected a torch.distributed group of num_ranks={num_ranks}, got None and no "
            "default group; call torch.distributed.init_process_group first",
        )
        group = dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "group: expected one that this process belongs to, got one of others; build it in the "
            "group's own processes alone"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group: expected None or a torch.distributed group, got {type(group).__name__}"
        )
    ranks = dist.get_world_size(group)
    check(
        ranks == num_ranks,
        f"group: expected num_ranks={num_ranks} ranks, got a group of {ranks}; pass a group of "
        f"that size, or a Problem with num_ranks={ranks}",
    )
    return None if num_ranks == 1 else group


def bytes_of(x: torch.Tensor | BlockScaled, live: int) -> list[torch.Tensor]:
    """The first ``live`` rows of x as uint8 [live, width], one for each of ``wire_parts``."""
    if isinstance(x, torch.Tensor):
        return [x[:live].view(torch.uint8)]
    arrays = [x.data[:live].view(torch.uint8), x.sf[:live].view(torch.uint8)]
    if x.global_scale is not None:
        scale = x.global_scale.expand(x.shape[:1])[:live].contiguous()
        arrays.append(scale.view(-1, 1).view(torch.uint8))
    return arrays


def operand_from(payload: str, arrays: list[torch.Tensor]) -> torch.Tensor | BlockScaled:
    """What arrived as x of a layer: the inverse of ``bytes_of``, a view."""
    if payload == "bf16":
        return arrays[0].view(torch.bfloat16)
    if payload == "mxfp8":
        return BlockScaled(formats.MXFP8, arrays[0].view(torch.float8_e4m3fn), arrays[1])
    data, sf, scale = arrays
    scale = scale.view(torch.float32).view(-1)
    return BlockScaled(formats.NVFP4, data, sf.view(torch.float8_e4m3fn), scale)


def _values(x: torch.Tensor | BlockScaled) -> torch.Tensor:
    return formats.dequantize(x) if isinstance(x, BlockScaled) else x


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
