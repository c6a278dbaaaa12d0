"""NVIDIA's public CuTe DSL examples, known to be right on hardware, under the emulator.

``--examples DIR`` names ``examples/python/CuTeDSL/cute`` of github.com/NVIDIA/cutlass.
"""

from __future__ import annotations

import re

import cutlass
import numpy as np
import pytest
import torch
from emulator_cases import aligned
from emulator_examples import Gemm, ScaledGemm, build, load

from moe_ep_jit.tools.emulator import floats
from moe_ep_jit.tools.emulator.fault import Fault
from moe_ep_jit.tools.emulator.layer import Object
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


# Blackwell


def dense_fp16(examples, two_ctas):
    module = load(examples, "blackwell/kernel/dense_gemm/dense_gemm_persistent.py")
    shape = ((256, 128), (2, 1)) if two_ctas else ((128, 128), (1, 1))
    gemm = module.PersistentDenseGemmKernel(cutlass.Float32, two_ctas, *shape, use_tma_store=True)
    return Gemm(gemm, (M, N, K), cutlass.Float16, cutlass.Float16)


@pytest.mark.parametrize("two_ctas", [False, True], ids=["one-cta", "two-ctas"])
def test_blackwell_gemm(two_ctas, examples, tmp_path):
    obj = build(dense_fp16(examples, two_ctas), "sm_100a", tmp_path)
    for seed in range(5):
        assert error(obj, torch.float16, seed) < 5e-4


def block_scaled(examples, fmt, two_ctas):
    path = "blackwell/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent.py"
    module = load(examples, path)
    shape = ((256, 128), (2, 1)) if two_ctas else ((128, 128), (1, 1))
    nvfp4 = fmt == "nvfp4"
    gemm = module.Sm100BlockScaledPersistentDenseGemmKernel(16 if nvfp4 else 32, *shape)
    types = (
        (cutlass.Float4E2M1FN, cutlass.Float8E4M3FN)
        if nvfp4
        else (cutlass.Float8E4M3FN, cutlass.Float8E8M0FNU)
    )
    return ScaledGemm(gemm, (M, N, 256), *types, cutlass.Float16)


def packed_side(rows, fmt, columns=256):
    """(bytes, scale bytes in the order of the hardware's 128 x 4 chunks, values)."""
    block = 16 if fmt == "nvfp4" else 32
    if fmt == "nvfp4":
        codes = np.random.randint(0, 16, (rows, columns)).astype(np.uint8)
        data, values = codes[:, 0::2] | codes[:, 1::2] << 4, floats.E2M1[codes]
        sf = np.random.randint(40, 72, (rows, columns // block)).astype(np.uint8)
        scales = floats.E4M3[sf]
    else:
        data = np.random.randint(0, 64, (rows, columns)).astype(np.uint8)
        data |= np.random.randint(0, 2, data.shape).astype(np.uint8) << 7
        values = floats.E4M3[data]
        sf = np.random.randint(124, 130, (rows, columns // block)).astype(np.uint8)
        scales = floats.UE8M0[sf]
    chunks = -(-sf.shape[1] // 4)
    packed = np.zeros(rows // 128 * chunks * 512, np.uint8)
    r, c = np.indices(sf.shape)
    place = (r // 128 * chunks + c // 4) * 512 + r % 32 * 16 + r // 32 % 4 * 4 + c % 4
    packed[place] = sf
    return np.ascontiguousarray(data), packed, values * np.repeat(scales, block, axis=1)


def scaled_error(obj, fmt, seed=0):
    (a, sfa, values_a), (b, sfb, values_b) = packed_side(M, fmt), packed_side(N, fmt)
    machine, given = Machine(seed), []
    for name, array in zip("ABCst", (a, b, np.zeros((M, N), np.float16), sfa, sfb), strict=True):
        memory = aligned(array.size, array.dtype)
        memory[:] = array.reshape(-1)
        machine.memory.add(name, memory.ctypes.data, memory.nbytes, written=True)
        given.append(memory)
    requests = obj.host.requests(*(m.ctypes.data for m in given), 0)
    machine.run([(obj.kernels[r.kernel], r) for r in requests])
    want = values_a.astype(np.float64) @ values_b.astype(np.float64).T
    got = given[2].reshape(M, N).astype(np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("two_ctas", [False, True], ids=["one-cta", "two-ctas"])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
def test_block_scaled_gemm(fmt, two_ctas, examples, tmp_path):
    obj = build(block_scaled(examples, fmt, two_ctas), "sm_100a", tmp_path)
    for seed in range(5):
        assert scaled_error(obj, fmt, seed) < 5e-4


_SCALED_MMA = r"(tcgen05\.mma[^;]*, )(%r\d+), (\[%r\d+\]), (\[%r\d+\]), (%p\d+;)"


@pytest.mark.parametrize(
    ("fmt", "pattern", "replacement"),
    [
        pytest.param("nvfp4", _SCALED_MMA, r"\1\2, \4, \3, \5", id="scales-swapped"),
        pytest.param("mxfp8", _SCALED_MMA, None, id="one-scale-id-for-all"),
        pytest.param("nvfp4", r"(warpx4 \t\[%r\d+\]), %rd\d+;", None, id="scale-columns-permuted"),
        pytest.param("nvfp4", r"tcgen05\.dealloc[^;]*;", "", id="not-freed"),
        pytest.param("nvfp4", r"tcgen05\.commit[^;]*;", "", id="not-committed"),
        pytest.param("nvfp4", r"(tcgen05\.ld[^;]*\[%r\d+)\]", r"\1+1]", id="column-plus-one"),
    ],
)
def test_a_changed_block_scaled_kernel_shows(fmt, pattern, replacement, examples, tmp_path):
    obj = build(block_scaled(examples, fmt, False), "sm_100a", tmp_path)
    found = list(re.finditer(pattern, obj.text))
    assert found
    if replacement is not None:
        text = re.sub(pattern, replacement, obj.text)
    elif fmt == "mxfp8":
        text = re.sub(pattern, rf"\1{found[0][2]}, \3, \4, \5", obj.text)
    else:
        source = found[1][0].split(", ")[1]
        text = obj.text.replace(found[0][0], f"{found[0][1]}, {source}")
    assert text != obj.text
    try:
        assert scaled_error(Object(tmp_path, text), fmt) > 1e-2
    except Fault:
        return
