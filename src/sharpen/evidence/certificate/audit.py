"""The checks of the run certificate: compare what a step is about to train with what was recorded.

In: the groups that were requested, and what the trainer receives of them (`Delivery`). Out: one `Check` for each
invariant. The same function checks online, before the update, and offline, on what was stored. It shares no code with
what makes the batches: which rollouts train, with which advantage and weight, comes from `expectation`.

Shape suffixes: T tokens of a sequence, S loss tokens of a call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set

import numpy as np

from sharpen.evidence.certificate.checks import (
    ACCOUNTED,
    ADVANTAGES,
    FAILURES,
    GROUPS,
    IDS,
    MASK,
    MEANS,
    OWNERS,
    POLICIES,
    RECORDS,
    REPLAY,
    STALENESS,
    TAKES_PART,
    TOKEN_WEIGHTS,
    UPDATES,
    WEIGHTS,
    CheckTally,
)
from sharpen.evidence.certificate.delivery import ids_digest, recorded_digest
from sharpen.evidence.certificate.expectation import (
    TRAINED,
    Expectation,
    ExpectedCall,
    carries_loss,
    expect,
    is_eligible,
)
from sharpen.evidence.certificate.rules import Rules
from sharpen.learning.experience.records import Delivery, LossSpan
from sharpen.types import Call, CallStatus, Check, Experience, Group, PictureSpan, Rollout

ZERO_MEAN_TOLERANCE = 1e-5
"""How far the mean advantage of a group may be from 0, relative to its largest advantage (float32 arithmetic)."""

TOLERANCE = 1e-5
"""How far an advantage or a weight may be from the recomputed one, relative to it (float32 arithmetic)."""


def audit(
    groups: Sequence[Group],
    delivered: Delivery,
    rules: Rules,
    *,
    version: int,
    max_staleness: int = 0,
    replayed: Sequence[Group] = (),
    replay_staleness: int = 0,
    baselines: Mapping[str, float] | None = None,
) -> tuple[Check, ...]:
    """Run all checks of one step. `version` is the policy version before the step's first update. `replayed` are groups
    of earlier steps that train again: they are not among the requested `groups`, and their tokens may be up to
    `replay_staleness` versions behind instead of `max_staleness`. `baselines` are those of the groups' roles, by group
    id."""
    tally = CheckTally()
    by_id = {rollout.id: rollout for group in (*groups, *replayed) for rollout in group.rollouts}
    oldest = {group.id: version - max_staleness for group in groups}
    oldest |= {group.id: version - replay_staleness for group in replayed}
    statuses = _statuses(delivered)
    recorded = {id_: of_group[0] for id_, of_group in statuses.items()}
    expected = expect(groups, replayed, rules, recorded, baselines)
    _check_refill(tally, groups, delivered, rules)
    asked = {group.id for group in groups if group.beside is None}
    for group in groups:
        _check_accounted(tally, group, rules.group_size, asked)
    _check_replay(tally, groups, replayed, version)
    for group in (*groups, *replayed):
        if rules.formula.baseline:
            _check_baseline(tally, group)
        _check_group(tally, group, statuses.get(group.id, []), expected.allowed_statuses[group.id])
        _check_owners(tally, expected.participants[group.id])
        _check_policies(tally, group, rules.frozen)
    _check_failures(tally, delivered, by_id, rules)
    for span in delivered.spans:
        rollout = by_id.get(span.rollout_id)
        if rollout is None:
            continue
        if not 0 <= span.call < len(rollout.calls):
            tally.add(MASK, f"rollout {span.rollout_id}, call {span.call}: the rollout has {len(rollout.calls)} calls")
            continue
        _check_call(tally, span, rollout.calls[span.call], oldest.get(span.group_id, version), version)
        _check_values(tally, span, expected.calls.get((span.rollout_id, span.call)))
    _check_coverage(tally, delivered, by_id)
    _check_taking_part(tally, delivered, expected.calls)
    if rules.centred:
        _check_means(tally, delivered, expected)
    return tally.checks()


def _statuses(delivered: Delivery) -> dict[str, list[str]]:
    """Return, by group id, the group's status in each update that it is in."""
    statuses: dict[str, list[str]] = {}
    for place in delivered.places:
        statuses.setdefault(place.group_id, []).append(place.left_out or TRAINED)
    return statuses


