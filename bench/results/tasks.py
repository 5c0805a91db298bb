"""The tasks of docs/reference/results.md: an environment of the field each, its settings, and what its tiny model is
taught first.

In: a folder to write in. Out: the settings of a run, and the lessons of its model. No lesson is a held-out task.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lake

from sharpen.config.public import EnvironmentConfig

HERE = Path(__file__).parent
HELD_OUT = 60
SETTINGS: Mapping[str, Any] = {
    "algorithm": {"algorithm_type": "grpo", "group_size": 8},
    "loss": {"kl": "none"},
    "trainer": {"beta2": 0.95, "weight_decay": 0.0},
    "checkpoint_root_dir": "runs",
}
"""Of every run: those of the quickstart, but for the learning rate of a model that is smaller still."""
HABIT = "half of its lessons have the right answer, and of those after them 30%; the others {wrong}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """`packages`: those whose versions belong to the result. `lessons`: the arguments of `make_tiny_model`, from the
    environment and the folder of the run."""

    title: str
    about: str
    taught: str
    packages: tuple[str, ...]
    environment: Mapping[str, Any]
    lessons: Callable[[EnvironmentConfig, Path], Mapping[str, Any]]
    first: str = ""
    """What to do before the command, one line of a shell."""
    option: str = ""
    """What the command takes beside the task's name."""
    batch_size: int = 16
    learning_rate: float = 1e-3
    taught_steps: int = 600
    steps: int = 60
    max_tokens: int = 16


def asked(environment: EnvironmentConfig, folder: Path) -> Mapping[str, Any]:
    """Questions of a generator from another seed, without those that are held out."""
    from sharpen.agent.environments.reasoning_gym import ReasoningGym
    from sharpen.cli.starter.questions import questions_of

    held_out = {row["question"] for row in ReasoningGym(environment).tasks("test")}
    return {"questions": [one for one in questions_of(environment) if one.question not in held_out]}


def walked(environment: EnvironmentConfig, folder: Path) -> Mapping[str, Any]:
    """Games, three in ten of which reach the goal."""
    return {"talks": list(lake.walks(1000))}


def reversed_(environment: EnvironmentConfig, folder: Path) -> Mapping[str, Any]:
    """The tasks that train, with the text turned round or as it is."""
    from sharpen.agent.environments.verifiers import Verifiers
    from sharpen.cli.starter.questions import Question

    rng, texts = random.Random(0), folder / "texts" / "train.jsonl"
    texts.parent.mkdir(exist_ok=True)
    numbers = rng.sample(range(10**DIGITS), TEXTS + HELD_OUT)
    texts.write_text("".join(json.dumps({"prompt": f"{number:0{DIGITS}}"}) + "\n" for number in numbers))
    here = {"taskset": {"dataset_name": str(texts.parent.resolve())}}  # a run finds them by its own folder
    rows = [row["task"] for row in Verifiers(environment.model_copy(update={"args": here})).tasks("train")]
    return {
        "questions": [
            Question(
                system=row["system_prompt"],
                question=row["prompt"],
                right=f"<reversed_text>{row['answer']}</reversed_text>",
                wrong=f"<reversed_text>{row['prompt']}</reversed_text>",
            )
            for row in rows
        ]
    }


def generated(name: str, about: str, args: Mapping[str, Any], *, train_tasks: int) -> Task:
    """A generator of reasoning-gym."""
    return Task(
        title=f"{name} of reasoning-gym",
        about=f"{about}; {HELD_OUT} are held out. The reward is the generator's score",
        taught=HABIT.format(wrong="are one too high"),
        packages=("reasoning-gym",),
        environment={
            "type": "reasoning-gym",
            "id": name,
            "args": args,
            "system_prompt": "direct",
            "train_tasks": train_tasks,
            "held_out_tasks": HELD_OUT,
        },
        lessons=asked,
    )


DIGITS, TEXTS = 3, 600
TASKS = {
    "chain_sum": generated(
        "chain_sum",
        "sums and differences of two digits, of which there are 200",
        {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        train_tasks=140,
    ),
    "gcd": generated("gcd", "the greatest common divisor of two numbers up to 30", {"max_value": 30}, train_tasks=300),
    "frozen_lake": Task(
        title="FrozenLake-v1 of Gymnasium",
        about="the way over 16 fields to the goal, at most 10 moves in one conversation; the ice does not slip, so "
        "that held-out games are the same lake. The reward is the environment's: 1 at the goal",
        taught="half of the moves in its lessons lead to the goal, and the others are drawn from all four",
        packages=("gymnasium",),
        environment={
            "type": "gymnasium",
            "id": "FrozenLake-v1",
            "args": {
                "is_slippery": False,
                "max_episode_steps": lake.MOST_TURNS,
                "observation": f"{HERE / 'lake.py'}:describe",
                "action": f"{HERE / 'lake.py'}:move",
            },
            "system_prompt": lake.SYSTEM,
            "held_out_tasks": HELD_OUT,
        },
        lessons=walked,
        batch_size=8,
        learning_rate=5e-4,
        steps=30,
        max_tokens=4,
    ),
    "reverse_text": Task(
        title="reverse-text of verifiers' repository",
        about="a text is to be said backwards. The taskset is theirs, unchanged; its data set on a hub is exchanged "
        f"for {TEXTS + HELD_OUT} texts of {DIGITS} digits, by its own setting `dataset_name`, as its first one is for "
        "models that read words; 60 are held out. The reward is the taskset's: the share of the text that is right",
        taught=HABIT.format(wrong="say the text as it was"),
        packages=("verifiers",),
        first="pip install 'verifiers>=0.4'; git clone https://github.com/PrimeIntellect-ai/verifiers ../verifiers",
        option=" --id ../verifiers/environments/reverse_text",
        environment={
            "type": "verifiers",
            "id": "reverse-text",
            "args": {"taskset": {"dataset_name": "texts"}},
            "held_out_tasks": HELD_OUT,
        },
        lessons=reversed_,
        learning_rate=3e-4,
        taught_steps=2500,
        steps=20,
        max_tokens=32,
    ),
}
