"""The taking game, for two: from a heap of sticks each player in turn takes 1, 2 or 3, and who takes the last one wins.

Role: what an owner brings. `play` is the game and knows nothing of training; `run_agent` (the workflow) seats the model
that is trained and its opponent, and gives the reward itself, so there is no judge.
In: a task `{"sticks": 9, "seat": "first", "game": 3}`, a model object whose policy `rival` is the opponent.
Out: a `WorkflowOutput` with a reward and metrics.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sharpen import WorkflowOutput

RIVAL = "rival"
SEATS = ("first", "second")
MOST = 3
RULES = (
    "Two players take sticks from a heap in turn: one, two or three at a time. Who takes the last stick wins. You are "
    "told how many are left. Answer with the number that you take, and nothing else."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """How a game ended: who won (0 went first), after how many moves, and whether the last one was against the rules,
    which loses."""

    winner: int
    moves: int
    broke_rules: bool


async def play(players: Sequence[Any], sticks: int) -> Game:
    """Let the players move in turn. Each sees the heap alone: nothing else matters in this game."""
    moves = 0
    while True:
        mover = moves % 2
        said = await ask(players[mover], sticks)
        moves += 1
        taken = read_move(said, sticks)
        if taken is None:
            return Game(winner=1 - mover, moves=moves, broke_rules=True)
        sticks -= taken
        if not sticks:
            return Game(winner=mover, moves=moves, broke_rules=False)


async def ask(player: Any, sticks: int) -> str:
    """What a player answers to a heap."""
    reply = await player.client.chat.completions.create(model=player.name, messages=sight(sticks))
    return reply.choices[0].message.content or ""


def sight(sticks: int) -> list[Any]:
    """What a player sees."""
    return [{"role": "system", "content": RULES}, {"role": "user", "content": f"{sticks} sticks are left."}]


def read_move(reply: str, sticks: int) -> int | None:
    """The last number that the reply names; None if it names none, or one that may not be taken."""
    numbers = re.findall(r"\d+", reply)
    taken = int(numbers[-1]) if numbers else 0
    return taken if 1 <= taken <= min(MOST, sticks) else None


async def run_agent(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """The workflow: one game from the model's side of the table, 1 if it wins and -1 if it loses."""
    seat = SEATS.index(task["seat"])
    players = [model.named(RIVAL), model.named(RIVAL)]
    players[seat] = model
    game = await play(players, task["sticks"])
    won = game.winner == seat
    return WorkflowOutput(
        reward=1.0 if won else -1.0,
        metrics={"won": won, "moves": game.moves, "broke_rules": game.broke_rules and not won},
    )
