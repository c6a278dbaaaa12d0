"""The schedule of a grouped GEMM's persistent CTAs (or clusters): which tile comes when.

N-tiles of an expert are fastest, then its m-steps (the m-tiles of a cluster), then the experts:
CTAs that run side by side share an expert's weights through L2.
"""

from typing import NamedTuple

from cutlass import Constexpr, Int32, Int64, const_expr, cute

from moe_ep_jit.kernels.common import ptx


class Step(NamedTuple):
    """One entry of the schedule."""

    expert: Int32
    m_step: Int32
    n_tile: Int32  # of the whole tile list
    first: Int32  # row of the expert that the tile begins with
    expert_row: Int32  # the expert's first row
    expert_rows: Int32


@cute.jit
def step_at(index, m_steps: Constexpr, tile_n: Constexpr, args, load: Constexpr):
    """Entry ``index``; ``load`` reads an Int32 at an address.

    Before the grid's own wait ``load`` must be ``ptx.load_relaxed``: route has ended, since the
    grid between launched this one only after its own wait, but L1 knows nothing of that.
    """
    expert = load(args.tiles + Int64(1 + index // m_steps) * 4)
    info = [load(args.expert_info + Int64(expert) * 16 + 4 * i) for i in range(4)]
    local = index - info[0] * m_steps
    m_step = local // info[1]
    n_tile = local - m_step * info[1]
    return Step(expert, m_step, info[0] + n_tile, n_tile * tile_n, info[2], info[3])


def sync_cluster(cluster):
    """All threads of the cluster; of the CTA where that is all there is."""
    if cluster == 1:
        cute.arch.sync_threads()
    else:
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


@cute.jit
def share_num_tiles(cluster: Constexpr, address, thread, tiles):
    """The number of n-tiles to the shared ``address`` of every CTA of the cluster.

    All roles go by one reading: a second stream's call could split them. Before this grid's wait,
    with loads past L1 as in ``step_at``.
    """
    if const_expr(cluster == 1):
        if thread == 0:
            ptx.store_shared(Int32, address, ptx.load_relaxed(tiles))
    else:
        if cute.arch.block_idx_in_cluster() == 0:
            if thread < cluster:
                ptx.store_shared_cluster(address, thread, ptx.load_relaxed(tiles))
