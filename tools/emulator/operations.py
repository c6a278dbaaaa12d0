"""Emitters of the instructions that touch memory, other lanes, barriers or copies."""

from __future__ import annotations

from moe_ep_jit.tools.emulator import tma
from moe_ep_jit.tools.emulator.arithmetic import EMITTERS as ARITHMETIC
from moe_ep_jit.tools.emulator.codegen import Writer, kind_of
from moe_ep_jit.tools.emulator.ptx import TYPE_BYTES, Instruction

#: Orders and scopes of strong accesses, and hints that change no value.
_ORDERS = {"relaxed", "acquire", "release", "acq_rel", "volatile"}
_HINTS = {
    "weak", "cta", "cluster", "gpu", "sys", "nc", "L1::no_allocate", "L1::evict_last",
    "L1::evict_first", "L1::evict_normal", "L2::128B", "L2::256B", "L2::64B",
}  # fmt: skip


def _access(i: Instruction) -> tuple[str, int, str, str]:
    """(space, vector length, type, order) of a load or store."""
    *modifiers, kind = i.parts[1:]
    space, count, order = "", 1, ""
    for modifier in modifiers:
        if modifier in ("global", "param", "shared", "shared::cta", "shared::cluster"):
            space = modifier.partition("::")[0]
        elif modifier in ("v2", "v4"):
            count = int(modifier[1])
        elif modifier in _ORDERS:
            order = modifier
        elif modifier not in _HINTS:
            raise i.unsupported(f"modifier {modifier}")
    if kind not in TYPE_BYTES or kind == "pred":
        raise i.unsupported("type")
    if not space:
        raise i.unsupported("generic address")
    return space, count, kind, _scoped(order, i)


def _scoped(order: str, i: Instruction) -> str:
    """The order with its scope, where that takes in other ranks: a volatile access's does."""
    if order == "volatile":
        return "relaxed.sys"
    return f"{order}.sys" if order and "sys" in i.parts else order


def _load(w: Writer, i: Instruction) -> None:
    space, count, kind, order = _access(i)
    d, address = i.operands[:2]
    targets = d.value if d.kind == "vec" else [d]
    unit = TYPE_BYTES[kind]
    if space == "param":
        for n, target in enumerate(targets):
            offset = address.extra[0] + n * unit
            value = f"c.param({address.value.value!r}, {offset}, u{unit * 8})"
            w.destination(target, f"u{unit * 8}", value)
        return
    base, offset = w.address(address)
    name = f"loaded{i.line}"
    call = f"c.load({space!r}, {base}, {offset}, {unit}, {count}, {w.mask}, {order!r})"
    w.emit(f"{name} = {call}")
    for n, target in enumerate(targets):
        view = kind_of(kind) if kind[0] == "s" else f"u{unit * 8}"
        shown = f"{name}[{n}].view({view})" if kind[0] == "s" else f"{name}[{n}]"
        w.destination(target, view, shown)


def _store(w: Writer, i: Instruction) -> None:
    space, _, kind, order = _access(i)
    address, value = i.operands[:2]
    sources = value.value if value.kind == "vec" else [value]
    base, offset = w.address(address)
    values = ", ".join(w.source(s, f"u{TYPE_BYTES[kind] * 8}") for s in sources)
    w.emit(f"c.store({space!r}, {base}, {offset}, [{values}], {w.mask}, {order!r})")


def _atomic(w: Writer, i: Instruction) -> None:
    returns = i.parts[0] == "atom"
    *modifiers, kind = i.parts[1:]
    order = _scoped(next((m for m in modifiers if m in _ORDERS), "relaxed"), i)
    known = {"add", "exch", "cas", "min", "max", "and", "or", "xor"}
    operation = next((m for m in modifiers if m in known), None)
    rest = set(modifiers) - _ORDERS - {"cta", "cluster", "gpu", "sys", "global", operation}
    if operation is None or rest or "global" not in modifiers:
        raise i.unsupported("modifier")
    d, address, *values = i.operands if returns else (None, *i.operands)
    kind = kind_of(kind)
    base, offset = w.address(address)
    given = ", ".join(w.source(v, kind) for v in values)
    call = f"c.atomic({operation!r}, {kind}, {base}, {offset}, [{given}], {w.mask}, {order!r})"
    if returns:
        w.destination(d, kind, call)
    else:
        w.emit(call)


