"""The operators that the settings name, applied one after the other.

In: `sampling.operators` or `sampling.task_operators`. Out: a function over the groups of a step, or over the tasks.
Everything that can be wrong with a name or an argument is said before anything is loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

from sharpen.agent.operators import rollouts, tasks
from sharpen.agent.operators.data_juicer.rows import on_rollouts, on_tasks
from sharpen.agent.operators.rollouts import checked
from sharpen.agent.operators.tasks import priority_order
from sharpen.config.functions import import_function
from sharpen.config.run import OperatorConfig
from sharpen.errors import ConfigError, DatasetError, OperatorError
from sharpen.types import Group, Task

Operator = Callable[..., Any]

ON_ROLLOUTS: Mapping[str, Operator] = {
    **{
        function.__name__: function
        for function in (
            rollouts.reward_filter,
            rollouts.reward_std_filter,
            rollouts.dapo_dynamic_sampling,
            rollouts.reward_shaping_mapper,
            rollouts.invalid_reward_filter,
            rollouts.pass_rate_calculator,
        )
    },
    "data_juicer": on_rollouts,
}
ON_TASKS: Mapping[str, Operator] = {
    **{
        function.__name__: function
        for function in (
            tasks.range_filter,
            tasks.difficulty_filter,
            tasks.pass_rate_filter,
            tasks.random_sample,
            priority_order,
        )
    },
    "data_juicer": on_tasks,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Operators by the names that the settings give them, with their arguments."""

    operators: tuple[tuple[str, Operator], ...]

    @property
    def asks_models(self) -> bool:
        """Whether an operator takes the auxiliary models of the run."""
        return any(_asks_models(operator) for _, operator in self.operators)

    @classmethod
    def of(cls, configs: Sequence[OperatorConfig], known: Mapping[str, Operator]) -> Pipeline:
        """The operators of a setting. Raises `ConfigError` for a name that nobody has, or arguments that it does not
        take."""
        return cls(operators=tuple((config.name, _bound(config, known)) for config in configs))

    def on_groups(self, groups: Sequence[Group], auxiliary_models: Mapping[str, Any] | None = None) -> list[Group]:
        """Apply the operators to the groups of a step; those that take the auxiliary models get these. Raises
        `OperatorError`, with the operator's name."""
        found = list(groups)
        for name, operator in self.operators:
            asks = partial(operator, auxiliary_models=auxiliary_models) if _asks_models(operator) else operator
            found = checked(name, found, _called(name, asks, found))
        return found

    def on_tasks(self, tasks: Sequence[Task]) -> list[Task]:
        """Apply the operators to the tasks. Raises `OperatorError`, and `DatasetError` if none is left."""
        found = list(tasks)
        for name, operator in self.operators:
            after = _called(name, operator, found)
            if not isinstance(after, Sequence) or not all(isinstance(task, Task) for task in after):
                raise OperatorError(f"operator {name} must return a list of tasks, got {type(after).__name__}")
            if not after:
                raise DatasetError(f"operator {name} kept none of {len(found)} tasks: there is nothing to train on")
            found = list(after)
        return found


def filter_tasks(tasks: Sequence[Task], configs: Sequence[OperatorConfig]) -> tuple[Sequence[Task], tuple[str, ...]]:
    """Return the tasks that the operators leave, and a line that says so if there are operators."""
    if not configs:
        return tasks, ()
    kept = Pipeline.of(configs, ON_TASKS).on_tasks(tasks)
    names = ", ".join(config.name for config in configs)
    return kept, (f"{len(kept)} of {len(tasks)} training tasks are left by the operators {names}",)


def _asks_models(operator: Operator) -> bool:
    return "auxiliary_models" in inspect.signature(operator).parameters


def _bound(config: OperatorConfig, known: Mapping[str, Operator]) -> Operator:
    operator = known.get(config.name)
    if operator is None:
        if ":" not in config.name:
            raise ConfigError(
                f"there is no operator {config.name!r}{_nearest(config.name, known)}; there are {', '.join(known)}, "
                "and your own as 'package.module:function' or 'file.py:function'"
            )
        operator = import_function(config.name)
        if inspect.isclass(operator):
            raise ConfigError(
                f"operator {config.name} is a class, but an operator is a function: it takes the groups of a step, or "
                "the tasks, and returns those to go on with (docs/use/operators.md)"
            )
    try:
        inspect.signature(operator).bind([], **config.args)
    except TypeError as error:
        raise ConfigError(
            f"operator {config.name} does not take the arguments {config.args}: {error}; its signature is "
            f"{inspect.signature(operator)}"
        ) from error
    bound = partial(operator, **config.args)
    if config.name in known:
        _called(config.name, bound, [])  # of nothing, a built-in one says what is wrong with its arguments
    return bound


def _nearest(name: str, known: Mapping[str, Operator]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _called(name: str, operator: Operator, what: Sequence[Any]) -> Any:
    try:
        return operator(what)
    except (ConfigError, DatasetError, OperatorError):
        raise
    except Exception as error:  # the owner's code: whatever it raises is told with the operator's name
        raise OperatorError(f"operator {name} failed: {type(error).__name__}: {error}") from error
