"""Devices, seeds and poisoned memory for every test.

Markers: ``sm90``, ``sm100`` (needs a GPU of that arch), ``ranks(n)`` (needs n GPUs); whatever has
none of them is ``cpu``. ``emulated``: where there is no GPU, or with ``--emulate``, the test runs
on the PTX emulator, on smaller shapes; what is ``full`` too does so with ``--full`` only.

A test whose device is missing is skipped with the reason; ``--arch sm90`` turns that skip into a
failure, so that a run meant for a GPU cannot pass empty.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import torch

from moe_ep_jit.tools.emulator.host import c_compiler

#: Marker -> the compute capabilities that serve it.
ARCHES = {"sm90": ((9, 0),), "sm100": ((10, 0), (10, 3))}
DEVICE_MARKERS = (*ARCHES, "ranks")

#: Where sm90's tests run: set before any test module is read.
DEVICE, EMULATED, FULL = "cuda", False, False

#: Whether sm100's run on the emulator: wherever no Blackwell GPU is, beside another GPU too. And
#: what of Hopper is compared with it, in tests for both.
SM100_EMULATED, SM90_EMULATED = False, False


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("moe_ep_jit")
    group.addoption("--seed", type=int, default=0, help="added to the seed of every test")
    group.addoption(
        "--emulate",
        action="store_true",
        help="run tests marked emulated on the PTX emulator; by itself where no GPU is",
    )
    group.addoption(
        "--full", action="store_true", help="everything on the emulator, not a pairwise choice"
    )
    group.addoption(
        "--examples", help="folder of NVIDIA's CuTe DSL examples, to run them on the emulator"
    )
    group.addoption(
        "--arch", choices=sorted(ARCHES), help="fail, not skip, where a GPU of this arch is missing"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is read: whether sm90's tests run on the emulator."""
    global DEVICE, EMULATED, FULL, SM100_EMULATED, SM90_EMULATED
    EMULATED = config.getoption("--emulate") or not torch.cuda.is_available()
    SM100_EMULATED = config.getoption("--emulate") or bool(_missing_arch("sm100"))
    SM90_EMULATED = config.getoption("--emulate") or bool(_missing_arch("sm90"))
    DEVICE, FULL = "cpu" if EMULATED else "cuda", config.getoption("--full")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if not any(item.get_closest_marker(name) for name in DEVICE_MARKERS):
            item.add_marker("cpu")
    if not config.getoption("--full"):
        left = [i for i in items if i.get_closest_marker("full") and _is_emulated(i)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]


def pytest_report_header() -> str:
    places = {"sm90": EMULATED, "sm100": SM100_EMULATED}
    return ", ".join(
        f"{arch} on {'the PTX emulator' if emulated else 'the GPU'}"
        for arch, emulated in places.items()
    )


def _is_emulated(item: pytest.Item) -> bool:
    return SM100_EMULATED if item.get_closest_marker("sm100") else EMULATED


def pytest_runtest_setup(item: pytest.Item) -> None:
    for arch in ARCHES:
        reason = _missing_arch(arch)
        emulated = _is_emulated(item) and item.get_closest_marker("emulated")
        if emulated and not item.config.getoption("--arch"):
            _skip_without_compiler()
            continue
        if item.get_closest_marker(arch) and reason:
            if item.config.getoption("--arch") == arch:
                pytest.fail(f"--arch {arch}: {reason}", pytrace=False)
            pytest.skip(reason)
    ranks = item.get_closest_marker("ranks")
    if ranks and torch.cuda.device_count() < ranks.args[0]:
        pytest.skip(f"needs {ranks.args[0]} GPUs, found {torch.cuda.device_count()}")


def _skip_without_compiler() -> None:
    if c_compiler() is None:
        pytest.skip("the emulator's launch stand-in needs a C compiler, found no cc, gcc or clang")


def _missing_arch(arch: str) -> str | None:
    """Why this machine cannot run tests of ``arch``; None if it can."""
    if not torch.cuda.is_available():
        return f"needs a GPU of {arch}, found no CUDA device"
    found = torch.cuda.get_device_capability()
    if found not in ARCHES[arch]:
        return f"needs a GPU of {arch}, found compute capability {found[0]}.{found[1]}"
    return None


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """The test's own seed, from its id and ``--seed``; all generators start from it."""
    offset = request.config.getoption("--seed")
    number = (zlib.crc32(request.node.nodeid.encode()) + offset) % 2**32
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    return number


def poison_bytes(*tensors: torch.Tensor) -> None:
    """Fill contiguous tensors with 0xFF bytes: NaN in every float type, -1 in every integer."""
    for tensor in tensors:
        tensor.view(-1).view(torch.uint8).fill_(0xFF)


@pytest.fixture
def poison() -> Callable[..., None]:
    """``poison(*tensors)`` fills them with 0xFF bytes, so that a stale read shows."""
    return poison_bytes
