"""Reads a dataset: a folder, a single file, or a name on the Hugging Face hub, always with `datasets.load_dataset`.

In: a `DatasetAddress`. Out: `Task`s (a lazy sequence), or plain rows for a preview. Every failure is a `DatasetError`
with a message of one sentence. Local paths never use the network.
"""

from __future__ import annotations

import difflib
import glob
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, overload

from sharpen.errors import DatasetError, DatasetNotFoundError
from sharpen.types import Task

FORMATS = (".jsonl", ".json", ".parquet", ".csv")
"""The extensions of single files that can be read (also with `.gz`)."""


class DatasetAddress(Protocol):
    """Where rows are: a path or a name on the hub, the configuration and the split (as in `DatasetConfig`)."""

    @property
    def path(self) -> str: ...
    @property
    def name(self) -> str | None: ...
    @property
    def split(self) -> str | None: ...


class MissingFieldError(DatasetError, KeyError):
    """The workflow or the judge read a field that the task does not have."""

    def __str__(self) -> str:
        return str(self.args[0])


class Row(dict[str, Any]):
    """The dict that the workflow receives as `task`. Its error for a missing field lists the fields that exist."""

    def __missing__(self, key: str) -> Any:
        close = difflib.get_close_matches(str(key), [str(name) for name in self], n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise MissingFieldError(f"the task has no field {key!r}{hint}; its fields are: {', '.join(map(str, self))}")


class TaskTable(Sequence[Task]):
    """The tasks of one split, read from disk row by row: `Task.id` is `<split>/<row number>`."""

    def __init__(self, rows: Any, prefix: str) -> None:
        self._rows = rows
        self._prefix = prefix

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"task {index} of {len(self)}")
        return Task(id=f"{self._prefix}/{position}", index=position, row=Row(self._row(position)))

    def _row(self, position: int) -> dict[str, Any]:
        """Return a row with its images decoded, which the library does when a row is read. Raises `DatasetError`."""
        try:
            row: dict[str, Any] = self._rows[position]
        except Exception as error:  # as in `read_rows`
            raise DatasetError(f"the row {self._prefix}/{position} cannot be read: {_one_line(error)}") from error
        return row


def load_tasks(config: DatasetAddress) -> Sequence[Task]:
    """Return the tasks of `config.split`, in the dataset's order. Raises `DatasetError`."""
    rows, prefix = _open(config, streaming=False)
    if len(rows) == 0:
        raise DatasetError(_empty(config))
    return TaskTable(rows, prefix)


def read_rows(config: DatasetAddress) -> Iterator[dict[str, Any]]:
    """Yield the rows of `config.split`, without preparing the whole dataset. Raises `DatasetError`."""
    # The library cannot slice a split ("train[:100]") while streaming.
    rows, _ = _open(config, streaming=not config.split or "[" not in config.split)
    reader = iter(rows)
    read = 0
    while True:
        try:
            with _quiet():
                row = list(islice(reader, 1))
        except Exception as error:  # the library's readers raise many kinds of errors: the data is unreadable
            raise DatasetError(f"dataset {config.path!r} cannot be read: {_one_line(error)}") from error
        if not row:
            break
        read += 1
        yield Row(row[0])
    if read == 0:
        raise DatasetError(_empty(config))


def check_path(config: DatasetAddress) -> None:
    """Raise `DatasetNotFoundError` for a path that can only be meant locally and is not there."""
    if _looks_local(config.path) and not Path(config.path).expanduser().exists():
        raise DatasetNotFoundError(
            f"dataset {config.path!r} does not exist: no such file or folder (seen from {Path.cwd()})"
        )


