"""What a cubin says about its kernels: registers, static shared memory, stack. A small ELF walk."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

# Attributes of the .nv.info sections.
_REGCOUNT = 0x2F
_FRAME_SIZE = 0x11
_MIN_STACK_SIZE = 0x12
_REQNTID = 0x10
_MAX_THREADS = 0x05
_SIZED = 0x04  # the one attribute form that carries a payload behind its 4-byte head

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")


def kernel_resources(cubin: bytes) -> list[dict[str, Any]]:
    """One dict per kernel, by name: ``name``, ``registers`` (per thread), ``static_shared_bytes``
    (per CTA), ``stack_bytes`` (local memory per thread; spills live here), ``threads`` (per CTA,
    0 where the kernel does not state it). ``ValueError`` if the bytes are no 64-bit ELF."""
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"cubin: expected a little-endian 64-bit ELF, got {cubin[:6]!r}")
    try:
        sections = _sections(cubin)
        return sorted(_kernels(sections), key=lambda kernel: kernel["name"])
    except (struct.error, IndexError) as error:
        raise ValueError(f"cubin: the ELF of {len(cubin)} bytes is cut short: {error}") from error


def _kernels(sections: dict[str, tuple[bytes, int]]) -> Iterator[dict[str, Any]]:
    names = _symbol_names(sections)
    by_attribute: dict[int, dict[str, int]] = {}
    for attribute, payload in _attributes(sections.get(".nv.info", (b"", 0))[0]):
        if attribute in (_REGCOUNT, _FRAME_SIZE, _MIN_STACK_SIZE):
            symbol, value = struct.unpack_from("<II", payload)
            by_attribute.setdefault(attribute, {})[names[symbol]] = value
    for section in sections:
        if not section.startswith(".text."):
            continue
        name = section[len(".text.") :]
        stack = (by_attribute.get(a, {}).get(name, 0) for a in (_FRAME_SIZE, _MIN_STACK_SIZE))
        yield {
            "name": name,
            "registers": by_attribute.get(_REGCOUNT, {}).get(name, 0),
            "static_shared_bytes": sections.get(f".nv.shared.{name}", (b"", 0))[1],
            "stack_bytes": max(stack),
            "threads": _threads(sections.get(f".nv.info.{name}", (b"", 0))[0]),
        }


def _threads(info: bytes) -> int:
    for attribute, payload in _attributes(info):
        if attribute in (_REQNTID, _MAX_THREADS):
            x, y, z = struct.unpack_from("<III", payload)
            return x * y * z
    return 0


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED:
            yield attribute, info[at : at + size]
            at += size


def _sections(elf: bytes) -> dict[str, tuple[bytes, int]]:
    """Section name -> (its bytes, its size); a section without bytes in the file has b""."""
    (table_at,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    heads = [_SECTION.unpack_from(elf, table_at + i * entry_size) for i in range(count)]
    names = elf[heads[names_index][4] :]
    nobits = 8
    return {
        _string(names, head[0]): (b"" if head[1] == nobits else elf[head[4] :][: head[5]], head[5])
        for head in heads
    }


def _symbol_names(sections: dict[str, tuple[bytes, int]]) -> list[str]:
    symbols, strings = sections[".symtab"][0], sections[".strtab"][0]
    return [_string(strings, symbol[0]) for symbol in _SYMBOL.iter_unpack(symbols)]


def _string(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()
