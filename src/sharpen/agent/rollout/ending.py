"""How an attempt of a rollout ended.

In: what workflow and judge returned or raised. Out: `Ending`, from which the rollout's record is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sharpen.errors import ConfigError, DatasetError
from sharpen.types import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an attempt ended. `reward` is set if the outcome is OK; it may be None if no reward is needed.

    If the workflow chose which calls take part, `call_rewards` holds its reward for each of them, by the call's index;
    the other calls are left out of training. None means that all take part. `trained` are the indices of the calls that
    train, None for all. `step_rewards`, `states`, `error` and `traceback` are those of `Rollout`. `answer` is the text
    that the workflow returned, if a request asked for several choices. `server_failed`: an unreachable server caused
    the failure, not the model's answer. `counts_as_attempt` is false if another attempt's code caused the failure.
    `refusal` is the error to stop with if no rollout before kept to what it names: a field that does not exist, an
    output of the wrong kind.
    `members` are the endings of the group's rollouts, in order, if one attempt made all of them; the `calls` of each
    are the indices of its own calls. `beside` are the endings of what the rollout answered to other questions, by a
    name for each question.
    """

    outcome: Outcome
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    call_rewards: Mapping[int, float] | None = None
    trained: frozenset[int] | None = None
    step_rewards: Mapping[int, float] = field(default_factory=dict)
    states: Mapping[int, str] = field(default_factory=dict)
    answer: str | None = None
    error: str | None = None
    traceback: str | None = None
    server_failed: bool = False
    counts_as_attempt: bool = True
    refusal: ConfigError | DatasetError | None = None
    members: tuple[Ending, ...] = ()
    calls: tuple[int, ...] = ()
    beside: Mapping[str, Ending] = field(default_factory=dict)
