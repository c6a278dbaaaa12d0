"""Dispatch: quantize the tokens and move them to the rows that route has given their slots."""

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, const_expr, cute, memory, select_

from moe_ep_jit import layout
from moe_ep_jit.kernels.common import ptx
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


class Dispatch:
    """One CTA a token at a time: read its row once, quantize it in registers, write it to the rows
    of its slots.

    operand  "e4m3": MXFP8 folded to one scale a row (``formats.fold``); "bf16": values that the
             act's rounding has been applied to, exact in bf16; NVFP4's second-level scale stays
             apart, in ``recv_sf``
    """

    def __init__(
        self, *, hidden: int, num_experts: int, top_k: int, operand: str, act: str, x_kind: str
    ):
        self.hidden, self.num_experts, self.top_k = hidden, num_experts, top_k
        self.fp8, self.act, self.x_kind = operand == "e4m3", act, x_kind
        # A piece is what a thread reads at once: 16 elements to quantize (an NVFP4 block, half an
        # MXFP8 block); 8 to copy, which keeps a warp's stores next to each other.
        self.copies = act == "bf16" and x_kind == "bf16"
        self.keeps_blocks = act == "nvfp4" and x_kind == "nvfp4"  # the caller's, with their scales
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
        maxima = smem.allocate_tensor(Int32, cute.make_layout(32), 16)
        live = live_tokens(route)
        # The first token, while route still counts: whatever made x had ended before route began,
        # but L1 may hold older lines, so these loads go past it.
        words = cute.make_rmem_tensor((self.words, self.pieces_per_thread), Int32)
        if token < live:
            self.fetch(args, token, thread, words)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        while token < live:
            if thread < self.top_k:
                rows[thread] = self.row_of(route, token, thread)
            values = [
                self.decoded(args, token, words[None, i]) for i in range(self.pieces_per_thread)
            ]
            if const_expr(self.keeps_blocks):
                packed = [self.pack_bf16(v) for v in values]
                row_sf = self.global_scale(args, token)
            else:
                packed, row_sf = self.quantize(values, maxima, thread)
            # The next token comes in while this one goes out; the last, once more.
            self.fetch(args, cutlass.min(token + step, live - 1), thread, words)
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
                address = (
                    args.recv_x + Int64(row) * (self.hidden * item) + piece * (self.piece * item)
                )
                for part in cutlass.range_constexpr(len(packed[i]) // 4):
                    words = cute.make_rmem_tensor(4, Int32)
                    for j in cutlass.range_constexpr(4):
                        words[j] = packed[i][4 * part + j]
                    cute.autovec_copy(words, ptx.vector(Int32, address + 16 * part, 4))
