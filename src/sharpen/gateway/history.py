"""Prompt ids that reuse the exact ids of an earlier call of the rollout.

In: the messages and rendered text of a request; the rollout's earlier calls with their responses. Out: the `Prompt`
ids and the parent call, if any. A prompt extends a call if its messages begin with the call's messages and response,
and its rendered text begins with the text of the call's prompt and sampled ids. Its ids are then the call's own ids
plus the tokenized rest. Otherwise the whole text is tokenized. Ids are never patched.

Images are part of their messages: the template writes a placeholder for each, in whose place come the tokens of the
picture. A prompt that extends a call has that call's own, and new ones only in the rest of the text.

A prompt without messages (a text, or ids) extends a call that had none either, whose text, or ids, it begins with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sharpen.gateway.images import Sight
from sharpen.gateway.render import REPLACEMENT, Renderer
from sharpen.types import IntArray, PictureSpan

Canonical = tuple[Any, ...]
Spans = tuple[PictureSpan, ...]
_RAW = -1
"""In place of a node: the calls without messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt for the engine: its ids, their text (in which a placeholder stands for each picture's tokens), its
    pictures, and the index of the call that it extends, if any."""

    ids_P: IntArray
    text: str
    parent: int | None
    pictures: tuple[PictureSpan, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """An earlier call: its text and ids, prompt and sampled tokens together, and the pictures in its prompt."""

    index: int
    text: str
    ids: IntArray
    pictures: Spans = ()


class History:
    """The conversations of one rollout, as a trie of canonical messages. Each node holds the calls that end there.

    A lookup walks the request's messages once, regardless of the number of calls.
    """

    def __init__(self) -> None:
        self._children: dict[tuple[int, Canonical], int] = {}
        self._ends: dict[int, list[_End]] = {}

    def prompt(
        self, renderer: Renderer, messages: Sequence[Mapping[str, Any]], text: str, sight: Sight | None = None
    ) -> Prompt:
        """Return the prompt of rendered `messages`, reusing the ids of the longest earlier call that they extend.
        `sight` is given if they have images. Raises `ImageError` if the text has not one placeholder for each."""
        for node in reversed(self._path(messages)):
            for end in reversed(self._ends.get(node, [])):
                if text.startswith(end.text):
                    return _extended(end, renderer, text, sight)
        if sight is None:
            return Prompt(ids_P=renderer.encode(text), text=text, parent=None)
        ids_P, pictures = sight.read(renderer, text, 0, None)
        return Prompt(ids_P=ids_P, text=text, parent=None, pictures=pictures)

    def raw_prompt(self, renderer: Renderer, given: str | Sequence[int]) -> Prompt:
        """Return the prompt of a text or of token ids, reusing the ids of the longest earlier call that a text extends.

        Ids are used as they are.
        """
        ends = sorted(self._ends.get(_RAW, []), key=lambda end: len(end.ids), reverse=True)
        if not isinstance(given, str):
            ids_P = np.array(given, dtype=np.int32)
            parent = next((end.index for end in ends if np.array_equal(ids_P[: len(end.ids)], end.ids)), None)
            return Prompt(ids_P=ids_P, text=renderer.spell(given), parent=parent)
        for end in ends:
            if given.startswith(end.text):
                rest = renderer.encode_after(int(end.ids[-1]), given[len(end.text) :])
                return Prompt(ids_P=np.concatenate([end.ids, rest]), text=given, parent=end.index)
        return Prompt(ids_P=renderer.encode_raw(given), text=given, parent=None)

    def add_raw(self, index: int, prompt: Prompt, ids_S: IntArray, sampled_text: str) -> None:
        """Add a call without messages, as `add` does."""
        if REPLACEMENT not in sampled_text:
            end = _End(index=index, text=prompt.text + sampled_text, ids=np.concatenate([prompt.ids_P, ids_S]))
            self._ends.setdefault(_RAW, []).append(end)

    def add(
        self,
        index: int,
        messages: Sequence[Mapping[str, Any]],
        response: Mapping[str, Any],
        prompt: Prompt,
        ids_S: IntArray,
        sampled_text: str,
    ) -> None:
        """Add a call, unless its sampled ids decode to invalid text (U+FFFD), which no later prompt can match."""
        if REPLACEMENT in sampled_text:
            return
        node = 0
        for message in (*messages, response):
            node = self._children.setdefault((node, canonical(message)), len(self._children) + 1)
        ids = np.concatenate([prompt.ids_P, ids_S])
        end = _End(index=index, text=prompt.text + sampled_text, ids=ids, pictures=prompt.pictures)
        self._ends.setdefault(node, []).append(end)

    def _path(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        path = [0]
        for message in messages:
            node = self._children.get((path[-1], canonical(message)))
            if node is None:
                break
            path.append(node)
        return path


def _extended(end: _End, renderer: Renderer, text: str, sight: Sight | None) -> Prompt:
    """Return the prompt that continues an earlier call; its text begins with the call's."""
    rest, last_id = text[len(end.text) :], int(end.ids[-1])
    if sight is None:
        ids_P = np.concatenate([end.ids, renderer.encode_after(last_id, rest)])
        return Prompt(ids_P=ids_P, text=text, parent=end.index)
    ids, found = sight.read(renderer, rest, len(end.pictures), last_id)
    pictures = (*end.pictures, *(replace(span, start=span.start + len(end.ids)) for span in found))
    return Prompt(ids_P=np.concatenate([end.ids, ids]), text=text, parent=end.index, pictures=pictures)


def canonical(message: Mapping[str, Any]) -> Canonical:
    """Return a message's content as a hashable value, of an image the hash.

    Tool-call ids and names are left out, since agents such as AgentScope's add names to the model's messages. If the
    template renders either, the comparison of texts decides.
    """
    calls = tuple((call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ()))
    content = message["content"]
    return (
        message["role"],
        content
        if isinstance(content, str)
        else tuple((part["type"], part.get("text", part.get("sha256"))) for part in content),
        message.get("reasoning_content", ""),
        calls,
    )
