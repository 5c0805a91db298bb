"""The advantages of single tokens, where the trainer's models make them: a KL penalty in the reward, or a critic.

In: the sequences of a step in order, each with the number that its rewards give it, its tokens' divergence from the
reference, and a critic's values. Out: a `Credit` for each. Written out from GAE (arXiv 1506.02438, equation 16) and
`docs/reference/algorithms.md`; nothing is shared with `trainer.credit` and `algorithm.gae`.

Shape suffixes: S tokens of a sequence with loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

Tensor = torch.Tensor

_FLOOR = 1e-8
"""Added to the variance before dividing by its root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """How a critic's advantages are made. `calls`: each call is an episode of its own, and the variance is unbiased.
    `value_clip` bounds how far an update may move a value."""

    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = True
    calls: bool = False
    value_clip: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A call of a rollout (`owner`): its recorded number (with a critic the reward after it, else its advantage), and
    its tokens' divergence from the reference, to be subtracted from their rewards times `coefficient`."""

    owner: str
    advantage: float
    divergence_S: Tensor
    coefficient: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """The advantages of a call's tokens; with a critic their returns, and its values before the step."""

    advantages_S: Tensor
    divergence_S: Tensor
    returns_S: Tensor
    values_S: Tensor


def assign(calls: Sequence[Tokens], values: Sequence[Tensor] | None, episodes: Episodes | None) -> list[Credit]:
    """Return the credit of each call; a rollout's calls are one after the other."""
    if values is None or episodes is None:
        return [
            credit for _, of_rollout in groupby(calls, lambda call: call.owner) for credit in _penalized([*of_rollout])
        ]
    numbered = [*enumerate(zip(calls, values, strict=True))]
    units = groupby(numbered, lambda one: one[0] if episodes.calls else one[1][0].owner)
    credits = [credit for _, unit in units for credit in _estimated([pair for _, pair in unit], episodes)]
    if not episodes.whiten:
        return credits
    all_S = torch.cat([credit.advantages_S for credit in credits])
    mean = all_S.mean()
    variance = ((all_S - mean) ** 2).sum() / max(len(all_S) - episodes.calls, 1)
    return [
        Credit(
            advantages_S=(credit.advantages_S - mean) / torch.sqrt(variance + _FLOOR),
            divergence_S=credit.divergence_S,
            returns_S=credit.returns_S,
            values_S=credit.values_S,
        )
        for credit in credits
    ]


def _penalized(calls: Sequence[Tokens]) -> list[Credit]:
    """Each token of a rollout: its call's advantage, less the penalties from it to the end of the rollout."""
    ahead, credits = 0.0, []
    for call in reversed(calls):
        later_S = ahead + call.coefficient * torch.flip(torch.cumsum(torch.flip(call.divergence_S, (0,)), 0), (0,))
        ahead = float(later_S[0]) if len(later_S) else ahead
        nothing_S = torch.zeros_like(later_S)
        credits.append(
            Credit(
                advantages_S=call.advantage - later_S,
                divergence_S=call.divergence_S,
                returns_S=nothing_S,
                values_S=nothing_S,
            )
        )
    return credits[::-1]


def _estimated(episode: Sequence[tuple[Tokens, Tensor]], rules: Episodes) -> list[Credit]:
    """Generalized advantages, from the episode's last token to its first."""
    following, ahead, credits = 0.0, 0.0, []
    for call, values_S in reversed(episode):
        rewards = (-call.coefficient * call.divergence_S).tolist()
        rewards[-1] += call.advantage
        advantages = []
        for reward, value in zip(reversed(rewards), reversed(values_S.double().tolist()), strict=True):
            ahead = reward + rules.gamma * following - value + rules.gamma * rules.lam * ahead
            following = value
            advantages.append(ahead)
        advantages_S = torch.tensor(advantages[::-1], dtype=torch.float64)
        credits.append(
            Credit(
                advantages_S=advantages_S,
                divergence_S=call.divergence_S,
                returns_S=advantages_S + values_S.double(),
                values_S=values_S,
            )
        )
    return credits[::-1]
