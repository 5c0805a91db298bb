"""The agent: it asks a calculator, with the `openai` package. Put yours, with its tools, in its place."""

import json
import operator
import re
from collections.abc import Callable
from typing import Any

from openai import AsyncOpenAI

from sharpen import WorkflowOutput

SYSTEM = "Answer with the number."
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Work out an expression.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]
OPERATORS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
MAX_CALLS = 3


def calculator(arguments: str) -> str:
    """The tool: JSON arguments in, the value of their expression out. An error is text, which the model may read."""
    try:
        expression = json.loads(arguments)["expression"]
        left, sign, right = re.fullmatch(r"(\d+) ?([-+*]) ?(\d+)", expression).groups()  # type: ignore[union-attr]
    except (AttributeError, KeyError, TypeError, ValueError):
        return "error: an expression has two numbers, such as 12 + 30"
    return str(OPERATORS[sign](int(left), int(right)))


async def solve(client: AsyncOpenAI, model: str, question: str) -> str | None:
    """The agent itself. It knows nothing of training. None if it never comes to an answer."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    for _ in range(MAX_CALLS):
        reply = await client.chat.completions.create(model=model, messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = calculator(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None


async def run_agent(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """The workflow: run the agent on one task, with the client that records its calls."""
    return WorkflowOutput(response=await solve(model.client, model.name, task["question"]))
