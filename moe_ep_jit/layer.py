"""``MoELayer``: weights, workspace and forward as one ``nn.Module``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from moe_ep_jit.api import moe_forward
from moe_ep_jit.formats import BlockScaled
from moe_ep_jit.launch import warmup
from moe_ep_jit.problem import Problem, check
from moe_ep_jit.rebalance import update_topology
from moe_ep_jit.weights import PreparedWeights, check_prepared, prepare_weights
from moe_ep_jit.workspace import Workspace, check_workspace


class MoELayer(nn.Module):
    """The experts of one MoE layer, for inference.

    problem    the layer's ``Problem``; ``layer.problem`` has format and act resolved
    w13, w2    as ``prepare_weights`` takes them; further keywords go there too
    workspace  shared with other layers (it must list this layer's problem), or None: the layer
               takes its own and gives it back in ``close``
    group, transport  with several ranks, for a workspace of its own: as ``Workspace`` takes them

    Weights are prepared tensors and no parameters: they are in no state_dict, and ``.to()`` leaves
    them where they are (``save_prepared``, ``load_prepared`` and ``update_weights`` serve them).
    """

    def __init__(
        self,
        problem: Problem,
        w13: torch.Tensor | BlockScaled,
        w2: torch.Tensor | BlockScaled,
        *,
        workspace: Workspace | None = None,
        group: object | None = None,
        transport: str = "collective",
        **prepare: Any,
    ) -> None:
        super().__init__()
        tensors = {"w13": w13, "w2": w2, **prepare}
        for name, tensor in tensors.items():
            check(
                not (isinstance(tensor, torch.Tensor) and tensor.requires_grad),
                f"{name}: expected a tensor that requires no grad (the layer is inference only), "
                f"got one that does; pass {name}.detach()",
            )
        self._adopt(prepare_weights(w13, w2, problem, **prepare), workspace, group, transport)

    @classmethod
    def from_prepared(
        cls,
        weights: PreparedWeights,
        *,
        workspace: Workspace | None = None,
        group: object | None = None,
        transport: str = "collective",
    ) -> MoELayer:
        """A layer around weights that are prepared (or loaded) already.

        TypeError for something else; ValueError for a workspace that does not serve them.
        """
        check_prepared(weights)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._adopt(weights, workspace, group, transport)
        return layer

    def _adopt(
        self,
        weights: PreparedWeights,
        workspace: Workspace | None,
        group: object | None,
        transport: str,
    ) -> None:
        self.weights = weights
        self.owns_workspace = workspace is None
        if workspace is None:
            backend = "reference" if weights.arch is None else "auto"
            workspace = Workspace(
                weights.problem,
                group,
                device=weights.device,
                backend=backend,
                operand=weights.operand,
                transport=transport,
            )
        else:
            check(
                group is None,
                "group: expected None beside workspace=, which has its own, got one; drop it",
            )
        check_workspace(workspace, "workspace")
        workspace.check_weights(weights)
        self.workspace = workspace

    @property
    def problem(self) -> Problem:
        """The layer's problem with format and act resolved."""
        return self.weights.problem

    @property
    def supports_output_view(self) -> bool:
        """Whether ``return_workspace_view=True`` gives the workspace's own buffer: always here."""
        return True

    def warmup(self, **options: Any) -> None:
        """Compile or load the layer's kernels; options as in ``moe_ep_jit.warmup``."""
        warmup(self.workspace, self.weights, **options)

    def forward(
        self,
        x: torch.Tensor | BlockScaled,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        num_tokens: torch.Tensor | None = None,
        return_workspace_view: bool = False,
    ) -> torch.Tensor:
        """x [tokens, hidden] -> bf16 [tokens, hidden]; arguments and errors as in ``moe_forward``.

        The result is the caller's own tensor, written directly: a new one, or ``out``. Its rows
        at and beyond ``num_tokens`` are not written. With ``return_workspace_view`` it is a view
        of the workspace, which dies with the next call of any layer that shares it.
        """
        if return_workspace_view and out is not None:
            raise ValueError(
                "return_workspace_view: expected False together with out=, got True; drop one"
            )
        # A wrong x goes on to moe_forward's checks: their error is the one to see.
        own = not return_workspace_view and isinstance(x, (torch.Tensor, BlockScaled))
        if out is None and own and len(x.shape) == 2:
            shape = (x.shape[0], self.problem.hidden)
            out = torch.empty(shape, dtype=torch.bfloat16, device=self.workspace.device)
        return moe_forward(
            x, topk_ids, topk_weights, self.weights, self.workspace, out=out, num_tokens=num_tokens
        )

    def update_topology(
        self,
        physical_to_logical: torch.Tensor | Sequence[int],
        w13: torch.Tensor | BlockScaled | None = None,
        w2: torch.Tensor | BlockScaled | None = None,
        **small: Any,
    ) -> None:
        """Move the layer's experts, on every rank or on none; as ``moe_ep_jit.update_topology``."""
        update_topology(self.workspace, self.weights, physical_to_logical, w13, w2, **small)

    def close(self) -> None:
        """Give the layer's own workspace back; a shared one stays. Further calls raise."""
        if self.owns_workspace:
            self.workspace.close()

    def extra_repr(self) -> str:
        p = self.problem
        return (
            f"{self.weights.variant.name}, hidden={p.hidden}, intermediate={p.intermediate}, "
            f"experts={p.num_experts}, top_k={p.top_k}"
        )
