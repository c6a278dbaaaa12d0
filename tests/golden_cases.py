"""What the kernels for sm_90a compute, piece by piece, on inputs that are equal everywhere.

``python tests/golden_cases.py FOLDER`` on a Hopper GPU compiles every rung, runs it and writes
``FOLDER/sm90.npz``, which belongs into ``tests/golden``: ``test_emulator_golden`` compares the
emulator with it, wherever Python runs. It holds a digest of all that no tensor core sum goes into,
which must be equal to the bit, and every 29th value of the rest.

The stages are fed apart, so that no stage inherits another's rounding: ``down`` reads an
intermediate, and ``combine`` rows, that were put there.
"""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from pathlib import Path

import numpy as np
import torch

import moe_ep_jit as moe
from moe_ep_jit import variants
from moe_ep_jit.kernels.sm90.packing import OPERANDS
from moe_ep_jit.tools import precompile

ARCH = "sm_90a"
GOLDEN = Path(__file__).parent / "golden" / "sm90.npz"
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS = 256, 192, 5, 3, 40
STRIDE = 29

#: name -> (format, act, K elements that share a magnitude, kind of prepared weights, biases)
LAYERS = {
    "mxfp8": ("mxfp8", "mxfp8", 0, "mxfp8_row", False),
    "mxfp8-bias": ("mxfp8", "mxfp8", 0, "mxfp8_row", True),
    "mxfp8-group128": ("mxfp8", "mxfp8", 128, "mxfp8_group128", False),
    "mxfp8-exact": ("mxfp8", "mxfp8", 32, "mxfp8_exact", False),
    "mxfp8-act-bf16": ("mxfp8", "bf16", 0, "mxfp8_exact", False),
    "nvfp4": ("nvfp4", "bf16", 0, "nvfp4", False),
    "nvfp4-bias": ("nvfp4", "bf16", 0, "nvfp4", True),
    "nvfp4-act-nvfp4": ("nvfp4", "nvfp4", 0, "nvfp4", False),
    "nvfp4-act-mxfp8": ("nvfp4", "mxfp8", 0, "nvfp4", False),
}
#: What dispatch leaves behind; ``rows`` live ones of the last three.
_MOVED = ("slot_rank", "expert_info", "tiles", "row_slot", "recv_x", "recv_sf")


def rungs(name):
    return variants.ladder(ARCH, OPERANDS[LAYERS[name][3]])


def draw(key, *shape):
    """Integers of 64 bits from a counter: alike under every version of every library."""
    count = int(np.prod(shape))
    start = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    with np.errstate(over="ignore"):
        z = np.uint64(start) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(
            0x9E3779B97F4A7C15
        )
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (z ^ z >> np.uint64(31)).reshape(shape)


def normal(key, *shape):
    """About a normal distribution of width 1: four 16-bit draws added, exact in fp32."""
    parts = draw(key, *shape).view(np.uint16).reshape(*shape, 4).astype(np.int64)
    total = (parts.sum(-1) - 2 * 65535) / 2.0**16  # width 0.577
    return torch.from_numpy((total * 1.75).astype(np.float32))


