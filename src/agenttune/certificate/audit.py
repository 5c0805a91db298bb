"""What a step is about to train, held against what was recorded: the checks of the run certificate.

In: the groups that were asked for, and the batches drawn from them. Out: one `Check` for each invariant. The checks
compare with the calls themselves and share no code with `merge` and `draw`, so that a mistake there is seen here.

Shape suffixes: T tokens of a sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from agenttune.algorithm.presets import Algorithm
from agenttune.errors import CertificateError
from agenttune.experience.draw import Batch
from agenttune.types import MODEL_CAUSED, Call, Check, Experience, Group, Outcome, Rollout

ZERO_MEAN_TOLERANCE = 1e-5
"""How far the mean advantage of a group may be from 0, relative to its largest one (float32 arithmetic)."""

ROUNDING = 1e-9
"""Where a group's mean or deviation is this near to a bound, either side of it is right."""

IDS, MASK, RECORDS, MEANS, STALENESS, REPLAY, FAILURES, ACCOUNTED, GROUPS, WEIGHTS = (
    "ids",
    "loss_mask",
    "records",
    "group_means",
    "staleness",
    "replay",
    "failures",
    "accounted",
    "groups",
    "weights",
)
MEANING: Mapping[str, str] = {
    IDS: "the ids trained on are the ids that were prompted and sampled",
    MASK: "every sampled token of every trainable call carries loss exactly once, and nothing else does",
    RECORDS: "logprob, version and temperature of every loss token are the recorded ones, and finite",
    MEANS: "advantages add up to zero over every group",
    STALENESS: "no token is older than allowed",
    REPLAY: "every group that trains again is whole, of an earlier policy version, and in the step once",
    FAILURES: "no failed rollout is in the statistics or the loss",
    ACCOUNTED: "every rollout that was asked for is there, once",
    GROUPS: "every group that was rolled out is trained, or left out for the reason that its rewards give",
    WEIGHTS: "every rollout with a trainable call weighs more than nothing",
}
"""The invariants by name."""

MEANING_OF_ROWS: Mapping[str, str] = {
    "rows": "every row that was drawn is trained exactly once, or was left out for its length",
    "mask": "loss is on the assistant's turns, each whole and with its end token, and on nothing else",
    "rendered": "the trained ids spell what the chat template writes for the conversation",
    "pairs": "both answers of a pair are in the same update",
}
"""Those of a run without rollouts (`supervised.checks`)."""


def sentence(check: Check) -> str:
    """A broken check for people."""
    meaning = MEANING[check.name] if check.name in MEANING else MEANING_OF_ROWS[check.name]
    return f"{check.name}: {meaning}; {check.broken} of {check.checked} do not, first {check.first}"


def broken_sentences(checks: Sequence[Check], *, stop: bool) -> list[str]:
    """The broken checks for people. Raises `CertificateError` with them instead if `stop`."""
    broken = [sentence(check) for check in checks if check.broken]
    if broken and stop:
        raise CertificateError(
            "the run certificate is broken, and nothing was trained on it: "
            + "; ".join(broken)
            + " (certificate.on_violation: warn goes on all the same)"
        )
    return broken


@dataclass(slots=True)
class _Tally:
    checked: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MEANING, 0))
    broken: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in MEANING})

    def look(self, name: str, broken: str | None, count: int = 1) -> None:
        self.checked[name] += count
        if broken is not None:
            self.broken[name].append(broken)

    def checks(self) -> tuple[Check, ...]:
        return tuple(
            Check(
                name=name,
                checked=self.checked[name],
                broken=len(self.broken[name]),
                first=next(iter(self.broken[name]), None),
            )
            for name in MEANING
        )


def audit(
    groups: Sequence[Group],
    batches: Iterable[Batch],
    algorithm: Algorithm,
    *,
    version: int,
    group_size: int,
    batch_size: int | None = None,
    max_staleness: int = 0,
    replayed: Sequence[Group] = (),
    replay_staleness: int = 0,
) -> tuple[Check, ...]:
    """All checks of one step. `version` is the policy version that trains, before its first update; with `batch_size`
    the number of groups is held against it. `replayed` are groups of earlier steps that train again: they are not
    among those asked for, and their tokens may be up to `replay_staleness` versions behind instead of `max_staleness`.
    """
    tally = _Tally()
    by_id = {rollout.id: rollout for group in (*groups, *replayed) for rollout in group.rollouts}
    bounds = {group.id: version - max_staleness for group in groups}
    bounds |= {group.id: version - replay_staleness for group in replayed}
    batches = tuple(batches)
    experiences = [experience for batch in batches for experience in batch.experiences]
    if batch_size is not None:
        _check_refill(tally, groups, batches, batch_size, algorithm.most_further(batch_size))
    for group in groups:
        _check_accounted(tally, group, group_size)
    _check_replay(tally, groups, replayed, version)
    for group in (*groups, *replayed):
        if algorithm.needs_baseline:
            _check_baseline(tally, group)
        _check_group(tally, group, batches, algorithm)
    for experience in experiences:
        rollout = by_id.get(experience.rollout_id)
        if rollout is None:
            tally.look(ACCOUNTED, f"{experience.rollout_id}, which nobody asked for")
            continue
        _check_failure(tally, rollout, algorithm)
        for index, places in _runs(experience):
            _check_call(tally, experience, rollout.calls[index], places, bounds.get(experience.group_id, version))
    _check_coverage(tally, experiences, by_id)
    if algorithm.centred:
        _check_means(tally, experiences, (*groups, *replayed), algorithm)
    return tally.checks()


