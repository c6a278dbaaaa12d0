"""The emulator finds what it is there to find: each seeded fault of a kernel is caught."""

from __future__ import annotations

import re

import emulator_cases as cases
import numpy as np
import pytest
import torch
from emulator_cases import COMBINE, DISPATCH, DOWN, GATE_UP, ROUTE, aligned, layer, replaced, run

import moe_ep_jit as moe
from moe_ep_jit import variants
from moe_ep_jit.tools.emulator.fault import DeadlockFault, Fault, UnsupportedError
from moe_ep_jit.tools.emulator.host import c_compiler
from moe_ep_jit.tools.emulator.layer import Object
from moe_ep_jit.tools.emulator.machine import Machine

pytestmark = pytest.mark.skipif(c_compiler() is None, reason="no C compiler for the stand-in")

SEEDS = range(5)


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("tile_n", [32, 128])
def test_the_kernels_as_they_are_have_no_fault(fmt, tile_n):
    """What every other test here relies on: nothing is found where nothing was changed."""
    for seed in SEEDS:
        assert layer(fmt, tile_n).error(seed=seed) < 1e-3


# Faults in our kernels


@pytest.mark.parametrize("number", [ROUTE, DISPATCH, GATE_UP, DOWN, COMBINE])
def test_a_missing_grid_dependency(number):
    with pytest.raises(Fault, match="nothing has written|has written with no|may still run"):
        layer().error(replaced(number, r"griddepcontrol\.wait;", ""))


@pytest.mark.parametrize("number", [GATE_UP, DOWN])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_wrong_parity(number, seed):
    wait = r"(try_wait\.parity\.shared\.b64 \S+ \[\S+\], )[^,]+,"
    with pytest.raises(Fault):
        layer(num_sms=1).error(replaced(number, wait, r"\g<1>1,"), seed=seed)


@pytest.mark.parametrize("number", [GATE_UP, DOWN])
def test_expected_bytes_16_short(number):
    def mutate(text):
        parts = re.split(r"(?=^\.visible \.entry)", text, flags=re.MULTILINE)
        part = parts[number + 1]
        register = re.search(r"arrive\.expect_tx\.\S+\s+\S+ \[.*?\], (%r\d+);", part).group(1)
        value = re.compile(rf"(mov\.b32 \t{register}, )(\d+);")
        assert value.search(part)
        parts[number + 1] = value.sub(lambda m: f"{m[1]}{int(m[2]) - 16};", part)
        return "".join(parts)

    with pytest.raises(Fault, match="more bytes have landed|-16 bytes pending"):
        layer().error(mutate)


@pytest.mark.parametrize("number", [GATE_UP, DOWN])
def test_a_missing_arrive(number):
    arrive = r"mbarrier\.arrive\.shared\.b64[^;]+;"
    with pytest.raises(DeadlockFault, match="arrivals missing"):
        layer(num_sms=1).error(replaced(number, arrive, ""))


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("number", [GATE_UP, DOWN])
def test_accumulators_read_before_the_wait(fmt, number):
    with pytest.raises(Fault, match="wgmma"):
        layer(fmt).error(replaced(number, r"wgmma\.wait_group[^;]+;", ""))


def test_a_missing_wgmma_fence():
    with pytest.raises(Fault, match=r"no wgmma\.fence"):
        layer().error(replaced(GATE_UP, r"wgmma\.fence[^;]+;", ""))


def test_a_missing_cluster_barrier_at_the_start():
    """The peer's mbarriers may not be initialised yet when the first multicast lands there."""
    barrier = r"barrier\.cluster\.(arrive|wait);"
    found = []
    for seed in SEEDS:
        try:
            layer(tile_n=128).error(replaced(GATE_UP, barrier, ""), seed=seed)
        except Fault as fault:
            found.append(fault)
    assert found


def test_a_missing_release_between_ctas():
    """Route's last CTA reads what the others have counted: without fences it may not."""
    problem = moe.Problem(
        hidden=64, intermediate=64, num_experts=3, top_k=2, max_tokens=600, format="mxfp8"
    )
    w13, w2 = torch.randn(3, 128, 64).bfloat16(), torch.randn(3, 64, 64).bfloat16()
    weights = moe.prepare_weights(w13, w2, problem, backend="emulator")
    config = variants.ladder("sm_90a", weights.operand)[2]
    x, ids = torch.randn(600, 64).bfloat16(), torch.randint(3, (600, 2), dtype=torch.int32)
    for text in (lambda t: t, lambda t: re.sub(r"fence\.acq_rel\.gpu;", "", t)):
        ws = moe.Workspace(weights.problem, device="cpu", backend="emulator")
        bound = moe.launch.bind(ws, weights).rung(ws, weights, "bf16", config)
        changed = text(bound.function.text)
        if changed == bound.function.text:
            moe.dispatch(x, ids, ws, weights, config=config)
            continue
        bound.function = Object(bound.function.folder, changed)
        with pytest.raises(Fault, match="with no barrier, release and acquire"):
            moe.dispatch(x, ids, ws, weights, config=config)


