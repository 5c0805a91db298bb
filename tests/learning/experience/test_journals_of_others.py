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

from sharpen.config.sections import GatewayConfig
from sharpen.errors import ImageError, JournalError
from sharpen.evidence.certificate.rollouts import MAX_BYTES, ImageFiles
from sharpen.learning import experience
from sharpen.learning.experience import opening
from sharpen.learning.experience.evidence import read_delivery, refuse_too_many
from sharpen.learning.experience.expansion import prompt_bytes, refuse_more_than_memory
from sharpen.learning.experience.images import ImageFolder
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.reading import read_groups_at, read_steps
from sharpen.learning.experience.records import Delivery, GroupPlace, LossSpan
from sharpen.types import MAX_PICTURE_BYTES, Call, Picture, PictureSpan

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
    assert set(re.findall(r"CREATE TABLE IF NOT EXISTS (\w+) \(", sources)) == opening._TABLES


def test_a_lock_is_no_damage(journal: Path) -> None:
    """Red with each error of SQLite called damage."""

    def read(writer: sqlite3.Connection) -> None:
        with opening.reading(journal):
            writer.execute("PRAGMA locking_mode = EXCLUSIVE")
            writer.execute("BEGIN IMMEDIATE")  # the reader's lock is in its way

    with closing(sqlite3.connect(journal, timeout=0.0)) as writer:
        writer.execute("SELECT * FROM steps").fetchall()  # its log and shared memory are there
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


def test_calls_that_stand_for_more_than_there_is_memory_are_refused(tmp_path: Path) -> None:
    """Red with each call expanded whatever that takes. What there is memory for is read."""
    with Journal(tmp_path / "run.db") as journal:
        journal.add(
            make_group([make_rollout(a_chain(200)[:100], 0.5, "g", 0), make_rollout(a_chain(100), 0.5, "g", 1)])
        )
    (group,) = read_groups_at(tmp_path / "run.db", [1])
    held = sum(4 * len(call.prompt_ids_P) + 8 * len(call.messages) for one in group.rollouts for call in one.calls)
    assert read_groups_at(tmp_path / "run.db", [1], most_bytes=held)
    with pytest.raises(JournalError, match=r"^the calls of 2 rollouts need 0.0 GB of memory"):
        read_groups_at(tmp_path / "run.db", [1], most_bytes=held - 1)


LINKS = """
WITH RECURSIVE links (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM links WHERE n < ?)
INSERT INTO calls ({columns}) SELECT {values} FROM links
"""


@pytest.mark.parametrize(
    ("base", "kept"), [("n - 1", "1000000000"), ("n - 1", "-1"), ("-1", "1000000000")], ids=["all", "but-one", "last"]
)
def test_a_small_file_for_which_no_machine_has_the_memory_ends_in_a_line_at_once(
    base: str, kept: str, tmp_path: Path
) -> None:
    """100,000 calls in a row, each with two tokens and the messages of the one before: 140 GB and more. Red with calls
    counted only while they are read, which fills the memory first; and with `[:-1]`, or the call before named as the
    last, counted as nothing."""
    with Journal(tmp_path / "run.db") as journal:
        journal.add(make_group([make_rollout([make_call(0, [1, 2, 3, 4], [1, 2])])]))
    with closing(sqlite3.connect(tmp_path / "run.db")) as connection, connection:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(calls)")]
        other = {"idx": "n", "base": base, "prompt_kept": kept, "messages_kept": kept}
        values = [other.get(name, f"(SELECT {name} FROM calls WHERE idx = 0)") for name in columns]
        connection.execute(LINKS.format(columns=", ".join(columns), values=", ".join(values)), (100_000,))
    with pytest.raises(JournalError, match=r"^the calls of 1 rollouts need [\d,.]+ GB of memory, .* GB are here"):
        read_groups_at(tmp_path / "run.db", [1], most_bytes=1e11)


def sizes(calls: int, grows: int, messages: int) -> list[dict[str, int | None]]:
    """The stored sizes of calls each of which goes on from the one before it: `grows` tokens more, half of them
    sampled, and `messages` more, one of them the answer."""
    half = grows // 2
    return [
        {
            "idx": index,
            "base": index - 1 if index else None,
            "prompt_kept": index * grows,
            "messages_kept": index * messages,
            "prompt": grows - half,
            "sampled": half,
            "messages": messages - 1,
        }
        for index in range(calls)
    ]


