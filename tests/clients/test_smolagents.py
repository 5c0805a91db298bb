"""Agents of smolagents on our model, over HTTP: tools as tool calls, and tools as code.

They write every step anew as text of theirs before they send it back, so that each call starts a sequence of its own.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agent_scripts import call, turns
from framework_checks import check_records
from smolagents import CodeAgent, LogLevel, OpenAIServerModel, ToolCallingAgent, tool

from sharpen import WorkflowOutput
from sharpen.types import Outcome

ADD_AS_CODE = "Thought: I add.\n<code>\nprint(add(2, 3))\n</code>"
SAYS = {
    ToolCallingAgent: turns(call("add", '{"a": 2, "b": 3}'), call("final_answer", '{"answer": "5"}')),
    CodeAgent: turns(ADD_AS_CODE, "<code>\nfinal_answer(5)\n</code>"),
}


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One number.
        b: The other number.
    """
    return a + b


def workflow_of(agent_class: Any, stream: bool) -> Any:
    def ask(task: dict[str, Any], model: Any) -> WorkflowOutput:
        url, options = model.base_url, {"max_retries": 0}
        chat = OpenAIServerModel(model.name, api_base=url, api_key=model.api_key, client_kwargs=options)
        agent = agent_class(tools=[add], model=chat, max_steps=2, verbosity_level=LogLevel.OFF, stream_outputs=stream)
        answer = str(agent.run(task["question"]))
        return WorkflowOutput(reward=float(answer == task["answer"]), response=answer)

    async def workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
        return await asyncio.to_thread(ask, task, model)

    return workflow


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize("agent_class", SAYS, ids=lambda agent: agent.__name__)
def test_each_step_is_a_sequence_of_its_own(rollouts: Any, agent_class: Any, stream: bool) -> None:
    served = rollouts(SAYS[agent_class])
    tasks = [{"question": "2+3", "answer": "5"}]
    (rollout,) = check_records(served.engine, served.run(workflow_of(agent_class, stream), tasks=tasks))
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 1.0), rollout.error
    assert [each.parent for each in rollout.calls] == [None, None]
    assert "Observation:" in rollout.calls[0].sampling.stop


def test_at_its_limit_of_steps_it_asks_once_more(rollouts: Any) -> None:
    """No exception: the answer is what the model says to a prompt that the agent makes for it."""
    served = rollouts(lambda prompt: "It is 7." if "give an answer" in prompt else call("add", '{"a": 2, "b": 3}'))
    tasks = [{"question": "2+3", "answer": "5"}]
    (rollout,) = check_records(served.engine, served.run(workflow_of(ToolCallingAgent, False), tasks=tasks))
    assert (rollout.outcome, rollout.reward) == (Outcome.OK, 0.0), rollout.error
    assert len(rollout.calls) == 3
    assert rollout.calls[-1].tools == ()