def _open(config: DatasetAddress, *, streaming: bool) -> tuple[Any, str]:
    """Return the rows of the split, and the prefix of its task ids."""
    path = Path(config.path).expanduser()
    if path.is_file():
        return _open_file(path, config, streaming)
    check_path(config)
    sliced = config.split and re.search(r"[\[+]", config.split)
    if path.is_dir() and glob.escape(str(path)) != str(path):  # the library would use the path as a pattern
        raise DatasetError(
            f"dataset {config.path!r} has *, ? or [ in its path: rename the folder, or name a file in it"
        )
    where = str(path.resolve()) if path.exists() else config.path
    loaded = _load(config, where, name=config.name or None, split=config.split if sliced else None, streaming=streaming)
    if sliced:
        return loaded, str(config.split)
    splits = ", ".join(loaded)
    if not config.split:
        if len(loaded) > 1:
            raise DatasetError(f"dataset {config.path!r} has several splits ({splits}): set split to one of them")
        split = next(iter(loaded))
        return loaded[split], split
    if config.split not in loaded:
        raise DatasetError(f"dataset {config.path!r} has no split {config.split!r}; its splits are: {splits}")
    return loaded[config.split], config.split


def _open_file(path: Path, config: DatasetAddress, streaming: bool) -> tuple[Any, str]:
    """Open a single file as one split. Task ids begin with the file's name, so those of `train.jsonl` and `test.jsonl`
    differ."""
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    if not suffixes or suffixes[-1].lower() not in FORMATS:
        raise DatasetError(f"dataset {config.path!r} is not a file we can read: use one of {', '.join(FORMATS)}")
    stem = path.name.split(".")[0]
    if config.name:
        raise DatasetError(f"dataset {config.path!r} is a single file, without configurations: leave out name")
    split = config.split or "train"
    base = re.split(r"[\[+]", split)[0]
    if base not in ("train", stem):
        raise DatasetError(
            f"dataset {config.path!r} has no split {config.split!r}; a single file is one split: leave split out"
        )
    if path.stat().st_size == 0:
        raise DatasetError(_empty(config))
    # Loaded as a file of its folder, since loading by format ("json") would send a download count over the network.
    # The library names the dataset after the folder, which must have a name, and uses the file's path as a pattern.
    absolute = path.absolute()
    if not absolute.parent.name:
        raise DatasetError(f"dataset {config.path!r} is in the root folder: move it into another one")
    pattern = glob.escape(str(absolute))
    rows = _load(config, str(absolute.parent), data_files={base: pattern}, split=split, streaming=streaming)
    return rows, split.replace(base, stem)


def _load(config: DatasetAddress, path: str, **arguments: Any) -> Any:
    import datasets

    try:
        with _quiet():
            return datasets.load_dataset(path, **arguments)
    except Exception as error:  # the library raises many kinds of errors, even StopIteration: the data is unreadable
        if "corresponds to no data" in str(error):
            raise DatasetError(_empty(config)) from error
        if (problem := _wrong_configuration(config, str(error))) is not None:
            raise DatasetError(problem) from error
        kind = "" if Path(config.path).expanduser().exists() else " (neither a local path nor found on the hub)"
        raise DatasetError(f"dataset {config.path!r} cannot be loaded{kind}: {_one_line(error)}") from error


def _wrong_configuration(config: DatasetAddress, error: str) -> str | None:
    """Return what is wrong with `config.name` if the library's error is about it (it lists the configurations)."""
    if "Config name is missing" not in error and not re.match(r"BuilderConfig .* not found", error):
        return None
    listed = re.search(r"\[('.*?')\]", error)
    names = re.findall(r"'([^']*)'", listed[1]) if listed else []
    if config.name is None:
        return f"dataset {config.path!r} has several configurations ({', '.join(names)}): set name to one of them"
    if names == ["default"]:
        return f"dataset {config.path!r} has no configuration {config.name!r}, nor any other: leave out name"
    return f"dataset {config.path!r} has no configuration {config.name!r}; its configurations are: {', '.join(names)}"


def _looks_local(path: str) -> bool:
    """Whether a path that does not exist cannot be a name on the hub (which is `name` or `owner/name`)."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).suffix.lower() in FORMATS


def _empty(config: DatasetAddress) -> str:
    return f"dataset {config.path!r}, split {config.split!r}, is empty: it needs at least one task"


def _one_line(error: BaseException) -> str:
    cause = error.__cause__ if error.__cause__ is not None else error
    text = " ".join(str(cause).split())
    return f"{type(cause).__name__}: {text[:300]}" if text else type(cause).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Turn off the progress bars and log lines of the datasets library during a block."""
    import datasets

    bars = datasets.is_progress_bar_enabled()
    verbosity = datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if bars:
            datasets.enable_progress_bars()
