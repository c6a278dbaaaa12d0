"""layout.py: regions of a workspace, columns of block scales, the list of launch arguments."""

from __future__ import annotations

import ast
import random

import pytest

from moe_ep_jit import cache_key, layout, variants
from moe_ep_jit.kernels.sm90.config import ladder
from moe_ep_jit.problem import ARCHES, Problem

OPERANDS = ["e4m3", "bf16", "mxfp8", "nvfp4"]
FORWARD = cache_key.kernels_folder() / "common" / "forward.py"

#: layer -> (hidden, intermediate, experts, top_k, max_tokens, max_recv_rows)
LAYERS = {
    "tiny": (64, 64, 1, 1, 1, None),
    "odd": (192, 320, 3, 2, 5, None),
    "dsv3-ep8": (7168, 2048, 32, 8, 4096, None),
    "gptoss-120b": (2880, 2880, 128, 4, 8192, None),
    "bounded": (256, 128, 7, 6, 1000, 1234),
    "beyond-2^31": (7168, 2048, 512, 8, 300_000, None),
}


def make(name):
    names = ("hidden", "intermediate", "num_experts", "top_k", "max_tokens", "max_recv_rows")
    return Problem(**dict(zip(names, LAYERS[name], strict=True)), format="mxfp8")


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("operand", OPERANDS)
def test_regions_are_aligned_in_order_and_apart(name, operand):
    problem = make(name)
    end = 0
    for key, region in layout.regions(problem, operand).items():
        assert region.name == key
        assert region.offset % layout.REGION_ALIGN == 0
        assert region.nbytes > 0
        assert end <= region.offset < end + layout.REGION_ALIGN
        end = region.offset + region.nbytes
    total = layout.workspace_bytes(problem, operand)
    assert end <= total < end + layout.REGION_ALIGN
    assert total % layout.REGION_ALIGN == 0


@pytest.mark.parametrize("operand", OPERANDS)
def test_regions_are_launch_arguments_in_that_order(operand):
    regions = list(layout.regions(make("odd"), operand))
    assert [name for name in layout.LAUNCH_ARGS if name in regions] == regions
    assert all(layout.LAUNCH_ARGS[name] == "ptr" for name in regions)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("operand", OPERANDS)
def test_control_words_come_first_whatever_the_layer_is(name, operand):
    control = layout.regions(make(name), operand)["control"]
    assert (control.offset, control.shape) == (0, (layout.CONTROL_WORDS,))


def test_words_and_stages_are_distinct():
    words = [value for name, value in vars(layout).items() if name.startswith("CONTROL_")]
    words += [layout.CONTROL_TIMEOUT + 1, layout.CONTROL_ERROR + 1]  # of 64 bits
    assert len(set(words)) == len(words)
    assert max(words) == layout.CONTROL_WORDS
    assert layout.CONTROL_TIMEOUT % 2 == layout.CONTROL_ERROR % 2 == 0
    stages = [
        layout.STAGE_DISPATCH,
        layout.STAGE_GATE_UP,
        layout.STAGE_DOWN,
        layout.STAGE_COMBINE,
    ]
    assert stages == [1, 2, 4, 8]
    assert sum(stages) == layout.STAGE_ALL
    assert layout.ERROR_CODE < layout.ERROR_WORDS


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 72])
def test_what_ranks_tell_each_other_has_words_of_its_own(num_ranks):
    parts = layout.exchange_parts(num_ranks)
    end = layout.CONTROL_WORDS
    for first, count in parts.values():
        assert first == end
        end += count
    assert end == layout.control_words(num_ranks)
    assert parts["deltas"][0] % 2 == 0  # of 64 bits
    assert layout.flag_name(parts["done_flags"][0] + 1, num_ranks) == "done_flags[1]"
    assert layout.flag_name(layout.CONTROL_EPOCH, num_ranks) == "control[4]"
    bits = layout.slot_bits(num_ranks)
    assert num_ranks << bits <= 2**31  # the largest rank and slot are no negative number
    assert num_ranks << (bits + 1) > 2**31


