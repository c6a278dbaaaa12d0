"""What one compiled object depends on (``common/facts.py``), and what builds it."""

from moe_ep_jit.kernels.common.facts import facts, name

__all__ = ["BUILD", "facts", "name"]

BUILD = "moe_ep_jit.kernels.sm90.forward:compile_op"
