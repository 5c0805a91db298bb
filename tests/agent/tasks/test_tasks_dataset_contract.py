"""Rows of somebody's own function become tasks; our files keep the contract, a source that breaks it is told how."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sharpen.config.load import point_beside
from sharpen.config.public import DatasetConfig
from sharpen.config.rows import check_path, load_tasks, read_rows
from sharpen.errors import ConfigError, DatasetError
from sharpen.testing import check_dataset

OWN = """
def three(name, split):
    if split == "broken":
        raise KeyError("no such split")
    return [{"question": f"{name} {split} {at}"} for at in range(3)]

def lazy(name, split):
    yield from three(name, split)

def none(name, split):
    return []

number = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> Callable[..., DatasetConfig]:
    (tmp_path / "own.py").write_text(OWN)
    return lambda function, **settings: DatasetConfig(path=f"{tmp_path / 'own.py'}:{function}", **settings)


@pytest.mark.parametrize("function", ["three", "lazy"])
def test_rows_of_a_function_are_tasks(own, function: str) -> None:
    tasks = load_tasks(own(function, name="a", split="test"))
    assert [(task.id, task.row["question"]) for task in tasks] == [(f"test/{at}", f"a test {at}") for at in range(3)]
    assert [row["question"] for row in read_rows(own(function))] == [f"None train {at}" for at in range(3)]


def test_what_is_wrong_with_a_function_is_said(own, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"own.py:three' cannot be loaded: KeyError: 'no such split'"):
        load_tasks(own("three", split="broken"))
    with pytest.raises(DatasetError, match=r"a function, which has no slices of splits: got 'train\[:2\]'"):
        load_tasks(own("three", split="train[:2]"))
    with pytest.raises(DatasetError, match="is empty"):
        load_tasks(own("none"))
    with pytest.raises(ConfigError, match=r"has no 'thre'; did you mean 'three'"):
        check_path(own("thre"))
    with pytest.raises(ConfigError, match="is 3: it must be a function of name and split"):
        check_path(own("number"))


def test_a_file_of_functions_beside_the_settings_is_meant(own, tmp_path: Path) -> None:
    own("three")
    settings = {"train_dataset": {"path": "own.py:three"}, "eval_dataset": {"path": "openai/gsm8k"}}
    point_beside(settings, tmp_path)
    assert settings["train_dataset"]["path"] == f"{tmp_path / 'own.py'}:three"
    assert settings["eval_dataset"]["path"] == "openai/gsm8k"


def test_our_files_keep_the_contract(toy_dataset: Path) -> None:
    def source(name: str | None, split: str | None) -> list[Any]:
        return [task.row for task in load_tasks(DatasetConfig(path=str(toy_dataset), name=name, split=split))]

    check_dataset(source)
    check_dataset(source, split="test")


ROWS = [{"a": 1}, {"a": 2}]


def _anew(name: str | None, split: str | None) -> list[dict[str, Any]]:
    return [{"a": random.random()} for _ in range(3)]


def _same(name: str | None, split: str | None) -> list[dict[str, Any]]:
    return ROWS


def _once(rows: Iterator[Any]) -> Callable[..., Iterator[Any]]:
    return lambda name, split: rows


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (_anew, "row 0 was .* at first, and .* when asked again"),
        (_same, r'row 0 was {"a": 1} at first, and {} when asked again'),
        (_once(iter([{"a": 1}])), "the source had 1 rows at first, and 0 when asked again"),
        (lambda name, split: [{"a": 1}], "asked for the split 'no such split', the source gave 1 rows"),
        (lambda name, split: [], "the source has no rows"),
        (lambda name, split: ["a"], "row 0 is a str, not a mapping"),
    ],
)
def test_a_source_that_breaks_the_contract_is_told_how(source: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        check_dataset(source)
