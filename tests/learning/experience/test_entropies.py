"""Entropies and ratios of tokens in the journal."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
from experience_builders import make_group, two_turns

from sharpen.learning.experience.entropies import read_entropies, read_ratios
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.opening import open_journal
from sharpen.types import CallEntropies, FloatArray, Rollout


def of(call: int, places: list[int], entropies: list[float], rollout: str = "g/0") -> CallEntropies:
    """The entropies of one call, whose ratios are 1."""
    return CallEntropies(
        rollout_id=rollout,
        call=call,
        places_S=np.array(places, np.int32),
        entropies_S=np.array(entropies, np.float16),
        log_ratios_S=np.zeros(len(places), np.float16),
        clipped_S=np.zeros(len(places), np.bool_),
        entropy=sum(entropies),
        varentropy=0.5 * len(entropies),
        cumulative=0.25 * len(entropies),
    )


def moved(call: int, places: list[int], ratios: list[float], clipped: list[bool]) -> CallEntropies:
    """The ratios of one call, NaN for none."""
    log_ratios_S = np.log(np.array(ratios)).astype(np.float16)
    return replace(of(call, places, [1.0] * len(places)), log_ratios_S=log_ratios_S, clipped_S=np.array(clipped))


def read(path: Path, rollout: Rollout, *steps: int) -> dict[int, list[float | None]]:
    """The entropies of a rollout's calls, None where there are none."""

    def listed(entropies_S: FloatArray) -> list[float | None]:
        return [None if np.isnan(one) else float(one) for one in entropies_S]

    with closing(open_journal(path)) as connection:
        return {call: listed(found) for call, found in read_entropies(connection, rollout, steps).items()}


def ratios(path: Path, rollout: Rollout, *steps: int) -> dict[int, list[tuple[float | None, bool]]]:
    """The ratios of a rollout's calls, to three digits, None where there are none, and which tokens are clipped."""
    with closing(open_journal(path)) as connection:
        return {
            call: [
                (None if np.isnan(ratio) else round(float(ratio), 3), bool(clipped))
                for ratio, clipped in zip(found.ratios_S, found.clipped_S, strict=True)
            ]
            for call, found in read_ratios(connection, rollout, steps).items()
        }


def stored(path: Path, *columns: str) -> list[tuple[bytes | None, ...]]:
    """The columns of all calls as they are stored, in the order of the calls."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(f"SELECT {', '.join(columns)} FROM entropies ORDER BY call").fetchall()


def test_they_come_back_by_the_tokens_of_each_call(tmp_path: Path) -> None:
    """`two_turns`: a prompt of 3 and 2 sampled tokens, then 2 of a tool and 1 sampled: places 3, 4 and 7."""
    path, rollout = tmp_path / "run.db", two_turns()
    other = two_turns(index=1)
    with Journal(path) as journal:
        journal.add(make_group([rollout, other]))
        journal.add_step(1, 1, {}, entropies=[of(1, [7], [0.25]), of(0, [3, 4], [1.5, 2.0]), of(0, [4], [3.0], "g/1")])
    assert read(path, rollout, 1) == {0: [1.5, 2.0], 1: [0.25]}
    assert read(path, other, 1) == {0: [None, 3.0]}
    assert read(path, rollout, 2) == {}


def test_places_need_not_follow_each_other(tmp_path: Path) -> None:
    path, rollout = tmp_path / "run.db", two_turns(merged=False)
    with Journal(path) as journal:
        journal.add_step(1, 1, {}, entropies=[of(0, [4], [3.0])])
        journal.add_step(2, 2, {}, entropies=[of(0, [3], [1.0]), of(1, [7], [2.0])])
    assert read(path, rollout, 1) == {0: [None, 3.0]}
    assert read(path, rollout, 1, 2) == {0: [1.0, None], 1: [2.0]}
    assert read(path, rollout, 1, 3) == {0: [None, 3.0]}


def test_places_of_a_longer_call_of_the_same_name_are_left_out(tmp_path: Path) -> None:
    """Those of another rollout with this id, which a resumed run made anew: before its prompt's end, and behind."""
    path, rollout = tmp_path / "run.db", two_turns()
    with Journal(path) as journal:
        journal.add_step(1, 1, {}, entropies=[of(0, [1, 4, 9], [1.0, 2.0, 3.0])])
    assert read(path, rollout, 1) == {0: [None, 2.0]}


