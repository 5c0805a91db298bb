"""Trinity's RAFT on ALFWorld: games that are imitated where they were won, and left out of training where not.

In: a row that holds the path of a game's file. Out: the answers of one attempt. Each answer holds `<experience>`,
`<think>` and `<action>`; an attempt is trained if it was won and all of its answers have the three.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from sharpen.compat.trinity.experience import Experience
from sharpen.compat.trinity.workflow import Workflow
from sharpen.compat.trinity.workflows.alfworld import ACTIONS, game_file, house_seen
from sharpen.compat.trinity.workflows.alfworld_game import AlfworldGame

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
