"""A run goes on with repaired rows where those that it has met are as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sharpen.learning.experience.journal import Journal
from sharpen.learning.supervised.batches import held_out_row
from sharpen.run.identity import changed_rows, used_rows_unchanged
from sharpen.types import Group, Task


def tasks(**changed: Any) -> list[Task]:
    rows = {f"train/{n}": {"question": f"{n} + {n}", "answer": str(2 * n)} for n in range(4)} | changed
    return [Task(id=id_, index=n, row=row) for n, (id_, row) in enumerate(rows.items())]


def test_rows_that_were_rolled_out(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    assert not used_rows_unchanged(path, tasks())
    journal = Journal(path)
    journal.add(Group(id="1/train/2", task=tasks()[2], version=0, rollouts=()))
    journal.close()
    assert used_rows_unchanged(path, tasks())
    assert used_rows_unchanged(path, tasks(**{"train/3": {"question": "3 + 3", "answer": "repaired"}}))
    assert not used_rows_unchanged(path, tasks(**{"train/2": {"question": "2 + 2", "answer": "another"}}))
    assert not used_rows_unchanged(path, tasks()[:2])


def test_used_rows_are_found_where_the_ids_say_or_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    assert changed_rows(path, tasks()) == []
    with Journal(path) as journal:
        for number in (1, 2):
            journal.add(Group(id=f"1/train/{number}", task=tasks()[number], version=0, rollouts=()))
    assert changed_rows(path, tasks()) == []
    assert changed_rows(path, tasks()[1:]) == [], "their places are others"
    assert changed_rows(path, tasks(**{"train/2": {"question": "other"}})) == ["train/2"]
    assert changed_rows(path, tasks()[:2]) == ["train/2"]


def test_rows_that_were_taught(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    journal = Journal(path)
    journal.add_taught(0, [held_out_row(Task(id="train/9", index=9, row={"held": "out"}))])
    journal.add_taught(1, [held_out_row(tasks()[1])])
    journal.close()
    assert used_rows_unchanged(path, tasks(**{"train/0": {"question": "repaired"}}))
    assert not used_rows_unchanged(path, tasks(**{"train/1": {"question": "another"}}))


def test_an_experts_rows_beside_rollouts_are_none_of_the_tasks(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with Journal(path) as journal:
        journal.add(Group(id="1/train/2", task=tasks()[2], version=0, rollouts=()))
        journal.add_taught(1, [held_out_row(Task(id="expert/rows/0", index=0, row={"prompt": "a", "response": "b"}))])
    assert changed_rows(path, tasks()) == []
    assert used_rows_unchanged(path, tasks())
