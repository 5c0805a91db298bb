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
from sharpen.gateway.context import Context, sampling_of
from sharpen.gateway.images import ImageReader, wrong_role
from sharpen.gateway.memory import Memory
from sharpen.gateway.protocols.responses_events import SEALED, ResponsesWriter
from sharpen.gateway.protocols.responses_items import with_urls
from sharpen.gateway.requests import (
    MAX_TOP_LOGPROBS,
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

HONOURED = frozenset(
    {
        *("include", "input", "instructions", "max_output_tokens", "model", "parallel_tool_calls"),
        *("previous_response_id", "reasoning"),
        *("store", "stream", "temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p"),
    }
)
HARMLESS = frozenset(
    {
        *("client_metadata", "max_tool_calls", "metadata", "moderation", "prompt_cache_key"),
        *("prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier", "stream_options"),
        *("truncation", "user"),
    }
)
REFUSED: Mapping[str, str] = {
    "background": "answers are waited for",
    "context_management": "send the input that the model is to see",
    "conversation": "send the whole input, or previous_response_id",
    "prompt": "templates of prompts are not kept here",
}
"""What is not supported, unless null, false or empty; each with what to do instead."""
CUSTOM_SCHEMA = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_RANKS = {"reasoning": 0, "message": 1, "function_call": 2, "custom_tool_call": 2}
"""The order of one answer's items."""


def parse_request(body: Any, context: Context) -> tuple[CallRequest, ResponsesWriter]:
    """Validate a decoded body. Raises `ApiError`."""
    given = given_fields(body)
    _refuse_unknown(given)
    conversation = [*_earlier(given, context.memory), *_conversation(given, context)]
    instructions = given.get("instructions", "")
    if not isinstance(instructions, str):
        raise ApiError(f"'instructions' is {short_repr(instructions)}; it must be a string.", param="instructions")
    messages = [*([{"role": "system", "content": instructions}] if instructions else []), *conversation]
    if not messages:
        raise ApiError("'input' is empty: it must be a string or a list of items.", param="input")
    tools, custom, notes = _tools(given)
    include = _include(given)
    stream = boolean(given, "stream")
    request = CallRequest(
        model=model_of(given, context.model_name),
        messages=tuple(messages),
        rendered=tuple(render_message(message, place) for place, message in enumerate(messages)),
        tools=tools,
        sampling=sampling_of(given, context, limit="max_output_tokens", max_temperature=2.0),
        top_logprobs=integer(given, "top_logprobs", 0, 0, MAX_TOP_LOGPROBS),
        stream=stream,
        template_kwargs=effort_of(_reasoning_of(given).get("effort"), "reasoning.effort"),
        form=_form(given, tools),
        notes=notes,
    )
    writer = ResponsesWriter(
        memory=context.memory,
        given={**given, "input": with_urls(given.get("input", []), context.images.reference_of)},
        conversation=conversation,
        custom=custom,
        store=boolean({"store": True, **given}, "store"),
        sealed="reasoning.encrypted_content" in include,
        summary=_reasoning_of(given).get("summary") is not None,
        logprobs="message.output_text.logprobs" in include or request.top_logprobs > 0,
    )
    return request, writer


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if key in REFUSED and value:
            raise ApiError(f"'{key}' is not supported: {REFUSED[key]}.", param=key)
        if key not in HONOURED and key not in HARMLESS and key not in REFUSED:
            raise ApiError(f"Unknown parameter: '{key}'.", code="unknown_parameter", param=key)


def _form(given: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> Form | None:
    text = given.get("text", {})
    if not isinstance(text, dict):
        raise ApiError(f"'text' is {short_repr(text)}; it must be an object.", param="text")
    schema, strict = schema_of(text.get("format") or {"type": "text"}, "text.format")
    boolean(given, "parallel_tool_calls")
    choice = given.get("tool_choice")
    named = isinstance(choice, dict) and choice["type"] != "allowed_tools"
    return form_of(
        ("text.format", "tool_choice", "tools"),
        schema=schema,
        strict=strict,
        strict_tools=[tool["name"] for tool in given.get("tools", []) if tools and tool.get("strict") is True],
        called=_called(choice) if tools else None,
        single=named or given.get("parallel_tool_calls") is False,
    )


def _called(choice: Any) -> list[str] | None:
    """Return the tools of which one must be called, empty for all; None: none need be."""
    if not isinstance(choice, dict):
        return [] if choice == "required" else None
    if choice["type"] != "allowed_tools":
        return [choice["name"]]
    if choice.get("mode") != "required":
        return None
    return [tool["name"] for tool in choice.get("tools", []) if isinstance(tool, dict) and "name" in tool]


def _include(given: Mapping[str, Any]) -> frozenset[str]:
    include = given.get("include", [])
    if not isinstance(include, list) or not all(isinstance(one, str) for one in include):
        raise ApiError("'include' must be a list of strings.", param="include")
    return frozenset(include)


def _reasoning_of(given: Mapping[str, Any]) -> Mapping[str, Any]:
    reasoning = given.get("reasoning", {})
    if not isinstance(reasoning, dict):
        raise ApiError("'reasoning' must be an object.", param="reasoning")
    return reasoning


def _earlier(given: Mapping[str, Any], memory: Memory) -> Sequence[Mapping[str, Any]]:
    """Return the conversation up to the end of the answer that this request continues."""
    name = given.get("previous_response_id")
    if name is None:
        return ()
    stored = memory.responses.get(name) if isinstance(name, str) else None
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
    if not isinstance(said, list):
        raise ApiError(f"'input' is {short_repr(said)}; it must be a string or a list of items.", param="input")
    messages: list[dict[str, Any]] = []
    last_rank = len(_RANKS)
    for place, given_item in enumerate(said):
        item, where = given_item, f"input[{place}]"
        if not isinstance(item, dict):
            raise ApiError(f"'{where}' must be an object.", param=where)
        if item.get("type") == "item_reference":
            item = _referenced(item, context.memory, where)
        kind = item.get("type", "message")
        by_model = kind != "message" or item.get("role") == "assistant"
        rank = _RANKS.get(kind) if by_model and isinstance(kind, str) else None
        if rank is None:
            messages.append(_input(item, kind, where, context.images))
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
            if one["id"] == item.get("id"):
                return dict(one)
    raise ApiError(f"'{where}' refers to {short_repr(item.get('id'))}, which is not stored here.", param=where)


def _input(item: Mapping[str, Any], kind: Any, where: str, images: ImageReader) -> dict[str, Any]:
    """Return the message of an item that the model did not write."""
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "system", "developer"):
            raise ApiError(f"'{where}.role' is {short_repr(role)}; it must be a role.", param=f"{where}.role")
        content = _content(item.get("content"), f"{where}.content", images)
        if role != "user" and not isinstance(content, str):
            raise wrong_role(role, f"{where}.content")
        return {"role": role, "content": content}
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = _content(item.get("output"), f"{where}.output", images)
        return {"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": output}
    raise ApiError(
        f"'{where}' is an item of type {short_repr(kind)}, which is not supported here.", param=f"{where}.type"
    )


def _add_to_answer(message: dict[str, Any], item: Mapping[str, Any], kind: str, where: str) -> None:
    if kind == "message":
        message["content"] = _text(item.get("content"), f"{where}.content")
    elif kind == "reasoning":
        if reasoning := _reasoning(item, where):
            message["reasoning_content"] = reasoning
    else:
        arguments = (
            _string(item, "arguments", where)
            if kind == "function_call"
            else json.dumps({"input": _string(item, "input", where)}, ensure_ascii=False)
        )
        function = {"name": _string(item, "name", where), "arguments": arguments}
        call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """Return the text of a reasoning item: its content, what we sealed, or else its summary."""
    if item.get("content"):
        return _text(item["content"], f"{where}.content")
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str) and sealed.startswith(SEALED):
        try:
            return base64.b64decode(sealed.removeprefix(SEALED), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError) as error:
            raise ApiError(f"'{where}.encrypted_content' is not what was given out.", param=where) from error
    return _text(item.get("summary", []), f"{where}.summary")


