"""Trinity's text worlds beside ALFWorld: ScienceWorld, WebShop, InterCode's SQL, each by the package that has it.

In: a row that names the game. Out: one experience of the whole game, with its reward. The packages are imported when a
game is opened; `registry` asks for them before anything is loaded.
"""

from __future__ import annotations

import json
import re
import threading
import typing
from importlib import import_module
from pathlib import Path
from typing import Any

from sharpen.compat.trinity.model import ModelWrapper
from sharpen.compat.trinity.task import Task
from sharpen.compat.trinity.workflows.game import TAGS, Game
from sharpen.errors import ConfigError

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
_CALL = re.compile(r"(.+)\[(.*)\]")


class SciWorldWorkflow(Game):
    """The question is JSON with `task_name`, `var_num` and `jar_path`. Reward: the best score so far, by 100.

    Each game has a Java process. They are kept for later games: there are as many as games at once
    (`rollout.max_concurrent_rollouts`).
    """

    system = LABORATORY
    max_env_steps = 30
    laboratories: dict[str, list[Any]] = {}  # noqa: RUF012 - by `jar_path`; shared by all games of the process
    _lock = threading.Lock()
    env: Any = None

    def begin(self) -> str:
        game = json.loads(self.task.raw_task[self.task.format_args.prompt_key])
        self.jar = str(game["jar_path"])
        with self._lock:
            idle = self.laboratories.setdefault(self.jar, [])
            env = idle.pop() if idle else None
        if env is None:
            env = import_module("scienceworld").ScienceWorldEnv("", self.jar, envStepLimit=100)
        env.load(game["task_name"], game["var_num"], "easy")
        observation, _ = env.reset()
        self.env, self.score, self.reward = env, 0.0, 0.0
        return f"Observation:\nTask Description: {env.get_task_description()}\n{observation}"

    def act(self, action: str) -> str:
        env, self.env = self.env, None  # if it fails, it is not kept
        observation, points, self.done, _ = env.step(action)
        self.env = env
        self.score += points
        self.reward = max(self.reward, self.score / 100)
        return f"Observation:\n{observation}"

    def close(self) -> None:
        if self.env is not None:
            with self._lock:
                self.laboratories[self.jar].append(self.env)


class WebShopWorkflow(Game):
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


class InterCodeSQLWorkflow(Game):
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


_use_database.__annotations__ = {"record": typing.Dict, "return": str}  # noqa: UP006 - the package compares them
