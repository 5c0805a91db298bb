"""What Trinity's text worlds share: a game of several turns, with an action in each of the model's answers.

In: the world's system prompt, observations and rewards, from a subclass. Out: one experience of the whole game.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from typing import Any

from sharpen.compat.trinity.experience import Experience
from sharpen.compat.trinity.workflow import MultiTurnWorkflow

NOT_FINISHED = -0.1
"""Reward of a game of ALFWorld or WebShop that was not finished."""
TAGS = (
    "In each turn, think first, between <think> and </think>, then give exactly one action between <action> and "
    "</action>. Nobody answers questions: finish the task yourself."
)
_ACTION = re.compile(r"<action>(.*?)(?:</action>|$)", re.DOTALL)


def action_in(text: str) -> str:
    """The first action of an answer; empty without one."""
    found = _ACTION.search(text)
    return found.group(1).strip() if found else ""


class Game(MultiTurnWorkflow):
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
