"""Models whose replies are given, and other small things for the examples' tests."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Scripted:
    """A model whose replies are given, one after the other; `requests` are the messages that it was sent."""

    def __init__(self, replies: Sequence[Any]) -> None:
        self.replies = list(replies)
        self.requests: list[list[dict[str, Any]]] = []
        self.name, self.api_key = "scripted", "none"
        self.base_url = ""
        self.client: Any = None

    def answer(self, messages: Any) -> Any:
        """The next reply: what a stand-in's endpoint asks for."""
        self.requests.append(list(messages))
        return self.replies.pop(0)

    @property
    def seen(self) -> list[str]:
        """What the last request added: the contents of the messages after the last reply."""
        messages = self.requests[-1]
        start = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        return [message["content"] for message in messages[start + 1 :]]


def tool_call(name: str, arguments: str, call_id: str = "call_0") -> dict[str, Any]:
    """An assistant message with one tool call."""
    function = {"name": name, "arguments": arguments}
    return {"content": None, "tool_calls": [{"id": call_id, "type": "function", "function": function}]}


def rows_of(path: Path) -> list[Any]:
    """The rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
