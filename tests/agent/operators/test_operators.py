"""Operators by hand: which rollouts each drops, what it does to rewards, and what no operator may do."""

from dataclasses import replace

import pytest

from sharpen.agent.operators import drop, with_reward
from sharpen.agent.operators.pipeline import ON_ROLLOUTS, ON_TASKS, Pipeline, filter_tasks
from sharpen.agent.rollout.statistics import check_excluded, summarize
from sharpen.config.run import OperatorConfig
from sharpen.errors import ConfigError, DatasetError, OperatorError
from sharpen.types import Group, Outcome, Rollout, Task


def rollout(group: str, index: int, reward: float | None, **changes) -> Rollout:
    values = {
        "id": f"{group}/{index}",
        "group_id": group,
        "task_id": group,
        "index": index,
        "attempt": 0,
        "calls": (),
        "outcome": Outcome.OK if reward is not None else Outcome.TIMEOUT,
        "reward": reward,
    }
    return Rollout(**values | changes)


def group(name: str, *rewards: float | None, metrics: dict[str, list[float]] | None = None) -> Group:
    found = [
        rollout(name, index, reward, metrics={key: values[index] for key, values in (metrics or {}).items()})
        for index, reward in enumerate(rewards)
    ]
    return Group(id=name, task=Task(id=name, index=0, row={}), version=0, rollouts=tuple(found))


def run(name: str, groups: list[Group], **args) -> list[Group]:
    return Pipeline.of([OperatorConfig(name=name, args=args)], ON_ROLLOUTS).on_groups(groups)


def kept(groups: list[Group]) -> list[str]:
    return [one.id for found in groups for one in found.scored]


def rewards(groups: list[Group]) -> list[float | None]:
    return [one.reward for found in groups for one in found.rollouts]


def test_reward_filter_keeps_the_threshold_itself():
    assert kept(run("reward_filter", [group("a", -0.5, 0.0, 1.0)])) == ["a/1", "a/2"]
    assert kept(run("reward_filter", [group("a", 0.4, 0.5, None)], threshold=0.5)) == ["a/1"]


def test_reward_std_filter_drops_flat_groups_and_single_rollouts():
    """The spread of 0 and 1 is 0.5; that of 0.4 and 0.6 is 0.1."""
    groups = [group("flat", 1.0, 1.0), group("one", 1.0), group("wide", 0.0, 1.0), group("narrow", 0.4, 0.6)]
    assert kept(run("reward_std_filter", groups)) == ["wide/0", "wide/1", "narrow/0", "narrow/1"]
    assert kept(run("reward_std_filter", groups, threshold=0.1000001)) == ["wide/0", "wide/1"]


def test_dynamic_sampling_goes_by_accuracy_before_rewards():
    """In `by_metric` rewards differ and all are wrong by the metric; in `mixed` one is right."""
    groups = [
        group("by_metric", 0.2, 0.7, metrics={"judge/accuracy": [0.0, 0.0]}),
        group("mixed", 0.2, 0.2, metrics={"accuracy": [0.0, 1.0]}),
        group("by_reward", 0.0, 1.0),
        group("all_right", 0.5, 1.0),
    ]
    assert kept(run("dapo_dynamic_sampling", groups)) == ["mixed/0", "mixed/1", "by_reward/0", "by_reward/1"]
    assert kept(run("dapo_dynamic_sampling", groups, correct_threshold=0.6)) == [
        *("mixed/0", "mixed/1", "by_reward/0", "by_reward/1", "all_right/0", "all_right/1")
    ]


@pytest.mark.parametrize(("operation", "expected"), [("ADD", 3.0), ("SUB", -1.0), ("MUL", 2.0), ("DIV", 0.5)])
def test_reward_shaping_applies_the_weighted_metric(operation, expected):
    """Reward 1, metric 4, weight 0.5."""
    config = {"stats_key": "quality", "op_type": operation, "weight": 0.5}
    (found,) = run(
        "reward_shaping_mapper", [group("a", 1.0, metrics={"quality": [4.0]})], reward_shaping_configs=[config]
    )
    assert rewards([found]) == [expected]
    assert found.rollouts[0].metrics["reward_before"] == 1.0


def test_reward_shaping_says_when_nothing_has_the_metric(caplog):
    groups = [group("a", 1.0, metrics={"other": [4.0]})]
    assert rewards(run("reward_shaping_mapper", groups, reward_shaping_configs=[{"stats_key": "quality"}])) == [1.0]
    assert "'quality'" in caplog.text
    assert "other" in caplog.text


def test_operators_work_one_after_the_other():
    shaping = {"reward_shaping_configs": [{"stats_key": "bonus"}]}
    pipeline = Pipeline.of(
        [
            OperatorConfig(name="reward_shaping_mapper", args=shaping),
            OperatorConfig(name="reward_filter", args={"threshold": 1}),
        ],
        ON_ROLLOUTS,
    )
    assert kept(pipeline.on_groups([group("a", 0.5, 0.9, metrics={"bonus": [0.6, 0.0]})])) == ["a/0"]


def test_dropped_rollouts_are_no_failures_and_keep_their_reward():
    groups = run("reward_filter", [group("a", 0.0, 1.0)], threshold=0.5)
    found = summarize(groups)
    assert (found.num_excluded, dict(found.failures), found.reward_mean) == (0, {}, 0.5)
    assert found.metrics()["rollout/dropped"] == 1
    assert any("1 of 2 rollouts dropped" in note and "reward below 0.5" in note for note in found.notes())
    check_excluded(groups, 0.0)


