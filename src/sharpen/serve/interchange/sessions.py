"""What was read of other programs' files, as sessions of a recording.

In: `Session`s, with calls whose tokens may be unknown. Out: a recording like those of `sharpen record`, from which
`sharpen export` makes rows.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from sharpen.agent.rollout.choices import mark_unused
from sharpen.errors import ConfigError, DatasetError
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.recorded import (
    create_tables,
    find_session,
    insert_answer,
    insert_session_opened,
    update_ended,
    update_reward,
)
from sharpen.run.lock import locked
from sharpen.serve.record.asked import with_references
from sharpen.serve.record.folder import JOURNAL, is_record, open_folder
from sharpen.serve.record.sessions import RecordedSession
from sharpen.types import Call, CallStatus, FinishReason, PictureSpan, Sampling, Task

NOT_READ = "calls whose messages are in words that are not known"
_REASONS: Mapping[str, FinishReason] = {"length": "length", "max_tokens": "length", "abort": "abort", "error": "abort"}


@dataclass(slots=True, kw_only=True)
class Session:
    """One rollout of another program: its calls in order, numbers by which it was judged, and the task if it names one
    (else sessions that begin with the same messages have the same task)."""

    id: str
    calls: list[Call] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)
    task_id: str = ""

    @property
    def task(self) -> Task:
        """The task, as the record has it."""
        if self.task_id:
            return Task(id=self.task_id, index=0, row={})
        first = self.calls[0]
        begin = json.dumps([first.messages, first.tools], sort_keys=True, default=str)
        return Task(id=hashlib.sha256(begin.encode()).hexdigest()[:16], index=0, row={})


def call_of(
    session: Session,
    messages: Sequence[Mapping[str, Any]],
    response: Mapping[str, Any],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    ids: tuple[Sequence[int], Sequence[int]] = ((), ()),
    logprobs: Sequence[float] = (),
    sampling: Sampling,
    finish_reason: str = "stop",
    **more: Any,
) -> Call:
    """Return the next call of a session. `ids` are those of prompt and answer, both or neither; logprobs of another
    number are not known (NaN). `more` are further fields of `Call`. Raises `DatasetError` for ids that are none."""
    pictures: list[Any] = []
    referred = tuple(with_references(message, pictures) for message in messages)
    prompt_P, sampled_S = (np.asarray(_ids(one), np.int32) for one in (ids if ids[0] and ids[1] else ((), ())))
    said = [number(one) for one in logprobs] if len(logprobs) == len(sampled_S) else [None] * len(sampled_S)
    return Call(
        index=len(session.calls),
        parent=None,
        prompt_ids_P=prompt_P,
        sampled_ids_S=sampled_S,
        logprobs_S=np.asarray([math.nan if one is None else one for one in said], np.float32),
        versions_S=np.zeros(len(sampled_S), np.int32),
        sampling=sampling,
        finish_reason=_REASONS.get(finish_reason, "stop"),
        status=CallStatus.USED,
        messages=referred,
        tools=tuple(tools),
        response=response,
        pictures=tuple(PictureSpan(picture=picture, start=0, length=0) for picture in pictures),
        **more,
    )


def reward_of(sessions: Iterable[Session], score: str | None) -> str | None:
    """Return the name of the score that is the reward: the one that was asked for, `reward`, or the only one; None
    without any. Raises `ConfigError` if it is not clear, or no session has it."""
    names = Counter(name for session in sessions for name in session.scores)
    if score is not None:
        if score not in names:
            known = ", ".join(names) or "none"
            raise ConfigError(f"--score {score}: no session has a score of this name (there are: {known})")
        return score
    if "reward" in names or not names:
        return "reward" if names else None
    if len(names) > 1:
        raise ConfigError(
            f"the sessions have several scores ({', '.join(names)}): --score NAME says which is the reward"
        )
    return next(iter(names))


def keep(sessions: Sequence[Session], folder: Path, reward: str | None, left_out: Counter[str]) -> list[Session]:
    """Write sessions into the recording in `folder`, which may be there already, and return those that were new.
    Raises `ConfigError` for another run's folder, or one in use."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        if not is_record(folder):
            open_folder(folder, "files of other programs", None)
        with Journal(folder / JOURNAL) as journal:
            journal.write(create_tables)
            journal.flush()
            new = [session for session in sessions if not find_session(journal.path, session.id)]
            for session in new:
                _write(journal, session, session.scores.get(reward) if reward else None)
    left_out["sessions that the recording has already"] += len(sessions) - len(new)
    return new


def _write(journal: Journal, session: Session, reward: float | None) -> None:
    opened = min((call.started for call in session.calls if call.started is not None), default=time.time())
    begun = RecordedSession(id=session.id, key=b"", task=session.task, opened=opened, used=opened, own=False)
    journal.write(insert_session_opened, session=begun.id, key=b"", own=False, task=begun.task, opened=opened)
    for call in session.calls:
        earlier, histories = tuple(begun.calls), tuple(begun.ids)
        journal.write(
            insert_answer,
            pictures=[span.picture for span in call.pictures],
            session=begun.id,
            name="",
            earlier=earlier,
            histories=histories,
            calls=begun.take([call]),
            used=(call.started or opened) + call.seconds,
        )
    marked = zip(begun.calls, mark_unused(begun.calls, None), strict=True)
    statuses = {after.index: after.status for before, after in marked if before.status != after.status}
    if reward is not None:
        journal.write(update_reward, session=begun.id, reward=reward, call=None)
    journal.write(update_ended, session=begun.id, statuses=statuses)


def session_id(name: str) -> str:
    """Return an id that may begin that of a group: without slashes, which part steps and tasks in it."""
    return name.replace("/", "-")


def number(value: Any) -> float | None:
    """Return a finite number; None for anything else."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None


def seconds_of(time: Any) -> float | None:
    """Return a time, or its text by ISO 8601, as seconds since 1970; None for what is none. Without a zone it is
    UTC."""
    if isinstance(time, str):
        try:
            time = datetime.fromisoformat(time)
        except ValueError:
            return None
    if not isinstance(time, datetime):
        return None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def _ids(values: Sequence[Any]) -> Sequence[int]:
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 31:
            raise DatasetError(f"{value!r} is no token id")
    return values


def leave_out(left_out: Counter[str], what: str, example: object) -> None:
    """Count what is left out, and name the first of its kind."""
    left_out[next((one for one in left_out if one.startswith(what)), f"{what} (the first: {example})")] += 1
