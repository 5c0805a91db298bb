"""Where explorer and trainer leave things: the same promises of a folder and of a real PostgreSQL server."""

import os
import stat
import threading
import time
from pathlib import Path

import pytest

from sharpen.errors import ConfigError, JournalError
from sharpen.placement.exchange.store import LEFT_S, Batches, FolderStore, open_store


def test_contents_are_kept_by_name(store):
    assert store.get("weights/a") is None
    store.put("weights/b", b"two \x00 \xff")
    store.put("weights/a", b"")
    store.put("trainer.json", b"{}")
    assert (store.get("weights/a"), store.get("weights/b"), store.get("trainer.json")) == (b"", b"two \x00 \xff", b"{}")
    assert store.names("weights") == ["weights/a", "weights/b"]
    assert store.names("batches") == []
    store.put("weights/b", b"again")
    store.remove("weights/a")
    store.remove("weights/c")
    assert store.get("weights/b") == b"again"
    assert store.names("weights") == ["weights/b"]


def test_a_content_as_a_file(store):
    store.put("weights/b", b"two \x00 \xff")
    with store.file("weights/b") as file:
        assert file is not None
        assert file.read_bytes() == b"two \x00 \xff"
    with store.file("weights/none") as file:
        assert file is None


def test_batches_are_kept_by_number(store):
    batches = Batches(store)
    assert batches.get(1) is None
    batches.put(2, b"two")
    batches.put(1, b"one")
    batches.put(0, b"announcement")
    batches.put(1_000_000, b"many")
    assert (batches.get(1), batches.get(2), batches.get(0)) == (b"one", b"two", b"announcement")
    assert batches.numbers() == [1, 2, 1_000_000]
    batches.remove(1)
    batches.remove(7)
    assert batches.numbers() == [2, 1_000_000]


