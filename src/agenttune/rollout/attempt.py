"""One attempt of one rollout: the user's workflow, then the judge, and the outcome classified by its cause.

In: a `Task`, a `Session`, the user's functions. Out: `Ended`. This is the failure boundary of user code: whatever it
raises becomes an outcome, except for bad input (a field that does not exist, an output of the wrong kind), which would
fail every rollout alike: that is raised, and stops the run.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import numbers
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from agenttune.errors import ConfigError, DatasetError
from agenttune.rollout.places import causes, describe, place_of_error
from agenttune.rollout.signature import judge_arguments, name_of, workflow_arguments
from agenttune.rollout.user_loop import owner
from agenttune.types import MODEL_CAUSED, Call, Outcome, Task

log = logging.getLogger("agenttune.rollout")
user_log = logging.getLogger("agenttune.workflow")

CONNECTION_ERRORS = {
    "openai": {"APIConnectionError", "InternalServerError", "RateLimitError"},
    "httpx": {"TransportError"},
    "httpx2": {"TransportError"},
    "aiohttp": {"ClientConnectionError"},
}
"""Errors that mean unreachable or overloaded servers, by package (none of which is imported for it)."""


GATEWAY = "gateway/"
"""Prefix of the metrics that a session counts, beside the user's own."""


class Session(Protocol):
    """The model as one attempt sees it. `failure` is what the model or the engine did wrong, if anything, in one line
    in `failure_reason`. `counts` is what was noticed on the way (malformed tool calls, forks), for the statistics.

    `close` revokes it (calls still running are abandoned, later ones refused) and gives the recorded calls; it is quick
    and may be called from any thread.
    """

    @property
    def model(self) -> Any: ...
    @property
    def failure(self) -> Outcome | None: ...
    @property
    def failure_reason(self) -> str | None: ...
    @property
    def counts(self) -> Mapping[str, float]: ...
    def close(self) -> tuple[Call, ...]: ...


class OpenedSession:
    """A session that is closed once, by whoever comes first: the end of the workflow, or the time limit."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._calls: tuple[Call, ...] | None = None

    @property
    def model(self) -> Any:
        return self._session.model

    @property
    def failure(self) -> Outcome | None:
        return self._session.failure

    @property
    def failure_reason(self) -> str:
        return self._session.failure_reason or "no reason given"

    @property
    def counts(self) -> dict[str, float]:
        return {f"{GATEWAY}{name}": value for name, value in self._session.counts.items()}

    def close(self) -> tuple[Call, ...]:
        with self._lock:
            if self._calls is None:
                self._calls = self._session.close()
            return self._calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How an attempt ended. `reward` is set when the outcome is OK."""

    outcome: Outcome
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None


