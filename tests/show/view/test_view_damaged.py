"""Run directories in every state open with what is there, and say what is missing."""

import json
import os
import shutil
import socket
import sqlite3
from contextlib import closing

import pytest
from addresses import PAGES

from sharpen.errors import JournalError
from sharpen.learning.experience.opening import open_journal
from sharpen.show.view.files import read_files
from sharpen.show.view.folders import Folder, find_folders, state_of


def cut_line(path):
    text = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text(text[: len(text) - 40])


def odd_lines(path):
    with (path / "metrics.jsonl").open("a") as file:
        file.write(
            'not json\n[1, 2]\n{"step": "x"}\n{"time": 5}\n{"step": 4, "reward/mean": NaN, "a": "text", "b": null}\n'
        )


def zero_bytes(path):
    with (path / "run.db").open("r+b") as file:
        file.seek(4096)
        file.write(b"\0" * 16000)


def cut_database(path):
    with (path / "run.db").open("r+b") as file:
        file.truncate(20_000)


def schema(path, version="99"):
    with closing(sqlite3.connect(path / "run.db")) as connection, connection:
        connection.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (version,))


def odd_records(path):
    """Messages that are not what they should be, as foreign or later versions may write them."""
    with closing(sqlite3.connect(path / "run.db")) as connection, connection:
        connection.execute("UPDATE calls SET messages_suffix = '[1, null, {}, [], {\"content\": {}}]', response = '[]'")


