"""What is tried again after a failure, and what a retry has replaced.

In: an attempt that failed, and what came of the next one. Out: whether it is final; whether other answers stand in its
place now.

A retry repeats its rollout's noise, so that an engine that can be reproduced gives the same answers again: what failed
on the model's text fails again, what something else made fail goes on from the same answers. An engine whose numbers
depend on what runs beside gives other answers now and then, and so does a prompt with the time in it. Where those get a
reward, user code has chosen between the model's answers: such rollouts are counted, and their share is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sharpen.types import MODEL_CAUSED, Group, Outcome, Rollout

OF_USER_CODE = frozenset({Outcome.WORKFLOW_ERROR, Outcome.JUDGE_ERROR, Outcome.TIMEOUT, Outcome.BLOCKED_LOOP})
"""Failures that user code may owe to what the model answered."""


def is_final(failed: Rollout, *, outside: bool, evaluation: bool) -> bool:
    """Whether an attempt that was not OK is not to be repeated. `outside`: a server was not there. An evaluation
    repeats nothing that the model may have caused."""
    if failed.outcome in MODEL_CAUSED:
        return True
    return evaluation and not outside and may_be_the_models(failed)


def may_be_the_models(failed: Rollout) -> bool:
    """Whether user code failed after the model had answered."""
    return failed.outcome in OF_USER_CODE and failed.num_answers != 0


def fails_its_task(failed: Rollout) -> bool:
    """Whether an evaluation counts this failure as the agent's: by the model, or in the workflow after it answered."""
    return failed.outcome in MODEL_CAUSED or (may_be_the_models(failed) and failed.outcome != Outcome.JUDGE_ERROR)


def replaced(group: Group) -> Iterator[tuple[Rollout, Rollout]]:
    """Each scored rollout that stands in for other answers, behind the failed attempt whose answers they were not."""
    finals = {rollout.index: rollout for rollout in group.rollouts if rollout.scored}
    for failed in group.attempts:
        final = finals.get(failed.index)
        if final is not None and may_be_the_models(failed) and not _repeats(failed, final):
            del finals[failed.index]
            yield failed, final


def _repeats(failed: Rollout, final: Rollout) -> bool:
    """Whether the answers of the failed attempt are the first ones of the other, to the last id."""
    first, second = failed.answers, final.answers
    if failed.num_answers != len(first) or len(first) > len(second):
        return False
    return all(np.array_equal(a.sampled_ids_S, b.sampled_ids_S) for a, b in zip(first, second, strict=False))
