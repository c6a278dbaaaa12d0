"""Route and dispatch: count the rows of each expert, then quantize tokens and move them to their rows.

A slot is a (token, k) pair, numbered token * top_k + k; each slot with a valid id becomes one row. Rows of an expert
are neighbours, in the order of their slots. Ids below 0 or beyond the experts, and every slot at or beyond the live
token count, are skipped.
"""

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int16, Int32, Int64, Uint8, const_expr, cute, memory, select_

from moe_ep_jit import layout
from moe_ep_jit.kernels.common import ptx
from moe_ep_jit.kernels.common import quantize as q


class RouteArgs(NamedTuple):
    """Run-time facts of a call's routing; addresses are Int64, 0 where absent."""

    tokens: Int32
    num_tokens: Int64
    ids: Int64
    ids_stride: Int64
    ids_words: Int32
    control: Int64
    chunk_counts: Int64
    slot_rank: Int64
    expert_info: Int64
    tiles: Int64
    row_slot: Int64
    error: Int64


class TokenArgs(NamedTuple):
    """The tokens of a call and where their rows go."""

    x: Int64
    x_stride: Int64
    x_sf: Int64
    x_global_scale: Int64
    x_global_stride: Int32
    recv_x: Int64
    recv_sf: Int64


@cute.jit
def live_tokens(args):
    """Rows of x that count: the device's number where one is given, never beyond x."""
    live = args.tokens
    if args.num_tokens != 0:
        live = cutlass.max(cutlass.min(ptx.load(Int32, args.num_tokens), live), 0)
    return live


@cute.jit
def expert_of(args, token, k, num_experts: cutlass.Constexpr):
    """The expert of a slot, -1 if it is to be skipped."""
    address = args.ids + (Int64(token) * args.ids_stride + k) * (4 * args.ids_words)
    expert = ptx.load(Int32, address)
    if args.ids_words == 2:
        # An int64 that is no int32 is out of range.
        if ptx.load(Int32, address + 4) != 0:
            expert = Int32(-1)
    if expert >= num_experts:
        expert = Int32(-1)
    return cutlass.max(expert, Int32(-1))


