"""Emitters of the instructions that only compute: each turns one into an expression over arrays."""

from __future__ import annotations

from collections.abc import Callable

from moe_ep_jit.tools.emulator.codegen import Writer, kind_of
from moe_ep_jit.tools.emulator.ptx import TYPE_BYTES, Instruction

Emitter = Callable[[Writer, Instruction], None]

#: Where shared memory lies among generic addresses.
SHARED_WINDOW = 1 << 62

_PACKED = ("bf16x2", "f16x2", "u16x2", "s16x2")

#: Modifiers that change no value here: rounding to nearest is all there is.
_NEUTRAL = {"rn", "lo"}


def _split(i: Instruction, *modifiers: str) -> tuple[str, set[str]]:
    """(the last type of the opcode, its modifiers); UnsupportedError for an unknown one."""
    parts = i.parts[1:]
    if not parts or parts[-1] not in (*TYPE_BYTES, "bf16", *_PACKED):
        raise i.unsupported("type")
    found = set(parts[:-1])
    unknown = found - set(modifiers) - _NEUTRAL
    if unknown:
        raise i.unsupported(f"modifier {', '.join(sorted(unknown))}")
    return parts[-1], found


def _binary(symbol: str) -> Emitter:
    """add, sub: wrapping integers or IEEE floats."""

    def emit(w: Writer, i: Instruction) -> None:
        kind, _ = _split(i)
        if kind == "f16x2":
            # NumPy rounds a half's sum or product once, and keeps denormals.
            d, a, b = i.operands
            x, y = (f"{w.source(o, 'u32')}.view(f16)" for o in (a, b))
            w.destination(d, "u32", f"({x} {symbol} {y}).view(u32)")
            return
        if kind in (*_PACKED, "bf16", "f16"):
            raise i.unsupported("packed type")
        # Integers wrap alike with and without a sign.
        kind = kind_of(kind) if kind[0] == "f" else "u" + kind[1:]
        d, a, b = i.operands
        value = f"{w.source(a, kind)} {symbol} {w.source(b, kind)}"
        w.destination(d, kind, f"fl.canonical_nan({value})" if kind == "f32" else value)

    return emit


def _mul(w: Writer, i: Instruction) -> None:
    d, a, b = i.operands
    if i.parts[-1] == "bf16x2":
        _split(i)
        w.destination(d, "u32", f"fl.mul_bf16x2({w.source(a, 'u32')}, {w.source(b, 'u32')})")
        return
    kind, modifiers = _split(i, "wide", "hi")
    if "wide" in modifiers:
        narrow, wide = kind_of(kind), f"{kind_of(kind)[0]}{int(kind[1:]) * 2}"
        x, y = (f"{w.source(o, narrow)}.astype({wide})" for o in (a, b))
        w.destination(d, wide, f"{x} * {y}")
    elif "hi" in modifiers:
        kind = kind_of(kind)
        w.destination(d, kind, f"fl.multiply_high({w.source(a, kind)}, {w.source(b, kind)})")
    else:
        _binary("*")(w, i)


def _mad(w: Writer, i: Instruction) -> None:
    kind, modifiers = _split(i, "wide")
    d, a, b, c = i.operands
    if "wide" in modifiers:
        narrow, wide = kind_of(kind), f"{kind_of(kind)[0]}{int(kind[1:]) * 2}"
        x, y = (f"{w.source(o, narrow)}.astype({wide})" for o in (a, b))
        w.destination(d, wide, f"{x} * {y} + {w.source(c, wide)}")
        return
    if kind[0] == "f":
        raise i.unsupported("mad of floats")
    kind = "u" + kind[1:]
    x, y, z = (w.source(o, kind) for o in (a, b, c))
    w.destination(d, kind, f"{x} * {y} + {z}")


def _fma(w: Writer, i: Instruction) -> None:
    kind, _ = _split(i)
    if kind != "f32":
        raise i.unsupported("fma of this type")
    d, *rest = i.operands
    w.destination(d, "f32", f"fl.fma({', '.join(w.source(o, 'f32') for o in rest)})")


