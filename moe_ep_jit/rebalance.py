"""``update_topology``: experts move between the ranks of a layer, on all of them or on none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_ep_jit.formats import BlockScaled
from moe_ep_jit.problem import check
from moe_ep_jit.topology import agree, checked_map, map_facts
from moe_ep_jit.weights import PreparedWeights, check_prepared, checked_update
from moe_ep_jit.workspace import IN_ROUND, Workspace, check_workspace


def update_topology(
    ws: Workspace,
    weights: PreparedWeights,
    physical_to_logical: torch.Tensor | Sequence[int],
    w13: torch.Tensor | BlockScaled | None = None,
    w2: torch.Tensor | BlockScaled | None = None,
    **small: Any,
) -> None:
    """Say which logical expert each place holds, and bring the weights of this rank's places.

    physical_to_logical  [num_experts] integers, the same on every rank, as balancers give them a
                         layer: the logical expert of each place. One may have several (redundant
                         experts), each has one at least. topk_ids then name logical experts
    w13, w2              of this rank's places, as ``update_weights`` takes them, further keywords
                         too: replaced in place. None on every rank: the weights are there already

    Every rank calls it between two calls of the layer. Which of its places a row goes to follows
    from the row's number alone (``Topology.physical_ids``), so results repeat bit for bit and are
    those of the logical experts. The load counters start anew. Works on the current stream; a
    captured call uses the new map and weights, unless it was captured before the first map.
    All or nothing: where one rank cannot (a map or weights that do not fit, a round in progress),
    that is an error on every rank, and map, weights and counters stay on all of them. ValueError,
    TypeError for a caller's mistake; RuntimeError for a rank that does not come.
    """
    check_workspace(ws)
    check_prepared(weights)
    write, held, facts, error = None, None, {}, None
    try:
        ws.begin()
        check(ws.round is None, IN_ROUND)
        if ws.on_gpu and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("update_topology: a CUDA graph is being captured; call it before")
        ws.check_weights(weights)
        held = checked_map(physical_to_logical, weights.problem.num_experts)
        check(
            (w13 is None) == (w2 is None) and not (w13 is None and small),
            "w13, w2: expected both, or neither and nothing else of the weights; pass both",
        )
        if w13 is not None:
            write = checked_update(weights, w13, w2, **small)
        facts = {
            "layer": str(ws.problem_of(weights)),
            "with new weights": w13 is not None,
            **map_facts(held),
        }
    except Exception as failure:  # whatever it is, the others wait for this rank's word
        error = failure
    peers = ws.peers if ws.exchange is None else ws.exchange.peers
    agree(peers, facts, error)
    if write is not None:
        write()
    weights.topology.place(held)
