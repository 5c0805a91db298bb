"""What a step is about to train, held against what was recorded: the checks of the run certificate.

In: the groups that were asked for, and what the trainer receives of them (`Delivery`). Out: one `Check` for each
invariant. The same function checks online, before the update, and offline, what was stored. It shares no code with
what makes the batches: who trains, with which advantage and which weight comes from `expectation`.

Shape suffixes: T tokens of a sequence, S loss tokens of a call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from sharpen.certificate.checks import (
    ACCOUNTED,
    ADVANTAGES,
    FAILURES,
    GROUPS,
    IDS,
    MASK,
    MEANS,
    OWNERS,
    RECORDS,
    REPLAY,
    STALENESS,
    TAKES_PART,
    TOKEN_WEIGHTS,
    UPDATES,
    WEIGHTS,
    CheckTally,
)
from sharpen.certificate.delivery import ids_digest, recorded_digest
from sharpen.certificate.expectation import TRAINED, Expectation, ExpectedCall, carries_loss, expect, has_part
from sharpen.certificate.rules import Rules
from sharpen.experience.records import Delivery, LossSpan
from sharpen.types import Call, CallStatus, Check, Experience, Group, Rollout

ZERO_MEAN_TOLERANCE = 1e-5
"""How far the mean advantage of a group may be from 0, relative to its largest one (float32 arithmetic)."""

TOLERANCE = 1e-5
"""How far an advantage or a weight may be from the one recomputed, relative to it (float32 arithmetic)."""


def audit(
    groups: Sequence[Group],
    delivered: Delivery,
    rules: Rules,
    *,
    version: int,
    max_staleness: int = 0,
    replayed: Sequence[Group] = (),
    replay_staleness: int = 0,
) -> tuple[Check, ...]:
    """All checks of one step. `version` is the policy version that trains, before its first update. `replayed` are
    groups of earlier steps that train again: they are not among those asked for, and their tokens may be up to
    `replay_staleness` versions behind instead of `max_staleness`."""
    tally = CheckTally()
    by_id = {rollout.id: rollout for group in (*groups, *replayed) for rollout in group.rollouts}
    oldest = {group.id: version - max_staleness for group in groups}
    oldest |= {group.id: version - replay_staleness for group in replayed}
    said = _said(delivered)
    expected = expect(groups, replayed, rules, {id_: ways[0] for id_, ways in said.items()})
    _check_refill(tally, groups, delivered, rules)
    for group in groups:
        _check_accounted(tally, group, rules.group_size)
    _check_replay(tally, groups, replayed, version)
    for group in (*groups, *replayed):
        if rules.formula.baseline:
            _check_baseline(tally, group)
        _check_group(tally, group, said.get(group.id, []), expected.may[group.id])
        _check_owners(tally, expected.taking_part[group.id])
    _check_failures(tally, delivered, by_id, rules)
    for span in delivered.spans:
        rollout = by_id.get(span.rollout_id)
        if rollout is None:
            continue
        if not 0 <= span.call < len(rollout.calls):
            tally.look(MASK, f"rollout {span.rollout_id}, call {span.call}: it made {len(rollout.calls)}")
            continue
        _check_call(tally, span, rollout.calls[span.call], oldest.get(span.group_id, version), version)
        _check_worth(tally, span, expected.calls.get((span.rollout_id, span.call)))
    _check_coverage(tally, delivered, by_id)
    _check_taking_part(tally, delivered, expected.calls)
    if rules.centred:
        _check_means(tally, delivered, expected)
    return tally.checks()


def _said(delivered: Delivery) -> dict[str, list[str]]:
    """What became of each group, in each update that it is in."""
    said: dict[str, list[str]] = {}
    for place in delivered.places:
        said.setdefault(place.group_id, []).append(place.left_out or TRAINED)
    return said


def _check_accounted(tally: CheckTally, group: Group, group_size: int) -> None:
    found = sorted(rollout.index for rollout in group.rollouts)
    wrong = None if found == list(range(group_size)) else f"group {group.id}: rollouts {found} of {group_size}"
    tally.look(ACCOUNTED, wrong, group_size)


def _check_replay(tally: CheckTally, groups: Sequence[Group], replayed: Sequence[Group], version: int) -> None:
    """A group that trains again was rolled out before this policy version, and is there once, with all its members."""
    times = Counter(group.id for group in (*groups, *replayed))
    for group in replayed:
        found = sorted(rollout.index for rollout in group.rollouts)
        newest = max(
            (int(v) for rollout in group.rollouts for call in rollout.calls for v in call.versions_S), default=-1
        )
        wrong = None
        if times[group.id] > 1:
            wrong = f"group {group.id}: {times[group.id]} times"
        elif newest >= version:
            wrong = f"group {group.id}: sampled at version {newest}, and {version} trains"
        elif found != list(range(len(found))):
            wrong = f"group {group.id}: rollouts {found}"
        tally.look(REPLAY, wrong)


def _check_baseline(tally: CheckTally, group: Group) -> None:
    """The group has its baseline, of which every call was greedy."""
    if group.baseline is None:
        tally.look(ACCOUNTED, f"group {group.id}: no baseline")
        return
    noisy = [call.index for call in group.baseline.calls if call.sampling.temperature != 0]
    tally.look(ACCOUNTED, f"baseline {group.baseline.id}, call {noisy[0]}: not greedy" if noisy else None)


def _check_refill(tally: CheckTally, groups: Sequence[Group], delivered: Delivery, rules: Rules) -> None:
    """A whole batch of groups trains, and no further task was rolled out than that took; or all that were allowed. Of
    earlier groups no more train than the settings ask for."""
    if rules.batch_size is None:
        return
    fresh, most = {group.id for group in groups}, rules.most_further
    trained = sum(place.group_id in fresh and place.left_out is None for place in delivered.places)
    further = len(groups) - rules.batch_size
    full = trained == rules.batch_size if most else True
    right = further == most or (0 <= further < most and full)
    wrong = f"{len(groups)} groups of {rules.batch_size}, of which {trained} train, with at most {most} further ones"
    tally.look(ACCOUNTED, None if right and trained <= rules.batch_size else wrong, 0)
    again = sum(place.replayed for place in delivered.places)
    said = f"{again} groups train again, where at most {rules.replayed_groups} may"
    tally.look(REPLAY, None if again <= rules.replayed_groups else said, 0)


def _check_group(tally: CheckTally, group: Group, said: Sequence[str], may: tuple[str, ...]) -> None:
    """The group is in one update, and what is said of it there is what its recorded rewards say (where they are not
    within rounding of a bound)."""
    if len(said) != 1:
        tally.look(GROUPS, f"group {group.id}: in {len(said)} batches")
        return
    wrong = f"group {group.id}: {said[0]}, but its rewards say {' or '.join(may)}"
    tally.look(GROUPS, None if said[0] in may else wrong)


def _check_owners(tally: CheckTally, rollouts: Sequence[Rollout]) -> None:
    for rollout in rollouts:
        foreign = [call.index for call in rollout.calls if call.status == CallStatus.FOREIGN]
        tally.look(OWNERS, f"rollout {rollout.id}, call {foreign[0]}" if foreign else None)


def _check_failures(tally: CheckTally, delivered: Delivery, by_id: Mapping[str, Rollout], rules: Rules) -> None:
    """Every sequence is of a rollout that was asked for and has a score."""
    for rollout_id, _ in dict.fromkeys((span.rollout_id, span.sequence) for span in delivered.spans):
        rollout = by_id.get(rollout_id)
        if rollout is None:
            tally.look(ACCOUNTED, f"{rollout_id}, which nobody asked for")
            continue
        wrong = f"rollout {rollout.id} ({rollout.outcome}, reward {rollout.reward})"
        tally.look(FAILURES, None if has_part(rollout, rules) else wrong)


def _check_call(tally: CheckTally, span: LossSpan, call: Call, oldest: int, newest: int) -> None:
    """Ids, mask and records of one call within a sequence, and how old its tokens are."""
    where = f"rollout {span.rollout_id}, call {call.index}"
    start, count = len(call.prompt_ids_P), len(call.sampled_ids_S)
    at_S = span.places_S
    whole = len(at_S) == count and int(at_S[0]) == start and int(at_S[-1]) == start + count - 1
    tally.look(MASK, None if whole and carries_loss(call) else f"{where}, token {_first_astray(at_S, start)}", count)
    if not whole:
        return
    same = span.ids == ids_digest(call.prompt_ids_P, call.sampled_ids_S)
    in_prompt, in_sampled = (None, None) if same else _other_ids(span.source, call, where)
    tally.look(IDS, in_prompt, start)
    tally.look(IDS, in_sampled, count)
    wrong = None
    if not np.isfinite(call.logprobs_S).all():
        wrong = f"{where}: a logprob that is not finite"
    elif len(call.logprobs_S) != count or len(call.versions_S) != count or span.records != recorded_digest(call):
        wrong = _other_records(span, call, where)
    tally.look(RECORDS, wrong, count)
    out = np.flatnonzero((call.versions_S < oldest) | (call.versions_S > newest))
    aged = f"{where}, token {start + int(out[0])}: version {int(call.versions_S[out[0]])}" if len(out) else None
    tally.look(STALENESS, aged, count)


def _check_worth(tally: CheckTally, span: LossSpan, expected: ExpectedCall | None) -> None:
    """Update, advantage and weight of a call's tokens; one that should not be there at all has none to compare."""
    if expected is None:
        return
    where, count = f"rollout {span.rollout_id}, call {span.call}", len(span.places_S)
    in_other = f"{where}: in update {span.update} of the step, not in {expected.update}"
    tally.look(UPDATES, None if span.update == expected.update else in_other)
    slack = TOLERANCE * abs(expected.advantage) + expected.slack
    for name, found_S, number, most in (
        (ADVANTAGES, span.advantages_S, expected.advantage, slack),
        (TOKEN_WEIGHTS, span.weights_S, expected.weight, TOLERANCE * expected.weight),
    ):
        astray = np.flatnonzero(~(np.abs(found_S.astype(np.float64) - number) <= most))
        wrong = None
        if len(astray):
            place = int(astray[0])
            wrong = f"{where}, token {int(span.places_S[place])}: {found_S[place]:.6g} instead of {number:.6g}"
        tally.look(name, wrong, count)


