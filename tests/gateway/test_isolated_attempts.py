"""Attempts in processes of their own: the same records, and what ends a process costs one attempt."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import isolated_agents
import numpy as np
import pytest
from scripted import ServingLoop
from scripted_rollouts import Rollouts, rollouts_of

from sharpen.agent.rollout.attempt import UserFunctions
from sharpen.agent.rollout.runner import RolloutRunner
from sharpen.config.load import resolve
from sharpen.config.rows import MissingFieldError, Row
from sharpen.config.run import RolloutConfig
from sharpen.errors import ConfigError
from sharpen.placement.isolated.pool import ProcessPool
from sharpen.run.decide import check_place
from sharpen.types import Outcome, Rollout, Task

ALONE: dict[str, Any] = {"isolation": "process", "num_processes": 1}


@pytest.fixture
def rollouts(serving: ServingLoop, tokenizer: Any) -> Iterator[Rollouts]:
    made = rollouts_of(tokenizer, serving, "four")
    yield made
    serving.run(made.gateway.close())


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def run_deeds(rollouts: Rollouts, workflow: Any, deeds: list[str], grace_s: float = 60.0, **settings: Any) -> Any:
    """A rollout for each deed, one after the other, in one process at a time."""
    config = RolloutConfig(**{"timeout_s": 600, "max_attempts": 1, **ALONE, **settings})
    pool = ProcessPool(UserFunctions(workflow, None), config, grace_s)
    tasks = [Task(id=f"train/{i}", index=i, row={"deed": deed}) for i, deed in enumerate(deeds)]
    with RolloutRunner(pool, rollouts.open, config, 1, 0) as runner:
        return [group.rollouts[0] for group in runner.run(tasks, group_ids=[task.id for task in tasks])]


def test_the_records_are_those_of_one_process_and_torch_is_not_there(rollouts: Rollouts) -> None:
    """Calls token for token, metrics, counts, the judge; red when the worker's own view of its calls is recorded."""

    def made(**settings: Any) -> list[Rollout]:
        groups = rollouts.run(isolated_agents.asks, isolated_agents.judged, tasks=({}, {}), **settings)
        return [group.rollouts[0] for group in groups]

    here, there = made(), made(**ALONE)
    for one, other in zip(here, there, strict=True):
        assert (other.outcome, other.reward, other.error) == (Outcome.OK, 1.0, None)
        assert (other.reward, other.unrecorded_answers) == (one.reward, one.unrecorded_answers)
        assert len(other.calls) == 2
        for mine, its in zip(one.calls, other.calls, strict=True):
            assert np.array_equal(mine.prompt_ids_P, its.prompt_ids_P)
            assert np.array_equal(mine.sampled_ids_S, its.sampled_ids_S)
            assert (mine.status, mine.parent, mine.messages) == (its.status, its.parent, its.messages)
        places = {"process", "judge/process", "torch"}
        assert {k: v for k, v in one.metrics.items() if k not in places} == {
            k: v for k, v in other.metrics.items() if k not in places
        }
        assert one.metrics["process"] == os.getpid() != other.metrics["process"]
        assert other.metrics["torch"] == 0.0
        assert other.metrics["process"] == other.metrics["judge/process"]
    assert there[0].metrics["process"] == there[1].metrics["process"]  # warm: the same process made both


def test_what_ends_a_process_costs_one_attempt(rollouts: Rollouts, capfd: pytest.CaptureFixture[str]) -> None:
    deeds = ["leave", "nothing", "crash", "kill", "nothing"]
    found = run_deeds(rollouts, isolated_agents.does, deeds)
    assert [one.outcome for one in found] == [
        *(Outcome.WORKFLOW_ERROR, Outcome.OK, Outcome.WORKFLOW_ERROR, Outcome.WORKFLOW_ERROR, Outcome.OK),
    ]
    for rollout, words in zip(found, ["exit code 0", "", "SIGSEGV", "SIGKILL", ""], strict=True):
        assert words in str(rollout.error)
        assert len(rollout.calls) == 1  # what the model said before is recorded
    assert "isolated_agents.py" in str(found[2].traceback)  # where it crashed
    capfd.readouterr()  # Python's own report of the crash was shown too


def test_a_process_that_holds_its_interpreter_is_killed(rollouts: Rollouts) -> None:
    """No thread of it runs, so that it can say nothing; red without a time limit on this side."""
    (held,) = run_deeds(rollouts, isolated_agents.holds, ["hold"], timeout_s=0.4, grace_s=0.1)
    assert held.outcome == Outcome.BLOCKED_LOOP
    assert "time limit of 0.4 s" in str(held.error)


def test_memory_is_bounded(rollouts: Rollouts) -> None:
    full, after = run_deeds(rollouts, isolated_agents.does, ["fill", "nothing"], memory_mb=400)
    assert (full.outcome, after.outcome) == (Outcome.WORKFLOW_ERROR, Outcome.OK)
    assert "MemoryError" in str(full.error) or "400 MB (rollout.memory_mb)" in str(full.error)


