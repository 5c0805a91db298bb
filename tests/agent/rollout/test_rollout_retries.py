"""Failures on the model's own text are the model's; a retry repeats its answer and never chooses another one unseen."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from scripted_serving import FakeServing, MakeRunner, make_call, make_task

from sharpen import UnusableAnswerError
from sharpen.agent.rollout.places import KNOWN
from sharpen.agent.rollout.retries import replacements
from sharpen.agent.rollout.statistics import check_excluded, summarize
from sharpen.config.functions import import_function
from sharpen.config.run import RolloutConfig
from sharpen.errors import ConfigError, RolloutError
from sharpen.types import CallStatus, Group, Outcome, Rollout


def run_one(runner: Any, **arguments: Any) -> Group:
    group: Group = runner.run([make_task()], group_ids=["g"], **arguments)[0]
    return group


def coin(model: Any) -> int:
    """One of two answers, as the rollout's noise falls."""
    answer = model.noise_seed % 2
    model.call(sampled_ids_S=np.array([answer, 7], np.int32))
    return int(answer)


async def breaks_on_one_of_two_answers(task: Any, model: Any) -> float:
    if coin(model):
        raise KeyError("the answer has no field 'x'")
    return 1.0


def test_trap_33_a_retry_repeats_the_answer_that_failed(make_runner: MakeRunner) -> None:
    """Red when `noise_seed` (runner.py) takes the attempt: all 16 survive, each that failed drawn until it suits."""
    group = run_one(make_runner(breaks_on_one_of_two_answers, max_attempts=3), group_size=16)
    answers = [int(rollout.calls[0].sampled_ids_S[0]) for rollout in group.rollouts]
    assert {0, 1} == set(answers)
    assert [rollout.outcome for rollout in group.rollouts] == [
        Outcome.WORKFLOW_ERROR if answer else Outcome.OK for answer in answers
    ]
    assert len(group.attempts) == 2 * sum(answers)
    assert list(replacements(group)) == []
    found = summarize([group])
    assert found.num_excluded == sum(answers)
    note = f"{sum(answers)} of 16 rollouts excluded ({sum(answers)} workflow_error)"
    assert note in found.notes()
    assert any("name it in rollout.model_exceptions" in line for line in found.notes())
    with pytest.raises(RolloutError, match=r"name it in rollout\.model_exceptions"):
        check_excluded([group], sum(answers) / 16 - 0.01)


def test_a_tool_that_fails_once_costs_the_model_nothing(make_runner: MakeRunner) -> None:
    """The retry goes on from the same answer: nothing was chosen."""
    tries: dict[str, int] = {}

    async def flaky(task: Any, model: Any) -> float:
        answer = coin(model)
        tries[model.rollout_id] = tries.get(model.rollout_id, 0) + 1
        if tries[model.rollout_id] == 1:
            raise OSError("disk full")
        model.call()
        return float(answer)

    group = run_one(make_runner(flaky), group_size=8)
    assert [rollout.outcome for rollout in group.rollouts] == [Outcome.OK] * 8
    found = summarize([group])
    assert (found.retries, found.num_replaced) == ({Outcome.WORKFLOW_ERROR: 8}, 0)
    check_excluded([group], 0.0)


def attempt(index: int, number: int, outcome: Outcome, *answers: int, **changes: Any) -> Rollout:
    values: dict[str, Any] = {
        "id": f"g/{index}",
        "group_id": "g",
        "task_id": "train/0",
        "index": index,
        "attempt": number,
        "calls": tuple(make_call(n, sampled_ids_S=np.array([answer], np.int32)) for n, answer in enumerate(answers)),
        "outcome": outcome,
        "reward": 1.0 if outcome == Outcome.OK else None,
        "error": None if outcome == Outcome.OK else "KeyError: 'x'",
    }
    return Rollout(**{**values, **changes})


