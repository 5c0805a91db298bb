"""Runs that are killed at random moments and at aimed places, or interrupted twice: `make kills` does it more often."""

import json
import signal

import pytest
from aims import AIMS, ROOT
from kills import HERE, Harness, all_aims, forks, unbroken_run
from processes import forked

KILLS = 4


def test_every_aim_is_a_line_of_the_source():
    """Red for a line that was changed there, at which nobody was killed any more."""
    assert [aim for aims in AIMS.values() for aim in aims if not aim.numbers()] == []
    assert all((ROOT / aim.file).is_file() for aims in AIMS.values() for aim in aims)


@pytest.mark.parametrize(("most", "least"), [(1, 5), pytest.param(9, 10, marks=pytest.mark.slow)])
def test_a_step_that_is_killed_at_a_place_is_done_again(tmp_path, toy_model_dir, most, least):
    """Real SIGKILLs. Red when `point` (checkpoint.py) writes the pointer in its place, when `JsonlSink` keeps a line of
    a later step, when `write_directory` renames before all is written."""
    message = {"role": "user", "content": "question"}
    rows = [[message, {"role": "assistant", "content": "yes " * (number % 5 + 1)}] for number in range(20)]
    (tmp_path / "rows").mkdir()
    text = "".join(f"{json.dumps({'messages': row})}\n" for row in rows)
    (tmp_path / "rows" / "train.jsonl").write_text(text)
    arguments = [str(tmp_path / "runs"), str(toy_model_dir), str(tmp_path / "rows"), str(most)]
    with forked(str(HERE / "killed_bench.py"), *arguments) as process:
        said, errors = process.communicate()
    assert process.returncode == 0, errors
    killed = [kind for line in said.splitlines() if (kind := line.partition(": at ")[0]) in AIMS]
    assert set(killed) == AIMS.keys()
    assert len(killed) >= least


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["synchronous", "asynchronous"])
@pytest.mark.parametrize(
    "send", [[signal.SIGKILL], [signal.SIGINT, signal.SIGINT]], ids=["killed", "interrupted twice"]
)
def test_a_run_that_is_ended_anywhere_ends_as_if_nobody_had(tmp_path, toy_model_dir, toy_dataset, kind, send):
    unbroken = unbroken_run(tmp_path / "unbroken", toy_model_dir, toy_dataset, kind)
    harness = Harness(folder=tmp_path / "killed", kind=kind, unbroken=unbroken, seed=0, send=send)
    with forks(harness.folder, toy_model_dir, toy_dataset) as parent:
        harness.kill(parent, KILLS, all_aims(kind) if send == [signal.SIGKILL] else [])
        assert parent.stdin is not None
        parent.stdin.close()
    assert sum(harness.killed.values()) >= KILLS
