"""The agent: an Agent of AgentScope 2. Put yours in its place."""

from typing import Any

from agentscope.agent import Agent, InjectionConfig
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionContext, PermissionMode
from agentscope.state import AgentState

from sharpen import WorkflowOutput

SYSTEM = "Answer with the number."


def build_agent(model: OpenAIChatModel) -> Agent:
    """The agent itself. It knows nothing of training; tools go into its `toolkit`, and none may wait for permission,
    since nobody answers during a rollout."""
    return Agent(
        name="solver",
        system_prompt=SYSTEM,
        model=model,
        state=AgentState(permission_context=PermissionContext(mode=PermissionMode.BYPASS)),
        injection_config=InjectionConfig(inject_runtime_state=False),  # else the time of day is in every prompt
    )


async def run_agent(task: dict[str, Any], model: OpenAIChatModel) -> WorkflowOutput:
    """The workflow: run the agent on one task. `model` is AgentScope's own class, and its calls are recorded."""
    answer = await build_agent(model).reply(UserMsg(name="user", content=task["question"]))
    return WorkflowOutput(response=answer.get_text_content())