def test_trap_33_what_retries_replace_is_counted_by_task_shown_and_bounded() -> None:
    """Red when `replacements` (retries.py) yields nothing, or `check_excluded` (statistics.py) omits its share."""
    error, other = Outcome.WORKFLOW_ERROR, Outcome.INFRASTRUCTURE
    group = Group(
        id="g",
        task=make_task(),
        version=0,
        rollouts=(
            attempt(0, 2, Outcome.OK, 5, 6),  # the first attempt's answer, but not the second's
            attempt(1, 1, Outcome.OK, 5, 6),  # the same answer, and one more
            attempt(2, 1, Outcome.OK, 5),  # other answers, but a server was down: nothing of the model's
            attempt(3, 1, Outcome.OK, 5),  # nothing had been answered
            attempt(4, 1, error, 5),  # failed twice: excluded, not replaced
            attempt(5, 1, Outcome.OK, 5),  # its process died with whatever was answered
            attempt(6, 1, Outcome.OK, 5),  # what the agent never saw is no answer
            attempt(7, 0, Outcome.OK, 5),
        ),
        attempts=(
            attempt(0, 0, error, 5),
            attempt(0, 1, Outcome.JUDGE_ERROR, 4),
            attempt(1, 0, error, 5),
            attempt(2, 0, other, 4),
            attempt(3, 0, error),
            attempt(4, 0, error, 4),
            attempt(5, 0, Outcome.BLOCKED_LOOP, unrecorded_answers=None),
            attempt(6, 0, Outcome.TIMEOUT, calls=(make_call(0, 9, status=CallStatus.ABANDONED),)),
        ),
    )
    assert [(failed.id, failed.attempt) for failed, _ in replacements(group)] == [("g/0", 1), ("g/5", 0)]
    found = summarize([group])
    assert found.replaced == {Outcome.JUDGE_ERROR: 1, Outcome.BLOCKED_LOOP: 1}
    assert found.replaced_by_task == {"train/0": 0.25}
    assert found.metrics()["rollout/replaced_share"] == 0.25
    assert found.metrics()["rollout/worst_task_replaced_share"] == 0.25
    assert (
        "2 of 8 rollouts replaced by a retry that gave other answers (1 judge_error, 1 blocked_loop)" in found.notes()
    )
    check_excluded([group], 0.375)
    with pytest.raises(RolloutError, match="1 of 8 rollouts have no reward, and 2 were replaced by a retry"):
        check_excluded([group], 0.374)


@pytest.mark.parametrize("evaluation", [False, True])
def test_an_answer_that_user_code_calls_unusable_is_not_retried(make_runner: MakeRunner, evaluation: bool) -> None:
    """Raised in the workflow, in a tool behind a framework's own error, in the judge: it gets the failure reward."""

    async def workflow(task: Any, model: Any) -> Any:
        model.call()
        if task["kind"] == "workflow":
            raise UnusableAnswerError("no JSON")
        if task["kind"] == "tool":
            try:
                raise UnusableAnswerError("no such city")
            except UnusableAnswerError:
                raise RuntimeError("tool failed")  # noqa: B904  frameworks do
        if task["kind"] == "url":
            raise UnusableAnswerError("a link to nowhere") from httpx.ConnectError("no such host")
        return type("Output", (), {"response": "4", "reward": None})

    async def judge(task: Any, response: Any) -> float:
        raise UnusableAnswerError("nothing to read")

    tasks = [make_task(n, kind=kind) for n, kind in enumerate(["workflow", "tool", "url", "judge"])]
    runner = make_runner(workflow, judge, group_size=1, failure_reward=-1.0)
    for group in runner.run(tasks, group_ids=[task.id for task in tasks], evaluation=evaluation):
        (rollout,) = group.rollouts
        assert (rollout.outcome, rollout.reward, group.attempts) == (Outcome.UNUSABLE_ANSWER, -1.0, ())
    found = summarize(runner.run(tasks, group_ids=[task.id for task in tasks]))
    assert found.notes() == ["4 of 4 rollouts got failure_reward for the model's failure (4 unusable_answer)"]


