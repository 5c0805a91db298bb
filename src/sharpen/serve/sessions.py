"""The sessions of a server that learns: who may call, which calls belong together, and what they are worth.

In: keys, requests for sessions, feedback, on the serving loop. Out: sessions that have ended, to be trained, and their
files, on the server's own thread. A restart loses only what has not been saved yet: some tenths of a second.
"""

from __future__ import annotations

import functools
import re
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sharpen.files import write_whole
from sharpen.gateway.exchange import RawRequest
from sharpen.gateway.gateway import Gateway
from sharpen.gateway.requests import ApiError
from sharpen.gateway.session import Session
from sharpen.placement.exchange.batch import sessions_in
from sharpen.placement.exchange.store import Batches
from sharpen.serve.feedback import Feedback, Opening, unknown
from sharpen.serve.front import check_key
from sharpen.serve.metrics import Metric, single
from sharpen.serve.visit import Visit, Weights, full_error
from sharpen.types import Task

SUFFIX = ".session"
MAX_OPEN = 10_000
"""Sessions that may be open at once."""
MAX_ENDED = 10_000
"""Sessions that may have ended and wait; beyond, the oldest are removed, unrated ones first."""
FORGOTTEN_S = 7 * 86_400.0
"""A session that nobody has rated for so long after its end is removed."""
_NAME = re.compile(r"[0-9a-f]{22}$")
_GONE = "it may have been trained already"
_NO_TASK = "any"
"""The task of a session that was opened without one."""


