"""Repeat the checks of a run's steps from its records.

In: a run directory, the steps behind its weights, and the rules of each. Out: a `Recomputation`: for each step the
checks of what was stored as passed to the trainer against the recorded groups; and what could not be compared.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import numpy as np

from sharpen.evidence.certificate.audit import TOLERANCE, audit
from sharpen.evidence.certificate.checks import DRAWS
from sharpen.evidence.certificate.delivery import ids_digest, recorded_digest
from sharpen.evidence.certificate.draws import Draws, DrawTest, sums_of
from sharpen.evidence.certificate.expectation import (
    TRAINED,
    Expectation,
    ExpectedCall,
    carries_loss,
    expect,
    is_eligible,
)
from sharpen.evidence.certificate.lineage import Lineage, in_words
from sharpen.evidence.certificate.role_baselines import NO_BASELINE, RoleBaselines
from sharpen.evidence.certificate.rules import Rules
from sharpen.learning.experience.entropies import read_entropy_sums
from sharpen.learning.experience.evidence import read_delivery, read_step_groups
from sharpen.learning.experience.opening import reading
from sharpen.learning.experience.reading import TrainedCall, read_checks, read_group_ids, read_groups_at, read_trained
from sharpen.learning.experience.records import EXPERT, Delivery, GroupPlace, LossSpan
from sharpen.types import Call, Check, Group


@dataclass(slots=True)
class Recomputation:
    """The checks of each step, what does not hold, what could not be compared, and the tests of the tokens' draws."""

    checks: dict[int, tuple[Check, ...]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    draws: tuple[DrawTest, ...] = ()


def recompute_steps(
    run_dir: Path, lineage: Lineage, rules_of: Callable[[int], Rules], replay_staleness: Callable[[int], int]
) -> Recomputation:
    """Repeat the audit of every step behind the weights. `rules_of` returns the rules of a step, `replay_staleness` how
    many versions behind its replayed groups may be."""
    journal, result = run_dir / "run.db", Recomputation()
    trained, noted, placed = _trained(journal), read_checks(journal), read_step_groups(journal)
    unstored: list[int] = []
    trimmed: Counter[int] = Counter()
    memory, images, draws, roles = Memory(), ImageFiles(run_dir), Draws(), RoleBaselines()
    for record in lineage.steps:
        step, rules = record.step, rules_of(record.step)
        fresh = read_groups_at(journal, lineage.groups[step])
        if not fresh:
            result.problems.append(f"step {step} was trained, but its groups are not in run.db")
            continue
        version = lineage.version_before(step)
        replayed = read_groups_at(journal, _replayed(journal, placed.get(step), fresh, trained.get(step, {})))
        trimmed[step] += sum(rollout.trimmed for group in fresh for rollout in group.with_baseline)
        statuses = {call.group_id: TRAINED for call in trained.get(step, {}).values()}
        delivered = read_delivery(journal, step)
        if delivered is not None:
            statuses = {place.group_id: place.left_out or TRAINED for place in delivered.places}
        baselines = roles.before(step, fresh, rules)
        roles.learn(step, fresh, delivered, rules)
        if lost := _lost(step, (*fresh, *replayed), roles, rules):
            result.problems.append(f"step {step} cannot be checked: {lost}")
            continue
        result.problems += images.problems(step, (*fresh, *replayed))
        expected = expect(fresh, replayed, rules, statuses, baselines)
        if delivered is None:
            unstored.append(step)
            delivered = expected_delivery(expected, fresh, replayed, statuses)
        result.checks[step] = audit(
            fresh,
            delivered,
            rules,
            version=version,
            max_staleness=int(record.metrics.get("sync/staleness_allowed", 0)),
            replayed=replayed,
            replay_staleness=replay_staleness(step),
            baselines=baselines,
        )
        used = [group.id for group in replayed]
        drawn = memory.draw(step, version, rules, replay_staleness(step))
        if sorted(drawn) != sorted(used):
            wrong = f"replayed {_group_names(used)}, but the seed draws {_group_names(drawn)}"
            result.problems.append(f"step {step}: {wrong}")
        memory.keep((*fresh, *replayed), expected.calls.values(), rules)
        result.problems += differences(step, expected, trained.get(step, {}))
        if step not in unstored:
            result.problems += _changed_checks(step, result.checks[step], noted.get(step, ()))
        with reading(journal) as connection:
            measured, metrics = read_entropy_sums(connection, step), record.metrics
        sums = sums_of(fresh, measured, metrics, version=version, places=delivered.places, rules=rules)
        result.checks[step] += (tested := draws.add(step, sums),)
        result.problems += _changed_draws(step, tested, noted.get(step, ()))
    result.draws = draws.tests()
    result.not_compared += _not_compared(+trimmed, unstored)
    return result


def _lost(step: int, groups: Sequence[Group], roles: RoleBaselines, rules: Rules) -> str | None:
    """Return what the advantages of a step compare with and the records have no more; None if they have it."""
    if rules.formula.compares == "states" and _without_states(groups):
        return "its advantages compare the states that messages show, and the text of its rollouts was dropped"
    if rules.formula.by_role and (lost := roles.missing(step)):
        return f"{NO_BASELINE} {in_words(lost)} are not in run.db"
    return None


def _not_compared(trimmed: Counter[int], unstored: Sequence[int]) -> Iterator[str]:
    """Yield what could not be compared: the text of `trimmed` rollouts, by step, and what the run did not store of
    `unstored` steps."""
    if trimmed:
        yield (
            f"what was said in {trimmed.total()} rollouts of steps {in_words([*trimmed])}, whose text the run dropped "
            "(journal.keep_steps): their token ids, logprobs, rewards and all that was trained are there, and were "
            "checked like those of the other steps"
        )
    if unstored:
        yield (
            f"weights, places, ids and updates of the trained tokens of {len(unstored)} steps ({in_words(unstored)}), "
            "which this run did not store; the trained calls, their number of tokens and their advantages were compared"
        )


def _without_states(groups: Iterable[Group]) -> bool:
    """Whether a trained call of these groups has neither a name for its state nor the messages that show it."""
    return any(
        rollout.trimmed and any(carries_loss(call) and call.index not in rollout.states for call in rollout.calls)
        for group in groups
        for rollout in group.rollouts
    )


def _group_names(ids: Sequence[str]) -> str:
    return ", ".join(f"group {id_}" for id_ in ids) or "no group"


def expected_delivery(
    expected: Expectation, fresh: Sequence[Group], replayed: Sequence[Group], statuses: Mapping[str, str]
) -> Delivery:
    """Return what the trainer should have received. It stands in for the delivery of a step that did not store it, so
    that the recorded statuses of its groups can still be checked."""
    spans = []
    for number, expected_call in enumerate(expected.calls.values()):
        call = expected_call.call
        start, count = len(call.prompt_ids_P), len(call.sampled_ids_S)
        spans.append(
            LossSpan(
                update=expected_call.update,
                sequence=number,
                group_id=expected_call.group_id,
                rollout_id=expected_call.rollout_id,
                call=call.index,
                places_S=np.arange(start, start + count, dtype=np.int32),
                advantages_S=np.full(count, expected_call.advantage, np.float32),
                weights_S=np.full(count, expected_call.weight, np.float32),
                ids=ids_digest(call.prompt_ids_P, call.sampled_ids_S, pictures=call.pictures),
                records=recorded_digest(call),
            )
        )
    places = []
    for again, groups in ((False, fresh), (True, replayed)):
        for group in groups:
            allowed = expected.allowed_statuses[group.id]
            status = statuses[group.id] if statuses.get(group.id) in allowed else allowed[0]
            left_out = None if status == TRAINED else status
            places.append(GroupPlace(group_id=group.id, update=0, left_out=left_out, replayed=again))
    return Delivery(spans=tuple(spans), places=tuple(places))


def differences(step: int, expected: Expectation, trained: Mapping[tuple[str, int], TrainedCall]) -> Iterator[str]:
    """Yield each difference between what the run recorded as trained and what should have been trained."""
    for key in expected.calls.keys() ^ trained.keys():
        wrong = "was trained, but takes no part" if key in trained else "takes part, but was not trained"
        yield f"step {step}: rollout {key[0]}, call {key[1]} {wrong}"
    for key in expected.calls.keys() & trained.keys():
        expected_call, count = expected.calls[key], len(expected.calls[key].call.sampled_ids_S)
        found = trained[key].advantage
        number = found if expected_call.advantage is None else expected_call.advantage
        slack = TOLERANCE * abs(number) + expected_call.slack
        if count != trained[key].num_tokens or not abs(number - found) <= slack:
            yield (
                f"step {step}: rollout {key[0]}, call {key[1]} was trained on {trained[key].num_tokens} tokens with "
                f"advantage {found:.6g}, but {count} and {number:.6g} were expected"
            )


def _trained(journal: Path) -> dict[int, dict[tuple[str, int], TrainedCall]]:
    by_step: dict[int, dict[tuple[str, int], TrainedCall]] = {}
    for call in read_trained(journal):
        if not call.rollout_id.startswith(EXPERT):
            by_step.setdefault(call.step, {})[call.rollout_id, call.call] = call
    return by_step


def _replayed(
    journal: Path,
    noted: Sequence[tuple[int, bool]] | None,
    fresh: Sequence[Group],
    trained: Mapping[tuple[str, int], TrainedCall],
) -> list[int]:
    """Return the keys in `run.db` of the groups that were replayed. For a step that did not store them, these are the
    last groups before its own with the ids that trained."""
    if noted is not None:
        return [key for key, again in noted if again]
    own = {group.id for group in fresh}
    others = dict.fromkeys(call.group_id for call in trained.values() if call.group_id not in own)
    if not others:
        return []
    last = {id_: key for key, id_ in read_group_ids(journal)}
    return [last[id_] for id_ in others if id_ in last]


def _changed_draws(step: int, recomputed: Check, recorded: Sequence[Check]) -> Iterator[str]:
    """Yield a sentence if another number of tokens was tested online. A sum is broken here alone if it began in an
    earlier session than the one that made the step."""
    for check in recorded:
        if check.name == DRAWS and check.checked != recomputed.checked:
            yield (
                f"step {step}: how {recomputed.checked} tokens were drawn can be tested from the records, but "
                f"{check.checked} were tested then"
            )


def _changed_checks(step: int, recomputed: Sequence[Check], recorded: Sequence[Check]) -> Iterator[str]:
    """Yield each recomputed check whose counts differ from those recorded online."""
    before = {check.name: check for check in recorded}
    for check in recomputed:
        earlier = before.get(check.name)
        if earlier is None or (earlier.checked, earlier.broken) != (check.checked, check.broken):
            was = "nothing" if earlier is None else f"{earlier.broken} of {earlier.checked} broken"
            yield (
                f"step {step}: the recomputed check {check.name} differs from the recorded one: {check.broken} of "
                f"{check.checked} broken now, {was} then"
            )


# The images of the recorded calls: whether their files are what the calls name, and where their tokens are.
#
# In: a run directory and its groups. Out: what does not hold, in words.

MAX_BYTES = 1 << 30
"""Of the file of an image: no request may send more (`gateway.max_body_mb`)."""
TOKEN_NAMES = ("image_token_id", "image_token_index")


class ImageFiles:
    """Compares calls with the files of a run. Each file is read once."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "images"
        self._token_id = _image_token(run_dir)
        self._known: dict[str, str | None] = {}

    def problems(self, step: int, groups: Iterable[Group]) -> Iterator[str]:
        """Yield each thing that does not hold in the groups of a step."""
        for group in groups:
            for rollout in group.with_baseline:
                for call in rollout.calls:
                    for problem in self._call(call):
                        yield f"step {step}: rollout {rollout.id}, call {call.index}: {problem}"

    def _call(self, call: Call) -> Iterator[str]:
        after = 0
        for span in call.pictures:
            name = span.picture.sha256
            if name not in self._known:
                self._known[name] = self._file(name)
            if (problem := self._known[name]) is not None:
                yield problem
            place = f"image {name[:12]} at the tokens {span.start} to {span.start + span.length - 1}"
            if span.length < 1 or span.start < after or span.start + span.length > len(call.prompt_ids_P):
                yield f"{place} is not in the prompt, or in another image"
                continue
            after = span.start + span.length
            ends = {int(call.prompt_ids_P[span.start]), int(call.prompt_ids_P[after - 1])}
            if len(ends) > 1 or self._token_id not in (None, *ends):
                yield f"{place} begins or ends with a token that is none of an image"

    def _file(self, name: str) -> str | None:
        try:
            with (self._folder / name).open("rb") as file:
                if os.fstat(file.fileno()).st_size > MAX_BYTES:
                    return f"the file images/{name} is too large: more than {MAX_BYTES >> 20} MiB"
                content = file.read(MAX_BYTES)
        except OSError:
            return f"the file images/{name} is missing"
        return None if sha256(content).hexdigest() == name else f"the file images/{name} has been changed"


def _image_token(run_dir: Path) -> int | None:
    """Return the id of the model's image token, if a checkpoint of the run says it."""
    for path in sorted(run_dir.glob("global_step_*/config.json")):
        settings = json.loads(path.read_text())
        for name in TOKEN_NAMES:
            if isinstance(settings.get(name), int):
                return int(settings[name])
    return None


# Draw the replayed groups of each step a second time, from the records.
#
# In: step by step the groups that trained, with the advantages of their calls. Out: the ids that the seed draws for a
# step. The odds are those of `docs/use/sampling.md`; the draw is the weighted sampling without replacement of
# Efraimidis and Spirakis.
#
# Shape suffix: N groups in memory.

_STREAM = 4
"""The number of this stream of random numbers, next to seed and step."""
_EXPONENT = 0.6


@dataclass(slots=True)
class _Entry:
    oldest: int
    signal: float
    uses: int


@dataclass(slots=True)
class Memory:
    """The groups that may be replayed, in the order in which they first trained."""

    kept: dict[str, _Entry] = field(default_factory=dict)

    def draw(self, step: int, version: int, rules: Rules, max_staleness: int) -> list[str]:
        """Return the ids that the seed draws for a step, in the order drawn."""
        self.kept = {id_: entry for id_, entry in self.kept.items() if version - entry.oldest <= max_staleness}
        if not self.kept or not rules.replayed_groups:
            return []
        odds_N = np.array(
            [
                (entry.signal**_EXPONENT if rules.replay_by_signal else 1.0)
                * (1.0 - (version - entry.oldest) / (max_staleness + 1))
                / 2.0 ** (entry.uses - 1)
                for entry in self.kept.values()
            ]
        )
        uniform_N = np.random.default_rng([rules.seed, step, _STREAM]).random(len(odds_N))
        order_N = np.argsort(-np.log1p(-uniform_N) / odds_N, kind="stable")
        ids = list(self.kept)
        return [ids[place] for place in order_N[: rules.replayed_groups].tolist()]

    def keep(self, groups: Sequence[Group], trained: Iterable[ExpectedCall], rules: Rules) -> None:
        """Record that these groups trained: add one to their uses and update their mean absolute advantage. Groups
        whose mean is 0 are dropped. A run without replay keeps none."""
        if not rules.replayed_groups:
            return
        sizes: dict[str, list[float]] = {}
        for call in trained:
            assert call.advantage is not None, "a run that replays has a second formula of its advantage"
            size = abs(float(np.float32(call.advantage)))
            sizes.setdefault(call.group_id, []).append(size if size > call.slack else 0.0)
        for group in groups:
            of_group = sizes.get(group.id, [])
            signal = math.fsum(of_group) / len(of_group) if of_group else 0.0
            if signal <= 0.0:
                self.kept.pop(group.id, None)
            elif group.id in self.kept:
                self.kept[group.id].signal, self.kept[group.id].uses = signal, self.kept[group.id].uses + 1
            else:
                self.kept[group.id] = _Entry(_oldest(group, rules), signal, 1)


def _oldest(group: Group, rules: Rules) -> int:
    """Return the version of the group's oldest trainable token."""
    versions = [
        int(call.versions_S.min())
        for rollout in group.rollouts
        for call in (rollout.calls if is_eligible(rollout, rules) else ())
        if carries_loss(call)
    ]
    return min(versions, default=group.version)
