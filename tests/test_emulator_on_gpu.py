"""The emulator against a Hopper GPU: the same objects on the same inputs."""

from __future__ import annotations

import pytest
import torch
from emulator_cases import HIDDEN, INTERMEDIATE

import moe_ep_jit as moe
from moe_ep_jit import reference, variants
from moe_ep_jit.kernels.sm90.packing import OPERANDS

pytestmark = pytest.mark.sm90

EXPERTS, TOP_K, TOKENS = 5, 3, 90

#: name -> (format, act, K elements that share a magnitude, kind of prepared weights)
LAYERS = {
    "mxfp8": ("mxfp8", "mxfp8", 0, "mxfp8_row"),
    "mxfp8-group128": ("mxfp8", "mxfp8", 128, "mxfp8_group128"),
    "mxfp8-exact": ("mxfp8", "mxfp8", 32, "mxfp8_exact"),
    "mxfp8-act-bf16": ("mxfp8", "bf16", 0, "mxfp8_exact"),
    "nvfp4": ("nvfp4", "bf16", 0, "nvfp4"),
    "nvfp4-act-nvfp4": ("nvfp4", "nvfp4", 0, "nvfp4"),
    "nvfp4-act-mxfp8": ("nvfp4", "mxfp8", 0, "nvfp4"),
}
RUNGS = [
    pytest.param(name, config, id=f"{name}-n{config.tile_n}")
    for name, (_, _, _, kind) in LAYERS.items()
    for config in variants.ladder("sm_90a", OPERANDS[kind])
]
#: Regions that no tensor core sum goes into: alike to the bit.
EXACT = ("expert_info", "tiles", "row_slot", "slot_rank", "recv_x")


@pytest.mark.parametrize(("name", "config"), RUNGS)
def test_emulator_and_gpu_agree(name, config):
    fmt, act, spread, kind = LAYERS[name]
    problem = moe.Problem(
        hidden=HIDDEN, intermediate=INTERMEDIATE, num_experts=EXPERTS, top_k=TOP_K,
        max_tokens=TOKENS, format=fmt, act=act,
    )  # fmt: skip
    w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) * HIDDEN**-0.5
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) * INTERMEDIATE**-0.5
    if spread:
        for w in (w13, w2):
            w *= torch.where(torch.arange(w.shape[-1]) // spread % 2 == 1, 2.0**-20, 1.0)
    weights = moe.prepare_weights(w13.bfloat16(), w2.bfloat16(), problem, arch="sm_90a")
    assert weights.kind == kind
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    ids = torch.randint(-1, EXPERTS, (TOKENS, TOP_K), dtype=torch.int32)
    topk_weights = torch.rand(TOKENS, TOP_K)

    seen = {}
    for where in ("cuda", "cpu"):
        here = weights.to(where)
        backend = "emulator" if where == "cpu" else "auto"
        ws = moe.Workspace(weights.problem, device=where, backend=backend, operand=weights.operand)
        moe.dispatch(x.to(where), ids.to(where), ws, here, config=config)
        views = ws.views(weights.problem, weights.operand)
        moved = {region: views[region].cpu().clone() for region in EXACT}
        moe.gate_up(ws, here)
        h = views["h"].cpu().clone()
        moe.down(ws, here)
        if where == "cpu":
            own_y = views["y"].clone()
            live = (ids >= 0).flatten()
            views["y"].copy_(seen["cuda"]["y"])
        y = views["y"].cpu().clone()
        out = moe.combine(ids.to(where), topk_weights.to(where), ws, here).cpu().clone()
        seen[where] = {"moved": moved, "h": h, "y": y, "out": out}

    rows, gpu, emulated = int((ids >= 0).sum()), seen["cuda"], seen["cpu"]
    tiles = int(gpu["moved"]["tiles"][0])
    for region, size in (("expert_info", EXPERTS), ("tiles", 1 + tiles), ("row_slot", rows),
                         ("recv_x", rows), ("slot_rank", ids.numel())):  # fmt: skip
        a, b = (s["moved"][region][:size] for s in (gpu, emulated))
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), region
    # Tensor cores keep 13 bits of an FP8 sum; a value on the edge then rounds the other way.
    assert reference.error(own_y[live].float(), gpu["y"][live].float()).whole < 1e-2
    # Combine on the GPU's own rows adds no tensor core sum.
    assert torch.equal(emulated["out"].view(torch.int16), gpu["out"].view(torch.int16))