class UserFunctions:
    """The workflow and the judge, checked, with the optional arguments that each one takes."""

    def __init__(
        self,
        workflow: Callable[..., Any],
        judge: Callable[..., Any] | None,
        auxiliary_models: Mapping[str, Any],
    ) -> None:
        self.workflow = workflow
        self.judge = judge
        optional = {"auxiliary_models": dict(auxiliary_models), "logger": user_log}
        self._for_workflow = {name: optional[name] for name in workflow_arguments(workflow)}
        self._for_judge = {name: optional[name] for name in judge_arguments(judge)} if judge is not None else {}
        self._warned: set[str] = set()

    async def attempt(self, task: Task, session: OpenedSession) -> Ended:
        """Run both functions on a copy of the task. Raises `ConfigError` or `DatasetError` for bad input only."""
        row = copy.deepcopy(task.row)
        try:
            output = await self.workflow(task=row, model=session.model, **self._for_workflow)
        except BaseException as error:  # the failure boundary of user code (see the module's docstring)
            return self._failed(error, session.failure, Outcome.WORKFLOW_ERROR, task)
        failure = session.failure
        session.close()  # the judge, and what the workflow left running, make no calls in the agent's name
        if failure is not None and failure not in MODEL_CAUSED:
            return Ended(outcome=failure, error=f"a model call failed: {session.failure_reason}")
        try:
            reward, response, metrics = self._read_output(output)
        except ConfigError as error:
            if failure is not None:  # e.g. the workflow caught the context overflow and returned None
                return Ended(outcome=failure, error=str(error))
            raise
        if self.judge is None:
            return self._scored(reward, metrics, Outcome.WORKFLOW_ERROR, f"workflow_func `{name_of(self.workflow)}`")
        try:
            judgement = await self.judge(task=row, response=response, **self._for_judge)
        except BaseException as error:  # the failure boundary of user code
            caused = failure if failure in MODEL_CAUSED else None
            return self._failed(error, caused, Outcome.JUDGE_ERROR, task)
        judged = getattr(judgement, "reward", judgement)
        metrics = {**metrics, **self._read_metrics(getattr(judgement, "metrics", None))}
        return self._scored(judged, metrics, Outcome.JUDGE_ERROR, f"judge_func `{name_of(self.judge)}`")

    def _failed(self, error: BaseException, failure: Outcome | None, otherwise: Outcome, task: Task) -> Ended:
        run = owner.get()
        if isinstance(error, GeneratorExit) or (isinstance(error, asyncio.CancelledError) and run and run.cancelled):
            raise error  # our own cancellation
        for cause in causes(error):
            if isinstance(cause, DatasetError):
                place = place_of_error(cause)
                raise type(cause)(f"{cause}" + (f" (read at {place})" if place else "")) from error
        text = describe(error)
        empty = [str(name) for name, value in task.row.items() if value is None]
        if empty:
            text += f" [task {task.id} has no value in: {', '.join(empty)}]"
        if failure is not None:
            return Ended(outcome=failure, error=text)
        unreachable = otherwise == Outcome.WORKFLOW_ERROR and any(is_connection_error(cause) for cause in causes(error))
        return Ended(outcome=Outcome.INFRASTRUCTURE if unreachable else otherwise, error=text)

    def _read_output(self, output: Any) -> tuple[Any, Any, dict[str, float]]:
        """(reward, response, metrics) of a `WorkflowOutput`, of an object like it, or of a plain number."""
        name = name_of(self.workflow)
        if as_number(output) is not None:
            output_reward, response, metrics = output, None, None
        elif hasattr(output, "reward") or hasattr(output, "response"):
            output_reward = getattr(output, "reward", None)
            response = getattr(output, "response", None)
            metrics = getattr(output, "metrics", None)
        else:
            raise ConfigError(
                f"workflow_func `{name}` returned {_shown(output)}: return WorkflowOutput(response=...) for the judge, "
                "WorkflowOutput(reward=...), or a number"
            )
        if self.judge is None and output_reward is None:
            raise ConfigError(
                f"workflow_func `{name}` returned no reward and there is no judge_func: "
                "return WorkflowOutput(reward=...), or pass a judge_func"
            )
        if self.judge is not None and output_reward is not None:
            self._warn_once(
                "reward", "workflow_func `%s` returns a reward, but there is a judge_func: the judge's counts", name
            )
        return output_reward, response, self._read_metrics(metrics)

    def _scored(self, reward: Any, metrics: dict[str, float], otherwise: Outcome, who: str) -> Ended:
        number = as_number(reward)
        if number is None:
            return Ended(outcome=otherwise, error=f"{who} gave {_shown(reward)} as reward: it must be a number")
        if not math.isfinite(number):
            return Ended(outcome=otherwise, error=f"{who} gave {number} as reward: it must be a finite number")
        return Ended(outcome=Outcome.OK, reward=number, metrics=metrics)

    def _read_metrics(self, metrics: Any) -> dict[str, float]:
        """The finite numbers among the metrics; anything else is skipped, with one warning for each name."""
        if metrics is None:
            return {}
        if not isinstance(metrics, Mapping):
            self._warn_once("metrics", "metrics must be a dict of numbers, not %s: skipped", _shown(metrics))
            return {}
        read: dict[str, float] = {}
        for name, value in metrics.items():
            number = as_number(value)
            if number is None or not math.isfinite(number):
                self._warn_once(f"metrics/{name}", "metric %r is %s, not a finite number: skipped", name, _shown(value))
            else:
                read[str(name)] = number
        return read

    def _warn_once(self, key: str, message: str, *arguments: Any) -> None:
        if key not in self._warned:
            self._warned.add(key)
            log.warning(message, *arguments)


def as_number(value: Any) -> float | None:
    """Python and numpy numbers, booleans, and one-element arrays or tensors without dimensions, as float."""
    if isinstance(value, numbers.Real):
        return float(value)
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        return as_number(value.item())
    return None


def is_connection_error(error: BaseException) -> bool:
    """Whether a server could not be reached, or answered that the failure is its own."""
    if isinstance(error, ConnectionError):
        return True
    kinds = [(kind.__module__.split(".")[0], kind.__name__) for kind in type(error).__mro__]
    return any(name in CONNECTION_ERRORS.get(package, ()) for package, name in kinds)


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return f"{text[:80]} ({type(value).__name__})"
