"""One attempt of one rollout: runs the user's workflow, then the judge, and classifies the outcome by its cause.

In: a `Task`, its `RolloutModels`, the user's functions. Out: `Ending`. This is the failure boundary of user code:
whatever it raises becomes an outcome, and so does what its objects raise while they are read. Bad input (a field that
does not exist, an output of the wrong kind) is a failure too; the ending holds its error, with which the runner stops
if no rollout has done better.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from sharpen.agent.rollout.choices import returned_text
from sharpen.agent.rollout.models import AUXILIARY, GATEWAY, RolloutModels
from sharpen.agent.rollout.places import (
    causes,
    declares_unusable,
    describe,
    forgotten_await,
    hint,
    hint_of_model,
    named_outcome,
    place_of_error,
    short_repr,
    stored_text,
    traceback_of,
)
from sharpen.agent.rollout.retries import Ending
from sharpen.agent.rollout.rewards import as_number, problem_of_reward, with_team
from sharpen.agent.rollout.signature import judge_arguments, name_of, workflow_arguments
from sharpen.agent.rollout.user_loop import owner
from sharpen.errors import ConfigError, DatasetError
from sharpen.types import MODEL_CAUSED, Outcome, Task, metric_named

log = logging.getLogger("sharpen.rollout")
user_log = logging.getLogger("sharpen.workflow")

CONNECTION_ERRORS = {
    "openai": {"APIConnectionError", "InternalServerError", "RateLimitError"},
    "httpx": {"TransportError"},
    "httpx2": {"TransportError"},
    "aiohttp": {"ClientConnectionError"},
    "websockets": {"ConnectionClosed"},
}
"""Errors that mean an unreachable or overloaded server, by package. None of the packages is imported for this."""

WORKFLOW = "workflow/"
"""Prefix of the workflow's own metrics where they are displayed or logged; a rollout holds them without it."""
JUDGE = "judge/"
"""Prefix of the judge's own metrics."""
HAS_ARGUMENTS = "has_workflow_args"
"""Attribute of a workflow function that was made with the run's `workflow_args`: it is not given them again."""
MAX_NAME = 200
"""Characters of a metric's name."""


