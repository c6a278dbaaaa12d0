"""What preparing refuses: each a clear error before anything is made."""

from __future__ import annotations

import pytest
import torch
from weight_cases import FORMATS, make_problem, one_thread, quantized, sources  # noqa: F401

from moe_ep_jit.weights import prepare_weights

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


@FORMATS
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_float_sources_must_be_finite(fmt: str, value: float) -> None:
    problem = make_problem(7, 64, 64, format=fmt)
    for name in ("w13", "w2"):
        w = dict(zip(("w13", "w2"), sources(problem), strict=True))
        w[name] = w[name].bfloat16()
        w[name][5, 60, 60] = value
        for arch in (None, "sm_90a"):
            with pytest.raises(ValueError, match=rf"{name}: .* NaN or Inf in expert\(s\) \[5\]"):
                prepare_weights(w["w13"], w["w2"], problem, arch=arch)


@pytest.mark.parametrize(
    ("fmt", "byte", "what"),
    [
        ("mxfp8", 0xFF, "NaN scales"),
        ("nvfp4", 0x7F, "NaN scales"),
        ("nvfp4", 0xFF, "NaN scales"),
        ("nvfp4", 0xB0, "negative scales"),
    ],
    ids=lambda v: f"{v:02x}" if isinstance(v, int) else v.split()[0],
)
@pytest.mark.parametrize("target", ["mxfp8", "nvfp4"])
def test_bad_scale_bytes(fmt: str, byte: int, what: str, target: str) -> None:
    problem = make_problem(3, 64, 64, format=target)
    w13, w2 = (quantized(w, fmt) for w in sources(problem))
    w2.sf.view(torch.uint8)[2, 60, 1] = byte
    for arch in (None, "sm_90a"):
        with pytest.raises(ValueError, match=rf"w2: .* {what} in expert\(s\) \[2\]"):
            prepare_weights(w13, w2, problem, arch=arch)


def test_nan_elements() -> None:
    problem = make_problem(3, 64, 64)
    w13, w2 = (quantized(w, "mxfp8") for w in sources(problem))
    w13.data.view(torch.uint8)[1, 0, 0] = 0xFF
    with pytest.raises(ValueError, match=r"w13: .* NaN elements in expert\(s\) \[1\]"):
        prepare_weights(w13, w2, problem)


@pytest.mark.parametrize("value", [float("nan"), -1.0, 2.0**110], ids=str)
def test_bad_global_scale(value: float) -> None:
    problem = make_problem(3, 64, 64, format="nvfp4")
    w13, w2 = (quantized(w, "nvfp4") for w in sources(problem))
    w13.global_scale[1] = value
    with pytest.raises(ValueError, match=r"w13\.global_scale: expected"):
        prepare_weights(w13, w2, problem)


