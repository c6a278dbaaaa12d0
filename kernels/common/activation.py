"""Gated activations on Float32 pairs."""

from cutlass import Float32, cute

from moe_ep_jit.kernels.common import ptx


def swiglu(gate, up, limit, alpha, beta):
    """``g * sigmoid(alpha * g) * (u + beta)`` with ``g = min(gate, limit)``, ``u = clamp(up,
    -limit, limit)``; NaN stays NaN.

    limit is infinity where there is none.
    """
    gate = cute.arch.fmin(gate, limit, nan=True)
    up = cute.arch.fmax(
        cute.arch.fmin(up, limit, nan=True), ptx.mul(limit, Float32(-1.0)), nan=True
    )
    # exp2 and the reciprocal are approximate to 22 bits, far below what the operands keep.
    decay = ptx.exp2(ptx.mul(ptx.mul(alpha, Float32(-1.4426950408889634)), gate))
    return gate * ptx.reciprocal(Float32(1.0) + decay) * (up + beta)
