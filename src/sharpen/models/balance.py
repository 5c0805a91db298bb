"""The auxiliary loss that spreads tokens evenly over the experts of a mixture of experts.

In: the logits of each router, and how often each expert was chosen. Out: the same logits, whose gradient includes that
of the loss. For one layer it is

    E * sum over experts e of (share of the choices that fell on e) * (mean probability of e),

1 if all experts are chosen equally often (Fedus, Zoph and Shazeer 2021, "Switch Transformers", equations 4 to 6, with
shares of all K choices of a token). Probabilities are the softmax of the logits; for routers that score by a sigmoid,
the sigmoids divided by their sum (DeepSeek-AI 2024, "DeepSeek-V3", equations 17 to 20). The loss is the mean over
layers. Only probabilities have a gradient, and both are means over the tokens of a whole update, so that those of its
packs add up.

Shape suffixes: N computed tokens, L layers with a router, K experts of a token, E experts of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sharpen.types import RouteArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The share of a pack in the loss of an update.

    `weights_N` is what each computed token counts for in the means over all packs' tokens, `shares_LE` the shares of
    the choices of all of them. `values` collects the pack's part of each layer's loss, without `coef`.
    """

    coef: float
    weights_N: torch.Tensor
    shares_LE: torch.Tensor
    values: list[torch.Tensor] = field(default_factory=list)

    @property
    def value(self) -> float:
        """The pack's part of the loss, without `coef`."""
        return float(torch.stack(self.values).mean())

    def add(self, logits_NE: torch.Tensor, layer: int, *, by_sigmoid: bool) -> torch.Tensor:
        """Return the logits of a layer's router, with the gradient of the loss added to theirs."""
        num_layers, num_experts = self.shares_LE.shape
        with torch.autocast(logits_NE.device.type, enabled=False):  # bfloat16 would lose small imbalances
            exact_NE = logits_NE.float()
            scores_NE = exact_NE.sigmoid() if by_sigmoid else exact_NE.softmax(-1)
            mean_E = self.weights_N @ (scores_NE / scores_NE.sum(-1, keepdim=True))
            loss = num_experts * (mean_E * self.shares_LE[layer]).sum()
        self.values.append(loss.detach())
        added: torch.Tensor = _AddLoss.apply(logits_NE, self.coef / num_layers * loss)  # type: ignore[no-untyped-call]
        return added


def count_choices(routes_NLK: RouteArray, weights_N: np.ndarray[Any, Any], num_experts: int) -> np.ndarray[Any, Any]:
    """Return how often each expert of each layer was chosen, each token counted `weights_N` times; shape (L, E)."""
    num_tokens, num_layers, top_k = routes_NLK.shape
    counts_LE = np.zeros((num_layers, num_experts))
    repeated_NK = np.broadcast_to(np.asarray(weights_N, np.float64)[:, None], (num_tokens, top_k))
    for layer in range(num_layers):
        chosen_NK = routes_NLK[:, layer].astype(np.int64)
        counts_LE[layer] = np.bincount(chosen_NK.ravel(), repeated_NK.ravel(), minlength=num_experts)
    return counts_LE


class _AddLoss(torch.autograd.Function):
    """Passes a tensor on, and gives a scalar loss the gradient 1: it need not be part of what is returned through
    layers that are computed again or gathered from other ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.dtype = loss.dtype
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], torch.ones((), dtype=ctx.dtype, device=grads[0].device)
