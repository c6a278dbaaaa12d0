"""Problem and SwiGLU: defaults, what follows from the sizes, and the message of every refusal."""

from __future__ import annotations

import math
import re
from dataclasses import FrozenInstanceError
from fractions import Fraction

import numpy as np
import pytest

from moe_ep_jit.problem import ACTS, Problem, SwiGLU, check

SIZES = {"hidden": 128, "intermediate": 192, "num_experts": 8, "top_k": 2, "max_tokens": 64}


def make(**changes):
    return Problem(**{**SIZES, **changes})


def refusal(error=ValueError, **changes):
    with pytest.raises(error) as caught:
        make(**changes)
    return str(caught.value)


def test_check_raises_its_message_or_nothing():
    check(True, "never")
    with pytest.raises(ValueError, match=r"^x: expected 1, got 2$"):
        check(False, "x: expected 1, got 2")


def test_defaults():
    problem = make()
    assert (problem.format, problem.act, problem.wire) == ("auto", "auto", "auto")
    assert (problem.num_ranks, problem.combine_wire, problem.bias) == (1, "bf16", False)
    assert problem.activation == SwiGLU(limit=None, alpha=1.0, beta=0.0)
    assert problem.max_recv_rows is None
    assert problem.num_local_experts == 8
    assert problem.recv_rows == 128
    assert not problem.is_resolved


def test_a_problem_is_frozen_hashable_and_equal_by_value():
    problem = make()
    with pytest.raises(FrozenInstanceError):
        problem.hidden = 64
    assert make() == problem
    assert hash(make()) == hash(problem)
    assert make(top_k=3) != problem


@pytest.mark.parametrize(("bound", "rows"), [(None, 128), (1, 1), (100, 100), (1000, 128)])
def test_receive_rows_are_the_worst_case_or_its_bound(bound, rows):
    assert make(max_recv_rows=bound).recv_rows == rows


@pytest.mark.parametrize(
    ("changes", "resolved"),
    [
        ({}, False),
        ({"format": "mxfp8"}, False),
        ({"act": "bf16"}, False),
        ({"format": "nvfp4", "act": "bf16"}, True),
    ],
    ids=str,
)
def test_resolved_means_format_and_act_are_decided(changes, resolved):
    assert make(**changes).is_resolved is resolved


def test_with_replaces_and_checks_again():
    problem = make().with_(format="nvfp4", act="nvfp4")
    assert (problem.format, problem.act, problem.hidden) == ("nvfp4", "nvfp4", 128)
    assert make().format == "auto"
    with pytest.raises(ValueError, match="act: expected one of"):
        problem.with_(format="mxfp8")
    with pytest.raises(TypeError, match="topk"):
        problem.with_(topk=3)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden": 64, "intermediate": 64, "num_experts": 1, "top_k": 1, "max_tokens": 1},
        {"hidden": 2880, "intermediate": 2880},
        {"hidden": 2688, "intermediate": 1856},
        {"num_experts": 512, "top_k": 32},
        {"num_experts": 7, "top_k": 7},
        {"max_tokens": 2**31 - 1, "top_k": 1},
        {"max_tokens": 2**30 - 1, "top_k": 2},
    ],
    ids=str,
)
def test_the_limits_themselves_are_fine(changes):
    make(**changes)


@pytest.mark.parametrize("name", ["hidden", "intermediate"])
@pytest.mark.parametrize("size", [0, -64, 96, 2849, 128.0, "128", True, np.int64(128), None])
def test_sizes(name, size):
    assert refusal(**{name: size}) == (
        f"{name}: expected a positive multiple of 64, got {size!r}; pad the checkpoint's {name} "
        "to a multiple of 64"
    )


@pytest.mark.parametrize("experts", [0, -8, 8.0, True, np.int32(8), None])
def test_num_experts(experts):
    message = refusal(num_experts=experts, top_k=1)
    assert message == f"num_experts: expected at least 1, got {experts!r}"


def test_too_many_experts_a_rank():
    assert refusal(num_experts=513) == (
        "num_experts: expected at most 512 a rank, got 513; use more ranks"
    )


@pytest.mark.parametrize("ranks", [0, -1, 1.0, True, None])
def test_num_ranks(ranks):
    message = refusal(num_ranks=ranks)
    assert message == f"num_ranks: expected at least 1, got {ranks!r}"


@pytest.mark.parametrize("ranks", [3, 16])
def test_experts_are_divided_evenly(ranks):
    assert refusal(num_ranks=ranks) == (
        f"num_experts: expected a multiple of num_ranks={ranks}, got 8; add padding experts or "
        "change the ranks"
    )


def test_one_ranks_share_of_several():
    problem = make(num_experts=1024, num_ranks=4, format="nvfp4", act="bf16", wire="mxfp8")
    assert (problem.num_local_experts, problem.recv_rows, problem.payload) == (256, 512, "mxfp8")
    local = problem.local
    assert (local.num_ranks, local.num_experts, local.top_k, local.wire) == (1, 256, 1, "auto")
    assert local.max_tokens == local.recv_rows == 512
    assert problem.with_(max_recv_rows=100).local.max_tokens == 100


def test_received_rows_fit_an_int32():
    sizes = {"num_ranks": 8, "max_tokens": 2**27}
    assert refusal(**sizes) == (
        f"num_ranks * max_tokens * top_k: expected below 2^31, got {2**31}; bound max_recv_rows, "
        "or split the batch"
    )
    make(**sizes, max_recv_rows=2**31 - 1)


