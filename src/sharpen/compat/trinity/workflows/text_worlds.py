"""Trinity's text worlds: ALFWorld, ScienceWorld, WebShop, InterCode's SQL, each by the package that has it.

In: a row that names the game. Out: one experience of the whole game (or one for each step), with the game's reward. The
packages are imported when a game is opened; `registry` asks for them before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from abc import abstractmethod
from importlib import import_module
from pathlib import Path
from typing import Any

from sharpen.compat.trinity.experience import Experience
from sharpen.compat.trinity.model import ModelWrapper
from sharpen.compat.trinity.steps import RewardPropagationWorkflow
from sharpen.compat.trinity.task import Task
from sharpen.compat.trinity.workflow import MultiTurnWorkflow
from sharpen.errors import ConfigError

NOT_FINISHED = -0.1
"""Reward of a game of ALFWorld or WebShop that was not finished."""
TAGS = (
    "In each turn, think first, between <think> and </think>, then give exactly one action between <action> and "
    "</action>. Nobody answers questions: finish the task yourself."
)
HOUSE = f"""You act in a house that is described in words, to carry out a task. {TAGS}

Actions: look; inventory (you can carry one thing); go to PLACE; open PLACE; close PLACE; take THING from PLACE; move \
THING to PLACE; examine THING; use THING; heat THING with PLACE; clean THING with PLACE; cool THING with PLACE; slice \
THING with THING. For example: <think>Cups may be in a cabinet.</think><action>go to cabinet 1</action>"""
LABORATORY = f"""You do scientific experiments in a world that is described in words. {TAGS}

Actions: open, close, activate, deactivate, examine, look at, read, pick up, focus on, use OBJECT; connect, move, pour \
OBJECT to (or into) OBJECT; disconnect OBJECT; mix OBJECT; teleport to PLACE; look around; wait; wait1. For example: \
<think>I need the thermometer.</think><action>pick up thermometer</action>"""
SHOP = f"""You shop on a website that is shown in words: buy what comes closest to the instruction, in 15 turns. {TAGS}

Actions: search[words] where there is a search button; click[name of a button that is shown]. For example: \
<think>I look for white shoes.</think><action>search[white shoes]</action>"""
DATABASE = f"""You answer a question by commands to a MySQL database. {TAGS}

An action is one SQL statement, or `submit` when the latest result is the answer. For example: <think>I look at the \
rows.</think><action>SELECT * FROM people LIMIT 5;</action>"""
_ACTION = re.compile(r"<action>(.*?)(?:</action>|$)", re.DOTALL)
_CALL = re.compile(r"(.+)\[(.*)\]")


def action_in(text: str) -> str:
    """The first action of an answer; empty without one."""
    found = _ACTION.search(text)
    return found.group(1).strip() if found else ""


class _Game(MultiTurnWorkflow):
    """A game of several turns, in a thread of its own. Subclasses say how it begins, goes on, and is scored."""

    system: str
    max_env_steps: int
    reward: float = NOT_FINISHED
    done: bool = False

    def run(self) -> list[Experience]:
        """Play until the game is over, or the turns have run out."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}]
        turns = 0
        try:
            observation = self.begin()
            while turns < self.max_env_steps and not self.done:
                turns += 1
                messages.append({"role": "user", "content": observation})
                (answer,) = self.model.chat(messages, n=1)
                messages.append({"role": "assistant", "content": answer.response_text})
                observation = self.act(action_in(answer.response_text))
            if not self.done:
                self.run_out()
        finally:
            self.close()
        info = {"env_rounds": turns, "env_done": int(self.done)}
        return [self.process_messages_to_experience(messages, float(self.reward), info)]

    @abstractmethod
    def begin(self) -> str:
        """Open the game; what the model sees first."""

    @abstractmethod
    def act(self, action: str) -> str:
        """Do an action, note `reward` and `done`; what the model sees next."""

    def run_out(self) -> None:
        """The turns have run out."""

    def close(self) -> None:
        """Give back what `begin` opened, if it came so far."""


