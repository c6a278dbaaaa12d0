"""The dispatcher: formats, activations, arches and rungs."""

from __future__ import annotations

import pytest
import torch

from moe_ep_jit import Problem, Workspace, choose_variant, layout, variants
from moe_ep_jit.problem import ARCHES

AUTO = Problem(hidden=256, intermediate=128, num_experts=32, top_k=4, max_tokens=512)


@pytest.mark.parametrize(
    ("sources", "fmt", "act"),
    [
        pytest.param((), "mxfp8", "mxfp8", id="nothing-said"),
        pytest.param(("bf16", "bf16"), "mxfp8", "mxfp8", id="bf16"),
        pytest.param(("torch.float32",), "mxfp8", "mxfp8", id="torch.float32"),
        pytest.param(("mxfp8", "mxfp8"), "mxfp8", "mxfp8", id="mxfp8"),
        pytest.param(("fp8",), "mxfp8", "mxfp8", id="fp8"),
        pytest.param(("nvfp4", "nvfp4"), "nvfp4", "bf16", id="nvfp4"),
        pytest.param(("nvfp4", "mxfp8"), "mxfp8", "mxfp8", id="nvfp4+mxfp8"),
        pytest.param(("nvfp4", "bf16"), "mxfp8", "mxfp8", id="nvfp4+bf16"),
    ],
)
@pytest.mark.parametrize("arch", ["sm_90a", None])
def test_auto_format_and_act(sources, fmt, act, arch):
    variant = choose_variant(AUTO, arch, sources)
    assert (variant.problem.format, variant.problem.act) == (fmt, act)
    folder = "reference" if arch is None else "sm90"
    assert variant.name == f"{folder}-{fmt}-{act}"
    assert variant.problem == AUTO.with_(format=fmt, act=act)


@pytest.mark.parametrize("expected_tokens", [None, 8, 4096])
def test_reason_is_one_line_and_says_the_decision(expected_tokens):
    reason = choose_variant(AUTO, "sm_90a", ("bf16",), expected_tokens).reason
    assert "\n" not in reason
    assert "mxfp8 weights" in reason
    assert ("rows an expert" in reason) == (expected_tokens is not None)
    assert ("half the bytes" in reason) == (expected_tokens == 8)


def test_what_the_problem_says_is_kept_and_requantization_is_told():
    problem = AUTO.with_(format="nvfp4", act="mxfp8")
    variant = choose_variant(problem, "sm_90a", ("mxfp8",))
    assert variant.problem == problem
    assert "requantized from mxfp8" in variant.reason
    assert "requantized" not in choose_variant(problem, "sm_90a", ("nvfp4",)).reason


def test_act_that_the_chosen_format_lacks_is_refused():
    with pytest.raises(ValueError, match="act: expected one of"):
        choose_variant(AUTO.with_(act="nvfp4"), "sm_90a", ("mxfp8",))


def test_problem_and_expected_tokens_are_checked():
    with pytest.raises(TypeError, match="problem: expected Problem, got NoneType"):
        choose_variant(None, "sm_90a")
    for tokens in ("x", -1, 8.0, True):
        with pytest.raises(ValueError, match="expected_tokens: expected None or an int >= 0, got"):
            choose_variant(AUTO, "sm_90a", (), tokens)


def test_unknown_source_and_arch_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"source_formats: .*nvfp4.*'int4'"):
        choose_variant(AUTO, "sm_90a", ("int4",))
    with pytest.raises(ValueError, match=r"arch: expected one of sm_90a.*'sm_80'"):
        choose_variant(AUTO, "sm_80", ("bf16",))


@pytest.mark.parametrize(
    ("fmt", "act", "operand"),
    [
        ("mxfp8", "auto", "e4m3"),
        ("mxfp8", "mxfp8", "e4m3"),
        ("mxfp8", "bf16", "bf16"),
        ("nvfp4", "auto", "bf16"),
        ("nvfp4", "bf16", "bf16"),
        ("nvfp4", "nvfp4", "bf16"),
        ("nvfp4", "mxfp8", "bf16"),
    ],
)
def test_operand_of(fmt, act, operand):
    assert variants.operand_of(AUTO.with_(format=fmt, act=act)) == operand


def test_operand_of_an_undecided_format_is_refused():
    with pytest.raises(ValueError, match=r"weights\.problem"):
        variants.operand_of(AUTO)


def test_cpu_has_no_kernels_and_runs_the_reference():
    assert variants.detect_arch("cpu") is None
    assert variants.resolve_backend(torch.device("cpu")) is None
    assert variants.resolve_backend(torch.device("cpu"), "reference") is None
    assert variants.resolve_backend(torch.device("cpu"), "emulator") == "sm_90a"
    with pytest.raises(ValueError, match='expected CPU tensors for "emulator", got cuda:0'):
        variants.resolve_backend(torch.device("cuda:0"), "emulator")
    with pytest.raises(ValueError, match='backend: expected "auto", "reference" or "emulator"'):
        variants.resolve_backend(torch.device("cpu"), "cuda")


