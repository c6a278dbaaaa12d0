"""Several ranks, and several streams of a rank, on one emulated machine."""

from __future__ import annotations

import emulator_cases as cases
import pytest
import torch
from emulator_cases import aligned, layer

import moe_ep_jit as moe
from moe_ep_jit import reference
from moe_ep_jit.tools.emulator.fault import DeadlockFault, Fault
from moe_ep_jit.tools.emulator.host import c_compiler
from moe_ep_jit.tools.emulator.launches import Stream
from moe_ep_jit.tools.emulator.layer import ranks, together
from moe_ep_jit.tools.emulator.machine import Machine

SEEDS = range(5)

#: Lane 0 of each warp alone goes on.
_ONE = "mov.u32 %r1, %tid.x; setp.ne.s32 %p1, %r1, 0; @%p1 bra DONE; ld.param.u64 %rd1, [p0];"
_POST = (
    _ONE
    + """
    mov.b32 %r2, 7; st.global.b32 [%rd1], %r2; mov.b32 %r3, 1; {post} DONE:
"""
)
_READ = (
    _ONE
    + """
    ld.param.u64 %rd2, [p1];
    WAIT: {wait} setp.eq.s32 %p2, %r4, 0; @%p2 bra WAIT;
    {after} ld.global.b32 %r5, [%rd1]; st.global.b32 [%rd2], %r5; DONE:
"""
)


def exchange(post, wait, seed, after="", rank=1, shared=None, private=False):
    """Rank 0 writes and posts, another waits for the flag and reads what rank 0 wrote."""
    machine = Machine(seed)
    data, out = aligned(32), aligned(32)
    machine.memory.add("data", data.ctypes.data, 128, written=True, rank=0 if private else None)
    machine.memory.add("out", out.ctypes.data, 128, written=True, rank=rank)
    writer, reader = Stream(0), Stream(rank)
    writer.launch(cases.kernel(_POST.format(post=post)), cases.request(32, data.ctypes.data))
    reader.launch(
        cases.kernel(_READ.format(wait=wait, after=after), ("u64", "u64")),
        cases.request(32, data.ctypes.data, out.ctypes.data),
    )
    machine.run_streams([reader, writer])
    return int(out[0])


POSTS = {
    "st": "st.release.sys.global.b32 [%rd1+64], %r3;",
    "red": "red.release.sys.global.add.u32 [%rd1+64], %r3;",
    "fence": "fence.acq_rel.sys; st.relaxed.sys.global.b32 [%rd1+64], %r3;",
    "membar": "membar.sys; st.volatile.global.b32 [%rd1+64], %r3;",
}
WAITS = {
    "ld": ("ld.acquire.sys.global.b32 %r4, [%rd1+64];", ""),
    "fence": ("ld.relaxed.sys.global.b32 %r4, [%rd1+64];", "fence.acq_rel.sys;"),
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("post", POSTS)
def test_a_flag_between_ranks(post, wait):
    for seed in SEEDS:
        assert exchange(POSTS[post], WAITS[wait][0], seed, WAITS[wait][1]) == 7


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("post", "wait", "after"),
    [
        pytest.param("st.relaxed.sys.global.b32 [%rd1+64], %r3;", *WAITS["ld"], id="relaxed-st"),
        pytest.param("red.relaxed.sys.global.add.u32 [%rd1+64], %r3;", *WAITS["ld"], id="red"),
        pytest.param("st.release.gpu.global.b32 [%rd1+64], %r3;", *WAITS["ld"], id="gpu-st"),
        pytest.param(
            "fence.acq_rel.gpu; st.relaxed.sys.global.b32 [%rd1+64], %r3;", *WAITS["ld"],
            id="gpu-fence",
        ),
        pytest.param(POSTS["st"], "ld.relaxed.sys.global.b32 %r4, [%rd1+64];", "", id="relaxed-ld"),
        pytest.param(POSTS["st"], "ld.acquire.gpu.global.b32 %r4, [%rd1+64];", "", id="gpu-ld"),
        pytest.param(POSTS["st"], WAITS["fence"][0], "fence.acq_rel.gpu;", id="gpu-fence-behind"),
    ],
)  # fmt: skip
def test_what_does_not_order_ranks(post, wait, after, seed):
    with pytest.raises(Fault, match="with no barrier, release and acquire"):
        exchange(post, wait, seed, after)


