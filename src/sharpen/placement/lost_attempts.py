"""How an attempt ended whose process was lost.

In: what is known of the process. Out: `Ending`. Used for processes of this machine and for workers of Ray.
"""

from __future__ import annotations

from sharpen.agent.rollout.ending import Ending
from sharpen.types import Outcome

HARD_GRACE_S = 10.0
"""How long after its time limit an attempt may still hold its process."""


def held_ending(timeout_s: float) -> Ending:
    """Return the ending of an attempt that held its process until that was killed."""
    text = f"held its process past the time limit of {timeout_s:g} s and could not be interrupted: killed"
    return Ending(outcome=Outcome.BLOCKED_LOOP, error=text)


def died_ending(reason: str, words: str | None = None) -> Ending:
    """Return the ending of an attempt whose process died. `words` are the last that it wrote to standard error."""
    return Ending(outcome=Outcome.WORKFLOW_ERROR, error=f"its process {reason}", traceback=words or None)
