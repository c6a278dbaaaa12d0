"""cp.async and reductions of bulk and tensor copies on the emulator, against NumPy."""

from __future__ import annotations

import emulator_cases as cases
import ml_dtypes
import numpy as np
import pytest
from emulator_cases import aligned, descriptor, run

from moe_ep_jit.tools.emulator.fault import Fault, UnsupportedError
from moe_ep_jit.tools.emulator.machine import Machine

SEEDS = range(5)
_BEGIN = """
    mov.u32 %r1, %tid.x; mov.b32 %r2, smem; ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1];
    shl.b32 %r3, %r1, 4; add.s32 %r4, %r2, %r3; cvt.u64.u32 %rd3, %r3; add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
"""
#: Each thread writes out what lies 32 threads from its own 16 bytes.
_OTHERS = """
    xor.b32 %r5, %r3, 512; add.s32 %r6, %r2, %r5; ld.shared.v4.b32 {%r7, %r8, %r9, %r10}, [%r6];
    st.global.v4.b32 [%rd5], {%r7, %r8, %r9, %r10};
"""
_COPY = "cp.async.cg.shared.global [%r4], [%rd4], 16;"
_GROUP = "cp.async.commit_group; cp.async.wait_group 0;"


def two_warps(body, seed=0):
    """64 threads with 16 bytes each -> (what p0 holds, what the body wrote to p1)"""
    source, out = aligned(256), aligned(256)
    source[:] = np.arange(256) * 2654435761 % 2**32
    run(_BEGIN + body, 64, source, out, seed=seed)
    return source.reshape(64, 4), out.reshape(64, 4)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("wait", [_GROUP, "cp.async.wait_all;"])
def test_small_copies_arrive_behind_a_wait_and_a_barrier(wait, seed):
    source, out = two_warps(f"{_COPY} {wait} bar.sync 0; {_OTHERS}", seed)
    assert np.array_equal(out, np.roll(source, 32, axis=0))


@pytest.mark.parametrize("size", [4, 8, 16])
def test_what_a_small_copy_does_not_read_is_zero(size):
    vector = {4: ("", "%r7"), 8: (".v2", "{%r7, %r8}"), 16: (".v4", "{%r7, %r8, %r9, %r10}")}[size]
    copy = f"""
    and.b32 %r11, %r1, 3; mov.b32 %r12, {size};
    cp.async.ca.shared.global.L2::128B [%r4], [%rd4], {size}, %r11; {_GROUP}
    ld.shared{vector[0]}.b32 {vector[1]}, [%r4]; st.global{vector[0]}.b32 [%rd5], {vector[1]};
    """
    source, out = two_warps(copy)
    want = source.view(np.uint8).copy()
    keep = np.arange(64) % 4  # bytes that each thread reads
    want[np.arange(16)[None] >= keep[:, None]] = 0
    assert np.array_equal(out.view(np.uint8)[:, :size], want[:, :size])


@pytest.mark.parametrize("seed", SEEDS)
def test_an_mbarrier_counts_small_copies(seed):
    body = f"""
    setp.ne.s32 %p1, %r1, 0; @%p1 bra A; mov.b32 %r20, 64;
    mbarrier.init.shared.b64 [%r2+2048], %r20; A: bar.sync 0;
    {_COPY} cp.async.mbarrier.arrive.noinc.shared.b64 [%r2+2048];
    {{.reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [%r2+2048], 0; @P bra D; bra W; D:}}
    {_OTHERS}
    """
    source, out = two_warps(body, seed)
    assert np.array_equal(out, np.roll(source, 32, axis=0))
    # Without .noinc the copies' arrivals come on top of the 64 that the mbarrier still waits for.
    with pytest.raises(Fault, match="64 of 64 arrivals missing"):
        two_warps(body.replace(".noinc", ""), seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(f"{_COPY} cp.async.commit_group; bar.sync 0; {_OTHERS}", id="no-wait"),
        pytest.param(f"{_COPY} {_GROUP} {_OTHERS}", id="no-barrier"),
        pytest.param(
            f"{_COPY} cp.async.commit_group; cp.async.wait_group 1; bar.sync 0; {_OTHERS}",
            id="one-group-too-many",
        ),
        pytest.param(f"{_COPY} cp.async.wait_group 0; bar.sync 0; {_OTHERS}", id="not-committed"),
    ],
)
def test_small_copies_that_are_read_too_early(body, seed):
    with pytest.raises(Fault, match="nothing has written|has written with no barrier"):
        two_warps(body, seed)


@pytest.mark.parametrize("fence", ["fence.proxy.async;", ""])
def test_the_proxy_fence_behind_a_small_copy(fence):
    """A cp.async writes by the generic proxy, unlike bulk copies."""
    body = f"""
    {_COPY} {_GROUP} {fence} bar.sync 0; setp.ne.s32 %p1, %r1, 0; @%p1 bra X; mov.b32 %r9, 1024;
    cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r2], %r9;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; X:
    """
    if fence:
        source, out = two_warps(body)
        assert np.array_equal(out, source)
    else:
        with pytest.raises(Fault, match=r"no fence\.proxy\.async between"):
            two_warps(body)


def test_small_copies_of_forms_that_are_not_known():
    for bad, why in (
        ("cp.async.cg.shared.global [%r4], [%rd4], 8;", "bytes of a copy"),
        ("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
         "[%r4], [%r4], %r3, [%r2];", "copy"),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.inc.u32 [%rd1], [%r2], %r3;",
         "reduction"),
    ):  # fmt: skip
        with pytest.raises(UnsupportedError, match=rf"PTX line \d+: {why}: cp\."):
            two_warps(bad)


# Reductions