def _check_accounted(tally: CheckTally, group: Group, group_size: int, asked: Set[str]) -> None:
    """Check that the group has all its rollouts; one at the side of another, at most as many as that one."""
    indices = sorted(rollout.index for rollout in group.rollouts)
    size = group_size if group.beside is None else min(len(indices), group_size)
    wrong = None if indices == list(range(size)) else f"group {group.id}: rollouts {indices} of {group_size}"
    if group.beside is not None and group.beside not in asked:
        wrong = f"group {group.id}: beside {group.beside}, which is none of this step"
    tally.add(ACCOUNTED, wrong, size)


def _check_replay(tally: CheckTally, groups: Sequence[Group], replayed: Sequence[Group], version: int) -> None:
    """Check that each replayed group was rolled out before this policy version, and is there once with all its
    members."""
    times = Counter(group.id for group in (*groups, *replayed))
    for group in replayed:
        indices = sorted(rollout.index for rollout in group.rollouts)
        newest = max(
            (int(v) for rollout in group.rollouts for call in rollout.calls for v in call.versions_S), default=-1
        )
        wrong = None
        if times[group.id] > 1:
            wrong = f"group {group.id}: {times[group.id]} times"
        elif newest >= version:
            wrong = f"group {group.id}: sampled at version {newest}, but version {version} trains"
        elif indices != list(range(len(indices))):
            wrong = f"group {group.id}: rollouts {indices}"
        tally.add(REPLAY, wrong)


def _check_baseline(tally: CheckTally, group: Group) -> None:
    """Check that the group has a baseline rollout, all of whose calls were greedy."""
    if group.baseline is None:
        tally.add(ACCOUNTED, f"group {group.id}: no baseline")
        return
    noisy = [call.index for call in group.baseline.calls if call.sampling.temperature != 0]
    tally.add(ACCOUNTED, f"baseline {group.baseline.id}, call {noisy[0]}: not greedy" if noisy else None)


def _check_refill(tally: CheckTally, groups: Sequence[Group], delivered: Delivery, rules: Rules) -> None:
    """Check that a full batch of groups trains and that refilling rolled out no more tasks than needed, or all that
    were allowed; and that no more groups are replayed than the settings ask for."""
    if rules.batch_size is None:
        return
    asked, most = [group.id for group in groups if group.beside is None], rules.most_further
    trained = sum(place.group_id in asked and place.left_out is None for place in delivered.places)
    further = len(asked) - rules.batch_size
    full = trained == rules.batch_size if most else True
    right = further == most or (0 <= further < most and full)
    wrong = f"{len(asked)} groups for a batch of {rules.batch_size}, {trained} of them train; at most {most} are extra"
    tally.add(ACCOUNTED, None if right and trained <= rules.batch_size else wrong, 0)
    replayed = sum(place.replayed for place in delivered.places)
    wrong = f"{replayed} groups are replayed, but at most {rules.replayed_groups} may be"
    tally.add(REPLAY, None if replayed <= rules.replayed_groups else wrong, 0)


def _check_group(tally: CheckTally, group: Group, statuses: Sequence[str], allowed: tuple[str, ...]) -> None:
    """Check that the group is in one update, with a status that its recorded rewards allow."""
    if len(statuses) != 1:
        tally.add(GROUPS, f"group {group.id}: in {len(statuses)} batches")
        return
    wrong = f"group {group.id}: {statuses[0]}, but its rewards say {' or '.join(allowed)}"
    tally.add(GROUPS, None if statuses[0] in allowed else wrong)


def _check_owners(tally: CheckTally, rollouts: Sequence[Rollout]) -> None:
    for rollout in rollouts:
        foreign = [call.index for call in rollout.calls if call.status == CallStatus.FOREIGN]
        tally.add(OWNERS, f"rollout {rollout.id}, call {foreign[0]}" if foreign else None)


def _check_policies(tally: CheckTally, group: Group, frozen: Mapping[str, int | None]) -> None:
    """Check that no call of a frozen policy trains, and which weights sampled it: those before training, version 0, or
    the last version before the group's that is a multiple of the policy's number."""
    for rollout in group.rollouts:
        for call in (one for one in rollout.calls if one.agent in frozen):
            every, wrong = frozen[call.agent], None
            behind = group.version if every is None else (group.version - 1) % every + 1
            expected = max(0, group.version - behind)
            others = call.versions_S[call.versions_S != expected]
            if carries_loss(call):
                wrong = f"rollout {rollout.id}, call {call.index}: trains"
            elif len(others):
                wrong = f"rollout {rollout.id}, call {call.index}: version {int(others[0])}, not {expected}"
            tally.add(POLICIES, wrong)


