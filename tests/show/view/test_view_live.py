"""A run that goes on: pages are told, and show what is new."""

import asyncio
import json
from contextlib import closing

from shop_runs import Maker, train

from sharpen.learning.experience.journal import Journal
from sharpen.show.monitor.metrics import JsonlSink
from sharpen.show.view.folders import Folder
from sharpen.show.view.follow import Follower, events
from sharpen.show.view.notes import new_note, write_note


def next_step(live, step):
    with Journal(live / "run.db") as journal, closing(JsonlSink(live / "metrics.jsonl")) as metrics:
        train(Maker(seed=1), journal, metrics, step)


def until_quiet(follower):
    """Take what changed while the index was being made."""
    while follower.changes():
        pass


def test_a_step_is_told_once(live, library):
    opened = library(live)
    opened.index(Folder.of(live), wait_s=120)
    follower = Follower(opened, Folder.of(live).key)
    assert follower.changes() == []
    until_quiet(follower)
    next_step(live, 3)
    change, *_ = follower.changes()
    assert (change["run"], change["step"]) == (Folder.of(live).key, 3)
    until_quiet(follower)
    assert follower.changes() == []


def test_rollouts_are_told_before_their_step_is_trained(live, library):
    opened = library(live)
    before = opened.index(Folder.of(live), wait_s=120).state().indexed
    follower = Follower(opened, Folder.of(live).key)
    until_quiet(follower)
    follower.changes()
    with Journal(live / "run.db") as journal:
        journal.add(Maker(seed=1).group(2, 5))
        journal.flush()
        changes = follower.changes()
        while not changes or changes[-1]["rollouts"] == before:
            changes += follower.changes()
    assert changes[-1]["rollouts"] > before
    assert changes[-1]["step"] == 2


def test_a_note_is_told(live, library):
    opened = library(live)
    follower = Follower(opened)
    follower.changes()
    assert follower.changes() == []
    write_note(live, new_note("a", "run.db", 1, "up", ""))
    assert [change["run"] for change in follower.changes()] == [Folder.of(live).key]


def test_a_new_run_is_told(live, library, tmp_path):
    follower = Follower(library(tmp_path / "project"))
    follower.changes()
    (tmp_path / "project" / "second").mkdir()
    (tmp_path / "project" / "second" / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    (change,) = follower.changes()
    assert change["run"].startswith("second-")
    assert change["reward"] == 0.5


def test_the_stream(live, library):
    """Its events are those of the follower; it ends with the server."""
    follower = Follower(library(live))
    ended = asyncio.Event()

    async def read():
        stream, parts = events(follower, ended.is_set, poll_s=0.001), []
        async for part in stream:
            parts.append(part)
            if len(parts) == 1:
                await asyncio.to_thread(follower.changes)
                await asyncio.to_thread(next_step, live, 3)
            else:
                ended.set()
        return parts

    parts = asyncio.run(read())
    assert parts[0].startswith(":")
    name, data = parts[1].strip().split("\n")
    assert name == "event: changed"
    assert json.loads(data.removeprefix("data: "))["step"] == 3


def test_the_pages_show_a_step_as_soon_as_it_is_there(live, library, client):
    key = Folder.of(live).key
    http = client(live)
    assert http.get("/?format=json").json()["rows"][0]["steps"] == 2
    next_step(live, 3)
    row = http.get("/?format=json").json()["rows"][0]
    assert (row["steps"], row["total_steps"], row["verdict"]) == (3, 6, None)
    library(live).index(Folder.of(live), wait_s=120)
    assert http.get(f"/run/{key}/step/3").status_code == 200


def test_a_run_that_is_not_there_is_not_followed(live, client):
    assert client(live).get("/events?run=none").status_code == 404