DAMAGE = {
    "no run.db": (lambda path: (path / "run.db").unlink(), "run.db"),
    "no evaluations": (lambda path: (path / "evaluations.db").unlink(), ""),
    "no metrics": (lambda path: (path / "metrics.jsonl").unlink(), "metrics.jsonl"),
    "a metrics line cut by a kill": (cut_line, ""),
    "metrics lines that are none": (odd_lines, "metrics.jsonl"),
    "empty metrics": (lambda path: (path / "metrics.jsonl").write_text(""), ""),
    "metrics of bytes": (lambda path: (path / "metrics.jsonl").write_bytes(b"\xff\xfe\0\n" * 9), "metrics.jsonl"),
    "no summary": (lambda path: (path / "summary.json").unlink(), "summary.json"),
    "half a summary": (lambda path: (path / "summary.json").write_text('{"verdict": {"kind"'), "summary.json"),
    "a summary of another kind": (lambda path: (path / "summary.json").write_text("[1]"), "summary.json"),
    "a summary of odd values": (
        lambda path: (path / "summary.json").write_text(
            '{"verdict": "yes", "before": {"sampled": 5}, "after": [], "seconds": "long", "steps": null}'
        ),
        "",
    ),
    "no certificate": (lambda path: (path / "certificate.json").unlink(), "certificate.json"),
    "an odd certificate": (
        lambda path: (path / "certificate.json").write_text(
            '{"holds": "perhaps", "checks": [5, {"name": 3}], "outcomes": {"ok": "many"}, "staleness": 5, "calls": 1}'
        ),
        "",
    ),
    "no settings": (lambda path: (path / "resolved.json").unlink(), "resolved.json"),
    "odd settings": (lambda path: (path / "resolved.json").write_text('{"model.model_path": 5, "seed": {}}'), ""),
    "a run.db of text": (lambda path: (path / "run.db").write_text("text" * 5000), "run.db"),
    "an empty run.db": (lambda path: (path / "run.db").write_bytes(b""), "run.db"),
    "a run.db with a hole": (zero_bytes, ""),
    "half a run.db": (cut_database, ""),
    "a run.db of another schema": (schema, "run.db"),
    "odd records": (odd_records, ""),
    "only metrics": (
        lambda path: [item.unlink() for item in path.glob("*.*") if item.name != "metrics.jsonl"],
        "run.db",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_every_page_opens_with_what_is_there(name, copied, client, library):
    damage, said = DAMAGE[name]
    for file in copied.glob("*.db-*"):
        file.unlink()
    damage(copied)
    key = library(copied).index(Folder.of(copied), wait_s=120).folder.key
    http = client(copied)
    for page in PAGES:
        response = http.get(page.format(run=key))
        # A rollout that cannot be read is the only page that does not open: it says why.
        expected = (200, 404, 503) if "/rollout/" in page else (200, 404)
        assert response.status_code in expected, (page, response.text)
        assert response.status_code != 503 or "run.db" in response.text
    assert http.get(f"/run/{key}").status_code == http.get(f"/run/{key}/rollouts").status_code == 200
    row = http.get(f"/run/{key}?format=json").json()["run"]
    problems = [*row["problems"], *http.get(f"/run/{key}/rollouts?format=json").json()["index"]["problems"]]
    assert any(said in problem for problem in problems) == bool(said) or not said


def test_what_is_damaged_does_not_hide_what_is_not(copied, client, library):
    """Without run.db the evaluations are still searched, and the curves drawn."""
    (copied / "run.db").unlink()
    key = library(copied).index(Folder.of(copied), wait_s=120).folder.key
    http = client(copied)
    assert http.get(f"/run/{key}/rollouts?format=json").json()["total"] > 0
    assert http.get(f"/run/{key}?format=json").json()["learning"]["training"]["steps"] == [1, 2, 3, 4, 5, 6]


def test_a_damaged_line_is_named_by_its_number(copied):
    lines = (copied / "metrics.jsonl").read_text().splitlines()
    (copied / "metrics.jsonl").write_text("\n".join([*lines[:2], "{", *lines[2:]]) + "\n")
    files = read_files(copied)
    assert len(files.rows) == len(lines)
    assert any("metrics.jsonl" in problem and "line 3" in problem for problem in files.problems)


def test_a_folder_where_a_run_is_about_to_start(tmp_path, client):
    (tmp_path / "empty").mkdir()
    http = client(tmp_path / "empty")
    row = http.get("/?format=json").json()["rows"][0]
    assert (row["name"], row["state"], row["steps"]) == ("empty", "empty", 0)
    assert http.get(f"/run/{row['key']}").status_code == 200
    assert http.get(f"/run/{row['key']}/rollouts").status_code == 200


def test_runs_are_found_below_a_folder_but_not_in_their_parts(run, tmp_path):
    shutil.copytree(run, tmp_path / "a" / "b" / "one", symlinks=True)
    shutil.copytree(run, tmp_path / "a" / "two", symlinks=True)
    (tmp_path / "a" / "two" / "global_step_6" / "summary.json").write_text("{}")
    found = find_folders([tmp_path, tmp_path / "a", tmp_path / "nowhere"])
    assert [folder.name for folder in found] == ["one", "two"] or [folder.name for folder in found] == ["two", "one"]
    assert len({folder.key for folder in find_folders([tmp_path])}) == 2
    assert find_folders([tmp_path])[0].key == find_folders([tmp_path / "a"])[0].key


def test_names_are_safe_in_addresses(tmp_path, run, client):
    path = shutil.copytree(run, tmp_path / "a b&c?d#é<script>", symlinks=True)
    http = client(path)
    row = http.get("/?format=json").json()["rows"][0]
    assert row["key"].isascii()
    assert http.get(f"/run/{row['key']}").status_code == 200
    assert "<script>" not in http.get("/").text.replace('<script type="', "")


def test_a_run_that_is_at_work(live):
    folder = Folder.of(live)
    assert state_of(folder, ended=False) == "stopped"
    (live / "run.lock").write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": "now"}))
    assert state_of(folder, ended=False) == "running"
    (live / "run.lock").write_text(json.dumps({"pid": 2**22 + 1, "host": socket.gethostname(), "since": "now"}))
    assert state_of(folder, ended=False) == "stopped"
    (live / "run.lock").write_text("{}")
    assert state_of(folder, ended=True) == "ended"


def test_a_run_on_another_machine_is_at_work_while_it_writes(live):
    (live / "run.lock").write_text(json.dumps({"pid": 1, "host": "elsewhere", "since": "now"}))
    assert state_of(Folder.of(live), ended=False) == "running"
    for file in live.iterdir():
        os.utime(file, (1000, 1000), follow_symlinks=False)
    assert state_of(Folder.of(live), ended=False) == "stopped"


def test_a_journal_that_is_none_is_refused(tmp_path):
    (tmp_path / "run.db").write_text("no")
    with pytest.raises(JournalError, match=r"run\.db"):
        open_journal(tmp_path / "run.db")


def test_the_table_of_runs_says_what_the_runs_page_says(copied, client):
    """It reads less of the files, and finds the same numbers in them."""
    cut_line(copied)
    http = client(copied)
    (row,) = http.get("/?format=json").json()["rows"]
    whole = http.get(f"/run/{row['key']}?format=json").json()["run"]
    assert row == whole
    assert row["steps"] == 6
    assert row["spark"]