def open_alfworld(game_file: str) -> Any:
    """ALFWorld's game in that file."""
    textworld, games = import_module("textworld"), import_module("textworld.gym")
    alfred = import_module("alfworld.agents.environment.alfred_tw_env")
    wanted = textworld.EnvInfos(description=True, inventory=True, admissible_commands=True)
    wrappers = [alfred.AlfredDemangler(), alfred.AlfredExpert(expert_type=alfred.AlfredExpertType.HANDCODED)]
    return games.make(games.register_game(game_file, wanted, wrappers=wrappers))


def house_seen(observation: str) -> str:
    """What the model sees of ALFWorld."""
    hint = " Check that the action is one of those listed, in its form." if "Nothing happens." in observation else ""
    return f"Observation: {observation}{hint}"


class AlfworldWorkflow(_Game):
    """The question is the path of a game. Reward: that of the game's end, -0.1 without one."""

    system = HOUSE

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.max_env_steps = int(task.workflow_args.get("max_env_steps", 30))
        self.env: Any = None

    def begin(self) -> str:
        self.env = open_alfworld(str(self.task.raw_task[self.task.format_args.prompt_key]))
        observation, _ = self.env.reset()
        return house_seen(observation)

    def act(self, action: str) -> str:
        observation, reward, self.done, _ = self.env.step(action)
        if self.done:
            self.reward = reward
        return house_seen(observation)

    def close(self) -> None:
        if self.env is not None:
            self.env.close()


class StepWiseAlfworldWorkflow(RewardPropagationWorkflow):
    """As `AlfworldWorkflow`, with an experience for each step, its own reward and the state it began in (GiGPO)."""

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models, use_openai_client=False)
        self.env: Any = None
        self.final_reward = NOT_FINISHED
        self.observation = ""
        self.memory: list[dict[str, Any]] = [{"role": "system", "content": HOUSE}]
        self.noted: list[tuple[str, float]] = []

    @property
    def max_step_num(self) -> int:
        """Steps at most."""
        return int(self.task.workflow_args.get("max_env_steps", 30))

    def run(self) -> list[Experience]:
        """Play one game."""
        self.env = open_alfworld(str(self.task.raw_task[self.task.format_args.prompt_key]))
        try:
            self.observation, _ = self.env.reset()
            experiences = super().run()
        finally:
            self.env.close()
        for experience, (state, reward) in zip(experiences, self.noted, strict=True):
            experience.info.update(env_state_hash=state, step_reward=reward)
        return experiences

    def step(self, step_num: int) -> bool:
        """One action; whether the game goes on."""
        seen = house_seen(self.observation)
        self.memory.append({"role": "user", "content": seen})
        (answer,) = self.model.chat(self.memory)
        self.memory.append({"role": "assistant", "content": answer.response_text})
        self.observation, reward, done, _ = self.env.step(action_in(answer.response_text))
        self.noted.append((hashlib.sha256(seen.encode()).hexdigest(), float(reward)))
        if done:
            self.final_reward = float(reward)
        return not done

    def reward(self, exps: list[Experience]) -> float:
        """The reward of the game's end."""
        return self.final_reward


class SciWorldWorkflow(_Game):
    """The question is JSON with `task_name`, `var_num` and `jar_path`. Reward: the best score so far, by 100."""

    system = LABORATORY
    max_env_steps = 30
    env: Any = None

    def begin(self) -> str:
        game = json.loads(self.task.raw_task[self.task.format_args.prompt_key])
        self.env = import_module("scienceworld").ScienceWorldEnv("", game["jar_path"], envStepLimit=100)
        self.env.load(game["task_name"], game["var_num"], "easy", generateGoldPath=True)
        observation, _ = self.env.reset()
        self.score, self.reward = 0.0, 0.0
        return f"Observation:\nTask Description: {self.env.get_task_description()}\n{observation}"

    def act(self, action: str) -> str:
        observation, points, self.done, _ = self.env.step(action)
        self.score += points
        self.reward = max(self.reward, self.score / 100)
        return f"Observation:\n{observation}"

    def close(self) -> None:
        if self.env is not None:
            self.env.close()


