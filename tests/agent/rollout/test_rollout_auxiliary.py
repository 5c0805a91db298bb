"""Auxiliary models within an attempt: until when they may be called, whose failure is whose, and what a cap does."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import time
from typing import Any

import pytest
from scripted_serving import FakeServing, MakeRunner, make_task

from sharpen.agent.rollout.statistics import summarize
from sharpen.config.public import WorkflowOutput
from sharpen.errors import RolloutError, TokenCapError
from sharpen.types import Group, Outcome


@pytest.fixture(autouse=True)
def helper(serving: FakeServing) -> None:
    serving.helpers = ("helper",)


def run_one(runner: Any, **arguments: Any) -> Group:
    return runner.run([make_task()], group_ids=["g"], **arguments)[0]


async def answers(task: Any, model: Any) -> WorkflowOutput:
    model.call()
    return WorkflowOutput(response=model)


def test_the_judge_may_call_them_when_the_policy_is_closed(make_runner: MakeRunner) -> None:
    async def workflow(task: Any, model: Any, auxiliary_models: Any) -> WorkflowOutput:
        auxiliary_models["helper"].call()
        model.call()
        return WorkflowOutput(response=model)

    async def judge(task: Any, response: Any, auxiliary_models: Any) -> float:
        with pytest.raises(ConnectionError, match="revoked"):
            response.call()
        return float(auxiliary_models["helper"].call() == "good")

    group = run_one(make_runner(workflow, judge))
    for rollout in group.rollouts:
        assert (rollout.outcome, rollout.reward) == (Outcome.OK, 1.0)
        assert len(rollout.calls) == 1  # the policy's alone
        assert rollout.metrics == {"auxiliary/helper/calls": 2.0}
    metrics = summarize([group]).metrics()
    assert metrics["auxiliary/helper/calls"] == 2.0
    assert metrics["auxiliary/helper/calls_total"] == 4.0


def test_a_workflow_that_calls_one_after_the_judge_is_refused(make_runner: MakeRunner) -> None:
    refused: list[BaseException] = []
    late: list[asyncio.Task[None]] = []
    judged = asyncio.Event()

    async def workflow(task: Any, model: Any, auxiliary_models: Any) -> WorkflowOutput:
        async def later() -> None:
            await judged.wait()
            await asyncio.sleep(0.05)
            try:
                auxiliary_models["helper"].call()
            except PermissionError as error:
                refused.append(error)

        late.append(asyncio.create_task(later()))
        return WorkflowOutput(response="4")

    async def judge(task: Any, response: Any) -> float:
        judged.set()
        return 1.0

    runner = make_runner(workflow, judge)
    assert run_one(runner, group_size=1).rollouts[0].metrics == {"auxiliary/helper/calls": 0.0}

    deadline = time.monotonic() + 120
    while not refused and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(refused) == 1


def test_each_attempt_has_objects_of_its_own(make_runner: MakeRunner) -> None:
    seen: list[Any] = []

    async def workflow(task: Any, model: Any, auxiliary_models: Any) -> float:
        seen.append(auxiliary_models["helper"])
        fails = len(seen) <= 2
        auxiliary_models.clear()
        await asyncio.sleep(0.01)
        if fails:
            raise RuntimeError("flaky")
        return 1.0

    group = run_one(make_runner(workflow))
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 1.0]
    assert len({id(one) for one in seen}) == len(seen) == 4


def test_none_configured_is_an_empty_dict_and_workflow_args_are_copies(
    make_runner: MakeRunner, serving: FakeServing
) -> None:
    serving.helpers = ()
    seen: list[Any] = []

    async def workflow(task: Any, model: Any, auxiliary_models: Any, workflow_args: Any) -> WorkflowOutput:
        seen.append((auxiliary_models, copy.deepcopy(workflow_args)))
        workflow_args["tools"].append("mine")
        return WorkflowOutput(response="4")

    async def judge(task: Any, response: Any, auxiliary_models: Any, workflow_args: Any) -> float:
        return float(auxiliary_models == {} and workflow_args == {"tools": ["calculator"]})

    runner = make_runner(workflow, judge, workflow_args={"tools": ["calculator"]})
    assert [rollout.reward for rollout in run_one(runner).rollouts] == [1.0, 1.0]
    assert seen[0][0] == {}
    assert seen[0][1] == seen[1][1] == {"tools": ["calculator"]}


def test_workflow_args_are_in_the_task_where_the_dataset_has_no_field_of_that_name(make_runner: MakeRunner) -> None:
    """Red where a sample's `task.get("workflow_args", {})` finds nothing: it plays the other side than was set."""
    seen: list[Any] = []

    async def workflow(task: Any, model: Any) -> WorkflowOutput:
        seen.append(copy.deepcopy(task.get("workflow_args")))
        task.get("workflow_args", {}).pop("side", None)
        return WorkflowOutput(response=model.call())

    async def judge(task: Any, response: Any) -> float:
        seen.append(task.get("workflow_args"))
        return 1.0

    def ran(row: Any, arguments: Any) -> list[Any]:
        seen.clear()
        task = dataclasses.replace(make_task(), row={**make_task().row, **row})
        make_runner(workflow, judge, group_size=1, workflow_args=arguments).run([task], group_ids=["g"])
        return [*seen]

    given = {"side": "good"}
    assert ran({}, given) == [{"side": "good"}, {}]
    assert given == {"side": "good"}
    assert ran({"workflow_args": {"side": "bad"}}, given) == [{"side": "bad"}, {}]
    assert ran({}, {}) == [None, None]


