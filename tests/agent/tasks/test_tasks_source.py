"""Datasets: what loads, what a row is, and one clear sentence for each thing that can be wrong."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sharpen.config.public import DatasetConfig
from sharpen.config.rows import MissingFieldError, TaskTable, load_tasks, read_rows
from sharpen.errors import DatasetError

ROWS = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(5)]


def write_jsonl(path: Path, rows: list[dict[str, str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "data" / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "data" / "test.jsonl", ROWS[:2])
    return tmp_path / "data"


def test_a_folder_has_splits_and_stable_ids(folder: Path) -> None:
    tasks = load_tasks(DatasetConfig(path=str(folder)))
    assert [task.id for task in tasks] == [f"train/{n}" for n in range(5)]
    assert [dict(task.row) for task in tasks] == ROWS
    assert tasks[-1].index == 4
    assert [task.id for task in tasks[1:3]] == ["train/1", "train/2"]
    with pytest.raises(IndexError):
        tasks[5]
    assert len(load_tasks(DatasetConfig(path=str(folder), split="test"))) == 2


def test_a_slice_of_a_split(folder: Path) -> None:
    tasks = load_tasks(DatasetConfig(path=str(folder), split="train[3:]"))
    assert [task.row["answer"] for task in tasks] == ["6", "8"]
    assert tasks[0].id == "train[3:]/0"
    assert len(list(read_rows(DatasetConfig(path=str(folder), split="train[3:]")))) == 2


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_single_files(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"problems.{kind}"
    if kind == "jsonl":
        write_jsonl(path, ROWS)
    elif kind == "json":
        path.write_text(json.dumps(ROWS))
    elif kind == "csv":
        path.write_text("question,answer\n" + "".join(f"{row['question']},{row['answer']}\n" for row in ROWS))
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    tasks = load_tasks(DatasetConfig(path=str(path)))
    assert [task.id for task in tasks] == [f"problems/{n}" for n in range(5)]
    assert [task.row["question"] for task in tasks] == [row["question"] for row in ROWS]


@pytest.mark.parametrize(
    "path", ["tasks.jsonl", "./tasks.jsonl", "../here/tasks.jsonl", "../a[1]/tasks.jsonl", ".", "../here"]
)
def test_relative_paths(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red while the folder of `tasks.jsonl` was handed on as '.', which has no name: "dataset_name should be
    specified"."""
    for folder in ("here", "a[1]"):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "tasks.jsonl", ROWS)
    monkeypatch.chdir(tmp_path / "here")
    assert [dict(task.row) for task in load_tasks(DatasetConfig(path=path))] == ROWS
    assert list(read_rows(DatasetConfig(path=path))) == ROWS


def test_a_folder_that_looks_like_a_pattern_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a[1]").mkdir()
    write_jsonl(tmp_path / "a[1]" / "train.jsonl", ROWS)
    with pytest.raises(DatasetError, match=r"has \*, \? or \[ in its path: rename the folder"):
        load_tasks(DatasetConfig(path=str(tmp_path / "a[1]")))


