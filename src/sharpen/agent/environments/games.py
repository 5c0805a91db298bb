"""What environments have in common: a conversation with the player, tasks that are seeds, rewards and calls of tools
that are checked.

In: observations of a game, in text; messages of the model. Out: the model's replies; rows of tasks; arguments.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from typing import Any

from sharpen.config.public import EnvironmentConfig
from sharpen.errors import RolloutError

NUM_TRAIN, NUM_HELD_OUT = 1000, 200
"""The games that are played where the settings do not say how many."""
_SEEDS = 2**20
"""The seeds that belong to one `environment.seed`."""


class Conversation:
    """A player's conversation: what the game tells is the user's, what the model replies is a move."""

    def __init__(self, model: Any, system_prompt: str) -> None:
        """`system_prompt`: "" is none."""
        self._model = model
        self._start: list[Any] = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._messages = [*self._start]
        self._heard = ""

    async def reply(self, told: str) -> str:
        """Return the move after what the game tells next. Raises `RolloutError` if that is no text."""
        self._messages.append({"role": "user", "content": as_text(told)})
        answer = await self._model.client.chat.completions.create(model=self._model.name, messages=self._messages)
        move = answer.choices[0].message.content or ""
        self._messages.append({"role": "assistant", "content": move})
        return move

    async def reply_to_all(self, told: str) -> str:
        """As `reply`, of a game that tells all from the start each time: what is new is told on, and if the game tells
        something else, the conversation begins anew."""
        if isinstance(told, str):
            if self._heard and told.startswith(self._heard) and told[len(self._heard) :].strip():
                told, self._heard = told[len(self._heard) :], told
            else:
                self._messages, self._heard = [*self._start], told
        return await self.reply(told)


def seeds(config: EnvironmentConfig, split_is_held_out: bool) -> range:
    """Return the seeds of a split: the held-out ones first, then those that train."""
    num_train, num_held_out = config.train_tasks or NUM_TRAIN, config.held_out_tasks or NUM_HELD_OUT
    first = config.seed * _SEEDS
    return (
        range(first, first + num_held_out)
        if split_is_held_out
        else range(first + num_held_out, first + num_held_out + num_train)
    )


@contextlib.contextmanager
def resetting(name: str | None, seed: int) -> Iterator[None]:
    """Raise `RolloutError` in place of what an environment's own code raises when it begins a task."""
    try:
        yield
    except Exception as error:
        raise RolloutError(
            f"{name} cannot be reset with seed {seed}: {type(error).__name__}: {str(error)[:120]}: reset it by "
            "itself with this seed, and correct it or environment.args"
        ) from error


def as_text(told: Any) -> str:
    """Return what a game tells. Raises `RolloutError` if it is no text, or empty."""
    if not isinstance(told, str) or not told.strip():
        raise RolloutError(
            f"the environment gave the player no text, but {told!r}: correct it, or what makes text of its "
            "observations (environment.args.observation)"
        )
    return told


def as_reward(value: Any, whose: str) -> float:
    """Return a reward as a number. Raises `RolloutError` for what is none."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, str) or not math.isfinite(number):
        raise RolloutError(
            f"the reward of {whose} is {value!r}, not a finite number: let the environment give one, 0.0 for nothing"
        )
    return number


def arguments_of(call: Any) -> dict[str, Any] | str:
    """Return the arguments of a tool's call; or, if they are no JSON object, what to say to the model instead."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except json.JSONDecodeError as error:
        return f"error: the arguments are no JSON ({error})"
    if not isinstance(arguments, dict):
        return f"error: the arguments must be a JSON object, got {type(arguments).__name__}"
    return arguments
