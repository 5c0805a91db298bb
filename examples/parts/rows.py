"""Writes data sets. In: rows by split. Out: a folder with `<split>.jsonl`, which `DatasetConfig(path=folder)` reads."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_rows(folder: Path, splits: Mapping[str, Sequence[Mapping[str, Any]]]) -> Path:
    """Write one file for each split, a row a line; the same rows give the same bytes. Gives the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder
