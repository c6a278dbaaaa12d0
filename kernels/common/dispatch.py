"""Dispatch: quantize the tokens and move them to the rows that route has given their slots."""

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, const_expr, cute, memory, select_

from moe_ep_jit import layout
from moe_ep_jit.kernels.common import exchange, ptx
from moe_ep_jit.kernels.common import quantize as q
from moe_ep_jit.kernels.common.route import RouteArgs, expert_of, live_tokens


class TokenArgs(NamedTuple):
    """The tokens of a call and where their rows go."""

    x: Int64
    x_stride: Int64
    x_sf: Int64
    x_global_scale: Int64
    x_global_stride: Int32
    recv_x: Int64
    recv_sf: Int64
    recv_block_sf: Int64


class Dispatch:
    """One CTA a token at a time: read its row once, quantize it in registers, write it to the rows
    of its slots.

    operand  "e4m3": MXFP8 folded to one scale a row (``formats.fold``); "bf16": values that the
             act's rounding has been applied to, exact in bf16; NVFP4's second-level scale stays
             apart, in ``recv_sf``; "mxfp8", "nvfp4": the format's own elements, and its block
             scales in the order of ``layout.sf_place``
    tile_n   rows of a tile, whose scales are neighbours: for the last two
    ranks    exchange.Ranks of several ranks, else None: a row, its scales and its slot go straight
             to their places on the rank of its expert, which counts them
    """

    def __init__(
        self, *, hidden: int, num_experts: int, top_k: int, operand: str, act: str, x_kind: str,
        tile_n: int, ranks: exchange.Ranks | None = None
    ):  # fmt: skip
        self.ranks = ranks
        self.hidden, self.num_experts, self.top_k = hidden, num_experts, top_k
        self.operand, self.act, self.x_kind = operand, act, x_kind
        self.has_blocks = operand in layout.SF_ATOM_K
        self.tile_n = tile_n
        if self.has_blocks:
            self.sf_atom_bytes = layout.sf_atom_bytes(tile_n)
            self.tile_sf_bytes = layout.sf_atoms(hidden, operand) * self.sf_atom_bytes
        self.item_bits = {"bf16": 16, "nvfp4": 4}.get(operand, 8)
        # A piece is what a thread reads at once: 16 elements to quantize (an NVFP4 block, half an
        # MXFP8 block); 8 to copy, which keeps a warp's stores next to each other.
        self.copies = act == "bf16" and x_kind == "bf16"
        # The caller's blocks, with their scales.
        self.keeps_blocks = act == x_kind and (act == "nvfp4" or self.has_blocks)
        self.piece = 8 if self.copies else 16
        self.pieces = hidden // self.piece
        # Of a piece, and one for the scale byte of its block.
        self.words = {"bf16": self.piece // 2, "mxfp8": 4 + 1, "nvfp4": 2 + 1}[x_kind]
        self.pieces_per_thread = layout.ceil_div(self.pieces, 512)
        self.threads = layout.round_up(layout.ceil_div(self.pieces, self.pieces_per_thread), 32)

    @cute.jit
    def __call__(self, route: RouteArgs, args: TokenArgs, num_sms: Int32, stream):
        grid = cutlass.max(cutlass.min(route.tokens, num_sms * 8), 1)
        self.kernel(route, args).launch(
            grid=(grid, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, route: RouteArgs, args: TokenArgs):
        thread, _, _ = cute.arch.thread_idx()
        token, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        smem = memory.SmemAllocator()
        rows = smem.allocate_tensor(Int32, cute.make_layout(self.top_k), 16)
        sf_places = smem.allocate_tensor(Int64, cute.make_layout(self.top_k), 16)
        deltas = sf_pitches = None
        if const_expr(self.ranks is not None):
            deltas = smem.allocate_tensor(Int64, cute.make_layout(self.top_k), 16)
            sf_pitches = smem.allocate_tensor(Int32, cute.make_layout(self.top_k), 16)
        maxima = smem.allocate_tensor(Int32, cute.make_layout(32), 16)
        live = live_tokens(route)
        # The first token, while route still counts: whatever made x had ended before route began,
        # but L1 may hold older lines, so these loads go past it.
        words = cute.make_rmem_tensor((self.words, self.pieces_per_thread), Int32)
        if token < live:
            self.fetch(args, token, thread, words)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if const_expr(self.ranks is not None):
            if exchange.has_failed(route.control):
                live = Int32(0)
        while token < live:
            arrival = Int64(0)
            if thread < self.top_k:
                if const_expr(self.ranks is None):
                    row, sf_place = self.row_of(route, args, token, thread)
                else:
                    row, sf_place, deltas[thread], sf_pitches[thread], arrival = self.row_there(
                        route, args, token, thread
                    )
                rows[thread] = row
                if const_expr(self.has_blocks):
                    sf_places[thread] = sf_place
            values = [
                self.decoded(args, token, words[None, i]) for i in range(self.pieces_per_thread)
            ]
            block_sf = None
            if const_expr(self.keeps_blocks):
                row_sf = None
                if const_expr(self.act == "nvfp4"):
                    row_sf = self.global_scale(args, token)
                if const_expr(self.has_blocks):
                    packed, block_sf = [v[:-1] for v in values], [v[-1] for v in values]
                else:
                    packed = [self.pack_bf16(v) for v in values]
            elif const_expr(self.has_blocks):
                packed, block_sf, row_sf = self.quantize_blocks(values, maxima, thread)
            else:
                packed, row_sf = self.quantize(values, maxima, thread)
            # The next token comes in while this one goes out; the last, once more.
            self.fetch(args, cutlass.min(token + step, live - 1), thread, words)
            cute.arch.sync_threads()
            for k in cutlass.range_constexpr(self.top_k):
                row = rows[k]
                if row >= 0:
                    there, pitch = 0, None
                    if const_expr(self.has_blocks):
                        pitch = self.sf_atom_bytes
                    if const_expr(self.ranks is not None):
                        there, pitch = deltas[k], sf_pitches[k]
                    self.write(args.recv_x + there, row, packed, thread)
                    if const_expr(block_sf is not None):
                        self.write_scales(sf_places[k], pitch, block_sf, thread)
                    if const_expr(row_sf is not None):
                        if thread == 0:
                            ptx.store(Float32, args.recv_sf + there + Int64(row) * 4, row_sf)
            cute.arch.sync_threads()  # before the next token's rows and maxima
            if const_expr(self.ranks is not None):
                if arrival != 0:
                    # release: the row that the CTA has written, to await_rows of its expert's rank
                    ptx.add_release_system(arrival, Int32(1))
            token += step

    @cute.jit
    def row_of(self, route, args, token, k):
        """The row of a slot, -1 if it is skipped, and the address of its first block scale; records
        the slot at its row.
        """
        slot = token * self.top_k + k
        row = ptx.load(Int32, route.slot_rank + Int64(slot) * 4)
        sf_place = Int64(0)
        if row >= 0:
            expert = expert_of(route, token, k, self.num_experts)
            chunk = slot // layout.ROUTE_CHUNK
            row += ptx.load(
                Int32, route.chunk_counts + (Int64(chunk) * self.num_experts + expert) * 4
            )
            info = route.expert_info + Int64(expert) * 16
            if const_expr(self.has_blocks):
                tile = row // self.tile_n
                first = Int64(ptx.load(Int32, info) + tile) * self.tile_sf_bytes
                in_tile = layout.sf_place(row - tile * self.tile_n)
                sf_place = args.recv_block_sf + first + in_tile
            row += ptx.load(Int32, info + 8)
            ptx.store(Int32, route.row_slot + Int64(row) * 4, slot)
        return row, sf_place

    @cute.jit
    def row_there(self, route, args, token, k):
        """Of a slot with several ranks: as ``row_of``, on the rank of its expert; then its delta,
        the bytes of a k-atom of its rung, and the address of the count of arrivals (0: skipped).
        """
        control, ranks = route.control, self.ranks
        slot = token * self.top_k + k
        row = ptx.load(Int32, route.slot_rank + Int64(slot) * 4)
        sf_place, there, pitch, arrival = Int64(0), Int64(0), Int32(0), Int64(0)
        if row >= 0:
            expert = expert_of(route, token, k, self.num_experts)
            owner = expert // ranks.local
            local = expert - owner * ranks.local
            rank = exchange.word(control, layout.CONTROL_RANK)
            there = exchange.delta(ranks, control, owner)
            chunk = slot // layout.ROUTE_CHUNK
            row += ptx.load(
                Int32, route.chunk_counts + (Int64(chunk) * self.num_experts + expert) * 4
            )
            row += ptx.load(Int32, exchange.place(ranks, control, "rows_before", expert))
            if const_expr(self.has_blocks):
                # The rung of the expert's rank may be another than this one's.
                epoch = exchange.word(control, layout.CONTROL_EPOCH)
                tile_n = exchange.tile_rows(ranks, control, epoch, owner)
                tile = row // tile_n
                pitch = cutlass.min(tile_n, 32) * 16 * ((tile_n + 127) // 128)
                first = ptx.load(Int32, exchange.place(ranks, control, "first_tile", expert)) + tile
                sf_place = args.recv_block_sf + there + layout.sf_place(row - tile * tile_n)
                sf_place += Int64(first) * (layout.sf_atoms(self.hidden, self.operand) * pitch)
            row += ptx.load(Int32, exchange.place(ranks, control, "first_row", expert))
            at = route.row_slot + there + Int64(row) * 4
            ptx.store(Int32, at, (rank << layout.slot_bits(ranks.num_ranks)) | slot)
            index = local * ranks.num_ranks + rank
            arrival = exchange.place(ranks, control, "arrived", index) + there
        return row, sf_place, there, pitch, arrival

    def piece_at(self, thread, i):
        """The i-th piece of a thread; beyond the row, its last piece once more (read, never
        written).
        """
        return cutlass.min(thread + i * self.threads, Int32(self.pieces - 1))

    def fetch(self, args, token, thread, words):
        """A thread's pieces of a token as they are in memory, the block's scale byte behind."""
        for i in range(self.pieces_per_thread):
            piece = self.piece_at(thread, i)
            row = args.x + Int64(token) * args.x_stride * (2 if self.x_kind == "bf16" else 1)
            count = self.words if self.x_kind == "bf16" else self.words - 1
            loaded = ptx.load_streaming(row + piece * (4 * count), count)
            if self.x_kind != "bf16":
                blocks = {"mxfp8": 32, "nvfp4": 16}[self.x_kind]
                sf = Int64(token) * (self.hidden // blocks) + piece * 16 // blocks
                loaded = [*loaded, ptx.load_relaxed(args.x_sf + sf, bits=8)]
            for j, word in enumerate(loaded):
                words[j, i] = word

    def decoded(self, args, token, words):
        """A piece's 16 elements as Float32; what is copied stays words."""
        if self.copies:
            return [words[i] for i in range(4)]
        if self.keeps_blocks and self.has_blocks:
            return [words[i] for i in range(self.words)]
        if self.x_kind == "bf16":
            return [f for i in range(8) for f in (ptx.low_bf16(words[i]), ptx.high_bf16(words[i]))]
        if self.x_kind == "mxfp8":
            byte = words[4]
            scale = select_(byte == 255, ptx.from_bits(Int32(q.NAN_BLOCK)), q.exp2_of_byte(byte))
            return [
                ptx.mul(ptx.e4m3(ptx.shift_right(words[i // 4], 8 * (i % 4))), scale)
                for i in range(16)
            ]
        scale = ptx.e4m3(words[2])
        values = [
            ptx.mul(self.e2m1(ptx.shift_right(words[i // 8], 4 * (i % 8))), scale)
            for i in range(16)
        ]
        if self.keeps_blocks:
            return values
        g = self.global_scale(args, token)
        return [ptx.mul(v, g) for v in values]

    def global_scale(self, args, token):
        """Second-level scale of a BlockScaled NVFP4 token."""
        at = args.x_global_scale + Int64(token * args.x_global_stride) * 4
        return ptx.load(Float32, at)

    def e2m1(self, nibble):
        """E2M1 bits as Float32: at a float's sign, exponent and mantissa they read as the value
        times 2^-126, its subnormal included.
        """
        bits = ((nibble & 8) << 28) | ((nibble & 7) << 22)
        return ptx.mul(ptx.from_bits(bits), Float32(2.0**126))

    def quantize(self, values, maxima, thread):
        """Pieces of Float32 -> (packed words to store, the row's scale or None)."""
        if self.copies:
            return values, None
        if self.act == "bf16":
            return [self.pack_bf16(v) for v in values], None
        if self.act == "mxfp8":
            return self.quantize_mxfp8(values, maxima, thread)
        g, inverse_g = self.nvfp4_scale(values, maxima, thread)
        packed = []
        for v in values:
            s, factor = self.nvfp4_block(v, inverse_g)
            packed.append(
                self.pack_bf16([ptx.mul(q.round_to_e2m1(ptx.mul(x, factor)), s) for x in v])
            )
        return packed, g

    def quantize_mxfp8(self, values, maxima, thread):
        byte_list, elements = self.mxfp8_elements(values)
        elements = [[ptx.round_to_e4m3(x) for x in v] for v in elements]
        if self.operand != "e4m3":
            packed = [
                self.pack_bf16([ptx.mul(x, q.exp2_of_byte(b)) for x in v])
                for v, b in zip(elements, byte_list, strict=True)
            ]
            return packed, None
        row_byte = self.row_maximum(q.maximum(byte_list), maxima, thread)
        packed = []
        for v, byte in zip(elements, byte_list, strict=True):
            factor = q.fold_factor(byte, row_byte)
            packed.append(self.pack_e4m3([ptx.mul(x, factor) for x in v]))
        return packed, q.exp2_of_byte(row_byte)

    def mxfp8_elements(self, values):
        """Scale bytes of pieces, and their elements times the inverse scale, not rounded yet."""
        byte_list, elements = [], []
        for v in values:
            amax = q.maximum([q.finite_bits(x) for x in v])
            # Two neighbouring threads hold one block of 32.
            amax = cutlass.max(amax, cute.arch.shuffle_sync_bfly(amax, 1))
            byte = q.mxfp8_byte(amax)
            byte_list.append(byte)
            inverse = q.mxfp8_inverse(byte)
            elements.append([ptx.mul(x, inverse) for x in v])
        return byte_list, elements

    def quantize_blocks(self, values, maxima, thread):
        """Pieces of Float32 -> (packed words to store, a scale byte each, the row's scale or
        None).
        """
        if self.act == "mxfp8":
            byte_list, elements = self.mxfp8_elements(values)
            return [self.pack_e4m3(v) for v in elements], byte_list, None
        g, inverse_g = self.nvfp4_scale(values, maxima, thread)
        packed, scales = [], []
        for v in values:
            s, factor = self.nvfp4_block(v, inverse_g)
            pairs = [
                ptx.pack_e2m1x2(ptx.mul(v[i], factor), ptx.mul(v[i + 1], factor))
                for i in range(0, 16, 2)
            ]
            packed.append([self.four_bytes(pairs[i : i + 4]) for i in (0, 4)])
            scales.append(ptx.pack_e4m3x2(s, Float32(0.0)))
        return packed, scales, g

    def nvfp4_scale(self, values, maxima, thread):
        """The row's second-level scale and its inverse."""
        amax = q.maximum([q.finite_bits(x) for v in values for x in v])
        g = q.nvfp4_row(self.row_maximum(amax, maxima, thread))
        return g, q.nvfp4_row_inverse(g)

    def nvfp4_block(self, v, inverse_g):
        """A block's scale and the factor of its elements."""
        amax = q.maximum([q.finite_or_nan_bits(x) for x in v])
        s, factor, _ = q.nvfp4_block(amax, inverse_g)
        return s, factor

    def pack_e4m3(self, values):
        pairs = [ptx.pack_e4m3x2(values[i], values[i + 1]) for i in range(0, 16, 2)]
        return [pairs[i] | (pairs[i + 1] << 16) for i in range(0, 8, 2)]

    def four_bytes(self, numbers):
        low, high = numbers[0] | (numbers[1] << 8), numbers[2] | (numbers[3] << 8)
        return low | (high << 16)

    def pack_bf16(self, values):
        return [ptx.pack_bf16x2(values[i], values[i + 1]) for i in range(0, 16, 2)]

    @cute.jit
    def row_maximum(self, mine, maxima, thread):
        """The largest Int32 of the CTA, in every thread."""
        mine = cute.arch.warp_redux_sync(mine, "max")
        if thread % 32 == 0:
            maxima[thread // 32] = mine
        cute.arch.sync_threads()
        out = maxima[0]
        for w in cutlass.range_constexpr(1, self.threads // 32):
            out = cutlass.max(out, maxima[w])
        return out

    @cute.jit
    def write(self, recv_x, row, packed, thread):
        """Store this thread's pieces to one row."""
        row_bytes, piece_bytes = (n * self.item_bits // 8 for n in (self.hidden, self.piece))
        for i in cutlass.range_constexpr(self.pieces_per_thread):
            piece = thread + i * self.threads
            if piece < self.pieces:
                address = recv_x + Int64(row) * row_bytes + piece * piece_bytes
                for first in cutlass.range_constexpr(0, len(packed[i]), 4):
                    count = min(len(packed[i]) - first, 4)
                    words = cute.make_rmem_tensor(count, Int32)
                    for j in cutlass.range_constexpr(count):
                        words[j] = packed[i][first + j]
                    cute.autovec_copy(words, ptx.vector(Int32, address + 4 * first, count))

    @cute.jit
    def write_scales(self, place, pitch, block_sf, thread):
        """Store the scales of this thread's pieces to one row, k-atoms ``pitch`` bytes apart; of an
        MXFP8 block, which two threads hold, the first.
        """
        per_block = 2 if const_expr(self.act == "mxfp8") else 1
        for i in cutlass.range_constexpr(self.pieces_per_thread):
            piece = thread + i * self.threads
            block = piece // per_block
            if piece < self.pieces and piece % per_block == 0:
                at = place + block // 4 * pitch + block % 4
                ptx.store(Uint8, at, Uint8(block_sf[i]))