def framework(name: str, *classes: str, base: type[Exception] = Exception) -> ModuleType:
    """A package as frameworks are made: classes defined deep inside, re-exported at the top."""
    inner, top = ModuleType(f"{name}.deep.errors"), ModuleType(name)
    for kind in classes:
        made = type(kind, (base,), {"__module__": inner.__name__})
        setattr(inner, kind, made)
        setattr(top, kind, made)
    return top


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_known_frameworks_errors_on_bad_output_are_the_models(make_runner: MakeRunner, name: str) -> None:
    """Told by package and class, wherever in the package the class is, also for subclasses."""
    package, _, kind = name.partition(".")
    error = type("Finer", (getattr(framework(package, kind), kind),), {"__module__": "elsewhere"})

    async def workflow(task: Any, model: Any) -> Any:
        model.call()
        raise error("bad output")

    group = run_one(make_runner(workflow, group_size=1))
    assert (group.rollouts[0].outcome, group.attempts) == (KNOWN[name], ())


def test_the_page_on_failures_lists_what_is_known() -> None:
    page = (Path(__file__).parents[3] / "docs" / "use" / "failures.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (`\w+\.\w+`.*) \|$", page, re.MULTILINE)
    assert {name: outcome for outcome, row in rows for name in re.findall(r"`(\w+\.\w+)`", row)} == dict(KNOWN)
    assert {outcome.value for outcome in Outcome} <= set(re.findall(r"`(\w+)`", page))


def test_an_exception_of_a_file_is_named_by_the_file(make_runner: MakeRunner, tmp_path: Path) -> None:
    """Such modules have a name of ours, which nobody knows."""
    (tmp_path / "shop_agent.py").write_text(
        "class NoOrder(Exception): pass\nasync def run(task, model):\n    raise NoOrder('nothing ordered')\n"
    )
    workflow = import_function(f"{tmp_path / 'shop_agent.py'}:run")
    runner = make_runner(workflow, group_size=1, model_exceptions=["shop_agent.NoOrder"])
    assert run_one(runner).rollouts[0].outcome == Outcome.UNUSABLE_ANSWER


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("myagent.ParseError", Outcome.UNUSABLE_ANSWER),
        ("myagent.deep.errors.ParseError", Outcome.UNUSABLE_ANSWER),
        ("builtins.ArithmeticError", Outcome.UNUSABLE_ANSWER),
        ("myagent.other.ParseError", Outcome.WORKFLOW_ERROR),
        ("myagent.Lost", Outcome.WORKFLOW_ERROR),
    ],
)
def test_exceptions_are_named_in_the_settings(make_runner: MakeRunner, name: str, outcome: Outcome) -> None:
    """By package and class, by where they are defined, by a base; also where another exception hides them."""
    error = framework("myagent", "ParseError", base=ZeroDivisionError).ParseError

    async def workflow(task: Any, model: Any) -> Any:
        model.call()
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())

    async def fails() -> None:
        raise RuntimeError("the step failed") from error("bad")

    runner = make_runner(workflow, group_size=1, max_attempts=1, model_exceptions=[name])
    assert run_one(runner).rollouts[0].outcome == outcome


def test_an_exception_is_named_by_where_it_is_imported_from(make_runner: MakeRunner) -> None:
    """`myagent.api.ParseError` is the class behind it, wherever that is defined."""
    deep = framework("myagent", "ParseError")
    public = ModuleType("myagent.api")
    vars(public)["ParseError"] = deep.ParseError
    sys.modules["myagent.api"] = public

    async def workflow(task: Any, model: Any) -> Any:
        raise deep.ParseError("bad")

    try:
        runner = make_runner(workflow, group_size=1, model_exceptions=["myagent.api.ParseError"])
        assert run_one(runner).rollouts[0].outcome == Outcome.UNUSABLE_ANSWER
    finally:
        del sys.modules["myagent.api"]


