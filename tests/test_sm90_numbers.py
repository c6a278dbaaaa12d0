"""The forward's numbers on Hopper or the emulator: every rung, routing, dtypes, quantized x."""

from __future__ import annotations

import pytest
import torch
from conftest import DEVICE, EMULATED, FULL, poison_bytes
from sm90_cases import (
    ACTS,
    BACKEND,
    CASES,
    EXPERTS,
    HIDDEN,
    MAIN,
    MANY,
    MAX_TOKENS,
    RUNGS,
    TOP_K,
    assert_close,
    assert_end_is_exact,
    bits,
    make_inputs,
    make_layer,
    uneven_ids,
    want_from_intermediate,
)

import moe_ep_jit as moe
from moe_ep_jit import formats, layout, reference, variants
from moe_ep_jit.kernels.sm90.grouped_gemm import WIDTHS

pytestmark = [pytest.mark.sm90, pytest.mark.emulated]


# Numbers


@pytest.mark.parametrize(("name", "config"), RUNGS)
def test_every_rung_is_within_the_bounds(name, config):
    layer = make_layer(name)
    # 90 tokens give the first expert more rows than the widest tile.
    most = 90 if EMULATED else MAX_TOKENS
    for tokens in (1, most) if EMULATED and not FULL else (1, 37, most):
        x, _, topk_weights = make_inputs(tokens)
        ids = uneven_ids(tokens)
        layer.poison()
        inputs = (x, ids, topk_weights)
        y = layer(*inputs, config=config)
        assert_close(y, layer.want(*inputs), CASES[name].fmt)
        end = want_from_intermediate(layer.ws, layer.weights, layer.plain, inputs, config)
        assert_end_is_exact(y, end)


