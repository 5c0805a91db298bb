"""Tests of the judge and the tasks: `pytest`. A judge that is wrong is learnt from all the same."""

import asyncio
import json
from pathlib import Path
from typing import Any

from judge import judge

TASKS = Path(__file__).with_name("tasks")


def reward(task: dict[str, Any], response: str | None) -> float:
    """What the judge gives."""
    return asyncio.run(judge(task, response)).reward


def test_the_judge_tells_right_from_wrong() -> None:
    task = {"question": "What is 3 + 4?", "answer": "7"}
    assert reward(task, "3 + 4 = 7") == 1.0
    assert reward(task, "7 or 8") == 0.0
    assert reward(task, "I do not know") == reward(task, None) == 0.0


def test_every_task_can_be_solved() -> None:
    """Its own answer gets the highest reward."""
    for split in ("train", "test"):
        for line in (TASKS / f"{split}.jsonl").read_text(encoding="utf-8").splitlines():
            task = json.loads(line)
            assert reward(task, task["answer"]) == 1.0, task


def test_held_out_tasks_are_not_trained_on() -> None:
    train, test = (set((TASKS / f"{split}.jsonl").read_text("utf-8").splitlines()) for split in ("train", "test"))
    assert not train & test
