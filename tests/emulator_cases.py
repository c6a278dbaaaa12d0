"""What the emulator's own tests run: small kernels in PTX, and the layer with its PTX changed."""

from __future__ import annotations

import re
import struct
from functools import cache

import numpy as np
import torch

import moe_ep_jit as moe
from moe_ep_jit import launch, reference, variants
from moe_ep_jit.tools.emulator import ptx
from moe_ep_jit.tools.emulator.launches import Kernel, Request
from moe_ep_jit.tools.emulator.layer import Object
from moe_ep_jit.tools.emulator.machine import Machine

_MODULE = """
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry {name}({params})
{{
    .reg .pred %p<20>;
    .reg .b16 %rs<20>;
    .reg .b32 %r<200>;
    .reg .b64 %rd<40>;
    {body}
    ret;
}}
"""


def kernel(body, params=("u64",), name="k"):
    """A kernel of ``body``, which calls its parameters p0, p1, ..; ``desc``: 128 bytes."""
    kinds = {"desc": ".param .align 64 .b8 p{}[128]"}
    given = ", ".join(
        kinds.get(kind, f".param .{kind} p{{}}").format(n) for n, kind in enumerate(params)
    )
    return Kernel(ptx.parse(_MODULE.format(name=name, params=given, body=body)), name)


def request(threads, *values, grid=1, shared=4096, dependent=False, cluster=1):
    """A launch; values: integers of 8 bytes, or bytes as they are."""
    packed = b"".join(v if isinstance(v, bytes) else struct.pack("<Q", v) for v in values)
    return Request("k", (grid, 1, 1), (threads, 1, 1), (cluster, 1, 1), shared, dependent, packed)


def run(body, threads, *arrays, seed=0, params=None, written=True, **options):
    """One launch of ``body`` on arrays of bytes, which are its parameters."""
    machine = Machine(seed)
    for number, array in enumerate(arrays):
        machine.memory.add(f"p{number}", array.ctypes.data, array.nbytes, written=written)
    k = kernel(body, params or ("u64",) * len(arrays))
    machine.run([(k, request(threads, *(a.ctypes.data for a in arrays), **options))])
    return machine


def aligned(count, dtype=np.uint32):
    """Zeros on a boundary of 128 bytes."""
    raw = np.zeros(count * np.dtype(dtype).itemsize + 128, np.uint8)
    start = -raw.ctypes.data % 128
    return raw[start : start + count * np.dtype(dtype).itemsize].view(dtype)


def descriptor(array, dims, box, swizzle=0, kind=7, item=4, stride=None):
    """A TMA descriptor as the host code of an object writes it; dims and box fastest first."""
    rank = len(dims)
    strides, step = [], item
    for size in dims[:-1]:
        step *= size
        strides.append(step >> 4)
    if stride is not None:
        strides[0] = stride >> 4
    strides += [0] * (4 - len(strides))
    sizes = [d - 1 for d in dims] + [0] * (5 - rank)
    boxes = [b - 1 for b in box] + [0] * (5 - rank)
    words = [
        array.ctypes.data & 0xFFFFFFFF,
        array.ctypes.data >> 32,
        rank - 1 << 4 | kind << 7 | swizzle << 13,
        *(s & 0xFFFFFFFF for s in strides),
        sum((s >> 32) << 4 * n for n, s in enumerate(strides)),
        *sizes,
        boxes[0] << 24,
        boxes[1] | boxes[2] << 8 | boxes[3] << 16 | boxes[4] << 24,
        0,
    ]
    return struct.pack("<16I", *words) + b"\xa5" * 64


# The layer

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS = 256, 192, 3, 2, 40


class Layer:
    """A small layer on the emulator, whose objects can be run with other PTX."""

    def __init__(self, fmt, tile_n, num_sms=2):
        torch.manual_seed(11)
        problem = moe.Problem(
            hidden=HIDDEN,
            intermediate=INTERMEDIATE,
            num_experts=EXPERTS,
            top_k=TOP_K,
            max_tokens=TOKENS,
            format=fmt,
        )
        w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN).bfloat16() * HIDDEN**-0.5
        w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE).bfloat16() * INTERMEDIATE**-0.5
        self.weights = moe.prepare_weights(w13, w2, problem, backend="emulator")
        self.plain = moe.prepare_weights(w13, w2, problem, backend="reference")
        operand = self.weights.operand
        self.config = next(c for c in variants.ladder("sm_90a", operand) if c.tile_n == tile_n)
        self.problem, self.num_sms = self.weights.problem, num_sms
        self.x = torch.randn(TOKENS, HIDDEN).bfloat16()
        self.ids = torch.randint(EXPERTS, (TOKENS, TOP_K), dtype=torch.int32)
        self.topk_weights = torch.rand(TOKENS, TOP_K)
        self.want = reference.moe_forward(self.x, self.ids, self.topk_weights, self.plain)

    def workspace(self, seed=0):
        ws = moe.Workspace(
            self.problem, device="cpu", backend="emulator", operand=self.weights.operand
        )
        ws.emulator.seed, ws.emulator.num_sms = seed, self.num_sms
        return ws

    def object(self, ws):
        binding = launch.bind(ws, self.weights)
        return binding.rung(ws, self.weights, "bf16", self.config)

    def error(self, mutate=None, seed=0, requests=None):
        """Whole error of a call; ``mutate(text)`` and ``requests(list)`` change what runs."""
        ws = self.workspace(seed)
        bound = self.object(ws)
        if mutate is not None:
            bound.function = Object(bound.function.folder, mutate(bound.function.text))
        if requests is not None:
            bound.function = _Requests(bound.function, requests)
        y = moe.moe_forward(
            self.x, self.ids, self.topk_weights, self.weights, ws, config=self.config
        )
        return reference.error(y, self.want).whole


class _Requests:
    """An object whose launches are changed before they run."""

    def __init__(self, function, change):
        self.kernels, self.host, self.inner, self.change = function.kernels, self, function, change

    def requests(self, *args):
        return self.change(self.inner.host.requests(*args))


@cache
def layer(fmt="mxfp8", tile_n=32, num_sms=2):
    return Layer(fmt, tile_n, num_sms)


def replaced(kernel_number, pattern, replacement, count=0):
    """A change of one kernel's PTX: the n-th entry, by a regular expression that must match."""

    def mutate(text):
        parts = re.split(r"(?=^\.visible \.entry)", text, flags=re.MULTILINE)
        assert len(parts) > kernel_number + 1
        changed, number = re.subn(pattern, replacement, parts[kernel_number + 1], count=count)
        assert number, f"{pattern} is not in kernel {kernel_number}"
        parts[kernel_number + 1] = changed
        return "".join(parts)

    return mutate


ROUTE, DISPATCH, GATE_UP, DOWN, COMBINE = range(5)
