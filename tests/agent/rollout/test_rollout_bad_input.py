"""Bad input by the issue's list: what each wrong workflow, judge, output or environment ends in."""

from __future__ import annotations

import functools
import logging
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scripted_serving import MakeRunner, make_task

from sharpen.config.public import JudgeOutput, WorkflowOutput
from sharpen.errors import ConfigError
from sharpen.types import Group, Outcome, Rollout


def run_one(runner: Any) -> Group:
    (group,) = runner.run([make_task()], group_ids=["train/0"])
    return group


def only(group: Group) -> Rollout:
    return group.rollouts[0]


class Agent:
    """A workflow that is an object."""

    def __init__(self, reward: float) -> None:
        self.reward = reward

    async def __call__(self, task: Any, model: Any) -> WorkflowOutput:
        return WorkflowOutput(reward=self.reward)

    async def run(self, model: Any, task: Any, hint: str = "") -> WorkflowOutput:
        return WorkflowOutput(reward=self.reward + len(hint))


async def configurable(reward: float, task: Any, model: Any) -> WorkflowOutput:
    return WorkflowOutput(reward=reward)


@pytest.mark.parametrize(
    ("workflow", "reward"),
    [
        (Agent(0.25), 0.25),
        (Agent(0.5).run, 0.5),
        (functools.partial(configurable, 0.75), 0.75),
        (functools.partial(Agent(0.5).run, hint="ab"), 2.5),
        (functools.partial(functools.partial(configurable), 0.125), 0.125),
    ],
)
def test_objects_methods_and_partials_are_workflows(make_runner: MakeRunner, workflow: Any, reward: float) -> None:
    rollout = only(run_one(make_runner(workflow)))
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, reward)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (math.nan, "`workflow` gave nan as reward: it must be a finite number"),
        (math.inf, "`workflow` gave inf as reward: it must be a finite number"),
        (np.float32(-np.inf), "`workflow` gave -inf as reward: it must be a finite number"),
        ("1.0", "`workflow` gave '1.0' (str) as reward: it must be a number"),
        ([1.0], "`workflow` gave [1.0] (list) as reward: it must be a number"),
    ],
)
def test_a_workflows_reward_that_is_no_finite_number_is_excluded(
    make_runner: MakeRunner, reward: Any, message: str
) -> None:
    async def workflow(task: Any, model: Any) -> Any:
        return SimpleNamespace(reward=reward)

    rollout = only(run_one(make_runner(workflow, max_attempts=1)))
    assert (rollout.outcome, rollout.reward) == (Outcome.WORKFLOW_ERROR, None)
    assert message in str(rollout.error)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_outputs_of_ours_carry_such_a_reward_to_the_same_end(make_runner: MakeRunner, reward: float) -> None:
    """The object itself does not raise within the workflow, where a `try` of the user would hide it."""

    async def workflow(task: Any, model: Any) -> WorkflowOutput:
        return WorkflowOutput(reward=reward)

    async def judge(task: Any, response: Any) -> JudgeOutput:
        return JudgeOutput(reward=reward)

    assert only(run_one(make_runner(workflow, max_attempts=1))).outcome == Outcome.WORKFLOW_ERROR
    assert only(run_one(make_runner(Agent(1.0), judge, max_attempts=1))).outcome == Outcome.JUDGE_ERROR


def test_no_judge_and_no_reward_stops_the_run(make_runner: MakeRunner) -> None:
    async def workflow(task: Any, model: Any) -> WorkflowOutput:
        return WorkflowOutput(response="4", metrics={"turns": 1.0})

    with pytest.raises(ConfigError, match="returned no reward and there is no judge_func"):
        run_one(make_runner(workflow))


def test_a_judges_metrics_that_are_not_numbers_are_skipped(
    make_runner: MakeRunner, caplog: pytest.LogCaptureFixture
) -> None:
    async def judge(task: Any, response: Any) -> JudgeOutput:
        return JudgeOutput(reward=1.0, metrics={"exact": 1, "why": "because", "parts": [1, 2]})

    with caplog.at_level(logging.WARNING, "sharpen.rollout"):
        rollout = only(run_one(make_runner(Agent(0.0), judge)))
    assert (rollout.reward, rollout.metrics) == (1.0, {"judge/exact": 1.0})
    assert {"'why'", "'parts'"} == {message.split()[1] for message in caplog.messages if message.startswith("metric ")}


def test_a_judge_that_raises_on_an_empty_answer_is_excluded_and_says_where(make_runner: MakeRunner) -> None:
    async def workflow(task: Any, model: Any) -> WorkflowOutput:
        return WorkflowOutput(response=None)

    async def judge(task: Any, response: Any) -> JudgeOutput:
        return JudgeOutput(reward=float(task["answer"] in response))

    rollout = only(run_one(make_runner(workflow, judge, max_attempts=1)))
    assert (rollout.outcome, rollout.reward) == (Outcome.JUDGE_ERROR, None)
    assert "TypeError" in str(rollout.error)
    assert "test_rollout_bad_input.py" in str(rollout.error)


def test_a_package_that_is_missing_is_named(make_runner: MakeRunner) -> None:
    async def workflow(task: Any, model: Any) -> WorkflowOutput:
        import agentscope.of.nowhere as missing

        return WorkflowOutput(reward=float(missing.reward))

    rollout = only(run_one(make_runner(workflow, max_attempts=1)))
    assert (rollout.outcome, rollout.reward) == (Outcome.WORKFLOW_ERROR, None)
    assert "ModuleNotFoundError" in str(rollout.error)
    assert "agentscope" in str(rollout.error)
