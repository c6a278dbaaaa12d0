"""MXFP8 and NVFP4 as data: the block-scaled operand, and the definition of its numbers.

Kernels match ``quantize`` bit for bit. Every step is one IEEE fp32 operation or integer arithmetic
on fp32 bits, so that CPU, GPU and a kernel agree. ``rn`` is an fp32 rounding to nearest even; ``x``
is the element, rounded to fp32 if it was wider, and ``bits`` are its bits.

MXFP8, per 32 elements:

1. ``m`` = the largest ``bits & 0x7FFFFFFF`` below 0x7F800000 in the block, 0 if there is none
   (the largest finite magnitude, amax)
2. ``byte = max(0, ((m + 0x1FFFFF) >> 23) - 8)``, which is ceil(log2(amax / 448)) + 127; at most 247
3. ``inv`` = the float with bits ``(254 - byte) << 23``: 2^(127 - byte), always normal
4. ``element = e4m3(x * inv)``: to nearest even, saturating to +-448 (+-Inf too); NaN becomes 0x7F
   whatever its sign (``cvt.rn.satfinite.e4m3x2.f32``). The product must not flush denormals.

NVFP4, per 16 elements:

1. ``m`` and ``amax`` as above, per block and, where no global scale is given, per row
2. row:   ``g = rn(amax_row * INV_2688)``, 0 if that is below 2^-112 (a given ``g`` stays as it is)
3. row:   ``rg = 0 if g < 2^-112 else rn(1 / g)``
4. block: ``t = rn(rn(amax * rg) * INV_6)``; ``s = e4m3(t)`` to nearest even, saturating to 448;
   0x7F (NaN) if any element is NaN
5. block: ``r = 0 if s == 0 else rn(rg * rn(1 / s))``
6. ``v = rn(x * r)``; ``code = sign(v) << 3 | e2m1(|v|)`` to nearest even, saturating to 6 (+-Inf
   too); v = NaN gives code 7

E2M1 has no NaN, hence the NaN scale: the block decodes to NaN (its codes are all 7) and its
neighbours are untouched. +-Inf becomes +-6 times the scale of the block's finite elements. A block
whose scale rounds to zero, and a row whose g is below 2^-112, become zeros with their signs kept.
That floor keeps ``r`` finite and, for g below 2^117, results the same where denormals are flushed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from moe_ep_jit.problem import check

#: fp32(1 / 6), fp32(1 / (6 * 448)), and the smallest global scale that gives more than zeros.
INV_6 = 11184811 * 2.0**-26
INV_2688 = 12782641 * 2.0**-35
MIN_GLOBAL_SCALE = 2.0**-112

#: E2M1's magnitudes by code; bit 3 of a code is the sign.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_E4M3 = torch.float8_e4m3fn
_E4M3_MAX = 448.0
_INF_BITS = 0x7F800000
#: Elements that one step of a chunked loop works on: in cache on a CPU, enough to fill a GPU.
_CPU_CHUNK = 1 << 20
_GPU_CHUNK = 1 << 25


@dataclass(frozen=True)
class Format:
    """A number format: ``bits`` an element, a scale of ``sf_dtype`` per ``sf_block`` along K."""

    name: str
    bits: int
    sf_block: int
    sf_dtype: torch.dtype
    has_global_scale: bool


#: E4M3 elements; a scale is a UE8M0 byte b, 2^(b - 127), 255 is NaN.
MXFP8 = Format("mxfp8", 8, 32, torch.uint8, False)
#: E2M1 elements, two a byte; E4M3 scales; an fp32 second-level scale.
NVFP4 = Format("nvfp4", 4, 16, torch.float8_e4m3fn, True)
BY_NAME = {"mxfp8": MXFP8, "nvfp4": NVFP4}


@dataclass(frozen=True, eq=False)
class BlockScaled:
    """A quantized tensor of logical shape [..., K].

    data          MXFP8: float8_e4m3fn [..., K]
                  NVFP4: uint8 [..., K // 2], the even k in the low nibble
    sf            MXFP8: uint8 [..., K // 32], UE8M0 (float8_e8m0fnu is viewed as bytes)
                  NVFP4: float8_e4m3fn [..., K // 16]
    global_scale  NVFP4 only: fp32, any shape that broadcasts to [...];
                  an element is e2m1 * sf * global_scale
    sf_layout     order of ``sf`` in memory: "linear" (row-major, as its shape says), no other yet

    Raises ``TypeError`` for a wrong dtype, ``ValueError`` for a wrong shape, device or layout.
    """

    format: Format
    data: torch.Tensor
    sf: torch.Tensor
    global_scale: torch.Tensor | None = None
    sf_layout: str = "linear"

    def __post_init__(self) -> None:
        fmt = _format(self.format)
        object.__setattr__(self, "format", fmt)
        check(
            self.sf_layout == "linear",
            f'sf_layout: expected "linear", got {self.sf_layout!r}; '
            f"unswizzle the scales to [..., K // {fmt.sf_block}] first",
        )
        data, sf = self.data, self.sf
        _check_tensor(f"{fmt.name} data", data)
        _check_tensor(f"{fmt.name} sf", sf)
        if fmt is NVFP4 and data.dtype == getattr(torch, "float4_e2m1fn_x2", None):
            data = data.view(torch.uint8)
        if fmt is MXFP8 and sf.dtype == getattr(torch, "float8_e8m0fnu", None):
            sf = sf.view(torch.uint8)
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "sf", sf)
        _check_dtype(f"{fmt.name} data", data, torch.uint8 if fmt is NVFP4 else _E4M3)
        _check_dtype(f"{fmt.name} sf", sf, fmt.sf_dtype)
        check(data.dim() >= 1, f"{fmt.name} data: expected at least one dimension, got a scalar")
        _check_blocks(f"{fmt.name} data", self.shape[-1], fmt)
        want = (*self.shape[:-1], self.shape[-1] // fmt.sf_block)
        check(
            tuple(sf.shape) == want,
            f"{fmt.name} sf: expected shape {want} for data of logical shape "
            f"{tuple(self.shape)}, got {tuple(sf.shape)}; pass linear, unpadded scales",
        )
        check(
            sf.device == data.device, f"{fmt.name} sf: expected on {data.device}, got {sf.device}"
        )
        if fmt.has_global_scale:
            check(
                self.global_scale is not None,
                f"{fmt.name}: expected a global_scale (fp32), got None; "
                "pass torch.ones(()) if the data has none",
            )
            _check_global_scale(self.global_scale, self.shape[:-1], data.device)
        else:
            check(
                self.global_scale is None,
                f"{fmt.name}: expected no global_scale, got one; fold it into sf",
            )

    @property
    def shape(self) -> torch.Size:
        """The logical shape [..., K] in elements."""
        per_byte = 8 // self.format.bits
        return torch.Size((*self.data.shape[:-1], self.data.shape[-1] * per_byte))

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        tensors = [t for t in (self.data, self.sf, self.global_scale) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)

    def to(self, device: torch.device | str) -> BlockScaled:
        """The same operand on ``device``."""
        scale = None if self.global_scale is None else self.global_scale.to(device)
        return replace(self, data=self.data.to(device), sf=self.sf.to(device), global_scale=scale)


@dataclass(frozen=True, eq=False)
class FoldedMXFP8:
    """MXFP8 with its scales folded along K.

    data   float8_e4m3fn [..., K]
    sf     uint8 [..., ceil(K / group)], UE8M0
    group  elements that share a scale
    """

    data: torch.Tensor
    sf: torch.Tensor
    group: int

    @property
    def shape(self) -> torch.Size:
        return self.data.shape


def quantize(
    x: torch.Tensor, fmt: Format | str, global_scale: torch.Tensor | float | None = None
) -> BlockScaled:
    """x [..., K] of any float type -> BlockScaled [..., K], in blocks along K, on x's device.

    fmt           MXFP8 or NVFP4 (or its name); K must be a multiple of its block
    global_scale  NVFP4 only: fp32, broadcastable to x.shape[:-1], used as given (static);
                  None: amax / (6 * 448) of each row (dynamic)

    The module's docstring has the exact arithmetic. Never synchronises; works in chunks, so that
    temporaries stay small.
    Raises ``TypeError`` (x or global_scale of a wrong type) or ``ValueError`` (shape, device).
    """
    fmt = _format(fmt)
    _check_tensor("quantize: x", x)
    if not x.is_floating_point():
        raise TypeError(f"quantize: expected a floating-point x, got {x.dtype}; convert it first")
    check(x.dim() >= 1, "quantize: expected x of at least one dimension, got a scalar")
    _check_blocks("quantize: x", x.shape[-1], fmt)
    x = x.detach()
    leading, k = x.shape[:-1], x.shape[-1]
    rows = leading.numel()
    sf = torch.empty(rows, k // fmt.sf_block, dtype=torch.uint8, device=x.device)
    if fmt is MXFP8:
        check(global_scale is None, "quantize: mxfp8 takes no global_scale; leave it None")
        data = torch.empty(rows, k, dtype=torch.uint8, device=x.device)
        for first, part in _row_chunks(x):
            piece = slice(first, first + len(part))
            data[piece], sf[piece] = _quantize_mxfp8(part)
        return BlockScaled(fmt, data.view(_E4M3).view(x.shape), sf.view(*leading, k // 32))

    data = torch.empty(rows, k // 2, dtype=torch.uint8, device=x.device)
    if global_scale is None:
        g = torch.empty(rows, dtype=torch.float32, device=x.device)
        stored = g.view(leading)
    else:
        if isinstance(global_scale, (int, float)):
            global_scale = torch.tensor(global_scale, dtype=torch.float32, device=x.device)
        _check_global_scale(global_scale, leading, x.device)
        stored = global_scale.detach()
        g = stored.expand(leading).reshape(rows)
    for first, part in _row_chunks(x):
        piece = slice(first, first + len(part))
        part = part.float().contiguous()
        amax, has_nan = _finite_amax(part, fmt.sf_block)
        if global_scale is None:
            g[piece] = global_scale_of(amax.amax(-1))
        data[piece], sf[piece] = _quantize_nvfp4(part, amax, has_nan, g[piece])
    return BlockScaled(
        fmt, data.view(*leading, k // 2), sf.view(_E4M3).view(*leading, k // 16), stored
    )


def dequantize(q: BlockScaled | FoldedMXFP8) -> torch.Tensor:
    """q of logical shape [..., K] -> fp32 [..., K].

    MXFP8: e4m3 * 2^(byte - 127), exact but where fp32 overflows.
    NVFP4: e2m1 * sf (exact), times global_scale, rounded once.
    """
    out = torch.empty(q.shape, dtype=torch.float32, device=q.data.device)
    k = q.shape[-1]
    flat, data, sf = (
        out.view(-1, k),
        q.data.reshape(-1, q.data.shape[-1]),
        q.sf.reshape(-1, q.sf.shape[-1]),
    )
    if isinstance(q, FoldedMXFP8):
        for piece in _slices(flat):
            scale = _e8m0(sf[piece]).repeat_interleave(q.group, -1)[:, :k]
            torch.mul(data[piece].float(), scale, out=flat[piece])
    elif q.format is MXFP8:
        for piece in _slices(flat):
            scale = _e8m0(sf[piece]).unsqueeze(-1)
            torch.mul(_blocks(data[piece].float(), 32), scale, out=_blocks(flat[piece], 32))
    else:
        g = q.global_scale.expand(q.shape[:-1]).reshape(-1)
        pairs = _e2m1_pairs(out.device)
        for piece in _slices(flat):
            values = pairs.index_select(0, data[piece].int().flatten()).view(-1, k // 16, 16)
            values.mul_(sf[piece].float().unsqueeze(-1))
            torch.mul(values.view(-1, k), g[piece].unsqueeze(-1), out=flat[piece])
    return out


def global_scale_of(amax: torch.Tensor) -> torch.Tensor:
    """amax fp32 of any shape -> NVFP4's second-level scale, amax / (6 * 448), of the same shape.

    ``amax`` is the largest finite magnitude (``finite_amax``). A scale below 2^-112 becomes 0, and
    the data quantizes to zeros.
    """
    g = amax * INV_2688
    return torch.where(g < MIN_GLOBAL_SCALE, 0.0, g)


def finite_amax(x: torch.Tensor) -> torch.Tensor:
    """x [..., K] of any float type -> fp32 [...]: largest finite magnitude of a row, else 0."""
    out = torch.empty(x.shape[:-1].numel(), dtype=torch.float32, device=x.device)
    for first, part in _row_chunks(x.detach()):
        out[first : first + len(part)] = _finite_amax(part.float(), x.shape[-1])[0].squeeze(-1)
    return out.view(x.shape[:-1])


def saturated_blocks(x: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """Blocks of x [..., K] whose NVFP4 scale saturates under a given global_scale, int64 scalar.

    That is t > 464 in step 4: what E4M3 would round above its largest number, 448.
    """
    count = torch.zeros((), dtype=torch.int64, device=x.device)
    g = global_scale.expand(x.shape[:-1]).reshape(-1)
    for first, part in _row_chunks(x.detach()):
        amax, _ = _finite_amax(part.float(), 16)
        rg = _inverse_global_scale(g[first : first + len(part)])
        count += ((amax * rg.unsqueeze(-1)) * INV_6 > 464.0).sum()
    return count


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """E2M1 codes 0..15, uint8 [..., K] -> uint8 [..., K // 2], the even k in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(data: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K // 2] -> E2M1 codes 0..15, uint8 [..., K]."""
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def fold(q: BlockScaled, group: int | None = None) -> FoldedMXFP8:
    """MXFP8 [..., K] -> one scale per ``group`` elements of K (None: per row), as FP8 MMAs want it.

    A group takes the largest scale byte of its blocks. An element becomes
    e4m3(data * 2^(block byte - group byte)) to nearest even, which is exact unless it falls among
    E4M3's subnormals; NaN becomes 0x7F. A block of byte 255 (NaN) takes no part in the maximum and
    becomes NaN elements.
    """
    check(
        q.format is MXFP8,
        f"fold: expected mxfp8, got {q.format.name}; only power-of-two scales fold",
    )
    k = q.shape[-1]
    group = k if group is None else group
    check(
        group > 0 and group % 32 == 0,
        f"fold: expected a group that is a multiple of 32, got {group}",
    )
    data, sf = q.data.reshape(-1, k), q.sf.reshape(-1, k // 32)
    is_nan = sf == 255
    finite = sf.masked_fill(is_nan, 0)
    per_group = group // 32
    num_groups = -(-sf.shape[1] // per_group)
    padded = torch.nn.functional.pad(finite, (0, num_groups * per_group - sf.shape[1]))
    group_sf = padded.view(-1, num_groups, per_group).amax(-1)
    # 448 * 2^-19 rounds to zero already; a bounded shift keeps the factor a normal float
    shift = _shift_of(finite, group_sf, per_group)
    factor = ((127 - shift) << 23).view(torch.float32).masked_fill_(is_nan, float("nan"))
    out = torch.empty(data.shape, dtype=torch.uint8, device=data.device)
    for piece in _slices(data):
        values = _blocks(data[piece].float(), 32) * factor[piece].unsqueeze(-1)
        out[piece] = _to_e4m3(values).view(-1, k)
    return FoldedMXFP8(
        out.view(_E4M3).view(q.shape), group_sf.view(*q.shape[:-1], num_groups), group
    )


def fold_loss(q: BlockScaled, folded: FoldedMXFP8) -> torch.Tensor:
    """Relative L2 error that folding added to each block of q, fp32 [..., K // 32].

    0 for a block of zeros; NaN elements count nothing.
    """
    k = q.shape[-1]
    data, sf = q.data.reshape(-1, k), q.sf.reshape(-1, k // 32)
    after = folded.data.reshape(-1, k)
    shift = _shift_of(
        sf.masked_fill(sf == 255, 0), folded.sf.reshape(-1, folded.sf.shape[-1]), folded.group // 32
    )
    undo = ((127 + shift) << 23).view(torch.float32)
    loss = torch.empty(sf.shape, dtype=torch.float32, device=sf.device)
    for piece in _slices(data):
        # in units of the block's own scale, so that no power of two over- or underflows
        want = _blocks(data[piece].float(), 32).nan_to_num_(nan=0.0)
        got = _blocks(after[piece].float(), 32).nan_to_num_(nan=0.0) * undo[piece].unsqueeze(-1)
        got.masked_fill_((sf[piece] == 255).unsqueeze(-1), 0)
        want.masked_fill_((sf[piece] == 255).unsqueeze(-1), 0)
        norm = want.norm(dim=-1)
        loss[piece] = torch.where(
            norm > 0, (got - want).norm(dim=-1) / norm.clamp(min=2.0**-10), 0.0
        )
    return loss.view(q.sf.shape)


def _quantize_mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, K] -> E4M3 bytes [rows, K], scale bytes [rows, K // 32]."""
    x = x.float().contiguous()
    amax, _ = _finite_amax(x, 32)
    byte = (((amax.view(torch.int32) + 0x1FFFFF) >> 23) - 8).clamp_(min=0)
    inv = ((254 - byte) << 23).view(torch.float32)
    values = _blocks(x, 32) * inv.unsqueeze(-1)
    return _to_e4m3(values).view(x.shape), byte.to(torch.uint8)


def _quantize_nvfp4(
    x: torch.Tensor, amax: torch.Tensor, has_nan: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x fp32 [rows, K], amax and has_nan [rows, K // 16], g [rows]
    -> packed codes [rows, K // 2], scale bytes [rows, K // 16]."""
    rg = _inverse_global_scale(g).unsqueeze(-1)
    scale = _to_e4m3((amax * rg) * INV_6).masked_fill_(has_nan, 0x7F)
    s = scale.view(_E4M3).float()
    r = torch.where(s == 0, 0.0, rg * s.reciprocal())
    v = (_blocks(x, 16) * r.unsqueeze(-1)).view(x.shape)
    v.nan_to_num_(nan=6.0, posinf=6.0, neginf=-6.0)
    sign = (v.view(torch.int32) >> 28).bitwise_and_(8)
    a = v.abs_().clamp_(max=6.0)
    # a + 1.5 * 2^23 * step rounds a to n steps of 2^(e - 1), ties to even n; n is in the low bits
    e = (a.view(torch.int32) >> 23).clamp_(min=127).sub_(127)
    magic = ((e + 149) << 23).bitwise_or_(0x400000).view(torch.float32)
    n = a.add_(magic).view(torch.int32).bitwise_and_(7)
    codes = n.add_(e, alpha=2).bitwise_or_(sign)
    pairs = codes.view(torch.int64)
    return (pairs | (pairs >> 28)).bitwise_and_(0xFF).to(torch.uint8), scale


def _inverse_global_scale(g: torch.Tensor) -> torch.Tensor:
    return torch.where(g < MIN_GLOBAL_SCALE, 0.0, g.reciprocal())


def _finite_amax(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x fp32 [rows, K] -> per block: largest finite magnitude (fp32), is any element NaN (bool)."""
    bits = _blocks(x.contiguous(), block).view(torch.int32) & 0x7FFFFFFF
    has_nan = bits.amax(-1) > _INF_BITS
    bits.masked_fill_(bits >= _INF_BITS, 0)
    return bits.amax(-1).view(torch.float32), has_nan


def _to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """fp32 -> E4M3 bytes: to nearest even, saturating, NaN as 0x7F. Overwrites ``values``."""
    out = values.clamp_(-_E4M3_MAX, _E4M3_MAX).to(_E4M3).view(torch.uint8)
    return out.masked_fill_(out == 0xFF, 0x7F)


def _e8m0(sf: torch.Tensor) -> torch.Tensor:
    """UE8M0 bytes -> fp32 2^(byte - 127); 255 is NaN."""
    bits = sf.int() << 23
    bits.masked_fill_(sf == 0, 0x00400000)
    return bits.masked_fill_(sf == 255, 0x7FC00000).view(torch.float32)


def _e2m1_pairs(device: torch.device) -> torch.Tensor:
    """fp32 [256, 2]: the two values of each packed byte."""
    values = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=torch.float32)
    byte = torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), -1).to(device)


def _shift_of(sf: torch.Tensor, group_sf: torch.Tensor, per_group: int) -> torch.Tensor:
    """int32 [rows, blocks]: how far each block's byte is below its group's, at most 40."""
    wide = group_sf.repeat_interleave(per_group, -1)[:, : sf.shape[1]]
    return (wide.int() - sf.int()).clamp_(max=40)


def _blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """[rows, K] -> [rows, K // block, block], a view."""
    return x.view(x.shape[0], x.shape[1] // block, block)


def _chunk_rows(x: torch.Tensor) -> int:
    return max(1, (_GPU_CHUNK if x.is_cuda else _CPU_CHUNK) // x.shape[-1])


def _slices(x: torch.Tensor) -> Iterator[slice]:
    """Slices of x's rows of one chunk each."""
    rows = _chunk_rows(x)
    return (slice(first, first + rows) for first in range(0, x.shape[0], rows))


def _row_chunks(x: torch.Tensor, first: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
    """x [..., K] -> (first row, [rows, K] view) pieces of one chunk, without copying x whole."""
    try:
        flat = x.view(-1, x.shape[-1])
    except RuntimeError:
        # strides that no two-dimensional view has: one outer index after the other
        for index, part in enumerate(x):
            yield from _row_chunks(part, first + index * part.shape[:-1].numel())
        return
    for piece in _slices(flat):
        yield first + piece.start, flat[piece]


def _format(fmt: Format | str) -> Format:
    if isinstance(fmt, str):
        check(fmt in BY_NAME, f'format: expected "mxfp8" or "nvfp4", got {fmt!r}')
        return BY_NAME[fmt]
    if fmt not in (MXFP8, NVFP4):
        raise TypeError(f"format: expected formats.MXFP8 or formats.NVFP4, got {fmt!r}")
    return MXFP8 if fmt == MXFP8 else NVFP4


def check_rows(name: str, rows: torch.Tensor, num_rows: int) -> None:
    """ValueError unless 16-byte accesses can walk the rows of a tensor called ``name``."""
    if num_rows == 0:
        return
    row_stride, stride = rows.stride()
    if stride != 1:
        raise ValueError(
            f"{name}: expected elements of a row next to each other (inner stride 1), got stride "
            f"{stride}; pass {name}.contiguous()"
        )
    if rows.data_ptr() % 16 or (num_rows > 1 and row_stride * rows.itemsize % 16):
        raise ValueError(
            f"{name}: expected rows on 16-byte boundaries (row stride a multiple of "
            f"{16 // rows.itemsize}), got address {rows.data_ptr():#x}, row stride {row_stride}; "
            f"pass {name}.clone(memory_format=torch.contiguous_format)"
        )


def _check_tensor(what: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{what}: expected a torch.Tensor, got {type(value).__name__}; convert it with "
            "torch.as_tensor"
        )


def _check_dtype(what: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise TypeError(
            f"{what}: expected {dtype}, got {tensor.dtype}; convert or view it as {dtype}"
        )


def _check_blocks(what: str, k: int, fmt: Format) -> None:
    check(
        k > 0 and k % fmt.sf_block == 0,
        f"{what}: expected a last dimension that is a positive multiple of {fmt.sf_block}, "
        f"got {k}; pad with zeros",
    )


def _check_global_scale(scale: torch.Tensor, leading: torch.Size, device: torch.device) -> None:
    _check_tensor("global_scale", scale)
    _check_dtype("global_scale", scale, torch.float32)
    fits = scale.dim() <= len(leading) and all(
        a in (1, b) for a, b in zip(reversed(scale.shape), reversed(leading), strict=False)
    )
    check(
        fits,
        f"global_scale: expected a shape that broadcasts to {tuple(leading)}, "
        f"got {tuple(scale.shape)}; reshape it, for example [experts] to [experts, 1]",
    )
    check(
        scale.device == device,
        f"global_scale: expected on {device}, got {scale.device}; move it there",
    )
