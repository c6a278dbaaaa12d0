"""Rows to the ranks of their experts and back, by kernels over symmetric memory: the transport of a
fleet. The ranks agree on the routing on the host, as ``transport.Exchange`` does.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from moe_ep_jit import formats, jit, layout
from moe_ep_jit.formats import BlockScaled
from moe_ep_jit.launch import SLOT, Launch, bound_args, load_together
from moe_ep_jit.problem import Problem
from moe_ep_jit.topology import Topology
from moe_ep_jit.transport import Exchange, Route, bytes_of, message_words, operand_from
from moe_ep_jit.workspace import Workspace

_BUILD = "moe_ep_jit.kernels.common.carry:compile_op"


class SymmetricExchange(Exchange):
    """The interface of ``Exchange``. Rows received are ordered by expert, then source rank.

    A round is dispatch, then combine of the same route; another order begins a new round.
    """

    def __init__(
        self, problem: Problem, group: object | None, device: torch.device, timeout: float,
        backend: str,
    ) -> None:  # fmt: skip
        self.problems = (problem,)
        self.device = device
        # As a layer whose experts take bf16 and are of no size: room for any payload's rows.
        layer = problem.with_(intermediate=64, format="nvfp4", act="bf16", wire="auto", bias=False)
        self.ws = Workspace(
            layer, group, device=device, backend=backend, operand="bf16", transport="symm",
            timeout=timeout,
        )  # fmt: skip
        self.layer = layer
        self.peers = self.ws.peers
        self.peers.words = message_words([problem])
        self._row_bytes = layout.round_up(
            sum(layout.wire_parts(problem.hidden, problem.payload).values()), layout.WIRE_ALIGN
        )
        # What ``launch`` and the emulator ask of weights. There are none, and the fleet counts rows
        # by its handles, not by what the kernels send.
        topology = Topology(problem.num_experts, device)
        self._no_weights = SimpleNamespace(operand="bf16", tensors={}, topology=topology)
        self._launch = load_together(self.peers, self._load, {"payload": problem.payload})
        self._memory = self.ws._regions
        #: Of the round that waits for its combine.
        self._current: Route | None = None

    def _load(self) -> Any:
        """The compiled kernels with their arguments in place."""
        facts = {
            "hidden": self.layer.hidden,
            "row_elements": self._row_bytes // 2,
            "num_experts": self.layer.num_experts,
            "top_k": self.layer.top_k,
            "num_ranks": self.layer.num_ranks,
        }
        name = "fleet-" + "-".join(f"{key[0]}{value}" for key, value in facts.items())
        what = {"facts": facts, "arch": self.ws.arch, "build": _BUILD, "name": name}
        function = jit.load("fleet", **what)
        args = bound_args(self.ws, self.layer, self._no_weights)
        emulator = self.ws.emulator
        if emulator is None:
            return Launch(function, args, self.device)
        function = emulator.function(jit.entry_folder("fleet", **what))
        return emulator.bind(self.ws, self._no_weights, self.layer, function, args)

    def route(self, problem: Problem, topk_ids: torch.Tensor, live: int) -> Route:
        self.ws.begin()
        route = super().route(problem, topk_ids, live)
        route.topk_ids = topk_ids[:live].contiguous().clone()
        rows = torch.tensor(route.rows_per_expert)
        local = torch.arange(problem.num_local_experts, dtype=torch.int32)
        route.expert_ids = local.repeat_interleave(rows).view(-1, 1).to(self.device)
        return route

    def dispatch(self, route: Route, x: torch.Tensor | BlockScaled) -> torch.Tensor | BlockScaled:
        problem, payload = route.problem, route.problem.payload
        if isinstance(x, torch.Tensor) and payload != "bf16":
            x = formats.quantize(x[: route.live], payload)
        parts = bytes_of(x, route.live)
        rows = parts[0]
        if len(parts) > 1:
            rows = torch.zeros(route.live, self._row_bytes, dtype=torch.uint8, device=self.device)
            torch.cat(parts, 1, out=rows[:, : sum(part.shape[1] for part in parts)])
        self._send(route, rows)
        count = sum(route.recv_rows)
        region = layout.regions(self.layer, "bf16")["recv_x"]
        received = self._memory[region.offset :][: count * self._row_bytes]
        received = received.view(count, self._row_bytes)
        widths = list(layout.wire_parts(problem.hidden, payload).values())
        arrays = received[:, : sum(widths)].split(widths, 1)
        return operand_from(payload, [array.contiguous() for array in arrays])

    def combine(
        self, route: Route, y: torch.Tensor, topk_weights: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        if self._current is not route:
            # Another round was there since: its rows' places have to be found again. y may be the
            # rows that dispatch returned, over which zeros come.
            y = y.clone()
            size = (route.live, self._row_bytes)
            self._send(route, torch.zeros(size, dtype=torch.uint8, device=self.device))
        self._current = None
        if topk_weights is None:
            topk_weights = torch.ones(route.live, self.layer.top_k, device=self.device)
        weights = topk_weights[: route.live].float().contiguous()
        self._run(
            route,
            layout.STAGE_DOWN | layout.STAGE_COMBINE,
            (y, weights, out),
            h=y.data_ptr(),
            topk_weights=weights.data_ptr(),
            topk_weights_stride=self.layer.top_k,
            topk_weights_type=layout.TOPK_WEIGHT_TYPES["float32"],
            out=out.data_ptr(),
            out_stride=out.stride(0),
        )

    def close(self) -> None:
        self._memory = self._current = None
        self.ws.close()

    def _send(self, route: Route, rows: torch.Tensor) -> None:
        """Begin a round: rows uint8 [live, row bytes] to their experts, all of them there. One that
        waits for its combine is dropped: its rows have come, so nobody waits for anything of it.
        """
        if self._current is not None:
            self.ws.clear_tickets()
        self._current = route
        self._run(
            route,
            layout.STAGE_DISPATCH | layout.STAGE_GATE_UP,
            (rows,),
            x=rows.data_ptr(),
            x_stride=rows.stride(0) // 2 if len(rows) else 0,
        )

    def _run(self, route: Route, stages: int, tensors: tuple[Any, ...], **values: int) -> None:
        self.ws.begin()
        args = self._launch.args.copy()
        values |= {
            "stages": stages,
            "tokens": route.live,
            "ids": route.topk_ids.data_ptr(),
            "ids_stride": self.layer.top_k,
            "ids_words": route.topk_ids.itemsize // 4,
        }
        if self.ws.on_gpu:
            values["stream"] = torch.cuda.current_stream(self.device).cuda_stream
            self.ws.note_stream(values["stream"])
        for name, value in values.items():
            args[SLOT[name]] = value
        self._launch.run(args, (*tensors, route.topk_ids))

    def _words(self, problem: Problem, counts: torch.Tensor) -> torch.Tensor:
        return super()._words(problem, counts).to(self.peers.device)
