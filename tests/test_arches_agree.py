"""One input on Hopper's kernels, on Blackwell's and by the reference: all within the same bounds of
one another. Each arch's kernels run on its GPU where there is one, on the PTX emulator elsewhere;
the test's id says which.
"""

from __future__ import annotations

import pytest
import torch
from conftest import SM90_EMULATED, SM100_EMULATED
from sm100_cases import assert_close, on_arch

import moe_ep_jit as moe
from moe_ep_jit import reference, variants

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS = 192, 256, 3, 2, 40

# Runs everywhere, and with a GPU's own tests where one is.
pytestmark = [
    pytest.mark.emulated,
    *([] if SM90_EMULATED else [pytest.mark.sm90]),
    *([] if SM100_EMULATED else [pytest.mark.sm100]),
]


def arch_of(emulated, name):
    """(arch, backend, device) for one side of the comparison."""
    return (name, "emulator", "cpu") if emulated else (variants.detect_arch("cuda"), "auto", "cuda")


HOPPER, BLACKWELL = arch_of(SM90_EMULATED, "sm_90a"), arch_of(SM100_EMULATED, "sm_100a")
REFERENCE = (None, "reference", "cpu")


def where(side):
    return "GPU" if side[2] == "cuda" else "emulated"


def forward(side, fmt, matrices, inputs):
    arch, backend, device = side
    problem = moe.Problem(
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        num_experts=EXPERTS,
        top_k=TOP_K,
        max_tokens=TOKENS,
        format=fmt,
        act=fmt,
    )
    matrices = [matrix.to(device) for matrix in matrices]
    inputs = [part.to(device) for part in inputs]
    if arch is None:
        weights = moe.prepare_weights(*matrices, problem, backend=backend)
        return reference.moe_forward(*inputs, weights)
    with on_arch(arch):
        weights = moe.prepare_weights(*matrices, problem, backend=backend)
        ws = moe.Workspace(weights.problem, device=device, backend=backend, operand=weights.operand)
    assert ws.arch == arch
    return moe.moe_forward(*inputs, weights, ws).cpu()


@pytest.mark.parametrize(
    "places", [f"hopper_{where(HOPPER)}-blackwell_{where(BLACKWELL)}"], ids=str
)
@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
def test_hopper_blackwell_and_the_reference_agree(fmt, places):
    w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN).bfloat16() * HIDDEN**-0.5
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE).bfloat16() * INTERMEDIATE**-0.5
    ids = torch.randint(EXPERTS, (TOKENS, TOP_K), dtype=torch.int32)
    inputs = torch.randn(TOKENS, HIDDEN).bfloat16(), ids, torch.rand(TOKENS, TOP_K)
    hopper, blackwell, want = (
        forward(side, fmt, (w13, w2), inputs) for side in (HOPPER, BLACKWELL, REFERENCE)
    )
    assert_close(hopper, want, fmt)
    assert_close(blackwell, want, fmt)
    assert_close(blackwell, hopper, fmt)
