"""Integer arithmetic that host and device share: regions, launch arguments, control words.

Nothing here imports torch or the DSL. A region, a control word or a launch argument is listed once,
here.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from moe_ep_jit.problem import Problem

#: Bytes of one element, by the names that regions use.
ITEM_BYTES = {"u8": 1, "i32": 4, "f32": 4, "bf16": 2}

#: Every region starts on this boundary: TMA wants 16 bytes, a 128-byte swizzle atom wants 1024.
REGION_ALIGN = 1024

#: Each array of a row payload starts on this boundary, as rows of x do.
WIRE_ALIGN = 16

#: Slots (token, k) that one CTA of the route kernel counts.
ROUTE_CHUNK = 1024

#: The smallest token tile of any rung: bounds the length of the tile list.
MIN_TILE_N = 8

#: MXFP8 block along K.
SF_BLOCK = 32

#: K elements that four block scales serve, for the operands whose blocks the MMA scales itself.
SF_ATOM_K = {"mxfp8": 128, "nvfp4": 64}

#: Words of the ``control`` region; with several ranks ``exchange_parts`` come behind them.
CONTROL_WORDS = 16
CONTROL_ROUTE_TICKET = 0  # CTAs of the route kernel that have finished
CONTROL_COMBINE_TICKET = 1  # CTAs of the combine kernel that have finished
CONTROL_IN_FLIGHT = 2  # 1 from a call's route to its combine
CONTROL_SATURATED = 3  # NVFP4 blocks of the intermediate whose scale saturated, since construction
# With several ranks over symmetric memory.
CONTROL_EPOCH = 4  # rounds that route has begun
CONTROL_FAILED = 5  # 1: a wait timed out, or the ranks do not agree; nothing is posted any more
CONTROL_RANK = 6
CONTROL_TIMEOUT = 8  # int64: nanoseconds that a wait may last
CONTROL_ERROR = 10  # int64: address of the error record

#: The most experts of all ranks over symmetric memory: what a rank's post of counts has room for.
EXCHANGE_EXPERTS = 1024

#: Words that a rank posts in front of its counts.
HEADER_WORDS = 4
HEADER_SIGNATURE = 0  # of the layer's facts
HEADER_RECV_ROWS = 1
HEADER_TILE_N = 2  # of its rung: says where block scales go

#: Words of the pinned host error record; those behind the code are what a wait expected.
ERROR_WORDS = 8
ERROR_CODE = 0
ERROR_RANK = 1
ERROR_PEER = 2
ERROR_PHASE = 3  # PHASES
ERROR_FLAG = 4  # word of ``control``
ERROR_EXPECTED = 5
ERROR_SEEN = 6
ERROR_TWO_STREAMS = 1  # a second call started before the first had finished
ERROR_TIMEOUT = 2  # a wait for a peer
ERROR_OVERFLOW = 3  # peer would receive "seen" rows, more than "expected"
ERROR_DIFFERENT = 4  # peer calls another layer

#: What a rank waits for, by ``ERROR_PHASE``.
PHASES = ("count exchange", "dispatch", "combine")

#: Bits of the ``stages`` launch argument.
STAGE_DISPATCH = 1
STAGE_GATE_UP = 2
STAGE_DOWN = 4
STAGE_COMBINE = 8
STAGE_ALL = 15


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


@dataclass(frozen=True)
class Region:
    """A named part of the workspace: ``offset`` in bytes from its start, ``shape`` in elements."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def sf_pitch(rows: int, num_experts: int) -> int:
    """Columns of ``h_sf``: one a row, each expert's first on a multiple of 4 (``first_sf_row``).

    The last 64 are what a tile of at most 64 rows reads beyond the last expert's.
    """
    return (rows + 3) // 4 * 4 + 4 * num_experts + 64


def first_sf_row(first_row: int, expert: int) -> int:
    """The column of ``h_sf`` of an expert's first row.

    16-byte aligned for bulk copies, and clear of its neighbours' columns.
    """
    return (first_row + 3) // 4 * 4 + 4 * expert


# Block scales for an MMA that scales blocks itself (operand "mxfp8" or "nvfp4"). Four blocks of K
# are a k-atom, a word a row. The MMA takes 128 rows x 4 blocks as 32 lanes of 16 bytes: row r is
# word r / 32 of lane r % 32. A tile of tokens must begin at lane 0, so the scales are kept tile by
# tile, in the order of the tile list, and in a tile k-atom by k-atom; tiles of 8 or 16 rows keep as
# many lanes. An expert's last tile leaves the places behind its rows unwritten: they scale only
# columns of the product that nobody reads.


def sf_atom_bytes(tile_n: int) -> int:
    """Bytes of the scales of one tile for one k-atom."""
    return min(tile_n, 32) * 16 * ceil_div(tile_n, 128)


