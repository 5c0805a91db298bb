"""The checks of the certificate: each invariant is broken once, and named."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from experience_builders import audited, call_trees, make_call, make_group, make_rollout, two_turns
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpen.evidence.certificate.checks import MEANING, sentence
from sharpen.learning.algorithm.presets import PRESETS
from sharpen.learning.experience.draw import Batch, make_batch
from sharpen.types import Call, CallStatus, Check, Experience, Group, Outcome, Picture, PictureSpan

GRPO = PRESETS["grpo"]


def group_of_two() -> Group:
    return make_group([two_turns(1.0), make_rollout([make_call(0, [1, 2], [3])], 0.0, index=1)])


def checks(group: Group, batch: Batch, group_size: int = 2, **options: int) -> dict[str, Check]:
    return audited([group], [batch], GRPO, group_size=group_size, options=options)


def changed(batch: Batch, number: int, change: Callable[[Experience], Experience]) -> Batch:
    experiences = [change(e) if i == number else e for i, e in enumerate(batch.experiences)]
    return replace(batch, experiences=tuple(experiences))


def edited(name: str, place: int, value: float) -> Callable[[Experience], Experience]:
    """One element of an array replaced."""

    def change(experience: Experience) -> Experience:
        array = getattr(experience, name).copy()
        array[place] = value
        return replace(experience, **{name: array})

    return change


def test_an_honest_batch_passes_and_says_what_was_looked_at() -> None:
    group = group_of_two()
    found = checks(group, make_batch([group], GRPO))
    assert [check.name for check in found.values()] == list(MEANING)
    assert not any(check.broken for check in found.values())
    assert found["loss_mask"].checked == 4  # two, one and one sampled tokens
    assert found["accounted"].checked == 2
    assert found["group_means"].checked == 1
    assert found["weights"].checked == 2


BROKEN = {
    # In the first sequence the tokens 3, 4 are call 0's and token 7 is call 1's.
    "ids": (edited("ids_T", 4, 99), r"rollout g/0, call 0, token 4: 99 instead of"),
    "loss_mask": (edited("loss_mask_T", 2, True), "rollout g/0, call 0, token 2"),
    "records": (edited("logprobs_T", 7, -9.0), r"rollout g/0, call 1, token 7: -9.0 instead of"),
    "group_means": (edited("advantages_T", 3, 5.0), "group g: mean advantage"),
    "weights": (lambda e: replace(e, weights_T=np.zeros_like(e.weights_T)), "rollout g/0: weight 0"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_invariant_is_found_and_named(name: str) -> None:
    """Each is red when its line in `audit` is taken out."""
    group = group_of_two()
    change, message = BROKEN[name]
    batch = changed(make_batch([group], GRPO), 0, change)
    if name == "loss_mask":  # a context token that claims to be call 0's
        batch = changed(batch, 0, edited("calls_T", 2, 0))
    found = checks(group, batch)
    assert found[name].broken
    assert found[name].first is not None
    assert found[name].first.startswith(message)
    assert MEANING[name] in sentence(found[name])


def test_a_prompt_that_was_changed_is_found() -> None:
    group = group_of_two()
    batch = changed(make_batch([group], GRPO), 0, edited("ids_T", 0, 77))
    assert checks(group, batch)["ids"].broken == 2  # the first call's prompt, and the second's, which begins with it


def test_images_that_were_lost_or_swapped_are_found_and_named() -> None:
    """All images of one size have the same ids. Red when the digest of a call's ids leaves its images out."""
    span = PictureSpan(picture=Picture.of(b"red"), start=1, length=1)
    seeing = make_group(
        [make_rollout([make_call(0, [1, 2], [3], pictures=(span,))], float(i), index=i) for i in (0, 1)]
    )
    batch = make_batch([seeing], GRPO)
    assert not checks(seeing, batch)["ids"].broken
    blue = replace(span, picture=Picture.of(b"blue"))
    for pictures, told in (
        ((), "0 images instead of 1"),
        ((blue,), f"image 0 is {blue.picture.sha256[:12]} at tokens 1 to 1 instead of {span.picture.sha256[:12]}"),
        ((replace(span, start=0),), "image 0 is"),
    ):
        found = checks(seeing, changed(batch, 0, lambda one, pictures=pictures: replace(one, pictures=pictures)))["ids"]
        assert found.broken == 1
        assert str(found.first).startswith(f"rollout g/0, call 0: {told}")


def test_a_call_that_is_trained_twice_or_never_is_found() -> None:
    group = group_of_two()
    batch = make_batch([group], GRPO)
    twice = replace(batch, experiences=(*batch.experiences, batch.experiences[0]))
    assert checks(group, twice)["loss_mask"].first == "rollout g/0, call 0: trained 2 times"
    last = batch.experiences[0]
    mask_T = last.loss_mask_T.copy()
    mask_T[7] = False
    never = replace(batch, experiences=(replace(last, loss_mask_T=mask_T), batch.experiences[1]))
    assert checks(group, never)["loss_mask"].first == "rollout g/0, call 1: trained 0 times"


def test_stale_tokens_are_found_beyond_the_bound() -> None:
    group = group_of_two()
    batch = make_batch([group], GRPO)
    assert checks(group, batch, version=2)["staleness"].broken == 3
    assert not checks(group, batch, version=2, max_staleness=2)["staleness"].broken


def test_trap_21_a_failed_rollout_in_the_batch_is_found() -> None:
    """Red when `_check_failure` looks at the reward only."""
    group = group_of_two()
    batch = make_batch([group], GRPO)
    failed = replace(group, rollouts=(replace(group.rollouts[0], outcome=Outcome.JUDGE_ERROR), group.rollouts[1]))
    assert "judge_error" in str(checks(failed, batch)["failures"].first)


def test_a_missing_and_a_foreign_rollout_are_found() -> None:
    group = group_of_two()
    batch = make_batch([group], GRPO)
    assert "rollouts [0, 1] of 3" in str(checks(group, batch, group_size=3)["accounted"].first)
    foreign = changed(batch, 0, lambda e: replace(e, rollout_id="x/9"))
    assert "x/9, which was not requested" in str(checks(group, foreign)["accounted"].first)


def owned(call: Call) -> Call:
    """A call as honest rollouts have them: made from their own context."""
    return replace(call, status=CallStatus.ABANDONED) if call.status == CallStatus.FOREIGN else call


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(call_trees(4), st.sampled_from([0.0, 0.5, 1.0])), min_size=2, max_size=4))
def test_whatever_the_calls_an_honest_batch_passes(members: list[tuple[list[Call], float]]) -> None:
    members = [([owned(call) for call in calls], reward) for calls, reward in members]
    group = make_group([make_rollout(calls, reward, index=i) for i, (calls, reward) in enumerate(members)])
    newest = max((int(v) for calls, _ in members for call in calls for v in call.versions_S), default=0)
    options = {"version": newest, "max_staleness": newest}
    found = audited([group], [make_batch([group], GRPO)], GRPO, group_size=len(members), options=options)
    assert not [check for check in found.values() if check.broken]
