"""A Trinity `Workflow` class as the asynchronous function that rollouts run.

In: the class (or its registered name), the run's `task_args` and `workflow_args`. Out: `async def (task, model,
auxiliary_models)`, whose result holds the reward of each call. Each rollout gets a `Task`, a `ModelWrapper` and a
workflow object of its own.

What comes of the experiences that a workflow returns, `results` says. A class with `can_repeat` makes all rollouts of a
group in one run (`group`), unless its `run` treats the answers one by one (`workflow.each_alone`): then that is left to
the runner.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import typing
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sharpen.agent.rollout.attempt import HAS_ARGUMENTS
from sharpen.agent.rollout.user_loop import owner
from sharpen.compat.trinity.model import ModelWrapper
from sharpen.compat.trinity.registry import REWARD_FUNCTIONS, WORKFLOWS
from sharpen.compat.trinity.results import STEP_REWARD, WorkflowResult, differs, results_of
from sharpen.compat.trinity.rewards import check_reward_function
from sharpen.compat.trinity.task import TasksetConfig, generation_config, task_of
from sharpen.compat.trinity.workflow import Workflow, overrides
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError

log = logging.getLogger("sharpen.workflow")

LAST_STEP_COUNTS = "step_wise_grpo"
"""The advantage that is defined by the last step's reward: rewards that differ within a rollout are expected there."""

WorkflowFunction = Callable[..., Awaitable["WorkflowResult | list[WorkflowResult | ValueError]"]]


def configured_workflow(workflow: Any, judge: Any, config: RunConfig) -> Any:
    """What rollouts run: a function as it is, a `Workflow` class (or a registered name, or where either is) as a
    function. Raises `ConfigError` as `workflow_function` does, and for a judge beside a `Workflow`.
    """
    if isinstance(workflow, str):
        workflow = WORKFLOWS.get(workflow)
    if not (isinstance(workflow, type) and issubclass(workflow, Workflow)):
        _check_not_of_trinity(workflow)
        if given := sorted(config.task_args):
            log.warning("task_args.%s: no effect: the workflow is a function, which reads the row", "/".join(given))
        for name, own in config.evaluation.own.items():
            if own.workflow is not None or own.task_args is not None:
                log.warning(
                    "evaluation.own.%s: only workflow_args has an effect: the workflow is a function, which does all "
                    "tasks (it may take `task_set`, the set's name)",
                    name,
                )
        return workflow
    if judge is not None:
        raise ConfigError(
            f"{workflow.__qualname__} is a Trinity Workflow, which sets the rewards itself: leave the judge out"
        )
    training = workflow_function(workflow, TasksetConfig.of(config.task_args), config.workflow_args, *_uses(config))
    by_set = {name: _function_of_set(workflow, config, name) for name in config.evaluation.own}
    return _choose_by_set(training, by_set) if by_set else training


def _check_not_of_trinity(workflow: Any) -> None:
    """Raise `ConfigError` for a workflow class of a Trinity-RFT that is installed."""
    for base in workflow.__mro__ if isinstance(workflow, type) else ():
        if base.__module__.startswith("trinity."):
            raise ConfigError(
                f"{workflow.__qualname__} is a workflow class of the Trinity-RFT that is installed "
                f"({base.__module__}): pass --trinity-imports, so that its module gets Sharpen's classes, or import "
                "them from sharpen.compat.trinity"
            )


def _function_of_set(workflow: type[Workflow], config: RunConfig, name: str) -> WorkflowFunction:
    """The function that runs the tasks of an evaluation set that has something of its own."""
    own = config.evaluation.own[name]
    task_args = config.task_args if own.task_args is None else own.task_args
    workflow_args = config.workflow_args if own.workflow_args is None else own.workflow_args
    return workflow_function(own.workflow or workflow, TasksetConfig.of(task_args), workflow_args, *_uses(config))


def _choose_by_set(training: WorkflowFunction, own: Mapping[str, WorkflowFunction]) -> WorkflowFunction:
    """One function for all tasks: that of the task's evaluation set, else that of training."""

    async def run_workflow(
        task: dict[str, Any],
        model: Any,
        auxiliary_models: Mapping[str, Any],
        task_set: str | None,
        group_size: int = 1,
    ) -> WorkflowResult | list[WorkflowResult | ValueError]:
        chosen = own.get(task_set or "", training)
        found = await chosen(task, model, auxiliary_models, task_set, group_size)
        if whole_groups == _whole_groups(chosen):
            return found
        if not isinstance(found, list):
            return [found]
        (only,) = found  # an evaluation set's groups have one rollout each
        if isinstance(only, ValueError):
            raise only
        return only

    whole_groups = _whole_groups(training)
    return _labelled(run_workflow, training.__qualname__, whole_groups=whole_groups)


