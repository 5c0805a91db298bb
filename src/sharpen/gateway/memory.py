"""What a rollout's earlier answers said, where clients send it back in other words, or by its id alone.

In: tool calls and stored responses as they were given out. Out: the same, found by their ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sharpen.gateway.body import read_json
from sharpen.types import Picture

Messages = Sequence[Mapping[str, Any]]


@dataclass(slots=True, kw_only=True)
class StoredResponse:
    """An answer that a later request may continue by its id: its body, the conversation up to its end, and the items of
    its own request's input, oldest first."""

    body: Mapping[str, Any]
    messages: Messages
    input_items: Sequence[Mapping[str, Any]] = ()


@dataclass(slots=True, kw_only=True)
class Memory:
    """The memory of one rollout. `arguments`: those of each tool call by its id, as they were sampled. `responses`: by
    id, what OpenAI's Responses store. `pictures`: the images of its requests by the hash of their content."""

    arguments: dict[str, str] = field(default_factory=dict)
    responses: dict[str, StoredResponse] = field(default_factory=dict)
    pictures: dict[str, Picture] = field(default_factory=dict)

    def note(self, message: Mapping[str, Any]) -> None:
        """Remember the tool calls of an answer."""
        for call in message.get("tool_calls", ()):
            self.arguments[call["id"]] = call["function"]["arguments"]

    def as_sampled(self, rendered: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message of a request with the arguments of its tool calls as they were sampled.

        Clients parse them and write them anew, with other spaces. Arguments of another value are left as they are.
        """
        calls = rendered.get("tool_calls")
        if not calls:
            return rendered
        return {**rendered, "tool_calls": [self._call_as_sampled(call) for call in calls]}

    def _call_as_sampled(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call["function"]
        sampled = self.arguments.get(call.get("id") or "")
        if sampled is None or sampled == function["arguments"]:
            return call
        try:
            same = json.loads(sampled) == read_json(function["arguments"])
        except (ValueError, RecursionError):
            return call
        return {**call, "function": {**function, "arguments": sampled}} if same else call
