"""Computes the advantages of single tokens that need the trainer's models: with a critic, a KL penalty in the reward, a
teacher's logprobs of the sampled tokens, or a baseline of each token.

In: all packs of a step as drawn, with the logprobs of reference and teacher and the critic's values. Out: the same
packs with an advantage per token, and the returns that the critic learns. This happens once per step, before its first
update.

The tokens of a rollout are the sampled tokens of its calls, in call order, whichever sequences they are in. With a
critic, the recorded advantage of a call is the reward after its last token: the reward of the rollout, or (`per_call`)
of that call, in which case GAE ends with the call. A KL penalty is subtracted from the reward of its token. Without a
critic, the recorded advantage stays, and the penalties from each token to the end of its rollout are subtracted from
it (as in REINFORCE++, arXiv 2501.03262), after normalization over the group; what is left is compared with the
baseline of its token, if there are such. The teacher's term is added to the advantage of its token or, with a critic,
to its reward.

A teacher with other tokens says something of a chunk of them (`trainer.reread`): log teacher - log π of the chunk.
Since its log π is the sum over its tokens, the policy gradient of the chunk's reverse KL has the whole term at each of
them. A critic adds up rewards: there it is the reward of the chunk's last token.

Shape suffixes: S loss tokens of a step, rollout after rollout; E loss entries of a pack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan

import numpy as np
import torch

from sharpen.errors import TrainingError
from sharpen.learning.algorithm.clip_entropy import mean_discriminator
from sharpen.learning.algorithm.distill import Distill, sampled_advantages
from sharpen.learning.algorithm.gae import explained_variance, sums_to_end
from sharpen.learning.algorithm.kl import estimator
from sharpen.learning.algorithm.presets import Algorithm
from sharpen.learning.algorithm.token_baseline import less_baseline
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import IndexArray, Pack
from sharpen.learning.trainer.scores import PackScores
from sharpen.learning.trainer.team import IDLE, Team
from sharpen.learning.trainer.work import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Metrics, and the mean divergence from the reference in nats per token if there is a KL penalty."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    kl: float | None = None


def assign(parts: Sequence[Part], algorithm: Algorithm, groups: Mapping[str, str] | None = None) -> Credit:
    """Set the advantages and, with a critic, the returns of all parts of a step. `groups` are the groups of rollouts,
    by id, needed for a baseline of each token.

    Raises `TrainingError` if a value of the critic is NaN or infinite.
    """
    if not algorithm.scores_tokens or not parts:
        return Credit()
    order_S, rollouts_S, last_S = _order([part.pack for part in parts])
    recorded_S = np.concatenate([part.pack.advantages_E for part in parts])[order_S].astype(np.float64)
    penalties_S, metrics, kl = np.zeros(len(order_S)), {}, None
    if algorithm.needs_reference and algorithm.kl_in == "reward":
        kl_S = np.concatenate([_divergence(part, algorithm) for part in parts])[order_S]
        penalties_S, kl = algorithm.kl_coef * kl_S, float(kl_S.mean())
        metrics["kl_penalty"] = float(penalties_S.mean())
    teacher_S = np.zeros(len(order_S))
    if algorithm.distill is not None and not algorithm.distill.of_vocabulary:
        terms = [_teacher_terms(part, algorithm.distill) for part in parts]
        teacher_S, shares_S, ends_S = (np.concatenate(column)[order_S] for column in zip(*terms, strict=True))
        metrics["distill_divergence"] = -float((teacher_S * shares_S).mean()) / algorithm.distill.coef
        teacher_S = np.where(ends_S, teacher_S, 0.0) if algorithm.needs_critic else teacher_S
    if not algorithm.needs_critic:
        returns_S = recorded_S - sums_to_end(penalties_S, rollouts_S)
        if algorithm.token_baseline:
            energies_S = np.concatenate([_numpy(part.energies_E) for part in parts])[order_S]
            returns_S = less_baseline(returns_S, energies_S, rollouts_S, _groups(parts, groups or {}))
        _set_advantages(parts, _split(parts, order_S, returns_S + teacher_S))
        return Credit(metrics=metrics, kl=kl)
    values_S = np.concatenate([_numpy(part.values_E) for part in parts])[order_S]
    if not np.isfinite(values_S).all():
        raise TrainingError(
            f"{int((~np.isfinite(values_S)).sum())} of {len(values_S)} values of the critic are NaN or infinite; "
            "nothing was updated. Lower critic.learning_rate, or train in float32"
        )
    rewards_S = np.where(last_S, recorded_S, 0.0) - penalties_S + teacher_S
    episodes_S = np.cumsum(np.append([False], last_S[:-1])) if algorithm.per_call else rollouts_S
    advantages_S, returns_S = algorithm.token_advantages(rewards_S, values_S, episodes_S)
    _set_advantages(parts, _split(parts, order_S, advantages_S))
    for part, returns_E in zip(parts, _split(parts, order_S, returns_S), strict=True):
        assert part.values_E is not None
        part.returns_E = torch.from_numpy(returns_E).to(part.values_E)
    metrics |= {"value_mean": float(values_S.mean()), "return_mean": float(returns_S.mean())}
    explained = explained_variance(values_S, returns_S)
    if not isnan(explained):
        metrics["explained_variance"] = explained
    return Credit(metrics=metrics, kl=kl)


def _rollouts(packs: Iterable[Pack]) -> dict[str, int]:
    """Return the number of each rollout, by its id."""
    ids = dict.fromkeys(rollout_id for pack in packs for rollout_id in pack.rollout_ids)
    return {rollout_id: number for number, rollout_id in enumerate(ids)}


def _groups(parts: Sequence[Part], groups: Mapping[str, str]) -> IndexArray:
    """Return the number of each rollout's group."""
    of_rollouts = [groups[rollout_id] for rollout_id in _rollouts(part.pack for part in parts)]
    numbers = {group_id: number for number, group_id in enumerate(dict.fromkeys(of_rollouts))}
    return np.array([numbers[group_id] for group_id in of_rollouts], np.int64)


