"""One internal request, which every protocol's requests become, and what their validation shares.

In: fields of decoded JSON bodies. Out: `CallRequest`, in the words of chat completions, or `ApiError`. Unknown fields
of messages are passed to the chat template; the gateway warns once about those that it does not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sharpen.types import Sampling

MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})
NOT_RENDERED = frozenset(
    {"refusal", "annotations", "audio", "function_call", "partial", "prefix"}  # the last four are empty
)
"""Fields of messages that no template is given."""
EFFORT = "reasoning_effort"
"""The argument of chat templates, and the field of chat completions."""
IMAGE_ROLES = frozenset({"user", "tool"})
REFERENCE = "sha256:"
"""Begins the URL of an image in a recorded message; the hash of its content follows."""


SHOWN = 100
"""Characters of a value in an error message."""
MAX_MESSAGE, MAX_PARAM = 4000, 400
"""Characters of an error, and of the place that it names: fields may have names of megabytes."""


class ApiError(Exception):
    """An error that the agent receives, in OpenAI's format; `status` is the HTTP status."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(_cut(message, MAX_MESSAGE))
        self.status, self.code, self.kind = status, code, kind
        self.param = None if param is None else _cut(param, MAX_PARAM)

    def body(self) -> dict[str, Any]:
        """The JSON body of the response."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class PromptTooLongError(ApiError):
    """The prompt leaves no room for an answer: it has `num_tokens`, and the context `limit`. The words are those by
    which agents know that they have to compact."""

    def __init__(self, num_tokens: int, limit: int, asked: str) -> None:
        super().__init__(
            f"This model's maximum context length is {limit} tokens, but the prompt has {num_tokens}: your input "
            "exceeds the context window.",
            code="context_length_exceeded",
            param=asked,
        )
        self.num_tokens, self.limit = num_tokens, limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What an answer has to be (`constraints.form_of`)."""

    origin: str
    schema: Mapping[str, Any] | None = None
    strict: bool = False
    strict_tools: frozenset[str] = frozenset()
    called: tuple[str, ...] | None = None
    single: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """One validated request: `messages` as chat completions has them, `rendered` as the template receives them, `tools`
    empty for none.

    `plain_text`: the sampled text is not parsed. `continue_final`: the last message is the beginning of the answer.
    `model` is any name that the client sent. `other_fields` are the fields of messages that are not OpenAI's and that a
    chat template may read. `prompt` is the prompt itself, text or token ids, of a request that has no messages to
    render (see `protocols.completions`); `prompt_logprobs` is that of `GenerateRequest`. `form` is what the answer has
    to be; None: any text. `notes` are what was left out of the request by a stated rule, to be reported once.
    """

    model: str
    messages: tuple[Mapping[str, Any], ...]
    rendered: tuple[Mapping[str, Any], ...]
    sampling: Sampling
    tools: tuple[Mapping[str, Any], ...] = ()
    other_fields: frozenset[str] = frozenset()
    n: int = 1
    seed: int | None = None
    top_logprobs: int = 0
    stream: bool = False
    plain_text: bool = False
    continue_final: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    prompt_logprobs: int | None = None
    form: Form | None = None

    @property
    def asked(self) -> str:
        """The parameter that holds what is asked."""
        return "messages" if self.prompt is None else "prompt"


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}..."


def short_repr(value: Any) -> str:
    """Return a value's ASCII repr for an error message, cut to 100 characters. The rest is not looked at: a request may
    have 60 MB of it."""
    text = ""
    for piece in _repr_pieces(value):
        text += piece
        if len(text) > SHOWN:
            return f"{text[:SHOWN]}..."
    return text


def _repr_pieces(value: Any) -> Iterator[str]:
    """Yield the ASCII repr of a decoded JSON value, piece by piece, each no longer than its value needs to be shown."""
    if isinstance(value, dict):
        for number, (name, member) in enumerate(value.items()):
            yield ", " if number else "{"
            yield from _repr_pieces(name)
            yield ": "
            yield from _repr_pieces(member)
        yield "}" if value else "{}"
    elif isinstance(value, list):
        for number, member in enumerate(value):
            yield ", " if number else "["
            yield from _repr_pieces(member)
        yield "]" if value else "[]"
    else:
        yield ascii(value[: SHOWN + 1] if isinstance(value, str) else value)


def effort_of(effort: str | None) -> dict[str, str]:
    """Return the template's arguments for the reasoning effort that a request asks for: templates read it (gpt-oss), or
    it has no effect."""
    return {} if effort is None else {EFFORT: effort}


def given_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a body that are not null."""
    return {key: value for key, value in body.items() if value is not None}


def render_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of chat completions as chat templates expect it: no nulls, `developer` as `system`, and as its
    content a text, or parts if there are images among it, each with the hash of its content. Fields that are not
    OpenAI's are kept for the template."""
    rendered = {key: value for key, value in message.items() if value is not None and key not in NOT_RENDERED}
    if rendered["role"] == "developer":
        rendered["role"] = "system"
    rendered["content"] = _content(rendered.get("content", ""))
    if calls := rendered.pop("tool_calls", None):
        rendered["tool_calls"] = [
            {
                "id": call.get("id"),
                "type": "function",
                "function": {name: call["function"][name] for name in ("name", "arguments")},
            }
            for call in calls
        ]
    return rendered


def text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a rendered message's content."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _content(content: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        if part["type"] == "image_url":
            parts.append({"type": "image", "sha256": part["image_url"]["url"].removeprefix(REFERENCE)})
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += part["text"]
        else:
            parts.append({"type": "text", "text": part["text"]})
    return parts if any(part["type"] == "image" for part in parts) else text_of(parts)
