"""The quickstart's agent with a system prompt that can be tuned."""

from typing import Any

from quickstart.agent import solve

from sharpen import WorkflowOutput


async def run_agent(task: dict[str, Any], system_prompt: str, model: Any) -> WorkflowOutput:
    """The workflow: one run of the agent on one task, under a system prompt."""
    return WorkflowOutput(response=await solve(model.client, model.name, task["question"], system_prompt))
