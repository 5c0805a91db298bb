"""Old text is dropped from a journal: what goes, what stays, and that its space is used again."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
from experience_builders import make_call, make_group, make_rollout
from test_journal import same

from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.reading import read_groups
from sharpen.types import Group


def group_of(step: int, *, said: str = "said", number: int = 0, tokens: int = 5) -> Group:
    """A group that was made for this step: two rollouts of two calls, the second of which builds on the first."""
    id_ = f"step-{step - 1}/task-{number}"

    def rollout(index: int):
        ids = np.arange(tokens)
        asked = {"role": "user", "content": f"asked {said} in step {step}"}
        answer = {"role": "assistant", "content": f"answered {said} in step {step}"}
        first = make_call(0, ids, ids, messages=(asked,), response=answer, started=1.5)
        longer = np.concatenate([ids, ids, ids])
        messages = (asked, answer, {"role": "tool", "content": f"tool {said} in step {step}"})
        second = make_call(1, longer, ids, parent=0, messages=messages, response=answer)
        notes = {"states": {0: "start"}, "metrics": {"m": 1.5}, "traceback": f"traceback {said} in step {step}"}
        return make_rollout([first, second], 0.5, id_, index, error="KeyError: 1", **notes)

    group = make_group([rollout(0), rollout(1)], id_)
    return replace(group, attempts=(rollout(0),), baseline=replace(rollout(0), index=2))


def without_text(group: Group) -> Group:
    def bare(rollout):
        calls = tuple(replace(call, messages=(), response={}) for call in rollout.calls)
        return replace(rollout, calls=calls, traceback=None, trimmed=True)

    return replace(
        group,
        rollouts=tuple(map(bare, group.rollouts)),
        attempts=tuple(map(bare, group.attempts)),
        baseline=bare(group.baseline),
    )


def test_the_text_of_old_steps_goes_and_everything_else_stays(tmp_path: Path) -> None:
    """Red when a call keeps counting messages of its base, which has none any more."""
    path, groups = tmp_path / "run.db", [group_of(step) for step in (1, 2, 3)]
    with Journal(path) as journal:
        for group in groups:
            journal.add(group)
        journal.trim(2)
    found = tuple(read_groups(path))
    assert same(found, (without_text(groups[0]), without_text(groups[1]), groups[2]))
    content = path.read_bytes()
    for step, there in ((1, False), (2, False), (3, True)):
        for kind in ("asked", "answered", "tool", "traceback"):
            assert (f"{kind} said in step {step}".encode() in content) is there


def test_it_is_trimmed_again_and_a_repeated_step_too(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with Journal(path) as journal:
        journal.add(group_of(1))
        journal.trim(1)
        journal.trim(1)
        journal.add(group_of(1, said="again"))
        journal.trim(0)
    assert [group.rollouts[0].trimmed for group in read_groups(path)] == [True, False]
    with Journal(path) as journal:
        journal.trim(1)
    assert same(tuple(read_groups(path)), (without_text(group_of(1)),) * 2)


def test_the_space_of_dropped_text_is_used_again(tmp_path: Path) -> None:
    """Red when rows are only shortened where they are: each leaves a hole on its page, and the file grows by what
    was dropped."""
    sizes = {}
    for keep in (1, 100):
        path = tmp_path / f"{keep}.db"
        with Journal(path) as journal:
            for step in range(1, 61):
                journal.add(group_of(step, said="word " * 150))
                journal.trim(step - keep)
                journal.flush()
        sizes[keep] = path.stat().st_size
    text = (
        60 * 4 * sum(len(json.dumps(m)) for c in group_of(1, said="word " * 150).rollouts[0].calls for m in c.messages)
    )
    assert sizes[100] - sizes[1] > 0.6 * text


def test_a_journal_from_before_trimming_is_read_and_trimmed(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with Journal(path) as journal:
        journal.add(group_of(1))
    with closing(sqlite3.connect(path)) as connection:
        assert not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'trimmed'").fetchall()
    assert same(tuple(read_groups(path)), (group_of(1),))
    with Journal(path) as journal:
        journal.trim(1)
    assert same(tuple(read_groups(path)), (without_text(group_of(1)),))


def test_free_space_is_given_back_at_the_end(tmp_path: Path) -> None:
    """Red without `incremental_vacuum`, or if only its first page is awaited."""
    path = tmp_path / "run.db"
    with Journal(path) as journal:
        for number in range(50):
            journal.add(group_of(1, said="word " * 400, number=number))
        journal.flush()
        with closing(sqlite3.connect(path)) as connection:
            (before,) = connection.execute("PRAGMA page_count").fetchone()
        journal.trim(1)
    with closing(sqlite3.connect(path)) as connection:
        (after,), (free,) = (connection.execute(f"PRAGMA {name}_count").fetchone() for name in ("page", "freelist"))
    assert free == 0
    assert after < before / 2


def test_dropped_text_is_not_on_the_disk_when_the_journal_is_closed(tmp_path: Path) -> None:
    """Red without `secure_delete`: free pages keep what stood there until something is written over them."""
    path = tmp_path / "run.db"
    with Journal(path) as journal:
        for number in range(50):
            journal.add(group_of(1, said="word " * 400, number=number))
        journal.trim(1)
    assert b"word word" not in path.read_bytes()
    assert not path.with_name("run.db-wal").exists()