def _check_coverage(tally: CheckTally, delivered: Delivery, by_id: Mapping[str, Rollout]) -> None:
    """Every trainable call of the rollouts in the batch carries loss in exactly one sequence, and has weight."""
    times = Counter((span.rollout_id, span.call) for span in delivered.spans)
    weights: dict[str, float] = {}
    for span in delivered.spans:
        weights[span.rollout_id] = weights.get(span.rollout_id, 0.0) + float(span.weights_S.sum())
    for rollout_id, weight in weights.items():
        tally.look(WEIGHTS, None if weight > 0 else f"rollout {rollout_id}: weight {weight:g}")
        for call in by_id[rollout_id].calls if rollout_id in by_id else ():
            count = times[rollout_id, call.index]
            wrong = f"rollout {rollout_id}, call {call.index}: trained {count} times"
            tally.look(MASK, None if count == int(carries_loss(call)) else wrong, 0)


def _check_taking_part(
    tally: CheckTally, delivered: Delivery, expected: Mapping[tuple[str, int], ExpectedCall]
) -> None:
    """The calls that train are those that must, and no others."""
    found = dict.fromkeys((span.rollout_id, span.call) for span in delivered.spans)
    for rollout_id, call in expected:
        wrong = f"rollout {rollout_id}, call {call}: takes part, and is not trained"
        tally.look(TAKES_PART, None if (rollout_id, call) in found else wrong)
    for rollout_id, call in found:
        if (rollout_id, call) not in expected:
            tally.look(TAKES_PART, f"rollout {rollout_id}, call {call}: trained, and takes no part")


