"""Faults planted one after the other in what the trainer is about to receive: each is found by name, online before the
update and offline from what was stored. What finds them shares nothing with what makes the batches."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted_run import (
    FAILED,
    MINIBATCHES,
    a_rollout,
    a_step,
    draw,
    leave,
    online,
    resolved,
    with_calls,
    with_rollout,
)

from sharpen.config.load import ResolvedConfig
from sharpen.evidence.certificate.certify import certify
from sharpen.evidence.certificate.checks import MEANING
from sharpen.learning.experience.draw import Batch
from sharpen.types import Call, CallStatus, Experience, Group, Picture, PictureSpan

Batches = tuple[Batch, ...]
Groups = list[Group]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`records` are the groups as recorded; `drawn` those that the batches are made of, where that is the fault;
    `change` spoils the batches. `found` are checks that must find it."""

    found: tuple[str, ...]
    records: Callable[[Groups], Groups] = lambda groups: groups
    drawn: Callable[[Groups], Groups] = lambda groups: groups
    change: Callable[[Batches], Batches] = lambda batches: batches
    settings: dict[str, Any] = None  # type: ignore[assignment]
    drawn_settings: dict[str, Any] = None  # type: ignore[assignment]

    def plant(self) -> tuple[Groups, Batches, ResolvedConfig]:
        """What was recorded, what is trained, and the settings."""
        groups, run = self.records(a_step()), resolved(**(self.settings or {}))
        drawing = resolved(**self.drawn_settings) if self.drawn_settings is not None else run
        return groups, self.change(draw(self.drawn(groups), drawing)), run


def each(change: Callable[[Experience], Experience], where: Callable[[Experience], bool] = lambda _: True) -> Any:
    """Change sequences of the batches."""

    def changed(batches: Batches) -> Batches:
        return tuple(
            replace(batch, experiences=tuple(change(one) if where(one) else one for one in batch.experiences))
            for batch in batches
        )

    return changed


def of(rollout: str) -> Callable[[Experience], bool]:
    return lambda experience: experience.rollout_id == rollout


def arrays(**changes: Callable[[Experience], np.ndarray]) -> Callable[[Experience], Experience]:
    """Change arrays of a sequence."""
    return lambda one: replace(one, **{name: change(one) for name, change in changes.items()})


def without(rollout: str) -> Callable[[Batches], Batches]:
    def dropped(batches: Batches) -> Batches:
        return tuple(
            replace(batch, experiences=tuple(one for one in batch.experiences if one.rollout_id != rollout))
            for batch in batches
        )

    return dropped


def only_first_call(one: Experience) -> Experience:
    return replace(one, loss_mask_T=one.loss_mask_T & (one.calls_T == 0))


def rest_times(factor: float) -> Callable[[Experience], np.ndarray]:
    """Advantages of all tokens but the first of each sequence, times a factor."""

    def change(one: Experience) -> np.ndarray:
        rest_T = one.loss_mask_T & (np.arange(len(one.ids_T)) > np.argmax(one.loss_mask_T))
        return np.where(rest_T, factor * one.advantages_T, one.advantages_T).astype(np.float32)

    return change


def random_weights(one: Experience) -> np.ndarray:
    noise = np.random.default_rng(0).random(len(one.ids_T)).astype(np.float32)
    return np.where(one.loss_mask_T, noise, 0.0).astype(np.float32)


def exchanged(first: str, second: str) -> Callable[[Batches], Batches]:
    """The advantages of two rollouts in each other's place."""

    def change(batches: Batches) -> Batches:
        numbers = {
            one.rollout_id: float(one.advantages_T[np.argmax(one.loss_mask_T)])
            for batch in batches
            for one in batch.experiences
        }
        numbers[first], numbers[second] = numbers[second], numbers[first]
        return each(
            arrays(advantages_T=lambda one: np.where(one.loss_mask_T, numbers[one.rollout_id], 0.0).astype(np.float32))
        )(batches)

    return change


def shifted(one: Experience) -> Experience:
    """The loss of the first call one token early: as many tokens, other ones."""
    at = np.flatnonzero(one.calls_T == 0)
    moved = {}
    for name in ("loss_mask_T", "calls_T", "logprobs_T", "versions_T", "temperatures_T", "advantages_T", "weights_T"):
        moved[name] = getattr(one, name).copy()
        moved[name][at - 1] = getattr(one, name)[at]
        moved[name][at[-1]] = getattr(one, name)[0]
    return replace(one, **moved)


def in_group(task: str, change: Callable[[Group], Group]) -> Callable[[Groups], Groups]:
    return lambda groups: [change(group) if group.id == f"step-0/{task}" else group for group in groups]


