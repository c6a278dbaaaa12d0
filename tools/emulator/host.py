"""The host side of a compiled object without a GPU: what it would launch, in order."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from moe_ep_jit.cache_key import SYMBOL
from moe_ep_jit.tools.emulator import ptx
from moe_ep_jit.tools.emulator.launches import Request

_CALLBACK = ctypes.CFUNCTYPE(
    None,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.c_uint64,
    ctypes.c_uint32,
    ctypes.POINTER(ctypes.c_void_p),
)
_STANDIN = Path(__file__).with_name("standin.c")


class HostFunction:
    """An exported object whose launches are recorded instead of carried out.

    module  the parsed PTX of the same object, which knows the parameters' sizes
    """

    def __init__(self, obj: Path, module: ptx.Module) -> None:
        self.module = module
        self._requests: list[Request] = []
        self._failure: Exception | None = None
        self._callback = _CALLBACK(self._on_launch)
        with tempfile.TemporaryDirectory(prefix="moe_ep_jit-") as folder:
            library = Path(folder) / "emulated.so"
            _link(obj, library)
            self._load(library)

    def _load(self, library: Path) -> None:
        import tvm_ffi

        self._library = ctypes.CDLL(str(library))
        self._library.moe_ep_jit_on_launch(self._callback)
        self._module = tvm_ffi.load_module(str(library))
        self._function = self._module[SYMBOL]

    def requests(self, *args: Any) -> list[Request]:
        """The launches of one call."""
        self._requests, self._failure = [], None
        self._function(*args)
        if self._failure is not None:
            raise self._failure
        return self._requests

    def _on_launch(
        self, name: bytes, shape: Any, shared_bytes: int, dependent: int, args: Any
    ) -> None:
        try:
            entry = self.module.entries[name.decode()]
            params = bytearray(entry.param_bytes)
            for number, param in enumerate(entry.params):
                content = ctypes.string_at(args[number], param.size)
                params[param.offset : param.offset + param.size] = content
            numbers = [int(shape[n]) for n in range(9)]
            grid, block, cluster = (tuple(numbers[n : n + 3]) for n in (0, 3, 6))
            self._requests.append(
                Request(
                    entry.name, grid, block, cluster, shared_bytes, bool(dependent), bytes(params)
                )
            )
        except Exception as error:  # an exception cannot pass through C
            self._failure = error


def c_compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def _link(obj: Path, library: Path) -> None:
    """The object with the stand-in as a shared library. RuntimeError where there is no compiler."""
    compiler = c_compiler()
    if compiler is None:
        raise RuntimeError(
            "the emulator needs a C compiler for its launch stand-in;"
            " run: apt-get install gcc (or what your system has for it)"
        )
    import tvm_ffi.libinfo

    runtime = tvm_ffi.libinfo.find_libtvm_ffi()
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(obj), str(_STANDIN)]
    command += ["-Wl,-Bsymbolic", "-Wl,-z,noexecstack", str(runtime)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{compiler} could not link the launch stand-in:\n{done.stderr[-2000:]}")
