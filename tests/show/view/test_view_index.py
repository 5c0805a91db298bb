"""The index: what it holds, how it grows, when it is made anew."""

import os
import shutil
import sqlite3
import threading
from contextlib import closing

import pytest
from shop_runs import Maker, make_run, train

from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.reading import read_groups
from sharpen.show.monitor.metrics import JsonlSink
from sharpen.show.view.entries import TRAINING
from sharpen.show.view.folders import Folder
from sharpen.show.view.index import Index, IndexState


def whole(path, cache):
    index = Index(Folder.of(path), cache)
    while index.update():
        pass
    return index


def rows(index, sql="SELECT id FROM rollouts ORDER BY number"):
    with index.reading() as connection:
        return [tuple(row) for row in connection.execute(sql)]


def test_every_rollout_is_in_it_with_its_numbers(run, tmp_path):
    index = whole(run, tmp_path)
    groups = list(read_groups(run / "run.db"))
    expected = [
        (rollout.id, rollout.outcome.value, rollout.reward, len(rollout.calls), group.task.id)
        for group in groups
        for rollout in (*group.rollouts, *group.attempts)
    ]
    sql = f"SELECT id, outcome, reward, calls, task FROM rollouts WHERE place = '{TRAINING}' ORDER BY number"
    assert rows(index, sql) == expected
    tokens = sum(len(call.sampled_ids_S) for group in groups for one in group.rollouts for call in one.calls)
    assert rows(index, f"SELECT SUM(tokens) FROM rollouts WHERE place = '{TRAINING}' AND kind = 1") == [(tokens,)]
    longest = max(
        len(call.prompt_ids_P) + len(call.sampled_ids_S)
        for group in groups
        for one in group.rollouts
        for call in one.calls
    )
    assert rows(index, f"SELECT MAX(length) FROM rollouts WHERE place = '{TRAINING}'") == [(longest,)]
    rewards = [one.reward for one in groups[0].scored]
    assert rows(index, "SELECT mean FROM groups WHERE number = 2") == [(pytest.approx(sum(rewards) / len(rewards)),)]
    assert index.state().complete


def test_it_grows_with_the_run_and_reads_nothing_twice(live, tmp_path):
    index = whole(live, tmp_path)
    before = rows(index)
    maker = Maker(seed=1)
    with Journal(live / "run.db") as journal, closing(JsonlSink(live / "metrics.jsonl")) as metrics:
        train(maker, journal, metrics, 3)
        # The journal is open, as that of a running run: its last records are in its log.
        assert (live / "run.db-wal").stat().st_size
        assert not index.state().complete
        while index.update():
            pass
    after = rows(index)
    assert set(before) < set(after)
    assert len(after) == len(set(rows(index, "SELECT number FROM rollouts"))) == index.state().indexed
    assert any(name.startswith("step-2/") for (name,) in after)


def test_another_run_in_its_place_replaces_it(live, tmp_path):
    whole(live, tmp_path / "cache")
    shutil.rmtree(live)
    make_run(live, Maker(seed=7), until=1, ended=False)
    index = whole(live, tmp_path / "cache")
    expected = [one.id for group in read_groups(live / "run.db") for one in (*group.rollouts, *group.attempts)]
    assert [name for (name,) in rows(index) if name.startswith("step-")] == expected
    assert rows(index, "SELECT COUNT(*) FROM texts WHERE texts MATCH 'stock'")[0][0] == index.state().indexed


@pytest.mark.parametrize("damage", [b"not a database", b"", b"SQLite format 3\x00" + bytes(4000)])
def test_a_damaged_index_is_made_anew(live, tmp_path, damage):
    before = rows(whole(live, tmp_path))
    (path,) = tmp_path.glob("*/view.db")
    for name in ("view.db-wal", "view.db-shm"):
        path.with_name(name).unlink(missing_ok=True)
    path.write_bytes(damage)
    assert rows(whole(live, tmp_path)) == before


def scribble(path):
    """Write garbage over all pages but the first, which names the tables."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        size = connection.execute("PRAGMA page_size").fetchone()[0]
    content = path.read_bytes()
    assert len(content) > 4 * size
    path.write_bytes(content[:size] + b"\xa5" * (len(content) - size))


def retype(path):
    """Leave the tables of another version, with this version's mark."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("DROP TABLE words; CREATE TABLE words (number INTEGER PRIMARY KEY, question TEXT);")


