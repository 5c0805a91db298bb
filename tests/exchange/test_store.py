"""Where batches lie: the same promises of a folder and of a real PostgreSQL server."""

import shutil
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from sharpen.errors import ConfigError, JournalError
from sharpen.exchange.postgres import PostgresStore
from sharpen.exchange.store import FolderStore, Store, open_store


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where the server's package keeps its files is not ours to mend
        pgserver = pytest.importorskip("pgserver")
        folder = tmp_path_factory.mktemp("postgres")
        server = pgserver.get_server(folder, cleanup_mode="stop")
    yield server.get_uri()
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["folder", "postgres"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "shared") if request.param == "folder" else request.getfixturevalue("database")


@pytest.fixture
def store(address: str, tmp_path: Path) -> Iterator[Store]:
    found = open_store(address, tmp_path, f"P/{tmp_path}")
    yield found
    found.close()


def test_contents_are_kept_by_number(store):
    assert store.get(1) is None
    store.put(2, b"two \x00 \xff")
    store.put(1, b"")
    store.put(0, b"announcement")
    assert (store.get(1), store.get(2), store.get(0)) == (b"", b"two \x00 \xff", b"announcement")
    assert store.numbers() == [1, 2]
    store.put(2, b"again")
    store.remove(1)
    store.remove(7)
    assert store.get(2) == b"again"
    assert store.numbers() == [2]


def test_another_process_sees_a_content_whole_or_not_at_all(address, store, tmp_path):
    """Red for a file that is written in place."""
    large, seen = bytes(20_000_000), set()
    other = open_store(address, tmp_path, f"P/{tmp_path}")
    writer = threading.Thread(target=store.put, args=(1, large))
    writer.start()
    while writer.is_alive():
        seen.add(len(other.get(1) or b""))
    writer.join()
    seen.add(len(other.get(1) or b""))
    other.close()
    assert seen <= {0, len(large)}


def test_runs_share_a_database(database, tmp_path):
    one, other = (PostgresStore(database, f"{tmp_path}/{name}") for name in ("one", "other"))
    one.put(1, b"one")
    assert other.get(1) is None
    assert other.numbers() == []
    one.close()
    other.close()


def test_a_database_that_cannot_be_reached_is_named_without_the_password(tmp_path):
    with pytest.raises(ConfigError, match="nowhere") as found:
        open_store("postgresql://me:secret@nowhere.invalid:1/runs?connect_timeout=1", tmp_path, "P/run")
    assert "exchange" in str(found.value)
    assert "secret" not in str(found.value)


def test_a_lost_database_and_a_folder_that_is_gone_are_errors_of_ours(database, tmp_path):
    lost = PostgresStore(database, "P/lost")
    lost.close()
    for use in (lost.numbers, lambda: lost.get(1), lambda: lost.put(1, b"x"), lambda: lost.remove(1)):
        with pytest.raises(JournalError, match="exchange"):
            use()
    gone = FolderStore(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(JournalError, match="batch 3") as found:
        gone.put(3, b"x")
    assert str(tmp_path / "gone") in str(found.value)


def test_without_the_setting_the_run_has_a_folder_of_its_own(tmp_path):
    open_store(None, tmp_path, "P/run").put(3, b"x")
    assert FolderStore(tmp_path / "exchange" / "batches").numbers() == [3]
