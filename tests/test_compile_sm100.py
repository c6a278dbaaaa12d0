"""Blackwell's kernels compile without a GPU, and what the compiler made of them fits the plan."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from moe_ep_jit import cache_key, entries, jit, variants
from moe_ep_jit.problem import Problem
from moe_ep_jit.tools import precompile, presets

FACTS = variants.kernels_module("sm_100a", "facts")
SHARED_LIMIT, REGISTER_FILE, TMEM_COLUMNS = 232_448, 65536, 512
IN_FLIGHT = 64 * 1024  # bytes of loads that an SM should have on their way, and never fewer stages
STAGES = 3  # than this

SIZES = {"hidden": 192, "intermediate": 320, "num_experts": 3, "top_k": 2, "max_tokens": 64}
PRESETS = ["dsv3-ep8", "gptoss-120b"]
KINDS = {"mxfp8": "mxf8f6f4.block_scale.block32", "nvfp4": "mxf4nvf4.block_scale.block16"}


def small_job(kind, config, arch="sm_100a", x_kind="bf16", **sizes):
    problem = Problem(**(SIZES | sizes), format=kind, act=kind)
    facts = FACTS.facts(problem, kind, x_kind, config)
    return precompile.Job("moe", facts, arch, FACTS.BUILD, FACTS.name(facts))


def ladder(kind):
    return variants.ladder("sm_100a", kind)


SMALL = [small_job(kind, config) for kind in KINDS for config in ladder(kind)]
# Of the sister arch, and with a quantized x, where little differs: a rung each.
SMALL += [small_job(kind, ladder(kind)[i], "sm_103a") for kind in KINDS for i in (0, -1)]
SMALL += [small_job(kind, ladder(kind)[1], x_kind=kind) for kind in KINDS]
# One part of a token a CTA or several: combine's loops differ, and spilled at 256 once.
SMALL += [
    small_job("nvfp4", ladder("nvfp4")[0], hidden=hidden, num_experts=8, top_k=top_k)
    for hidden, top_k in ((256, 2), (1024, 8), (2048, 6))
]
IN_FULL = [
    job
    for preset in presets.load(PRESETS)
    for fmt in KINDS
    for job in presets.jobs(preset.problem(fmt), "sm_100a")
]
JOBS = [*SMALL, *IN_FULL]


@pytest.fixture(scope="module")
def compiled():
    """(arch, name) of a job -> PTX and launch.json, all jobs compiled by two processes."""
    done = precompile.run(JOBS, num_workers=2)
    assert not [r for r in done["results"] if r["status"] == "failed"], done
    found = {}
    for job in JOBS:
        key = cache_key.full_key(job.op, job.facts, job.arch, job.build)
        entry = entries.Entry(key, cache_key.fingerprint(key), job.name)
        folders = [entry.folder(cache) for cache in jit.cache_dirs()]
        folder = next((folder for folder in folders if folder.is_dir()), None)
        assert folder is not None, f"{job.name} is in no cache folder: did a source just change?"
        launch = json.loads((folder / entries.LAUNCH).read_text())
        found[job.arch, job.name] = (folder / entries.PTX).read_text(), launch
    assert len(found) == len(JOBS)
    return found


def gemms_of(text):
    """The PTX of both grouped GEMMs."""
    parts = re.split(r"(?=^\.visible \.entry)", text, flags=re.MULTILINE)[1:]
    return [part for part in parts if "GroupedGemm" in part.split("(", 1)[0]]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.arch}-{job.name}")
def test_object_fits_its_launch(compiled, job):
    text, launch = compiled[job.arch, job.name]
    assert f".target {job.arch}" in text
    for part, count in {"Route": 1, "Dispatch": 1, "GroupedGemm": 2, "Combine": 1}.items():
        kernels = [k for k in launch["kernels"] if f"{part}_" in k["name"]]
        assert len(kernels) == count, (part, launch["kernels"])
    assert {k["threads"] for k in launch["kernels"] if "GroupedGemm_" in k["name"]} == {384}
    for kernel in launch["kernels"]:
        most = min(REGISTER_FILE // kernel["threads"] // 8 * 8, 255)
        assert 0 < kernel["registers"] <= most, kernel
        assert kernel["stack_bytes"] == 0, kernel  # where spilled registers would be
    assert launch["dynamic_shared_bytes"]["GroupedGemm"] <= SHARED_LIMIT


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.arch}-{job.name}")
def test_tensor_cores_are_asked_as_planned(compiled, job):
    text, _ = compiled[job.arch, job.name]
    kind, config = job.facts["kind"], job.facts["config"]
    ctas = config["cluster"]
    gemms = gemms_of(text)
    assert len(gemms) == 2
    for gemm in gemms:
        mmas = re.findall(r"tcgen05\.mma\.(\S+)", gemm)
        assert mmas
        assert set(mmas) == {f"cta_group::{ctas}.kind::{KINDS[kind]}"}
        (columns,) = re.findall(r"tcgen05\.alloc\S+ \[%r\d+\], (%r\d+);", gemm)
        (columns,) = re.findall(rf"mov\.b32 \t{columns}, (\d+);", gemm)
        assert 2 * config["tile_n"] < int(columns) <= TMEM_COLUMNS
        loads = re.findall(r"cp\.async\.bulk\.tensor\.2d\.(\S+)", gemm)
        assert ("multicast::cluster" in "".join(loads)) == (ctas == 2)
        assert len(re.findall(r"tcgen05\.dealloc", gemm)) == 1


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.arch}-{job.name}")
def test_roles_are_as_planned(compiled, job):
    """Each role's instructions stand once: nothing is unrolled, doubled or done by two roles."""
    from moe_ep_jit.kernels.sm100.grouped_gemm import GroupedGemm

    text, _ = compiled[job.arch, job.name]
    facts = job.facts
    hidden, intermediate = facts["hidden"], facts["intermediate"]
    plans = [
        GroupedGemm(
            kind=facts["kind"],
            gate_up=gate_up,
            k=k,
            m=m,
            num_experts=facts["num_experts"],
            config=variants.kernels_module(job.arch, "config").Config(**facts["config"]),
        )
        for gate_up, k, m in ((True, hidden, 2 * intermediate), (False, intermediate, hidden))
    ]
    found = []
    for gemm in gemms_of(text):
        counts = [
            len(re.findall(rf"^\s*(?:@%\w+ )?{op}", gemm, flags=re.MULTILINE))
            for op in (
                r".*tcgen05\.mma\.",
                r".*tcgen05\.cp\.",
                r".*tcgen05\.commit\.",
                r".*tcgen05\.ld\.",
                r".*cp\.async\.bulk\.tensor\.",
            )
        ]
        found.append(counts)
    want = []
    for plan in plans:
        # The stage of the loop, and one of its own where K ends within a stage.
        stages = [plan.steps] if plan.k_stages > 1 or plan.last_steps == plan.steps else []
        stages += [plan.last_steps] if plan.last_steps != plan.steps else []
        atoms = [-(-steps // plan.steps_per_atom) for steps in stages]
        ahead = min(plan.num_stages, plan.k_stages)
        copies = ahead + 2 + plan.sf_copies  # weights first, then weights, tokens, scales
        commits = len(stages) + 1
        want.append(
            [sum(stages), sum(atoms) * (1 + plan.sf_blocks), commits, 1, copies],
        )
    assert sorted(found) == sorted(want)


@pytest.mark.parametrize("kind", KINDS)
def test_stages_and_columns_of_every_rung(kind):
    from moe_ep_jit.kernels.sm100.grouped_gemm import GroupedGemm

    sizes = {"k": 7168, "m": 4096, "num_experts": 32}
    for config in ladder(kind):
        for gate_up in (True, False):
            gemm = GroupedGemm(kind=kind, gate_up=gate_up, config=config, **sizes)
            assert gemm.num_stages >= STAGES
            assert gemm.num_stages * gemm.loaded_bytes // gemm.cluster >= IN_FLIGHT
            assert gemm.smem_bytes <= SHARED_LIMIT
            assert gemm.sfa_column >= 2 * config.tile_n  # two accumulators
            widest = kind == "nvfp4" and config.tile_n == 192
            assert gemm.sf_slots == (2 if widest else gemm.num_stages)
            assert gemm.tmem_columns <= TMEM_COLUMNS
            assert config.cluster == (2 if config.tile_n >= 128 else 1)


def nvdisasm():
    """The disassembler of a CUDA toolkit or of NVIDIA's wheels; None where there is none."""
    found = shutil.which("nvdisasm")
    if found is None:
        spec = importlib.util.find_spec("nvidia")
        places = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
        found = next((p for place in places for p in place.glob("*/bin/nvdisasm")), None)
    return found


@pytest.mark.skipif(nvdisasm() is None, reason="nvdisasm is not installed")
@pytest.mark.parametrize("job", SMALL, ids=lambda job: f"{job.arch}-{job.name}")
def test_machine_code_holds_the_block_scaled_mma(compiled, job, tmp_path):
    key = cache_key.full_key(job.op, job.facts, job.arch, job.build)
    entry = entries.Entry(key, cache_key.fingerprint(key), job.name)
    folder = next(f for f in (entry.folder(c) for c in jit.cache_dirs()) if f.is_dir())
    raw = (folder / entries.OBJECT).read_bytes()
    cubin = tmp_path / "kernels.cubin"
    cubin.write_bytes(raw[raw.index(b"\x7fELF", 1) :])
    done = subprocess.run([nvdisasm(), "-c", cubin], capture_output=True, text=True, check=True)
    mmas = set(re.findall(r"\b(UTC[A-Z]*MMA\S*)", done.stdout))
    assert mmas
    pair = job.facts["config"]["cluster"] == 2
    for mma in mmas:
        assert mma.startswith({"mxfp8": "UTCQMMA", "nvfp4": "UTCOMMA"}[job.facts["kind"]])
        assert ("2CTA" in mma) == pair
    assert "SpillRefill" not in done.stdout
