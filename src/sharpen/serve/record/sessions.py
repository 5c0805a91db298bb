"""The sessions of a recording: which calls belong together, and what is written of them.

In: keys, answers, feedback, on the event loop. Out: rows in the journal, written as they come; what an open session
said so far stays in memory, to find which call continues which.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sharpen.agent.rollout.choices import mark_unused
from sharpen.errors import JournalError
from sharpen.gateway.caller import PREFIX, new_key
from sharpen.gateway.exchange import RawRequest
from sharpen.gateway.requests import ApiError
from sharpen.learning.experience.images import ImageFolder
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.recorded import (
    create_tables,
    find_answer,
    find_session,
    insert_answer,
    insert_session_opened,
    is_own_key,
    read_open_sessions,
    update_ended,
    update_reward,
)
from sharpen.serve.feedback import Feedback, Opening, unknown
from sharpen.serve.metrics import Metric, single
from sharpen.serve.sessions import MAX_OPEN
from sharpen.serve.visit import MAX_CALLS, MAX_TOKENS, full_error
from sharpen.types import Call, IntArray, Task

_NO_TASK = Task(id="", index=0, row={})


@dataclass(slots=True, kw_only=True, eq=False)
class RecordedSession:
    """An open session. `ids` are the prompt and sampled ids of each of its calls; `own` says that it was opened here
    and has a key of its own; `opened` and `used` are when it began and was last used (seconds since 1970); `running`
    counts its requests that are not answered yet."""

    id: str
    key: bytes
    task: Task
    opened: float
    used: float
    own: bool
    calls: list[Call] = field(default_factory=list)
    ids: list[IntArray] = field(default_factory=list)
    num_tokens: int = 0
    running: int = 0
    written: bool = False

    @property
    def full(self) -> bool:
        """Whether it has as many calls or tokens as a session may have."""
        return len(self.calls) >= MAX_CALLS or self.num_tokens >= MAX_TOKENS

    def take(self, calls: Iterable[Call]) -> list[Call]:
        """Add calls, each with its parent, and return them so."""
        taken = [replace(call, parent=self._parent(call)) for call in calls]
        for call in taken:
            self.calls.append(call)
            self.ids.append(np.concatenate([call.prompt_ids_P, call.sampled_ids_S]))
            self.num_tokens += len(self.ids[-1])
        return taken

    def _parent(self, call: Call) -> int | None:
        """Return the earlier call with the longest ids that the prompt starts with, and images too."""
        best, longest = None, 0
        for index, ids in enumerate(self.ids):
            fits = self.calls[index].delivered and longest < len(ids) <= len(call.prompt_ids_P)
            shown = self.calls[index].pictures
            fits = fits and shown == call.pictures[: len(shown)]  # the ids of all images are the same
            if fits and np.array_equal(ids, call.prompt_ids_P[: len(ids)]):
                best, longest = index, len(ids)
        return best


class RecordedSessions:
    """The sessions of a recording, by key. Whoever has another key than a session's has the session of all calls with
    that key, which ends when it has been idle for `idle_s` seconds, or is full."""

    def __init__(self, journal: Journal, *, idle_s: float, say: Callable[[str], None]) -> None:
        self.address: Callable[[], str] = lambda: ""
        self.failure: JournalError | None = None
        """Why nothing more is recorded."""
        self._path, self._images = journal.path, ImageFolder(journal.path)
        self._journal, self._idle_s, self._say = journal, idle_s, say
        self._by_key: dict[bytes, RecordedSession] = {}
        self._by_id: dict[str, RecordedSession] = {}
        self._num_sessions = self._num_calls = self._num_without_ids = 0
        self._write(create_tables)
        journal.flush()  # what comes at once is looked for in them

    def restore(self) -> int:
        """Go on with the sessions that a former recording left open. Return how many there are."""
        for one in read_open_sessions(self._path):
            session = RecordedSession(
                id=one.session, key=one.key, task=one.task, opened=one.opened, used=one.used, own=one.own, written=True
            )
            session.take(one.calls)
            self._add(session)
        self.end_idle()
        return len(self._by_id)

    # Requests.

    def has(self, key: str) -> bool:
        """Whether a key is that of a session alone, which the server does not know. Once it was, it is."""
        digest = _digest(key)
        session = self._by_key.get(digest)
        return session.own if session is not None else key.startswith(PREFIX) and is_own_key(self._path, digest)

    def enter(self, raw: RawRequest) -> RecordedSession:
        """Return the session of a request. Raises `ApiError` if its session has ended, or is full."""
        digest = _digest(raw.key)
        session = self._by_key.get(digest)
        if session is None and self.has(raw.key):
            message = "This session has ended."
            raise ApiError(message, status=401, code="invalid_api_key", kind="authentication_error")
        if session is not None and session.full and not session.own:
            if not session.running:
                self._end(session)
            session = None
        if session is None:
            session = self._new(digest, _NO_TASK, own=False)
        elif session.full:
            raise full_error()
        session.running += 1
        session.used = time.time()
        return session

    def leave(self, session: RecordedSession, name: str, calls: Callable[[int], Iterable[Call]]) -> None:
        """A request has been answered, or came to nothing (no calls); `calls` makes them from a first index on."""
        session.running -= 1
        session.used = time.time()
        if session.id not in self._by_id:  # it ended meanwhile
            return
        earlier, ids = tuple(session.calls), tuple(session.ids)
        came = list(calls(len(session.calls)))
        pictures = [span.picture for call in came for span in call.pictures]
        if not (taken := session.take(self._with_files(call) for call in came)):
            return
        if not session.written:
            self._write_opened(session)
        self._num_calls += len(taken)
        self._num_without_ids += sum(not len(call.sampled_ids_S) for call in taken)
        self._write(
            insert_answer,
            pictures=pictures,
            session=session.id,
            name=name,
            earlier=earlier,
            histories=ids,
            calls=taken,
            used=session.used,
        )

    def end_idle(self) -> None:
        """End the sessions that have been idle for too long."""
        now = time.time()
        for session in list(self._by_id.values()):
            if not session.running and now - session.used > self._idle_s:
                self._end(session)

    # What applications say of sessions.

    def open(self, raw: RawRequest) -> dict[str, Any]:
        """`POST /sessions`: open a session, for a task if one is named."""
        opening, key = Opening.of(raw), new_key()
        task = Task(id=opening.task_id or "", index=0, row=opening.row)
        session = self._new(_digest(key), task, own=True)
        self._write_opened(session)
        url = self.address()
        about = {"id": session.id, "task_id": opening.task_id, "api_key": key, "base_url": url}
        return {**about, "anthropic_base_url": url.removesuffix("/v1")}

    def rate(self, raw: RawRequest) -> dict[str, Any]:
        """`POST /feedback`: the reward of a session or of one of its calls, also long after the session's end."""
        given = Feedback.of(raw)
        id_, call = self._rated(given)
        if given.reward is not None:
            self._write(update_reward, session=id_, reward=given.reward, call=call)
        session = self._by_id.get(id_)
        if session is not None and given.end:
            self._end(session)
        self._flush()  # whoever has the answer finds the reward in the record, also if the recorder is killed now
        return {"session": id_, "reward": given.reward, "ended": id_ not in self._by_id}

    def metrics(self) -> Iterator[Metric]:
        """Yield what is recorded."""
        yield single("sessions_open", "gauge", "Sessions that have not ended.", len(self._by_id))
        yield single("sessions_total", "counter", "Sessions that were opened.", self._num_sessions)
        yield single("calls_recorded_total", "counter", "Calls recorded.", self._num_calls)
        without = "Calls recorded without token ids."
        yield single("calls_without_ids_total", "counter", without, self._num_without_ids)
        yield single("recording", "gauge", "Whether calls are recorded.", int(self.failure is None))

    def _rated(self, given: Feedback) -> tuple[str, int | None]:
        """Return the session that feedback is for, and the call if it is for one."""
        self._flush()
        if given.session is not None:
            if given.session not in self._by_id and not find_session(self._path, given.session):
                raise unknown("session", given.session, "none of this id was recorded")
            return given.session, None
        assert given.call is not None
        found = find_answer(self._path, given.call)
        if found is None:
            raise unknown("call", given.call, "no answer of this id was recorded")
        return found

    def _new(self, key: bytes, task: Task, *, own: bool) -> RecordedSession:
        if len(self._by_id) >= MAX_OPEN:
            raise ApiError(f"{MAX_OPEN} sessions are open already.", status=503, code="overloaded", kind="server_error")
        now = time.time()
        session = RecordedSession(id=secrets.token_hex(8), key=key, task=task, opened=now, used=now, own=own)
        self._num_sessions += 1
        self._add(session)
        return session

    def _add(self, session: RecordedSession) -> None:
        self._by_key[session.key] = self._by_id[session.id] = session

    def _end(self, session: RecordedSession) -> None:
        self._by_id.pop(session.id, None)
        if self._by_key.get(session.key) is session:
            del self._by_key[session.key]
        if session.written:
            marked = zip(session.calls, mark_unused(session.calls, None), strict=True)
            statuses = {after.index: after.status for before, after in marked if before.status != after.status}
            self._write(update_ended, session=session.id, statuses=statuses)

    def _write_opened(self, session: RecordedSession) -> None:
        session.written = True
        self._write(
            insert_session_opened,
            session=session.id,
            key=session.key,
            own=session.own,
            task=session.task,
            opened=session.opened,
        )

    def _with_files(self, call: Call) -> Call:
        """Return a call with its images as the files that they will be, so that a session does not hold them."""
        shown = (replace(span, picture=self._images.picture(span.picture.sha256)) for span in call.pictures)
        return replace(call, pictures=tuple(shown))

    def _write(self, insert: Callable[..., None], **record: Any) -> None:
        """Queue a write. If the journal cannot be written, say so once; calls are still forwarded."""
        if self.failure is None:
            try:
                self._journal.write(insert, **record)
            except JournalError as error:
                self._fail(error)

    def _flush(self) -> None:
        if self.failure is None:
            try:
                self._journal.flush()
            except JournalError as error:
                self._fail(error)
        if self.failure is not None:
            raise ApiError(f"Nothing is recorded any more: {self.failure}.", status=503, kind="server_error")

    def _fail(self, error: JournalError) -> None:
        self.failure = error
        self._say(f"nothing more is recorded, calls are still forwarded: {error}")


def _digest(key: str) -> bytes:
    """Return what stands for a key in the record, which is no place for secrets."""
    return hashlib.blake2b(key.encode(), digest_size=16).digest()