def test_sizes_of_dsv3_on_one_rank():
    """4096 tokens, 32 experts, top 8: one row a (token, k), in the format of the operand."""
    rows = 32768
    problem = make("dsv3-ep8")
    assert problem.recv_rows == rows
    fp8 = {n: r.nbytes for n, r in layout.regions(problem, "e4m3").items()}
    bf16 = {n: r.nbytes for n, r in layout.regions(problem, "bf16").items()}
    assert fp8["recv_x"] == rows * 7168 == 234_881_024
    assert fp8["h"] == rows * 2048 == 67_108_864
    assert fp8["recv_sf"] == rows * 4
    assert fp8["h_sf"] == 2048 // 32 * (rows + 4 * 32 + 64) * 4 == 8_437_760
    assert fp8["y"] == bf16["y"] == rows * 7168 * 2 == 469_762_048
    assert bf16["recv_x"] == 2 * fp8["recv_x"]
    assert bf16["h"] == 2 * fp8["h"]
    assert "h_sf" not in bf16
    # Bookkeeping: a third of a percent of the payload at most.
    payload = fp8["recv_x"] + fp8["h"] + fp8["h_sf"] + fp8["y"]
    assert payload < layout.workspace_bytes(problem, "e4m3") < 1.003 * payload
    payload = bf16["recv_x"] + bf16["h"] + bf16["y"]
    assert payload < layout.workspace_bytes(problem, "bf16") < 1.003 * payload


def test_bookkeeping_holds_the_worst_case():
    problem = make("bounded")
    regions = layout.regions(problem, "e4m3")
    slots, rows, experts = 6000, 1234, 7
    assert problem.recv_rows == rows
    assert regions["slot_rank"].shape == (slots,)
    assert regions["y"].shape == (slots, 256)
    assert regions["chunk_counts"].shape == (6, experts)  # chunks of 1024 slots
    assert regions["expert_info"].shape == (experts, 4)
    assert regions["row_slot"].shape == (rows,)
    assert regions["recv_x"].shape == (rows, 256)
    assert regions["recv_sf"].shape == (rows,)
    assert regions["h_sf"].shape[0] == 4


def counts_of(num_experts, total, how):
    """Rows of each expert, ``total`` in all."""
    if how == "one":
        counts = [0] * num_experts
        counts[random.randrange(num_experts)] = total
        return counts
    if how == "zipf":
        weights = [1 / (e + 1) ** 1.2 for e in range(num_experts)]
    else:
        weights = [random.random() ** 4 for _ in range(num_experts)]
    chosen = random.choices(range(num_experts), weights, k=total)
    return [chosen.count(e) for e in range(num_experts)]


@pytest.mark.parametrize("how", ["one", "zipf", "random"])
@pytest.mark.parametrize("num_experts", [1, 2, 7, 32, 160])
def test_columns_of_block_scales_never_overlap(num_experts, how):
    for total in (0, 1, 2, 3, 4, 5, 31, 100, 997):
        counts = counts_of(num_experts, total, how)
        pitch = layout.sf_pitch(total, num_experts)
        assert pitch % 4 == 0  # so that every row of h_sf starts on 16 bytes
        end, first_row = 0, 0
        for expert, rows in enumerate(counts):
            first = layout.first_sf_row(first_row, expert)
            assert first % 4 == 0
            assert first >= end
            end = first + layout.round_up(rows, 4)  # bulk copies end on 16 bytes too
            # The tiles of an expert cover it, and what the last one reads beyond stays inside.
            for config in ladder("e4m3"):
                tile = config.tile_n
                if rows and not config.fold_intermediate:
                    assert first + layout.round_up(rows, tile) <= pitch
            first_row += rows
        assert end <= pitch


@pytest.mark.parametrize("num_experts", [1, 3, 32])
def test_tile_list_holds_every_rungs_tiles(num_experts):
    smallest = min(
        config.tile_n
        for arch in ARCHES
        for operand in variants.operands(arch)
        for config in variants.ladder(arch, operand)
    )
    assert smallest == layout.MIN_TILE_N
    for total in (1, 8, 100, 997):
        problem = Problem(64, 64, num_experts, 1, total, format="mxfp8")
        (words,) = layout.regions(problem, "e4m3")["tiles"].shape
        for how in ("one", "zipf", "random"):
            counts = counts_of(num_experts, total, how)
            assert 1 + sum(layout.ceil_div(rows, smallest) for rows in counts) <= words