def _matrix_store(w: Writer, i: Instruction) -> None:
    number = _matrix_form(i)
    address, value = i.operands
    registers = value.value if value.kind == "vec" else [value]
    if len(registers) != number:
        raise i.unsupported("registers")
    base, offset = w.address(address)
    given = ", ".join(w.source(r, "u32") for r in registers)
    w.emit(f"c.stmatrix({base}, {offset}, [{given}], {'trans' in i.parts}, {w.mask})")


def _matrix_load(w: Writer, i: Instruction) -> None:
    number = _matrix_form(i)
    d, address = i.operands
    targets = d.value if d.kind == "vec" else [d]
    base, offset = w.address(address)
    name = f"loaded{i.line}"
    w.emit(f"{name} = c.ldmatrix({base}, {offset}, {number}, {'trans' in i.parts}, {w.mask})")
    for n, target in enumerate(targets):
        w.destination(target, "u32", f"{name}[{n}]")


def _matrix_form(i: Instruction) -> int:
    parts = set(i.parts[1:])
    number = next((int(p[1]) for p in parts if p in ("x1", "x2", "x4")), None)
    known = {"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16"}
    if number is None or parts - known:
        raise i.unsupported("matrix form")
    return number


def _shuffle(w: Writer, i: Instruction) -> None:
    if i.parts[1] != "sync" or i.parts[3] != "b32":
        raise i.unsupported("modifier")
    d, value, distance, control, member = i.operands
    given = ", ".join(w.source(o, "u32") for o in (value, distance, control, member))
    name = f"shuffled{i.line}"
    w.emit(f"{name} = c.shuffle({i.parts[2]!r}, {given}, {w.mask})")
    target = d.value if d.kind == "pair" else d
    w.destination(target, "u32", f"{name}[0]")
    if d.kind == "pair":
        w.destination(d.extra, "p", f"{name}[1]")


def _elect(w: Writer, i: Instruction) -> None:
    d, member = i.operands
    name = f"elected{i.line}"
    w.emit(f"{name} = c.elect({w.source(member, 'u32')}, {w.mask})")
    if d.kind != "pair":
        raise i.unsupported("destination")
    w.destination(d.value, "u32", f"{name}[0]")
    w.destination(d.extra, "p", f"{name}[1]")


def _match(w: Writer, i: Instruction) -> None:
    if i.op != "match.any.sync.b32":
        raise i.unsupported("modifier")
    d, value, member = i.operands
    call = f"c.match_any({w.source(value, 'u32')}, {w.source(member, 'u32')}, {w.mask})"
    w.destination(d, "u32", call)


def _vote(w: Writer, i: Instruction) -> None:
    mode = i.parts[2]
    if i.parts[1] != "sync" or mode not in ("any", "all", "uni", "ballot"):
        raise i.unsupported("modifier")
    d, value, member = i.operands
    call = f"c.vote({mode!r}, {w.source(value, 'p')}, {w.source(member, 'u32')}, {w.mask})"
    w.destination(d, "u32" if mode == "ballot" else "p", call)


def _active_mask(w: Writer, i: Instruction) -> None:
    w.destination(i.operands[0], "u32", f"c.active_mask({w.mask})")


def _redux(w: Writer, i: Instruction) -> None:
    if i.parts[1] != "sync" or len(i.parts) != 4:
        raise i.unsupported("modifier")
    kind = kind_of(i.parts[3])
    d, value, member = i.operands
    given = f"{w.source(value, kind)}, {w.source(member, 'u32')}"
    w.destination(d, kind, f"c.reduce({i.parts[2]!r}, {given}, {w.mask})")


