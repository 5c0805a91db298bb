"""Decides which failures are retried, and finds rollouts whose retry gave other answers.

In: a failed attempt, and the attempt after it. Out: whether the failure is final; whether the retry's answers differ.

A retry repeats its rollout's noise, so that a reproducible engine gives the same answers: a failure on the model's text
happens again, and after any other failure the rollout continues from the same answers. An engine whose numbers depend
on concurrent requests sometimes gives other answers, and so does a prompt that contains the time. If such answers get a
reward, user code has in effect selected among the model's answers: these rollouts are counted, and their share is
bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from sharpen.errors import ConfigError, DatasetError
from sharpen.types import MODEL_CAUSED, Group, Outcome, Rollout

# How an attempt of a rollout ended.
#
# In: what workflow and judge returned or raised. Out: `Ending`, from which the rollout's record is made.


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


OF_USER_CODE = frozenset({Outcome.WORKFLOW_ERROR, Outcome.JUDGE_ERROR, Outcome.TIMEOUT, Outcome.BLOCKED_LOOP})
"""Failures of user code that the model's answers may have caused."""


def is_final(failed: Rollout, *, server_failed: bool, evaluation: bool) -> bool:
    """Whether a failed attempt is not retried. `server_failed`: a server could not be reached. An evaluation does not
    retry failures that the model may have caused."""
    if failed.outcome in MODEL_CAUSED:
        return True
    return evaluation and not server_failed and may_be_models_fault(failed)


def may_be_models_fault(failed: Rollout) -> bool:
    """Whether user code failed after the model answered."""
    return failed.outcome in OF_USER_CODE and failed.num_answers != 0


def fails_its_task(failed: Rollout) -> bool:
    """Whether an evaluation counts this failure against the agent: the model caused it, or the workflow failed after
    the model answered."""
    return failed.outcome in MODEL_CAUSED or (may_be_models_fault(failed) and failed.outcome != Outcome.JUDGE_ERROR)


def replacements(group: Group) -> Iterator[tuple[Rollout, Rollout]]:
    """Yield each failed attempt that a scored rollout with other answers replaced, with that rollout."""
    finals = {rollout.index: rollout for rollout in group.rollouts if rollout.scored}
    for failed in group.attempts:
        final = finals.get(failed.index)
        if final is not None and may_be_models_fault(failed) and not _repeats(failed, final):
            del finals[failed.index]
            yield failed, final


def _repeats(failed: Rollout, final: Rollout) -> bool:
    """Whether the failed attempt's answers are the first answers of the final one, token for token."""
    first, second = failed.answers, final.answers
    if failed.num_answers != len(first) or len(first) > len(second):
        return False
    return all(np.array_equal(a.sampled_ids_S, b.sampled_ids_S) for a, b in zip(first, second, strict=False))