def _divide(w: Writer, i: Instruction) -> None:
    kind, _ = _split(i)
    kind = kind_of(kind)
    d, a, b = i.operands
    x, y = w.source(a, kind), w.source(b, kind)
    if kind[0] == "f":
        w.destination(d, kind, f"fl.canonical_nan({x} / {y})" if kind == "f32" else f"{x} / {y}")
    else:
        w.destination(d, kind, f"fl.divide_integers({x}, {y})")


def _remainder(w: Writer, i: Instruction) -> None:
    kind, _ = _split(i)
    kind = kind_of(kind)
    d, a, b = i.operands
    x, y = w.source(a, kind), w.source(b, kind)
    w.destination(d, kind, f"{x} - fl.divide_integers({x}, {y}) * {y}")


def _extreme(name: str) -> Emitter:
    """min, max."""

    def emit(w: Writer, i: Instruction) -> None:
        kind, modifiers = _split(i, "relu", "NaN")
        d, a, b = i.operands
        if kind in ("u16x2", "s16x2") and not modifiers:
            half = kind[0].replace("s", "i") + "16"
            x, y = (f"{w.source(o, 'u32')}.view({half})" for o in (a, b))
            w.destination(d, "u32", f"np.{name}({x}, {y}).view(u32)")
            return
        kind = kind_of(kind)
        x, y = w.source(a, kind), w.source(b, kind)
        if kind[0] == "f":
            # IEEE 754-2019's maximum lets a NaN win; plain min and max let it lose.
            function = f"np.{name}" if "NaN" in modifiers else f"fl.{name}"
            w.destination(d, kind, f"fl.canonical_nan({function}({x}, {y}))")
            return
        value = f"np.{name}({x}, {y})"
        if "relu" in modifiers:
            value = f"np.maximum({value}, {w.constant(kind, 0)})"
        w.destination(d, kind, value)

    return emit


def _negate(w: Writer, i: Instruction) -> None:
    kind, _ = _split(i)
    kind = kind_of(kind)
    d, a = i.operands
    w.destination(d, kind, f"-{w.source(a, kind)}")


def _absolute(w: Writer, i: Instruction) -> None:
    kind, _ = _split(i)
    kind = kind_of(kind)
    d, a = i.operands
    w.destination(d, kind, f"np.abs({w.source(a, kind)})")


def _bitwise(symbol: str) -> Emitter:
    def emit(w: Writer, i: Instruction) -> None:
        kind = kind_of(_split(i)[0])
        d, a, b = i.operands
        w.destination(d, kind, f"{w.source(a, kind)} {symbol} {w.source(b, kind)}")

    return emit


def _not(w: Writer, i: Instruction) -> None:
    kind = kind_of(_split(i)[0])
    d, a = i.operands
    w.destination(d, kind, f"~{w.source(a, kind)}")


def _shift(left: bool) -> Emitter:
    def emit(w: Writer, i: Instruction) -> None:
        kind = kind_of(_split(i)[0])
        d, a, count = i.operands
        x = w.source(a, kind)
        if count.kind == "imm" and 0 <= count.value < int(kind[1:]):
            value = f"{x} {'<<' if left else '>>'} {w.constant(kind, count.value)}"
        else:
            value = f"fl.shift({x}, {w.source(count, 'u32')}, {left})"
        w.destination(d, kind, value)

    return emit


_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
            "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}  # fmt: skip
_OPPOSITE = {"equ": "!=", "neu": "==", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}


