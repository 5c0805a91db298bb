"""A scripted serving side: sessions whose model makes recorded calls without any engine."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from sharpen.agent.rollout.models import RolloutModels
from sharpen.agent.rollout.runner import RolloutRunner
from sharpen.errors import TokenCapError
from sharpen.types import Call, CallStatus, Outcome, Sampling, Task

MakeRunner = Callable[..., RolloutRunner]


def make_call(index: int = 0, num_sampled: int = 3, **changes: Any) -> Call:
    values: dict[str, Any] = {
        "index": index,
        "parent": None,
        "prompt_ids_P": np.arange(4, dtype=np.int32),
        "sampled_ids_S": np.arange(num_sampled, dtype=np.int32),
        "logprobs_S": np.full(num_sampled, -1.0, dtype=np.float32),
        "versions_S": np.zeros(num_sampled, dtype=np.int32),
        "sampling": Sampling(),
        "finish_reason": "stop",
        "status": CallStatus.USED,
        "messages": (),
        "tools": (),
        "response": {"role": "assistant", "content": "4"},
    }
    return Call(**{**values, **changes})


def make_task(number: int = 0, /, **row: Any) -> Task:
    return Task(id=f"train/{number}", index=number, row=row or {"question": f"q{number}", "answer": str(number)})


class FakeModel:
    """What a workflow gets: `call()` is one call to the model."""

    def __init__(self, session: FakeSession) -> None:
        self._session = session
        self.rollout_id = session.rollout_id
        self.noise_seed = session.noise_seed

    def call(self, fail: Outcome | None = None, **changes: Any) -> str:
        if self._session.closed:
            raise ConnectionError("this key was revoked")
        if fail is not None:
            self._session.failure, self._session.failure_reason = fail, f"scripted {fail}"
            raise RuntimeError(f"400: {fail}")
        self._session.calls.append(make_call(len(self._session.calls), **changes))
        return "4"


class FakeHelper:
    """An auxiliary model that can be called until it is closed, and an attempt's access to it."""

    def __init__(self) -> None:
        self.model = self
        self.counts = {"calls": 0.0}
        self.failure: Outcome | None = None
        self.failure_reason: str | None = None
        self.exhausted: TokenCapError | None = None
        self.num_answers, self.cut = 0, False
        self.closed = False

    def call(self, *, fail: bool = False, exhaust: bool = False) -> str:
        if self.closed:
            raise PermissionError("this key was revoked")
        if fail:
            self.failure, self.failure_reason = Outcome.INFRASTRUCTURE, "scripted"
            raise RuntimeError("503")
        if exhaust:
            self.exhausted = TokenCapError("the helper has used 10 tokens")
            raise RuntimeError("403")
        self.counts["calls"] += 1
        return "good"

    def allow(self, num_rollouts: int) -> None:
        raise AssertionError("auxiliary models have no limit of calls")

    def close(self) -> tuple[Call, ...]:
        self.closed = True
        return ()

    def discard(self) -> None:
        pass


class FakeSession:
    def __init__(self, rollout_id: str, noise_seed: int, helpers: dict[str, FakeHelper]) -> None:
        self.rollout_id = rollout_id
        self.noise_seed = noise_seed
        self.helpers = helpers
        self.calls: list[Call] = []
        self.closed = False
        self.failure: Outcome | None = None
        self.failure_reason: str | None = None
        self.counts: dict[str, float] = {}
        self.exhausted: TokenCapError | None = None
        self.recorded = True
        self.allowed = 1
        self.model = FakeModel(self)

    def allow(self, num_rollouts: int) -> None:
        self.allowed = num_rollouts

    @property
    def num_answers(self) -> int:
        return len(self.calls)

    @property
    def cut(self) -> bool:
        return bool(self.calls) and self.calls[-1].finish_reason == "length"

    def close(self) -> tuple[Call, ...]:
        self.closed = True
        return tuple(self.calls) if self.recorded else ()

    def discard(self) -> None:
        pass


class FakeServing:
    """`open` is the runner's `open_session`; remembers what was opened."""

    def __init__(self) -> None:
        self.sessions: dict[str, list[FakeSession]] = defaultdict(list)
        self.order: list[str] = []
        self.refuse = 0
        self.helpers: tuple[str, ...] = ()
        self.recorded = True
        self._lock = threading.Lock()

    def open(self, rollout_id: str, noise_seed: int) -> RolloutModels:
        with self._lock:
            if self.refuse > 0:
                self.refuse -= 1
                raise RuntimeError("the engine is down")
            session = FakeSession(rollout_id, noise_seed, {name: FakeHelper() for name in self.helpers})
            session.recorded = self.recorded
            self.sessions[rollout_id].append(session)
            self.order.append(rollout_id)
            return RolloutModels(session, session.helpers)

    @property
    def all_closed(self) -> bool:
        opened = [session for sessions in self.sessions.values() for session in sessions]
        return all(one.closed for session in opened for one in (session, *session.helpers.values()))
