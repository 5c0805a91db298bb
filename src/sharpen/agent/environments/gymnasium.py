"""Environments of Gymnasium, whose observations are text or become text by a function of yours.

In: `id`, the environment's name; `args`, what `gymnasium.make` takes, and `observation` and `action`, your functions
(`games.py:describe`: observation to text; `games.py:move`: the model's text to an action). Out: a task for each seed; a
workflow of one episode, whose reward is the sum of its rewards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sharpen.agent.environments.environment import TEST, import_package
from sharpen.agent.environments.games import Conversation, as_reward, resetting, seeds
from sharpen.config.functions import import_function
from sharpen.config.public import EnvironmentConfig, WorkflowOutput
from sharpen.errors import ConfigError

TYPE = "gymnasium"
STEPS, NO_ACTIONS, TRUNCATED = "steps", "replies_that_are_no_action", "truncated"
"""Metrics of an episode."""
_MOST_TURNS = 1000
"""The turns of an episode whose environment sets no limit."""


class Gymnasium:
    """One environment, made anew for each rollout."""

    judge = None

    def __init__(self, config: EnvironmentConfig) -> None:
        package = import_package(TYPE, "gymnasium")
        if config.id is None:
            raise ConfigError("environment.id is missing: the name of an environment of Gymnasium (FrozenLake-v1)")
        self._config, self._make, self._text = config, package.make, package.spaces.Text
        self._settings = {name: value for name, value in config.args.items() if name not in ("observation", "action")}
        made = self._made()
        spec = made.spec
        self._most_turns = (spec and spec.max_episode_steps) or _MOST_TURNS
        self._describe = self._function("observation", made.observation_space)
        self._act = self._function("action", made.action_space)
        made.close()

    def tasks(self, split: str) -> Sequence[Mapping[str, Any]]:
        """Return a row for each seed. What differs between seeds is the environment's to say."""
        return [
            {"question": f"{self._config.id}, seed {seed}", "seed": seed} for seed in seeds(self._config, split == TEST)
        ]

    async def workflow(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        """Play an episode. A reply that is no action is answered with the reason, and takes one of the turns."""
        environment = await asyncio.to_thread(self._made)
        player = Conversation(model, self._config.system_prompt or "")
        total, steps, wrong, over = 0.0, 0, 0, False
        try:
            with resetting(self._config.id, task["seed"]):
                observation, _ = await asyncio.to_thread(environment.reset, seed=task["seed"])
            told = self._describe(observation)
            for _ in range(self._most_turns):
                reply = await player.reply(told)
                try:
                    action = self._act(reply)
                except ValueError as error:
                    wrong, told = wrong + 1, f"That is no action: {error}"
                    continue
                observation, reward, ended, cut_off, _ = await asyncio.to_thread(environment.step, action)
                total, steps = total + as_reward(reward, f"step {steps + 1} of {self._config.id}"), steps + 1
                over = bool(ended)
                if over or cut_off:
                    break
                told = self._describe(observation)
        finally:
            await asyncio.to_thread(environment.close)
        metrics = {STEPS: steps, NO_ACTIONS: wrong, TRUNCATED: float(not over)}
        return WorkflowOutput(reward=total, metrics=metrics)

    def close(self) -> None:
        """Do nothing: what a rollout opens it closes."""

    def _made(self) -> Any:
        try:
            return self._make(self._config.id, **self._settings)
        except Exception as error:  # the environment's code runs
            raise ConfigError(
                f"Gymnasium makes no {self._config.id!r} with environment.args {self._settings}: "
                f"{' '.join(str(error).split()) or repr(error)}"
            ) from error

    def _function(self, name: str, space: Any) -> Callable[[Any], Any]:
        """Return the function of the settings between text and what is in a space; text needs none."""
        given = self._config.args.get(name)
        if given is not None:
            return import_function(given)
        if not isinstance(space, self._text):
            what = "text from an observation" if name == "observation" else "an action from the model's text"
            raise ConfigError(
                f"{self._config.id!r} has {space} for its {name}s, not text: environment.args.{name} must name a "
                f"function of yours that makes {what}, as games.py:function"
            )
        return _as_it_is


def _as_it_is(value: Any) -> Any:
    return value
