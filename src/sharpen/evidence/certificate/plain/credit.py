"""The advantages of single tokens, where the trainer's models make them: a KL penalty in the reward, or a critic.

In: the sequences of a step in order, each with the number that its rewards give it, its tokens' divergence from the
reference, and a critic's values. Out: a `Credit` for each. Written out from GAE (arXiv 1506.02438, equation 16) and
`docs/reference/algorithms.md`; nothing is shared with `trainer.credit` and `algorithm.gae`.

Shape suffixes: S tokens of a sequence with loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from sharpen.errors import ModelError
from sharpen.evidence.certificate.rules import Rules

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


# What each token of a group is compared with (`otb`), a second time.
#
# In: the credit of each call's tokens, and the distributions that they were drawn from under the weights before the
# step's first update. Out: the credit less a mean over the group's tokens at the same place of their rollouts, each
# weighted by the squared norms of all gradients of logits so far. Written out from arXiv 2602.07078 and
# `docs/reference/algorithms.md`; nothing is shared with `algorithm.token_baseline`.
#
# Shape suffixes: S tokens of a sequence with loss, V vocabulary.

_NO_WEIGHT = 1e-8
"""Added to the weights before dividing by them."""


def squared_norms(logprobs_SV: Tensor, sampled_S: Tensor) -> Tensor:
    """Return the squared norm of each sampled token's gradient with respect to the logits: 1 for it, less p of each."""
    gradient_SV = -logprobs_SV.double().exp()
    gradient_SV.scatter_add_(1, sampled_S[:, None], torch.ones_like(gradient_SV[:, :1]))
    return (gradient_SV**2).sum(-1)


def less_baselines(
    credits: Sequence[Credit], owners: Sequence[tuple[str, str]], norms: Sequence[Tensor]
) -> list[Credit]:
    """Return the credits less the baselines. `owners` are group and rollout of each call, in order."""
    sums: dict[tuple[str, int], tuple[float, float]] = {}
    so_far: dict[tuple[str, str], tuple[int, float]] = {}
    places: list[list[tuple[str, int]]] = []
    for credit, owner, norms_S in zip(credits, owners, norms, strict=True):
        place, weight = so_far.get(owner, (0, 0.0))
        places.append([(owner[0], place + number) for number in range(len(norms_S))])
        for key, value, norm in zip(places[-1], credit.advantages_S.tolist(), norms_S.tolist(), strict=True):
            weight += norm
            above, below = sums.get(key, (0.0, 0.0))
            sums[key] = above + weight * value, below + weight
        so_far[owner] = place + len(norms_S), weight
    baselines = {key: above / (below + _NO_WEIGHT) for key, (above, below) in sums.items()}
    return [
        replace(
            credit,
            advantages_S=credit.advantages_S - torch.tensor([baselines[key] for key in keys], dtype=torch.float64),
        )
        for credit, keys in zip(credits, places, strict=True)
    ]


# Which tokens of a step lose their advantage because training on them lowers the entropy (`clipb`, `clipv`), found a
# second time to repeat an update.
#
# In: the advantages of a step's tokens, and the distributions that they were drawn from under the weights before its
# first update. Out: for each token whether it is left out. Written out from arXiv 2602.03392 and
# `docs/reference/algorithms.md`; nothing is shared with `algorithm.clip_entropy`.
#
# Shape suffixes: S tokens of a sequence with loss, V vocabulary.

_CLOSE = 1e-5
"""A token this close to a bound, in deviations, is left out or not as rounding in float32 will."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyClip:
    """The bound, in standard deviations. `own`: a token is compared with the mean over its own distribution, and at
    most `share` of the step's tokens are left out (at least one); else with the mean over all tokens."""

    own: bool
    mu: float
    share: float | None = None

    @classmethod
    def of(cls, rules: Rules) -> EntropyClip | None:
        """Return the clip that a run's rules define, None if there is none."""
        if rules.advantage == "clipb":
            return cls(own=False, mu=rules.arguments.get("mu", 2.5))
        if rules.advantage == "clipv":
            share = rules.arguments.get("max_frac", 1e-4)
            return cls(own=True, mu=rules.arguments.get("mu", 8.5), share=share)
        return None

    def left_out(self, advantages: Sequence[Tensor], terms: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Return for each sequence which of its tokens (S) are left out; `terms` are those
        of `entropy_terms`, of the sampled tokens. Raises
        `ModelError` if rounding decides about one."""
        if not advantages:
            return []
        falls_S = torch.cat([of_token_S for of_token_S, _ in terms]).double()
        means_S = torch.cat([mean_S for _, mean_S in terms]).double() if self.own else falls_S.mean()
        pushed_S = torch.cat([*advantages]) < 0
        below_S = means_S - falls_S
        deviation = float(((below_S - below_S.mean()) ** 2).mean().sqrt())
        bound, close = self.mu * deviation, _CLOSE * deviation
        out_S = pushed_S & (below_S > bound) & (deviation >= 1e-12)
        furthest = torch.sort(below_S[out_S], descending=True).values
        if self.share is not None and len(furthest) > (most := max(int(self.share * len(out_S)), 1)):
            if float(furthest[most - 1] - furthest[most]) <= close:
                raise ModelError("rounding decides which of two tokens loses its advantage")
            bound = float(furthest[most - 1] + furthest[most]) / 2
            out_S &= below_S > bound
        if deviation >= 1e-12 and bool((pushed_S & ((below_S - bound).abs() <= close)).any()):
            raise ModelError("rounding decides whether a token loses its advantage")
        return [*torch.split(out_S, [len(one) for one in advantages])]


def entropy_terms(logprobs_SV: Tensor) -> tuple[Tensor, Tensor]:
    """Return `p (H + log p)` of each id (S, V), by how much the entropy falls as its logit rises, and the mean of that
    over the distribution (S)."""
    p_SV = logprobs_SV.exp()
    falls_SV = p_SV * (logprobs_SV - (p_SV * logprobs_SV).sum(-1, keepdim=True))
    return falls_SV, (p_SV * falls_SV).sum(-1)
