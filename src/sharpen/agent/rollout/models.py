"""The models of one rollout: the policy and the auxiliary models, until they are revoked.

In: the `Access` of one attempt to each model. Out: the model objects for user code, counts, the recorded calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from sharpen.errors import TokenCapError
from sharpen.types import Call, Outcome

GATEWAY = "gateway/"
"""Prefix of the policy's counts in a rollout's metrics."""
AUXILIARY = "auxiliary/"
"""Prefix of the auxiliary models' counts in a rollout's metrics."""


class Access(Protocol):
    """One attempt's access to one model: a session of a gateway, or of an endpoint.

    `failure` is why a call failed, caused by the model or by its server, and `failure_reason` says so in one line.
    `counts` are numbers for the statistics. `num_answers` counts the answers that the agent received (None if unknown);
    `cut` says whether the last one stopped at its token limit. `exhausted` is the error that stops the run once a call
    was refused because the run has used up the model's tokens.

    `close` revokes the access (calls in progress are abandoned, later ones refused) and returns the recorded calls. It
    is quick and may be called from any thread. After that, `discard` removes what was kept until the judge has
    looked at it (the folders of commands). `allow` multiplies the limit of calls, for an attempt that makes several
    rollouts.
    """

    @property
    def model(self) -> Any: ...
    @property
    def failure(self) -> Outcome | None: ...
    @property
    def failure_reason(self) -> str | None: ...
    @property
    def counts(self) -> Mapping[str, float]: ...
    @property
    def num_answers(self) -> int | None: ...
    @property
    def cut(self) -> bool: ...
    @property
    def exhausted(self) -> TokenCapError | None: ...
    def allow(self, num_rollouts: int) -> None: ...
    def close(self) -> tuple[Call, ...]: ...
    def discard(self) -> None: ...


class RolloutModels:
    """The models of one attempt. `present` converts a model to the object that user code receives; None: unchanged.

    At the end of the workflow `close` revokes the policy (the judge still needs the auxiliary models); at the time
    limit `end` revokes all models. Both may be called repeatedly, from any thread.
    """

    def __init__(
        self,
        policy: Access,
        auxiliary: Mapping[str, Access] | None = None,
        present: Callable[[Any], Any] | None = None,
    ) -> None:
        self.policy = policy
        self.auxiliary = auxiliary or {}
        self.model = policy.model if present is None else present(policy.model)
        """The policy, as the workflow receives it."""
        self.auxiliary_models = {
            name: access.model if present is None else present(access.model) for name, access in self.auxiliary.items()
        }
        """The auxiliary models, by name, as workflow and judge receive them."""
        self._lock = threading.Lock()
        self._calls: tuple[Call, ...] | None = None

    @property
    def auxiliary_failure(self) -> str | None:
        """One line about an auxiliary model whose server failed a call, with no successful retry; None if none did."""
        for name, access in self.auxiliary.items():
            if access.failure == Outcome.INFRASTRUCTURE:
                return f"a call of the auxiliary model {name!r} failed: {access.failure_reason}"
        return None

    @property
    def exhausted(self) -> TokenCapError | None:
        """The error of a call that was refused because the run has used up a model's tokens."""
        return next((access.exhausted for access in self.auxiliary.values() if access.exhausted is not None), None)

    @property
    def counts(self) -> dict[str, float]:
        """The counts of the policy and of the auxiliary models, with their prefixes."""
        parts = [(GATEWAY, self.policy), *((f"{AUXILIARY}{name}/", one) for name, one in self.auxiliary.items())]
        return {f"{prefix}{name}": value for prefix, access in parts for name, value in access.counts.items()}

    def close(self) -> tuple[Call, ...]:
        """Revoke the policy and return its recorded calls."""
        with self._lock:
            if self._calls is None:
                self._calls = self.policy.close()
            return self._calls

    def end(self) -> tuple[Call, ...]:
        """Revoke all models and return the policy's recorded calls."""
        try:
            return self.close()
        finally:
            for access in self.auxiliary.values():
                access.close()
            for access in (self.policy, *self.auxiliary.values()):
                access.discard()
