"""Settings that are allowed and hardly meant are said; what cannot be meant is refused."""

import pytest

from sharpen.config.load import resolve
from sharpen.config.problems import doubtful
from sharpen.errors import ConfigError


def config(**settings):
    given = {"train_dataset.path": "x", "model.model_path": "m", "model.max_model_len": 64, "workflow": "a.py:f"}
    return resolve(None, {**given, **settings}).config


def lines(num_tasks=40, total_steps=10, **settings):
    return list(doubtful(config(**settings), num_tasks=num_tasks, total_steps=total_steps))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model.max_tokens": 65}, "model.max_tokens is 65, above model.max_model_len (64)"),
        ({"algorithm.batch_size": 41}, "algorithm.batch_size is 41, but there are 40 tasks"),
        ({"algorithm.learning_rate": 0.02}, "algorithm.learning_rate is 0.02"),
        ({"trainer.warmup_steps": 20, "trainer.epochs": 2}, "trainer.warmup_steps is 20, but the run has 20 updates"),
    ],
)
def test_what_is_hardly_meant_is_said(settings, said):
    """Red when the run takes it in silence."""
    (line,) = lines(**settings)
    assert line.startswith(said)


@pytest.mark.parametrize(
    "settings",
    [
        {},  # the default of max_tokens is above this context, and means: as long as there is room
        {"model.max_tokens": 64},
        {"algorithm.batch_size": 40},
        {"algorithm.learning_rate": 0.01},
        {"trainer.warmup_steps": 9},
    ],
)
def test_what_can_be_meant_is_not(settings):
    assert lines(**settings) == []


def test_of_an_unknown_number_of_tasks_nothing_is_said():
    assert lines(num_tasks=0) == []


@pytest.mark.parametrize("name", ["algorithm.learning_rate", "critic.learning_rate"])
def test_a_learning_rate_that_moves_each_weight_by_more_than_one_is_refused(name):
    with pytest.raises(ConfigError, match=f"'{name}' must be at most 1, got 100"):
        config(**{name: 100})
