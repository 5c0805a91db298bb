"""The side of the coordinator that rolls out, with scripted rollouts: what is begun when, and what a resume needs."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sharpen.agent.tasks.order import TaskOrder
from sharpen.config.run import RunConfig
from sharpen.errors import EngineError, ParityError
from sharpen.learning.recipe import recipe_of
from sharpen.run.explorer import Explorer
from sharpen.types import Call, CallStatus, Group, Outcome, Rollout, Sampling, Task


class Runner:
    """Groups end when the test says so; those that nobody holds back end at once."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.futures: dict[str, Future[Group]] = {}
        self.held: set[str] = set()

    def submit(self, task: Task, group_id: str, version: int, **_: Any) -> Future[Group]:
        self.begun.append((group_id, version))
        future: Future[Group] = Future()
        self.futures[group_id] = future
        if group_id not in self.held:
            future.set_result(group_of(task, group_id, version))
        return future

    def collect(self, futures: list[Future[Group]]) -> list[Group]:
        return [future.result(timeout=60) for future in futures]


class Serving:
    """Notes what is published; a probe fails if the test says so."""

    def __init__(self) -> None:
        self.runner = Runner()
        self.published: list[int] = []
        self.failure: Exception | None = None

    def generating_s(self) -> float:
        return 0.0

    def rest(self) -> None:
        pass

    def publish(self, version: int, tensors: Any) -> None:
        self.published.append(version)

    def probe(self, prompt_ids_P: Any, *, noise: int, temperature: float) -> Future[Any]:
        future: Future[Any] = Future()
        if self.failure is None:
            future.set_result((("probe", prompt_ids_P.tolist(), noise),))
        else:
            future.set_exception(self.failure)
        return future


class Trainer:
    """A version is all there is."""

    def __init__(self, version: int = 0) -> None:
        self.version = version

    def state_tensors(self) -> dict[str, Any]:
        return {}


def group_of(task: Task, group_id: str, version: int) -> Group:
    call = Call(
        index=0,
        parent=None,
        prompt_ids_P=np.array([7, 8], np.int32),
        sampled_ids_S=np.array([5], np.int32),
        logprobs_S=np.zeros(1, np.float32),
        versions_S=np.array([version], np.int32),
        sampling=Sampling(),
        finish_reason="stop",
        status=CallStatus.USED,
        messages=(),
        tools=(),
        response={},
    )
    rollouts = tuple(
        Rollout(
            id=f"{group_id}/{index}",
            group_id=group_id,
            task_id=task.id,
            index=index,
            attempt=0,
            calls=(call,),
            outcome=Outcome.OK,
            reward=float(index),
        )
        for index in range(2)
    )
    return Group(id=group_id, task=task, version=version, rollouts=rollouts)


def explorer(serving: Serving, *, total: int = 6, trained: int = 0, version: int = 0, drawn: Any = (), **sync: Any):
    config = RunConfig.model_validate(
        {
            "train_dataset": {"path": "d"},
            "model": {"model_path": "m", "max_model_len": 64},
            "algorithm": {"algorithm_type": "grpo", "batch_size": 1, "group_size": 2},
            "sync": sync,
        }
    )
    return Explorer(
        recipe_of(config),
        serving=serving,  # type: ignore[arg-type]
        tasks=[Task(id=f"t{index}", index=index, row={}) for index in range(9)],
        order=TaskOrder(9, 0, 1, shuffle=False),
        total_steps=total,
        display=SimpleNamespace(rollouts=lambda done, total: None, doing=lambda what: None),  # type: ignore[arg-type]
        trained=trained,
        version=version,
        drawn=drawn,
    )


def step(explorer: Explorer, trainer: Trainer) -> list[str]:
    groups = explorer.gather(trainer).groups
    trainer.version += 1
    explorer.settle(trainer)
    return [group.id for group in groups]


def test_batches_begin_with_the_weights_that_serve():
    """Interval 2, offset 1, six steps: `b1 b2 b3 t1 t2 s2 b4 b5 t3 t4 s4 b6 t5 t6 s6`."""
    serving, trainer = Serving(), Trainer()
    one = explorer(serving, interval=2, offset=1)
    assert [step(one, trainer) for _ in range(6)] == [[f"step_{n + 1}/t{n}"] for n in range(6)]
    assert [version for _, version in serving.runner.begun] == [0, 0, 0, 2, 2, 4]
    assert serving.published == [2, 4, 6]


def test_what_is_in_flight_is_in_the_position_and_rolled_out_first_again():
    serving, trainer = Serving(), Trainer()
    one = explorer(serving, offset=2)
    serving.runner.held = {"step_3/t2"}
    step(one, trainer)
    state, drawn = one.position()
    assert drawn == [[1], [2]]
    assert one.num_ahead == 1
    one.close()
    assert serving.runner.futures["step_3/t2"].cancelled()

    again = Serving()
    other = explorer(again, offset=2, trained=1, version=1, drawn=drawn)
    other._order.restore(state)
    assert other.position()[1] == drawn
    assert [step(other, trainer) for _ in range(5)] == [[f"step_{n + 1}/t{n}"] for n in range(1, 6)]
    assert again.runner.begun[:2] == [("step_2/t1", 1), ("step_3/t2", 1)]


def test_an_evaluation_waits_for_what_is_in_flight_and_gets_the_latest_weights():
    serving, trainer = Serving(), Trainer()
    one = explorer(serving, interval=3)
    step(one, trainer)
    assert serving.published == []
    one.serve_latest(trainer)
    one.serve_latest(trainer)
    assert serving.published == [1]


def test_a_probe_is_there_behind_each_sync_and_not_before_the_next():
    serving, trainer = Serving(), Trainer()
    one = explorer(serving, interval=2)
    step(one, trainer)
    assert one.probe() == ()
    step(one, trainer)
    assert one.probe() == (("probe", [7, 8], 2),)
    step(one, trainer)
    assert one.probe() == ()


def test_an_engine_that_fails_under_new_weights_stops_the_run():
    serving, trainer = Serving(), Trainer()
    serving.failure = EngineError("the model's logits are not finite")
    one = explorer(serving, offset=1)
    step(one, trainer)
    with pytest.raises(ParityError, match="with the weights of version 1: the model's logits are not finite"):
        one.probe()


def test_a_synchronous_run_asks_for_no_probe():
    serving, trainer = Serving(), Trainer()
    one = explorer(serving)
    step(one, trainer)
    assert serving.published == [1]
    assert one.probe() == ()
    assert one.num_ahead == 0
