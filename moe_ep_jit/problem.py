"""The static facts of one MoE layer: everything that sizes memory or selects a kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

#: Every arch this version knows: its exact compile target -> its folder under ``kernels/``.
ARCHES = {"sm_90a": "sm90", "sm_100a": "sm100", "sm_103a": "sm100"}

FORMATS = ("mxfp8", "nvfp4")

#: What the experts' activations may be, for each weight format; an arch's ``config.ACTS`` says
#: which of them it has kernels for. The first is Hopper's default and the reference's.
ACTS = {"mxfp8": ("mxfp8", "bf16"), "nvfp4": ("bf16", "nvfp4", "mxfp8")}

#: What may cross the wire between ranks.
WIRES = ("bf16", "mxfp8", "nvfp4")

#: What may cross it on the way back.
COMBINE_WIRES = ("bf16", "mxfp8")
#: What carries it: torch.distributed, or kernels over symmetric memory.
TRANSPORTS = ("collective", "symm")

MAX_TOP_K = 32
MAX_LOCAL_EXPERTS = 512

_FP32_MAX = 2.0**128 - 2.0**104


def check(condition: bool, message: str) -> None:
    """Raise ``ValueError(message)`` unless ``condition``: the one form of a caller's mistake."""
    if not condition:
        raise ValueError(message)


def check_problem(problem: object) -> None:
    """``TypeError`` unless ``problem`` is a ``Problem``."""
    if not isinstance(problem, Problem):
        raise TypeError(
            f"problem: expected Problem, got {type(problem).__name__}; build "
            "moe_ep_jit.Problem(...)"
        )


