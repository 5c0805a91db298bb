"""Trinity's workflow of tool calls as text: which functions are called with which arguments, after thinking.

In: a row with `tools` (a JSON list of function schemas), `raw_system`, `conversations` (`from`, `value`) and `answer`
(the calls expected, as JSON). Out: one experience with reward 1 or 0.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sharpen.compat.trinity.experience import Experience
from sharpen.compat.trinity.rewards import thinks_once
from sharpen.compat.trinity.simple import BaseSimpleWorkflow
from sharpen.compat.trinity.task import Task
from sharpen.compat.trinity.workflow import each_alone
from sharpen.errors import DatasetError

TOOLS = """# Tools

<tools>
{tools}
</tools>

In each step, first write your reasoning between <think> and </think>, once. Then write the calls as one JSON list
between <tool_call> and </tool_call>, each call an object with "name" and "arguments", whose types are those of the
function's schema. Reasoning and calls belong to the same reply, for example:
<think>The user wants the sum, which `add` computes.</think>
<tool_call>[{{"name": "add", "arguments": {{"a": 1, "b": 2}}}}]</tool_call>
"""
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
_CALLS = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ToolCallWorkflow(BaseSimpleWorkflow):
    """One reply with calls of tools; the reward is 1 if it makes exactly the calls that the row's `answer` holds."""

    is_async = True
    can_reset = True
    can_repeat = True

    def reset(self, task: Task) -> None:
        """Read the task; there is no reward function to choose."""
        self._read(task)

    def format_messages(self) -> list[dict[str, Any]]:
        """The row's conversation, after its system prompt with the tools behind it."""
        tools = "\n".join(
            json.dumps({"type": "function", "function": tool}) for tool in _json(self.raw_task["tools"], "tools")
        )
        messages = [{"role": "system", "content": str(self.raw_task["raw_system"]) + TOOLS.format(tools=tools)}]
        for turn in self.raw_task["conversations"]:
            role = _ROLES.get(turn["from"])
            if role is None:
                raise DatasetError(
                    f"the task has a turn from {turn['from']!r} in 'conversations': one of {', '.join(_ROLES)} is known"
                )
            value = turn["value"]
            messages.append({"role": role, "content": value if isinstance(value, str) else json.dumps(value)})
        return messages

    @each_alone
    async def run_async(self) -> list[Experience]:
        """Ask and score."""
        expected = expected_calls(self.raw_task["answer"])
        experiences = await self.model.chat_async(self.format_messages(), **self.rollout_args)
        for number, experience in enumerate(experiences):
            experience.reward = float(makes_calls(experience.response_text, expected))
            experience.eid.run = number + self.run_id_base
        return experiences


def makes_calls(response: str, expected: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a reply thinks once, before its calls, and then makes the expected ones, in any order and no others.

    Its calls are the JSON of its last `<tool_call>` tags: a list of objects, or one object.
    """
    if not thinks_once(response):
        return False
    first = response.find("<tool_call>")
    if first != -1 and response.find("</think>") > first:
        return False
    found = _CALLS.findall(response)
    calls = _calls(found[-1].strip()) if found else None
    return calls is not None and _counted(calls) == _counted(expected)


def expected_calls(answer: Any) -> list[dict[str, Any]]:
    """The calls in a row's `answer`. Raises `DatasetError` for what is no list of calls."""
    calls = _calls(answer)
    if calls is None:
        raise DatasetError(
            f"the task's 'answer' is {answer!r}: it must be a JSON list of calls, each with 'name' and 'arguments'"
        )
    return calls


def _calls(value: Any) -> list[dict[str, Any]] | None:
    """A list of calls, out of JSON (which may be JSON in a string again); None for anything else."""
    for _ in range(2):
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                return None
    calls = [value] if isinstance(value, dict) else value
    if not isinstance(calls, list):
        return None
    whole = all(isinstance(call, dict) and {"name", "arguments"} <= call.keys() for call in calls)
    return calls if whole else None


def _counted(calls: Sequence[Mapping[str, Any]]) -> Counter[tuple[str, str]]:
    return Counter((str(call["name"]), json.dumps(call["arguments"], sort_keys=True)) for call in calls)


def _json(value: Any, field: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise DatasetError(f"the task's field {field!r} is no JSON: {error}") from error
