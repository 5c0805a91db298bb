"""What a server answered: gathered for the record, and given back without what only the record asked for.

In: decoded bodies or chunks, in OpenAI's words with vLLM's fields. Out: the same without these; a `Call` for each
choice.

Shape suffixes: P prompt tokens, S sampled tokens of a choice.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sharpen.gateway.routes import CHAT
from sharpen.serve.record.asked import LOGPROBS, TOKEN_IDS, Asked
from sharpen.types import Call, CallStatus, FinishReason, PictureSpan, Span

# Server-sent events, one by one as they arrive.
#
# In: pieces of a body, cut anywhere. Out: whole events, byte for byte; the JSON that one holds.

_END = re.compile(rb"\r?\n\r?\n|\r\r")


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield each event with the empty line that ends it; the last one may lack it."""
    left = b""
    async for piece in pieces:
        left += piece
        while (end := _END.search(left)) is not None:
            yield left[: end.end()]
            left = left[end.end() :]
    if left:
        yield left


def data_of(event: bytes) -> dict[str, Any] | None:
    """Return the JSON object that an event holds; None for any other event."""
    lines = [line for line in event.splitlines() if line]
    data = b"\n".join(line.removeprefix(b"data:") for line in lines if line.startswith(b"data:"))
    try:
        value = json.loads(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) and len(lines) == 1 else None


def is_done(event: bytes) -> bool:
    """Whether an event says that the stream is over."""
    return event.strip() == b"data: [DONE]"


_REASONS: Mapping[str, FinishReason] = {"length": "length", "abort": "abort"}
"""Finish reasons by OpenAI's names; with all others the model stopped by itself."""


@dataclass(slots=True, kw_only=True, eq=False)
class Choice:
    """One choice, as far as it has come. `ids_S` is None until the server gives some."""

    message: dict[str, Any] = field(default_factory=dict)
    prompt_ids_P: list[int] | None = None
    ids_S: list[int] | None = None
    logprobs_S: list[float] = field(default_factory=list)
    finish_reason: str | None = None


class Answer:
    """The answer to one request: its `name` and `model` as the server says them, and its choices."""

    def __init__(self, asked: Asked) -> None:
        self.name = self.model = ""
        self._asked = asked
        self._prompt_ids_P: list[int] | None = None
        self._choices: dict[int, Choice] = {}

    @property
    def has_ids(self) -> bool:
        """Whether the server gave the ids of the prompt and of every choice."""
        return bool(self._choices) and all(
            choice.ids_S is not None and self._prompt_of(choice) is not None for choice in self._choices.values()
        )

    @property
    def num_prompt_tokens(self) -> int:
        """How many tokens the prompt has; 0 if the server does not say which."""
        return len(next(filter(None, map(self._prompt_of, self._choices.values())), ()))

    @property
    def num_sampled_tokens(self) -> int:
        """How many tokens all choices have so far; 0 if the server does not say which."""
        return sum(len(choice.ids_S or ()) for choice in self._choices.values())

    def add(self, body: dict[str, Any]) -> bool:
        """Note what a body or a chunk says, and take out of it what the client did not ask for. Return whether the
        client gets it: not a chunk with nothing left."""
        self.name = self.name or str(body.get("id") or "")
        self.model = self.model or str(body.get("model") or "")
        self._prompt_ids_P = _ids(body.get("prompt_token_ids")) or self._prompt_ids_P
        entries = [one for one in body.get("choices") or () if isinstance(one, dict)]
        for entry in entries:
            self._add_choice(entry)
        only_ids = TOKEN_IDS in self._asked.added and entries and all(map(_holds_only_ids, entries))
        self._take_out(body, entries)
        return not only_ids

    def calls(
        self, first: int, *, delivered: bool, started: float, seconds: float, agent: str, span: Span | None
    ) -> Iterator[Call]:
        """Yield the call of each choice, from index `first` on; parents are still to be found. The other arguments
        are the fields of `Call`, but for `delivered`: whether the agent has the whole answer."""
        prompts = [self._prompt_of(choice) for choice in self._choices.values()]
        messages, pictures = self._asked.messages()
        several = len(prompts) > 1 and all(one == prompts[0] for one in prompts)  # several prompts: no alternatives
        for number, (_, choice) in enumerate(sorted(self._choices.items())):
            ids_S = np.asarray(choice.ids_S or (), np.int32) if self.has_ids else np.zeros(0, np.int32)
            known = len(choice.logprobs_S) == len(ids_S)
            yield Call(
                index=first + number,
                parent=None,
                prompt_ids_P=np.asarray((self._prompt_of(choice) if self.has_ids else None) or (), np.int32),
                sampled_ids_S=ids_S,
                logprobs_S=np.asarray(choice.logprobs_S if known else [math.nan] * len(ids_S), np.float32),
                versions_S=np.zeros(len(ids_S), np.int32),
                sampling=self._asked.sampling,
                finish_reason=_finish_reason(choice),
                status=CallStatus.USED if delivered else CallStatus.ABANDONED,
                messages=messages,
                tools=self._asked.tools,
                response=_response(choice.message),
                seconds=seconds,
                started=started,
                request=first if several else None,
                agent=agent,
                model=self.model or str(self._asked.given.get("model") or ""),
                span=span,
                pictures=tuple(PictureSpan(picture=picture, start=0, length=0) for picture in pictures),
            )

    def _prompt_of(self, choice: Choice) -> list[int] | None:
        return choice.prompt_ids_P or self._prompt_ids_P

    def _add_choice(self, entry: Mapping[str, Any]) -> None:
        index = entry.get("index")
        choice = self._choices.setdefault(index if isinstance(index, int) else 0, Choice())
        choice.prompt_ids_P = _ids(entry.get("prompt_token_ids")) or choice.prompt_ids_P
        if (ids := _ids(entry.get("token_ids"))) is not None:
            choice.ids_S = [*(choice.ids_S or ()), *ids]
        choice.logprobs_S += _logprobs(entry.get("logprobs"))
        choice.finish_reason = entry.get("finish_reason") or choice.finish_reason
        if self._asked.route != CHAT:
            choice.message["content"] = choice.message.get("content", "") + str(entry.get("text") or "")
        elif isinstance(delta := entry.get("message", entry.get("delta")), dict):
            add_delta(choice.message, delta)

    def _take_out(self, body: dict[str, Any], entries: list[dict[str, Any]]) -> None:
        added = self._asked.added
        if TOKEN_IDS in added:
            body.pop("prompt_token_ids", None)
            for entry in entries:
                entry.pop("token_ids", None)
                entry.pop("prompt_token_ids", None)
        if LOGPROBS in added:
            for entry in entries:
                if "logprobs" in entry:
                    entry["logprobs"] = None