def _order(packs: Sequence[Pack]) -> tuple[IndexArray, IndexArray, np.ndarray]:
    """Sort all loss tokens by rollout and call. Return their indices among the packs' entries, the number of their
    rollout, and whether they are the last of their call."""
    numbers = _rollouts(packs)
    rollouts = np.concatenate(
        [np.array([numbers[id_] for id_ in p.rollout_ids], np.int64)[p.rollouts_E] for p in packs]
    )
    calls = np.concatenate([pack.calls_E for pack in packs])
    tokens = np.concatenate([pack.tokens_E for pack in packs])
    order_S = np.lexsort((tokens, calls, rollouts))
    rollouts_S, calls_S = rollouts[order_S], calls[order_S]
    same_S = (rollouts_S[1:] == rollouts_S[:-1]) & (calls_S[1:] == calls_S[:-1])
    return order_S, rollouts_S, np.append(~same_S, [True])


def _divergence(part: Part, algorithm: Algorithm) -> np.ndarray:
    """Estimate for each entry the divergence of the sampling policy from the reference."""
    assert part.reference_E is not None, f"{algorithm.name} penalizes KL in the reward: reference logprobs are needed"
    sampled_E = torch.from_numpy(part.pack.logprobs_E).to(part.reference_E)
    return _numpy(estimator(algorithm.kl)(sampled_E, part.reference_E, sampled_E))


def _teacher_terms(part: Part, distill: Distill) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the advantage that the teacher gives each entry, with the other entries of its chunk; the entry's share of
    it, so that all terms are counted once; and whether the entry is the last of its chunk."""
    assert part.teacher_E is not None, "the teacher's logprobs of every pack are needed"
    sampled_E, count = part.pack.logprobs_E.astype(np.float64), part.pack.num_trained_tokens
    shares_E, ends_E = np.ones(count), np.ones(count, np.bool_)
    if (chunks_E := part.chunks_E) is not None:
        sampled_E = np.bincount(chunks_E, sampled_E)[chunks_E].astype(np.float64)
        shares_E = 1.0 / np.bincount(chunks_E)[chunks_E]
        ends_E = np.append(np.diff(chunks_E) != 0, [True])
    terms_E = _numpy(sampled_advantages(distill, part.teacher_E, torch.from_numpy(sampled_E).to(part.teacher_E)))
    return terms_E, shares_E, ends_E


def _set_advantages(parts: Sequence[Part], advantages: Sequence[np.ndarray]) -> None:
    for part, advantages_E in zip(parts, advantages, strict=True):
        part.pack = replace(part.pack, advantages_E=advantages_E.astype(np.float32))


def _split(parts: Sequence[Part], order_S: IndexArray, values_S: np.ndarray) -> list[np.ndarray]:
    """Undo `_order`: return the values of each part's entries."""
    unsorted = np.empty(len(order_S))
    unsorted[order_S] = values_S
    return np.split(unsorted, np.cumsum([part.pack.num_trained_tokens for part in parts])[:-1])


