"""Blackwell's weight layouts: every byte where tensor memory wants it, and the way back."""

from __future__ import annotations

import pytest
import torch

import moe_ep_jit as moe
from moe_ep_jit.kernels.common.packing import Rows
from moe_ep_jit.kernels.sm100 import packing

KINDS = ["mxfp8", "nvfp4"]


def random_rows(kind, m, k):
    per_byte = 2 if kind == "nvfp4" else 1
    data = torch.randint(0, 256, (m, k // per_byte), dtype=torch.uint8)
    sf = torch.randint(0, 256, (m, k // packing.SF_BLOCK[kind]), dtype=torch.uint8)
    return Rows(data, sf)


def packed_row(blob_row):
    """The packed row of a blob's row: warp w reads lanes 32 w .., 16 for each half of the rows."""
    warp, half, i = blob_row // 32, blob_row % 32 // 16, blob_row % 16
    return 64 * half + 16 * warp + i


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "k"), [(128, 256), (64, 64), (192, 320), (384, 1088)])
def test_reversed_bit_for_bit(kind, m, k):
    q = random_rows(kind, m, k)
    scale = torch.rand(m) if kind == "nvfp4" else None
    blobs, kept = packing.pack_rows(kind, q, scale)
    shape = (-(-m // 128), -(-k // packing.BLOB_K[kind]), packing.blob_bytes(kind))
    assert blobs.shape == shape
    assert kept is scale
    back, _ = packing.unpack_rows(kind, blobs, kept)
    width, blocks = q.data.shape[1], q.sf.shape[1]
    assert torch.equal(back.data[:m, :width], q.data)
    assert torch.equal(back.sf[:m, :blocks], q.sf)
    for padding in (back.data[m:], back.sf[m:], back.data[:, width:], back.sf[:, blocks:]):
        assert (padding == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_is_where_the_docstring_says(kind):
    q = random_rows(kind, 256, 2 * packing.BLOB_K[kind])
    blobs, _ = packing.pack_rows(kind, q)
    atoms = packing.atoms(kind)
    for tile in range(2):
        for part in range(2):
            blob = blobs[tile, part]
            for row in range(0, 128, 7):
                source = tile * 128 + packed_row(row)
                for chunk in range(8):
                    at = row * 128 + (chunk ^ row % 8) * 16
                    first = part * 128 + chunk * 16
                    assert torch.equal(blob[at : at + 16], q.data[source, first : first + 16])
                for atom in range(atoms):
                    at = 16384 + atom * 512 + row % 32 * 16 + row // 32 * 4
                    first = (part * atoms + atom) * 4
                    assert torch.equal(blob[at : at + 4], q.sf[source, first : first + 4])


@pytest.mark.parametrize("fmt", KINDS)
@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_prepared_weights_are_the_references(fmt, arch, tmp_path):
    """Nothing is folded: both layouts hold the same numbers, biases too; also through a file."""
    problem = moe.Problem(
        hidden=192, intermediate=320, num_experts=2, top_k=1, max_tokens=4, format=fmt, bias=True
    )
    w13, w2 = torch.randn(2, 640, 192), torch.randn(2, 192, 320)
    biases = {"w13_bias": torch.randn(2, 640), "w2_bias": torch.randn(2, 192)}
    weights = moe.prepare_weights(w13, w2, problem, arch=arch, **biases)
    plain = moe.prepare_weights(w13, w2, problem, backend="reference", **biases)
    assert (weights.kind, weights.operand, weights.layout) == (fmt, fmt, "sm100")
    assert weights.problem.act == fmt
    assert weights.report["fold"] == {}
    moe.save_prepared(weights, tmp_path / "w.pt")
    for held in (weights, moe.load_prepared(tmp_path / "w.pt")):
        for name in ("w13", "w2"):
            assert torch.equal(held.dequantize(name), plain.dequantize(name))
            assert torch.equal(held.bias(name), plain.bias(name))
    address = weights.tensors["w13"].data_ptr()
    moe.update_weights(weights, -w13, w2, **biases)
    assert weights.tensors["w13"].data_ptr() == address
    assert torch.equal(weights.dequantize("w13"), -plain.dequantize("w13"))


def test_what_the_tensor_cores_do_not_take_is_refused():
    for fmt, act in (("mxfp8", "bf16"), ("nvfp4", "bf16"), ("nvfp4", "mxfp8")):
        problem = moe.Problem(
            hidden=64, intermediate=64, num_experts=1, top_k=1, max_tokens=1, format=fmt, act=act
        )
        with pytest.raises(ValueError, match=r"weights on sm_100a, got .* no other pair"):
            moe.prepare_weights(
                torch.randn(1, 128, 64), torch.randn(1, 64, 64), problem, arch="sm_100a"
            )
