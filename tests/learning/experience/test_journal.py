"""The journal: exact round trip, durability, failure, linear size."""

import pickle
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experience_builders import call_trees, make_call, make_group, make_rollout, two_turns
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpen.errors import JournalError
from sharpen.learning.algorithm.presets import PRESETS
from sharpen.learning.experience.draw import make_batch
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.reading import StepRecord, TrainedCall, read_groups, read_steps, read_trained
from sharpen.types import Call, Constraint, Group, Outcome, Rollout, Sampling, Span, Supports


def same(ours: Any, theirs: Any) -> bool:
    """Deep equality that looks into records and compares arrays by dtype, shape and value."""
    if isinstance(ours, np.ndarray):
        return ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    if is_dataclass(ours):
        return type(ours) is type(theirs) and all(
            same(getattr(ours, f.name), getattr(theirs, f.name)) for f in fields(ours)
        )
    if isinstance(ours, tuple):
        return len(ours) == len(theirs) and all(same(a, b) for a, b in zip(ours, theirs, strict=True))
    return bool(ours == theirs)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
messages = st.lists(st.dictionaries(st.sampled_from(["role", "content", "name"]), json_values, max_size=3), max_size=4)


@st.composite
def rollouts(draw: st.DrawFn, group: str, index: int) -> Rollout:
    calls: list[Call] = []
    for call in draw(call_trees(4)):
        history = (*calls[call.parent].messages, calls[call.parent].response) if call.parent is not None else ()
        calls.append(
            replace(
                call,
                logprobs_S=call.logprobs_S.astype(np.float32),
                sampling=replace(
                    call.sampling,
                    top_p=draw(st.sampled_from([1.0, 0.9])),
                    min_p=draw(st.sampled_from([0.0, 0.1])),
                    stop=draw(st.just(()) | st.just(("\n",))),
                ),
                finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
                messages=(*history, *draw(messages)),
                tools=tuple(draw(messages)),
                response={"role": "assistant", "content": draw(st.text(max_size=5))},
                seconds=draw(st.floats(0, 10)),
                started=draw(st.none() | st.floats(1e9, 2e9)),
                constraint=draw(st.none() | st.builds(Constraint, grammar=st.text(max_size=9), origin=st.just("x"))),
            )
        )
    reward = draw(st.none() | st.floats(-1, 1))
    return make_rollout(
        calls,
        reward,
        group,
        index,
        outcome=draw(st.sampled_from(Outcome)),
        metrics=draw(st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False), max_size=2)),
        error=draw(st.none() | st.text(st.characters(exclude_categories=("Cs",)), max_size=9)),
        traceback=draw(st.none() | st.just("Traceback\n  a line\nKeyError: 1")),
        started=draw(st.none() | st.floats(1e9, 2e9)),
        attempt=draw(st.integers(0, 3)),
    )


