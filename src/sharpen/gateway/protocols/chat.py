"""OpenAI's Chat Completions: its requests, answers and stream events.

Nothing is silently ignored: a parameter is honoured, harmless (any value is accepted), or refused by name
(`chat_schema`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharpen.contracts import Generation
from sharpen.gateway.answers import Choice, Delta, Head, Writer
from sharpen.gateway.constraints import form_of, schema_of
from sharpen.gateway.door import Door, openai_place
from sharpen.gateway.images import with_references
from sharpen.gateway.protocols.chat_schema import AnyKnownMessage, AnyMessage, ChatRequest, StreamOptions
from sharpen.gateway.protocols.protocol import Context, sampling_of
from sharpen.gateway.render import Renderer
from sharpen.gateway.replies import dump
from sharpen.gateway.requests import (
    EFFORT,
    MESSAGE_FIELDS,
    ApiError,
    CallRequest,
    Form,
    effort_of,
    given_fields,
    render_message,
    short_repr,
)
from sharpen.types import Sampling

RESERVED_TEMPLATE_KWARGS = frozenset(
    {"conversation", "messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt"}
    | {"continue_final_message", "return_dict", "sanitize_control_tokens", "return_assistant_tokens_mask"}
)
DONE = b"data: [DONE]\n\n"
"""Ends every stream of OpenAI's older APIs."""


def unknown(name: str) -> ApiError:
    """Return the error for a field that is not known."""
    return ApiError(f"Unrecognized or unsupported request argument: {short_repr(name)}.", param=name)


DOOR = Door(ChatRequest, openai_place, unknown)
MESSAGE_DOOR, RECORDED_DOOR = Door(AnyMessage, openai_place), Door(AnyKnownMessage, openai_place)


def parse_request(body: Any, context: Context) -> tuple[CallRequest, ChatWriter]:
    """Read a decoded body. Raises `ApiError`."""
    DOOR.check(body)
    return read_request(given_fields(body), context)


def check_message(message: Any, position: int) -> None:
    """Raise `ApiError` for what is no message of a request."""
    MESSAGE_DOOR.check(message, "messages", position)


def check_recorded(message: Any, position: int) -> None:
    """Raise `ApiError` for what is no message as it is recorded, whose fields are all known."""
    RECORDED_DOOR.check(message, "messages", position)


def read_request(given: Mapping[str, Any], context: Context) -> tuple[CallRequest, ChatWriter]:
    """Read the fields of a request that has passed the door. Raises `ApiError` for what does not go together."""
    messages = [with_references(message, at, context.images) for at, message in enumerate(given["messages"])]
    rendered = tuple(map(render_message, messages))
    stream, logprobs = given.get("stream", False), given.get("logprobs", False)
    top_logprobs = given.get("top_logprobs", 0)
    if top_logprobs and not logprobs:
        raise ApiError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    plain_text = given.get("plain_text", False)
    tools = _tools(given)
    request = CallRequest(
        model=given.get("model", context.model_name),
        other_fields=frozenset(key for message in rendered for key in message if key not in MESSAGE_FIELDS),
        messages=tuple(messages),
        rendered=rendered,
        tools=tools,
        sampling=_sampling(given, context),
        n=given.get("n", 1),
        seed=given.get("seed"),
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
        return_token_ids=given.get("return_token_ids", False),
        call_index=plain_text,
    )
    return request, writer


def _tools(given: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the tools to render; `tool_choice` "none" hides them."""
    tools, choice = given.get("tools", []), given.get("tool_choice", "auto")
    if choice == "none":
        return ()
    if choice == "required" and not tools:
        raise ApiError("'tool_choice' is 'required' but there are no 'tools'.", param="tool_choice")
    if isinstance(choice, dict):
        offered = {tool["function"]["name"] for tool in tools}
        chosen = choice["allowed_tools"]["tools"] if choice["type"] == "allowed_tools" else [choice]
        for name in (tool["function"]["name"] for tool in chosen):
            if name not in offered:
                raise ApiError(
                    f"'tool_choice' is {short_repr(choice)}; {short_repr(name)} is none of 'tools'.",
                    param="tool_choice",
                )
    return tuple(tools)


def _form(given: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> Form | None:
    asked = given.get("response_format", {})
    if asked.get("type") == "json_schema" and asked.get("json_schema") is None and asked.get("schema") is None:
        where = "response_format.json_schema"
        raise ApiError(f"{where}: Field required", param=where)
    schema, strict = schema_of(asked)
    choice = given.get("tool_choice", "auto") if tools else "auto"
    called: list[str] | None = [] if choice == "required" else None
    if isinstance(choice, dict) and choice["type"] == "function":
        called = [choice["function"]["name"]]
    elif isinstance(choice, dict) and choice["allowed_tools"]["mode"] == "required":
        called = [tool["function"]["name"] for tool in choice["allowed_tools"]["tools"]]
    named = isinstance(choice, dict) and choice["type"] == "function"
    return form_of(
        ("response_format", "tool_choice", "tools"),
        schema=schema,
        strict=strict,
        strict_tools=[tool["function"]["name"] for tool in tools if tool["function"].get("strict")],
        called=called,
        single=named or given.get("parallel_tool_calls") is False,
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
    others = (name for name in given_fields(options) if name not in StreamOptions.__annotations__)
    if (unknown := next(others, None)) is not None:
        raise ApiError(
            f"'stream_options' has {short_repr(unknown)}; it may have 'include_usage'.", param="stream_options"
        )
    return bool(options.get("include_usage"))


def _continue_final(given: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> bool:
    wanted = given.get("continue_final_message", False)
    if wanted and messages[-1]["role"] != "assistant":
        raise ApiError(
            "'continue_final_message' needs an assistant message at the end.", param="continue_final_message"
        )
    return bool(wanted)


def _template_kwargs(given: Mapping[str, Any]) -> Mapping[str, Any]:
    kwargs = given.get("chat_template_kwargs", {})
    reserved = sorted(RESERVED_TEMPLATE_KWARGS & set(kwargs))
    if reserved:
        raise ApiError(f"'chat_template_kwargs' may not set {reserved}.", param="chat_template_kwargs")
    return {**effort_of(given.get(EFFORT)), **kwargs}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatWriter(Writer):
    """Writes one answer as chat completions have it.

    `logprobs`, `return_token_ids`: each choice holds them; in a stream, they come after its text. `call_index`: each
    choice has the index of its recorded call.
    """

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
