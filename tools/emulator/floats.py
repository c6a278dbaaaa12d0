"""Small float formats and PTX's conversions over arrays of bits. Round to nearest even."""

from __future__ import annotations

import numpy as np

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
I32, F16, F32, F64 = np.int32, np.float16, np.float32, np.float64

_ONE_TIE = U64(0x10000000)  # what a double keeps below a float, when it lies between two floats
_BELOW_F32 = U64(0x1FFFFFFF)
_EXPONENT = U32(0x7F800000)


def _decode(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = (code & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) & 1 else 1.0
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias)
    return sign * (1 + mantissa) * 2.0 ** (exponent - bias)


def _e4m3_table() -> np.ndarray:
    values = [_decode(code, 4, 3, 7) for code in range(256)]
    values[0x7F] = values[0xFF] = float("nan")
    return np.array(values, F32)


def _e5m2_table() -> np.ndarray:
    return (np.arange(256, dtype=U16) << 8).view(F16).astype(F32)


#: Value of each code as fp32.
E4M3 = _e4m3_table()
E5M2 = _e5m2_table()
E2M1 = np.array([_decode(code, 2, 1, 1) for code in range(16)], F32)
UE8M0 = np.array([2.0 ** (code - 127) if code < 255 else float("nan") for code in range(256)], F32)
_E4M3_AS_F16 = E4M3.astype(F16).view(U16).copy()
_E4M3_AS_F16[[0x7F, 0xFF]] = 0x7FFF


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """bf16 bits (uint16) as fp32."""
    return (bits.astype(U32) << U32(16)).view(F32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """fp32 to bf16 bits (uint16); every NaN becomes 0x7FFF."""
    u = x.view(U32)
    rounded = (u + U32(0x7FFF) + (u >> U32(16) & U32(1))) >> U32(16)
    nan = x != x
    if np.count_nonzero(nan):
        rounded = np.where(nan, U32(0x7FFF), rounded)
    return rounded.astype(U16)


def mul_bf16x2(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Products of two bf16 pairs (uint32 each), rounded once: 8 x 8 bits are exact in fp32."""
    return f32_to_bf16(_halves(a) * _halves(b)).view(U32)


def _halves(pairs: np.ndarray) -> np.ndarray:
    """The bf16 pairs of each element as fp32, one after the other."""
    return bf16_to_f32(np.ascontiguousarray(pairs).view(U16))


def _interleaved(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """low, high, low, high, .. so that one conversion serves both."""
    shape = np.broadcast_shapes(np.shape(low), np.shape(high))
    both = np.empty((*shape, 2), F32)
    both[..., 0], both[..., 1] = low, high
    return both


def pack_bf16x2(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """cvt.rn.bf16x2.f32 d, high, low."""
    return f32_to_bf16(_interleaved(low, high)).view(U32)[..., 0]


def pack_f16x2(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """cvt.rn.f16x2.f32 d, high, low."""
    halves = [np.where(x != x, U16(0x7FFF), x.astype(F16).view(U16)) for x in (high, low)]
    return halves[1].astype(U32) | halves[0].astype(U32) << U32(16)


def f32_to_e4m3(x: np.ndarray) -> np.ndarray:
    """fp32 to E4M3 codes (uint16), saturating at 448; NaN becomes 0x7F."""
    u = x.view(U32)
    sign = (u >> U32(24) & U32(0x80)).astype(U16)
    magnitude = np.abs(x)
    # Normal values: round the mantissa to three bits where it stands, then move the exponent.
    m = magnitude.view(U32)
    normal = (m + U32(0x7FFFF) + (m >> U32(20) & U32(1)) >> U32(20)).astype(I32) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9; rint rounds to even.
    small = np.rint(np.minimum(magnitude, F32(1.0)) * F32(512.0)).astype(I32)
    code = np.where(magnitude < F32(2.0**-6), small, np.minimum(normal, 0x7E))
    code = np.where(x != x, 0x7F, code).astype(U16)
    return np.where(x != x, code, code | sign)


def pack_e4m3x2(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """cvt.rn.satfinite.e4m3x2.f32 d, high, low: uint16."""
    return f32_to_e4m3(_interleaved(low, high)).astype(U8).view(U16)[..., 0]


def f16x2_to_e4m3x2(pair: np.ndarray) -> np.ndarray:
    """cvt.rn.satfinite.e4m3x2.f16x2 d, a: uint16."""
    low = (pair & U32(0xFFFF)).astype(U16).view(F16).astype(F32)
    high = (pair >> U32(16)).astype(U16).view(F16).astype(F32)
    return pack_e4m3x2(high, low)


def f32_to_e2m1(x: np.ndarray) -> np.ndarray:
    """fp32 to E2M1 codes (uint16), saturating at 6; NaN becomes +6."""
    magnitude = np.abs(x)
    code = np.zeros(x.shape, U16)
    # The middle between two codes goes to the even one.
    for number, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), start=1):
        above = magnitude >= F32(middle) if number % 2 == 0 else magnitude > F32(middle)
        code = np.where(above, U16(number), code)
    code |= (x.view(U32) >> U32(28) & U32(8)).astype(U16)
    return np.where(x != x, U16(7), code)


def pack_e2m1x2(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """cvt.rn.satfinite.e2m1x2.f32 d, high, low: uint8."""
    return (f32_to_e2m1(low) | f32_to_e2m1(high) << U16(4)).astype(np.uint8)


def e4m3x2_to_f16x2(pair: np.ndarray) -> np.ndarray:
    """Two E4M3 codes (uint16) as two fp16 (uint32)."""
    low = _E4M3_AS_F16[pair & U16(0xFF)].astype(U32)
    return low | _E4M3_AS_F16[pair >> U16(8)].astype(U32) << U32(16)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """fp32 ``a * b + c`` rounded once.

    The product is exact in double. Where the double sum lands on the middle between two floats it
    may have been rounded to there, and the remainder decides.
    """
    product = a.astype(F64) * b.astype(F64)
    wide = c.astype(F64)
    total = product + wide
    at_tie = (total.view(U64) & _BELOW_F32) == _ONE_TIE
    if np.count_nonzero(at_tie):
        back = total - product
        rest = (product - (total - back)) + (wide - back)
        away = np.where(rest > 0, np.inf, -np.inf)
        total = np.where(at_tie & (rest != 0), np.nextafter(total, away), total)
    return canonical_nan(total.astype(F32))


def minimum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """min.f32: a NaN loses."""
    return np.fmin(a, b)


def maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """max.f32: a NaN loses."""
    return np.fmax(a, b)


def canonical_nan(x: np.ndarray) -> np.ndarray:
    """fp32 with the one NaN that PTX arithmetic gives."""
    nan = x != x
    if np.count_nonzero(nan):
        return np.where(nan, U32(0x7FFFFFFF), x.view(U32)).view(F32)
    return x


def flush(x: np.ndarray) -> np.ndarray:
    """Denormals to zero, the sign kept."""
    return np.where(np.abs(x) < F32(2.0**-126), np.copysign(F32(0), x), x)


def exp2(x: np.ndarray) -> np.ndarray:
    """ex2.approx: here the fp32 nearest to 2^x; the hardware's is within 2 ulp."""
    return np.exp2(x.astype(F64)).astype(F32)


def log2(x: np.ndarray) -> np.ndarray:
    """lg2.approx, likewise."""
    return np.log2(x.astype(F64)).astype(F32)


def reciprocal(x: np.ndarray) -> np.ndarray:
    """rcp.approx, likewise within 1 ulp."""
    return F32(1.0) / x


def divide_integers(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Quotient rounded to zero; what the hardware gives for a zero divisor is -1."""
    zero = b == 0
    divisor = np.where(zero, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        quotient = a // divisor
    else:
        quotient = a // divisor
        short = (quotient * divisor != a) & ((a < 0) != (divisor < 0))
        quotient = quotient + short.astype(a.dtype)
    return np.where(zero, ~a.dtype.type(0), quotient)


def multiply_high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """High half of the product of two integers of one type."""
    if a.dtype.itemsize == 4:
        wide = np.int64 if a.dtype.kind == "i" else U64
        return (np.multiply(a, b, dtype=wide) >> wide(32)).astype(a.dtype)
    x, y = np.broadcast_arrays(a.view(U64), b.view(U64))
    mask, half = U64(0xFFFFFFFF), U64(32)
    low = (x & mask) * (y & mask)
    middle = (x >> half) * (y & mask) + (low >> half)
    other = (x & mask) * (y >> half) + (middle & mask)
    high = (x >> half) * (y >> half) + (middle >> half) + (other >> half)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, y, U64(0)) - np.where(b < 0, x, U64(0))
    return high.view(a.dtype)


def permute(a: np.ndarray, b: np.ndarray, selector: int) -> np.ndarray:
    """prmt.b32 with a constant selector."""
    both = (a, b)
    result = U32(0)
    for byte in range(4):
        pick = selector >> 4 * byte & 0xF
        word = both[pick >> 2 & 1] >> U32(8 * (pick & 3)) & U32(0xFF)
        if pick & 8:
            word = (word >> U32(7)) * U32(0xFF)
        result = result | word << U32(8 * byte)
    return result


def logic3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """lop3.b32: bit i of the result is ``table``'s bit (a, b, c)."""
    if table == 0xEA:
        return a & b | c
    result = U32(0) & (a | b | c)
    for row in range(8):
        if table >> row & 1:
            x = a if row & 4 else ~a
            y = b if row & 2 else ~b
            z = c if row & 1 else ~c
            result = result | x & y & z
    return result


def popcount(x: np.ndarray) -> np.ndarray:
    """Set bits of each element, as uint32."""
    count = np.zeros(x.shape, U32)
    for byte in x.reshape(-1, 1).view(U8).T:
        count += _BITS_OF_BYTE[byte].reshape(x.shape)
    return count


_BITS_OF_BYTE = np.array([bin(value).count("1") for value in range(256)], U32)


def shift(x: np.ndarray, count: np.ndarray, left: bool) -> np.ndarray:
    """Shift by an amount that may reach beyond the width."""
    width = x.dtype.itemsize * 8
    kept = np.minimum(count, U32(width - 1)).astype(x.dtype)
    if left:
        return np.where(count < width, x << kept, x.dtype.type(0))
    if x.dtype.kind == "i":
        return x >> kept
    return np.where(count < width, x >> kept, x.dtype.type(0))
