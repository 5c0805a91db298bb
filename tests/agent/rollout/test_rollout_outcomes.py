"""Every outcome states its cause; only what has a reward is scored."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
from scripted_serving import FakeServing, MakeRunner, make_task

from sharpen.agent.rollout.statistics import summarize
from sharpen.config.public import JudgeOutput, WorkflowOutput
from sharpen.config.rows import MissingFieldError, Row
from sharpen.errors import ConfigError, DatasetError
from sharpen.types import Group, Outcome


def run_one(runner: Any, **arguments: Any) -> Group:
    return runner.run([make_task()], group_ids=["g"], **arguments)[0]


async def answers(task: Any, model: Any) -> WorkflowOutput:
    return WorkflowOutput(response=model.call(), metrics={"turns": 1})


async def judge_right(task: Any, response: Any) -> JudgeOutput:
    return JudgeOutput(reward=float(response == "4"), metrics={"exact": 1.0})


def test_workflow_and_judge(make_runner: MakeRunner) -> None:
    group = make_runner(answers, judge_right).submit(make_task(), "3/train/0", 7).result()
    assert (group.id, group.version, group.task.id) == ("3/train/0", 7, "train/0")
    assert [rollout.id for rollout in group.rollouts] == ["3/train/0/0", "3/train/0/1"]
    for rollout in group.rollouts:
        assert (rollout.outcome, rollout.reward, rollout.attempt, rollout.error) == (Outcome.OK, 1.0, 0, None)
        assert rollout.metrics == {"turns": 1.0, "judge/exact": 1.0}
        assert len(rollout.calls) == 1
    assert group.attempts == ()


def test_metrics_of_one_name_from_workflow_and_judge_are_two(make_runner: MakeRunner) -> None:
    """Red on the code before: the judge's replaced the workflow's, and both were called the workflow's."""

    async def both(task: Any, model: Any) -> WorkflowOutput:
        return WorkflowOutput(response=model.call(), metrics={"exact": 0.25, "judge/exact": 0.5})

    group = run_one(make_runner(both, judge_right))
    assert group.rollouts[0].metrics == {"exact": 0.25, "workflow/judge/exact": 0.5, "judge/exact": 1.0}
    step = summarize([group]).metrics()
    found = {name: value for name, value in step.items() if "exact" in name}
    assert found == {"workflow/exact": 0.25, "workflow/judge/exact": 0.5, "judge/exact": 1.0}


@pytest.mark.parametrize(
    "output",
    [0.5, np.float32(0.5), np.array(0.5), SimpleNamespace(reward=0.5), WorkflowOutput(reward=0.5)],
)
def test_kinds_of_output(make_runner: MakeRunner, output: Any) -> None:
    async def workflow(task: Any, model: Any) -> Any:
        model.call()
        return output

    assert [rollout.reward for rollout in run_one(make_runner(workflow)).rollouts] == [0.5, 0.5]


def test_optional_arguments_are_passed(make_runner: MakeRunner, serving: FakeServing) -> None:
    async def workflow(task: Any, model: Any, auxiliary_models: Any, logger: logging.Logger) -> float:
        return float(auxiliary_models == {} and logger.name == "sharpen.workflow")

    async def judge(task: Any, response: Any, auxiliary_models: Any, logger: logging.Logger) -> float:
        return float(auxiliary_models == {} and logger.name == "sharpen.workflow")

    assert run_one(make_runner(workflow)).rollouts[0].reward == 1.0
    assert run_one(make_runner(workflow, judge)).rollouts[0].reward == 1.0


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (math.nan, "`judge` gave nan as reward"),
        (-math.inf, "`judge` gave -inf as reward"),
        ("0.7", "gave '0.7' (str) as reward: it must be a number"),
        (None, "gave None (NoneType) as reward"),
    ],
)
def test_trap_28_a_judge_that_gives_no_number_is_never_a_reward(
    make_runner: MakeRunner, reward: Any, message: str
) -> None:
    """Red when `_scored` (attempt.py) takes such a value for 0, or lets NaN through."""

    async def judge(task: Any, response: Any) -> Any:
        return SimpleNamespace(reward=reward)

    group = run_one(make_runner(answers, judge, max_attempts=2))
    for rollout in group.rollouts:
        assert (rollout.outcome, rollout.reward) == (Outcome.JUDGE_ERROR, None)
        assert message in str(rollout.error)
    assert len(group.attempts) == 2
    assert group.scored == ()


