"""The forward's numbers on Blackwell or the emulator: rungs, loads, sizes, layouts, bad values."""

from __future__ import annotations

import pytest
import torch
from conftest import FULL, SM100_EMULATED
from sm100_cases import (
    ARCH,
    CASES,
    DEVICE,
    EXPERTS,
    MATRIX,
    MAX_TOKENS,
    RUNGS,
    SIZES,
    TOP_K,
    assert_close,
    bits,
    block_scales,
    inputs_of_loads,
    make_inputs,
    make_layer,
    sf_index,
    tiles_of,
)

import moe_ep_jit as moe
from moe_ep_jit import formats, layout, reference, variants
from moe_ep_jit.formats import BlockScaled
from moe_ep_jit.tools.emulator import tensor_memory

pytestmark = [pytest.mark.sm100, pytest.mark.emulated]

FORMATS = ["mxfp8", "nvfp4"]


def end_from_intermediate(layer, inputs, config):
    """The layer's end in fp32, from the intermediate that the kernels of a finished call left."""
    weights, plain = layer.weights, layer.plain
    problem, views = weights.problem, layer.views()
    x, ids, topk_weights = inputs
    fmt = formats.BY_NAME[problem.format]
    sf = block_scales(layer, "h_sf", config.tile_n, problem.intermediate).view(fmt.sf_dtype)
    rows = len(sf)
    data = views["h"][:rows]
    y = torch.zeros(ids.numel(), problem.hidden, device=x.device)
    for expert, (_, _, first, count) in enumerate(views["expert_info"].tolist()):
        piece = slice(first, first + count)
        if fmt is formats.NVFP4:
            q = BlockScaled(fmt, data[piece], sf[piece], weights.h_global_scale[expert])
        else:
            q = BlockScaled(fmt, data[piece].view(torch.float8_e4m3fn), sf[piece])
        out = formats.dequantize(q) @ plain.dequantize("w2", expert).T
        if problem.bias:
            out += plain.bias("w2")[expert]
        y[views["row_slot"][piece].long()] = out.bfloat16().float()
    scale = torch.where(ids >= 0, topk_weights, 0.0)
    return (y.view(*ids.shape, problem.hidden) * scale[..., None]).sum(1).bfloat16()


@pytest.mark.parametrize(("name", "config"), RUNGS)
def test_every_rung_on_all_loads(name, config):
    layer = make_layer(name)
    inputs = inputs_of_loads()
    y = layer(*inputs, config=config)
    assert layer.views()["expert_info"][:, 3].tolist() == [0, 1, 31, 32, 33, 127, 128, 129]
    assert_close(y, layer.want(*inputs), CASES[name][0])
    # From the kernels' own intermediate, rounding to bf16, twice, is all that may differ.
    errors = reference.error(y, end_from_intermediate(layer, inputs, config))
    assert errors.whole < 2e-3, errors
    assert errors.worst_row < 6e-3, errors


@pytest.mark.parametrize(("name", "sizes", "arch", "config"), MATRIX)
def test_every_rung_on_all_loads_and_sizes(name, sizes, arch, config):
    layer = make_layer(name, sizes, arch=arch)
    inputs = inputs_of_loads(hidden=sizes[0])
    assert_close(layer(*inputs, config=config), layer.want(*inputs), name)