def _check_failures(tally: CheckTally, delivered: Delivery, by_id: Mapping[str, Rollout], rules: Rules) -> None:
    """Check that every sequence belongs to a rollout that was requested and has a score."""
    for rollout_id, _ in dict.fromkeys((span.rollout_id, span.sequence) for span in delivered.spans):
        rollout = by_id.get(rollout_id)
        if rollout is None:
            tally.add(ACCOUNTED, f"{rollout_id}, which was not requested")
            continue
        wrong = f"rollout {rollout.id} ({rollout.outcome}, reward {rollout.reward})"
        tally.add(FAILURES, None if is_eligible(rollout, rules) else wrong)


def _check_call(tally: CheckTally, span: LossSpan, call: Call, oldest: int, newest: int) -> None:
    """Check ids, mask and recorded values of one call within a sequence, and the age of its tokens."""
    where = f"rollout {span.rollout_id}, call {call.index}"
    start, count = len(call.prompt_ids_P), len(call.sampled_ids_S)
    at_S = span.places_S
    whole = len(at_S) == count and int(at_S[0]) == start and int(at_S[-1]) == start + count - 1
    tally.add(MASK, None if whole and carries_loss(call) else f"{where}, token {_first_astray(at_S, start)}", count)
    if not whole:
        return
    same = span.ids == ids_digest(call.prompt_ids_P, call.sampled_ids_S, pictures=call.pictures)
    in_prompt, in_sampled = (None, None) if same else _changed_ids(span.source, call, where)
    tally.add(IDS, in_prompt, start)
    tally.add(IDS, in_sampled, count)
    wrong = None
    if not np.isfinite(call.logprobs_S).all():
        wrong = f"{where}: a logprob is not finite"
    elif len(call.logprobs_S) != count or len(call.versions_S) != count or span.records != recorded_digest(call):
        wrong = _changed_records(span, call, where)
    tally.add(RECORDS, wrong, count)
    outside = np.flatnonzero((call.versions_S < oldest) | (call.versions_S > newest))
    wrong = None
    if len(outside):
        wrong = f"{where}, token {start + int(outside[0])}: version {int(call.versions_S[outside[0]])}"
    tally.add(STALENESS, wrong, count)


def _check_values(tally: CheckTally, span: LossSpan, expected: ExpectedCall | None) -> None:
    """Check update, advantage and weight of a call's tokens. `expected` is None for a call that should not train."""
    if expected is None:
        return
    where, count = f"rollout {span.rollout_id}, call {span.call}", len(span.places_S)
    misplaced = f"{where}: in update {span.update} of the step, not in {expected.update}"
    tally.add(UPDATES, None if span.update == expected.update else misplaced)
    for name, found_S, number, slack in (
        (ADVANTAGES, span.advantages_S, expected.advantage, expected.slack),
        (TOKEN_WEIGHTS, span.weights_S, expected.weight, 0.0),
    ):
        if number is None:  # of a part without a second formula (`sources.without_second`)
            continue
        most = TOLERANCE * abs(number) + slack
        astray = np.flatnonzero(~(np.abs(found_S.astype(np.float64) - number) <= most))
        wrong = None
        if len(astray):
            place = int(astray[0])
            wrong = f"{where}, token {int(span.places_S[place])}: {found_S[place]:.6g} instead of {number:.6g}"
        tally.add(name, wrong, count)


def _check_coverage(tally: CheckTally, delivered: Delivery, by_id: Mapping[str, Rollout]) -> None:
    """Check that every trainable call of the batch's rollouts carries loss in exactly one sequence, and has weight."""
    times = Counter((span.rollout_id, span.call) for span in delivered.spans)
    weights: dict[str, float] = {}
    for span in delivered.spans:
        weights[span.rollout_id] = weights.get(span.rollout_id, 0.0) + float(span.weights_S.sum())
    for rollout_id, weight in weights.items():
        tally.add(WEIGHTS, None if weight > 0 else f"rollout {rollout_id}: weight {weight:g}")
        for call in by_id[rollout_id].calls if rollout_id in by_id else ():
            count = times[rollout_id, call.index]
            wrong = f"rollout {rollout_id}, call {call.index}: trained {count} times"
            tally.add(MASK, None if count == int(carries_loss(call)) else wrong, 0)


