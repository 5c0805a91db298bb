"""Identities of datasets and of parts that the user brings: digests of their content, by which a continued run
recognizes them at any path, as it does models (`models.identity`).

In: rows; the names of parts. Out: `{"rows": 40, "digest": "..."}`, which to stay cheap covers up to 1,000 evenly spaced
rows; `{"bytes": 1234, "digest": "..."}` of a part's file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from sharpen.agent.environments.opening import environment_identity
from sharpen.agent.tasks.images import is_image
from sharpen.config.doors import source_identity
from sharpen.config.run import RunConfig
from sharpen.gateway.formats.table import AUTO, REASONING_FORMATS, REASONING_NAMES, TOOL_FORMATS, TOOL_NAMES
from sharpen.learning.experience.reading import read_task_rows, read_taught
from sharpen.learning.experience.records import row_text
from sharpen.models.identity import Identity
from sharpen.types import Task

ROWS = 1000
"""The number of rows in a digest, with the first and the last; a smaller dataset is covered whole."""
_WITH_IMAGES = 100
"""The number of used rows that are compared with a run's records, if they have images: to read one decodes them."""


def rows_identity(rows: Sequence[Task]) -> Identity:
    """Return the number of rows and their digest. Of a value without a JSON form (an image) only the type counts."""
    digest = hashlib.blake2b(digest_size=8)
    count = min(ROWS, len(rows))
    for index in range(count):
        row = rows[index * (len(rows) - 1) // max(count - 1, 1)].row
        digest.update(json.dumps(row, default=_stand_in, sort_keys=True).encode())
    return {"rows": len(rows), "digest": digest.hexdigest()}


def parts_identities(config: RunConfig) -> dict[str, Identity]:
    """Return the identity of the environment, and of the formats, protocols and families that the user brings, each by
    its setting. (The certificate has those of an algorithm's parts: `evidence.certificate.sources`.)"""
    brought: dict[str, tuple[str, Sequence[str]]] = {
        "families": ("families", config.families),
        "gateway.protocols": ("protocols", config.gateway.protocols),
    }
    models = {
        "model": config.model,
        **{f"auxiliary_models.{name}": one for name, one in config.auxiliary_models.items()},
    }
    for section, model in models.items():
        for setting, kind, ours in (
            ("tool_call_parser", "tool_formats", {*TOOL_FORMATS, *TOOL_NAMES, AUTO, None}),
            ("reasoning_parser", "reasoning_formats", {*REASONING_FORMATS, *REASONING_NAMES, AUTO, None}),
        ):
            if (name := getattr(model, setting)) not in ours:
                brought[f"{section}.{setting}"] = kind, (name,)
    environments = {}
    if config.environment is not None and config.mode != "train":  # there it is the explorer's
        environments["environment.type"] = environment_identity(config.environment)
    return environments | {
        setting: _together([source_identity(kind, name) for name in names])
        for setting, (kind, names) in brought.items()
        if names
    }


def _together(identities: Sequence[Identity]) -> Identity:
    if len(identities) == 1:
        return identities[0]
    digest = hashlib.blake2b("".join(str(one["digest"]) for one in identities).encode(), digest_size=8)
    return {"bytes": sum(int(one["bytes"]) for one in identities), "digest": digest.hexdigest()}


def used_rows_unchanged(journal: Path, rows: Sequence[Task]) -> bool:
    """Whether every row that a run has used, by its journal, is still there and unchanged. Other rows may differ: one
    that could not be read may have been repaired. False if the run has used none."""
    used = _used_rows(journal)
    return bool(used) and _changed(used, rows) == []


def changed_rows(journal: Path, rows: Sequence[Task]) -> list[str]:
    """Return the ids of the rows that a run has used, by its journal, and that are not there any more as they were. Of
    rows with images 100 are compared, evenly spaced."""
    used = _used_rows(journal)
    first = _rows_of(rows, list(used)[:1])
    if len(used) > _WITH_IMAGES and any(_has_images(task.row) for task in first.values()):
        ids = list(used)
        spaced = [ids[number * (len(ids) - 1) // (_WITH_IMAGES - 1)] for number in range(_WITH_IMAGES)]
        used = {id_: used[id_] for id_ in spaced}
    return _changed(used, rows)


def _used_rows(journal: Path) -> dict[str, str | bytes]:
    """Return what the journal has of each row that a run has used, by its id: its text, or in a run without rollouts
    the digest of a row that was taught."""
    if not journal.exists():
        return {}
    used: dict[str, str | bytes] = dict(read_task_rows(journal))
    return used or {row.row_id: row.row_digest for step, some in read_taught(journal).items() if step for row in some}


def _has_images(row: Mapping[str, Any]) -> bool:
    return any(is_image(item) for value in row.values() for item in (value if isinstance(value, list) else [value]))


def _changed(used: Mapping[str, str | bytes], rows: Sequence[Task]) -> list[str]:
    from sharpen.learning.supervised.batches import row_digest  # supervised runs are opened through here

    now = _rows_of(rows, used)
    return [
        id_
        for id_, known in used.items()
        if id_ not in now or known != (row_digest(now[id_]) if isinstance(known, bytes) else row_text(now[id_].row))
    ]


def _rows_of(rows: Sequence[Task], ids: Collection[str]) -> dict[str, Task]:
    """Return the rows with these ids. One whose id ends with its place is read there; for the others all are read."""
    found = {}
    for id_ in ids:
        place = id_.rpartition("/")[2]
        if place.isdecimal() and int(place) < len(rows) and (row := rows[int(place)]).id == id_:
            found[id_] = row
    missing = {id_ for id_ in ids if id_ not in found}
    return found | {row.id: row for row in (rows if missing else ()) if row.id in missing}


def _stand_in(value: Any) -> str:
    return hashlib.blake2b(value, digest_size=8).hexdigest() if isinstance(value, bytes) else type(value).__name__
