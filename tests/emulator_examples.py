"""NVIDIA's public CuTe DSL examples as objects for the emulator. None of their code is here: their
classes come from a folder that the caller names.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Int64, cute

from moe_ep_jit import cache_key
from moe_ep_jit.tools.emulator.layer import Object


def load(folder, relative):
    """A module of the examples, imported from its file."""
    path = Path(folder) / relative
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Gemm:
    """``C[m, n] = A[m, k] B[n, k]^T`` by one of the examples' classes, from plain addresses.

    scaled  dense_gemm_fp8_2xacc: two fp32 scales follow
    """

    def __init__(self, gemm, sizes, ab, c, scaled=False):
        self.gemm, self.sizes, self.ab, self.c, self.scaled = gemm, sizes, ab, c, scaled

    def tensor(self, dtype, address, rows, columns):
        pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)
        shape, stride = (rows, columns, 1), (columns, 1, rows * columns)
        return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))

    @cute.jit
    def __call__(self, a: Int64, b: Int64, c: Int64, sa: Int64, sb: Int64, stream: CUstream):
        m, n, k = self.sizes
        operands = [
            self.tensor(self.ab, a, m, k),
            self.tensor(self.ab, b, n, k),
            self.tensor(self.c, c, m, n),
        ]
        if cutlass.const_expr(self.scaled):
            for address in (sa, sb):
                pointer = cute.make_ptr(
                    cutlass.Float32, address, cute.AddressSpace.gmem, assumed_align=4
                )
                operands.append(cute.make_tensor(pointer, cute.make_layout(1)))
        self.gemm(*operands, 2, stream)  # at most two clusters at a time


def build(host, arch, folder):
    """Compile and export ``host`` into ``folder``; the object as the emulator runs it."""
    before = os.environ.get("CUTE_DSL_ARCH")
    os.environ["CUTE_DSL_ARCH"] = arch
    try:
        options = f"{cache_key.COMPILE_OPTIONS} --gpu-arch={arch} --dump-dir='{folder}'"
        stream = cute.runtime.make_fake_stream()
        compiled = cute.compile(host, *[Int64(0)] * 5, stream, options=options)
        compiled.export_to_c(str(folder / "kernel.o"), function_name=cache_key.SYMBOL)
    finally:
        if before is None:
            del os.environ["CUTE_DSL_ARCH"]
        else:
            os.environ["CUTE_DSL_ARCH"] = before
    text = compiled.artifacts.PTX
    (folder / "kernel.ptx").write_text(text if isinstance(text, str) else text.decode())
    return Object(folder)


class ScaledGemm:
    """dense_blockscaled_gemm_persistent from plain addresses; operands are K-major."""

    def __init__(self, gemm, sizes, ab, sf, c):
        self.gemm, self.sizes, self.types = gemm, sizes, (ab, ab, sf, sf, c)

    @cute.jit
    def __call__(self, a: Int64, b: Int64, c: Int64, sa: Int64, sb: Int64, stream: CUstream):
        pointers = [
            cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=32)
            for dtype, address in zip(self.types, (a, b, sa, sb, c), strict=True)
        ]
        major = cute.nvgpu.OperandMajorMode.K
        layouts = (major, major, cutlass.utils.LayoutEnum.ROW_MAJOR)
        self.gemm(*pointers, layouts, (*self.sizes, 1), 2, stream)
