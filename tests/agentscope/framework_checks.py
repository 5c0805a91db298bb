"""What must hold with every framework: a tool round is one sequence, and nothing of one rollout is trained in another.

In: the tests' `rollouts`, a workflow that asks an agent `a+b` and wants `answer` in what it says. Out: assertions, and
the rollouts for what a framework has of its own.
"""

from __future__ import annotations

from typing import Any

from agent_scripts import add_numbers_of_the_question, add_then_answer

from sharpen.types import CallStatus, Group, Outcome, Rollout

TASK = {"question": "2+3", "answer": "The answer is 5."}


def sums(count: int) -> list[dict[str, str]]:
    """Tasks whose questions tell them apart."""
    return [{"question": f"{i}+{7 * i}", "answer": f"The answer is {8 * i}."} for i in range(1, count + 1)]


def check_tool_round(rollouts: Any, workflow: Any) -> Rollout:
    """A call of the tool `add`, and the answer: two calls of one sequence, both trained."""
    (group,) = rollouts(add_then_answer).run(workflow, tasks=[TASK])
    (rollout,) = group.rollouts
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 1.0), rollout.error
    assert [call.parent for call in rollout.calls] == [None, 0]
    assert [call.status for call in rollout.calls] == [CallStatus.USED] * 2
    assert [tool["function"]["name"] for tool in rollout.calls[0].tools] == ["add"]
    return rollout


def check_parallel_rollouts(rollouts: Any, workflow: Any, *, tasks: int = 6, group_size: int = 4) -> None:
    """Each rollout has the calls of its own task."""
    asked = sums(tasks)
    groups = rollouts(add_numbers_of_the_question).run(workflow, tasks=asked, group_size=group_size)
    assert [rollout.reward for group in groups for rollout in group.rollouts] == [1.0] * tasks * group_size
    for task, group in zip(asked, groups, strict=True):
        for rollout in group.rollouts:
            assert len(rollout.calls) == 2
            assert all(task["question"] in str(call.messages) for call in rollout.calls)


def check_what_the_process_shares(rollouts: Any, workflow: Any, *, tasks: int, said: Any) -> list[Group]:
    """A workflow that sets its client for the whole process: the rollout that came last gets the calls of all, at most
    it is scored, and no call is trained in a rollout of another task."""
    asked = sums(tasks)
    groups: list[Group] = rollouts(said).run(workflow, tasks=asked, group_size=2)
    for task, group in zip(asked, groups, strict=True):
        for rollout in group.rollouts:
            assert all(task["question"] in str(call.messages) for call in rollout.calls if call.trainable)
            assert not rollout.scored or all(call.status != CallStatus.FOREIGN for call in rollout.calls)
    failed = [rollout for group in groups for rollout in group.rollouts if not rollout.scored]
    assert len(failed) >= 2 * tasks - 1
    assert {rollout.outcome for rollout in failed} == {Outcome.WORKFLOW_ERROR}
    return groups
