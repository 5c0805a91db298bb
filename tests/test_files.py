"""Files that others read are whole at any time, whoever writes them and where."""

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from sharpen.files import check_regular, check_writable, partial_files, write_whole


def test_several_writers_of_one_file_leave_one_whole_content(tmp_path: Path):
    """Red when they write under one name beside it: each cut what the other wrote, or took it away."""
    path, failures = tmp_path / "file", []
    contents = [bytes([number]) * 50_000 for number in range(8)]
    start = threading.Barrier(len(contents))

    def write(content: bytes) -> None:
        start.wait()
        try:
            for _ in range(5):
                write_whole(path, content)
                assert path.read_bytes() in contents
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=[content]) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert os.listdir(tmp_path) == ["file"]


def test_text_that_utf_8_cannot_hold_is_escaped(tmp_path: Path):
    write_whole(tmp_path / "file", "a\ud800ö")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "a\\ud800ö"


def test_a_device_is_written_and_not_replaced(tmp_path: Path):
    """Red when every file is replaced: `--output /dev/stdout` took the device's place."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        check_writable(tmp_path / "pipe")
        write_whole(tmp_path / "pipe", "text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_what_was_printed_stays_where_a_file_is_written_to_stdout(tmp_path: Path):
    """`--output /dev/stdout > file`. Red when the file behind it is replaced: what was printed went."""
    code = (
        "import sys; from pathlib import Path; from sharpen.files import check_writable, write_whole\n"
        "print('before'); path = Path('/dev/stdout'); check_writable(path); write_whole(path, 'content\\n')\n"
        "print('after')"
    )
    with (tmp_path / "file").open("w") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    assert (tmp_path / "file").read_text() == "before\ncontent\nafter\n"
    with (tmp_path / "other").open("w") as file:
        write_whole(Path(f"/dev/fd/{file.fileno()}"), "a")
        write_whole(Path(f"/proc/self/fd/{file.fileno()}"), "b")
    assert (tmp_path / "other").read_text() == "ab"


def test_who_may_read_a_file_stays_as_it_is(tmp_path: Path):
    """Red with the mode of a new file: a report for the group alone was everybody's."""
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(0o640)
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        write_whole(tmp_path / name, "text")
        assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
    write_whole(tmp_path / "new", "text")
    (tmp_path / "like").touch()
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "like").stat().st_mode


@pytest.mark.parametrize("target", [None, "/dev/zero"])
def test_what_is_no_file_is_named_wherever_it_is(target: str | None, tmp_path: Path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "latest").symlink_to("a", target_is_directory=True)
    (tmp_path / "best").symlink_to("gone")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "file").touch()
    check_regular(tmp_path)
    odd = tmp_path / "a" / "b" / "odd"
    if target is None:
        os.mkfifo(odd)
    else:
        odd.symlink_to(target)
    with pytest.raises(OSError, match="a pipe or a device") as error:
        check_regular(tmp_path)
    assert error.value.filename == str(odd)


def test_plain_files_are_not_looked_at_one_by_one(tmp_path: Path):
    """Red with two looks at each: a command that reads took 40,000 for a run of 20,000 images."""
    (tmp_path / "images").mkdir()
    for number in range(100):
        (tmp_path / "images" / str(number)).touch()
    looks: list[str] = []

    def note(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ in ("stat", "lstat"):
            looks.append(called.__name__)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        check_regular(tmp_path)
    finally:
        sys.setprofile(before)
    assert looks == []


def test_a_link_stays_one(tmp_path: Path):
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", b"text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"text"


@pytest.mark.parametrize("check", [check_writable, lambda path: write_whole(path, b"")])
def test_what_cannot_be_written_is_named(check, tmp_path: Path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "none" / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=path.name) as error:
            check(path)
        assert error.value.filename == str(path)
    check(tmp_path / "new")
    assert list(partial_files(tmp_path)) == []


def test_a_file_and_then_its_name_are_on_disk(tmp_path: Path):
    """Red without the flush of the folder (a power cut took the new name back), with one before the name is there, or
    without that of the content (the name was there, the file empty)."""
    path, flushed = tmp_path / "file", []
    path.write_text("before")

    def flush(descriptor: int) -> None:
        found = os.fstat(descriptor)
        kind = "folder" if stat.S_ISDIR(found.st_mode) else "file"
        if kind == "folder":
            assert os.path.samestat(found, tmp_path.stat())
        flushed.append((kind, found.st_size if kind == "file" else None, path.read_text()))

    write_whole(path, "after", flush=flush)
    assert flushed == [("file", len("after"), "before"), ("folder", None, "after")]
    write_whole(path, "later", lasting=False, flush=flush)
    assert len(flushed) == 2


@pytest.mark.parametrize(("number", "harmless"), [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)])
def test_a_file_system_that_cannot_flush_folders_is_no_failure(number: int, harmless: bool, tmp_path: Path):
    """Red with each error of the flush suppressed, and with none."""

    def flush(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))

    if harmless:
        write_whole(tmp_path / "file", "text", flush=flush)
    else:
        with pytest.raises(OSError, match="file") as caught:
            write_whole(tmp_path / "file", "text", flush=flush)
        assert caught.value.errno == number
    assert (tmp_path / "file").read_text() == "text"
