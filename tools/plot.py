"""One picture a preset: time against tokens, with floors and peers. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moe_ep_jit.problem import FORMATS, check
from moe_ep_jit.tools import results

#: (format, act) of ours -> its color; peers take the rest.
_COLORS = {"mxfp8": "#1f6fb4", "nvfp4": "#c2571a"}
_PEER_COLORS = ("#6b7280", "#7c3aed", "#059669")


def check_installed() -> None:
    """RuntimeError with the command where matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise RuntimeError(
            "--plot: expected matplotlib to be importable, it is not; run: pip install "
            "'moe-ep-jit[plot]' (a checkout: bash tools/dev run python -m pip install matplotlib)"
        )


def curves(rows: Iterable[dict[str, Any]]) -> dict[str, dict[tuple[str, str], list[dict]]]:
    """preset -> (format, act) -> rows by tokens: uniform routing, the newest of each count.

    Only rows of the GPU that has the newest one: two GPUs in one picture would compare nothing.
    """
    uniform = [
        row for row in results.newest(filter(results.usable, rows)) if _routing(row) == "uniform"
    ]
    if not uniform:
        return {}
    gpu = max(uniform, key=lambda row: str(row.get("date", "")))["gpu"]
    found: dict[str, dict[tuple[str, str], list[dict]]] = {}
    for row in sorted(uniform, key=lambda row: row["tokens"]):
        if row["gpu"] == gpu:
            lines = found.setdefault(row["preset"], {})
            lines.setdefault((row["format"], row["act"]), []).append(row)
    return found


def _routing(row: dict[str, Any]) -> str:
    return row.get("routing", "uniform")


def draw(rows: Iterable[dict[str, Any]], folder: Path) -> list[Path]:
    """Write ``folder/<preset>.svg`` for each preset of the rows; their paths.

    ValueError where no row has a time under uniform routing.
    """
    check_installed()
    found = curves(rows)
    check(
        bool(found),
        "--plot: expected rows with a time under uniform routing, got none; measure some without "
        "--skew, or read others with --from",
    )
    folder.mkdir(parents=True, exist_ok=True)
    return [_draw_preset(name, lines, folder) for name, lines in found.items()]


def _draw_preset(name: str, lines: dict[tuple[str, str], list[dict]], folder: Path) -> Path:
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator, ScalarFormatter

    # Text as text and ids from a fixed salt: small files, and equal rows give equal bytes.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.add_subplot()
        for (fmt, act), rows in lines.items():
            _draw_line(axes, fmt, act, rows, _color(fmt, lines))
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms")
        counts = sorted({row["tokens"] for rows in lines.values() for row in rows})
        axes.xaxis.set_major_locator(FixedLocator(counts))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.grid(True, linewidth=0.3)
        last = max((r for rows in lines.values() for r in rows), key=lambda r: str(r.get("date")))
        date = str(last.get("date", ""))[:10]
        axes.set_title(f"{name}, whole layer, {last['gpu']}, {date}", fontsize=10)
        axes.legend(fontsize=8)
        path = folder / f"{name}.svg"
        figure.savefig(path, format="svg", metadata={"Date": None})
    return path


def _color(fmt: str, lines: dict[tuple[str, str], list[dict]]) -> str:
    if fmt in FORMATS:
        return _COLORS[fmt]
    peers = list(dict.fromkeys(name for name, _ in lines if name not in FORMATS))
    return _PEER_COLORS[peers.index(fmt) % len(_PEER_COLORS)]


def _draw_line(axes: Any, fmt: str, act: str, rows: Sequence[dict], color: str) -> None:
    ours = fmt in FORMATS
    label = f"{fmt}, {act} activations" if ours else fmt
    style = "-" if ours else "-."
    tokens = [row["tokens"] for row in rows]
    axes.plot(
        tokens, [row["ms"] for row in rows], style, marker="o", ms=4, color=color, label=label
    )
    with_floor = [row for row in rows if isinstance(row.get("floor_layer_ms"), int | float)]
    if ours and with_floor:
        floor = [row["floor_layer_ms"] for row in with_floor]
        counts = [row["tokens"] for row in with_floor]
        axes.plot(counts, floor, "--", linewidth=1, color=color, label=f"{fmt} floor")