def _check_taking_part(
    tally: CheckTally, delivered: Delivery, expected: Mapping[tuple[str, int], ExpectedCall]
) -> None:
    """Check that the calls that train are exactly those that must."""
    trained = dict.fromkeys((span.rollout_id, span.call) for span in delivered.spans)
    for rollout_id, call in expected:
        wrong = f"rollout {rollout_id}, call {call}: takes part, but is not trained"
        tally.add(TAKES_PART, None if (rollout_id, call) in trained else wrong)
    for rollout_id, call in trained:
        if (rollout_id, call) not in expected:
            tally.add(TAKES_PART, f"rollout {rollout_id}, call {call}: trained, but takes no part")


def _check_means(tally: CheckTally, delivered: Delivery, expected: Expectation) -> None:
    """Check that the advantages of a group add up to zero, if each rollout has one advantage. Groups with rollouts
    without tokens are skipped: these have advantages too, but no token that shows them."""
    advantages: dict[str, dict[str, float]] = {}
    for span in delivered.spans:
        advantages.setdefault(span.group_id, {}).setdefault(span.rollout_id, float(span.advantages_S[0]))
    for group_id, rollouts in expected.participants.items():
        of_group = advantages.get(group_id, {})
        if len(of_group) != len(rollouts) or not of_group:
            continue
        mean, largest = sum(of_group.values()) / len(of_group), max(abs(value) for value in of_group.values())
        wrong = not abs(mean) <= ZERO_MEAN_TOLERANCE * max(largest, 1.0)
        tally.add(MEANS, f"group {group_id}: mean advantage {mean:g}" if wrong else None)


def _first_astray(at_S: np.ndarray, start: int) -> int:
    """Return the first position that does not continue the call's tokens from `start`."""
    astray = np.flatnonzero(at_S != np.arange(start, start + len(at_S)))
    return int(at_S[astray[0]]) if len(astray) else int(at_S[0])


def _changed_ids(source: Experience | None, call: Call, where: str) -> tuple[str | None, str | None]:
    """Describe where the trained ids differ from the recorded ones: in the prompt, with its images, and among the
    sampled ids."""
    start = len(call.prompt_ids_P)
    if source is None:
        return f"{where}: the ids{' or the images' * bool(call.pictures)} differ from the recorded ones", None
    sampled = source.ids_T[start : start + len(call.sampled_ids_S)]
    in_prompt = _first_difference(source.ids_T[:start], call.prompt_ids_P, where, 0)
    in_sampled = _first_difference(sampled, call.sampled_ids_S, where, start)
    if in_prompt is None and in_sampled is None:
        in_prompt = _changed_pictures(source, call, where)
    return in_prompt, in_sampled


def _changed_pictures(source: Experience, call: Call, where: str) -> str:
    """Describe which images differ from the recorded ones, where all ids are equal."""
    end = len(call.prompt_ids_P) + len(call.sampled_ids_S)
    shown = [span for span in source.pictures if span.start < end]
    for number, (found, recorded) in enumerate(zip(shown, call.pictures, strict=False)):
        if found != recorded:
            return f"{where}: image {number} is {_shown(found)} instead of {_shown(recorded)}"
    return f"{where}: {len(shown)} images instead of {len(call.pictures)}"


def _shown(span: PictureSpan) -> str:
    return f"{span.picture.sha256[:12]} at tokens {span.start} to {span.stop - 1}"


def _changed_records(span: LossSpan, call: Call, where: str) -> str:
    """Describe which logprobs, versions or temperatures differ from the recorded ones."""
    if span.source is not None:
        start = int(span.places_S[0])
        for found_T, recorded_S in (
            (span.source.logprobs_T, call.logprobs_S),
            (span.source.versions_T, call.versions_S),
        ):
            difference = _first_difference(found_T[span.places_S], recorded_S, where, start)
            if difference is not None:
                return difference
        return f"{where}: another temperature, other experts or other supports"
    return f"{where}: logprobs, versions, temperatures, experts or supports differ from the recorded ones"


def _first_difference(found_T: np.ndarray, expected_T: np.ndarray, where: str, offset: int) -> str | None:
    if len(found_T) != len(expected_T):
        return f"{where}: {len(found_T)} tokens instead of {len(expected_T)}"
    differs = np.flatnonzero(found_T != expected_T)
    if not len(differs):
        return None
    place = int(differs[0])
    return f"{where}, token {offset + place}: {found_T[place]} instead of {expected_T[place]}"
