"""A Trinity `Workflow` class as the asynchronous function that rollouts run.

In: the class (or its registered name), the run's `task_args` and `workflow_args`. Out: `async def (task, model,
auxiliary_models)`, whose result holds the reward of each call. Each rollout gets a `Task`, a `ModelWrapper` and a
workflow object of its own.

What a workflow returns, and what comes of it:

- experiences of this rollout, each with a finite reward: the rollout's reward is that of the last call, and counts
  once; what was written on each call is kept, and never added up; calls that were not returned, or masked out, are not
  trained
- `exp.info["step_reward"]`: the reward of that step, which is added to those of the other steps where an algorithm uses
  rewards of steps; `exp.info["env_state_hash"]`: the state of the environment in which the step began
- no experience, one without a reward, or one whose reward is not finite: this rollout fails
- something that is no list of experiences, experiences of another rollout or of an auxiliary model, of several runs, or
  changed in place: a `ConfigError`, which stops the run

A class with `can_repeat` makes all rollouts of a group in one run (`group`), unless its `run` treats the answers one by
one (`workflow.each_alone`): then that is left to the runner.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import typing
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sharpen.compat.trinity.experience import Experience, is_number
from sharpen.compat.trinity.group import by_run
from sharpen.compat.trinity.model import ModelWrapper
from sharpen.compat.trinity.registry import REWARD_FUNCTIONS, WORKFLOWS
from sharpen.compat.trinity.rewards import check_reward_function
from sharpen.compat.trinity.task import TasksetConfig, generation_config, task_of
from sharpen.compat.trinity.workflow import Workflow, overrides
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError
from sharpen.rollout.attempt import HAS_ARGUMENTS, as_number
from sharpen.rollout.user_loop import owner

log = logging.getLogger("sharpen.workflow")

STEP_REWARD, STATE = "step_reward", "env_state_hash"
"""What of `exp.info` is read, under Trinity-RFT's names."""
LAST_STEP_COUNTS = "step_wise_grpo"
"""The advantage that is defined by the last step's reward: rewards that differ within a rollout are expected there."""