def _check_means(tally: CheckTally, delivered: Delivery, expected: Expectation) -> None:
    """With one advantage for each rollout, those of a group add up to zero (rollouts without a token have theirs too,
    so groups with such rollouts are not looked at)."""
    advantages: dict[str, dict[str, float]] = {}
    for span in delivered.spans:
        advantages.setdefault(span.group_id, {}).setdefault(span.rollout_id, float(span.advantages_S[0]))
    for group_id, rollouts in expected.taking_part.items():
        found = advantages.get(group_id, {})
        if len(found) != len(rollouts) or not found:
            continue
        mean, largest = sum(found.values()) / len(found), max(abs(value) for value in found.values())
        wrong = not abs(mean) <= ZERO_MEAN_TOLERANCE * max(largest, 1.0)
        tally.look(MEANS, f"group {group_id}: mean advantage {mean:g}" if wrong else None)


def _first_astray(at_S: np.ndarray, start: int) -> int:
    """The first place that is not where a call's tokens begin and go on."""
    astray = np.flatnonzero(at_S != np.arange(start, start + len(at_S)))
    return int(at_S[astray[0]]) if len(astray) else int(at_S[0])


def _other_ids(source: Experience | None, call: Call, where: str) -> tuple[str | None, str | None]:
    """Where the trained ids are not the recorded ones: in the prompt, and among the sampled."""
    start = len(call.prompt_ids_P)
    if source is None:
        return f"{where}: other ids than were recorded", None
    sampled = source.ids_T[start : start + len(call.sampled_ids_S)]
    in_prompt = _first_difference(source.ids_T[:start], call.prompt_ids_P, where, 0)
    return in_prompt, _first_difference(sampled, call.sampled_ids_S, where, start)


def _other_records(span: LossSpan, call: Call, where: str) -> str:
    """What of logprobs, versions and temperatures is not what was recorded."""
    if span.source is not None:
        start = int(span.places_S[0])
        for found_T, recorded_S in (
            (span.source.logprobs_T, call.logprobs_S),
            (span.source.versions_T, call.versions_S),
        ):
            found = _first_difference(found_T[span.places_S], recorded_S, where, start)
            if found is not None:
                return found
        return f"{where}: another temperature"
    return f"{where}: other logprobs, versions or temperatures than were recorded"


def _first_difference(found_T: np.ndarray, expected_T: np.ndarray, where: str, offset: int) -> str | None:
    if len(found_T) != len(expected_T):
        return f"{where}: {len(found_T)} tokens instead of {len(expected_T)}"
    differs = np.flatnonzero(found_T != expected_T)
    if not len(differs):
        return None
    place = int(differs[0])
    return f"{where}, token {offset + place}: {found_T[place]} instead of {expected_T[place]}"
