"""One rollout's models: the policy, and the auxiliary models beside it, until they are revoked.

In: the `Access` that one attempt has to each model. Out: what user code receives, what was noticed, the recorded calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from sharpen.errors import TokenCapError
from sharpen.types import Call, Outcome

GATEWAY = "gateway/"
"""Prefix of what is counted of the policy's calls, in the metrics of a rollout, beside the user's own."""
AUXILIARY = "auxiliary/"
"""Prefix of what is counted of auxiliary models."""


class Access(Protocol):
    """One model as one attempt may use it: a session of a gateway, or of an endpoint.

    `failure` is what went wrong with a call, by the model or by what serves it, and `failure_reason` that in one line.
    `counts` is what was noticed, for the statistics. `num_answers` counts the answers that the agent was handed, `cut`
    is whether its token limit cut the last one. `exhausted` is the error that stops the run, once a call was refused
    because the run has used up the model's tokens.

    `close` revokes it (calls still running are abandoned, later ones refused) and gives the recorded calls; it is
    quick and may be called from any thread. `allow` lets as many calls be made as so many rollouts may make, which one
    attempt makes.
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
    def num_answers(self) -> int: ...
    @property
    def cut(self) -> bool: ...
    @property
    def exhausted(self) -> TokenCapError | None: ...
    def allow(self, num_rollouts: int) -> None: ...
    def close(self) -> tuple[Call, ...]: ...


class RolloutModels:
    """The models of one attempt. `present` makes what user code receives of a model; None hands it over as it is.

    The policy is revoked once, by whoever comes first: the end of the workflow (`close`: the judge still needs the
    auxiliary models), or the time limit (`end`: all of them). From any thread.
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
        """Which auxiliary model could not be had, and why, in one line: a call failed by the model's serving side, and
        no repetition of it succeeded."""
        for name, access in self.auxiliary.items():
            if access.failure == Outcome.INFRASTRUCTURE:
                return f"a call of the auxiliary model {name!r} failed: {access.failure_reason}"
        return None

    @property
    def exhausted(self) -> TokenCapError | None:
        """The error of a call that came after the run had used up a model's tokens."""
        return next((access.exhausted for access in self.auxiliary.values() if access.exhausted is not None), None)

    @property
    def counts(self) -> dict[str, float]:
        """What was noticed of the policy's calls, and what the auxiliary models were used for."""
        parts = [(GATEWAY, self.policy), *((f"{AUXILIARY}{name}/", one) for name, one in self.auxiliary.items())]
        return {f"{prefix}{name}": value for prefix, access in parts for name, value in access.counts.items()}

    def close(self) -> tuple[Call, ...]:
        """Revoke the policy; its recorded calls."""
        with self._lock:
            if self._calls is None:
                self._calls = self.policy.close()
            return self._calls

    def end(self) -> tuple[Call, ...]:
        """Revoke all of them; the policy's recorded calls."""
        try:
            return self.close()
        finally:
            for access in self.auxiliary.values():
                access.close()