def test_of_several_that_store_the_same_batch_one_does(address, store, tmp_path):
    """Red when `put_new` looks first and stores then, and when each stores."""
    begin, stored = threading.Barrier(4), []

    def put(content: bytes) -> None:
        own = open_store(address, tmp_path, f"P/{tmp_path}")
        for number in range(1, 11):
            begin.wait(60)
            if Batches(own).put_new(number, content):
                stored.append((number, content))
        own.close()

    contents = [bytes([letter]) * 20_000_000 for letter in b"ab"] + [b"c", b""]
    threads = [threading.Thread(target=put, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for number, _ in stored) == [*range(1, 11)]
    assert all(Batches(store).get(number) == content for number, content in stored)
    assert not Batches(store).put_new(1, b"late")
    Batches(store).remove(1)
    assert Batches(store).put_new(1, b"again")


def test_a_batch_is_stored_if_the_answer_to_its_link_was_lost(tmp_path):
    """As on NFS, whose client repeats the request, and is told then that the name is taken: by its own file. Red
    before: not stored, so that its sessions went into the next batch, too."""

    def link_twice(own: Path, path: Path) -> None:
        os.link(own, path)
        os.link(own, path)

    def link_late(own: Path, path: Path) -> None:
        path.write_bytes(b"another's")
        os.link(own, path)

    def find_removed(own: Path, path: Path) -> None:
        raise FileExistsError(path)

    assert Batches(FolderStore(tmp_path, link=link_twice)).put_new(1, b"own")
    assert Batches(FolderStore(tmp_path)).get(1) == b"own"
    assert not Batches(FolderStore(tmp_path, link=link_late)).put_new(2, b"own")
    assert Batches(FolderStore(tmp_path)).get(2) == b"another's"
    assert not Batches(FolderStore(tmp_path, link=find_removed)).put_new(3, b"own")
    assert {file.name for file in (tmp_path / "batches").iterdir()} == {"000001.batch", "000002.batch"}


def test_the_name_of_a_new_batch_is_on_disk_when_it_is_stored(tmp_path):
    """Red before: after a power cut a batch could be gone that had been trained, and its sessions trained again."""
    flushed: list[set[str]] = []

    def flush(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            flushed.append({name for name in os.listdir(descriptor) if not name.startswith(".")})

    assert Batches(FolderStore(tmp_path, flush=flush)).put_new(1, b"one")
    assert flushed[0] == {"batches"}
    assert flushed[-1] == {"000001.batch"}


def test_another_process_sees_a_content_whole_or_not_at_all(address, store, tmp_path):
    """Red for a file that is written in place, and for parts that are committed one by one."""
    large, seen = bytes(20_000_000), set()
    other = open_store(address, tmp_path, f"P/{tmp_path}")
    writer = threading.Thread(target=store.put, args=("weights/a", large))
    writer.start()
    while writer.is_alive():
        seen.add(len(other.get("weights/a") or b""))
    writer.join()
    seen.add(len(other.get("weights/a") or b""))
    other.close()
    assert seen <= {0, len(large)}


def test_two_runs_share_an_address(address, tmp_path):
    if not address.startswith("postgresql"):  # each run has a folder of its own
        return
    one, other = (open_store(address, tmp_path, f"{tmp_path}/{name}") for name in ("one", "other"))
    one.put("batches/1", b"one")
    assert other.get("batches/1") is None
    assert other.names("batches") == []
    one.close()
    other.close()


def test_a_database_that_cannot_be_reached_is_named_without_the_password(tmp_path):
    with pytest.raises(ConfigError, match="nowhere") as found:
        open_store("postgresql://me:secret@nowhere.invalid:1/runs?connect_timeout=1", tmp_path, "P/run")
    assert "exchange" in str(found.value)
    assert "secret" not in str(found.value)


def test_several_hosts_are_an_address(tmp_path):
    """Red before: refused as none, though libpq reads it."""
    address = "postgresql://me:secret@nowhere.invalid:1,elsewhere.invalid:2/runs?connect_timeout=1"
    with pytest.raises(ConfigError, match=r"cannot use the database.*elsewhere") as found:
        open_store(address, tmp_path, "P/run")
    assert "secret" not in str(found.value)


@pytest.mark.parametrize("address", ["postgresql://me:secret@host:port/db", "postgres://["])
def test_an_address_that_is_none_is_bad_input(address, tmp_path):
    with pytest.raises(ConfigError, match="exchange") as found:
        open_store(address, tmp_path, "P/run")
    assert "secret" not in str(found.value)


def test_what_a_killed_process_left_is_removed(tmp_path):
    """Red before: as large as a model each, until the disk was full."""
    store, long_ago = FolderStore(tmp_path), time.time() - 2 * LEFT_S
    left = tmp_path / "weights" / ".ab12-3.safetensors.4711-0123abcd.partial"
    other = tmp_path / "batches" / ".000001.batch.4711-0123abcd.partial"
    for path in (left, other):
        path.parent.mkdir()
        path.write_bytes(b"half")
        os.utime(path, (long_ago, long_ago))
    used = left.with_name(".ab12-4.safetensors.4712-0123abcd.partial")
    used.write_bytes(b"hal")
    store.put("weights/b", b"whole")
    assert not left.exists()
    assert used.exists(), "another process is writing it"
    assert other.exists(), "nothing was put there yet"
    store.put("batches/1", b"whole")
    assert not other.exists()


def test_a_folder_that_is_gone_is_an_error_of_ours(tmp_path):
    gone = FolderStore(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(JournalError, match="batches/000003") as found:
        Batches(gone).put(3, b"x")
    assert str(tmp_path / "gone") in str(found.value)


def test_without_the_setting_the_run_has_a_folder_of_its_own(tmp_path):
    Batches(open_store(None, tmp_path, "P/run")).put(3, b"x")
    assert Batches(FolderStore(tmp_path / "exchange")).numbers() == [3]
    assert (tmp_path / "exchange" / "batches" / "000003.batch").exists()
