"""Metrics of a training step, from the measurements of its updates.

In: `UpdateMetrics` of each update. Out: metrics by name, alarms, entropies by call, `StepMetrics`.

Shape suffixes: E loss entries of a pack, S loss tokens of a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from sharpen.learning.algorithm.objective import (
    ObjectiveSums,
    effective_sample_share,
    sample_share_alarm,
    sequence_log_ratios,
)
from sharpen.learning.algorithm.presets import Algorithm
from sharpen.learning.trainer.critic import CriticUpdate
from sharpen.learning.trainer.expert_loss import ExpertPart
from sharpen.learning.trainer.expert_loss import summarize as summarize_expert
from sharpen.learning.trainer.parity import LogprobGap
from sharpen.learning.trainer.work import Part, Work
from sharpen.types import CallEntropies


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """The metrics of a training step.

    `version` is the policy version after it. `values` are numbers to log: means over the step's loss tokens and
    updates. Token counts are those of one pass over the data: `trained_tokens` carry loss, `computed_tokens` went
    through the model, `sequence_tokens` would have without shared prefixes, `skipped_tokens` are loss tokens left out
    because their gradient is zero. `alarms` warn the user that the weights moved too far; the caller, which knows the
    settings, adds what to lower. `entropies` are those of the rollouts' tokens, with their ratios; rows have none.
    """

    version: int
    num_updates: int
    trained_tokens: int
    computed_tokens: int
    sequence_tokens: int
    skipped_tokens: int
    seconds: float
    values: Mapping[str, float]
    alarms: tuple[str, ...] = ()
    entropies: tuple[CallEntropies, ...] = ()

    def as_dict(self) -> dict[str, float]:
        """Return all numbers by name."""
        names = ("version", "num_updates", "trained_tokens", "computed_tokens", "sequence_tokens", "skipped_tokens")
        return {name: getattr(self, name) for name in names} | {"seconds": self.seconds} | dict(self.values)


@dataclass(frozen=True, slots=True)
class Echoed:
    """What the environment answered, in an update: the weight of a token, the sum of -log π, the number of tokens."""

    weight: float
    nll_sum: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateMetrics:
    """The measurements of one update on rollouts."""

    sums: ObjectiveSums
    entropy: float
    gap: LogprobGap
    sample_share: float
    critic: CriticUpdate | None
    expert: ExpertPart | None
    masked: Mapping[str, float]
    balance: float | None = None
    echo: Echoed | None = None


def sample_share(parts: Sequence[Part], logprobs: Sequence[torch.Tensor]) -> float:
    """Return the effective sample share of an update's N rollouts, from the current logprobs of each pack (shape E).
    Tokens of a truncated distribution whose support is not known count as unchanged."""
    if not parts:
        return 1.0
    rollouts_E = np.concatenate([part.pack.rollouts_E for part in parts])
    now_E, truncated_E = torch.cat(list(logprobs)), np.concatenate([part.pack.truncated_E for part in parts])
    old_E = torch.from_numpy(np.concatenate([part.pack.logprobs_E for part in parts])).to(now_E.dtype)
    old_E = torch.where(torch.from_numpy(truncated_E), now_E, old_E)
    num_rollouts = len(parts[0].pack.rollout_ids)
    log_ratios_N = sequence_log_ratios(now_E, old_E, torch.from_numpy(rollouts_E), num_rollouts)
    return effective_sample_share(log_ratios_N[np.unique(rollouts_E)])


def summarize(
    updates: Sequence[UpdateMetrics], algorithm: Algorithm, probed: LogprobGap
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return the metrics of a step's updates by name, and alarms."""
    if not updates:
        return {}, ()
    sums = updates[0].sums
    for update in updates[1:]:
        sums = sums + update.sums
    num_tokens = float(sums.num_tokens)
    values = sums.means(algorithm) if num_tokens else {"loss": 0.0}  # an update may have only expert rows
    for name in [name for name in values if name.endswith("loss")]:  # these are sums over an update: average them
        values[name] /= len(updates)
    experts = summarize_expert([update.expert for update in updates if update.expert is not None])
    values |= experts
    values["loss"] += experts.get("expert_loss", 0.0)
    if echoed := [update.echo for update in updates if update.echo is not None]:
        values["echo_loss"] = sum(one.weight * one.nll_sum for one in echoed) / len(updates)
        values["echo_nll"] = sum(one.nll_sum for one in echoed) / sum(one.num_tokens for one in echoed)
        values["loss"] += values["echo_loss"]
    if num_tokens:
        values["entropy"] = sum(update.entropy for update in updates) / num_tokens
    values["sample_share"] = min(update.sample_share for update in updates)
    measured = [gap for gap in (probed, *(update.gap for update in updates)) if gap.num_tokens]
    if measured:
        num_tokens = sum(gap.num_tokens for gap in measured)
        values["logprob_gap_mean"] = sum(gap.mean * gap.num_tokens for gap in measured) / num_tokens
        values["logprob_gap_max"] = max(gap.max for gap in measured)
        values["logprob_gap_kl"] = sum(gap.kl * gap.num_tokens for gap in measured) / num_tokens
        values["logprob_gap_tokens"] = num_tokens
        if judged := sum(gap.num_judged for gap in measured):
            values["logprob_gap_off"] = sum(gap.num_off for gap in measured) / judged
    of_masks = [update.masked for update in updates if update.masked]
    values |= {name: sum(one[name] for one in of_masks) / len(of_masks) for name in (of_masks[0] if of_masks else ())}
    balances = [update.balance for update in updates if update.balance is not None]
    if balances:
        values["balance_loss"] = sum(balances) / len(balances)
    critics = [update.critic for update in updates if update.critic is not None]
    if critics:
        values["value_loss"] = sum(critic.loss for critic in critics) / len(critics)
        values["value_clip_fraction"] = sum(critic.clip_fraction for critic in critics) / len(critics)
    alarm = sample_share_alarm(values["sample_share"])
    return values, (alarm,) if alarm else ()


def token_entropies(works: Iterable[Work]) -> tuple[CallEntropies, ...]:
    """Return the entropies and ratios of the tokens of a step's updates, by call."""
    return tuple(chain.from_iterable(_of_calls(part) for work in works for part in work.parts))


def _of_calls(part: Part) -> Iterator[CallEntropies]:
    """Yield the entropies and ratios of a pack's calls. A call is never split over packs."""
    pack, moments_3E, log_ratios_E, clipped_E = part.pack, part.moments_3E, part.log_ratios_E, part.clipped_E
    if moments_3E is None or not moments_3E.shape[1]:
        return
    assert log_ratios_E is not None, "the update that gave entropies gave log ratios"
    assert clipped_E is not None, "the update that gave entropies said what it clipped"
    numbers_E = pack.call_numbers_E
    order = np.argsort(numbers_E, kind="stable")  # the tokens of a call stay in their order
    for entries_S in np.split(order, np.flatnonzero(np.diff(numbers_E[order])) + 1):
        entropy, varentropy, cumulative = moments_3E[:, entries_S].sum(axis=1, dtype=np.float64).tolist()
        yield CallEntropies(
            rollout_id=pack.rollout_ids[pack.rollouts_E[entries_S[0]]],
            call=int(pack.calls_E[entries_S[0]]),
            places_S=pack.tokens_E[entries_S].astype(np.int32),
            entropies_S=moments_3E[0, entries_S].astype(np.float16),
            entropy=entropy,
            varentropy=varentropy,
            cumulative=cumulative,
            log_ratios_S=log_ratios_E[entries_S],
            clipped_S=clipped_E[entries_S],
        )
