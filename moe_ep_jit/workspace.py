"""The memory of a forward: regions, output buffers, error record; all taken at construction."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from moe_ep_jit import layout, variants
from moe_ep_jit.problem import Problem, check, check_problem
from moe_ep_jit.record import explain
from moe_ep_jit.symmetric import Symmetric, check_problems, host_peers, meet
from moe_ep_jit.topology import agree
from moe_ep_jit.transport import (
    TIMEOUT,
    Exchange,
    Peers,
    check_group,
    check_may_move,
    check_transport,
    group_size,
)

if TYPE_CHECKING:
    from moe_ep_jit.weights import PreparedWeights

_DTYPES = {
    "u8": torch.uint8,
    "i32": torch.int32,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
}
_BF16_BYTES = 2

#: Values of MOE_EP_JIT_DEBUG, in any case, that leave debugging off.
_OFF = ("", "0", "no", "false", "off")

#: Of both ways to change a topology.
IN_ROUND = (
    "update_topology: expected no round in progress, got one; finish it with combine, or drop it "
    "with ws.reset()"
)


class Workspace:
    """All memory that ``moe_forward`` uses, for one layer or for several that share it.

    problem   the layer's ``Problem``, or several: regions are sized by the largest of them
    group     a ``torch.distributed`` group of ``num_ranks`` ranks; None: the default group, or none
              at all for one rank. Its ranks build their workspaces together
    device    None: the current CUDA device where there is one, else the CPU
    backend   "auto": kernels on CUDA, else the reference; "reference": the reference anywhere;
              "emulator": the kernels, by the PTX emulator on CPU tensors
    debug     two output buffers alternate, and the one before is filled with NaN by the next call;
              None: what ``MOE_EP_JIT_DEBUG`` says (empty, 0, no, false and off mean off)
    operand   "e4m3" or "bf16", where weights turned out to need another than the problem's own
              (``weights.operand``); None: ``variants.operand_of(problem, arch)``
    transport what several ranks exchange rows over. "collective": torch.distributed; "symm": the
              kernels write them to each other's memory, in one NVLink domain
    timeout   seconds that a rank waits for the others in one phase of a call; 0: as long as the
              group's own timeout (collective), for ever (symm)

    With several ranks every call is a call of all ranks, with 0 tokens too, in one order. Where the
    transport is collective, ``local`` is the one-rank workspace of the rank's own experts, whose
    tokens are the rows that arrive.

    A workspace serves one stream at a time. A result that is a view of ``output`` dies with the
    next call of any layer that shares the workspace; its memory stays valid as long as the view.
    ValueError, TypeError for a caller's mistake, problems that differ between ranks among them (on
    every rank); RuntimeError on a CUDA device that is missing or has no kernels, while a graph is
    captured, and for a rank that does not come.
    """

    def __init__(
        self,
        problem: Problem | Iterable[Problem],
        group: object | None = None,
        *,
        device: torch.device | str | None = None,
        backend: str = "auto",
        debug: bool | None = None,
        operand: str | None = None,
        transport: str = "collective",
        timeout: float = TIMEOUT,
    ) -> None:
        self._closed = True  # until everything below has succeeded
        self._options = {"backend": backend, "operand": operand, "transport": transport}
        self._options["timeout"] = timeout
        self.problems = _problems(problem)
        check_transport(transport)
        if self.problems[0].num_ranks == 1:
            check_group(group, 1)
        self.device = device = variants.usable_device(device)
        self.arch = variants.resolve_backend(device, backend)
        #: tools.emulator.layer.Emulator with backend="emulator", else None.
        self.emulator = _emulator() if backend == "emulator" else None
        self.on_gpu = self.arch is not None and self.emulator is None
        if self.on_gpu and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "Workspace: a CUDA graph is being captured; build the workspace, and call "
                "moe_ep_jit.warmup, before the capture"
            )
        if debug is None:
            debug = os.environ.get("MOE_EP_JIT_DEBUG", "").strip().lower() not in _OFF
        self.debug = bool(debug)
        sizes = [layout.workspace_bytes(p, _operand(p, operand, self.arch)) for p in self.problems]
        self.operand = operand
        #: transport.Exchange and the experts' own Workspace, with several ranks.
        self.exchange: Exchange | None = None
        self.local: Workspace | None = None
        #: transport.Peers for meetings on the host, and the memory, with transport="symm".
        self.peers: Peers | None = None
        self.symmetric: Symmetric | None = None
        #: Whether all ranks have warmed up for any weights.
        self.is_warm = False
        self._timeout = timeout
        if self.problems[0].num_ranks > 1 and transport == "symm":
            check_problems(self.problems)
            self.peers = host_peers(group, self.problems[0].num_ranks, device, timeout)
            operands = [_operand(p, operand, self.arch) for p in self.problems]
            meet(self.problems, operands, self.peers, device, self.arch)
        elif self.problems[0].num_ranks > 1:
            self.exchange = Exchange(self.problems, group, device, timeout)
            own = [p.local for p in self.problems]
            self.local = Workspace(
                own, device=device, backend=backend, debug=False, operand=operand
            )
            # The kernels run on the regions of ``local``.
            self.arch, self.emulator, self.on_gpu = None, None, False
        self.nbytes_regions = max(sizes) if self.arch is not None else 0
        #: The round that the stage functions have begun: api.Round, None between calls.
        self.round: Any = None
        #: What the reference's stages leave for the next: reference.Stages.
        self.reference: Any = None
        #: launch.Binding by the id of its weights.
        self.bindings: dict[int, Any] = {}
        #: Host functions that warmup or a call has loaded, by what launch.py names them.
        self.functions: dict[tuple[Any, ...], Any] = {}
        self._streams: set[int] = set()
        #: Which of the output buffers holds the newest result.
        self.turn = 0
        # Memory made under inference_mode could not be written outside of it.
        with torch.inference_mode(False):
            self._allocate()
        self._closed = False

    def _allocate(self) -> None:
        """Take everything; on a GPU wait until ``control`` is zero, whatever stream comes next."""
        elements = max(p.max_tokens * p.hidden for p in self.problems)
        try:
            self._outputs = [
                torch.empty(elements, dtype=torch.bfloat16, device=self.device)
                for _ in range(2 if self.debug else 1)
            ]
            if self.peers is not None:
                self.symmetric = Symmetric(self.nbytes_regions, self.peers, self.device)
                raw = self.symmetric.tensor
            else:
                raw = torch.empty(
                    self.nbytes_regions + (layout.REGION_ALIGN if self.nbytes_regions else 0),
                    dtype=torch.uint8,
                    device=self.device,
                )
        except torch.OutOfMemoryError as error:
            need = self.nbytes_regions + elements * _BF16_BYTES * (2 if self.debug else 1)
            raise torch.OutOfMemoryError(
                f"Workspace: {need} bytes do not fit on {self.device}; lower max_tokens or bound "
                "max_recv_rows (Workspace.bytes_needed tells the size beforehand)"
            ) from error
        if self.debug:
            for output in self._outputs:
                output.fill_(float("nan"))
        start = -raw.data_ptr() % layout.REGION_ALIGN if self.nbytes_regions else 0
        self._regions = raw[start : start + self.nbytes_regions]
        self._record = _error_record(pinned=self.on_gpu)
        # Read on every call: a ctypes view costs 0.1 us, Tensor.item() ten times that.
        self._error = (ctypes.c_int32 * layout.ERROR_WORDS).from_address(self._record.data_ptr())
        if self.arch is not None:
            self._control().zero_()
            if self.peers is not None:
                record = self._record.data_ptr()
                self.symmetric.introduce(self._control(), self.peers, record, self._timeout)
            if self.on_gpu:
                torch.cuda.current_stream(self.device).synchronize()
            if self.peers is not None:
                self.peers.compare({})  # nobody writes to a rank before its words are zero

    @staticmethod
    def bytes_needed(
        problem: Problem | Iterable[Problem],
        operand: str | None = None,
        debug: bool = False,
        arch: str | None = None,
        transport: str = "collective",
    ) -> int:
        """Bytes of device memory that a workspace for ``problem`` takes, its output included.

        Known before anything is allocated and independent of how many layers share the workspace.
        arch  exact arch whose kernels will run; None: Hopper's
        """
        check_transport(transport)
        problems = _problems(problem)
        output = max(p.max_tokens * p.hidden for p in problems) * _BF16_BYTES
        output *= 2 if debug else 1
        several = problems[0].num_ranks > 1
        if several and transport == "collective":
            own = Workspace.bytes_needed([p.local for p in problems], operand, arch=arch)
            return own + max(map(layout.exchange_bytes, problems)) + output
        regions = max(layout.workspace_bytes(p, _operand(p, operand, arch)) for p in problems)
        return regions + output + (0 if several else layout.REGION_ALIGN)

    @property
    def closed(self) -> bool:
        """True once ``close`` has given the memory back."""
        return self._closed

    @property
    def output(self) -> torch.Tensor:
        """The buffer of the newest result, bf16 [max_tokens, hidden] of the first problem."""
        return self.output_of(self.problems[0])

    def output_of(self, problem: Problem) -> torch.Tensor:
        """The buffer of the newest result as ``problem`` sees it, bf16 [max_tokens, hidden]."""
        return self.outputs_of(problem)[self.turn]

    def outputs_of(self, problem: Problem) -> list[torch.Tensor]:
        """All output buffers as ``problem`` sees them: one, or two in debug mode."""
        self._check_open()
        shape = (problem.max_tokens, problem.hidden)
        return [output[: prod(shape)].view(shape) for output in self._outputs]

    @property
    def base_address(self) -> int:
        """Address of the first region."""
        self._check_open()
        return self._regions.data_ptr()

    @property
    def error_address(self) -> int:
        """Address of the error record: pinned, so the device knows it by the same one."""
        self._check_open()
        return self._record.data_ptr()

    def views(self, problem: Problem | None = None, operand: str | None = None) -> dict[str, Any]:
        """Named tensors over the workspace's own memory, as ``problem`` (None: the first) sees it.

        "output" always; on a GPU every region of ``layout.regions`` too (e4m3 values as uint8).
        ValueError for a problem or an operand that needs more than the workspace holds.
        """
        problem = self.problems[0] if problem is None else problem
        named = {"output": self.output_of(problem)}
        if self.arch is None:
            return named
        operand = operand or self.operand or variants.operand_of(problem, self.arch)
        self._check_fits(problem, operand)
        for name, region in layout.regions(problem, operand).items():
            flat = self._regions[region.offset : region.offset + region.nbytes]
            named[name] = flat.view(_DTYPES[region.dtype]).view(region.shape)
        return named

    def control(self) -> torch.Tensor:
        """The control words, int32 [CONTROL_WORDS]: the first region whatever the problem is."""
        self._check_open()
        return self._control()

    def _control(self) -> torch.Tensor:
        words = layout.control_words(1 if self.peers is None else self.peers.size)
        return self._regions[: words * 4].view(torch.int32)

    def problem_of(self, weights: PreparedWeights) -> Problem:
        """The workspace's problem that ``weights`` were prepared for, with format and act resolved.

        Capacities (max_tokens, max_recv_rows) are the workspace's and may differ from those that
        the weights were prepared with. ValueError where no problem fits.
        """
        fits = [p for p in self.problems if _matches(p, weights.problem)]
        check(
            bool(fits),
            f"weights: prepared for {weights.problem}, but the workspace serves "
            f"{', '.join(map(str, self.problems))}; build Workspace([..., weights.problem])",
        )
        problem = max(fits, key=lambda p: p.max_tokens)
        return problem.with_(format=weights.problem.format, act=weights.problem.act)

    def check_weights(self, weights: PreparedWeights) -> None:
        """ValueError unless this workspace's device, backend and size serve ``weights``."""
        check(
            torch.device(weights.device) == self.device,
            f"weights: expected on the workspace's device {self.device}, got {weights.device}; "
            "prepare or load them there",
        )
        grads = [name for name, tensor in weights.tensors.items() if tensor.requires_grad]
        check(
            not grads,
            f"weights: expected tensors that require no grad (the layer is inference only), got "
            f"{', '.join(grads)} that do; prepare them from detached tensors",
        )
        problem = self.problem_of(weights)
        peers = self.peers if self.exchange is None else self.exchange.peers
        if peers is not None:
            check(
                weights.rank == peers.rank,
                f"weights: expected those of this rank's experts, rank {peers.rank}, got rank "
                f"{weights.rank}; pass rank= to prepare_weights",
            )
        if self.local is not None:
            self.local.check_weights(weights.local)
        if self.arch is None:
            return
        check(
            weights.arch == self.arch,
            f"weights: expected the layout of {self.arch}, got layout {weights.layout!r} of arch "
            f"{weights.arch}; prepare them without backend='reference', or build the workspace "
            "with backend='reference'",
        )
        self._check_fits(problem, weights.operand)

    def _check_fits(self, problem: Problem, operand: str) -> None:
        need = layout.workspace_bytes(problem, operand)
        check(
            need <= self.nbytes_regions,
            f"workspace: {need} bytes are needed for operand {operand!r}, it has "
            f"{self.nbytes_regions}; build Workspace(problem, operand=weights.operand)",
        )

    def begin(self) -> None:
        """What every call does first: RuntimeError when closed or when a call before it failed."""
        if self._closed:
            self._check_open()
        if self._error[layout.ERROR_CODE]:
            self._raise_error()

    def note_stream(self, handle: int) -> None:
        """Keep the memory from being reused while work of stream ``handle`` is in flight."""
        if handle in self._streams:
            return
        self._streams.add(handle)
        stream = torch.cuda.current_stream(self.device)
        for tensor in (self._regions, *self._outputs):
            tensor.record_stream(stream)

    def next_output(self) -> torch.Tensor | None:
        """Turn to the other buffer in debug mode; the buffer that it leaves, else None."""
        if not self.debug:
            return None
        stale = self._outputs[self.turn]
        self.turn ^= 1
        return stale

    def check(self) -> None:
        """Wait for the device and raise the RuntimeError that a call has recorded, if any."""
        self._check_open()
        if self.local is not None:
            self.local.check()
            self.exchange.peers.begin()
        if self.on_gpu and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(self.device)
        self.begin()

    def saturated_blocks(self) -> int:
        """NVFP4 blocks of the intermediate whose scale saturated, since construction. Waits.

        Counted by the kernels; the reference counts none.
        """
        self._check_open()
        if self.local is not None:
            return self.local.saturated_blocks()
        if self.arch is None:
            return 0
        return int(self.control()[layout.CONTROL_SATURATED].item())

    def update_topology(
        self, group: object | None, problem: Problem | Iterable[Problem] | None = None
    ) -> None:
        """Move to another group of ranks; every rank of the new one calls it together.

        problem  None: the present layers over as many ranks as ``group`` has; else as at
                 construction
        Everything is taken anew before the present memory is given back, so both must fit;
        addresses change, and calls need weights of the rank's experts in the new group. (Experts
        that move within a group are ``moe_ep_jit.update_topology``'s.) With transport "symm" it is
        a ValueError: build another workspace.
        All or nothing: where one rank cannot, that is an error on every rank, and each keeps what
        it had. ValueError, TypeError, RuntimeError as at construction.
        """
        self._check_open()
        check_may_move(False, self._options["transport"])
        if problem is None:
            ranks = group_size(group)
            problems = [p.with_(num_ranks=ranks) for p in self.problems]
        else:
            problems = _problems(problem)
        ranks = problems[0].num_ranks
        peers = Peers(group, ranks, self.device, self._options["timeout"])
        fresh, error = None, None
        # What this rank cannot do by itself, said before the others wait for it in building.
        try:
            check(self.round is None, IN_ROUND)
            (self.local or self).check()  # an earlier call's error, which closing would raise
        except (ValueError, RuntimeError) as failure:
            error = failure
        agree(peers, {}, error)
        try:
            fresh = Workspace(
                problems, group, device=self.device, debug=self.debug, **self._options
            )
        except Exception as failure:  # whatever it is, the others wait for this rank's word
            error = failure
        try:
            agree(peers, {}, error)
        except Exception:
            if fresh is not None:
                fresh.close()
            raise
        self.__dict__, fresh.__dict__ = fresh.__dict__, self.__dict__
        fresh.close()

    def reset(self) -> None:
        """Drop a round that the stage functions began and did not finish, on the current stream.

        With several ranks each of them has to, after the same stage. With transport="symm" they
        meet, and an error that a call has recorded is dropped with the round.
        """
        self._check_open()
        self.round = None
        if self.peers is not None:
            self._begin_anew()
            return
        if self.local is not None:
            self.local.reset()
        if self.arch is not None:
            self.clear_tickets()

    def close(self) -> None:
        """Wait for the device and give the memory back; further calls raise. Twice is fine.

        Views that were returned stay valid. Raises what a call has recorded, after closing.
        """
        if self._closed:
            return
        if self.exchange is not None:
            self.exchange.close()
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        record = list(self._error)
        self._closed = True
        self.round = None
        self.bindings.clear()
        self.functions.clear()
        del self._error, self._record, self._regions, self._outputs
        self.symmetric = None
        if self.local is not None:
            self.local.close()
        if record[layout.ERROR_CODE]:
            raise RuntimeError(explain(record, self.peers, self._timeout))

    def __enter__(self) -> Workspace:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except RuntimeError:
            if kind is None:  # else the body's own error is the one to see
                raise

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        raise TypeError(
            "workspace: expected no copy and no pickle (it holds addresses), got one; build a new "
            "Workspace"
        )

    def __repr__(self) -> str:
        arch = self.arch if self.local is None else self.local.arch
        state = "closed" if self._closed else arch or "reference"
        return f"Workspace({len(self.problems)} problem(s), {self.device}, {state})"

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("workspace: it is closed; build a new Workspace for further calls")

    def clear_tickets(self) -> None:
        control = self.control()
        for word in (
            layout.CONTROL_ROUTE_TICKET,
            layout.CONTROL_COMBINE_TICKET,
            layout.CONTROL_IN_FLIGHT,
        ):
            control[word].zero_()

    def _begin_anew(self) -> None:
        """All ranks, once their devices are idle, go on from one epoch and without a failure."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)
        self.clear_tickets()
        self.symmetric.agree_again(self._control(), self.peers)
        if self.on_gpu:
            torch.cuda.current_stream(self.device).synchronize()
        self._record.zero_()
        self.peers.compare({}, "reset", timeout=0)  # nobody goes on before all are ready

    def _raise_error(self) -> None:
        """Raise what the kernels recorded; clear it and the open round, so that work can go on.

        With transport="symm" it stays, until all ranks have met in ``reset``.
        """
        record = list(self._error)
        capturing = self.on_gpu and torch.cuda.is_current_stream_capturing()
        if not capturing and self.peers is None:  # else it stays for the next call that may wait
            self.round = None
            if self.on_gpu:
                torch.cuda.synchronize(self.device)
            if self.arch is not None:
                self.clear_tickets()
            if self.on_gpu:
                torch.cuda.current_stream(self.device).synchronize()
            self._record.zero_()
        raise RuntimeError(explain(record, self.peers, self._timeout))


def check_workspace(ws: object, name: str = "ws") -> None:
    """``TypeError`` unless ``ws``, an argument called ``name``, is a ``Workspace``."""
    if not isinstance(ws, Workspace):
        raise TypeError(
            f"{name}: expected Workspace, got {type(ws).__name__}; build "
            "moe_ep_jit.Workspace(weights.problem)"
        )


def _emulator() -> Any:
    from moe_ep_jit.tools.emulator.layer import Emulator  # needs the DSL's libraries, GPUs do not

    return Emulator()


def _error_record(pinned: bool) -> torch.Tensor:
    return torch.zeros(layout.ERROR_WORDS, dtype=torch.int32, pin_memory=pinned)


def _problems(problem: Problem | Iterable[Problem]) -> tuple[Problem, ...]:
    if isinstance(problem, Problem):
        return (problem,)
    if not isinstance(problem, Iterable):
        raise TypeError(
            f"problem: expected a Problem or a list of them, got {type(problem).__name__}; pass "
            "weights.problem"
        )
    problems = tuple(problem)
    check(bool(problems), "problem: expected a Problem or a list of them, got an empty list")
    for p in problems:
        check_problem(p)
    ranks = sorted({p.num_ranks for p in problems})
    check(
        len(ranks) == 1,
        f"problem: expected one num_ranks for all layers, got {ranks}; build a Workspace for each",
    )
    return problems


def _operand(problem: Problem, operand: str | None, arch: str | None) -> str:
    if operand is None:
        return variants.operand_of(problem, arch)
    variants.check_operand(arch, operand)
    return operand


def _matches(held: Problem, prepared: Problem) -> bool:
    """Whether weights made for ``prepared`` are weights of ``held``; capacities do not matter."""
    if held.format not in ("auto", prepared.format) or held.act not in ("auto", prepared.act):
        return False
    if (prepared.act if held.wire == "auto" else held.wire) != prepared.payload:
        return False
    same = {"format": prepared.format, "act": prepared.act, "wire": prepared.wire}
    same |= {"max_tokens": prepared.max_tokens, "max_recv_rows": prepared.max_recv_rows}
    return held.with_(**same) == prepared
