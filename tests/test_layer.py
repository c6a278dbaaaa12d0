"""``MoELayer`` on the CPU."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import moe_ep_jit as moe
from moe_ep_jit import reference

PROBLEM = moe.Problem(
    hidden=128, intermediate=64, num_experts=4, top_k=2, max_tokens=16, format="auto"
)


def checkpoint(bias=False):
    w13 = (torch.randn(4, 128, 128) * 128**-0.5).bfloat16()
    w2 = (torch.randn(4, 128, 64) * 64**-0.5).bfloat16()
    if not bias:
        return w13, w2
    return w13, w2, {"w13_bias": torch.randn(4, 128), "w2_bias": torch.randn(4, 128)}


def make_inputs(tokens):
    x = torch.randn(tokens, 128).bfloat16()
    ids = torch.randint(0, 4, (tokens, 2))
    return x, ids, torch.rand(tokens, 2)


def expected(inputs, layer):
    return reference.moe_forward(*inputs, layer.weights)


def test_the_result_is_the_callers_own():
    layer = moe.MoELayer(PROBLEM, *checkpoint())
    first, second = make_inputs(6), make_inputs(6)
    y1 = layer(*first)
    y2 = layer(*second)
    storage = layer.workspace.output.untyped_storage().data_ptr()
    for y, inputs in ((y1, first), (y2, second)):
        assert y.untyped_storage().data_ptr() != storage
        assert torch.equal(y, expected(inputs, layer))


def test_the_view_is_given_when_asked_for():
    layer = moe.MoELayer(PROBLEM, *checkpoint())
    inputs = make_inputs(6)
    assert layer.supports_output_view
    y = layer(*inputs, return_workspace_view=True)
    assert y.data_ptr() == layer.workspace.output.data_ptr()
    assert torch.equal(y, expected(inputs, layer))
    out = torch.empty(6, 128, dtype=torch.bfloat16)
    assert layer(*inputs, out=out) is out
    with pytest.raises(ValueError, match="return_workspace_view: expected False"):
        layer(*inputs, out=out, return_workspace_view=True)


def test_num_tokens_leaves_the_rows_behind_it_alone():
    layer = moe.MoELayer(PROBLEM, *checkpoint())
    x, ids, topk_weights = make_inputs(6)
    out = torch.full((6, 128), 5.0, dtype=torch.bfloat16)
    live = torch.tensor([4], dtype=torch.int32)
    layer(x, ids, topk_weights, out=out, num_tokens=live)
    assert torch.equal(out[:4], expected((x, ids, topk_weights), layer)[:4])
    assert (out[4:] == 5).all()


def test_layers_share_a_workspace_and_close_only_their_own():
    a = moe.MoELayer(PROBLEM, *checkpoint())
    shared = moe.Workspace(a.problem, device="cpu")
    b = moe.MoELayer(PROBLEM, *checkpoint(), workspace=shared)
    c = moe.MoELayer.from_prepared(a.weights, workspace=shared)
    inputs = make_inputs(5)
    for layer in (a, b, c):
        layer.warmup()
        assert torch.equal(layer(*inputs), expected(inputs, layer))
    b.close()
    assert torch.equal(c(*inputs), expected(inputs, c))
    a.close()
    with pytest.raises(RuntimeError, match="it is closed"):
        a(*inputs)
    shared.close()
    with pytest.raises(RuntimeError, match="it is closed"):
        c(*inputs)


@pytest.mark.parametrize(
    "how",
    [copy.deepcopy, pickle.dumps, lambda x: torch.save(x, io.BytesIO())],
    ids=["deepcopy", "pickle", "save"],
)
def test_neither_a_workspace_nor_its_layer_can_be_copied(how):  # fmt: skip
    layer = moe.MoELayer(PROBLEM, *checkpoint())
    for what in (layer.workspace, layer):
        with pytest.raises(TypeError, match="workspace: expected no copy .* build a new Workspace"):
            how(what)
    copy.deepcopy(layer.weights)  # what they hold may be


def test_a_shared_workspace_must_know_the_layer():
    other = moe.Workspace(PROBLEM.with_(hidden=192, format="mxfp8"), device="cpu")
    with pytest.raises(ValueError, match="weights: prepared for"):
        moe.MoELayer(PROBLEM, *checkpoint(), workspace=other)


def test_what_is_no_weights_or_no_workspace_is_refused():
    layer = moe.MoELayer(PROBLEM, *checkpoint())
    with pytest.raises(TypeError, match="weights: expected PreparedWeights, got NoneType"):
        moe.MoELayer.from_prepared(None)
    with pytest.raises(TypeError, match="workspace: expected Workspace, got int"):
        moe.MoELayer.from_prepared(layer.weights, workspace=3)


def test_keywords_go_to_prepare_weights():
    w13, w2, biases = checkpoint(bias=True)
    problem = PROBLEM.with_(bias=True, format="nvfp4")
    layer = moe.MoELayer(problem, w13, w2, gate_up="up_first", **biases)
    inputs = make_inputs(5)
    assert torch.equal(layer(*inputs), expected(inputs, layer))
    assert layer.problem.act == "bf16"
    assert "reference-nvfp4-bf16" in repr(layer)


def test_weights_are_no_parameters_and_stay_out_of_the_state():
    layer = moe.MoELayer(PROBLEM, *checkpoint())
    assert not list(layer.parameters())
    assert not layer.state_dict()


def test_weights_and_inputs_that_require_grad_are_refused():
    w13, w2 = checkpoint()
    with pytest.raises(ValueError, match="grad"):
        moe.MoELayer(PROBLEM, w13.requires_grad_(), w2)
    layer = moe.MoELayer(PROBLEM, w13.detach(), w2)
    x, ids, topk_weights = make_inputs(3)
    with pytest.raises(ValueError, match=r"x\.detach"):
        layer(x.requires_grad_(), ids, topk_weights)


@pytest.mark.parametrize(
    ("x", "error"),
    [
        (torch.zeros(2, 3, 128, dtype=torch.bfloat16), ValueError),
        (torch.zeros(3, 64, dtype=torch.bfloat16), ValueError),
        (torch.zeros((), dtype=torch.bfloat16), ValueError),
        ([1.0], TypeError),
    ],
    ids=["3d", "hidden", "scalar", "list"],
)
def test_a_wrong_x_gets_the_forwards_own_message(x, error):
    layer = moe.MoELayer(PROBLEM, *checkpoint())
    with pytest.raises(error, match="x: expected"):
        layer(x, torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2))
