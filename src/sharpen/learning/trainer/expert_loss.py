"""The loss of an update on an expert's rows, and its gradient.

In: packs of an expert's rows. They are kept apart from packs of rollouts: no engine sampled these tokens, so they have
no ratio, no advantage, and nothing to compare. Out: gradients, added to those of the rollouts, and an `ExpertPart`.

Shape suffixes: E loss entries of a pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sharpen.learning.algorithm.expert import Expert
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import Pack
from sharpen.learning.trainer.scores import to_device
from sharpen.learning.trainer.team import Team, backward_idle


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPart:
    """The expert's share in an update: its `loss`, already weighted by `mu`, and the sum of -log π of its tokens."""

    mu: float
    loss: float
    nll_sum: float
    num_tokens: int


def backward(policy: TrainedModel, packs: Sequence[Pack], expert: Expert, step: int, team: Team) -> ExpertPart:
    """Add the gradient of the expert's tokens in one update of a step; steps count from 1."""
    mu = expert.weight(step)

    def backward_one(pack: Pack) -> tuple[float, float]:
        logprobs_E = policy.score(pack).logprobs_E
        weights_E = to_device(pack.weights_E, logprobs_E.device).to(logprobs_E.dtype)
        loss = mu * (weights_E * expert.token_losses(logprobs_E)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()), -float(logprobs_E.detach().sum())

    results = team.map(packs, backward_one, lambda: backward_idle(policy))
    return ExpertPart(
        mu=mu,
        loss=sum(loss for loss, _ in results),
        nll_sum=sum(nll for _, nll in results),
        num_tokens=sum(pack.num_trained_tokens for pack in packs),
    )


def summarize(parts: Sequence[ExpertPart]) -> dict[str, float]:
    """Return the metrics of a step: `expert_loss` is a term of the loss, `expert_nll` the mean -log π per token."""
    if not parts:
        return {}
    num_tokens = sum(part.num_tokens for part in parts)
    values = {"mu": parts[-1].mu, "expert_loss": sum(part.loss for part in parts) / len(parts)}
    return values | ({"expert_nll": sum(part.nll_sum for part in parts) / num_tokens} if num_tokens else {})
