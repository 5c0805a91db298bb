"""Rollouts of algorithms that learn without rewards: none is needed, and a failure is still a failure."""

from __future__ import annotations

from typing import Any

from scripted_serving import FakeModel, MakeRunner, make_task

from sharpen import JudgeOutput, WorkflowOutput
from sharpen.agent.rollout.check import check_groups
from sharpen.agent.rollout.statistics import is_flat, summarize
from sharpen.types import Outcome


async def answers(task: dict[str, Any], model: FakeModel) -> WorkflowOutput:
    model.call()
    if task["question"] == "broken":
        raise ValueError("a broken tool")
    if task["question"] == "too long":
        model.call(fail=Outcome.CONTEXT_OVERFLOW)
    return WorkflowOutput(metrics={"turns": 1})


def test_an_ok_rollout_takes_part_without_a_reward(make_runner: MakeRunner) -> None:
    """Red when `UserFunctions.attempt` makes a reward of 0 of it, or `num_excluded` counts missing rewards."""
    runner = make_runner(answers, needs_reward=False, max_attempts=2)
    tasks = [make_task(1, question="fine"), make_task(2, question="broken"), make_task(3, question="too long")]
    fine, broken, long = runner.run(tasks, group_ids=["a", "b", "c"], version=0)
    assert [(one.outcome, one.reward, one.scored) for one in fine.rollouts] == [(Outcome.OK, None, True)] * 2
    assert fine.rollouts[0].metrics["turns"] == 1.0
    assert [(one.outcome, one.scored) for one in broken.rollouts] == [(Outcome.WORKFLOW_ERROR, False)] * 2
    assert [(one.outcome, one.scored) for one in long.rollouts] == [(Outcome.CONTEXT_OVERFLOW, False)] * 2
    assert not is_flat(fine)
    found = summarize([fine, broken, long])
    assert (found.num_rollouts, found.num_excluded, found.num_flat_groups) == (6, 4, 0)
    assert not any(name.startswith("reward/m") for name in found.metrics())
    assert found.excluded_by_task == {"train/2": 1.0, "train/3": 1.0}
    report = check_groups([fine], needs_reward=False)
    assert report.ready
    assert report.has_signal
    text = "\n".join(report.lines())
    assert "none none" in text
    assert "rewards     none" in text
    assert "nan" not in text
    assert "fail fail" in "\n".join(check_groups([broken], needs_reward=False).lines())


def test_optional_rewards_are_kept_and_need_not_differ(make_runner: MakeRunner) -> None:
    async def judge(task: dict[str, Any], response: Any) -> JudgeOutput:
        return JudgeOutput(reward=0.5)

    (group,) = make_runner(answers, judge, needs_reward=False).run(
        [make_task(1, question="fine")], group_ids=["a"], version=0
    )
    assert [one.reward for one in group.rollouts] == [0.5, 0.5]
    assert check_groups([group], needs_reward=False).ready
    assert not check_groups([group]).ready
    assert summarize([group]).notes(needs_reward=False) == []
    assert summarize([group]).notes() == ["rewards are equal within every group: nothing to learn from"]
