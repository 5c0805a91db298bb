"""Reading commands over a run that has ended, and over one that was killed: its directory stays byte for byte and name
for name, and the latest run stays the latest."""

import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from shop_runs import Maker, RunSize, make_run
from starlette.testclient import TestClient

from sharpen.cli.main import main
from sharpen.config.recorded import latest_last
from sharpen.errors import JournalError
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.opening import reading
from sharpen.learning.experience.reading import read_steps
from sharpen.show.view.folders import Folder
from sharpen.show.view.library import Library
from sharpen.show.view.server import make_app

JOURNALS = ("run.db", "evaluations.db")
JUDGE = "async def judge(task, response):\n    return 1.0\n"


def content(run: Path) -> Mapping[str, tuple[bytes, int]]:
    """Each file below a folder, with the time at which it was written."""
    paths = (path for path in run.rglob("*") if path.is_file())
    return {str(path.relative_to(run)): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def kill(run: Path, *, shared: bool = True) -> Path:
    """Give a run the logs that a kill leaves, with SQLite's shared memory or without it; a group and a step are in
    them alone."""
    maker, aside = Maker(size=RunSize(steps=3)), run.parent / "aside"
    for name in JOURNALS:
        with Journal(run / name) as journal:
            journal.add(maker.group(2, 0))
            journal.add_step(3, 3, {"reward/mean": 0.5})
            journal.flush()
            aside.mkdir()
            for ending in ("", "-wal", "-shm"):
                shutil.copyfile(run / f"{name}{ending}", aside / f"{name}{ending}")
        for ending in ("", "-wal", "-shm") if shared else ("", "-wal"):
            shutil.copyfile(aside / f"{name}{ending}", run / f"{name}{ending}")
        shutil.rmtree(aside)
    return run


@pytest.fixture(params=["ended", "killed", "killed, copied without shared memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    run = make_run(tmp_path / "runs" / "project" / "read", Maker(size=RunSize(steps=2)), ended=request.param == "ended")
    if request.param != "ended":
        kill(run, shared=request.param == "killed")
    for path in run.rglob("*"):
        os.utime(path, (1e9, 1e9), follow_symlinks=False)
    return run


def test_no_reading_command_writes_into_a_run(run: Path, tmp_path: Path, capsys):
    """Red with `mode=ro` alone: SQLite left `run.db-wal` and `run.db-shm` beside a journal at rest, and wrote into the
    shared memory of a killed run."""
    (tmp_path / "judge.py").write_text(JUDGE)
    other, before = shutil.copytree(run, tmp_path / "runs" / "project" / "other", symlinks=True), content(run)
    first = {"sft": "rows.jsonl", "dpo": "pairs.jsonl", "datasets": "all.parquet"}
    commands = [
        ["show"],
        ["show", "--best"],
        ["show", "--failed"],
        ["show", "--step", "1", "--json"],
        ["diagnose"],
        ["certify", "--no-logprobs"],
        ["compare", str(other)],
        ["report", "--md"],
        ["report", "--output", str(tmp_path / "report.html")],
        ["rescore", "--judge", f"{tmp_path / 'judge.py'}:judge", "--output", str(tmp_path / "scores.jsonl")],
        *(["export", "--for", purpose, "--to", str(tmp_path / name)] for purpose, name in first.items()),
    ]
    for name, *rest in commands:
        assert main([name, str(run), *rest]) in (0, 1, 2), name
        assert content(run) == before, f"{name} wrote: {capsys.readouterr()}"
    assert main(["ls", "--root", str(tmp_path / "runs")]) == 0
    assert content(run) == before
    killed = (run / "run.db-wal").exists()
    assert [record.step for record in read_steps(run / "run.db")] == ([1, 2, 3] if killed else [1, 2])


def test_no_page_writes_into_a_run(run: Path, tmp_path: Path):
    before = content(run)
    library = Library([run], cache=tmp_path / "cache")
    app, key = make_app(library, token="t" * 22, port=8123), Folder.of(run).key
    library.index(Folder.of(run), wait_s=60)
    headers = {"authorization": f"Bearer {'t' * 22}"}
    http = TestClient(app, base_url="http://127.0.0.1:8123", headers=headers)
    pages = ["", "/step/1", "/tasks", "/rollouts", "/rollout/t1", "/rollout/e1"]
    for address in ["/", *(f"/run/{key}{page}" for page in pages)]:
        assert http.get(address).status_code == 200, address
    diagnosis = library.diagnoses.of(Folder.of(run), "now", wait_s=60)
    assert not diagnosis.pending
    assert not diagnosis.problem
    library.close()
    assert content(run) == before


def test_the_latest_run_is_the_one_that_recorded_last(tmp_path: Path, capsys):
    """Red with the times of files: a copy, a checkout of git or a note made an old run the latest."""
    root = tmp_path / "project"
    old, new = (make_run(root / name, Maker(size=RunSize(steps=1))) for name in ("old", "new"))
    shutil.copytree(old, root / "elsewhere", symlinks=True)
    shutil.rmtree(old)
    shutil.copytree(root / "elsewhere", old, symlinks=True)
    (old / "run.db-wal").touch()
    assert latest_last([new, old]) == [old, new]
    for command in (["show"], ["diagnose"], ["report", "--md"], ["certify", "--no-logprobs"]):
        main([*command, "--root", str(tmp_path)])
        assert f"the latest run is {new}\n" in capsys.readouterr().err, command
    again = json.loads((old / "resolved.json").read_text())  # it is continued
    again["run.started"]["value"] = time.time()
    (old / "resolved.json").write_text(json.dumps(again))
    main(["show", "--root", str(tmp_path)])
    assert f"the latest run is {old}\n" in capsys.readouterr().err


def test_what_a_run_writes_meanwhile_is_read(tmp_path: Path):
    """Its log is read where it is, with SQLite's locks: no record is missing, none is half there."""
    with Journal(tmp_path / "run.db") as journal:
        for step in range(1, 40):
            journal.add_step(step, step, {f"metric/{number}": 0.5 for number in range(500)})
            journal.flush()
            assert [record.step for record in read_steps(tmp_path / "run.db")] == [*range(1, step + 1)]


def test_a_journal_at_rest_that_is_written_meanwhile_is_not_taken_for_whole(tmp_path: Path):
    with Journal(tmp_path / "run.db") as journal:
        journal.add_step(1, 1, {"reward/mean": 0.5})
    with (
        pytest.raises(JournalError, match="written while it was read: read it again"),
        reading(tmp_path / "run.db"),
        Journal(tmp_path / "run.db") as journal,  # the run has come back
    ):
        journal.add_step(2, 2, {"reward/mean": 0.5})
