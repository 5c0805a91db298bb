"""A run on a read-only file system is read to its last record, and nothing is written there."""

import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sharpen.cli.main import main
from sharpen.config.load import resolve, write_resolved
from sharpen.errors import JournalError
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.opening import open_journal
from sharpen.learning.experience.reading import read_steps

_VERSION_3, _CAP_DAC_OVERRIDE = 0x20080522, 1


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing in a folder can be written or made. Root could all the same: this thread does without that right."""
    header, rights = (ctypes.c_uint32 * 2)(_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    system = ctypes.CDLL(None) if sys.platform == "linux" and os.geteuid() == 0 else None
    paths = [folder, *folder.rglob("*")]
    modes = {path: path.stat().st_mode for path in paths}
    for path in paths:
        path.chmod(modes[path] & 0o555)
    if system is not None:
        assert system.capget(header, rights) == 0
        before, rights[0] = rights[0], rights[0] & ~(1 << _CAP_DAC_OVERRIDE)
        assert system.capset(header, rights) == 0
    try:
        with pytest.raises(PermissionError):
            (folder / "new").touch()
        yield
    finally:
        if system is not None:
            rights[0] = before
            assert system.capset(header, rights) == 0
        for path in paths:
            path.chmod(modes[path])


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """What a kill leaves, copied without SQLite's file of shared memory: all records are in the log."""
    run_dir, source = tmp_path / "run", tmp_path / "source"
    source.mkdir()
    run_dir.mkdir()
    with Journal(source / "run.db") as journal:
        for step in (1, 2, 3):
            journal.add_step(step, step, {"reward/mean": 0.5})
        journal.flush()
        for name in ("run.db", "run.db-wal"):
            shutil.copyfile(source / name, run_dir / name)
    return run_dir


def test_records_that_are_in_the_log_are_read_from_a_copy(killed):
    """Red when the log is left out: the journal had no table, so that a killed run could not be looked at."""
    there = sorted(killed.iterdir())
    with read_only(killed):
        assert [record.step for record in read_steps(killed / "run.db")] == [1, 2, 3]
    assert sorted(killed.iterdir()) == there
    assert [record.step for record in read_steps(killed / "run.db")] == [1, 2, 3]


def test_a_journal_without_a_log_is_read_as_it_is(killed):
    read_steps(killed / "run.db")
    with Journal(killed / "run.db"):
        pass
    assert not (killed / "run.db-wal").exists()
    with read_only(killed):
        assert len(read_steps(killed / "run.db")) == 3


def test_a_journal_that_is_not_there_is_said(tmp_path):
    with read_only(tmp_path), pytest.raises(JournalError, match="unable to open"):
        open_journal(tmp_path / "run.db")


def test_commands_read_and_a_report_asks_for_another_place(killed, tmp_path, capsys):
    settings = {"train_dataset.path": "rows.jsonl", "model": {"model_path": "toy", "max_model_len": 64}}
    write_resolved(killed / "resolved.json", resolve(None, settings))
    (killed / "metrics.jsonl").write_text('{"step": 1, "time": 0, "reward/mean": 0.5}\n')
    with read_only(killed):
        assert main(["show", str(killed)]) == 0
        assert main(["diagnose", str(killed)]) == 0
        assert main(["certify", str(killed), "--no-logprobs"]) == 1
        assert "no check was recorded in 3 steps" in capsys.readouterr().out
        assert main(["report", str(killed)]) == 2
        assert "--output" in capsys.readouterr().err
        assert main(["report", str(killed), "--output", str(tmp_path / "report.html")]) == 0
    assert (tmp_path / "report.html").is_file()
