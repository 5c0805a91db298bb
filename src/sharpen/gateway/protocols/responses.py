"""OpenAI's Responses: its requests. `responses_events` writes the answers.

The items of `input` become messages of chat completions. Stated rules:

- Messages, function calls, calls of custom tools, their outputs, reasoning and references to items are read; files
  and the items of tools that OpenAI runs are refused by name. Images are read in messages of the user's and in the
  outputs of calls.
- Reasoning, text and calls that follow each other are one answer of the model's, as they were when it was given.
- A custom tool is a function with one string, `input`. Tools of other kinds (`web_search`, `namespace`, ...) are left
  out of the prompt, and that is reported once.
- `previous_response_id` continues an answer of the same rollout. Its `instructions` are not carried over.
- Effort is an argument of the chat template. Verbosity, `truncation`, and what concerns caches and accounting have no
  effect.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any

from sharpen.gateway.constraints import form_of, schema_of
from sharpen.gateway.door import Door, openai_place
from sharpen.gateway.images import ImageReader, wrong_role
from sharpen.gateway.memory import Memory
from sharpen.gateway.protocols.protocol import Context, sampling_of
from sharpen.gateway.protocols.responses_events import SEALED, ResponsesWriter, with_urls
from sharpen.gateway.protocols.responses_schema import ResponsesRequest
from sharpen.gateway.requests import (
    ApiError,
    CallRequest,
    Form,
    effort_of,
    given_fields,
    render_message,
    short_repr,
)

CUSTOM_SCHEMA = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_RANKS = {"reasoning": 0, "message": 1, "function_call": 2, "custom_tool_call": 2}
"""The order of one answer's items."""


def _unknown(name: str) -> ApiError:
    return ApiError(f"Unknown parameter: '{name}'.", code="unknown_parameter", param=name)


DOOR = Door(ResponsesRequest, openai_place, _unknown)


def parse_request(body: Any, context: Context) -> tuple[CallRequest, ResponsesWriter]:
    """Read a decoded body. Raises `ApiError`."""
    DOOR.check(body)
    given = given_fields(body)
    conversation = [*_earlier(given, context.memory), *_conversation(given, context)]
    instructions = given.get("instructions", "")
    messages = [*([{"role": "system", "content": instructions}] if instructions else []), *conversation]
    if not messages:
        raise ApiError("'input' is empty: it must be a string or a list of items.", param="input")
    tools, custom, notes = _tools(given)
    include, reasoning = given.get("include", []), given.get("reasoning", {})
    request = CallRequest(
        model=given.get("model", context.model_name),
        messages=tuple(messages),
        rendered=tuple(map(render_message, messages)),
        tools=tools,
        sampling=sampling_of(given, context, limit="max_output_tokens"),
        top_logprobs=given.get("top_logprobs", 0),
        stream=given.get("stream", False),
        template_kwargs=effort_of(reasoning.get("effort")),
        form=_form(given, tools),
        notes=notes,
    )
    writer = ResponsesWriter(
        memory=context.memory,
        given={**given, "input": with_urls(given.get("input", []), context.images.reference_of)},
        conversation=conversation,
        custom=custom,
        store=given.get("store", True),
        sealed="reasoning.encrypted_content" in include,
        summary=reasoning.get("summary") is not None,
        logprobs="message.output_text.logprobs" in include or request.top_logprobs > 0,
    )
    return request, writer


