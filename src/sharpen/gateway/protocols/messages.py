"""Anthropic's Messages: its requests, answers and stream events.

A system prompt and the content blocks become messages of chat completions. Stated rules:

- Text, tool use, tool results and thinking are read, and images in base64 that users and tools give; documents and
  server tools' blocks are refused by name.
- A tool's result with `is_error` begins with "Error: " in the prompt: nothing else would say so.
- `cache_control` has no effect, nor have `context_management` (the client sends what it wants seen) and effort.
- Tools without an `input_schema` (Anthropic's own) are left out of the prompt.
- Thinking is given out if the request asks for it, as the API has it; `thinking` does not switch it on or off, which
  `model.enable_thinking` does.
- A last message of the assistant's is the beginning of the answer.
- A `thread`, in whose name a client leaves out the earlier messages, is refused in the words at which SDKs send them.
- Unknown fields are refused, unless the client sends an `anthropic-beta` header: then they have no effect, and that is
  reported once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sharpen.gateway.answers import Choice, Delta, Head
from sharpen.gateway.constraints import form_of
from sharpen.gateway.context import Context, sampling_of
from sharpen.gateway.images import ImageReader
from sharpen.gateway.render import Renderer
from sharpen.gateway.replies import NO_THREADS, anthropic_error, dump
from sharpen.gateway.requests import (
    ApiError,
    CallRequest,
    Form,
    boolean,
    given_fields,
    integer,
    model_of,
    render_message,
    short_repr,
)

HONOURED = frozenset(
    {
        *("max_tokens", "messages", "model", "stop_sequences", "stream", "system", "temperature", "thinking"),
        *("tool_choice", "tools", "top_k", "top_p"),
    }
)
HARMLESS = frozenset(
    {
        *("cache_control", "context_management", "inference_geo", "metadata", "output_config", "service_tier", "speed"),
    }
)
REFUSED = frozenset({"container", "mcp_servers", "thread"})
"""What this server does not run; null or empty is accepted."""
NO_EFFECT = "a request of Anthropic's has no effect here in its field"
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def parse_request(body: Any, context: Context) -> tuple[CallRequest, MessagesWriter]:
    """Validate a decoded body. Raises `ApiError`."""
    given = given_fields(body)
    _refuse_unknown(given, beta=context.beta)
    if "max_tokens" not in given:
        raise ApiError("max_tokens: Field required", param="max_tokens")
    request = _request(given, context)
    return request, MessagesWriter(thinking=_thinking(given))


def parse_count(body: Any, context: Context) -> tuple[CallRequest, MessagesWriter]:
    """Validate the decoded body of a request to count the tokens of its prompt. Raises `ApiError`."""
    given = given_fields(body)
    return _request(given, context), MessagesWriter(thinking=False)


def _request(given: Mapping[str, Any], context: Context) -> CallRequest:
    messages = _messages(given, context.images)
    tools, notes = _tools(given)
    integer(given, "max_tokens", 1, 1, 2**31 - 1)
    return CallRequest(
        model=model_of(given, context.model_name),
        messages=tuple(messages),
        rendered=tuple(render_message(message, place) for place, message in enumerate(messages)),
        tools=tools,
        sampling=sampling_of(given, context, stop="stop_sequences", max_temperature=1.0),
        stream=boolean(given, "stream"),
        continue_final=messages[-1]["role"] == "assistant",
        form=_form(given, tools),
        notes=(*notes, *(f"{NO_EFFECT} {short_repr(key)}" for key in given if not _is_known(key))),
    )


def _is_known(field: str) -> bool:
    return field in HONOURED or field in HARMLESS or field in REFUSED


def _refuse_unknown(given: Mapping[str, Any], *, beta: bool) -> None:
    if given.get("thread"):
        raise ApiError("thread: conversations are not kept here; send all messages.", param="thread", code=NO_THREADS)
    for key, value in given.items():
        if not _is_known(key) and not beta:
            raise ApiError(f"{key}: Extra inputs are not permitted", param=key)
        if key in REFUSED and value:
            raise ApiError(f"{key}: not supported here; this server runs no tools of its own.", param=key)


def _messages(given: Mapping[str, Any], images: ImageReader) -> list[dict[str, Any]]:
    """Return the conversation as chat completions have it, the system prompt first."""
    said = given.get("messages")
    if not isinstance(said, list) or not said:
        raise ApiError("messages: a list with at least one message is required", param="messages")
    messages = []
    if "system" in given:
        messages.append({"role": "system", "content": _texts(given["system"], "system")})
    for place, message in enumerate(said):
        where = f"messages.{place}"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            raise ApiError(f"{where}.role: {short_repr(role)} is not 'user' or 'assistant'", param=where)
        content = message.get("content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list) or not content or not all(isinstance(block, dict) for block in content):
            raise ApiError(f"{where}.content: a string or a list of blocks is required, not empty", param=where)
        messages += [_assistant(content, where)] if role == "assistant" else _turn(role, content, where, images)
    return messages


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for place, block in enumerate(blocks):
        at, kind = f"{where}.content.{place}", block.get("type")
        if kind == "text":
            texts.append(_string(block, "text", at))
        elif kind == "thinking":
            thoughts.append(_string(block, "thinking", at))
        elif kind == "tool_use":
            calls.append(_tool_use(block, at))
        else:
            raise _refused_block(kind, at)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_use(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise ApiError(f"{where}.input: an object is required", param=where)
    function = {"name": _string(block, "name", where), "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": _string(block, "id", where), "type": "function", "function": function}


def _turn(role: str, blocks: Sequence[Mapping[str, Any]], where: str, images: ImageReader) -> Iterator[dict[str, Any]]:
    """Yield what a message of the user's says: a message for each tool result, and one for what is between them."""
    said: list[dict[str, Any]] = []
    for place, block in enumerate(blocks):
        at, kind = f"{where}.content.{place}", block.get("type")
        if kind == "text" or (kind == "image" and role == "user"):
            said.append(_part(block, at, images))
        elif kind == "tool_result" and role == "user":
            if said:
                yield {"role": role, "content": _joined(said)}
                said = []
            yield _tool_result(block, at, images)
        else:
            raise _refused_block(kind, at)
    if said:
        yield {"role": role, "content": _joined(said)}