def _set_predicate(w: Writer, i: Instruction) -> None:
    parts = i.parts[1:]
    compare, kind = parts[0], kind_of(parts[-1])
    combine = {"and": "&", "or": "|", "xor": "^"}.get(parts[1]) if len(parts) == 3 else None
    if len(parts) > 3 or (len(parts) == 3 and combine is None):
        raise i.unsupported("modifier")
    d, a, b, *more = i.operands
    if parts[-1][0] == "b":
        kind = "u" + parts[-1][1:]
    x, y = w.source(a, kind), w.source(b, kind)
    if compare in ("num", "nan"):
        value = f"({x} == {x}) & ({y} == {y})"
        value = f"({value})" if compare == "num" else f"~({value})"
    elif kind[0] == "f" and compare in _OPPOSITE:
        # Unordered comparisons hold where a NaN is: the negation of the ordered opposite, but for
        # equality, where NaN must hold both for equ and for neu.
        ordered = f"{x} {_OPPOSITE[compare]} {y}"
        value = f"~({ordered})"
        if compare == "equ":
            value = f"(~({ordered}) | ({x} != {x}) | ({y} != {y}))"
    elif kind[0] == "f" and compare == "ne":
        value = f"(({x} != {y}) & ({x} == {x}) & ({y} == {y}))"
    elif compare in _COMPARE:
        value = f"({x} {_COMPARE[compare]} {y})"
    else:
        raise i.unsupported("comparison")
    if d.kind == "pair":
        raise i.unsupported("two destinations")
    if combine:
        value = f"{value} {combine} {w.source(more[0], 'p')}"
    w.destination(d, "p", value)


def _select(w: Writer, i: Instruction) -> None:
    kind = kind_of(_split(i)[0])
    d, a, b, p = i.operands
    where = f"np.where({w.source(p, 'p')}, {w.source(a, kind)}, {w.source(b, kind)})"
    w.destination(d, kind, where)


def _popc(w: Writer, i: Instruction) -> None:
    kind = kind_of(_split(i)[0])
    d, a = i.operands
    w.destination(d, "u32", f"fl.popcount({w.source(a, kind)})")


def _lop3(w: Writer, i: Instruction) -> None:
    _split(i)
    d, a, b, c, table = i.operands
    x, y, z = (w.source(o, "u32") for o in (a, b, c))
    w.destination(d, "u32", f"fl.logic3({x}, {y}, {z}, {table.value})")


def _prmt(w: Writer, i: Instruction) -> None:
    _split(i)
    d, a, b, selector = i.operands
    if selector.kind != "imm":
        raise i.unsupported("selector in a register")
    x, y = w.source(a, "u32"), w.source(b, "u32")
    w.destination(d, "u32", f"fl.permute({x}, {y}, {selector.value})")


def _approximate(function: str) -> Emitter:
    def emit(w: Writer, i: Instruction) -> None:
        kind, modifiers = _split(i, "approx", "ftz")
        if kind != "f32":
            raise i.unsupported("type")
        d, a = i.operands
        value = w.source(a, "f32")
        if "ftz" in modifiers:
            w.destination(d, "f32", f"fl.canonical_nan(fl.flush(fl.{function}(fl.flush({value}))))")
        else:
            w.destination(d, "f32", f"fl.canonical_nan(fl.{function}({value}))")

    return emit


def _move(w: Writer, i: Instruction) -> None:
    if len(i.parts) != 2:
        raise i.unsupported("modifier")
    kind = kind_of(i.parts[1])
    kind = kind if kind == "p" else "u" + kind[1:]
    d, a = i.operands
    if d.kind == "vec":
        _unpack(w, i, kind)
    elif a.kind == "vec":
        part = f"u{int(kind[1:]) // len(a.value)}"
        width = int(part[1:])
        terms = [
            f"({w.source(o, part)}).astype({kind}) << {w.constant(kind, width * n)}"
            for n, o in enumerate(a.value)
        ]
        w.destination(d, kind, " | ".join(terms))
    elif a.kind == "imm":
        w.destination(d, kind, f"c.full({w.constant(kind, a.value)})")
    else:
        w.destination(d, kind, w.source(a, kind))


def _unpack(w: Writer, i: Instruction, kind: str) -> None:
    d, a = i.operands
    part = f"u{int(kind[1:]) // len(d.value)}"
    source = w.source(a, kind)
    for n, o in enumerate(d.value):
        if o.kind != "sink":
            shifted = f"({source} >> {w.constant(kind, int(part[1:]) * n)})" if n else source
            w.destination(o, part, f"{shifted}.astype({part})")


