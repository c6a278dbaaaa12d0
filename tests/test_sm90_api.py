"""The forward on a Hopper GPU: output, stages, streams, graphs and what a call costs.

What needs no stream, graph or clock of a GPU runs on the emulator too.
"""

from __future__ import annotations

import sys
import time
from functools import partial

import pytest
import torch
from conftest import DEVICE, EMULATED, poison_bytes
from sm90_cases import (
    ACTS,
    BACKEND,
    EXPERTS,
    FEW,
    HIDDEN,
    INTERMEDIATE,
    MAIN,
    MANY,
    MAX_TOKENS,
    RUNGS,
    assert_close,
    bits,
    chosen,
    device_events,
    make_inputs,
    make_layer,
    make_workspace,
    num_kernels,
    synchronize,
    uneven_ids,
)

import moe_ep_jit as moe
from moe_ep_jit import layout, variants

pytestmark = pytest.mark.sm90


# Output


@pytest.mark.emulated
@pytest.mark.parametrize("name", chosen(MAIN, "mxfp8"))
def test_the_result_is_the_workspaces_memory_or_out_and_nothing_is_copied(name):
    layer = make_layer(name)
    inputs = make_inputs(FEW)
    config = variants.choose_rung(layer.weights.problem, "sm_90a", FEW, layer.weights.operand)
    y = layer(*inputs)
    assert y.data_ptr() == layer.ws.output.data_ptr()
    assert y.untyped_storage().data_ptr() == layer.ws.output.untyped_storage().data_ptr()
    assert y.shape == (FEW, HIDDEN)
    same = y.clone()
    out = torch.empty(FEW + 6, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    poison_bytes(out)
    layer.poison()
    assert layer(*inputs, out=out) is out
    assert torch.equal(bits(out[:FEW]), bits(same))
    assert out[FEW:].isnan().all()
    assert layer.ws.output.isnan().all()
    for options in ({}, {"out": out}):
        events = device_events(lambda options=options: layer(*inputs, **options))
        assert len(events) == num_kernels(config), events
        assert not [e for e in events if e.lower().startswith("mem")], events


@pytest.mark.emulated
@pytest.mark.parametrize(("name", "config"), [p for p in RUNGS if p.values[0] in MAIN])
def test_number_of_kernels_of_every_rung(name, config):
    layer = make_layer(name)
    inputs = make_inputs(FEW)
    events = device_events(lambda: layer(*inputs, config=config))
    assert len(events) == num_kernels(config), events


@pytest.mark.emulated
@pytest.mark.parametrize("name", chosen(ACTS, "nvfp4", "mxfp8-act-bf16"))
def test_out_may_alias_x(name):
    layer = make_layer(name)
    x, ids, topk_weights = make_inputs(MANY)
    same = layer(x, ids, topk_weights).clone()
    layer.poison()
    assert layer(x, ids, topk_weights, out=x) is x
    assert torch.equal(bits(x), bits(same))


@pytest.mark.emulated
def test_a_result_may_be_the_next_input():
    layer = make_layer("mxfp8")
    x, ids, topk_weights = make_inputs(FEW)
    y = layer(x, ids, topk_weights)
    same = layer(y.clone(), ids, topk_weights).clone()
    y = layer(x, ids, topk_weights)
    assert torch.equal(bits(layer(y, ids, topk_weights)), bits(same))


@pytest.mark.emulated
def test_zero_tokens():
    layer = make_layer("mxfp8")
    config = variants.choose_rung(layer.weights.problem, "sm_90a", 0, layer.weights.operand)
    layer.poison()
    inputs = make_inputs(0)
    y = layer(*inputs)
    assert y.shape == (0, HIDDEN)
    synchronize()
    assert layer.ws.output.isnan().all()
    assert len(device_events(lambda: layer(*inputs))) == num_kernels(config)


@pytest.mark.emulated
def test_debug_alternates_and_poisons_the_result_before():
    layer = make_layer("mxfp8")
    ws = make_workspace(layer.weights, debug=True)
    first, second = make_inputs(FEW), make_inputs(FEW - 5)
    same = layer(*second).clone()
    y1 = moe.moe_forward(*first, layer.weights, ws)
    assert torch.isfinite(y1).all()
    y2 = moe.moe_forward(*second, layer.weights, ws)
    assert y1.isnan().all()
    assert torch.equal(bits(y2), bits(same))
    x, ids, topk_weights = second
    chained = moe.moe_forward(y2, ids, topk_weights, layer.weights, ws)
    assert torch.equal(bits(chained), bits(layer(same, ids, topk_weights)))
    ws.close()


@pytest.mark.emulated
def test_layers_that_differ_share_a_workspace():
    a, b = make_layer("mxfp8"), make_layer("nvfp4")
    ws = moe.Workspace(
        [a.weights.problem, b.weights.problem], debug=False, device=DEVICE, backend=BACKEND
    )
    for layer in (a, b):
        if not EMULATED:
            moe.warmup(ws, layer.weights)
    for tokens in (3, MANY):
        for layer in (a, b, a):
            inputs = make_inputs(tokens)
            same = layer(*inputs).clone()
            y = moe.moe_forward(*inputs, layer.weights, ws)
            assert torch.equal(bits(y), bits(same))
    ws.close()


@pytest.mark.emulated
def test_a_view_outlives_the_workspace():
    layer = make_layer("mxfp8")
    ws = make_workspace(layer.weights)
    inputs = make_inputs(FEW)
    y = moe.moe_forward(*inputs, layer.weights, ws)
    ws.close()
    del ws
    assert torch.equal(bits(y), bits(layer(*inputs)))


@pytest.mark.emulated
def test_module_returns_the_callers_own_tensor_without_a_copy():
    layer = make_layer("mxfp8")
    ws = make_workspace(layer.weights) if EMULATED else None  # its own would be the reference's
    module = moe.MoELayer.from_prepared(layer.weights, workspace=ws)
    if not EMULATED:
        module.warmup()
    inputs = make_inputs(FEW)
    same = layer(*inputs).clone()
    own = module(*inputs)
    view = module(*inputs, return_workspace_view=True)
    assert view.data_ptr() == module.workspace.output.data_ptr() != own.data_ptr()
    assert torch.equal(bits(own), bits(same))
    assert torch.equal(bits(view), bits(same))
    config = variants.choose_rung(layer.weights.problem, "sm_90a", FEW, layer.weights.operand)
    assert len(device_events(lambda: module(*inputs))) == num_kernels(config)
    module.close()


# Stages


@pytest.mark.emulated
@pytest.mark.parametrize("name", chosen(ACTS, "mxfp8", "nvfp4-act-nvfp4"))
@pytest.mark.parametrize("quantized", [False, True], ids=["bf16-x", "quantized-x"])
@pytest.mark.parametrize("tokens", chosen([1, FEW, MAX_TOKENS], FEW))
def test_stages_apart_equal_the_whole(name, quantized, tokens):
    layer = make_layer(name)
    x, _, topk_weights = make_inputs(tokens)
    ids = uneven_ids(tokens)
    same = layer(x, ids, topk_weights).clone()
    layer.poison()
    moe.dispatch(
        moe.quantize(x, layer.weights.problem) if quantized else x, ids, layer.ws, layer.weights
    )
    moe.gate_up(layer.ws, layer.weights)
    moe.down(layer.ws, layer.weights)
    out = torch.empty_like(x)
    assert moe.combine(ids, topk_weights, layer.ws, layer.weights, out=out) is out
    assert torch.equal(bits(out), bits(same))


# Streams


def test_work_goes_to_the_current_stream_and_the_host_does_not_wait():
    layer = make_layer("mxfp8")
    inputs = make_inputs(64)
    same = layer(*inputs).clone()
    side = torch.cuda.Stream()  # the first of a process waits for the device
    with torch.cuda.stream(side):
        layer(*inputs)
    torch.cuda.synchronize()
    busy, done = torch.cuda.Event(), torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # about a second on the default stream
    busy.record()
    with torch.cuda.stream(side):
        y = layer(*inputs)
        done.record()
    done.synchronize()
    assert not busy.query(), "the call waited for another stream"
    torch.cuda.synchronize()
    assert torch.equal(bits(y), bits(same))

    torch.cuda._sleep(2_000_000_000)
    layer(*inputs)
    done.record()
    assert not done.query(), "the call waited for the GPU"
    torch.cuda.synchronize()


def test_no_synchronization_and_no_allocation_in_a_warm_call():
    layer = make_layer("nvfp4")
    x, ids, topk_weights = make_inputs(64)
    long_ids, out = ids.long(), torch.empty_like(x)
    live = torch.tensor([50], device="cuda", dtype=torch.int32)
    calls = [
        lambda: layer(x, ids, topk_weights),
        lambda: layer(x, long_ids, topk_weights, out=out),
        lambda: layer(x, ids, topk_weights, out=out, num_tokens=live),
    ]
    for call in calls:
        call()
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        before = torch.cuda.memory_stats()
        for call in calls:
            call()
        after = torch.cuda.memory_stats()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    for counter in ("allocation.all.allocated", "segment.all.allocated", "num_alloc_retries"):
        assert after[counter] == before[counter], counter


@pytest.mark.parametrize("name", MAIN)
def test_host_time_is_shown(name, capsys):
    layer = make_layer(name)
    inputs = make_inputs(8)
    for _ in range(20):
        layer(*inputs)
    times = []
    for _ in range(50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        layer(*inputs)
        times.append(time.perf_counter() - start)
    with capsys.disabled():
        sys.stdout.write(f"\n{name}: host time of a warm call {1e6 * sorted(times)[25]:.1f} us\n")


def test_two_streams_on_one_workspace_are_detected():
    layer = make_layer("mxfp8")
    ws = make_workspace(layer.weights)
    inputs = make_inputs(64)
    same = moe.moe_forward(*inputs, layer.weights, ws).clone()
    side = torch.cuda.Stream()
    for find in (ws.check, partial(moe.moe_forward, *inputs, layer.weights, ws), ws.close):
        moe.dispatch(*inputs[:2], ws, layer.weights)
        torch.cuda.synchronize()
        ws.round = None  # the host state of another thread would not know of this round
        with torch.cuda.stream(side):
            moe.moe_forward(*inputs, layer.weights, ws)
        torch.cuda.synchronize()
        with pytest.raises(RuntimeError, match="one stream at a time. Use one Workspace a stream"):
            find()
        if ws.closed:
            break
        assert ws.control()[layout.CONTROL_IN_FLIGHT].item() == 0
        assert torch.equal(bits(moe.moe_forward(*inputs, layer.weights, ws)), bits(same))
        ws.check()
    assert ws.closed


def test_two_workspaces_on_two_streams():
    layer = make_layer("mxfp8")
    streams = [torch.cuda.Stream() for _ in range(2)]
    spaces = [make_workspace(layer.weights) for _ in streams]
    inputs = [make_inputs(MAX_TOKENS) for _ in streams]
    same = [layer(*args).clone() for args in inputs]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, ws, args in zip(streams, spaces, inputs, strict=True):
            with torch.cuda.stream(stream):
                y = moe.moe_forward(*args, layer.weights, ws)
        assert y.data_ptr() == spaces[1].output.data_ptr()
    torch.cuda.synchronize()
    for ws, want in zip(spaces, same, strict=True):
        ws.check()
        assert torch.equal(bits(ws.output[:MAX_TOKENS]), bits(want))
        ws.close()


@pytest.mark.emulated
def test_reset_frees_the_workspace_of_an_unfinished_round():
    layer = make_layer("mxfp8")
    inputs = make_inputs(FEW)
    same = layer(*inputs).clone()
    moe.dispatch(*inputs[:2], layer.ws, layer.weights)
    layer.ws.reset()
    assert torch.equal(bits(layer(*inputs)), bits(same))
    layer.ws.check()


# CUDA graphs


@pytest.mark.parametrize("name", ACTS)
def test_graph_replays_with_other_ids_and_live_counts(name):
    layer = make_layer(name)
    ws = make_workspace(layer.weights)  # warmed up, and never called before the capture
    x, ids, topk_weights = make_inputs(200)
    live = torch.tensor([200], device="cuda", dtype=torch.int32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = moe.moe_forward(x, ids, topk_weights, layer.weights, ws, num_tokens=live)
    views = ws.views(layer.weights.problem, layer.weights.operand)
    for count in (200, 0, 1, 77, 200):
        fresh_x, _, fresh_weights = make_inputs(200)
        fresh = fresh_x, uneven_ids(200), fresh_weights
        same = layer(*fresh, num_tokens=live.fill_(count)).clone()
        for static, new in zip((x, ids, topk_weights), fresh, strict=True):
            static.copy_(new)
        poison_bytes(*(tensor for key, tensor in views.items() if key != "control"))
        graph.replay()
        assert torch.equal(bits(y[:count]), bits(same[:count]))
        assert y[count:].isnan().all()
    ws.check()
    ws.close()


def test_graphs_of_two_sizes_and_eager_calls_interleave():
    layer = make_layer("nvfp4")
    graphs = []
    for tokens in (64, 256):
        inputs = make_inputs(tokens)
        out = torch.empty(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        same = layer(*inputs).clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer(*inputs, out=out)
        graphs.append((graph, out, same, inputs))  # a graph keeps addresses, not tensors
    eager = make_inputs(130)
    eager_same = layer(*eager).clone()
    for _ in range(3):
        for graph, out, same, _ in graphs:
            poison_bytes(out)
            graph.replay()
            assert torch.equal(bits(layer(*eager)), bits(eager_same))
            assert torch.equal(bits(out), bits(same))


def test_updated_weights_reach_a_captured_graph():
    layer = make_layer("mxfp8")
    w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, device="cuda").bfloat16() * 0.05
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, device="cuda").bfloat16() * 0.05
    weights = moe.prepare_weights(w13, w2, layer.weights.problem)
    ws = make_workspace(weights)
    inputs = make_inputs(64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = moe.moe_forward(*inputs, weights, ws)
    moe.update_weights(weights, w13.flip(0), w2.flip(0))
    graph.replay()
    fresh = moe.prepare_weights(w13.flip(0), w2.flip(0), layer.weights.problem)
    want = y.clone()
    assert torch.equal(bits(moe.moe_forward(*inputs, fresh, ws)), bits(want))
    ws.close()


def test_cold_call_under_capture_is_refused_and_warm_up_cures_it():
    layer = make_layer("mxfp8")
    inputs = make_inputs(64)
    same = layer(*inputs).clone()
    ws = moe.Workspace(layer.weights.problem, debug=False)
    refused = pytest.raises(RuntimeError, match=r"call moe_ep_jit\.warmup\(ws, weights\) before")
    with torch.cuda.graph(torch.cuda.CUDAGraph()), refused:
        moe.moe_forward(*inputs, layer.weights, ws)
    assert ws.round is None
    moe.warmup(ws, layer.weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = moe.moe_forward(*inputs, layer.weights, ws)
    graph.replay()
    assert torch.equal(bits(y), bits(same))
    ws.close()


# Bad input that only a GPU shows


def test_tensors_on_the_cpu_are_refused():
    layer = make_layer("mxfp8")
    x, ids, topk_weights = make_inputs(8)
    for bad in ((x.cpu(), ids, topk_weights), (x, ids.cpu(), topk_weights)):
        with pytest.raises(ValueError, match="expected on the workspace's device cuda:0, got cpu"):
            layer(*bad)
    with pytest.raises(ValueError, match="num_tokens: .*got cpu"):
        layer(x, ids, topk_weights, num_tokens=torch.ones(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="weights: expected on the workspace's device"):
        moe.moe_forward(x, ids, topk_weights, layer.plain.to("cpu"), layer.ws)
    with pytest.raises(ValueError, match="expected the layout of sm_90a, got layout 'plain'"):
        moe.moe_forward(x, ids, topk_weights, layer.plain, layer.ws)


def test_the_reference_runs_on_the_gpu_when_asked():
    layer = make_layer("nvfp4")
    ws = moe.Workspace(layer.weights.problem, backend="reference", debug=False)
    inputs = make_inputs(32)
    y = moe.moe_forward(*inputs, layer.plain, ws)
    assert torch.equal(y, layer.want(*inputs))
    assert_close(layer(*inputs), y, "nvfp4")


def test_a_workspace_that_does_not_fit_says_how_much_it_needs():
    problem = make_layer("mxfp8").weights.problem.with_(max_tokens=2**28)
    need = moe.Workspace.bytes_needed(problem)
    assert need > torch.cuda.mem_get_info()[1]
    with pytest.raises(torch.OutOfMemoryError, match="lower max_tokens"):
        moe.Workspace(problem)
    torch.cuda.empty_cache()
