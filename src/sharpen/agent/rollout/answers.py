"""A rollout in a few lines, for lists: the row of its task, and what the model said last.

In: a task's row, a rollout. Out: short lines of text, as they are: whoever prints them escapes control characters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from sharpen.agent.transcript import message_text
from sharpen.types import Group, Rollout

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
