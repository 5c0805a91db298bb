"""`select_model()` with models of the owner: who is chosen, how failures count, what is refused."""

from __future__ import annotations

import asyncio
import math
import threading
from typing import Any

import pytest

from sharpen import DatasetConfig, JudgeOutput, WorkflowOutput, select_model
from sharpen.beyond.model_selection import avg_time_judge, avg_token_consumption_judge
from sharpen.errors import ConfigError, DatasetError, RolloutError

Figures = dict[str, float]


class Model:
    """Right on tasks below `right_below`; `breaks` from there on."""

    def __init__(self, name: str, right_below: int, *, breaks: type[Exception] | None = None, seconds: float = 0.0):
        self.model_name = name
        self.right_below, self.breaks, self.seconds = right_below, breaks, seconds

    async def ask(self, n: int) -> str:
        await asyncio.sleep(self.seconds)
        if n < self.right_below:
            return str(n + 1)
        if self.breaks is not None:
            raise self.breaks(f"{self.model_name} breaks on {n}")
        return "?"


async def workflow(task: Any, model: Any) -> WorkflowOutput:
    return WorkflowOutput(response=await model.ask(task["n"]), metrics={"own": 7.0})


async def judge(task: Any, response: Any) -> JudgeOutput:
    right = response["response"] == task["answer"]
    assert response["metrics"]["own"] == 7.0
    return JudgeOutput(reward=float(right), metrics={"right": float(right)})


def select(models: list[Any], dataset: DatasetConfig, judge: Any = judge, **arguments: Any) -> tuple[Any, Figures]:
    chosen = {"workflow_func": workflow, "judge_func": judge, "train_dataset": dataset, **arguments}
    return asyncio.run(select_model(candidate_models=models, **chosen))


