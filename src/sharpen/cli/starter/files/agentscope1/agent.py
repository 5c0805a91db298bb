"""The agent: a ReActAgent of AgentScope 1. Put yours in its place."""

from typing import Any

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg
from agentscope.model import OpenAIChatModel

from sharpen import WorkflowOutput

SYSTEM = "Answer with the number."


def build_agent(model: OpenAIChatModel) -> ReActAgent:
    """The agent itself. It knows nothing of training; tools go into its `toolkit`."""
    return ReActAgent(name="solver", sys_prompt=SYSTEM, model=model, formatter=OpenAIChatFormatter())


async def run_agent(task: dict[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
    """The workflow: run the agent on one task. `model` is AgentScope's own class, and its calls are recorded."""
    answer = await build_agent(model).reply(Msg("user", task["question"], "user"))
    return WorkflowOutput(response=answer.get_text_content())
