from __future__ import annotations


async def workflow_function(
    task: Dict,
    model: TrinityChatModel,
    auxiliary_models: Dict[str, ChatModelBase],
) -> WorkflowOutput:
    """Run the agent workflow on a single task and return a scalar reward."""


async def judge_function(
    task: Dict,
    response: Any,
    auxiliary_models: Dict[str, ChatModelBase],
) -> JudgeOutput:
    """Calculate reward based on the input task and agent's response."""
