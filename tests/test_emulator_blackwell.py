"""What the emulator knows of tensor memory beyond NVIDIA's examples, and that it sees what a change
of the Blackwell kernels breaks.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from sm100_cases import make_inputs, make_layer

import moe_ep_jit as moe
from moe_ep_jit import launch, reference, variants
from moe_ep_jit.formats import E2M1_VALUES
from moe_ep_jit.tools.emulator import floats, tensor_memory
from moe_ep_jit.tools.emulator.fault import Fault
from moe_ep_jit.tools.emulator.layer import Object


def test_registers_of_a_16x256b_load():
    """Of each 8 columns: row t / 4, columns 2 c, 2 c + 1 (c = t % 4), then row t / 4 + 8."""
    cells = np.arange(16 * 32).reshape(16, 32)
    got = tensor_memory._by_thread(cells)
    assert got.shape == (32, 16)
    for thread in range(32):
        for register in range(16):
            row = thread // 4 + register % 4 // 2 * 8
            column = register // 4 * 8 + thread % 4 * 2 + register % 2
            assert got[thread, register] == cells[row, column]


def test_two_floats_to_e2m1():
    values = np.array([*E2M1_VALUES, *(-v for v in E2M1_VALUES), np.nan, 1e9], np.float32)
    codes = [*range(16), 7, 7]
    for low, code in zip(values, codes, strict=True):
        pair = floats.pack_e2m1x2(np.array([6.0], np.float32), np.array([low], np.float32))
        assert pair.tolist() == [0x70 | code]


def error(fmt, tile_n, pattern, replacement):
    """A layer's error with a change of the gate/up GEMM's PTX, which must match somewhere."""
    layer = make_layer(fmt, (192, 192), 2, arch="sm_100a")
    config = next(c for c in variants.ladder("sm_100a", fmt) if c.tile_n == tile_n)
    ws = layer.ws
    bound = launch.bind(ws, layer.weights).rung(ws, layer.weights, "bf16", config)
    kept = bound.function
    parts = re.split(r"(?=^\.visible \.entry)", kept.text, flags=re.MULTILINE)
    parts[3], count = re.subn(pattern, replacement, parts[3])
    assert count
    inputs = make_inputs(12, 192, 2)
    layer.poison()
    try:
        bound.function = Object(kept.folder, "".join(parts))
        y = moe.moe_forward(*inputs, layer.weights, ws, config=config)
    finally:
        bound.function = kept
        ws.control()[:3].zero_()
        ws._record.zero_()
    return reference.error(y, layer.want(*inputs)).whole


@pytest.mark.emulated
@pytest.mark.skipif(torch.cuda.is_available(), reason="layers of sm100_cases are on the GPU there")
@pytest.mark.parametrize(
    ("tile_n", "pattern", "replacement", "found"),
    [
        (16, r"tcgen05\.dealloc[^;]*;", "", "tensor memory"),
        (16, r"tcgen05\.commit[^;]*;", "", "waits"),
        (192, r"(tcgen05\.commit[^;]*), (%rs\d+);", r"mov.b16 \2, 1; \1, \2;", "waits"),
        (16, r"fence\.proxy\.async[^;]*;", "", "fence.proxy"),
        (16, r"(tcgen05\.cp[^;]*;)", "", "which nothing has written"),
    ],
    ids=["not-freed", "not-committed", "one-cta-told", "no-proxy-fence", "no-scales"],
)
def test_a_broken_kernel_is_a_fault(tile_n, pattern, replacement, found):
    with pytest.raises(Fault, match=found):
        error("nvfp4", tile_n, pattern, replacement)


@pytest.mark.emulated
@pytest.mark.skipif(torch.cuda.is_available(), reason="layers of sm100_cases are on the GPU there")
@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (r"(tcgen05\.mma[^;]*, )(%r\d+), (\[%r\d+\]), (\[%r\d+\]), ", r"\1\2, \4, \3, "),
        (r"cvt\.rn\.satfinite\.e2m1x2\.f32 (\w+), (%f\d+|%r\d+), (%f\d+|%r\d+);",
         r"cvt.rn.satfinite.e2m1x2.f32 \1, \3, \2;"),
    ],
    ids=["scales-of-the-other-side", "nibbles-swapped"],
)  # fmt: skip
def test_a_wrong_number_shows(pattern, replacement):
    assert error("nvfp4", 32, pattern, replacement) > 0.05
