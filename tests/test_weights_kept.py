"""Prepared weights replaced in place, and kept in files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from weight_cases import (
    ACTS,
    ARCHES,
    FORMATS,
    copied,
    far_groups,
    in_order,
    make_problem,
    one_thread,  # noqa: F401  a fixture
    random_biases,
    same_bits,
    sources,
    spread_weights,
)

from moe_ep_jit import formats
from moe_ep_jit.formats import MXFP8
from moe_ep_jit.weights import PreparedWeights, prepare_weights, update_weights
from moe_ep_jit.weights_file import load_prepared, save_prepared

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("one_thread")]


# In place


@ARCHES
@ACTS
def test_update_gives_what_preparing_gives_at_the_same_addresses(
    arch: str | None, fmt: str, act: str
) -> None:
    problem = make_problem(format=fmt, act=act, bias=True)
    old, new = sources(problem), tuple(-3 * w for w in sources(problem))
    biases = random_biases(problem)
    prepared = prepare_weights(*old, problem, arch=arch, **biases)
    pointers = {n: t.data_ptr() for n, t in prepared.tensors.items()}
    biases = {"w13_bias": torch.randn(2, 256), "w2_bias": torch.randn(2, 192).bfloat16()}
    given = in_order(new[0], 4)
    order_bias = {**biases, "w13_bias": in_order(biases["w13_bias"], 4)}
    update_weights(prepared, given, new[1], gate_up=4, **order_bias)
    want = prepare_weights(*new, problem, arch=arch, **biases)
    assert same_bits(prepared.tensors, want.tensors)
    assert {n: t.data_ptr() for n, t in prepared.tensors.items()} == pointers


def test_what_is_no_prepared_weights_is_refused(tmp_path: Path) -> None:
    w13, w2 = sources(make_problem())
    message = "prepared: expected PreparedWeights, got {}; pass what prepare_weights"
    with pytest.raises(TypeError, match=message.format("NoneType")):
        update_weights(None, w13, w2)
    with pytest.raises(TypeError, match=message.format("dict")):
        save_prepared({}, tmp_path / "layer.pt")
    assert not list(tmp_path.iterdir())


def test_update_keeps_or_replaces_the_intermediate_scale() -> None:
    problem = make_problem(format="nvfp4", act="nvfp4")
    w = sources(problem)
    prepared = prepare_weights(*w, problem, h_global_scale=0.5)
    update_weights(prepared, *w)
    assert prepared.h_global_scale.tolist() == [0.5, 0.5]
    update_weights(prepared, *w, h_global_scale=0.25)
    assert prepared.h_global_scale.tolist() == [0.25, 0.25]


def test_update_refuses_another_fold_kind_and_takes_a_better_one() -> None:
    problem = make_problem(hidden=256, intermediate=256)
    near, mid, far = far_groups(problem, 0), far_groups(problem, 20), spread_weights(problem, 20)
    row = prepare_weights(*near, problem, arch="sm_90a")
    before = copied(row.tensors)
    for worse in (mid, far):
        with pytest.raises(ValueError, match="call prepare_weights, then warmup"):
            update_weights(row, *worse)
        assert same_bits(row.tensors, before)
    group = prepare_weights(*mid, problem, arch="sm_90a")
    update_weights(group, *near)
    assert group.kind == "mxfp8_group128"
    q = formats.quantize(near[1][1], MXFP8)
    assert torch.equal(group.dequantize("w2", 1), formats.dequantize(formats.fold(q, 128)))
    exact = prepare_weights(*far, problem, arch="sm_90a")
    update_weights(exact, *near)
    assert exact.kind == "mxfp8_exact"
    assert torch.equal(exact.dequantize("w2", 1), formats.dequantize(q))


@FORMATS
@pytest.mark.parametrize("bad", ["nan", "shape", "bias", "last_expert_of_w2", "bias_nan"])
def test_update_changes_nothing_when_it_refuses(fmt: str, bad: str) -> None:
    problem = make_problem(format=fmt, bias=True)
    w13, w2 = sources(problem)
    biases = random_biases(problem)
    prepared = prepare_weights(w13, w2, problem, arch="sm_90a", **biases)
    before = copied(prepared.tensors)
    w13, w2 = 2 * w13, 2 * w2
    biases["w13_bias"] = biases["w13_bias"] + 1
    if bad == "nan":
        w13[1, 3, 5] = float("nan")
    elif bad == "shape":
        w2 = w2[:, :64]
    elif bad == "bias":
        biases["w2_bias"] = None
    elif bad == "bias_nan":
        biases["w2_bias"][1, 7] = float("inf")
    else:
        w2[-1, -1, -1] = float("inf")
    with pytest.raises(ValueError, match="expected"):
        update_weights(prepared, w13, w2, **biases)
    assert same_bits(prepared.tensors, before)


# Files


@ARCHES
@ACTS
def test_saved_and_loaded(arch: str | None, fmt: str, act: str, tmp_path: Path) -> None:
    problem = make_problem(format=fmt, act=act, bias=True)
    w13, w2 = sources(problem)
    prepared = prepare_weights(w13, w2, problem, arch=arch, **random_biases(problem))
    path = tmp_path / "layer.pt"
    prepared.topology.place([1, 0])
    save_prepared(prepared, path)
    assert [p.name for p in tmp_path.iterdir()] == ["layer.pt"]
    loaded = load_prepared(path)
    path.write_bytes(b"")  # the loaded tensors are copies
    assert same_bits(loaded.tensors, prepared.tensors)
    for f in dataclasses.fields(PreparedWeights):
        if f.name not in ("tensors", "topology"):
            assert getattr(loaded, f.name) == getattr(prepared, f.name), f.name
    for held in (loaded, prepared.to("cpu")):
        assert held.topology.physical_to_logical == [1, 0]
        assert held.topology.physical_ids(torch.tensor([[0], [1]]), 0, 2).tolist() == [[1], [0]]
    update_weights(loaded, w13, w2, w13_bias=torch.zeros(2, 256), w2_bias=torch.zeros(2, 192))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    problem = make_problem()
    path = tmp_path / "layer.pt"
    save_prepared(prepare_weights(*sources(problem), problem, arch="sm_90a"), path)
    return path


def test_load_takes_a_fitting_problem(saved: Path) -> None:
    with pytest.raises(TypeError, match="problem: expected Problem, got str"):
        load_prepared(saved, problem="mine")
    wanted = make_problem(format="auto").with_(max_tokens=99)
    loaded = load_prepared(saved, problem=wanted)
    assert loaded.problem == wanted.with_(format="mxfp8", act="mxfp8")
    for changes in ({"hidden": 256}, {"bias": True}, {"format": "nvfp4"}, {"num_experts": 4}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            load_prepared(saved, problem=wanted.with_(**changes))


@pytest.mark.parametrize("size", [0, 100, -1000], ids=["empty", "head", "tail_cut"])
def test_load_refuses_truncated_files(saved: Path, size: int) -> None:
    saved.write_bytes(saved.read_bytes()[:size])
    with pytest.raises(ValueError, match="truncated, or not a file of save_prepared"):
        load_prepared(saved)


def _foreign(state: dict) -> Any:
    return {"weight": torch.zeros(3)}


def _old_version(state: dict) -> Any:
    return {**state, "version": 0}


def _no_tensor(state: dict) -> Any:
    del state["tensors"]["w2_sf"]
    return state


def _wrong_shape(state: dict) -> Any:
    state["tensors"]["w2"] = state["tensors"]["w2"][:1].clone()
    return state


def _wrong_dtype(state: dict) -> Any:
    state["tensors"]["w2_sf"] = state["tensors"]["w2_sf"].half()
    return state


def _sparse(state: dict) -> Any:
    state["tensors"]["w2"] = state["tensors"]["w2"].to_sparse()
    return state


def _expanded(state: dict) -> Any:
    held = state["tensors"]["w2_sf"]
    state["tensors"]["w2_sf"] = held[:1].expand(held.shape)
    return state


def _no_tensor_at_all(state: dict) -> Any:
    state["tensors"]["w2"] = [1, 2]
    return state


def _nan_scale(state: dict) -> Any:
    state["tensors"]["w2_sf"][1, 3] = float("nan")
    return state


def _flipped_bit(state: dict) -> Any:
    state["tensors"]["w13"].view(-1)[77] ^= 4
    return state


def _two_swapped(state: dict) -> Any:
    held = state["tensors"]["w13"]
    held.copy_(held.flip(0))
    return state


def _other_fact(state: dict) -> Any:
    state["problem"]["activation"]["alpha"] = 2.0
    return state


def _no_digests(state: dict) -> Any:
    del state["sha256"]
    return state


def _rank_out_of_range(state: dict) -> Any:
    return {**state, "rank": 1}


def _bad_map(state: dict) -> Any:
    return {**state, "physical_to_logical": [0, 2]}


def _rank_as_text(state: dict) -> Any:
    return {**state, "rank": "0"}


def _wrong_kind(state: dict) -> Any:
    return {**state, "kind": "nvfp4"}


def _wrong_arch(state: dict) -> Any:
    return {**state, "arch": "sm_100a"}


def _wrong_problem(state: dict) -> Any:
    return {**state, "problem": {**state["problem"], "hidden": 100}}


def _unknown_fact(state: dict) -> Any:
    return {**state, "problem": {**state["problem"], "colour": 1}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_foreign, "other torch data"),
        (_old_version, "expected version 2, got 0"),
        (_no_tensor, "w2_sf"),
        (_wrong_shape, "w2: expected"),
        (_wrong_dtype, "w2_sf: expected"),
        (_sparse, "w2: expected a contiguous, strided tensor"),
        (_expanded, "w2_sf: expected a contiguous, strided tensor"),
        (_no_tensor_at_all, "damaged"),
        (_nan_scale, "w2_sf: expected finite"),
        (_flipped_bit, "w13: another digest"),
        (_two_swapped, "w13: another digest"),
        (_other_fact, "facts: another digest"),
        (_no_digests, "sha256"),
        (_rank_out_of_range, r"rank: expected 0\.\.0, got 1"),
        (_bad_map, "physical_to_logical: expected a place for every logical expert"),
        (_rank_as_text, r"rank: expected 0\.\.0, got '0'"),
        (_wrong_kind, "kind: expected"),
        (_wrong_arch, "layout 'sm90' for arch 'sm_100a'"),
        (_wrong_problem, "hidden: expected"),
        (_unknown_fact, "colour"),
    ],
    ids=lambda v: v.__name__.strip("_") if callable(v) else "",
)
def test_load_refuses_foreign_files(saved: Path, change: Callable, message: str) -> None:
    torch.save(change(torch.load(saved, weights_only=True)), saved)
    with pytest.raises(ValueError, match=message) as caught:
        load_prepared(saved)
    assert "run prepare_weights and save_prepared again" in str(caught.value)


@pytest.mark.parametrize(
    ("fmt", "byte"), [("mxfp8", 0xFF), ("nvfp4", 0x7F), ("nvfp4", 0xFF)], ids=str
)
def test_plain_scales_that_are_no_numbers_are_refused(fmt: str, byte: int, tmp_path: Path) -> None:
    """Written so: their digests are right."""
    problem = make_problem(format=fmt)
    prepared = prepare_weights(*sources(problem), problem)
    prepared.tensors["w13_sf"].view(torch.uint8)[1, 2, 3] = byte
    save_prepared(prepared, tmp_path / "layer.pt")
    with pytest.raises(ValueError, match="w13_sf: expected finite"):
        load_prepared(tmp_path / "layer.pt")


def test_every_byte_of_a_tensor_counts(saved: Path) -> None:
    """A bit that changes on the disk, wherever a tensor lies."""
    whole = bytearray(saved.read_bytes())
    tensors = torch.load(saved, weights_only=True)["tensors"]
    for name, tensor in tensors.items():
        at = whole.index(bytes(tensor.view(-1).view(torch.uint8).tolist()))
        whole[at + 200] ^= 1
        saved.write_bytes(whole)
        with pytest.raises(ValueError, match=f"{name}: (another digest|expected finite)"):
            load_prepared(saved)
        whole[at + 200] ^= 1


def test_save_says_where_it_cannot_write(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, folder = load_prepared(saved), saved.parent
    with pytest.raises(RuntimeError, match=f"got {folder}/no/x.pt; run: mkdir -p {folder}/no"):
        save_prepared(prepared, folder / "no" / "x.pt")
    with pytest.raises(RuntimeError, match=f"got the folder {folder}; add a file name"):
        save_prepared(prepared, folder)

    def no_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    before = saved.read_bytes()
    monkeypatch.setattr(torch, "save", no_space)
    with pytest.raises(RuntimeError, match=f"{saved}: could not be written .*No space left"):
        save_prepared(prepared, saved)
    assert saved.read_bytes() == before
    assert [path.name for path in folder.iterdir()] == [saved.name]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_load_onto_a_gpu_that_is_not_there_names_the_doctor(saved: Path) -> None:
    for device in ("cuda", "cuda:1", torch.device("cuda")):
        with pytest.raises(RuntimeError, match="device: expected .* run: moe-ep-jit doctor"):
            load_prepared(saved, device)
        with pytest.raises(RuntimeError, match="run: moe-ep-jit doctor"):
            load_prepared(saved).to(device)
    with pytest.raises(ValueError, match="device: expected .* got 'gpu'"):
        load_prepared(saved, "gpu")


def test_load_runs_no_code(tmp_path: Path) -> None:
    path = tmp_path / "layer.pt"
    torch.save({"mark": Path("x")}, path)
    with pytest.raises(ValueError, match="not a file of save_prepared"):
        load_prepared(path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_prepared(tmp_path / "missing.pt")
