"""Reads a dataset: a folder, a single file, or a name on the Hugging Face hub, always with `datasets.load_dataset`; or
what somebody's own function gives (`contracts.RowSource`).

In: a `DatasetAddress`. Out: `Task`s (a lazy sequence), or plain rows for a preview. Every failure is a `DatasetError`
with a message of one sentence. Local paths never use the network.
"""

from __future__ import annotations

import difflib
import glob
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, overload

from sharpen.config.doors import find_part, names
from sharpen.contracts import RowSource
from sharpen.errors import ConfigError, DatasetError, DatasetNotFoundError
from sharpen.files import near_path
from sharpen.types import Task

FORMATS = (".jsonl", ".json", ".parquet", ".csv")
"""The extensions of single files that can be read (also with `.gz`)."""

_SLICED = r"[\[+]"
_BLANK = b"\xef\xbb\xbf \t\r\n\v\f"
"""What a text file without rows may hold: a byte order mark and blank lines."""


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
            row: dict[str, Any] = dict(self._rows[position])
        except Exception as error:  # as in `read_rows`
            raise DatasetError(f"the row {self._prefix}/{position} cannot be read: {_one_line(error)}") from error
        return row


def load_tasks(config: DatasetAddress) -> Sequence[Task]:
    """Return the tasks of `config.split`, in the dataset's order. Raises `DatasetError`."""
    opened = _open(config, streaming=False)
    if len(opened.rows) == 0:
        raise DatasetError(_empty(config, opened.files))
    return TaskTable(opened.rows, opened.prefix)


def read_rows(config: DatasetAddress) -> Iterator[dict[str, Any]]:
    """Yield the rows of `config.split`, without preparing the whole dataset. Raises `DatasetError`."""
    # The library can neither slice ("train[:100]") nor join ("train+test") splits while streaming.
    opened = _open(config, streaming=not config.split or not re.search(_SLICED, config.split))
    reader = iter(opened.rows)
    read = 0
    while True:
        with _failures(config, opened.files, "read"):
            row = list(islice(reader, 1))
        if not row:
            break
        read += 1
        yield Row(row[0])
    if read == 0:
        raise DatasetError(_empty(config, opened.files))


