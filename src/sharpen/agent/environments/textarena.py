"""Games of TextArena, for one player or for two.

In: `id`, a game's name; `args`, what `textarena.make` takes, and `opponent`, the name of an auxiliary model, or of a
policy of the run, that plays the other side. Out: a task for each seed, and each side in turn against an opponent; a
workflow of one game, whose reward is the game's. Without an opponent the model plays both sides (`player_0`,
`player_1`), each with its own reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np

from sharpen.agent.environments.environment import TEST, import_package
from sharpen.agent.environments.games import Conversation, as_reward, resetting, seeds
from sharpen.config.public import EnvironmentConfig, WorkflowOutput
from sharpen.errors import ConfigError, RolloutError

TYPE = "textarena"
TURNS, INVALID, WON = "turns", "ended_by_an_invalid_move", "won"
"""Metrics of a game."""
_MOST_TURNS = 1000
"""No game is longer: most have a limit of their own."""
_drawing = threading.Lock()


class TextArena:
    """One game, made anew for each rollout."""

    judge = None

    def __init__(self, config: EnvironmentConfig) -> None:
        self._package = import_package(TYPE, "textarena")
        known = import_package(TYPE, "textarena.envs.registration").ENV_REGISTRY
        if config.id not in known:
            near = get_close_matches(config.id or "", list(known), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"environment.id is {config.id!r}, which is no game of TextArena{hint}")
        self._config, self._opponent = config, config.args.get("opponent")
        self._settings = {name: value for name, value in config.args.items() if name != "opponent"}
        self._num_players = self._players()
        if self._opponent is not None and self._num_players == 1:
            raise ConfigError(f"environment.args.opponent is {self._opponent!r}, but {config.id} is for one player")
        prompts = import_package(TYPE, "textarena.agents.basic_agents")
        given = config.system_prompt
        self.system_prompt = str(prompts.STANDARD_GAME_PROMPT) if given is None else given

    def tasks(self, split: str) -> Sequence[Mapping[str, Any]]:
        """Return a row for each seed. Games with few beginnings have the same one under several seeds."""
        rows: list[dict[str, Any]] = []
        for seed in seeds(self._config, split == TEST):
            row = {"question": f"{self._config.id}, seed {seed}", "seed": seed}
            rows.append(row if self._opponent is None else {**row, "seat": seed % 2})
        return rows

    async def workflow(
        self, task: dict[str, Any], model: Any, auxiliary_models: Mapping[str, Any] | None = None
    ) -> WorkflowOutput:
        """Play a game to its end."""
        players = {
            seat: Conversation(who, self.system_prompt)
            for seat, who in self._seats(task, model, auxiliary_models or {}).items()
        }
        with resetting(self._config.id, task["seed"]):
            game = await asyncio.to_thread(
                _Game, self._package, self._config.id, self._settings, self._num_players, task["seed"]
            )
        turns = 0
        while not game.is_over:
            if turns == _MOST_TURNS:
                raise RolloutError(
                    f"{self._config.id} did not end within {_MOST_TURNS} turns: set its limit of turns in "
                    "environment.args, or choose a game that ends"
                )
            seat, told = await asyncio.to_thread(game.observe)
            await asyncio.to_thread(game.move, await players[seat].reply_to_all(told))
            turns += 1
        return self._output(game, task.get("seat", 0), turns)

    def close(self) -> None:
        """Do nothing: a game is objects of this process."""

    def _seats(self, task: Mapping[str, Any], model: Any, others: Mapping[str, Any]) -> dict[int, Any]:
        """Return the model of each side."""
        if self._num_players == 1:
            return {0: model}
        if self._opponent is None:
            return {seat: model.named(f"player_{seat}") for seat in range(self._num_players)}
        if self._opponent in getattr(model, "policies", ()):
            return {task["seat"]: model, 1 - task["seat"]: model.named(self._opponent)}
        if self._opponent not in others:
            raise RolloutError(
                f"environment.args.opponent is {self._opponent!r}, but the auxiliary models are "
                f"{sorted(others) or 'none'}, and policies has no such name"
            )
        return {task["seat"]: model, 1 - task["seat"]: others[self._opponent]}

    def _output(self, game: _Game, seat: int, turns: int) -> WorkflowOutput:
        rewards, told = game.close()
        if not isinstance(rewards, Mapping):
            raise RolloutError(f"{self._config.id} gave no rewards at its end, but {rewards!r}")
        numbers = {who: as_reward(rewards.get(who), f"player {who}") for who in range(self._num_players)}
        invalid = bool((told.get(seat) or {}).get("invalid_move", False))
        metrics = {TURNS: turns, INVALID: float(invalid), WON: float(numbers[seat] > 0)}
        of_each = None
        if self._num_players > 1 and self._opponent is None:
            of_each = {f"player_{who}": number for who, number in numbers.items()}
        return WorkflowOutput(reward=numbers[seat], call_rewards=of_each, metrics=metrics)

    def _players(self) -> int:
        """Return for how many players the game is: it is begun with one, then with two."""
        reasons = []
        for number in (1, 2):
            try:
                _Game(self._package, self._config.id, self._settings, number, seed=0)
            except Exception as error:  # the game's code runs
                reasons.append(f"with {number}: {' '.join(str(error).split()) or repr(error)}")
            else:
                return number
        raise ConfigError(
            f"TextArena begins no game {self._config.id!r} with environment.args {self._settings} for one or two "
            f"players ({'; '.join(reasons)})"
        )


class _Game:
    """A game that was begun. Games draw from the random numbers of the whole process, and many are played at a time:
    each has its own here, so that one seed is one game."""

    def __init__(self, package: Any, id_: str | None, settings: Mapping[str, Any], num_players: int, seed: int) -> None:
        seeded = random.Random(seed)
        self._drawn: tuple[Any, Any] = (seeded.getstate(), np.random.RandomState(seed % 2**32).get_state())
        with self._own_numbers():
            self._made = package.make(id_, **settings)
            self._made.reset(num_players=num_players, seed=seed)
        self.is_over = False

    def observe(self) -> tuple[int, str]:
        """Return whose turn it is, and all that this side knows."""
        with self._own_numbers():
            seat, told = self._made.get_observation()
        return seat, told

    def move(self, action: str) -> None:
        """Make a move."""
        with self._own_numbers():
            self.is_over, _ = self._made.step(action)

    def close(self) -> tuple[Any, Mapping[int, Any]]:
        """Return the rewards, and what is told of each side at the end."""
        rewards, told = self._made.close()
        return rewards, told or {}

    @contextlib.contextmanager
    def _own_numbers(self) -> Iterator[None]:
        with _drawing:
            others = random.getstate(), np.random.get_state()
            random.setstate(self._drawn[0])
            np.random.set_state(self._drawn[1])
            try:
                yield
            finally:
                self._drawn = (random.getstate(), np.random.get_state())
                random.setstate(others[0])
                np.random.set_state(others[1])
