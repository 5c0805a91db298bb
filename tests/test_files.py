"""A file that others read is whole, whoever writes it at the same time."""

import os
import threading

import pytest

from sharpen.files import write_whole


def test_several_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    """Red where two threads of a process share the file that is renamed: the second finds it gone."""
    path, failures = tmp_path / "image", []
    together = threading.Barrier(4)

    def write() -> None:
        try:
            together.wait()
            for _ in range(50):
                write_whole(path, b"content")
        except OSError as error:
            failures.append(error)

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert failures == []
    assert path.read_bytes() == b"content"
    assert list(tmp_path.iterdir()) == [path]


def test_text_is_written_in_utf_8(tmp_path):
    write_whole(tmp_path / "text", "größer")
    assert (tmp_path / "text").read_bytes() == "größer".encode()


def test_a_pipe_stays_a_pipe(tmp_path):
    """As `--output /dev/stdout` is. Red where it is replaced by a file."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(path, b"content")
    assert os.read(reader, 100) == b"content"
    os.close(reader)
    assert path.is_fifo()


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "folder", b"content")
    assert [one.name for one in tmp_path.iterdir()] == ["folder"]