def _numpy(tensor_E: torch.Tensor | None) -> np.ndarray:
    assert tensor_E is not None, "the scores of every pack are needed"
    return tensor_E.detach().double().cpu().numpy()


# Sets the advantage of tokens to 0 depending on how training on them changes the entropy (`clipb`, `clipv`).
#
# In: all packs of a step with their advantages, and the policy before the step's first update. Out: the same packs,
# with advantage 0 for some entries, and metrics. It costs one forward pass over all tokens of the step, because the
# threshold depends on all of them. A clipped token still counts in the normalization of the loss and in the KL term.
#
# Shape suffixes: S loss tokens of a step, E loss entries of a pack.


def clip_by_entropy(parts: Sequence[Part], policy: TrainedModel, algorithm: Algorithm, team: Team) -> dict[str, float]:
    """Set the advantages of clipped tokens to 0. Return metrics: the number of clipped tokens relative to all tokens,
    and relative to those with a negative advantage."""
    if not algorithm.clips_by_entropy or not parts:
        return {}

    def score(pack: Pack) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return _columns(policy.score(pack, statistic=mean_discriminator))

    with torch.no_grad():
        scores = team.map(parts, lambda part: score(part.pack), lambda: score(IDLE))
    logprobs_S, entropy_S, means_S = (np.concatenate(column) for column in zip(*scores, strict=True))
    advantages_S = np.concatenate([part.pack.advantages_E for part in parts])
    kept_S = algorithm.keeps_advantage(advantages_S.astype(np.float64), logprobs_S, entropy_S, means_S)
    ends = np.cumsum([part.pack.num_trained_tokens for part in parts])[:-1]
    kept = zip(parts, np.split(np.where(kept_S, advantages_S, 0.0), ends), np.split(kept_S, ends), strict=True)
    for part, advantages_E, kept_E in kept:
        part.pack = replace(part.pack, advantages_E=advantages_E.astype(np.float32))
        part.left_out_E = part.left_out_with(~kept_E)
    num_negative = max(int((advantages_S < 0).sum()), 1)
    return {
        "entropy_clip_fraction": float((~kept_S).mean()),
        "entropy_clip_fraction_negative": float((~kept_S).sum()) / num_negative,
    }


def _columns(scores: PackScores) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return logprob, entropy and mean discriminator of a pack's entries."""
    assert scores.statistic_E is not None
    columns = (scores.logprobs_E, scores.entropy_E, scores.statistic_E)
    first, second, third = (column.double().cpu().numpy() for column in columns)
    return first, second, third


# Sets the advantage of tokens to 0 that a policy loss leaves out of an update (`m2po`).
#
# In: all packs of an update, and the policy before it. Out: copies of the packs, with advantage 0 for some entries, and
# metrics. It costs one forward pass over all tokens of the update, since which ones are left out depends on all of
# them. A token that is left out still counts in the normalization of the loss and in the KL term.
#
# Shape suffixes: S loss tokens of an update, E loss entries of a pack.


def mask_tokens(
    scored: Iterable[tuple[Part, torch.Tensor]], algorithm: Algorithm
) -> tuple[Sequence[Part], dict[str, float]]:
    """Return the parts of an update, some advantages of which are 0, and metrics. `scored` has each part with its
    current logprobs (shape E)."""
    parts, logprobs = zip(*scored, strict=True)
    now_S = torch.cat(logprobs).double().numpy()
    old_S, advantages_S, rollouts_S, calls_S, tokens_S = (
        np.concatenate([getattr(part.pack, name) for part in parts])
        for name in ("logprobs_E", "advantages_E", "rollouts_E", "calls_E", "tokens_E")
    )
    order_S = np.lexsort((tokens_S, calls_S, rollouts_S))  # does not depend on the packs
    found = algorithm.keeps_tokens(advantages_S.astype(np.float64)[order_S], (now_S - old_S)[order_S])
    kept_S = np.empty_like(found.kept_S)
    kept_S[order_S] = found.kept_S
    ends = np.cumsum([part.pack.num_trained_tokens for part in parts])[:-1]
    masked = [
        replace(part, pack=replace(part.pack, advantages_E=advantages_E), left_out_E=part.left_out_with(~kept_E))
        for part, advantages_E, kept_E in zip(
            parts,
            np.split(np.where(kept_S, advantages_S, np.float32(0)), ends),
            np.split(kept_S, ends),
            strict=True,
        )
    ]
    return masked, found.metrics()
