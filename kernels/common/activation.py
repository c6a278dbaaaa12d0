"""Gated activations on Float32 pairs."""

from cutlass import Float32, cute

from moe_ep_jit.kernels.common import ptx


def swiglu(gate, up, limit, alpha, beta):
    """``g * sigmoid(alpha * g) * (u + beta)`` with ``g = min(gate, limit)``, ``u = clamp(up, -limit, limit)``; NaN stays NaN.

    limit is infinity where there is none.
    """
    gate = cute.arch.fmin(gate, limit, nan=True)
    up = cute.arch.fmax(
        cute.arch.fmin(up, limit, nan=True), ptx.mul(limit, Float32(-1.0)), nan=True
    )
    sigmoid = ptx.div(Float32(1.0), Float32(1.0) + cute.math.exp(ptx.mul(alpha, gate) * -1.0))
    return gate * sigmoid * (up + beta)
