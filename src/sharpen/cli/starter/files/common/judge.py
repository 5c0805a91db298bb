"""The judge: scores the answer of the agent. The reward is what the training raises, so it must say what you want."""

import re
from typing import Any

from sharpen import JudgeOutput


async def judge(task: dict[str, Any], response: str | None) -> JudgeOutput:
    """Reward 1 if the last number of the answer is the task's, else 0."""
    numbers = re.findall(r"-?\d+", response or "")
    return JudgeOutput(reward=1.0 if numbers[-1:] == [task["answer"]] else 0.0)