def test_a_score_without_a_named_reward_is_a_failure_of_who_gave_it(make_runner: MakeRunner) -> None:
    """Red when `_ending_of_reward` takes a metric that is missing for 0, or leaves it to the update."""

    async def scores(task: Any, model: Any) -> WorkflowOutput:
        model.call()
        return WorkflowOutput(reward=1.0, metrics={"exact": 1.0, "form": math.nan})

    for judge, outcome in ((judge_right, Outcome.JUDGE_ERROR), (None, Outcome.WORKFLOW_ERROR)):
        runner = make_runner(answers if judge else scores, judge, needs_metrics=("exact", "form"), max_attempts=1)
        for rollout in run_one(runner).rollouts:
            assert (rollout.outcome, rollout.reward) == (outcome, None)
            assert "gave no finite number as metric 'form'" in str(rollout.error)
    assert run_one(make_runner(answers, judge_right, needs_metrics=("exact",))).rollouts[0].reward == 1.0


def test_trap_28_every_outcome_states_its_cause(make_runner: MakeRunner, serving: FakeServing) -> None:
    """Red when `_failed` (attempt.py) returns one outcome for all, or failures get a reward."""

    async def workflow(task: Any, model: Any) -> Any:
        kind = task["kind"]
        if kind == "overflow":
            model.call(fail=Outcome.CONTEXT_OVERFLOW)
        if kind == "connection":
            raise RuntimeError("agent gave up") from openai.APIConnectionError(request=None)  # type: ignore[arg-type]
        if kind == "workflow":
            return {}["x"]
        if kind == "exit":
            sys.exit(3)
        if kind == "cancel":
            raise asyncio.CancelledError
        if kind == "group":
            async with asyncio.TaskGroup() as group:
                group.create_task(workflow({"kind": "workflow"}, model))
        return WorkflowOutput(response=kind)

    async def judge(task: Any, response: Any) -> Any:
        raise TypeError("argument of type 'NoneType' is not iterable")

    tasks = [make_task(n, kind=kind) for n, kind in enumerate(
        ["overflow", "connection", "workflow", "exit", "cancel", "group", "judge"]
    )]  # fmt: skip
    runner = make_runner(workflow, judge, max_attempts=1, group_size=1)
    groups = runner.run(tasks, group_ids=[task.id for task in tasks])
    outcomes = [group.rollouts[0].outcome for group in groups]
    assert outcomes == [
        Outcome.CONTEXT_OVERFLOW,
        Outcome.INFRASTRUCTURE,
        Outcome.WORKFLOW_ERROR,
        Outcome.WORKFLOW_ERROR,
        Outcome.WORKFLOW_ERROR,
        Outcome.WORKFLOW_ERROR,
        Outcome.JUDGE_ERROR,
    ]
    assert all(group.rollouts[0].reward is None for group in groups)
    error = groups[2].rollouts[0].error
    assert error is not None
    assert error.startswith("KeyError: 'x' (")
    assert error.endswith("in workflow)")
    assert "test_rollout_outcomes.py:" in error


def test_trap_28_infrastructure_that_the_workflow_swallowed_is_no_wrong_answer(make_runner: MakeRunner) -> None:
    """Red when attempt.py no longer looks at `session.failure` after a workflow that returned."""

    async def workflow(task: Any, model: Any) -> Any:
        try:
            model.call(fail=Outcome.INFRASTRUCTURE)
        except RuntimeError:
            return 0.0

    group = run_one(make_runner(workflow, max_attempts=1))
    assert [(rollout.outcome, rollout.reward) for rollout in group.rollouts] == [(Outcome.INFRASTRUCTURE, None)] * 2


def test_what_the_model_caused_gets_the_failure_reward_and_is_not_retried(
    make_runner: MakeRunner, serving: FakeServing
) -> None:
    async def workflow(task: Any, model: Any) -> Any:
        model.call(fail=Outcome.CALL_LIMIT)

    async def swallows(task: Any, model: Any) -> Any:
        try:
            model.call(fail=Outcome.CONTEXT_OVERFLOW)
        except RuntimeError:
            return None

    group = run_one(make_runner(workflow, failure_reward=-1.0))
    assert [(rollout.outcome, rollout.reward) for rollout in group.rollouts] == [(Outcome.CALL_LIMIT, -1.0)] * 2
    group = run_one(make_runner(workflow))
    assert [(rollout.outcome, rollout.reward) for rollout in group.rollouts] == [(Outcome.CALL_LIMIT, None)] * 2
    group = run_one(make_runner(swallows))
    assert [rollout.outcome for rollout in group.rollouts] == [Outcome.CONTEXT_OVERFLOW] * 2
    assert group.attempts == ()