def pretend_gpu(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Some GPU")


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((9, 0), "sm_90a"),
        ((8, 0), None),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 0), None),
    ],
)
def test_detect_arch_by_capability(monkeypatch, capability, arch):
    monkeypatch.delenv("MOE_EP_JIT_ARCH", raising=False)
    pretend_gpu(monkeypatch, capability)
    assert variants.detect_arch("cuda:0") == arch


def test_arch_override_is_validated(monkeypatch):
    pretend_gpu(monkeypatch, (8, 0))
    monkeypatch.setenv("MOE_EP_JIT_ARCH", "sm_90a")
    assert variants.detect_arch("cuda:0") == "sm_90a"
    assert variants.detect_arch("cpu") is None
    monkeypatch.setenv("MOE_EP_JIT_ARCH", "sm_90")
    with pytest.raises(ValueError, match=r"MOE_EP_JIT_ARCH: expected one of sm_90a.*'sm_90'"):
        variants.detect_arch("cuda:0")


def test_arch_without_kernels_names_the_reference(monkeypatch):
    monkeypatch.delenv("MOE_EP_JIT_ARCH", raising=False)
    pretend_gpu(monkeypatch, (8, 0))
    device = torch.device("cuda", 0)
    with pytest.raises(RuntimeError, match=r'sm_80.*backend="reference"'):
        variants.resolve_backend(device)
    assert variants.resolve_backend(device, "reference") is None


def pretend_torch(monkeypatch, cuda, devices):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices - 1)


def test_usable_device(monkeypatch):
    pretend_torch(monkeypatch, "13.0", 2)
    assert variants.usable_device("cuda") == torch.device("cuda", 1)
    assert variants.usable_device(torch.device("cuda", 0)) == torch.device("cuda", 0)
    assert variants.usable_device() == torch.device("cuda", 1)
    assert variants.usable_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="device: expected cuda:0 to cuda:1, got cuda:2"):
        variants.usable_device("cuda:2")
    for bad in ("gpu", 3.5, []):
        with pytest.raises(ValueError, match=r"device: expected a torch\.device or a name"):
            variants.usable_device(bad)


@pytest.mark.parametrize(
    ("cuda", "why"), [(None, "built without CUDA"), ("13.0", "finds no GPU")], ids=["cpu", "none"]
)
def test_cuda_that_is_not_there_names_the_doctor(monkeypatch, cuda, why):
    pretend_torch(monkeypatch, cuda, 0)
    assert variants.usable_device() == torch.device("cpu")
    for device in ("cuda", "cuda:0"):
        with pytest.raises(RuntimeError, match=f"{why}; run: moe-ep-jit doctor"):
            variants.usable_device(device)
        with pytest.raises(RuntimeError, match="run: moe-ep-jit doctor"):
            Workspace(AUTO.with_(format="mxfp8"), device=device)


def test_every_arch_has_its_folder():
    for arch, folder in ARCHES.items():
        assert variants.kernels_folder(arch) == folder
        assert variants.kernels_module(arch, "config").__name__.endswith(f"{folder}.config")


@pytest.mark.parametrize(
    ("arch", "operand"), [(arch, operand) for arch in ARCHES for operand in variants.operands(arch)]
)
def test_rungs_are_on_the_ladder_and_grow_with_tokens(arch, operand):
    rungs = variants.ladder(arch, operand)
    assert len(set(rungs)) == len(rungs)
    assert min(rung.tile_n for rung in rungs) >= layout.MIN_TILE_N
    problem = AUTO.with_(format="mxfp8", max_tokens=65536)
    chosen = [
        variants.choose_rung(problem, arch, tokens, operand)
        for tokens in (0, 1, 2, 7, 64, 512, 4096, 65536)
    ]
    assert set(chosen) <= set(rungs)
    sizes = [rung.tile_n for rung in chosen]
    assert sizes[:-2] == sorted(sizes[:-2])
    assert len(set(sizes)) > 3
    assert min(sizes[-2:]) >= 128  # beyond all tiles, what multiplies fastest


def test_ladder_refuses_an_unknown_operand():
    with pytest.raises(ValueError, match=r'operand: expected "e4m3" or "bf16"'):
        variants.ladder("sm_90a", "fp8")


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_blackwell_has_one_format_on_both_sides(arch):
    for fmt in ("mxfp8", "nvfp4"):
        variant = variants.choose_variant(AUTO.with_(format=fmt), arch, [fmt])
        assert (variant.problem.act, variant.name) == (fmt, f"sm100-{fmt}-{fmt}")
        assert variants.operand_of(variant.problem, arch) == fmt
    variant = variants.choose_variant(AUTO, arch, ["nvfp4"])
    assert variant.problem.format == variant.problem.act == "nvfp4"
    for fmt, act in (("nvfp4", "bf16"), ("nvfp4", "mxfp8"), ("mxfp8", "bf16")):
        with pytest.raises(ValueError, match=rf"act: expected .* on {arch}, got '{act}'"):
            variants.choose_variant(AUTO.with_(format=fmt, act=act), arch)


def test_blackwell_says_that_fewer_bits_are_faster_at_any_rows():
    for tokens in (8, 65536):
        problem = AUTO.with_(max_tokens=65536)
        assert "half the bytes" in variants.choose_variant(problem, "sm_100a", (), tokens).reason