def newer(call: Call, shift: float = 0.0) -> Call:
    return replace(call, versions_S=call.versions_S + 1, logprobs_S=call.logprobs_S - np.float32(shift))


def calls_changed(change: Callable[[Call], Call]) -> Callable[[Groups], Groups]:
    return lambda groups: [
        replace(
            group,
            rollouts=tuple(replace(one, calls=tuple(change(call) for call in one.calls)) for one in group.rollouts),
        )
        for group in groups
    ]


def one_moved(batches: Batches) -> Batches:
    """A group in the other update, its weights as they were."""
    first, second = batches
    moved = tuple(one for one in first.experiences if one.group_id == "step-0/a")
    return (
        replace(first, experiences=first.experiences[len(moved) :], group_ids=first.group_ids[1:]),
        replace(second, experiences=(*moved, *second.experiences), group_ids=("step-0/a", *second.group_ids)),
    )


def spoken(group: Group) -> Group:
    """The rollout that never called counts as if it had."""
    return with_rollout(group, a_rollout(group.id, 3, 1.0))


def foreign(group: Group) -> Group:
    first = group.rollouts[0]
    calls = (replace(first.calls[0], status=CallStatus.FOREIGN), first.calls[1])
    return with_rollout(group, replace(first, calls=calls))


def cut(group: Group) -> Group:
    return with_rollout(group, with_calls(group.rollouts[0], finish_reason="length"))


def twice(batches: Batches) -> Batches:
    return each(arrays(weights_T=lambda one: one.weights_T / np.float32(MINIBATCHES)))(batches)


def own_ids(one: Experience) -> np.ndarray:
    return np.where(np.arange(len(one.ids_T)) == len(one.ids_T) - 1, 99, one.ids_T).astype(np.int32)


def shown(content: bytes, start: int = 1) -> tuple[PictureSpan, ...]:
    """An image of one token in the prompt of every call."""
    return (PictureSpan(picture=Picture.of(content), start=start, length=1),)


seeing = calls_changed(lambda call: replace(call, pictures=shown(b"red")))


A0, A1, D0 = "step-0/a/0", "step-0/a/1", "step-0/d/0"

FAULTS = {
    "a scored rollout dropped": Fault(change=without(A0), found=("takes_part",)),
    "a scored rollout dropped, the rest drawn without it": Fault(
        drawn=in_group("a", lambda group: with_rollout(group, replace(group.rollouts[0], **FAILED))),
        found=("takes_part", "advantages", "token_weights"),
    ),
    "a call dropped": Fault(change=each(only_first_call, of(A0)), found=("takes_part", "loss_mask")),
    "all tokens but the first times -7": Fault(
        change=each(arrays(advantages_T=rest_times(-7.0))), found=("advantages",)
    ),
    "weights random": Fault(change=each(arrays(weights_T=random_weights)), found=("token_weights",)),
    "weights negative": Fault(
        change=each(arrays(weights_T=lambda one: -one.weights_T)), found=("token_weights", "weights")
    ),
    "weights of one rollout scaled": Fault(
        change=each(arrays(weights_T=lambda one: 3 * one.weights_T), of(A0)), found=("token_weights",)
    ),
    "advantages flipped": Fault(change=each(arrays(advantages_T=lambda one: -one.advantages_T)), found=("advantages",)),
    "advantages times 10": Fault(
        change=each(arrays(advantages_T=lambda one: 10 * one.advantages_T)), found=("advantages",)
    ),
    "advantages permuted between rollouts": Fault(change=exchanged(A0, A1), found=("advantages",)),
    "advantages permuted between groups": Fault(change=exchanged(A0, D0), found=("advantages",)),
    "advantages zeroed": Fault(
        change=each(arrays(advantages_T=lambda one: np.zeros_like(one.advantages_T))), found=("advantages",)
    ),
    "advantages not divided by the deviation": Fault(
        drawn_settings={"loss.std_normalize": False}, found=("advantages",)
    ),
    "advantages of the recorded rewards, over-long punishment forgotten": Fault(
        settings={"sampling.overlong_cache": 14}, drawn_settings={}, found=("advantages",)
    ),
    "another aggregation": Fault(drawn_settings={"loss.aggregation": "rollout-mean"}, found=("token_weights",)),
    "the loss mask shifted, as many tokens": Fault(change=each(shifted, of(A0)), found=("loss_mask",)),
    "a failed rollout included": Fault(
        drawn=in_group("b", lambda group: with_rollout(group, a_rollout(group.id, 3, 1.0))),
        found=("failures", "takes_part", "advantages"),
    ),
    "a rollout without a call in the baseline": Fault(
        drawn=in_group("d", lambda group: spoken(group)), change=without("step-0/d/3"), found=("advantages",)
    ),
    "versions newer than the trainer's": Fault(records=calls_changed(newer), found=("staleness",)),
    "every logprob off by 3, with the version after": Fault(
        records=calls_changed(lambda call: newer(call, 3.0)), found=("staleness",)
    ),
    "logprobs that are not the recorded ones": Fault(
        change=each(arrays(logprobs_T=lambda one: one.logprobs_T - np.float32(0.5))), found=("records",)
    ),
    "another sampled id": Fault(change=each(arrays(ids_T=own_ids), of(A0)), found=("ids",)),
    "images dropped": Fault(records=seeing, change=each(lambda one: replace(one, pictures=())), found=("ids",)),
    "images swapped": Fault(
        records=seeing, change=each(lambda one: replace(one, pictures=shown(b"blue")), of(A0)), found=("ids",)
    ),
    "images in another place": Fault(
        records=seeing, change=each(lambda one: replace(one, pictures=shown(b"red", 2)), of(A0)), found=("ids",)
    ),
    "each minibatch normalized twice": Fault(change=twice, found=("token_weights",)),
    "normalized over the step instead of the update": Fault(
        drawn_settings={"trainer.num_minibatches": 1}, found=("token_weights", "updates")
    ),
    "a group in another update": Fault(change=one_moved, found=("updates",)),
    "a truncated rollout trained in spite of overlong_filter": Fault(
        records=in_group("a", cut),
        settings={"sampling.overlong_filter": True},
        drawn_settings={},
        found=("takes_part", "advantages"),
    ),
    "a foreign call trained": Fault(
        records=in_group("a", foreign),
        drawn=in_group("a", lambda group: with_rollout(group, with_calls(group.rollouts[0], status=CallStatus.USED))),
        found=("owners", "takes_part", "loss_mask"),
    ),
    "a rollout with a foreign call takes part": Fault(records=in_group("a", foreign), found=("owners",)),
    "a group left out that trains": Fault(
        settings={"loss.std_threshold": 0.0}, drawn_settings={}, found=("groups", "takes_part")
    ),
    "a group that trains left out": Fault(drawn_settings={"loss.std_threshold": 0.0}, found=("groups", "takes_part")),
}


