"""A session of an application: calls that belong together, what they are worth, and its file.

In: calls of the gateway's session, rewards. Out: a `Rollout`; bytes that hold everything, for after a restart.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sharpen.agent.rollout.choices import mark_unused
from sharpen.gateway.requests import ApiError
from sharpen.gateway.session import Session
from sharpen.placement.exchange.batch import pack, unpack
from sharpen.types import Call, CallStatus, Group, Outcome, Rollout, Task

MAX_CALLS, MAX_TOKENS = 1_000, 16_000_000
"""How many calls a session may have, and how many tokens in all prompts and answers of these."""
Weights = tuple[str, int]
"""The name of the weights that sampled something: the trainer's session (empty: the model's files) and the version."""


@dataclass(slots=True, kw_only=True, eq=False)
class Visit:
    """One session. `session` is the gateway's while it is open; `before` are its calls up to a restart, or all of them
    once it has ended. `names` are the ids of its answers, with the index of the call of each. `batch` is the number of
    the batch that it was given to. Of an ended session that is saved only the file has the calls: `filed`."""

    id: str
    key: str
    task: Task
    opened: float
    used: float
    version: int
    session: Session | None = None
    before: tuple[Call, ...] = ()
    running: int = 0
    reward: float | None = None
    call_rewards: dict[int, float] = field(default_factory=dict)
    weights: set[Weights] = field(default_factory=set)
    names: dict[str, int] = field(default_factory=dict)
    batch: int | None = None
    ended: bool = False
    changed: bool = True
    filed: bool = False

    @classmethod
    def new(cls, task: Task, version: int) -> Visit:
        """Return a session that begins now."""
        id_, key, now = secrets.token_hex(8), f"at-{secrets.token_urlsafe(24)}", time.time()
        return cls(id=id_, key=key, task=task, opened=now, used=now, version=version)

    @property
    def calls(self) -> tuple[Call, ...]:
        """All calls so far, in order."""
        if self.session is None:
            return self.before
        return (*self.before, *(_shifted(call, len(self.before)) for call in self.session.snapshot()))

    @property
    def waits(self) -> bool:
        """Whether it has ended, has a reward, and is in no batch."""
        return self.ended and self.reward is not None and self.batch is None

    @property
    def full(self) -> bool:
        """Whether it has had as many calls or tokens as a session may have."""
        counts = {} if self.session is None else self.session.metrics
        num_calls = len(self.before) + counts.get("num_calls", 0)
        tokens = sum(len(call.prompt_ids_P) + len(call.sampled_ids_S) for call in self.before)
        tokens += int(counts.get("prompt_tokens", 0) + counts.get("sampled_tokens", 0))
        return num_calls >= MAX_CALLS or tokens >= MAX_TOKENS

    def note_names(self) -> None:
        """Note the ids of the answers that have come since the last time."""
        assert self.session is not None
        for index in range(int(self.session.metrics["num_calls"])):
            self.names[self.session.name(index)] = len(self.before) + index

    def finish(self) -> None:
        """Let no more calls be made, and keep those that were."""
        if self.session is not None:
            self.note_names()
            self.session.close()
            self.before, self.session = mark_unused(self.calls, None), None
        self.ended = self.changed = True

    def rollout(self, id_: str, group_id: str, index: int, *, needs_ratio: bool) -> Rollout:
        """Return the session as a rollout; with `needs_ratio` calls without one do not train."""
        calls = tuple(self._trained(call, needs_ratio) for call in self.before)
        return Rollout(
            id=id_,
            group_id=group_id,
            task_id=self.task.id,
            index=index,
            attempt=0,
            calls=calls,
            outcome=Outcome.OK,
            reward=self.reward,
            call_rewards=self.call_rewards,
            seconds=self.used - self.opened,
            started=self.opened,
        )

    def _trained(self, call: Call, needs_ratio: bool) -> Call:
        unrated = bool(self.call_rewards) and call.index not in self.call_rewards
        truncated = needs_ratio and not call.has_ratio
        out = call.status == CallStatus.USED and (unrated or truncated)
        return replace(call, status=CallStatus.LEFT_OUT) if out else call

    def copy(self) -> Visit:
        """Return the session as it is now, to be written while it goes on."""
        return replace(
            self,
            session=None,
            before=self.calls,
            call_rewards=dict(self.call_rewards),
            weights=set(self.weights),
            names=dict(self.names),
        )

    def to_bytes(self) -> bytes:
        """The session as it is now, with its calls, which must be here."""
        assert not self.filed
        about = {name: getattr(self, name) for name in _PLAIN}
        about |= {"call_rewards": list(self.call_rewards.items()), "weights": sorted(self.weights)}
        rollout = Rollout(
            id=self.id, group_id=self.id, task_id=self.task.id, index=0, attempt=0, calls=self.calls,
            outcome=Outcome.OK, reward=self.reward,
        )  # fmt: skip
        return pack([Group(id=self.id, task=self.task, version=self.version, rollouts=(rollout,))], about)

    @classmethod
    def from_bytes(cls, content: bytes) -> Visit:
        """Read a session back. Raises `JournalError` for bytes that are none."""
        about, (group,) = unpack(content)
        fields: dict[str, Any] = {name: about.get(name) for name in _PLAIN}  # older files have no batch
        return cls(
            **fields,
            task=group.task,
            before=group.rollouts[0].calls,
            call_rewards=dict(_pairs(about["call_rewards"])),
            weights=set(_pairs(about["weights"])),
            changed=False,
        )


_PLAIN = ("id", "key", "opened", "used", "version", "reward", "names", "batch", "ended")


def full_error() -> ApiError:
    """Return the error for a further call of a session that has had all it may have."""
    return ApiError(
        f"This session has had its {MAX_CALLS} calls, or {MAX_TOKENS} tokens: open another.",
        status=403,
        code="session_full",
        kind="permission_error",
    )


def _pairs(listed: Sequence[Sequence[Any]]) -> list[tuple[Any, Any]]:
    return [(first, second) for first, second in listed]


def _shifted(call: Call, by: int) -> Call:
    """Return a call of a session that went on after a restart, with its place among all."""
    moved: Mapping[str, int | None] = {
        "parent": None if call.parent is None else call.parent + by,
        "request": None if call.request is None else call.request + by,
    }
    return replace(call, index=call.index + by, parent=moved["parent"], request=moved["request"])
