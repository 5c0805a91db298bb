"""The marks of a judge's owner: which answers are good and which are not.

In: a JSONL file, `{"task": {...}, "answer": "...", "mark": true}` on each line; a run, whose answers are to be marked.
Out: `Mark`s; a line for each new one, on disk before the next answer is shown.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sharpen.agent.transcript import answer_text
from sharpen.errors import ConfigError, DatasetError, DatasetNotFoundError
from sharpen.learning.experience.reading import read_groups
from sharpen.learning.experience.records import EVALUATIONS
from sharpen.types import Group

GOOD = {True: True, False: False, "good": True, "bad": False, "y": True, "n": False}
"""What a mark may be; 1 and 0 are true and false."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer to be marked: the row of its task, its text, and the id of its rollout (empty: unknown)."""

    task: Mapping[str, Any]
    text: str
    rollout: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An answer that its owner calls `good`, or not."""

    answer: Answer
    good: bool


def read_marks(path: Path) -> list[Mark]:
    """Read a file of marks. Raises `DatasetError` if it is not there or empty, or for a line that is no mark."""
    if not path.is_file():
        raise DatasetNotFoundError(
            f"there is no file of marks {path}: `sharpen judge label RUN --marks {path}` writes it"
        )
    marks = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                marks.append(_mark(line, f"{path}, line {number}"))
    if not marks:
        raise DatasetError(f"{path} has no marks: `sharpen judge label RUN --marks {path}` adds some")
    return marks


def add_mark(path: Path, mark: Mark) -> None:
    """Add a mark to a file, whose last line may have been written by hand and have no end. It is on disk when this
    returns. Raises `OSError`."""
    line = json.dumps(
        {
            "task": dict(mark.answer.task),
            "answer": mark.answer.text,
            "mark": mark.good,
            **({"rollout": mark.answer.rollout} if mark.answer.rollout else {}),
        },
        ensure_ascii=False,
        default=str,
    )
    with path.open("ab+") as file:
        file.seek(max(0, file.tell() - 1))
        end = b"" if file.read(1) in (b"", b"\n") else b"\n"
        file.write(end + f"{line}\n".encode(errors="replace"))
        file.flush()
        os.fsync(file.fileno())


def answers_to_mark(run_dir: Path, marked: Sequence[Mark], most: int, seed: int = 0) -> list[Answer]:
    """Return up to `most` answers of a run that are not marked yet, drawn with equal chances from all that ended with a
    reward, in training and evaluations. Raises `ConfigError` if the run has none."""
    known = {(json.dumps(dict(one.answer.task), default=str), one.answer.text) for one in marked}
    drawn: list[Answer] = []
    draw, seen = random.Random(seed), 0
    for answer in _answers(run_dir):
        key = (json.dumps(dict(answer.task), default=str), answer.text)
        if key in known:
            continue
        known.add(key)
        seen += 1
        if len(drawn) < most:
            drawn.append(answer)
        elif (place := draw.randrange(seen)) < most:
            drawn[place] = answer
    if not drawn and not marked:
        raise ConfigError(
            f"{run_dir} has no answers to mark: no rollout ended with a reward, or their text was dropped"
        )
    draw.shuffle(drawn)
    return drawn


def _answers(run_dir: Path) -> Iterator[Answer]:
    groups: list[Iterator[Group]] = [
        read_groups(path) for name in ("run.db", EVALUATIONS) if (path := run_dir / name).exists()
    ]
    for journal in groups:
        for group in journal:
            for rollout in group.rollouts:
                if rollout.reward is not None and not rollout.trimmed and (text := answer_text(rollout)):
                    yield Answer(task=group.task.row, text=text, rollout=rollout.id)


def _mark(line: str, place: str) -> Mark:
    try:
        content = json.loads(line)
    except ValueError as error:
        raise DatasetError(f"{place} is no JSON: {error}") from error
    task, text, mark = (content.get(name) if isinstance(content, dict) else None for name in ("task", "answer", "mark"))
    if not isinstance(task, dict) or not isinstance(text, str):
        raise DatasetError(f'{place} is no mark: write {{"task": {{...}}, "answer": "...", "mark": true}}')
    if not isinstance(mark, bool | int | str) or mark not in GOOD:
        raise DatasetError(f"{place}: mark is {mark!r}: it must be true or false (or 1, 0, good, bad, y, n)")
    answer = Answer(task=task, text=text, rollout=str(content.get("rollout", "")))
    return Mark(answer=answer, good=GOOD[mark])
