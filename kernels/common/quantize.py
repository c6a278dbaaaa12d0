"""Block-scaled quantization in registers: the op sequences of ``moe_ep_jit.formats``, bit for bit.

Plain functions over DSL numbers, traced inline. An amax travels as the bits of |x|, which order as
integers do.
"""

import cutlass
from cutlass import Float32, Int32, select_

from moe_ep_jit.formats import INV_6, INV_2688, MIN_GLOBAL_SCALE
from moe_ep_jit.kernels.common import ptx

INF_BITS = 0x7F800000
NAN_BLOCK = 0x7FFFFFFF  # amax of a block that holds a NaN, where that makes the whole block NaN


def finite_bits(x):
    """Bits of |x|; 0 where x is Inf or NaN."""
    magnitude = ptx.and_const(ptx.bits(x), 0x7FFFFFFF)
    return select_(magnitude < INF_BITS, magnitude, Int32(0))


def finite_or_nan_bits(x):
    """Bits of |x|; 0 for Inf, NAN_BLOCK for NaN."""
    magnitude = ptx.and_const(ptx.bits(x), 0x7FFFFFFF)
    special = select_(magnitude > INF_BITS, Int32(NAN_BLOCK), Int32(0))
    return select_(magnitude < INF_BITS, magnitude, special)


def finite_halves(low, high):
    """Finite magnitudes of two numbers as the upper 16 of their bits, rounded up, in one word.

    ``mxfp8_byte`` looks for what exceeds 1.75 * 2^n, which has 7 bits of fraction: what lies above
    it still does when rounded up to that many, and what does not, does not.
    """
    bits = [finite_bits(x) + 0xFFFF for x in (low, high)]
    return ptx.permute(*bits, 0x7632)


def maximum(values):
    """The largest of a Python list of numbers."""
    out = values[0]
    for value in values[1:]:
        out = cutlass.max(out, value)
    return out


def exp2_of_byte(byte):
    """2^(byte - 127), the value of a UE8M0 byte 0..254; that of byte 0 is denormal."""
    return ptx.from_bits(select_(byte == 0, Int32(0x00400000), byte << 23))


def mxfp8_byte(amax_bits):
    """UE8M0 byte of a block."""
    return cutlass.max(ptx.shift_right(amax_bits + 0x1FFFFF, 23) - 8, Int32(0))


def mxfp8_inverse(byte):
    """2^(127 - byte) for a byte that ``mxfp8_byte`` gave."""
    return ptx.from_bits((254 - byte) << 23)


def fold_factor(byte, target):
    """2^(byte - target) for target >= byte, by which folding multiplies a block's elements; 0 where
    that underflows.
    """
    return ptx.from_bits(cutlass.max(127 + byte - target, Int32(0)) << 23)


def nvfp4_row(amax_bits):
    """Dynamic second-level scale g of a row."""
    g = ptx.mul(ptx.from_bits(amax_bits), Float32(INV_2688))
    return select_(g < MIN_GLOBAL_SCALE, Float32(0.0), g)


def nvfp4_row_inverse(g):
    """1 / g, 0 for a row that quantizes to zeros."""
    return select_(g < MIN_GLOBAL_SCALE, Float32(0.0), ptx.div(Float32(1.0), g))


def nvfp4_block(amax_bits, inverse_g):
    """Block scale (an E4M3 as Float32, NaN for NAN_BLOCK), the elements' factor, and whether the
    scale saturated.
    """
    t = ptx.mul(ptx.mul(ptx.from_bits(amax_bits), inverse_g), Float32(INV_6))
    s = select_(amax_bits == NAN_BLOCK, ptx.from_bits(Int32(NAN_BLOCK)), ptx.round_to_e4m3(t))
    factor = select_(s == 0.0, Float32(0.0), ptx.mul(inverse_g, ptx.div(Float32(1.0), s)))
    return s, factor, t > 464.0  # what rounds to 448 has not saturated


def round_to_e2m1(v):
    """The nearest E2M1 value of a Float32, ties to even, beyond 6 (and NaN) to 6, with v's sign."""
    magnitude = ptx.from_bits(ptx.and_const(ptx.bits(v), 0x7FFFFFFF))
    magnitude = cutlass.cute.arch.fmin(magnitude, Float32(6.0))  # of NaN and 6 it gives 6
    # Adding 1.5 * 2^23 steps leaves whole steps: 0.5 below 2, 1 below 4, 2 above.
    step = select_(
        magnitude < 2.0, Float32(0.5), select_(magnitude < 4.0, Float32(1.0), Float32(2.0))
    )
    shift = ptx.mul(step, Float32(1.5 * 2**23))
    rounded = ptx.add(ptx.add(magnitude, shift), ptx.mul(shift, Float32(-1.0)))
    return ptx.from_bits(ptx.bits(rounded) | ptx.and_const(ptx.bits(v), 0x80000000))
