"""The quickstart agent: ReAct with one tool, in the plain `openai` SDK, and the two functions that tune it.

Role: what an owner brings. `solve` is the agent and knows nothing of training; `run_agent` (the workflow) lets it
work on one task, `judge` scores what it said.
In: a task `{"question": ..., "answer": "... #### 42"}` and a model object (`client`: an `openai.AsyncOpenAI`, `name`).
Out: a `WorkflowOutput` with the agent's last text, a `JudgeOutput` with reward 1 or 0.
"""

import ast
import json
import operator
import re
from collections.abc import Callable
from typing import Any

from openai import AsyncOpenAI

from sharpen import JudgeOutput, WorkflowOutput

SYSTEM = "Solve the problem. End with #### and the number."
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
MAX_CALLS, MAX_TOKENS = 3, 48
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


async def solve(client: AsyncOpenAI, model: str, question: str, system: str = SYSTEM) -> str | None:
    """Let the model think and use the calculator until it answers; None when it never does."""
    messages: list[Any] = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    for _ in range(MAX_CALLS):
        reply = await client.chat.completions.create(model=model, messages=messages, tools=TOOLS, max_tokens=MAX_TOKENS)
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            assert call.type == "function"
            result = calculator(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None


def calculator(arguments: str) -> str:
    """The tool: JSON arguments in, the value of their expression out; an error comes back as text."""
    try:
        return f"{value_of(ast.parse(json.loads(arguments)['expression'], mode='eval').body):.10g}"
    except (ArithmeticError, KeyError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        return f"error: {type(error).__name__}"


def value_of(node: ast.expr) -> float:
    """The value of an arithmetic expression tree; ValueError for anything that is not arithmetic."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value_of(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value_of(left), value_of(right))
    raise ValueError(f"not arithmetic: {type(node).__name__}")


def last_number(text: str | None) -> float | None:
    """The number after the last '####', else the last number in the text, else None."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", (text or "").rpartition("####")[2])
    return float(numbers[-1].replace(",", "")) if numbers else None


async def run_agent(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """The workflow: one run of the agent on one task."""
    return WorkflowOutput(response=await solve(model.client, model.name, task["question"]))


async def judge(task: dict[str, Any], response: Any) -> JudgeOutput:
    """Reward 1 for the right number, else 0."""
    return JudgeOutput(reward=float(last_number(response) == last_number(task["answer"])))
