"""The journal keeps an image once, beside it, and reads it when it is needed."""

import os
import pickle
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from experience_builders import make_call, make_group, make_rollout

from sharpen.errors import ImageError, JournalError
from sharpen.evidence.certificate.rollouts import ImageFiles
from sharpen.learning.experience.images import ImageFolder
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.opening import open_journal
from sharpen.learning.experience.reading import read_groups
from sharpen.placement.exchange.batch import pack, unpack
from sharpen.types import Call, Group, Picture, PictureSpan

ONE, TWO = Picture.of(b"first image"), Picture.of(b"second image")


def shown(*pictures: Picture, start: int = 2) -> tuple[PictureSpan, ...]:
    return tuple(
        PictureSpan(picture=picture, start=start + 4 * number, length=3) for number, picture in enumerate(pictures)
    )


def looking(index: int, prompt: list[int], *pictures: Picture, parent: int | None = None) -> Call:
    made = make_call(index, prompt, [7, 8], parent=parent)
    return replace(made, pictures=shown(*pictures))


PROMPT = [1, 2, 9, 9, 9, 3, 9, 9, 9, 4]
"""With image tokens (9) where `shown` says."""


def group_of(*calls: Call) -> Group:
    return make_group([make_rollout(calls)])


@pytest.fixture
def group() -> Group:
    """A call that shows one image, one that goes on with another, and one that has the same ids and other images."""
    first = looking(0, PROMPT[:6], ONE)
    more = looking(1, [*PROMPT[:6], 7, 8, *PROMPT], ONE, parent=0)
    more = replace(more, pictures=(*first.pictures, *shown(TWO, start=10)))
    return group_of(first, more, looking(2, PROMPT, TWO, ONE))


def test_calls_come_back_with_their_images(tmp_path: Path, group: Group) -> None:
    with Journal(tmp_path / "run.db") as journal:
        journal.add(group)
        journal.add(replace(group, id="again"))
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == sorted((ONE.sha256, TWO.sha256))
    for read in read_groups(tmp_path / "run.db"):
        for ours, theirs in zip(group.rollouts[0].calls, read.rollouts[0].calls, strict=True):
            assert ours.pictures == theirs.pictures
            assert [span.picture.data for span in ours.pictures] == [span.picture.data for span in theirs.pictures]


def test_only_what_a_call_adds_is_written(tmp_path: Path, group: Group) -> None:
    with Journal(tmp_path / "run.db") as journal:
        journal.add(group)
    with closing(open_journal(tmp_path / "run.db")) as connection:
        rows = connection.execute("SELECT call, kept, spans FROM call_pictures ORDER BY call").fetchall()
    assert [(call, kept, spans.count(ONE.sha256), spans.count(TWO.sha256)) for call, kept, spans in rows] == [
        (0, 0, 1, 0),
        (1, 1, 0, 1),
        (2, 0, 1, 1),
    ]


def test_an_older_journal_has_no_images(tmp_path: Path) -> None:
    with Journal(tmp_path / "run.db") as journal:
        journal.add(group_of(make_call(0, [1, 2], [3])))
        journal.write(lambda connection: connection.execute("DROP TABLE call_pictures"))
    (read,) = read_groups(tmp_path / "run.db")
    assert read.rollouts[0].calls[0].pictures == ()
    assert not (tmp_path / "images").exists()


def test_an_image_is_on_disk_before_a_call_that_names_it(tmp_path: Path, group: Group) -> None:
    """A folder that cannot be written fails the journal, and no row is left that names an image that is not there."""
    (tmp_path / "images").write_text("in the way")
    journal = Journal(tmp_path / "run.db")
    journal.add(group)
    with pytest.raises(JournalError, match="could not be written"):
        journal.flush()
    with pytest.raises(JournalError):
        journal.close()
    assert list(read_groups(tmp_path / "run.db")) == []