@pytest.mark.parametrize(("damage", "opened"), [(scribble, False), (scribble, True), (retype, False)])
def test_an_index_that_is_damaged_inside_is_made_anew(live, tmp_path, damage, opened):
    """Red when `_prepare` does not compare the tables, or `update` passes an error of SQLite's on as it is."""
    index = whole(live, tmp_path)
    before = rows(index)
    (path,) = tmp_path.glob("*/view.db")
    damage(path)
    if not opened:
        index = Index(Folder.of(live), tmp_path)
    while index.update():
        pass
    assert rows(index) == before
    assert len(rows(index, "SELECT number, question, answer, error FROM words")) == len(before)


def lose(path):
    """Lose a table."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE words")


@pytest.mark.parametrize("damage", [scribble, lose])
def test_a_page_that_meets_a_damaged_index_comes_again(live, client, library, tmp_path, damage):
    """Red when `make_app` has no answer to `IndexMadeAnewError`."""
    http = client(live)
    address = f"/run/{Folder.of(live).key}/rollouts?format=json"
    before = http.get(address).json()["total"]
    (path,) = tmp_path.glob("cache/*/view.db")
    damage(path)
    for _ in range(3):
        response = http.get(address)
        if response.status_code != 303:
            break
        assert response.headers["location"] == address
    assert response.status_code == 200
    opened = library(live, cache=tmp_path / "cache")
    assert opened.index(Folder.of(live), wait_s=120).state().complete
    assert http.get(address).json()["total"] == before > 0


def test_an_error_of_a_journal_does_not_cost_the_index(live, tmp_path):
    """Red when `_remade_if_damaged` does not look at the index first."""
    index = whole(live, tmp_path)
    before = rows(index)
    with pytest.raises(sqlite3.DatabaseError), index.reading():
        raise sqlite3.DatabaseError("database disk image is malformed")
    assert rows(index) == before


def test_the_index_of_another_version_is_made_anew(live, tmp_path):
    before = rows(whole(live, tmp_path))
    (path,) = tmp_path.glob("*/view.db")
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("UPDATE meta SET value = '0'; DROP TABLE words; DROP TABLE rollouts;")
    assert rows(whole(live, tmp_path)) == before


def test_two_views_share_it(live, tmp_path):
    """Two processes update one index: each group is added once."""
    expected = rows(whole(live, tmp_path / "alone"))
    indexes = [Index(Folder.of(live), tmp_path / "shared") for _ in range(2)]

    def update(index):
        while index.update():
            pass

    threads = [threading.Thread(target=update, args=(index,)) for index in indexes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rows(indexes[0]) == expected
    assert rows(indexes[0], "SELECT COUNT(*) FROM texts WHERE texts MATCH 'stock'")[0][0] == len(expected)


def test_nothing_is_written_beside_a_run_at_rest(live, tmp_path):
    before = sorted(os.listdir(live))
    whole(live, tmp_path / "cache")
    assert sorted(os.listdir(live)) == before


def test_it_is_the_users_alone(live, tmp_path):
    whole(live, tmp_path / "cache")
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "cache").glob("*") if path.is_dir())


def test_indexes_of_runs_that_are_gone_are_removed(live, tmp_path, library):
    whole(live, tmp_path / "cache")
    (kept,) = (tmp_path / "cache").glob("*/view.db")
    library(live, cache=tmp_path / "cache").close()
    assert kept.exists()
    shutil.rmtree(live)
    library(tmp_path, cache=tmp_path / "cache").close()
    assert not kept.exists()


def test_without_a_cache_folder_it_is_temporary(live, tmp_path, library):
    """The cache's place is taken by a file."""
    (tmp_path / "taken").write_text("")
    opened = library(live, cache=tmp_path / "taken" / "cache")
    index = opened.index(opened.folders()[0], wait_s=120)
    assert index.state() == IndexState(indexed=len(rows(index)), total=len(rows(index)))
    place = index._path
    opened.close()
    assert not place.exists()