def test_ones_own_operator_may_leave_groups_out(tmp_path):
    (tmp_path / "mine.py").write_text("def first(groups, count):\n    return groups[:count]\n")
    found = run(f"{tmp_path / 'mine.py'}:first", [group("a", 1.0), group("b", 1.0)], count=1)
    assert [one.id for one in found] == ["a", "b"]
    assert kept(found) == ["a/0"]
    assert found[1].rollouts[0].outcome == Outcome.FILTERED


def other_calls(groups):
    return [replace(one, rollouts=tuple(replace(r, calls=(1,)) for r in one.rollouts)) for one in groups]


def fewer(groups):
    return [replace(one, rollouts=one.rollouts[:1]) for one in groups]


def infinite(groups):
    return [replace(one, rollouts=tuple(with_reward(r, float("inf")) for r in one.rollouts)) for one in groups]


def healed(groups):
    return [replace(one, rollouts=tuple(replace(r, outcome=Outcome.OK) for r in one.rollouts)) for one in groups]


def foreign(groups):
    return [replace(one, id="other") for one in groups]


def nothing(groups):
    return None


def broken(groups):
    return 1 / 0


@pytest.mark.parametrize(
    ("operator", "fact"),
    [
        (other_calls, "a/0"),
        (fewer, "1 rollouts"),
        (infinite, "inf"),
        (healed, "'ok'"),
        (foreign, "'other'"),
        (nothing, "NoneType"),
        (broken, "ZeroDivisionError"),
    ],
)
def test_no_operator_changes_the_record(operator, fact):
    with pytest.raises(OperatorError, match=operator.__name__) as found:
        run(f"{__name__}:{operator.__name__}", [group("a", 1.0, None)])
    assert fact in str(found.value)


@pytest.mark.parametrize(
    ("name", "args", "facts"),
    [
        ("reward_filtre", {}, ["reward_filtre", "'reward_filter'"]),
        ("human_preference_annotation_mapper", {}, ["human_preference_annotation_mapper"]),
        ("reward_filter", {"least": 1}, ["reward_filter", "least", "threshold"]),
        ("nowhere.at_all:f", {}, ["nowhere"]),
    ],
)
def test_what_is_wrong_with_an_operator_is_said_before_it_runs(name, args, facts):
    with pytest.raises(ConfigError) as found:
        Pipeline.of([OperatorConfig(name=name, args=args)], ON_ROLLOUTS)
    assert all(fact in str(found.value) for fact in facts)


def test_a_wrong_shaping_is_said_with_what_is_right():
    with pytest.raises(ConfigError, match="POW") as found:
        run("reward_shaping_mapper", [group("a", 1.0)], reward_shaping_configs=[{"stats_key": "x", "op_type": "POW"}])
    assert "ADD, SUB, MUL, DIV" in str(found.value)


def test_dropping_twice_keeps_the_first_reason():
    once = drop(rollout("a", 0, 1.0), "first")
    assert drop(once, "second") is once


TASKS = [Task(id=f"t{number}", index=number, row={"difficulty": number / 4, "n": number}) for number in range(5)]


def test_tasks_within_bounds_stay():
    found, line = filter_tasks(TASKS, [OperatorConfig(name="difficulty_filter", args={"low": 0.25, "high": 0.75})])
    assert [task.id for task in found] == ["t1", "t2", "t3"]
    assert "3 of 5" in line[0]
    assert filter_tasks(TASKS, []) == (TASKS, ())


def test_a_random_sample_is_the_same_for_the_same_seed():
    (one, _), (other, _) = (
        filter_tasks(TASKS, [OperatorConfig(name="random_sample", args={"count": 3})]) for _ in "12"
    )
    assert one == other
    assert len(one) == 3
    assert [task.index for task in one] == sorted(task.index for task in one)


@pytest.mark.parametrize(
    ("name", "args", "facts"),
    [
        ("pass_rate_filter", {}, ["t0", "'pass_rate'"]),
        ("range_filter", {"key": "n", "low": 9}, ["range_filter", "5 tasks"]),
    ],
)
def test_tasks_that_cannot_be_filtered_are_named(name, args, facts):
    with pytest.raises(DatasetError) as found:
        Pipeline.of([OperatorConfig(name=name, args=args)], ON_TASKS).on_tasks(TASKS)
    assert all(fact in str(found.value) for fact in facts)


def test_arguments_of_a_built_in_operator_are_checked_before_a_run():
    wrong = [{"stats_key": "score", "op_type": "POW"}]
    config = OperatorConfig(name="reward_shaping_mapper", args={"reward_shaping_configs": wrong})
    with pytest.raises(ConfigError, match="POW"):
        Pipeline.of([config], ON_ROLLOUTS)


def test_a_class_is_no_operator(tmp_path):
    (tmp_path / "own.py").write_text("class Keep:\n    def process(self, exps):\n        return exps, {}\n")
    name = f"{tmp_path / 'own.py'}:Keep"
    with pytest.raises(ConfigError, match=r"own.py:Keep is a class, but an operator is a function"):
        Pipeline.of([OperatorConfig(name=name)], ON_ROLLOUTS)
