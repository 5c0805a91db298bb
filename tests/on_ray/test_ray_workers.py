"""What user code does to its process, it does to one rollout worker: the others go on, and nothing is lost."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter

import pytest
import torch
from ray_workflows import actors_of, does_what_the_task_says, make_tasks
from transformers import AutoModelForCausalLM

from sharpen.compat.trinity import workflow_function
from sharpen.compat.trinity.task import TasksetConfig
from sharpen.config.functions import import_function
from sharpen.errors import ConfigError, DatasetError
from sharpen.types import Outcome


@pytest.fixture(scope="module")
def serving(make_serving):
    """Two workers for most tests."""
    settings = {"rollout__max_attempts": 1, "rollout__model_exceptions": ["ray_workflows.NoFieldError"]}
    return make_serving(does_what_the_task_says, cluster__rollouts_per_worker=8, **settings)


@pytest.fixture(scope="module")
def strict(make_serving):
    """One worker, one rollout at a time, with little patience."""
    settings = {"rollout__timeout_s": 1.0, "rollout__max_attempts": 1, "cluster__num_workers": 1}
    return make_serving(does_what_the_task_says, grace_s=3.0, cluster__rollouts_per_worker=1, **settings)


def run(serving, tasks, part="", **options):
    return serving.runner.run(tasks, group_ids=[f"{part}group-{task.index}" for task in tasks], **options)


def test_trap_26_calls_of_many_rollouts_are_recorded_where_they_belong(serving):
    """300 rollouts of 2 calls over 2 workers. Red when `OnWorkers.run` gives the record of an attempt that
    ended before."""
    groups = run(serving, make_tasks(150))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert len(rollouts) == 300
    assert len({rollout.metrics["pid"] for rollout in rollouts}) == 2
    for group in groups:
        for rollout in group.rollouts:
            number = group.task.index
            assert rollout.reward == number
            asked = [call.messages[0]["content"] for call in rollout.calls]
            assert asked == [f"{part} question {number}" for part in ("first", "second")]
    sampled = Counter(tuple(call.sampled_ids_S.tolist()) for rollout in rollouts for call in rollout.calls)
    assert max(sampled.values()) < 30  # noise of its own for each


def test_evaluation_and_baseline_are_greedy_where_they_should_be(serving):
    """Red when the worker opens the models as "sampled" in each mode."""
    (group,) = run(serving, make_tasks(1), "baseline-", open_baseline=serving.modes["greedy"])
    assert [call.sampling.temperature for call in group.rollouts[0].calls] == [1.0, 1.0]
    assert [call.sampling.temperature for call in group.baseline.calls] == [0.0, 0.0]
    (evaluated,) = run(serving, make_tasks(1), "evaluated-", open_session=serving.modes["greedy"])
    found = [call.sampling.temperature for rollout in evaluated.rollouts for call in rollout.calls]
    assert set(found) == {0.0}, "kept as transcripts"


def test_a_task_that_crashes_its_process_fails_alone(serving):
    """Its neighbours run again and end well, in their only attempt. Red when `OnWorkers.run` counts an attempt as
    failed that was not alone on its worker."""
    groups = run(serving, make_tasks(8, "crash"), "crash-", group_size=1)
    for group in groups:
        (rollout,) = group.rollouts
        if group.task.index == 3:
            assert rollout.outcome == Outcome.WORKFLOW_ERROR
            assert "its process died while nothing else ran there" in rollout.error
            assert rollout.num_answers is None  # what it was answered died with it
        else:
            assert (rollout.outcome, len(rollout.calls)) == (Outcome.OK, 1)


@pytest.mark.parametrize("evaluation", [False, True])
def test_failures_have_their_causes_on_workers_too(serving, evaluation):
    """Red when `UserFunctions` travels without the names, or `Attempt` without the number of answers."""
    opens = {"open_session": serving.modes["sampled"]} if evaluation else {}
    groups = run(serving, make_tasks(3, "fail"), f"fails-{evaluation}-", group_size=1, evaluation=evaluation, **opens)
    rollouts = [group.rollouts[0] for group in groups]
    expected = [Outcome.UNUSABLE_ANSWER, Outcome.UNUSABLE_ANSWER, Outcome.WORKFLOW_ERROR]
    assert [rollout.outcome for rollout in rollouts] == expected
    assert [rollout.num_answers for rollout in rollouts] == [1, 1, 1]
    assert [len(rollout.calls) for rollout in rollouts] == [1, 1, 1]


def test_an_engine_that_dies_is_started_again_with_the_current_weights(serving, toy_model_dir, caplog):
    """Its calls are made again; rollouts notice nothing. Red when `_watch` serves None: tokens would be of version 0,
    while the run is at version 3."""
    model = AutoModelForCausalLM.from_pretrained(toy_model_dir, dtype=torch.float32)
    serving.publish(3, {name: value * 1.01 for name, value in model.state_dict().items()})
    (engine,), before = actors_of("EngineActor"), serving.generating_s()
    futures = [serving.runner.submit(task, f"dies-{task.index}", 3) for task in make_tasks(4, "slowly")]
    while serving.generating_s() == before:
        time.sleep(0.01)
    engine.kill()
    groups = serving.runner.collect(futures)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert {(rollout.outcome, rollout.attempt) for rollout in rollouts} == {(Outcome.OK, 0)}
    assert {len(rollout.calls) for rollout in rollouts} == {10}
    assert {int(version) for rollout in rollouts for call in rollout.calls for version in call.versions_S} == {3}
    assert "engine 0 died: restarted with the weights of version 3" in caplog.text


def test_bad_input_stops_the_run_with_its_own_message(serving):
    """Tasks of which none has gone well. The last test with these workers: their runner has stopped."""
    tasks = [dataclasses.replace(task, task_set="new") for task in make_tasks(1, "bad input")]
    with pytest.raises(DatasetError, match=r"task 0 has nothing \(read at .*ray_workflows.py"):
        run(serving, tasks, "bad-")


def test_a_hang_that_no_signal_ends_costs_its_worker(strict):
    """Red when `OnWorkers._run_on` waits for ever: the run would."""
    (group,) = run(strict, make_tasks(1, "hang"), group_size=1)
    (rollout,) = group.rollouts
    assert rollout.outcome == Outcome.BLOCKED_LOOP
    assert "held its process past the time limit of 1 s" in rollout.error


def test_what_cannot_be_sent_is_refused_before_anything_starts(make_serving):
    lock = threading.Lock()

    async def holds_a_lock(task, model):
        return 1.0 if lock else 0.0

    with pytest.raises(ConfigError, match=r"cannot be sent to a rollout worker.*lock"):
        make_serving(holds_a_lock)


ASKS_THE_JUDGE_TOO = """
from sharpen.compat.trinity import REWARD_FUNCTIONS, RewardFn, Workflow

