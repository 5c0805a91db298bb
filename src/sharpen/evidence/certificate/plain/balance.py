"""The balance loss of a mixture of experts, written out to repeat an update.

In: a model, the sequences of an update, its weights. Out: its gradient, added to theirs. For a layer the loss is E
times the sum over experts of (share of the tokens' choices that fell on it) times (its mean probability): Fedus, Zoph
and Shazeer (arXiv 2101.03961), equations 4 to 6; over the tokens with loss, each where it is predicted, and a mean over
layers. Of routers that score by sigmoids, probabilities are these, divided by their sum (arXiv 2412.19437, equations 17
to 20). Nothing is shared with `models.balance` or `models.routing`.

Shape suffixes: T tokens of a sequence, S of them that carry loss, L layers with a router, E experts, K of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sharpen.errors import ModelError
from sharpen.evidence.certificate.plain.model import PlainModel, PlainSequence

Tensor = torch.Tensor


def add_balance(
    model: PlainModel, update: Sequence[PlainSequence], weights: Mapping[str, Tensor], coefficient: float
) -> None:
    """Add the gradient of the balance loss of an update."""
    with torch.no_grad():
        chosen = [_of_routers(model, one, weights)[1] for one in update]
    total = sum(len(one.places_S) for one in update)
    if not total:
        return
    for one in update:
        probabilities_LSE, _ = _of_routers(model, one, weights)
        num_layers, _, num_experts = probabilities_LSE.shape
        counts_LE = sum(torch.nn.functional.one_hot(of_one, num_experts).sum((1, 2)) for of_one in chosen)
        assert isinstance(counts_LE, Tensor)
        shares_LE = counts_LE / (total * chosen[0].shape[2])
        of_layers_L = num_experts * (shares_LE * probabilities_LSE.sum(1) / total).sum(1)
        (coefficient * of_layers_L.sum() / num_layers).backward()  # type: ignore[no-untyped-call]


def _of_routers(model: PlainModel, one: PlainSequence, weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return where each token with loss is predicted the probabilities of all experts (L, S, E), and those that were
    chosen (L, S, K)."""
    routers = Routers(model.num_experts)
    model.compute_within(routers, one, weights)
    if not routers.chosen:
        raise ModelError("a balance loss is added, and no router chose among all experts by one topk")
    before_S = one.places_S - 1
    probabilities = torch.stack([by_token_TE[before_S] for by_token_TE in routers.probabilities])
    return probabilities.to(model.dtype), torch.stack([by_token_TK[before_S] for by_token_TK in routers.chosen])


class Routers(TorchFunctionMode):
    """Notes within it, layer by layer, the probabilities that routers compute (T, E) and the experts that they choose
    (T, K): each router has a linear layer and a `topk` after it."""

    def __init__(self, num_experts: int | None) -> None:
        super().__init__()
        self.probabilities: list[Tensor] = []
        self.chosen: list[Tensor] = []
        self._num_experts = num_experts
        self._logits_TE: Tensor | None = None
        self._by_sigmoid = False

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        if function is torch.nn.functional.linear and self._is_of_experts(output):
            self._logits_TE, self._by_sigmoid = output, False
        elif function in (torch.sigmoid, torch.Tensor.sigmoid) and self._is_of_experts(output):
            self._by_sigmoid = True
        elif function in (torch.topk, torch.Tensor.topk) and self._is_of_experts(
            args[0] if args else (kwargs or {})["input"]
        ):
            self._chose(output.indices)
        return output

    def _is_of_experts(self, tensor: Tensor) -> bool:
        return tensor.dim() == 2 and tensor.shape[1] == self._num_experts

    def _chose(self, chosen_TK: Tensor) -> None:
        if self._logits_TE is None:
            raise ModelError("a balance loss is added, and a router does not compute its scores by a linear layer")
        logits_TE = self._logits_TE.to(torch.promote_types(self._logits_TE.dtype, torch.float32))
        with torch.autocast("cpu", enabled=False):
            scores_TE = logits_TE.sigmoid() if self._by_sigmoid else logits_TE.softmax(-1)
            self.probabilities.append(scores_TE / scores_TE.sum(-1, keepdim=True))
        self.chosen.append(chosen_TK)
        self._logits_TE = None
