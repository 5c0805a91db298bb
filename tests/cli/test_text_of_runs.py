"""Text of a run, of an agent, or of a file from a stranger reaches the terminal as text: it commands nothing there."""

import ast
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from shop_runs import Maker, RunSize, make_run

import sharpen.cli
from sharpen.cli.main import main

EVIL = "\x1b[31mred\x1b]0;title\x07\x9b2J"
COLUMNS = {
    "groups": ("id", "task_id"),
    "rollouts": ("id", "group_id", "task_id", "error"),
    "calls": ("finish_reason",),
    "trained": ("group_id", "rollout_id"),
    "spans": ("group_id", "rollout_id"),
    "step_groups": ("group_id",),
    "checks": ("first",),
    "rollout_notes": ("traceback",),
}
"""Columns of text that `sharpen` prints, or finds things by."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs, `evil` and `other`; the first has control characters in its names, answers, metrics and settings."""
    folder = tmp_path_factory.mktemp("runs")
    size = RunSize(steps=2, batch_size=1, group_size=2, tasks=2, held_out=2)
    said = {f"step-{step}/train/{step}/{index}": EVIL for step in range(2) for index in range(2)}
    make_run(folder / "evil", Maker(size=size, said=said))
    shutil.copytree(folder / "evil", folder / "other", symlinks=True)
    for name in ("run.db", "evaluations.db"):
        with closing(sqlite3.connect(folder / "evil" / name)) as journal:
            for table, columns in COLUMNS.items():
                for column in columns:
                    journal.execute(f"UPDATE {table} SET {column} = coalesce({column}, '') || ?", (EVIL,))
            journal.execute("UPDATE rollouts SET metrics = ?", (json.dumps({EVIL: 1.0}),))
            task_row = json.dumps({"question": EVIL, EVIL: EVIL})
            for (text,) in journal.execute("SELECT id FROM texts WHERE json LIKE '{%'").fetchall():
                journal.execute("UPDATE texts SET json = ?, hash = id WHERE id = ?", (task_row, text))
            journal.commit()
    path = folder / "evil" / "resolved.json"
    resolved = json.loads(path.read_text())
    resolved |= {name: {"value": EVIL, "origin": EVIL} for name in ("judge", "workflow", "model.model_path", EVIL)}
    path.write_text(json.dumps(resolved))
    for name in ("summary.json", "certificate.json"):
        path = folder / "evil" / name
        path.write_text(json.dumps(spoil(json.loads(path.read_text()))))
    (folder / "evil" / "metrics.jsonl").write_text(json.dumps({"step": 1, EVIL: 1.0, "reward/mean": 0.5}) + "\n")
    return folder


def spoil(value):
    if isinstance(value, dict):
        return {key: spoil(one) for key, one in value.items()} | {EVIL: EVIL}
    if isinstance(value, list):
        return [spoil(one) for one in value]
    return value + EVIL if isinstance(value, str) else value


def rollout_of(run: Path) -> str:
    with closing(sqlite3.connect(run / "run.db")) as journal:
        return str(journal.execute("SELECT id FROM rollouts LIMIT 1").fetchone()[0])


@pytest.mark.parametrize(
    "command",
    [
        "ls --root {runs}",
        "ls --root {runs} --json",
        "show {run}",
        "show {run} --best",
        "show {run} --best --json",
        "show {run} --failed",
        "show {run} --step 1",
        "show {run} --rollout ROLLOUT",
        "show {run} --rollout no-such",
        "show {run} --task ROLLOUT",
        "compare {run} {runs}/other",
        "compare {runs}/other {run} --json",
        "diagnose {run} --json",
        "certify {run}",
        "report {run} --md",
    ],
)
def test_nothing_of_a_run_commands_the_terminal(runs, command, capsys):
    run = runs / "evil"
    words = [word.format(run=run, runs=runs) for word in command.split()]
    main([rollout_of(run) if word == "ROLLOUT" else word for word in words])
    out, err = capsys.readouterr()
    assert not [one for one in out + err if one in "\x1b\x07\x9b\x7f"]
    assert out + err
    if "--json" in command and out:
        json.loads(out)


def test_commands_print_through_say():
    """`print` is called in one place of the command line, which makes control characters visible."""
    folder = Path(sharpen.cli.__file__).parent
    for path in folder.glob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        prints = [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
        assert not prints or path.name == "arguments.py", f"{path.name}, lines {prints}"
