"""NVIDIA's public CuTe DSL examples, known to be right on hardware, under the emulator.

``--examples DIR`` names ``examples/python/CuTeDSL/cute`` of github.com/NVIDIA/cutlass.
"""

from __future__ import annotations

import cutlass
import numpy as np
import pytest
import torch
from emulator_examples import Gemm, build, load

from moe_ep_jit.tools.emulator.fault import Fault
from moe_ep_jit.tools.emulator.machine import Machine

M, N, K = 256, 256, 192
HOPPER = "hopper/kernel/dense_gemm/"
CLUSTERS = [(1, 1), (2, 1), (1, 2), (2, 2)]


@pytest.fixture
def examples(request):
    folder = request.config.getoption("--examples")
    if folder is None:
        pytest.skip("needs --examples DIR, NVIDIA's CuTe DSL examples")
    return folder


def persistent_fp16(examples, cluster):
    module = load(examples, HOPPER + "dense_gemm_persistent.py")
    gemm = module.HopperWgmmaGemmPersistentKernel(
        cutlass.Float32, (128, 128), cluster, swizzle_size=1, raster_along_m=True
    )
    return Gemm(gemm, (M, N, K), cutlass.Float16, cutlass.Float16), torch.float16


def fp8_2xacc(examples, cluster):
    module = load(examples, HOPPER + "dense_gemm_fp8_2xacc.py")
    gemm = module.HopperFP8WarpSpecialized2xAccGemmKernel(
        (128, 128), cluster, swizzle_size=1, raster_along_m=True
    )
    host = Gemm(gemm, (M, N, K), cutlass.Float8E4M3FN, cutlass.Float16, scaled=True)
    return host, torch.float8_e4m3fn


def error(obj, dtype, seed=0, change=None):
    """Relative error of a product; ``change`` alters the launches."""
    a, b = torch.randn(M, K).to(dtype), torch.randn(N, K).to(dtype)
    c = torch.zeros(M, N, dtype=torch.float16)
    scales = torch.tensor([0.5]), torch.tensor([4.0])
    machine = Machine(seed)
    given = a, b, c, *scales
    for name, tensor in zip(("A", "B", "C", "scale A", "scale B"), given, strict=True):
        size = tensor.numel() * tensor.element_size()
        machine.memory.add(name, tensor.data_ptr(), size, written=True)
    requests = obj.host.requests(*(t.data_ptr() for t in given), 0)
    if change is not None:
        change(requests)
    machine.run([(obj.kernels[r.kernel], r) for r in requests])
    want = a.float() @ b.float().T * (2.0 if dtype == torch.float8_e4m3fn else 1.0)
    return float((c.float() - want).norm() / want.norm())


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
@pytest.mark.parametrize("make", [persistent_fp16, fp8_2xacc])
def test_hopper_gemm(make, cluster, examples, tmp_path):
    host, dtype = make(examples, cluster)
    obj = build(host, "sm_90a", tmp_path)
    for seed in range(5):
        assert error(obj, dtype, seed) < 5e-4  # C is rounded to fp16


@pytest.mark.parametrize("word", [2, 3, 8, 14], ids=["swizzle", "stride", "dimension", "box"])
def test_a_changed_descriptor_shows(word, examples, tmp_path):
    """Errors that cancel out would hide: one field of one operand's descriptor must not."""
    host, dtype = persistent_fp16(examples, (1, 1))
    obj = build(host, "sm_90a", tmp_path)

    def change(requests):
        words = np.frombuffer(requests[0].params, np.uint32).copy()
        words[word] = {2: words[2] ^ 1 << 13, 3: words[3] + 1, 8: words[8] - 64, 14: words[14] - 1}[
            word
        ]
        requests[0].params = words.tobytes()

    try:
        assert error(obj, dtype, change=change) > 1e-2
    except Fault:
        return