def workflow_function(
    workflow: type[Workflow] | str,
    taskset: TasksetConfig,
    workflow_args: Mapping[str, Any],
    no_use_in: str | None = None,
    uses_steps: bool = False,
) -> WorkflowFunction:
    """The function that runs `workflow` on a task. Where rewards differ within a rollout, it says once that the
    algorithm `no_use_in` makes no use of that; with `uses_steps`, unless they are rewards of steps.

    Raises `ConfigError` for an unknown name, a class that is no `Workflow` or that cannot be constructed with a task
    and a model, an unknown reward function or sampling setting.
    """
    found = WORKFLOWS.get(workflow) if isinstance(workflow, str) else workflow
    if not (isinstance(found, type) and issubclass(found, Workflow)):
        raise ConfigError(f"{workflow!r} is not a subclass of sharpen.compat.trinity.Workflow")
    name = found.__qualname__
    asynchronous = _is_asynchronous(found)
    takes_auxiliary = _check_constructor(found)
    annotation = _annotation(found)
    reward_fn = _reward_function(taskset)
    generation_config(taskset.rollout_args)
    whole_groups = _makes_groups(found, asynchronous=asynchronous)
    warned = no_use_in is None

    async def run_workflow(
        task: dict[str, Any],
        model: Any,
        auxiliary_models: Mapping[str, Any],
        task_set: str | None = None,
        group_size: int = 1,
    ) -> WorkflowResult | list[WorkflowResult | ValueError]:
        nonlocal warned
        policy = ModelWrapper(model, enable_history=True)
        given = task_of(
            task,
            taskset,
            workflow_args,
            workflow=found,
            reward_fn=reward_fn,
            is_eval=policy.is_eval or task_set is not None,
            rollout=_rollout(),
            repeat_times=group_size,
        )
        auxiliary = {"auxiliary_models": _auxiliary_argument(annotation, auxiliary_models)} if takes_auxiliary else {}
        arguments = {"task": given, "model": policy, **auxiliary}
        if asynchronous:
            experiences = await _prepared(found, arguments, group_size).run_async()
        else:  # constructed in its thread too: what it opens may belong to one thread (a database connection)
            experiences = await asyncio.to_thread(lambda: _prepared(found, arguments, group_size).run())
        results = results_of(name, experiences, policy, str(given.task_id), group_size if whole_groups else None)
        if not warned and any(differs(result, uses_steps=uses_steps) for result in results):
            warned = True
            _warn_of_call_rewards(name, no_use_in, uses_steps)
        return results if whole_groups else results[0]  # type: ignore[return-value]

    return _labelled(run_workflow, name, whole_groups=whole_groups)


def _reward_function(taskset: TasksetConfig) -> Callable[..., Any] | None:
    """The class of the reward function. Raises `ConfigError` for one that does not exist, and for `reward_fn_args`
    that a built-in one does not take."""
    if taskset.reward_fn is None:
        return None
    reward_fn = check_reward_function(REWARD_FUNCTIONS.get(taskset.reward_fn), taskset.reward_fn)
    if taskset.reward_fn in REWARD_FUNCTIONS.built_in:
        try:
            reward_fn(**taskset.reward_fn_args)
        except TypeError as error:
            raise ConfigError(
                f"the reward function {taskset.reward_fn!r} does not take task_args.reward_fn_args "
                f"{dict(taskset.reward_fn_args)}: {error}"
            ) from error
    return reward_fn


def _warn_of_call_rewards(name: str, algorithm: str | None, uses_steps: bool) -> None:
    log.warning(
        "workflow %s rewards the calls of a rollout differently, but %s trains all of them with the rollout's "
        "reward, that of its last call%s",
        name,
        algorithm,
        f" (a reward of a step goes into exp.info[{STEP_REWARD!r}])" if uses_steps else "",
    )


def _labelled(function: Any, name: str, *, whole_groups: bool) -> WorkflowFunction:
    """The function with what `UserFunctions` reads of it."""
    function.__qualname__ = function.__name__ = name
    function.whole_groups = whole_groups
    setattr(function, HAS_ARGUMENTS, True)
    return function  # type: ignore[no-any-return]


