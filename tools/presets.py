"""The layers of ``cache/shapes.toml``, which precompile, bench and the compile tests share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_ep_jit import launch, variants
from moe_ep_jit import problem as problems
from moe_ep_jit.problem import Problem, SwiGLU, check
from moe_ep_jit.tools.precompile import Job

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

_PACKAGE = Path(problems.__file__).resolve().parent
_ACTIVATION = ("limit", "alpha", "beta")


@dataclass(frozen=True)
class Preset:
    """One layer as one rank sees it.

    sizes   the keyword arguments of its ``Problem``, but for max_tokens, format and act
    tokens  token counts worth timing, ascending
    ranks   over how many the model's experts are spread
    """

    name: str
    sizes: dict[str, Any]
    tokens: tuple[int, ...]
    ranks: int = 1

    def problem(
        self,
        fmt: str = "auto",
        act: str = "auto",
        max_tokens: int | None = None,
        ranks: int | None = None,
    ) -> Problem:
        """The layer's ``Problem``; ``max_tokens`` defaults to the largest count worth timing.

        ranks  None: one rank's experts as a layer of their own; else all experts over so many ranks
        """
        sizes = dict(self.sizes)
        if ranks is not None:
            sizes["num_experts"] *= self.ranks
        tokens = max_tokens or max(self.tokens)
        return Problem(**sizes, format=fmt, act=act, max_tokens=tokens, num_ranks=ranks or 1)


def shapes_path() -> Path:
    """``cache/shapes.toml`` of the checkout, or the copy that an installed package carries."""
    for folder in (_PACKAGE.parent, _PACKAGE):
        path = folder / "cache" / "shapes.toml"
        if path.is_file():
            return path
    raise RuntimeError(
        f"cache/shapes.toml is in neither {_PACKAGE.parent} nor {_PACKAGE}; reinstall moe-ep-jit"
    )


def load(names: Iterable[str] = (), path: Path | None = None) -> list[Preset]:
    """The presets called ``names`` in their order, or all; ValueError for one that is not there."""
    path = path or shapes_path()
    with path.open("rb") as file:
        table = tomllib.load(file)
    presets = {name: _parse(name, dict(entry)) for name, entry in table.items()}
    for name in names:
        check(name in presets, f"preset: expected one of {', '.join(presets)}, got {name!r}")
    return [presets[name] for name in dict.fromkeys(names)] or list(presets.values())


def _parse(name: str, entry: dict[str, Any]) -> Preset:
    tokens = entry.pop("tokens")
    ranks = entry.pop("ranks", 1)
    constants = {key: entry.pop(key) for key in _ACTIVATION if key in entry}
    sizes = {**entry, "activation": SwiGLU(**constants)}
    preset = Preset(name, sizes, tuple(sorted(tokens)), ranks)
    preset.problem()  # a preset with sizes that no Problem takes fails here, with its message
    return preset


def of_sizes(hidden: int, intermediate: int, experts: int, top_k: int) -> Preset:
    """A layer that no preset describes, with the plain SwiGLU; ValueError for what no layer has."""
    sizes = {
        "hidden": hidden,
        "intermediate": intermediate,
        "num_experts": experts,
        "top_k": top_k,
    }
    preset = Preset(f"h{hidden}-i{intermediate}-e{experts}-k{top_k}", sizes, (1, 8, 64, 512, 4096))
    preset.problem()
    return preset


def jobs(
    problem: Problem,
    arch: str,
    configs: Iterable[Any] | None = None,
    x_kind: str = "bf16",
    transport: str = "collective",
) -> list[Job]:
    """What ``precompile.run`` has to build so that calls of this layer never compile.

    configs    None: every rung of the ladder
    x_kind     what a call's x is: "bf16", or ``BlockScaled`` "mxfp8" or "nvfp4"; with several ranks
               and transport "collective" it is what crosses the wire, whatever is said here
    """
    problem = variants.choose_variant(problem, arch).problem
    if problem.num_ranks > 1 and transport == "collective":
        x_kind, problem = problem.payload, problem.local
    operand = variants.operand_of(problem, arch)
    rungs = variants.ladder(arch, operand) if configs is None else tuple(configs)
    module = variants.kernels_module(arch, "facts")
    found = []
    for kind in launch.weights_kinds(arch, problem, operand):
        for config in rungs:
            facts = module.facts(problem, kind, x_kind, config)
            found.append(Job("moe", facts, arch, module.BUILD, module.name(facts)))
    return found
