"""Validation of chat-completion requests.

In: the decoded JSON body of one request and the sampling defaults of its session. Out: `ChatRequest`, or `ApiError` in
OpenAI's error format. Nothing is silently ignored: a parameter is honoured, harmless (`HARMLESS`), a preference that is
not enforced (`NOT_FORCED`), or refused by name. Unknown fields of messages are passed to the chat template; the gateway
warns once about those that it does not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sharpen.types import Sampling

HARMLESS = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"})
"""Parameters accepted without effect: they change neither the prompt nor the distribution."""

NOT_FORCED = frozenset({"parallel_tool_calls"})
"""Parameters accepted as preferences, like `tool_choice` "required" (or a function's name) and a tool's `strict`.

Enforcing them would sample from a different distribution than the one that is trained.
"""

HONOURED = frozenset(
    {
        *("chat_template_kwargs", "continue_final_message", "logprobs", "max_completion_tokens", "max_tokens"),
        *("messages", "model", "n", "plain_text", "return_token_ids", "seed", "stop", "stream", "stream_options"),
        *("temperature", "tool_choice", "tools", "top_k", "top_logprobs", "top_p"),
    }
)

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
}
"""Parameters that change the distribution sampled from, with the only accepted values: those without effect."""

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
RESERVED_TEMPLATE_KWARGS = frozenset(
    {"conversation", "messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt"}
    | {"continue_final_message", "return_dict", "sanitize_control_tokens", "return_assistant_tokens_mask"}
)
MAX_CHOICES = 128
MIN_TEMPERATURE = 0.01
"""The lowest temperature above 0 (greedy): below it, rounding errors dominate an engine's logprobs."""
MIN_TOP_P = 1e-6
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One validated request: `messages` as sent, `rendered` as the template receives them, `tools` empty for none.

    `plain_text`: the sampled text is not parsed, and each choice has the index of its call (`call_index`).
    `continue_final`: the last message is the beginning of the answer. `model` is any name that the client sent.
    `other_fields` are the fields of messages that are not OpenAI's and that a chat template may read. `prompt` is the
    prompt itself, text or token ids, of a request that has no messages to render (see `completions`).
    """

    model: str
    other_fields: frozenset[str]
    messages: tuple[Mapping[str, Any], ...]
    rendered: tuple[dict[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    sampling: Sampling
    n: int
    seed: int | None
    logprobs: bool
    top_logprobs: int
    stream: bool
    include_usage: bool
    return_token_ids: bool
    plain_text: bool
    continue_final: bool
    template_kwargs: Mapping[str, Any]
    prompt: str | tuple[int, ...] | None = None

    @property
    def asked(self) -> str:
        """The parameter that holds what is asked."""
        return "messages" if self.prompt is None else "prompt"


def short_repr(value: Any) -> str:
    """Return a value's ASCII repr for an error message, cut to 100 characters."""
    text = ascii(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def parse_request(body: Any, *, model_name: str, defaults: Sampling, greedy: bool) -> ChatRequest:
    """Validate a decoded body. `greedy` overrides the request's own temperature. Raises `ApiError`."""
    if not isinstance(body, dict):
        raise ApiError("The request body must be a JSON object.")
    given = {key: value for key, value in body.items() if value is not None}
    _refuse_unknown(given)
    model = given.get("model", model_name)
    if not isinstance(model, str):
        raise ApiError(
            f"'model' is {short_repr(model)}; it must be a string: {model_name!r} (`model.name`).", param="model"
        )
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("'messages' must be a list with at least one message.", param="messages")
    stream = _boolean(given, "stream")
    top_logprobs = _integer(given, "top_logprobs", 0, 0, MAX_TOP_LOGPROBS)
    logprobs = _boolean(given, "logprobs")
    if top_logprobs and not logprobs:
        raise ApiError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    rendered = tuple(render_message(message, position, keep_others=True) for position, message in enumerate(messages))
    return ChatRequest(
        model=model,
        other_fields=frozenset(key for message in rendered for key in message if key not in MESSAGE_FIELDS),
        messages=tuple(messages),
        rendered=rendered,
        tools=_tools(given),
        sampling=_sampling(given, defaults, greedy),
        n=_integer(given, "n", 1, 1, MAX_CHOICES),
        seed=_integer(given, "seed", None, -(2**63), 2**63 - 1),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
        stream=stream,
        include_usage=_include_usage(given, stream),
        return_token_ids=_boolean(given, "return_token_ids"),
        plain_text=_boolean(given, "plain_text"),
        continue_final=_continue_final(given, messages),
        template_kwargs=_template_kwargs(given),
    )


def render_message(message: Any, position: int, *, keep_others: bool = False) -> dict[str, Any]:
    """Return a message as chat templates expect it: text content, no nulls, `developer` as `system`.

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
    rendered["content"] = _text(message.get("content"), f"{where}.content")
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


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if key in NOT_FORCED:
            _boolean(given, key)
        if key in HONOURED or key in HARMLESS or key in NOT_FORCED:
            continue
        if key not in NEUTRAL:
            raise ApiError(f"Unrecognized or unsupported request argument: {key!r}.", param=key)
        if value not in NEUTRAL[key]:
            instead = " Offer a tool with this schema instead." if key == "response_format" else ""
            raise ApiError(
                f"{key!r} is not supported: it would change the distribution sampled from.{instead}", param=key
            )


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"'{where}' must be a string, a list of text parts, or null.", param=where)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ApiError(f"'{where}' has a part of type {short_repr(kind)}; only text is supported.", param=where)
        texts.append(part["text"])
    return "".join(texts)


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


def _tools(given: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the tools to render. `tool_choice` "none" hides them; "required" or a function's name is not enforced."""
    tools = given.get("tools", [])
    if not isinstance(tools, list):
        raise ApiError("'tools' must be a list.", param="tools")
    names = set()
    for position, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(f"'tools[{position}]' must be a function with a name.", param=f"tools[{position}]")
        names.add(function["name"])
    choice = given.get("tool_choice", "auto")
    if choice == "none":
        return ()
    if choice not in ("auto", "required"):
        function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in names:
            raise ApiError(
                f"'tool_choice' is {short_repr(choice)}; it must be 'none', 'auto', 'required' or one of 'tools'.",
                param="tool_choice",
            )
    elif choice == "required" and not tools:
        raise ApiError("'tool_choice' is 'required' but there are no 'tools'.", param="tool_choice")
    return tuple(tools)


def _sampling(given: Mapping[str, Any], defaults: Sampling, greedy: bool) -> Sampling:
    limit = given.get("max_completion_tokens", given.get("max_tokens"))
    if limit != given.get("max_tokens", limit):
        raise ApiError("'max_tokens' and 'max_completion_tokens' differ.", param="max_tokens")
    name = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    max_tokens = _integer(given, name, defaults.max_tokens, 1, 2**31 - 1)
    stop = given.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise ApiError("'stop' must be a non-empty string or a list of them.", param="stop")
    temperature = _number(given, "temperature", defaults.temperature, 0.0, 100.0)
    if "temperature" in given and 0.0 < temperature < MIN_TEMPERATURE:
        raise ApiError(
            f"'temperature' is {temperature:g}; it must be 0 (greedy) or at least {MIN_TEMPERATURE:g}.",
            param="temperature",
        )
    top_p = _number(given, "top_p", defaults.top_p, 0.0, 1.0)
    if top_p < MIN_TOP_P:
        raise ApiError(
            f"'top_p' is {top_p:g}; it must be at least {MIN_TOP_P:g} (use 'temperature': 0 for greedy).", param="top_p"
        )
    top_k = _integer(given, "top_k", defaults.top_k, -1, 2**31 - 1)
    return Sampling(
        temperature=0.0 if greedy else temperature,
        top_p=top_p,
        top_k=max(top_k, 0),
        max_tokens=max_tokens,
        stop=tuple(stop),
    )


def _include_usage(given: Mapping[str, Any], stream: bool) -> bool:
    options = given.get("stream_options")
    if options is None:
        return False
    if not stream:
        raise ApiError("'stream_options' needs 'stream': true.", param="stream_options")
    unknown = set(options) - {"include_usage", "include_obfuscation"} if isinstance(options, dict) else {"?"}
    if unknown:
        raise ApiError("'stream_options' must be an object with 'include_usage'.", param="stream_options")
    return _boolean(options, "include_usage")


def _continue_final(given: Mapping[str, Any], messages: list[Any]) -> bool:
    wanted = _boolean(given, "continue_final_message")
    if wanted and not (isinstance(messages[-1], dict) and messages[-1].get("role") == "assistant"):
        raise ApiError(
            "'continue_final_message' needs an assistant message at the end.", param="continue_final_message"
        )
    return wanted


def _template_kwargs(given: Mapping[str, Any]) -> Mapping[str, Any]:
    kwargs = given.get("chat_template_kwargs", {})
    if not isinstance(kwargs, dict):
        raise ApiError("'chat_template_kwargs' must be an object.", param="chat_template_kwargs")
    reserved = sorted(RESERVED_TEMPLATE_KWARGS & set(kwargs))
    if reserved:
        raise ApiError(f"'chat_template_kwargs' may not set {reserved}.", param="chat_template_kwargs")
    return kwargs


def _boolean(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(f"'{name}' is {short_repr(value)}; it must be true or false.", param=name)
    return bool(value)


def _integer(given: Mapping[str, Any], name: str, default: Any, low: int, high: int) -> Any:
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ApiError(f"'{name}' is {short_repr(value)}; it must be an integer from {low} to {high}.", param=name)
    return value


def _number(given: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ApiError(f"'{name}' is {short_repr(value)}; it must be a number.", param=name)
    if not low <= value <= high:
        raise ApiError(f"'{name}' is {short_repr(value)}; it must lie between {low} and {high}.", param=name)
    return float(value)