def _runs(experience: Experience) -> Iterator[tuple[int, np.ndarray]]:
    """Each call that carries loss in the sequence, with the places of its tokens."""
    places_T = np.flatnonzero(experience.loss_mask_T)
    calls = experience.calls_T[places_T]
    for index in np.unique(calls):
        yield int(index), places_T[calls == index]


def _check_accounted(tally: _Tally, group: Group, group_size: int) -> None:
    found = sorted(rollout.index for rollout in group.rollouts)
    wrong = None if found == list(range(group_size)) else f"group {group.id}: rollouts {found} of {group_size}"
    tally.look(ACCOUNTED, wrong, group_size)


def _check_replay(tally: _Tally, groups: Sequence[Group], replayed: Sequence[Group], version: int) -> None:
    """A group that trains again was rolled out before this policy version, and is there once, with all its members."""
    times = Counter(group.id for group in (*groups, *replayed))
    for group in replayed:
        found = sorted(rollout.index for rollout in group.rollouts)
        newest = max(
            (int(v) for rollout in group.scored for call in rollout.calls for v in call.versions_S), default=-1
        )
        wrong = None
        if times[group.id] > 1:
            wrong = f"group {group.id}: {times[group.id]} times"
        elif newest >= version:
            wrong = f"group {group.id}: sampled at version {newest}, and {version} trains"
        elif found != list(range(len(found))):
            wrong = f"group {group.id}: rollouts {found}"
        tally.look(REPLAY, wrong)


def _check_baseline(tally: _Tally, group: Group) -> None:
    """The group has its baseline, of which every call was greedy."""
    if group.baseline is None:
        tally.look(ACCOUNTED, f"group {group.id}: no baseline")
        return
    noisy = [call.index for call in group.baseline.calls if call.sampling.temperature != 0]
    tally.look(ACCOUNTED, f"baseline {group.baseline.id}, call {noisy[0]}: not greedy" if noisy else None)


def _check_refill(tally: _Tally, groups: Sequence[Group], batches: Sequence[Batch], batch_size: int, most: int) -> None:
    """A whole batch of groups trains, and no further task was rolled out than that took; or all that were allowed."""
    fresh = {group.id for group in groups}
    trained = sum(id_ in fresh for batch in batches for id_ in batch.group_ids)
    further = len(groups) - batch_size
    full = trained == batch_size if most else True
    right = further == most or (0 <= further < most and full)
    wrong = f"{len(groups)} groups of {batch_size}, of which {trained} train, with at most {most} further ones"
    tally.look(ACCOUNTED, None if right and trained <= batch_size else wrong, 0)


def _check_group(tally: _Tally, group: Group, batches: Sequence[Batch], algorithm: Algorithm) -> None:
    """The group is in one batch, and what is said of it there is what its recorded rewards say (where they are not
    within rounding of a bound)."""
    said = [batch.left_out.get(group.id) for batch in batches if group.id in (*batch.group_ids, *batch.left_out)]
    if len(said) != 1:
        tally.look(GROUPS, f"group {group.id}: in {len(said)} batches")
        return
    rewards_G = np.array([rollout.reward for rollout in algorithm.shaping.taking_part(group.scored)], np.float64)
    expected = _expected(rewards_G, algorithm)
    if algorithm.std_threshold is not None and expected in (("flat",), ("trained",)) and not algorithm.compares_rewards:
        expected = ("flat", "trained")  # what is compared is not what was recorded
    baseline = group.baseline
    if algorithm.needs_baseline and (baseline is None or baseline.reward is None or not baseline.answered):
        expected = ("small",)
    wrong = f"group {group.id}: {said[0] or 'trained'}, but its rewards say {' or '.join(expected)}"
    tally.look(GROUPS, None if (said[0] or "trained") in expected else wrong)


def _expected(rewards_G: np.ndarray, algorithm: Algorithm) -> tuple[str, ...]:
    """What may become of a group with these rewards: one thing, or two where they are within rounding of a bound."""
    if len(rewards_G) < (2 if algorithm.group_relative else 1):
        return ("small",)
    mean, may = float(rewards_G.mean()), []
    low, high = algorithm.shaping.reward_low, algorithm.shaping.reward_high
    below, above = -np.inf if low is None else low - mean, -np.inf if high is None else mean - high
    outside = max(below, above)
    if len(rewards_G) > 1 and algorithm.std_threshold is not None:
        excess = 0.0 if (rewards_G == rewards_G[0]).all() else float(rewards_G.std(ddof=1))
        excess -= algorithm.std_threshold
        may += ["flat"] if excess <= ROUNDING else []
        if excess <= 0.0 and (excess < -ROUNDING or algorithm.std_threshold == 0.0):
            return ("flat",)
    may += ["filtered"] if outside > -ROUNDING else []
    return (*may, "trained") if outside < ROUNDING else tuple(may)