@settings(max_examples=30)
@given(st.data())
def test_groups_come_back_exactly(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    groups = [
        make_group(
            [data.draw(rollouts(name, i)) for i in range(2)],
            name,
            attempts=tuple([data.draw(rollouts(name, 0))][: len(name)]),
        )
        for name in ("a", "b")
    ]
    path = tmp_path_factory.mktemp("journal") / "run.db"
    with Journal(path) as journal:
        for group in groups:
            journal.add(group)
    found = list(read_groups(path))
    assert same(tuple(found), tuple(groups))


def test_groups_can_be_asked_for_by_id_and_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with Journal(path) as journal:
        for name in "abcb":
            journal.add(make_group([two_turns(group=name)], name))
    assert [group.id for group in read_groups(path, group_id="b")] == ["b", "b"]
    assert [group.id for group in read_groups(path, last=3)] == ["b", "c", "b"]


def test_values_that_json_cannot_hold_become_text(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    group = make_group([two_turns()])
    group = replace(group, task=replace(group.task, row={"image": b"\x00", "count": np.int64(3), "text": "\ud800"}))
    with Journal(path) as journal:
        journal.add(group)
    (found,) = read_groups(path)
    assert found.task.row == {"image": "b'\\x00'", "count": 3, "text": "\ud800"}


def test_steps_and_trained_calls_come_back(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    batch = make_batch([make_group([two_turns(1.0), two_turns(0.0, index=1)])], PRESETS["grpo"])
    with Journal(path) as journal:
        journal.add_step(1, 1, {"loss": 0.5, "tokens": np.float32(2)}, batch.experiences)
        journal.add_step(2, 2, {})
    assert read_steps(path) == [
        StepRecord(step=1, version=1, metrics={"loss": 0.5, "tokens": 2.0}),
        StepRecord(step=2, version=2, metrics={}),
    ]
    trained = read_trained(path, step=1)
    assert trained[1] == TrainedCall(
        step=1,
        group_id="g",
        rollout_id="g/0",
        call=1,
        num_tokens=1,
        advantage=float(batch.experiences[0].advantages_T[7]),
    )
    assert [(call.rollout_id, call.call, call.num_tokens) for call in trained] == [
        ("g/0", 0, 2),
        ("g/0", 1, 1),
        ("g/1", 0, 2),
        ("g/1", 1, 1),
    ]
    assert read_trained(path, step=2) == []


def count(path: Path, table: str) -> int:
    with closing(sqlite3.connect(path)) as connection:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def test_what_is_flushed_is_on_disk(tmp_path: Path) -> None:
    """Red when `flush` does not wait for the writer: another connection sees committed rows only."""
    path = tmp_path / "run.db"
    with Journal(path) as journal:
        for index in range(30):
            journal.add(make_group([two_turns(group=str(index))], str(index)))
        journal.flush()
        assert count(path, "groups") == 30


def test_a_journal_from_before_constraints_is_read_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    old, new = (make_group([two_turns(group=name)], name) for name in ("old", "new"))
    with Journal(path) as journal:
        journal.add(old)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE call_constraints")
    assert same(tuple(read_groups(path)), (old,))
    constraint = Constraint(grammar='start: "yes"', origin="response_format")
    (rollout, *others) = new.rollouts
    calls = tuple(replace(call, constraint=constraint) for call in rollout.calls)
    new = replace(new, rollouts=(replace(rollout, calls=calls), *others))
    with Journal(path) as journal:
        journal.add(new)
    assert same(tuple(read_groups(path)), (old, new))


def test_a_journal_from_before_supports_is_read_and_continued(tmp_path: Path) -> None:
    """Break: write the sizes of another type, or read supports of another rollout's calls."""
    path = tmp_path / "run.db"
    old, new = (make_group([two_turns(group=name)], name) for name in ("old", "new"))
    with Journal(path) as journal:
        journal.add(old)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE call_supports")
    assert same(tuple(read_groups(path)), (old,))
    supports = Supports(vocab_size=900, sizes_S=np.array([1, 2], np.int32), packed=b"\1\x80\1")
    (rollout, *others) = new.rollouts
    calls = tuple(replace(call, supports=supports) for call in rollout.calls)
    new = replace(new, rollouts=(replace(rollout, calls=calls), *others))
    with Journal(path) as journal:
        journal.add(new)
    assert same(tuple(read_groups(path)), (old, new))


def test_a_journal_from_before_start_times_is_read_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    old = make_group([two_turns(group="old")], "old")
    with Journal(path) as journal:
        journal.add(old)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE call_times")
        connection.execute("DROP TABLE call_seeds")
        connection.execute("DROP TABLE call_min_p")
        connection.execute("DROP TABLE rollout_notes")
    assert same(tuple(read_groups(path)), (old,))
    call = make_call(0, [1], [2], started=1.7e9 + 0.25, seeded=True, sampling=Sampling(min_p=0.25))
    new = make_group([make_rollout([call], group="new", started=1.7e9, traceback="\ud800 of no Unicode")], "new")
    with Journal(path) as journal:
        journal.add(new)
    (rollout,) = next(read_groups(path, group_id="new")).rollouts
    assert (rollout.calls[0].seeded, rollout.calls[0].sampling.min_p) == (True, 0.25)
    assert (rollout.started, rollout.calls[0].started, rollout.traceback) == (
        1.7e9,
        1.7e9 + 0.25,
        "\\ud800 of no Unicode",
    )


def test_a_journal_from_before_spans_is_read_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    old, new = (make_group([two_turns(group=name)], name) for name in ("old", "new"))
    with Journal(path) as journal:
        journal.add(old)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE call_traces")
    assert same(tuple(read_groups(path)), (old,))
    (rollout,) = new.rollouts
    calls = (replace(rollout.calls[0], span=Span(trace_id="a" * 32, span_id="b" * 16)), rollout.calls[1])
    new = replace(new, rollouts=(replace(rollout, calls=calls),))
    with Journal(path) as journal:
        journal.add(new)
    assert same(tuple(read_groups(path)), (old, new))


def test_a_journal_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    for name in "ab":
        with Journal(path) as journal:
            journal.add(make_group([two_turns(group=name)], name))
    assert [group.id for group in read_groups(path)] == ["a", "b"]


def test_it_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with Journal(path) as journal:
        journal.add(make_group([two_turns()]))
        journal.flush()
        assert len(list(read_groups(path))) == 1


def test_many_threads_may_add(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with Journal(path) as journal:

        def add(name: str) -> None:
            for index in range(20):
                journal.add(make_group([two_turns(group=f"{name}{index}")], f"{name}{index}"))
            journal.flush()

        threads = [threading.Thread(target=add, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert count(path, "groups") == 80


def big_group(name: str) -> Group:
    return make_group([make_rollout([make_call(0, range(4000), range(4000))], group=name)], name)


def test_a_full_disk_is_a_clear_error_at_the_next_call_and_nothing_is_lost_silently(tmp_path: Path) -> None:
    """Red when the writer swallows the failure of a transaction."""
    path = tmp_path / "run.db"
    journal = Journal(path, max_bytes=500_000)
    saved = 0

    def fill() -> None:
        nonlocal saved
        for saved in range(100):
            journal.add(big_group(str(saved)))
            journal.flush()

    with pytest.raises(JournalError, match=r"run\.db could not be written .*full.*1 groups or steps are not saved"):
        fill()
    assert saved > 2
    for failing in (
        lambda: journal.add(big_group("x")),
        journal.flush,
        journal.close,
        lambda: journal.add_step(1, 1, {}),
    ):
        with pytest.raises(JournalError, match="full"):
            failing()
    assert same(tuple(read_groups(path)), tuple(big_group(str(index)) for index in range(saved)))


def test_a_record_that_cannot_be_written_is_a_failure_too(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run.db")
    journal.add(make_group([make_rollout([make_call(0, [1], [2], response={"content": object()})])]))
    with pytest.raises(JournalError, match="TypeError: object cannot be written as JSON"):
        journal.close()


class Breaks(Mapping[str, Any]):
    """A part of a record; writing it does to the writer what the test says."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        self._act()
        return iter(())

    def __len__(self) -> int:
        return 0


def ends_the_writer() -> None:
    raise SystemExit


@pytest.mark.parametrize("end", ["rollback", "writer"])
def test_flush_never_waits_for_a_writer_that_is_gone(end: str, tmp_path: Path) -> None:
    """Red when a ROLLBACK that fails (the connection is gone in mid-transaction) ends the writer, or when
    nobody notices that it ended."""
    journal = Journal(tmp_path / "run.db")
    act = journal._connection.close if end == "rollback" else ends_the_writer
    journal.add(make_group([make_rollout([make_call(0, [1], [2], response={"content": Breaks(act)})])]))
    found: list[BaseException] = []

    def flush() -> None:
        try:
            journal.flush()
        except JournalError as error:
            found.append(error)

    waiting = threading.Thread(target=flush, daemon=True)
    waiting.start()
    waiting.join(120.0)
    assert not waiting.is_alive()
    assert "could not be written" in str(found[0])
    with pytest.raises(JournalError, match="could not be written"):
        journal.close()


def test_a_closed_journal_takes_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run.db")
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="is closed"):
        journal.add(make_group([two_turns()]))


def test_a_file_that_is_not_a_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    with pytest.raises(JournalError, match="cannot read"):
        read_steps(path)
    path.write_text("not a database, but long enough to look at" * 100)
    with pytest.raises(JournalError, match="cannot open"):
        Journal(path)
    other = tmp_path / "other.db"
    Journal(other).close()
    with closing(sqlite3.connect(other)) as connection, connection:
        connection.execute("UPDATE meta SET value = '99'")
    with pytest.raises(JournalError, match="schema version 99"):
        Journal(other)
    with pytest.raises(JournalError, match="schema version 99"):
        list(read_groups(other))


def test_a_database_without_a_schema_version_is_refused(tmp_path: Path) -> None:
    """Red when the missing row is read like any other: a `TypeError` instead of a `JournalError`."""
    path = tmp_path / "run.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE meta (key TEXT, value TEXT)")
    with pytest.raises(JournalError, match=r"run\.db has no schema version"):
        read_steps(path)


def test_errors_pickle() -> None:
    assert str(pickle.loads(pickle.dumps(JournalError("text")))) == "text"


TOOLS = tuple({"name": f"tool{i}", "description": "x" * 500} for i in range(4))


def conversation(num_turns: int, drops_thinking: bool) -> Group:
    """A rollout whose prompt grows by 100 ids a turn; with `drops_thinking` each forks off the ids before."""
    calls: list[Call] = []
    ids, told = list(range(300)), [{"role": "user", "content": "question " * 30}]
    for turn in range(num_turns):
        sampled = [7000 + turn] * 20 + list(range(30))
        response = {"role": "assistant", "content": f"{turn} " * 20}
        calls.append(
            make_call(
                turn,
                ids,
                sampled,
                parent=None if drops_thinking or turn == 0 else turn - 1,
                messages=tuple(told),
                tools=TOOLS,
                response=response,
                sampling=Sampling(max_tokens=64),
            )
        )
        ids = ids + (sampled[20:] if drops_thinking else sampled) + [5000 + turn] * 50
        told = [*told, dict(response), {"role": "tool", "content": "result " * 20}]
    return make_group([make_rollout(calls)])


@pytest.mark.parametrize("drops_thinking", [False, True])
def test_size_grows_linearly_with_turns(tmp_path: Path, drops_thinking: bool) -> None:
    """Red when a call stores its whole prompt (`_find_base` returns None)."""
    sizes = []
    for num_turns in (10, 20, 40):
        path = tmp_path / f"{num_turns}.db"
        group = conversation(num_turns, drops_thinking)
        with Journal(path) as journal:
            journal.add(group)
        with closing(sqlite3.connect(path)) as connection:
            (bytes_,) = connection.execute(
                "SELECT sum(length(prompt_suffix) + length(sampled) + length(logprobs) + length(versions)"
                " + length(messages_suffix) + length(response)) FROM calls"
            ).fetchone()
            (num_texts,) = connection.execute("SELECT count(*) FROM texts").fetchone()
        sizes.append(bytes_)
        assert num_texts == 2, "the tools and the task, once each"
        assert same(tuple(read_groups(path)), (group,))
    assert sizes[2] - sizes[1] < 2.1 * (sizes[1] - sizes[0])
