"""The certificate of a supervised run: the checks of every step before its update.

In: the lessons drawn and the updates made from them. Out: `Check`s. `rows`: every row drawn is trained exactly once, or
was left out because of its length. `rendered`: the trained ids decode exactly to the text that the chat template writes
for the conversation. `mask`: loss is on whole turns of the assistant, including their end token, and on nothing else
(for texts, on all tokens of a piece but the first). `pairs`: both answers of a pair are in the same update. The checks
on rollouts (sampled ids, engine logprobs, staleness, groups) do not apply.

Shape suffixes: T tokens of a sequence, S tokens of a turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from sharpen.gateway.images import images_of
from sharpen.gateway.memory import Memory
from sharpen.gateway.requests import render_message
from sharpen.learning.supervised.lessons import Lesson, Tutor
from sharpen.types import Call, Check, Experience


def check_step(lessons: Sequence[Lesson], updates: Sequence[Sequence[Experience]], tutor: Tutor) -> tuple[Check, ...]:
    """Make all checks of a step."""
    sources = {(lesson.id, number): calls for lesson in lessons for number, calls in enumerate(lesson.sources)}
    trained = [experience for update in updates for experience in update]
    counts: Counter[str] = Counter()
    pairs = []
    for experience in trained:
        pairs.append((experience, sources.get((experience.rollout_id, counts[experience.rollout_id]))))
        counts[experience.rollout_id] += 1
    checks = [
        _check_rows(lessons, updates),
        _summarize("mask", [_check_mask(one, calls, tutor) for one, calls in pairs]),
    ]
    if tutor.data != "texts":
        checks.append(_summarize("rendered", [_check_rendered(one, calls, tutor) for one, calls in pairs]))
    if tutor.data == "pairs":
        sides = [_check_sides(update, row) for update in updates for row in _row_ids(update)]
        checks.append(_summarize("pairs", sides))
    return tuple(checks)


def _summarize(name: str, problems: Sequence[str | None]) -> Check:
    """Make a check of one problem, or None, for each item checked."""
    broken = [problem for problem in problems if problem is not None]
    return Check(name=name, checked=len(problems), broken=len(broken), first=broken[0] if broken else None)


def _row_ids(update: Sequence[Experience]) -> list[str]:
    return list(dict.fromkeys(experience.rollout_id for experience in update))


def _check_rows(lessons: Sequence[Lesson], updates: Sequence[Sequence[Experience]]) -> Check:
    times = Counter(row for update in updates for row in _row_ids(update))
    expected = {lesson.id: int(bool(lesson.experiences)) for lesson in lessons}
    problems: list[str | None] = [
        None if times[row] == count else f"row {row} is in {times[row]} updates, but should be in {count}"
        for row, count in expected.items()
    ]
    problems += [f"row {row} is trained, but was not drawn" for row in times if row not in expected]
    return _summarize("rows", problems)


def _check_mask(experience: Experience, calls: tuple[Call, ...] | None, tutor: Tutor) -> str | None:
    """Return what is wrong with the loss mask of a sequence, if anything."""
    row, mask_T, weights_T = experience.rollout_id, experience.loss_mask_T, experience.weights_T
    wrong_T = np.where(mask_T, ~(np.isfinite(weights_T) & (weights_T > 0)), weights_T != 0)
    if wrong_T.any():
        token = int(np.argmax(wrong_T))
        return f"row {row}, token {token}: the weight is {weights_T[token]:g}, but the mask is {bool(mask_T[token])}"
    if calls is None:
        return f"row {row}: a sequence was not made from the row"
    if not calls:
        all_but_first = not mask_T[0] and mask_T[1:].all()
        return None if all_but_first else f"row {row}: loss is not on all tokens of the text but the first"
    for number in np.unique(experience.calls_T[mask_T]).tolist():
        call = calls[number]
        at_T = np.flatnonzero(mask_T & (experience.calls_T == number))
        first, last = int(at_T[0]), int(at_T[-1])
        if call.response.get("role") != "assistant":
            return f"row {row}, token {first}: it carries loss, but is not in a turn of the assistant"
        if last - first + 1 != len(at_T) or not np.array_equal(experience.ids_T[at_T], call.sampled_ids_S):
            return f"row {row}, token {first}: the tokens with loss are not exactly turn {number}"
        if not np.array_equal(experience.ids_T[:first], call.prompt_ids_P):
            return f"row {row}, token {first}: the tokens before turn {number} are not its prompt"
        if tuple(span for span in experience.pictures if span.start < first) != call.pictures:
            return f"row {row}, token {first}: the images before turn {number} are not those of its prompt"
        if int(experience.ids_T[last]) not in tutor.end_ids:
            return f"row {row}, token {last}: turn {number} ends without an end token"
    return None


def _check_rendered(experience: Experience, calls: tuple[Call, ...] | None, tutor: Tutor) -> str | None:
    """Return how the text of a sequence differs from the chat template's, up to its last turn, if it does."""
    assert tutor.renderer is not None
    if not calls:
        return f"row {experience.rollout_id}: a sequence was not made from a turn"
    last = calls[int(experience.calls_T.max())]
    messages = [render_message(message) for message in (*last.messages, last.response)]
    text = tutor.renderer.render(messages, last.tools, tutor.template_kwargs, closed=True)
    pictures = {span.picture.sha256: span.picture for span in last.pictures}
    if not pictures.keys() >= set(images_of(messages)):
        return f"row {experience.rollout_id}: its messages have images that its tokens lack"
    sight = tutor.album.sight(messages, Memory(pictures=pictures))
    if sight is not None:
        text = sight.eyes.expand_text(text, sight.pictures)
        if sight.eyes.spans(experience.ids_T, sight.pictures) != experience.pictures:
            return f"row {experience.rollout_id}: its images are not where their tokens are"
    end = tutor.renderer.token_bytes(int(experience.ids_T[-1]))[0]
    expected = text[: text.rfind(end) + len(end)]
    spelled = tutor.renderer.spell(experience.ids_T.tolist())
    if spelled in (expected, tutor.renderer.spell(tutor.renderer.encode(expected).tolist())):
        return None
    at = next((at for at, (one, other) in enumerate(zip(spelled, expected, strict=False)) if one != other), -1)
    return f"row {experience.rollout_id}: its text differs from the chat template's from character {at} on"


def _check_sides(update: Sequence[Experience], row: str) -> str | None:
    sides = {float(experience.advantages_T.sum()) > 0 for experience in update if experience.rollout_id == row}
    return None if len(sides) == 2 else f"row {row}: only one answer of the pair is in its update"
