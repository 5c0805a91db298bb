"""One attempt of one rollout: the user's workflow, then the judge, and the outcome classified by its cause.

In: a `Task`, its `RolloutModels`, the user's functions. Out: `Ending`. This is the failure boundary of user code:
whatever it raises becomes an outcome, except for bad input (a field that does not exist, an output of the wrong kind),
which would fail every rollout alike: that is raised, and stops the run.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import logging
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sharpen.errors import ConfigError, DatasetError
from sharpen.rollout.choices import returned_text
from sharpen.rollout.model_exceptions import declares_unusable, named_outcome
from sharpen.rollout.models import AUXILIARY, GATEWAY, RolloutModels
from sharpen.rollout.places import causes, describe, place_of_error
from sharpen.rollout.signature import judge_arguments, name_of, workflow_arguments
from sharpen.rollout.user_loop import owner
from sharpen.types import MODEL_CAUSED, Outcome, Task

log = logging.getLogger("sharpen.rollout")
user_log = logging.getLogger("sharpen.workflow")

CONNECTION_ERRORS = {
    "openai": {"APIConnectionError", "InternalServerError", "RateLimitError"},
    "httpx": {"TransportError"},
    "httpx2": {"TransportError"},
    "aiohttp": {"ClientConnectionError"},
}
"""Errors that mean unreachable or overloaded servers, by package (none of which is imported for it)."""

WORKFLOW = "workflow/"
"""Prefix of the workflow's own metrics, in what is shown and logged; a rollout has them under their plain names."""
JUDGE = "judge/"
"""Prefix of the judge's own metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an attempt ended. `reward` is set when the outcome is OK (None: the workflow gave none, and none is needed).

    Where the workflow says which calls take part, `call_rewards` holds what it wrote on each of them, by the call's
    index; the others are left out of training. None: all take part. `step_rewards` and `states` are those of `Rollout`.
    `answer` is the text that the workflow returned, where a request asked for several choices. `outside`: a server that
    could not be reached made it fail, and nothing that the model said. `counts` is false where another attempt's code
    made it fail. `members` are the endings of a group's rollouts, in order, where one attempt made all of them; `calls`
    are then the indices of the calls that each says are its own.
    """

    outcome: Outcome
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    call_rewards: Mapping[int, float] | None = None
    step_rewards: Mapping[int, float] = field(default_factory=dict)
    states: Mapping[int, str] = field(default_factory=dict)
    answer: str | None = None
    error: str | None = None
    outside: bool = False
    counts: bool = True
    members: tuple[Ending, ...] = ()
    calls: tuple[int, ...] = ()


