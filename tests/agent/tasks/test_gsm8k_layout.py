"""A local folder in the layout of `openai/gsm8k`: configurations and splits, read by the code that reads the hub's."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from sharpen import DatasetConfig
from sharpen.config.rows import load_tasks, read_rows
from sharpen.errors import DatasetError

EXAMPLE = Path(__file__).parents[3] / "examples" / "math_agent" / "gsm8k.py"


@pytest.fixture(scope="module")
def gsm8k() -> ModuleType:
    """The example's writer of the layout."""
    spec = importlib.util.spec_from_file_location("math_agent_gsm8k", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(gsm8k: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gsm8k.write_data(tmp_path_factory.mktemp("gsm8k"))


@pytest.fixture(scope="module")
def two_configurations(gsm8k: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As on the hub: `main`, and `socratic` beside it."""
    folder = gsm8k.write_data(tmp_path_factory.mktemp("two"))
    (folder / "main").rename(folder / "socratic")
    card = folder / "README.md"
    entry = re.search(r"- config_name.*?(?=---)", card.read_text(), re.DOTALL)
    assert entry is not None
    card.unlink()
    gsm8k.write_data(folder)
    card.write_text(card.read_text().replace(entry[0], entry[0] + entry[0].replace("main", "socratic")))
    return folder


@pytest.mark.parametrize(
    ("split", "count", "first_id"), [("train", 4000, "train/0"), ("test", 512, "test/0"), ("train[:20]", 20, None)]
)
def test_configuration_and_split_are_read(folder: Path, split: str, count: int, first_id: str | None) -> None:
    tasks = load_tasks(DatasetConfig(path=str(folder), name="main", split=split))
    assert len(tasks) == count
    assert first_id is None or tasks[0].id == first_id
    for task in tasks[:20]:
        assert set(task.row) == {"question", "answer"}
        assert re.search(r"\n#### -?\d+$", task.row["answer"])


def test_only_configuration_needs_no_name(folder: Path) -> None:
    named = load_tasks(DatasetConfig(path=str(folder), name="main", split="test"))
    unnamed = load_tasks(DatasetConfig(path=str(folder), split="test"))
    assert [task.row for task in named] == [task.row for task in unnamed]


def test_preview_shows_rows_of_the_configuration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = DatasetConfig(path=str(folder), name="main", split="test").preview(n=2)
    assert len(rows) == 2
    assert rows[0]["question"] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, "has several configurations (main, socratic): set name to one of them"),
        ("mian", "has no configuration 'mian'; its configurations are: main, socratic"),
    ],
)
def test_missing_or_wrong_configuration_is_named(two_configurations: Path, name: str | None, message: str) -> None:
    config = DatasetConfig(path=str(two_configurations), name=name, split="train")
    with pytest.raises(DatasetError, match=re.escape(message)):
        load_tasks(config)
    with pytest.raises(DatasetError, match=re.escape(message)):
        next(read_rows(config))
    for right in ("main", "socratic"):
        assert len(load_tasks(DatasetConfig(path=str(two_configurations), name=right, split="test"))) == 512


def test_writing_again_changes_nothing(gsm8k: ModuleType, folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert gsm8k.write_data(folder) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
