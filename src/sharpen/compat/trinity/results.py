"""What a workflow returned, as the results of rollouts.

In: the experiences that one run of a workflow returned. Out: a `WorkflowResult` for each rollout.

- Experiences of this rollout, each with a finite reward: the rollout's reward is that of the last call, and counts
  once; what was written on each call is kept, and never added up. Calls that were not returned, or masked out, are not
  trained.
- `exp.info["step_reward"]`: the reward of that step, which is added to those of the other steps where an algorithm uses
  rewards of steps; `exp.info["env_state_hash"]`: the state of the environment in which the step began.
- Experiences of another task (`exp.eid.task`), as a judge's answers that are to be trained: the rollout `beside` this
  one. Rollouts of the same other task are compared with each other alone.
- No experience, one without a reward, or one whose reward is not finite: this rollout fails.
- Something that is no list of experiences, experiences of another rollout or of an auxiliary model, of several runs, or
  changed in place: a `ConfigError`, which stops the run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from sharpen.agent.rollout.rewards import as_number
from sharpen.compat.trinity.experience import Experience, is_number
from sharpen.compat.trinity.model import ModelWrapper
from sharpen.errors import ConfigError

# Whose each experience is, where one run of a workflow made all rollouts of a group (`can_repeat`).
#
# In: the experiences that it returned, the group's size. Out: those of each rollout, in order.


def by_run(name: str, experiences: Sequence[Experience], group_size: int) -> list[list[Experience]]:
    """The experiences of each run, by `eid.run` from 0 on. Where none was set, as many as there are runs are one each.

    Raises `ConfigError` for a run that was not asked for and for a call in two runs, `ValueError` for a number of
    experiences that does not say whose they are.
    """
    runs = [experience.eid.run for experience in experiences]
    if group_size > 1 and experiences and not any(runs):
        if len(experiences) != group_size:
            raise ValueError(
                f"workflow {name} returned {len(experiences)} experiences for {group_size} runs (set_repeat_times) "
                "without saying whose they are: set exp.eid.run, from self.run_id_base on, or return one for each run"
            )
        runs = list(range(group_size))
    parts: list[list[Experience]] = [[] for _ in range(group_size)]
    owners: dict[int, int] = {}
    for run, experience in zip(runs, experiences, strict=True):
        if not 0 <= run < group_size:
            raise ConfigError(
                f"workflow {name} returned an experience of run {run} (exp.eid.run), but set_repeat_times asked for "
                f"{group_size} runs from 0 on"
            )
        for call in experience.calls:
            if owners.setdefault(call.index, run) != run:
                raise ConfigError(
                    f"workflow {name} returned call {call.index} in run {owners[call.index]} and in run {run} "
                    "(exp.eid.run): a call is of one run"
                )
        parts[run].append(experience)
    return parts


STEP_REWARD, STATE = "step_reward", "env_state_hash"
"""What of `exp.info` is read, under Trinity-RFT's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowResult:
    """What a rollout gave, as `Rollout` has it. `call_rewards` is None where an endpoint answered, whose calls have no
    index; `calls` are the indices of all calls that were returned, trained or not; `beside` holds the results of other
    tasks, by their names."""

    reward: float
    metrics: Mapping[str, Any]
    call_rewards: Mapping[int, float] | None
    calls: tuple[int, ...] = ()
    step_rewards: Mapping[int, float] = field(default_factory=dict)
    states: Mapping[int, str] = field(default_factory=dict)
    beside: Mapping[str, Self] = field(default_factory=dict)


def check_experiences(name: str, returned: Any) -> Sequence[Experience]:
    """What a workflow returned. Raises `ConfigError` if it is no list of experiences."""
    if not isinstance(returned, Sequence) or not all(isinstance(item, Experience) for item in returned):
        raise ConfigError(
            f"workflow {name} returned {_shown(returned)}: return a list of Experience, e.g. those of "
            "self.model.extract_experience_from_history(), with their reward set"
        )
    return returned


def results_of(
    name: str, returned: Any, model: ModelWrapper, task_id: str, group_size: int | None
) -> list[WorkflowResult | ValueError]:
    """The result of each rollout of a group that one run made, or the only one (`group_size` None). `task_id` is the
    `eid.task` of the task itself. Raises as `result_of`."""
    experiences = model.recognize(name, check_experiences(name, returned))
    tasks = _by_task(name, experiences, task_id)
    own = tasks.pop("")
    if group_size is None:
        beside = {task: result_of(name, part, model) for task, part in tasks.items()}
        return [replace(result_of(name, own, model), beside=beside)]
    results = [_result_or_error(name, part, model) for part in by_run(name, own, group_size)]
    for task, part in tasks.items():
        for number, of_run in enumerate(by_run(name, part, group_size)):
            result = results[number]
            if of_run and isinstance(result, WorkflowResult):
                found = _result_or_error(name, of_run, model)
                both = (
                    found if isinstance(found, ValueError) else replace(result, beside={**result.beside, task: found})
                )
                results[number] = both
    return results


def _by_task(name: str, experiences: Sequence[Experience], task_id: str) -> dict[str, list[Experience]]:
    """The experiences of each task: `""` is the task itself, another one is named by what its `eid.task` adds to it.

    Raises `ConfigError` for a call that is in two of them.
    """
    tasks: dict[str, list[Experience]] = {"": []}
    owners: dict[int, str] = {}
    for experience in experiences:
        given = str(experience.eid.task)
        task = "" if given in ("", task_id) else given.removeprefix(task_id).strip("-_/ ") or given
        for call in experience.calls:
            if owners.setdefault(call.index, task) != task:
                raise ConfigError(
                    f"workflow {name} returned call {call.index} in experiences of two tasks (exp.eid.task): a call is "
                    "an answer to one of them"
                )
        tasks.setdefault(task, []).append(experience)
    return tasks


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


def _reward_of(experience: Experience) -> float:
    assert experience.reward is not None
    return experience.reward


def _result_or_error(name: str, experiences: Sequence[Experience], model: ModelWrapper) -> WorkflowResult | ValueError:
    """One rollout's result, or what made this one fail, of several that one run made."""
    try:
        return result_of(name, experiences, model)
    except ConfigError:
        raise
    except ValueError as error:
        return error


def differs(result: WorkflowResult | ValueError, *, uses_steps: bool) -> bool:
    """Whether the rewards of a rollout's calls differ, and are no rewards of steps that are made use of."""
    if isinstance(result, ValueError) or (uses_steps and result.step_rewards):
        return False
    return len(set((result.call_rewards or {}).values())) > 1


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
