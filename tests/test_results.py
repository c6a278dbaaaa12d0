"""Rows of bench: files, the newest of each, comparisons at their limits, tables, pictures."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from moe_ep_jit import cli
from moe_ep_jit.tools import plot, results

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "tools" / "results" / "h200.jsonl"


def row(ms=1.0, **changes):
    facts = {"preset": "p", "format": "mxfp8", "act": "mxfp8", "tokens": 8, "routing": "uniform"}
    facts |= {"gpu": "G", "date": "2026-01-02T00:00:00Z", "commit": "abc", "floor_layer_ms": 0.5}
    return {**facts, "ms": ms, **changes}


def without(name, **changes):
    found = row(**changes)
    del found[name]
    return found


def write(path, *rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


# Files


def test_rows_without_identity_or_time_are_left_out_and_counted(tmp_path):
    bad = [row(math.nan), row(0.0), row(-1.0), row(None), row("1"), row(True), row(math.inf)]
    bad += [without(name) for name in ("preset", "format", "act", "tokens", "gpu", "ms")]
    bad += [row(tokens="8")]
    rows, left_out = results.read(write(tmp_path / "rows", row(), *bad, without("routing")))
    assert left_out == len(bad)
    assert rows == [row(), row()]  # rows from before there were patterns are uniform


@pytest.mark.parametrize("line", ['{"preset": "p", "ms"', "[1]", "3", "rubbish"])
def test_a_line_that_is_no_object_is_named(tmp_path, line):
    path = tmp_path / "rows"
    path.write_text(f"{json.dumps(row())}\n\n{line}\n")
    with pytest.raises(ValueError, match=r"rows:3: expected a JSON object, got .*remove the line"):
        results.read(path)


def test_a_file_that_is_not_there_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"expected a file of rows from .*No such file"):
        results.read(tmp_path / "none")


def test_newest_of_each_identity():
    old, new = row(1.0, date="2026-01-01"), row(2.0, date="2026-02-01")
    other = row(3.0, date="2026-01-01", gpu="H")
    assert results.newest([new, old, other]) == [new, other]
    later = row(4.0, date="2026-02-01")
    assert results.newest([new, later]) == [later]
    assert results.newest([without("date"), old]) == [old]


def test_select():
    rows = [row(), row(format="nvfp4"), row(tokens=64)]
    assert results.select(rows, format=["mxfp8"], tokens=[8], routing=[]) == rows[:1]
    assert results.select(rows) == rows


# Comparing


@pytest.mark.parametrize(
    ("before", "ms", "verdict"),
    [
        (1.0, 0.5, "ok"),
        (1.0, 1.0, "ok"),
        (1.0, 1.0499, "ok"),
        (1.0, 1.05, "slower"),
        (0.2, 0.21, "slower"),
        (0.3, 0.315, "slower"),
        (1.0, 1.1499, "slower"),
        (1.0, 1.15, "failed"),
        (0.2, 0.23, "failed"),
        (0.7, 0.805, "failed"),
        (1.0, 9.0, "failed"),
        (1.0, math.nan, "failed"),
    ],
)
def test_limits(before, ms, verdict):
    (compared,), unmatched = results.compare([row(ms)], [row(before)])
    assert (compared.verdict, unmatched) == (verdict, [])


@pytest.mark.parametrize("name", results.KEY)
def test_only_equal_identities_are_compared(name):
    other = row(tokens=9) if name == "tokens" else row(**{name: "other"})
    compared, unmatched = results.compare([row()], [other])
    assert (compared, unmatched) == ([], [row()])


def test_the_newest_earlier_row_counts():
    earlier = [row(9.0, date="2026-03-01"), row(1.0, date="2026-02-01")]
    (compared,), _ = results.compare([row(9.0)], earlier)
    assert (compared.percent, compared.verdict) == (0.0, "ok")


def test_exit_status_and_table(tmp_path, capsys):
    earlier = write(tmp_path / "earlier", row(1.0), row(1.0, tokens=64), row(1.0, gpu="H"))
    for ms, code in ((1.05, 0), (1.15, 1)):
        now = write(tmp_path / "now", row(ms), row(1.0, tokens=64), row(1.0, tokens=9))
        assert cli.main(["bench", "--from", str(now), "--compare", str(earlier)]) == code
        said = capsys.readouterr().out
        assert f"+{100 * (ms - 1):.1f} %" in said
        assert "2 compared" in said
        assert "not there before: p mxfp8 mxfp8 9 uniform G" in said
    assert cli.main(["bench", "--from", str(now), "--compare", str(earlier), "--json"]) == 1
    said = capsys.readouterr()
    assert [json.loads(line)["ms"] for line in said.out.splitlines()] == [1.15, 1.0, 1.0]
    assert "2 compared" in said.err


def test_comparing_nothing_is_a_failure(tmp_path, capsys):
    now, earlier = write(tmp_path / "now", row()), write(tmp_path / "earlier", row(gpu="H"))
    assert cli.main(["bench", "--from", str(now), "--compare", str(earlier)]) == 1
    assert "on this GPU, got none (the file's GPUs: H)" in " ".join(capsys.readouterr().err.split())


def test_rows_appended_to_the_compared_file_are_not_compared_with_themselves(tmp_path):
    path = write(tmp_path / "rows", row(1.0))

    def measured():
        slow = row(2.0, date="2026-09-01")
        write(path, row(1.0), slow)
        yield slow

    with open(tmp_path / "out", "w") as file:
        from rich.console import Console

        output = results.Output(as_json=True, compare=path)
        assert results.show(measured(), output, Console(file=file)) == 1


# Showing


def test_table_has_the_columns_that_rows_have():
    full = row(stage_ms=dict.fromkeys(results.STAGES, 0.5), copy_pct={"dispatch": 81.2})
    full |= {"stage_gbps": {"down": 4000.4}, "stage_tflops": {"down": 12.0}, "sm_mhz": None}
    table = results.table([full, row(format="torch-bf16", act="bf16")])
    cells = {c.header: list(c.cells) for c in table.columns}
    assert cells["dispatch"] == ["0.500 81%", "-"]
    assert cells["down"] == ["0.500 4000/12", "-"]
    assert cells["x floor"] == ["2.00", "2.00"]
    assert "MHz" not in cells
    assert "host us" not in cells


def test_measured_rows_need_no_gpu(capsys):
    argv = ["bench", "--from", str(MEASURED), "--preset", "qwen3-30b", "--format", "nvfp4"]
    assert cli.main([*argv, "--tokens", "8", "64"]) == 0
    said = capsys.readouterr().out
    shown = [r for r in results.read(MEASURED)[0] if r["preset"] == "qwen3-30b"]
    newest = {r["tokens"]: r["ms"] for r in shown if r["format"] == "nvfp4"}
    assert all(f"{newest[tokens]:.3f}" in said for tokens in (8, 64))
    assert "dsv3" not in said
    assert cli.main([*argv, "--tokens", "3"]) == 1
    assert "expected rows of what was asked for, got none" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--sustained"], ["--peer", "torch"], ["--seed", "0"]])
def test_what_measures_does_not_go_with_reading(option, capsys):
    assert cli.main(["bench", "--from", str(MEASURED), *option]) == 1
    assert f"{option[0]}: expected none with --from" in capsys.readouterr().err


# Pictures


def test_curves_are_uniform_newest_and_of_one_gpu():
    rows = [row(2.0, tokens=64), row(1.0), row(9.0, date="2025-01-01"), row(5.0, routing="zipf")]
    rows += [row(7.0, gpu="H", date="2025-06-01"), row(3.0, format="torch-bf16", act="bf16")]
    rows += [row(math.nan, tokens=512)]
    found = plot.curves(rows)
    times = {line: [r["ms"] for r in points] for line, points in found["p"].items()}
    assert times == {("mxfp8", "mxfp8"): [1.0, 2.0], ("torch-bf16", "bf16"): [3.0]}
    assert plot.curves([row(routing="hot")]) == {}


def test_missing_matplotlib_is_said_before_anything_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    assert cli.main(["bench", "--from", str(MEASURED), "--plot", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "pip install 'moe-ep-jit[plot]'" in " ".join(said.err.split())


def test_pictures_are_whole_and_equal_rows_give_equal_bytes(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'moe-ep-jit[plot]'")
    for folder in ("a", "b"):
        argv = ["bench", "--from", str(MEASURED), "--plot", str(tmp_path / folder)]
        assert cli.main(argv) == 0
    pictures = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert pictures == ["dsv3-ep8.svg", "gptoss-120b.svg", "qwen3-30b.svg"]
    text = (tmp_path / "a" / "dsv3-ep8.svg").read_text()
    for words in ("mxfp8 floor", "nvfp4, bf16 activations", "NVIDIA H200", ">4096<", "tokens"):
        assert words in text
    assert text == (tmp_path / "b" / "dsv3-ep8.svg").read_text()


def test_plot_into_a_file_and_of_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plot, "find_spec", lambda name: object())
    (tmp_path / "file").touch()
    argv = ["bench", "--from", str(MEASURED), "--plot", str(tmp_path / "file")]
    assert cli.main(argv) == 1
    assert "expected a folder, got a file" in capsys.readouterr().err
    with pytest.raises(ValueError, match="rows with a time under uniform routing, got none"):
        plot.draw([row(routing="hot")], tmp_path)
