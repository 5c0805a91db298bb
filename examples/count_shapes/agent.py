"""An agent that looks at a picture and counts, in the plain `openai` SDK.

In: a task `{"picture": "0001.png", "shape": "circle", "count": 3}`. Out: what the model says; reward 1 for the count.
"""

import base64
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from sharpen import JudgeOutput, WorkflowOutput


async def count(client: AsyncOpenAI, model: str, picture: Path, shape: str) -> str:
    """Show the model a picture, and ask how many there are."""
    encoded = base64.b64encode(picture.read_bytes()).decode()
    content: list[Any] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}},
        {"type": "text", "text": f"how many {shape}?"},
    ]
    messages: list[Any] = [{"role": "user", "content": content}]
    reply = await client.chat.completions.create(model=model, messages=messages)
    return reply.choices[0].message.content or ""


async def run_agent(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """The workflow: one picture."""
    return WorkflowOutput(response=await count(model.client, model.name, Path(task["picture"]), task["shape"]))


async def judge(task: dict[str, Any], response: str) -> JudgeOutput:
    """Reward 1 for the right number, else 0."""
    return JudgeOutput(reward=float(response.strip() == str(task["count"])))
