"""The user's functions, what runs them here, and the models of a rollout: the policy, at a gateway or an endpoint, and
auxiliary models.

In: a job, a gateway. Out: `UserFunctions`, an `AttemptRunner`, and for each mode a function that opens `RolloutModels`;
auxiliary models beside any rollout.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sharpen.agent.agentscope.model import present
from sharpen.agent.rollout.attempt import UserFunctions
from sharpen.agent.rollout.in_process import AttemptRunner, InProcess, OpenModels
from sharpen.agent.rollout.models import Access, RolloutModels
from sharpen.agent.rollout.runner import noise_seed
from sharpen.config.run import EvaluationConfig, RolloutConfig
from sharpen.gateway.gateway import Gateway
from sharpen.learning.recipe import Job, Recipe
from sharpen.placement.auxiliary.models import AuxiliaryModels
from sharpen.types import Mode, Sampling


def user_functions(job: Job[Recipe]) -> UserFunctions:
    """Return the workflow and the judge, checked. Raises `ConfigError` for a wrong signature."""
    return UserFunctions(
        job.agent,
        job.judge,
        job.config.workflow_args,
        own_arguments=own_arguments(job.config.evaluation),
        needs_reward=job.recipe.needs_reward,
        needs_metrics=job.recipe.needs_metrics,
        model_exceptions=job.config.rollout.model_exceptions,
    )


def attempt_runner(functions: UserFunctions, config: RolloutConfig) -> AttemptRunner:
    """Return what runs attempts: this process, or processes of their own (`rollout.isolation`). Raises `ConfigError` if
    the functions cannot be sent to these."""
    if config.isolation == "none":
        return InProcess(functions, config.timeout_s)
    from sharpen.placement.isolated.pool import ProcessPool

    return ProcessPool(functions, config)


def own_arguments(evaluation: EvaluationConfig) -> dict[str, Mapping[str, Any]]:
    """The `workflow_args` of the evaluation sets that have their own, by the set's name."""
    return {name: own.workflow_args for name, own in evaluation.own.items() if own.workflow_args is not None}


def openers(gateway: Gateway, auxiliary: AuxiliaryModels, *, max_tokens: int) -> Mapping[Mode, OpenModels]:
    """Return the function that opens a rollout's models for an evaluation, in each mode. Both modes record the calls,
    and have the original model for every policy beside the trained one."""
    greedy = Sampling(temperature=0.0, max_tokens=max_tokens)
    return {
        "greedy": opener(functools.partial(gateway.open, sampling=greedy, original=True), auxiliary),
        "sampled": opener(functools.partial(gateway.open, original=True), auxiliary),
    }


@contextlib.contextmanager
def opened(auxiliary: AuxiliaryModels, name: str, seed: int) -> Iterator[Mapping[str, Any]]:
    """Open the auxiliary models for a block of code that belongs to no rollout but has a `name`, as user code receives
    them. Raises the error of a call that was refused because the run has used up a model's tokens."""
    models = auxiliary.open(name, noise_seed(seed, name))
    try:
        yield {name: present(access.model) for name, access in models.items()}
    finally:
        for access in models.values():
            access.close()
            access.discard()
    for access in models.values():
        if access.exhausted is not None:
            raise access.exhausted


def opener(open_policy: Callable[[str, int], Access], auxiliary: AuxiliaryModels) -> OpenModels:
    """Return a function that opens a rollout's models: the policy, by the `open` of a gateway or an endpoint, and the
    auxiliary models. User code that uses AgentScope receives AgentScope's objects."""

    def open_models(rollout_id: str, noise_seed: int) -> RolloutModels:
        return RolloutModels(open_policy(rollout_id, noise_seed), auxiliary.open(rollout_id, noise_seed), present)

    return open_models
