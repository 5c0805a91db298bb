"""A stand-in for the model that proposes prompts: it goes through a list, whatever it is asked.

In: a request of DSPy's or GEPA's. Out: the text in the form that was asked for. Enough to see every part run; a real
model reads the tasks and the answers that it is shown.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

PROPOSALS = (
    "You are a calculator.",
    "Solve the problem. End with #### and the number.",
    "Think step by step, then answer.",
    "Answer with one number and nothing else.",
)


class Proposer:
    """Answers requests; see the module."""

    def __init__(self) -> None:
        self._proposals = itertools.cycle(PROPOSALS)

    def __call__(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The answer to one request."""
        asked = str(messages[-1]["content"])
        if "`[[ ## proposed_instruction ## ]]`" in asked:
            return _field("proposed_instruction", next(self._proposals))
        if "`[[ ## summary ## ]]`" in asked:
            return _field("summary", "Word problems with two numbers.")
        if "`[[ ## observations ## ]]`" in asked:
            return _field("observations", "COMPLETE")
        return f"```\n{next(self._proposals)}\n```"


def _field(name: str, value: str) -> str:
    return f"[[ ## {name} ## ]]\n{value}\n\n[[ ## completed ## ]]"
