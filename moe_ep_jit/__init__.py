"""One MoE layer's forward in MXFP8 and NVFP4: kernels compiled on the first call, cached on disk.

Importing this initialises no CUDA and imports no compiler.
"""

from moe_ep_jit.api import combine, dispatch, down, gate_up, moe_forward, quantize
from moe_ep_jit.formats import MXFP8, NVFP4, BlockScaled, Format
from moe_ep_jit.launch import warmup
from moe_ep_jit.layer import MoELayer
from moe_ep_jit.problem import Problem, SwiGLU
from moe_ep_jit.variants import Variant, choose_variant
from moe_ep_jit.weights import (
    PreparedWeights,
    load_prepared,
    prepare_weights,
    save_prepared,
    update_weights,
)
from moe_ep_jit.workspace import Workspace

__version__ = "0.1.0"

__all__ = [
    "MXFP8",
    "NVFP4",
    "BlockScaled",
    "Format",
    "MoELayer",
    "PreparedWeights",
    "Problem",
    "SwiGLU",
    "Variant",
    "Workspace",
    "__version__",
    "choose_variant",
    "combine",
    "dispatch",
    "down",
    "gate_up",
    "load_prepared",
    "moe_forward",
    "prepare_weights",
    "quantize",
    "save_prepared",
    "update_weights",
    "warmup",
]
