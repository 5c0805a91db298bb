"""The shapes that messages have in traces of applications.

In: what a call was given and what it answered, as a tracing library noted it: in the words of OpenAI, Anthropic or
LangChain, as objects or as their JSON. Out: messages and tools in OpenAI's. Raises `DatasetError` for anything else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from sharpen.errors import DatasetError

Message = dict[str, Any]
_LANGCHAIN = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool", "developer": "developer"}
_ROLES = {"system", "developer", "user", "assistant", "tool"}


def asked(value: Any) -> tuple[list[Message], list[Any]]:
    """Return the messages and the tools of a request."""
    value = loaded(value)
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}], []
    if isinstance(value, list):
        return _messages(value), []
    if isinstance(value, Mapping):
        if _is_message(value):
            return _messages([value]), []
        inner = loaded(value.get("messages"))
        if isinstance(inner, list):
            system = value.get("system")  # Anthropic's
            begin = [{"role": "system", "content": system}] if system else []
            return [*_messages(begin), *_messages(inner)], tools_of(value.get("tools"))
    raise DatasetError(f"what it was given has no messages: {short(value)}")


def answered(value: Any) -> list[Message]:
    """Return the answers: one for each choice."""
    value = loaded(value)
    if isinstance(value, str) and value:
        return [{"role": "assistant", "content": value}]
    if isinstance(value, list):
        found = [one for one in _messages(value) if one["role"] == "assistant"][-1:]
    elif isinstance(value, Mapping):
        found = list(_answers(value))
    else:
        found = []
    if not found:
        raise DatasetError(f"what it answered has no message of an assistant: {short(value)}")
    return found


def _answers(value: Mapping[str, Any]) -> Iterator[Message]:
    if isinstance(choices := value.get("choices"), list):
        for choice in choices:
            if isinstance(choice, Mapping) and isinstance(choice.get("message"), Mapping):
                yield from _messages([{"role": "assistant", **choice["message"]}])
    elif isinstance(generations := value.get("generations"), list):
        some = generations[0] if generations and isinstance(generations[0], list) else generations
        for one in some:
            if isinstance(one, Mapping) and isinstance(one.get("message"), Mapping):
                yield from _messages([one["message"]])
            elif isinstance(one, Mapping) and isinstance(one.get("text"), str):
                yield {"role": "assistant", "content": one["text"]}
    elif _is_message(value):
        yield from _messages([value])
    else:
        for name in ("message", "messages", "output"):
            inner = value.get(name)
            if isinstance(inner, str | list) or (isinstance(inner, Mapping) and _is_message(inner)):
                yield from answered(inner)
                return


def tools_of(value: Any) -> list[Any]:
    """Return tools in OpenAI's words, of a list in OpenAI's or Anthropic's."""
    found = []
    for tool in loaded(value) or ():
        if not isinstance(tool, Mapping):
            raise DatasetError(f"a tool is no object: {short(tool)}")
        if isinstance(tool.get("function"), Mapping):
            found.append(dict(tool))
        elif isinstance(tool.get("name"), str):
            names = {"description": "description", "input_schema": "parameters", "parameters": "parameters"}
            function = {ours: tool[theirs] for theirs, ours in names.items() if tool.get(theirs) is not None}
            found.append({"type": "function", "function": {"name": tool["name"], **function}})
        else:
            raise DatasetError(f"a tool has no name: {short(tool)}")
    return found


def loaded(value: Any) -> Any:
    """Return what JSON text says; any other text, and any other value, as it is."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def short(value: Any) -> str:
    """Return the beginning of a value."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_message(value: Mapping[str, Any]) -> bool:
    return _role(value)[0] is not None


def _messages(values: list[Any]) -> list[Message]:
    if len(values) == 1 and isinstance(values[0], list):  # LangChain's batch of one
        values = values[0]
    return [message for one in values for message in _message(one)]


def _role(one: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """Return the role of a message in any words, and where its fields are."""
    if isinstance(role := one.get("role"), str) and role in _ROLES:
        return role, one
    if isinstance(names := one.get("id"), list) and isinstance(fields := one.get("kwargs"), Mapping):  # serialized
        kind = str(names[-1]).removesuffix("Chunk").removesuffix("Message").lower()
        return _LANGCHAIN.get(kind), fields
    inner = one.get("data")
    return _LANGCHAIN.get(str(one.get("type"))), inner if isinstance(inner, Mapping) else one


def _message(one: Any) -> Iterator[Message]:
    """Yield a message; several of Anthropic's messages with results of tools."""
    role, fields = _role(one) if isinstance(one, Mapping) else (None, {})
    if role is None:
        raise DatasetError(f"a message has no role that is known: {short(one)}")
    message: Message = {"role": role}
    calls = [_tool_call(call) for call in fields.get("tool_calls") or ()]
    content = fields.get("content")
    if isinstance(content, list):
        parts: list[Any] = []
        for block in content:
            kind = block.get("type") if isinstance(block, Mapping) else None
            if kind == "tool_use":
                calls = calls or []
                if all(call["id"] != block.get("id") for call in calls):
                    calls.append(_function(block.get("id"), block.get("name"), block.get("input")))
            elif kind == "tool_result":
                inner = block.get("content")
                yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _content(inner or "")}
            elif kind == "thinking":
                message["reasoning_content"] = message.get("reasoning_content", "") + str(block.get("thinking"))
            else:
                parts.append(block)
        if not parts and content and role == "user":
            return
        content = _content(parts) if parts else ""
    message["content"] = content
    for name in ("reasoning_content", "name", "tool_call_id"):
        if isinstance(fields.get(name), str):
            message[name] = fields[name]
    if calls:
        message["tool_calls"] = calls
    yield message


def _content(content: Any) -> Any:
    """Return content in OpenAI's parts, as text if all of it is."""
    if not isinstance(content, list):
        return content
    parts: list[Message] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        source = part.get("source") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        elif kind in ("text", "input_text", "output_text"):
            parts.append({"type": "text", "text": str(part.get("text"))})
        elif kind == "image" and isinstance(source, Mapping):  # Anthropic's
            url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
        elif kind == "image_url":
            parts.append(part)
        else:
            raise DatasetError(f"a part of a message is neither text nor an image: {short(part)}")
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _tool_call(call: Any) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if isinstance(function, Mapping):
        return _function(call.get("id"), function.get("name"), function.get("arguments"))
    if isinstance(call, Mapping):  # LangChain's
        return _function(call.get("id"), call.get("name"), call.get("args"))
    raise DatasetError(f"a tool call is no object: {short(call)}")


def _function(id_: Any, name: Any, arguments: Any) -> Message:
    if not isinstance(name, str):
        raise DatasetError(f"a tool call has no name: {short(name)}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {"id": str(id_ or ""), "type": "function", "function": {"name": name, "arguments": text}}