def check_path(config: DatasetAddress) -> None:
    """Raise `DatasetNotFoundError` for a path that can only be meant locally and is not there, `ConfigError` for a
    function that cannot be imported."""
    if _source(config) is None and _looks_local(config.path) and not Path(config.path).expanduser().exists():
        raise DatasetNotFoundError(
            f"dataset {config.path!r} does not exist: no such file or folder (seen from {Path.cwd()})"
            f"{near_path(config.path)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """The rows of a split, the prefix of its task ids, and the local files that it is made of."""

    rows: Any
    prefix: str
    files: tuple[str, ...] = ()


def _open(config: DatasetAddress, *, streaming: bool) -> _Opened:
    path = Path(config.path).expanduser()
    if path.is_file():
        return _open_file(path, config, streaming)
    if (source := _source(config)) is not None:
        return _open_source(source, config)
    check_path(config)
    if path.is_dir():
        return _open_folder(path, config, streaming)
    sliced = config.split if config.split and re.search(_SLICED, config.split) else None
    loaded = _load(config, config.path, (), name=config.name or None, split=sliced, streaming=streaming)
    if sliced:
        return _Opened(rows=loaded, prefix=sliced)
    split = _names(config, list(loaded))[0]
    return _Opened(rows=loaded[split], prefix=split)


def _source(config: DatasetAddress) -> RowSource | None:
    """Return somebody's own function that gives the rows, None if the path is none's. What lies at the path comes
    first. Raises `ConfigError` if it cannot be imported."""
    is_place = re.fullmatch(r".+:[^\W\d]\w*(\.[^\W\d]\w*)*", config.path) is not None
    if Path(config.path).expanduser().exists() or not (is_place or config.path in names("datasets", {})):
        return None
    source: RowSource = find_part("datasets", config.path, {})
    if not callable(source):
        raise ConfigError(
            f"dataset {config.path!r} is {source!r}: it must be a function of name and split that gives rows "
            "(docs/use/extending.md)"
        )
    return source


def _open_source(source: RowSource, config: DatasetAddress) -> _Opened:
    split = config.split or "train"
    if re.search(_SLICED, split):
        raise DatasetError(f"dataset {config.path!r} is a function, which has no slices of splits: got {split!r}")
    try:
        found = source(config.name, config.split)
        rows = found if isinstance(found, Sequence) else list(found)
    except Exception as error:  # the user's code may raise anything
        raise DatasetError(f"dataset {config.path!r} cannot be loaded: {_one_line(error)}") from error
    return _Opened(rows=rows, prefix=split)


def _open_folder(path: Path, config: DatasetAddress, streaming: bool) -> _Opened:
    """Open the files of the split that was asked for: those of others may be empty, broken, or of other columns."""
    import datasets
    from datasets.info import DatasetInfosDict

    if glob.escape(str(path)) != str(path):  # the library would use the path as a pattern
        raise DatasetError(
            f"dataset {config.path!r} has *, ? or [ in its path: rename the folder, or name a file in it"
        )
    where, name = str(path.resolve()), config.name or None
    with _failures(config, (), "loaded"):
        chosen = datasets.load_dataset_builder(where, name=name).config
        declared = DatasetInfosDict.from_directory(where).get(chosen.name)
    splits = {str(split): files for split, files in chosen.data_files.items()}
    asked = {split: splits[split] for split in _names(config, list(splits))}
    files = tuple(file for listed in asked.values() for file in listed)
    full = {file for file in files if _has_rows(config, file)}
    if not full:
        raise DatasetError(_empty(config, files))
    kept = {
        split: type(listed)([f for f in listed if f in full], listed.origin_metadata) for split, listed in asked.items()
    }
    split = config.split or next(iter(kept))
    features = declared and declared.features
    rows = _load(config, where, files, name=name, data_files=kept, split=split, features=features, streaming=streaming)
    return _Opened(rows=rows, prefix=split, files=files)


def _names(config: DatasetAddress, splits: Sequence[str]) -> list[str]:
    """Return the names in `config.split` ("train", "train[:100]", "train+test"), or the only one that there is."""
    listed = ", ".join(splits)
    if not config.split:
        if len(splits) > 1:
            raise DatasetError(f"dataset {config.path!r} has several splits ({listed}): set split to one of them")
        return list(splits)
    names = list(dict.fromkeys(part.split("[")[0].strip() for part in config.split.split("+")))
    for name in names:
        if name not in splits:
            near = difflib.get_close_matches(name, list(splits), n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise DatasetError(f"dataset {config.path!r} has no split {name!r}; its splits are: {listed}{meant}")
    return names


def _open_file(path: Path, config: DatasetAddress, streaming: bool) -> _Opened:
    """Open a single file as one split. Task ids begin with the file's name, so those of `train.jsonl` and `test.jsonl`
    differ."""
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    if not suffixes or suffixes[-1].lower() not in FORMATS:
        raise DatasetError(f"dataset {config.path!r} is not a file we can read: use one of {', '.join(FORMATS)}")
    stem = path.name.split(".")[0]
    if config.name:
        raise DatasetError(f"dataset {config.path!r} is a single file, without configurations: leave out name")
    split = config.split or "train"
    base = re.split(_SLICED, split)[0]
    if base not in ("train", stem):
        raise DatasetError(
            f"dataset {config.path!r} has no split {config.split!r}; a single file is one split: leave split out"
        )
    # Loaded as a file of its folder, since loading by format ("json") would send a download count over the network.
    # The library names the dataset after the folder, which must have a name, and uses the file's path as a pattern.
    absolute = path.absolute()
    files = (str(absolute),)
    if not _has_rows(config, files[0]):
        raise DatasetError(_empty(config, files))
    if not absolute.parent.name:
        raise DatasetError(f"dataset {config.path!r} is in the root folder: move it into another one")
    pattern = glob.escape(files[0])
    rows = _load(config, str(absolute.parent), files, data_files={base: pattern}, split=split, streaming=streaming)
    return _Opened(rows=rows, prefix=split.replace(base, stem), files=files)


def _has_rows(config: DatasetAddress, file: str) -> bool:
    """Whether there is anything in a local file: some of the library's readers fail at one without. Raises
    `DatasetError` for a Parquet file that is none."""
    path = Path(file)
    with _failures(config, (file,), "read"), path.open("rb") as opened:
        if path.suffix.lower() == ".parquet" and path.stat().st_size > 0:
            from pyarrow.parquet import ParquetFile

            return bool(ParquetFile(opened).metadata.num_rows)
        return any(part.strip(_BLANK) for part in iter(partial(opened.read, 1 << 16), b""))


def _load(config: DatasetAddress, path: str, files: Sequence[str], **arguments: Any) -> Any:
    import datasets

    with _failures(config, files, "loaded"):
        return datasets.load_dataset(path, **arguments)


@contextmanager
def _failures(config: DatasetAddress, files: Sequence[str], failed: str) -> Iterator[None]:
    """Raise what the library raises (errors of many kinds, even StopIteration: the data is unreadable) as
    `DatasetError`. `files` are those that are read."""
    is_local = Path(config.path).expanduser().exists()
    with _quiet("datasets", *(["huggingface_hub"] if is_local else [])) as said:  # the hub may say why it takes long
        try:
            yield
        except Exception as error:
            raise DatasetError(_problem(config, files, failed, error, said)) from error


def _problem(config: DatasetAddress, files: Sequence[str], failed: str, error: Exception, said: Sequence[str]) -> str:
    """Return what an error of the library means, with the file if that is known."""
    text = str(error)
    if "corresponds to no data" in text:
        return _empty(config, files)
    if "doesn't contain any data files" in text:
        return f"dataset {config.path!r} has no files that can be read: it needs some of {', '.join(FORMATS)}"
    if "infer the same data file format" in text:
        return f"dataset {config.path!r} has splits of different formats: give the path of one file instead"
    if (problem := _wrong_configuration(config, text)) is not None:
        return problem
    everything = " ".join([text, str(error.__cause__), *said])
    named = next((file for file in files if file in everything), files[0] if len(files) == 1 else None)
    where = f", file {named!r}," if named and not _is(config, named) else ""
    kind = "" if Path(config.path).expanduser().exists() else " (neither a local path nor found on the hub)"
    return f"dataset {config.path!r}{where} cannot be {failed}{kind}: {_one_line(error)}{near_path(config.path)}"


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


def _empty(config: DatasetAddress, files: Sequence[str]) -> str:
    split = f", split {config.split!r}," if config.split else ""
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    named = f" ({files[0]}{more})" if files and not _is(config, files[0]) else ""
    return f"dataset {config.path!r}{split} is empty{named}: it needs at least one task"


def _is(config: DatasetAddress, file: str) -> bool:
    """Whether the dataset is this file."""
    return Path(config.path).expanduser().absolute() == Path(file)


def _one_line(error: BaseException) -> str:
    cause = error.__cause__ if error.__cause__ is not None else error
    text = " ".join(str(cause).split())
    return f"{type(cause).__name__}: {text[:300]}" if text else type(cause).__name__


@contextmanager
def _quiet(*loggers: str) -> Iterator[list[str]]:
    """Turn off the progress bars of the datasets library and what these loggers print during a block. Yields a list to
    which that is added: it names files that the library's errors do not name."""
    import datasets

    said: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return False

    bars = datasets.is_progress_bar_enabled()
    verbosity = datasets.logging.get_verbosity()
    handlers = [handler for name in loggers for handler in logging.getLogger(name).handlers]
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    for handler in handlers:
        handler.addFilter(keep)
    try:
        yield said
    finally:
        for handler in handlers:
            handler.removeFilter(keep)
        datasets.logging.set_verbosity(verbosity)
        if bars:
            datasets.enable_progress_bars()