@pytest.mark.parametrize("top_k", [0, -1, 9, 2.0, True, np.int64(2), None])
def test_top_k(top_k):
    assert refusal(top_k=top_k) == (
        f"top_k: expected 1..8 (at most 32 and at most num_experts=8), got {top_k!r}"
    )


def test_top_k_beyond_what_the_kernels_take():
    assert refusal(num_experts=64, top_k=33) == (
        "top_k: expected 1..32 (at most 32 and at most num_experts=64), got 33"
    )


@pytest.mark.parametrize("tokens", [0, -1, 64.0, True, np.int64(64), None])
def test_max_tokens(tokens):
    assert refusal(max_tokens=tokens) == f"max_tokens: expected at least 1, got {tokens!r}"


def test_slots_fit_an_int32():
    assert refusal(max_tokens=2**30, top_k=2) == (
        f"max_tokens * top_k: expected below 2^31, got {2**31}; split the batch"
    )


@pytest.mark.parametrize("fmt", ["fp8", "MXFP8", "", None, 8])
def test_format(fmt):
    assert refusal(format=fmt) == f'format: expected "mxfp8", "nvfp4" or "auto", got {fmt!r}'


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4", "auto"])
def test_acts_of_each_format(fmt):
    fitting = dict.fromkeys(ACTS["mxfp8"] + ACTS["nvfp4"]) if fmt == "auto" else ACTS[fmt]
    for act in ("mxfp8", "nvfp4", "bf16"):
        if act in fitting:
            assert make(format=fmt, act=act).act == act
        else:
            assert refusal(format=fmt, act=act) == (
                f"act: expected one of {('auto', *fitting)} for format={fmt!r}, got {act!r}"
            )
    for act in ("fp8", None):
        assert f"for format={fmt!r}, got {act!r}" in refusal(format=fmt, act=act)


@pytest.mark.parametrize(
    "changes",
    [{"wire": "mxfp8"}, {"wire": "bf16", "act": "mxfp8"}, {"combine_wire": "mxfp8"}],
    ids=str,
)
def test_wires(changes):
    wire, combine_wire = changes.get("wire", "auto"), changes.get("combine_wire", "bf16")
    assert refusal(**changes) == (
        'wire, combine_wire: expected "auto" and "bf16" (one rank sends nothing), got '
        f"{wire!r} and {combine_wire!r}"
    )


@pytest.mark.parametrize(
    ("act", "wires"),
    [
        ("auto", ("bf16", "mxfp8", "nvfp4")),
        ("bf16", ("bf16", "mxfp8", "nvfp4")),
        ("mxfp8", ("bf16", "mxfp8")),
        ("nvfp4", ("bf16", "nvfp4")),
    ],
)
def test_wires_of_several_ranks(act, wires):
    several = {"num_ranks": 2, "act": act}
    for wire in ("bf16", "mxfp8", "nvfp4", "fp8", None):
        if wire in wires:
            assert make(**several, wire=wire).payload == wire
        else:
            assert refusal(**several, wire=wire) == (
                f"wire: expected one of {('auto', *wires)} for act={act!r}, got {wire!r}; what is "
                "rounded for the wire is not rounded again"
            )
    assert make(**several).payload == act
    assert make(**several, combine_wire="mxfp8").local.combine_wire == "bf16"
    assert refusal(**several, combine_wire="nvfp4") == (
        "combine_wire: expected one of ('bf16', 'mxfp8'), got 'nvfp4'"
    )


def test_wire_may_name_the_act():
    assert make(format="mxfp8", act="mxfp8", wire="mxfp8").wire == "mxfp8"


@pytest.mark.parametrize("activation", ["swiglu", None, 7.0])
def test_activation(activation):
    assert refusal(activation=activation) == (
        f"activation: expected SwiGLU(limit, alpha, beta), got {activation!r}"
    )


@pytest.mark.parametrize("rows", [0, -5, 3.5, True, np.int64(3)])
def test_max_recv_rows(rows):
    message = refusal(max_recv_rows=rows)
    assert message == f"max_recv_rows: expected None or at least 1, got {rows!r}"


NO_NUMBERS = [
    math.nan,
    math.inf,
    -math.inf,
    True,
    "7",
    Fraction(7, 2),
    np.float32(7),
    1e39,
    10**400,
]


@pytest.mark.parametrize("limit", [0, 0.0, -7.0, *NO_NUMBERS], ids=lambda v: repr(v)[:20])
def test_limit(limit):
    message = (
        f"SwiGLU.limit: expected None or a positive, finite int or float, got {limit!r}; "
        "pass limit=None to clamp nothing"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SwiGLU(limit=limit)


@pytest.mark.parametrize(("name", "default"), [("alpha", 1.0), ("beta", 0.0)])
@pytest.mark.parametrize("value", [None, *NO_NUMBERS], ids=lambda v: repr(v)[:20])
def test_alpha_and_beta(name, default, value):
    message = (
        f"SwiGLU.{name}: expected a finite int or float, got {value!r}; leave it out for {default}"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SwiGLU(**{name: value})


@pytest.mark.parametrize("bias", [None, 0, 1, "yes", np.True_])
def test_bias(bias):
    assert refusal(bias=bias) == (
        f"bias: expected True or False, got {bias!r}; pass the tensors themselves to "
        "prepare_weights(w13_bias=, w2_bias=)"
    )


@pytest.mark.parametrize("limit", [None, 7, 10.0])
def test_limits_that_are_fine(limit):
    assert SwiGLU(limit, 1.702, 1.0).limit == limit
