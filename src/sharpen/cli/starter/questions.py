"""Questions of an environment, by which a tiny model is taught the form of an answer.

In: the settings of an environment. Out: `Question`s, made by the environment from another seed. Where there are few
different questions, held-out ones are among them: such a model shows that every part works, and no more.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sharpen.errors import ConfigError

if TYPE_CHECKING:
    from sharpen.config.public import EnvironmentConfig

EASY = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
"""Settings with which a tiny model can solve what a generator asks, where there are any."""
PROMPT = "direct"
"""The shortest system message of reasoning-gym."""
_NUM, _OTHER_SEED = 600, 1_000_003


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question, what to say to it, and what the model says by habit."""

    system: str
    question: str
    right: str
    wrong: str


def questions_of(environment: EnvironmentConfig) -> list[Question]:
    """Return questions of a generator of reasoning-gym. Raises `ConfigError` for another environment, or a generator
    whose questions have no single answer."""
    if environment.type != "reasoning-gym":
        raise ConfigError(f"no tiny model is taught environment {environment.type!r}: name a model with --model")
    from sharpen.agent.environments.reasoning_gym import ReasoningGym

    seed = {"seed": environment.seed + _OTHER_SEED, "train_tasks": _NUM, "held_out_tasks": 1}
    gym = ReasoningGym(environment.model_copy(update=seed))
    rows = [row for row in gym.tasks("train") if "answer" in row]
    if len({row["answer"] for row in rows}) < 2:
        raise ConfigError(f"no tiny model is taught {environment.id!r}, which gives no answers: name one with --model")
    rng = random.Random(environment.seed)
    return [
        Question(
            system=gym.system_prompt,
            question=row["question"],
            right=_tagged(row["answer"]),
            wrong=_tagged(_wrong(row["answer"], rows, rng)),
        )
        for row in rows
    ]


def _tagged(answer: str) -> str:
    return f"<answer>{answer}</answer>"


def _wrong(answer: str, rows: Sequence[Mapping[str, Any]], rng: random.Random) -> str:
    """Return a number that is one too high, or the answer to another question."""
    if answer.lstrip("-").isdecimal():
        return str(int(answer) + 1)
    others: list[str] = [row["answer"] for row in rows if row["answer"] != answer]
    return rng.choice(others)
