"""Beginners' mistakes in workflow and judge are named, not only what they led to."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from scripted_serving import MakeRunner, make_task

from sharpen import JudgeOutput, WorkflowOutput
from sharpen.agent.rollout.places import hint, hint_of_model
from sharpen.errors import ConfigError
from sharpen.types import Outcome, Rollout


async def later() -> float:
    return 1.0


def rollouts(make_runner: MakeRunner, workflow: Any, judge: Any = None) -> tuple[Rollout, ...]:
    (group,) = make_runner(workflow, judge, max_attempts=1).run([make_task()], group_ids=["g"])
    return group.rollouts


@pytest.mark.parametrize("output", [later, lambda: WorkflowOutput(response=later())], ids=["output", "response"])
def test_a_workflow_that_returns_a_coroutine_forgot_an_await(make_runner: MakeRunner, output: Any) -> None:
    async def workflow(task: Any, model: Any) -> Any:
        return output()

    async def judge(task: Any, response: Any) -> float:
        return 1.0

    with pytest.raises(ConfigError, match="an `await` is missing in front of what gave this coroutine"):
        rollouts(make_runner, workflow, judge)


def test_a_judge_that_returns_a_coroutine_forgot_an_await(make_runner: MakeRunner) -> None:
    async def workflow(task: Any, model: Any) -> WorkflowOutput:
        return WorkflowOutput(response="x")

    async def judge(task: Any, response: Any) -> Any:
        return later()

    for one in rollouts(make_runner, workflow, judge):
        assert one.outcome == Outcome.JUDGE_ERROR
        assert "as reward: an `await` is missing in front of what gave this coroutine" in str(one.error)


def test_what_is_done_with_a_coroutine_shows_a_forgotten_await(make_runner: MakeRunner) -> None:
    async def workflow(task: Any, model: Any) -> float:
        reply = later()
        try:
            return float(reply.choices)  # type: ignore[attr-defined]
        finally:
            reply.close()

    for one in rollouts(make_runner, workflow):
        assert "'coroutine' object has no attribute 'choices'" in str(one.error)
        assert str(one.error).endswith("[an `await` is missing: this is a coroutine, not its result]")


def test_an_await_of_what_is_none_is_named(make_runner: MakeRunner) -> None:
    async def workflow(task: Any, model: Any) -> float:
        return float(await 1.0)  # type: ignore[misc]

    assert "[this is no async call: leave its `await` out" in str(rollouts(make_runner, workflow)[0].error)


@pytest.mark.parametrize("text", ["1", "0.5", b"1"])
def test_a_reward_that_is_text_is_refused_with_its_type(make_runner: MakeRunner, text: Any) -> None:
    """Red when pydantic makes a number of it: where it comes from a model's answer, '1' may be anything."""

    async def workflow(task: Any, model: Any) -> WorkflowOutput:
        return WorkflowOutput(response="x")

    async def judge(task: Any, response: Any) -> JudgeOutput:
        return JudgeOutput(reward=text)

    async def plain(task: Any, response: Any) -> Any:
        return text

    kind = type(text).__name__
    for one in rollouts(make_runner, workflow, judge):
        assert one.outcome == Outcome.JUDGE_ERROR
        assert f"a reward is a number, and {text!r} is text ({kind})" in str(one.error)
    for one in rollouts(make_runner, workflow, plain):
        assert (one.outcome, f"gave {text!r} ({kind}) as reward" in str(one.error)) == (Outcome.JUDGE_ERROR, True)
    with pytest.raises(ValueError, match="a reward is a number"):
        WorkflowOutput(reward=text)
    assert JudgeOutput(reward=True).reward == WorkflowOutput(reward=1).reward == 1.0


def test_a_refused_connection_names_the_address_and_the_models() -> None:
    request = httpx.Request("POST", "http://user:secret1234@localhost:11434/v1/chat/completions")
    text = hint(openai.APIConnectionError(request=request), Outcome.INFRASTRUCTURE)
    assert text.startswith(" [no server answered at http://")
    assert "localhost:11434/v1/chat/completions: an agent that asks the model there" in text
    assert "base_url=model.base_url" in text
    assert "secret1234" not in text
    assert "base_url=model.base_url" in hint(ConnectionRefusedError(111, "refused"), Outcome.INFRASTRUCTURE)
    assert "base_url=model.base_url" in hint(httpx.ConnectError("refused"), Outcome.INFRASTRUCTURE)
    answered = openai.InternalServerError("overloaded", response=httpx.Response(500, request=request), body=None)
    assert hint(answered, Outcome.INFRASTRUCTURE) == ""
    assert hint(ConnectionError("down"), Outcome.INFRASTRUCTURE) == ""


def test_a_prompt_that_is_too_long_names_the_setting() -> None:
    assert "model.max_model_len" in hint_of_model(Outcome.CONTEXT_OVERFLOW)
    assert hint_of_model(Outcome.UNUSABLE_ANSWER) == ""


def test_a_client_of_the_agents_own_that_reaches_no_server_is_told_so(make_runner: MakeRunner) -> None:
    async def workflow(task: Any, model: Any) -> float:
        raise openai.APIConnectionError(request=httpx.Request("POST", "http://localhost:9/v1"))

    (one, *_) = rollouts(make_runner, workflow)
    assert one.outcome == Outcome.INFRASTRUCTURE
    assert "[no server answered at http://localhost:9/v1: an agent that asks the model there" in str(one.error)
