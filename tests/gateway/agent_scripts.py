"""What the scripted model says to an agent, told by the last thing in its prompt.

In: the text of a prompt. Out: the text that the model samples.
"""

from __future__ import annotations

import re
from collections.abc import Callable

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def call(name: str, arguments: str) -> str:
    """A tool call as the model samples it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def tool_results(prompt: str) -> list[str]:
    """The tool results in a prompt, in order."""
    return re.findall(r"<tool_response>\n(.*?)\n</tool_response>", prompt, re.DOTALL)


def add_then_answer(prompt: str) -> str:
    """Calls `add` once, then answers with its result."""
    results = tool_results(prompt)
    return f"The answer is {results[-1]}." if results else ADD


def add_numbers_of_the_question(prompt: str) -> str:
    """Calls `add` with the numbers of a question like `12+7`, then answers with its result."""
    results = tool_results(prompt)
    if results:
        return f"The answer is {results[-1]}."
    a, b = re.findall(r"(\d+)\+(\d+)", prompt)[-1]
    return call("add", f'{{"a": {a}, "b": {b}}}')


def turns(*said: str) -> Callable[[str], str]:
    """Says one thing after another; which is told by how often the assistant has spoken."""
    return lambda prompt: said[min(prompt.count("<|im_start|>assistant") - 1, len(said) - 1)]
