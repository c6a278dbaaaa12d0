"""The forward's door, output and workspace on the CPU, where the reference serves."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import moe_ep_jit as moe
from moe_ep_jit import formats, layout, reference
from moe_ep_jit.problem import Problem

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, MAX_TOKENS = 128, 64, 4, 2, 16
PROBLEM = Problem(
    hidden=HIDDEN,
    intermediate=INTERMEDIATE,
    num_experts=EXPERTS,
    top_k=TOP_K,
    max_tokens=MAX_TOKENS,
    format="mxfp8",
)
VARIANTS = [("mxfp8", "mxfp8"), ("mxfp8", "bf16"), ("nvfp4", "bf16"), ("nvfp4", "nvfp4")]


def make_weights(problem, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape13 = (problem.num_experts, 2 * problem.intermediate, problem.hidden)
    shape2 = (problem.num_experts, problem.hidden, problem.intermediate)
    w13 = torch.randn(shape13, generator=generator) * problem.hidden**-0.5
    w2 = torch.randn(shape2, generator=generator) * problem.intermediate**-0.5
    return moe.prepare_weights(w13.bfloat16(), w2.bfloat16(), problem)


def make_inputs(tokens, problem=PROBLEM):
    x = torch.randn(tokens, problem.hidden).bfloat16()
    ids = torch.randint(0, problem.num_experts, (tokens, problem.top_k), dtype=torch.int32)
    topk_weights = torch.rand(tokens, problem.top_k)
    return x, ids, topk_weights


def expected(x, ids, topk_weights, weights):
    """The same call without a workspace."""
    return reference.moe_forward(x, ids, topk_weights, weights)


@pytest.fixture(scope="module")
def weights():
    return make_weights(PROBLEM)


@pytest.fixture
def ws():
    workspace = moe.Workspace(PROBLEM, device="cpu", debug=False)
    yield workspace
    workspace.close()


@pytest.mark.parametrize(("fmt", "act"), VARIANTS, ids=["-".join(v) for v in VARIANTS])
@pytest.mark.parametrize("tokens", [0, 1, MAX_TOKENS])
def test_forward_is_the_reference_in_a_view_of_the_workspace(fmt, act, tokens):
    problem = PROBLEM.with_(format=fmt, act=act)
    weights = make_weights(problem)
    ws = moe.Workspace(problem, device="cpu", debug=False)
    inputs = make_inputs(tokens)
    y = moe.moe_forward(*inputs, weights, ws)
    assert y.shape == (tokens, HIDDEN)
    assert y.dtype == torch.bfloat16
    assert y.untyped_storage().data_ptr() == ws.output.untyped_storage().data_ptr()
    assert tokens == 0 or y.data_ptr() == ws.output.data_ptr()
    assert torch.equal(y, expected(*inputs, weights))


def test_out_is_returned_as_it_is_and_the_workspace_is_left_alone(ws, weights, poison):
    inputs = make_inputs(5)
    poison(ws.output)
    out = torch.empty(9, HIDDEN, dtype=torch.bfloat16)
    poison(out)
    assert moe.moe_forward(*inputs, weights, ws, out=out) is out
    assert torch.equal(out[:5], expected(*inputs, weights))
    assert out[5:].isnan().all()
    assert ws.output.isnan().all()


def test_out_may_be_strided(ws, weights):
    inputs = make_inputs(5)
    out = torch.zeros(5, 2 * HIDDEN, dtype=torch.bfloat16)
    moe.moe_forward(*inputs, weights, ws, out=out[:, HIDDEN:])
    assert torch.equal(out[:, HIDDEN:], expected(*inputs, weights))
    assert (out[:, :HIDDEN] == 0).all()


def test_out_may_alias_x(ws, weights):
    x, ids, topk_weights = make_inputs(7)
    want = expected(x, ids, topk_weights, weights)
    assert moe.moe_forward(x, ids, topk_weights, weights, ws, out=x) is x
    assert torch.equal(x, want)


@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_a_result_may_be_the_next_input(weights, debug):
    ws = moe.Workspace(PROBLEM, device="cpu", debug=debug)
    x, ids, topk_weights = make_inputs(6)
    want = expected(expected(x, ids, topk_weights, weights), ids, topk_weights, weights)
    y = moe.moe_forward(x, ids, topk_weights, weights, ws)
    assert torch.equal(moe.moe_forward(y, ids, topk_weights, weights, ws), want)


def test_a_view_shows_the_next_call(ws, weights):
    first, second = make_inputs(6), make_inputs(6)
    y1 = moe.moe_forward(*first, weights, ws)
    assert torch.equal(y1, expected(*first, weights))
    y2 = moe.moe_forward(*second, weights, ws)
    assert torch.equal(y1, y2)
    assert torch.equal(y1, expected(*second, weights))


def test_a_view_outlives_the_workspace(weights):
    ws = moe.Workspace(PROBLEM, device="cpu", debug=False)
    inputs = make_inputs(6)
    y = moe.moe_forward(*inputs, weights, ws)
    ws.close()
    del ws
    assert torch.equal(y, expected(*inputs, weights))


def test_debug_alternates_and_poisons_the_result_before(weights):
    ws = moe.Workspace(PROBLEM, device="cpu", debug=True)
    first, second = make_inputs(6), make_inputs(3)
    y1 = moe.moe_forward(*first, weights, ws)
    y2 = moe.moe_forward(*second, weights, ws)
    assert y1.isnan().all()
    assert torch.equal(y2, expected(*second, weights))
    assert ws.output.data_ptr() == y2.data_ptr() != y1.data_ptr()
    out = torch.empty(3, HIDDEN, dtype=torch.bfloat16)
    moe.moe_forward(*second, weights, ws, out=out)
    assert y2.isnan().all()
    assert torch.equal(out, expected(*second, weights))


def test_debug_keeps_a_result_that_out_writes_over(weights):
    ws = moe.Workspace(PROBLEM, device="cpu", debug=True)
    first, second = make_inputs(6), make_inputs(3)
    y1 = moe.moe_forward(*first, weights, ws)
    assert moe.moe_forward(*second, weights, ws, out=y1) is y1
    assert torch.equal(y1[:3], expected(*second, weights))


@pytest.mark.parametrize(
    ("value", "debug"),
    [(v, True) for v in ("1", "yes", "on", "2")]
    + [(v, False) for v in ("", "0", "no", "No", "false", "FALSE", "off")],
)
def test_debug_variable_is_the_default(monkeypatch, value, debug):
    monkeypatch.setenv("MOE_EP_JIT_DEBUG", value)
    assert moe.Workspace(PROBLEM, device="cpu").debug is debug
    assert moe.Workspace(PROBLEM, device="cpu", debug=not debug).debug is not debug


@pytest.mark.parametrize("live", [0, 1, 4, 9, 100])
def test_rows_behind_the_live_count_are_neither_read_nor_written(ws, weights, poison, live):
    x, ids, topk_weights = make_inputs(9)
    kept = min(live, 9)
    want = expected(x[:kept], ids[:kept], topk_weights[:kept], weights)
    x[kept:] = float("nan")
    ids[kept:] = 2**31 - 1
    topk_weights[kept:] = float("nan")
    poison(ws.output)
    num_tokens = torch.tensor([live], dtype=torch.int32)
    y = moe.moe_forward(x, ids, topk_weights, weights, ws, num_tokens=num_tokens)
    assert y.shape == (9, HIDDEN)
    assert torch.equal(y[:kept], want)
    assert y[kept:].isnan().all()


@pytest.mark.parametrize("skip", [-1, EXPERTS, 2**31 - 1, -(2**31)])
def test_ids_that_are_no_experts_add_nothing(ws, weights, poison, skip):
    x, ids, topk_weights = make_inputs(8)
    ids[2] = skip
    ids[5, 0] = skip
    topk_weights[2] = float("nan")
    poison(ws.output)
    y = moe.moe_forward(x, ids, topk_weights, weights, ws)
    assert (y[2] == 0).all()
    alone = topk_weights[5:6].clone()
    alone[0, 0] = 0
    assert torch.equal(y[5:6], expected(x[5:6], ids[5:6].clamp(0, EXPERTS - 1), alone, weights))


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_dtypes_of_the_routing(ws, weights, ids_dtype, dtype):
    x, ids, topk_weights = make_inputs(6)
    topk_weights = topk_weights.to(dtype)
    y = moe.moe_forward(x, ids.to(ids_dtype), topk_weights, weights, ws)
    assert torch.equal(y, expected(x, ids, topk_weights, weights))


def test_rows_may_be_strided(ws, weights):
    x, ids, topk_weights = make_inputs(6)
    wide = torch.full((6, 3 * HIDDEN), float("nan"), dtype=torch.bfloat16)
    wide[:, HIDDEN : 2 * HIDDEN] = x
    wide_ids = torch.full((6, 5), -1, dtype=torch.int64)
    wide_ids[:, 1 : 1 + TOP_K] = ids
    args = wide[:, HIDDEN : 2 * HIDDEN], wide_ids[:, 1 : 1 + TOP_K], topk_weights
    y = moe.moe_forward(*args, weights, ws)
    assert torch.equal(y, expected(x, ids, topk_weights, weights))


@pytest.mark.parametrize(("fmt", "act"), VARIANTS, ids=["-".join(v) for v in VARIANTS])
def test_stages_apart_equal_the_whole(fmt, act):
    problem = PROBLEM.with_(format=fmt, act=act)
    weights = make_weights(problem)
    ws = moe.Workspace(problem, device="cpu", debug=False)
    x, ids, topk_weights = make_inputs(11)
    whole = moe.moe_forward(x, ids, topk_weights, weights, ws).clone()
    ws.output.fill_(float("nan"))
    moe.dispatch(moe.quantize(x, weights.problem), ids, ws, weights)
    moe.gate_up(ws, weights)
    moe.down(ws, weights)
    y = moe.combine(ids, topk_weights, ws, weights)
    assert y.data_ptr() == ws.output.data_ptr()
    assert torch.equal(y, whole)


@pytest.mark.parametrize(
    ("x_format", "act"), [("mxfp8", "mxfp8"), ("mxfp8", "bf16"), ("nvfp4", "bf16")]
)
def test_block_scaled_x_is_the_operand_itself(x_format, act):
    problem = PROBLEM.with_(act=act)
    weights = make_weights(problem)
    ws = moe.Workspace(problem, device="cpu", debug=False)
    x, ids, topk_weights = make_inputs(5)
    q = formats.quantize(x, x_format)
    y = moe.moe_forward(q, ids, topk_weights, weights, ws)
    assert torch.equal(y, expected(q, ids, topk_weights, weights))
    if act == x_format:
        assert torch.equal(y, expected(x, ids, topk_weights, weights))


def test_quantize_is_the_formats_own(weights):
    x, _, _ = make_inputs(5)
    q = moe.quantize(x, weights.problem)
    want = formats.quantize(x, "mxfp8")
    assert torch.equal(q.data.view(torch.uint8), want.data.view(torch.uint8))
    assert torch.equal(q.sf, want.sf)
    assert moe.quantize(q, weights.problem) is q
    assert moe.quantize(x, PROBLEM.with_(act="bf16")) is x
    with pytest.raises(ValueError, match=r"weights\.problem"):
        moe.quantize(x, PROBLEM)


# Bad input: refused at the door, with nothing changed.


def zeros(*shape, dtype=torch.bfloat16, **options):
    return torch.zeros(*shape, dtype=dtype, **options)


def unaligned(rows):
    return torch.zeros(rows * HIDDEN + 1, dtype=torch.bfloat16)[1:].view(rows, HIDDEN)


BAD = {
    "x-type": ({"x": [1.0]}, TypeError, "x: expected a bf16 tensor .*list"),
    "x-fp32": ({"x": zeros(6, HIDDEN, dtype=torch.float32)}, TypeError, "x: .*float32; pass"),
    "x-1d": ({"x": zeros(HIDDEN)}, ValueError, r"x: expected \[tokens, hidden=128\]"),
    "x-3d": ({"x": zeros(2, 3, HIDDEN)}, ValueError, "flatten leading"),
    "x-hidden": ({"x": zeros(6, 64)}, ValueError, r"hidden=128\], got \[6, 64\]"),
    "x-tokens": ({"x": zeros(17, HIDDEN)}, ValueError, "max_tokens=16 rows, got 17"),
    "x-device": ({"x": zeros(6, HIDDEN, device="meta")}, ValueError, "device cpu, got meta"),
    "x-grad": ({"x": zeros(6, HIDDEN).requires_grad_()}, ValueError, r"x\.detach\(\)"),
    "x-columns": ({"x": zeros(HIDDEN, 6).t()}, ValueError, r"inner stride 1.*contiguous\(\)"),
    "x-row-stride": ({"x": zeros(6, HIDDEN + 4)[:, :HIDDEN]}, ValueError, "multiple of 8"),
    "x-unaligned": ({"x": unaligned(6)}, ValueError, "16-byte boundaries"),
    "x-format": (
        {"x": formats.quantize(torch.ones(6, HIDDEN), "nvfp4")},
        ValueError,
        "BlockScaled in mxfp8.*dequantize",
    ),
    "ids-type": ({"topk_ids": [[0, 1]]}, TypeError, "topk_ids: expected a tensor, got list"),
    "ids-int16": ({"topk_ids": zeros(6, 2, dtype=torch.int16)}, TypeError, "int32.*int64.*int16"),
    "ids-float": ({"topk_ids": zeros(6, 2)}, TypeError, "topk_ids: .*bfloat16"),
    "ids-rows": (
        {"topk_ids": zeros(5, 2, dtype=torch.int32)},
        ValueError,
        r"topk_ids: expected \[tokens=6, top_k=2\], got \[5, 2\]",
    ),
    "ids-top_k": ({"topk_ids": zeros(6, 3, dtype=torch.int32)}, ValueError, "top_k=2"),
    "ids-device": (
        {"topk_ids": zeros(6, 2, dtype=torch.int32, device="meta")},
        ValueError,
        "topk_ids: .*got meta",
    ),
    "ids-columns": ({"topk_ids": zeros(2, 6, dtype=torch.int32).t()}, ValueError, "contiguous"),
    "weights-int": ({"topk_weights": zeros(6, 2, dtype=torch.int32)}, TypeError, "topk_weights"),
    "weights-shape": ({"topk_weights": zeros(6, 1)}, ValueError, r"topk_weights: .*\[6, 1\]"),
    "weights-grad": (
        {"topk_weights": zeros(6, 2).requires_grad_()},
        ValueError,
        r"topk_weights\.detach\(\)",
    ),
    "out-type": ({"out": "here"}, TypeError, "out: .*str"),
    "out-fp32": ({"out": zeros(6, HIDDEN, dtype=torch.float32)}, TypeError, "out: .*float32"),
    "out-rows": ({"out": zeros(5, HIDDEN)}, ValueError, r"out: expected \[at least tokens=6"),
    "out-hidden": ({"out": zeros(6, 64)}, ValueError, r"hidden=128\], got \[6, 64\]"),
    "out-device": ({"out": zeros(6, HIDDEN, device="meta")}, ValueError, "out: .*got meta"),
    "out-grad": ({"out": zeros(6, HIDDEN).requires_grad_()}, ValueError, r"out\.detach"),
    "out-columns": ({"out": zeros(HIDDEN, 6).t()}, ValueError, "out: .*inner stride 1"),
    "out-row-stride": ({"out": zeros(6, HIDDEN + 4)[:, :HIDDEN]}, ValueError, "multiple of 8"),
    "out-overlap": ({"out": zeros(1, HIDDEN).expand(6, HIDDEN)}, ValueError, "do not overlap"),
    "live-int": ({"num_tokens": 3}, TypeError, "num_tokens: .*got int; pass"),
    "live-int64": ({"num_tokens": torch.tensor([3])}, TypeError, "num_tokens: .*int64"),
    "live-shape": (
        {"num_tokens": zeros(2, dtype=torch.int32)},
        ValueError,
        "one element",
    ),
    "live-device": (
        {"num_tokens": zeros(1, dtype=torch.int32, device="meta")},
        ValueError,
        "num_tokens: .*got meta",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_and_nothing_changes(weights, case):
    bad, error, message = BAD[case]
    ws = moe.Workspace(PROBLEM, device="cpu", debug=True)
    good = make_inputs(6)
    y = moe.moe_forward(*good, weights, ws)
    x, ids, topk_weights = make_inputs(6)
    call = {"x": x, "topk_ids": ids, "topk_weights": topk_weights, **bad}
    with pytest.raises(error, match=message):
        moe.moe_forward(**call, weights=weights, ws=ws)
    assert torch.equal(y, expected(*good, weights))  # the debug buffers have not turned
    assert torch.equal(moe.moe_forward(*good, weights, ws), expected(*good, weights))


def test_block_scaled_x_has_its_own_checks(ws, weights):
    x, ids, topk_weights = make_inputs(6)
    wide = formats.quantize(torch.ones(6, 2 * HIDDEN), "mxfp8")
    half = moe.BlockScaled(moe.MXFP8, wide.data[:, :HIDDEN], wide.sf[:, : HIDDEN // 32])
    with pytest.raises(ValueError, match=r"x\.sf: expected contiguous"):
        moe.moe_forward(half, ids, topk_weights, weights, ws)
    with pytest.raises(ValueError, match="hidden=128"):
        moe.moe_forward(wide, ids, topk_weights, weights, ws)
    strided = moe.BlockScaled(
        moe.MXFP8, wide.data[:, :HIDDEN], wide.sf[:, : HIDDEN // 32].contiguous()
    )
    y = moe.moe_forward(strided, ids, topk_weights, weights, ws)
    assert torch.equal(y, expected(strided, ids, topk_weights, weights))


def test_weights_and_workspace_of_the_wrong_type(ws, weights):
    inputs = make_inputs(2)
    with pytest.raises(TypeError, match="weights: expected PreparedWeights, got Tensor"):
        moe.moe_forward(*inputs, torch.zeros(2), ws)
    for call in (
        lambda: moe.moe_forward(*inputs, weights, None),
        lambda: moe.gate_up(None, weights),
        lambda: moe.warmup(None),
    ):
        with pytest.raises(TypeError, match="ws: expected Workspace, got NoneType; build"):
            call()
    with pytest.raises(TypeError, match="weights: expected PreparedWeights, got int; pass what"):
        moe.warmup(ws, 3)
    with pytest.raises(TypeError, match="problem: expected Problem, got NoneType"):
        moe.quantize(inputs[0], None)


def test_max_recv_rows_bounds_a_call(weights):
    ws = moe.Workspace(PROBLEM.with_(max_recv_rows=9), device="cpu", debug=False)
    inputs = make_inputs(4)
    assert torch.equal(moe.moe_forward(*inputs, weights, ws), expected(*inputs, weights))
    with pytest.raises(ValueError, match="max_recv_rows=9 rows .* got 10 for 5 tokens"):
        moe.moe_forward(*make_inputs(5), weights, ws)


def test_stages_out_of_order_are_refused(ws, weights):
    x, ids, topk_weights = make_inputs(4)
    for stage in (moe.gate_up, moe.down):
        with pytest.raises(ValueError, match="dispatch is due"):
            stage(ws, weights)
    with pytest.raises(ValueError, match="dispatch is due"):
        moe.combine(ids, topk_weights, ws, weights)
    moe.dispatch(x, ids, ws, weights)
    with pytest.raises(ValueError, match="gate_up is due"):
        moe.down(ws, weights)
    with pytest.raises(ValueError, match="expected the weights that dispatch"):
        moe.gate_up(ws, make_weights(PROBLEM))
    with pytest.raises(ValueError, match=r"round in progress.*gate_up.*ws\.reset\(\)"):
        moe.moe_forward(x, ids, topk_weights, weights, ws)
    moe.gate_up(ws, weights)
    moe.down(ws, weights)
    with pytest.raises(ValueError, match="tokens=4"):
        moe.combine(ids[:3], topk_weights[:3], ws, weights)
    y = moe.combine(ids, topk_weights, ws, weights)
    assert torch.equal(y, expected(x, ids, topk_weights, weights))


@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
def test_combine_goes_by_the_live_count_of_dispatch(ws, weights, again):
    x, ids, topk_weights = make_inputs(4)
    live = torch.tensor([3], dtype=torch.int32)
    out = torch.full((4, HIDDEN), 5.0, dtype=torch.bfloat16)
    moe.dispatch(x, ids, ws, weights, num_tokens=live)
    moe.gate_up(ws, weights)
    moe.down(ws, weights)
    moe.combine(ids, topk_weights, ws, weights, out=out, num_tokens=live if again else None)
    assert torch.equal(out[:3], expected(x, ids, topk_weights, weights)[:3])
    assert (out[3:] == 5).all()


def test_reset_drops_an_unfinished_round(ws, weights):
    x, ids, topk_weights = make_inputs(4)
    moe.dispatch(x, ids, ws, weights)
    ws.reset()
    y = moe.moe_forward(x, ids, topk_weights, weights, ws)
    assert torch.equal(y, expected(x, ids, topk_weights, weights))


# Workspaces


WIDE = PROBLEM.with_(hidden=192, top_k=3, max_tokens=8, format="nvfp4")


def test_layers_that_differ_share_a_workspace(weights):
    ws = moe.Workspace([PROBLEM, WIDE], device="cpu", debug=False)
    wide = make_weights(WIDE)
    assert ws.output_of(WIDE).shape == (8, 192)
    assert ws.output_of(WIDE).data_ptr() == ws.output.data_ptr()
    for _ in range(2):
        a, b = make_inputs(MAX_TOKENS), make_inputs(8, WIDE)
        y = moe.moe_forward(*a, weights, ws)
        assert torch.equal(y, expected(*a, weights))
        y_wide = moe.moe_forward(*b, wide, ws)
        assert torch.equal(y_wide, expected(*b, wide))
        assert not torch.equal(y, expected(*a, weights))  # its memory is the other layer's now
    with pytest.raises(ValueError, match="max_tokens=8 rows, got 9"):
        moe.moe_forward(*make_inputs(9, WIDE), wide, ws)


def test_weights_of_another_layer_are_refused(ws):
    with pytest.raises(ValueError, match=r"weights: prepared for Problem\(hidden=192"):
        moe.moe_forward(*make_inputs(2, WIDE), make_weights(WIDE), ws)


def test_capacity_is_the_workspaces(weights):
    ws = moe.Workspace(PROBLEM.with_(max_tokens=40), device="cpu", debug=False)
    inputs = make_inputs(40)
    assert torch.equal(moe.moe_forward(*inputs, weights, ws), expected(*inputs, weights))


@pytest.mark.parametrize("operand", ["e4m3", "bf16", None])
def test_bytes_needed_is_regions_and_output(operand):
    need = moe.Workspace.bytes_needed(PROBLEM, operand)
    regions = layout.workspace_bytes(PROBLEM, operand or "e4m3")
    output = MAX_TOKENS * HIDDEN * 2
    assert regions + output <= need <= regions + output + layout.REGION_ALIGN
    assert moe.Workspace.bytes_needed(PROBLEM, operand, debug=True) == need + output
    assert moe.Workspace.bytes_needed([PROBLEM] * 60, operand) == need


def test_bytes_needed_grows_with_the_largest_layer():
    both = moe.Workspace.bytes_needed([PROBLEM, WIDE])
    assert both >= max(moe.Workspace.bytes_needed(p) for p in (PROBLEM, WIDE))


def test_an_undecided_format_has_no_size_yet():
    auto = PROBLEM.with_(format="auto")
    with pytest.raises(ValueError, match=r"weights\.problem"):
        moe.Workspace.bytes_needed(auto)
    assert moe.Workspace.bytes_needed(auto, "bf16") > moe.Workspace.bytes_needed(auto, "e4m3")
    with pytest.raises(ValueError, match=r"weights\.problem"):
        moe.Workspace(auto, device="cpu")


BAD_WORKSPACE = {
    "no-problem": ({"problem": []}, ValueError, "empty list"),
    "none": (
        {"problem": None},
        TypeError,
        "problem: expected a Problem or a list .* NoneType; pass",
    ),
    "device": ({"device": "gpu"}, ValueError, "device: expected .* got 'gpu'"),
    "not-a-problem": ({"problem": [3]}, TypeError, "expected Problem, got int"),
    "group-type": ({"group": "all"}, TypeError, "group: expected None"),
    "backend": ({"backend": "gpu"}, ValueError, "backend: expected"),
    "operand": ({"operand": "fp8"}, ValueError, "operand: expected"),
}


@pytest.mark.parametrize("case", BAD_WORKSPACE)
def test_bad_workspace(case):
    bad, error, message = BAD_WORKSPACE[case]
    with pytest.raises(error, match=message):
        moe.Workspace(**{"problem": PROBLEM, "device": "cpu", **bad})


def test_group_of_one_rank_is_taken_and_more_are_refused(tmp_path, monkeypatch):
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        moe.Workspace(PROBLEM, dist.group.WORLD, device="cpu").close()
        monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
        with pytest.raises(ValueError, match="group: expected num_ranks=1 ranks.* of 2;"):
            moe.Workspace(PROBLEM, dist.group.WORLD, device="cpu")
    finally:
        dist.destroy_process_group()


def test_calls_after_close_raise(weights):
    ws = moe.Workspace(PROBLEM, device="cpu")
    inputs = make_inputs(2)
    moe.moe_forward(*inputs, weights, ws)
    ws.close()
    ws.close()
    assert ws.closed
    for call in (
        lambda: moe.moe_forward(*inputs, weights, ws),
        lambda: moe.dispatch(*inputs[:2], ws, weights),
        lambda: moe.gate_up(ws, weights),
        lambda: moe.warmup(ws),
        lambda: ws.output,
        lambda: ws.views(),
        lambda: ws.base_address,
        lambda: ws.error_address,
        ws.control,
        ws.check,
        ws.reset,
        ws.saturated_blocks,
    ):
        with pytest.raises(RuntimeError, match="workspace: it is closed; build a new"):
            call()


def test_a_workspace_closes_itself_as_a_context():
    with moe.Workspace(PROBLEM, device="cpu") as ws:
        assert not ws.closed
    assert ws.closed


@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_a_workspace_made_in_inference_mode_serves_outside_and_the_reverse(weights, debug):
    inputs = make_inputs(3)
    want = expected(*inputs, weights)
    with torch.inference_mode():
        inside = moe.Workspace(PROBLEM, device="cpu", debug=debug)
        assert torch.equal(moe.moe_forward(*inputs, weights, inside), want)
    outside = moe.Workspace(PROBLEM, device="cpu", debug=debug)
    for ws in (inside, outside):
        assert torch.equal(moe.moe_forward(*inputs, weights, ws), want)
        with torch.inference_mode():
            assert torch.equal(moe.moe_forward(*inputs, weights, ws), want)
        assert torch.equal(moe.moe_forward(*inputs, weights, ws), want)


def test_recorded_error_is_raised_once_and_explained(weights):
    ws = moe.Workspace(PROBLEM, device="cpu")
    inputs = make_inputs(3)
    ws._record[layout.ERROR_CODE] = layout.ERROR_TWO_STREAMS
    with pytest.raises(RuntimeError, match="one stream at a time. Use one Workspace a stream"):
        moe.moe_forward(*inputs, weights, ws)
    y = moe.moe_forward(*inputs, weights, ws)
    assert torch.equal(y, expected(*inputs, weights))
    ws._record[layout.ERROR_CODE] = layout.ERROR_TWO_STREAMS
    with pytest.raises(RuntimeError, match="one stream at a time"):
        ws.check()
    ws.check()
    ws._record[layout.ERROR_CODE] = layout.ERROR_TWO_STREAMS
    with pytest.raises(RuntimeError, match="one stream at a time"):
        ws.close()
    assert ws.closed


def test_a_workspace_keeps_no_weights_alive():
    ws = moe.Workspace(PROBLEM, device="cpu")
    weights = make_weights(PROBLEM)
    moe.moe_forward(*make_inputs(3), weights, ws)
    gone = weakref.ref(weights)
    del weights
    gc.collect()
    assert gone() is None
    assert ws.bindings == {}


def test_warmup_without_kernels_checks_and_returns(ws, weights):
    moe.warmup(ws)
    moe.warmup(ws, weights, x_kinds=("bf16", "mxfp8"))
    with pytest.raises(ValueError, match="x_kinds: .*'fp4'"):
        moe.warmup(ws, weights, x_kinds=("fp4",))
    with pytest.raises(ValueError, match="weights: prepared for"):
        moe.warmup(ws, make_weights(WIDE))
