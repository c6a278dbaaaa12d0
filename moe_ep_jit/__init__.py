"""One MoE layer's forward in MXFP8 and NVFP4: kernels compiled on the first call, cached on disk.

Importing this imports neither torch nor a compiler: each name is fetched from its module when it is
first used, so that ``moe-ep-jit doctor`` works where torch is missing or broken.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_ep_jit.api import combine, dispatch, down, gate_up, moe_forward, quantize
    from moe_ep_jit.fleet import Fleet, Handle, create_fleet
    from moe_ep_jit.formats import MXFP8, NVFP4, BlockScaled, Format
    from moe_ep_jit.launch import warmup
    from moe_ep_jit.layer import MoELayer
    from moe_ep_jit.problem import Problem, SwiGLU
    from moe_ep_jit.rebalance import update_topology
    from moe_ep_jit.variants import Variant, choose_variant
    from moe_ep_jit.weights import PreparedWeights, prepare_weights, update_weights
    from moe_ep_jit.weights_file import load_prepared, save_prepared
    from moe_ep_jit.workspace import Workspace

__version__ = "0.1.0"

#: Public name -> its module.
_HOMES = {
    **dict.fromkeys(("combine", "dispatch", "down", "gate_up", "moe_forward", "quantize"), "api"),
    **dict.fromkeys(("Fleet", "Handle", "create_fleet"), "fleet"),
    **dict.fromkeys(("MXFP8", "NVFP4", "BlockScaled", "Format"), "formats"),
    "warmup": "launch",
    "MoELayer": "layer",
    **dict.fromkeys(("Problem", "SwiGLU"), "problem"),
    **dict.fromkeys(("Variant", "choose_variant"), "variants"),
    "update_topology": "rebalance",
    **dict.fromkeys(("PreparedWeights", "prepare_weights", "update_weights"), "weights"),
    **dict.fromkeys(("load_prepared", "save_prepared"), "weights_file"),
    "Workspace": "workspace",
}

__all__ = [
    "MXFP8",
    "NVFP4",
    "BlockScaled",
    "Fleet",
    "Format",
    "Handle",
    "MoELayer",
    "PreparedWeights",
    "Problem",
    "SwiGLU",
    "Variant",
    "Workspace",
    "__version__",
    "choose_variant",
    "combine",
    "create_fleet",
    "dispatch",
    "down",
    "gate_up",
    "load_prepared",
    "moe_forward",
    "prepare_weights",
    "quantize",
    "save_prepared",
    "update_topology",
    "update_weights",
    "warmup",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
