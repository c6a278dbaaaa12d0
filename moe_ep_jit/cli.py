"""``moe-ep-jit``: demo, precompile, cache, plan, bench, tune, doctor.

Each command imports what it needs when it runs, so that ``doctor`` works where torch does not.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.table import Table

from moe_ep_jit.problem import ACTS, ARCHES, FORMATS, TRANSPORTS, check

_PIPE_WIDTH = 200
_MIB = 2**20
_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 when all is well, 1 when something failed or is wrong, 2 for bad usage."""
    args = _parser().parse_args(argv)
    # A pipe has no width: tables must not be folded at 80 columns there.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    notes = Console(stderr=True, highlight=False)
    handler = RichHandler(console=notes, show_path=False, show_level=False, log_time_format="%X")
    logger = logging.getLogger("moe_ep_jit")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if args.verbose else logging.WARNING)
    try:
        return args.run(args, console)
    except (ValueError, TypeError, RuntimeError, OSError, ImportError) as error:
        if args.verbose:
            notes.print_exception()
        notes.print(f"[red]moe-ep-jit {args.command}:[/] {escape(_text(error))}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        notes.print("interrupted")
        return 130
    finally:
        logger.removeHandler(handler)


def _text(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error}; run: moe-ep-jit doctor"
    return str(error) or type(error).__name__


def _version() -> str:
    try:
        return metadata.version("moe-ep-jit")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moe-ep-jit", description="One MoE layer in MXFP8 and NVFP4, compiled on first use."
    )
    parser.add_argument("--version", action="version", version=f"moe-ep-jit {_version()}")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="log on stderr; tracebacks of errors"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_precompile(commands)
    _add_cache(commands)
    _add_plan(commands)
    _add_bench(commands)
    _add_tune(commands)
    doctor = _command(commands, "doctor", _doctor, "what this machine has and what is wrong")
    _json(doctor)
    return parser


def _command(commands: Any, name: str, run: Any, summary: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=_sentence(summary))
    parser.set_defaults(run=run)
    return parser


def _sentence(summary: str) -> str:
    return f"{summary[0].upper()}{summary[1:]}."


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _presets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preset",
        action="append",
        default=[],
        metavar="NAME",
        help="out of cache/shapes.toml; repeatable; default: all",
    )
    parser.add_argument(
        "--format",
        action="append",
        choices=FORMATS,
        help="of the weights; repeatable; default: both",
    )
    parser.add_argument(
        "--act",
        choices=("auto", *dict.fromkeys(act for acts in ACTS.values() for act in acts)),
        default="auto",
        help="the experts' activations; default: auto, the format's own",
    )


def _formats(args: argparse.Namespace) -> list[str]:
    """The formats asked for; with an ``--act``, those of them that have it."""
    chosen = args.format or FORMATS
    formats = [fmt for fmt in chosen if args.act == "auto" or args.act in ACTS[fmt]]
    check(bool(formats), f"--act {args.act}: expected one that {' or '.join(chosen)} weights have")
    return formats


# demo


def _add_demo(commands: Any) -> None:
    summary = "the layer in both formats on this machine, with or without a GPU"
    demo = _command(commands, "demo", _demo, summary)
    demo.add_argument("--seed", type=int, default=0, help="of the random data; default: 0")
    _json(demo)


def _demo(args: argparse.Namespace, console: Console) -> int:
    from moe_ep_jit.tools import demo

    return demo.run(console, args.seed, args.json)


# precompile


def _add_precompile(commands: Any) -> None:
    summary = "fill the cache ahead of time; needs no GPU"
    precompile = _command(commands, "precompile", _precompile, summary)
    arch = next(iter(ARCHES))
    precompile.add_argument(
        "--arch",
        action="append",
        choices=tuple(ARCHES),
        help=f"to compile for; more than one may be given; default: {arch}",
    )
    _presets(precompile)
    _ranks(precompile, "for calls of so many ranks; default: one rank's own layer")
    precompile.add_argument(
        "--jobs", type=_positive, default=None, help="processes; default: what CPU and memory allow"
    )
    _json(precompile)