@pytest.mark.parametrize(
    ("rollouts", "calls", "grows", "gigabytes"),
    [(1, 10_000, 8, 2.4), (8, 10_000, 20, 38.4), (32, 300, 428, 2.5)],
    ids=["one-of-10000-calls", "eight-of-10000-calls", "32-to-128k"],
)
def test_long_rollouts_are_no_damage(rollouts: int, calls: int, grows: int, gigabytes: float) -> None:
    """By hand: n calls of g tokens and two messages more hold n^2 / 2 * (4 g + 16) bytes. Red with a group of 2 GiB
    called damaged: only what the machine has no memory for is refused, with the number."""
    held = rollouts * prompt_bytes(sizes(calls, grows, 2), {}, {})
    assert held == pytest.approx(gigabytes * 1e9, rel=0.03)
    refuse_more_than_memory(held, "the calls", 64 << 30)
    with pytest.raises(JournalError, match=rf"^the calls need {held / 1e9:,.1f} GB of memory, 2.0 GB are here"):
        refuse_more_than_memory(held, "the calls", 2e9)


def test_experts_count_as_what_they_take() -> None:
    """48 layers of 8 experts, 16 rollouts of 100 calls to 100,000 tokens: 31 GB of experts, of a byte each. Images of
    the base count in each call too."""
    calls = sizes(100, 1000, 2)
    routes = {index: {"kept": index * 1000, "own": 1000 * 48 * 8, "token_bytes": 48 * 8} for index in range(100)}
    without, held = prompt_bytes(calls, {}, {}), prompt_bytes(calls, routes, {})
    assert held - without == sum(1000 * (index + 1) * 48 * 8 for index in range(100))
    refuse_more_than_memory(16 * held, "the calls", 64 << 30)
    assert prompt_bytes(calls, {}, {index: (index, 1) for index in range(100)}) - without == 8 * 5050


def test_a_step_of_512_tasks_is_no_damage() -> None:
    """Each with 16 rollouts of 8,200 tokens, 67 million. Red with 2^26 tokens a step at most."""
    counts = [8200] * (512 * 16)
    refuse_too_many(counts, 64 << 30)
    with pytest.raises(JournalError, match=r"^the 67174400 loss tokens of a step need 0.8 GB of memory"):
        refuse_too_many(counts, 1e6)


@pytest.mark.parametrize("counts", [(2**60,), (2**40, -(2**40)), (5, -4), (2**31 - 1,) * 5000])
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
    with pytest.raises(JournalError, match=r"loss tokens: no run made it|loss tokens of a step need 128,849.0 GB"):
        read_delivery(tmp_path / "run.db", 1)


def test_an_image_file_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    """Red with the whole file read for its hash: this one takes no space on the disk, and a terabyte of memory."""
    name = "a" * 64
    folder = ImageFolder(tmp_path / "run.db")
    folder.path.mkdir()
    with (folder.path / name).open("wb") as file:
        file.truncate(1 << 40)
    picture = folder.picture(name)
    with pytest.raises(ImageError, match="is too large: more than 1024 MiB"):
        _ = picture.data
    call = replace(make_call(0, [1, 2], [3]), pictures=(PictureSpan(picture=picture, start=0, length=1),))
    (problem,) = ImageFiles(tmp_path).problems(1, [make_group([make_rollout([call])])])
    assert problem.endswith("is too large: more than 1024 MiB")


def test_an_image_of_the_largest_request_is_read(tmp_path: Path) -> None:
    """Red with 64 MiB at most: with `gateway.max_body_mb` above its default such an image was trained and stored, and
    then said to have been changed."""
    (most,) = [one.le for one in GatewayConfig.model_fields["max_body_mb"].metadata if hasattr(one, "le")]
    assert most << 20 == MAX_PICTURE_BYTES == MAX_BYTES
    content = bytes(65 << 20)
    picture = Picture.of(content)
    folder = ImageFolder(tmp_path / "run.db")
    folder.add([picture])
    assert folder.picture(picture.sha256).data == content
    call = replace(make_call(0, [1, 2], [3]), pictures=(PictureSpan(picture=picture, start=0, length=1),))
    assert not list(ImageFiles(tmp_path).problems(1, [make_group([make_rollout([call])])]))


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
