"""An agent that walks over Gymnasium's frozen lake: it sees the map as text and answers one move a turn.

Role: what an owner brings. `play` is the agent in its environment and knows nothing of training; `run_agent` (the
workflow) lets it play one map and gives the reward itself, so there is no judge.
In: a task `{"map": ["SFFF", ...], "slippery": false, "seed": 7, "max_turns": 14}`, a model object.
Out: a `WorkflowOutput` with a reward and metrics.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
from openai import AsyncOpenAI

from sharpen import WorkflowOutput

MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}
"""Gymnasium's number of each move."""
RULES = (
    "You walk over a frozen lake, seen from above. P is you, F is ice, S the start, H a hole, G the goal. "
    "Reach G, avoid H. Each turn, answer with one move: left, down, right or up."
)
SLIPPERY = " The ice is slippery: you may slide to the left or right of where you want to go."
NO_MOVE = "That is no move. Answer left, down, right or up."
NO_MOVE_COST = 0.2
"""Taken from the reward when every reply was no move; in proportion when some were."""
NEAR_SHARE = 0.3
"""Reward of a player who stands beside the goal when the turns are over; in proportion where he got less far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """How a game ended. `turns` counts replies; `no_moves` those of them that named no move.

    `nearness` is 0 at the start and 1 at the goal, by rows and columns, whatever is between.
    """

    reached: bool
    fell: bool
    nearness: float
    turns: int
    no_moves: int


async def play(client: AsyncOpenAI, model: str, task: Mapping[str, Any]) -> Game:
    """Play one map, until the goal, a hole, or `max_turns` replies. What slips depends on the task's seed only."""
    lake = gymnasium.make("FrozenLake-v1", desc=task["map"], is_slippery=task["slippery"])
    place, _ = lake.reset(seed=task["seed"])
    messages: list[Any] = opening(task, place)
    reached, ended, turns, no_moves = False, False, 0, 0
    while not ended and turns < task["max_turns"]:
        reply = await client.chat.completions.create(model=model, messages=messages)
        said = reply.choices[0].message.content or ""
        turns += 1
        move = read_move(said)
        if move is None:
            no_moves += 1
            seen = NO_MOVE
        else:
            place, reward, ended, _, _ = lake.step(move)
            reached = float(reward) > 0
            seen = draw(task["map"], place)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": seen}]
    lake.close()
    size = len(task["map"])
    nearness = sum(divmod(place, size)) / (2 * (size - 1))
    return Game(reached=reached, fell=ended and not reached, nearness=nearness, turns=turns, no_moves=no_moves)


def reward_of(game: Game) -> float:
    """1 for the goal, 0 for a hole, up to 0.3 for having come nearer; less up to 0.2 for replies that are no moves."""
    earned = float(game.reached) if game.reached or game.fell else NEAR_SHARE * game.nearness
    return earned - NO_MOVE_COST * game.no_moves / game.turns


def opening(task: Mapping[str, Any], place: int) -> list[dict[str, str]]:
    """The rules and the first sight of the map."""
    rules = RULES + (SLIPPERY if task["slippery"] else "")
    return [{"role": "system", "content": rules}, {"role": "user", "content": draw(task["map"], place)}]


def read_move(reply: str) -> int | None:
    """The last move that the reply names (what comes before it may be thoughts); None when it names none."""
    words = re.findall(r"\b(left|down|right|up)\b", reply.lower())
    return MOVES[words[-1]] if words else None


def draw(rows: Sequence[str], place: int) -> str:
    """The map with P where the player stands; `place` counts cells row by row, as Gymnasium does."""
    width = len(rows[0])
    cells = "".join(rows)
    cells = f"{cells[:place]}P{cells[place + 1 :]}"
    return "\n".join(cells[start : start + width] for start in range(0, len(cells), width))


async def run_agent(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """The workflow: one game and its reward."""
    game = await play(model.client, model.name, task)
    return WorkflowOutput(
        reward=reward_of(game),
        metrics={"reached": game.reached, "fell": game.fell, "turns": game.turns, "no_moves": game.no_moves},
    )