def sf_place(row: int) -> int:
    """Byte of a tile's row in its k-atom."""
    return (row >> 7) * 512 + (row & 31) * 16 + ((row >> 5) & 3) * 4


def sf_lines(rows: int, num_experts: int, k_atoms: int) -> int:
    """Lines of 128 bytes that hold the scales of ``rows``, whatever tile_n is.

    ``rows // tile_n + num_experts`` tiles at most, of 16 bytes a row or less, of 1024 or less.
    """
    return ((rows + 7) // 8 + 8 * num_experts) * k_atoms


def sf_atoms(k: int, operand: str) -> int:
    """K-atoms of ``k`` elements."""
    return ceil_div(k, SF_ATOM_K[operand])


def exchange_parts(num_ranks: int) -> dict[str, tuple[int, int]]:
    """What ranks over symmetric memory tell each other: name -> (first word of ``control``, words).

    The same whatever the layer, since a rank posts while another still reads the post before: for
    another layer, of those that share the workspace.
    """
    words = {
        "deltas": 2 * num_ranks,  # int64 a rank: from an address here to the same place there
        "count_flags": num_ranks,  # by source: the epoch whose counts it has posted
        "done_flags": num_ranks,  # by source: the epoch whose rows it has sent back
        "expects": num_ranks,  # by rank: rows of this round that come back from it
        "headers": 2 * num_ranks * HEADER_WORDS,  # by the epoch's parity, by source
        "counts": 2 * num_ranks * EXCHANGE_EXPERTS,  # likewise: rows for each expert
        "arrived": EXCHANGE_EXPERTS,  # by local expert, by source: rows that have come
        "expected": EXCHANGE_EXPERTS,  # likewise: rows that are to come
        # Of an expert where it is: rows of the ranks before this one, first row, first n-tile.
        "rows_before": EXCHANGE_EXPERTS,
        "first_row": EXCHANGE_EXPERTS,
        "first_tile": EXCHANGE_EXPERTS,
    }
    parts, first = {}, CONTROL_WORDS
    for name, count in words.items():
        parts[name] = (first, count)
        first += count
    return parts


def flag_name(word: int, num_ranks: int) -> str:
    """A word of ``control`` as its part and its place there."""
    for name, (first, count) in exchange_parts(num_ranks).items():
        if first <= word < first + count:
            return f"{name}[{word - first}]"
    return f"control[{word}]"


def control_words(num_ranks: int) -> int:
    """Words of ``control``."""
    if num_ranks == 1:
        return CONTROL_WORDS
    return sum(list(exchange_parts(num_ranks).values())[-1])


def slot_bits(num_ranks: int) -> int:
    """Bits of a ``row_slot`` that are the slot; the rank whose slot it is comes above them."""
    return 31 - (num_ranks - 1).bit_length()


def regions(problem: Problem, operand: str) -> dict[str, Region]:
    """All regions of one rank's workspace but the output, by name, in launch-argument order.

    operand  what the MMA's token side is: "e4m3" (one byte), "bf16", or rows with their block
             scales apart: "mxfp8" (one byte), "nvfp4" (half a byte)
    """
    slots = problem.max_tokens * problem.top_k
    rows, experts = problem.recv_rows, problem.num_local_experts
    token = "bf16" if operand == "bf16" else "u8"
    packing = 2 if operand == "nvfp4" else 1  # elements that an item holds

    def block_scales(k: int) -> tuple[tuple[int, ...], str] | None:
        if operand not in SF_ATOM_K:
            return None
        return (sf_lines(rows, experts, sf_atoms(k, operand)), 128), "u8"

    shapes = {
        "control": ((control_words(problem.num_ranks),), "i32"),
        # rows of each expert in a chunk; in the end, in the chunks before it
        "chunk_counts": ((ceil_div(slots, ROUTE_CHUNK), problem.num_experts), "i32"),
        # place among its chunk's slots of the same expert; -1: skipped
        "slot_rank": ((slots,), "i32"),
        # first n-tile, n-tiles, first row, rows
        "expert_info": ((experts, 4), "i32"),
        # number of n-tiles, then the expert of each
        "tiles": ((1 + ceil_div(rows, MIN_TILE_N) + experts,), "i32"),
        "row_slot": ((rows,), "i32"),  # token * top_k + k; above ``slot_bits`` its rank
        "recv_x": ((rows, problem.hidden // packing), token),
        "recv_sf": ((rows,), "f32"),  # scale of a row of recv_x, after folding of h
        "recv_block_sf": block_scales(problem.hidden),
        "h": ((rows, problem.intermediate // packing), token),
        "h_sf": block_scales(problem.intermediate),
        "y": ((slots, problem.hidden), "bf16"),  # by slot: what combine sums
    }
    if operand == "e4m3":  # fp32 scales of the intermediate's blocks alone
        blocks = problem.intermediate // SF_BLOCK
        shapes["h_sf"] = ((blocks, sf_pitch(rows, experts)), "f32")
    # A 16-bit operand carries its scales in its values.
    shapes = {name: shape for name, shape in shapes.items() if shape is not None}
    out, offset = {}, 0
    for name, (shape, dtype) in shapes.items():
        out[name] = Region(name, offset, shape, dtype)
        offset = round_up(offset + out[name].nbytes, REGION_ALIGN)
    return out


#: Regions that other ranks write to, over symmetric memory.
PEER_WRITTEN = ("control", "row_slot", "recv_x", "recv_sf", "recv_block_sf", "y")


def wire_parts(hidden: int, payload: str) -> dict[str, int]:
    """Bytes a row of each array that carries ``payload`` ("bf16", "mxfp8", "nvfp4") by its name."""
    if payload == "bf16":
        return {"data": 2 * hidden}
    if payload == "mxfp8":
        return {"data": hidden, "sf": hidden // 32}
    return {"data": hidden // 2, "sf": hidden // 16, "global_scale": 4}


def wire_bytes(rows: int, hidden: int, payload: str) -> int:
    """Bytes of ``rows`` rows of ``payload``, each array on a boundary of ``WIRE_ALIGN``."""
    return sum(round_up(rows * width, WIRE_ALIGN) for width in wire_parts(hidden, payload).values())


def exchange_regions(problem: Problem) -> dict[str, Region]:
    """What one rank's exchange of rows with the others takes, by name.

    A payload that is undecided counts as bf16, the largest.
    """
    payload = "bf16" if problem.payload == "auto" else problem.payload
    slots, rows = problem.max_tokens * problem.top_k, problem.recv_rows
    shapes = {
        "send_rows": ((wire_bytes(slots, problem.hidden, payload),), "u8"),
        "recv_rows": ((wire_bytes(rows, problem.hidden, payload),), "u8"),
        # in the order of send_rows
        "returned": ((wire_bytes(slots, problem.hidden, problem.combine_wire),), "u8"),
    }
    out, offset = {}, 0
    for name, (shape, dtype) in shapes.items():
        out[name] = Region(name, offset, shape, dtype)
        offset = round_up(offset + out[name].nbytes, REGION_ALIGN)
    return out


def exchange_bytes(problem: Problem) -> int:
    """Bytes of ``exchange_regions``."""
    last = list(exchange_regions(problem).values())[-1]
    return round_up(last.offset + last.nbytes, REGION_ALIGN)


def workspace_bytes(problem: Problem, operand: str) -> int:
    """Bytes of all regions but the output."""
    last = list(regions(problem, operand).values())[-1]
    return round_up(last.offset + last.nbytes, REGION_ALIGN)


#: The launch arguments of the layer's one host function, in order: name -> kind.
#: ptr: address (0: absent); i32, i64, f32: value; stream: stream handle.
LAUNCH_ARGS = {
    "stages": "i32",  # STAGE_* bits
    "num_sms": "i32",
    "tokens": "i32",  # rows of x
    "num_tokens": "ptr",  # device int32: live rows; 0: all
    "x": "ptr",
    "x_stride": "i64",  # elements of x's own type between rows
    "x_sf": "ptr",  # BlockScaled x: its block scales
    "x_global_scale": "ptr",  # BlockScaled NVFP4 x: fp32
    "x_global_stride": "i32",  # 1: one a token, 0: one for all
    "ids": "ptr",
    "ids_stride": "i64",  # elements between tokens
    "ids_words": "i32",  # 1: int32, 2: int64
    "topk_weights": "ptr",
    "topk_weights_stride": "i64",
    "topk_weights_type": "i32",  # TOPK_WEIGHT_TYPES
    "out": "ptr",
    "out_stride": "i64",
    "limit": "f32",  # SwiGLU; inf: none
    "alpha": "f32",
    "beta": "f32",
    "w13": "ptr",
    "w13_sf": "ptr",
    "w13_bias": "ptr",
    "w2": "ptr",
    "w2_sf": "ptr",
    "w2_bias": "ptr",
    "h_global_scale": "ptr",
    "control": "ptr",
    "chunk_counts": "ptr",
    "slot_rank": "ptr",
    "expert_info": "ptr",
    "tiles": "ptr",
    "row_slot": "ptr",
    "recv_x": "ptr",
    "recv_sf": "ptr",
    "recv_block_sf": "ptr",
    "h": "ptr",
    "h_sf": "ptr",
    "y": "ptr",
    "recv_rows": "i32",  # rows that the receive regions hold
    "error": "ptr",  # pinned host int32 [ERROR_WORDS]
    "load": "ptr",  # int64 [experts]: rows so far, which route adds to
    "stream": "stream",
}

#: ``topk_weights_type`` by torch dtype name.
TOPK_WEIGHT_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2, "float64": 3}
