"""The expert's part of an update: its tokens scored, their loss and its gradient.

In: packs of an expert's rows, which are never mixed with those of rollouts: nobody sampled these tokens, so that they
have no ratio, no advantage, and nothing to compare with the engine. Out: gradients, which add to those of the rollouts,
and an `ExpertPart` of numbers.

Shape suffixes: E loss entries of a pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sharpen.algorithm.expert import Expert
from sharpen.trainer.model import TrainedModel
from sharpen.trainer.packing import Pack
from sharpen.trainer.scores import to_device
from sharpen.trainer.team import Team, backward_nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPart:
    """What the expert's tokens added to an update: `loss` with its weight `mu`, and the sum of their -log π."""

    mu: float
    loss: float
    nll_sum: float
    num_tokens: int


def backward(policy: TrainedModel, packs: Sequence[Pack], expert: Expert, step: int, team: Team) -> ExpertPart:
    """Add the gradient of the expert's tokens of one update, made in the given step (the first is 1)."""
    mu = expert.weight(step)

    def backward_one(pack: Pack) -> tuple[float, float]:
        logprobs_E = policy.score(pack).logprobs_E
        weights_E = to_device(pack.weights_E, logprobs_E.device).to(logprobs_E.dtype)
        loss = mu * (weights_E * expert.token_losses(logprobs_E)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()), -float(logprobs_E.detach().sum())

    found = team.map(packs, backward_one, lambda: backward_nothing(policy))
    return ExpertPart(
        mu=mu,
        loss=sum(loss for loss, _ in found),
        nll_sum=sum(nll for _, nll in found),
        num_tokens=sum(pack.num_trained_tokens for pack in packs),
    )


def summarize(parts: Sequence[ExpertPart]) -> dict[str, float]:
    """Metrics of a step's updates: `expert_loss` is a part of the loss, `expert_nll` the mean -log π of the tokens."""
    if not parts:
        return {}
    num_tokens = sum(part.num_tokens for part in parts)
    found = {"mu": parts[-1].mu, "expert_loss": sum(part.loss for part in parts) / len(parts)}
    return found | ({"expert_nll": sum(part.nll_sum for part in parts) / num_tokens} if num_tokens else {})