def test_trap_21_failed_rollouts_are_retried_then_excluded_and_siblings_go_on(
    make_runner: MakeRunner, serving: FakeServing
) -> None:
    """Red when `_rollout` (runner.py) stops retrying, or `_attempt` gives a failure the reward 0."""
    tries = {0: 0, 1: 0, 2: 0}

    async def workflow(task: Any, model: Any) -> float:
        index = int(model.rollout_id.rsplit("/", 1)[1])
        tries[index] += 1
        model.call()
        if index == 0 or (index == 1 and tries[1] < 3):
            raise RuntimeError("flaky tool")
        return 1.0

    group = run_one(make_runner(workflow, max_attempts=3), group_size=3)
    assert tries == {0: 3, 1: 3, 2: 1}
    assert [rollout.reward for rollout in group.rollouts] == [None, 1.0, 1.0]
    assert [rollout.attempt for rollout in group.rollouts] == [2, 2, 0]
    assert [rollout.index for rollout in group.scored] == [1, 2]
    assert sorted((rollout.index, rollout.attempt) for rollout in group.attempts) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    sessions = serving.sessions["g/1"]
    assert len({session.noise_seed for session in sessions}) == 1  # a retry repeats, it does not draw anew
    assert [len(rollout.calls) for rollout in group.rollouts] == [1, 1, 1]


def test_serving_that_fails_is_retried(make_runner: MakeRunner, serving: FakeServing) -> None:
    serving.refuse = 1
    group = run_one(make_runner(answers, judge_right))
    assert [rollout.outcome for rollout in group.rollouts] == [Outcome.OK] * 2
    (failed,) = group.attempts
    assert (failed.outcome, failed.calls) == (Outcome.INFRASTRUCTURE, ())
    assert "the engine is down" in str(failed.error)


def test_trap_27_no_call_in_the_agents_name_after_the_workflow_ended(make_runner: MakeRunner) -> None:
    """Red when attempt.py does not close the session before the judge runs."""

    async def workflow(task: Any, model: Any) -> WorkflowOutput:
        model.call()
        return WorkflowOutput(response=model)

    async def judge(task: Any, response: Any) -> float:
        with pytest.raises(ConnectionError, match="revoked"):
            response.call()
        return 1.0

    assert [len(rollout.calls) for rollout in run_one(make_runner(workflow, judge)).rollouts] == [1, 1]


def test_a_missing_field_stops_the_run_with_its_message(make_runner: MakeRunner, serving: FakeServing) -> None:
    async def workflow(task: Any, model: Any) -> Any:
        await asyncio.sleep(0.01)
        return WorkflowOutput(response=task["qestion"])

    tasks = [make_task(n) for n in range(50)]
    tasks = [type(task)(id=task.id, index=task.index, row=Row(task.row)) for task in tasks]
    runner = make_runner(workflow, judge_right, max_concurrent_rollouts=4)
    with pytest.raises(MissingFieldError, match=r"no field 'qestion' \(did you mean 'question'\?\)") as caught:
        runner.run(tasks, group_ids=[task.id for task in tasks])
    assert "read at" in str(caught.value)
    assert len(serving.order) <= 8
    with pytest.raises(DatasetError):
        runner.submit(tasks[0], "later", 0).result()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (None, "returned None (NoneType): return WorkflowOutput"),
        ("4", "returned '4' (str)"),
        (WorkflowOutput(response="4"), "returned no reward and there is no judge_func"),
    ],
)
def test_an_output_of_the_wrong_kind_stops_the_run(make_runner: MakeRunner, output: Any, message: str) -> None:
    async def workflow(task: Any, model: Any) -> Any:
        return output

    with pytest.raises(ConfigError) as caught:
        run_one(make_runner(workflow))
    assert message in str(caught.value)


def test_metrics_that_are_not_numbers_are_skipped_with_one_warning(
    make_runner: MakeRunner, caplog: pytest.LogCaptureFixture
) -> None:
    async def workflow(task: Any, model: Any) -> Any:
        return SimpleNamespace(reward=1.0, metrics={"turns": 2, "note": "fine", "loss": math.nan})

    with caplog.at_level(logging.WARNING, "sharpen.rollout"):
        group = run_one(make_runner(workflow), group_size=8)
    assert all(rollout.metrics == {"turns": 2.0} for rollout in group.rollouts)
    assert sorted(record.getMessage() for record in caplog.records) == [
        "metric 'loss' is nan (float), not a finite number: skipped",
        "metric 'note' is 'fine' (str), not a finite number: skipped",
    ]


def test_a_task_that_is_mutated_harms_nobody(make_runner: MakeRunner) -> None:
    async def workflow(task: Any, model: Any) -> float:
        task["seen"].append(1)
        task["question"] = "mine"
        return float(len(task["seen"]))

    task = make_task(0, question="q", seen=[])
    group = make_runner(workflow).run([task], group_ids=["g"], group_size=4)[0]
    assert [rollout.reward for rollout in group.rollouts] == [1.0] * 4
    assert task.row == {"question": "q", "seen": []}


def test_an_empty_field_is_named_in_the_error(make_runner: MakeRunner) -> None:
    async def workflow(task: Any, model: Any) -> float:
        return float(len(task["answer"]))

    group = make_runner(workflow, max_attempts=1).run([make_task(3, question="q", answer=None)], group_ids=["g"])[0]
    assert "[task train/3 has no value in: answer]" in str(group.rollouts[0].error)
