"""The emulator's arithmetic against independent definitions."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from emulator_cases import aligned, run

from moe_ep_jit.tools.emulator import floats, wgmma

F32, U32 = np.float32, np.uint32


def hard_floats():
    """Random bit patterns, and all that lies close to where rounding turns."""
    random = np.random.randint(0, 1 << 32, 200_000, np.uint64).astype(U32).view(F32)
    near = np.random.randn(50_000).astype(F32) * 2.0 ** np.random.randint(-12, 10, 50_000)
    middles = (np.arange(0, 1 << 16, dtype=U32) << 16 | 0x8000).view(F32)
    near = np.concatenate((near.astype(F32), middles))
    return np.concatenate((random, near, np.nextafter(near, F32(0)), np.nextafter(near, F32(9e9))))


def rounded(x, dtype, bits):
    with np.errstate(all="ignore"):
        return x.astype(dtype).view(bits)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_f32_to_bf16():
    x = hard_floats()
    x = x[~np.isnan(x)]
    want = rounded(x, ml_dtypes.bfloat16, np.uint16)
    assert (floats.f32_to_bf16(x) == want).all()
    assert floats.f32_to_bf16(np.array([np.nan], F32))[0] == 0x7FFF


@pytest.mark.filterwarnings("ignore:invalid value")
def test_f32_to_e4m3_saturates():
    x = hard_floats()
    x = x[~np.isnan(x)]
    want = rounded(np.clip(x, -448, 448), ml_dtypes.float8_e4m3fn, np.uint8)
    assert (floats.f32_to_e4m3(x) == want).all()
    assert floats.f32_to_e4m3(np.array([np.nan], F32))[0] == 0x7F


@pytest.mark.filterwarnings("ignore:invalid value")
def test_f32_to_e2m1_saturates():
    x = hard_floats()
    x = x[~np.isnan(x)]
    want = rounded(np.clip(x, -6, 6), ml_dtypes.float4_e2m1fn, np.uint8)
    assert (floats.f32_to_e2m1(x) == want & 15).all()


def test_tables_of_the_small_formats():
    codes = np.arange(256, dtype=np.uint8)
    for table, dtype in (
        (floats.E4M3, ml_dtypes.float8_e4m3fn),
        (floats.E5M2, ml_dtypes.float8_e5m2),
        (floats.UE8M0, ml_dtypes.float8_e8m0fnu),
    ):
        np.testing.assert_array_equal(table, codes.view(dtype).astype(F32))
    np.testing.assert_array_equal(floats.E2M1, codes[:16].view(ml_dtypes.float4_e2m1fn).astype(F32))


def nearest(exact):
    """The fp32 nearest to a fraction, ties to even."""
    guess = F32(float(exact))
    around = (np.nextafter(guess, F32(-np.inf)), guess, np.nextafter(guess, F32(np.inf)))
    return min(around, key=lambda f: (abs(Fraction(float(f)) - exact), int(f.view(U32)) & 1))


def test_fma_rounds_once():
    """Also where the double in between lands on the middle of two floats."""
    a, b = (np.random.randn(3000).astype(F32) for _ in range(2))
    c = np.random.randn(3000).astype(F32) * 2.0 ** np.random.randint(-30, 30, 3000)
    # 1 + 2^-24 is a middle; the tiny product decides, which a double cannot hold beside it.
    tie_a = np.array([1, 1, -1, -1], F32) * F32(2**-40)
    tie_b = np.array([1, 1, 1, 1], F32) * F32(2**-24)
    a, b = np.concatenate((a, tie_a)), np.concatenate((b, tie_b))
    middle_c = [1.0 + 2.0**-23, 1.0, 1.0 + 2.0**-23, 1.0]
    c = np.concatenate((c.astype(F32), np.array(middle_c, F32)))
    got = floats.fma(a, b, c)
    for x, y, z, value in zip(a, b, c, got, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert value == nearest(exact), (x, y, z)
    x, y, z = F32(1 + 2**-12), F32(1 + 2**-12), F32(2.0**-60)
    exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
    (value,) = floats.fma(np.array([x]), np.array([y]), np.array([z]))
    assert value == nearest(exact)


def computed(instruction, *inputs, kind="u32"):
    """``instruction`` on %r1, %r2, %r3 with a thread for each element."""
    inputs = [np.resize(np.asarray(i, np.int64).astype(U32), 32) for i in inputs]
    data, out = aligned(32 * max(len(inputs), 1)), aligned(32)
    data[: 32 * len(inputs)] = np.concatenate(inputs)
    loads = "".join(f"ld.global.b32 %r{n + 1}, [%rd3+{128 * n}];" for n in range(len(inputs)))
    body = f"""
    ld.param.u64 %rd1, [p0]; ld.param.u64 %rd2, [p1]; mov.u32 %r9, %tid.x; shl.b32 %r9, %r9, 2;
    cvt.u64.u32 %rd4, %r9; add.s64 %rd3, %rd1, %rd4; add.s64 %rd5, %rd2, %rd4; {loads}
    {instruction} st.global.b32 [%rd5], %r5;
    """
    run(body, 32, data, out)
    return out.astype(np.int64) if kind == "u32" else out.view(np.int32).astype(np.int64)


A = [0, 1, -1, 7, -7, 2**31 - 1, -(2**31), 123456789, -987654321, 40]
B = [3, -1, 2, -3, 5, 31, 32, 33, -(2**31), 6]


def signed(values):
    return np.resize(np.array(values, np.int64), 32)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("add.s32 %r5, %r1, %r2;", lambda a, b: a + b),
        ("sub.s32 %r5, %r1, %r2;", lambda a, b: a - b),
        ("mul.lo.s32 %r5, %r1, %r2;", lambda a, b: a * b),
        ("mul.hi.s32 %r5, %r1, %r2;", lambda a, b: a * b >> 32),
        ("mul.hi.u32 %r5, %r1, %r2;", lambda a, b: (a % 2**32) * (b % 2**32) >> 32),
        ("min.s32 %r5, %r1, %r2;", min),
        ("max.s32 %r5, %r1, %r2;", max),
        ("max.u32 %r5, %r1, %r2;", lambda a, b: max(a % 2**32, b % 2**32)),
        ("div.s32 %r5, %r1, %r2;", lambda a, b: abs(a) // abs(b) * (1 if a * b >= 0 else -1)),
        ("rem.s32 %r5, %r1, %r2;", lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1)),
        ("shl.b32 %r5, %r1, %r2;", lambda a, b: a << b % 2**32 if b % 2**32 < 32 else 0),
        ("shr.u32 %r5, %r1, %r2;", lambda a, b: (a % 2**32) >> min(b % 2**32, 32)),
        ("shr.s32 %r5, %r1, %r2;", lambda a, b: a >> min(b % 2**32, 31)),
        ("setp.lt.s32 %p1, %r1, %r2; selp.b32 %r5, 1, 2, %p1;", lambda a, b: 1 if a < b else 2),
        ("setp.lo.u32 %p1, %r1, %r2; selp.b32 %r5, 1, 2, %p1;",
         lambda a, b: 1 if a % 2**32 < b % 2**32 else 2),
        ("popc.b32 %r5, %r1;", lambda a, b: bin(a % 2**32).count("1")),
        ("lop3.b32 %r5, %r1, %r2, %r1, 0x96;", lambda a, b: b),
        ("prmt.b32 %r5, %r1, %r2, 0x6510;",
         lambda a, b: (a & 0xFFFF) | (b >> 8 & 0xFFFF) << 16),
        ("prmt.b32 %r5, %r1, %r2, 0x888F;",
         lambda a, b: (0xFF if b >> 31 & 1 else 0) | (0xFFFFFF00 if a >> 7 & 1 else 0)),
    ],
    ids=lambda value: value.split(" ")[0] if isinstance(value, str) else "",
)  # fmt: skip
def test_integers(text, want):
    a, b = signed(A), signed(B)
    expected = [int(want(int(x), int(y))) % 2**32 for x, y in zip(a, b, strict=True)]
    assert computed(text, a, b).tolist() == expected


@pytest.mark.parametrize("mode", ["bfly", "up", "down", "idx"])
def test_shuffles(mode):
    lane = np.arange(32)
    clamp = 0 if mode == "up" else 31
    got = computed(f"shfl.sync.{mode}.b32 %r5, %r1, 5, {clamp}, -1;", lane)
    source = {"bfly": lane ^ 5, "up": lane - 5, "down": lane + 5, "idx": 0 * lane + 5}[mode]
    assert (got == np.where((source >= 0) & (source < 32), source, lane)).all()


def test_lanes_that_go_other_ways_come_back():
    """A loop with its own count for each lane: registers of who has left stay as they were."""
    body = """mov.b32 %r5, 0;
    LOOP: setp.ge.s32 %p1, %r5, %r1; @%p1 bra END; add.s32 %r5, %r5, 1; bra LOOP;
    END: mul.lo.s32 %r5, %r5, 3;"""
    assert (computed(body, np.arange(32) % 7) == np.arange(32) % 7 * 3).all()


@pytest.mark.parametrize(
    ("instruction", "a", "b"),
    [
        ("add.f32 %r7, %r5, %r6;", np.inf, -np.inf),
        ("sub.f32 %r7, %r5, %r6;", np.inf, np.inf),
        ("mul.f32 %r7, %r5, %r6;", np.inf, 0.0),
        ("mul.rn.f32 %r7, %r5, %r6;", -np.nan, 1.0),
        ("div.rn.f32 %r7, %r5, %r6;", 0.0, 0.0),
        ("fma.rn.f32 %r7, %r5, %r6, %r5;", np.inf, 0.0),
        ("rcp.approx.ftz.f32 %r7, %r5;", -np.nan, 0.0),
        ("ex2.approx.ftz.f32 %r7, %r5;", -np.nan, 0.0),
    ],
)
def test_a_nan_that_arithmetic_gives_is_the_positive_one(instruction, a, b):
    """The host's own arithmetic gives negative NaNs, whose sign a kernel may look at."""
    given = np.array([a, b], F32).view(U32).tolist()
    out = aligned(4)
    run(
        f"mov.b32 %r5, {given[0]}; mov.b32 %r6, {given[1]}; {instruction}"
        "ld.param.u64 %rd1, [p0]; st.global.b32 [%rd1], %r7;",
        32, out,
    )  # fmt: skip
    assert out[0] == 0x7FFFFFFF


@pytest.mark.parametrize(("kind", "k"), [("e4m3", 32), ("bf16", 16), ("f16", 16)])
def test_a_sum_of_wgmma_does_not_depend_on_the_tile_around_it(kind, k):
    """Else rungs would not agree bit for bit, as they do on the GPU."""
    dtype = {"e4m3": ml_dtypes.float8_e4m3fn, "bf16": ml_dtypes.bfloat16, "f16": np.float16}[kind]
    a = (np.random.randn(256, k) * 2.0 ** np.random.randint(-6, 6, (256, k))).astype(dtype)
    b = np.random.randn(192, k).astype(dtype)
    a, b = a.astype(F32), b.astype(F32)
    whole = wgmma._times(a, b.T)
    exact = [[sum(map(Fraction, (x * y).tolist())) for y in b[:4].astype(float)] for x in
             a[:16].astype(float)]  # fmt: skip
    assert (whole[:16, :4] == np.array(exact, float).astype(F32)).all()
    for rows in (64, 128, 192, 256):
        for n in (8, 16, 24, 40, 64, 80, 96, 128, 160):
            assert (wgmma._times(a[-rows:], b[:n].T) == whole[-rows:, :n]).all()
