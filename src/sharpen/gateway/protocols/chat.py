"""OpenAI's Chat Completions: its requests, answers and stream events.

Nothing is silently ignored: a parameter is honoured, harmless (`HARMLESS`), or refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharpen.gateway.answers import Choice, Delta, Head
from sharpen.gateway.constraints import form_of, schema_of
from sharpen.gateway.context import Context, sampling_of
from sharpen.gateway.images import with_references
from sharpen.gateway.render import Renderer
from sharpen.gateway.replies import dump
from sharpen.gateway.requests import (
    EFFORT,
    MAX_TOP_LOGPROBS,
    MESSAGE_FIELDS,
    ApiError,
    CallRequest,
    Form,
    boolean,
    effort_of,
    given_fields,
    integer,
    model_of,
    render_message,
    short_repr,
)
from sharpen.inference.engine import Generation
from sharpen.types import Sampling

HARMLESS = frozenset(
    {
        *("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store"),
        *("user", "verbosity"),
    }
)
"""Parameters accepted without effect: they change neither the prompt nor the distribution."""

HONOURED = frozenset(
    {
        *("chat_template_kwargs", "continue_final_message", "logprobs", "max_completion_tokens", "max_tokens"),
        *("messages", "model", "n", "parallel_tool_calls", "plain_text", "response_format", "return_token_ids"),
        *("reasoning_effort", "seed", "stop", "stream", "stream_options"),
        *("temperature", "tool_choice", "tools", "top_k", "top_logprobs", "top_p"),
    }
)

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
}
"""Parameters that change the distribution in ways that are not recorded, with the only accepted values: those without
effect."""

RESERVED_TEMPLATE_KWARGS = frozenset(
    {"conversation", "messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt"}
    | {"continue_final_message", "return_dict", "sanitize_control_tokens", "return_assistant_tokens_mask"}
)
MAX_CHOICES = 128
DONE = b"data: [DONE]\n\n"
"""Ends every stream of OpenAI's older APIs."""


def parse_request(body: Any, context: Context) -> tuple[CallRequest, ChatWriter]:
    """Validate a decoded body. Raises `ApiError`."""
    given = given_fields(body)
    _refuse_unknown(given)
    messages = _messages(given, context)
    stream = boolean(given, "stream")
    top_logprobs = integer(given, "top_logprobs", 0, 0, MAX_TOP_LOGPROBS)
    logprobs = boolean(given, "logprobs")
    if top_logprobs and not logprobs:
        raise ApiError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    rendered = tuple(render_message(message, position, keep_others=True) for position, message in enumerate(messages))
    plain_text = boolean(given, "plain_text")
    tools = _tools(given)
    request = CallRequest(
        model=model_of(given, context.model_name),
        other_fields=frozenset(key for message in rendered for key in message if key not in MESSAGE_FIELDS),
        messages=tuple(messages),
        rendered=rendered,
        tools=tools,
        sampling=_sampling(given, context),
        n=integer(given, "n", 1, 1, MAX_CHOICES),
        seed=integer(given, "seed", None, -(2**63), 2**63 - 1),
        top_logprobs=top_logprobs,
        stream=stream,
        plain_text=plain_text,
        continue_final=_continue_final(given, messages),
        template_kwargs=_template_kwargs(given),
        form=_form(given, tools),
    )
    writer = ChatWriter(
        logprobs=logprobs,
        include_usage=_include_usage(given, stream),
        return_token_ids=boolean(given, "return_token_ids"),
        call_index=plain_text,
    )
    return request, writer


def _messages(given: Mapping[str, Any], context: Context) -> list[Any]:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("'messages' must be a list with at least one message.", param="messages")
    return [with_references(message, position, context.images) for position, message in enumerate(messages)]


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if key in HONOURED or key in HARMLESS:
            continue
        if key not in NEUTRAL:
            raise ApiError(f"Unrecognized or unsupported request argument: {key!r}.", param=key)
        if value not in NEUTRAL[key]:
            raise ApiError(f"{key!r} is {short_repr(value)}, which is not supported here.", param=key)


