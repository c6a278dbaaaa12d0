"""Fill the cache ahead of time, on several processes and without a GPU.

Workers are fresh interpreters that take one job after another as a JSON line. They need no
``__main__`` guard, start from daemonic processes too, and one that dies takes only its job along.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_ep_jit import jit
from moe_ep_jit.problem import ARCHES, check

#: Memory that one compile needs, in bytes (measured: 0.5 GB).
_COMPILE_BYTES = 1 << 29


@dataclass(frozen=True)
class Job:
    """One object to compile: the arguments of ``jit.load`` by name."""

    op: str
    facts: dict[str, Any]
    arch: str
    build: str
    name: str


def run(
    jobs: Iterable[Job],
    num_workers: int | None = None,
    progress: Callable[[int, int, dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Compile what is not in the cache yet; equal jobs count once.

    num_workers  processes; default: what the CPUs and the free memory allow
    progress     called as ``progress(done, total, result)`` after each job, one call at a time
    -> ``compiled``, ``cached``, ``failed`` (counts), ``seconds``, ``workers``, ``results``: for
    each job, in the order given, ``name``, ``op``, ``arch``, ``status`` ("compiled", "cached" or
    "failed"), ``seconds``, ``error`` ("" or why). A job that fails does not stop the others.
    ``RuntimeError`` where the cache folder cannot keep anything.
    """
    todo = _distinct(jobs)
    check(num_workers is None or num_workers >= 1, f"num_workers: expected >= 1, got {num_workers}")
    for job in todo:
        check(job.arch in ARCHES, f"arch: expected one of {sorted(ARCHES)}, got {job.arch!r}")
    started = time.perf_counter()
    count = min(num_workers or default_workers(), max(len(todo), 1))
    results: list[dict[str, Any]] = []
    if todo:
        jit.require_writable()
        results = _run_all(todo, count, progress)
    statuses = [result["status"] for result in results]
    return {
        "compiled": statuses.count("compiled"),
        "cached": statuses.count("cached"),
        "failed": statuses.count("failed"),
        "seconds": round(time.perf_counter() - started, 3),
        "workers": count,
        "results": results,
    }


def default_workers() -> int:
    """As many processes as CPUs that this one may use, and as compiles fit into free memory."""
    try:
        cpus = len(os.sched_getaffinity(0))
    except AttributeError:
        cpus = os.cpu_count() or 1
    free = _free_bytes()
    return max(1, cpus if free is None else min(cpus, free // _COMPILE_BYTES))


def _free_bytes() -> int | None:
    """Free memory of the machine or of this process's control group, whichever is less."""
    found = []
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        found.append(limit - int((group / "memory.current").read_text()))
    return min(found, default=None)


def _distinct(jobs: Iterable[Job]) -> list[Job]:
    found: dict[str, Job] = {}
    for job in jobs:
        found.setdefault(json.dumps(asdict(job), sort_keys=True), job)
    return list(found.values())


def _run_all(
    todo: list[Job], count: int, progress: Callable[[int, int, dict[str, Any]], None] | None
) -> list[dict[str, Any]]:
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(todo)):
        waiting.put(index)
    results: list[dict[str, Any] | None] = [None] * len(todo)
    workers = [_Worker() for _ in range(count)]
    reporting = threading.Lock()
    failures: list[BaseException] = []
    done = 0

    def serve(worker: _Worker) -> None:
        nonlocal done
        try:
            while not failures:
                try:
                    index = waiting.get_nowait()
                except queue.Empty:
                    return
                result = worker.run(todo[index])
                with reporting:
                    results[index] = result
                    done += 1
                    if progress is not None:
                        progress(done, len(todo), result)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=serve, args=(worker,), daemon=True) for worker in workers]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException as error:  # an interrupt: no thread may start another job
        failures.append(error)
        raise
    finally:
        for worker in workers:
            worker.stop()
    if failures:
        raise failures[0]
    return [result for result in results if result is not None]


class _Worker:
    """One process, started with the first job and again after it died or for another arch."""

    def __init__(self) -> None:
        self.process: subprocess.Popen | None = None
        self.arch = ""

    def run(self, job: Job) -> dict[str, Any]:
        started = time.perf_counter()
        status, error = "failed", ""
        if self.process is None or self.arch != job.arch:
            self.stop()
            self._start(job.arch)
        try:
            self.process.stdin.write(json.dumps(asdict(job)) + "\n")
            self.process.stdin.flush()
            answer = json.loads(self.process.stdout.readline())
            status, error = answer["status"], answer["error"]
        except (OSError, ValueError):
            code = self.process.wait() if self.process else None
            self.stop()
            error = f"the compiling process ended with code {code}"
            if code == -9:
                error += " (killed, maybe for lack of memory: use fewer workers)"
        return {
            "name": job.name,
            "op": job.op,
            "arch": job.arch,
            "status": status,
            "seconds": round(time.perf_counter() - started, 3),
            "error": error,
        }

    def _start(self, arch: str) -> None:
        # What this process can import, the worker can; no `-m`, which would import it twice.
        code = "from moe_ep_jit.tools.precompile import serve_stdin; serve_stdin()"
        environment = {
            **os.environ,
            "CUTE_DSL_ARCH": arch,
            "PYTHONPATH": os.pathsep.join(part or os.getcwd() for part in sys.path),
        }
        self.arch = arch
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    pipe.close()


def serve_stdin() -> None:
    """A worker's loop: a job per line on stdin, an answer per line on what was stdout."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides, and ends the workers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a compiler prints must not get between the answers
    for line in sys.stdin:
        job = json.loads(line)
        before = jit.stats()["compiles"]
        error = ""
        try:
            jit.load(**job, announce=False)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        status = "compiled" if jit.stats()["compiles"] > before else "cached"
        answers.write(json.dumps({"status": "failed" if error else status, "error": error}) + "\n")
        answers.flush()
