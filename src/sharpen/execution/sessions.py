"""What an attempt gets: the policy's session, and beside it those of the auxiliary models.

In: a session of a gateway, or an endpoint's, and an `AuxiliarySession`. Out: a `rollout.attempt.Session` whose models
are what user code receives (AgentScope's objects, where AgentScope is in use).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from sharpen.compat.agentscope import present
from sharpen.config.run import RunConfig
from sharpen.execution.auxiliary import AuxiliaryModels, AuxiliarySession
from sharpen.execution.engines import sampling_of
from sharpen.execution.remote import RemoteUse
from sharpen.gateway.gateway import Gateway
from sharpen.inference.engine import Engine
from sharpen.rollout.attempt import Session
from sharpen.rollout.in_process import OpenSession, SessionKind
from sharpen.rollout.user_loop import owner
from sharpen.types import Call, Outcome, Sampling


class PolicySession(Protocol):
    """The policy's part: of a gateway, or of an endpoint."""

    @property
    def model(self) -> Any: ...
    @property
    def failure(self) -> Outcome | None: ...
    @property
    def failure_reason(self) -> str | None: ...
    @property
    def counts(self) -> Mapping[str, float]: ...
    @property
    def num_answers(self) -> int: ...
    @property
    def cut(self) -> bool: ...
    def close(self) -> tuple[Call, ...]: ...


class EndpointSession:
    """A policy that is not ours: for evaluation. Nothing is recorded token-exactly there."""

    def __init__(self, use: RemoteUse) -> None:
        self._use = use
        self.model = use.model

    @property
    def failure(self) -> Outcome | None:
        """INFRASTRUCTURE if a call failed by the endpoint's doing, and was not repeated with success."""
        return None if self._use.failure is None else Outcome.INFRASTRUCTURE

    @property
    def failure_reason(self) -> str | None:
        """One line about it."""
        return self._use.failure

    @property
    def counts(self) -> dict[str, float]:
        """Nothing was noticed."""
        return {}

    @property
    def num_answers(self) -> int:
        """How many answers came."""
        return self._use.num_answers

    @property
    def cut(self) -> bool:
        """Not known here."""
        return False

    def close(self) -> tuple[Call, ...]:
        """Refuse later calls. Nothing was recorded."""
        self._use.close()
        return ()


class RolloutSession:
    """One attempt's models. `close` is the policy's; the auxiliary models stay usable until `auxiliary.close()`."""

    def __init__(self, policy: PolicySession, auxiliary: AuxiliarySession) -> None:
        self.policy = policy
        self.auxiliary = auxiliary
        self.model = present(policy.model)

    @property
    def failure(self) -> Outcome | None:
        """What the policy or its engine did wrong."""
        return self.policy.failure

    @property
    def failure_reason(self) -> str | None:
        """One line about it."""
        return self.policy.failure_reason

    @property
    def counts(self) -> Mapping[str, float]:
        """What the policy's session noticed."""
        return self.policy.counts

    @property
    def num_answers(self) -> int:
        """How many answers of the policy the agent was handed."""
        return self.policy.num_answers

    @property
    def cut(self) -> bool:
        """Whether the last of them stopped at its token limit."""
        return self.policy.cut

    def close(self) -> tuple[Call, ...]:
        """Revoke the policy; its recorded calls."""
        return self.policy.close()


def make_gateway(config: RunConfig, engine: Engine, tokenizer: Any, loop: asyncio.AbstractEventLoop) -> Gateway:
    """The gateway of the model that is tuned. Raises `ConfigError` for an unknown parser."""
    return Gateway(
        engine,
        tokenizer,
        model_name=config.model.model_path,
        loop=loop,
        sampling=sampling_of(config.model),
        enable_thinking=config.model.enable_thinking,
        tool_call_parser=config.model.tool_call_parser,
        reasoning_parser=config.model.reasoning_parser,
        max_calls=config.rollout.max_calls,
        who_calls=owner.get,
    )


def session_kinds(config: RunConfig, gateway: Gateway, auxiliary: AuxiliaryModels) -> Mapping[SessionKind, OpenSession]:
    """How each kind of session is opened: for training, greedy beside it, and for evaluation. Every one records its
    calls."""
    greedy = Sampling(temperature=0.0, max_tokens=config.model.max_tokens)

    def opener(sampling: Sampling | None) -> OpenSession:
        def open_session(rollout_id: str, noise_seed: int) -> Session:
            policy = gateway.open(rollout_id, noise_seed=noise_seed, sampling=sampling)
            return RolloutSession(policy, auxiliary.open(rollout_id, noise_seed))

        return open_session

    return {
        "recorded": opener(None),
        "baseline": opener(greedy),
        "greedy": opener(greedy),
        "sampled": opener(None),
    }
