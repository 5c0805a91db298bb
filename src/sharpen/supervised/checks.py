"""The certificate of a run without rollouts: what is asserted of every step before its update.

In: the lessons drawn and the updates made of them. Out: `Check`s. `rows`: every row drawn is trained exactly once, or
was left out for its length. `rendered`: the trained ids spell, character for character, what the chat template writes
for the conversation. `mask`: loss is on the assistant's turns, each whole and with its end token, and on nothing else
(texts: on everything but a piece's first token). `pairs`: both answers of a pair are in the same update. What a
certificate says of rollouts (sampled ids, engine logprobs, staleness, groups) does not apply, and is not claimed.

Shape suffixes: T tokens of a sequence, S tokens of a turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from sharpen.gateway.requests import render_message
from sharpen.supervised.lessons import Lesson, Tutor
from sharpen.types import Call, Check, Experience


def check_step(lessons: Sequence[Lesson], updates: Sequence[Sequence[Experience]], tutor: Tutor) -> tuple[Check, ...]:
    """All checks of a step."""
    sources = {(lesson.id, number): calls for lesson in lessons for number, calls in enumerate(lesson.sources)}
    trained = [experience for update in updates for experience in update]
    places: Counter[str] = Counter()
    pairs = []
    for experience in trained:
        pairs.append((experience, sources.get((experience.rollout_id, places[experience.rollout_id]))))
        places[experience.rollout_id] += 1
    checks = [_rows(lessons, updates), _check("mask", [_mask(one, calls, tutor) for one, calls in pairs])]
    if tutor.data != "texts":
        checks.append(_check("rendered", [_rendered(one, calls, tutor) for one, calls in pairs]))
    if tutor.data == "pairs":
        checks.append(_check("pairs", [_sides(update, name) for update in updates for name in _names(update)]))
    return tuple(checks)


def _check(name: str, found: Sequence[str | None]) -> Check:
    broken = [sentence for sentence in found if sentence is not None]
    return Check(name=name, checked=len(found), broken=len(broken), first=broken[0] if broken else None)


def _names(update: Sequence[Experience]) -> list[str]:
    return list(dict.fromkeys(experience.rollout_id for experience in update))


def _rows(lessons: Sequence[Lesson], updates: Sequence[Sequence[Experience]]) -> Check:
    times = Counter(name for update in updates for name in _names(update))
    expected = {lesson.id: int(bool(lesson.experiences)) for lesson in lessons}
    found: list[str | None] = [
        None if times[name] == once else f"row {name} is in {times[name]} updates, and should be in {once}"
        for name, once in expected.items()
    ]
    found += [f"row {name} is trained, but was not drawn" for name in times if name not in expected]
    return _check("rows", found)


def _mask(experience: Experience, calls: tuple[Call, ...] | None, tutor: Tutor) -> str | None:
    """What is wrong with the loss mask of a sequence, if anything."""
    row, mask_T, weights_T = experience.rollout_id, experience.loss_mask_T, experience.weights_T
    wrong_T = np.where(mask_T, ~(np.isfinite(weights_T) & (weights_T > 0)), weights_T != 0)
    if wrong_T.any():
        token = int(np.argmax(wrong_T))
        return f"row {row}, token {token}: weight {weights_T[token]:g} where the mask is {bool(mask_T[token])}"
    if calls is None:
        return f"row {row}: a sequence that no part of the row made"
    if not calls:
        return None if not mask_T[0] and mask_T[1:].all() else f"row {row}: a token of the text carries no loss"
    for number in np.unique(experience.calls_T[mask_T]).tolist():
        call = calls[number]
        at_T = np.flatnonzero(mask_T & (experience.calls_T == number))
        first, last = int(at_T[0]), int(at_T[-1])
        if call.response.get("role") != "assistant":
            return f"row {row}, token {first}: it is taught, but no turn of the assistant's"
        if last - first + 1 != len(at_T) or not np.array_equal(experience.ids_T[at_T], call.sampled_ids_S):
            return f"row {row}, token {first}: what is taught is not the whole turn {number}"
        if not np.array_equal(experience.ids_T[:first], call.prompt_ids_P):
            return f"row {row}, token {first}: what stands before turn {number} is not its prompt"
        if int(experience.ids_T[last]) not in tutor.end_ids:
            return f"row {row}, token {last}: turn {number} ends without an end token"
    return None


def _rendered(experience: Experience, calls: tuple[Call, ...] | None, tutor: Tutor) -> str | None:
    """Whether the ids spell the template's text of the conversation up to the sequence's last turn."""
    assert tutor.renderer is not None
    if not calls:
        return f"row {experience.rollout_id}: a sequence that no turn made"
    last = calls[int(experience.calls_T.max())]
    messages = [render_message(message, at) for at, message in enumerate((*last.messages, last.response))]
    whole = tutor.renderer.render(messages, last.tools, tutor.template_kwargs, closed=True)
    end = tutor.renderer.token_bytes(int(experience.ids_T[-1]))[0]
    expected = whole[: whole.rfind(end) + len(end)]
    spelled = tutor.renderer.spell(experience.ids_T.tolist())
    if spelled in (expected, tutor.renderer.spell(tutor.renderer.encode(expected).tolist())):
        return None
    at = next((at for at, (one, other) in enumerate(zip(spelled, expected, strict=False)) if one != other), -1)
    return f"row {experience.rollout_id}: its ids spell other text than the chat template, from character {at} on"


def _sides(update: Sequence[Experience], name: str) -> str | None:
    sides = {float(experience.advantages_T.sum()) > 0 for experience in update if experience.rollout_id == name}
    return None if len(sides) == 2 else f"row {name}: only one answer of the pair is in its update"