def _mbarrier(w: Writer, i: Instruction) -> None:
    parts = set(i.parts[1:])
    known = {
        "init", "arrive", "expect_tx", "inval", "test_wait", "parity", "shared", "shared::cta",
        "shared::cluster", "b64", "release", "acquire", "relaxed", "cta", "cluster",
    }  # fmt: skip
    if parts - known:
        raise i.unsupported("modifier")
    if "init" in parts:
        base, offset = w.address(i.operands[0])
        count = w.source(i.operands[1], "u32")
        w.emit(f"c.mbarrier_init({base}, {offset}, {count}, {w.mask})")
    elif "inval" in parts:
        base, offset = w.address(i.operands[0])
        w.emit(f"c.mbarrier_inval({base}, {offset}, {w.mask})")
    elif "arrive" in parts:
        d, address, *more = i.operands
        base, offset = w.address(address)
        count, expected = w.constant("u32", 1), "None"
        if "expect_tx" in parts:
            expected = w.source(more[0], "u32")
        elif more:
            count = w.source(more[0], "u32")
        call = f"c.mbarrier_arrive({base}, {offset}, {count}, {expected}, {w.mask})"
        w.destination(d, "u64", call)
    elif "expect_tx" in parts:
        base, offset = w.address(i.operands[0])
        w.emit(f"c.mbarrier_expect({base}, {offset}, {w.source(i.operands[1], 'u32')}, {w.mask})")
    elif {"test_wait", "parity"} <= parts:
        d, address, parity = i.operands
        base, offset = w.address(address)
        call = f"c.mbarrier_test({base}, {offset}, {w.source(parity, 'u32')}, {w.mask})"
        w.destination(d, "p", call)
    else:
        raise i.unsupported("modifier")


def _fence(w: Writer, i: Instruction) -> None:
    rest = i.op.partition(".")[2]
    if rest in ("proxy.async", "proxy.async.shared::cta", "proxy.async.global",
                "proxy.async.shared::cluster"):  # fmt: skip
        w.emit(f"c.fence_proxy({w.mask})")
    elif rest.startswith(("acq_rel.", "sc.")) or i.parts[0] == "membar":
        w.emit(f"c.fence({'sys' in i.parts}, {w.mask})")
    elif rest != "mbarrier_init.release.cluster":
        raise i.unsupported("fence")


def _barrier(w: Writer, i: Instruction) -> None:
    if i.op == "bar.warp.sync":
        w.emit(f"c.sync_warp({w.source(i.operands[0], 'u32')}, {w.mask})")
    elif i.op.startswith("barrier.cluster.arrive"):
        if set(i.parts[3:]) - {"release", "relaxed", "aligned"}:
            raise i.unsupported("modifier")
        w.emit(f"c.cluster_arrive({'relaxed' in i.parts}, {w.mask})")
    else:
        raise i.unsupported("barrier")


def _grid(w: Writer, i: Instruction) -> None:
    if i.op != "griddepcontrol.launch_dependents":
        raise i.unsupported("modifier")
    w.emit(f"c.launch_dependents({w.mask})")


def _nothing(w: Writer, i: Instruction) -> None:
    """Hints that change no value: prefetches, register budgets."""
    if not i.op.startswith(("prefetch", "setmaxnreg")):
        raise i.unsupported("instruction")


def _pause(w: Writer, i: Instruction) -> None:
    w.emit("c.pause()")


def _map_address(w: Writer, i: Instruction) -> None:
    if i.op != "mapa.shared::cluster.u32":
        raise i.unsupported("mapa")
    d, address, rank = i.operands
    low = f"{w.source(address, 'u32')} & {w.constant('u32', 0xFFFFFF)}"
    w.destination(d, "u32", f"{low} | {w.source(rank, 'u32')} << {w.constant('u32', 24)}")


_BULK = {
    "async", "bulk", "tensor", "1d", "2d", "3d", "4d", "5d", "tile", "global", "shared::cta",
    "shared::cluster", "bulk_group", "L2::cache_hint", "multicast::cluster",
    "mbarrier::complete_tx::bytes", "cta_group::1", "cta_group::2",
}  # fmt: skip
_REDUCTIONS = {"add", "min", "max", "and", "or", "xor"}


def _copy(w: Writer, i: Instruction) -> None:
    """cp.async in all its forms, and cp.reduce."""
    if i.parts[:3] == ["cp", "async", "bulk"] or i.parts[:4] == ["cp", "reduce", "async", "bulk"]:
        _bulk(w, i)
    elif i.op == "cp.async.commit_group":
        w.emit(f"c.copy_commit({w.mask})")
    elif i.op.startswith("cp.async.mbarrier.arrive."):
        if set(i.parts[4:]) - {"noinc", "shared", "shared::cta", "b64"}:
            raise i.unsupported("modifier")
        base, offset = w.address(i.operands[0])
        w.constants[f"I{i.line}"] = i
        w.emit(f"c.copy_arrive(I{i.line}, {base}, {offset}, {w.mask})")
    else:
        _small_copy(w, i)


