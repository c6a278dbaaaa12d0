"""The emulator against what an H200 computed from the same inputs: a file, so no GPU is needed."""

from __future__ import annotations

import golden_cases as golden
import numpy as np
import pytest

from moe_ep_jit.tools.emulator.host import c_compiler

pytestmark = pytest.mark.skipif(c_compiler() is None, reason="no C compiler for the stand-in")

FROM_GPU = golden.load() if golden.GOLDEN.exists() else None


def _rungs():
    """In CI two rungs of each layer, as ``sm90_cases`` chooses them; with --full all."""
    for number, name in enumerate(golden.LAYERS):
        ladder = golden.rungs(name)
        chosen = number % len(ladder), (number + 3) % len(ladder)
        for index, config in enumerate(ladder):
            marks = () if index in chosen else (pytest.mark.full, pytest.mark.emulated)
            yield pytest.param(name, config, id=golden.key_of(name, config), marks=marks)


@pytest.mark.skipif(FROM_GPU is None, reason=f"{golden.GOLDEN.name} has not been written yet")
@pytest.mark.parametrize(("name", "config"), list(_rungs()))
def test_as_on_the_gpu(name, config):
    got = golden.record(name, config, "cpu", seed=1)
    golden.compare(name, got, FROM_GPU[golden.key_of(name, config)])


def _example(change=None):
    config = golden.rungs("mxfp8")[2]
    found = golden.record("mxfp8", config, "cpu")
    if change:
        found[change] = found[change].copy()
        found[change].flat[1] += 1
    return found


def test_what_is_stored_comes_back(tmp_path, monkeypatch):
    found = _example()
    kept = {
        f"mxfp8-n32/{part}": value if part in golden._DIGESTS else value.astype(np.float16)
        for part, value in found.items()
    }
    np.savez_compressed(tmp_path / "sm90.npz", **kept)
    monkeypatch.setattr(golden, "GOLDEN", tmp_path / "sm90.npz")
    golden.compare("mxfp8", found, golden.load()["mxfp8-n32"])


@pytest.mark.parametrize("part", ["moved", "out", "weights", "h", "y"])
def test_a_difference_shows(part):
    with pytest.raises(AssertionError, match=part):
        golden.compare("mxfp8", _example(part), _example())
