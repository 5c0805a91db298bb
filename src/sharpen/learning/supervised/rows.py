"""Reads the rows of a dataset into conversations, texts, or pairs of conversations, without a model.

In: a row and the names of its fields (`supervised` in the configuration). Out: `Conversation`, `Text` or `Pair`. Every
failure is a `DatasetError` that names the row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sharpen.agent.tasks.images import is_image, name_images, with_images
from sharpen.config.run import SupervisedConfig
from sharpen.errors import DatasetError
from sharpen.types import Task

Message = dict[str, Any]
Data = Literal["conversations", "texts", "pairs"]
_IMAGES = "images"
"""The field that is read for images where none is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages, and the tools that were available. The assistant's turns from message `first` on are trained, except
    those in `unweighted` (message numbers), which are context."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    first: int = 0
    unweighted: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Plain text, which is trained completely."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two continuations of one prompt, the better first."""

    chosen: Conversation
    rejected: Conversation


def read_row(task: Task, data: Data, fields: SupervisedConfig) -> Conversation | Text | Pair:
    """Read a row. Raises `DatasetError`, naming the row, if it does not have the format."""
    try:
        if data == "texts":
            return Text(text=_string(task.row, fields.text_key))
        if data == "pairs":
            return _pair(task.row, fields)
        return _conversation(task.row, fields)
    except DatasetError as error:
        raise DatasetError(f"row {task.id}: {error}") from None


class _RowError(DatasetError):
    """A problem with a row; `read_row` adds the row's id."""


def _conversation(row: Mapping[str, Any], fields: SupervisedConfig) -> Conversation:
    """Read a conversation from `messages`, or from `prompt` and `response`."""
    if row.get(fields.messages_key) is not None:
        messages = _messages(_parse_json(row[fields.messages_key], fields.messages_key), fields.messages_key, fields)
    elif row.get(fields.prompt_key) is not None:
        prompt = _prompt(row, fields)
        answer = _answer(row, fields.response_key, fields)
        messages = [*prompt, *answer]
    else:
        raise _RowError(
            f"it has neither {fields.messages_key!r} nor {fields.prompt_key!r}; its fields are: {', '.join(row)} "
            "(supervised.messages_key, prompt_key and response_key set which to read)"
        )
    first = 0
    if fields.turns == "last":
        answers = (number for number, message in enumerate(messages) if message.get("role") == "assistant")
        first = max(answers, default=0)
    return _make_conversation(messages, row, fields, first=first)


def _pair(row: Mapping[str, Any], fields: SupervisedConfig) -> Pair:
    """Read a pair from `prompt`, `chosen` and `rejected`. Without `prompt`, the two are whole conversations, and their
    common beginning is the prompt."""
    if row.get(fields.prompt_key) is not None:
        prompt = _prompt(row, fields)
        sides = [[*prompt, *_answer(row, key, fields)] for key in (fields.chosen_key, fields.rejected_key)]
        first = len(prompt)
    else:
        sides = [_messages(row.get(key), key, fields) for key in (fields.chosen_key, fields.rejected_key)]
        pairs = zip(*sides, strict=False)
        first = next((at for at, (one, other) in enumerate(pairs) if one != other), min(map(len, sides)))
    if sides[0] == sides[1]:
        raise _RowError(f"{fields.chosen_key!r} and {fields.rejected_key!r} are the same")
    chosen, rejected = (_make_conversation(side, row, fields, first=first) for side in sides)
    return Pair(chosen=chosen, rejected=rejected)


def _make_conversation(
    messages: list[Message], row: Mapping[str, Any], fields: SupervisedConfig, *, first: int
) -> Conversation:
    """Make a conversation with the row's tools. An answer with `weight` 0, as in OpenAI's format, becomes context."""
    unweighted, plain = set(), []
    for number, message in enumerate(with_images(messages, _images(row, fields, messages))):
        weight = message.get("weight", 1)
        if weight not in (0, 1) or isinstance(weight, bool):
            raise _RowError(f"message {number} has weight {weight!r}: it must be 0 or 1")
        if weight == 0:
            unweighted.add(number)
        plain.append({name: value for name, value in message.items() if name != "weight"})
    answers = [number for number, message in enumerate(plain) if message.get("role") == "assistant" and number >= first]
    if not answers:
        raise _RowError("it has no message of the assistant to learn from")
    if set(answers) <= unweighted:
        raise _RowError("every message of the assistant has weight 0, so there is nothing to learn")
    return Conversation(
        messages=tuple(plain[: answers[-1] + 1]),
        tools=_tools(row.get(fields.tools_key), fields.tools_key),
        first=first,
        unweighted=frozenset(unweighted),
    )


def _prompt(row: Mapping[str, Any], fields: SupervisedConfig) -> list[Message]:
    value = row[fields.prompt_key]
    if isinstance(value, str):
        return [*_system(fields), {"role": "user", "content": value}]
    return _messages(value, fields.prompt_key, fields)


def _answer(row: Mapping[str, Any], key: str, fields: SupervisedConfig) -> list[Message]:
    value = row.get(key)
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    if value is None:
        raise _RowError(f"it has no {key!r}; its fields are: {', '.join(row)}")
    return _plain_messages(value, key)


def _messages(value: Any, key: str, fields: SupervisedConfig) -> list[Message]:
    messages = _plain_messages(value, key)
    if messages[0].get("role") in ("system", "developer"):
        return messages
    return [*_system(fields), *messages]


def _plain_messages(value: Any, key: str) -> list[Message]:
    """Return messages without null fields, which tabular files add for fields that only other messages have."""
    if not isinstance(value, list) or not value or not all(isinstance(message, Mapping) for message in value):
        raise _RowError(f"{key!r} must be a list of messages (role and content), but it is {_short(value)}")
    return [{name: inner for name, inner in message.items() if inner is not None} for message in value]


def _system(fields: SupervisedConfig) -> list[Message]:
    return [] if fields.system_prompt is None else [{"role": "system", "content": fields.system_prompt}]


def _images(row: Mapping[str, Any], fields: SupervisedConfig, messages: Iterable[Message]) -> Sequence[Any]:
    """Return the images that belong into the row's messages. A column that nobody named may be about something else:
    addresses, names of files, a count."""
    value: Any = row.get(_IMAGES if fields.images_key is None else fields.images_key)
    single = isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence)
    images = [image for image in ([value] if single else value) if image is not None]
    if fields.images_key is not None or name_images(messages) or all(map(is_image, images)):
        return images
    return ()


def _tools(value: Any, key: str) -> tuple[Mapping[str, Any], ...]:
    """Read tools in OpenAI's format, as a list or as JSON text. Null fields in a list, which tabular files add, are
    removed."""
    if value is None:
        return ()
    tools = _parse_json(value, key) if isinstance(value, str) else _without_nulls(value)
    if not isinstance(tools, list):
        raise _RowError(f"{key!r} must be a list of tools, or its JSON text, but it is {_short(value)}")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _RowError(
                f"{key!r} holds {_short(tool)}, but a tool must be a function with a name (OpenAI's format)"
            )
    return tuple(tools)


def _parse_json(value: Any, key: str) -> Any:
    """Parse JSON text; return other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise _RowError(f"{key!r} is not JSON: {error}") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_nulls(inner) for inner in value]
    return value


def _string(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise _RowError(f"{key!r} must be text, but it is {_short(value)}; its fields are: {', '.join(row)}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
