"""Evaluations: what fails counts, what was repeated is said, and one that did not ask the model is no result."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from scripted_serving import FakeServing, MakeRunner, make_call, make_task

from sharpen.agent.rollout.statistics import summarize
from sharpen.config.public import DatasetConfig, TunerModelConfig
from sharpen.config.run import EvaluationConfig, RunConfig, TaskSetConfig
from sharpen.errors import ConfigError, UnusableAnswerError
from sharpen.run.evaluation import Evaluator
from sharpen.show.monitor.statistics import Evaluation, accuracy_metrics, evaluation_from_json, evaluation_to_json
from sharpen.types import Group, Outcome, Rollout


def evaluate(runner: Any, serving: FakeServing, *rows: dict[str, Any], **settings: Any) -> tuple[Evaluation, list[str]]:
    model = TunerModelConfig(model_path="m", max_model_len=64)
    config = RunConfig(train_dataset=DatasetConfig(path="tasks.jsonl"), model=model, **settings)
    said: list[str] = []
    evaluator = Evaluator(
        config=config,
        runner=runner,
        modes={"greedy": serving.open, "sampled": serving.open},
        tasks=[make_task(number, **row) for number, row in enumerate(rows)],
        further={},
        progress=lambda *_: None,
        message=said.append,
    )
    serving.recorded = False  # as in an evaluation
    return evaluator.evaluate(0, name="before", with_further=True), said


async def as_the_task_says(task: Any, model: Any) -> float:
    if task["kind"] == "infrastructure":
        raise ConnectionError("down")
    model.call()
    if task["kind"] == "raises":
        raise KeyError("no field x")
    if task["kind"] == "unusable":
        raise UnusableAnswerError("no JSON")
    return 1.0


@pytest.mark.parametrize(("failure_reward", "counts"), [(None, 0.0), (-1.0, -1.0)])
def test_trap_33_an_agent_that_raises_is_worth_what_one_that_gives_nothing_is(
    make_runner: MakeRunner, serving: FakeServing, failure_reward: float | None, counts: float
) -> None:
    """Red when `rewards_by_task` (evaluate.py) leaves out what the workflow raised after the model answered: 0.5 is
    then 1.0."""
    kinds = ["fine", "raises", "unusable", "infrastructure", "fine"]
    runner = make_runner(as_the_task_says, failure_reward=failure_reward)
    found, said = evaluate(
        runner, serving, *({"kind": kind} for kind in kinds), rollout={"failure_reward": failure_reward}
    )
    rewards = {"train/0": 1.0, "train/1": counts, "train/2": counts, "train/4": 1.0}
    assert (found.greedy, found.sampled, found.no_result) == (rewards, rewards, "")
    lines = [line.removeprefix("evaluating before (greedy): ") for line in said if "(greedy)" in line]
    assert [line.partition(" (tests/")[0] for line in lines] == [
        f"1 of 5 rollouts failed (workflow_error) and count {counts:g}; the first: train/1: KeyError: 'no field x'",
        f"1 of 5 rollouts failed (unusable_answer) and count {counts:g}; the first: train/2: UnusableAnswerError: no "
        "JSON",
        "2 failed attempts (infrastructure) were repeated; the first: train/3: ConnectionError: down",
        "1 of 5 tasks left out; the first: train/3: infrastructure: ConnectionError: down",
    ]


def test_tasks_that_a_time_limit_ended_are_kept_apart(make_runner: MakeRunner, serving: FakeServing) -> None:
    """Red when `out_of_time` is left out of the evaluation, or of what a checkpoint keeps of it; or has what was
    repeated and ended well, or failed otherwise."""

    async def slow(task: Any, model: Any) -> float:
        model.call()
        if task["kind"] == "hangs":
            await asyncio.Event().wait()
        if task["kind"] == "raises":
            raise KeyError("no field x")
        return 1.0

    tasks = [{"kind": kind} for kind in ("fine", "hangs", "raises")]
    for timeout_s in (0.2, 2.0, 20.0):  # a loaded machine may need longer for what does not hang
        found, _ = evaluate(make_runner(slow, timeout_s=timeout_s), serving, *tasks)
        if found.sampled["train/0"] == 1.0 and "train/0" not in found.out_of_time["greedy"]:
            break
    assert found.sampled == {"train/0": 1.0, "train/1": 0.0, "train/2": 0.0}
    assert found.out_of_time == {"greedy": ["train/1"], "sampled": ["train/1"]}
    assert evaluation_from_json(evaluation_to_json(found)) == found


def test_an_evaluation_that_a_cache_answered_is_no_result(make_runner: MakeRunner, serving: FakeServing) -> None:
    """Red when `_reasons_against` (evaluation.py) does not look at rollouts without calls. DSPy did this by default:
    greedy asks, sampled is answered from memory."""
    cache: set[int] = set()

    async def cached(task: Any, model: Any) -> float:
        if task["n"] not in cache:
            cache.add(task["n"])
            await asyncio.sleep(0.1)
            model.call()
        return 1.0

    found, said = evaluate(make_runner(cached), serving, *({"n": n} for n in range(4)))
    assert found.without_calls == {"greedy": 0, "sampled": 4}
    assert found.no_result.startswith(
        "sampled: 4 of 4 rollouts made no model call: a cache answers in the model's place"
    )
    assert said == [f"evaluating before: no result: {found.no_result}"]
    assert accuracy_metrics(found)["eval/sampled/without_calls"] == 4.0
    assert evaluation_from_json(evaluation_to_json(found)) == found
    old = {"greedy": {"a": 1.0}, "sampled": {}, "further": {}}
    assert evaluation_from_json(old) == Evaluation(greedy={"a": 1.0}, sampled={})

    cache.clear()
    half = [{"n": n // 2} for n in range(4)]
    found, _ = evaluate(make_runner(cached, max_concurrent_rollouts=1), serving, *half)
    assert found.without_calls["greedy"] == 2
    assert "2 of 4 rollouts made no model call, and took 0.0" in found.no_result
    assert "dspy.configure_cache(enable_disk_cache=False" in found.no_result
    found, _ = evaluate(make_runner(cached), serving, *half, evaluation={"max_without_calls": 1.0})
    assert (found.no_result, found.without_calls) == ("", {"greedy": 4, "sampled": 4})


def test_an_evaluation_of_survivors_is_no_result(make_runner: MakeRunner, serving: FakeServing) -> None:
    async def judge(task: Any, response: Any) -> float:
        return response["nothing"] if task["n"] else 1.0  # type: ignore[no-any-return]

    async def answers(task: Any, model: Any) -> Any:
        return type("Output", (), {"response": model.call(), "reward": None})

    found, _ = evaluate(make_runner(answers, judge), serving, *({"n": n} for n in range(4)))
    assert found.greedy == {"train/0": 1.0}
    assert found.no_result.startswith(
        "greedy: 3 of 4 tasks were left out (rollout.max_excluded_share is 0.5); sampled:"
    )


def test_rollouts_without_calls_and_time_are_remarked_on() -> None:
    rollouts = [
        Rollout(
            id=f"g/{index}",
            group_id="g",
            task_id="train/0",
            index=index,
            attempt=0,
            calls=() if index else (make_call(),),
            outcome=Outcome.OK,
            reward=1.0,
            seconds=0.001 if index else 1.5,
        )
        for index in range(4)
    ]
    found = summarize([Group(id="g", task=make_task(), version=0, rollouts=tuple(rollouts))])
    *_, note = found.notes()
    assert note.startswith(
        "3 of 4 rollouts made no model call, and took 0.001 s where the others took 1.50 s: the agent's framework "
        "answers from a cache"
    )


def test_a_task_knows_its_evaluation_set_and_gets_the_set_s_arguments(
    make_runner: MakeRunner, serving: FakeServing
) -> None:
    """Red when `Evaluator` does not name the set of a task, or `UserFunctions` gives all sets the run's arguments."""
    seen: list[tuple[str | None, dict[str, Any]]] = []

    async def note(task: Any, model: Any, task_set: str | None, workflow_args: dict[str, Any]) -> float:
        seen.append((task_set, workflow_args))
        model.call()
        return 1.0

    runner = make_runner(note, workflow_args={"turns": 1}, own_arguments={"hard": {"turns": 9}})
    model = TunerModelConfig(model_path="m", max_model_len=64)
    progress: list[tuple[str, int, int]] = []
    evaluator = Evaluator(
        config=RunConfig(train_dataset=DatasetConfig(path="tasks.jsonl"), model=model),
        runner=runner,
        modes={"sampled": serving.open},
        tasks=[make_task(0)],
        further={"hard": [make_task(1)], "easy": [make_task(2)]},
        progress=lambda *call: progress.append(call),
        message=lambda _: None,
    )
    serving.recorded = False
    evaluator.evaluate(0, name="before", with_further=True)
    assert seen == [("held-out", {"turns": 1}), ("hard", {"turns": 9}), ("easy", {"turns": 1})]
    assert progress[:2] == [("before (sampled)", 0, 1), ("before (sampled)", 1, 1)]  # its seconds count from here


def test_only_sets_that_exist_have_something_of_their_own() -> None:
    data, own = DatasetConfig(path="x"), TaskSetConfig(workflow_args={"a": 1})
    assert EvaluationConfig(further={"hard": data}, own={"hard": own, "held-out": own}).own["hard"] == own
    with pytest.raises(ConfigError, match="own has 'hrd', which is no evaluation set: there are held-out, hard"):
        EvaluationConfig(further={"hard": data}, own={"hrd": own})
    with pytest.raises(ConfigError, match="'held-out', which is the name of eval_dataset: give it another"):
        EvaluationConfig(further={"held-out": data})
