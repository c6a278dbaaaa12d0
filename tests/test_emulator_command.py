"""``python -m moe_ep_jit.tools.emulator KEY``: an entry of the cache, a warp's instructions."""

from __future__ import annotations

import re

import pytest
from emulator_cases import layer

from moe_ep_jit.tools.emulator.__main__ import main
from moe_ep_jit.tools.emulator.host import c_compiler

pytestmark = pytest.mark.skipif(c_compiler() is None, reason="no C compiler for the stand-in")


@pytest.fixture
def key():
    """The name of an entry that is there."""
    case = layer()
    return case.object(case.workspace()).function.folder.parent.name


def test_an_entry_runs_and_is_compared(key, capsys):
    assert main([key, "--tokens", "5", "--seed", "2"]) == 0
    found = re.search(
        r"5 tokens in .* relative error to the reference (\S+)", capsys.readouterr().out
    )
    assert float(found[1]) < 1e-3


def test_a_trace_shows_a_warps_instructions(key, capsys):
    assert main([key, "--tokens", "5", "--trace", "Route:0:3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [re.match(r" *(\d+) +(\d+) lanes  (.*)", line) for line in lines[:-1]]
    assert len(shown) > 50
    assert all(shown)
    assert any("%tid.x" in line and "= 96" in line for line in lines)  # warp 3's first lane
    assert any("griddepcontrol" in line for line in lines)


def test_changed_ptx_is_run_in_place_of_the_entrys(key, capsys, tmp_path):
    case = layer()
    text = case.object(case.workspace()).function.text
    changed = tmp_path / "changed.ptx"
    changed.write_text(text.replace("griddepcontrol.wait;", ""))
    assert main([key, "--tokens", "5", "--ptx", str(changed)]) == 1
    assert "fault:" in capsys.readouterr().err


def test_a_key_that_names_no_entry_or_several(key, capsys):
    assert main(["no-such-entry"]) == 1
    assert "expected part of one entry" in capsys.readouterr().err
