"""The balance loss of a mixture of experts over an update: what each of its packs adds.

In: the packs of an update. Out: a `Balance` for each, which the model adds to the gradient of its routers. Means are
over the tokens that carry loss, each at the token that predicts it: so they do not depend on how the update is split
into packs, on shared beginnings, or on how calls were merged.

Shape suffixes: N computed tokens of a pack, L layers with a router, K experts of a token, E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sharpen.errors import ConfigError
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import Pack
from sharpen.learning.trainer.scores import to_device
from sharpen.learning.trainer.team import IDLE, Team
from sharpen.learning.trainer.work import Part
from sharpen.models.balance import Balance, count_choices


class BalanceLoss:
    """The balance loss of a policy, added `coef` times to that of each update."""

    def __init__(self, policy: TrainedModel, coef: float, team: Team) -> None:
        """Raises `ConfigError` if the policy has no experts, `ModelError` if a loss cannot be added to its routers."""
        if policy.routing is None:
            raise ConfigError(
                f"trainer.balance_coef is {coef:g}, but this model ({policy.module.config.model_type}) has no experts: "
                "leave it out"
            )
        assert policy.adapters is None, "refused before: with adapters the routers are frozen"
        policy.routing.check_balance()
        self._policy, self._coef, self._team = policy, coef, team
        self._shape = policy.routing.shape

    def of(self, parts: Sequence[Part]) -> list[Balance]:
        """Return what each pack of an update adds. Packs without recorded experts (rows) are computed once for this,
        without gradient."""
        weights = [_weights(part.pack) for part in parts]
        num_experts = self._shape.num_experts
        known = [part.pack.routes_NLK for part in parts]
        counted = [
            count_choices(routes_NLK, weights_N, num_experts)
            for routes_NLK, weights_N in zip(known, weights, strict=True)
            if routes_NLK is not None
        ]
        unknown = [part for part, routes_NLK in zip(parts, known, strict=True) if routes_NLK is None]
        counted += self._team.map(unknown, self._count, lambda: self._policy.routes_of(IDLE))
        total = sum(weights_N.sum() for weights_N in weights)
        counts_LE = sum(counted, start=np.zeros((self._shape.num_layers, num_experts)))
        shares_LE = torch.from_numpy((counts_LE / (total * self._shape.top_k)).astype(np.float32))
        device = self._policy.device
        return [
            Balance(
                coef=self._coef,
                weights_N=to_device((weights_N / total).astype(np.float32), device),
                shares_LE=to_device(shares_LE, device),
            )
            for weights_N in weights
        ]

    def _count(self, part: Part) -> np.ndarray[Any, Any]:
        return count_choices(self._policy.routes_of(part.pack), _weights(part.pack), self._shape.num_experts)


def _weights(pack: Pack) -> np.ndarray[Any, Any]:
    """Return how many tokens with loss each computed token predicts; shape N."""
    return np.bincount(pack.predict_E, minlength=pack.num_computed_tokens)