def _check_failure(tally: _Tally, rollout: Rollout, algorithm: Algorithm) -> None:
    rewarded = rollout.reward is not None and (rollout.outcome == Outcome.OK or rollout.outcome in MODEL_CAUSED)
    scored = rewarded or (rollout.outcome == Outcome.OK and not algorithm.needs_reward)
    tally.look(FAILURES, None if scored else f"rollout {rollout.id} ({rollout.outcome}, reward {rollout.reward})")


def _check_call(tally: _Tally, experience: Experience, call: Call, places: np.ndarray, oldest: int) -> None:
    """Ids, mask and records of one call within a sequence."""
    where = f"rollout {experience.rollout_id}, call {call.index}"
    start, count = len(call.prompt_ids_P), len(call.sampled_ids_S)
    contiguous = np.array_equal(places, np.arange(start, start + count))
    tally.look(MASK, None if contiguous and call.trainable else f"{where}, token {int(places[0])}", count)
    if not contiguous:
        return
    sampled = slice(start, start + count)
    for found_T, expected_T, first in (
        (experience.ids_T[:start], call.prompt_ids_P, 0),
        (experience.ids_T[sampled], call.sampled_ids_S, start),
    ):
        tally.look(IDS, _first_difference(found_T, expected_T, where, first), len(expected_T))
    logprobs_T = experience.logprobs_T[sampled]
    recorded = _first_difference(logprobs_T, call.logprobs_S, where, start)
    recorded = recorded or _first_difference(experience.versions_T[sampled], call.versions_S, where, start)
    if recorded is None and not np.isfinite(logprobs_T).all():
        recorded = f"{where}: a logprob that is not finite"
    if recorded is None and not (experience.temperatures_T[sampled] == np.float32(call.sampling.temperature)).all():
        recorded = f"{where}: another temperature"
    tally.look(RECORDS, recorded, count)
    stale = np.flatnonzero(experience.versions_T[sampled] < oldest)
    aged = f"{where}, token {start + int(stale[0])}: version {int(call.versions_S[stale[0]])}" if len(stale) else None
    tally.look(STALENESS, aged, count)


def _check_coverage(tally: _Tally, experiences: Sequence[Experience], by_id: Mapping[str, Rollout]) -> None:
    """Every trainable call of the rollouts in the batch carries loss in exactly one sequence, and has weight."""
    times: dict[tuple[str, int], int] = {}
    weights: dict[str, float] = {}
    for experience in experiences:
        weights[experience.rollout_id] = weights.get(experience.rollout_id, 0.0) + float(experience.weights_T.sum())
        for index, _ in _runs(experience):
            key = (experience.rollout_id, index)
            times[key] = times.get(key, 0) + 1
    for rollout_id, weight in weights.items():
        tally.look(WEIGHTS, None if weight > 0 else f"rollout {rollout_id}: weight {weight:g}")
        for call in by_id[rollout_id].calls if rollout_id in by_id else ():
            count = times.get((rollout_id, call.index), 0)
            wrong = f"rollout {rollout_id}, call {call.index}: trained {count} times"
            tally.look(MASK, None if count == int(call.trainable) else wrong, 0)


def _check_means(
    tally: _Tally, experiences: Sequence[Experience], groups: Sequence[Group], algorithm: Algorithm
) -> None:
    """With one advantage for each rollout, those of a group add up to zero (rollouts without a token have theirs too,
    so groups with such rollouts are not looked at)."""
    advantages: dict[str, dict[str, float]] = {}
    for experience in experiences:
        first = int(np.argmax(experience.loss_mask_T))
        advantages.setdefault(experience.group_id, {})[experience.rollout_id] = float(experience.advantages_T[first])
    for group in groups:
        found = advantages.get(group.id, {})
        if len(found) != len(algorithm.shaping.taking_part(group.scored)) or not found:
            continue
        mean, largest = sum(found.values()) / len(found), max(abs(value) for value in found.values())
        wrong = abs(mean) > ZERO_MEAN_TOLERANCE * max(largest, 1.0)
        tally.look(MEANS, f"group {group.id}: mean advantage {mean:g}" if wrong else None)


def _first_difference(found_T: np.ndarray, expected_T: np.ndarray, where: str, offset: int) -> str | None:
    if len(found_T) != len(expected_T):
        return f"{where}: {len(found_T)} tokens instead of {len(expected_T)}"
    differs = np.flatnonzero(found_T != expected_T)
    if not len(differs):
        return None
    place = int(differs[0])
    return f"{where}, token {offset + place}: {found_T[place]} instead of {expected_T[place]}"
