"""What only a database can do, or suffer: versions of its tables, connections that are lost, two that begin at once."""

import threading
import time
from collections.abc import Callable, Iterator

import psycopg
import pytest

from sharpen.errors import ConfigError, JournalError
from sharpen.placement.exchange.database import PART_BYTES, DatabaseStore
from sharpen.placement.exchange.store import Batches

pytestmark = pytest.mark.postgres


@pytest.fixture
def fresh(postgres: str) -> Iterator[Callable[[], str]]:
    """Make databases of their own, without any table."""
    made: list[str] = []

    def make() -> str:
        made.append(f"fresh_{len(made)}")
        with psycopg.connect(postgres, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {made[-1]}")
        return postgres.replace("/postgres?", f"/{made[-1]}?")

    yield make
    with psycopg.connect(postgres, autocommit=True) as connection:
        for name in made:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def test_a_table_of_an_earlier_sharpen_is_brought_to_this_version(fresh, tmp_path):
    """Its batches are there afterwards, under the same run and number; once."""
    address = fresh()
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE sharpen_exchange "
            "(run text NOT NULL, number integer NOT NULL, content bytea NOT NULL, PRIMARY KEY (run, number))"
        )
        rows = [("P/run", 0, b"announcement"), ("P/run", 12, b"twelve"), ("P/other", 12, b"other")]
        connection.cursor().executemany("INSERT INTO sharpen_exchange VALUES (%s, %s, %s)", rows)
    for _ in range(2):
        store = DatabaseStore(address, "P/run", tmp_path)
        batches = Batches(store)
        assert batches.numbers() == [12]
        assert (batches.get(0), batches.get(12)) == (b"announcement", b"twelve")
        store.close()


def test_explorer_and_trainer_may_begin_at_the_same_moment(fresh, tmp_path):
    """Red without the lock: one of them finds half of the tables."""
    for _ in range(3):
        address, begin, problems = fresh(), threading.Barrier(4), []

        def open_one(address: str, begin: threading.Barrier, problems: list[BaseException]) -> None:
            begin.wait(60)
            try:
                DatabaseStore(address, "P/run", tmp_path).close()
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=open_one, args=(address, begin, problems)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []


def test_tables_of_a_later_sharpen_are_refused(fresh, tmp_path):
    address = fresh()
    DatabaseStore(address, "P/run", tmp_path).close()
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute("UPDATE sharpen_schema SET version_num = '9999'")
    with pytest.raises(ConfigError, match="later Sharpen"):
        DatabaseStore(address, "P/run", tmp_path)


def test_a_connection_that_was_lost_is_made_anew(postgres, tmp_path):
    """As after a restart of the server, or a firewall that ends idle connections."""
    store = DatabaseStore(postgres, f"P/{tmp_path}", tmp_path)
    store.put("a", b"a")
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
    assert store.get("a") == b"a"
    store.close()


def test_a_database_that_cannot_be_used_is_an_error_of_ours_without_the_password(fresh, tmp_path):
    address = fresh()
    lost = DatabaseStore(address, f"P/{tmp_path}", tmp_path)
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute("DROP TABLE sharpen_contents")

    def whole() -> None:
        with lost.file("a"):
            pass

    uses = {"a could": [lambda: lost.get("a"), lambda: lost.put("a", b"x"), lambda: lost.remove("a"), whole]}
    for said, tries in {**uses, "batches could": [lambda: lost.names("batches")]}.items():
        for use in tries:
            with pytest.raises(JournalError, match=said) as found:
                use()
            assert "exchange" in str(found.value)
            assert "sharpen_contents" in str(found.value)
            assert "secret-word" not in str(found.value)
    lost.close()
    with pytest.raises(JournalError, match="closed"):
        lost.get("a")


def test_a_large_content_is_stored_in_parts(postgres, tmp_path):
    """A value has at most a gigabyte; weights have many."""
    store, large = (
        DatabaseStore(postgres, f"P/{tmp_path}", tmp_path),
        bytes(range(256)) * (2 * PART_BYTES // 256) + b"end",
    )
    store.put("weights/a", large)
    with psycopg.connect(postgres) as connection:
        sizes = connection.execute(
            "SELECT length(content) FROM sharpen_contents WHERE run = %s ORDER BY part", (f"P/{tmp_path}",)
        ).fetchall()
    assert sizes == [(PART_BYTES,), (PART_BYTES,), (3,)]
    assert store.get("weights/a") == large
    assert store.names("weights") == ["weights/a"]
    with store.file("weights/a") as file:
        assert file is not None
        assert file.read_bytes() == large
    store.put("weights/a", b"small")
    assert store.get("weights/a") == b"small"
    store.close()


def test_of_two_that_store_one_content_the_later_replaces_the_earlier(postgres, tmp_path):
    """Red before: `put` returned as if it had stored, and the content of the other was there."""
    store, run = DatabaseStore(postgres, f"P/{tmp_path}", tmp_path), f"P/{tmp_path}"
    insert = "INSERT INTO sharpen_contents (run, name, part, content) VALUES (%s, 'trainer.json', %s, 'other')"
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'INSERT%'"
    with psycopg.connect(postgres) as other, psycopg.connect(postgres, autocommit=True) as watching:
        other.cursor().executemany(insert, [(run, part) for part in range(3)])
        putting = threading.Thread(target=store.put, args=("trainer.json", b"mine"))
        putting.start()
        end = time.monotonic() + 60
        while watching.execute(waiting).fetchone() == (0,) and time.monotonic() < end:
            time.sleep(0.01)
        other.commit()
        putting.join(60)
    assert store.get("trainer.json") == b"mine"
    store.close()


def test_of_several_hosts_the_first_that_answers_is_used(postgres, tmp_path):
    """Red before: such an address, which libpq reads, was refused."""
    here = postgres.rpartition("host=")[2]
    address = f"postgresql://postgres:secret-word@%2Fnowhere:5432,{here}:5432/postgres"
    store = DatabaseStore(address, f"P/{tmp_path}", tmp_path)
    store.put("a", b"two \x00 \xff")
    assert store.get("a") == b"two \x00 \xff"
    assert "secret-word" not in store.where
    store.close()


def test_a_content_is_a_file_in_the_run_s_folder_and_a_full_disk_is_told(postgres, tmp_path):
    """Red before: weights lay in the system's folder of temporary files, and without room an OSError ended the run."""
    folder = tmp_path / "run" / "explore"
    store = DatabaseStore(postgres, f"P/{tmp_path}", folder)
    store.put("weights/a", b"weights")
    with store.file("weights/a") as file:
        assert file is not None
        assert file.parent == folder
    assert list(folder.iterdir()) == []
    store.put("weights/a", bytes(3 * PART_BYTES))
    (folder / ".exchange.partial").symlink_to("/dev/full")
    with pytest.raises(JournalError, match=r"weights/a could not be read.*Make room") as found, store.file("weights/a"):
        pass
    assert str(folder) in str(found.value)
    store.close()
