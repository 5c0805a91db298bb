"""One internal request, which every protocol's requests become, and what their validation shares.

In: fields of decoded JSON bodies. Out: `CallRequest`, in the words of chat completions, or `ApiError`. Unknown fields
of messages are passed to the chat template; the gateway warns once about those that it does not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sharpen.types import Sampling

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
MESSAGE_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})
DROPPED_FIELDS = frozenset({"refusal", "annotations"})
"""Fields of responses (ours or OpenAI's) that agents send back and that no template renders."""
OTHER_CONTENT: Mapping[str, str] = {
    "audio": "only text is supported",
    "function_call": "send 'tool_calls'",
    "partial": "send 'continue_final_message' with the request",
    "prefix": "send 'continue_final_message' with the request",
}
"""Fields of messages that are not supported, unless null, false or empty; each with what to do instead."""
EFFORT = "reasoning_effort"
"""The argument of chat templates, and the field of chat completions."""
IMAGE_ROLES = frozenset({"user", "tool"})
REFERENCE = "sha256:"
"""Begins the URL of an image in a recorded message; the hash of its content follows."""
MAX_TOP_LOGPROBS = 20


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
        super().__init__(message)
        self.status, self.code, self.param, self.kind = status, code, param, kind

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
    render (see `protocols.completions`). `form` is what the answer has to be; None: any text. `notes` are what was left
    out of the request by a stated rule, to be reported once.
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
    form: Form | None = None

    @property
    def asked(self) -> str:
        """The parameter that holds what is asked."""
        return "messages" if self.prompt is None else "prompt"


def short_repr(value: Any) -> str:
    """Return a value's ASCII repr for an error message, cut to 100 characters."""
    text = ascii(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def effort_of(value: Any, name: str) -> dict[str, str]:
    """Return the template's arguments for the reasoning effort that a request asks for: templates read it (gpt-oss), or
    it has no effect. `name` is the protocol's. Raises `ApiError`."""
    if value is None:
        return {}
    if not isinstance(value, str) or not value.isalpha():
        raise ApiError(f"'{name}' is {short_repr(value)}; it must be a word, such as 'low'.", param=name)
    return {EFFORT: value}


def model_of(given: Mapping[str, Any], model_name: str) -> str:
    """Return the model that a request names, ours if it names none. Raises `ApiError`."""
    model = given.get("model", model_name)
    if not isinstance(model, str):
        raise ApiError(
            f"'model' is {short_repr(model)}; it must be a string: {model_name!r} (`model.name`).", param="model"
        )
    return model


def given_fields(body: Any) -> dict[str, Any]:
    """Return the fields of a decoded body that are not null. Raises `ApiError` if it is no object."""
    if not isinstance(body, dict):
        raise ApiError("The request body must be a JSON object.")
    return {key: value for key, value in body.items() if value is not None}


def render_message(message: Any, position: int, *, keep_others: bool = False) -> dict[str, Any]:
    """Return a message as chat templates expect it: no nulls, `developer` as `system`, and as its content a text, or
    parts if there are images among it, each with the hash of its content.

    With `keep_others`, fields that are not OpenAI's are kept for the template. Raises `ApiError`.
    """
    where = f"messages[{position}]"
    if not isinstance(message, dict):
        raise ApiError(f"'{where}' must be an object.", param=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ApiError(
            f"'{where}.role' is {short_repr(role)}; it must be one of {sorted(ROLES)}.", param=f"{where}.role"
        )
    others = _other_fields(message, where, keep_others)
    rendered: dict[str, Any] = {**others, "role": "system" if role == "developer" else role}
    rendered["content"] = _content(message.get("content"), f"{where}.content")
    for key in ("name", "tool_call_id", "reasoning_content"):
        value = message.get(key)
        if value is None:
            continue
        if not isinstance(value, str):
            raise ApiError(f"'{where}.{key}' must be a string.", param=f"{where}.{key}")
        rendered[key] = value
    tool_calls = message.get("tool_calls")
    if tool_calls:
        if role != "assistant":
            raise ApiError(f"'{where}.tool_calls' belongs to assistant messages only.", param=f"{where}.tool_calls")
        rendered["tool_calls"] = _tool_calls(tool_calls, f"{where}.tool_calls")
    return rendered


def _other_fields(message: Mapping[str, Any], where: str, keep_others: bool) -> dict[str, Any]:
    others = {}
    for key, value in message.items():
        if value is None or key in MESSAGE_FIELDS or key in DROPPED_FIELDS:
            continue
        if key in OTHER_CONTENT and not value:
            continue
        if key in OTHER_CONTENT or not keep_others:
            hint = f": {OTHER_CONTENT[key]}" if key in OTHER_CONTENT else ""
            raise ApiError(f"'{where}.{key}' is not supported here{hint}.", param=f"{where}.{key}")
        others[key] = value
    return others


def text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a rendered message's content."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"'{where}' must be a string, a list of parts, or null.", param=where)
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        name = _referenced_image(part) if kind == "image_url" else None
        if name is not None:
            parts.append({"type": "image", "sha256": name})
        elif kind != "text" or not isinstance(part.get("text"), str):
            raise ApiError(f"'{where}' has a part of type {short_repr(kind)}; only text is supported.", param=where)
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += part["text"]
        else:
            parts.append({"type": "text", "text": part["text"]})
    return parts if any(part["type"] == "image" for part in parts) else text_of(parts)


def _referenced_image(part: Mapping[str, Any]) -> str | None:
    """Return the hash that a part of a recorded message has in place of its image, if that is what it is."""
    source = part.get("image_url")
    url = source.get("url") if isinstance(source, dict) else None
    return url.removeprefix(REFERENCE) if isinstance(url, str) and url.startswith(REFERENCE) else None


def _tool_calls(tool_calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(tool_calls, list):
        raise ApiError(f"'{where}' must be a list.", param=where)
    rendered = []
    for call in tool_calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ApiError(f"'{where}' holds something that is not a function call.", param=where)
        name, arguments, call_id = function.get("name"), function.get("arguments"), call.get("id")
        if not isinstance(name, str) or not isinstance(arguments, str) or not isinstance(call_id, str | None):
            raise ApiError(f"'{where}': 'id', 'name' and 'arguments' must be strings.", param=where)
        rendered.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
    return rendered


def boolean(given: Mapping[str, Any], name: str) -> bool:
    """Return a field that is true or false; absent is false. Raises `ApiError`."""
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(f"'{name}' is {short_repr(value)}; it must be true or false.", param=name)
    return bool(value)


def integer(given: Mapping[str, Any], name: str, default: Any, low: int, high: int) -> Any:
    """Return an integer field, or `default` if it is absent. Raises `ApiError`."""
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ApiError(f"'{name}' is {short_repr(value)}; it must be an integer from {low} to {high}.", param=name)
    return value


def number(given: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    """Return a number, or `default` if it is absent. Raises `ApiError`."""
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ApiError(f"'{name}' is {short_repr(value)}; it must be a number.", param=name)
    if not low <= value <= high:
        raise ApiError(f"'{name}' is {short_repr(value)}; it must lie between {low} and {high}.", param=name)
    return float(value)
