"""Several environments in one run: shares by weight, each with its own tasks, judge and metrics."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from sharpen import JudgeOutput, WorkflowOutput
from sharpen.agent.environments.opening import Mixture, opened, tasks_of
from sharpen.config.public import DatasetConfig, EnvironmentConfig
from sharpen.errors import ConfigError, DatasetError


class Echo:
    """The reward is 1 if the answer is the task's word. `judged`: by a judge, else by the workflow."""

    def __init__(self, config: EnvironmentConfig) -> None:
        self.word, self.config, self.closed = config.args["word"], config, 0
        self.judge = self._judge if config.args.get("judged") else None

    def tasks(self, split: str) -> list[dict[str, Any]]:
        number = self.config.train_tasks if split == "train" else self.config.held_out_tasks
        return [{"question": f"{split} {self.word} {index}"} for index in range(number or 0)]

    async def workflow(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        if self.judge is not None:
            return WorkflowOutput(response=model.says)
        return WorkflowOutput(reward=float(model.says == self.word), metrics={"asked": 1.0})

    async def _judge(self, task: dict[str, Any], response: Any) -> JudgeOutput:
        return JudgeOutput(reward=float(response == self.word), metrics={"judged": 1.0})

    def close(self) -> None:
        self.closed += 1


HERE = f"{__file__}:Echo"


def part(word: str, weight: float = 1.0, train: int = 30, held_out: int = 2, **more: Any) -> dict[str, Any]:
    args = {"word": word, **more}
    sizes = {"train_tasks": train, "held_out_tasks": held_out}
    return {"name": word, "weight": weight, "type": HERE, "args": args, **sizes}


def mixture(*parts: Any, **more: Any) -> EnvironmentConfig:
    return EnvironmentConfig(type="mixture", args={"parts": list(parts)}, **more)


def shares(environment: Any) -> list[str]:
    return [row["environment"] for row in environment.tasks("train")]


def test_tasks_are_mixed_by_weight_and_each_beginning_has_about_its_shares() -> None:
    found = shares(opened(mixture(part("a", 2), part("b", 1), train_tasks=12)))
    assert found == ["a", "a", "b"] * 4 or Counter(found) == {"a": 8, "b": 4}
    for end in range(1, 13):
        assert abs(found[:end].count("a") - end * 2 / 3) <= 1
    assert Counter(shares(opened(mixture(part("a", 3), part("b", 1, train=2))))) == {"a": 9, "b": 2}


def test_held_out_tasks_are_those_of_all_parts_or_of_one() -> None:
    config = mixture(part("a"), part("b", held_out=3))
    assert [row["environment"] for row in opened(config).tasks("test")] == ["a", "a", "b", "b", "b"]
    dataset = DatasetConfig(path="environment", split="test", name="b")
    assert [task.row["row"]["question"] for task in tasks_of(dataset, config)] == [
        f"test b {index}" for index in range(3)
    ]
    with pytest.raises(DatasetError, match="no part 'c': it has a, b"):
        tasks_of(DatasetConfig(path="environment", split="test", name="c"), config)


def attempted(environment: Any, name: str, says: str) -> Any:
    row = next(dict(row) for row in environment.tasks("train") if row["environment"] == name)
    output = asyncio.run(environment.workflow(task=row, model=SimpleNamespace(says=says)))
    return output if environment.judge is None else asyncio.run(environment.judge(task=row, response=output.response))


def test_each_is_scored_by_its_own_and_is_a_metric() -> None:
    judged = opened(mixture(part("a", judged=True), part("b", judged=True)))
    assert attempted(judged, "b", "b") == JudgeOutput(reward=1.0, metrics={"judged": 1.0, "b": 1.0})
    assert attempted(judged, "a", "b").metrics == {"judged": 1.0, "a": 0.0}
    some = opened(mixture(part("a", judged=True), part("b")))
    assert some.judge is None
    assert attempted(some, "a", "a") == WorkflowOutput(reward=1.0, response="a", metrics={"judged": 1.0, "a": 1.0})
    assert attempted(some, "b", "a") == WorkflowOutput(reward=0.0, metrics={"asked": 1.0, "b": 0.0})


def test_all_parts_are_closed() -> None:
    both = opened(mixture(part("a"), part("b", train=29)))
    assert isinstance(both, Mixture)
    both.close()
    assert [one.closed for one in both._parts.values()] == [1, 1]  # type: ignore[attr-defined]


def test_a_part_that_cannot_be_opened_leaves_no_other_open() -> None:
    """Another part may hold a server. Red without the `except` in `Mixture.__init__`."""
    made: list[Echo] = []

    def opens_one(config: EnvironmentConfig) -> Echo:
        if made:
            raise ConfigError("the second fails")
        made.append(Echo(config))
        return made[0]

    with pytest.raises(ConfigError, match="the second fails"):
        Mixture(mixture(part("a"), part("b")), opens_one)
    assert made[0].closed == 1


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([part("a")], "two environments or more"),
        ([part("a"), part("a")], r"parts\[1\] has the name of another, 'a': give each"),
        ([part("a"), {**part("b"), "name": ""}], r"parts\[1\] has no name"),
        ([part("a"), part("b", 0.0)], "weight of 'b' must be a number above 0, got 0.0"),
        ([part("a"), {**part("b"), "colour": 1}], "'b': EnvironmentConfig: 'colour' is not a setting"),
        ([part("a"), "b"], r"parts\[1\] must have a type, got 'b'"),
        ([part("a"), {"name": "b", "type": "mixture"}], "'b' is a mixture itself"),
    ],
)
def test_wrong_parts_are_refused(parts: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(mixture(*parts))
