"""Two tiny kernels in one object, built by the DSL: what ``jit`` sees of a real operator."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Int32, Int64, cute


@cute.kernel
def add_kernel(address: Int64, n: Int32):
    thread, _, _ = cute.arch.thread_idx()
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=16)
    values = cute.make_tensor(pointer, cute.make_layout((n,)))
    if thread < n:
        values[thread] = values[thread] + 1.0


@cute.kernel
def reverse_kernel(address: Int64, n: Int32):
    thread, _, _ = cute.arch.thread_idx()
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=16)
    values = cute.make_tensor(pointer, cute.make_layout((n,)))
    # Indexed by runtime values: it cannot stay in registers and shows as stack.
    local = cute.make_rmem_tensor((64,), Float32)
    shared = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout((64,)), 16)
    for i in cutlass.range_constexpr(64):
        local[i] = values[i]
    for i in cutlass.range(n, unroll=1):
        local[(thread * i) % 64] = local[(i * n) % 64] + 1.0
    shared[thread] = local[n % 64]
    cute.arch.sync_threads()
    values[thread] = shared[63 - thread]


@cute.jit
def add_and_reverse(address: Int64, n: Int32, stages: Int32, stream: cuda.CUstream):
    if (stages & 1) != 0:
        add_kernel(address, n).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)
    if (stages & 2) != 0:
        reverse_kernel(address, n).launch(grid=(1, 1, 1), block=(64, 1, 1), smem=256, stream=stream)


def compile_op(facts, options):
    compiled = cute.compile(
        add_and_reverse,
        Int64(0),
        Int32(4),
        Int32(facts["stages"]),
        cute.runtime.make_fake_stream(),
        options=options,
    )
    compiled.moe_launch = {"dynamic_shared_bytes": {"reverse_kernel": 256}}
    return compiled