def _ranks(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument("--ranks", type=_positive, help=what)
    command.add_argument("--transport", choices=TRANSPORTS, default="collective", help="of ranks")


def _precompile(args: argparse.Namespace, console: Console) -> int:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    from moe_ep_jit.tools import precompile, presets

    jobs = [
        job
        for arch in dict.fromkeys(args.arch or [next(iter(ARCHES))])
        for preset in presets.load(args.preset)
        for fmt in _formats(args)
        for problem in (preset.problem(fmt, args.act, ranks=args.ranks),)
        for job in presets.jobs(problem, arch, transport=args.transport)
    ]
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    notes = Console(stderr=True)
    # Without a terminal the bar would be an empty line.
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as bar:
        task = bar.add_task("compiling", total=None)

        def show(done: int, total: int, result: dict[str, Any]) -> None:
            bar.update(task, completed=done, total=total, description=result["name"])

        result = precompile.run(jobs, args.jobs, show)
    if args.json:
        console.print_json(data=result)
        return int(result["failed"] > 0)
    for row in result["results"]:
        if row["status"] == "failed":
            console.print(
                f"[red]✗[/] {escape(row['name'])}: {escape(row['error'])}", soft_wrap=True
            )
    console.print(
        f"{result['compiled']} compiled, {result['cached']} were in the cache, "
        f"{result['failed']} failed; {result['seconds']:.1f} s on {result['workers']} processes"
    )
    return int(result["failed"] > 0)


# cache


def _add_cache(commands: Any) -> None:
    summary = "look after the compiled kernels on disk, an object for each layer and tile size"
    cache = commands.add_parser("cache", help=summary, description=_sentence(summary))
    actions = cache.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, run, summary in (
        ("list", _cache_list, "every object: shape, size, registers, whether it is usable here"),
        ("verify", _cache_verify, "check every file against its digest"),
        ("path", _cache_path, "the cache folders, the user's own first"),
    ):
        _json(_command(actions, name, run, summary))
    prune = _command(actions, "prune", _cache_prune, "remove objects that nothing loads any more")
    prune.add_argument(
        "--older-than", type=_duration, metavar="30d", help="only what was not used for so long"
    )
    prune.add_argument(
        "--max-size", type=_size, metavar="500M", help="oldest use first, until the rest fits"
    )
    prune.add_argument("--all", action="store_true", help="also objects that are usable now")
    prune.add_argument("--dry-run", action="store_true", help="only say what would go")
    _json(prune)
    pack = _command(actions, "pack", _cache_pack, "write all usable objects to one tar file")
    pack.add_argument("file", metavar="FILE.tar[.gz|.xz]")
    _json(pack)
    unpack = _command(actions, "unpack", _cache_unpack, "take over the objects of a packed file")
    unpack.add_argument("file", metavar="FILE", help="from where you trust: it holds native code")
    _json(unpack)


def _cache_list(args: argparse.Namespace, console: Console) -> int:
    from moe_ep_jit import cache_admin, jit

    rows = cache_admin.list_entries()
    if args.json:
        console.print_json(data=rows)
        return 0
    if not rows:
        console.print(f"nothing in {jit.cache_dir()}; run: moe-ep-jit precompile", soft_wrap=True)
        return 0
    table = Table("arch", "op", "shape", box=None)
    for name in ("size", "compiled in", "registers", "shared", "spills", "used"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for row in rows:
        table.add_row(
            row["arch"],
            row["op"],
            row["name"],
            f"{row['bytes'] / _MIB:.2f} MiB",
            f"{row['compile_s']:.1f} s",
            str(row["registers"]),
            f"{row['shared_bytes'] / 1024:.1f} KiB",
            f"{row['spill_bytes']} B",
            f"{datetime.fromtimestamp(row['used']):%Y-%m-%d %H:%M}",
            row["state"] + (f": {row['reason']}" if row["reason"] else ""),
        )
    console.print(table)
    size = sum(row["bytes"] for row in rows) / _MIB
    usable = sum(row["usable"] for row in rows)
    console.print(f"{len(rows)} objects, {usable} usable here, {size:.1f} MiB")
    return 0


def _cache_verify(args: argparse.Namespace, console: Console) -> int:
    from moe_ep_jit import cache_admin

    rows = cache_admin.verify()
    bad = [row for row in rows if not row["ok"]]
    if args.json:
        console.print_json(data=rows)
        return int(bool(bad))
    for row in bad:
        console.print(f"[red]✗[/] {escape(row['path'])}: {escape(row['reason'])}", soft_wrap=True)
    console.print(f"{len(rows) - len(bad)} of {len(rows)} objects are whole")
    if bad:
        console.print(
            "The next load builds a broken one anew (`cache prune` removes it), and it refuses one "
            "that others can write."
        )
    return int(bool(bad))


def _cache_path(args: argparse.Namespace, console: Console) -> int:
    from moe_ep_jit import jit

    folders = [str(folder) for folder in jit.cache_dirs()]
    if args.json:
        console.print_json(data=folders)
        return 0
    for folder in folders:
        console.print(folder, soft_wrap=True, markup=False)
    return 0


def _cache_prune(args: argparse.Namespace, console: Console) -> int:
    from moe_ep_jit import cache_admin

    rows = cache_admin.prune(
        older_than=args.older_than,
        max_bytes=args.max_size,
        keep_current=not args.all,
        dry_run=args.dry_run,
    )
    if args.json:
        console.print_json(data=rows)
        return 0
    for row in rows:
        console.print(f"{escape(row['path'])}: {escape(row['reason'])}", soft_wrap=True)
    size = sum(row["bytes"] for row in rows) / _MIB
    console.print(f"{'would remove' if args.dry_run else 'removed'} {len(rows)}, {size:.1f} MiB")
    return 0


def _cache_pack(args: argparse.Namespace, console: Console) -> int:
    from moe_ep_jit import cache_admin

    result = cache_admin.pack(args.file)
    if args.json:
        console.print_json(data=result)
        return 0
    size = result["bytes"] / _MIB
    console.print(f"{result['entries']} objects in {escape(result['path'])}, {size:.1f} MiB")
    return 0


def _cache_unpack(args: argparse.Namespace, console: Console) -> int:
    from moe_ep_jit import cache_admin

    result = cache_admin.unpack(args.file)
    if args.json:
        console.print_json(data=result)
    else:
        added, present, foreign = (len(result[k]) for k in ("added", "present", "foreign"))
        console.print(
            f"{added} objects added, {present} were there, {foreign} are for other machines"
            + (f"; {len(result['tuned'])} tuned layers added" if result["tuned"] else "")
        )
        if result["untrusted"]:
            console.print(
                f"[red]✗[/] {len(result['untrusted'])} are there, but others can write them and "
                "loading refuses them; run: moe-ep-jit cache verify",
                soft_wrap=True,
            )
    good = result["added"] or result["present"] or not result["foreign"]
    return int(bool(result["untrusted"]) or not good)


# plan


def _add_plan(commands: Any) -> None:
    plan = _command(commands, "plan", _plan, "a rank's memory by region, and predicted times")
    _presets(plan)
    _ranks(plan, "that share the experts; default: the preset's own")
    plan.add_argument("--tokens", type=_positive, help="of a call, at most; default: the preset's")
    plan.add_argument(
        "--max-recv-rows", type=_positive, help="bound on received rows; default: the worst case"
    )
    _json(plan)


def _plan(args: argparse.Namespace, console: Console) -> int:
    from moe_ep_jit.tools import plan, presets

    plans = []
    for preset in presets.load(args.preset):
        for fmt in _formats(args):
            ranks = args.ranks or preset.ranks
            problem = preset.problem(fmt, args.act, args.tokens, ranks)
            problem = problem.with_(max_recv_rows=args.max_recv_rows)
            plans.append(plan.make(preset.name, problem, args.transport))
    plan.show(plans, console, args.json)
    return 0


# bench

#: Only what measures has these; with ``--from`` they would be dropped silently.
_MEASURING = ("sustained", "peer", "iterations", "seed", "commit")


def _add_bench(commands: Any) -> None:
    bench = _command(commands, "bench", _bench, "time the presets on this GPU against its floors")
    _presets(bench)
    bench.add_argument(
        "--tokens", type=_positive, nargs="+", default=[], help="default: the preset's own counts"
    )
    bench.add_argument(
        "--skew",
        nargs="+",
        default=[],
        choices=("uniform", "zipf", "hot", "one"),
        help="routing: zipf is Zipf(1.2), hot has every token on one expert besides uniform ones, "
        "one has every token on one expert alone; default: uniform",
    )
    bench.add_argument(
        "--sustained", action="store_true", help="also 1.5 s back to back, with clock and power"
    )
    bench.add_argument(
        "--peer",
        action="append",
        choices=("torch", "flashinfer"),
        help="also time it, in this process; repeatable",
    )
    bench.add_argument(
        "--iterations", type=_positive, help="calls behind a median; default and least: 30"
    )
    bench.add_argument("--seed", type=int, help="of the random data; default: 0")
    bench.add_argument("--commit", metavar="ID", help="for the rows; default: what git says")
    instead = bench.add_mutually_exclusive_group()
    instead.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FILE",
        help="measure nothing: take the newest rows of a file of JSON lines; needs no GPU",
    )
    bench.add_argument(
        "--compare",
        type=Path,
        metavar="FILE",
        help="with the newest rows of a file: warn at 5 %% slower, exit with 1 at 15 %%",
    )
    bench.add_argument(
        "--plot", type=Path, metavar="DIR", help="draw DIR/<preset>.svg: time against tokens"
    )
    instead.add_argument(
        "--ladder", action="store_true", help="measure nothing: list the rungs and their reasons"
    )
    bench.add_argument("--json", action="store_true", help="print one JSON line for each row")


def _bench(args: argparse.Namespace, console: Console) -> int:
    from moe_ep_jit.tools import bench, presets, results

    if args.ladder:
        return _ladder(args, console)
    output = results.Output(args.json, args.compare, args.plot)
    if args.source is not None:
        return _bench_from(args, output, console)
    request = bench.Request(
        presets=presets.load(args.preset),
        formats=_formats(args),
        act=args.act,
        tokens=args.tokens,
        iterations=args.iterations or 30,
        seed=args.seed or 0,
        patterns=tuple(dict.fromkeys(args.skew)) or ("uniform",),
        others=tuple(dict.fromkeys(args.peer or ())),
        sustained=args.sustained,
    )
    return bench.run(request, output, console, args.commit)


def _bench_from(args: argparse.Namespace, output: Any, console: Console) -> int:
    from moe_ep_jit.tools import results

    for name in _MEASURING:
        given = getattr(args, name)
        check(
            given is None or given is False,
            f"--{name}: expected none with --from, which measures nothing; leave one of them out",
        )
    output.check()
    rows, left_out = results.read(args.source)
    if left_out:
        notes = Console(stderr=True, highlight=False)
        notes.print(f"{escape(str(args.source))}: {left_out} rows lack an identity or a time")
    chosen = results.select(
        results.newest(rows),
        preset=args.preset,
        format=args.format or (),
        act=() if args.act == "auto" else (args.act,),
        tokens=args.tokens,
        routing=args.skew,
    )
    check(
        bool(chosen),
        f"--from {args.source}: expected rows of what was asked for, got none of {len(rows)}; ask "
        "for less, or add some with `moe-ep-jit bench --json`",
    )
    return results.show(chosen, output, console)


def _ladder(args: argparse.Namespace, console: Console) -> int:
    from moe_ep_jit.tools import bench

    check(
        args.compare is None and args.plot is None,
        "--ladder: expected no --compare and no --plot beside it, got one; the list has no times, "
        "so leave one of them out",
    )
    rows = [row for arch in ARCHES for row in bench.ladder_rows(arch)]
    if args.json:
        console.print_json(data=rows)
        return 0
    table = Table("arch", "operand", "rung", "why", box=None)
    for row in rows:
        table.add_row(row["arch"], row["operand"], row["config"], row["reason"] or "-")
    console.print(table)
    return 0


# tune


def _add_tune(commands: Any) -> None:
    summary = "time every rung of the ladder on this GPU and keep the winners for later calls"
    tune = _command(commands, "tune", _tune, summary)
    _presets(tune)
    tune.add_argument(
        "--sizes",
        type=_positive,
        nargs=4,
        metavar=("HIDDEN", "INTERMEDIATE", "EXPERTS", "TOP_K"),
        help="a layer that no preset describes, instead of --preset",
    )
    tune.add_argument(
        "--tokens",
        type=_positive,
        nargs="+",
        default=[],
        help="a winner serves calls from half of its count up to it; default: 1, 2, 4, ... up to "
        "the preset's largest count",
    )
    tune.add_argument(
        "--iterations",
        type=_positive,
        default=30,
        help="calls behind a median; default and least: 30",
    )
    tune.add_argument("--seed", type=int, default=0, help="of the random data; default: 0")
    tune.add_argument("--json", action="store_true", help="print one JSON line for each count")


def _tune(args: argparse.Namespace, console: Console) -> int:
    from moe_ep_jit.tools import bench, presets, tune

    check(
        not (args.sizes and args.preset),
        f"--sizes: expected none beside --preset, got {args.sizes}; run one after the other",
    )
    layers = [presets.of_sizes(*args.sizes)] if args.sizes else presets.load(args.preset)
    request = bench.Request(
        presets=layers,
        formats=_formats(args),
        act=args.act,
        tokens=args.tokens,
        iterations=args.iterations,
        seed=args.seed,
    )
    return tune.run(request, console, args.json)


# doctor


def _doctor(args: argparse.Namespace, console: Console) -> int:
    from moe_ep_jit import doctor

    return doctor.run(console, args.json)


# argument types


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def _duration(text: str) -> float:
    """ "30d", "12h", "90m" or "60s" -> seconds."""
    number, unit = text[:-1], text[-1:]
    if unit not in _SECONDS or not number.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(f"expected a number and s, m, h or d, got {text!r}")
    return float(number) * _SECONDS[unit]


def _size(text: str) -> int:
    """ "500M", "2G" or a number of bytes -> bytes."""
    number = text.rstrip("KMG")
    unit = text[len(number) :]
    if unit not in _SIZES or not number.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(f"expected a number and K, M or G, got {text!r}")
    return int(float(number) * _SIZES[unit])