def _is_int(value: object) -> bool:
    """Whether ``value`` is a Python int: no bool, and no numpy integer, which JSON cannot say."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    """Whether ``value`` is a Python int or float that fp32 can hold: no bool, numpy, NaN or Inf."""
    return type(value) in (int, float) and abs(value) <= _FP32_MAX


@dataclass(frozen=True)
class SwiGLU:
    """``g * sigmoid(alpha * g) * (u + beta)``, g = min(gate, limit), u = clamp(up, -limit, limit).

    DeepSeek-V4 uses ``limit=10``; gpt-oss uses ``limit=7, alpha=1.702, beta=1``. ``limit=None``
    clamps nothing.
    """

    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        check(
            self.limit is None or (_is_number(self.limit) and self.limit > 0),
            f"SwiGLU.limit: expected None or a positive, finite int or float, got {self.limit!r}; "
            "pass limit=None to clamp nothing",
        )
        for name, default in (("alpha", 1.0), ("beta", 0.0)):
            value = getattr(self, name)
            check(
                _is_number(value),
                f"SwiGLU.{name}: expected a finite int or float, got {value!r}; leave it out for "
                f"{default}",
            )


@dataclass(frozen=True)
class Problem:
    """One MoE layer, frozen. Sizes are in elements.

    hidden, intermediate  multiples of 64
    num_experts           places over all ranks, redundant ones (``update_topology``) included;
                          divisible by ``num_ranks``; at most 512 a rank
    top_k                 1..32, at most ``num_experts``
    max_tokens            the most tokens one rank passes to one call
    format                "mxfp8", "nvfp4", or "auto" until ``prepare_weights`` has decided
                          (``weights.problem`` then says)
    num_ranks             expert-parallel ranks; several need ``Workspace(problem, group)``
    act                   activations of the experts: "mxfp8", "nvfp4", "bf16", or "auto" until
                          ``prepare_weights`` has decided
    wire, combine_wire    payload between ranks: "auto" follows ``act``; else "bf16" (rounded to
                          ``act`` on arrival), or with act="bf16" also "mxfp8" or "nvfp4" (what
                          arrives is what the experts read). combine carries "bf16", or "mxfp8":
                          half the bytes, 2.7 % more error (``reference.carried``). Both
                          keep their defaults where kernels carry rows (transport "symm")
    activation            the gated activation and its constants
    bias                  True: both GEMMs add a bias (gpt-oss)
    max_recv_rows         bound on the rows a rank receives in one call; None: the worst case,
                          ranks * max_tokens * top_k
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    max_tokens: int
    format: str = "auto"
    num_ranks: int = 1
    act: str = "auto"
    wire: str = "auto"
    combine_wire: str = "bf16"
    activation: SwiGLU = SwiGLU()
    bias: bool = False
    max_recv_rows: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate"):
            size = getattr(self, name)
            check(
                _is_int(size) and size > 0 and size % 64 == 0,
                f"{name}: expected a positive multiple of 64, got {size!r}; pad the checkpoint's "
                f"{name} to a multiple of 64",
            )
        check(
            _is_int(self.num_experts) and self.num_experts >= 1,
            f"num_experts: expected at least 1, got {self.num_experts!r}",
        )
        check(
            _is_int(self.num_ranks) and self.num_ranks >= 1,
            f"num_ranks: expected at least 1, got {self.num_ranks!r}",
        )
        check(
            self.num_experts % self.num_ranks == 0,
            f"num_experts: expected a multiple of num_ranks={self.num_ranks}, got "
            f"{self.num_experts}; add padding experts or change the ranks",
        )
        check(
            self.num_local_experts <= MAX_LOCAL_EXPERTS,
            f"num_experts: expected at most {MAX_LOCAL_EXPERTS} a rank, got "
            f"{self.num_local_experts}; use more ranks",
        )
        most = min(MAX_TOP_K, self.num_experts)
        check(
            _is_int(self.top_k) and 1 <= self.top_k <= most,
            f"top_k: expected 1..{most} (at most {MAX_TOP_K} and at most "
            f"num_experts={self.num_experts}), got {self.top_k!r}",
        )
        check(
            _is_int(self.max_tokens) and self.max_tokens >= 1,
            f"max_tokens: expected at least 1, got {self.max_tokens!r}",
        )
        check(
            self.max_tokens * self.top_k < 2**31,
            f"max_tokens * top_k: expected below 2^31, got {self.max_tokens * self.top_k}; "
            "split the batch",
        )
        check(
            self.format in (*FORMATS, "auto"),
            f'format: expected "mxfp8", "nvfp4" or "auto", got {self.format!r}',
        )
        fitting = ACTS.values() if self.format == "auto" else (ACTS[self.format],)
        acts = ("auto", *dict.fromkeys(act for names in fitting for act in names))
        check(
            self.act in acts,
            f"act: expected one of {acts} for format={self.format!r}, got {self.act!r}",
        )
        self._check_wires()
        check(
            isinstance(self.activation, SwiGLU),
            f"activation: expected SwiGLU(limit, alpha, beta), got {self.activation!r}",
        )
        check(
            isinstance(self.bias, bool),
            f"bias: expected True or False, got {self.bias!r}; pass the tensors themselves to "
            "prepare_weights(w13_bias=, w2_bias=)",
        )
        check(
            self.max_recv_rows is None or (_is_int(self.max_recv_rows) and self.max_recv_rows >= 1),
            f"max_recv_rows: expected None or at least 1, got {self.max_recv_rows!r}",
        )
        check(
            self.recv_rows < 2**31,
            f"num_ranks * max_tokens * top_k: expected below 2^31, got {self.recv_rows}; bound "
            "max_recv_rows, or split the batch",
        )

    def _check_wires(self) -> None:
        check(
            self.combine_wire in COMBINE_WIRES,
            f"combine_wire: expected one of {COMBINE_WIRES}, got {self.combine_wire!r}",
        )
        check(
            self.num_ranks > 1 or (self.wire in ("auto", self.act) and self.combine_wire == "bf16"),
            'wire, combine_wire: expected "auto" and "bf16" (one rank sends nothing), got '
            f"{self.wire!r} and {self.combine_wire!r}",
        )
        wires = WIRES if self.act in ("auto", "bf16") else ("bf16", self.act)
        check(
            self.wire in ("auto", *wires),
            f"wire: expected one of {('auto', *wires)} for act={self.act!r}, got {self.wire!r}; "
            "what is rounded for the wire is not rounded again",
        )

    @property
    def num_local_experts(self) -> int:
        """Experts that one rank holds."""
        return self.num_experts // self.num_ranks

    @property
    def recv_rows(self) -> int:
        """Rows (one per token and k) that the receive region of a rank holds."""
        worst = self.num_ranks * self.max_tokens * self.top_k
        return worst if self.max_recv_rows is None else min(self.max_recv_rows, worst)

    @property
    def payload(self) -> str:
        """What crosses the wire: a name out of ``WIRES``; "auto" while ``act`` decides and is."""
        return self.act if self.wire == "auto" else self.wire

    @property
    def local(self) -> Problem:
        """One rank's experts as a layer of their own, whose tokens are the rows that arrive."""
        return self.with_(
            num_ranks=1,
            num_experts=self.num_local_experts,
            top_k=1,
            max_tokens=self.recv_rows,
            max_recv_rows=None,
            wire="auto",
            combine_wire="bf16",
        )

    @property
    def is_resolved(self) -> bool:
        """True once ``format`` and ``act`` are decided."""
        return self.format != "auto" and self.act != "auto"

    def with_(self, **changes: object) -> Problem:
        """A copy with some fields replaced, checked again."""
        return replace(self, **changes)
