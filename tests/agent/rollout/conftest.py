"""Runners on a scripted serving side, closed at the end of each test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from scripted_serving import FakeServing, MakeRunner

from sharpen.agent.rollout.attempt import UserFunctions
from sharpen.agent.rollout.in_process import InProcess
from sharpen.agent.rollout.runner import RolloutRunner
from sharpen.config.run import RolloutConfig


@pytest.fixture
def serving() -> FakeServing:
    return FakeServing()


@pytest.fixture
def make_runner(serving: FakeServing) -> Iterator[MakeRunner]:
    """Runners that are closed at the end of the test; keyword arguments are settings."""
    runners: list[RolloutRunner] = []

    def make(workflow: Any, judge: Any = None, *, group_size: int = 2, seed: int = 0, **settings: Any) -> RolloutRunner:
        workflow_args, needs_reward = settings.pop("workflow_args", None), settings.pop("needs_reward", True)
        own, needs_metrics = settings.pop("own_arguments", None), settings.pop("needs_metrics", ())
        config = RolloutConfig(**{"timeout_s": 20.0, **settings})
        names = config.model_exceptions
        functions = UserFunctions(
            workflow,
            judge,
            workflow_args,
            own_arguments=own,
            needs_reward=needs_reward,
            needs_metrics=needs_metrics,
            model_exceptions=names,
        )
        attempts = InProcess(functions, config.timeout_s)
        runners.append(
            RolloutRunner(attempts, serving.open, config, group_size, seed, whole_groups=functions.whole_groups)
        )
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()
    assert serving.all_closed
