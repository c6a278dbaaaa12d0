"""The error record: what kernels left in host memory, in words."""

from __future__ import annotations

from moe_ep_jit import layout
from moe_ep_jit.transport import Peers

_TWO_STREAMS = (
    "workspace: a call on this workspace started before the one before it had finished, so both "
    "results are lost: a workspace serves one stream at a time. Use one Workspace a stream "
    "(two-batch overlap takes two), or order the streams with events."
)
_ALONE = "The workspace is usable again"
_TOGETHER = (
    "ws.reset() on every rank makes the workspace usable again (a fleet: close it and create it "
    "again on every rank)"
)


def explain(record: list[int], peers: Peers | None, timeout: float) -> str:
    """What to raise for the words of a record.

    peers    None where the workspace has none over symmetric memory
    timeout  seconds that a wait may last
    """
    code, rank = record[layout.ERROR_CODE], record[layout.ERROR_RANK]
    peer, expected, seen = (
        record[word] for word in (layout.ERROR_PEER, layout.ERROR_EXPECTED, layout.ERROR_SEEN)
    )
    if code == layout.ERROR_TWO_STREAMS:
        return f"{_TWO_STREAMS} {_ALONE if peers is None else _TOGETHER}"
    if code == layout.ERROR_TIMEOUT:
        phase = layout.PHASES[record[layout.ERROR_PHASE]]
        flag = layout.flag_name(record[layout.ERROR_FLAG], peers.size)
        return (
            f"expert parallelism: rank {rank} of {peers.size}, phase {phase!r}: waited {timeout:g} "
            f"s for rank {peer} (flag {flag}: expected {expected}, seen {seen}); the output is "
            f"NaN. See why that rank failed or is late. {_TOGETHER}; else close this and make a "
            "new Workspace"
        )
    if code == layout.ERROR_OVERFLOW:
        return (
            f"max_recv_rows: expected at most {expected} rows of (token, k) for a rank, got {seen} "
            f"for rank {peer}; raise it, or split the batch (no row has moved, the output is NaN). "
            f"{_TOGETHER}"
        )
    if code == layout.ERROR_DIFFERENT:
        return (
            f"round: expected every rank to call the same layer, got another on rank {peer} than "
            f"on rank {rank}; call the layers in the same order, prepared alike, on every rank (no "
            f"row has moved, the output is NaN). {_TOGETHER}"
        )
    return f"workspace: a kernel recorded the unknown error {code}; report it as a bug"