@REWARD_FUNCTIONS.register_module("letters_of_a_file", force=True)
class Letters(RewardFn):
    def __call__(self, response, **kwargs):
        return {"letters": response.count("e") / 8}

class Asks(Workflow):
    def run(self):
        messages = [{"role": "user", "content": self.task.raw_task["question"]}]
        (exp,) = self.model.chat(messages, max_tokens=8)
        for _ in range(self.task.raw_task["number"]):
            self.auxiliary_model_wrappers[0].chat(messages)
        (exp.reward,) = self.task.reward_fn()(exp.response_text).values()
        return [exp]
"""


def test_a_trinity_workflow_of_a_file_goes_to_workers_with_an_auxiliary_model(make_serving, tmp_path, toy_model_dir):
    """With its reward function, from a file that workers cannot import; the judge has two engines of its own and is
    counted, and its `tensor_parallel_size` is told. Red when `pickled` sends only the module of the function itself by
    value (the adapter's), and when `OnWorkers.run` does not count what an attempt used."""
    (tmp_path / "asks.py").write_text(ASKS_THE_JUDGE_TOO)
    asks = import_function(f"{tmp_path / 'asks.py'}:Asks")
    workflow = workflow_function(asks, TasksetConfig(reward_fn="letters_of_a_file"), {})
    judge = {"model_path": str(toy_model_dir), "max_model_len": 128, "max_tokens": 4}
    judge |= {"inference_engine_num": 2, "tensor_parallel_size": 2}
    serving = make_serving(workflow, cluster__num_workers=1, auxiliary_models__judge=judge)
    assert "auxiliary_models.judge.tensor_parallel_size = 2: without effect" in serving.line
    assert [placed.auxiliary for placed in serving._engines] == [None, "judge", "judge"]
    groups = run(serving, make_tasks(3), "judged-")
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert [(rollout.outcome, rollout.error) for rollout in rollouts] == [(Outcome.OK, None)] * 6
    for group in groups:
        for rollout in group.rollouts:
            assert len(rollout.calls) == 1  # those of the judge are not trained
            assert rollout.call_rewards == {0: rollout.reward}
            assert rollout.metrics["auxiliary/judge/calls"] == group.task.index
    used = sum(rollout.metrics["auxiliary/judge/tokens"] for rollout in rollouts)
    assert used > 0
    assert serving.auxiliary.total_tokens == {"judge": used}