def test_a_gpu_scope_orders_streams_of_one_rank():
    post = "st.release.gpu.global.b32 [%rd1+64], %r3;"
    assert exchange(post, "ld.acquire.gpu.global.b32 %r4, [%rd1+64];", 1, rank=0) == 7


def test_memory_that_is_another_ranks_own():
    with pytest.raises(Fault, match=r"ld\.global by rank 1 at data, which is rank 0's alone"):
        exchange(POSTS["st"], WAITS["ld"][0], 0, private=True)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fence", ["fence.proxy.async;", ""])
def test_a_copy_of_what_a_peer_wrote_needs_a_proxy_fence(fence, seed):
    """The bulk copy's bytes came by ordinary stores of another rank, behind release and acquire."""
    after = f"""
    mov.b32 %r10, smem; mov.b32 %r11, 1; mbarrier.init.shared.b64 [%r10], %r11; {fence}
    mov.b32 %r12, 16; mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r10], %r12;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
        [%r10+64], [%rd1], %r12, [%r10];
    {{.reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [%r10], 0; @P bra D; bra W; D:}}
    ld.shared.b32 %r13, [%r10+64]; st.global.b32 [%rd2+4], %r13;
    """
    if fence:
        assert exchange(POSTS["st"], WAITS["ld"][0], seed, after) == 7
    else:
        with pytest.raises(Fault, match=r"no fence\.proxy\.async between"):
            exchange(POSTS["st"], WAITS["ld"][0], seed, after)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_release_covers_a_bulk_store_that_was_waited_for(seed):
    """Until wait_group, and not only its .read, what a bulk store writes is nobody's to publish."""
    post = """
    mov.b32 %r10, smem; st.shared.v4.b32 [%r10], {{%r2, %r2, %r2, %r2}}; fence.proxy.async;
    mov.b32 %r12, 16; add.s64 %rd2, %rd1, 16;
    cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r10], %r12;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group{} 0; """
    read = "ld.global.b32 %r6, [%rd1+16]; st.global.b32 [%rd2+4], %r6;"
    assert exchange(post.format("") + POSTS["st"], WAITS["ld"][0], seed, read) == 7
    with pytest.raises(Fault, match="an asynchronous copy of rank 0.* has written with no barrier"):
        exchange(post.format(".read") + POSTS["st"], WAITS["ld"][0], seed, read)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("wait", WAITS)
def test_a_flag_raised_by_an_ordinary_store(wait, seed):
    """On hardware a peer may never see it; here the strong read that meets it is a race."""
    with pytest.raises(Fault, match=r"reads data \+ 64, which .* has written with no barrier"):
        exchange("st.global.b32 [%rd1+64], %r3;", WAITS[wait][0], seed, WAITS[wait][1])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_flag_that_nobody_posts_is_a_deadlock(seed):
    with pytest.raises(DeadlockFault, match=r"rank 1, launch 0(.|\n)*data \+ 64, by ld.acquire"):
        exchange("", WAITS["ld"][0], seed)


def test_a_warp_that_spins_holds_up_no_other_warp():
    """Warp 0 waits for what warp 1 of its own CTA posts, with no barrier between."""
    body = """
    mov.u32 %r1, %tid.x; ld.param.u64 %rd1, [p0]; setp.gt.s32 %p1, %r1, 31; @%p1 bra POST;
    WAIT: ld.acquire.gpu.global.b32 %r4, [%rd1]; setp.eq.s32 %p2, %r4, 0; @%p2 bra WAIT;
    bra DONE;
    POST: mov.b32 %r3, 1; st.release.gpu.global.b32 [%rd1], %r3;
    DONE:
    """
    for seed in SEEDS:
        cases.run(body, 64, aligned(4), seed=seed)


