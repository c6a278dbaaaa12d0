"""Gated activations on Float32 pairs."""

from cutlass import Float32, cute

from moe_ep_jit.kernels.common import ptx


def clamp(gate, up, limit):
    """``min(gate, limit)`` and up between -limit and limit; NaN stays NaN."""
    low = ptx.mul(limit, Float32(-1.0))
    gate = cute.arch.fmin(gate, limit, nan=True)
    return gate, cute.arch.fmax(cute.arch.fmin(up, limit, nan=True), low, nan=True)


def swiglu(gate, up, alpha, beta):
    """``gate * sigmoid(alpha * gate) * (up + beta)``; NaN stays NaN."""
    # exp2 and the reciprocal are approximate to 22 bits, far below what the operands keep.
    decay = ptx.exp2(ptx.mul(ptx.mul(alpha, Float32(-1.4426950408889634)), gate))
    return gate * ptx.reciprocal(Float32(1.0) + decay) * (up + beta)