def test_rows_stream_for_the_preview(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert DatasetConfig(path=str(folder)).preview(2) == ROWS[:2]
    printed = capsys.readouterr()
    assert json.loads(printed.out) == ROWS[:2]
    assert printed.err == ""


def test_empty_names_are_none(folder: Path) -> None:
    """AgentScope's examples write them so for a single file."""
    tasks = load_tasks(DatasetConfig(path=str(folder / "train.jsonl"), name="", split=""))
    assert tasks[0].id == "train/0"
    with pytest.raises(DatasetError, match="several splits"):
        load_tasks(DatasetConfig(path=str(folder), name="", split=""))


def test_a_row_is_a_plain_dict_that_names_its_fields(folder: Path) -> None:
    task = load_tasks(DatasetConfig(path=str(folder)))[0]
    assert isinstance(task.row, dict)
    assert task.row == ROWS[0]
    assert task.row.get("anwser") is None
    assert "anwser" not in task.row
    own = copy.deepcopy(task.row)
    assert isinstance(own, dict)
    with pytest.raises(MissingFieldError) as caught:
        own["anwser"]
    assert str(caught.value) == (
        "the task has no field 'anwser' (did you mean 'answer'?); its fields are: question, answer"
    )
    assert isinstance(caught.value, KeyError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "data", "split": "dev"}, "has no split 'dev'; its splits are: train, test"),
        ({"path": "data", "split": None}, "has several splits"),
        ({"path": "data", "name": "main"}, "has no configuration 'main', nor any other: leave out name"),
        ({"path": "data/none.jsonl"}, "does not exist"),
        ({"path": "data/train.jsonl", "split": "dev"}, "has no split 'dev'; a single file is one split"),
        ({"path": "data/train.jsonl", "name": "main"}, "leave out name"),
        ({"path": "empty.jsonl"}, "is empty"),
        ({"path": "header.csv"}, "is empty"),
        ({"path": "broken.jsonl"}, "cannot be loaded"),
        ({"path": "notes.txt"}, "use one of .jsonl, .json, .parquet, .csv"),
        ({"path": "formats", "split": "train"}, "has splits of different formats: give the path of one file"),
        ({"path": "nothing"}, "has no files that can be read"),
    ],
)
def test_bad_datasets_get_one_sentence(folder: Path, arguments: dict[str, str], message: str) -> None:
    root = folder.parent
    (root / "empty.jsonl").touch()
    (root / "nothing").mkdir()
    (root / "formats").mkdir()
    (root / "formats" / "train.jsonl").write_bytes(WHOLE["jsonl"])
    (root / "formats" / "test.csv").write_bytes(WHOLE["csv"])
    (root / "header.csv").write_text("question,answer\n")
    (root / "broken.jsonl").write_text('{"question": \n')
    (root / "notes.txt").write_text("hello")
    config = DatasetConfig(**{**arguments, "path": str(root / arguments["path"])})
    with pytest.raises(DatasetError) as caught:
        load_tasks(config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(DatasetError):
        list(read_rows(config))


def parquet(num_rows: int) -> bytes:
    import pyarrow
    import pyarrow.parquet

    written = pyarrow.BufferOutputStream()
    table = pyarrow.table({key: pyarrow.array([row[key] for row in ROWS[:num_rows]], "string") for key in ROWS[0]})
    pyarrow.parquet.write_table(table, written)
    return written.getvalue().to_pybytes()


WHOLE = {
    "jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
    "json": json.dumps(ROWS).encode(),
    "csv": b"question,answer\n1,2\n",
    "parquet": parquet(5),
}
EMPTY = [
    *(("jsonl", b""), ("jsonl", b"\n  \n\n"), ("jsonl", b"\xef\xbb\xbf"), ("json", b""), ("json", b"[]"), ("csv", b"")),
    *(("csv", b"\n\n"), ("csv", b"question,answer\n"), ("parquet", b""), ("parquet", parquet(0))),
]
BROKEN = [
    ("jsonl", bytes(range(256))),
    ("jsonl", WHOLE["jsonl"][:-10]),
    ("json", WHOLE["json"][:20]),
    ("csv", b"a,b\n1,2\n1,2,3\n"),
    ("parquet", parquet(5)[:60]),
]


@pytest.mark.parametrize(("kind", "body"), [*EMPTY, *BROKEN, ("jsonl", b'{"other": 1}\n')])
def test_a_sibling_split_does_not_matter(tmp_path: Path, kind: str, body: bytes) -> None:
    """Red while every split of a folder was read: an empty `test.jsonl` made "train" empty."""
    (tmp_path / f"train.{kind}").write_bytes(WHOLE[kind])
    (tmp_path / f"test.{kind}").write_bytes(body)
    config = DatasetConfig(path=str(tmp_path), split="train")
    assert len(load_tasks(config)) == len(list(read_rows(config))) == (1 if kind == "csv" else 5)


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [*((*one, "is empty") for one in EMPTY), *((*one, "cannot be") for one in BROKEN)],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, kind: str, body: bytes, words: str, as_file: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """Red while an empty `train.jsonl` ended in "StopIteration"."""
    (tmp_path / f"train.{kind}").write_bytes(body)
    (tmp_path / f"test.{kind}").write_bytes(WHOLE[kind])
    config = DatasetConfig(path=str(tmp_path / f"train.{kind}" if as_file else tmp_path), split="train")
    for read in (load_tasks, lambda config: list(read_rows(config))):
        with pytest.raises(DatasetError) as caught:
            read(config)
        assert str(caught.value).count(str(tmp_path / f"train.{kind}")) == 1
        assert words in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_the_file_of_a_split_in_parts_is_named(tmp_path: Path) -> None:
    """And one of its files may be empty."""
    parts = [tmp_path / "data" / f"train-0000{n}-of-00003.jsonl" for n in range(3)]
    write_jsonl(parts[0], ROWS[:3])
    parts[1].touch()
    write_jsonl(parts[2], ROWS[3:])
    config = DatasetConfig(path=str(tmp_path / "data"))
    assert [dict(task.row) for task in load_tasks(config)] == list(read_rows(config)) == ROWS
    parts[2].write_bytes(WHOLE["jsonl"][:-10])
    with pytest.raises(DatasetError, match=r"train-00002-of-00003\.jsonl', cannot be loaded"):
        load_tasks(config)


def test_declared_features_and_notes_stay(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A card's features count for the split that is read; one without metadata is no reason for a message."""
    (tmp_path / "train.jsonl").write_text('{"label": 1}\n')
    (tmp_path / "test.jsonl").write_text('{"label"')
    features = "[{name: label, dtype: {class_label: {names: {'0': bad, '1': good}}}}]"
    (tmp_path / "README.md").write_text(f"---\ndataset_info:\n  features: {features}\n---\n")
    tasks = load_tasks(DatasetConfig(path=str(tmp_path), split="train"))
    assert isinstance(tasks, TaskTable)
    assert tasks._rows.features["label"].names == ["bad", "good"]
    (tmp_path / "README.md").write_text("# Notes\n")
    assert len(load_tasks(DatasetConfig(path=str(tmp_path), split="train"))) == 1
    assert capfd.readouterr() == ("", "")


def test_splits_can_be_joined(folder: Path) -> None:
    config = DatasetConfig(path=str(folder), split="test+train[:1]")
    assert [dict(task.row) for task in load_tasks(config)] == list(read_rows(config)) == [*ROWS[:2], ROWS[0]]
    with pytest.raises(DatasetError, match="has no split 'tain'; its splits are: train, test"):
        load_tasks(DatasetConfig(path=str(folder), split="test+tain"))


def test_local_data_never_touches_the_network(folder: Path) -> None:
    """In a process of its own, where every connection and name look-up is an error."""
    code = f"""
import sys
def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname"):
        raise SystemExit(f"network: {{event}} {{arguments}}")
sys.addaudithook(refuse)
from sharpen.config.public import DatasetConfig
from sharpen.config.rows import load_tasks, read_rows
assert "datasets" not in sys.modules
assert len(load_tasks(DatasetConfig(path={str(folder)!r}))) == 5
assert len(load_tasks(DatasetConfig(path={str(folder / "train.jsonl")!r}))) == 5
assert len(list(read_rows(DatasetConfig(path={str(folder)!r})))) == 5
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
