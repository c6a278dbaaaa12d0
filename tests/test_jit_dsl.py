"""The cache with the real compiler: what an entry says of its kernels, and starts without it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cache_tools import cache_fixture as cache_fixture
from cache_tools import python, the_entry

from moe_ep_jit import cache_key, jit
from moe_ep_jit.cubin import kernel_resources

LOAD_TOY = """
import os, sys, json, time
import torch
start = time.perf_counter()
from moe_ep_jit import jit
f = jit.load("toy", {"stages": 3}, arch="sm_90a", build="toy_build:compile_op", name="toy")
seconds = time.perf_counter() - start
print(json.dumps({"cutlass": "cutlass" in sys.modules, "seconds": seconds, **jit.stats()}))
"""


@pytest.fixture(scope="module")
def toy_cache(tmp_path_factory):
    """A cache with the real toy in it, made by another process in an otherwise empty folder."""
    folder = tmp_path_factory.mktemp("toy")
    here = folder / "cwd"
    here.mkdir()
    said = python(f"import os; os.chdir({str(here)!r})" + LOAD_TOY, MOE_EP_JIT_CACHE=str(folder))
    assert json.loads(said)["compiles"] == 1
    assert not list(here.iterdir())  # the compiler's dumps do not litter
    here.rmdir()
    return folder


def test_second_process_runs_no_compiler(toy_cache):
    said = json.loads(python(LOAD_TOY, MOE_EP_JIT_CACHE=str(toy_cache)))
    assert said["cutlass"] is False
    assert said["compiles"] == 0
    assert said["disk_hits"] == 1
    assert said["seconds"] < 1.0  # from torch to the function in hand


def test_without_c_compiler(tmp_path):
    code = "import shutil; shutil.which = lambda name: None\n" + LOAD_TOY
    assert json.loads(python(code, MOE_EP_JIT_CACHE=str(tmp_path)))["compiles"] == 1
    assert not list(tmp_path.glob("sm_90a/*/*/kernel.so"))
    assert json.loads(python(code, MOE_EP_JIT_CACHE=str(tmp_path)))["disk_hits"] == 1


def test_toy_launch_facts(toy_cache):
    folder = the_entry(toy_cache)
    assert ".target sm_90a" in (folder / "kernel.ptx").read_text()
    launch = json.loads((folder / "launch.json").read_text())
    add, reverse = launch["kernels"]
    assert "add_kernel" in add["name"]
    assert 0 < add["registers"] < 32
    assert (add["threads"], reverse["threads"]) == (128, 64)
    assert add["stack_bytes"] == 0
    assert launch["stack_bytes"] == reverse["stack_bytes"] >= 256
    assert launch["compile_s"] > 0


def test_resources_agree_with_cuobjdump(toy_cache):
    import toy_build

    found = [*Path(np.__file__).parents[1].glob("nvidia/*/bin/cuobjdump")]
    tool = str(found[0]) if found else shutil.which("cuobjdump")
    if tool is None:
        pytest.skip("needs cuobjdump; run: pip install nvidia-cuda-cuobjdump")
    options = f"{cache_key.COMPILE_OPTIONS} --gpu-arch=sm_90a --dump-dir={toy_cache}/.tmp"
    cubin = toy_build.compile_op({"stages": 3}, options).artifacts.CUBIN
    (toy_cache / ".tmp" / "toy.cubin").write_bytes(cubin)
    command = [tool, "--dump-resource-usage", str(toy_cache / ".tmp" / "toy.cubin")]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    pattern = r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)"
    theirs = {name: tuple(map(int, numbers)) for name, *numbers in re.findall(pattern, said)}
    ours = {
        k["name"]: (k["registers"], k["stack_bytes"], k["static_shared_bytes"])
        for k in kernel_resources(cubin)
    }
    assert len(ours) == 2
    assert ours == theirs


@pytest.mark.parametrize("cut", [0, 20, 100, 1000])
def test_cut_cubin_is_a_value_error(toy_cache, cut):
    whole = (the_entry(toy_cache) / "kernel.o").read_bytes()
    with pytest.raises(ValueError, match="cubin"):
        kernel_resources(whole[:cut])


def test_warm_call_reaches_the_kernel_launch(toy_cache):
    """The function checks its arguments and then fails, or runs, in the CUDA runtime."""
    code = LOAD_TOY + (
        "\ntry: f(0, 4, 3)\nexcept TypeError as e: print('Expects 4' in str(e))"
        "\ntry: f(0, 4, 0, 0)\nexcept RuntimeError as e: print('cuda' in str(e).lower())"
        "\nelse: print(True)"
    )
    assert python(code, MOE_EP_JIT_CACHE=str(toy_cache)).split("\n")[1:3] == ["True", "True"]


def test_many_compiles_free_their_threads(cache):
    import toy_build

    def count():
        return len(os.listdir("/proc/self/task"))

    for i in range(2, 12):
        jit.load("toy", {"stages": i}, arch="sm_90a", build="toy_build:compile_op", name=f"toy-{i}")
        if i == 3:
            before = count()
    assert count() <= before + 1
    assert toy_build.__name__ in sys.modules


def test_import_touches_no_gpu_and_no_compiler():
    code = (
        "import sys, torch, moe_ep_jit, moe_ep_jit.jit, moe_ep_jit.cache_admin\n"
        "print(torch.cuda.is_initialized(), 'cutlass' in sys.modules, 'tvm_ffi' in sys.modules)"
    )
    assert python(code).split() == ["False", "False", "False"]
