"""The agent: one question, one answer, with the `openai` package. Put yours in its place."""

from typing import Any

from openai import AsyncOpenAI

from sharpen import WorkflowOutput

SYSTEM = "Answer with the number."


async def solve(client: AsyncOpenAI, model: str, question: str) -> str | None:
    """The agent itself. It knows nothing of training."""
    reply = await client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
    )
    return reply.choices[0].message.content


async def run_agent(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """The workflow: run the agent on one task, with the client that records its calls."""
    return WorkflowOutput(response=await solve(model.client, model.name, task["question"]))