def test_no_memory_to_say_so_costs_one_attempt(rollouts: Rollouts) -> None:
    """Red when the worker sends the error that its own handler raised, which ended the run."""
    full, after = run_deeds(rollouts, isolated_agents.does, ["use up", "nothing"], memory_mb=4000)
    assert (full.outcome, after.outcome) == (Outcome.WORKFLOW_ERROR, Outcome.OK)
    assert "4000 MB (rollout.memory_mb)" in str(full.error)


def test_a_result_that_cannot_be_read_costs_one_attempt(rollouts: Rollouts) -> None:
    strange, after = run_deeds(rollouts, isolated_agents.does, ["hide", "nothing"])
    assert (strange.outcome, after.outcome) == (Outcome.WORKFLOW_ERROR, Outcome.OK)
    assert "not in this process" in str(strange.error)


def test_what_it_logs_is_logged_once_as_it_is(rollouts: Rollouts, caplog: pytest.LogCaptureFixture) -> None:
    """Red with the format of `logging.basicConfig` in the worker: the run adds its own."""
    run_deeds(rollouts, isolated_agents.does, ["log"])
    assert [(one.name, one.getMessage()) for one in caplog.records if one.name == "mine"] == [("mine", "hello")]


def test_code_that_swallows_its_cancellation_ends_with_what_it_forked(rollouts: Rollouts, tmp_path: Path) -> None:
    """Red when its process goes on to the next attempt. On a loaded machine the time limit may pass before it has
    forked and written its file: then a longer one is tried."""
    files = [tmp_path / "first", tmp_path / "second"]
    tasks = [{"file": str(file), "goes_on": number == 0} for number, file in enumerate(files)]
    for timeout_s in (1.0, 10.0, 200.0):
        first, _ = rollouts.run(isolated_agents.swallows, tasks=tasks, timeout_s=timeout_s, **ALONE)
        if all(file.exists() for file in files):
            break
    assert first.rollouts[0].outcome in (Outcome.TIMEOUT, Outcome.BLOCKED_LOOP)
    (worker, child), (next_worker, _) = (map(int, file.read_text().split()) for file in files)
    assert worker != next_worker
    assert [is_alive(one) for one in (worker, child, next_worker)] == [False] * 3


def test_a_forked_copy_of_the_worker_says_nothing(rollouts: Rollouts) -> None:
    """Red without the check of the process in `Worker.send`: both copies answer, and the run reads neither."""
    first, second = rollouts.run(isolated_agents.returns_twice, tasks=({}, {}), **ALONE)
    assert [first.rollouts[0].reward, second.rollouts[0].reward] == [1.0, 1.0]


def test_what_it_writes_is_shown_up_to_a_bound(rollouts: Rollouts, capsys: pytest.CaptureFixture[str]) -> None:
    (group,) = rollouts.run(isolated_agents.writes, **ALONE)
    shown = capsys.readouterr().out
    assert group.rollouts[0].reward == 1.0
    assert shown.startswith("one line\n")
    assert 1_000_000 <= len(shown) < 1_001_000
    assert "step-0/train/0/0 wrote more than 1,000,000 characters" in shown


def test_bad_input_and_strange_errors_are_those_of_one_process(rollouts: Rollouts) -> None:
    task = Task(id="train/0", index=0, row=Row(question="x"))
    with (
        rollouts.runner(isolated_agents.needs_answer, **ALONE) as runner,
        pytest.raises(MissingFieldError, match="no field 'answer'"),
    ):
        runner.run([task], group_ids=["g"])
    (strange,) = rollouts.run(isolated_agents.raises_strangely, **ALONE)
    assert "Unpicklable: as I like" in str(strange.rollouts[0].error)


def test_functions_that_cannot_travel_are_named_before_anything_starts(rollouts: Rollouts) -> None:
    lock = threading.Lock()

    async def workflow(task: Any, model: Any) -> float:
        with lock:
            return 1.0

    with pytest.raises(ConfigError, match=r"cannot be sent to a rollout worker.*lock"):
        rollouts.runner(workflow, **ALONE)
    with pytest.raises(ValueError, match=r"num_processes \(2\) and memory_mb \(100\) are for isolation: process"):
        RolloutConfig(num_processes=2, memory_mb=100)


def test_where_there_are_no_such_processes_the_setting_is_refused() -> None:
    settings = {
        "train_dataset.path": "none",
        "model": {"model_path": "none", "max_model_len": 128},
        "rollout.isolation": "process",
    }
    with pytest.raises(ConfigError, match=r"rollout\.isolation is process, but on Ray"):
        check_place(resolve(settings={**settings, "execution": "ray"}).config)
