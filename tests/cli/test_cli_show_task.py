"""`sharpen show --task`: which task and which evaluations it means."""

from __future__ import annotations

from pathlib import Path

import pytest

from sharpen.cli.main import BAD_INPUT, main
from sharpen.learning.experience.journal import Journal
from sharpen.types import Group, Outcome, Rollout, Task


def group(id_: str, reward: float) -> Group:
    """One evaluated task without calls, as from an endpoint."""
    task = id_.split("/sampled/")[1]
    rollout = Rollout(
        id=f"{id_}/0", group_id=id_, task_id=task, index=0, attempt=0, calls=(), outcome=Outcome.OK, reward=reward
    )
    return Group(id=id_, task=Task(id=task, index=0, row={}), version=0, rollouts=(rollout,))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    with Journal(tmp_path / "evaluations.db") as journal:
        for when, reward in (("before", 0.0), ("step-20", 0.25), ("after", 0.5), ("after", 1.0)):
            for tasks in ("held-out", "hard"):
                for number in (1, 11):
                    journal.add(group(f"{when}/{tasks}/sampled/test/{number}", reward))
        for task in ("hard/sampled/other/7", "held-out/sampled/one/12", "held-out/sampled/two/12"):
            journal.add(group(f"before/{task}", 0.0))
    (tmp_path / "resolved.json").write_text('{"model.model_path": {"value": "nowhere"}}')
    return tmp_path


def test_a_task_is_that_of_the_held_out_set_and_an_evaluation_done_again_counts_once(run_dir, capsys):
    assert main(["show", str(run_dir), "--task", "test/1"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "/held-out/" in line or "/hard/" in line]
    assert lines == [
        "before/held-out/sampled/test/1   reward 0  calls 0",
        "step-20/held-out/sampled/test/1  reward 0.25  calls 0",
        "after/held-out/sampled/test/1    reward 1  calls 0",
        "rollout before/held-out/sampled/test/1/0",
        "rollout after/held-out/sampled/test/1/0",
    ]
    assert main(["show", str(run_dir), "--task", "11"]) == 0
    assert "rollout after/held-out/sampled/test/11/0" in capsys.readouterr().out
    assert main(["show", str(run_dir), "--task", "hard/test/1"]) == 0
    assert "rollout after/hard/sampled/test/1/0" in capsys.readouterr().out
    assert main(["show", str(run_dir), "--task", "7"]) == 0
    shown = capsys.readouterr().out
    assert "=== BEFORE ===" in shown
    assert "=== AFTER ===" not in shown


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--task", "12"], "2 sampled tasks end with it: held-out/one/12, held-out/two/12"),
        (["--task", "9"], "e.g. hard/other/7, hard/test/1, hard/test/11"),
        (["--task", "test/1", "--mode", "greedy"], "no greedy task has this id"),
    ],
)
def test_what_fits_no_task_or_several_is_one_sentence(run_dir, capsys, given, words):
    assert main(["show", str(run_dir), *given]) == BAD_INPUT
    assert words in capsys.readouterr().err


def test_a_run_without_transcripts_says_so(tmp_path, capsys):
    assert main(["show", str(tmp_path), "--task", "1"]) == BAD_INPUT
    assert "has no evaluations.db" in capsys.readouterr().err
