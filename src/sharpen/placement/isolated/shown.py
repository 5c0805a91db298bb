"""What a worker process writes, shown as it comes.

In: bytes of its standard output or error, the rollout that it works on. Out: text on the same stream of this process,
a bounded amount for each attempt; the last of it is kept for the report of a crash.
"""

from __future__ import annotations

import codecs
import sys

from sharpen.agent.rollout.places import stored_text
from sharpen.agent.sandbox.output import Output

MAX_SHOWN = 1_000_000
"""Characters of one attempt that are shown, on each of the two streams."""
LAST_WORDS = 8000


class Shown(Output):
    """Shows the output of a worker process, and keeps its last words."""

    def __init__(self, stream: str) -> None:
        super().__init__(2 * LAST_WORDS)
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rollout_id, self._left, self._last = "", MAX_SHOWN, ""

    def begin(self, rollout_id: str) -> None:
        """Begin an attempt: it may write so much again, and what was written before is not its own."""
        self._rollout_id, self._left, self._last = rollout_id, MAX_SHOWN, ""

    def add(self, data: bytes) -> None:
        """Show the next bytes."""
        text = self._decoder.decode(data)
        self._last = (self._last + text)[-LAST_WORDS:]
        if self._left <= 0:
            return
        shown, self._left = text[: self._left], self._left - len(text)
        if self._left <= 0:
            shown += f"\n[rollout {self._rollout_id} wrote more than {MAX_SHOWN:,} characters: the rest is left out]\n"
        getattr(sys, self._stream).write(shown)

    @property
    def last_words(self) -> str:
        """The end of what the current attempt wrote."""
        return stored_text(self._last.strip())
