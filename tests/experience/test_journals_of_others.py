"""A journal that its user has looked into with tools of their own, one that cannot be read now, and small ones that
stand for more than any memory holds."""

import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from experience_builders import make_call, make_group, make_rollout

from sharpen import experience
from sharpen.certificate.images import ImageFiles
from sharpen.errors import ImageError, JournalError
from sharpen.experience import reading
from sharpen.experience.evidence import read_delivery
from sharpen.experience.images import ImageFolder
from sharpen.experience.journal import Journal
from sharpen.experience.reading import read_groups_at, read_steps
from sharpen.experience.records import Delivery, GroupPlace, LossSpan
from sharpen.types import Call, PictureSpan

OWN = (
    "CREATE VIEW rewards AS SELECT * FROM (SELECT step FROM steps)",
    "CREATE TABLE mine (generated INTEGER, virtual TEXT DEFAULT (1), twice AS (generated * 2))",
    "CREATE TABLE copied AS SELECT * FROM steps",
    "ALTER TABLE steps ADD COLUMN generated INTEGER",
    "CREATE INDEX often ON steps (step) WHERE step > 0",
)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    with Journal(tmp_path / "run.db") as opened:
        opened.add_step(1, 1, {"reward/mean": 0.5})
    return tmp_path / "run.db"


@pytest.mark.parametrize("statement", OWN)
def test_what_a_user_adds_does_not_matter(statement: str, journal: Path) -> None:
    """Red with any view refused, and with a word of the schema taken for a computation."""
    with closing(sqlite3.connect(journal)) as connection, connection:
        connection.execute(statement)
    assert [record.step for record in read_steps(journal)] == [1]


def test_the_view_that_stands_for_a_table_is_named_with_the_remedy(journal: Path) -> None:
    """Also for a table that not every journal has, whatever its letters."""
    with closing(sqlite3.connect(journal)) as connection, connection:
        connection.execute("CREATE VIEW Images AS SELECT step FROM steps")
    with pytest.raises(JournalError, match=r"the view 'Images'.* DROP VIEW Images$"):
        read_steps(journal)


def test_every_table_of_a_journal_is_known() -> None:
    """A view of the name of a table that is not would be read."""
    sources = "".join(path.read_text() for path in Path(experience.__file__).parent.glob("*.py"))
    assert set(re.findall(r"CREATE TABLE IF NOT EXISTS (\w+) \(", sources)) == reading._TABLES


def test_a_lock_is_no_damage(journal: Path) -> None:
    """Red with each error of SQLite called damage."""

    def read(writer: sqlite3.Connection) -> None:
        with reading.reading(journal) as reader:
            reader.execute("PRAGMA busy_timeout = 0")
            writer.execute("BEGIN EXCLUSIVE")
            reader.execute("SELECT * FROM steps").fetchall()

    with closing(sqlite3.connect(journal)) as writer:
        writer.execute("PRAGMA journal_mode = DELETE")
        with pytest.raises(JournalError, match=r"^cannot read .*: database is locked$"):
            read(writer)


def a_chain(length: int) -> list[Call]:
    """Calls each of which goes on from the one before it, by an id and a message."""
    calls: list[Call] = []
    for index in range(length):
        asked = tuple({"role": "user", "content": str(number)} for number in range(index + 1))
        made = make_call(index, np.arange(index + 1), [1], messages=asked, response={"role": "assistant"})
        calls.append(made)
    return calls


def test_calls_that_stand_for_more_than_a_run_could_hold_are_refused(tmp_path: Path) -> None:
    """Red with each call expanded whatever that takes: 100,000 of them in a row, in a file of 15 MB, need 80 GB. What
    a run could hold is read."""
    with Journal(tmp_path / "run.db") as journal:
        journal.add(
            make_group([make_rollout(a_chain(200)[:100], 0.5, "g", 0), make_rollout(a_chain(100), 0.5, "g", 1)])
        )
    (group,) = read_groups_at(tmp_path / "run.db", [1])
    held = sum(4 * len(call.prompt_ids_P) + 8 * len(call.messages) for one in group.rollouts for call in one.calls)
    assert read_groups_at(tmp_path / "run.db", [1], most_bytes=held)
    with pytest.raises(JournalError, match=r"is damaged: .*stand for more than 0 MiB of prompts"):
        read_groups_at(tmp_path / "run.db", [1], most_bytes=held - 1)


@pytest.mark.parametrize("counts", [(2**60,), (2**40, -(2**40)), (2**25, 2**25, 1)])
def test_a_row_that_stands_for_too_many_tokens_is_refused(counts: tuple[int, ...], tmp_path: Path) -> None:
    """Red with as many places made as a row names: a `MemoryError`, or all of the machine's memory."""
    ones = np.ones(1, np.float32)
    span = LossSpan(
        update=0,
        sequence=0,
        group_id="g",
        rollout_id="g/0",
        call=0,
        places_S=np.zeros(1, np.int32),
        advantages_S=ones,
        weights_S=ones,
        ids=b"",
        records=b"",
    )
    place = GroupPlace(group_id="g", update=0, left_out=None, replayed=False)
    with Journal(tmp_path / "run.db") as journal:
        journal.add_step(1, 1, {}, delivery=Delivery(spans=(span,) * len(counts), places=(place,)))
    with closing(sqlite3.connect(tmp_path / "run.db")) as connection, connection:
        for rowid, count in enumerate(counts, start=1):
            connection.execute("UPDATE spans SET num_tokens = ? WHERE rowid = ?", (count, rowid))
    with pytest.raises(JournalError, match="loss tokens in one step"):
        read_delivery(tmp_path / "run.db", 1)


def test_an_image_file_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    """Red with the whole file read for its hash: this one takes no space on the disk, and a terabyte of memory."""
    name = "a" * 64
    folder = ImageFolder(tmp_path / "run.db")
    folder.path.mkdir()
    with (folder.path / name).open("wb") as file:
        file.truncate(1 << 40)
    picture = folder.picture(name)
    with pytest.raises(ImageError, match="more than 67108864 bytes"):
        _ = picture.data
    call = replace(make_call(0, [1, 2], [3]), pictures=(PictureSpan(picture=picture, start=0, length=1),))
    (problem,) = ImageFiles(tmp_path).problems(1, [make_group([make_rollout([call])])])
    assert problem.endswith("has been changed")


@pytest.mark.parametrize("json", ['["a"]', '"a"', "5", "null"])
@pytest.mark.parametrize("place", ["tools", "row", "messages", "response"])
def test_json_of_another_kind_is_damage(place: str, json: str, tmp_path: Path) -> None:
    """Red with any JSON read: `show`, `export` and `certify` ended in an `AttributeError`."""
    with Journal(tmp_path / "run.db") as journal:
        journal.add(make_group([make_rollout([make_call(0, [1], [2])])]))
    statement = {
        "tools": "UPDATE texts SET json = ? WHERE id IN (SELECT tools FROM calls)",
        "messages": "UPDATE calls SET messages_suffix = ?",
        "response": "UPDATE calls SET response = ?",
        "row": "UPDATE texts SET json = ? WHERE id IN (SELECT task_row FROM groups)",
    }
    with closing(sqlite3.connect(tmp_path / "run.db")) as connection, connection:
        connection.execute(statement[place], (json,))
    with pytest.raises(JournalError, match=r"is damaged: TypeError: .* is no (list|object)$"):
        read_groups_at(tmp_path / "run.db", [1])
