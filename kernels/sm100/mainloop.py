"""The MMA warp's way through K: scales to tensor memory, then block-scaled MMAs, stage by stage.

``gemm`` is the GroupedGemm whose tile it is. One thread issues all copies and MMAs, so that they
reach the tensor core in the order that they are written in.
"""

import cutlass
from cutlass import Int32, const_expr, cute

from moe_ep_jit.kernels.sm100 import tmem


@cute.jit
def advance(gemm: cutlass.Constexpr, stage, phase):
    """The stage after this one, and the parity that its barriers are waited for with."""
    stage += 1
    if stage == gemm.num_stages:
        stage = Int32(0)
        phase = phase ^ 1
    return stage, phase


@cute.jit
def k_loop(gemm: cutlass.Constexpr, accumulator, width, columns, stage, phase, shared):
    """Overwrite ``width`` columns of an accumulator with a tile's product over all of K.

    columns  the first of tensor memory
    """
    target = tmem.Target(accumulator, width)
    full_stages = gemm.k_stages - (1 if const_expr(gemm.last_steps != gemm.steps) else 0)
    for k_stage in cutlass.range(full_stages, unroll=1):
        adds = cutlass.min(k_stage, 1)
        one_stage(gemm, gemm.steps, target, columns, adds, stage, phase, shared)
        stage, phase = advance(gemm, stage, phase)
    if const_expr(gemm.last_steps != gemm.steps):
        # What lies beyond K is not multiplied: its scales may be anything, NaN too.
        adds = Int32(min(full_stages, 1))
        one_stage(gemm, gemm.last_steps, target, columns, adds, stage, phase, shared)
        stage, phase = advance(gemm, stage, phase)
    return stage, phase


@cute.jit
def one_stage(
    gemm: cutlass.Constexpr, steps: cutlass.Constexpr, target, columns,
    adds, stage, phase, shared
):  # fmt: skip
    """``steps`` MMAs of 32 bytes of K each; ``adds`` 0: the first overwrites."""
    # acquire: the copies of load, in a pair those of both CTAs
    cute.arch.mbarrier_wait(shared.full + stage, phase)
    tmem.fence_after()
    w = Int32(shared.w.iterator.toint()) + stage * gemm.w_pitch
    x = Int32(shared.x.iterator.toint()) + stage * gemm.token_bytes
    x_sf = Int32(shared.x_sf.iterator.toint()) + stage * gemm.sf_pitch
    slot = stage if const_expr(gemm.sf_slots == gemm.num_stages) else stage & (gemm.sf_slots - 1)
    sf_columns = columns + gemm.sfa_column + slot * gemm.sf_columns
    with cute.arch.elect_one():
        issue(gemm, steps, target, sf_columns, adds, w, x, x_sf)
        # release: load may overwrite the stage, in both CTAs, once the tensor core has read it
        tmem.commit(gemm.cluster, shared.empty + stage)


def issue(gemm, steps, target, sf_columns, adds, w, x, x_sf):
    """A stage's scale copies, then its MMAs. One thread."""
    sfa, sfb = sf_columns, sf_columns + 4 * gemm.atoms
    for atom in range(min(gemm.atoms, -(-steps // gemm.steps_per_atom))):
        scales = tmem.scale_descriptor(w + gemm.value_bytes + atom * 512)
        tmem.copy_scales(gemm.cluster, sfa + 4 * atom, scales)
        for i in range(gemm.sf_blocks):
            block = atom * gemm.sf_blocks + i
            scales = tmem.scale_descriptor(x_sf + block * 512)
            tmem.copy_scales(gemm.cluster, sfb + 4 * block, scales)
    a, b = tmem.descriptor(w), tmem.descriptor(x)
    for step in range(steps):
        atom, scale_byte = step // gemm.steps_per_atom, step % gemm.steps_per_atom
        tmem.mma(
            gemm.kind, gemm.cluster, target, a + 2 * step, b + 2 * step,
            sfa + 4 * atom, sfb + 4 * gemm.sf_blocks * atom, scale_byte,
            adds if step == 0 else Int32(1),
        )  # fmt: skip
