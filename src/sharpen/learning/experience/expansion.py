"""How much memory the records of a journal take when they are read: small files may stand for more than a machine has.

In: the sizes of what is stored, as numbers. Out: bytes, or a refusal before anything is read. A call stores only what
its base does not have, so that a file of 15 MB may hold 100,000 calls in a row that stand for 80 GB of prompts; a row
of loss tokens says how many it stands for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sharpen.errors import JournalError
from sharpen.machine import total_bytes

_ID, _REFERENCE = 4, 8
"""Bytes of a token's id, and of a place in a list of messages or images."""

CALL_SIZES = """
SELECT idx, base, prompt_kept, messages_kept, length(prompt_suffix) / 4 AS prompt, length(sampled) / 4 AS sampled,
    CASE WHEN json_valid(messages_suffix) AND json_type(messages_suffix) = 'array'
        THEN json_array_length(messages_suffix) ELSE length(messages_suffix) END AS messages
FROM calls WHERE rollout_key = ? ORDER BY idx
"""
ROUTE_SIZES = """
SELECT call, kept, num_layers * top_k * item_bytes AS token_bytes, length(experts) + length(call_routes.sampled) AS own
FROM call_routes JOIN routes ON routes.id = prompt WHERE rollout_key = ?
"""


def refuse_more_than_memory(num_bytes: int, what: str, most_bytes: float | None = None) -> None:
    """Raise `JournalError` if `what` needs more than `most_bytes`: by default the memory of this machine."""
    most_bytes = total_bytes() if most_bytes is None else most_bytes
    if num_bytes > most_bytes:
        raise JournalError(
            f"{what} need {num_bytes / 1e9:,.1f} GB of memory, {most_bytes / 1e9:,.1f} GB are here: read them on a "
            "machine with more, if you trust the file"
        )


def prompt_bytes(
    calls: Iterable[Mapping[str, Any]],
    routes: Mapping[int, Mapping[str, Any]],
    pictures: Mapping[int, tuple[int, int]],
) -> int:
    """Return the bytes of the prompts of a rollout's calls, each whole: their ids, the places of their messages and
    images, and their experts.

    `calls` are rows of `CALL_SIZES`, in order; `routes` rows of `ROUTE_SIZES` by call; `pictures` how many images a
    call has from its base, and of its own. Raises `LookupError` or `TypeError` for a base that is no call.
    """
    prompts: list[int] = []
    histories: list[tuple[int, int]] = []
    experts: list[tuple[int, int]] = []
    shown: list[int] = []
    num_bytes = 0
    for call in calls:
        index, base = call["idx"], call["base"]
        if index != len(prompts):
            break  # the reader says which call is missing
        ids, messages = histories[base] if base is not None else (0, 0)
        prompts.append(_kept(ids, call["prompt_kept"]) + call["prompt"])
        asked = _kept(messages, call["messages_kept"]) + call["messages"]
        histories.append((prompts[-1] + call["sampled"], asked + 1))
        experts.append(_experts(routes[index], experts, base) if index in routes else (0, 0))
        kept, own = pictures.get(index, (0, 0))
        shown.append((_kept(shown[base], kept) if base is not None else 0) + own)
        num_bytes += _ID * prompts[-1] + _REFERENCE * (asked + shown[-1]) + experts[-1][0] * experts[-1][1]
    return num_bytes


def _experts(row: Mapping[str, Any], earlier: list[tuple[int, int]], base: int | None) -> tuple[int, int]:
    """Return the tokens of a call whose experts are known, and the bytes of each."""
    tokens, token_bytes = earlier[base] if base is not None and row["kept"] else (0, 0)
    return _kept(tokens, row["kept"]) + row["own"] // row["token_bytes"], max(token_bytes, row["token_bytes"])


def _kept(length: int, kept: int | None) -> int:
    """Return the length of `sequence[:kept]`."""
    return len(range(length)[:kept])
