"""What stands between Gymnasium's frozen lake and a model: an observation as text, and text as an action.

In: the number of a field; what the model says. Out: a sentence; the number of a move. The environment's settings name
both functions (docs/use/environments.md). `walks` are games by which a model is taught.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

MOVES = ("left", "down", "right", "up")
"""In Gymnasium's order."""
SYSTEM = "You cross a frozen lake. Answer with left, down, right or up."
MOST_TURNS = 10
"""More would not fit into the context of the tiny model."""
_WAY = ("down", "down", "right", "right", "down", "right")
_NOWHERE = ("left", "up")
"""From the first field no move of these leads away."""
_SHARE = 0.2


def describe(observation: Any) -> str:
    """Where the player stands, of 16 fields that are counted row by row."""
    return f"You stand on field {int(observation)} of 16."


def move(text: str) -> int:
    """The number of a move. Raises `ValueError` for any other text, with what to say to the model."""
    if text not in MOVES:
        raise ValueError(f"say one of {', '.join(MOVES)}")
    return MOVES.index(text)


def walks(count: int, seed: int = 0) -> Iterator[list[dict[str, Any]]]:
    """Conversations of games: a share goes the way, and the others go nowhere."""
    import gymnasium

    rng, lake = random.Random(seed), gymnasium.make("FrozenLake-v1", is_slippery=False, max_episode_steps=MOST_TURNS)
    for _ in range(count):
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        field, over = lake.reset()[0], False
        way = iter(_WAY) if rng.random() < _SHARE else iter(lambda: rng.choice(_NOWHERE), "")
        while not over:
            said = next(way)
            messages.append({"role": "user", "content": describe(field)})
            messages.append({"role": "assistant", "content": said})
            field, _, ended, cut_off, _ = lake.step(move(said))
            over = ended or cut_off
        yield messages
    lake.close()
