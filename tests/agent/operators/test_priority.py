"""The order of tasks by what was measured of them, by hand."""

import pytest

from sharpen.agent.operators.pipeline import ON_TASKS, Pipeline
from sharpen.config.run import OperatorConfig
from sharpen.errors import ConfigError
from sharpen.types import Task


def ordered(*rows, **args):
    tasks = [Task(id=f"{index}", index=index, row=row) for index, row in enumerate(rows)]
    found = Pipeline.of([OperatorConfig(name="priority_order", args=args)], ON_TASKS).on_tasks(tasks)
    return [task.index for task in found]


def test_quality_counts_for_a_task_and_difficulty_against_it():
    """1 x quality - 0.7 x difficulty: 0.5, 0.9 - 0.7 = 0.2, and 0.3 - 0.07 = 0.23."""
    easy, hard = {"llm_quality_score": 0.5}, {"llm_quality_score": 0.9, "llm_difficulty_score": 1.0}
    middle = {"llm_quality_score": 0.3, "llm_difficulty_score": 0.1}
    assert ordered(hard, middle, easy) == [2, 1, 0]
    assert ordered(hard, middle, easy, weights={"difficulty": 1.0}) == [0, 1, 2]
    assert ordered(hard, middle, easy, weights={"quality": 1.0}, top_k=2) == [0, 2]


def test_a_kind_is_the_mean_of_its_statistics_and_falling_ones_count_the_other_way():
    """Quality (0.8 + 1 - 0.6) / 2 = 0.6 against 0.7; perplexity is from the smallest to the greatest there is."""
    assert ordered({"alnum_ratio": 0.8, "char_rep_ratio": 0.6}, {"llm_quality_score": 0.7}) == [1, 0]
    assert ordered({"perplexity": 90}, {"perplexity": 10}, {"perplexity": 50}, weights={"difficulty": 1}) == [0, 2, 1]
    assert ordered({"perplexity": 7}, {"perplexity": 7}) == [0, 1]


def test_tasks_without_statistics_stay_in_their_order():
    assert ordered({"a": 1}, {"llm_quality_score": "high"}, {"llm_quality_score": True}) == [0, 1, 2]
    assert ordered({"a": 1}, {}, top_k=1) == [0]


@pytest.mark.parametrize(
    ("args", "word"), [({"weights": {"diversity": 1.0}}, "'diversity'"), ({"top_k": 0}, "top_k 0")]
)
def test_what_is_no_weight_is_said_before_a_run(args, word):
    with pytest.raises(ConfigError, match=word):
        ordered({}, **args)