def _tool_result(block: Mapping[str, Any], where: str, images: ImageReader) -> dict[str, Any]:
    given = block.get("content", "")
    blocks = given if isinstance(given, list) else [{"type": "text", "text": given}]
    parts = []
    for place, one in enumerate(blocks):
        kind = one.get("type") if isinstance(one, dict) else type(one).__name__
        if kind not in ("text", "image"):
            raise _refused_block(kind, f"{where}.content.{place}")
        parts.append(_part(one, f"{where}.content.{place}", images))
    content = _joined(parts)
    if boolean(block, "is_error"):
        content = f"Error: {content}" if isinstance(content, str) else [{"type": "text", "text": "Error: "}, *content]
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id", where), "content": content}


def _part(block: Mapping[str, Any], where: str, images: ImageReader) -> dict[str, Any]:
    """Return a block of text or an image as a part of a message of chat completions."""
    if block["type"] == "text":
        return {"type": "text", "text": _string(block, "text", where)}
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or kind != "base64":
        raise ApiError(
            f"{where}.source: {short_repr(kind)} is not 'base64': images are not fetched here, nor are files kept",
            param=where,
        )
    return images.from_base64(source.get("data"), f"{where}.source.data")


def _joined(parts: Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the texts, one below the other, or, if there are images, the parts with adjacent texts so joined."""
    joined: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] == "text" and joined and joined[-1]["type"] == "text":
            joined[-1]["text"] += "\n" + part["text"]
        else:
            joined.append(dict(part))
    if not joined:
        return ""
    return str(joined[0]["text"]) if len(joined) == 1 and joined[0]["type"] == "text" else joined


def _texts(content: Any, where: str) -> str:
    """Return a string, or the texts of a list of blocks, one below the other."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"{where}: a string or a list of text blocks is required", param=where)
    texts = []
    for place, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else type(block).__name__
        if kind != "text":
            raise _refused_block(kind, f"{where}.{place}")
        texts.append(_string(block, "text", f"{where}.{place}"))
    return "\n".join(texts)


def _string(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise ApiError(f"{where}.{name}: a string is required, not {short_repr(value)}", param=where)
    return value


def _refused_block(kind: Any, where: str) -> ApiError:
    return ApiError(f"{where}: blocks of type {short_repr(kind)} are not supported here", param=where)


def _tools(given: Mapping[str, Any]) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    """Return the tools to render, and notes on those left out. `tool_choice` "none" hides all."""
    tools: list[dict[str, Any]] = []
    left_out: list[str] = []
    given_tools = given.get("tools", [])
    if not isinstance(given_tools, list) or not all(isinstance(tool, dict) for tool in given_tools):
        raise ApiError("tools: a list of objects is required", param="tools")
    for place, tool in enumerate(given_tools):
        name = _string(tool, "name", f"tools.{place}")
        schema = tool.get("input_schema")
        if schema is None and tool.get("type") not in (None, "custom"):
            left_out.append(f"tool {name!r} of type {short_repr(tool['type'])} is left out: the model knows none such")
            continue
        if not isinstance(schema, dict):
            raise ApiError(f"tools.{place}.input_schema: an object is required", param="tools")
        function: dict[str, Any] = {"name": name, "parameters": schema}
        if isinstance(tool.get("description"), str):
            function["description"] = tool["description"]
        tools.append({"type": "function", "function": function})
    hidden = _tool_choice(given, {tool["function"]["name"] for tool in tools}) == "none"
    return (() if hidden else tuple(tools)), tuple(left_out)


def _tool_choice(given: Mapping[str, Any], names: set[str]) -> str:
    choice = given.get("tool_choice", {"type": "auto"})
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind not in ("auto", "any", "tool", "none"):
        raise ApiError(f"tool_choice.type: {short_repr(kind)} is not auto, any, tool or none", param="tool_choice")
    if kind == "tool" and choice.get("name") not in list(names):
        raise ApiError(f"tool_choice.name: there is no tool {short_repr(choice.get('name'))}", param="tool_choice")
    if kind == "any" and not names:
        raise ApiError("tool_choice.type: 'any' needs tools", param="tool_choice")
    return str(kind)


def _form(given: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> Form | None:
    output = given.get("output_config", {})
    form = output.get("format") if isinstance(output, dict) else output
    schema = form.get("schema") if isinstance(form, dict) and form.get("type") == "json_schema" else None
    if form is not None and not isinstance(schema, dict):
        raise ApiError(
            "output_config.format: the type 'json_schema' with an object 'schema' is required", param="output_config"
        )
    choice, called = given.get("tool_choice", {}), None
    if tools and choice.get("type") in ("any", "tool"):
        called = [choice["name"]] if choice["type"] == "tool" else []
    return form_of(
        ("output_config", "tool_choice", "tools"),
        schema=schema,
        strict=True,
        strict_tools=[tool["name"] for tool in given.get("tools", []) if tools and boolean(tool, "strict")],
        called=called,
        single=bool(called) or boolean(choice, "disable_parallel_tool_use"),
    )


def _thinking(given: Mapping[str, Any]) -> bool:
    thinking = given.get("thinking", {"type": "disabled"})
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if kind not in ("enabled", "disabled", "adaptive"):
        raise ApiError(f"thinking.type: {short_repr(kind)} is not enabled, disabled or adaptive", param="thinking")
    return str(kind) != "disabled"


class MessagesWriter:
    """Writes one answer as Messages have it. `thinking`: reasoning is given out."""

    streams_overflow = False

    def __init__(self, *, thinking: bool) -> None:
        self._thinking = thinking
        self._block: str | None = None
        self._index = -1

    def whole(self, head: Head, choices: Sequence[Choice], renderer: Renderer) -> dict[str, Any]:
        """Return the body of the whole answer."""
        (choice,) = choices
        reason = {"stop_reason": _stop_reason(choice), "stop_sequence": choice.stop}
        usage = {**_usage(head), "output_tokens": len(choice.generation.ids)}
        return {**_message(head), "content": self._blocks(choice.message), **reason, "usage": usage}

    def begin(self, head: Head) -> bytes:
        """Return the event that begins the message."""
        message = {**_message(head), "content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**message, "usage": {**_usage(head), "output_tokens": 0}})

    def delta(self, head: Head, delta: Delta) -> bytes:
        """Return the events of new text, in a block of its kind."""
        if delta.kind == "content":
            return self._open({"type": "text", "text": ""}) + self._add({"type": "text_delta", "text": delta.text})
        if not self._thinking:
            return b""
        block = {"type": "thinking", "thinking": "", "signature": ""}
        return self._open(block) + self._add({"type": "thinking_delta", "thinking": delta.text})

    def end(self, head: Head, choices: Sequence[Choice], renderer: Renderer) -> bytes:
        """Return the events of tool use, and of the end."""
        (choice,) = choices
        events = [self._close()]
        for block in self._blocks(choice.message):
            if block["type"] == "tool_use":
                events.append(self._open({**block, "input": {}}, anew=True))
                arguments = next(
                    call["function"]["arguments"] for call in choice.message["tool_calls"] if call["id"] == block["id"]
                )
                events.append(self._add({"type": "input_json_delta", "partial_json": arguments}))
                events.append(self._close())
        delta = {"stop_reason": _stop_reason(choice), "stop_sequence": choice.stop}
        usage = {**_usage(head), "output_tokens": len(choice.generation.ids)}
        return b"".join([*events, _event("message_delta", delta=delta, usage=usage), _event("message_stop")])

    def error(self, error: ApiError) -> bytes:
        """Return the event of an error."""
        return _event(**anthropic_error(error))

    def _blocks(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        if self._thinking and message.get("reasoning_content"):
            blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
        if message["content"]:
            blocks.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", ()):
            function = call["function"]
            arguments = json.loads(function["arguments"])
            blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
        return blocks

    def _open(self, block: Mapping[str, Any], *, anew: bool = False) -> bytes:
        """Return the event that begins a block, after the end of the one before; nothing if such a block is open."""
        if self._block == block["type"] and not anew:
            return b""
        closed = self._close()
        self._block, self._index = block["type"], self._index + 1
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def _add(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        if self._block is None:
            return b""
        self._block = None
        return _event("content_block_stop", index=self._index)


def _stop_reason(choice: Choice) -> str:
    return "stop_sequence" if choice.stop is not None else STOP_REASONS[choice.finish_reason]


def _message(head: Head) -> dict[str, Any]:
    return {"id": f"msg_{head.name}", "type": "message", "role": "assistant", "model": head.model}


def _usage(head: Head) -> dict[str, Any]:
    no_cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": len(head.prompt_ids_P), **no_cache}


def _event(type: str, **fields: Any) -> bytes:
    return b"event: " + type.encode() + b"\ndata: " + dump({"type": type, **fields}) + b"\n\n"
