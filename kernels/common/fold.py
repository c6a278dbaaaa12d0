"""Fold: the intermediate's 32-blocks to one scale a row."""

from typing import NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute, memory

from moe_ep_jit import layout
from moe_ep_jit.kernels.common import ptx
from moe_ep_jit.kernels.common import quantize as q


class FoldArgs(NamedTuple):
    """Addresses of the tile list, the intermediate and its scales."""

    tiles: Int64
    expert_info: Int64
    h: Int64
    h_sf: Int64
    sf_stride: Int32
    row_sf: Int64


class Fold:
    """``formats.fold`` of the intermediate that gate/up wrote, in place.

    One CTA takes 32 rows of an n-tile at a time: a lane a row where the scales are read (those of
    neighbouring rows are neighbours), then a warp a row.
    """

    threads = 256
    num_warps = threads // 32

    def __init__(self, *, intermediate: int, tile_n: int):
        self.intermediate, self.tile_n = intermediate, tile_n
        self.blocks = intermediate // layout.SF_BLOCK

    @cute.jit
    def __call__(self, args: FoldArgs, num_sms: Int32, stream):
        self.kernel(args).launch(
            grid=(num_sms * 4, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, args: FoldArgs):
        thread, _, _ = cute.arch.thread_idx()
        group, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        lane, warp = thread % 32, thread // 32
        smem = memory.SmemAllocator()
        largest = smem.allocate_tensor(Float32, cute.make_layout((32, self.num_warps)), 16)
        # The scales of the rows at hand, which were neighbours in memory by rows.
        scales = smem.allocate_tensor(
            Float32, cute.make_layout((32, self.blocks), stride=(1, 33)), 16
        )
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        groups_per_tile = layout.ceil_div(self.tile_n, 32)
        num_groups = ptx.load(Int32, args.tiles) * groups_per_tile
        while group < num_groups:
            tile = group // groups_per_tile
            expert = ptx.load(Int32, args.tiles + Int64(1 + tile) * 4)
            info = cute.make_rmem_tensor(4, Int32)
            cute.autovec_copy(ptx.vector(Int32, args.expert_info + Int64(expert) * 16, 4), info)
            first = (tile - info[0]) * self.tile_n + group % groups_per_tile * 32
            rows = cutlass.min(info[3] - first, 32)
            first_row = info[2] + first
            sf_at = args.h_sf + Int64(layout.first_sf_row(info[2], expert) + first) * 4
            scale = Float32(0.0)
            if lane < rows:
                for block in cutlass.range(warp, self.blocks, self.num_warps):
                    at = sf_at + (Int64(block) * args.sf_stride + lane) * 4
                    scales[lane, block] = ptx.load(Float32, at)
                    scale = cute.arch.fmax(scale, scales[lane, block])
            largest[lane, warp] = scale
            cute.arch.sync_threads()
            for local in cutlass.range(warp, rows, self.num_warps):
                top = largest[local, 0]
                for w in cutlass.range_constexpr(1, self.num_warps):
                    top = cute.arch.fmax(top, largest[local, w])
                at = args.h + Int64(first_row + local) * self.intermediate
                self.fold_row(at, scales, local, top, lane)
                if lane == 0:
                    ptx.store(Float32, args.row_sf + Int64(first_row + local) * 4, top)
            cute.arch.sync_threads()  # before the next rows' maxima
            group += step

    @cute.jit
    def fold_row(self, h, scales, local, top, lane):
        """One warp: multiply a row's blocks by 2^(their exponent - the row's) and round again."""
        for piece in cutlass.range(lane, self.intermediate // 16, 32):
            scale = scales[local, piece // 2]
            if scale != top:
                words = cute.make_rmem_tensor(4, Int32)
                at = ptx.vector(Int32, h + piece * 16, 4)
                cute.autovec_copy(at, words)
                exponents = [ptx.shift_right(ptx.bits(x), 23) for x in (scale, top)]
                factor = q.fold_factor(*exponents)
                for w in cutlass.range_constexpr(4):
                    words[w] = ptx.scale_e4m3x4(words[w], factor)
                cute.autovec_copy(words, at)