@pytest.mark.parametrize("name", FAULTS)
def test_trap_37_a_planted_fault_is_found_by_name_online(name: str) -> None:
    """Each is red when its check in `audit` is taken out."""
    groups, batches, run = FAULTS[name].plant()
    broken = {check.name: check for check in online(groups, batches, run) if check.broken}
    assert set(FAULTS[name].found) <= set(broken), (name, sorted(broken))
    assert all("step-0/" in str(check.first) for check in broken.values())


@pytest.mark.parametrize("name", FAULTS)
def test_trap_37_a_planted_fault_is_found_by_name_offline(name: str, tmp_path: Path) -> None:
    """From what was stored of it, with `certificate.on_violation: warn`. Red when `certify` draws the batches again."""
    groups, batches, run = FAULTS[name].plant()
    found = certify(leave(tmp_path / "run", groups, batches, run), logprobs=False)
    assert not found.holds
    for check in FAULTS[name].found:
        assert any(problem.startswith(f"step 1: {check}: ") for problem in found.problems), (check, found.problems)


def test_what_faults_are_planted_in_holds_without_them(tmp_path: Path) -> None:
    groups, run = a_step(), resolved()
    batches = draw(groups, run)
    assert not [check for check in online(groups, batches, run) if check.broken]
    found = certify(leave(tmp_path / "run", groups, batches, run), logprobs=False)
    assert found.holds, found.problems
    with_images = seeing(groups)
    found = certify(leave(tmp_path / "seen", with_images, draw(with_images, run), run), logprobs=False)
    assert found.holds, found.problems
    checked = {check.name: check.checked for check in found.checks}
    num_calls = sum(len(rollout.calls) for group in groups for rollout in group.rollouts if rollout.scored)
    assert checked["takes_part"] == checked["updates"] == num_calls
    assert checked["advantages"] == checked["token_weights"] == checked["loss_mask"] > num_calls


def test_the_document_names_every_check() -> None:
    """docs/understand/certificate.md: the first table has the checks."""
    lines = (Path(__file__).parents[3] / "docs" / "understand" / "certificate.md").read_text().splitlines()
    first = [found[1] for line in lines if (found := re.match(r"\| `(\w+)` \|", line))]
    assert sorted(first) == sorted(MEANING)