def _bad_arguments() -> list:
    f = torch.zeros
    w13, w2 = (2, 256, 192), (2, 192, 128)
    good = {"w13": f(w13), "w2": f(w2)}
    return [
        ("transposed", {**good, "w13": f(2, 192, 256)}, ValueError, "w13: expected .*256, 192"),
        ("experts", {**good, "w2": f(3, 192, 128)}, ValueError, "w2: expected"),
        ("two_dims", {**good, "w2": f(192, 128)}, ValueError, "w2: expected"),
        ("int_dtype", {**good, "w13": f(w13, dtype=torch.int8)}, TypeError, "BlockScaled"),
        ("fp64", {**good, "w13": f(w13, dtype=torch.float64)}, TypeError, "float64"),
        ("fp8", {**good, "w13": f(w13).to(torch.float8_e4m3fn)}, TypeError, "BlockScaled"),
        ("not_a_tensor", {**good, "w13": [1]}, TypeError, "list"),
        ("device", {**good, "w2": f(w2, device="meta")}, ValueError, "w2: expected on cpu"),
        ("bias_given", {**good, "w13_bias": f(2, 256)}, ValueError, "w13_bias: expected None"),
        ("gate_up_name", {**good, "gate_up": "both"}, ValueError, "gate_up: expected"),
        ("gate_up_step", {**good, "gate_up": 3}, ValueError, "divisor of intermediate=128"),
        ("gate_up_bool", {**good, "gate_up": True}, ValueError, "gate_up: expected"),
        ("gate_up_zero", {**good, "gate_up": 0}, ValueError, "gate_up: expected"),
        ("h_scale", {**good, "h_global_scale": 1.0}, ValueError, "h_global_scale: expected None"),
        ("rank", {**good, "rank": 1}, ValueError, "rank: expected 0..0"),
        ("rank_text", {**good, "rank": "0"}, ValueError, "rank: expected 0..0, got '0'; pass"),
        ("rank_bool", {**good, "rank": False}, ValueError, "rank: expected 0..0, got False"),
        ("problem", {**good, "problem": None}, TypeError, "problem: expected Problem, got None"),
        ("tokens", {**good, "expected_tokens": "x"}, ValueError, "expected_tokens: .*got 'x'; "),
        ("tokens_less", {**good, "expected_tokens": -1}, ValueError, "expected_tokens: .*got -1"),
        ("arch", {**good, "arch": "sm_80"}, ValueError, "sm_90a"),
        ("backend", {**good, "backend": "cuda"}, ValueError, "backend: expected"),
        ("arch_and_reference", {**good, "arch": "sm_90a", "backend": "reference"}, ValueError,
         "drop one"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [pytest.param(*case[1:], id=case[0]) for case in _bad_arguments()],
)
def test_bad_arguments(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        prepare_weights(**{"problem": make_problem(), **arguments})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"w13_bias": None}, ValueError, "w13_bias: expected a tensor"),
        ({"w2_bias": None}, ValueError, "w2_bias: expected a tensor"),
        ({"w2_bias": torch.zeros(2, 256)}, ValueError, "w2_bias: expected shape"),
        ({"w2_bias": torch.zeros(2, 192, dtype=torch.int32)}, TypeError, "floating-point"),
        ({"w2_bias": torch.zeros(2, 192, device="meta")}, ValueError, "expected on cpu"),
        ({"w13_bias": torch.full((2, 256), float("nan"))}, ValueError, "finite"),
        ({"h_global_scale": 0.0}, ValueError, "positive"),
        ({"h_global_scale": float("nan")}, ValueError, "finite"),
        ({"h_global_scale": torch.ones(3)}, ValueError, "expected shape"),
        ({"h_global_scale": float("inf")}, ValueError, "finite"),
        ({"h_global_scale": 10**400}, ValueError, "finite"),
        ({"h_global_scale": 2.0**107}, ValueError, r"below 2\^107"),
        ({"h_global_scale": -(2.0**107)}, ValueError, "positive"),
        ({"h_global_scale": torch.tensor([1.0, 2.0**120])}, ValueError, r"below 2\^107"),
        ({"h_global_scale": torch.tensor(1e300, dtype=torch.float64)}, ValueError, r"2\^107"),
        ({"h_global_scale": "1"}, TypeError, "h_global_scale: expected .* got str; pass"),
        ({"h_global_scale": True}, TypeError, "h_global_scale: expected .* got bool"),
    ],
    ids=["no13", "no2", "shape", "dtype", "device", "nan", "h_zero", "h_nan", "h_shape", "h_inf",
         "h_int", "h_limit", "h_negative", "h_expert", "h_fp64", "h_text", "h_bool"],
)  # fmt: skip
def test_bad_small_tensors(changes: dict, error: type[Exception], message: str) -> None:
    problem = make_problem(format="nvfp4", act="nvfp4", bias=True)
    arguments = {"w13_bias": torch.zeros(2, 256), "w2_bias": torch.zeros(2, 192), **changes}
    with pytest.raises(error, match=message):
        prepare_weights(*sources(problem), problem, arch="sm_90a", **arguments)