def _whole_groups(function: WorkflowFunction) -> bool:
    return bool(getattr(function, "whole_groups", False))


def _auxiliary_argument(annotation: str, models: Mapping[str, Any]) -> list[Any] | None:
    """The auxiliary models as the constructor asks for them by its annotation; None without any."""
    if not models:
        return None
    wrappers = [ModelWrapper(model, enable_history=False) for model in models.values()]
    if "AsyncOpenAI" in annotation:
        return [wrapper.get_openai_async_client() for wrapper in wrappers]
    if "OpenAI" in annotation:
        return [wrapper.get_openai_client() for wrapper in wrappers]
    return wrappers


def _annotation(workflow: type[Workflow]) -> str:
    """The annotation of `auxiliary_models`, as text, in the constructor or the first base's that names it."""
    for base in workflow.__mro__:
        constructor = vars(base).get("__init__")
        if constructor is None or "auxiliary_models" not in inspect.signature(constructor).parameters:
            continue
        try:
            return str(typing.get_type_hints(constructor).get("auxiliary_models", ""))
        except (
            NameError,
            AttributeError,
            TypeError,
        ):  # a name that is imported for type checkers only: the text as written says it too
            return str(inspect.signature(constructor).parameters["auxiliary_models"].annotation)
    return ""


def _uses(config: RunConfig) -> tuple[str | None, bool]:
    """The configured algorithm, if it has no use for rewards that differ within a rollout (and is a known one), and
    whether it uses rewards of steps."""
    from sharpen.learning.algorithm.advantages import ADVANTAGES
    from sharpen.learning.algorithm.presets import PRESETS

    preset = PRESETS.get(config.algorithm.algorithm_type)
    name = config.loss.advantage or (preset.advantage if preset is not None else "")
    if name not in ADVANTAGES:
        return None, False
    has_use = ADVANTAGES[name].per_call or name == LAST_STEP_COUNTS
    return None if has_use else config.algorithm.algorithm_type, ADVANTAGES[name].per_step


def _rollout() -> str:
    """The id of the rollout that this code belongs to."""
    run = owner.get()
    return run.label if run is not None else ""


def _prepared(workflow: type[Workflow], arguments: Mapping[str, Any], group_size: int) -> Workflow:
    made = workflow(**arguments)
    if made.repeatable:
        made.set_repeat_times(group_size, 0)
    return made


def _makes_groups(workflow: type[Workflow], *, asynchronous: bool) -> bool:
    """Whether the class wants to make all rollouts of a group in one run."""
    run = workflow.run_async if asynchronous else workflow.run
    return bool(object.__new__(workflow).repeatable) and not getattr(run, "each_alone", False)


def _is_asynchronous(workflow: type[Workflow]) -> bool:
    """Whether `run_async` is meant: the only one that there is, or what the class says of itself."""
    has_run, has_run_async = overrides(workflow, "run"), overrides(workflow, "run_async")
    name = workflow.__qualname__
    if has_run and inspect.iscoroutinefunction(workflow.run):
        raise ConfigError(f"workflow {name}: run() is asynchronous; call it run_async()")
    if has_run_async and not inspect.iscoroutinefunction(workflow.run_async):
        raise ConfigError(f"workflow {name}: run_async() is not asynchronous; write `async def`, or call it run()")
    if has_run != has_run_async:
        return has_run_async
    if not has_run:
        raise ConfigError(f"workflow {name} has neither run() nor run_async(): write one of them")
    return bool(object.__new__(workflow).asynchronous)  # a property of the class in effect, in Trinity's older style


def _check_constructor(workflow: type[Workflow]) -> bool:
    """Whether the constructor takes auxiliary models. Raises `ConfigError` if it does not take a task and a model."""
    name = workflow.__qualname__
    if inspect.isabstract(workflow):
        missing = ", ".join(sorted(getattr(workflow, "__abstractmethods__", ())))
        raise ConfigError(f"workflow {name} is abstract: it lacks {missing}")
    signature = inspect.signature(workflow.__init__)
    for auxiliary in ({"auxiliary_models": None}, {}):
        try:
            signature.bind(None, task=None, model=None, **auxiliary)
        except TypeError as error:
            reason = str(error)
        else:
            return bool(auxiliary)
    raise ConfigError(
        f"workflow {name} cannot be constructed: {reason}; write "
        "`def __init__(self, *, task, model, auxiliary_models=None)`"
    )