def _content(content: Any, where: str, images: ImageReader) -> str | list[dict[str, Any]]:
    """Return a text or, if there are images, the parts of the content as chat completions have them."""
    kinds = (
        [part.get("type") if isinstance(part, dict) else None for part in content] if isinstance(content, list) else []
    )
    if "input_image" not in kinds:
        return _text(content, where)
    parts = []
    for place, (part, kind) in enumerate(zip(content, kinds, strict=True)):
        at = f"{where}[{place}]"
        if kind != "input_image":
            parts.append({"type": "text", "text": _text([part], where)})
        elif part.get("image_url") is None:
            raise ApiError(f"'{at}' has no 'image_url': no files are kept here, send a data URL.", param=at)
        else:
            parts.append(images.from_url(part["image_url"], f"{at}.image_url"))
    return parts


def _text(content: Any, where: str) -> str:
    """Return a string, or the texts of a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"'{where}' must be a string or a list of parts.", param=where)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in ("input_text", "output_text", "reasoning_text", "summary_text", "text"):
            raise ApiError(f"'{where}' has a part of type {short_repr(kind)}; only text is supported.", param=where)
        texts.append(_string(part, "text", where))
    return "".join(texts)


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ApiError(f"'{where}.{name}' is {short_repr(value)}; it must be a string.", param=f"{where}.{name}")
    return value


def _tools(given: Mapping[str, Any]) -> tuple[tuple[Mapping[str, Any], ...], frozenset[str], tuple[str, ...]]:
    """Return the tools to render, the names of the custom ones, and notes on those left out."""
    tools: list[dict[str, Any]] = []
    custom: set[str] = set()
    left_out: list[str] = []
    offered = given.get("tools", [])
    if not isinstance(offered, list) or not all(isinstance(tool, dict) for tool in offered):
        raise ApiError("'tools' must be a list of objects.", param="tools")
    for place, tool in enumerate(offered):
        kind = tool.get("type")
        if kind not in ("function", "custom"):
            left_out.append(f"tools of type {short_repr(kind)} are left out of the prompt: they are not run here")
            continue
        function: dict[str, Any] = {"name": _string(tool, "name", f"tools[{place}]")}
        if isinstance(tool.get("description"), str):
            function["description"] = tool["description"]
        function["parameters"] = CUSTOM_SCHEMA if kind == "custom" else tool.get("parameters") or {"type": "object"}
        if kind == "custom":
            custom.add(function["name"])
        tools.append({"type": "function", "function": function})
    hidden = _tool_choice(given, {tool["function"]["name"] for tool in tools}) == "none"
    return (() if hidden else tuple(tools)), frozenset(custom), tuple(left_out)


def _tool_choice(given: Mapping[str, Any], names: set[str]) -> str:
    choice = given.get("tool_choice", "auto")
    if choice in ("auto", "none", "required"):
        if choice == "required" and not names:
            raise ApiError("'tool_choice' is 'required' but there are no 'tools'.", param="tool_choice")
        return str(choice)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "allowed_tools":
        return "auto"
    if kind not in ("function", "custom") or choice.get("name") not in list(names):
        raise ApiError(
            f"'tool_choice' is {short_repr(choice)}; it must be 'none', 'auto', 'required' or one of 'tools'.",
            param="tool_choice",
        )
    return "named"
