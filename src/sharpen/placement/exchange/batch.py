"""The rollouts of one step as bytes, for a trainer in another process.

In: an `ExploredBatch`. Out: the bytes of an SQLite file with the journal's own tables, and the same batch back.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from sharpen.agent.rollout.refill import StepRollouts
from sharpen.errors import JournalError, SharpenError
from sharpen.learning.experience.images import insert_images, pictures_of
from sharpen.learning.experience.opening import DAMAGE
from sharpen.learning.experience.reading import read_groups_from
from sharpen.learning.experience.records import SCHEMA, SCHEMA_VERSION, insert_group
from sharpen.types import Group

SESSIONS = "sessions"
"""Where the `order` of a batch names the sessions that it was made of, if applications had them."""
_ABOUT = "explored"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExploredBatch:
    """The rollouts of a step. `session` and `version` name the weights that served them (an empty session: those of the
    model's files); `order` is the state of the task order after the batch was drawn; `generate_s` are the seconds in
    which the engine had a request."""

    rollouts: StepRollouts
    session: str
    version: int
    order: Mapping[str, Any]
    generate_s: float
    further: tuple[tuple[str, int], ...] = ()
    """Sessions and versions of further weights that sampled parts of it."""

    @property
    def sessions(self) -> tuple[str, ...]:
        """The sessions of applications that it was made of; none of an explorer's."""
        return tuple(self.order.get(SESSIONS, ()))

    @property
    def sampled_by(self) -> tuple[tuple[str, int], ...]:
        """The names of all weights that sampled it."""
        return ((self.session, self.version), *self.further)

    def to_bytes(self) -> bytes:
        """The batch as an SQLite file."""
        about = {
            "batch_size": self.rollouts.batch_size,
            "usable": self.rollouts.usable,
            "refill_rounds": self.rollouts.refill_rounds,
            "seconds": self.rollouts.seconds,
            "refill_s": self.rollouts.refill_s,
            "session": self.session,
            "version": self.version,
            "order": dict(self.order),
            "generate_s": self.generate_s,
            "further": self.further,
        }
        return pack(self.rollouts.groups, about)

    @classmethod
    def from_bytes(cls, content: bytes) -> ExploredBatch:
        """Read a batch back. Raises `JournalError` for bytes that are not a batch, or were written by another
        version."""
        about, groups = unpack(content)
        fields = ("batch_size", "usable", "refill_rounds", "seconds", "refill_s")
        return cls(
            rollouts=StepRollouts(groups=groups, **{name: about[name] for name in fields}),
            **{name: about[name] for name in ("session", "version", "order", "generate_s")},
            further=tuple((session, version) for session, version in about.get("further", ())),
        )


def sessions_in(content: bytes) -> tuple[str, ...]:
    """Return `ExploredBatch.sessions` of bytes, without the rollouts. Raises as `ExploredBatch.from_bytes`."""
    with closing(sqlite3.connect(":memory:")) as connection:
        return tuple(_read_about(connection, content)["order"].get(SESSIONS, ()))


def pack(groups: Iterable[Group], about: Mapping[str, Any]) -> bytes:
    """Return groups, and what is to be known about them, as an SQLite file."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        rows = [("schema_version", str(SCHEMA_VERSION)), (_ABOUT, json.dumps(about))]
        connection.executemany("INSERT INTO meta (key, value) VALUES (?, ?)", rows)
        for group in groups:
            insert_group(connection, group)
            if pictures := pictures_of(group):
                insert_images(connection, pictures)
        connection.commit()
        return connection.serialize()


def unpack(content: bytes) -> tuple[dict[str, Any], tuple[Group, ...]]:
    """Return what `pack` took, whatever memory it needs: it is ours. Raises `JournalError` for other bytes, and
    those of another version."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.row_factory = sqlite3.Row
        about = _read_about(connection, content)
        try:
            return about, tuple(read_groups_from(connection))
        except SharpenError:
            raise
        except DAMAGE as error:
            raise JournalError(
                f"what is in the exchange is not a batch of rollouts: {type(error).__name__}: {error}"
            ) from error


def _read_about(connection: sqlite3.Connection, content: bytes) -> dict[str, Any]:
    if not content:
        raise JournalError("what is in the exchange is not a batch of rollouts: it is empty")
    try:
        connection.deserialize(content)
        meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
        if meta["schema_version"] != str(SCHEMA_VERSION):
            raise JournalError(
                f"a batch of the exchange has schema version {meta['schema_version']}, this Sharpen reads "
                f"{SCHEMA_VERSION}: run explorer and trainer with the same version"
            )
        about: dict[str, Any] = json.loads(meta[_ABOUT])
    except (sqlite3.Error, KeyError, ValueError) as error:
        raise JournalError(f"what is in the exchange is not a batch of rollouts: {error}") from error
    return about
