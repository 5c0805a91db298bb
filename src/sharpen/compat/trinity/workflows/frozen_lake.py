"""Trinity's frozen lake: the model walks over a board of ice and holes to the goal, one step with each answer.

In: a row with `size`, `p` (share of frozen tiles) and `seed`, which make the board; `workflow_args`: `env_max_steps`,
`agent_max_steps`, `is_slippery`, `desc` (a board of one's own). Out: one experience of the whole walk, with reward 1 at
the goal, else 0. Boards, starts and slips are those of Trinity-RFT (which has gymnasium draw them) for the same seed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from sharpen.compat.trinity.experience import Experience
from sharpen.compat.trinity.model import ModelWrapper
from sharpen.compat.trinity.task import Task
from sharpen.compat.trinity.workflow import MultiTurnWorkflow
from sharpen.errors import ConfigError

MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""In the order in which gymnasium counts actions; Trinity-RFT counts them from 1."""
SYMBOLS = {"S": "_", "F": "_", "H": "O", "G": "G"}
SYSTEM = (
    "You are walking on a frozen lake. Bring the player (P) to the goal (G) in as few steps as you can.\n\n"
    "Symbols: P player, G goal, _ ice, O hole. The ice may be slippery: now and then you slide to the side of where "
    "you wanted to go. Falling into a hole ends the walk with reward 0, reaching the goal with reward 1.\n\n"
    "In each turn you see the lake. Think about your next step, then write it between three backticks: one of Up, "
    "Down, Left, Right, and nothing else, for example ```Up```."
)
_ACTION = re.compile(r"```(.*?)```", re.DOTALL)


class Lake:
    """A board and the player on it. Slips are drawn from `seed`."""

    def __init__(self, board: Sequence[str], *, slippery: bool, seed: int) -> None:
        self.board, self.slippery = list(board), slippery
        self._random = np.random.default_rng(seed)
        self._random.random()  # gymnasium draws the start among one
        self.place = next((r, c) for r, row in enumerate(board) for c, tile in enumerate(row) if tile == "S")

    @property
    def tile(self) -> str:
        """What the player stands on."""
        return self.board[self.place[0]][self.place[1]]

    @property
    def done(self) -> bool:
        """Whether the walk is over."""
        return self.tile in "HG"

    def step(self, move: str) -> None:
        """Go one step, or slip; the border holds the player back."""
        names = list(MOVES)
        if self.slippery:
            index = names.index(move)
            ways = [names[(index - 1) % 4], move, names[(index + 1) % 4]]
            move = ways[int(np.argmax(np.cumsum([1 / 3] * 3) > self._random.random()))]
        size = (len(self.board), len(self.board[0]))
        row, column = (
            min(max(at + by, 0), most - 1) for at, by, most in zip(self.place, MOVES[move], size, strict=True)
        )
        self.place = (row, column)

    def shown(self) -> str:
        """The lake as the model sees it."""
        rows = [[SYMBOLS[tile] for tile in row] for row in self.board]
        rows[self.place[0]][self.place[1]] = {"H": "X", "G": "√"}.get(self.tile, "P")
        return "\n".join("".join(f" {symbol} \t" for symbol in row) for row in rows)


class FrozenLakeWorkflow(MultiTurnWorkflow):
    """Metrics: `env_steps`, `env_done`, `test_score`. The answers of a walk share a budget of 10,240 tokens."""

    is_async = True
    max_response_tokens = 10240

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        arguments, row = task.workflow_args, task.raw_task
        self.agent_max_steps = int(arguments.get("agent_max_steps", 10))
        seed = int(row.get("seed", 42))
        board = arguments.get("desc") or made_lake(
            int(row["size"]), float(row.get("p", 0.8)), seed, int(arguments.get("env_max_steps", 8))
        )
        self.lake = Lake(board, slippery=bool(arguments.get("is_slippery", False)), seed=seed)

    async def run_async(self) -> list[Experience]:
        """Walk until the goal, a hole, or the last step."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        steps, first, before = 0, 0, ""
        while steps < self.agent_max_steps and not self.lake.done:
            asked = [*messages, {"role": "user", "content": self._question(steps, before)}]
            tokens = await self._num_tokens(asked)
            first = first or tokens
            if (left := self.max_response_tokens - (tokens - first)) <= 0:
                break
            sampling = {**asdict(self.task.rollout_args), "n": 1, "max_tokens": left}
            (answer,) = await self.model.chat_async(asked, **sampling)
            messages = [*asked, {"role": "assistant", "content": answer.response_text}]
            before = self.lake.shown()
            if (move := move_in(answer.response_text)) is not None:
                self.lake.step(move)
            steps += 1
        reward = float(self.lake.tile == "G")
        info = {"env_steps": steps, "env_done": int(self.lake.done), "test_score": reward}
        return [self.process_messages_to_experience(messages, reward, info)]

    async def _num_tokens(self, messages: list[dict[str, Any]]) -> int:
        """Tokens of the prompt; 0 where an endpoint answers, which counts for itself."""
        try:
            return await self.model.get_message_token_len(messages)
        except ConfigError:
            return 0

    def _question(self, steps: int, before: str) -> str:
        now = self.lake.shown()
        unmoved = "\nYou have not moved: check your step, and that one of the four words is between the backticks."
        return (
            f"The lake ({steps}):\n{now}\nYou are not at the goal yet. What is your next step?"
            f"{unmoved if steps and now == before else ''}\nSteps left: {self.agent_max_steps - steps}."
        )


def move_in(text: str) -> str | None:
    """The step in an answer: the last thing between three backticks, a direction or its number from 1."""
    found = _ACTION.findall(text)
    word = found[-1].strip().lower() if found else ""
    numbers = {str(number): move for number, move in enumerate(MOVES, 1)}
    return word if word in MOVES else numbers.get(word)


def made_lake(size: int, frozen: float, seed: int, max_steps: int) -> list[str]:
    """A board whose goal can be reached. Raises `ConfigError` for a size of which there is none."""
    if size < 2:
        raise ConfigError(f"frozen_lake_workflow: the task's size is {size}; a lake has at least 2 x 2 tiles")
    random, share = np.random.default_rng(seed), min(1.0, frozen)
    while True:
        board = random.choice(["F", "H"], (size, size), p=[share, 1 - share]).tolist()
        start = goal = (0, 0)
        while start == goal:
            start, goal = ((int(random.integers(0, size)), int(random.integers(0, size))) for _ in range(2))
        board[start[0]][start[1]], board[goal[0]][goal[1]] = "S", "G"
        if _reaches(board, start, max_steps):
            return ["".join(row) for row in board]


def _reaches(board: list[list[str]], start: tuple[int, int], max_steps: int) -> bool:
    """Whether a search that goes deep first finds the goal within so many steps. In Trinity-RFT's order, so that it
    takes and leaves the same boards."""
    waiting, seen = [(*start, 0)], set[tuple[int, int]]()
    while waiting:
        row, column, steps = waiting.pop()
        if steps > max_steps or (row, column) in seen:
            continue
        seen.add((row, column))
        for down, right in ((1, 0), (0, 1), (-1, 0), (0, -1)):
            place = row + down, column + right
            if not all(0 <= at < len(board) for at in place):
                continue
            tile = board[place[0]][place[1]]
            if tile == "G":
                return True
            if tile != "H":
                waiting.append((*place, steps + 1))
    return False