def test_a_crash_between_image_and_row_leaves_an_image_that_no_call_names(tmp_path: Path, group: Group) -> None:
    ImageFolder(tmp_path / "run.db").add([ONE])  # then it died
    with Journal(tmp_path / "run.db") as journal:  # and is resumed
        journal.add(group)
    (read,) = read_groups(tmp_path / "run.db")
    assert [span.picture.data for span in read.rollouts[0].calls[0].pictures] == [b"first image"]
    assert len(list((tmp_path / "images").iterdir())) == 2


def test_what_could_not_be_written_leaves_nothing(tmp_path: Path) -> None:
    folder = ImageFolder(tmp_path / "run.db")
    with pytest.raises(TypeError):
        folder.add([Picture(sha256="0" * 64, content=5)])  # type: ignore[arg-type]
    assert list((tmp_path / "images").iterdir()) == []


def test_nothing_is_read_before_it_is_needed(tmp_path: Path, group: Group) -> None:
    with Journal(tmp_path / "run.db") as journal:
        journal.add(group)
    (tmp_path / "images" / ONE.sha256).unlink()
    (tmp_path / "images" / TWO.sha256).write_bytes(b"another")
    (read,) = read_groups(tmp_path / "run.db")
    missing, changed = (span.picture for span in read.rollouts[0].calls[1].pictures)
    with pytest.raises(ImageError, match=ONE.sha256):
        _ = missing.data
    with pytest.raises(ImageError, match="changed"):
        _ = changed.data


def test_images_travel_to_another_machine(tmp_path: Path, group: Group) -> None:
    with Journal(tmp_path / "run.db") as journal:
        journal.add(group)
    (read,) = read_groups(tmp_path / "run.db")
    pickled, packed = pickle.dumps(read), pack([read], {})
    (tmp_path / "images" / ONE.sha256).unlink()
    for there in (pickle.loads(pickled), unpack(packed)[1][0]):
        assert there.rollouts[0].calls[1].pictures == group.rollouts[0].calls[1].pictures
        assert there.rollouts[0].calls[1].pictures[0].picture.data == b"first image"


def test_the_certificate_looks_at_files_and_places(tmp_path: Path, group: Group) -> None:
    with Journal(tmp_path / "run.db") as journal:
        journal.add(group)
    (tmp_path / "global_step_1").mkdir()
    (tmp_path / "global_step_1" / "config.json").write_text('{"image_token_id": 9}')

    def problems(given: Group) -> list[str]:
        return list(ImageFiles(tmp_path).problems(1, [given]))

    assert problems(group) == []
    call = group.rollouts[0].calls[2]
    first, second = call.pictures
    for wrong, said in (
        ((replace(first, length=4), second), "none of an image"),
        ((replace(first, start=0), second), "none of an image"),
        ((first, replace(second, start=4)), "in another image"),
        ((first, replace(second, length=40)), "not in the prompt"),
        ((second, first), "in another image"),
    ):
        (problem,) = problems(group_of(replace(call, pictures=wrong)))
        assert said in problem
        assert problem.startswith("step 1: rollout")
    other = replace(call, prompt_ids_P=np.where(call.prompt_ids_P == 9, 5, call.prompt_ids_P))
    assert len(problems(group_of(other))) == 2
    (tmp_path / "images" / ONE.sha256).unlink()
    (tmp_path / "images" / TWO.sha256).write_bytes(b"another")
    assert {one.split(": ")[-1] for one in problems(group)} == {
        f"the file images/{ONE.sha256} is missing",
        f"the file images/{TWO.sha256} has been changed",
    }


def test_what_a_killed_process_left_is_removed_and_not_what_is_being_written(tmp_path: Path):
    """Red before: it stayed for good."""
    folder = ImageFolder(tmp_path / "run.db")
    folder.path.mkdir()
    left, written = (folder.path / f".{name}.4711-0123abcd.partial" for name in "ab")
    for path in (left, written):
        path.write_bytes(b"half")
    os.utime(left, (0, 0))
    folder.add([ONE])
    assert sorted(path.name for path in folder.path.iterdir()) == sorted([ONE.sha256, written.name])