def test_a_step_that_is_trained_again_replaces_them(tmp_path: Path) -> None:
    path, rollout = tmp_path / "run.db", two_turns()
    with Journal(path) as journal:
        journal.add_step(1, 1, {}, entropies=[of(0, [3, 4], [1.0, 1.0]), of(1, [7], [1.0])])
        journal.add_step(1, 1, {}, entropies=[of(0, [3, 4], [2.0, 2.0])])
    assert read(path, rollout, 1) == {0: [2.0, 2.0]}


def test_an_older_journal_has_none_and_goes_on(tmp_path: Path) -> None:
    path, rollout = tmp_path / "run.db", two_turns()
    with Journal(path) as journal:
        journal.add(make_group([rollout]))
        journal.add_step(1, 1, {}, entropies=[of(0, [3, 4], [1.0, 1.0])])
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE entropies")
        connection.commit()
    assert read(path, rollout, 1) == {}
    with Journal(path) as journal:
        journal.add_step(2, 2, {}, entropies=[of(1, [7], [4.0])])
    assert read(path, rollout, 1, 2) == {1: [4.0]}


def test_ratios_and_clips_come_back_by_the_tokens_of_each_call(tmp_path: Path) -> None:
    """Those of the last step that has some; NaN and not clipped for a token that was not trained."""
    path, rollout = tmp_path / "run.db", two_turns()
    with Journal(path) as journal:
        journal.add(make_group([rollout]))
        journal.add_step(
            1, 1, {}, entropies=[moved(0, [3, 4], [1.25, 0.5], [True, False]), moved(1, [7], [2], [False])]
        )
        journal.add_step(2, 2, {}, entropies=[moved(0, [4], [0.75], [True])])
    assert ratios(path, rollout, 1) == {0: [(1.25, True), (0.5, False)], 1: [(2.0, False)]}
    assert ratios(path, rollout, 1, 2) == {0: [(None, False), (0.75, True)]}
    assert ratios(path, rollout, 3) == {}


def test_ratios_of_one_take_no_room_and_clips_only_where_there_are_some(tmp_path: Path) -> None:
    """A step of one update with the weights that sampled: rounding of 1e-4 is no ratio. The second call, which such a
    rounding is left out of (`clipb`), keeps its bit."""
    path, rollout = tmp_path / "run.db", two_turns()
    with Journal(path) as journal:
        journal.add(make_group([rollout]))
        journal.add_step(
            1, 1, {}, entropies=[moved(0, [3, 4], [1 + 1e-4, 1 - 1e-4], [False] * 2), moved(1, [7], [1], [True])]
        )
    assert stored(path, "log_ratios", "clipped") == [(b"", None), (b"", b"\x80")]
    assert ratios(path, rollout, 1) == {0: [(1.0, False)] * 2, 1: [(1.0, True)]}


def test_a_truncated_distribution_has_clips_and_no_ratio(tmp_path: Path) -> None:
    path, rollout = tmp_path / "run.db", two_turns()
    nan = float("nan")
    with Journal(path) as journal:
        journal.add(make_group([rollout]))
        journal.add_step(1, 1, {}, entropies=[moved(0, [3, 4], [nan] * 2, [False] * 2), moved(1, [7], [nan], [True])])
    assert stored(path, "log_ratios", "clipped") == [(None, None), (None, b"\x80")]
    assert ratios(path, rollout, 1) == {1: [(None, True)]}


def test_a_journal_without_the_columns_of_ratios_is_read_and_goes_on(tmp_path: Path) -> None:
    path, rollout = tmp_path / "run.db", two_turns()
    with Journal(path) as journal:
        journal.add(make_group([rollout]))
        journal.add_step(1, 1, {}, entropies=[of(0, [3, 4], [1.0, 2.0])])
    with closing(sqlite3.connect(path)) as connection:
        for column in ("log_ratios", "clipped"):
            connection.execute(f"ALTER TABLE entropies DROP COLUMN {column}")
        connection.commit()
    assert (read(path, rollout, 1), ratios(path, rollout, 1)) == ({0: [1.0, 2.0]}, {})
    with Journal(path) as journal:
        journal.add_step(2, 2, {}, entropies=[moved(1, [7], [1.5], [True])])
    assert (read(path, rollout, 1), ratios(path, rollout, 1)) == ({0: [1.0, 2.0]}, {})
    assert ratios(path, rollout, 1, 2) == {1: [(1.5, True)]}
