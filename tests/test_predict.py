"""docs/blackwell.md has the tables that the code computes, and says that they are computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_ep_jit.tools import floors, predict, presets

DOC = Path(__file__).parents[1] / "docs" / "blackwell.md"


@pytest.fixture(autouse=True)
def on_blackwell(monkeypatch):
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")


def test_the_page_has_the_computed_tables():
    text = DOC.read_text()
    assert predict.table() in text
    assert predict.peer_table() in text
    assert "never measured" in text


def test_a_prediction_is_never_below_its_floor():
    for preset in presets.load():
        for fmt in ("mxfp8", "nvfp4"):
            for tokens in preset.tokens:
                p = predict.predict(preset.problem(fmt), tokens)
                assert p.layer_ms > p.floor_ms


def test_floors_of_blackwell_by_hand():
    """dsv3-ep8 at 4096 tokens: 6 x 32768 x 7168 x 2048 operations at the data sheet's rates."""
    problem = presets.load(["dsv3-ep8"])[0].problem("nvfp4")
    for kind, flops in (("mxfp8", 4.5e15), ("nvfp4", 9e15)):
        floor = floors.floors(problem, kind, kind, 4096, 32768, 32)
        assert floor.gemm_ms == pytest.approx(6 * 32768 * 7168 * 2048 / flops * 1e3)
        few = floors.floors(problem, kind, kind, 8, 64, 28)
        bits = {"mxfp8": 8.25, "nvfp4": 4.5}[kind]
        assert few.gemm_ms == pytest.approx(28 * 3 * 7168 * 2048 * bits / 8 / 8e12 * 1e3)