def _convert(w: Writer, i: Instruction) -> None:
    """cvt: integers of any width, and the floats of these kernels."""
    parts = i.parts[1:]
    to, source = parts[-2], parts[-1]
    modifiers = set(parts[:-2])
    d, *rest = i.operands
    packed = {
        ("bf16x2", "f32"): ("pack_bf16x2", "u32", {"rn"}),
        ("f16x2", "f32"): ("pack_f16x2", "u32", {"rn"}),
        ("e4m3x2", "f32"): ("pack_e4m3x2", "u16", {"rn", "satfinite"}),
        ("e2m1x2", "f32"): ("pack_e2m1x2", "u8", {"rn", "satfinite"}),
        ("e4m3x2", "f16x2"): ("f16x2_to_e4m3x2", "u16", {"rn", "satfinite"}),
    }.get((to, source))
    if packed:
        function, kind, needed = packed
        if modifiers != needed:
            raise i.unsupported("modifier")
        form = "u32" if source == "f16x2" else "f32"
        w.destination(d, kind, f"fl.{function}({', '.join(w.source(o, form) for o in rest)})")
        return
    (a,) = rest
    if (to, source) == ("f16x2", "e4m3x2"):
        w.destination(d, "u32", f"fl.e4m3x2_to_f16x2({w.source(a, 'u16')})")
    elif (to, source) == ("f32", "bf16") and not modifiers:
        w.destination(d, "f32", f"fl.bf16_to_f32({w.source(a, 'u16')})")
    elif (to, source) == ("bf16", "f32") and modifiers == {"rn"}:
        w.destination(d, "u16", f"fl.f32_to_bf16({w.source(a, 'f32')})")
    elif source[0] in "us" and to[0] in "us" and not modifiers - {"sat"}:
        if "sat" in modifiers:
            raise i.unsupported("saturating conversion")
        # Sign or zero extension is the source's matter, truncation nobody's.
        wide = f"{kind_of(source)[0]}{to[1:]}"
        w.destination(d, wide, f"({w.source(a, kind_of(source))}).astype({wide})")
    elif to[0] == "f" and source[0] in "fus" and not modifiers - {"rn"}:
        kind = kind_of(to)
        w.destination(d, kind, f"({w.source(a, kind_of(source))}).astype({kind})")
    else:
        raise i.unsupported("conversion")


def _convert_address(w: Writer, i: Instruction) -> None:
    """cvta: global and parameter addresses are generic ones; shared ones have a window of their
    own, through which nothing is loaded.
    """
    parts = i.parts[1:]
    if parts[-1] != "u64" or set(parts[:-1]) - {
        "to", "global", "param", "shared", "shared::cta", "shared::cluster"
    }:  # fmt: skip
        raise i.unsupported("address conversion")
    d, a = i.operands
    value = w.source(a, "u64")
    if "shared" in i.op:
        value = f"{value} {'-' if 'to' in parts else '+'} {w.constant('u64', SHARED_WINDOW)}"
    w.destination(d, "u64", value)


def _bit_field_extract(w: Writer, i: Instruction) -> None:
    kind, _ = _split(i)
    d, a, position, length = i.operands
    if kind[0] != "u" or position.kind != "imm" or length.kind != "imm":
        raise i.unsupported("bit field")
    kind = kind_of(kind)
    mask = w.constant(kind, (1 << length.value) - 1)
    w.destination(d, kind, f"{w.source(a, kind)} >> {w.constant(kind, position.value)} & {mask}")


EMITTERS: dict[str, Emitter] = {
    "add": _binary("+"),
    "sub": _binary("-"),
    "mul": _mul,
    "mad": _mad,
    "fma": _fma,
    "div": _divide,
    "rem": _remainder,
    "min": _extreme("minimum"),
    "max": _extreme("maximum"),
    "neg": _negate,
    "abs": _absolute,
    "and": _bitwise("&"),
    "or": _bitwise("|"),
    "xor": _bitwise("^"),
    "not": _not,
    "shl": _shift(True),
    "shr": _shift(False),
    "setp": _set_predicate,
    "selp": _select,
    "popc": _popc,
    "lop3": _lop3,
    "prmt": _prmt,
    "ex2": _approximate("exp2"),
    "lg2": _approximate("log2"),
    "rcp": _approximate("reciprocal"),
    "mov": _move,
    "cvt": _convert,
    "cvta": _convert_address,
    "bfe": _bit_field_extract,
}