TYPES = {
    "f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "u32": np.uint32,
    "s32": np.int32, "u64": np.uint64,
}  # fmt: skip
_REDUCTIONS = [
    ("add", "f32"), ("add", "f16"), ("add", "bf16"), ("add", "u32"), ("add", "u64"),
    ("min", "s32"), ("max", "u32"), ("max", "bf16"), ("and", "u32"), ("xor", "u32"),
]  # fmt: skip
_COMBINE = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "xor": np.bitwise_xor,
}  # fmt: skip


def reduce_into(
    total, parts, instruction, params=("u64", "u64"), first=None, seed=0, fence=True, written=True
):
    """One CTA for each row of ``parts``: the row to shared memory, then reduced into ``total``."""
    body = f"""
    mov.u32 %r1, %tid.x; mov.b32 %r2, smem; mov.u32 %r5, %ctaid.x; shl.b32 %r3, %r1, 4;
    add.s32 %r4, %r2, %r3; ld.param.u64 %rd2, [p1]; shl.b32 %r6, %r5, 9; add.s32 %r6, %r6, %r3;
    cvt.u64.u32 %rd3, %r6; add.s64 %rd4, %rd2, %rd3;
    ld.global.v4.b32 {{%r7, %r8, %r9, %r10}}, [%rd4];
    st.shared.v4.b32 [%r4], {{%r7, %r8, %r9, %r10}}; {"fence.proxy.async;" if fence else ""}
    bar.sync 0; setp.ne.s32 %p1, %r1, 0; @%p1 bra X; mov.b32 %r11, 512; {instruction}
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; X:
    """
    machine = Machine(seed)
    machine.memory.add("total", total.ctypes.data, total.nbytes, written=written)
    machine.memory.add("parts", parts.ctypes.data, parts.nbytes, written=True)
    values = (total.ctypes.data if params[0] == "u64" else first, parts.ctypes.data)
    machine.run([(cases.kernel(body, params), cases.request(32, *values, grid=len(parts)))])


def _numbers(rng, count, kind):
    if np.issubdtype(kind, np.integer):
        return rng.integers(0, 2**31, count).astype(kind)
    return rng.integers(-8, 8, count).astype(np.float32).astype(kind)  # sums are exact


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("operation", "kind"), _REDUCTIONS)
def test_bulk_reductions(operation, kind, seed):
    number, rng = TYPES[kind], np.random.default_rng(3)
    total, parts = aligned(128), aligned(4 * 128)
    count = 512 // np.dtype(number).itemsize
    total.view(number)[:] = _numbers(rng, count, number)
    parts.view(number)[:] = _numbers(rng, 4 * count, number)
    want = total.view(number).copy()
    for part in parts.view(number).reshape(4, count):
        want = _COMBINE[operation](want, part)
    rounding = ".noftz" if kind in ("f16", "bf16") and operation == "add" else ""
    reduce_into(
        total, parts.reshape(4, 128),
        "ld.param.u64 %rd1, [p0]; cp.reduce.async.bulk.global.shared::cta.bulk_group."
        f"{operation}{rounding}.{kind} [%rd1], [%r2], %r11;",
        seed=seed,
    )  # fmt: skip
    assert np.array_equal(total.view(np.uint8), want.view(np.uint8))


def test_a_tensor_reduction_leaves_out_what_lies_out_of_bounds():
    """A box of 8 x 16 fp32 at row 4 of 8 rows: half of it is out of bounds."""
    rng = np.random.default_rng(4)
    total, parts = aligned(8 * 16, np.float32), aligned(3 * 128, np.float32)
    total[:] = rng.integers(-8, 8, 128)
    parts[:] = rng.integers(-8, 8, 3 * 128)
    want = total.reshape(8, 16).copy()
    want[4:] += parts.reshape(3, 8, 16)[:, :4].sum(0)
    raw = descriptor(total, (16, 8), (16, 8))
    reduce_into(
        total, parts.reshape(3, 128),
        "mov.b32 %r12, 0; mov.b32 %r13, 4; mov.b64 %rd9, p0;"
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group"
        " [%rd9, {%r12, %r13}], [%r2];",
        ("desc", "u64"), first=raw, seed=1,
    )  # fmt: skip
    assert np.array_equal(total.reshape(8, 16), want)


_ADD = "ld.param.u64 %rd1, [p0]; cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 "


def test_a_reduction_into_what_nobody_wrote():
    with pytest.raises(Fault, match=r"a reduction into total \+ 0, which nothing has written"):
        reduce_into(
            aligned(128), aligned(128).reshape(1, 128), _ADD + "[%rd1], [%r2], %r11;", written=False
        )


def test_the_proxy_fence_before_a_reduction():
    with pytest.raises(Fault, match=r"no fence\.proxy\.async between"):
        reduce_into(
            aligned(128), aligned(128).reshape(1, 128), _ADD + "[%rd1], [%r2], %r11;", fence=False
        )


# What the emulator does not know, and says so


def test_operands_that_are_not_k_major_are_named():
    registers = ", ".join(f"%r{100 + n}" for n in range(4))
    body = f"""
    wgmma.fence.sync.aligned; setp.eq.b32 %p3, %r1, %r1;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
        {{{registers}}}, %rd3, %rd4, %p3, 1, 1, 0, 1;
    """
    with pytest.raises(UnsupportedError, match=r"PTX line \d+: operand that is not K-major.*wgmma"):
        run("mov.u32 %r1, %tid.x;" + body, 128, aligned(4))


def test_stores_to_tensor_memory_are_named():
    with pytest.raises(UnsupportedError, match=r"PTX line \d+: .*tcgen05\.st"):
        run("mov.b32 %r1, 0; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], {%r1};", 128, aligned(4))