def _form(given: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> Form | None:
    schema, strict = schema_of(given.get("text", {}).get("format"))
    choice = given.get("tool_choice")
    named = isinstance(choice, dict) and choice["type"] != "allowed_tools"
    return form_of(
        ("text.format", "tool_choice", "tools"),
        schema=schema,
        strict=strict,
        strict_tools=[tool["name"] for tool in given.get("tools", []) if tools and _is_strict(tool)],
        called=_called(choice) if tools else None,
        single=named or given.get("parallel_tool_calls") is False,
    )


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return tool.get("type") == "function" and tool.get("strict") is True


def _called(choice: Any) -> list[str] | None:
    """Return the tools of which one must be called, empty for all; None: none need be."""
    if not isinstance(choice, dict):
        return [] if choice == "required" else None
    if choice["type"] != "allowed_tools":
        return [choice["name"]]
    if choice.get("mode") != "required":
        return None
    return [tool["name"] for tool in choice.get("tools", []) if "name" in tool]


def _earlier(given: Mapping[str, Any], memory: Memory) -> Sequence[Mapping[str, Any]]:
    """Return the conversation up to the end of the answer that this request continues."""
    name = given.get("previous_response_id")
    if name is None:
        return ()
    stored = memory.responses.get(name)
    if stored is None:
        raise ApiError(
            f"Previous response with id {short_repr(name)} not found: this rollout has stored none such.",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    return stored.messages


def _conversation(given: Mapping[str, Any], context: Context) -> list[dict[str, Any]]:
    said = given.get("input", [])
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    messages: list[dict[str, Any]] = []
    last_rank = len(_RANKS)
    for place, given_item in enumerate(said):
        item, where = given_item, f"input[{place}]"
        if item.get("type") == "item_reference":
            item = _referenced(item, context.memory, where)
        kind = item.get("type", "message")
        by_model = kind != "message" or item["role"] == "assistant"
        rank = _RANKS.get(kind) if by_model else None
        if rank is None:
            messages.append(_input(item, where, context.images))
            last_rank = len(_RANKS)
            continue
        if rank < last_rank or (rank == last_rank and rank < _RANKS["function_call"]) or last_rank == len(_RANKS):
            messages.append({"role": "assistant", "content": ""})
        _add_to_answer(messages[-1], item, kind, where)
        last_rank = rank
    return messages


def _referenced(item: Mapping[str, Any], memory: Memory, where: str) -> Mapping[str, Any]:
    for stored in list(memory.responses.values()):  # on a thread of its own if there are images
        for one in stored.body["output"]:
            if one["id"] == item["id"]:
                return dict(one)
    raise ApiError(f"'{where}' refers to {short_repr(item['id'])}, which is not stored here.", param=where)


def _input(item: Mapping[str, Any], where: str, images: ImageReader) -> dict[str, Any]:
    """Return the message of an item that the model did not write."""
    if item.get("type", "message") != "message":
        output = _content(item["output"], f"{where}.output", images)
        return {"role": "tool", "tool_call_id": item["call_id"], "content": output}
    content = _content(item["content"], f"{where}.content", images)
    if item["role"] != "user" and not isinstance(content, str):
        raise wrong_role(item["role"], f"{where}.content")
    return {"role": item["role"], "content": content}


def _add_to_answer(message: dict[str, Any], item: Mapping[str, Any], kind: str, where: str) -> None:
    if kind == "message":
        message["content"] = _text(item["content"])
    elif kind == "reasoning":
        if reasoning := _reasoning(item, where):
            message["reasoning_content"] = reasoning
    else:
        arguments = (
            item["arguments"] if kind == "function_call" else json.dumps({"input": item["input"]}, ensure_ascii=False)
        )
        function = {"name": item["name"], "arguments": arguments}
        call = {"id": item["call_id"], "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """Return the text of a reasoning item: its content, what we sealed, or else its summary."""
    if item.get("content"):
        return _text(item["content"])
    sealed = item.get("encrypted_content") or ""
    if sealed.startswith(SEALED):
        try:
            return base64.b64decode(sealed.removeprefix(SEALED), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise ApiError(f"'{where}.encrypted_content' is not what was given out.", param=where) from error
    return _text(item.get("summary") or "")


def _content(content: str | Sequence[Mapping[str, Any]], where: str, images: ImageReader) -> str | list[dict[str, Any]]:
    """Return a text or, if there are images, the parts of the content as chat completions have them."""
    if isinstance(content, str) or all(part["type"] != "input_image" for part in content):
        return _text(content)
    parts = []
    for place, part in enumerate(content):
        at = f"{where}[{place}]"
        if part["type"] != "input_image":
            parts.append({"type": "text", "text": part["text"]})
        elif part.get("image_url") is None:
            raise ApiError(f"'{at}' has no 'image_url': no files are kept here, send a data URL.", param=at)
        else:
            parts.append(images.from_url(part["image_url"], f"{at}.image_url"))
    return parts


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a string, or the texts of a list of parts."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _tools(given: Mapping[str, Any]) -> tuple[tuple[Mapping[str, Any], ...], frozenset[str], tuple[str, ...]]:
    """Return the tools to render, the names of the custom ones, and notes on those left out."""
    tools: list[dict[str, Any]] = []
    custom: set[str] = set()
    left_out: list[str] = []
    for tool in given.get("tools", []):
        kind = tool.get("type")
        if kind not in ("function", "custom"):
            left_out.append(f"tools of type {short_repr(kind)} are left out of the prompt: they are not run here")
            continue
        function: dict[str, Any] = {"name": tool["name"]}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        function["parameters"] = CUSTOM_SCHEMA if kind == "custom" else tool.get("parameters") or {"type": "object"}
        if kind == "custom":
            custom.add(function["name"])
        tools.append({"type": "function", "function": function})
    _check_choice(given.get("tool_choice"), {tool["function"]["name"] for tool in tools})
    return (() if given.get("tool_choice") == "none" else tuple(tools)), frozenset(custom), tuple(left_out)


def _check_choice(choice: Any, names: set[str]) -> None:
    if choice == "required" and not names:
        raise ApiError("'tool_choice' is 'required' but there are no 'tools'.", param="tool_choice")
    if isinstance(choice, dict) and choice["type"] != "allowed_tools" and choice["name"] not in names:
        raise ApiError(
            f"'tool_choice' is {short_repr(choice)}; it must be 'none', 'auto', 'required' or one of 'tools'.",
            param="tool_choice",
        )