@pytest.mark.parametrize("operand", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("num_experts", [1, 3, 32])
def test_every_tile_has_its_block_scales_in_the_region(num_experts, operand):
    for total in (1, 8, 100, 997):
        problem = Problem(192, 64, num_experts, 1, total, format=operand)
        room = layout.regions(problem, operand)["recv_block_sf"].nbytes
        atoms = layout.sf_atoms(problem.hidden, operand)
        for config in variants.ladder("sm_100a", operand):
            tile_bytes = atoms * layout.sf_atom_bytes(config.tile_n)
            for how in ("one", "zipf", "random"):
                counts = counts_of(num_experts, total, how)
                tiles = sum(layout.ceil_div(rows, config.tile_n) for rows in counts)
                assert tiles * tile_bytes <= room


def test_places_of_block_scales_are_the_mmas_order():
    """Row r of 128: word r / 32 of lane r % 32; 512 bytes for each 128 rows; nothing twice."""
    for tile_n in (8, 16, 32, 64, 128, 192):
        places = [layout.sf_place(row) for row in range(tile_n)]
        assert len(set(places)) == tile_n
        assert max(places) < layout.sf_atom_bytes(tile_n)
        for row, place in enumerate(places):
            block, offset = divmod(place, 512)
            assert block == row // 128
            assert divmod(offset, 16) == (row % 32, row % 128 // 32 * 4)


def test_launch_arguments_are_the_parameters_of_forward():
    """Read from the source: no compiler is imported."""
    types = {"ptr": "Int64", "i32": "Int32", "i64": "Int64", "f32": "Float32", "stream": "CUstream"}
    (forward,) = (
        node
        for node in ast.parse(FORWARD.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "Forward"
    )
    (call,) = (
        node
        for node in forward.body
        if isinstance(node, ast.FunctionDef) and node.name == "__call__"
    )
    found = {a.arg: ast.unparse(a.annotation) for a in call.args.args[1:]}
    assert list(found) == list(layout.LAUNCH_ARGS)
    assert found == {name: types[kind] for name, kind in layout.LAUNCH_ARGS.items()}


@pytest.mark.parametrize(
    ("a", "b", "quotient", "rounded"), [(0, 8, 0, 0), (1, 8, 1, 8), (8, 8, 1, 8), (9, 8, 2, 16)]
)
def test_rounding(a, b, quotient, rounded):
    assert layout.ceil_div(a, b) == quotient
    assert layout.round_up(a, b) == rounded


@pytest.mark.parametrize(
    ("payload", "bytes_a_row"), [("bf16", 14336), ("mxfp8", 7168 + 224), ("nvfp4", 3584 + 448 + 4)]
)
def test_exchange_regions_hold_every_row_of_the_payload(payload, bytes_a_row):
    facts = {"act": "bf16", "wire": payload, "num_ranks": 4, "max_recv_rows": 5003}
    problem = Problem(7168, 2048, 32, 8, 100, format="mxfp8", **facts)
    assert sum(layout.wire_parts(7168, payload).values()) == bytes_a_row
    end = 0
    regions = layout.exchange_regions(problem)
    for region in regions.values():
        assert region.offset % layout.REGION_ALIGN == 0
        assert region.offset >= end
        end = region.offset + region.nbytes
    assert end <= layout.exchange_bytes(problem) < end + layout.REGION_ALIGN
    for name, rows in (("send_rows", 800), ("recv_rows", 3200)):  # the worst case is below 5003
        assert rows * bytes_a_row <= regions[name].nbytes < rows * bytes_a_row + 48
    for combine_wire, width in (("bf16", 14336), ("mxfp8", 7168 + 224)):
        back = layout.exchange_regions(problem.with_(combine_wire=combine_wire))["returned"]
        assert back.nbytes == 800 * width
    bounded = layout.exchange_regions(problem.with_(max_recv_rows=77))
    assert bounded["recv_rows"].nbytes < 77 * bytes_a_row + 48


def test_an_undecided_payload_is_given_room_for_any():
    problem = Problem(64, 64, 4, 2, 3, format="nvfp4", num_ranks=2)
    sizes = [layout.exchange_bytes(problem.with_(act=act)) for act in ("bf16", "mxfp8", "nvfp4")]
    assert layout.exchange_bytes(problem) == max(sizes)
