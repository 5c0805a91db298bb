"""Trinity's workflows on ALFWorld: a game, and a game step by step.

In: a row that holds the path of a game's file. Out: one experience of the whole game, or one for each step (GiGPO).
"""

from __future__ import annotations

import hashlib
from typing import Any

from sharpen.compat.trinity.experience import Experience
from sharpen.compat.trinity.model import ModelWrapper
from sharpen.compat.trinity.steps import RewardPropagationWorkflow
from sharpen.compat.trinity.task import Task
from sharpen.compat.trinity.workflows.alfworld_game import AlfworldGame
from sharpen.compat.trinity.workflows.game import NOT_FINISHED, TAGS, Game, action_in

ACTIONS = """\
Actions: look; inventory (you can carry one thing); go to PLACE; open PLACE; close PLACE; take THING from PLACE; move \
THING to PLACE; examine THING; use THING; heat THING with PLACE; clean THING with PLACE; cool THING with PLACE; slice \
THING with THING."""
HOUSE = f"""You act in a house that is described in words, to carry out a task. {TAGS}

{ACTIONS} For example: <think>Cups may be in a cabinet.</think><action>go to cabinet 1</action>"""


def house_seen(observation: str) -> str:
    """What the model sees of ALFWorld."""
    hint = " Check that the action is one of those listed, in its form." if "Nothing happens." in observation else ""
    return f"Observation: {observation}{hint}"


def game_file(task: Task) -> str:
    """The path of the task's game."""
    return str(task.raw_task[task.format_args.prompt_key])


class AlfworldWorkflow(Game):
    """The question is the path of a game. Reward: that of the game's end, -0.1 without one."""

    system = HOUSE

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.max_env_steps = int(task.workflow_args.get("max_env_steps", 30))
        self.game: AlfworldGame | None = None

    def begin(self) -> str:
        self.game = AlfworldGame(game_file(self.task))
        return house_seen(self.game.observation)

    def act(self, action: str) -> str:
        assert self.game is not None
        reward, self.done = self.game.act(action)
        if self.done:
            self.reward = reward
        return house_seen(self.game.observation)

    def close(self) -> None:
        if self.game is not None:
            self.game.close()


class StepWiseAlfworldWorkflow(RewardPropagationWorkflow):
    """As `AlfworldWorkflow`, with an experience for each step, its own reward and the state it began in (GiGPO)."""

    game: AlfworldGame

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models, use_openai_client=False)
        self.final_reward = NOT_FINISHED
        self.memory: list[dict[str, Any]] = [{"role": "system", "content": HOUSE}]
        self.noted: list[tuple[str, float]] = []

    @property
    def max_step_num(self) -> int:
        """Steps at most."""
        return int(self.task.workflow_args.get("max_env_steps", 30))

    def run(self) -> list[Experience]:
        """Play one game."""
        self.game = AlfworldGame(game_file(self.task))
        try:
            experiences = super().run()
        finally:
            self.game.close()
        for experience, (state, reward) in zip(experiences, self.noted, strict=True):
            experience.info.update(env_state_hash=state, step_reward=reward)
        return experiences

    def step(self, step_num: int) -> bool:
        """One action; whether the game goes on."""
        seen = house_seen(self.game.observation)
        self.memory.append({"role": "user", "content": seen})
        (answer,) = self.model.chat(self.memory)
        self.memory.append({"role": "assistant", "content": answer.response_text})
        reward, done = self.game.act(action_in(answer.response_text))
        self.noted.append((hashlib.sha256(seen.encode()).hexdigest(), reward))
        if done:
            self.final_reward = reward
        return not done

    def reward(self, exps: list[Experience]) -> float:
        """The reward of the game's end."""
        return self.final_reward
