"""Trinity's workflows on ALFWorld: a game, and a game step by step.

In: a row that holds the path of a game's file. Out: one experience of the whole game, or one for each step (GiGPO).
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

from sharpen.compat.trinity.experience import Experience
from sharpen.compat.trinity.model import ModelWrapper
from sharpen.compat.trinity.steps import RewardPropagationWorkflow
from sharpen.compat.trinity.task import Task
from sharpen.compat.trinity.workflow import Workflow
from sharpen.compat.trinity.workflows.game import NOT_FINISHED, TAGS, Game, action_in

# A game of ALFWorld, in a process of its own.
#
# In: the path of a game's file, and actions. Out: what is seen, rewards. The package allows one game at a time in a
# process: its parser and its translator of PDDL keep their state in globals and replace `sys.argv` and `sys.stdout`. A
# process is kept for later games, so that there are as many as games at once.

_idle: list[subprocess.Popen[bytes]] = []
_all: list[subprocess.Popen[bytes]] = []
_lock = threading.Lock()


class AlfworldGame:
    """A game that has begun. `observation` is what was seen last. Raises `RuntimeError` where the package fails."""

    def __init__(self, file: str) -> None:
        with _lock:
            self._process = _idle.pop() if _idle else _start()
        self.observation = ""
        self._ask({"open": os.path.abspath(file)})

    def act(self, action: str) -> tuple[float, bool]:
        """Do an action; the reward so far, and whether the game is over."""
        reply = self._ask({"act": action})
        return float(reply["reward"]), bool(reply["done"])

    def close(self) -> None:
        """Keep the process for a later game."""
        with _lock:
            if self._process.poll() is None:
                _idle.append(self._process)

    def _ask(self, question: dict[str, str]) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = b""
        reply: dict[str, Any] = json.loads(line) if line else {"error": "its process ended: see its message"}
        if "error" in reply:
            _end(process)
            raise RuntimeError(f"the game of ALFWorld failed: {reply['error']}")
        self.observation = str(reply["observation"])
        return reply


def _start() -> subprocess.Popen[bytes]:
    """A process that imports from where this one does."""
    command = [sys.executable, "-m", "sharpen.compat.trinity.workflows.alfworld_process"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    _all.append(process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
    with _lock:
        _all.remove(process)


@atexit.register
def end_all() -> None:
    """End all processes, those of games that go on too."""
    _idle.clear()
    for process in list(_all):
        _end(process)


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


# Trinity's RAFT on ALFWorld: games that are imitated where they were won, and left out of training where not.
#
# In: a row that holds the path of a game's file. Out: the answers of one attempt. Each answer holds `<experience>`,
# `<think>` and `<action>`; an attempt is trained if it was won and all of its answers have the three.

MAX_STEPS = 50
"""Actions of an attempt at most."""
SAME_ACTIONS = 3
"""A first attempt ends where the model gives the same action so often in a row."""
SYSTEM = f"""You act in a house that is described in words, to carry out a task. Every answer has three parts, in this \
order, and none may be missing:

<experience>what is worth knowing for tasks of this kind: principles, strategies, common sense, pitfalls; nothing that \
holds for this task alone, and no empty phrases</experience>
<think>your reasoning</think>
<action>exactly one action</action>

{ACTIONS} For example: <experience>Things are found sooner where people usually put them, and closed places have to be \
opened to see what is in them.</experience><think>Cups may be in a cabinet.</think><action>go to cabinet 1</action>"""
AGAIN = """{outcome}

