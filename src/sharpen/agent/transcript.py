"""A rollout in a few lines, for lists: the row of its task, and what the model said last.

In: a task's row, a rollout. Out: short lines of text, as they are: whoever prints them escapes control characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sharpen.types import Group, Rollout

if TYPE_CHECKING:
    from sharpen.types import IntArray


# A rollout in a few lines, for lists: the row of its task, and what the model said last.
#
# In: a task's row, a rollout. Out: short lines of text, as they are: whoever prints them escapes control characters.

SHOWN = 300
"""The most characters of an answer or of a field."""
TRIMMED = "text of this rollout was dropped (journal.keep_steps)"
CONVERSATION = 10_000
"""The most characters of a conversation in a table: its end, which is what was said last."""


def last_answer(rollout: Rollout, most: int = SHOWN) -> str:
    """Return the text that the model said last, on one line; the tools that it called if it said nothing."""
    for call in reversed(rollout.calls):
        content = call.response.get("content")
        text = " ".join(content.split()) if isinstance(content, str) else ""
        if not text and (tools := call.response.get("tool_calls")):
            text = " ".join(f"-> {tool['function']['name']}({tool['function']['arguments']})" for tool in tools)
        if text:
            return text if len(text) <= most else f"{text[: most - 3]}..."
    return ""


def answer_text(rollout: Rollout) -> str:
    """Return the text of the last answer that the agent received; empty if there is none."""
    texts = [content_text(call.response.get("content")) for call in rollout.answers]
    return texts[-1] if texts else ""


def row_lines(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each field of a task's row."""
    for name, value in row.items():
        text = value if isinstance(value, str) else repr(value)
        text = " ".join(text.split())
        yield f"{name}: {text if len(text) <= SHOWN else f'{text[: SHOWN - 3]}...'}"


def best_and_worst(groups: Sequence[Group]) -> str:
    """Return the rollouts of the highest and the lowest reward in Markdown: task, answer, reward; empty without any."""
    scored = [(one.reward, group, one) for group in groups for one in group.rollouts if one.reward is not None]
    if not scored:
        return ""
    parts = []
    for name, pick in (("best", max), ("worst", min)):
        reward, group, rollout = pick(scored, key=lambda found: found[0])
        lines = [f"**{name}: reward {reward:g}** ({rollout.id})", *row_lines(group.task.row)]
        parts.append("\n\n".join([*lines, f"said: {last_answer(rollout)}"]))
    return "\n\n---\n\n".join(parts)


def rows_of(groups: Sequence[Group], most: int) -> list[dict[str, str | float | None]]:
    """Return a row for each of the first rollouts, `most` at most, for tables elsewhere."""
    rollouts = ((group, one) for group in groups for one in group.rollouts)
    return [_row_of(group, one) for group, one in islice(rollouts, most)]


def _row_of(group: Group, rollout: Rollout) -> dict[str, str | float | None]:
    last = rollout.calls[-1] if rollout.calls else None
    said = () if last is None else (*last.messages, last.response)
    conversation = "\n\n".join(f"{message.get('role')}: {message_text(message)}" for message in said)
    return {
        "rollout": rollout.id,
        "task": "\n".join(row_lines(group.task.row)),
        "conversation": conversation if len(conversation) <= CONVERSATION else f"...{conversation[3 - CONVERSATION :]}",
        "reward": rollout.reward,
        "outcome": rollout.outcome.value,
        "calls": float(len(rollout.calls)),
        "tokens": float(sum(len(call.sampled_ids_S) for call in rollout.calls)),
        "error": rollout.error or "",
    }


Decode = Callable[[Sequence[int]], str]
_CONTEXT_IDS, _MAX_PIECE = 4, 8
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_IMAGE = re.compile("sha256:([0-9a-f]{64})")
_DIRECTION = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def clean(text: str) -> str:
    """Escape control characters other than tabs and newlines, so that a model's text cannot control the terminal."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", text)


def clean_for_page(text: str) -> str:
    """Escape control characters, those that change the direction of writing, and half characters, which no page can
    carry: what is seen is what is there."""
    text = clean(text).encode("utf-8", "backslashreplace").decode()
    return _DIRECTION.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def pieces(ids_S: IntArray, decode: Decode | None) -> Iterator[tuple[int, int, str]]:
    """Yield the sampled tokens as text: (start, end, text) of mostly one token, or of several if a character is spread
    over them. Without `decode`, yield ids in angle brackets."""
    ids, start = ids_S.tolist(), 0
    for end in range(1, len(ids) + 1):
        if decode is None:
            text = f"<{ids[start]}>"
        else:
            context = ids[max(0, start - _CONTEXT_IDS) : start]
            text = decode([*context, *ids[start:end]])[len(decode(context)) :]
            if text.endswith("\ufffd") and end < len(ids) and end - start < _MAX_PIECE:
                continue
        yield start, end, text
        start = end


def content_text(content: Any, sizes: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return a message's content as text, with images by the beginning of their hash, and the types of other parts, in
    brackets. `sizes` are those of images by hash, to be said too."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        return json.dumps(content, ensure_ascii=False)
    parts = [part if isinstance(part, Mapping) else {"text": str(part)} for part in content]
    return "\n".join(str(part.get("text", f"[{_other_part(part, sizes)}]")) for part in parts)


def image_name(part: Mapping[str, Any]) -> str | None:
    """Return the hash of the recorded image that a part of a message stands for; None for another part."""
    source = part.get("image_url")
    found = _IMAGE.fullmatch(str(source.get("url", ""))) if isinstance(source, Mapping) else None
    return None if found is None else found[1]


def _other_part(part: Mapping[str, Any], sizes: Mapping[str, str]) -> str:
    name = image_name(part)
    if name is None:
        return str(part.get("type", "part"))
    return " ".join(["image", *([sizes[name]] if name in sizes else []), name[:12]])


def tool_calls(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the (name, arguments) of a message's tool calls; arguments that are no text as JSON."""
    found = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            arguments = function.get("arguments")
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            found.append((str(function.get("name")), text))
    return found


def message_text(message: Mapping[str, Any]) -> str:
    """Return all text of a message: reasoning, content, tool calls."""
    called = [f"{name} {arguments}" for name, arguments in tool_calls(message)]
    reasoning = message.get("reasoning_content")
    return "\n".join(filter(None, [str(reasoning or ""), content_text(message.get("content")), *called]))