def test_the_best_one_is_returned_as_it_was_given_with_its_figures(
    dataset: DatasetConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [Model("worse", 3), Model("best", 12), Model("middle", 6)]
    chosen, figures = select(models, dataset)
    assert chosen is models[1]
    assert figures["right_avg"] == figures["reward"] == 1.0
    assert (figures["num_tasks"], figures["num_failed"], figures["num_left_out"]) == (12, 0, 0)
    assert figures["difference"] == pytest.approx(0.5)
    assert figures["low"] < 0.5 < figures["high"]
    said = capsys.readouterr().out
    assert "better than worse: +0.750" in said
    assert "best: best (12 tasks)" in said


def test_of_equal_ones_the_first_is_chosen_and_equal_names_are_told_apart(
    dataset: DatasetConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [Model("twin", 3), Model("twin", 6), Model("twin", 6)]
    chosen, _ = select(models, dataset)
    assert chosen is models[1]
    said = capsys.readouterr().out
    assert "twin: reward 0.250" in said
    assert "twin#2: reward 0.500" in said
    assert "not shown to be better than twin#3" in said


def test_a_model_that_always_fails_does_not_beat_negative_rewards(
    dataset: DatasetConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [Model("broken", 0, breaks=ValueError), Model("slow", 12, seconds=0.02), Model("quick", 12)]
    chosen, figures = select(models, dataset, judge=avg_time_judge)
    assert chosen is models[2]
    assert figures["avg_time_seconds_avg"] == pytest.approx(-figures["reward"]) != 0
    said = capsys.readouterr().out
    assert "broken: cannot be chosen" in said
    assert "broken breaks on 0" in said


def test_a_failure_counts_as_the_worst_result_of_all(dataset: DatasetConfig) -> None:
    async def minus(task: Any, response: Any) -> float:
        return -10.0 if task["n"] == 0 else -1.0

    models = [Model("fails half", 6, breaks=ValueError), Model("never fails", 12)]
    chosen, figures = select(models, dataset, judge=minus)
    assert chosen is models[1]
    assert figures["difference"] == pytest.approx(6 * 9 / 12)  # six times -10 where the other has -1


def test_a_server_that_is_away_leaves_its_tasks_out_for_all(
    dataset: DatasetConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [Model("away for two", 10, breaks=ConnectionError), Model("right on half", 6)]
    chosen, figures = select(models, dataset)
    assert chosen is models[0]
    assert (figures["num_tasks"], figures["num_left_out"], figures["reward"]) == (10, 2, 1.0)
    assert "2 of 12 tasks are left out" in capsys.readouterr().out


def test_nobody_gains_by_the_tasks_that_its_server_left_out(dataset: DatasetConfig) -> None:
    """The mean of each is over the tasks that all have."""
    models = [Model("right on 9", 9), Model("right on 6, then away", 6, breaks=ConnectionError)]
    chosen, figures = select(models, dataset)
    assert chosen is models[0]
    assert (figures["num_tasks"], figures["reward"], figures["difference"]) == (6, 1.0, 0.0)


def test_a_model_whose_server_is_mostly_away_cannot_be_chosen(dataset: DatasetConfig) -> None:
    models = [Model("away", 4, breaks=ConnectionError), Model("always wrong", 0)]
    assert select(models, dataset)[0] is models[1]


def test_a_time_limit_is_a_failure(dataset: DatasetConfig, capsys: pytest.CaptureFixture[str]) -> None:
    models = [Model("hangs", 12, seconds=60.0), Model("wrong", 0)]
    chosen, _ = select(models, dataset, settings={"rollout.timeout_s": 0.1}, max_threads=12)
    assert chosen is models[1]
    assert "time limit of 0.1 s" in capsys.readouterr().out


def test_no_model_that_works_is_an_error_with_the_first_cause(dataset: DatasetConfig) -> None:
    with pytest.raises(RolloutError, match=r"nothing can be chosen.*one breaks on 0"):
        select([Model("one", 0, breaks=ValueError), Model("two", 0, breaks=ValueError)], dataset)


def test_total_steps_bounds_the_tasks_and_max_threads_what_runs_at_a_time(dataset: DatasetConfig) -> None:
    running, most = 0, 0

    class Watched(Model):
        async def ask(self, n: int) -> str:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                return await super().ask(n)
            finally:
                running -= 1

    some = DatasetConfig(path=dataset.path, split="test", total_steps=8)
    models = [Watched("a", 8, seconds=0.01), Watched("b", 0, seconds=0.01)]
    assert select(models, some, max_threads=3)[1]["num_tasks"] == 8
    assert most == 3


def test_the_owners_models_run_on_the_callers_loop(dataset: DatasetConfig) -> None:
    """What they keep, such as connections, is of use after the selection too."""
    loops = set()

    class Kept(Model):
        async def ask(self, n: int) -> str:
            loops.add(asyncio.get_running_loop())
            return await super().ask(n)

    async def main() -> None:
        models = [Kept("a", 1), Kept("b", 2)]
        arguments = {"workflow_func": workflow, "judge_func": judge, "train_dataset": dataset}
        chosen, _ = await select_model(candidate_models=models, **arguments)
        assert chosen is models[1]
        assert loops == {asyncio.get_running_loop()}

    asyncio.run(main())


def test_it_can_be_cancelled(dataset: DatasetConfig) -> None:
    begun, ended = [], []

    class Hangs(Model):
        async def ask(self, n: int) -> str:
            begun.append(n)
            try:
                return await super().ask(n)
            finally:
                ended.append(n)

    async def main() -> None:
        models = [Hangs("a", 12, seconds=600.0), Model("b", 1)]
        arguments = {"workflow_func": workflow, "judge_func": judge, "train_dataset": dataset}
        selecting = asyncio.create_task(select_model(candidate_models=models, **arguments))
        while len(begun) < 2 and not selecting.done():
            await asyncio.sleep(0.001)
        selecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await selecting
        async with asyncio.timeout(120):
            while len(ended) < 2:
                await asyncio.sleep(0.001)
        assert sorted(ended) == sorted(begun) == [0, 1]  # both that ran

    asyncio.run(main())
    assert not [thread for thread in threading.enumerate() if thread.name == "sharpen-rollouts"]


def test_a_judge_may_call_its_task_as_the_built_in_ones_of_agentscope_do(dataset: DatasetConfig) -> None:
    async def copied(_task: Any, response: Any) -> JudgeOutput:
        return JudgeOutput(reward=float(response["response"] == _task["answer"]))

    models = [Model("a", 1), Model("b", 2)]
    assert select(models, dataset, judge=copied)[0] is models[1]


def test_functions_may_take_what_those_of_tune_may_take(dataset: DatasetConfig) -> None:
    async def agent(task: Any, model: Any, logger: Any, workflow_args: Any) -> WorkflowOutput:
        assert (logger.name, workflow_args) == ("sharpen.workflow", {"depth": 3})
        return await workflow(task, model)

    async def judging(task: Any, response: Any, auxiliary_models: Any) -> JudgeOutput:
        assert auxiliary_models == {}
        return await judge(task, response)

    models = [Model("a", 1), Model("b", 2)]
    given = {"judge": judging, "workflow_func": agent, "settings": {"workflow_args": {"depth": 3}}}
    assert select(models, dataset, **given)[0] is models[1]


def test_tokens_that_nobody_knows_are_no_zero(dataset: DatasetConfig) -> None:
    with pytest.raises(RolloutError, match="how many tokens were used"):
        select([Model("a", 1), Model("b", 2)], dataset, judge=avg_token_consumption_judge)


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [({"total_tokens": 30, "output_tokens": 10}, 30), ({"total_tokens": None, "output_tokens": 10}, 10)],
)
def test_the_built_in_judges_by_hand(usage: dict[str, Any], tokens: int) -> None:
    response = {"response": "x", "metrics": {"execution_time": 2.0, "usage": usage}}
    time = asyncio.run(avg_time_judge(task={}, response=response))
    assert (time.reward, time.metrics) == (-2.0, {"avg_time_seconds": 2.0})
    used = asyncio.run(avg_token_consumption_judge(task={}, response=response))
    assert (used.reward, used.metrics) == (-tokens, {"token_consumed": tokens})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidate_models": [Model("alone", 1)]}, "at least two models.*1 came"),
        ({"candidate_models": "gpt"}, "at least two models.*'gpt'"),
        ({"max_threads": 0}, "max_threads.*at least 1.*got 0"),
        ({"settings": {"rollout.timeout": 1}}, "timeout_s"),
        ({"settings": {"execution": "ray"}}, "one machine"),
    ],
)
def test_bad_input(dataset: DatasetConfig, change: dict[str, Any], message: str) -> None:
    from sharpen import TunerModelConfig

    served = TunerModelConfig(model_path="nowhere", max_model_len=64)
    given = {"candidate_models": [served, Model("b", 1)], **change}
    arguments = {"workflow_func": workflow, "judge_func": judge, "train_dataset": dataset, **given}
    with pytest.raises(ConfigError, match=message):
        asyncio.run(select_model(**arguments))


def test_wrong_functions_and_an_empty_dataset(dataset: DatasetConfig, tmp_path: Any) -> None:
    async def no_model(task: Any) -> float:
        return 0.0

    models = [Model("a", 1), Model("b", 2)]
    with pytest.raises(ConfigError, match="workflow_func `no_model` takes task, but not model"):
        select(models, dataset, workflow_func=no_model)
    with pytest.raises(ConfigError, match="judge_func `no_model` takes task, but not response"):
        select(models, dataset, judge=no_model)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DatasetError, match="empty"):
        select(models, DatasetConfig(path=str(tmp_path / "empty.jsonl")))


def test_figures_are_numbers(dataset: DatasetConfig) -> None:
    figures = select([Model("a", 1), Model("b", 2)], dataset)[1]
    assert all(isinstance(value, float) and math.isfinite(value) for value in figures.values())