def add_delta(message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Add a delta of a message to what has come of it, or the whole message."""
    for name, value in delta.items():
        if name == "tool_calls":
            for place, part in enumerate(value or ()):
                _add_tool_call(message.setdefault("tool_calls", {}), place, part)
        elif isinstance(value, str) and name != "role":
            message[name] = message.get(name, "") + value
        elif value is not None:
            message[name] = value


def _add_tool_call(calls: dict[int, Any], place: int, part: Any) -> None:
    if not isinstance(part, dict):
        return
    number = part.get("index")
    call = calls.setdefault(
        number if isinstance(number, int) else place,
        {"id": None, "type": "function", "function": {"name": "", "arguments": ""}},
    )
    call["id"] = part.get("id") or call["id"]
    function = part.get("function") or {}
    for name in ("name", "arguments"):
        call["function"][name] += function.get(name) or ""


def _response(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as agents send it back: the fields that chat templates read."""
    response: dict[str, Any] = {"role": "assistant", "content": message.get("content") or ""}
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        response["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        response["tool_calls"] = [calls[number] for number in sorted(calls)]
    return response


def _holds_only_ids(entry: Mapping[str, Any]) -> bool:
    """Whether a chunk's choice was sent for its ids alone: the server would have waited for more text."""
    return "token_ids" in entry and not entry.get("finish_reason") and entry.get("delta") == {}


def _finish_reason(choice: Choice) -> FinishReason:
    return "abort" if choice.finish_reason is None else _REASONS.get(choice.finish_reason, "stop")


def _ids(value: Any) -> list[int] | None:
    good = isinstance(value, list) and all(type(one) is int for one in value)
    return value if good else None


def _logprobs(value: Any) -> list[float]:
    """Return the logprobs of the sampled tokens: in chat's words, or in those of completions."""
    if not isinstance(value, dict):
        return []
    found = value.get("token_logprobs")
    if found is None:
        found = [one.get("logprob") for one in value.get("content") or () if isinstance(one, dict)]
    return [math.nan if one is None else float(one) for one in found]