class Route:
    """One CTA a chunk of slots; a warp's lanes are neighbouring slots.

    Each warp finds the lanes with equal ids, so a slot's rank in its chunk is its rank in the warp plus the counts of the
    warps before: deterministic, without atomics. The CTA that finishes last turns the chunks' counts into prefix sums,
    the experts' first rows and the list of n-tiles; nobody waits for it but the next kernel.
    """

    def __init__(self, *, num_experts: int, top_k: int, tile_n: int):
        self.num_experts, self.top_k, self.tile_n = num_experts, top_k, tile_n
        self.threads = layout.ROUTE_CHUNK
        self.num_warps = self.threads // 32

    @cute.jit
    def __call__(self, args: RouteArgs, stream):
        slots = args.tokens * self.top_k
        chunks = cutlass.max((slots + layout.ROUTE_CHUNK - 1) // layout.ROUTE_CHUNK, 1)
        self.kernel(args).launch(
            grid=(chunks, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, args: RouteArgs):
        thread, _, _ = cute.arch.thread_idx()
        chunk, _, _ = cute.arch.block_idx()
        smem = memory.SmemAllocator()
        counts = smem.allocate_tensor(
            Int16, cute.make_layout(self.num_warps * self.num_experts), 16
        )
        first_rows = smem.allocate_tensor(Int32, cute.make_layout(self.num_experts + 1), 16)
        first_tiles = smem.allocate_tensor(Int32, cute.make_layout(self.num_experts + 1), 16)
        is_last = smem.allocate_tensor(Int32, cute.make_layout(1), 16)
        for i in cutlass.range(thread, self.num_warps * self.num_experts, self.threads):
            counts[i] = Int16(0)
        # The call before may still read the regions that are written below.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.sync_threads()
        self.count(args, counts, thread, chunk)
        if thread == 0:
            # release: the counts and ranks of this chunk are visible to the CTA that finishes last
            cute.arch.fence_acq_rel_gpu()
            grid, _, _ = cute.arch.grid_dim()
            ticket = cute.arch.atomic_add(ptx.ptr(Int32, args.control), Int32(1))
            is_last[0] = Int32(ticket == grid - 1)
        cute.arch.sync_threads()
        if is_last[0] != 0:
            # acquire: the counts of every chunk, released before its ticket
            cute.arch.fence_acq_rel_gpu()
            self.place(args, first_rows, first_tiles, thread)

    @cute.jit
    def count(self, args, counts, thread, chunk):
        """Rank this chunk's slots within their experts and store the chunk's counts."""
        slot = chunk * layout.ROUTE_CHUNK + thread
        token = slot // self.top_k
        warp = thread // 32
        expert = Int32(-1)
        if token < live_tokens(args):
            expert = expert_of(args, token, slot - token * self.top_k, self.num_experts)
        same = ptx.match_any(expert)
        rank = cute.arch.popc(same & ptx.lanemask_lt())
        if expert >= 0 and rank == 0:
            counts[warp * self.num_experts + expert] = Int16(cute.arch.popc(same))
        cute.arch.sync_threads()
        for e in cutlass.range(thread, self.num_experts, self.threads):
            total = Int32(0)
            for w in cutlass.range(self.num_warps):
                mine = Int32(counts[w * self.num_experts + e])
                counts[w * self.num_experts + e] = Int16(total)
                total += mine
            ptx.store(Int32, args.chunk_counts + (Int64(chunk) * self.num_experts + e) * 4, total)
        cute.arch.sync_threads()
        if token < args.tokens:
            if expert >= 0:
                rank += Int32(counts[warp * self.num_experts + expert])
            ptx.store(
                Int32, args.slot_rank + Int64(slot) * 4, select_(expert >= 0, rank, Int32(-1))
            )
        cute.arch.sync_threads()

    @cute.jit
    def place(self, args, first_rows, first_tiles, thread):
        """Prefix sums over chunks and experts, the experts' rows and the list of n-tiles."""
        chunks, _, _ = cute.arch.grid_dim()
        for e in cutlass.range(thread, self.num_experts, self.threads):
            total = Int32(0)
            for c in cutlass.range(chunks, unroll=4):
                address = args.chunk_counts + (Int64(c) * self.num_experts + e) * 4
                mine = ptx.load(Int32, address)
                ptx.store(Int32, address, total)
                total += mine
            first_rows[e] = total
        cute.arch.sync_threads()
        if thread < 32:
            self.scan(first_rows, first_tiles, thread)
        cute.arch.sync_threads()
        for e in cutlass.range(thread, self.num_experts, self.threads):
            info = cute.make_rmem_tensor(4, Int32)
            info[0] = first_tiles[e]
            info[1] = first_tiles[e + 1] - first_tiles[e]
            info[2] = first_rows[e]
            info[3] = first_rows[e + 1] - first_rows[e]
            cute.autovec_copy(info, ptx.vector(Int32, args.expert_info + Int64(e) * 16, 4))
        num_tiles = first_tiles[self.num_experts]
        for i in cutlass.range(thread, num_tiles, self.threads):
            # The expert of n-tile i: the last whose first tile is at or before it.
            low, high = Int32(0), Int32(self.num_experts)
            while high - low > 1:
                middle = (low + high) // 2
                if first_tiles[middle] <= i:
                    low = middle
                else:
                    high = middle
            ptx.store(Int32, args.tiles + Int64(1 + i) * 4, low)
        if thread == 0:
            ptx.store(Int32, args.tiles, num_tiles)
            ptx.store(Int32, args.control + layout.CONTROL_ROUTE_TICKET * 4, Int32(0))
            # Set from here to the combine of this round: a second round that begins meanwhile says so.
            in_flight = args.control + layout.CONTROL_IN_FLIGHT * 4
            if cute.arch.atomic_exch(ptx.ptr(Int32, in_flight), Int32(1)) != 0:
                ptx.store_system(
                    args.error + layout.ERROR_CODE * 4, Int32(layout.ERROR_TWO_STREAMS)
                )

    @cute.jit
    def scan(self, first_rows, first_tiles, lane):
        """One warp: counts in ``first_rows`` become exclusive sums; those of the n-tiles go to ``first_tiles``."""
        row_base, tile_base = Int32(0), Int32(0)
        for group in cutlass.range((self.num_experts + 31) // 32):
            e = group * 32 + lane
            rows = Int32(0)
            if e < self.num_experts:
                rows = first_rows[e]
            tiles = (rows + self.tile_n - 1) // self.tile_n
            row_sum, tile_sum = rows, tiles
            for power in cutlass.range_constexpr(5):
                distance = 1 << power
                row_before = cute.arch.shuffle_sync_up(row_sum, distance, mask_and_clamp=0)
                tile_before = cute.arch.shuffle_sync_up(tile_sum, distance, mask_and_clamp=0)
                if lane >= distance:
                    row_sum += row_before
                    tile_sum += tile_before
            cute.arch.sync_warp()
            if e < self.num_experts:
                first_rows[e] = row_base + row_sum - rows
                first_tiles[e] = tile_base + tile_sum - tiles
            row_base += cute.arch.shuffle_sync(row_sum, 31)
            tile_base += cute.arch.shuffle_sync(tile_sum, 31)
        if lane == 0:
            first_rows[self.num_experts] = row_base
            first_tiles[self.num_experts] = tile_base


class Dispatch:
    """One CTA a token at a time: load its row once, quantize it in registers, write it to the rows of its slots.

    operand  "e4m3": MXFP8 folded to one scale a row (``formats.fold``); "bf16": values whose act rounding is applied,
             exact in bf16, NVFP4's second-level scale apart in ``recv_sf``
    """

    def __init__(
        self, *, hidden: int, num_experts: int, top_k: int, operand: str, act: str, x_kind: str
    ):
        self.hidden, self.num_experts, self.top_k = hidden, num_experts, top_k
        self.fp8, self.act, self.x_kind = operand == "e4m3", act, x_kind
        # A piece is what a thread reads at once: 16 elements to quantize (an NVFP4 block, half an MXFP8
        # block); 8 to copy, which keeps a warp's stores next to each other.
        self.copies = act == "bf16" and x_kind == "bf16"
        self.piece = 8 if self.copies else 16
        self.pieces = hidden // self.piece
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
        maxima = smem.allocate_tensor(Int32, cute.make_layout(32), 16)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        live = live_tokens(route)
        while token < live:
            if thread < self.top_k:
                rows[thread] = self.row_of(route, token, thread)
            values = [
                self.load(args, token, self.piece_at(thread, i)) for i in range(self.pieces_per_thread)
            ]
            packed, row_sf = self.quantize(values, maxima, thread)
            cute.arch.sync_threads()
            for k in cutlass.range_constexpr(self.top_k):
                row = rows[k]
                if row >= 0:
                    self.write(args, row, packed, thread)
                    if const_expr(row_sf is not None):
                        if thread == 0:
                            ptx.store(Float32, args.recv_sf + Int64(row) * 4, row_sf)
            cute.arch.sync_threads()  # before the next token's rows and maxima
            token += step

    @cute.jit
    def row_of(self, route, token, k):
        """The row of a slot, -1 if it is skipped; records the slot at its row."""
        slot = token * self.top_k + k
        row = ptx.load(Int32, route.slot_rank + Int64(slot) * 4)
        if row >= 0:
            expert = expert_of(route, token, k, self.num_experts)
            chunk = slot // layout.ROUTE_CHUNK
            row += ptx.load(
                Int32, route.chunk_counts + (Int64(chunk) * self.num_experts + expert) * 4
            )
            row += ptx.load(Int32, route.expert_info + Int64(expert) * 16 + 8)
            ptx.store(Int32, route.row_slot + Int64(row) * 4, slot)
        return row

    def piece_at(self, thread, i):
        """The i-th piece of a thread; beyond the row, its last piece once more (read, never written)."""
        return cutlass.min(thread + i * self.threads, Int32(self.pieces - 1))

    def load(self, args, token, piece):
        """One piece: 16 elements as Float32, or 8 as the words that they are."""
        if self.copies:
            raw = cute.make_rmem_tensor(4, Int32)
            address = args.x + (Int64(token) * args.x_stride + piece * 8) * 2
            cute.autovec_copy(ptx.vector(Int32, address, 4), raw)
            return [raw[i] for i in range(4)]
        if self.x_kind == "bf16":
            raw = cute.make_rmem_tensor(8, Int32)
            address = args.x + (Int64(token) * args.x_stride + piece * 16) * 2
            for half in range(2):
                cute.autovec_copy(
                    ptx.vector(Int32, address + 16 * half, 4),
                    cute.make_tensor(raw.iterator + 4 * half, cute.make_layout(4)),
                )
            return [f for i in range(8) for f in (ptx.low_bf16(raw[i]), ptx.high_bf16(raw[i]))]
        if self.x_kind == "mxfp8":
            raw = cute.make_rmem_tensor(4, Int32)
            cute.autovec_copy(
                ptx.vector(Int32, args.x + Int64(token) * args.x_stride + piece * 16, 4), raw
            )
            sf_address = args.x_sf + Int64(token) * (self.hidden // 32) + piece // 2
            byte = Int32(ptx.load(Uint8, sf_address))
            scale = select_(byte == 255, ptx.from_bits(Int32(q.NAN_BLOCK)), q.exp2_of_byte(byte))
            return [
                ptx.mul(ptx.e4m3(ptx.shift_right(raw[i // 4], 8 * (i % 4))), scale)
                for i in range(16)
            ]
        raw = cute.make_rmem_tensor(2, Int32)
        cute.autovec_copy(
            ptx.vector(Int32, args.x + Int64(token) * args.x_stride + piece * 8, 2), raw
        )
        sf = Int32(ptx.load(Uint8, args.x_sf + Int64(token) * (self.hidden // 16) + piece))
        g = ptx.load(Float32, args.x_global_scale + Int64(token * args.x_global_stride) * 4)
        scale = ptx.e4m3(sf)
        return [
            ptx.mul(ptx.mul(self.e2m1(ptx.shift_right(raw[i // 8], 4 * (i % 8))), scale), g)
            for i in range(16)
        ]

    def e2m1(self, nibble):
        """E2M1 bits as Float32: sign, exponent and mantissa at a float's, times 2^126; its subnormal comes out right."""
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
        amax = self.row_maximum(
            q.maximum([q.finite_bits(x) for v in values for x in v]), maxima, thread
        )
        g = q.nvfp4_row(amax)
        inverse_g = q.nvfp4_row_inverse(g)
        packed = []
        for v in values:
            s, factor, _ = q.nvfp4_block(q.maximum([q.finite_or_nan_bits(x) for x in v]), inverse_g)
            packed.append(
                self.pack_bf16([ptx.mul(q.round_to_e2m1(ptx.mul(x, factor)), s) for x in v])
            )
        return packed, g

    def quantize_mxfp8(self, values, maxima, thread):
        byte_list, elements = [], []
        for v in values:
            amax = q.maximum([q.finite_bits(x) for x in v])
            # Two neighbouring threads hold one block of 32.
            amax = cutlass.max(amax, cute.arch.shuffle_sync_bfly(amax, 1))
            byte = q.mxfp8_byte(amax)
            byte_list.append(byte)
            inverse = q.mxfp8_inverse(byte)
            elements.append([ptx.round_to_e4m3(ptx.mul(x, inverse)) for x in v])
        if not self.fp8:
            packed = [
                self.pack_bf16([ptx.mul(x, q.exp2_of_byte(b)) for x in v])
                for v, b in zip(elements, byte_list, strict=True)
            ]
            return packed, None
        row_byte = self.row_maximum(q.maximum(byte_list), maxima, thread)
        packed = []
        for v, byte in zip(elements, byte_list, strict=True):
            factor = q.fold_factor(byte, row_byte)
            pairs = [
                ptx.pack_e4m3x2(ptx.mul(v[i], factor), ptx.mul(v[i + 1], factor))
                for i in range(0, 16, 2)
            ]
            packed.append([pairs[i] | (pairs[i + 1] << 16) for i in range(0, 8, 2)])
        return packed, q.exp2_of_byte(row_byte)

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
    def write(self, args, row, packed, thread):
        """Store this thread's pieces to one row."""
        item = 1 if self.fp8 else 2
        for i in cutlass.range_constexpr(self.pieces_per_thread):
            piece = thread + i * self.threads
            if piece < self.pieces:
                address = args.recv_x + Int64(row) * (self.hidden * item) + piece * (self.piece * item)
                for part in cutlass.range_constexpr(len(packed[i]) // 4):
                    words = cute.make_rmem_tensor(4, Int32)
                    for j in cutlass.range_constexpr(4):
                        words[j] = packed[i][4 * part + j]
                    cute.autovec_copy(words, ptx.vector(Int32, address + 16 * part, 4))


class FoldRows:
    """Fold the intermediate's 32-blocks to one scale a row, in place: ``formats.fold`` of what gate/up wrote.

    One CTA an n-tile at a time, 32 rows of it together: a lane a row where the scales are read (those of neighbouring
    rows are neighbours), then a warp a row.
    """

    threads = 256
    num_warps = threads // 32

    def __init__(self, *, intermediate: int, tile_n: int):
        self.intermediate, self.tile_n = intermediate, tile_n
        self.blocks = intermediate // layout.SF_BLOCK

    @cute.jit
    def __call__(
        self, tiles: Int64, expert_info: Int64, h: Int64, h_sf: Int64, sf_stride: Int32, row_sf: Int64,
        num_sms: Int32, stream,
    ):  # fmt: skip
        self.kernel(tiles, expert_info, h, h_sf, sf_stride, row_sf).launch(
            grid=(num_sms * 4, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, tiles: Int64, expert_info: Int64, h: Int64, h_sf: Int64, sf_stride: Int32, row_sf: Int64):  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        group, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        lane, warp = thread % 32, thread // 32
        smem = memory.SmemAllocator()
        largest = smem.allocate_tensor(Float32, cute.make_layout((32, self.num_warps)), 16)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        groups_per_tile = layout.ceil_div(self.tile_n, 32)
        num_groups = ptx.load(Int32, tiles) * groups_per_tile
        while group < num_groups:
            tile = group // groups_per_tile
            expert = ptx.load(Int32, tiles + Int64(1 + tile) * 4)
            info = cute.make_rmem_tensor(4, Int32)
            cute.autovec_copy(ptx.vector(Int32, expert_info + Int64(expert) * 16, 4), info)
            first = (tile - info[0]) * self.tile_n + group % groups_per_tile * 32
            rows = cutlass.min(info[3] - first, 32)
            first_row = info[2] + first
            sf_at = h_sf + Int64(layout.first_sf_row(info[2], expert) + first) * 4
            scale = Float32(0.0)
            if lane < rows:
                for block in cutlass.range(warp, self.blocks, self.num_warps):
                    at = sf_at + (Int64(block) * sf_stride + lane) * 4
                    scale = cute.arch.fmax(scale, ptx.load(Float32, at))
            largest[lane, warp] = scale
            cute.arch.sync_threads()
            for local in cutlass.range(warp, rows, self.num_warps):
                top = largest[local, 0]
                for w in cutlass.range_constexpr(1, self.num_warps):
                    top = cute.arch.fmax(top, largest[local, w])
                at = h + Int64(first_row + local) * self.intermediate
                self.fold_row(at, sf_at + Int64(local) * 4, sf_stride, top, lane)
                if lane == 0:
                    ptx.store(Float32, row_sf + Int64(first_row + local) * 4, top)
            cute.arch.sync_threads()  # before the next rows' maxima
            group += step

    @cute.jit
    def fold_row(self, h, h_sf, sf_stride, top, lane):
        """One warp: multiply the blocks of a row by 2^(their exponent - the row's) and round again."""
        for piece in cutlass.range(lane, self.intermediate // 16, 32):
            scale = ptx.load(Float32, h_sf + Int64(piece // 2) * sf_stride * 4)
            if scale != top:
                words = cute.make_rmem_tensor(4, Int32)
                at = ptx.vector(Int32, h + piece * 16, 4)
                cute.autovec_copy(at, words)
                factor = ptx.div(scale, top)  # of powers of two: exact, or 0 far below any E4M3
                for w in cutlass.range_constexpr(4):
                    x = [
                        ptx.mul(ptx.e4m3(ptx.shift_right(words[w], 8 * i)), factor)
                        for i in range(4)
                    ]
                    words[w] = ptx.pack_e4m3x2(x[0], x[1]) | (ptx.pack_e4m3x2(x[2], x[3]) << 16)
                cute.autovec_copy(words, at)
