"""What rollouts run with: the user's functions, and models, the policy at a gateway or an endpoint, auxiliary ones
beside it.

In: a job, a gateway. Out: `UserFunctions`, and for each mode a function that opens `RolloutModels`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from sharpen.compat.agentscope import present
from sharpen.config.run import RunConfig
from sharpen.execution.auxiliary.models import AuxiliaryModels
from sharpen.gateway.gateway import Gateway
from sharpen.recipe import Job, Recipe
from sharpen.rollout.attempt import UserFunctions
from sharpen.rollout.in_process import OpenModels
from sharpen.rollout.models import Access, RolloutModels
from sharpen.types import Mode, Sampling


def functions_of(job: Job[Recipe]) -> UserFunctions:
    """The workflow and the judge, ready to be run. Raises `ConfigError` for a wrong signature."""
    return UserFunctions(
        job.agent,
        job.judge,
        job.config.workflow_args,
        own_arguments=own_arguments(job.config),
        needs_reward=job.recipe.needs_reward,
        model_exceptions=job.config.rollout.model_exceptions,
    )


def own_arguments(config: RunConfig) -> dict[str, Mapping[str, Any]]:
    """The `workflow_args` of the evaluation sets that have their own, by the set's name."""
    return {name: own.workflow_args for name, own in config.evaluation.own.items() if own.workflow_args is not None}


def openers(config: RunConfig, gateway: Gateway, auxiliary: AuxiliaryModels) -> Mapping[Mode, OpenModels]:
    """How a rollout's models are opened in each mode. Every one records its calls."""
    greedy = Sampling(temperature=0.0, max_tokens=config.model.max_tokens)
    return {
        "greedy": opener(functools.partial(gateway.open, sampling=greedy), auxiliary),
        "sampled": opener(gateway.open, auxiliary),
    }


def opener(open_policy: Callable[[str, int], Access], auxiliary: AuxiliaryModels) -> OpenModels:
    """How a rollout's models are opened: the policy by a gateway's or an endpoint's `open`, beside it the auxiliary
    models; user code receives AgentScope's objects where AgentScope is in use."""

    def open_models(rollout_id: str, noise_seed: int) -> RolloutModels:
        return RolloutModels(open_policy(rollout_id, noise_seed), auxiliary.open(rollout_id, noise_seed), present)

    return open_models
