"""Times on the GPU: medians of launches back to back, a sustained run, and the host's part.

A GPU backlog hides the host. Every measurement begins on a rested GPU: FP8 at full rate draws 700 W
and takes the clock from 1.98 GHz to 1.5 within 100 ms, for whoever comes next too.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from moe_ep_jit.tools.nvml import Sensors

#: Launches before the timed ones.
WARMUP_CALLS = 10
#: The least launches behind a median.
LEAST_CALLS = 30

_REST_S = 0.4
_SUSTAINED_S = 1.5
_SAMPLE_S = 0.02
#: Longer than the host needs to queue one step and its event, at most 2 GHz.
_BACKLOG_CYCLES_PER_STEP = 150_000
_LEAST_BACKLOG_CYCLES = 30_000_000  # about 15 ms


@dataclass(frozen=True)
class Timed:
    """Medians of each step in ms, and the mean SM clock meanwhile (None: no sensor)."""

    ms: list[float]
    sm_mhz: float | None


@dataclass(frozen=True)
class Sustained:
    """Mean time of a launch in a long run, with mean SM clock and power (None: no sensor)."""

    ms: float
    sm_mhz: float | None
    watts: float | None


def medians_ms(steps: Callable[[int], Sequence[Callable[[], Any]]], iterations: int) -> list[float]:
    """The median time of each of ``steps(i)``, run in order for i = 0, 1, ... back to back, after a
    rest."""
    return timed(steps, iterations).ms


def timed(
    steps: Callable[[int], Sequence[Callable[[], Any]]],
    iterations: int,
    sensors: Sensors | None = None,
) -> Timed:
    """``medians_ms`` with the clock; the steps of one i are what is interleaved."""
    torch.cuda.synchronize()
    time.sleep(_REST_S)
    for i in range(WARMUP_CALLS):
        for step in steps(i):
            step()
    count = len(steps(0))
    marks = [
        [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)] for _ in range(iterations)
    ]
    torch.cuda.synchronize()
    torch.cuda._sleep(max(_LEAST_BACKLOG_CYCLES, iterations * count * _BACKLOG_CYCLES_PER_STEP))
    for i, row in enumerate(marks):
        row[0].record()
        for step, mark in zip(steps(i), row[1:], strict=True):
            step()
            mark.record()
    clocks = _clocks_until(marks[0][0], marks[-1][-1], sensors)
    torch.cuda.synchronize()
    return Timed(
        [statistics.median(row[j].elapsed_time(row[j + 1]) for row in marks) for j in range(count)],
        _mean(clocks),
    )


def _clocks_until(
    first: torch.cuda.Event, last: torch.cuda.Event, sensors: Sensors | None
) -> list[float | None]:
    """The clock between two events that are queued already; at least one reading."""
    if sensors is None:
        return []
    clocks = []
    while not last.query():
        if first.query():
            clocks.append(sensors.sm_mhz())
        time.sleep(1e-3)
    return clocks or [sensors.sm_mhz()]


def sustained(
    call: Callable[[int], Any],
    expected_ms: float,
    sensors: Sensors,
    seconds: float = _SUSTAINED_S,
) -> Sustained:
    """``call(i)`` back to back for about ``seconds``, as many as take ``expected_ms`` each."""
    count = max(LEAST_CALLS, math.ceil(seconds * 1e3 / expected_ms))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for i in range(WARMUP_CALLS):
        call(i)
    torch.cuda.synchronize()
    with _sampled(sensors.sm_mhz) as clocks:
        joules, began = sensors.joules(), time.perf_counter()
        start.record()
        for i in range(count):
            call(i)
        end.record()
        torch.cuda.synchronize()
        spent, after = time.perf_counter() - began, sensors.joules()
    watts = None if joules is None or after is None else (after - joules) / spent
    return Sustained(start.elapsed_time(end) / count, _mean(clocks), watts)


@contextmanager
def _sampled(read: Callable[[], float | None]) -> Iterator[list[float | None]]:
    """Readings taken on a thread while the body runs."""
    values: list[float | None] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(_SAMPLE_S):
            values.append(read())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield values
    finally:
        done.set()
        thread.join()


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def host_us(call: Callable[[int], Any], iterations: int) -> float:
    """The median time that the host spends in ``call(i)``, with the GPU busy elsewhere."""
    torch.cuda.synchronize()
    torch.cuda._sleep(_LEAST_BACKLOG_CYCLES)
    spent = []
    for i in range(iterations):
        start = time.perf_counter()
        call(i)
        spent.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(spent) * 1e6


def captured(call: Callable[[int], Any], count: int) -> list[torch.cuda.CUDAGraph]:
    """A CUDA graph of each of ``call(0)`` to ``call(count - 1)``, which run once before."""
    for i in range(count):
        call(i)
    graphs = []
    for i in range(count):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call(i)
        graphs.append(graph)
    return graphs
