"""What must hold with every agent: what the engine sampled is what is recorded and trained, a run that trains it is
certified, a tool round is one sequence, and nothing of one rollout is trained in another.

In: the tests' `rollouts`, a workflow that asks an agent `a+b` and wants `answer` in what it says. Out: assertions, and
the rollouts for what a framework has of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from agent_scripts import add_numbers_of_the_question, add_then_answer
from certified import certified
from scripted_rollouts import RememberingEngine

from sharpen.learning.experience.merge import merge
from sharpen.types import Call, CallStatus, Group, Outcome, Rollout

TASK = {"question": "2+3", "answer": "The answer is 5."}


def sums(count: int) -> list[dict[str, str]]:
    """Tasks whose questions tell them apart."""
    return [{"question": f"{i}+{7 * i}", "answer": f"The answer is {8 * i}."} for i in range(1, count + 1)]


def check_tool_round(rollouts: Any, workflow: Any) -> Rollout:
    """A call of the tool `add`, and the answer: two calls of one sequence, both trained."""
    served = rollouts(add_then_answer)
    (rollout,) = check_records(served.engine, served.run(workflow, tasks=[TASK]))
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 1.0), rollout.error
    assert [call.parent for call in rollout.calls] == [None, 0]
    assert [call.status for call in rollout.calls] == [CallStatus.USED] * 2
    assert [tool["function"]["name"] for tool in rollout.calls[0].tools] == ["add"]
    return rollout


def check_parallel_rollouts(rollouts: Any, workflow: Any, *, tasks: int = 6, group_size: int = 4) -> None:
    """Each rollout has the calls of its own task."""
    asked = sums(tasks)
    served = rollouts(add_numbers_of_the_question)
    groups = served.run(workflow, tasks=asked, group_size=group_size)
    check_records(served.engine, groups)
    assert [rollout.reward for group in groups for rollout in group.rollouts] == [1.0] * tasks * group_size
    for task, group in zip(asked, groups, strict=True):
        for rollout in group.rollouts:
            assert len(rollout.calls) == 2
            assert all(task["question"] in str(call.messages) for call in rollout.calls)


def check_what_the_process_shares(rollouts: Any, workflow_of: Any, *, tasks: int, said: Any) -> list[Group]:
    """A workflow that sets its client for the whole process: the rollout that came last gets the calls of all, at most
    it is scored, and no call is trained in a rollout of another task. `workflow_of(others)` gives it; `await others()`
    waits until every rollout is there."""
    asked = sums(tasks)
    everyone = asyncio.Barrier(2 * tasks)
    groups: list[Group] = rollouts(said).run(workflow_of(everyone.wait), tasks=asked, group_size=2)
    for task, group in zip(asked, groups, strict=True):
        for rollout in group.rollouts:
            assert all(task["question"] in str(call.messages) for call in rollout.calls if call.trainable)
            assert not rollout.scored or all(call.status != CallStatus.FOREIGN for call in rollout.calls)
    failed = [rollout for group in groups for rollout in group.rollouts if not rollout.scored]
    assert len(failed) >= 2 * tasks - 1
    assert {rollout.outcome for rollout in failed} == {Outcome.WORKFLOW_ERROR}
    return groups


def check_records(engine: RememberingEngine, groups: Sequence[Group]) -> list[Rollout]:
    """Return the rollouts, of which this holds: each thing that the engine sampled is one call, id for id, with its
    logprobs; each call that continues another starts with its ids; the loss is on the sampled ids, all of them and no
    other; and `certify` holds for a run that trains them, over all the tokens of all calls that may train.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    calls = [call for rollout in rollouts for call in rollout.calls]
    sampled = sorted((_key(request.prompt_ids, got.ids, got.logprobs) for request, got in engine.answered))
    recorded = sorted(_key(call.prompt_ids_P, call.sampled_ids_S, call.logprobs_S) for call in calls)
    assert recorded == sampled
    assert calls, [rollout.error for rollout in rollouts]
    for rollout in rollouts:
        for call in rollout.calls:
            if call.parent is not None:
                before = _all_ids(rollout.calls[call.parent])
                assert call.prompt_ids_P[: len(before)].tolist() == before
        _check_loss(rollout)
    _check_certificate(groups)
    return rollouts


def _key(prompt_ids: Any, ids: Any, logprobs: Any) -> tuple[list[int], list[int], list[float]]:
    return (np.asarray(prompt_ids).tolist(), np.asarray(ids).tolist(), np.asarray(logprobs).tolist())


def _all_ids(call: Call) -> list[int]:
    return [*call.prompt_ids_P.tolist(), *call.sampled_ids_S.tolist()]


def _check_loss(rollout: Rollout) -> None:
    """Each call that may be trained has its ids, in order, under the loss mask of one sequence; nothing else has."""
    found: dict[int, list[int]] = {}
    for sequence in merge(rollout):
        for at in np.flatnonzero(sequence.loss_mask_T):
            found.setdefault(int(sequence.calls_T[at]), []).append(int(sequence.ids_T[at]))
    assert found == {call.index: call.sampled_ids_S.tolist() for call in rollout.calls if call.trainable}


def _check_certificate(groups: Sequence[Group]) -> None:
    scored = [rollout for group in groups for rollout in group.scored]
    with TemporaryDirectory() as folder:
        certificate, trained = certified(groups, Path(folder))
    assert certificate.holds, certificate.problems
    asked = {
        (rollout.id, call.index): len(call.sampled_ids_S)
        for rollout in scored
        for call in rollout.calls
        if call.trainable
    }
    assert trained == asked
