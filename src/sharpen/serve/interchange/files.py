"""Files of other programs, by what they hold.

In: files, or folders of them: one JSON value, JSON Lines or Parquet. Out: sessions of a recording. Nothing is written
before all of them are read.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from sharpen.errors import ConfigError, DatasetError
from sharpen.serve.interchange import atif, otel, traces
from sharpen.serve.interchange.messages import short
from sharpen.serve.interchange.sessions import Session, number

KINDS = (".json", ".jsonl", ".parquet")
FORMATS = "Harbor's ATIF, OTLP JSON, exports of Langfuse and of LangSmith"
Record = Mapping[str, Any]


def read_files(paths: Iterable[Path], left_out: Counter[str]) -> list[Session]:
    """Return the sessions of all files that have calls of a model. Raises `ConfigError` with the file's name."""
    known: dict[str, Session] = {}
    for path in [file for given in paths for file in _files(given)]:
        try:
            _read(path, known, left_out)
        except (DatasetError, OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ConfigError(f"{path} cannot be read, and nothing was imported: {why}") from error
    sessions = [session for session in known.values() if session.calls]
    left_out["traces or sessions without a call of a model"] += len(known) - len(sessions)
    return sessions


def _files(path: Path) -> Iterator[Path]:
    """Yield the files of a folder: Harbor's trajectories wherever they are in it, else those that lie in it."""
    if not path.is_dir():
        yield path
        return
    found = sorted(path.rglob("trajectory*.json")) or sorted(one for one in path.iterdir() if one.suffix in KINDS)
    if not found:
        raise ConfigError(f"{path} has no files to read: {', '.join(KINDS)}")
    yield from found


def _read(path: Path, known: dict[str, Session], left_out: Counter[str]) -> None:
    records = _records(path)
    if not records:
        raise DatasetError("it is empty")
    first = records[0]
    if "schema_version" in first and "steps" in first:
        for place, record in enumerate(records):
            named = _name(path) if len(records) == 1 else f"{_name(path)}-{place}"
            atif.read(record, named, path.parent, known, left_out)
        _judged_by_harbor(path, first, known)
    elif "resourceSpans" in first:
        otel.read([span for record in records for span in otel.spans_of(record)], known, left_out)
    elif traces.is_langsmith(first):
        traces.read_langsmith(records, known, left_out)
    elif any(map(traces.is_langfuse, records)):
        traces.read_langfuse(records, known, left_out)
    else:
        raise DatasetError(
            f"it is of no format that is known ({FORMATS}): its first record has "
            f"{', '.join(list(first)[:8]) or 'nothing'}"
        )


def _records(path: Path) -> Sequence[Record]:
    """Return the objects of a file. A page of an API is unpacked. Raises `DatasetError` with the line."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            rows: list[Record] = pyarrow.parquet.read_table(path).to_pylist()
        except pyarrow.ArrowInvalid as error:
            raise DatasetError(f"it is no Parquet file: {error}") from error
        return rows
    text = path.read_text(encoding="utf-8-sig")
    try:
        values = [json.loads(text)]
    except ValueError:
        values = [_line(line, place) for place, line in enumerate(text.splitlines(), 1) if line.strip()]
    if len(values) == 1 and isinstance(values[0], Mapping) and isinstance(values[0].get("data"), list):
        values = values[0]["data"]
    elif len(values) == 1 and isinstance(values[0], list):
        values = values[0]
    for place, value in enumerate(values, 1):
        if not isinstance(value, Mapping):
            raise DatasetError(f"record {place} is no object: {short(value)}")
    return values


def _name(path: Path) -> str:
    """Return what stands for a trajectory that has no id: Harbor's are all named alike, in folders of their trials."""
    return "-".join(path.with_suffix("").parts[-3:])


def _line(line: str, place: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise DatasetError(f"line {place} is no JSON: {error}") from error


def _judged_by_harbor(path: Path, document: Record, known: dict[str, Session]) -> None:
    """Note the rewards and the task of a trial, which Harbor writes beside the folder of its agent."""
    try:
        result = json.loads((path.parent.parent / "result.json").read_text(encoding="utf-8"))
        rewards = result["verifier_result"]["rewards"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    id_ = atif.id_of(document, _name(path))
    known[id_].task_id = known[id_].task_id or str(result.get("task_name") or "")
    for name, value in rewards.items() if isinstance(rewards, Mapping) else ():
        if (score := number(value)) is not None:
            known[id_].scores.setdefault(str(name), score)


# There.


def write_documents(path: Path, documents: Iterable[tuple[str, dict[str, Any]]]) -> int:
    """Write documents as JSON Lines if the name ends so, else a file for each into a new folder, and return how many
    there are. Without any nothing is written. Raises `OSError`, `FileExistsError` among them."""
    made = iter(documents)
    first = next(made, None)
    if first is None:
        return 0
    made, number = chain([first], made), 0
    if path.suffix == ".jsonl":
        with path.open("x", encoding="utf-8") as file:
            for _, document in made:
                file.write(f"{_text(document)}\n")
                number += 1
        return number
    path.mkdir()
    for name, document in made:
        whole = atif.with_files(document, path) if document.get("schema_version") == atif.VERSION else document
        with (path / f"{name.replace('/', '-')}.json").open("x", encoding="utf-8") as file:
            file.write(f"{_text(whole, indent=2)}\n")
        number += 1
    return number


def _text(document: Any, indent: int | None = None) -> str:
    """Return a document as JSON, which has no NaN: a number that is not finite is null."""
    try:
        return json.dumps(document, ensure_ascii=False, default=str, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(document), ensure_ascii=False, default=str, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
