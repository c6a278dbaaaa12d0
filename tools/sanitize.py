"""Every kernel on small shapes: ``compute-sanitizer --tool T python -m moe_ep_jit.tools.sanitize``.

Compile first (a run without the sanitizer does), since the tools slow the compiler down too.
Weights are prepared on the CPU, so that what the tools see is this package's kernels.
"""

from __future__ import annotations

import torch

import moe_ep_jit as moe
from moe_ep_jit import variants

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS = 192, 320, 5, 3, 70
#: (format, act, tile_n of the rungs to run); what the GPU's arch has no kernels for is left out.
LAYERS = (
    ("mxfp8", "mxfp8", (8, 64, 192)),
    ("mxfp8", "bf16", (16,)),
    ("nvfp4", "bf16", (8, 64, 192)),
    ("nvfp4", "nvfp4", (8, 32, 192)),
    ("nvfp4", "mxfp8", (128,)),
)


def main() -> None:
    """Two calls of each layer and rung: the second meets what the first has left behind."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    w13, w2 = (
        normal(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / 16,
        normal(EXPERTS, HIDDEN, INTERMEDIATE) / 16,
    )
    x = normal(TOKENS, HIDDEN).bfloat16().cuda()
    ids = torch.randint(-1, EXPERTS - 1, (TOKENS, TOP_K), generator=generator).cuda()
    topk_weights = normal(TOKENS, TOP_K).cuda()
    arch = variants.detect_arch("cuda")
    layers = [layer for layer in LAYERS if layer[1] in variants.acts(arch, layer[0])]
    for fmt, act, tiles in layers:
        problem = moe.Problem(
            hidden=HIDDEN,
            intermediate=INTERMEDIATE,
            num_experts=EXPERTS,
            top_k=TOP_K,
            max_tokens=TOKENS,
            format=fmt,
            act=act,
        )
        weights = moe.prepare_weights(w13, w2, problem, arch=arch).to("cuda")
        ws = moe.Workspace(problem, operand=weights.operand)
        rungs = [c for c in variants.ladder(ws.arch, weights.operand) if c.tile_n in tiles]
        moe.warmup(ws, weights, configs=rungs)
        # GEMMs load scales of whole tiles, also behind an expert's live rows. Nothing that is kept
        # depends on them; with this, all that initcheck still reports is a mistake.
        for name, view in ws.views(problem, weights.operand).items():
            if name in ("recv_block_sf", "h_sf"):
                view.zero_()
        for config in rungs:
            for _ in range(2):
                moe.moe_forward(x, ids, topk_weights, weights, ws, config=config)
        ws.check()
    print(f"{sum(len(tiles) for _, _, tiles in layers)} rungs ran")  # noqa: T201


if __name__ == "__main__":
    main()