_BOUNDED = (
    _ONE
    + """
    mov.u64 %rd3, %globaltimer; mov.b32 %r6, 0;
    WAIT: ld.acquire.sys.global.b32 %r4, [%rd1+64]; setp.ne.s32 %p2, %r4, 0; @%p2 bra OVER;
    mov.u64 %rd4, %globaltimer; sub.s64 %rd5, %rd4, %rd3; setp.gt.u64 %p3, %rd5, 10000000000;
    @!%p3 bra WAIT;
    mov.b32 %r6, 1;
    OVER: st.global.b32 [%rd1+96], %r6; DONE:
"""
)
_LATE = (
    _ONE
    + """
    mov.b32 %r2, 0;
    LOOP: st.volatile.global.b32 [%rd1+32], %r2; ld.volatile.global.b32 %r3, [%rd1+32];
    add.s32 %r2, %r2, 1; setp.lt.s32 %p2, %r2, 3000; @%p2 bra LOOP;
    mov.b32 %r3, 1; st.release.sys.global.b32 [%rd1+64], %r3; DONE:
"""
)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("posts", [True, False])
def test_a_bounded_wait_runs_out_only_where_nothing_comes(posts, seed):
    """Ten seconds on %globaltimer: not gone while a slow peer works, over soon where none does."""
    machine, data = Machine(seed), aligned(32)
    machine.memory.add("data", data.ctypes.data, 128, written=True)
    waits, late = Stream(0), Stream(1)
    waits.launch(cases.kernel(_BOUNDED), cases.request(32, data.ctypes.data))
    if posts:
        late.launch(cases.kernel(_LATE), cases.request(32, data.ctypes.data))
    machine.run_streams([waits, late])
    assert data[24] == (0 if posts else 1)


_STORED = _ONE + "mov.b32 %r2, {value}; st.global.b32 [%rd1], %r2; DONE:"
_COPIED = _ONE + "ld.global.b32 %r2, [%rd1]; st.global.b32 [%rd1+64], %r2; DONE:"


def test_streams_of_one_rank_are_ordered_by_events_alone():
    """Without the event the copy comes before what it copies, or a race is found."""
    races = []
    for seed in SEEDS:
        for ordered in (True, False):
            machine, data = Machine(seed), aligned(32)
            machine.memory.add("data", data.ctypes.data, 128, written=True)
            first, second = Stream(), Stream()
            for value in (1, 2):
                body = _STORED.format(value=value)
                first.launch(cases.kernel(body), cases.request(32, data.ctypes.data))
            if ordered:
                second.wait(first.record())
            second.launch(cases.kernel(_COPIED), cases.request(32, data.ctypes.data))
            try:
                machine.run_streams([second, first])
            except Fault as fault:
                races.append((ordered, str(fault)))
            else:
                assert data[16] == (2 if ordered else 0)
    assert races
    for ordered, found in races:
        assert not ordered
        assert "with no barrier, release and acquire" in found


@pytest.mark.skipif(c_compiler() is None, reason="no C compiler for the stand-in")
@pytest.mark.parametrize("seed", [0, 1])
def test_layers_of_two_ranks_run_together(seed):
    """Two ranks that have nothing to say to each other: numbers as ever, each in its own memory."""
    case = layer()
    emulators = ranks(2, seed=seed)
    spaces = [case.workspace() for _ in emulators]
    ids = [case.ids, case.ids.flip(0).contiguous()]
    for ws, emulator in zip(spaces, emulators, strict=True):
        ws.emulator = emulator
    with together(*emulators):
        found = [
            moe.moe_forward(case.x, i, case.topk_weights, case.weights, ws, config=case.config)
            for i, ws in zip(ids, spaces, strict=True)
        ]
    for y, i in zip(found, ids, strict=True):
        want = reference.moe_forward(case.x, i, case.topk_weights, case.plain)
        assert reference.error(y, want).whole < 1e-3
    assert not torch.equal(*found)


@pytest.mark.skipif(c_compiler() is None, reason="no C compiler for the stand-in")
def test_two_streams_of_a_layer_need_an_event():
    """Two calls on one workspace: on two streams, ordered by an event, or a Fault."""
    case = layer()
    for ordered in (True, False):
        ws = case.workspace(seed=1)
        emulator = ws.emulator

        def call(ws=ws):
            return moe.moe_forward(
                case.x, case.ids, case.topk_weights, case.weights, ws, config=case.config
            )

        def both(emulator=emulator, ordered=ordered, call=call):
            with together(emulator):
                first = call()
                event = emulator.record()
                emulator.stream = 1
                if ordered:
                    emulator.wait(event)
                return first, call()

        if ordered:
            first, second = both()
            assert torch.equal(first, second)
            assert reference.error(first, case.want).whole < 1e-3
        else:
            with pytest.raises(Fault):
                both()
