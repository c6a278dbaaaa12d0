"""Which experts the tokens of a benchmark go to: even, skewed, and all on one."""

from __future__ import annotations

import torch

from moe_ep_jit.problem import Problem, check

#: Zipf exponent of the "zipf" pattern.
ZIPF = 1.2


def uniform(tokens: int, problem: Problem, generator: torch.Generator) -> torch.Tensor:
    """int32 [tokens, top_k]: distinct experts for each token, every choice equally likely."""
    return _uniform(tokens, problem.num_experts, problem.top_k, generator)


def zipf(tokens: int, problem: Problem, generator: torch.Generator) -> torch.Tensor:
    """int32 [tokens, top_k]: distinct experts for each token, drawn one after another with weights
    1 / rank ** ``ZIPF``; the ranks are a random order of the experts."""
    device = generator.device
    order = torch.randperm(problem.num_experts, generator=generator, device=device)
    shape = (tokens, problem.num_experts)
    draw = torch.rand(shape, generator=generator, device=device, dtype=torch.float64)
    # Gumbel's trick: the k largest are k draws without replacement.
    noise = -torch.log(-torch.log(draw.clamp_(min=1e-300)))
    keys = noise - ZIPF * torch.log(order.double() + 1)
    return keys.topk(problem.top_k, dim=1).indices.to(torch.int32)


def hot(tokens: int, problem: Problem, generator: torch.Generator) -> torch.Tensor:
    """int32 [tokens, top_k]: expert 0 for every token, and distinct uniform ones besides it."""
    ids = torch.zeros(tokens, problem.top_k, dtype=torch.int32, device=generator.device)
    ids[:, 1:] = 1 + _uniform(tokens, problem.num_experts - 1, problem.top_k - 1, generator)
    return ids


def one(tokens: int, problem: Problem, generator: torch.Generator) -> torch.Tensor:
    """int32 [tokens, top_k]: expert 0 for every token and nothing else, as under top-1 routing."""
    ids = torch.full((tokens, problem.top_k), -1, dtype=torch.int32, device=generator.device)
    ids[:, 0] = 0
    return ids


PATTERNS = {"uniform": uniform, "zipf": zipf, "hot": hot, "one": one}


def make_ids(
    pattern: str, tokens: int, problem: Problem, generator: torch.Generator
) -> torch.Tensor:
    """int32 [tokens, top_k] by the name of a pattern; -1 where a token has no further expert."""
    check(
        pattern in PATTERNS,
        f"routing: expected one of {', '.join(PATTERNS)}, got {pattern!r}",
    )
    return PATTERNS[pattern](tokens, problem, generator)


def _uniform(tokens: int, experts: int, count: int, generator: torch.Generator) -> torch.Tensor:
    draw = torch.rand(tokens, experts, generator=generator, device=generator.device)
    return draw.topk(count, dim=1).indices.to(torch.int32)
