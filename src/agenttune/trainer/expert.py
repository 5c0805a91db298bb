"""The expert's part of an update: its tokens scored, their loss and its gradient.

In: packs of an expert's rows, which are never mixed with those of rollouts: nobody sampled these tokens, so that they
have no ratio, no advantage, and nothing to compare with the engine. Out: gradients, which add to those of the rollouts,
and an `ExpertPart` of numbers.

Shape suffixes: E loss entries of a pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agenttune.algorithm.expert import Expert
from agenttune.trainer.model import TrainedModel
from agenttune.trainer.packing import Pack


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPart:
    """What the expert's tokens added to an update: `loss` with its weight `mu`, and the sum of their -log π."""

    mu: float
    loss: float
    nll_sum: float
    num_tokens: int


def backward(policy: TrainedModel, packs: Sequence[Pack], expert: Expert, step: int) -> ExpertPart:
    """Add the gradient of the expert's tokens of one update, made in the given step (the first is 1)."""
    mu, total, nll_sum = expert.weight(step), 0.0, 0.0
    for pack in packs:
        logprobs_E = policy.score(pack).logprobs_E
        weights_E = torch.from_numpy(pack.weights_E).to(logprobs_E)
        loss = mu * (weights_E * expert.token_losses(logprobs_E)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
        nll_sum -= float(logprobs_E.detach().sum())
    return ExpertPart(mu=mu, loss=total, nll_sum=nll_sum, num_tokens=sum(pack.num_trained_tokens for pack in packs))


def summarize(parts: Sequence[ExpertPart]) -> dict[str, float]:
    """Metrics of a step's updates: `expert_loss` is a part of the loss, `expert_nll` the mean -log π of the tokens."""
    if not parts:
        return {}
    num_tokens = sum(part.num_tokens for part in parts)
    found = {"mu": parts[-1].mu, "expert_loss": sum(part.loss for part in parts) / len(parts)}
    return found | ({"expert_nll": sum(part.nll_sum for part in parts) / num_tokens} if num_tokens else {})