@pytest.mark.parametrize(
    ("name", "tile_n"),
    [
        pytest.param(name, tile_n, marks=() if (name, tile_n) in few else pytest.mark.full)
        for few in [{("mxfp8", 160), ("nvfp4", 192)}]
        for name in MAIN
        for tile_n in (128, 160, 192)
    ],
)
def test_tiles_at_the_edges_of_every_width(name, tile_n):
    """Wide rungs multiply in the least width that holds a tile's rows: experts with as many rows
    as each width, and one more.
    """
    layer = make_layer(name)
    (config,) = [c for c in variants.ladder("sm_90a", layer.weights.operand) if c.tile_n == tile_n]
    edges = WIDTHS[layer.weights.operand == "e4m3"][tile_n]
    rows = [1, *edges[1:], *(edge + 1 for edge in edges)]
    assert len(rows) <= EXPERTS
    experts = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))
    tokens = -(-len(experts) // TOP_K)
    ids = torch.full((tokens * TOP_K,), -1, dtype=torch.int32)
    ids[: len(experts)] = experts.int()
    ids = ids[torch.randperm(len(ids))].view(tokens, TOP_K).to(DEVICE)
    x, _, topk_weights = make_inputs(tokens)
    layer.poison()
    inputs = (x, ids, topk_weights)
    y = layer(*inputs, config=config)
    assert_close(y, layer.want(*inputs), CASES[name].fmt)
    end = want_from_intermediate(layer.ws, layer.weights, layer.plain, inputs, config)
    assert_end_is_exact(y, end)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_rungs_agree_bit_for_bit(name):
    """A row's sums do not depend on the tile around it. Folding the intermediate changes them, and
    so does splitting K, where fp32 sums come in another order.
    """
    layer = make_layer(name)
    tokens = 90 if EMULATED else 150
    x, _, topk_weights = make_inputs(tokens)
    ids = uneven_ids(tokens)
    seen = {}
    for config in variants.ladder("sm_90a", layer.weights.operand):
        layer.poison()
        y = bits(layer(x, ids, topk_weights, config=config).clone())
        same = seen.setdefault((config.fold_intermediate, config.k_slices), y)
        assert torch.equal(y, same), (config, int((y != same).any(1).sum()))


@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize(
    "row", [[7, 7, 7, 7], [7, 7, 7, 3], [-1, -1, -1, 5], [0, 1, 2, 3]], ids=str
)
def test_all_tokens_to_the_same_experts(name, row):
    layer = make_layer(name)
    x, _, topk_weights = make_inputs(MAX_TOKENS)
    ids = torch.tensor([row], device=DEVICE).repeat(MAX_TOKENS, 1)
    layer.poison()
    y = layer(x, ids, topk_weights)
    assert_close(y, layer.want(x, ids, topk_weights), CASES[name].fmt)


@pytest.mark.full
@pytest.mark.parametrize("name", MAIN)
def test_sweep_of_token_counts(name):
    layer = make_layer(name)
    counts = (2, 7, 8, 9, 16, 31, 32, 33, 64, 127, 128, 129, 255, 256, 257)
    for tokens in (n for n in counts if n <= MAX_TOKENS):
        inputs = make_inputs(tokens)
        layer.poison()
        assert_close(layer(*inputs), layer.want(*inputs), CASES[name].fmt)


@pytest.mark.full
@pytest.mark.parametrize("name", MAIN)
def test_a_hundred_equal_calls_give_equal_bits(name):
    layer = make_layer(name)
    inputs = make_inputs(MANY)
    first = layer(*inputs).clone()
    for _ in range(20 if EMULATED else 100):  # on the emulator five orders each
        layer.poison()
        assert torch.equal(bits(layer(*inputs)), bits(first))


@pytest.mark.parametrize("name", MAIN)
def test_control_words_are_at_rest_after_a_call(name):
    layer = make_layer(name)
    layer(*make_inputs(64))
    control = layer.ws.control().tolist()
    for word in (
        layout.CONTROL_ROUTE_TICKET,
        layout.CONTROL_COMBINE_TICKET,
        layout.CONTROL_IN_FLIGHT,
    ):
        assert control[word] == 0


def test_saturated_blocks_are_counted():
    layer = make_layer("nvfp4-act-nvfp4")
    inputs = make_inputs(64)
    before = layer.ws.saturated_blocks()
    layer(inputs[0] * 0.25, *inputs[1:])  # far from the 10.5 where the default scale saturates
    assert layer.ws.saturated_blocks() == before
    w13 = layer.plain.dequantize("w13").bfloat16()
    w2 = layer.plain.dequantize("w2").bfloat16()
    options = {"h_global_scale": 2.0**-30, "backend": BACKEND}
    tight = moe.prepare_weights(w13, w2, layer.weights.problem, **options)
    moe.moe_forward(*inputs, tight, layer.ws)
    assert layer.ws.saturated_blocks() > before


@pytest.mark.parametrize(
    ("name", "bound"),
    [("mxfp8", 7.0), ("nvfp4", 17.5), ("nvfp4-act-nvfp4", 24.0), ("nvfp4-act-mxfp8", 18.0)],
)
def test_accuracy_against_a_dense_layer_in_bf16(name, bound):
    layer = make_layer(name)
    inputs = make_inputs(MAX_TOKENS)
    want = reference.dense_bf16(*inputs, *layer.source)
    assert 100 * reference.error(layer(*inputs), want).whole < bound


# Routing


@pytest.mark.parametrize("name", ACTS)
def test_rows_without_an_expert_are_zero(name):
    layer = make_layer(name)
    x, ids, topk_weights = make_inputs(64)
    for row, skip in enumerate((-1, EXPERTS, 2**31 - 1, -(2**31))):
        ids[row] = skip
        x[row] = float("nan")
        topk_weights[row] = float("nan")
    layer.poison()
    y = layer(x, ids, topk_weights)
    assert (y[:4] == 0).all()
    assert_close(y[4:], layer.want(x, ids, topk_weights)[4:], CASES[name].fmt)


def test_int64_ids_beyond_int32_are_no_experts():
    layer = make_layer("mxfp8")
    x, ids, topk_weights = make_inputs(64)
    ids = ids.long()
    ids[3] = 2**32 + 1  # its low word is an expert's
    ids[4] = -(2**32) + 1
    layer.poison()
    y = layer(x, ids, topk_weights)
    assert (y[3:5] == 0).all()
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("name", ACTS)
def test_bad_rows_touch_no_other_row(name):
    layer = make_layer(name)
    x, ids, topk_weights = make_inputs(200)
    clean = layer(x, ids, topk_weights).clone()
    x[5, 3] = float("nan")
    x[6] = float("nan")
    x[7, 150] = float("inf")
    x[8] = float("-inf")
    topk_weights[20] = float("nan")
    topk_weights[21, 1] = float("inf")
    layer.poison()
    y = layer(x, ids, topk_weights)
    bad = torch.tensor([5, 6, 7, 8, 20, 21], device=DEVICE)
    good = torch.ones(200, dtype=torch.bool, device=DEVICE).index_fill_(0, bad, False)
    assert torch.equal(bits(y[good]), bits(clean[good]))
    assert y[[5, 6, 20]].isnan().all()


@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_dtypes_of_the_routing(name, ids_dtype, dtype):
    layer = make_layer(name)
    x, ids, topk_weights = make_inputs(64)
    topk_weights = topk_weights.to(dtype)
    same = layer(x, ids, topk_weights.float()).clone()
    layer.poison()
    y = layer(x, ids.to(ids_dtype), topk_weights)
    assert torch.equal(bits(y), bits(same))


def test_strided_rows():
    layer = make_layer("mxfp8")
    x, ids, topk_weights = make_inputs(64)
    same = layer(x, ids, topk_weights).clone()
    wide = torch.full((64, 2 * HIDDEN), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    wide[:, HIDDEN:] = x
    wide_ids = torch.full((64, TOP_K + 3), -1, device=DEVICE, dtype=torch.int64)
    wide_ids[:, 1 : 1 + TOP_K] = ids
    wide_weights = torch.full((64, TOP_K + 5), float("nan"), device=DEVICE)
    wide_weights[:, 5:] = topk_weights
    out = torch.zeros(64, 3 * HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    layer.poison()
    layer(
        wide[:, HIDDEN:],
        wide_ids[:, 1 : 1 + TOP_K],
        wide_weights[:, 5:],
        out=out[:, HIDDEN : 2 * HIDDEN],
    )
    assert torch.equal(bits(out[:, HIDDEN : 2 * HIDDEN]), bits(same))
    assert (out[:, :HIDDEN] == 0).all()
    assert (out[:, 2 * HIDDEN :] == 0).all()


@pytest.mark.parametrize("name", ACTS)
@pytest.mark.parametrize(
    "live",
    [0, 77, *(pytest.param(live, marks=pytest.mark.full) for live in (1, 200, 1000))],
)
def test_rows_behind_the_live_count_are_neither_read_nor_written(name, live):
    layer = make_layer(name)
    config = variants.choose_rung(layer.weights.problem, "sm_90a", 200, layer.weights.operand)
    x, ids, topk_weights = make_inputs(200)
    kept = min(live, 200)
    same = layer(x[:kept], ids[:kept], topk_weights[:kept], config=config).clone()
    poison_bytes(x[kept:])
    ids[kept:] = 2**31 - 1
    poison_bytes(topk_weights[kept:])
    out = torch.full((200, HIDDEN), 5.0, device=DEVICE, dtype=torch.bfloat16)
    layer.poison()
    num_tokens = torch.tensor([live], device=DEVICE, dtype=torch.int32)
    layer(x, ids, topk_weights, out=out, num_tokens=num_tokens)
    assert torch.equal(bits(out[:kept]), bits(same))
    assert (out[kept:] == 5).all()


# Quantized x


@pytest.mark.parametrize(
    ("name", "x_format"),
    [
        ("mxfp8", "mxfp8"),
        ("nvfp4-act-mxfp8", "mxfp8"),
        ("nvfp4-act-nvfp4", "nvfp4"),
        ("mxfp8-act-bf16", "mxfp8"),
        ("nvfp4", "mxfp8"),
        ("nvfp4", "nvfp4"),
    ],
)
def test_block_scaled_x_equals_its_values_in_bf16(name, x_format):
    layer = make_layer(name)
    x, ids, topk_weights = make_inputs(64)
    if CASES[name].act == "bf16":
        # A global scale that is a power of two, so that the values are exact in bf16.
        scale = torch.tensor(2.0**-8, device=DEVICE) if x_format == "nvfp4" else None
        q = formats.quantize(x, x_format, scale)
        x = formats.dequantize(q).bfloat16()
        assert torch.equal(x.float(), formats.dequantize(q))
    else:
        q = formats.quantize(x, x_format)
    same = layer(x, ids, topk_weights).clone()
    layer.poison()
    y = layer(q, ids, topk_weights)
    assert torch.equal(bits(y), bits(same))
    assert_close(y, layer.want(q, ids, topk_weights), CASES[name].fmt)


def test_nvfp4_x_with_a_scale_per_token():
    layer = make_layer("nvfp4")
    x, ids, topk_weights = make_inputs(64)
    q = formats.quantize(x * torch.logspace(-2, 2, 64, device=DEVICE)[:, None], "nvfp4")
    assert q.global_scale.shape == (64,)
    layer.poison()
    assert_close(layer(q, ids, topk_weights), layer.want(q, ids, topk_weights), "nvfp4")


@pytest.mark.parametrize("scale", ["static", "per token"])
def test_nvfp4_x_keeps_its_blocks(scale):
    """Blocks quantized with a scale that is not the row's own reach the experts as they are."""
    layer = make_layer("nvfp4-act-nvfp4")
    x, ids, topk_weights = make_inputs(64)
    g = torch.full((64,), 3e-3, device=DEVICE)
    if scale == "per token":
        g *= 1 + torch.rand(64, device=DEVICE)
    q = formats.quantize(x, "nvfp4", g if scale == "per token" else g[0])
    layer.poison()
    assert_close(layer(q, ids, topk_weights), layer.want(q, ids, topk_weights), "nvfp4")
    views = layer.ws.views(layer.weights.problem, layer.weights.operand)
    rows = ids.numel()
    token = views["row_slot"][:rows].long() // TOP_K
    assert torch.equal(views["recv_sf"][:rows], g[token])
    values = formats.dequantize(
        formats.BlockScaled(q.format, q.data, q.sf, torch.ones((), device=DEVICE))
    )
    assert torch.equal(views["recv_x"][:rows].float(), values[token])
