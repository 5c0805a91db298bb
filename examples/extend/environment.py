"""An environment of your own: a number is to be guessed, and after each guess the model hears whether it is greater.

`environment: {type: environment.py:GuessNumber, args: {up_to: 8}}`
"""

import random
import re
from typing import Any

from sharpen import WorkflowOutput
from sharpen.config.public import EnvironmentConfig
from sharpen.errors import ConfigError

RULES = "I think of a number from 1 to {up_to}. Guess it: answer with one number."


class GuessNumber:
    """Each number of the range is a task: the last ones of a shuffled list are held out."""

    judge = None  # `workflow` gives the reward

    def __init__(self, config: EnvironmentConfig) -> None:
        unknown = config.args.keys() - {"up_to"}
        self.up_to = config.args.get("up_to", 16)
        if unknown or not isinstance(self.up_to, int) or self.up_to < 2:
            raise ConfigError(f"environment.args are {config.args}: give up_to, a whole number above 1, and no other")
        numbers = list(range(1, self.up_to + 1))
        random.Random(config.seed).shuffle(numbers)
        held_out = min(config.held_out_tasks or self.up_to // 4, self.up_to - 1)
        self.rows = {
            "train": [{"number": number} for number in numbers[: len(numbers) - held_out]][: config.train_tasks],
            "test": [{"number": number} for number in numbers[len(numbers) - held_out :]],
        }

    def tasks(self, split: str) -> list[dict[str, Any]]:
        """The rows of a split."""
        return self.rows[split]

    async def workflow(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        """Up to four guesses; the reward is 1 for the first, less for each further one, 0 if none is right."""
        messages = [{"role": "user", "content": RULES.format(up_to=self.up_to)}]
        for turn in range(4):
            reply = await model.client.chat.completions.create(model=model.name, messages=messages)
            said = reply.choices[0].message.content or ""
            numbers = re.findall(r"\d+", said)
            if numbers and int(numbers[-1][:9]) == task["number"]:
                return WorkflowOutput(reward=1 - 0.2 * turn, metrics={"turns": turn + 1})
            hint = "That is no number."
            if numbers:
                hint = "It is greater." if int(numbers[-1][:9]) < task["number"] else "It is less."
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": hint}]
        return WorkflowOutput(reward=0.0, metrics={"turns": 4})

    def close(self) -> None:
        """Nothing is open."""