@cache
def layer(name):
    fmt, act, spread, kind, bias = LAYERS[name]
    problem = moe.Problem(
        hidden=HIDDEN, intermediate=INTERMEDIATE, num_experts=EXPERTS, top_k=TOP_K,
        max_tokens=TOKENS, format=fmt, act=act, bias=bias,
        activation=moe.SwiGLU(limit=7.0, alpha=1.702, beta=1.0) if bias else moe.SwiGLU(),
    )  # fmt: skip
    w13 = normal(f"{name} w13", EXPERTS, 2 * INTERMEDIATE, HIDDEN) * 2.0**-4
    w2 = normal(f"{name} w2", EXPERTS, HIDDEN, INTERMEDIATE) * 2.0**-4
    if spread:
        for w in (w13, w2):
            w *= torch.where(torch.arange(w.shape[-1]) // spread % 2 == 1, 2.0**-20, 1.0)
    biases = {}
    if bias:
        biases["w13_bias"] = normal(f"{name} b13", EXPERTS, 2 * INTERMEDIATE)
        biases["w2_bias"] = normal(f"{name} b2", EXPERTS, HIDDEN)
    weights = moe.prepare_weights(w13.bfloat16(), w2.bfloat16(), problem, arch=ARCH, **biases)
    assert weights.kind == kind
    return weights


def inputs():
    x = normal("x", TOKENS, HIDDEN).bfloat16()
    ids = torch.from_numpy((draw("ids", TOKENS, TOP_K) % np.uint64(EXPERTS + 1)).astype(np.int32))
    topk_weights = torch.from_numpy((draw("weights", TOKENS, TOP_K) >> np.uint64(40)) * 2.0**-24)
    return x, ids - 1, topk_weights.float()


def workspace(name, where, seed=0):
    """(weights there, a poisoned workspace)"""
    weights = layer(name).to(where)
    ws = moe.Workspace(
        weights.problem, device=where, backend="emulator" if where == "cpu" else "auto",
        operand=weights.operand,
    )  # fmt: skip
    if where == "cpu":
        ws.emulator.seed = seed
    for region, tensor in ws.views(weights.problem, weights.operand).items():
        if region != "control":
            tensor.view(-1).view(torch.uint8).fill_(0xFF)
    return weights, ws


def record(name, config, where, seed=0, stride=STRIDE):
    """Digests and samples of one rung: all that is compared."""
    weights, ws = workspace(name, where, seed)
    x, ids, topk_weights = (t.to(where) for t in inputs())
    views = ws.views(weights.problem, weights.operand)
    live = (ids >= 0).flatten().cpu()
    rows = int(live.sum())
    moe.dispatch(x, ids, ws, weights, config=config)
    sizes = {"expert_info": EXPERTS, "tiles": 1 + int(views["tiles"][0]), "slot_rank": ids.numel()}
    moved = [views[r][: sizes.get(r, rows)].cpu() for r in _MOVED if _is_moved(r, weights)]
    found = {"moved": _digest(*moved), "weights": _digest(*_tensors(weights))}

    moe.gate_up(ws, weights)
    found["h"] = _sample(_intermediate(views, weights, config, rows), stride)

    _put_intermediate(views, weights, name, rows)
    moe.down(ws, weights)
    found["y"] = _sample(views["y"].cpu()[live], stride)

    y = normal(f"{name} y", ids.numel(), HIDDEN).bfloat16().to(where)
    views["y"][live.to(where)] = y[live.to(where)]
    found["out"] = _digest(moe.combine(ids, topk_weights, ws, weights).cpu())
    return found


def _is_moved(region, weights):
    return region != "recv_sf" or weights.operand == "e4m3"


def _tensors(weights):
    return [weights.tensors[key] for key in sorted(weights.tensors)]


def _digest(*tensors):
    joined = hashlib.sha256()
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            joined.update(raw.numpy().tobytes())
    return np.frombuffer(joined.digest()[:16], np.uint8)


def _sample(tensor, stride):
    return tensor.float().flatten()[::stride].numpy()


def _intermediate(views, weights, config, rows):
    """The live rows of h as numbers."""
    h = views["h"][:rows]
    if weights.operand == "bf16":
        return h.float().cpu()
    h = h.view(torch.float8_e4m3fn).float().cpu()
    if config.fold_intermediate:
        return h * views["recv_sf"][:rows, None].cpu()
    scales = []
    for expert, (_, _, first, count) in enumerate(views["expert_info"].tolist()):
        column = -(-first // 4) * 4 + 4 * expert
        scales.append(views["h_sf"][:, column : column + count].T.cpu())
    return h * torch.cat(scales).repeat_interleave(32, 1)


def _put_intermediate(views, weights, name, rows):
    """Another intermediate, with its scales, in the live rows."""
    where = views["h"].device
    h = normal(f"{name} h", rows, INTERMEDIATE)
    if weights.operand == "bf16":
        views["h"][:rows] = h.bfloat16().to(where)
        return
    codes = (h * 64).to(torch.float8_e4m3fn).view(torch.uint8)
    views["h"][:rows] = codes.view(views["h"].dtype).to(where)
    scales = 2.0 ** -(4 + torch.from_numpy((draw("h_sf", rows) % np.uint64(5)).astype(np.int64)))
    views["recv_sf"][:rows] = scales.float().to(where)
    for expert, (_, _, first, count) in enumerate(views["expert_info"].tolist()):
        column = -(-first // 4) * 4 + 4 * expert
        part = scales[first : first + count].float().to(where)
        views["h_sf"][:, column : column + count] = part


def compare(name, got, want):
    """What the emulator found against what the GPU did. Bounds: relative L2 of the samples.

    Tensor cores keep 13 bits of an FP8 sum, 24 of a 16-bit one: an intermediate on the edge rounds
    the other way, and so does a bf16 y.
    """
    for part in ("weights", "moved", "out"):
        assert got[part].tolist() == want[part].tolist(), part
    fp8 = LAYERS[name][0] == "mxfp8" and LAYERS[name][1] == "mxfp8"
    for part, bound in (("h", 1e-2), ("y", 2e-3 if fp8 else 1e-3)):
        error = np.linalg.norm(got[part] - want[part]) / np.linalg.norm(want[part])
        assert error < bound, (part, error)


def key_of(name, config):
    return f"{name}-n{config.tile_n}"


def load():
    """rung's key -> what ``record`` gave on the GPU."""
    with np.load(GOLDEN) as file:
        found = {}
        for entry in file.files:
            key, part = entry.rsplit("/", 1)
            value = file[entry]
            found.setdefault(key, {})[part] = value if part in _DIGESTS else value.astype("f4")
    return found


_DIGESTS = ("weights", "moved", "out")


def main():
    """Compile on all cores, run, write."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    facts = variants.kernels_module(ARCH, "facts")
    jobs = []
    for name in LAYERS:
        weights = layer(name)
        for config in rungs(name):
            what = facts.facts(weights.problem, weights.kind, "bf16", config)
            jobs.append(precompile.Job("moe", what, ARCH, facts.BUILD, facts.name(what)))
    done = precompile.run(jobs)
    assert not done["failed"], done["results"]
    values = {}
    for name in LAYERS:
        for config in rungs(name):
            for part, value in record(name, config, "cuda").items():
                kept = value if part in _DIGESTS else value.astype(np.float16)
                values[f"{key_of(name, config)}/{part}"] = kept
    np.savez_compressed(folder / "sm90.npz", **values)
    gpu = torch.cuda.get_device_name()
    print(f"{len(values) // 5} rungs on {gpu}, {done['seconds']} s of compiling")  # noqa: T201


if __name__ == "__main__":
    main()