def _small_copy(w: Writer, i: Instruction) -> None:
    if (
        i.parts[2] not in ("ca", "cg")
        or i.parts[4] != "global"
        or (
            i.parts[3] not in ("shared", "shared::cta")
            or {p for p in i.parts[5:] if not p.startswith("L2::")}
        )
    ):
        raise i.unsupported("copy")
    dst, src, size, *rest = i.operands
    if "L2::cache_hint" in i.parts:
        rest.pop()
    if size.kind != "imm" or size.value not in ((16,) if i.parts[2] == "cg" else (4, 8, 16)):
        raise i.unsupported("bytes of a copy")
    length = w.source(rest.pop(0), "u32") if rest else w.constant("u32", size.value)
    if rest:
        raise i.unsupported("operands of a copy")
    w.constants[f"I{i.line}"] = i
    given = f"{_sum(w, dst)}, {_sum(w, src)}, {size.value}, {length}"
    w.emit(f"c.copy(I{i.line}, {given}, {w.mask})")


def _bulk(w: Writer, i: Instruction) -> None:
    parts = [p for p in i.parts[1:] if p != "reduce"]
    if i.parts[1] == "reduce":
        _check_reduction(i)
        parts = [p for p in parts if p not in _REDUCTIONS | {"noftz"} and p not in TYPE_BYTES]
    if i.op == "cp.async.bulk.commit_group":
        w.emit(f"c.bulk_commit({w.mask})")
        return
    if set(parts) - _BULK or ".shared::cluster.shared::cta" in i.op:
        raise i.unsupported("copy")
    dst, src, *rest = i.operands
    if "L2::cache_hint" in parts:
        rest.pop()
    values = {}
    tensor = "tensor" in parts
    loads = "mbarrier::complete_tx::bytes" in parts
    if tensor:
        coords = (src if loads else dst).extra[1][0].value
        values["coords"] = "[" + ", ".join(w.source(o, "u32") for o in coords) + "]"
    else:
        values["size"] = w.source(rest.pop(0), "u32")
    if loads:
        values["mbar"] = _sum(w, rest.pop(0))
        if "multicast::cluster" in parts:
            values["multicast"] = w.source(rest.pop(0), "u16")
    if rest:
        raise i.unsupported("operands of a copy")
    values["dst"], values["src"] = _sum(w, dst), _sum(w, src)
    name = f"I{i.line}"
    w.constants[name] = i
    given = ", ".join(f"{key!r}: {value}" for key, value in values.items())
    w.emit(f"c.bulk({name}, {{{given}}}, {w.mask})")


def _check_reduction(i: Instruction) -> None:
    """The kind of a reduction: of a tensor's, the descriptor names the type."""
    kinds = [p for p in i.parts if p in tma.REDUCED]
    if len(_REDUCTIONS & set(i.parts)) != 1 or len(kinds) != (0 if "tensor" in i.parts else 1):
        raise i.unsupported("reduction")


def _sum(w: Writer, operand: object) -> str:
    base, offset = w.address(operand)
    return f"({base} + {base}.dtype.type({offset}))" if offset else base


EMITTERS = {
    **ARITHMETIC,
    "ld": _load,
    "st": _store,
    "atom": _atomic,
    "red": _atomic,
    "stmatrix": _matrix_store,
    "ldmatrix": _matrix_load,
    "shfl": _shuffle,
    "elect": _elect,
    "match": _match,
    "vote": _vote,
    "activemask": _active_mask,
    "redux": _redux,
    "mbarrier": _mbarrier,
    "fence": _fence,
    "membar": _fence,
    "bar": _barrier,
    "barrier": _barrier,
    "griddepcontrol": _grid,
    "prefetch": _nothing,
    "setmaxnreg": _nothing,
    "nanosleep": _pause,
    "mapa": _map_address,
    "cp": _copy,
}
