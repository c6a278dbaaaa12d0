"""One input on Hopper's kernels, on Blackwell's and by the reference: all within the same bounds of
one another. Both arches' kernels run on the PTX emulator here, whatever the machine has.
"""

from __future__ import annotations

import pytest
import torch
from sm100_cases import assert_close, on_arch

import moe_ep_jit as moe
from moe_ep_jit import reference

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS = 192, 256, 3, 2, 40

pytestmark = pytest.mark.emulated


def forward(arch, fmt, matrices, inputs):
    problem = moe.Problem(
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        num_experts=EXPERTS,
        top_k=TOP_K,
        max_tokens=TOKENS,
        format=fmt,
        act=fmt,
    )
    if arch is None:
        weights = moe.prepare_weights(*matrices, problem, backend="reference")
        return reference.moe_forward(*inputs, weights)
    with on_arch(arch):
        weights = moe.prepare_weights(*matrices, problem, backend="emulator")
        ws = moe.Workspace(
            weights.problem, device="cpu", backend="emulator", operand=weights.operand
        )
    return moe.moe_forward(*inputs, weights, ws).clone()


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
def test_hopper_blackwell_and_the_reference_agree(fmt):
    w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN).bfloat16() * HIDDEN**-0.5
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE).bfloat16() * INTERMEDIATE**-0.5
    ids = torch.randint(EXPERTS, (TOKENS, TOP_K), dtype=torch.int32)
    inputs = torch.randn(TOKENS, HIDDEN).bfloat16(), ids, torch.rand(TOKENS, TOP_K)
    hopper, blackwell, want = (
        forward(arch, fmt, (w13, w2), inputs) for arch in ("sm_90a", "sm_100a", None)
    )
    assert_close(hopper, want, fmt)
    assert_close(blackwell, want, fmt)
    assert_close(blackwell, hopper, fmt)
