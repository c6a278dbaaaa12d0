"""Symmetric memory: one allocation on each rank of a group, which every rank can write to.

On GPUs it is torch's symmetric memory (one NVLink domain); for the emulator it is memory that the
processes of one machine share. What could go wrong is decided before anything is allocated, on
every rank alike.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moe_ep_jit import layout
from moe_ep_jit.problem import Problem, check
from moe_ep_jit.transport import Peers, layer_facts

_COLLECTIVE = 'pass transport="collective" (torch.distributed), or put the ranks where they can'

#: torch's own switch for several ranks on one GPU, for tests.
_OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"

#: CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED: NVLink has them, PCIe has not.
_NATIVE_ATOMICS = 3


def host_peers(group: object | None, num_ranks: int, device: torch.device, timeout: float) -> Peers:
    """The group as ranks meet on the host: over CPU tensors where the group moves them."""
    peers = Peers(group, num_ranks, device, timeout)
    backend = torch.distributed.get_backend_config(peers.group)
    if "cpu:" in str(backend) or str(backend) == "gloo":
        peers.device = torch.device("cpu")
    return peers


def check_problems(problems: Sequence[Problem]) -> None:
    """ValueError for layers that this transport does not serve."""
    for problem in problems:
        check(
            problem.wire in ("auto", problem.act),
            f'wire: expected "auto" with transport="symm" (rows move as the experts\' tensor cores '
            f'read them), got {problem.wire!r}; leave it out, or pass transport="collective"',
        )
        check(
            problem.combine_wire == "bf16",
            f'combine_wire: expected "bf16" with transport="symm" (the down GEMM writes its rows '
            f"to where their tokens are), got {problem.combine_wire!r}; leave it out, or pass "
            'transport="collective"',
        )
        check(
            problem.num_experts <= layout.EXCHANGE_EXPERTS,
            f"num_experts: expected at most {layout.EXCHANGE_EXPERTS} with "
            f'transport="symm", got {problem.num_experts}; pass transport="collective"',
        )
        slots = problem.max_tokens * problem.top_k
        most = 1 << layout.slot_bits(problem.num_ranks)
        check(
            slots < most,
            f"max_tokens * top_k: expected at most {most - 1} for {problem.num_ranks} ranks, got "
            f"{slots}; split the batch",
        )


def meet(
    problems: Sequence[Problem], operands: Sequence[str], peers: Peers, device: torch.device,
    arch: str | None,
) -> None:  # fmt: skip
    """Tell each other what the workspace is to be. The same error on every rank, before anything
    is allocated: ValueError where problems differ, RuntimeError where the ranks cannot reach each
    other's memory.

    arch  of the kernels that this rank will run; None: it has none
    """
    facts = layer_facts(problems) | {"transport": "symm", "operands": list(operands)}
    facts["device"] = device.type
    here = {"host": socket.gethostname(), "gpu": _gpu(device), "trouble": _trouble(device, arch)}
    told = [theirs["_here"] for theirs in peers.compare(facts | {"_here": here})]
    _raise("symmetric memory", [theirs["trouble"] for theirs in told])
    hosts = [theirs["host"] for theirs in told]
    if len(set(hosts)) > 1:
        raise RuntimeError(
            f'transport="symm": expected the ranks on one machine, in one NVLink domain, got '
            f"{', '.join(hosts)} by rank; {_COLLECTIVE}"
        )
    gpus = [theirs["gpu"] for theirs in told]
    reach = {"_trouble": _unreachable(gpus, peers.rank, device)}
    _raise("peer access", [theirs["_trouble"] for theirs in peers.compare(reach)])


class Symmetric:
    """One rank's part, and where it finds the others'.

    tensor  uint8 [nbytes], zeros where the system gives zeros
    deltas  by rank: from an address here to the same place there
    others  (first address, bytes) of the other ranks' parts, as this process sees them
    """

    def __init__(self, nbytes: int, peers: Peers, device: torch.device) -> None:
        failure = ""
        self.tensor: torch.Tensor | None = None
        path: Path | None = None
        try:
            if device.type == "cuda":
                self.tensor = _empty(nbytes, device)
            else:
                path = _shared_file(nbytes)
        except (OSError, RuntimeError) as error:  # out of memory among them
            failure = " ".join(str(error).split())[:200]
        try:
            # Who has none must say so before the others wait for it in the rendezvous.
            told = peers.compare({"_failure": failure, "_path": str(path)})
            _raise(f"{nbytes} bytes of symmetric memory", [theirs["_failure"] for theirs in told])
            if device.type == "cuda":
                addresses = self._rendezvous(peers)
            else:
                paths = [theirs["_path"] for theirs in told]
                addresses = self._map(paths, nbytes, peers)
        finally:
            if path is not None:
                path.unlink(missing_ok=True)
        own = self.tensor.data_ptr()
        self.deltas = [address - own for address in addresses]
        self.others = [(address, nbytes) for address in addresses if address != own]

    def introduce(self, control: torch.Tensor, peers: Peers, record: int, timeout: float) -> None:
        """Tell the kernels, in ``control``, who they are, where their peers are, where errors go
        and how many seconds to wait (0: for ever).
        """
        control[layout.CONTROL_RANK] = peers.rank
        first, _ = layout.exchange_parts(peers.size)["deltas"]
        for word, values in (
            (layout.CONTROL_TIMEOUT, [int(timeout * 1e9) if timeout else 2**63 - 1]),
            (layout.CONTROL_ERROR, [record]),
            (first, self.deltas),
        ):
            there = control[word : word + 2 * len(values)].view(torch.int64)
            there.copy_(torch.tensor(values, dtype=torch.int64))

    def agree_again(self, control: torch.Tensor, peers: Peers) -> None:
        """After a round that ranks may have left at different places: no failure, one epoch, so
        that the next is new to all. Every rank calls it, with its device idle.
        """
        epoch = control[layout.CONTROL_EPOCH : layout.CONTROL_EPOCH + 1].to(peers.device)
        # Who is late may come yet, within the group's own timeout.
        latest = int(peers.swap(epoch, "reset", timeout=0).max())
        control[layout.CONTROL_EPOCH] = latest
        control[layout.CONTROL_FAILED] = 0

    def _rendezvous(self, peers: Peers) -> list[int]:
        self._handle = _module().rendezvous(self.tensor, peers.group)
        pointers = self._handle.buffer_ptrs
        offset = self.tensor.data_ptr() - pointers[peers.rank]
        return [pointer + offset for pointer in pointers]

    def _map(self, paths: list[str], nbytes: int, peers: Peers) -> list[int]:
        self._parts = [
            torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8) for path in paths
        ]
        self.tensor = self._parts[peers.rank]
        peers.compare({})  # everybody has mapped all of them: the files may go
        return [part.data_ptr() for part in self._parts]


def _module() -> Any:
    # Before torch asks. Multicast is of no use here, and where it fails it takes other GPUs along.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import torch.distributed._symmetric_memory as symmetric_memory

    return symmetric_memory


def _empty(nbytes: int, device: torch.device) -> torch.Tensor:
    return _module().empty(nbytes, dtype=torch.uint8, device=device)


def _shared_file(nbytes: int) -> Path:
    """A new file of zeros, in memory where the system has such a place."""
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    descriptor, name = tempfile.mkstemp(prefix="moe_ep_jit-", dir=folder)
    with os.fdopen(descriptor, "wb") as file:
        file.truncate(nbytes)
    return Path(name)


def _gpu(device: torch.device) -> str:
    """What tells one GPU from another, on every process of the machine."""
    if device.type != "cuda":
        return "cpu"
    return str(torch.cuda.get_device_properties(device).uuid)


def _trouble(device: torch.device, arch: str | None) -> str:
    """Why this rank has no symmetric memory; empty where it may."""
    if arch is None:
        return (
            f"the reference runs on {device} and has none; pass "
            'transport="collective", or on a CPU backend="emulator"'
        )
    if device.type != "cuda":
        return ""
    try:
        _module()
    except ImportError as error:
        return f"this torch ({torch.__version__}) has none ({error}); run: pip install 'torch>=2.9'"
    return ""


def _unreachable(gpus: Sequence[str], rank: int, device: torch.device) -> str:
    """Which of the other ranks' GPUs this one cannot write to; empty where it can."""
    if device.type != "cuda":
        return ""
    mine = gpus[rank]
    count = torch.cuda.device_count()
    visible = {_gpu(torch.device("cuda", index)): index for index in range(count)}
    for peer, gpu in enumerate(gpus):
        if peer == rank:
            continue
        if gpu == mine:
            if os.environ.get(_OVERLAPPING) != "1":
                return f"it shares {device} with rank {peer}; give each rank a GPU of its own"
        elif gpu in visible:
            index = visible[gpu]
            if not torch.cuda.can_device_access_peer(device.index, index):
                return f"no peer access from {device} to rank {peer}'s cuda:{index}; {_COLLECTIVE}"
            if not _has_native_atomics(device.index, index):
                return (
                    f"no NVLink (native atomics) from {device} to rank {peer}'s cuda:{index}; "
                    f"{_COLLECTIVE}"
                )
        # Else only the rendezvous can tell: the peer's GPU is hidden from this process.
    return ""


def _has_native_atomics(device: int, peer: int) -> bool:
    from cuda.bindings import driver

    attribute = driver.CUdevice_P2PAttribute(_NATIVE_ATOMICS)
    status, value = driver.cuDeviceGetP2PAttribute(attribute, device, peer)
    # What the driver does not tell is left to the rendezvous.
    return int(status) != 0 or value == 1


def _raise(what: str, troubles: Sequence[str]) -> None:
    """RuntimeError, on every rank the same, for what some rank has said."""
    said = [f"rank {rank}: {trouble}" for rank, trouble in enumerate(troubles) if trouble]
    if said:
        raise RuntimeError(f'transport="symm": {what}: {"; ".join(said)}')
