"""Tensor memory and the MMAs that write to it: tcgen05 as small functions over DSL numbers.

An address in tensor memory (Int32) is lane * 2^16 + column. ``ctas`` is 1, or 2 for an instruction
of both CTAs of a pair, which the even one issues: it names the same shared and tensor memory
addresses in both.
"""

from typing import NamedTuple

from cutlass import Float32, Int16, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

COLUMNS = 512  # of a CTA's tensor memory
MMA_K_BYTES = 32  # of K in one MMA, for both kinds

#: Kind of prepared weights -> (opcode, instruction descriptor but for its sizes and scale bytes).
#: The descriptor's bits: 7..9 and 10..12 formats of A and B (E4M3: 0 for mxf8f6f4; E2M1: 1 for
#: mxf4nvf4), 23 UE8M0 scales.
KINDS = {
    "mxfp8": ("mxf8f6f4.block_scale.block32", 1 << 23),
    "nvfp4": ("mxf4nvf4.block_scale.block16", 1 << 7 | 1 << 10),
}

#: Shared memory descriptors but for the address: bits 16.. 1 where no operand is wider than its
#: swizzle, 32.. the stride of 8 rows / 16, 46 the
#: version, 61.. the swizzle.
_ROWS_SWIZZLED = 1 << 16 | 1024 >> 4 << 32 | 1 << 46 | 2 << 61
_SCALES = 1 << 16 | 128 >> 4 << 32 | 1 << 46


@dsl_user_op
def _asm(result, args, code, constraints, *, loc=None, ip=None):
    values = [a.ir_value(loc=loc, ip=ip) for a in args]
    return llvm.inline_asm(result, values, code, constraints, has_side_effects=True, loc=loc, ip=ip)


def _do(code, constraints, *args):
    _asm(None, args, code, f"{constraints},~{{memory}}" if constraints else "~{memory}")


def allocate(address, columns, ctas):
    """By one whole warp, of both CTAs where two share MMAs: the first column to the shared
    ``address``. Nothing else of this kernel allocates afterwards.
    """
    group = f"cta_group::{ctas}.sync.aligned"
    _do(f"tcgen05.alloc.{group}.shared::cta.b32 [$0], $1;", "r,r", Int32(address), Int32(columns))
    _do(f"tcgen05.relinquish_alloc_permit.{group};", "")


def free(base, columns, ctas):
    """By the warp that allocated."""
    code = f"tcgen05.dealloc.cta_group::{ctas}.sync.aligned.b32 $0, $1;"
    _do(code, "r,r", Int32(base), Int32(columns))


def fence_before():
    """Earlier tcgen05 work comes before a barrier or an arrival that follows."""
    _do("tcgen05.fence::before_thread_sync;", "")


def fence_after():
    """Later tcgen05 work comes after a barrier or a wait that precedes."""
    _do("tcgen05.fence::after_thread_sync;", "")


def descriptor(address):
    """Of rows of 128 swizzled bytes at a shared address; + 2 k for the k-th MMA's part of them."""
    return Int64(_ROWS_SWIZZLED) + Int64(address >> 4)


def scale_descriptor(address):
    """Of 32 lanes of 16 bytes at a shared address."""
    return Int64(_SCALES) + Int64(address >> 4)


class Target(NamedTuple):
    """Columns of an accumulator; a multiple of 16, or of 8 with one CTA."""

    first: Int32
    count: Int32


def mma(kind, ctas, target, a, b, sfa, sfb, scale_byte, adds):
    """Issue D (+)= A B^T with block scales: 128 rows a CTA, ``target``'s columns, 32 bytes of K.
    One thread.

    a, b         descriptors
    sfa, sfb     columns of both sides' scales
    scale_byte   of the scales' words, from which on they are this K's
    adds         Int32: 0 to overwrite D
    """
    opcode, form = KINDS[kind]
    form |= ctas * 128 >> 7 << 27 | scale_byte << 29 | scale_byte << 4
    code = (
        f"{{.reg .pred p; setp.ne.b32 p, $5, 0; tcgen05.mma.cta_group::{ctas}.kind::{opcode}"
        f" [$0], $1, $2, $6, [$3], [$4], p;}}"
    )
    form = form - (1 << 32) if form >= 1 << 31 else form
    form = Int32(form) | (target.count << (17 - 3))  # columns / 8 from bit 17 on
    args = (target.first, Int64(a), Int64(b), Int32(sfa), Int32(sfb), Int32(adds), form)
    _do(code, "r,l,l,r,r,r,r", *args)


def copy_scales(ctas, column, source):
    """Issue the copy of 128 rows' scales, 512 bytes, to four columns. One thread, the MMAs' own:
    later MMAs of it read them, earlier ones have read what was there.
    """
    code = f"tcgen05.cp.cta_group::{ctas}.32x128b.warpx4 [$0], $1;"
    _do(code, "r,l", Int32(column), Int64(source))


def commit(ctas, mbar):
    """Arrive at an mbarrier, of both CTAs at the same place, once all MMAs and copies that this
    thread has issued are done.
    """
    op = f"tcgen05.commit.cta_group::{ctas}.mbarrier::arrive::one.shared::cluster"
    address = Int32(mbar.toint())
    if ctas == 1:
        _do(f"{op}.b64 [$0];", "r", address)
    else:
        _do(f"{op}.multicast::cluster.b64 [$0], $1;", "r,h", address, Int16(3))


@dsl_user_op
def load(address, columns, *, loc=None, ip=None):
    """16 lanes from ``address`` on x ``columns``, as a Python list of Float32, and wait for them.

    Of each 8 columns a thread has four: row lane / 4, columns 2 c and 2 c + 1 (c = lane % 4), then
    the same of row lane / 4 + 8. In one statement with its wait, which nothing else orders.
    """
    count = columns // 2
    names = ", ".join(f"${i}" for i in range(count))
    code = (
        f"tcgen05.ld.sync.aligned.16x256b.x{columns // 8}.b32 {{{names}}}, [${count}];"
        " tcgen05.wait::ld.sync.aligned;"
    )
    values = llvm.inline_asm(
        llvm.StructType.get_literal([T.f32()] * count),
        [Int32(address).ir_value(loc=loc, ip=ip)],
        code,
        ",".join(["=f"] * count) + ",r,~{memory}",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return [Float32(llvm.extractvalue(T.f32(), values, [i], loc=loc, ip=ip)) for i in range(count)]