def test_one_tile_too_many():
    """A schedule that goes one tile beyond the last: its entry was never written."""
    case = layer()
    ws = case.workspace()
    moe.dispatch(case.x, case.ids, ws, case.weights, config=case.config)
    ws.views(case.problem, case.weights.operand)["tiles"][0] += 1
    with pytest.raises(Fault, match="reads tiles .* which nothing has written"):
        moe.gate_up(ws, case.weights)


def test_a_token_too_many():
    case = layer()
    ws = case.workspace()
    bound = case.object(ws)
    args = bound.args
    args[list(moe.layout.LAUNCH_ARGS).index("tokens")] = cases.TOKENS + 1

    def run_with_one_more(given, tensors):
        given[list(moe.layout.LAUNCH_ARGS).index("tokens")] = cases.TOKENS + 1
        type(bound).run(bound, given, tensors)

    bound.run = run_with_one_more
    with pytest.raises(Fault, match="no allocation holds|runs past its end"):
        moe.moe_forward(case.x, case.ids, case.topk_weights, case.weights, ws, config=case.config)


@pytest.mark.parametrize("field", ["stride", "swizzle", "box"])
def test_a_wrong_descriptor(field):
    def change(requests):
        for r in requests:
            if "GroupedGemm" in r.kernel:
                words = np.frombuffer(r.params, np.uint32).copy()
                if field == "stride":
                    words[3] += 1
                elif field == "swizzle":
                    words[2] ^= 1 << 13
                else:
                    words[14] -= 1
                r.params = words.tobytes()
        return requests

    try:
        error = layer().error(requests=change)
    except Fault:
        return
    assert not error < 0.1


# Faults in small kernels


_TID = "mov.u32 %r1, %tid.x; mov.b32 %r2, smem; shl.b32 %r3, %r1, 2; add.s32 %r4, %r2, %r3;"


def test_a_register_that_nothing_wrote():
    with pytest.raises(Fault, match=r"register is read(.|\n)*add\.s32 %r1, %r2, 1"):
        run("add.s32 %r1, %r2, 1;", 32, aligned(4))


def test_shared_memory_that_nothing_wrote():
    with pytest.raises(Fault, match="nothing has written"):
        run(f"{_TID} ld.shared.b32 %r5, [%r4];", 32, aligned(4))


def test_global_memory_that_nothing_wrote():
    body = "ld.param.u64 %rd1, [p0]; ld.global.b32 %r1, [%rd1];"
    run(body, 32, aligned(4))
    with pytest.raises(Fault, match=r"reads p0 \+ 0, which nothing has written"):
        run(body, 32, aligned(4), written=False)


@pytest.mark.parametrize(
    ("offset", "found"), [(16, "16"), (2, "not aligned"), (-4, "no allocation")]
)
def test_bounds_and_alignment_in_global_memory(offset, found):
    body = f"ld.param.u64 %rd1, [p0]; ld.global.b32 %r1, [%rd1+{offset}];"
    with pytest.raises(Fault, match=found):
        run(body, 32, aligned(4))


def test_bounds_of_shared_memory():
    with pytest.raises(Fault, match="st.shared of 4 bytes at shared 0x480"):
        run(f"{_TID} st.shared.b32 [%r4], %r1;", 64, aligned(4), shared=128)


def test_a_missing_barrier_between_warps():
    exchange = "st.shared.b32 [%r4], %r1; {} xor.b32 %r5, %r3, 128; add.s32 %r6, %r2, %r5;"
    read = "ld.shared.b32 %r7, [%r6];"
    run(_TID + exchange.format("bar.sync 0;") + read, 64, aligned(4))
    with pytest.raises(Fault, match="with no barrier"):
        run(_TID + exchange.format("") + read, 64, aligned(4))


def test_an_elected_arrive_does_not_release_the_other_lanes():
    """Lane 0's arrive passes on what lane 0 wrote; the other lanes' stores need their own."""
    body = """
    setp.ne.s32 %p1, %r1, 0; @%p1 bra INIT;
    mov.b32 %r20, {count}; mbarrier.init.shared.b64 [%r2+2048], %r20;
    INIT: bar.sync 0;
    setp.gt.s32 %p2, %r1, 31; @%p2 bra READ;
    st.shared.b32 [%r4], %r1; {who}
    mbarrier.arrive.shared.b64 %rd1, [%r2+2048];
    bra DONE;
    READ: {{.reg .pred P;
    W: mbarrier.try_wait.parity.shared.b64 P, [%r2+2048], 0; @P bra D; bra W; D:}}
    add.s32 %r6, %r4, -128; ld.shared.b32 %r7, [%r6];
    DONE:
    """
    run(_TID + body.format(count=32, who=""), 64, aligned(4))
    with pytest.raises(Fault, match="with no barrier"):
        run(_TID + body.format(count=1, who="@%p1 bra DONE;"), 64, aligned(4))


