"""The entropies of trained tokens in the journal: written with each step, read for one rollout.

In: `CallEntropies` of a step. Out: of a rollout, the entropy of each sampled token of each call, as float16, two bytes
a token; of a step, the exact sums of each call, which the certificate reads. Older journals do not have the tables.

Shape suffix: S sampled tokens of a call, of which those trained have an entropy.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from sharpen.experience.reading import has, ints
from sharpen.experience.records import INT_BYTES
from sharpen.types import CallEntropies, FloatArray, Rollout

_HALF_BYTES = np.dtype("<f2")


class EntropySums(NamedTuple):
    """Of a call's trained tokens: how many they are, and the sums of `CallEntropies`."""

    num_tokens: int
    entropy: float
    varentropy: float
    cumulative: float


def entropy_sums(calls: Iterable[CallEntropies]) -> dict[tuple[str, int], EntropySums]:
    """Return the sums of each call, by rollout id and index."""
    return {
        (one.rollout_id, one.call): EntropySums(len(one.places_S), one.entropy, one.varentropy, one.cumulative)
        for one in calls
    }


def read_entropy_sums(connection: sqlite3.Connection, step: int) -> dict[tuple[str, int], EntropySums]:
    """Return the sums of a step's calls in an open journal; none for an older journal."""
    if not has(connection, "entropy_sums"):
        return {}
    sql = "SELECT rollout_id, call, num_tokens, entropy, varentropy, cumulative FROM entropy_sums WHERE step = ?"
    return {(rollout, call): EntropySums(*sums) for rollout, call, *sums in connection.execute(sql, (step,))}


def insert_entropies(connection: sqlite3.Connection, step: int, calls: Iterable[CallEntropies]) -> None:
    """Write the entropies of a step, replacing those of an earlier step with the same number, which an interruption
    undid."""
    calls = tuple(calls)
    for table in ("entropies", "entropy_sums"):
        connection.execute(f"DELETE FROM {table} WHERE step = ?", (step,))
    connection.executemany(
        "INSERT OR REPLACE INTO entropy_sums VALUES (?, ?, ?, ?, ?, ?, ?)",
        [(step, *key, *sums) for key, sums in entropy_sums(calls).items() if np.isfinite(sums).all()],
    )
    connection.executemany(
        "INSERT INTO entropies (step, rollout_id, call, first, places, entropies) VALUES (?, ?, ?, ?, ?, ?)",
        [
            (
                step,
                one.rollout_id,
                one.call,
                int(one.places_S[0]),
                None if (np.diff(one.places_S) == 1).all() else one.places_S.astype(INT_BYTES).tobytes(),
                one.entropies_S.astype(_HALF_BYTES).tobytes(),
            )
            for one in calls
        ],
    )


def read_entropies(connection: sqlite3.Connection, rollout: Rollout, steps: Iterable[int]) -> dict[int, FloatArray]:
    """Return the entropies (S) of a rollout's calls in the last of these steps of an open journal that has some, by the
    call's index; NaN for a token that was not trained. Calls without any are left out."""
    if not has(connection, "entropies"):
        return {}
    sql = "SELECT call, first, places, entropies FROM entropies WHERE step = ? AND rollout_id = ?"
    for step in reversed(list(steps)):
        if rows := connection.execute(sql, (step, rollout.id)).fetchall():
            return {call: _of_call(rollout, call, *stored) for call, *stored in rows if call < len(rollout.calls)}
    return {}


def _of_call(rollout: Rollout, index: int, first: int, places: bytes | None, stored: bytes) -> FloatArray:
    """Return the entropies of a call's sampled tokens, which follow its prompt."""
    call = rollout.calls[index]
    values_S = np.frombuffer(stored, _HALF_BYTES).astype(np.float32)
    places_S = np.arange(first, first + len(values_S)) if places is None else ints(places)
    sampled_S = places_S - len(call.prompt_ids_P)
    entropies_S = np.full(len(call.sampled_ids_S), np.nan, np.float32)
    own = (sampled_S >= 0) & (sampled_S < len(entropies_S))  # an undone step's rollout of this id may be another
    entropies_S[sampled_S[own]] = values_S[own]
    return entropies_S
