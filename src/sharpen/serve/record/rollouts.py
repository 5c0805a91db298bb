"""Every rollout of a journal as a row for `datasets`: what was said, what it was worth, what people think of it.

In: groups, thumbs and notes by rollout id. Out: a row with plain columns for each conversation
of a rollout; a JSON Lines or a Parquet file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpen.agent.transcript import content_text
from sharpen.serve.record.rows import LeftOut, Row, talks
from sharpen.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """What somebody thinks of a rollout: `up`, `down` or empty, and a text."""

    thumb: str = ""
    text: str = ""


def rollout_rows(groups: Iterable[Group], opinions: Mapping[str, Opinion], left_out: LeftOut) -> Iterator[Row]:
    """Yield a row for each conversation of each rollout, also of those that failed. `images` are the data URLs of its
    images, in order; in a message's text `[image_url]` stands for each. `task` is the task's row and `metrics` what was
    measured, both as JSON."""
    for group in groups:
        task = json.dumps(group.task.row, ensure_ascii=False, default=str)
        for rollout in group.rollouts:
            opinion = opinions.get(rollout.id, Opinion())
            for talk in talks(rollout, left_out, None):
                yield {
                    "messages": [_plain(message) for message in talk.messages],
                    "images": [url for message in talk.messages for url in _images(message)],
                    "tools": json.dumps(list(talk.tools), ensure_ascii=False) if talk.tools else None,
                    "rollout": rollout.id,
                    "group": group.id,
                    "task_id": group.task.id,
                    "task": task,
                    "reward": rollout.reward,
                    "outcome": rollout.outcome.value,
                    "metrics": json.dumps(dict(rollout.metrics), ensure_ascii=False),
                    "thumb": opinion.thumb,
                    "note": opinion.text,
                }


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write Parquet if the name ends so, else JSON Lines. Raises `OSError`, `FileExistsError` among them."""
    if path.suffix != ".parquet":
        with path.open("x", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
        return
    import pyarrow
    import pyarrow.parquet

    with path.open("xb") as file:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def _images(message: Mapping[str, Any]) -> Iterator[str]:
    content = message.get("content")
    for part in content if isinstance(content, list | tuple) else ():
        source = part.get("image_url") if isinstance(part, Mapping) else None
        if isinstance(source, Mapping) and str(source.get("url", "")).startswith("data:"):
            yield source["url"]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with the same fields as every other, so that it fits a table: content as text, tool calls as
    JSON."""
    calls = message.get("tool_calls")
    return {
        "role": str(message.get("role")),
        "content": content_text(message.get("content")),
        "reasoning_content": message.get("reasoning_content"),
        "tool_calls": json.dumps(calls, ensure_ascii=False) if calls else None,
        "tool_call_id": message.get("tool_call_id"),
        "name": message.get("name"),
    }