WorkflowFunction = Callable[..., Awaitable["WorkflowResult | list[WorkflowResult | ValueError]"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowResult:
    """What a rollout gave, as `Rollout` has it. `call_rewards` is None where an endpoint answered, whose calls have no
    index; `calls` are the indices of all calls that were returned, trained or not."""

    reward: float
    metrics: Mapping[str, Any]
    call_rewards: Mapping[int, float] | None
    calls: tuple[int, ...] = ()
    step_rewards: Mapping[int, float] = field(default_factory=dict)
    states: Mapping[int, str] = field(default_factory=dict)


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
    reward_fn = None
    if taskset.reward_fn is not None:
        reward_fn = check_reward_function(REWARD_FUNCTIONS.get(taskset.reward_fn), taskset.reward_fn)
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
        results = _results(name, experiences, policy, group_size if whole_groups else None)
        if not warned and any(_differs(result, uses_steps=uses_steps) for result in results):
            warned = True
            _warn_of_call_rewards(name, no_use_in, uses_steps)
        return results if whole_groups else results[0]  # type: ignore[return-value]

    return _labelled(run_workflow, name, whole_groups=whole_groups)


def _warn_of_call_rewards(name: str, algorithm: str | None, uses_steps: bool) -> None:
    log.warning(
        "workflow %s rewards the calls of a rollout differently, but %s trains all of them with the rollout's "
        "reward, that of its last call%s",
        name,
        algorithm,
        f" (a reward of a step goes into exp.info[{STEP_REWARD!r}])" if uses_steps else "",
    )


def check_experiences(name: str, returned: Any) -> Sequence[Experience]:
    """What a workflow returned. Raises `ConfigError` if it is no list of experiences."""
    if not isinstance(returned, Sequence) or not all(isinstance(item, Experience) for item in returned):
        raise ConfigError(
            f"workflow {name} returned {_shown(returned)}: return a list of Experience, e.g. those of "
            "self.model.extract_experience_from_history(), with their reward set"
        )
    return returned


def result_of(name: str, returned: Any, model: ModelWrapper) -> WorkflowResult:
    """What a workflow's return value says. Raises `ConfigError` for what would go wrong in every rollout alike, and
    `ValueError` for what may be this rollout's alone (see the module).
    """
    experiences = check_experiences(name, returned)
    if not experiences:
        raise ValueError(f"workflow {name} returned no experience: did it call the model before it extracted them?")
    for experience in experiences:
        if not experience.came_from(model):
            raise ConfigError(
                f"workflow {name} returned an experience of another rollout, or of an auxiliary model: return those of "
                "self.model, and keep none from one rollout to the next"
            )
        experience.check()
        if experience.reward is None:
            raise ValueError(f"workflow {name} returned an experience without a reward: set exp.reward")
        if not math.isfinite(experience.reward):
            raise ValueError(f"workflow {name} set the reward {experience.reward}: it must be a finite number")
    runs = {experience.eid.run for experience in experiences}
    if len(runs) > 1:
        raise ConfigError(
            f"workflow {name} returned experiences of {len(runs)} runs (exp.eid.run): a rollout is one run, and "
            "algorithm.group_size says how many there are of a task"
        )
    rewards = _call_rewards(name, experiences)
    trained = {call.index for experience in experiences if not experience.left_out for call in experience.calls}
    return WorkflowResult(
        reward=rewards[max(rewards)] if rewards else _reward_of(experiences[-1]),
        metrics=_mean_metrics(experiences),
        call_rewards={index: reward for index, reward in rewards.items() if index in trained} if rewards else None,
        calls=tuple({call.index: None for experience in experiences for call in experience.calls}),
        step_rewards=_of_steps(name, experiences),
        states=_states(experiences),
    )


def _labelled(function: Any, name: str, *, whole_groups: bool) -> WorkflowFunction:
    """The function with what `UserFunctions` reads of it."""
    function.__qualname__ = function.__name__ = name
    function.whole_groups = whole_groups
    setattr(function, HAS_ARGUMENTS, True)
    return function  # type: ignore[no-any-return]


def _whole_groups(function: WorkflowFunction) -> bool:
    return bool(getattr(function, "whole_groups", False))


def _reward_of(experience: Experience) -> float:
    assert experience.reward is not None
    return experience.reward


def _results(
    name: str, returned: Any, model: ModelWrapper, group_size: int | None
) -> list[WorkflowResult | ValueError]:
    """The result of each rollout of a group, or the only one."""
    returned = model.recognize(name, check_experiences(name, returned))
    if group_size is None:
        return [result_of(name, returned, model)]
    parts = by_run(name, returned, group_size)
    return [_result_or_error(name, part, model) for part in parts]


def _result_or_error(name: str, experiences: Sequence[Experience], model: ModelWrapper) -> WorkflowResult | ValueError:
    """One rollout's result, or what made this one fail, of several that one run made."""
    try:
        return result_of(name, experiences, model)
    except ConfigError:
        raise
    except ValueError as error:
        return error


def _differs(result: WorkflowResult | ValueError, *, uses_steps: bool) -> bool:
    """Whether the rewards of a rollout's calls differ, and are no rewards of steps that are made use of."""
    if isinstance(result, ValueError) or (uses_steps and result.step_rewards):
        return False
    return len(set((result.call_rewards or {}).values())) > 1


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
    from sharpen.algorithm.advantages import ADVANTAGES
    from sharpen.algorithm.presets import PRESETS

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


def _call_rewards(name: str, experiences: Sequence[Experience]) -> dict[int, float]:
    rewards: dict[int, float] = {}
    for experience in experiences:
        assert experience.reward is not None
        for call in experience.calls:
            if rewards.setdefault(call.index, experience.reward) != experience.reward:
                raise ConfigError(
                    f"workflow {name} returned call {call.index} in two experiences with different rewards, "
                    f"{rewards[call.index]:g} and {experience.reward:g}: return each call once"
                )
    return rewards


def _of_steps(name: str, experiences: Sequence[Experience]) -> dict[int, float]:
    """The rewards of steps, each by the last call of its step."""
    rewards: dict[int, float] = {}
    for experience in _once(experiences):
        value = experience.info.get(STEP_REWARD)
        if value is None or not experience.calls:
            continue
        reward = as_number(value)
        if reward is None:
            raise ConfigError(
                f"workflow {name} set exp.info[{STEP_REWARD!r}] to {_shown(value)}: it must be a number, the reward of "
                "that step"
            )
        if not math.isfinite(reward):
            raise ValueError(f"workflow {name} set exp.info[{STEP_REWARD!r}] to {reward}: it must be a finite number")
        index = experience.calls[-1].index
        if index in rewards:
            raise ConfigError(
                f"workflow {name} returned call {index} in two experiences with exp.info[{STEP_REWARD!r}]: return each "
                "call once"
            )
        rewards[index] = reward
    return rewards


def _states(experiences: Sequence[Experience]) -> dict[int, str]:
    """The states of the environment that the workflow names, each by the first call made in it."""
    return {
        experience.calls[0].index: str(experience.info[STATE])
        for experience in experiences
        if experience.calls and experience.info.get(STATE) is not None
    }


def _once(experiences: Sequence[Experience]) -> list[Experience]:
    return list({id(experience): experience for experience in experiences}.values())


def _mean_metrics(experiences: Sequence[Experience]) -> dict[str, Any]:
    """Each metric's mean over the experiences that have it; what is no number goes through, to be warned about."""
    values: dict[str, list[Any]] = defaultdict(list)
    for experience in experiences:
        for name, value in dict(experience.metrics or {}).items():
            values[name].append(value)
    means: dict[str, Any] = {}
    for name, found in values.items():
        odd = [value for value in found if not is_number(value)]
        means[name] = odd[0] if odd else sum(map(float, found)) / len(found)
    return means


def _shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return f"{text[:80]} ({type(value).__name__})"
