"""Every kernel compiles for its arch without a GPU, and what the compiler made of it fits.

Objects go to the cache that the package itself uses, so that a second run only reads. Each
distinct (kind, act, rung) is built once at a small odd size, each form of a quantized x once, and
two presets of ``cache/shapes.toml`` in full.
"""

from __future__ import annotations

import json
import re

import pytest

from moe_ep_jit import cache_key, entries, jit, layout, variants
from moe_ep_jit.kernels.sm90.packing import OPERANDS
from moe_ep_jit.problem import Problem
from moe_ep_jit.tools import precompile, presets

ARCH = "sm_90a"
FACTS = variants.kernels_module(ARCH, "facts")

#: Registers of an SM, and the shared memory that one CTA may have, in bytes.
REGISTER_FILE = 65536
SHARED_LIMIT = 232_448

#: Small, and no multiple of 128 nor of a power of two in any direction.
SIZES = {"hidden": 192, "intermediate": 320, "num_experts": 3, "top_k": 2, "max_tokens": 64}

#: kind of prepared weights -> the acts that it serves.
KINDS = {
    "mxfp8_row": ("mxfp8",),
    "mxfp8_group128": ("mxfp8",),
    "mxfp8_exact": ("mxfp8", "bf16"),
    "nvfp4": ("bf16", "nvfp4", "mxfp8"),
}

#: (kind, act, form of x) beyond bf16: dispatch alone differs, so one rung of each will do.
QUANTIZED_X = [
    ("mxfp8_row", "mxfp8", "mxfp8"),
    ("nvfp4", "mxfp8", "mxfp8"),
    ("nvfp4", "nvfp4", "nvfp4"),
    ("nvfp4", "bf16", "mxfp8"),
    ("nvfp4", "bf16", "nvfp4"),
]

PRESETS = ["dsv3-ep8", "gptoss-120b"]


def small_job(kind, act, config, x_kind="bf16"):
    fmt = "nvfp4" if kind == "nvfp4" else "mxfp8"
    facts = FACTS.facts(Problem(**SIZES, format=fmt, act=act), kind, x_kind, config)
    return precompile.Job("moe", facts, ARCH, FACTS.BUILD, FACTS.name(facts))


def rungs(kind):
    return variants.ladder(ARCH, OPERANDS[kind])


SMALL = [
    small_job(kind, act, config)
    for kind, acts in KINDS.items()
    for act in acts
    for config in rungs(kind)
] + [small_job(kind, act, rungs(kind)[1], x_kind) for kind, act, x_kind in QUANTIZED_X]

IN_FULL = [
    job
    for preset in presets.load(PRESETS)
    for fmt in ("mxfp8", "nvfp4")
    for job in presets.jobs(preset.problem(fmt), ARCH)
]

JOBS = [*SMALL, *IN_FULL]


@pytest.fixture(scope="module")
def compiled():
    """Job name -> its entry's folder and launch.json, all jobs compiled by two processes."""
    done = precompile.run(JOBS, num_workers=2)
    assert not [r for r in done["results"] if r["status"] == "failed"], done
    found = {}
    for job in JOBS:
        key = cache_key.full_key(job.op, job.facts, job.arch, job.build)
        entry = entries.Entry(key, cache_key.fingerprint(key), job.name)
        folders = [entry.folder(cache) for cache in jit.cache_dirs()]
        folder = next((folder for folder in folders if folder.is_dir()), None)
        assert folder is not None, f"{job.name} is in no cache folder: did a source just change?"
        found[job.name] = folder, json.loads((folder / entries.LAUNCH).read_text())
    assert len(found) == len(JOBS)
    return found


def kernels_of(launch, part):
    return [k for k in launch["kernels"] if part in k["name"]]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_object_fits_its_launch(compiled, job):
    folder, launch = compiled[job.name]
    assert f".target {ARCH}" in (folder / entries.PTX).read_text()
    fold = job.facts["config"]["fold_intermediate"]
    for part, count in {
        "Route": 1,
        "Dispatch": 1,
        "GroupedGemm": 2,
        "Fold": int(fold),
        "Combine": 1,
    }.items():
        assert len(kernels_of(launch, f"{part}_")) == count, (part, launch["kernels"])
    for kernel in launch["kernels"]:
        # A warp's registers are given in eights a thread.
        most = min(REGISTER_FILE // kernel["threads"] // 8 * 8, 255)
        assert 0 < kernel["registers"] <= most, kernel
        assert kernel["stack_bytes"] == 0, kernel  # where spilled registers would be
        assert kernel["static_shared_bytes"] <= 48 * 1024, kernel
    shared = launch["dynamic_shared_bytes"]["GroupedGemm"]
    gemms = kernels_of(launch, "GroupedGemm_")
    assert shared + max(k["static_shared_bytes"] for k in gemms) <= SHARED_LIMIT


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_registers_that_warpgroups_pass_on_fit_the_file(compiled, job):
    folder, launch = compiled[job.name]
    ptx = (folder / entries.PTX).read_text()
    wgs = job.facts["config"]["num_math_warpgroups"]
    for kernel in kernels_of(launch, "GroupedGemm_"):
        assert kernel["threads"] == 128 * (wgs + 1)
    grown = {int(n) for n in re.findall(r"setmaxnreg\.inc\.\S+\s+(\d+);", ptx)}
    shrunk = {int(n) for n in re.findall(r"setmaxnreg\.dec\.\S+\s+(\d+);", ptx)}
    assert grown
    assert 128 * (wgs * max(grown) + max(shrunk)) <= REGISTER_FILE


def test_every_rung_of_both_formats_is_covered():
    covered = {(j.facts["kind"], j.facts["act"], j.facts["config"]["tile_n"]) for j in SMALL}
    assert len(covered) == 7 * 7
    for preset in PRESETS:
        assert sum(preset == p.name for p in presets.load()) == 1
    assert len(IN_FULL) == len(PRESETS) * (2 + 1) * 7
    assert min(j.facts["config"]["tile_n"] for j in SMALL) == layout.MIN_TILE_N