def test_servers_that_are_down_are_not_the_models_doing(make_runner: MakeRunner) -> None:
    """Also where a framework makes its own error of it; a judge's framework speaks of the judge's model."""
    error = framework("pydantic_ai", "UnexpectedModelBehavior").UnexpectedModelBehavior

    async def workflow(task: Any, model: Any) -> Any:
        model.call()
        if task["kind"] == "down":
            raise error("exceeded retries") from openai.APIConnectionError(request=None)  # type: ignore[arg-type]
        if task["kind"] == "gateway":
            try:
                model.call(fail=Outcome.INFRASTRUCTURE)
            except RuntimeError:
                raise UnusableAnswerError("no answer") from None
        return type("Output", (), {"response": "4", "reward": None})

    async def judge(task: Any, response: Any) -> float:
        raise error("the judge's model gave no score")

    tasks = [make_task(n, kind=kind) for n, kind in enumerate(["down", "gateway", "judge"])]
    runner = make_runner(workflow, judge, group_size=1, max_attempts=2, failure_reward=0.0)
    groups = runner.run(tasks, group_ids=[task.id for task in tasks])
    assert [group.rollouts[0].outcome for group in groups] == [
        Outcome.INFRASTRUCTURE,
        Outcome.INFRASTRUCTURE,
        Outcome.JUDGE_ERROR,
    ]
    assert [len(group.attempts) for group in groups] == [1, 1, 1]


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [
        ("plain", Outcome.TOKEN_LIMIT),
        ("unusable", Outcome.TOKEN_LIMIT),
        ("turns", Outcome.CALL_LIMIT),
        ("tool", Outcome.INFRASTRUCTURE),
        ("disk", Outcome.WORKFLOW_ERROR),
        ("goes on", Outcome.WORKFLOW_ERROR),
        ("fine", Outcome.OK),
    ],
)
def test_a_failure_on_a_truncated_answer_is_a_token_limit(make_runner: MakeRunner, kind: str, outcome: Outcome) -> None:
    """The last answer counts, and only if the workflow raised on it."""
    turns = framework("agents", "MaxTurnsExceeded").MaxTurnsExceeded

    async def workflow(task: Any, model: Any) -> float:
        model.call(finish_reason="length")
        if kind == "goes on":
            model.call()
        errors = {
            "unusable": UnusableAnswerError("cut"),
            "turns": turns("10"),
            "tool": ConnectionError("down"),
            "disk": OSError("full"),
        }
        if kind != "fine":
            raise errors.get(kind, ValueError("unterminated string"))
        return 1.0

    rollout = run_one(make_runner(workflow, group_size=1, max_attempts=1)).rollouts[0]
    assert rollout.outcome == outcome


def test_trap_33_an_evaluation_repeats_nothing_that_the_model_may_have_caused(
    make_runner: MakeRunner, serving: FakeServing
) -> None:
    """Red when `is_final` (retries.py) does not look at `evaluation`."""
    serving.recorded = False

    async def workflow(task: Any, model: Any) -> Any:
        if task["kind"] == "before":
            raise KeyError("x")
        model.call()
        if task["kind"] == "after":
            raise KeyError("x")
        if task["kind"] == "down":
            raise ConnectionError("the search engine is down")
        if task["kind"] == "hangs":
            await asyncio.Event().wait()
        return type("Output", (), {"response": task["kind"], "reward": None})

    async def judge(task: Any, response: Any) -> float:
        raise ConnectionError("down") if response == "judge down" else TypeError("NoneType")

    kinds = {"before": 2, "after": 0, "down": 2, "hangs": 0, "judge": 0, "judge down": 2}
    tasks = [make_task(n, kind=kind) for n, kind in enumerate(kinds)]
    for timeout_s in (0.3, 3.0, 30.0):  # a loaded machine may need longer for what does not hang
        runner = make_runner(workflow, judge, group_size=1, timeout_s=timeout_s)
        groups = runner.run(tasks, group_ids=[task.id for task in tasks], evaluation=True)
        if [group.rollouts[0].outcome for group in groups].count(Outcome.TIMEOUT) == 1:
            break
    assert [len(group.attempts) for group in groups] == list(kinds.values())
    assert [group.rollouts[0].num_answers for group in groups] == [0, 1, 1, 1, 1, 1]
    assert all(group.rollouts[0].calls == () for group in groups)
    training = runner.run(tasks[1:2], group_ids=["again"])
    assert len(training[0].attempts) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("MaxTurnsExceeded", "must name exceptions as package.Class"),
        ("agents.", "must name exceptions as package.Class"),
        ("agents.Max Turns", "must name exceptions as package.Class"),
        ("builtins.ValueErorr", "'builtins.ValueErorr' is not an exception of Python"),
        ("builtins.Exception", "covers every failure, also those that the model did not cause"),
    ],
)
def test_a_name_that_can_mean_no_exception_or_all_of_them_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RolloutConfig(model_exceptions=["agents.MaxTurnsExceeded", name])
