"""An agent of Pydantic AI on our model: it raises on output that it cannot use, after asking the model again itself."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI
from pydantic_ai import Agent, ModelRetry, TextOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from sharpen import WorkflowOutput
from sharpen.types import Outcome

TASK = {"question": "2+3", "answer": 5}


def number_in(text: str) -> int:
    """Asks the model again where its text is no number."""
    if not text.strip().isdecimal():
        raise ModelRetry("Answer with a number alone.")
    return int(text)


async def in_process(task: dict[str, Any], model: Any) -> WorkflowOutput:
    return await answer(task, model.name, model.client)


async def over_http(task: dict[str, Any], model: Any) -> WorkflowOutput:
    async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0) as client:
        return await answer(task, model.name, client)


async def answer(task: dict[str, Any], name: str, client: AsyncOpenAI) -> WorkflowOutput:
    model = OpenAIChatModel(name, provider=OpenAIProvider(openai_client=client))
    agent = Agent(model, output_type=TextOutput(number_in), retries=1)
    result = await agent.run(task["question"])
    return WorkflowOutput(reward=float(result.output == task["answer"]), response=result.output)


@pytest.mark.parametrize("workflow", [in_process, over_http])
def test_an_answer_that_it_can_use(rollouts: Any, workflow: Any) -> None:
    (group,) = rollouts("5").run(workflow, tasks=[TASK])
    (rollout,) = group.rollouts
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 1.0), rollout.error
    assert len(rollout.calls) == 1


@pytest.mark.parametrize("failure_reward", [None, 0.0])
def test_output_that_it_raises_on_is_the_models_failure(rollouts: Any, failure_reward: float | None) -> None:
    """Red while it was a `workflow_error`, drawn again until an answer survived: here every answer is bad, so that all
    three attempts were made."""
    served = rollouts("no number")
    (group,) = served.run(in_process, tasks=[TASK], max_attempts=3, failure_reward=failure_reward)
    (rollout,) = group.rollouts
    assert (rollout.outcome, rollout.reward) == (Outcome.UNUSABLE_ANSWER, failure_reward), rollout.error
    assert "UnexpectedModelBehavior" in (rollout.error or "")
    assert group.attempts == ()
    assert len(rollout.calls) == 2  # its own second try is part of the rollout
    assert all(call.trainable for call in rollout.calls)
