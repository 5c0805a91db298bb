"""Thumbs and notes: kept beside the run, by several at once."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from sharpen.show.view.folders import Folder
from sharpen.show.view.notes import NAME, new_note, read_notes, write_note


def test_the_last_note_counts(tmp_path):
    for thumb, text in (("up", "first"), ("down", "second")):
        write_note(tmp_path, new_note("step-0/a/0", "run.db", 3, thumb, text))
    write_note(tmp_path, new_note("before/held-out/greedy/a/0", "evaluations.db", 3, "up", ""))
    notes = read_notes(tmp_path)
    assert {place: (note.thumb, note.text) for place, note in notes.items()} == {
        ("run.db", 3): ("down", "second"),
        ("evaluations.db", 3): ("up", ""),
    }
    write_note(tmp_path, new_note("step-0/a/0", "run.db", 3, "", ""))
    assert list(read_notes(tmp_path)) == [("evaluations.db", 3)]
    assert len((tmp_path / NAME).read_text().splitlines()) == 4


def test_two_writers_lose_nothing(tmp_path):
    notes = [new_note("r", "run.db", key, "up", f"line\n{key} \u2028" * 200) for key in range(60)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda note: write_note(tmp_path, note), notes))
    assert {note.text for note in read_notes(tmp_path).values()} == {note.text for note in notes}


def test_a_line_cut_by_a_kill_spoils_no_other(tmp_path):
    write_note(tmp_path, new_note("a", "run.db", 1, "up", ""))
    with (tmp_path / NAME).open("a") as file:
        file.write('{"rollout": "b", "sour')
    write_note(tmp_path, new_note("c", "run.db", 3, "down", ""))
    assert {key for _, key in read_notes(tmp_path)} == {1, 3}


@pytest.mark.parametrize(
    "line", ["5", "[]", '{"rollout": 1}', "null", '{"rollout": "a", "source": "run.db", "key": "x"}']
)
def test_lines_that_are_no_notes_are_left_out(tmp_path, line):
    (tmp_path / NAME).write_text(line + "\n")
    assert read_notes(tmp_path) == {}


def test_from_the_page(copied, client):
    key = Folder.of(copied).key
    http = client(copied)
    address = f"/run/{key}/rollout/t1/note"
    assert http.get(address).status_code == 405
    response = http.post(address, data={"thumb": "down", "text": "it <b>cheats</b>"})
    assert (response.status_code, response.headers["location"]) == (303, f"/run/{key}/rollout/t1")
    note = http.get(f"/run/{key}/rollout/t1?format=json").json()["note"]
    assert (note["thumb"], note["text"], note["rollout"]) == ("down", "it <b>cheats</b>", "step-0/train/0/0")
    assert json.loads((copied / NAME).read_text())["key"] == 1
    as_json = http.post(address, data={"thumb": "up"}, headers={"accept": "application/json"}).json()
    assert as_json["thumb"] == "up"


@pytest.mark.parametrize(
    ("address", "form", "status"),
    [
        ("t1", {"thumb": "sideways"}, 400),
        ("t99999", {"thumb": "up"}, 404),
        ("t1", {"text": "x" * 300_000}, 413),
    ],
)
def test_what_is_no_note_is_refused(copied, client, address, form, status):
    response = client(copied).post(f"/run/{Folder.of(copied).key}/rollout/{address}/note", data=form)
    assert response.status_code == status
    assert not (copied / NAME).exists()


def test_another_site_leaves_no_note(copied, client):
    address = f"/run/{Folder.of(copied).key}/rollout/t1/note"
    for headers in ({"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
        assert client(copied).post(address, data={"thumb": "up"}, headers=headers).status_code == 403
    assert client(copied, token="").post(f"{address}?token=the-token", data={"thumb": "up"}).status_code == 401
    assert not (copied / NAME).exists()