@pytest.mark.parametrize("swallow", [False, True])
@pytest.mark.parametrize("where", ["workflow", "judge"])
def test_trap_28_a_failing_auxiliary_model_is_never_a_reward(
    make_runner: MakeRunner, where: str, swallow: bool
) -> None:
    """Red when attempt.py does not look at `session.auxiliary_failure`."""

    async def use(auxiliary_models: Any) -> None:
        try:
            auxiliary_models["helper"].call(fail=True)
        except RuntimeError:
            if not swallow:
                raise

    async def workflow(task: Any, model: Any, auxiliary_models: Any) -> WorkflowOutput:
        if where == "workflow":
            await use(auxiliary_models)
        return WorkflowOutput(response="4")

    async def judge(task: Any, response: Any, auxiliary_models: Any) -> float:
        if where == "judge":
            await use(auxiliary_models)
        return 0.0

    group = run_one(make_runner(workflow, judge, max_attempts=2, failure_reward=-1.0))
    expected = Outcome.INFRASTRUCTURE if where == "workflow" else Outcome.JUDGE_ERROR
    assert [(rollout.outcome, rollout.reward) for rollout in group.rollouts] == [(expected, None)] * 2
    assert len(group.attempts) == 2
    if swallow:
        assert "the auxiliary model 'helper' failed: scripted" in str(group.rollouts[0].error)


@pytest.mark.parametrize("swallow", [False, True])
def test_tokens_used_up_stop_the_run_with_their_own_error(make_runner: MakeRunner, swallow: bool) -> None:
    async def judge(task: Any, response: Any, auxiliary_models: Any) -> float:
        try:
            auxiliary_models["helper"].call(exhaust=task["number"] == 3)
        except RuntimeError:
            if not swallow:
                raise
        return 0.0

    runner = make_runner(answers, judge, max_concurrent_rollouts=1)
    tasks = [make_task(n, number=n) for n in range(8)]
    with pytest.raises(TokenCapError, match="helper has used 10 tokens") as caught:
        runner.run(tasks, group_ids=[task.id for task in tasks])
    assert isinstance(caught.value, RolloutError)
    with pytest.raises(TokenCapError):
        runner.submit(tasks[0], "later", 0).result()