class Sessions:
    """The sessions of a server, by id, by key, and by the ids of their answers. Satisfies `serve.front.Entrance`.

    Whoever has the server's `key` instead of a session's own has the session of all who have it, which ends when it has
    been idle for `idle_s` seconds. With `group_size` above 1 a session needs a task, to be compared with others of it.
    """

    def __init__(self, gateway: Gateway, key: str, folder: Path, *, idle_s: float, group_size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.weights: Weights = ("", 0)
        """The weights that are served."""
        self.address: Callable[[], str] = lambda: ""
        self._gateway, self._key, self._folder = gateway, key, folder
        self._idle_s, self._group_size = idle_s, group_size
        self._lock = threading.Lock()
        self._visits: dict[str, Visit] = {}
        self._by_key: dict[str, Visit] = {}
        self._shared: Visit | None = None
        self._num_forgotten = 0

    def restore(self, batches: Batches, trained: int) -> int:
        """Read the sessions of before. One that was to be given to a batch is in it if the batch in the store says so,
        or if the batch is one of the `trained` and somebody has deleted it; else it waits again. Return how many there
        are. Raises `JournalError` for a file that cannot be read."""
        last = max(batches.numbers(), default=None)
        members = functools.cache(functools.partial(_members, batches))
        for file in sorted(self._folder.glob(f"*{SUFFIX}")):
            visit = Visit.from_bytes(file.read_bytes())
            number = last if visit.batch is None else visit.batch
            ids = None if number is None else members(number)
            is_trained = visit.batch is not None and visit.batch <= trained
            batch = number if (is_trained if ids is None else visit.id in ids) else None
            visit.changed, visit.batch = batch != visit.batch, batch
            self._visits[visit.id] = self._by_key[visit.key] = visit
        self.save()
        return len(self._visits)

    # On the serving loop.

    def enter(self, raw: RawRequest) -> Session:
        """See `Entrance.enter`."""
        with self._lock:
            visit = self._visit_of(raw.key)
            if visit.session is None:
                visit.session = self._gateway.open(visit.id, secrets.randbits(63))
            visit.running += 1
            visit.used = time.time()
            visit.weights.add(self.weights)
            return visit.session

    def leave(self, session: Session) -> None:
        """See `Entrance.leave`."""
        with self._lock:
            visit = self._visits.get(session.rollout_id)
            if visit is None:
                return
            visit.running -= 1
            visit.used, visit.changed = time.time(), True
            if visit.session is session:  # it has not ended meanwhile
                visit.note_names()

    def moved(self, weights: Weights) -> None:
        """Other weights are served from now on, also to what is running."""
        with self._lock:
            self.weights = weights
            for visit in self._visits.values():
                if visit.running:
                    visit.weights.add(weights)

    def open(self, raw: RawRequest) -> dict[str, Any]:
        """`POST /sessions`: open a session, for a task if one is named."""
        opening = Opening.of(raw)
        if opening.task_id is None and self._group_size > 1:
            raise ApiError(
                f"'task_id' is missing: sessions of one task are compared, {self._group_size} at a time "
                "(algorithm.group_size).",
                param="task_id",
            )
        with self._lock:
            visit = self._new(Task(id=opening.task_id or _NO_TASK, index=0, row=opening.row))
        url = self.address()
        return {
            "id": visit.id,
            "task_id": visit.task.id,
            "api_key": visit.key,
            "base_url": url,
            "anthropic_base_url": url.removesuffix("/v1"),
        }

    def rate(self, raw: RawRequest) -> dict[str, Any]:
        """`POST /feedback`: the reward of a session, which ends with it, or of one of its calls."""
        given = Feedback.of(raw)
        with self._lock:
            visit, index = self._rated(given)
            if visit.batch is not None:
                raise ApiError(
                    f"Session {visit.id} is in batch {visit.batch} already: what is said of it now comes too late.",
                    status=409,
                    code="already_trained",
                )
            if given.reward is not None:
                visit.reward = given.reward
                if index is not None:
                    visit.call_rewards[index] = given.reward
            visit.changed = True
            if given.end and not visit.ended:
                visit.finish()
            return {"session": visit.id, "reward": visit.reward, "ended": visit.ended}

    def metrics(self) -> Iterator[Metric]:
        """Yield how many sessions are open; how many have ended and wait for a reward, or for a batch; how many are in
        batches that are not trained yet; and how many were forgotten."""
        visits = list(self._visits.values())
        unrated = sum(one.ended and one.reward is None for one in visits)
        for name, text, number in (
            ("open", "Sessions that have not ended.", sum(not one.ended for one in visits)),
            ("unrated", "Sessions that have ended without a reward.", unrated),
            ("rated", "Sessions that wait to be trained.", sum(one.waits for one in visits)),
            ("in_batches", "Sessions in batches that are not trained yet.", sum(bool(one.batch) for one in visits)),
        ):
            yield single(f"sessions_{name}", "gauge", text, number)
        text = "Sessions that ended and were forgotten untrained."
        yield single("sessions_forgotten_total", "counter", text, self._num_forgotten)

    # On the server's own thread.

    def save(self) -> None:
        """End the sessions that are idle, forget those that nobody rated or that are too many, and write what has
        changed. Of an ended session only the file has the calls then."""
        now = time.time()
        unwritten: list[tuple[Visit, Visit]] = []
        try:
            with self._lock:
                for visit in self._visits.values():
                    if not visit.ended and not visit.running and now - visit.used > self._idle_s:
                        visit.finish()
                forgotten = self._to_forget(now)
                self._num_forgotten += len(forgotten)
                for visit in self._visits.values():
                    if visit.changed and (visit.ended or not visit.running):
                        unwritten.append((visit, visit.copy()))
                        visit.changed = False
            while unwritten:  # requests need not wait for this
                visit, copy = unwritten[-1]
                write_whole(self._file(visit), (self.with_calls(copy) if copy.filed else copy).to_bytes())
                unwritten.pop()
        finally:  # a full disk, or Ctrl-C: next time
            for visit, _ in unwritten:
                visit.changed = True
        with self._lock:
            for visit in self._visits.values():
                if visit.ended and not visit.changed:
                    visit.before, visit.filed = (), True
        self.remove(forgotten)

    def rated(self) -> list[Visit]:
        """Return the sessions that wait to be trained, in the order of their last use."""
        with self._lock:
            found = [one for one in self._visits.values() if one.waits and one.filed and not one.changed]
        return sorted(found, key=lambda one: one.used)

    def with_calls(self, visit: Visit) -> Visit:
        """Return a copy of an ended session, with its calls."""
        return replace(visit, before=Visit.from_bytes(self._file(visit).read_bytes()).before, filed=False)

    def give(self, ids: Collection[str], number: int) -> bool:
        """Note on disk which batch sessions go to, before it is there: whatever happens then, none is lost or trained
        twice. False, and nothing done, if one has just been rated anew."""
        with self._lock:
            visits = [self._visits[id_] for id_ in ids]
            if any(visit.changed for visit in visits):
                return False
            for visit in visits:
                visit.batch, visit.changed = number, True
        self.save()
        return True

    def take_back(self, ids: Collection[str]) -> None:
        """The sessions go to no batch: they wait again."""
        with self._lock:
            for visit in (self._visits[id_] for id_ in ids):
                visit.batch, visit.changed = None, True

    def settle(self, trained: int, batches: Batches, there: Collection[int]) -> dict[int, int]:
        """Forget the sessions of batches that have trained. Those of batches that the trainer refused wait again: they
        are no longer `there`, or one of another server has trained in their place. Return how many they are, by batch.
        """
        with self._lock:
            given = [(one.id, one.batch) for one in self._visits.values() if one.batch is not None]
        members = {number: _members(batches, number) for number in {one for _, one in given if one <= trained}}

        def is_refused(id_: str, number: int) -> bool:
            if number > trained:
                return number not in there
            trained_ids = members[number]
            return trained_ids is not None and id_ not in trained_ids  # None: somebody has deleted what was trained

        refused = {id_: number for id_, number in given if is_refused(id_, number)}
        self.take_back(refused)
        self.remove([self._visits[id_] for id_, number in given if number <= trained and id_ not in refused])
        return dict(Counter(refused.values()))

    def remove(self, visits: Sequence[Visit]) -> None:
        """Forget sessions."""
        with self._lock:
            for visit in visits:
                self._visits.pop(visit.id, None)
                self._by_key.pop(visit.key, None)
        for visit in visits:
            self._file(visit).unlink(missing_ok=True)

    def _to_forget(self, now: float) -> list[Visit]:
        """Return the ended sessions that nobody has rated for too long, and the oldest beyond `MAX_ENDED`, unrated ones
        first."""
        ended = [one for one in self._visits.values() if one.ended and one.batch is None]
        old = [one for one in ended if one.reward is None and now - one.used > FORGOTTEN_S]
        if len(ended) - len(old) <= MAX_ENDED:
            return old
        ended.sort(key=lambda one: (one.reward is not None, one.used))
        return ended[: len(ended) - MAX_ENDED]

    def _file(self, visit: Visit) -> Path:
        return self._folder / f"{visit.id}{SUFFIX}"

    def _visit_of(self, key: str) -> Visit:
        visit = self._by_key.get(key)
        if visit is None:
            check_key(key, self._key)
            if self._shared is not None and self._shared.full and not self._shared.running:
                self._shared.finish()
            if self._shared is None or self._shared.ended or self._shared.full:
                if self._group_size > 1:
                    raise ApiError(
                        "This is the server's own key: open a session for a task first (POST /sessions), and call with "
                        "its key.",
                        status=403,
                        code="no_session",
                        kind="permission_error",
                    )
                self._shared = self._new(Task(id=_NO_TASK, index=0, row={}))
            visit = self._shared
        if visit.ended:
            raise ApiError("This session has ended.", status=401, code="invalid_api_key", kind="authentication_error")
        if visit.full:
            raise full_error()
        return visit

    def _new(self, task: Task) -> Visit:
        if sum(not one.ended for one in self._visits.values()) >= MAX_OPEN:
            raise ApiError(f"{MAX_OPEN} sessions are open already.", status=503, code="overloaded", kind="server_error")
        visit = Visit.new(task, self.weights[1])
        self._visits[visit.id] = self._by_key[visit.key] = visit
        return visit

    def _rated(self, given: Feedback) -> tuple[Visit, int | None]:
        """Return the session that feedback is for, and the index of the call if it is for one."""
        if given.session is not None:
            visit = self._visits.get(given.session)
            if visit is None:
                raise unknown("session", given.session, _GONE)
            return visit, None
        assert given.call is not None
        match = _NAME.search(given.call)
        name = "" if match is None else match[0]
        found = next((visit for visit in self._visits.values() if name in visit.names), None)
        if found is None:
            raise unknown("call", given.call, _GONE)
        return found, found.names[name]


def _members(batches: Batches, number: int) -> tuple[str, ...] | None:
    """Return the sessions of a batch; None if it is not there."""
    content = batches.get(number)
    return None if content is None else sessions_in(content)
