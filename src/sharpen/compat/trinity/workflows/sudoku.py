"""Trinity's sudoku: a board is filled in over several steps, some cells in each.

In: a row with `puzzle` and `solution` (lists of rows; 0 is empty), else a board made from the task. Out: an experience
for each step: reward 1 for the step that solves it, -1 for one that breaks a rule, which ends it, 0 for the others.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from sharpen.compat.trinity.experience import Experience
from sharpen.compat.trinity.model import ModelWrapper
from sharpen.compat.trinity.task import Task
from sharpen.compat.trinity.workflow import Workflow
from sharpen.errors import DatasetError

Board = list[list[int]]
MAX_STEPS, MAX_MOVES = 20, 5
HOLES = 0.5
"""Share of a made board's cells that are empty."""


class SudokuWorkflow(Workflow):
    """Up to 20 steps of up to 5 moves (`row col value`, one a line, rows and columns from 0)."""

    can_reset = True
    max_steps = MAX_STEPS
    max_moves_per_step = MAX_MOVES

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.reset(task)

    def reset(self, task: Task) -> None:
        """Take the row's board, or make one: the same in all rollouts of a task."""
        row = task.raw_task
        if ("puzzle" in row) != ("solution" in row):
            raise DatasetError("the task has only one of the fields 'puzzle' and 'solution': a sudoku needs both")
        if "puzzle" in row:
            self.board, self.solution = _copy(row["puzzle"]), _copy(row["solution"])
        else:
            self.board, self.solution = made_board(random.Random(str(task.task_id)))
        self.current_step = 0

    def run(self) -> list[Experience]:
        """Ask for moves until the board is solved, a rule is broken, or the steps have run out."""
        experiences: list[Experience] = []
        while self.current_step < self.max_steps:
            (experience,) = self.model.chat([{"role": "user", "content": self._prompt()}])
            experience.reward = self._play(experience.response_text)
            experience.eid.step = self.current_step
            experiences.append(experience)
            self.current_step += 1
            if experience.reward != 0.0:
                break
        return experiences

    def parse_action(self, text: str) -> list[tuple[int, int, int]] | None:
        """The moves in a reply of nothing but lines `row col value`; None if it is anything else."""
        size, moves = len(self.board), []
        for line in filter(None, map(str.strip, text.strip().splitlines())):
            try:
                row, column, value = map(int, line.split())
            except ValueError:
                return None
            if not (0 <= row < size and 0 <= column < size and 1 <= value <= size):
                return None
            moves.append((row, column, value))
        return moves if 0 < len(moves) <= self.max_moves_per_step else None

    def _play(self, text: str) -> float:
        """Do a reply's moves; the reward of the step."""
        for row, column, value in self.parse_action(text) or [(-1, -1, 0)]:
            if row < 0 or self.board[row][column] != 0:
                return -1.0
            self.board[row][column] = value
        if not is_valid(self.board):
            return -1.0
        return float(self.board == self.solution)

    def _prompt(self) -> str:
        size = len(self.board)
        block = math.isqrt(size)
        shown = "\n".join(" ".join(map(str, row)) for row in self.board)
        return (
            f"Solve this sudoku of {size}x{size} cells step by step. 0 is an empty cell. Each number from 1 to {size} "
            f"stands once in every row, every column and every block of {block}x{block}. Only empty cells may be "
            f"filled.\n\nReply with 1 to {self.max_moves_per_step} moves and nothing else, one a line, each as three "
            "numbers: row, column, value. Rows and columns are counted from 0. For example:\n0 2 4\n1 3 5\n\n"
            f"Step {self.current_step + 1} of {self.max_steps}. The board:\n{shown}\n"
        )


def is_valid(board: Board) -> bool:
    """Whether no number stands twice in a row, a column or a block. Empty cells are allowed."""
    size = len(board)
    block = math.isqrt(size)
    units: list[list[int]] = [*board, *(list(column) for column in zip(*board, strict=True))]
    for top in range(0, size, block):
        for left in range(0, size, block):
            units.append([board[top + i][left + j] for i in range(block) for j in range(block)])
    filled = [[value for value in unit if value] for unit in units]
    return all(len(values) == len(set(values)) for values in filled)


def made_board(draw: random.Random, size: int = 9) -> tuple[Board, Board]:
    """A puzzle with half of its cells empty, and the board that it was made from."""
    block = math.isqrt(size)
    bands = [list(range(start, start + block)) for start in range(0, size, block)]
    rows, columns = ([i for band in _shuffled(bands, draw) for i in _shuffled(band, draw)] for _ in range(2))
    names = _shuffled(range(1, size + 1), draw)
    solution = [[names[(block * (row % block) + row // block + column) % size] for column in columns] for row in rows]
    puzzle = _copy(solution)
    for cell in draw.sample(range(size * size), int(size * size * HOLES)):
        puzzle[cell // size][cell % size] = 0
    return puzzle, solution


def _shuffled(values: Sequence[Any], draw: random.Random) -> list[Any]:
    return draw.sample(values, len(values))


def _copy(board: Sequence[Sequence[int]]) -> Board:
    return [[int(value) for value in row] for row in board]
