"""Rows of ``bench``: read from a file, shown as a table, compared with earlier ones.

A row is a JSON object a line. Its identity is ``KEY``: what was timed and on which GPU.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moe_ep_jit.problem import check

#: What two rows must share to be compared.
KEY = ("preset", "format", "act", "tokens", "routing", "gpu")

#: Slower than the earlier row by this many per cent: a warning, a failure.
WARN_PCT, FAIL_PCT = 5.0, 15.0

STAGES = ("dispatch", "gate_up", "down", "combine")

_EXPLANATION = (
    "ms: whole layer in a CUDA graph; x floor: ms over the layer's floor; GB/s: active experts' "
    "weights over ms; stages from eager calls, with their share of the copy ceiling or their rate."
)


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """The identity of a row; rows from before there were patterns are uniform."""
    return tuple(row.get(name, "uniform" if name == "routing" else None) for name in KEY)


def usable(row: Any) -> bool:
    """Whether a row says what it timed and has a time: whole, positive, no NaN."""
    if not isinstance(row, dict) or None in key(row):
        return False
    ms, tokens = row.get("ms"), row["tokens"]
    if isinstance(ms, bool) or not isinstance(ms, int | float) or not isinstance(tokens, int):
        return False
    return math.isfinite(ms) and ms > 0


def read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(rows with an identity and a time, how many were left out because they lack one).

    ValueError for a file that cannot be read and for a line that is no JSON object.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path}: expected a file of rows from `moe-ep-jit bench --json`, got {error}; pass one"
        ) from error
    rows, left_out = [], 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        check(
            isinstance(row, dict),
            f"{path}:{number}: expected a JSON object, got {line[:40]!r}; remove the line or write "
            "the file anew with `moe-ep-jit bench --json`",
        )
        if usable(row):
            rows.append({"routing": "uniform", **row})
        else:
            left_out += 1
    return rows, left_out


def newest(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest row of each identity by date, the later one of equals; in order of appearance."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        before = found.get(key(row))
        if before is None or str(row.get("date", "")) >= str(before.get("date", "")):
            found[key(row)] = row
    return list(found.values())


def select(rows: Iterable[dict[str, Any]], **wanted: Iterable[Any]) -> list[dict[str, Any]]:
    """The rows whose field is among the wanted values, for each field with any."""
    chosen = {name: set(values) for name, values in wanted.items() if values}
    return [row for row in rows if all(row.get(name) in chosen[name] for name in chosen)]


# Comparing


@dataclass(frozen=True)
class Compared:
    """A measured row beside the earlier one. ``verdict``: "ok", "slower" (a warning), "failed"."""

    row: dict[str, Any]
    before: dict[str, Any]
    percent: float
    verdict: str


def compare(
    measured: Iterable[dict[str, Any]], earlier: Iterable[dict[str, Any]]
) -> tuple[list[Compared], list[dict[str, Any]]]:
    """(each measured row beside the newest earlier one of its identity, rows that have none).

    ``WARN_PCT`` slower is "slower", ``FAIL_PCT`` slower or no time at all is "failed".
    """
    before = {key(row): row for row in newest(earlier)}
    compared, unmatched = [], []
    for row in measured:
        match = before.get(key(row))
        if match is None:
            unmatched.append(row)
            continue
        percent = math.inf
        if usable(row):
            # Rounded, since 1.05 / 1.0 - 1 is not 0.05 in binary.
            percent = round(100 * (row["ms"] / match["ms"] - 1), 6)
        limits = ((FAIL_PCT, "failed"), (WARN_PCT, "slower"))
        verdict = next((name for limit, name in limits if percent >= limit), "ok")
        compared.append(Compared(row, match, percent, verdict))
    return compared, unmatched


def comparison_table(compared: Iterable[Compared]) -> Table:
    """One line a row: both times, the change, where the earlier one comes from."""
    out = Table("preset", "format", "act", "routing", box=None)
    for name in ("tokens", "ms", "before", "change"):
        out.add_column(name, justify="right")
    for name in ("verdict", "earlier commit", "date"):
        out.add_column(name)
    colors = {"ok": "green", "slower": "yellow", "failed": "red"}
    for c in compared:
        out.add_row(
            *(str(c.row[name]) for name in ("preset", "format", "act")),
            str(c.row.get("routing", "uniform")),
            str(c.row["tokens"]),
            f"{c.row.get('ms', math.nan):.4f}",
            f"{c.before['ms']:.4f}",
            f"{c.percent:+.1f} %",
            f"[{colors[c.verdict]}]{c.verdict}[/]",
            str(c.before.get("commit", "-")),
            str(c.before.get("date", "-")),
        )
    return out


# Showing


@dataclass(frozen=True)
class Output:
    """What becomes of rows.

    as_json  a JSON line each as they come, instead of a table at the end
    compare  a file of earlier rows to compare with
    plot     a folder for one picture a preset
    """

    as_json: bool = False
    compare: Path | None = None
    plot: Path | None = None

    def check(self) -> None:
        """Refuse before anything is measured what would fail after it."""
        if self.compare is not None:
            read(self.compare)
        if self.plot is not None:
            from moe_ep_jit.tools import plot

            plot.check_installed()
            check(
                self.plot.is_dir() or not self.plot.exists(),
                f"--plot {self.plot}: expected a folder, got a file; pass another path",
            )


def show(rows: Iterable[dict[str, Any]], output: Output, console: Console) -> int:
    """Print, compare and draw rows; 1 when one is ``FAIL_PCT`` slower than before, else 0."""
    notes = Console(stderr=True)
    # Read before the first row comes: what is printed may be appended to this very file.
    earlier, left_out = ([], 0) if output.compare is None else read(output.compare)
    if left_out:
        notes.print(f"{escape(str(output.compare))}: {left_out} rows lack an identity or a time")
    kept = []
    for row in rows:
        kept.append(row)
        if output.as_json:
            console.print(json.dumps(row), soft_wrap=True, markup=False, highlight=False)
    if not output.as_json:
        console.print(table(kept))
        console.print(_EXPLANATION, highlight=False)
    if output.plot is not None:
        from moe_ep_jit.tools import plot

        for path in plot.draw(kept, output.plot):
            notes.print(f"drew {escape(str(path))}", soft_wrap=True)
    if output.compare is not None:
        compared, unmatched = compare(kept, earlier)
        gpus = ", ".join(sorted({str(row["gpu"]) for row in earlier})) or "none"
        check(
            bool(compared),
            f"--compare {output.compare}: expected rows that were timed before on this GPU, got "
            f"none (the file's GPUs: {gpus}); add some with `moe-ep-jit bench --json`",
        )
        return _show_comparison(compared, unmatched, notes if output.as_json else console)
    return 0


def _show_comparison(
    compared: list[Compared], unmatched: list[dict[str, Any]], console: Console
) -> int:
    console.print(comparison_table(compared))
    for row in unmatched:
        console.print(f"not there before: {' '.join(map(str, key(row)))}", markup=False)
    verdicts = [c.verdict for c in compared]
    console.print(
        f"{len(compared)} compared: {verdicts.count('slower')} at least {WARN_PCT:g} % slower, "
        f"{verdicts.count('failed')} at least {FAIL_PCT:g} %",
        highlight=False,
    )
    return int("failed" in verdicts)


#: Column -> how a row says it; what a row does not have is "-".
_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "tokens": lambda row: str(row["tokens"]),
    "ms": lambda row: f"{row['ms']:.3f}",
    "eager": lambda row: f"{row['eager_ms']:.3f}",
    "sustained": lambda row: f"{row['sustained_ms']:.3f}",
    "dispatch": lambda row: _stage(row, "dispatch"),
    "gate_up": lambda row: _stage(row, "gate_up"),
    "down": lambda row: _stage(row, "down"),
    "combine": lambda row: _stage(row, "combine"),
    "floor gemm": lambda row: f"{row['floor_gemm_ms']:.3f}",
    "layer": lambda row: f"{row['floor_layer_ms']:.3f}",
    "x floor": lambda row: f"{row['ms'] / row['floor_layer_ms']:.2f}",
    "TFLOP/s": lambda row: f"{row['tflops']:.0f}",
    "GB/s": lambda row: f"{row['gbps']:.0f}",
    "host us": lambda row: f"{row['host_us']:.0f}",
    "MHz": lambda row: f"{row['sm_mhz']:.0f}",
    "W": lambda row: f"{row['sustained_watts']:.0f}",
    "rel-L2": lambda row: f"{row['rel_l2']:.1e}",
}


def _stage(row: dict[str, Any], name: str) -> str:
    text = f"{row['stage_ms'][name]:.3f}"
    if name in row.get("copy_pct", ()):
        return f"{text} {row['copy_pct'][name]:.0f}%"
    if name in row.get("stage_gbps", ()):
        return f"{text} {row['stage_gbps'][name]:.0f}/{row['stage_tflops'][name]:.0f}"
    return text


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows for people; only columns that some row has."""

    def cell(row: dict[str, Any], column: Callable[[dict[str, Any]], str]) -> str:
        try:
            return column(row)
        except (KeyError, TypeError):  # not measured
            return "-"

    cells = {name: [cell(row, column) for row in rows] for name, column in _COLUMNS.items()}
    shown = {name: texts for name, texts in cells.items() if set(texts) != {"-"}}
    out = Table(box=None)
    left = ("preset", "format", "act", "routing")
    for name in left:
        out.add_column(name)
    for name in shown:
        out.add_column(name, justify="right")
    for index, row in enumerate(rows):
        names = (str(row.get(name, "uniform" if name == "routing" else "-")) for name in left)
        out.add_row(*names, *(texts[index] for texts in shown.values()))
    return out


# Where a row comes from


def machine(device: torch.device, commit_id: str | None = None) -> dict[str, Any]:
    """What a row needs to be compared with others: GPU, commit, date, versions."""
    return {
        "gpu": torch.cuda.get_device_name(device),
        "commit": commit_id or commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "dsl": metadata.version("nvidia-cutlass-dsl"),
        "torch": torch.__version__,
    }


def commit() -> str | None:
    """The checkout's commit, with "+" when files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parents[1]
    if not (root / "pyproject.toml").is_file():  # installed, maybe below somebody else's checkout
        return None
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
