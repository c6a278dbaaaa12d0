"""PTX that the DSL has no words for, as small functions over DSL numbers.

Pure functions (no side effect) may be moved, merged or dropped by the compiler; the others may not.
"""

from cutlass import Float32, Int32, Int64, cute, select_
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

GMEM = cute.AddressSpace.gmem
SMEM = cute.AddressSpace.smem

#: L2 cache policies of createpolicy.fractional with fraction 1, as constants.
EVICT_FIRST = 0x12F0000000000000
EVICT_NORMAL = 0x1000000000000000


@dsl_user_op
def _asm(result, args, code, constraints, side_effects, *, loc=None, ip=None):
    values = [a.ir_value(loc=loc, ip=ip) for a in args]
    return llvm.inline_asm(
        result, values, code, constraints, has_side_effects=side_effects, loc=loc, ip=ip
    )


def _i32(code, *args):
    args = [Int32(a) for a in args]
    return Int32(_asm(T.i32(), args, code, "=r" + ",r" * len(args), False))


def signed32(value: int) -> int:
    """A 32-bit pattern as the signed number that an Int32 literal wants."""
    return value - (1 << 32) if value >= 1 << 31 else value


# Memory by address: rows and experts need 64-bit products, so addresses are Int64, offsets added.


def ptr(dtype, address, align=None, space=GMEM):
    """The pointer at an Int64 address."""
    return cute.make_ptr(dtype, address, space, assumed_align=align or dtype.width // 8)


def vector(dtype, address, count, space=GMEM):
    """``count`` elements at an address that is aligned to all of them: one access copies them."""
    return cute.make_tensor(
        ptr(dtype, address, count * dtype.width // 8, space), cute.make_layout(count)
    )


def load(dtype, address):
    """One element at an address."""
    return cute.make_tensor(ptr(dtype, address), cute.make_layout(1))[0]


def load_global(address):
    """An Int32 at an address."""
    return load(Int32, address)


@dsl_user_op
def load_relaxed(address, *, bits=32, loc=None, ip=None):
    """An Int32 from the L2 cache, whatever L1 holds; of one byte with ``bits`` 8."""
    code = f"ld.relaxed.gpu.global.u{bits} $0, [$1];"
    return Int32(_asm(T.i32(), [Int64(address)], code, "=r,l,~{memory}", True))


def load_streaming(address, count):
    """``count`` Int32 that nobody reads again, past L1, as a Python list; from an address aligned
    to as many bytes as they are, at most 16.
    """
    return [
        word
        for first in range(0, count, 4)
        for word in _load_past_l1(Int64(address) + 4 * first, min(count, 4))
    ]


@dsl_user_op
def _load_past_l1(address, count, *, loc=None, ip=None):
    names = ", ".join(f"${i}" for i in range(count))
    values = _asm(
        llvm.StructType.get_literal([T.i32()] * count),
        [address],
        f"ld.relaxed.gpu.global.v{count}.b32 {{{names}}}, [${count}];",
        ",".join(["=r"] * count) + ",l,~{memory}",
        True,
    )
    return [Int32(llvm.extractvalue(T.i32(), values, [i], loc=loc, ip=ip)) for i in range(count)]


def store(dtype, address, value):
    """Write one element to an address."""
    cute.make_tensor(ptr(dtype, address), cute.make_layout(1))[0] = value


def load_shared(dtype, address):
    """One element at a shared address (Int32)."""
    return cute.make_tensor(ptr(dtype, address, None, SMEM), cute.make_layout(1))[0]


def store_shared(dtype, address, value):
    """Write one element to a shared address (Int32)."""
    cute.make_tensor(ptr(dtype, address, None, SMEM), cute.make_layout(1))[0] = value


@dsl_user_op
def store_shared_cluster(address, rank, value, *, loc=None, ip=None):
    """Write an Int32 to a shared address (Int32) of the cluster's CTA ``rank``."""
    code = "{.reg .b32 a; mapa.shared::cluster.u32 a, $0, $1; st.shared::cluster.s32 [a], $2;}"
    _asm(None, [Int32(address), Int32(rank), Int32(value)], code, "r,r,r,~{memory}", True)


@dsl_user_op
def store_words_if(condition, address, words, *, loc=None, ip=None):
    """Four Int32 to an address on 16 bytes, as one predicated instruction: behind a branch the
    compiler would move the loads of the words too, one after the other.
    """
    code = "{.reg .pred p; setp.ne.b32 p, $0, 0; @p st.global.v4.b32 [$1], {$2, $3, $4, $5};}"
    values = [select_(condition, Int32(1), Int32(0)), Int64(address), *map(Int32, words)]
    _asm(None, values, code, "r,l,r,r,r,r,~{memory}", True)


@dsl_user_op
def store_system(address, value, *, loc=None, ip=None):
    """Write an Int32 where the host can see it."""
    _asm(
        None,
        [Int64(address), Int32(value)],
        "st.relaxed.sys.global.s32 [$0], $1;",
        "l,r,~{memory}",
        True,
    )


# Between ranks. Each use of these names its partner.


@dsl_user_op
def load_acquire_system(address, *, loc=None, ip=None):
    """An Int32 that another rank writes, with all that it released before."""
    code = "ld.acquire.sys.global.s32 $0, [$1];"
    return Int32(_asm(T.i32(), [Int64(address)], code, "=r,l,~{memory}", True))


@dsl_user_op
def store_release_system(address, value, *, loc=None, ip=None):
    """Write an Int32 for another rank, or the host, which then sees what came before."""
    code = "st.release.sys.global.s32 [$0], $1;"
    _asm(None, [Int64(address), Int32(value)], code, "l,r,~{memory}", True)


@dsl_user_op
def add_release_system(address, value, *, loc=None, ip=None):
    """Add to an Int32 of another rank, which then sees what came before."""
    code = "red.release.sys.global.add.s32 [$0], $1;"
    _asm(None, [Int64(address), Int32(value)], code, "l,r,~{memory}", True)


@dsl_user_op
def global_timer(*, loc=None, ip=None):
    """Nanoseconds of the device's clock, as Int64."""
    return Int64(_asm(T.i64(), [], "mov.u64 $0, %globaltimer;", "=l,~{memory}", True))


@dsl_user_op
def fence_proxy_async(*, loc=None, ip=None):
    """What this thread may read becomes readable for its bulk copies."""
    _asm(None, [], "fence.proxy.async.global;", "~{memory}", True)


@dsl_user_op
def reduce_add(address, value, *, loc=None, ip=None):
    """Add an Int64 to the one at an address, atomically; nobody waits for it."""
    code = "red.relaxed.gpu.global.add.u64 [$0], $1;"
    _asm(None, [Int64(address), Int64(value)], code, "l,l,~{memory}", True)


@dsl_user_op
def bulk_load(dst, src, size, mbar, policy, *, loc=None, ip=None):
    """Copy ``size`` contiguous bytes from global to shared memory; the mbarrier counts them.

    dst, mbar  shared addresses (Int32)
    src        global address; like dst and size a multiple of 16
    policy     L2 cache policy
    """
    _asm(
        None,
        [Int32(dst), Int64(src), Int32(size), Int32(mbar), Int64(policy)],
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [$0], [$1], $2, [$3], $4;",
        "r,l,r,r,l,~{memory}",
        True,
    )


@dsl_user_op
def stmatrix_trans(address, registers, *, loc=None, ip=None):
    """Store 1, 2 or 4 8x8 matrices of 16-bit elements, a register each, transposed.

    address  lane i's: of row i % 8 of matrix i / 8, for as many lanes as there are rows
    """
    count = len(registers)
    values = ", ".join(f"${i + 1}" for i in range(count))
    _asm(
        None,
        [Int32(address), *(Int32(r) for r in registers)],
        f"stmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 [$0], {{{values}}};",
        "r" + ",r" * count + ",~{memory}",
        True,
    )


@dsl_user_op
def match_any(value, *, loc=None, ip=None):
    """The mask of the warp's lanes that hold the same value."""
    return Int32(
        _asm(T.i32(), [Int32(value)], "match.any.sync.b32 $0, $1, 0xffffffff;", "=r,r", True)
    )


@dsl_user_op
def lanemask_lt(*, loc=None, ip=None):
    """The mask of the lanes below this one."""
    return Int32(_asm(T.i32(), [], "mov.u32 $0, %lanemask_lt;", "=r", False))


# Bits and small floats.


def bits(x):
    """The bit pattern of a Float32."""
    return Int32(_asm(T.i32(), [Float32(x)], "mov.b32 $0, $1;", "=r,f", False))


def from_bits(x):
    """The Float32 of a bit pattern."""
    return Float32(_asm(T.f32(), [Int32(x)], "mov.b32 $0, $1;", "=f,r", False))


@dsl_user_op
def keep(a, *, loc=None, ip=None):
    """``a``, in a register: the compiler does not read a special register again each time."""
    return Int32(_asm(T.i32(), [Int32(a)], "mov.b32 $0, $1;", "=r,r", True))


def and_const(a, mask):
    return _i32(f"and.b32 $0, $1, {signed32(mask)};", a)


def shift_left(a, count):
    """Left shift as a multiplication: the multiplier's pipe is idle where the ALU is the limit."""
    return _i32(f"mul.lo.s32 $0, $1, {1 << count};", a)


def mul_const(a, factor):
    return _i32(f"mul.lo.s32 $0, $1, {factor};", a)


def shift_right(a, count):
    return _i32(f"shr.u32 $0, $1, {count};", a)


def and_or(a, b, c):
    """``(a & b) | c``"""
    return _i32("lop3.b32 $0, $1, $2, $3, 0xEA;", a, b, c)


def permute(a, b, selector):
    """Bytes of ``a`` (0..3) and ``b`` (4..7), the lowest selector digit first."""
    return _i32(f"prmt.b32 $0, $1, $2, {selector};", a, b)


def max_u16x2(a, b):
    """The larger of each of two unsigned halves."""
    return _i32("max.u16x2 $0, $1, $2;", a, b)


def swap_bytes_in_halves(a):
    return _i32("prmt.b32 $0, $1, $1, 0x2301;", a)


def mul_bf16x2_by_low(a, pair):
    """Both halves of ``a`` times the low bf16 of ``pair``."""
    broadcast = "{.reg .b16 l,h; .reg .b32 s; mov.b32 {l,h}, $2; mov.b32 s, {l,l};"
    return _i32(broadcast + " mul.rn.bf16x2 $0, $1, s;}", a, pair)


def mul_bf16x2_by_high(a, pair):
    """Both halves of ``a`` times the high bf16 of ``pair``."""
    broadcast = "{.reg .b16 l,h; .reg .b32 s; mov.b32 {l,h}, $2; mov.b32 s, {h,h};"
    return _i32(broadcast + " mul.rn.bf16x2 $0, $1, s;}", a, pair)


def pack_e4m3x2(low, high):
    """Two Float32 to E4M3, in bits 0..7 and 8..15: to nearest even, saturating, NaN to 0x7F."""
    code = "{.reg .b16 p; cvt.rn.satfinite.e4m3x2.f32 p, $2, $1; mov.b32 $0, {p, 0};}"
    return Int32(_asm(T.i32(), [Float32(low), Float32(high)], code, "=r,f,f", False))


def pack_e2m1x2(low, high):
    """Two Float32 to E2M1, in bits 0..3 and 4..7: to nearest even, saturating, NaN to 7. sm_100."""
    code = "{.reg .b8 p; cvt.rn.satfinite.e2m1x2.f32 p, $2, $1; cvt.u32.u8 $0, p;}"
    return Int32(_asm(T.i32(), [Float32(low), Float32(high)], code, "=r,f,f", False))


def pack_e2m1_bytes(low, high):
    """Two Float32 to E2M1, in bits 0..3 and 8..11; else as ``pack_e2m1x2``."""
    pair = pack_e2m1x2(low, high)
    return and_const(pair | (pair << 4), 0x0F0F)


def pack_bf16x2(low, high):
    """Two Float32 to bf16, to nearest even; low in bits 0..15."""
    code = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return Int32(_asm(T.i32(), [Float32(low), Float32(high)], code, "=r,f,f", False))


def low_bf16(pair):
    """The low bf16 of a pair as Float32."""
    return from_bits(_i32("shl.b32 $0, $1, 16;", pair))


def high_bf16(pair):
    """The high bf16 of a pair as Float32."""
    return from_bits(and_const(pair, 0xFFFF0000))


def e4m3(byte):
    """The E4M3 in the low 8 bits as Float32, exactly."""
    code = (
        "{.reg .b16 p,q,h,l; .reg .b32 d; mov.b32 {p,q}, $1; cvt.rn.f16x2.e4m3x2 d, p;"
        " mov.b32 {l,h}, d; cvt.f32.f16 $0, l;}"
    )
    return Float32(_asm(T.f32(), [Int32(byte)], code, "=f,r", False))


def round_to_e4m3(x):
    """The nearest E4M3 of a Float32, as Float32."""
    return e4m3(pack_e4m3x2(x, Float32(0.0)))


def scale_e4m3x4(word, factor):
    """Four E4M3 in a word times a power of two (a Float32 up to 1), to nearest even.

    Through f16, which holds every product that does not round to zero.
    """
    code = (
        "{.reg .b16 l,h,s; .reg .b32 a,b,ss; mov.b32 {l,h}, $1; cvt.rn.f16x2.e4m3x2 a, l;"
        " cvt.rn.f16x2.e4m3x2 b, h; cvt.rn.f16.f32 s, $2; mov.b32 ss, {s,s};"
        " mul.rn.f16x2 a, a, ss; mul.rn.f16x2 b, b, ss; cvt.rn.satfinite.e4m3x2.f16x2 l, a;"
        " cvt.rn.satfinite.e4m3x2.f16x2 h, b; mov.b32 $0, {l,h};}"
    )
    return Int32(_asm(T.i32(), [Int32(word), Float32(factor)], code, "=r,r,f", False))


def exp2(x):
    """2^x to about 22 bits; 0 and infinity where it leaves the normal numbers."""
    return Float32(_asm(T.f32(), [Float32(x)], "ex2.approx.ftz.f32 $0, $1;", "=f,f", False))


def reciprocal(x):
    """1 / x to about 23 bits; denormals count as 0."""
    return Float32(_asm(T.f32(), [Float32(x)], "rcp.approx.ftz.f32 $0, $1;", "=f,f", False))


def div(a, b):
    """IEEE division, to nearest even, denormals kept."""
    return Float32(
        _asm(T.f32(), [Float32(a), Float32(b)], "div.rn.f32 $0, $1, $2;", "=f,f,f", False)
    )


def mul(a, b):
    """IEEE product, denormals kept, never fused with an addition."""
    return Float32(
        _asm(T.f32(), [Float32(a), Float32(b)], "mul.rn.f32 $0, $1, $2;", "=f,f,f", False)
    )


def add(a, b):
    """IEEE sum, never fused with a product."""
    return Float32(
        _asm(T.f32(), [Float32(a), Float32(b)], "add.rn.f32 $0, $1, $2;", "=f,f,f", False)
    )