@pytest.mark.skipif(not SM100_EMULATED, reason="asks the emulator what was multiplied")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("tile_n", "widths"),
    [(8, {8}), (32, {32}), (128, {64, 128}), (192, {64, 128, 192})],
)
def test_last_tiles_multiply_the_columns_that_are_read(name, tile_n, widths, monkeypatch):
    """Of experts with 0 to 192 rows, in whole chunks of the epilogue, 64 at most."""
    found = set()
    form = tensor_memory.Form

    def noted(instruction, word):
        made = form(instruction, word)
        found.add(made.n)
        return made

    monkeypatch.setattr(tensor_memory, "Form", noted)
    layer = make_layer(name)
    config = next(c for c in variants.ladder("sm_100a", name) if c.tile_n == tile_n)
    inputs = inputs_of_loads((0, 1, 31, 33, 64, 70, 100, 192))
    assert_close(layer(*inputs, config=config), layer.want(*inputs), name)
    assert found == widths


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("mxfp8", (64, 64)),
        ("nvfp4", (64, 64)),
        ("nvfp4", (256, 128)),
        pytest.param("mxfp8", (256, 128), marks=pytest.mark.full),
        pytest.param("mxfp8", (320, 192), marks=pytest.mark.full),
        pytest.param("nvfp4", (320, 192), marks=pytest.mark.full),
        pytest.param("mxfp8", (704, 256), marks=pytest.mark.full),
        pytest.param("nvfp4", (704, 256), marks=pytest.mark.full),
        pytest.param("mxfp8", (1664, 448), marks=pytest.mark.full),
        pytest.param("nvfp4", (3392, 1280), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_sizes(name, sizes):
    layer = make_layer(name, sizes, 3)
    ladder = variants.ladder("sm_100a", name)
    for config in ladder if FULL or not SM100_EMULATED else (ladder[1], ladder[-1]):
        inputs = make_inputs(20, sizes[0], 3)
        assert_close(layer(*inputs, config=config), layer.want(*inputs), name)


@pytest.mark.parametrize("name", FORMATS)
def test_rungs_agree_bit_for_bit(name):
    """A row's sums do not depend on the tile around it, nor on the CTAs that share an MMA."""
    layer = make_layer(name)
    inputs = make_inputs(60)
    ladder = variants.ladder("sm_100a", name)
    chosen = ladder if FULL or not SM100_EMULATED else (ladder[0], ladder[3], ladder[5])
    seen = [bits(layer(*inputs, config=config).clone()) for config in chosen]
    assert all(torch.equal(seen[0], y) for y in seen[1:])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_few_tokens(name, tokens):
    layer = make_layer(name)
    inputs = make_inputs(tokens)
    y = layer(*inputs)
    assert y.shape == (tokens, SIZES[0])
    if tokens:
        assert_close(y, layer.want(*inputs), name)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tile_n", [8, 32, 192])
def test_dispatch_writes_rows_and_scales_bit_for_bit_and_nothing_else(name, tile_n):
    layer = make_layer(name)
    config = next(c for c in variants.ladder("sm_100a", name) if c.tile_n == tile_n)
    x, ids, topk_weights = make_inputs(70)
    layer.poison()
    moe.dispatch(x, ids, layer.ws, layer.weights, config=config)
    layer.ws.reset()
    want = formats.quantize(x, name)
    views = layer.views()
    rows = ids.numel()
    token = views["row_slot"][:rows].long() // TOP_K
    assert torch.equal(views["recv_x"][:rows], want.data.view(torch.uint8)[token])
    assert (views["recv_x"][rows:] == 0xFF).all()
    flat = views["recv_block_sf"].view(-1)
    is_used = torch.zeros_like(flat, dtype=torch.bool)
    sf = want.sf.view(torch.uint8)
    for _, first, count, n_tile in tiles_of(layer, tile_n):
        index = sf_index(tile_n, n_tile, count, SIZES[0], name)
        assert torch.equal(flat[index], sf[token[first : first + count]])
        is_used[index] = True
    assert (flat[~is_used] == 0xFF).all()
    if name == "nvfp4":
        assert torch.equal(views["recv_sf"][:rows], want.global_scale[token])


@pytest.mark.parametrize("name", FORMATS)
def test_bad_rows_touch_no_other_row(name):
    layer = make_layer(name)
    x, ids, topk_weights = make_inputs(60)
    clean = layer(x, ids, topk_weights).clone()
    x[5, 3] = float("nan")
    x[6] = float("nan")
    x[7, 150] = float("inf")
    x[8] = float("-inf")
    topk_weights[20] = float("nan")
    y = layer(x, ids, topk_weights)
    good = [row for row in range(60) if row not in (5, 6, 7, 8, 20)]
    assert torch.equal(bits(y[good]), bits(clean[good]))
    assert y[[5, 6, 20]].isnan().all()


@pytest.mark.parametrize("name", FORMATS)
def test_skipped_slots_and_rows_behind_the_live_count(name):
    layer = make_layer(name)
    x, ids, topk_weights = make_inputs(60)
    ids[3] = -1
    ids[4, 0] = EXPERTS
    same = layer(x[:40], ids[:40], topk_weights[:40]).clone()
    config = variants.choose_rung(layer.weights.problem, ARCH, 40)
    x[40:], ids[40:], topk_weights[40:] = float("nan"), 2**31 - 1, float("nan")
    out = torch.full((60, SIZES[0]), 5.0, device=DEVICE, dtype=torch.bfloat16)
    live = torch.tensor([40], device=DEVICE, dtype=torch.int32)
    layer(x, ids, topk_weights, out=out, num_tokens=live, config=config)
    assert torch.equal(bits(out[:40]), bits(same))
    assert (out[3] == 0).all()
    assert (out[40:] == 5).all()


@pytest.mark.parametrize(("name", "scale"), [("mxfp8", None), ("nvfp4", "row"), ("nvfp4", "one")])
def test_block_scaled_x(name, scale):
    """Blocks quantized by another scale than the row's own reach the experts as they are."""
    layer = make_layer(name)
    x, ids, topk_weights = make_inputs(40)
    g = None
    if scale is not None:
        g = torch.full((40,), 3e-3, device=DEVICE) * (1 + torch.rand(40, device=DEVICE))
    q = formats.quantize(x, name, g[0] if scale == "one" else g)
    assert_close(layer(q, ids, topk_weights), layer.want(q, ids, topk_weights), name)
    views = layer.views()
    token = views["row_slot"][: ids.numel()].long() // TOP_K
    assert torch.equal(views["recv_x"][: ids.numel()], q.data.view(torch.uint8)[token])
    if scale is not None:
        given = g[:1].expand(40) if scale == "one" else g
        assert torch.equal(views["recv_sf"][: ids.numel()], given[token])


def test_saturated_blocks_are_counted():
    layer = make_layer("nvfp4")
    inputs = make_inputs(40)
    before = layer.ws.saturated_blocks()
    layer(inputs[0] * 0.25, *inputs[1:])
    assert layer.ws.saturated_blocks() == before
    layer(inputs[0] * 64, *inputs[1:])
    assert layer.ws.saturated_blocks() > before


@pytest.mark.parametrize(("name", "bound"), [("mxfp8", 7.0), ("nvfp4", 24.0)])
def test_accuracy_against_a_dense_layer_in_bf16(name, bound):
    layer = make_layer(name)
    inputs = make_inputs(MAX_TOKENS)
    want = reference.dense_bf16(*inputs, *layer.source)
    assert 100 * reference.error(layer(*inputs), want).whole < bound


@pytest.mark.parametrize("name", FORMATS)
def test_equal_calls_give_equal_bits_and_leave_control_at_rest(name):
    layer = make_layer(name)
    inputs = make_inputs(40)
    first = layer(*inputs).clone()
    for _ in range(3):
        assert torch.equal(bits(layer(*inputs)), bits(first))
    control = layer.ws.control().tolist()
    for word in (
        layout.CONTROL_ROUTE_TICKET,
        layout.CONTROL_COMBINE_TICKET,
        layout.CONTROL_IN_FLIGHT,
    ):
        assert control[word] == 0