class UserFunctions:
    """The user's workflow and judge, with the optional arguments that each takes (such as `workflow_args`).

    `own_arguments` holds the `workflow_args` of evaluation sets that have their own, by the set's name. Without
    `needs_reward`, a workflow without a judge may return no reward. A score without one of `needs_metrics` is a failure
    of who gave it, since the algorithm compares these. `model_exceptions` names exceptions of the
    workflow that are caused by the model's answer (`rollout.model_exceptions`). Raises `ConfigError` for a wrong
    signature.

    A workflow with the attribute `whole_groups` makes all rollouts of a group in one call: it also takes `group_size`,
    and returns an output for each rollout, or the exception with which that rollout failed.
    """

    def __init__(
        self,
        workflow: Callable[..., Any],
        judge: Callable[..., Any] | None,
        workflow_args: Mapping[str, Any] | None = None,
        *,
        own_arguments: Mapping[str, Mapping[str, Any]] | None = None,
        needs_reward: bool = True,
        needs_metrics: Sequence[str] = (),
        model_exceptions: Sequence[str] = (),
    ) -> None:
        self.workflow = workflow
        self.judge = judge
        self._workflow_args = dict(workflow_args or {})
        self._own_arguments = dict(own_arguments or {})
        self._needs_reward = needs_reward
        self._needs_metrics = tuple(needs_metrics)
        self._model_exceptions = model_exceptions
        self.whole_groups = bool(getattr(workflow, "whole_groups", False))
        self._workflow_takes = workflow_arguments(workflow)
        self._judge_takes = judge_arguments(judge) if judge is not None else frozenset()
        self._warned: set[str] = set()

    async def attempt(self, task: Task, models: RolloutModels, group_size: int = 1) -> Ending:
        """Run workflow and judge on a copy of the task. Raises nothing but its own cancellation."""
        try:
            return await self._attempt(task, models, group_size)
        except BaseException as error:  # of bad input, or of the user's objects while they were read
            if _is_our_cancellation(error):
                raise
            if isinstance(error, ConfigError | DatasetError):
                return _refused(error, Outcome.WORKFLOW_ERROR, error)
            return Ending(outcome=Outcome.WORKFLOW_ERROR, error=describe(error), traceback=traceback_of(error))

    async def _attempt(self, task: Task, models: RolloutModels, group_size: int) -> Ending:
        row = self._row_of(task)
        try:
            optional = self._optional_arguments(self._workflow_takes, task, models)
            if self.whole_groups:
                optional["group_size"] = group_size
            output = await self.workflow(task=row, model=models.model, **optional)
        except BaseException as error:  # the failure boundary of user code (see the module's docstring)
            failed = Outcome.INFRASTRUCTURE if models.auxiliary_failure is not None else models.policy.failure
            return self._ending_of_error(error, failed, Outcome.WORKFLOW_ERROR, task, models)
        failure = models.policy.failure
        calls = models.close()  # neither the judge nor tasks that the workflow left running may call the agent's model
        if failure is not None and failure not in MODEL_CAUSED:
            return Ending(outcome=failure, error=f"a model call failed: {models.policy.failure_reason}")
        if (reason := models.auxiliary_failure) is not None:  # the workflow caught the error
            return Ending(outcome=Outcome.INFRASTRUCTURE, error=reason)
        if self.whole_groups:
            return Ending(outcome=Outcome.OK, members=tuple(map(self._ending_of_member, output)))
        try:
            reward, response, metrics = self._read_output(output)
        except ConfigError as error:
            if failure is not None:  # e.g. the workflow caught the context overflow and returned None
                return Ending(outcome=failure, error=f"{error}{hint_of_model(failure)}")
            raise
        answer = returned_text(response) if any(call.request is not None for call in calls) else None
        if self.judge is None and reward is None:
            return with_team(Ending(outcome=Outcome.OK, metrics=metrics, answer=answer), output, calls)
        if self.judge is None:
            ending = self._with_parts(self._ending_of_output(output, reward, metrics), output)
            return with_team(dataclasses.replace(ending, answer=answer), output, calls)
        try:
            optional = self._optional_arguments(self._judge_takes, task, models)
            judgement = await self.judge(task=row, response=response, **optional)
            judged, of_judge = getattr(judgement, "reward", judgement), getattr(judgement, "metrics", None)
            metrics |= {f"{JUDGE}{name}": value for name, value in self._read_metrics(of_judge).items()}
            ending = self._ending_of_reward(judged, metrics, Outcome.JUDGE_ERROR, f"judge_func `{name_of(self.judge)}`")
        except BaseException as error:  # the failure boundary of user code
            blameless = models.auxiliary_failure is not None
            caused = failure if failure in MODEL_CAUSED and not blameless else None
            return self._ending_of_error(error, caused, Outcome.JUDGE_ERROR, task, models)
        if (reason := models.auxiliary_failure) is not None:  # the judge caught the error: its score is invalid
            return Ending(outcome=Outcome.JUDGE_ERROR, error=reason, server_failed=True)
        return with_team(dataclasses.replace(ending, answer=answer), output, calls)

    def _ending_of_member(self, output: Any) -> Ending:
        """Return the ending of one rollout of a whole group."""
        if isinstance(output, Exception):
            return Ending(outcome=Outcome.WORKFLOW_ERROR, error=describe(output), traceback=traceback_of(output))
        reward, _, metrics = self._read_output(output)
        return self._with_parts(self._ending_of_output(output, reward, metrics), output)

    def _with_parts(self, ending: Ending, output: Any) -> Ending:
        """Return the ending with what an output that knows its calls has beside it."""
        if not (self.whole_groups or getattr(self.workflow, HAS_ARGUMENTS, False)):
            return ending
        beside = {name: self._ending_of_member(part) for name, part in getattr(output, "beside", {}).items()}
        return dataclasses.replace(ending, calls=tuple(output.calls), beside=beside)

    def _ending_of_output(self, output: Any, reward: Any, metrics: dict[str, float]) -> Ending:
        """Return the ending of a workflow that sets the reward itself."""
        who = f"workflow_func `{name_of(self.workflow)}`"
        return dataclasses.replace(
            self._ending_of_reward(reward, metrics, Outcome.WORKFLOW_ERROR, who),
            call_rewards=_by_index(getattr(output, "call_rewards", None)),
            step_rewards=_by_index(getattr(output, "step_rewards", None)) or {},
            states={index: _text(state) for index, state in (getattr(output, "states", None) or {}).items()},
        )

    def _row_of(self, task: Task) -> dict[str, Any]:
        """Return a copy of the task's row. It holds the run's `workflow_args` too, if there are any, unless the dataset
        has a field of that name or the workflow was made with them."""
        row = cast("dict[str, Any]", copy.deepcopy(task.row))  # user code gets a plain dict
        arguments = self._arguments_of(task)
        if arguments and "workflow_args" not in row and not getattr(self.workflow, HAS_ARGUMENTS, False):
            row["workflow_args"] = arguments
        return row

    def _arguments_of(self, task: Task) -> dict[str, Any]:
        """Return a copy of the `workflow_args` of the task's evaluation set, or of the run."""
        return copy.deepcopy(dict(self._own_arguments.get(task.task_set or "", self._workflow_args)))

    def _optional_arguments(self, names: frozenset[str], task: Task, models: RolloutModels) -> dict[str, Any]:
        """Return the values of the optional arguments `names`. Attempts share none of them but the logger."""
        values: dict[str, Any] = {"logger": user_log, "task_set": task.task_set}
        if "auxiliary_models" in names:
            values["auxiliary_models"] = dict(models.auxiliary_models)
        if "workflow_args" in names:
            values["workflow_args"] = self._arguments_of(task)
        return {name: values[name] for name in names}

    def _ending_of_error(
        self,
        error: BaseException,
        failure: Outcome | None,
        otherwise: Outcome,
        task: Task,
        models: RolloutModels,
    ) -> Ending:
        if _is_our_cancellation(error):
            raise error
        for cause in causes(error):
            if isinstance(cause, DatasetError):
                place = place_of_error(cause)
                refusal = type(cause)(f"{cause}" + (f" (read at {place})" if place else ""))
                return _refused(refusal, otherwise, error)
        if isinstance(error, ConfigError) and failure is None:
            place = place_of_error(error)  # e.g. an output of the wrong kind, raised within a Trinity workflow
            return _refused(ConfigError(f"{error}" + (f" (at {place})" if place else "")), otherwise, error)
        text = describe(error)
        empty = [str(name) for name, value in task.row.items() if value is None]
        if empty:
            text += f" [task {task.id} has no value in: {', '.join(empty)}]"
        if failure is not None:
            return Ending(outcome=failure, error=f"{text}{hint_of_model(failure)}", traceback=traceback_of(error))
        outcome = self._outcome(error, otherwise, cut=models.policy.cut)
        text += hint(error, outcome)
        server_failed = models.auxiliary_failure is not None or any(map(is_connection_error, causes(error)))
        return Ending(outcome=outcome, error=text, traceback=traceback_of(error), server_failed=server_failed)

    def _outcome(self, error: BaseException, otherwise: Outcome, *, cut: bool) -> Outcome:
        """Classify an exception of the workflow or the judge.

        In order: the user's own `UnusableAnswerError`, an unreachable server, exceptions that are known or named in the
        settings, an answer cut at its token limit. For a judge only the first counts, since other exceptions may be
        about the judge's own model. `otherwise` is the outcome if none applies.
        """
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
        """Return reward, response and metrics of a `WorkflowOutput`, an object like it, or a plain number."""
        name = name_of(self.workflow)
        if as_number(output) is not None:
            output_reward, response, metrics = output, None, None
        elif hasattr(output, "reward") or hasattr(output, "response"):
            output_reward = getattr(output, "reward", None)
            response = getattr(output, "response", None)
            metrics = getattr(output, "metrics", None)
        elif missing := forgotten_await(output):
            raise ConfigError(f"workflow_func `{name}` returned {short_repr(output)}: {missing}")
        else:
            raise ConfigError(
                f"workflow_func `{name}` returned {short_repr(output)}: return WorkflowOutput(response=...) for the "
                "judge, WorkflowOutput(reward=...), or a number"
            )
        if missing := forgotten_await(response):
            raise ConfigError(f"workflow_func `{name}` gave {short_repr(response)} as response: {missing}")
        if self.judge is None and output_reward is None and self._needs_reward:
            raise ConfigError(
                f"workflow_func `{name}` returned no reward and there is no judge_func: "
                "return WorkflowOutput(reward=...), or give one (`judge` in a file)"
            )
        if self.judge is not None and output_reward is not None:
            self._warn_once(
                "reward", "workflow_func `%s` returns a reward, but there is a judge_func: the judge's is used", name
            )
        own = self._read_metrics(metrics)
        reserved = (GATEWAY, AUXILIARY, WORKFLOW, JUDGE)
        return output_reward, response, {f"{WORKFLOW * name.startswith(reserved)}{name}": own[name] for name in own}

    def _ending_of_reward(self, reward: Any, metrics: dict[str, float], otherwise: Outcome, who: str) -> Ending:
        number = as_number(reward)
        if (problem := problem_of_reward(number)) is not None:
            shown = short_repr(reward) if number is None else number
            problem = forgotten_await(reward) or f"it must be {problem}"
            return Ending(outcome=otherwise, error=f"{who} gave {shown} as reward: {problem}")
        if missing := [name for name in self._needs_metrics if metric_named(metrics, name) is None]:
            named = ", ".join(map(repr, missing))
            return Ending(
                outcome=otherwise,
                error=f"{who} gave no finite number as metric {named}, which loss.advantage_args.weights names "
                f"(it gave {', '.join(map(repr, metrics)) or 'none'}): return all of them with each score",
            )
        return Ending(outcome=Outcome.OK, reward=number, metrics=metrics)

    def _read_metrics(self, metrics: Any) -> dict[str, float]:
        """Return the finite numbers among the metrics; skip anything else, with one warning for each name."""
        if metrics is None:
            return {}
        if not isinstance(metrics, Mapping):
            self._warn_once("metrics", "metrics must be a dict of numbers, not %s: skipped", short_repr(metrics))
            return {}
        read: dict[str, float] = {}
        for name, value in metrics.items():
            number = as_number(value)
            known = stored_text(name)[:MAX_NAME] if isinstance(name, str) else short_repr(name)
            if not isinstance(name, str):
                self._warn_once("metrics", "the name of a metric is %s, not text: skipped", known)
            elif number is None or not math.isfinite(number):
                self._warn_once(
                    f"metrics/{known}", "metric %r is %s, not a finite number: skipped", known, short_repr(value)
                )
            else:
                read[known] = number
        return read

    def _warn_once(self, key: str, message: str, *arguments: Any) -> None:
        if key not in self._warned:
            self._warned.add(key)
            log.warning(message, *arguments)


