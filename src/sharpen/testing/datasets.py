"""Tries a source of rows: what a run needs of them to go on, and what a run of another split must not get.

In: a function of name and split. Out: nothing, or an `AssertionError`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sharpen.contracts import RowSource

NO_SPLIT = "no such split"


def check_dataset(source: RowSource, *, name: str | None = None, split: str | None = "train") -> None:
    """Raise `AssertionError` if `source` does not keep the contract of `RowSource`.

    It is asked twice for the rows of a split, which must be the same, whatever was done to those of before; a sequence
    is also read from its end; and a split that nobody has must be refused.
    """
    first = _rows(source, name, split)
    assert first, f"the source has no rows for name {name!r} and split {split!r}"
    texts = [_text(row, at) for at, row in enumerate(first)]
    for row in first:
        if isinstance(row, dict):
            row.clear()
    second = source(name, split)
    again = [_text(row, at) for at, row in enumerate(second)]
    assert len(again) == len(texts), f"the source had {len(texts)} rows at first, and {len(again)} when asked again"
    for at, (one, other) in enumerate(zip(texts, again, strict=True)):
        assert one == other, f"row {at} was {one} at first, and {other} when asked again"
    if isinstance(second, Sequence):
        assert len(second) == len(again), f"the length is {len(second)}, and there are {len(again)} rows"
        for at in reversed(range(len(second))):
            found = _text(second[at], at)
            assert found == again[at], f"row {at} is {found} by its index, and {again[at]} in their order"
    try:
        wrong = list(source(name, NO_SPLIT))
    except Exception:  # whatever the source's own error is
        return
    raise AssertionError(
        f"asked for the split {NO_SPLIT!r}, the source gave {len(wrong)} rows: a run that names a wrong split would be "
        "evaluated on others"
    )


def _rows(source: RowSource, name: str | None, split: str | None) -> list[Mapping[str, Any]]:
    try:
        return list(source(name, split))
    except Exception as error:
        raise AssertionError(
            f"asked for name {name!r} and split {split!r}, the source raised {type(error).__name__}: {error}"
        ) from error


def _text(row: Any, at: int) -> str:
    assert isinstance(row, Mapping), f"row {at} is a {type(row).__name__}, not a mapping"
    wrong = [key for key in row if not isinstance(key, str)]
    assert not wrong, f"row {at} has the field {wrong[0]!r}: names of fields are text"
    return json.dumps(dict(row), default=lambda value: type(value).__name__, sort_keys=True)