def test_an_mbarrier_that_gets_too_many_arrivals():
    body = "mov.b32 %r2, smem; mov.b32 %r3, 16; setp.ne.s32 %p1, %r1, 0; @%p1 bra X;"
    body = "mov.u32 %r1, %tid.x;" + body + "mbarrier.init.shared.b64 [%r2], %r3; X: bar.sync 0;"
    with pytest.raises(Fault, match="arrivals are more than are expected"):
        run(body + "mbarrier.arrive.shared.b64 %rd1, [%r2];", 32, aligned(4))


def test_a_deadlock_says_who_waits_on_what():
    body = """
    mov.u32 %r1, %tid.x; setp.gt.s32 %p1, %r1, 31; @%p1 bra X;
    bar.sync 1, 64;
    X:
    """
    with pytest.raises(DeadlockFault, match=r"(?s)warps 0, PTX line.*barrier 1: 32 of 64 threads"):
        run(body, 64, aligned(4))


_FENCED = [pytest.param("fence.proxy.async;", id="fenced"), pytest.param("", id="not-fenced")]


@pytest.mark.parametrize("fence", _FENCED)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_proxy_fence_before_a_bulk_store(fence, seed):
    out = aligned(32)
    body = f"""{_TID}
    st.shared.b32 [%r4], %r1; {fence} bar.sync 0;
    setp.ne.s32 %p1, %r1, 0; @%p1 bra X;
    ld.param.u64 %rd1, [p0]; mov.b32 %r9, 128;
    cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], %r9;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    X:
    """
    if fence:
        run(body, 32, out, seed=seed)
        assert (out == np.arange(32)).all()
    else:
        with pytest.raises(Fault, match=r"no fence\.proxy\.async between"):
            run(body, 32, out, seed=seed)


def _wgmma_body(fence):
    """Every element 1 in A [64, 16] and B [8, 16], written by ordinary stores."""
    accumulators = ", ".join(f"%r{100 + n}" for n in range(4))
    return f"""{_TID}
    mov.b32 %r5, 0x3F803F80; mov.b32 %r6, %r4;
    st.shared.b32 [%r4], %r5; st.shared.b32 [%r4+512], %r5; st.shared.b32 [%r4+1024], %r5;
    st.shared.b32 [%r4+1536], %r5; st.shared.b32 [%r4+2048], %r5;
    {fence} bar.sync 0;
    shr.u32 %r7, %r2, 4; and.b32 %r7, %r7, 0x3FFF; cvt.u64.u32 %rd2, %r7;
    or.b64 %rd3, %rd2, {(128 >> 4) << 16 | (256 >> 4) << 32};
    add.s64 %rd4, %rd3, {2048 >> 4};
    mov.b32 %r100, 0; mov.b32 %r101, 0; mov.b32 %r102, 0; mov.b32 %r103, 0;
    setp.ne.b32 %p3, %r5, 0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16
        {{{accumulators}}}, %rd3, %rd4, %p3, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
    ld.param.u64 %rd1, [p0]; cvt.u64.u32 %rd5, %r3; add.s64 %rd6, %rd1, %rd5;
    st.global.b32 [%rd6], %r103;
    """


@pytest.mark.parametrize("fence", _FENCED)
def test_the_proxy_fence_before_a_wgmma(fence):
    out = aligned(128)
    if fence:
        run(_wgmma_body(fence), 128, out)
        assert (out.view(np.float32) == 16).all()
    else:
        with pytest.raises(Fault, match=r"no fence\.proxy\.async between"):
            run(_wgmma_body(fence), 128, out)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("order", ["release", "relaxed"])
def test_an_arrival_flag(order, seed):
    """CTA 0 writes and raises a flag; CTA 1 waits for it and reads."""
    body = f"""
    ld.param.u64 %rd1, [p0]; mov.u32 %r1, %ctaid.x; setp.ne.s32 %p1, %r1, 0; @%p1 bra READ;
    mov.b32 %r2, 7; st.global.b32 [%rd1], %r2; mov.b32 %r3, 1;
    st.{order}.gpu.global.b32 [%rd1+64], %r3; bra DONE;
    READ: ld.acquire.gpu.global.b32 %r4, [%rd1+64]; setp.eq.s32 %p2, %r4, 0; @%p2 bra READ;
    ld.global.b32 %r5, [%rd1]; st.global.b32 [%rd1+128], %r5;
    DONE:
    """
    data = aligned(64)
    if order == "release":
        run(body, 32, data, seed=seed, grid=2)
        assert data[32] == 7
    else:
        with pytest.raises(Fault, match="with no barrier, release and acquire"):
            run(body, 32, data, seed=seed, grid=2)


def test_a_dependent_grid_may_not_write_early():
    first = cases.kernel(
        "griddepcontrol.launch_dependents; bar.sync 0; ld.param.u64 %rd1, [p0];"
        "mov.b32 %r1, 1; st.global.b32 [%rd1], %r1; bar.sync 0;"
    )
    for wait in ("griddepcontrol.wait;", ""):
        second = cases.kernel(
            f"{wait} ld.param.u64 %rd1, [p0]; mov.b32 %r1, 2; st.global.b32 [%rd1+16], %r1;"
        )
        data = aligned(8)
        machine = Machine(3)
        machine.memory.add("p0", data.ctypes.data, data.nbytes, written=True)
        work = [
            (first, cases.request(32, data.ctypes.data)),
            (second, cases.request(32, data.ctypes.data, dependent=True)),
        ]
        if wait:
            machine.run(work)
            assert data[0] == 1
            assert data[4] == 2
        else:
            with pytest.raises(Fault, match="before its griddepcontrol.wait"):
                machine.run(work)


def test_an_instruction_that_is_not_known_is_named_with_its_line():
    with pytest.raises(UnsupportedError, match=r"PTX line \d+: .*frobnicate\.b32 %r1, %r2"):
        run("frobnicate.b32 %r1, %r2;", 32, aligned(4))
    with pytest.raises(UnsupportedError, match=r"PTX line \d+: modifier sat"):
        run("mov.b32 %r2, 1; add.sat.s32 %r1, %r2, %r2;", 32, aligned(4))


# Tensor memory


def _tensor_core_body(wait=True, free=True, add=0):
    """128 x 8 x 16 of ones on the tensor core of sm_100a, back through tensor memory."""
    results = ", ".join(f"%r{100 + n}" for n in range(8))
    fills = "".join(f"st.shared.b32 [%r4+{512 * n}], %r5;" for n in range(9))
    loop = """{.reg .pred P;
    W: mbarrier.try_wait.parity.shared.b64 P, [%r2+8192], 0; @P bra D; bra W; D:}"""
    return f"""{_TID}
    mov.b32 %r5, 0x3C003C00; {fills} fence.proxy.async;
    setp.ne.s32 %p1, %r1, 0; @%p1 bra A; mov.b32 %r6, 1; mbarrier.init.shared.b64 [%r2+8192], %r6;
    A: bar.sync 0; shr.u32 %r7, %r1, 5; setp.ne.s32 %p2, %r7, 0; @%p2 bra B;
    add.s32 %r8, %r2, 8200; mov.b32 %r9, 32;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r8], %r9;
    B: bar.sync 0; ld.shared.b32 %r10, [%r2+8200]; @%p1 bra C;
    shr.u32 %r11, %r2, 4; cvt.u64.u32 %rd2, %r11;
    or.b64 %rd3, %rd2, {8 << 16 | 16 << 32 | 1 << 46}; add.s64 %rd4, %rd3, {4096 >> 4};
    mov.b32 %r12, {1 << 4 | 1 << 17 | 8 << 24}; mov.pred %p3, {add};
    tcgen05.mma.cta_group::1.kind::f16 [%r10], %rd3, %rd4, %r12, %p3;
    tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2+8192];
    C: {loop if wait else ""}
    shl.b32 %r13, %r7, 21; add.s32 %r14, %r10, %r13;
    tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{results}}}, [%r14];
    tcgen05.wait::ld.sync.aligned;
    ld.param.u64 %rd1, [p0]; cvt.u64.u32 %rd5, %r3; add.s64 %rd6, %rd1, %rd5;
    st.global.b32 [%rd6], %r107; bar.sync 0; @%p2 bra E;
    {"tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, %r9;" if free else ""}
    E:
    """


def test_a_product_in_tensor_memory():
    out = aligned(128)
    run(_tensor_core_body(), 128, out, shared=16384)
    assert (out.view(np.float32) == 16).all()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"free": False}, "tensor memory was not freed"),
        ({"wait": False}, "tcgen05.ld of "),
        ({"add": -1}, "adds to columns that nothing has written"),
    ],
)
def test_faults_around_tensor_memory(change, found):
    with pytest.raises(Fault, match=found):
        run(_tensor_core_body(**change), 128, aligned(128), shared=16384)