class UserFunctions:
    """The workflow and the judge, checked, with the optional arguments that each one takes (`workflow_args` is one).

    Without `needs_reward` a workflow without judge may give none. `model_exceptions` names exceptions of the workflow
    that blame the model's answer (`rollout.model_exceptions`). Raises `ConfigError` for a wrong signature.

    A workflow with the attribute `whole_groups` makes all rollouts of a group in one run: it is called with
    `group_size` besides, and gives an output for each of them, or the exception that it failed with.
    """

    def __init__(
        self,
        workflow: Callable[..., Any],
        judge: Callable[..., Any] | None,
        workflow_args: Mapping[str, Any] | None = None,
        *,
        needs_reward: bool = True,
        model_exceptions: Sequence[str] = (),
    ) -> None:
        self.workflow = workflow
        self.judge = judge
        self._workflow_args = dict(workflow_args or {})
        self._needs_reward = needs_reward
        self._model_exceptions = model_exceptions
        self.whole_groups = bool(getattr(workflow, "whole_groups", False))
        self._workflow_takes = workflow_arguments(workflow)
        self._judge_takes = judge_arguments(judge) if judge is not None else frozenset()
        self._warned: set[str] = set()

    async def attempt(self, task: Task, models: RolloutModels, group_size: int = 1) -> Ending:
        """Run both functions on a copy of the task. Raises `ConfigError` or `DatasetError` for bad input only."""
        row = copy.deepcopy(task.row)
        try:
            further = self._optional(self._workflow_takes, models)
            if self.whole_groups:
                further["group_size"] = group_size
            output = await self.workflow(task=row, model=models.model, **further)
        except BaseException as error:  # the failure boundary of user code (see the module's docstring)
            failed = Outcome.INFRASTRUCTURE if models.auxiliary_failure is not None else models.policy.failure
            return self._failed(error, failed, Outcome.WORKFLOW_ERROR, task, models)
        failure = models.policy.failure
        calls = models.close()  # the judge, and what the workflow left running, make no calls in the agent's name
        if failure is not None and failure not in MODEL_CAUSED:
            return Ending(outcome=failure, error=f"a model call failed: {models.policy.failure_reason}")
        if (reason := models.auxiliary_failure) is not None:  # that the workflow swallowed
            return Ending(outcome=Outcome.INFRASTRUCTURE, error=reason)
        if self.whole_groups:
            return Ending(outcome=Outcome.OK, members=tuple(map(self._member, output)))
        try:
            reward, response, metrics = self._read_output(output)
        except ConfigError as error:
            if failure is not None:  # e.g. the workflow caught the context overflow and returned None
                return Ending(outcome=failure, error=str(error))
            raise
        answer = returned_text(response) if any(call.request is not None for call in calls) else None
        if self.judge is None and reward is None:
            return Ending(outcome=Outcome.OK, metrics=metrics, answer=answer)
        if self.judge is None:
            return dataclasses.replace(self._of_workflow(output, reward, metrics), answer=answer)
        try:
            further = self._optional(self._judge_takes, models)
            judgement = await self.judge(task=row, response=response, **further)
        except BaseException as error:  # the failure boundary of user code
            blameless = models.auxiliary_failure is not None
            caused = failure if failure in MODEL_CAUSED and not blameless else None
            return self._failed(error, caused, Outcome.JUDGE_ERROR, task, models)
        if (reason := models.auxiliary_failure) is not None:  # that the judge swallowed: its score means nothing
            return Ending(outcome=Outcome.JUDGE_ERROR, error=reason, outside=True)
        judged = getattr(judgement, "reward", judgement)
        of_judge = self._read_metrics(getattr(judgement, "metrics", None))
        metrics = {**metrics, **{f"{JUDGE}{name}": value for name, value in of_judge.items()}}
        ending = self._scored(judged, metrics, Outcome.JUDGE_ERROR, f"judge_func `{name_of(self.judge)}`")
        return dataclasses.replace(ending, answer=answer)

    def _member(self, output: Any) -> Ending:
        """How one rollout of a group ended, whose workflow made all of them."""
        if isinstance(output, Exception):
            return Ending(outcome=Outcome.WORKFLOW_ERROR, error=describe(output))
        reward, _, metrics = self._read_output(output)
        return dataclasses.replace(self._of_workflow(output, reward, metrics), calls=tuple(output.calls))

    def _of_workflow(self, output: Any, reward: Any, metrics: dict[str, float]) -> Ending:
        """The ending of a workflow that gave the reward itself."""
        ending = self._scored(reward, metrics, Outcome.WORKFLOW_ERROR, f"workflow_func `{name_of(self.workflow)}`")
        return dataclasses.replace(
            ending,
            call_rewards=getattr(output, "call_rewards", None),
            step_rewards=getattr(output, "step_rewards", None) or {},
            states=getattr(output, "states", None) or {},
        )

    def _optional(self, names: frozenset[str], models: RolloutModels) -> dict[str, Any]:
        """Those of the optional arguments that a function takes; nothing in them is shared between attempts."""
        values: dict[str, Any] = {"logger": user_log}
        if "auxiliary_models" in names:
            values["auxiliary_models"] = dict(models.auxiliary_models)
        if "workflow_args" in names:
            values["workflow_args"] = copy.deepcopy(self._workflow_args)
        return {name: values[name] for name in names}

    def _failed(
        self,
        error: BaseException,
        failure: Outcome | None,
        otherwise: Outcome,
        task: Task,
        models: RolloutModels,
    ) -> Ending:
        run = owner.get()
        if isinstance(error, GeneratorExit) or (isinstance(error, asyncio.CancelledError) and run and run.cancelled):
            raise error  # our own cancellation
        for cause in causes(error):
            if isinstance(cause, DatasetError):
                place = place_of_error(cause)
                raise type(cause)(f"{cause}" + (f" (read at {place})" if place else "")) from error
        if isinstance(error, ConfigError) and failure is None:
            place = place_of_error(error)  # e.g. an output of the wrong kind, found while a Trinity workflow still ran
            raise ConfigError(f"{error}" + (f" (at {place})" if place else "")) from error
        text = describe(error)
        empty = [str(name) for name, value in task.row.items() if value is None]
        if empty:
            text += f" [task {task.id} has no value in: {', '.join(empty)}]"
        if failure is not None:
            return Ending(outcome=failure, error=text)
        outcome = self._outcome(error, otherwise, cut=models.policy.cut)
        outside = models.auxiliary_failure is not None or any(map(is_connection_error, causes(error)))
        return Ending(outcome=outcome, error=text, outside=outside)

    def _outcome(self, error: BaseException, otherwise: Outcome, *, cut: bool) -> Outcome:
        """What an exception of the workflow, or of the judge, says of its cause: the owner's own word first, then a
        server that could not be reached, then exceptions that are known or named, then an answer that was cut. In a
        judge only the owner's word counts, for the rest may be about the judge's own model."""
        if declares_unusable(error):
            return Outcome.TOKEN_LIMIT if cut else Outcome.UNUSABLE_ANSWER
        if otherwise != Outcome.WORKFLOW_ERROR:
            return otherwise
        if any(map(is_connection_error, causes(error))):
            return Outcome.INFRASTRUCTURE
        outcome = named_outcome(error, self._model_exceptions)
        if cut and outcome != Outcome.CALL_LIMIT and (outcome is not None or not isinstance(error, OSError)):
            return Outcome.TOKEN_LIMIT
        return outcome or otherwise

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
        if self.judge is None and output_reward is None and self._needs_reward:
            raise ConfigError(
                f"workflow_func `{name}` returned no reward and there is no judge_func: "
                "return WorkflowOutput(reward=...), or pass a judge_func"
            )
        if self.judge is not None and output_reward is not None:
            self._warn_once(
                "reward", "workflow_func `%s` returns a reward, but there is a judge_func: the judge's counts", name
            )
        own = self._read_metrics(metrics)
        taken = (GATEWAY, AUXILIARY, WORKFLOW, JUDGE)
        return output_reward, response, {f"{WORKFLOW * name.startswith(taken)}{name}": own[name] for name in own}

    def _scored(self, reward: Any, metrics: dict[str, float], otherwise: Outcome, who: str) -> Ending:
        number = as_number(reward)
        if number is None:
            return Ending(outcome=otherwise, error=f"{who} gave {_shown(reward)} as reward: it must be a number")
        if not math.isfinite(number):
            return Ending(outcome=otherwise, error=f"{who} gave {number} as reward: it must be a finite number")
        return Ending(outcome=Outcome.OK, reward=number, metrics=metrics)

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
