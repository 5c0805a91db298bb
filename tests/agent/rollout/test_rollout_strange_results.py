"""Whatever one rollout returns or raises is that rollout's failure: its siblings and the run continue."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scripted_serving import MakeRunner, make_task

from sharpen.config.public import WorkflowOutput
from sharpen.config.rows import MissingFieldError, Row
from sharpen.errors import ConfigError
from sharpen.types import Group, Outcome, Rollout, Task


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Unreadable:
    """Every way of reading it raises."""

    @property
    def reward(self) -> float:
        raise SystemExit(3)

    def __repr__(self) -> str:
        raise ZeroDivisionError


def raised(error: BaseException) -> Callable[[], Any]:
    def give() -> Any:
        raise error

    return give


def in_circles() -> Exception:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    first.__context__, second.__context__ = first, second
    return first


def long_chain() -> Exception:
    error = ValueError("the first")
    for number in range(3000):
        later = ValueError(f"{number}")
        later.__cause__ = error
        error = later
    return error


STRANGE: dict[str, Callable[[], Any]] = {
    "an exception that causes itself": raised(in_circles()),
    "thousands of causes": raised(long_chain()),
    "an exception without words": raised(Wordless()),
    "a group of them": raised(BaseExceptionGroup("several", [Wordless(), KeyboardInterrupt()])),
    "half a character": raised(ValueError("\ud800")),
    "the end of the process": raised(SystemExit(0)),
    "a cancellation that nobody asked for": raised(asyncio.CancelledError()),
    "an object that cannot be read": Unreadable,
    "a huge integer": lambda: 10**400,
    "a huge number": lambda: 1e300,
    "no number": lambda: float("nan"),
    "a number of numpy": lambda: np.float64(-np.inf),
    "a nested list": lambda: SimpleNamespace(reward=[[1.0]]),
    "an agent's huge reward": lambda: WorkflowOutput(reward=1.0, call_rewards={"writer": 1e300}),
    "the rewards of calls are no numbers": lambda: SimpleNamespace(reward=1.0, call_rewards={0: "much"}),
    "the rewards of calls are no mapping": lambda: SimpleNamespace(reward=1.0, call_rewards=7),
    "a state that is no text": lambda: SimpleNamespace(reward=1.0, states={0: object()}),
    "nothing": lambda: None,
}


def spoilt(give: Callable[[], Any]) -> Callable[..., Any]:
    """A workflow that does well on the first task, and gives something strange on the second."""

    async def workflow(task: Any, model: Any) -> Any:
        model.call()
        return 1.0 if task["question"] == "q0" else give()

    return workflow


def two_groups(runner: Any) -> list[Group]:
    first = runner.run([make_task(0)], group_ids=["g0"])
    return [*first, *runner.run([make_task(1)], group_ids=["g1"])]


def check_stored(rollout: Rollout) -> None:
    """What run.db and the reports take: UTF-8 and finite numbers."""
    for text in (rollout.error or "", rollout.traceback or "", *rollout.metrics):
        text.encode()
    json.dumps(dict(rollout.metrics), allow_nan=False)


@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_end_is_one_failed_rollout(make_runner: MakeRunner, name: str) -> None:
    """Red before for half of these: the run ended, with the error of a `__str__`, of a property or of `float`."""
    good, bad = two_groups(make_runner(spoilt(STRANGE[name]), max_attempts=1))
    assert [rollout.reward for rollout in good.rollouts] == [1.0, 1.0]
    for rollout in bad.rollouts:
        assert (rollout.outcome, rollout.reward, len(rollout.calls)) == (Outcome.WORKFLOW_ERROR, None, 1)
        assert rollout.error
        check_stored(rollout)


OF_WORKFLOWS = ("agent's", "calls", "state")


@pytest.mark.parametrize("name", [name for name in STRANGE if not any(word in name for word in OF_WORKFLOWS)])
def test_a_judges_strange_end_is_one_failed_rollout(make_runner: MakeRunner, name: str) -> None:
    async def workflow(task: Any, model: Any) -> WorkflowOutput:
        return WorkflowOutput(response=model.call())

    judge = spoilt(STRANGE[name])

    async def judged(task: Any, response: Any) -> Any:
        return await judge(task, SimpleNamespace(call=lambda: None))

    _, bad = two_groups(make_runner(workflow, judged, max_attempts=1))
    for rollout in bad.rollouts:
        assert (rollout.outcome, rollout.reward) == (Outcome.JUDGE_ERROR, None)
        check_stored(rollout)


def test_strange_metrics_are_left_out_and_stored_ones_can_be_stored(make_runner: MakeRunner) -> None:
    class Cyclic:
        pass

    response = Cyclic()
    response.content = response  # type: ignore[attr-defined]
    metrics = {
        "half \ud800": 1,
        "x" * 5000: 2.0,
        7: 1.0,
        None: 1.0,
        "huge": 10**400,
        "none": None,
        "true": True,
        "numpy": np.float32(0.5),
        "object": Unreadable(),
    }

    async def workflow(task: Any, model: Any) -> Any:
        return SimpleNamespace(reward=0.5, response=response, metrics=metrics)

    for rollout in make_runner(workflow).run([make_task()], group_ids=["g"])[0].rollouts:
        assert rollout.reward == 0.5
        check_stored(rollout)
        assert rollout.metrics == {"half \\ud800": 1.0, "x" * 200: 2.0, "true": 1.0, "numpy": 0.5}


def test_bad_input_of_one_task_is_its_failure_once_another_went_well(make_runner: MakeRunner) -> None:
    """Red before: one row without a field ended the run, whatever had been learnt."""

    async def workflow(task: Any, model: Any) -> float:
        return float(task["answer"])

    def task(number: int, **row: Any) -> Task:
        return Task(id=f"train/{number}", index=number, row=Row(row))

    runner = make_runner(workflow, max_attempts=1)
    runner.run([task(0, answer=1)], group_ids=["g0"])
    (group,) = runner.run([task(1, question="x")], group_ids=["g1"])
    assert {rollout.outcome for rollout in group.rollouts} == {Outcome.WORKFLOW_ERROR}
    assert "no field 'answer'" in str(group.rollouts[0].error)
    with pytest.raises(MissingFieldError, match="no field 'answer'"):
        make_runner(workflow).run([task(1, question="x")], group_ids=["g1"])


def test_a_field_that_only_the_judge_misses_is_the_judges_failure(make_runner: MakeRunner) -> None:
    """Red when it counts as the workflow's: an evaluation would count it against the agent."""

    async def workflow(task: Any, model: Any) -> WorkflowOutput:
        return WorkflowOutput(response=model.call())

    async def judge(task: Any, response: Any) -> float:
        return float(task["answer"])

    runner = make_runner(workflow, judge, max_attempts=1)
    runner.run([make_task(0)], group_ids=["g0"])
    (group,) = runner.run([Task(id="train/1", index=1, row=Row(question="x"))], group_ids=["g1"])
    assert {rollout.outcome for rollout in group.rollouts} == {Outcome.JUDGE_ERROR}


def test_an_evaluation_set_has_a_contract_of_its_own(make_runner: MakeRunner) -> None:
    async def workflow(task: Any, model: Any) -> Any:
        return 1.0 if task["question"] == "q0" else None

    runner = make_runner(workflow)
    runner.run([make_task(0)], group_ids=["g0"])
    further = Task(id="hard/0", index=0, row={"question": "q1"}, task_set="hard")
    with pytest.raises(ConfigError, match="returned None"):
        runner.run([further], group_ids=["g1"])
