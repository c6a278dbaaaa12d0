"""Do the ranks of this job work together? Under torchrun, on one machine or several:

    torchrun --nproc_per_node=4 -m moe_ep_jit.tools.smoke --transport collective
    torchrun --nproc_per_node=4 -m moe_ep_jit.tools.smoke --transport symm --device cuda

On CPUs "symm" runs the kernels under the emulator. Each rank runs small layers in both formats,
sharded, and compares its rows with the unsharded layer, which it can compute since all inputs come
from one seed. The first rank prints the verdict; the exit status is 0 when all is well on every
rank.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

import moe_ep_jit as moe
from moe_ep_jit import reference, variants
from moe_ep_jit.problem import FORMATS, TRANSPORTS, Problem
from moe_ep_jit.transport import check_transport

HIDDEN, INTERMEDIATE, TOP_K, TOKENS = 256, 128, 4, 32
_EXPERTS_PER_RANK = 4
#: On a GPU kernels are compared with the reference (README, "Formats and accuracy").
_BOUNDS = {"mxfp8": 1e-2, "nvfp4": 2e-2}
_ROUTINGS = ("uniform", "one rank", "skips and repeats", "idle ranks")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rounds; 0 when every rank's results are right, else 1."""
    parser = argparse.ArgumentParser(prog="moe_ep_jit.tools.smoke", description=_first_line())
    parser.add_argument(
        "--transport",
        default="collective",
        help=f"one of {', '.join(TRANSPORTS)}; default: collective",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--rounds", type=int, default=8, help="of each format; default: 8")
    parser.add_argument("--seed", type=int, default=0, help="of the random data; default: 0")
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds to wait for a rank; default: 60"
    )
    args = parser.parse_args(argv)
    try:
        check_transport(args.transport)
        device = _join(args.device)
    except (RuntimeError, ValueError) as error:
        print(f"smoke: {error}", file=sys.stderr)  # noqa: T201
        return 1
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrong = []
    try:
        for fmt in FORMATS:
            wrong += _rounds(fmt, device, args)
    except (RuntimeError, ValueError) as error:
        print(f"smoke: rank {rank}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    for line in wrong:
        print(f"smoke: rank {rank}: {line}", file=sys.stderr)  # noqa: T201
    failed = torch.tensor([len(wrong)], device=device if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(failed)
    if rank == 0:
        total = args.rounds * len(FORMATS)
        what = f"{ranks} ranks, {args.transport} over {dist.get_backend()}, {total} rounds"
        bad = int(failed)
        print(f"{what}: {'pass' if not bad else f'{bad} results are wrong'}")  # noqa: T201
    dist.destroy_process_group()
    return int(bool(failed))


def _first_line() -> str:
    return (__doc__ or "").split("\n", 1)[0]


def _join(kind: str) -> torch.device:
    """Join the group that torchrun describes; RuntimeError where it does not."""
    if not dist.is_torchelastic_launched():
        raise RuntimeError(
            "expected to run under torchrun, got a process on its own; run: torchrun "
            "--nproc_per_node=4 -m moe_ep_jit.tools.smoke"
        )
    if kind == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(minutes=5))
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError("--device cuda: torch finds no GPU; run: moe-ep-jit doctor")
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    # NCCL wants a GPU for each rank; symmetric memory can do with fewer, for a test.
    backend = "nccl" if ranks <= torch.cuda.device_count() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=5))
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _rounds(fmt: str, device: torch.device, args: argparse.Namespace) -> list[str]:
    """Run one format's rounds; a line for each result that is wrong on this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    problem = Problem(
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        num_experts=_EXPERTS_PER_RANK * ranks,
        top_k=min(TOP_K, _EXPERTS_PER_RANK * ranks),
        max_tokens=TOKENS,
        format=fmt,
        num_ranks=ranks,
    )
    generator = torch.Generator().manual_seed(args.seed)
    w13 = torch.randn(problem.num_experts, 2 * INTERMEDIATE, HIDDEN, generator=generator)
    w2 = torch.randn(problem.num_experts, HIDDEN, INTERMEDIATE, generator=generator)
    w13, w2 = w13 * HIDDEN**-0.5, w2 * INTERMEDIATE**-0.5
    own = slice(rank * problem.num_local_experts, (rank + 1) * problem.num_local_experts)
    emulated = args.transport == "symm" and device.type == "cpu"
    backend = "emulator" if emulated else "auto"
    own13, own2 = w13[own].to(device), w2[own].to(device)
    weights = moe.prepare_weights(own13, own2, problem, rank=rank, backend=backend)
    full = moe.prepare_weights(w13, w2, problem.with_(num_ranks=1), backend="reference")
    wrong = []
    with moe.Workspace(
        weights.problem,
        device=device,
        backend=backend,
        operand=weights.operand,
        transport=args.transport,
        timeout=args.timeout,
    ) as ws:
        config = None
        if args.transport == "symm":  # one rung is enough to see whether ranks work together
            config = variants.choose_rung(weights.problem, ws.arch, TOKENS, weights.operand)
        moe.warmup(ws, weights, configs=None if config is None else [config])
        for index in range(args.rounds):
            routing = _ROUTINGS[index % len(_ROUTINGS)]
            inputs = [_draw(problem, routing, index, r, generator) for r in range(ranks)]
            mine = (t.to(device) for t in inputs[rank])
            y = moe.moe_forward(*mine, weights, ws, config=config).cpu()
            x, ids, topk_weights = (torch.cat(parts) for parts in zip(*inputs, strict=True))
            first = sum(len(inputs[r][0]) for r in range(rank))
            want = reference.moe_forward(x, ids, topk_weights, full)[first : first + len(y)]
            error = reference.error(y.float(), want.float()).whole if len(y) else 0.0
            kernels = emulated or device.type == "cuda"
            same = error < _BOUNDS[fmt] if kernels else torch.equal(y, want)
            if not same:
                wrong.append(f"{fmt}, round {index} ({routing}): relative error {error:.3g}")
    return wrong


def _draw(
    problem: Problem, routing: str, index: int, rank: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, topk_ids and topk_weights of one rank in one round."""
    tokens = int(torch.randint(1, TOKENS + 1, (), generator=generator))
    if routing == "idle ranks" and rank != index // len(_ROUTINGS) % problem.num_ranks:
        tokens = 0
    shape = (tokens, problem.top_k)
    ids = torch.randint(0, problem.num_experts, shape, generator=generator, dtype=torch.int32)
    if routing == "one rank":
        ids %= problem.num_local_experts
    elif routing == "skips and repeats":
        ids[:, 1:2] = ids[:, :1]
        ids[torch.rand(shape, generator=generator) < 0.3] = -1
    x = torch.randn(tokens, problem.hidden, generator=generator).bfloat16()
    return x, ids, torch.rand(shape, generator=generator)


if __name__ == "__main__":
    sys.exit(main())