def is_connection_error(error: BaseException) -> bool:
    """Whether a server could not be reached, or reported an error of its own."""
    if isinstance(error, ConnectionError):
        return True
    kinds = [(kind.__module__.split(".")[0], kind.__name__) for kind in type(error).__mro__]
    return any(name in CONNECTION_ERRORS.get(package, ()) for package, name in kinds)


def _refused(refusal: ConfigError | DatasetError, outcome: Outcome, error: BaseException) -> Ending:
    """Return the ending of an attempt with bad input, which `error` is about."""
    return Ending(outcome=outcome, error=stored_text(str(refusal)), traceback=traceback_of(error), refusal=refusal)


def _is_our_cancellation(error: BaseException) -> bool:
    run = owner.get()
    return isinstance(error, GeneratorExit) or bool(
        isinstance(error, asyncio.CancelledError) and run is not None and run.cancelled
    )


def _by_index(rewards: Mapping[Any, float] | None) -> Mapping[int, float] | None:
    """Return rewards of calls by their indices; None if there are none, or they are of agents (see `team`). Raises
    `ConfigError` for one that is no reward."""
    if rewards is None or any(isinstance(key, str) for key in rewards):
        return None
    for index, reward in rewards.items():
        if (problem := problem_of_reward(as_number(reward))) is not None:
            raise ConfigError(f"the reward of call {index} is {short_repr(reward)}: it must be {problem}")
    return rewards


def _text(state: Any) -> str:
    if not isinstance(state, str):
        raise ConfigError(f"the state of a step is {short_repr(state)}: it must be text")
    return stored_text(state)
