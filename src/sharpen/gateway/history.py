"""From the second call on, ids are never guessed: which earlier call does a prompt literally extend?

In: the messages and rendered text of a request; earlier calls of the rollout with their responses. Out: `Prompt` ids
and the parent call, if any. A prompt extends a call when the messages begin with the call's messages and its response,
and the rendered text begins with the text of the call's prompt and sampled ids. Then the ids are the call's own ids
plus the tokenized rest. Otherwise the text is tokenized afresh. Nothing is patched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sharpen.gateway.render import REPLACEMENT, Renderer
from sharpen.types import IntArray

Canonical = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the engine gets: ids of the prompt, the text they stand for, and the call they extend."""

    ids_P: IntArray
    text: str
    parent: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """An earlier call: where its text and ids end."""

    index: int
    text: str
    ids: IntArray


class History:
    """The conversations of one rollout, as a trie of canonical messages whose nodes know the calls that end there.

    A lookup walks the request's messages once, however many calls there were.
    """

    def __init__(self) -> None:
        self._children: dict[tuple[int, Canonical], int] = {}
        self._ends: dict[int, list[_End]] = {}

    def prompt(self, renderer: Renderer, messages: Sequence[Mapping[str, Any]], text: str) -> Prompt:
        """The prompt ids of rendered `messages`: extending the longest earlier call that they extend, or afresh."""
        for node in reversed(self._path(messages)):
            for end in reversed(self._ends.get(node, [])):
                if text.startswith(end.text):
                    rest = renderer.encode_after(int(end.ids[-1]), text[len(end.text) :])
                    return Prompt(ids_P=np.concatenate([end.ids, rest]), text=text, parent=end.index)
        return Prompt(ids_P=renderer.encode(text), text=text, parent=None)

    def add(
        self,
        index: int,
        messages: Sequence[Mapping[str, Any]],
        response: Mapping[str, Any],
        prompt: Prompt,
        ids_S: IntArray,
        sampled_text: str,
    ) -> None:
        """Remember a call. Sampled ids that are no whole text (U+FFFD) cannot be recognized again: later calls fork."""
        if REPLACEMENT in sampled_text:
            return
        node = 0
        for message in (*messages, response):
            node = self._children.setdefault((node, canonical(message)), len(self._children) + 1)
        end = _End(index=index, text=prompt.text + sampled_text, ids=np.concatenate([prompt.ids_P, ids_S]))
        self._ends.setdefault(node, []).append(end)

    def _path(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        path = [0]
        for message in messages:
            node = self._children.get((path[-1], canonical(message)))
            if node is None:
                break
            path.append(node)
        return path


def canonical(message: Mapping[str, Any]) -> Canonical:
    """What a rendered message says, hashable. Tool-call ids and names are left out: agents put names to what the model
    said (AgentScope does), and where either is rendered, the text decides.
    """
    calls = tuple((call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ()))
    return (
        message["role"],
        message["content"],
        message.get("reasoning_content", ""),
        calls,
    )