class WebShopWorkflow(_Game):
    """The question is the number of a session. Reward: that of the purchase, -0.1 without one.

    Shops are kept for later games: each takes about 15 GB with all products (`workflow_args.num_products`: fewer), and
    there are as many as games at once (`rollout.max_concurrent_rollouts`).
    """

    system = SHOP
    max_env_steps = 15
    shops: list[Any] = []  # noqa: RUF012 - shared by all games of the process
    _lock = threading.Lock()
    env: Any = None

    def begin(self) -> str:
        gym = import_module("gym")
        import_module("web_agent_site.envs")  # registers the environment
        with self._lock:
            self.env = self.shops.pop() if self.shops else None
        if self.env is None:
            products = self.task.workflow_args.get("num_products")
            options = {"observation_mode": "text_rich", "num_products": products, "human_goals": True}
            self.env = gym.make("WebAgentTextEnv-v0", **options)
        self.env.reset(session=int(self.task.raw_task[self.task.format_args.prompt_key]))
        return f"Observation: {self.env.observation}"

    def act(self, action: str) -> str:
        if problem := impossible(action, self.env.get_available_actions()):
            return f"Observation: {problem}"
        observation, reward, self.done, _ = self.env.step(action)
        if self.done:
            self.reward = reward
        return f"Observation: {observation}"

    def close(self) -> None:
        if self.env is not None:
            with self._lock:
                self.shops.append(self.env)


def impossible(action: str, available: dict[str, Any]) -> str:
    """Why a page of the shop does not take an action; empty if it does."""
    match = _CALL.match(action)
    name, argument = (match[1], match[2].lower()) if match else (action, "")
    if name == "search" and argument:
        return "" if available["has_search_bar"] else "There is no search here: click the button Back to Search first."
    if name == "search":
        return "A search needs words in its brackets: search[words]."
    if name == "click":
        buttons = ", ".join(available["clickables"])
        return "" if argument in available["clickables"] else f"There is no such button on this page, but {buttons}."
    return "That is no action: write search[words] or click[button] between <action> and </action>."


class InterCodeSQLWorkflow(_Game):
    """The question is a query's index in `data_path` (of the row, or of `workflow_args`). Reward: the last step's.

    `workflow_args`: `max_env_steps` (10), `image_name` (docker-env-sql), `verbose`, `auto_submit` (true).
    """

    system = DATABASE
    reward = 0.0
    env: Any = None

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.max_env_steps = int(task.workflow_args.get("max_env_steps", 10))
        self.data_path = str(task.raw_task.get("data_path") or task.workflow_args.get("data_path") or "")
        if not self.data_path:
            raise ConfigError("intercode_sql_workflow needs workflow_args.data_path, or a field data_path: the queries")

    def begin(self) -> str:
        arguments, row = self.task.workflow_args, self.task.raw_task
        image = arguments.get("image_name", "docker-env-sql")
        path = str(Path(self.data_path).expanduser())
        verbose = bool(arguments.get("verbose", False))
        self.env = import_module("intercode.envs").SqlEnv(
            image, data_path=path, preprocess=_use_database, verbose=verbose
        )
        observation, _ = self.env.reset(int(self.task.task_desc or row.get("query_idx", 0)))
        query = getattr(self.env, "query", row.get("query", ""))
        database = row.get("db") or _database(getattr(self.env, "record", {}))
        return f"Question: {query}\nDatabase: {database}\nObservation: {observation}"

    def act(self, action: str) -> str:
        if not action:
            return "Observation: that is no action: write one SQL statement, or submit, between <action> and </action>."
        observation, self.reward, self.done, _ = self.env.step(action)
        return f"Observation: {observation}"

    def run_out(self) -> None:
        if self.task.workflow_args.get("auto_submit", True):
            self.act("submit")

    def close(self) -> None:
        for handle in (getattr(self.env, name, None) for name in ("cur", "cnx")):
            if handle is not None:
                handle.close()


def _database(record: dict[str, Any]) -> str:
    extra = record.get("extra")
    return str(record.get("db") or (extra.get("db") if isinstance(extra, dict) else "") or "")


def _use_database(record: dict[str, Any]) -> str:
    return f"use {_database(record)}"
