"""What is remembered of rollouts that have ended, for the errors of requests that come too late."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sharpen.gateway.caller import Keys, new_key


@dataclass
class Ended:
    """A rollout without an owner."""

    rollout_id: str
    owner: Any = None


def test_a_bounded_number_of_ended_rollouts_is_remembered() -> None:
    """Red with 10,000 (0.4 MB for each 1,000 rollouts of a run of a day), or without a bound."""
    keys: Keys[Ended] = Keys()
    given = [new_key() for _ in range(2500)]
    for number, key in enumerate(given):
        keys.add(key, Ended(f"step-0/task/{number}"))
        keys.end(key)
    errors = [str(keys.refusal(key, None)) for key in given]
    assert errors[-1].startswith("Rollout step-0/task/2499 has ended")
    assert "or to one that ended long ago" in errors[0]
    assert sum(error.startswith("Rollout ") for error in errors) == 1000
    assert keys.holders() == []