def _tools(given: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the tools to render; `tool_choice` "none" hides them."""
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
    if _allowed(choice, list(names)) is not None:
        return tuple(tools)
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


def _allowed(choice: Any, offered: Collection[Any]) -> list[str] | None:
    """Return the tools of which a choice of the type "allowed_tools" requires one: none if it requires no call. None
    for another choice. Raises `ApiError` for tools that are not `offered`."""
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return None
    given = choice.get("allowed_tools")
    allowed = given if isinstance(given, dict) else {}
    tools = allowed.get("tools")
    functions = (
        [tool.get("function") if isinstance(tool, dict) else None for tool in tools] if isinstance(tools, list) else []
    )
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    if not names or allowed.get("mode") not in ("auto", "required") or not all(name in offered for name in names):
        raise ApiError(
            "'tool_choice.allowed_tools' must have a 'mode' ('auto' or 'required'), and functions of 'tools' in its "
            "'tools'.",
            param="tool_choice",
        )
    return [str(name) for name in names] if allowed["mode"] == "required" else []


def _form(given: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> Form | None:
    schema, strict = schema_of(given.get("response_format", {"type": "text"}), "response_format")
    choice = given.get("tool_choice")
    named = _allowed(choice, [tool["function"]["name"] for tool in tools]) if tools else None
    called: list[str] | None = None
    if tools and choice == "required":
        called = []
    elif tools and named is not None:
        called = named or None
    elif tools and isinstance(choice, dict):
        called = [choice["function"]["name"]]
    boolean(given, "parallel_tool_calls")
    return form_of(
        ("response_format", "tool_choice", "tools"),
        schema=schema,
        strict=strict,
        strict_tools=[tool["function"]["name"] for tool in tools if tool["function"].get("strict") is True],
        called=called,
        single=(bool(called) and named is None) or given.get("parallel_tool_calls") is False,
    )


def _sampling(given: Mapping[str, Any], context: Context) -> Sampling:
    limit = given.get("max_completion_tokens", given.get("max_tokens"))
    if limit != given.get("max_tokens", limit):
        raise ApiError("'max_tokens' and 'max_completion_tokens' differ.", param="max_tokens")
    name = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    return sampling_of(given, context, limit=name)


def _include_usage(given: Mapping[str, Any], stream: bool) -> bool:
    options = given.get("stream_options")
    if options is None:
        return False
    if not stream:
        raise ApiError("'stream_options' needs 'stream': true.", param="stream_options")
    unknown = set(options) - {"include_usage", "include_obfuscation"} if isinstance(options, dict) else {"?"}
    if unknown:
        raise ApiError("'stream_options' must be an object with 'include_usage'.", param="stream_options")
    return boolean(options, "include_usage")


def _continue_final(given: Mapping[str, Any], messages: list[Any]) -> bool:
    wanted = boolean(given, "continue_final_message")
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
    return {**effort_of(given.get(EFFORT), EFFORT), **kwargs}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatWriter:
    """Writes one answer as chat completions have it.

    `logprobs`, `return_token_ids`: each choice holds them; in a stream, they come after its text. `call_index`: each
    choice has the index of its recorded call.
    """

    streams_overflow = False

    logprobs: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    call_index: bool = False

    def whole(self, head: Head, choices: Sequence[Choice], renderer: Renderer) -> dict[str, Any]:
        """Return the body of the whole answer."""
        bodies = [
            {"index": index, "message": choice.message, **self._about(choice, renderer)}
            for index, choice in enumerate(choices)
        ]
        return {
            **self._head(head, "chat.completion"),
            **self._prompt(head),
            "choices": bodies,
            "usage": usage(head, choices),
        }

    def begin(self, head: Head) -> bytes:
        """Return the chunk that begins each choice."""
        first = {"delta": {"role": "assistant", "content": ""}}
        chunks = [self._chunk(head, index, first) for index in range(head.num_choices)]
        chunks[0].update(self._prompt(head))
        return events(chunks)

    def delta(self, head: Head, delta: Delta) -> bytes:
        """Return the chunk of new text."""
        name = "content" if delta.kind == "content" else "reasoning_content"
        return events([self._chunk(head, delta.choice, {"delta": {name: delta.text}})])

    def end(self, head: Head, choices: Sequence[Choice], renderer: Renderer) -> bytes:
        """Return the chunks after the text: tool calls, finish reasons with all else that was asked for, usage."""
        chunks = []
        for index, choice in enumerate(choices):
            for position, call in enumerate(choice.message.get("tool_calls", ())):
                chunks.append(self._chunk(head, index, {"delta": {"tool_calls": [{"index": position, **call}]}}))
            about = self._about(choice, renderer)
            if self.logprobs or self.return_token_ids:
                more = {key: value for key, value in about.items() if key in ("logprobs", "token_ids")}
                chunks.append(self._chunk(head, index, {"delta": {}, **more}))
            chunks.append(self._chunk(head, index, {"delta": {}, "finish_reason": choice.finish_reason}))
        if self.include_usage:
            chunks.append({**self._head(head, "chat.completion.chunk"), "choices": [], "usage": usage(head, choices)})
        return events(chunks) + DONE

    def error(self, error: ApiError) -> bytes:
        """Return the event of an error, which OpenAI's clients raise."""
        return events([error.body()])

    def _about(self, choice: Choice, renderer: Renderer) -> dict[str, Any]:
        about: dict[str, Any] = {
            "finish_reason": choice.finish_reason,
            "logprobs": logprobs_of(choice.generation, renderer) if self.logprobs else None,
        }
        if self.return_token_ids:
            about["token_ids"] = choice.generation.ids.tolist()
        if self.call_index:
            about["call_index"] = choice.call_index
        return about

    def _prompt(self, head: Head) -> dict[str, Any]:
        return {"prompt_token_ids": head.prompt_ids_P.tolist()} if self.return_token_ids else {}

    def _head(self, head: Head, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{head.name}", "created": head.created, "model": head.model, "object": kind}

    def _chunk(self, head: Head, index: int, choice: Mapping[str, Any]) -> dict[str, Any]:
        whole = {"index": index, "finish_reason": None, "logprobs": None, **choice}
        return {**self._head(head, "chat.completion.chunk"), "choices": [whole]}


def usage(head: Head, choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the counts of tokens, by OpenAI's names."""
    num_prompt, num_sampled = len(head.prompt_ids_P), sum(len(choice.generation.ids) for choice in choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }


def logprobs_of(generation: Generation, renderer: Renderer) -> dict[str, Any]:
    """Return the logprobs of each sampled token, and of the alternatives that were asked for."""
    tops = generation.top_logprobs or ((),) * len(generation.ids)
    content = []
    for token_id, logprob, top in zip(generation.ids.tolist(), generation.logprobs.tolist(), tops, strict=True):
        entry = _token(renderer, token_id, logprob)
        entry["top_logprobs"] = [_token(renderer, other_id, other) for other_id, other in top]
        content.append(entry)
    return {"content": content, "refusal": None}


def _token(renderer: Renderer, token_id: int, logprob: float) -> dict[str, Any]:
    text, text_bytes = renderer.token_bytes(token_id)
    # JSON has no infinity; like OpenAI, use -9999 for a token of probability 0.
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": text_bytes}


def events(chunks: Sequence[Mapping[str, Any]]) -> bytes:
    """Return chunks as server-sent events."""
    return b"".join(b"data: " + dump(chunk) + b"\n\n" for chunk in chunks)
