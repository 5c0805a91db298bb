"""One rollout's models: who is revoked when, and how often."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from scripted_serving import FakeHelper, FakeSession

from sharpen.agent.rollout.models import RolloutModels
from sharpen.types import Call, Outcome


class Slow(FakeSession):
    """Counts how often it is closed, and takes a while for it."""

    num_closed = 0

    def close(self) -> tuple[Call, ...]:
        self.num_closed += 1
        time.sleep(0.05)
        return super().close()


def models_of(policy: FakeSession) -> RolloutModels:
    return RolloutModels(policy, dict(policy.helpers))


def test_the_policy_is_revoked_once_whoever_comes_first() -> None:
    """Red without the lock in `close`: the end of a workflow and its time limit may come together."""
    policy = Slow("g/0", 1, {})
    models = models_of(policy)
    policy.model.call()
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(models.end())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert policy.num_closed == 1
    assert len(found) == 8
    assert all(calls is found[0] and len(calls) == 1 for calls in found)


def test_the_auxiliary_models_outlive_the_policy_until_the_end() -> None:
    """Red when `close` revokes them too, or `end` does not."""
    helper = FakeHelper()
    models = models_of(FakeSession("g/0", 1, {"helper": helper}))
    models.close()
    assert models.auxiliary_models["helper"].call() == "good"
    models.end()
    with pytest.raises(PermissionError):
        models.auxiliary_models["helper"].call()


def test_the_auxiliary_models_are_revoked_where_closing_the_policy_fails() -> None:
    """Red when `end` has no `finally`."""

    class Broken(FakeSession):
        def close(self) -> tuple[Call, ...]:
            raise RuntimeError("broken")

    helper = FakeHelper()
    with pytest.raises(RuntimeError, match="broken"):
        models_of(Broken("g/0", 1, {"helper": helper})).end()
    assert helper.closed


def test_the_models_own_failures_are_not_those_of_an_auxiliary_model() -> None:
    """Red when `auxiliary_failure` takes any failure: a judge's prompt that is too long is nobody's failure."""
    helper = FakeHelper()
    models = models_of(FakeSession("g/0", 1, {"helper": helper}))
    helper.failure, helper.failure_reason = Outcome.CONTEXT_OVERFLOW, "too long"
    assert models.auxiliary_failure is None
    helper.failure = Outcome.INFRASTRUCTURE
    assert models.auxiliary_failure == "a call of the auxiliary model 'helper' failed: too long"
