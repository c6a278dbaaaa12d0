"""CTAs and clusters: their threads, shared memory, barriers, and what they know of each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moe_ep_jit.tools.emulator import memory as mem
from moe_ep_jit.tools.emulator import tma, wgmma
from moe_ep_jit.tools.emulator.clocks import Clock, View, add_view
from moe_ep_jit.tools.emulator.fault import Fault
from moe_ep_jit.tools.emulator.mbarrier import MBarrier
from moe_ep_jit.tools.emulator.synchronize import NamedBarrier
from moe_ep_jit.tools.emulator.tensor_memory import TensorMemory
from moe_ep_jit.tools.emulator.threads import Threads

if TYPE_CHECKING:
    from moe_ep_jit.tools.emulator.launches import Launch

#: What the system keeps at the start of a CTA's shared memory.
SHARED_RESERVED = 1024


class Cluster:
    """The CTAs of one cluster and its barrier."""

    def __init__(self, place: tuple[int, ...]) -> None:
        self.place = place
        self.ctas: list[CTA] = []
        self.generation = 0
        self.arrived: set[tuple[int, int]] = set()
        #: What arrivals released, by CTA; those of the phase under way are not passed on yet.
        self.views: dict[int, View] = {}
        self.next_views: dict[int, View] = {}
        self.tickets: dict[tuple[int, int], int] = {}

    def arrive(self, cta: CTA, tids: np.ndarray, relaxed: bool) -> None:
        for tid in tids.tolist():
            key = cta.rank, tid
            if key in self.arrived:
                raise Fault(f"thread {tid} arrives twice at the cluster barrier")
            self.arrived.add(key)
            self.tickets[key] = self.generation
        if not relaxed:
            add_view(self.next_views, cta.clock.release(tids))
        self.check()

    def ticket(self, cta: CTA, tids: np.ndarray) -> int:
        """The phase that these threads wait for."""
        found = {self.tickets.get((cta.rank, tid), -1) for tid in tids.tolist()}
        if -1 in found or len(found) != 1:
            raise Fault("barrier.cluster.wait by threads that have not arrived")
        return found.pop()

    def check(self) -> None:
        if len(self.arrived) >= sum(cta.alive for cta in self.ctas) and self.arrived:
            self.generation += 1
            self.arrived.clear()
            self.views = dict(self.next_views)

    def describe(self) -> str:
        missing = sum(cta.alive for cta in self.ctas) - len(self.arrived)
        return f"cluster barrier: {missing} threads have not arrived"


class CTA:
    """One CTA: its threads, shared memory, barriers and clock."""

    def __init__(
        self, launch: Launch, uid: int, place: tuple[int, int, int], cluster: Cluster,
        horizon: np.ndarray,
    ) -> None:  # fmt: skip
        self.launch, self.machine, self.uid, self.place = launch, launch.machine, uid, place
        self.cluster, self.rank = cluster, len(cluster.ctas)
        cluster.ctas.append(self)
        block = launch.request.block
        self.threads = block[0] * block[1] * block[2]
        self.alive = self.threads
        self.clock = Clock(uid, max(self.threads, 1), horizon)
        entry = launch.entry
        self.shared_begin = SHARED_RESERVED
        self.dynamic_begin = SHARED_RESERVED + -(-entry.static_shared // 1024) * 1024
        end = self.dynamic_begin + launch.request.shared_bytes
        self.shared = mem.Memory(
            "shared", 0, np.zeros(-(-end // 16) * 16, np.uint8), written=False, granule=1
        )
        self.triggered = self.done = False
        self.named: dict[int, NamedBarrier] = {}
        self.mbarriers: dict[int, MBarrier] = {}
        #: By thread: its groups of copies, the last one open.
        self.bulk_groups: dict[int, list[list[Any]]] = {}
        self.copies: dict[int, list[list[Any]]] = {}
        self.tensor_memory = TensorMemory()
        self.last_commit: Any = None
        #: By thread. What its fences release, by "to other ranks too"; what it has read that was
        #: released, by "by another rank".
        self.fenced: dict[int, dict[bool, View]] = {}
        self.learnt: dict[int, dict[bool, View]] = {}
        whole = -(-self.threads // 32) * 32
        first = Threads(self, launch.kernel.code, np.arange(whole), [None] * len(entry.registers))
        if whole != self.threads:
            first.mask = np.arange(whole) < self.threads
            first.gone = ~first.mask
        self.groups = [first]

    @property
    def name(self) -> str:
        return f"{self.launch.title}, CTA {self.place[0]}"

    def peer(self, rank: int, what: str) -> CTA:
        if rank >= len(self.cluster.ctas):
            raise Fault(f"{what}: CTA {rank} of a cluster of {len(self.cluster.ctas)}")
        return self.cluster.ctas[rank]

    def symbol(self, name: str) -> int:
        """The address of a shared array or of a parameter."""
        if name in self.launch.kernel.module.dynamic_shared:
            return self.dynamic_begin | self.rank << 24
        if name in self.launch.entry.shared:
            return SHARED_RESERVED + self.launch.entry.shared[name] | self.rank << 24
        if name in self.launch.offsets:
            return self.launch.param_address + self.launch.offsets[name]
        raise Fault(f"symbol {name} is not known")

    def special_register(self, name: str, tids: np.ndarray) -> np.ndarray:
        r = self.launch.request
        register, _, axis = name[1:].partition(".")
        n = "xyz".index(axis) if axis else 0
        steps = (1, r.block[0], r.block[0] * r.block[1])
        lane = tids % 32
        grid_clusters = [-(-g // c) for g, c in zip(r.grid, r.cluster, strict=True)]
        in_cluster = [p % c for p, c in zip(self.place, r.cluster, strict=True)]
        values = {
            "tid": lambda: tids // steps[n] % r.block[n],
            "ntid": lambda: r.block[n],
            "ctaid": lambda: self.place[n],
            "nctaid": lambda: r.grid[n],
            "laneid": lambda: lane,
            "warpid": lambda: tids // 32,
            "nwarpid": lambda: -(-self.threads // 32),
            "lanemask_lt": lambda: (1 << lane) - 1,
            "lanemask_le": lambda: (2 << lane) - 1,
            "lanemask_eq": lambda: 1 << lane,
            "lanemask_gt": lambda: ~((2 << lane) - 1),
            "lanemask_ge": lambda: ~((1 << lane) - 1),
            "clusterid": lambda: self.cluster.place[n],
            "nclusterid": lambda: grid_clusters[n],
            "cluster_ctaid": lambda: in_cluster[n],
            "cluster_nctaid": lambda: r.cluster[n],
            "cluster_ctarank": lambda: self.rank,
            "cluster_nctarank": lambda: r.cluster[0] * r.cluster[1] * r.cluster[2],
            "dynamic_smem_size": lambda: r.shared_bytes,
            "total_smem_size": lambda: self.shared.size,
            "smid": lambda: self.uid - self.launch.first_uid,
        }
        if register not in values:
            raise Fault(f"special register {name} is not known")
        value = np.asarray(values[register](), np.int64)
        return np.broadcast_to(value, len(tids)).astype(np.uint32)

    # Barriers

    def named_barrier(self, number: int) -> NamedBarrier:
        if not 0 <= number < 16:
            raise Fault(f"barrier {number}: a CTA has 0 to 15")
        return self.named.setdefault(number, NamedBarrier(number))

    def check_barrier(self, barrier: NamedBarrier) -> None:
        expected = self.alive if barrier.expected is None else barrier.expected
        count = barrier.count()
        if count > expected:
            raise Fault(f"barrier {barrier.number}: {count} threads arrived, {expected} expected")
        if count == expected and count:
            self.clock.meet(np.concatenate(barrier.arrived))
            barrier.arrived = []
            barrier.generation += 1

    def threads_end(self, tids: np.ndarray) -> None:
        self.alive -= len(tids)
        self.machine.changes += 1
        for barrier in self.named.values():
            if barrier.expected is None and barrier.arrived:
                self.check_barrier(barrier)
        self.cluster.check()

    def new_mbarrier(self, address: int, count: int) -> None:
        self._mbarrier_address(address)
        offset = address & 0xFFFFFF
        if offset in self.mbarriers:
            raise Fault(f"mbarrier.init of shared {offset:#x}, which holds a live mbarrier")
        self.mbarriers[offset] = MBarrier(offset, count)

    def _mbarrier_address(self, address: int) -> None:
        offset = address & 0xFFFFFF
        if offset % 8 or offset < self.shared_begin or offset + 8 > self.shared.size:
            raise Fault(f"mbarrier at shared {offset:#x}: misaligned or outside the CTA's memory")

    def mbarrier(self, address: int) -> MBarrier:
        target = self.peer(address >> 24, "mbarrier")
        found = target.mbarriers.get(address & 0xFFFFFF)
        if found is None:
            raise Fault(f"no mbarrier was initialised at shared {address & 0xFFFFFF:#x}")
        return found

    # Order between CTAs

    def fence(self, tid: int, system: bool) -> None:
        """fence.acq_rel or .sc of one thread, at the scope of the GPU or of all ranks."""
        one = np.array([tid])
        learnt = self.learnt.get(tid, {})
        views = [
            learnt.pop(foreign) for foreign in (False, True)[: 1 + system] if foreign in learnt
        ]
        self.clock.acquire(one, *views)
        view = self.clock.release(one)
        self.fenced.setdefault(tid, {})[False] = view
        if system:
            self.fenced[tid][True] = view

    def synchronizes(self, address: int, tid: int, reads: bool, writes: bool, order: str) -> None:
        """A strong access of one thread to ``address``.

        order  e.g. "release.sys": other ranks are synchronized with at that scope alone, and only
               if they too name it
        """
        order, _, scope = order.partition(".")
        system = scope == "sys"
        seen = self.machine.published.get(address, {})
        if reads and seen:
            self._learn(tid, seen, order in ("acquire", "acq_rel"), system)
        if not writes:
            return
        rank = self.launch.rank
        if order in ("release", "acq_rel"):
            now = {(rank, system): self.clock.release(np.array([tid]))}
        else:
            fenced = self.fenced.get(tid, {})
            now = {(rank, far): view for far, view in fenced.items() if system or not far}
        if reads:
            # A read-modify-write carries on what was released before it; a store ends it.
            carried = {k: v.joined(now[k]) if k in now else v for k, v in seen.items()}
            now = {**now, **carried}
        self.machine.published[address] = now

    def _learn(
        self, tid: int, seen: dict[tuple[int, bool], View], acquires: bool, system: bool
    ) -> None:
        """What a thread reads was released: it knows at once, or from its next fence on."""
        for (rank, far), view in seen.items():
            foreign = rank != self.launch.rank
            if foreign and not (far and system):
                continue
            if acquires:
                self.clock.acquire(np.array([tid]), view)
            else:
                learnt = self.learnt.setdefault(tid, {})
                known = learnt.get(foreign)
                learnt[foreign] = self.clock.nothing().joined(view if known is None else known)
                if known is not None:
                    learnt[foreign] = learnt[foreign].joined(view)

    # Tensor cores

    def check_operands(self, threads: Any, product: Any) -> None:
        """The shared memory that a wgmma reads: written, ordered, and fenced."""
        seen = set()
        operands = [(product.b, product.n, product.kind_b)]
        if product.a.ndim == 1:
            operands.append((product.a, 64, product.kind_a))
        for first in range(0, threads.count, 128):
            tid = int(threads.tids[first])
            knows = int(self.clock.view_of[tid])
            for descriptors, rows, kind in operands:
                mine = descriptors[first : first + 128]
                if np.count_nonzero(mine != mine[0]):
                    raise Fault("a wgmma descriptor differs between threads")
                key = int(mine[0]), rows, knows
                if key in seen:
                    continue  # warpgroups that know the same read the same
                seen.add(key)
                self._check_operand(tid, *key[:2], product.k * wgmma.element_bytes(kind))

    def _check_operand(self, tid: int, descriptor: int, rows: int, row_bytes: int) -> None:
        offsets = wgmma.operand_offsets(descriptor, rows, row_bytes)
        if offsets.min() < self.shared_begin or offsets.max() + 16 > self.shared.size:
            raise Fault("a wgmma operand lies outside the CTA's shared memory")
        bad = self.shared.first_unwritten(offsets, 8, 2)
        if bad is not None:
            raise Fault(f"a wgmma reads shared {int(offsets[bad]):#x}, which nothing has written")
        tma.check_order(self, tid, self.shared, offsets)

    def tensor_core_bytes(self, offsets: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(self.shared.load(offsets, 8, 2)).view(np.uint8)

    # Running

    def end(self) -> None:
        """Every thread has ended: what may not be left behind."""
        self.done = True
        if self.tensor_memory.owner.any():
            raise Fault(f"{self.name} has ended and its tensor memory was not freed")
        for barrier in self.mbarriers.values():
            if barrier.bytes:
                raise Fault(f"{self.name} has ended; {barrier.describe()}")
        for copy in self.machine.under_way:
            if isinstance(copy, tma.Load) and self in copy.ctas:
                raise Fault(f"{self.name} has ended while a copy to it runs").locate(copy.place())
