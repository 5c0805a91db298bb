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

from sharpen.gateway.answers import Choice, Delta, Head, Writer
from sharpen.gateway.constraints import form_of
from sharpen.gateway.door import Door, anthropic_place
from sharpen.gateway.images import ImageReader
from sharpen.gateway.protocols.messages_schema import Asked, BetaMessagesRequest, CountRequest, MessagesRequest
from sharpen.gateway.protocols.protocol import Context, sampling_of
from sharpen.gateway.render import Renderer
from sharpen.gateway.replies import NO_THREADS, anthropic_error, dump
from sharpen.gateway.requests import ApiError, CallRequest, Form, given_fields, render_message, short_repr

NO_EFFECT = "a request of Anthropic's has no effect here in its field"
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _unknown(name: str) -> ApiError:
    return ApiError(f"{name}: Extra inputs are not permitted", param=name)


DOOR = Door(MessagesRequest, anthropic_place, _unknown)
BETA_DOOR, COUNT_DOOR = Door(BetaMessagesRequest, anthropic_place), Door(CountRequest, anthropic_place)


def parse_request(body: Any, context: Context) -> tuple[CallRequest, MessagesWriter]:
    """Read a decoded body. Raises `ApiError`."""
    if isinstance(body, dict) and body.get("thread"):
        raise ApiError("thread: conversations are not kept here; send all messages.", param="thread", code=NO_THREADS)
    (BETA_DOOR if context.beta else DOOR).check(body)
    given = given_fields(body)
    thinking = given.get("thinking", {"type": "disabled"})
    return _request(given, context), MessagesWriter(thinking=thinking["type"] != "disabled")


def parse_count(body: Any, context: Context) -> tuple[CallRequest, MessagesWriter]:
    """Read the decoded body of a request to count the tokens of its prompt. Raises `ApiError`."""
    COUNT_DOOR.check(body)
    return _request(given_fields(body), context), MessagesWriter(thinking=False)


def _request(given: Mapping[str, Any], context: Context) -> CallRequest:
    messages = _messages(given, context.images)
    tools, notes = _tools(given)
    return CallRequest(
        model=given.get("model", context.model_name),
        messages=tuple(messages),
        rendered=tuple(map(render_message, messages)),
        tools=tools,
        sampling=sampling_of(given, context, stop="stop_sequences"),
        stream=given.get("stream", False),
        continue_final=messages[-1]["role"] == "assistant",
        form=_form(given, tools),
        notes=(*notes, *(f"{NO_EFFECT} {short_repr(key)}" for key in given if key not in Asked.__annotations__)),
    )


def _messages(given: Mapping[str, Any], images: ImageReader) -> list[dict[str, Any]]:
    """Return the conversation as chat completions have it, the system prompt first."""
    messages: list[dict[str, Any]] = []
    if "system" in given:
        messages.append({"role": "system", "content": _joined(_blocks_of(given["system"]))})
    for place, message in enumerate(given["messages"]):
        blocks = _blocks_of(message["content"])
        if message["role"] == "assistant":
            messages.append(_assistant(blocks))
        else:
            messages += _turn(message["role"], blocks, f"messages.{place}", images)
    return messages


def _blocks_of(content: Any) -> Sequence[Mapping[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _assistant(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(block["text"] for block in blocks if block["type"] == "text"),
    }
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    calls = [_tool_use(block) for block in blocks if block["type"] == "tool_use"]
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_use(block: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
    return {"id": block["id"], "type": "function", "function": function}


def _turn(role: str, blocks: Sequence[Mapping[str, Any]], where: str, images: ImageReader) -> Iterator[dict[str, Any]]:
    """Yield what a message of the user's says: a message for each tool result, and one for what is between them."""
    said: list[dict[str, Any]] = []
    for place, block in enumerate(blocks):
        at = f"{where}.content.{place}"
        if block["type"] != "tool_result":
            said.append(_part(block, at, images))
            continue
        if said:
            yield {"role": role, "content": _joined(said)}
            said = []
        yield _tool_result(block, at, images)
    if said:
        yield {"role": role, "content": _joined(said)}


def _tool_result(block: Mapping[str, Any], where: str, images: ImageReader) -> dict[str, Any]:
    blocks = _blocks_of(block.get("content") or "")
    content = _joined([_part(one, f"{where}.content.{place}", images) for place, one in enumerate(blocks)])
    if block.get("is_error"):
        content = f"Error: {content}" if isinstance(content, str) else [{"type": "text", "text": "Error: "}, *content]
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}


def _part(block: Mapping[str, Any], where: str, images: ImageReader) -> dict[str, Any]:
    """Return a block of text or an image as a part of a message of chat completions."""
    if block["type"] == "text":
        return {"type": "text", "text": block["text"]}
    return images.from_base64(block["source"]["data"], f"{where}.source.data")


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


def _tools(given: Mapping[str, Any]) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...]]:
    """Return the tools to render, and notes on those left out. `tool_choice` "none" hides all."""
    tools: list[dict[str, Any]] = []
    left_out: list[str] = []
    for place, tool in enumerate(given.get("tools", [])):
        name, schema = tool["name"], tool.get("input_schema")
        if schema is None and tool.get("type") not in (None, "custom"):
            left_out.append(
                f"tool {short_repr(name)} of type {short_repr(tool['type'])} is left out: the model knows none such"
            )
            continue
        if schema is None:
            raise ApiError(f"tools.{place}.input_schema: an object is required", param="tools")
        function: dict[str, Any] = {"name": name, "parameters": schema}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        tools.append({"type": "function", "function": function})
    _check_choice(given.get("tool_choice", {"type": "auto"}), {tool["function"]["name"] for tool in tools})
    hidden = given.get("tool_choice", {}).get("type") == "none"
    return (() if hidden else tuple(tools)), tuple(left_out)


def _check_choice(choice: Mapping[str, Any], names: set[str]) -> None:
    if choice["type"] == "tool" and choice["name"] not in names:
        raise ApiError(f"tool_choice.name: there is no tool {short_repr(choice['name'])}", param="tool_choice")
    if choice["type"] == "any" and not names:
        raise ApiError("tool_choice.type: 'any' needs tools", param="tool_choice")


def _form(given: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> Form | None:
    form = given.get("output_config", {}).get("format")
    choice, called = given.get("tool_choice", {}), None
    if tools and choice.get("type") in ("any", "tool"):
        called = [choice["name"]] if choice["type"] == "tool" else []
    return form_of(
        ("output_config", "tool_choice", "tools"),
        schema=None if form is None else form["schema"],
        strict=True,
        strict_tools=[tool["name"] for tool in given.get("tools", []) if tools and tool.get("strict")],
        called=called,
        single=bool(called) or choice.get("disable_parallel_tool_use", False) is True,
    )


class MessagesWriter(Writer):
    """Writes one answer as Messages have it. `thinking`: reasoning is given out."""

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
