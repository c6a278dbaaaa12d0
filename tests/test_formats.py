"""formats against a second definition: tables by hand, ml_dtypes, and numpy's fp32 and fp64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from moe_ep_jit import formats
from moe_ep_jit.formats import MXFP8, NVFP4, BlockScaled

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.sm90)]

E2M1_BY_HAND = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
#: code 0..126: 7 subnormals in steps of 2^-9, then 8 mantissas for each of the exponents -6 .. 8
E4M3_BY_HAND = [m / 512 for m in range(8)] + [
    (8 + m) / 8 * 2.0**e for e in range(-6, 9) for m in range(8) if (e, m) != (8, 7)
]


def nearest(table: list[float], a: np.ndarray) -> np.ndarray:
    """Index of the entry nearest to each a >= 0, ties to the even index; the last if a is above."""
    table = np.asarray(table, np.float64)
    middle = (table[1:] + table[:-1]) / 2
    below = np.searchsorted(middle, a.astype(np.float64), side="left")
    tie = np.isin(a.astype(np.float64), middle)
    return np.where(tie & (below % 2 == 1), below + 1, below).astype(np.uint8)


def e4m3_bytes(v: np.ndarray) -> np.ndarray:
    """v of any float type -> E4M3 bytes, saturating; NaN is 0x7F."""
    a = np.minimum(np.abs(np.nan_to_num(v, nan=0.0, posinf=1e30, neginf=-1e30)), 448.0)
    code = nearest(E4M3_BY_HAND, a) | (np.signbit(v).astype(np.uint8) << 7)
    return np.where(np.isnan(v), np.uint8(0x7F), code)


def finite_amax(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), np.abs(x), np.float32(0)).max(-1)


def mxfp8_by_hand(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x fp32 [rows, K] -> E4M3 bytes, scale bytes: the smallest 2^e with amax <= 448 * 2^e."""
    blocks = x.reshape(len(x), x.shape[1] // 32, 32)
    limits = 448.0 * 2.0 ** np.arange(-127, 128)
    byte = (finite_amax(blocks)[..., None].astype(np.float64) > limits).sum(-1)
    scaled = blocks.astype(np.float64) * 2.0 ** (127.0 - byte)[..., None]
    return e4m3_bytes(scaled).reshape(x.shape), byte.astype(np.uint8)


def nvfp4_by_hand(x: np.ndarray, g: np.ndarray | None) -> tuple[np.ndarray, ...]:
    """x fp32 [rows, K] -> packed codes, E4M3 scale bytes, g [rows], in numpy's fp32."""
    f32, one = np.float32, np.float32(1)
    blocks = x.reshape(len(x), x.shape[1] // 16, 16)
    amax = finite_amax(blocks)
    with np.errstate(all="ignore"):
        if g is None:
            g = amax.max(-1) * (one / f32(2688))
            g = np.where(g < f32(2.0**-112), f32(0), g)
        rg = np.where(g < f32(2.0**-112), f32(0), one / g)[:, None]
        sf = e4m3_bytes(amax * rg * (one / f32(6)))
        sf = np.where(np.isnan(blocks).any(-1), np.uint8(0x7F), sf)
        s = sf.view(ml_dtypes.float8_e4m3fn).astype(f32)
        r = np.where(s == 0, f32(0), rg * (one / s))
        assert r.dtype == np.float32
        v = blocks * r[..., None]
    a = np.minimum(np.nan_to_num(np.abs(v), nan=6.0, posinf=6.0), 6.0)
    codes = nearest(E2M1_BY_HAND[:8], a) | ((np.signbit(v) & ~np.isnan(v)).astype(np.uint8) << 3)
    codes = codes.reshape(x.shape)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), sf, g


def assert_quantizes(x: torch.Tensor, fmt: formats.Format, device: str, g=None) -> BlockScaled:
    """quantize(x) on ``device`` and its decoding agree with the second definition, bit for bit."""
    q = formats.quantize(x.to(device), fmt, None if g is None else g.to(device)).to("cpu")
    x2 = x.float().reshape(-1, x.shape[-1]).numpy()
    if fmt is MXFP8:
        data, sf = mxfp8_by_hand(x2)
        scale = sf.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        values = data.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        with np.errstate(over="ignore"):  # 256 * 2^120 at the end of fp32
            want = values * np.repeat(scale, 32, -1)
    else:
        rows = None if g is None else g.expand(x.shape[:-1]).reshape(-1).numpy()
        data, sf, rows = nvfp4_by_hand(x2, rows)
        if g is None:
            assert_same_bits(q.global_scale.reshape(-1).numpy(), rows)
        codes = np.stack((data & 15, data >> 4), -1).reshape(x2.shape)
        values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        scale = sf.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        with np.errstate(all="ignore"):
            want = values * np.repeat(scale, 16, -1) * rows[:, None]
    assert_same_bits(q.data.view(torch.uint8).reshape(data.shape).numpy(), data)
    assert_same_bits(q.sf.view(torch.uint8).reshape(sf.shape).numpy(), sf)
    assert q.shape == x.shape
    got = formats.dequantize(q.to(device)).cpu().reshape(x2.shape).numpy()
    np.testing.assert_array_equal(got, want)  # NaN equals NaN here
    return q


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


def edge_amaxes() -> torch.Tensor:
    """Every 2^n, 448 * 2^n and 6 * 2^n that fp32 has, denormals included, and both neighbours."""
    n = np.arange(-149, 128, dtype=np.float64)
    with np.errstate(all="ignore"):
        base = np.concatenate([2.0**n, 448 * 2.0**n, 6 * 2.0**n]).astype(np.float32)
        near = [np.nextafter(base, np.float32(0)), base, np.nextafter(base, np.float32(np.inf))]
    edges = np.unique(np.concatenate(near))
    return torch.from_numpy(edges[np.isfinite(edges)])


def blocks_with_amax(amax: torch.Tensor, block: int) -> torch.Tensor:
    """[len(amax), block]: each row holds +-amax somewhere, smaller numbers elsewhere."""
    x = (torch.rand(len(amax), block) * 2 - 1) * amax[:, None]
    where = torch.randint(block, (len(amax), 1))
    sign = torch.where(torch.rand(len(amax), 1) < 0.5, -1.0, 1.0)
    return x.scatter_(1, where, amax[:, None] * sign)


@pytest.mark.parametrize("fmt", [MXFP8, NVFP4], ids=lambda f: f.name)
@pytest.mark.parametrize("device", DEVICES)
class TestQuantize:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("scale", [1e-6, 1e-2, 1.0, 300.0])
    def test_random(self, fmt, device, dtype, scale):
        x = torch.randn(64, 256) * torch.exp2(torch.randint(-6, 7, (64, 256))) * scale
        assert_quantizes(x.to(dtype), fmt, device)

    @pytest.mark.parametrize("log2", [-140, -126, -100, -60, 60, 100, 118, 126])
    def test_huge_and_tiny(self, fmt, device, log2):
        x = torch.randn(16, 128).clamp(-1.9, 1.9) * 2.0**log2
        q = assert_quantizes(x, fmt, device)
        if fmt is MXFP8 or log2 > -100:
            assert formats.dequantize(q).isfinite().all()

    def test_block_maxima_at_edges(self, fmt, device):
        x = blocks_with_amax(edge_amaxes(), fmt.sf_block)
        assert_quantizes(x, fmt, device)

    def test_zeros(self, fmt, device):
        x = torch.zeros(3, 64)
        x[1, 40] = 1.0
        x[2] = -0.0
        q = assert_quantizes(x, fmt, device)
        assert not formats.dequantize(q)[[0, 2]].any()
        assert q.sf.view(torch.uint8)[0].eq(0).all()

    def test_denormals(self, fmt, device):
        x = torch.from_numpy(np.arange(1, 65, dtype=np.int32).view(np.float32).copy())[None]
        x = torch.cat((x, x.flip(1) * 1000, -x * 2.0**20))
        q = assert_quantizes(x, fmt, device)
        assert formats.dequantize(q).isfinite().all()

    @pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), -float("nan")])
    def test_bad_element_stays_in_its_block(self, fmt, device, bad):
        clean = torch.randn(4, 128)
        clean[:, 0] = 10.0  # the row's largest, away from the bad block
        x = clean.clone()
        x[2, 70] = bad
        q = assert_quantizes(x, fmt, device)
        got, want = formats.dequantize(q), formats.dequantize(formats.quantize(clean, fmt))
        block = slice(64, 64 + fmt.sf_block)
        assert got[2, block].isnan().any() == np.isnan(bad)
        if np.isinf(bad):
            largest = (448.0 if fmt is MXFP8 else 6.0) * got[2, block].sign()[6]
            scale = formats.dequantize(q)[2, 70] / largest
            assert got[2, 70].isfinite()
            assert scale > 0
        got[2, block] = want[2, block] = 0
        assert torch.equal(got, want)

    def test_whole_rows_of_inf_and_nan(self, fmt, device):
        x = torch.randn(5, 64)
        x[1], x[3] = float("inf"), float("nan")
        got = formats.dequantize(assert_quantizes(x, fmt, device))
        assert got[3].isnan().all()
        assert got[[0, 1, 2, 4]].isfinite().all()

    @pytest.mark.parametrize("leading", [(), (1,), (0,), (7,), (3, 1, 5), (2, 0, 3)], ids=str)
    def test_leading_shapes(self, fmt, device, leading):
        q = assert_quantizes(torch.randn(*leading, 96), fmt, device)
        assert q.sf.shape == (*leading, 96 // fmt.sf_block)

    def test_chunks_and_strides(self, fmt, device, monkeypatch):
        monkeypatch.setattr(formats, "_CPU_CHUNK", 200)
        monkeypatch.setattr(formats, "_GPU_CHUNK", 200)
        whole = torch.randn(3, 6, 128)
        for x in (whole[:, 1:5], whole[..., 32:96], whole.transpose(0, 1), torch.randn(64, 5).t()):
            assert_quantizes(x, fmt, device)

    def test_float64_is_rounded_to_fp32_first(self, fmt, device):
        x = torch.randn(4, 64, dtype=torch.float64)
        q = formats.quantize(x.to(device), fmt)
        want = formats.quantize(x.float().to(device), fmt)
        assert torch.equal(q.data.view(torch.uint8), want.data.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
class TestGlobalScale:
    @pytest.mark.parametrize(
        "g", [1.0, 2.0**-8, 0.0371, 1e-20, 1e20, 2.0**-112, 2.0**-113, 2.0**126, 0.0]
    )
    def test_static(self, device, g):
        x = torch.randn(8, 64) * g
        q = assert_quantizes(x, NVFP4, device, torch.tensor(g, dtype=torch.float32))
        assert formats.dequantize(q).isfinite().all()

    def test_per_row_and_per_expert(self, device):
        x = torch.randn(3, 5, 64)
        assert_quantizes(x, NVFP4, device, torch.rand(3, 5) + 0.01)
        assert_quantizes(x, NVFP4, device, torch.rand(3, 1) + 0.01)
        assert_quantizes(x, NVFP4, device, torch.tensor([0.5]))

    def test_block_maxima_at_edges(self, device):
        amax = edge_amaxes()
        for g in (1.0, 2.0**-8, 2.0**-100, 0.3):
            near = amax[(amax > g * 1e-6) & (amax < g * 1e5)]
            x = blocks_with_amax(near, 16)
            assert_quantizes(x, NVFP4, device, torch.tensor(g, dtype=torch.float32))

    def test_block_scale_is_the_exact_quotient_rounded(self, device):
        """With a power of two for g and bf16 data no step's rounding shows in the scale."""
        amax = torch.rand(4096).add(0.5).mul(torch.exp2(torch.randint(-8, 12, (4096,)).float()))
        amax = torch.cat((amax.bfloat16().float(), torch.tensor(E4M3_BY_HAND[1:]) * 6.0))
        tie = (torch.tensor(E4M3_BY_HAND[1:]) + torch.tensor(E4M3_BY_HAND[:-1])) * 3.0
        amax = torch.cat((amax, tie))
        x = blocks_with_amax(amax, 16)
        q = formats.quantize(x.to(device), NVFP4, 1.0)
        want = e4m3_bytes(amax.numpy().astype(np.float64) / 6)
        assert_same_bits(q.sf.view(torch.uint8).cpu().flatten().numpy(), want)

    def test_global_scale_of_is_what_quantize_uses(self, device):
        x = (torch.randn(9, 64) * torch.exp2(torch.arange(-40.0, 50.0, 10.0))[:, None]).to(device)
        x[3, 5] = float("inf")
        g = formats.global_scale_of(formats.finite_amax(x))
        assert torch.equal(g, formats.quantize(x, NVFP4).global_scale)

    def test_saturated_blocks(self, device):
        amax = torch.tensor([1.0, 448 * 6, 464 * 6, 470 * 6, 1e9, 0.0])
        x = blocks_with_amax(amax, 16).to(device)
        assert formats.saturated_blocks(x, torch.ones((), device=device)).item() == 2
        assert formats.quantize(x, NVFP4, 1.0).sf.float().flatten()[4].item() == 448


@pytest.mark.parametrize("device", DEVICES)
class TestTables:
    def test_all_e4m3_bytes(self, device):
        data = torch.arange(256).to(torch.uint8)
        got = decode(
            data.view(torch.float8_e4m3fn), torch.full((8,), 127, dtype=torch.uint8), device
        )
        by_hand = [*E4M3_BY_HAND, np.nan]
        by_hand = np.array(by_hand + [-v for v in by_hand], np.float32)
        np.testing.assert_array_equal(got, by_hand)
        np.testing.assert_array_equal(got, data.numpy().view(ml_dtypes.float8_e4m3fn).astype("f4"))
        want = data.clone()
        want[255] = 0x7F
        # each byte beside a 448, so that the block's scale is 1
        blocks = torch.from_numpy(by_hand)[:, None].expand(256, 32).clone()
        blocks[:, 0] = 448.0
        kept = formats.quantize(blocks.to(device), MXFP8)
        assert torch.equal(kept.data.view(torch.uint8)[:, 1].cpu(), want)

    def test_all_e8m0_bytes(self, device):
        sf = torch.arange(256).to(torch.uint8)
        got = decode(torch.ones(256 * 32).to(torch.float8_e4m3fn), sf, device)
        want = np.append(2.0 ** np.arange(-127.0, 128.0), np.nan).astype(np.float32)
        np.testing.assert_array_equal(got.reshape(256, 32), np.repeat(want[:, None], 32, 1))

    def test_all_e2m1_codes_with_all_scales(self, device):
        codes = torch.arange(16).to(torch.uint8).repeat(256)
        sf = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
        q = BlockScaled(NVFP4, formats.pack_e2m1(codes), sf, torch.tensor(0.375))
        assert torch.equal(formats.unpack_e2m1(q.data), codes)
        got = formats.dequantize(q.to(device)).cpu().view(256, 16).numpy()
        scale = np.array([*E4M3_BY_HAND, np.nan], np.float32)
        scale = np.concatenate((scale, -scale))[:, None]
        want = np.array(E2M1_BY_HAND, np.float32)[None] * scale * np.float32(0.375)
        np.testing.assert_array_equal(got, want)
        packed = codes[:16].numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        np.testing.assert_array_equal(packed, np.array(E2M1_BY_HAND, np.float32))

    @pytest.mark.parametrize("fmt", [MXFP8, NVFP4], ids=lambda f: f.name)
    def test_every_rounding_boundary(self, fmt, device):
        """All midpoints between neighbours, and both their fp32 neighbours, at block scale 1."""
        table = np.array(E4M3_BY_HAND if fmt is MXFP8 else E2M1_BY_HAND[:8], np.float32)
        middle = (table[1:] + table[:-1]) / 2
        points = [
            np.nextafter(middle, np.float32(0)),
            middle,
            np.nextafter(middle, np.float32(1e9)),
        ]
        values = np.concatenate([*points, table])
        values = np.concatenate((values, -values))
        x = torch.from_numpy(values)[:, None].repeat(1, fmt.sf_block)
        x[:, 0] = float(table[-1])
        q = assert_quantizes(x, fmt, device, torch.ones(()) if fmt is NVFP4 else None)
        code = q.data.view(torch.uint8)[:, 1].numpy()
        code = code if fmt is MXFP8 else code & 15
        sign = np.signbit(values).astype(np.uint8) << (fmt.bits - 1)
        np.testing.assert_array_equal(code, nearest(list(table), np.abs(values)) | sign)


def decode(data: torch.Tensor, sf: torch.Tensor, device: str) -> np.ndarray:
    return formats.dequantize(BlockScaled(MXFP8, data, sf).to(device)).cpu().numpy()


def fold_by_hand(data: np.ndarray, sf: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """One row, element by element: data bytes [K], sf [K // 32]."""
    blocks = group // 32
    out_sf = [
        max((int(b) for b in sf[i : i + blocks] if b != 255), default=0)
        for i in range(0, len(sf), blocks)
    ]
    out = np.empty_like(data)
    for k, byte in enumerate(data):
        value = np.nan if byte & 0x7F == 0x7F else E4M3_BY_HAND[byte & 0x7F]
        value = -value if byte >> 7 else value
        block = int(sf[k // 32])
        value = np.nan if block == 255 else value * 2.0 ** (block - out_sf[k // group])
        out[k] = e4m3_bytes(np.array([value]))[0]
    return out, np.array(out_sf, np.uint8)


@pytest.mark.parametrize("device", DEVICES)
class TestFold:
    @pytest.mark.parametrize("group", [None, 32, 128, 64])
    def test_any_bytes(self, device, group):
        k = 160  # 1.25 groups of 128
        data = torch.randint(256, (6, k)).to(torch.uint8)
        sf = torch.randint(100, 125, (6, 5)).to(torch.uint8)
        sf[1, 2], sf[2], sf[3, 0], sf[4, 1] = 255, 255, 0, 254
        q = BlockScaled(MXFP8, data.view(torch.float8_e4m3fn), sf).to(device)
        folded = formats.fold(q, group)
        assert folded.shape == (6, k)
        for row in range(6):
            want, want_sf = fold_by_hand(data[row].numpy(), sf[row].numpy(), group or k)
            assert_same_bits(folded.data[row].view(torch.uint8).cpu().numpy(), want)
            assert_same_bits(folded.sf[row].cpu().numpy(), want_sf)

    @pytest.mark.parametrize("group", [None, 128])
    def test_exact_without_subnormals(self, device, group):
        x = torch.sign(torch.randn(4, 3, 256)) * (1 + torch.rand(4, 3, 256))
        x = x * torch.exp2(torch.randint(-2, 3, (4, 3, 8)).float()).repeat_interleave(32, -1)
        q = formats.quantize(x.to(device), MXFP8)
        folded = formats.fold(q, group)
        assert torch.equal(formats.dequantize(folded), formats.dequantize(q))
        assert not formats.fold_loss(q, folded).any()

    def test_loss_is_the_error_of_each_block(self, device):
        x = torch.randn(5, 256) * torch.exp2(torch.randint(-14, 1, (5, 8))).repeat_interleave(32, 1)
        x[0, 32:64] = 0
        q = formats.quantize(x.to(device), MXFP8)
        folded = formats.fold(q)
        loss = formats.fold_loss(q, folded).cpu()
        want, got = (formats.dequantize(t).cpu().double().view(5, 8, 32) for t in (q, folded))
        ratio = ((got - want).norm(dim=-1) / want.norm(dim=-1)).nan_to_num(nan=0.0)
        torch.testing.assert_close(loss.double(), ratio, rtol=1e-5, atol=1e-9)
        assert loss.max() > 0.01
        assert loss[0, 1] == 0

    def test_far_block_is_lost_whole(self, device):
        x = torch.ones(1, 64)
        x[0, 32:] = 1e-30
        q = formats.quantize(x.to(device), MXFP8)
        assert formats.fold_loss(q, formats.fold(q)).cpu().tolist() == [[0.0, 1.0]]

    def test_gaussian_weights_lose_almost_nothing(self, device):
        q = formats.quantize((torch.randn(64, 2048) * 0.02).to(device), MXFP8)
        got, want = formats.dequantize(formats.fold(q)), formats.dequantize(q)
        assert (got - want).norm() / want.norm() < 1.4e-5

    def test_zero_rows(self, device):
        q = formats.quantize(torch.zeros(0, 64, device=device), MXFP8)
        folded = formats.fold(q)
        assert formats.dequantize(folded).shape == (0, 64)
        assert formats.fold_loss(q, folded).shape == (0, 2)


E4M3, U8 = torch.float8_e4m3fn, torch.uint8


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"data": None}, "nvfp4 data: expected a torch.Tensor, got NoneType"),
            ({"sf": None}, "nvfp4 sf: expected a torch.Tensor, got NoneType"),
            ({"sf": [1.0]}, "nvfp4 sf: expected a torch.Tensor, got list"),
            ({"global_scale": 0.5}, "global_scale: expected a torch.Tensor, got float; convert"),
        ],
        ids=str,
    )
    def test_what_is_no_tensor(self, change, match):
        q = formats.quantize(torch.ones(4, 64), "nvfp4")
        parts = {"data": q.data, "sf": q.sf, "global_scale": q.global_scale, **change}
        with pytest.raises(TypeError, match=match):
            BlockScaled(NVFP4, **parts)
        with pytest.raises(TypeError, match="quantize: x: expected a torch.Tensor, got list"):
            formats.quantize([1.0], "nvfp4")

    @pytest.mark.parametrize(
        ("fmt", "data", "sf", "scale", "error", "match"),
        [
            (MXFP8, (U8, 4, 64), (U8, 4, 2), None, TypeError, "data: expected torch.float8"),
            (MXFP8, (E4M3, 4, 64), (E4M3, 4, 2), None, TypeError, "sf: expected torch.uint8"),
            (MXFP8, (E4M3, 4, 64), (torch.float32, 4, 2), None, TypeError, "sf: expected"),
            (NVFP4, (U8, 4, 32), (U8, 4, 4), (), TypeError, "sf: expected torch.float8"),
            (MXFP8, (E4M3, 4, 64), (U8, 4, 4), None, ValueError, "sf: expected shape"),
            (MXFP8, (E4M3, 4, 64), (U8, 128, 4), None, ValueError, "sf: expected shape"),
            (MXFP8, (E4M3, 4, 48), (U8, 4, 1), None, ValueError, "multiple of 32, got 48"),
            (NVFP4, (U8, 4, 4), (E4M3, 4, 0), (), ValueError, "multiple of 16, got 8"),
            (NVFP4, (U8, 4, 32), (E4M3, 4, 4), None, ValueError, "global_scale .*got None"),
            (NVFP4, (U8, 4, 32), (E4M3, 4, 4), (3,), ValueError, "broadcasts to"),
            (NVFP4, (U8, 4, 32), (E4M3, 4, 4), (1, 4), ValueError, "broadcasts to"),
            (MXFP8, (E4M3, 4, 64), (U8, 4, 2), (), ValueError, "no global_scale"),
        ],
    )
    def test_block_scaled(self, fmt, data, sf, scale, error, match):
        data, sf = (torch.zeros(shape).to(dtype) for dtype, *shape in (data, sf))
        scale = None if scale is None else torch.ones(scale)
        with pytest.raises(error, match=match):
            BlockScaled(fmt, data, sf, scale)

    def test_layout(self):
        with pytest.raises(ValueError, match="expected \"linear\", got 'swizzled'"):
            BlockScaled(MXFP8, torch.zeros(64).to(E4M3), torch.zeros(2).to(U8), None, "swizzled")

    def test_e8m0_dtype_is_viewed_as_bytes(self):
        sf = torch.full((2,), 3, dtype=U8).view(torch.float8_e8m0fnu)
        assert BlockScaled(MXFP8, torch.zeros(64).to(E4M3), sf).sf.tolist() == [3, 3]

    @pytest.mark.parametrize(
        ("x", "fmt", "scale", "error"),
        [
            (torch.zeros(4, 40), "mxfp8", None, ValueError),
            (torch.zeros(4, 40), "nvfp4", None, ValueError),
            (torch.zeros(4, 0), "mxfp8", None, ValueError),
            (torch.zeros(()), "mxfp8", None, ValueError),
            (torch.zeros(4, 32), "fp8", None, ValueError),
            (torch.zeros(4, 32), "mxfp8", 1.0, ValueError),
            (torch.zeros(4, 32), "nvfp4", torch.ones(5), ValueError),
            (torch.zeros(4, 32), "nvfp4", torch.ones(4, dtype=torch.float64), TypeError),
            (torch.zeros(4, 32, dtype=torch.int32), "mxfp8", None, TypeError),
            (torch.zeros(4, 32), None, None, TypeError),
        ],
    )
    def test_quantize(self, x, fmt, scale, error):
        with pytest.raises(error):
            formats.quantize(x, fmt, scale)

    def test_fold(self):
        with pytest.raises(ValueError, match="power-of-two"):
            formats.fold(formats.quantize(torch.ones(1, 64), NVFP4))
        with pytest.raises(ValueError, match="multiple of 32"):
            formats.fold(formats.quantize(torch.ones(1, 64), MXFP8), 48)


def test_requires_grad_is_ignored():
    q = formats.quantize(torch.ones(1, 32, requires_grad=True), "mxfp8")
    assert not formats.dequantize(q).requires_grad


@pytest.mark.parametrize(
    ("fmt", "want"), [(MXFP8, 2.65e-2), (NVFP4, 9.5e-2)], ids=["mxfp8", "nvfp4"]
)
def test_error_on_gaussian_data(fmt, want):
    x = torch.randn(256, 2048)
    error = (formats.dequantize(formats.quantize(x, fmt)) - x).norm() / x.norm()
    assert error.item() == pytest.approx(want, rel=0.02)


def test_poison_fills_bytes(poison):
    values, packed = torch.zeros(3, 4), torch.zeros(5, dtype=torch.uint8)
    poison(values, packed)
    assert values.isnan().all()
    assert packed.eq(255).all()
