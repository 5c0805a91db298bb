"""Detection of stop strings in the text of sampled ids.

In: all sampled ids of a request, its stop strings, a decoder. Out: the text before the earliest stop string, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_MARGIN_TOKENS = 16


def find_stop(ids: list[int], stop: Sequence[str], decode: Callable[[list[int]], str]) -> str | None:
    """Return the text before the first stop string, or None if there is none. To be called after each token.

    Only the tail is decoded, until it contains a stop string: a token is at least one byte, so a string of n bytes that
    the newest token completes lies within the last n tokens (a margin covers tokens that decode to nothing).
    """
    longest = max(len(string.encode()) for string in stop)
    tail = decode(ids[-(longest + _MARGIN_TOKENS) :])
    if not any(string in tail for string in stop):
        return None
    text = decode(ids)
    starts = [start for string in stop if (start := text.find(string)) >= 0]
    return text[: min(starts)] if starts else None
