"""Layers, inputs and comparisons of the tests on a Blackwell GPU, or on the emulator (smaller).

``plain`` are the same weights in the reference's layout: nothing is folded on Blackwell, so both
hold the same numbers. Workspaces are poisoned (0xFF bytes, all but the control words) before calls.
"""

from __future__ import annotations

import itertools
import os
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from conftest import FULL, SM100_EMULATED, poison_bytes

import moe_ep_jit as moe
from moe_ep_jit import formats, layout, reference, variants

DEVICE = "cpu" if SM100_EMULATED else "cuda"
BACKEND = "emulator" if SM100_EMULATED else "auto"
ARCH = "sm_100a" if SM100_EMULATED else variants.detect_arch("cuda")
GPT_OSS = moe.SwiGLU(limit=7.0, alpha=1.702, beta=1.0)

#: Rows of each expert: none, one, around one and four warps' worth.
LOADS = (0, 1, 31, 32, 33, 127, 128, 129)
EXPERTS, TOP_K, MAX_TOKENS = len(LOADS), 2, 256

#: hidden, intermediate: odd multiples of 64, so that K ends within a stage, M within a blob, and a
#: pair of CTAs has one blob of rows left.
SIZES = (192, 320)

#: Relative L2 of the whole against the reference; worst row and block may reach three times that.
BOUNDS = {"mxfp8": 1e-2, "nvfp4": 2e-2}

#: name -> (format, bias and gpt-oss's activation)
CASES = {
    "mxfp8": ("mxfp8", False),
    "nvfp4": ("nvfp4", False),
    "mxfp8-bias": ("mxfp8", True),
    "nvfp4-bias": ("nvfp4", True),
}


def _rungs():
    """Every rung of every case. On the emulator each rung meets one case, each case one rung or
    two; the others need --full.
    """
    for number, (name, (fmt, _)) in enumerate(CASES.items()):
        for index, config in enumerate(variants.ladder("sm_100a", fmt)):
            marks = () if index % len(CASES) == number else pytest.mark.full
            yield pytest.param(name, config, id=f"{name}-n{config.tile_n}", marks=marks)


RUNGS = list(_rungs())


def _matrix():
    """Both formats x hidden and intermediate x arch x rung, on all loads. Without --full the sister
    arch alone meets one rung of each format; on a GPU there is its own arch only.
    """
    arches = ("sm_100a", "sm_103a") if SM100_EMULATED else (ARCH,)
    multiples = ((64, 64), (128, 256), (256, 128), (320, 192))
    for fmt, arch in itertools.product(BOUNDS, arches):
        sizes = multiples if arch == arches[0] else ((64, 64), (192, 320))
        for shape, config in itertools.product(sizes, variants.ladder("sm_100a", fmt)):
            picked = {"mxfp8": 16, "nvfp4": 192}[fmt] == config.tile_n and shape == (64, 64)
            marks = () if picked and arch == arches[-1] else pytest.mark.full
            name = f"{fmt}-{arch}-h{shape[0]}-i{shape[1]}-n{config.tile_n}"
            yield pytest.param(fmt, shape, arch, config, id=name, marks=marks)


MATRIX = list(_matrix())


@contextmanager
def on_arch(arch):
    """What is built inside takes this arch on the emulator."""
    before = os.environ.get("MOE_EP_JIT_ARCH")
    os.environ["MOE_EP_JIT_ARCH"] = arch
    try:
        yield
    finally:
        if before is None:
            del os.environ["MOE_EP_JIT_ARCH"]
        else:
            os.environ["MOE_EP_JIT_ARCH"] = before


@dataclass
class Layer:
    weights: moe.PreparedWeights
    plain: moe.PreparedWeights
    source: tuple[torch.Tensor, torch.Tensor]
    ws: moe.Workspace

    def __call__(self, *inputs, **options):
        self.poison()
        y = moe.moe_forward(*inputs, self.weights, self.ws, **options)
        if SM100_EMULATED:
            # Another order of everything for the next call; with --full, three for each.
            for _ in range(2 if FULL else 0):
                self.ws.emulator.seed += 1
                before = y.clone()
                y = moe.moe_forward(*inputs, self.weights, self.ws, **options)
                assert torch.equal(bits(y), bits(before)), self.ws.emulator.seed
            self.ws.emulator.seed = (self.ws.emulator.seed + 1) % 5
        return y

    def views(self):
        return self.ws.views(self.weights.problem, self.weights.operand)

    def poison(self):
        for name, tensor in self.views().items():
            if name != "control":
                poison_bytes(tensor)

    def want(self, x, ids, topk_weights):
        return reference.moe_forward(x, ids, topk_weights, self.plain)


