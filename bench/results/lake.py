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
_WAY = {0: 1, 1: 2, 2: 1, 3: 0, 4: 1, 6: 1, 8: 2, 9: 1, 10: 1, 13: 2, 14: 2}
"""A move from each field that leads to the goal; there is none from a hole."""
_SHARE = 0.5


def describe(observation: Any) -> str:
    """Where the player stands, of 16 fields that are counted row by row."""
    return f"You stand on field {int(observation)} of 16."


def move(text: str) -> int:
    """The number of a move. Raises `ValueError` for any other text, with what to say to the model."""
    if text not in MOVES:
        raise ValueError(f"say one of {', '.join(MOVES)}")
    return MOVES.index(text)


def walks(count: int, seed: int = 0) -> Iterator[list[dict[str, Any]]]:
    """Conversations of games: a share of the moves leads to the goal, and the others are drawn from all four."""
    import gymnasium

    rng, lake = random.Random(seed), gymnasium.make("FrozenLake-v1", is_slippery=False, max_episode_steps=MOST_TURNS)
    for _ in range(count):
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        field, over = int(lake.reset()[0]), False
        while not over:
            said = MOVES[_WAY[field]] if rng.random() < _SHARE else rng.choice(MOVES)
            messages.append({"role": "user", "content": describe(field)})
            messages.append({"role": "assistant", "content": said})
            reached, _, ended, cut_off, _ = lake.step(move(said))
            field, over = int(reached), ended or cut_off
        yield messages
    lake.close()
