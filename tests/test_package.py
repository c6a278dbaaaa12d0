"""What importing the package does, and the names that it offers."""

from __future__ import annotations

import subprocess
import sys

import moe_ep_jit as moe


def test_import_touches_no_gpu_and_no_compiler():
    code = (
        "import sys, torch, moe_ep_jit\n"
        "loaded = [m for m in ('cutlass', 'tvm_ffi') if m in sys.modules]\n"
        "assert not loaded, loaded\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert moe_ep_jit.__version__\n"
        "missing = [n for n in moe_ep_jit.__all__ if not hasattr(moe_ep_jit, n)]\n"
        "assert not missing, missing\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_public_names():
    names = {
        "Problem", "SwiGLU", "BlockScaled", "prepare_weights", "save_prepared", "load_prepared",
        "update_weights", "Workspace", "warmup", "moe_forward", "quantize", "dispatch", "gate_up",
        "down", "combine", "MoELayer", "choose_variant", "__version__",
    }  # fmt: skip
    assert names <= set(moe.__all__)
