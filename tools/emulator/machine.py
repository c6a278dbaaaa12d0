"""The machine: grids in flight, their CTAs and clusters, and who runs next."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from moe_ep_jit.tools.emulator import memory as mem
from moe_ep_jit.tools.emulator import tma, wgmma
from moe_ep_jit.tools.emulator.clocks import Clock, View, add_view
from moe_ep_jit.tools.emulator.codegen import Code
from moe_ep_jit.tools.emulator.fault import DeadlockFault, Fault
from moe_ep_jit.tools.emulator.mbarrier import MBarrier
from moe_ep_jit.tools.emulator.operations import EMITTERS
from moe_ep_jit.tools.emulator.program import Program
from moe_ep_jit.tools.emulator.ptx import Module
from moe_ep_jit.tools.emulator.synchronize import NamedBarrier
from moe_ep_jit.tools.emulator.tensor_memory import TensorMemory
from moe_ep_jit.tools.emulator.threads import Threads

#: Shared memory that a CTA may ask for, and what the system keeps at its start.
SHARED_LIMIT, SHARED_RESERVED = 232_448, 1024


class Request:
    """One launch as the host asked for it."""

    def __init__(
        self, kernel: str, grid: tuple[int, int, int], block: tuple[int, int, int],
        cluster: tuple[int, int, int], shared_bytes: int, dependent: bool, params: bytes,
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.block, self.cluster = kernel, grid, block, cluster
        self.shared_bytes, self.dependent, self.params = shared_bytes, dependent, params


class Kernel:
    """One entry of a module, with its code."""

    def __init__(self, module: Module, name: str, traced: bool = False) -> None:
        self.module, self.entry = module, module.entries[name]
        self.code = Code(Program(self.entry), EMITTERS, traced)


class Launch:
    """A grid under way."""

    def __init__(
        self, machine: Machine, kernel: Kernel, request: Request, number: int, first_uid: int
    ) -> None:
        self.machine, self.kernel, self.request, self.number = machine, kernel, request, number
        self.entry = kernel.entry
        self.first_uid = first_uid
        self.before: Launch | None = None
        self.started = self.complete = False
        # The kernel's parameters live at an address of this process, as descriptors must.
        self.params = np.zeros(self.entry.param_bytes + 64, np.uint8)
        self.align = -self.params.ctypes.data % 64
        self.params[self.align : self.align + len(request.params)] = np.frombuffer(
            request.params, np.uint8
        )
        self.offsets = {p.name: p.offset for p in self.entry.params}
        self.ctas: list[CTA] = []

    @property
    def param_address(self) -> int:
        return self.params.ctypes.data + self.align

    def param(self, name: str, offset: int, kind: type) -> Any:
        at = self.align + self.offsets[name] + offset
        return self.params[at : at + np.dtype(kind).itemsize].view(kind)[0]

    def before_is_complete(self) -> bool:
        return self.before is None or self.before.complete

    def may_start(self) -> bool:
        """Behind the grid before; dependent launch: once all its CTAs have said so or ended."""
        if self.before_is_complete():
            return True
        before = self.before
        return (
            self.request.dependent
            and before.started
            and all(cta.triggered or cta.done for cta in before.ctas)
        )

    def start(self) -> None:
        self.started = True
        r = self.request
        # What a dependent grid may see before its griddepcontrol.wait leaves the grid before out,
        # however far that has come here: on hardware it may have only begun.
        horizon, earlier = self.first_uid, self.before
        if r.dependent:
            horizon = 1 if earlier is None else earlier.first_uid
        while earlier is not None and not earlier.complete:
            horizon, earlier = min(horizon, earlier.first_uid), earlier.before
        clusters: dict[tuple[int, ...], Cluster] = {}
        uid = self.first_uid
        for z in range(r.grid[2]):
            for y in range(r.grid[1]):
                for x in range(r.grid[0]):
                    place = (x, y, z)
                    key = tuple(a // b for a, b in zip(place, r.cluster, strict=True))
                    cluster = clusters.setdefault(key, Cluster(key))
                    cta = CTA(self, uid, place, cluster, horizon)
                    self.ctas.append(cta)
                    uid += 1

    def text_of(self, line: int | None) -> str:
        if line is None:
            return ""
        text = " ".join(self.kernel.module.lines[line - 1].split())
        return text.replace(f"{self.entry.name}_", "")

    @property
    def title(self) -> str:
        return f"launch {self.number} ({short_name(self.entry.name)})"


def short_name(name: str) -> str:
    """The words of a mangled kernel name that say which it is."""
    head = name.removeprefix("kernel_cutlass_kernel_").split("_object_at_")[0]
    return f"{head[-40:]} {name.rpartition('_')[2]}"


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
        self, launch: Launch, uid: int, place: tuple[int, int, int], cluster: Cluster, horizon: int
    ) -> None:
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
        self.bulk_groups: dict[int, list[list[Any]]] = {}
        self.tensor_memory = TensorMemory()
        self.last_commit: Any = None
        self.fenced: dict[int, View] = {}
        self.learnt: dict[int, View] = {}
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

    def fence(self, tid: int) -> None:
        """fence.acq_rel of one thread."""
        one = np.array([tid])
        learnt = self.learnt.pop(tid, None)
        if learnt is not None:
            self.clock.acquire(one, learnt)
        self.fenced[tid] = self.clock.release(one)

    def synchronizes(self, address: int, tid: int, reads: bool, writes: bool, order: str) -> None:
        """A strong access of one thread to ``address``."""
        published = self.machine.published
        one = np.array([tid])
        seen = published.get(address)
        if reads and seen is not None:
            if order in ("acquire", "acq_rel"):
                self.clock.acquire(one, seen)
            else:
                known = self.learnt.get(tid)
                self.learnt[tid] = (
                    seen.joined(self._empty()) if known is None else known.joined(seen)
                )
        if writes:
            release = order in ("release", "acq_rel")
            view = self.clock.release(one) if release else self.fenced.get(tid)
            if view is not None:
                # A read-modify-write carries on what was released before it; a store ends it.
                published[address] = view.joined(seen) if reads and seen is not None else view
            elif not reads:
                published.pop(address, None)

    def _empty(self) -> View:
        zeros = np.zeros(self.clock.threads + 1, np.int64)
        return View(self.uid, zeros, zeros, {}, 0)

    # Tensor cores

    def check_operands(self, threads: Any, product: Any) -> None:
        """The shared memory that a wgmma reads: written, ordered, and fenced."""
        for first in range(0, threads.count, 128):
            operands = [(product.b, product.n, product.kind_b)]
            if product.a.ndim == 1:
                operands.append((product.a, 64, product.kind_a))
            for descriptors, rows, kind in operands:
                unit = wgmma.element_bytes(kind)
                mine = descriptors[first : first + 128]
                if (mine != mine[0]).any():
                    raise Fault("a wgmma descriptor differs between threads")
                offsets = wgmma.operand_offsets(int(mine[0]), rows, product.k * unit)
                if offsets.min() < self.shared_begin or offsets.max() + 16 > self.shared.size:
                    raise Fault("a wgmma operand lies outside the CTA's shared memory")
                bad = self.shared.first_unwritten(offsets, 8, 2)
                if bad is not None:
                    raise Fault(
                        f"a wgmma reads shared {int(offsets[bad]):#x}, which nothing has written"
                    )
                tma.check_order(self, int(threads.tids[first]), self.shared, offsets)

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


class Machine:
    """Global memory, grids in flight, and the order in which things happen, drawn from a seed.

    seed  0: asynchronous copies land as late as they may, warps that stand together stay together.
          Else: copies, warps, CTAs and sides of a branch take random turns.
    """

    def __init__(self, seed: int = 0) -> None:
        self.memory = mem.GlobalMemory()
        self.seed, self.random = seed, random.Random(seed)
        self.under_way: list[Any] = []
        self.published: dict[int, View] = {}
        self.launches: list[Launch] = []
        self.tracer: Callable[[Threads, int, Any], None] | None = None

    def choose(self, count: int) -> int:
        return self.random.randrange(count) if self.seed else 0

    def later(self, copy: Any) -> None:
        """An asynchronous copy; it lands when its turn comes."""
        self.under_way.append(copy)

    def descriptor(self, address: int) -> bytes:
        """The 64 bytes of a TMA descriptor among a grid's parameters."""
        for launch in self.launches:
            begin = launch.param_address
            if begin <= address <= begin + launch.entry.param_bytes - 64:
                if address % 64:
                    raise Fault(f"a TMA descriptor at {address:#x}, not aligned to 64")
                at = launch.align + address - begin
                return launch.params[at : at + 64].tobytes()
        raise Fault(f"a TMA descriptor at {address:#x}, which is no kernel parameter")

    def writer(self, uid: int, thread: int) -> str:
        for launch in self.launches:
            for cta in launch.ctas:
                if cta.uid == uid:
                    who = f"thread {thread}" if thread < cta.threads else "an asynchronous copy"
                    return f"{who} of {cta.name}"
        return "somebody"

    def run(self, work: Iterable[tuple[Kernel, Request]]) -> None:
        """Run launches of one stream to their end. A Fault is the first thing found wrong."""
        self.launches, self.under_way, self.published = [], [], {}
        self.random = random.Random(self.seed)
        uid = 2  # 0: what no kernel has written; 1: the host's side of a dependent first grid
        for number, (kernel, request) in enumerate(work):
            check_request(kernel, request)
            launch = Launch(self, kernel, request, number, uid)
            uid += request.grid[0] * request.grid[1] * request.grid[2]
            launch.before = self.launches[-1] if self.launches else None
            self.launches.append(launch)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
            while not all(launch.complete for launch in self.launches):
                self._step()
        self.memory.settle()

    def _step(self) -> None:
        """Give every one who can run a turn."""
        for launch in self.launches:
            if not launch.started and launch.may_start():
                launch.start()
        moved = False
        if self.seed:
            self._land_some()
        for launch in self.launches:
            if launch.started and not launch.complete:
                moved |= self._run_launch(launch)
        if not moved:
            if not self.under_way:
                raise DeadlockFault(self._deadlock())
            self.under_way.pop(self.choose(len(self.under_way))).land()

    def _land_some(self) -> None:
        self.random.shuffle(self.under_way)
        for _ in range(self.random.randrange(len(self.under_way) + 1)):
            self.under_way.pop().land()

    def _run_launch(self, launch: Launch) -> bool:
        moved = False
        ctas = [cta for cta in launch.ctas if not cta.done]
        if self.seed:
            self.random.shuffle(ctas)
        for cta in ctas:
            groups = list(cta.groups)
            if self.seed:
                self.random.shuffle(groups)
            for threads in groups:
                moved |= threads.run()
                if threads.done:
                    cta.groups.remove(threads)
            moved |= self._merge(cta)
            if not cta.groups:
                cta.end()
        if all(cta.done for cta in launch.ctas) and launch.before_is_complete():
            mine = set(launch.ctas)
            for copy in [c for c in self.under_way if c.cta in mine]:
                self.under_way.remove(copy)
                copy.land()
            launch.complete = moved = True
        return moved

    def _merge(self, cta: CTA) -> bool:
        """Threads that stand at the same place run together again; with a seed, some part.

        Whether any came together.
        """
        groups, merged = cta.groups, False
        if len(groups) > 1:
            # Parts of a warpgroup that wait for each other always meet.
            all_meet = not self.seed or self.random.random() < 0.5
            kept: list[Threads] = []
            for threads in groups:
                twin = None
                if all_meet or threads.wait is not None:
                    twin = next((k for k in kept if k.may_merge(threads)), None)
                if twin is None:
                    kept.append(threads)
                else:
                    twin.merge(threads)
                    merged = True
            cta.groups = kept
        if self.seed:
            for threads in list(cta.groups):
                if threads.may_part() and self.random.random() < 0.25:
                    cut = 128 * self.random.randrange(1, threads.count // 128)
                    threads.split_off(np.arange(cut, threads.count), threads.pc)
                    threads.keep_only(np.arange(cut))
        return merged

    def _deadlock(self) -> str:
        rows = ["nothing can go on:"]
        for launch in self.launches:
            if not launch.started:
                rows.append(f"  {launch.title}: waits for the grid before")
            for cta in launch.ctas:
                for threads in cta.groups:
                    rows.append(f"  {threads.place()}\n    waits on {threads.describe_wait()}")
        return "\n".join(rows)


def check_request(kernel: Kernel, request: Request) -> None:
    """The limits of a launch, which the driver would refuse."""
    threads = request.block[0] * request.block[1] * request.block[2]
    wanted = kernel.entry.threads
    if threads == 0 or threads > 1024 or 0 in request.grid:
        raise Fault(f"launch of {request.grid} CTAs of {threads} threads")
    if wanted is not None and tuple(wanted) != request.block:
        raise Fault(f"launch with {request.block} threads, the kernel requires {wanted}")
    if request.shared_bytes + kernel.entry.static_shared > SHARED_LIMIT:
        raise Fault(f"{request.shared_bytes} bytes of shared memory, {SHARED_LIMIT} is the most")
    if any(g % c for g, c in zip(request.grid, request.cluster, strict=True)):
        raise Fault(f"a grid of {request.grid} does not divide into clusters of {request.cluster}")
    if len(request.params) != kernel.entry.param_bytes:
        raise Fault("parameter bytes do not fit the kernel")
