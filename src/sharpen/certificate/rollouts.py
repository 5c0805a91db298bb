"""The checks of a run's steps once more, from its records.

In: a run directory, which steps are behind its weights, the rules of each. Out: `Recomputation`: the checks of each
step, of what was stored as handed to the trainer, held against the recorded groups; and what could not be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sharpen.certificate.audit import TOLERANCE, audit
from sharpen.certificate.delivery import ids_digest, recorded_digest
from sharpen.certificate.expectation import TRAINED, Expectation, expect
from sharpen.certificate.lineage import Lineage, in_words
from sharpen.certificate.replay import Memory
from sharpen.certificate.rules import Rules
from sharpen.experience.evidence import read_delivery, read_step_groups
from sharpen.experience.reading import (
    TrainedCall,
    read_checks,
    read_group_ids,
    read_groups_at,
    read_trained,
)
from sharpen.experience.records import EXPERT, Delivery, GroupPlace, LossSpan
from sharpen.types import Check, Group


@dataclass(slots=True)
class Recomputation:
    """What came out."""

    checks: dict[int, tuple[Check, ...]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)


def recompute_steps(
    run_dir: Path, lineage: Lineage, rules_of: Callable[[int], Rules], replay_staleness: Callable[[int], int]
) -> Recomputation:
    """Audit every step behind the weights again. `rules_of` gives the rules of a step by its number,
    `replay_staleness` how far behind a group that trains again may be in it."""
    journal, found = run_dir / "run.db", Recomputation()
    trained, noted, placed = _trained(journal), read_checks(journal), read_step_groups(journal)
    unstored: list[int] = []
    memory = Memory()
    for record in lineage.steps:
        step, rules = record.step, rules_of(record.step)
        fresh = read_groups_at(journal, lineage.groups[step])
        if not fresh:
            found.problems.append(f"step {step} was trained, but its groups are not in run.db")
            continue
        version = lineage.version_before(step)
        replayed = read_groups_at(journal, _replayed(journal, placed.get(step), fresh, trained.get(step, {})))
        said = {call.group_id: TRAINED for call in trained.get(step, {}).values()}
        delivered = read_delivery(journal, step)
        if delivered is not None:
            said = {place.group_id: place.left_out or TRAINED for place in delivered.places}
        expected = expect(fresh, replayed, rules, said)
        if delivered is None:
            unstored.append(step)
            delivered = as_expected(expected, fresh, replayed, said)
        found.checks[step] = audit(
            fresh,
            delivered,
            rules,
            version=version,
            max_staleness=int(record.metrics.get("sync/staleness_allowed", 0)),
            replayed=replayed,
            replay_staleness=replay_staleness(step),
        )
        again = [group.id for group in replayed]
        drawn = memory.draw(step, version, rules, replay_staleness(step))
        if sorted(drawn) != sorted(again):
            found.problems.append(f"step {step}: {_listed(again)} trained again, but the seed draws {_listed(drawn)}")
        memory.keep((*fresh, *replayed), expected.calls.values(), rules)
        found.problems += differences(step, expected, trained.get(step, {}))
        if step not in unstored:
            found.problems += _other_checks(step, found.checks[step], noted.get(step, ()))
    if unstored:
        found.not_compared.append(
            f"weights, places, ids and updates of the trained tokens of {len(unstored)} steps ({in_words(unstored)}), "
            "which this run did not store: which calls were trained, on how many tokens and with which advantage was"
        )
    return found


def _listed(ids: Sequence[str]) -> str:
    return ", ".join(f"group {id_}" for id_ in ids) or "no group"


def as_expected(
    expected: Expectation, fresh: Sequence[Group], replayed: Sequence[Group], said: Mapping[str, str]
) -> Delivery:
    """What the trainer should have received: where a step did not store what it did, so that what is said of its groups
    can be checked all the same."""
    spans = []
    for number, one in enumerate(expected.calls.values()):
        start, count = len(one.call.prompt_ids_P), len(one.call.sampled_ids_S)
        spans.append(
            LossSpan(
                update=one.update,
                sequence=number,
                group_id=one.group_id,
                rollout_id=one.rollout_id,
                call=one.call.index,
                places_S=np.arange(start, start + count, dtype=np.int32),
                advantages_S=np.full(count, one.advantage, np.float32),
                weights_S=np.full(count, one.weight, np.float32),
                ids=ids_digest(one.call.prompt_ids_P, one.call.sampled_ids_S),
                records=recorded_digest(one.call),
            )
        )
    places = []
    for again, groups in ((False, fresh), (True, replayed)):
        for group in groups:
            ways = expected.may[group.id]
            way = said[group.id] if said.get(group.id) in ways else ways[0]
            left_out = None if way == TRAINED else way
            places.append(GroupPlace(group_id=group.id, update=0, left_out=left_out, replayed=again))
    return Delivery(spans=tuple(spans), places=tuple(places))


def differences(step: int, expected: Expectation, trained: Mapping[tuple[str, int], TrainedCall]) -> Iterator[str]:
    """What the run noted as trained, against what should have been."""
    for key in expected.calls.keys() ^ trained.keys():
        where = "was trained, and takes no part" if key in trained else "takes part, and was not trained"
        yield f"step {step}: rollout {key[0]}, call {key[1]} {where}"
    for key in expected.calls.keys() & trained.keys():
        one, count = expected.calls[key], len(expected.calls[key].call.sampled_ids_S)
        slack = TOLERANCE * abs(one.advantage) + one.slack
        if count != trained[key].num_tokens or not abs(one.advantage - trained[key].advantage) <= slack:
            yield (
                f"step {step}: rollout {key[0]}, call {key[1]} was trained on {trained[key].num_tokens} tokens with "
                f"advantage {trained[key].advantage:.6g}, but {count} and {one.advantage:.6g} were expected"
            )


def _trained(journal: Path) -> dict[int, dict[tuple[str, int], TrainedCall]]:
    found: dict[int, dict[tuple[str, int], TrainedCall]] = {}
    for call in read_trained(journal):
        if not call.rollout_id.startswith(EXPERT):
            found.setdefault(call.step, {})[call.rollout_id, call.call] = call
    return found


def _replayed(
    journal: Path,
    noted: Sequence[tuple[int, bool]] | None,
    fresh: Sequence[Group],
    trained: Mapping[tuple[str, int], TrainedCall],
) -> list[int]:
    """The places in the journal of the groups that trained again; where a step did not store them, the last ones
    before its own groups that have the ids of what was trained."""
    if noted is not None:
        return [key for key, again in noted if again]
    own = {group.id for group in fresh}
    others = dict.fromkeys(call.group_id for call in trained.values() if call.group_id not in own)
    if not others:
        return []
    last = {id_: key for key, id_ in read_group_ids(journal)}
    return [last[id_] for id_ in others if id_ in last]


def _other_checks(step: int, again: Sequence[Check], noted: Sequence[Check]) -> Iterator[str]:
    """Where what was noted online is not what comes out now."""
    before = {check.name: check for check in noted}
    for check in again:
        one = before.get(check.name)
        if one is None or (one.checked, one.broken) != (check.checked, check.broken):
            was = "nothing" if one is None else f"{one.broken} of {one.checked} broken"
            yield (
                f"step {step}: the checks recomputed differ from those that the run noted: {check.name} is "
                f"{check.broken} of {check.checked} broken, and {was} was noted"
            )