Try again, from the beginning, and do better. Put what the first attempt taught you into <experience>: strategies, \
pitfalls, what one has to know. Never give the same action twice in a row: if you notice it, do something else. Do not \
mention an earlier attempt; write as if this were the first, with the experience that you have now."""
_ANSWER = re.compile(r"<experience>(.*?)</experience>.*?<think>(.*?)</think>.*?<action>(.*?)</action>", re.DOTALL)


def parts_of(text: str) -> tuple[str, str, str]:
    """Experience, thought and action of an answer; empty texts where it does not have all three tags, in this order."""
    found = _ANSWER.search(text)
    experience, thought, action = (part.strip() for part in found.groups()) if found else ("", "", "")
    return experience, thought, action


@dataclass(slots=True, kw_only=True)
class Attempt:
    """What came of one attempt. `messages` is its conversation, `answers` are the model's answers in it."""

    messages: list[dict[str, Any]]
    answers: list[Experience] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    well_formed: bool = True
    reward: float = 0.0
    done: bool = False

    @property
    def won(self) -> bool:
        """Whether the task was carried out."""
        return self.reward >= 1

    @property
    def metrics(self) -> dict[str, float]:
        """Trinity's metrics of it."""
        return {"success": float(self.done and self.won), "reward": self.reward, "steps": float(len(self.actions))}


class RAFTAlfworldWorkflow(Workflow):
    """The question is the path of a game. Reward: 1 if it was won in 50 actions, else 0.

    Of an attempt that was not won, or in which an answer lacks a part, nothing is trained.
    """

    def run(self) -> list[Experience]:
        """Play one game."""
        attempt = self.attempt([{"role": "system", "content": SYSTEM}], SAME_ACTIONS)
        return scored(attempt, attempt.metrics, trained=attempt.won and attempt.well_formed)

    def attempt(self, messages: list[dict[str, Any]], same_actions: int | None = None) -> Attempt:
        """Play the game after these messages; `same_actions` in a row end it, the last of them undone."""
        attempt = Attempt(messages=list(messages))
        sampling = self.task.rollout_args
        options = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        game = AlfworldGame(game_file(self.task))
        try:
            while len(attempt.actions) < MAX_STEPS and not attempt.done:
                attempt.messages.append({"role": "user", "content": house_seen(game.observation)})
                (answer,) = self.model.chat(attempt.messages, n=1, **options)
                attempt.messages.append({"role": "assistant", "content": answer.response_text})
                parts = parts_of(answer.response_text)
                attempt.answers.append(answer)
                attempt.actions.append(parts[-1])
                attempt.well_formed = attempt.well_formed and all(parts)
                latest = attempt.actions[-same_actions:] if same_actions is not None else []
                if len(latest) == same_actions and len(set(latest)) == 1:
                    break
                attempt.reward, attempt.done = game.act(parts[-1])
        finally:
            game.close()
        return attempt


class RAFTReflectAlfworldWorkflow(RAFTAlfworldWorkflow):
    """As `RAFTAlfworldWorkflow`, with a second attempt after one that was not won, which knows the first one.

    A second attempt that is better is trained as it was sampled: after the first one, of which nothing is trained.
    """

    def run(self) -> list[Experience]:
        """Play one game, once or twice; once in an evaluation."""
        first = self.attempt([{"role": "system", "content": SYSTEM}], SAME_ACTIONS)
        if first.won or self.task.is_eval:
            return scored(first, first.metrics, trained=first.won and first.well_formed)
        again = {"role": "system", "content": AGAIN.format(outcome=outcome_of(first))}
        second = self.attempt([*first.messages, again])
        improved = second.reward > first.reward
        metrics = {
            "reward": first.reward,
            "steps": float(len(first.actions)),
            "trajectory_length": float(len(second.actions)),
            "second_reward": second.reward,
            "second_steps": float(len(second.actions)),
            "improvement": float(improved),
        }
        return scored(second, metrics, trained=second.well_formed and improved)


def scored(attempt: Attempt, metrics: dict[str, float], *, trained: bool) -> list[Experience]:
    """The answers of an attempt, with its reward, left out of training unless `trained`."""
    for answer in attempt.answers:
        answer.reward = attempt.reward
        answer.metrics = dict(metrics)
        if not trained:
            answer.leave_out()
    return attempt.answers


def outcome_of(first: Attempt) -> str:
    """What the model is told about an attempt that was not won."""
    steps = len(first.actions)
    if steps >= MAX_STEPS:
        return f"You have used all {MAX_STEPS} actions without carrying out the task (reward {first.reward:.3f})."
    return f"Your attempt ended after {steps} actions without carrying out the task (reward {first.reward:.3f})."
