"""What ended a run early, in its summary: beside what is there, without secrets, until the next session."""

import json

import pytest

from sharpen.errors import NoSignalError
from sharpen.evidence.ended import Ended, forget_ended, note_ended, read_ended


def test_it_stands_beside_what_an_earlier_session_wrote(tmp_path):
    summary = tmp_path / "summary.json"
    summary.write_text('{"verdict": {"kind": "better"}, "steps": 5}')
    note_ended(tmp_path, NoSignalError("check: nothing"))
    assert json.loads(summary.read_text()) == {
        "verdict": {"kind": "better"},
        "run_dir": str(tmp_path),
        "steps": 5,
        "error": {"kind": "NoSignalError", "message": "check: nothing", "traceback": None},
    }
    found = read_ended(tmp_path)
    assert found is not None
    assert (found.line, found.interrupted) == ("NoSignalError: check: nothing", False)
    forget_ended(tmp_path)
    assert read_ended(tmp_path) is None
    assert json.loads(summary.read_text())["steps"] == 5


def test_an_interrupt_is_no_failure_and_a_fault_has_its_traceback(tmp_path):
    interrupted = Ended.by(KeyboardInterrupt())
    assert (interrupted.interrupted, interrupted.line) == (True, "interrupted, by Ctrl-C or SIGTERM")
    try:
        raise MemoryError
    except MemoryError as error:
        found = Ended.by(error)
    assert found.line == "MemoryError: MemoryError"
    assert "test_ended.py" in str(found.traceback)
    noted = ValueError("no such model")
    noted.add_note("in stage two:")
    assert Ended.by(noted).message == "in stage two:\nno such model"


def test_secrets_are_hidden(tmp_path, monkeypatch):
    monkeypatch.setenv("OWN_API_KEY", "kd8sjw7fnq20xm4v")
    note_ended(tmp_path, RuntimeError("refused: key kd8sjw7fnq20xm4v"))
    assert "kd8sjw7fnq20xm4v" not in (tmp_path / "summary.json").read_text()
    assert "refused: key ***" in (tmp_path / "summary.json").read_text()


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"error": 3}', '{"error": {"kind": "X"}}', "[" * 20_000])
def test_a_damaged_summary_is_as_good_as_none(tmp_path, content):
    (tmp_path / "summary.json").write_text(content)
    assert read_ended(tmp_path) is None
    forget_ended(tmp_path)
    note_ended(tmp_path, KeyboardInterrupt())
    assert read_ended(tmp_path) is not None


def test_a_folder_that_is_gone_hides_no_error(tmp_path):
    note_ended(tmp_path / "gone", NoSignalError("x"))
