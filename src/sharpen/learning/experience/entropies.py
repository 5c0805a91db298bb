"""The entropies and ratios of trained tokens in the journal: written with each step, read for one rollout.

In: `CallEntropies` of a step. Out: of a rollout, the entropy of each sampled token of each call, its importance ratio
and whether it was clipped. Entropies are stored as float16 numbers, two bytes a token; log ratios likewise, but none
(an empty blob) for a call whose ratios are all 1 in float16, and NULL for one without ratios. Clipped tokens are bits,
NULL where none was. Older journals do not have the table, or not the columns of the ratios. Of a step, the
exact sums of each call, in a table that the certificate reads.

Shape suffix: S sampled tokens of a call, of which those trained have an entropy.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sharpen.learning.experience.opening import has
from sharpen.learning.experience.reading import ints
from sharpen.learning.experience.records import INT_BYTES
from sharpen.types import BoolArray, CallEntropies, FloatArray, IntArray, Rollout

_HALF_BYTES = np.dtype("<f2")
_RATIO_COLUMNS = ("log_ratios", "clipped")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRatios:
    """The importance ratio of each sampled token of a call (S) in the step's last update on it, NaN for a token without
    one, and whether the policy loss gave it no gradient there; see `CallEntropies`."""

    ratios_S: FloatArray
    clipped_S: BoolArray


def add_ratio_columns(connection: sqlite3.Connection) -> None:
    """Give an older journal the columns of the ratios."""
    for name in _RATIO_COLUMNS:
        if name not in _columns(connection):
            connection.execute(f"ALTER TABLE entropies ADD COLUMN {name} BLOB")


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
    """Write the entropies and ratios of a step, replacing those of an earlier step with the same number, which an
    interruption undid."""
    calls = tuple(calls)
    for table in ("entropies", "entropy_sums"):
        connection.execute(f"DELETE FROM {table} WHERE step = ?", (step,))
    connection.executemany(
        "INSERT OR REPLACE INTO entropy_sums VALUES (?, ?, ?, ?, ?, ?, ?)",
        [(step, *key, *sums) for key, sums in entropy_sums(calls).items() if np.isfinite(sums).all()],
    )
    connection.executemany(
        "INSERT INTO entropies (step, rollout_id, call, first, places, entropies, log_ratios, clipped)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (
                step,
                one.rollout_id,
                one.call,
                int(one.places_S[0]),
                None if (np.diff(one.places_S) == 1).all() else one.places_S.astype(INT_BYTES).tobytes(),
                one.entropies_S.astype(_HALF_BYTES).tobytes(),
                _ratio_bytes(one),
                np.packbits(one.clipped_S).tobytes() if one.clipped_S.any() else None,
            )
            for one in calls
        ],
    )


def _ratio_bytes(one: CallEntropies) -> bytes | None:
    if np.isnan(one.log_ratios_S).all():
        return None
    moved = (np.exp(one.log_ratios_S.astype(np.float32)).astype(np.float16) != 1).any()
    return one.log_ratios_S.astype(_HALF_BYTES).tobytes() if moved else b""


def read_entropies(connection: sqlite3.Connection, rollout: Rollout, steps: Iterable[int]) -> dict[int, FloatArray]:
    """Return the entropies (S) of a rollout's calls in the last of these steps of an open journal that has some, by the
    call's index; NaN for a token that was not trained. Calls without any are left out."""
    rows = _rows(connection, rollout, steps, ("entropies",)) if has(connection, "entropies") else []
    found = {}
    for call, places_S, (stored,) in rows:
        found[call] = _spread(rollout, call, places_S, np.frombuffer(stored, _HALF_BYTES).astype(np.float32), np.nan)
    return found


def read_ratios(connection: sqlite3.Connection, rollout: Rollout, steps: Iterable[int]) -> dict[int, TokenRatios]:
    """Return the ratios of a rollout's calls in the last of these steps of an open journal that has some, by the call's
    index. Calls without any are left out: of an older journal all, and those of unknown distributions."""
    if not {*_RATIO_COLUMNS} <= _columns(connection):
        return {}
    found = {}
    for call, places_S, (stored, bits) in _rows(connection, rollout, steps, _RATIO_COLUMNS):
        if stored is None and bits is None:
            continue
        count = len(places_S)
        log_ratios_S = np.frombuffer(stored or b"", _HALF_BYTES).astype(np.float32)
        if not len(log_ratios_S):
            log_ratios_S = np.full(count, np.nan if stored is None else 0.0, np.float32)
        clipped_S = np.zeros(count, np.bool_)
        if bits is not None:
            clipped_S = np.unpackbits(np.frombuffer(bits, np.uint8), count=count).astype(np.bool_)
        found[call] = TokenRatios(
            ratios_S=np.exp(_spread(rollout, call, places_S, log_ratios_S, np.nan)),
            clipped_S=_spread(rollout, call, places_S, clipped_S, False),
        )
    return found


def _columns(connection: sqlite3.Connection) -> set[str]:
    return {row[1] for row in connection.execute("PRAGMA table_info(entropies)")}


def _rows(
    connection: sqlite3.Connection, rollout: Rollout, steps: Iterable[int], columns: Iterable[str]
) -> list[tuple[int, IntArray, list[Any]]]:
    """Return (call, positions in its sequence, values of the columns) of the calls in the last step that has some."""
    sql = "SELECT call, first, places, LENGTH(entropies), {} FROM entropies WHERE step = ? AND rollout_id = ?"
    for step in reversed(list(steps)):
        if rows := connection.execute(sql.format(", ".join(columns)), (step, rollout.id)).fetchall():
            return [
                (call, np.arange(first, first + size // 2) if places is None else ints(places), stored)
                for call, first, places, size, *stored in rows
                if call < len(rollout.calls)
            ]
    return []


def _spread(
    rollout: Rollout, index: int, places_S: IntArray, values_S: npt.NDArray[Any], fill: object
) -> npt.NDArray[Any]:
    """Return the values of a call's sampled tokens, which follow its prompt; `fill` for a token without one."""
    call = rollout.calls[index]
    sampled_S = places_S - len(call.prompt_ids_P)
    spread_S = np.full(len(call.sampled_ids_S), fill, values_S.dtype)
    own = (sampled_S >= 0) & (sampled_S < len(spread_S))  # an undone step's rollout of this id may be another
    spread_S[sampled_S[own]] = values_S[own]
    return spread_S
