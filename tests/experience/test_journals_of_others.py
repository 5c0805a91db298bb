"""A journal that its user has looked into with tools of their own, and one that cannot be read now."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from sharpen import experience
from sharpen.errors import JournalError
from sharpen.experience import reading
from sharpen.experience.journal import Journal
from sharpen.experience.reading import read_steps

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