@cache
def make_layer(name, sizes=SIZES, experts=EXPERTS, arch=ARCH):
    fmt, bias = CASES[name]
    hidden, intermediate = sizes
    problem = moe.Problem(
        hidden=hidden,
        intermediate=intermediate,
        num_experts=experts,
        top_k=TOP_K,
        max_tokens=MAX_TOKENS,
        format=fmt,
        act=fmt,
        bias=bias,
        activation=GPT_OSS if bias else moe.SwiGLU(),
    )
    generator = torch.Generator(DEVICE).manual_seed(7)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=DEVICE)

    w13 = (normal(experts, 2 * intermediate, hidden) * hidden**-0.5).bfloat16()
    w2 = (normal(experts, hidden, intermediate) * intermediate**-0.5).bfloat16()
    biases = {}
    if bias:
        biases = {"w13_bias": normal(experts, 2 * intermediate), "w2_bias": normal(experts, hidden)}
    with on_arch(arch):
        weights = moe.prepare_weights(w13, w2, problem, backend=BACKEND, **biases)
        plain = moe.prepare_weights(w13, w2, problem, backend="reference", **biases)
        ws = moe.Workspace(
            weights.problem, operand=weights.operand, device=DEVICE, backend=BACKEND, debug=False
        )
    return Layer(weights, plain, (w13, w2), ws)


def make_inputs(tokens, hidden=SIZES[0], experts=EXPERTS):
    x = torch.randn(tokens, hidden, device=DEVICE).bfloat16()
    ids = torch.randint(0, experts, (tokens, TOP_K), device=DEVICE, dtype=torch.int32)
    return x, ids, torch.rand(tokens, TOP_K, device=DEVICE)


def inputs_of_loads(loads=LOADS, hidden=SIZES[0]):
    """Tokens whose slots, in random order, give each expert its load; what is over is skipped."""
    slots = torch.cat([torch.full((rows,), e) for e, rows in enumerate(loads)])
    tokens = -(-len(slots) // TOP_K)
    slots = torch.cat((slots, torch.full((tokens * TOP_K - len(slots),), -1)))
    ids = slots[torch.randperm(len(slots))].view(tokens, TOP_K).int().to(DEVICE)
    x = torch.randn(tokens, hidden, device=DEVICE).bfloat16()
    return x, ids, torch.rand(tokens, TOP_K, device=DEVICE)


def assert_close(got, want, fmt):
    errors = reference.error(got, want)
    bound = BOUNDS[fmt]
    assert errors.whole < (bound if len(got) >= 32 else 3 * bound), errors
    assert errors.worst_row < 3 * bound, errors
    assert errors.worst_block < 3 * bound, errors


def tiles_of(layer, tile_n):
    """(expert, first row, rows, n-tile) of every tile of a finished call."""
    for expert, (first_tile, _, first_row, rows) in enumerate(
        layer.views()["expert_info"].tolist()
    ):
        for number, first in enumerate(range(0, rows, tile_n)):
            yield expert, first_row + first, min(rows - first, tile_n), first_tile + number


def sf_index(tile_n, n_tile, rows, k, fmt):
    """int64 [rows, K/block]: bytes of a tile's block scales in their region, one by one."""
    atoms, atom_bytes = layout.sf_atoms(k, fmt), layout.sf_atom_bytes(tile_n)
    blocks = k // formats.BY_NAME[fmt].sf_block
    return torch.tensor(
        [
            [
                (n_tile * atoms + block // 4) * atom_bytes + layout.sf_place(row) + block % 4
                for block in range(blocks)
            ]
            for row in range(rows)
        ],
        device=DEVICE,
    )


def block_scales(layer, region, tile_n, k):
    """uint8 [rows, K/block]: block scales of all rows that a finished call has left."""
    flat, fmt = layer.views()[region].view(-1), layer.weights.problem.format
    return torch.cat(
        [
            flat[sf_index(tile_n, n_tile, rows, k, fmt)]
            for _, _, rows, n_tile in tiles_of(layer, tile_n)
        ]
    )


def bits(tensor):
    """For comparisons in which NaN equals NaN."""
    return tensor.contiguous().view(torch.int16)
