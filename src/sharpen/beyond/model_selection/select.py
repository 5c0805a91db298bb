"""`select_model()`: run every candidate on the same tasks and return the one with the highest mean reward.

In: the user's functions, tasks, candidates. Out: the best candidate, unchanged, and figures. A `TunerModelConfig` is
served here, one after the other; any other candidate is passed to the workflow as it is.

`trials.ranking` says how failures count, `trials.ranking` which candidates are eligible.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharpen.agent.rollout.attempt import UserFunctions
from sharpen.agent.rollout.runner import RolloutRunner
from sharpen.agent.tasks.order import distinct
from sharpen.beyond.trials.models import OnCallersLoop, TrialJudge, TrialWorkflow, with_own_models, with_served_model
from sharpen.beyond.trials.ranking import Candidate, Measured, Ranking, measure, rank
from sharpen.config.load import resolve
from sharpen.config.public import DatasetConfig, JudgeOutput, TunerModelConfig
from sharpen.config.rows import load_tasks
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError
from sharpen.learning.recipe import Job, Recipe
from sharpen.placement.local import start_serving
from sharpen.run.decide import decide_evaluation, refuse_policies
from sharpen.show.monitor.display import Display
from sharpen.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selection:
    """The checked arguments. `jobs` holds the candidates that are served here, by position."""

    workflow: TrialWorkflow
    judge: TrialJudge
    tasks: Sequence[Task]
    models: Sequence[Any]
    names: Sequence[str]
    jobs: Mapping[int, Job[Recipe]]
    config: RunConfig


async def select_model(
    *,
    workflow_func: Callable[..., Any],
    judge_func: Callable[..., Any],
    train_dataset: DatasetConfig,
    candidate_models: Sequence[Any],
    max_threads: int = 2,
    settings: Mapping[str, Any] | None = None,
) -> tuple[Any, dict[str, float]]:
    """Return the candidate with the highest mean reward, and its figures.

    `workflow_func` is `async def (task, model)`. `judge_func` is `async def (task, response)`, where `response` is
    `{"response": ..., "metrics": {...}}` with the workflow's metrics, `execution_time` and, where they are known,
    `usage`, `input_tokens`, `output_tokens` and `total_tokens`; higher rewards are better. `train_dataset.total_steps`
    bounds the number of tasks. At most `max_threads` workflows run at a time. `settings` holds settings of
    `docs/reference/configuration.md`, such as `{"rollout.timeout_s": 60, "engine.type": "vllm"}`.

    Workflows with a model of their own run on the event loop of the caller. The figures: the mean of each metric of the
    judge as `<name>_avg`, `reward`, `num_tasks`, `num_failed`, `num_left_out`, and against the next best candidate
    `difference`, `low`, `high` (95%, paired by task). Raises `ConfigError` or `DatasetError` for bad input, before
    anything is loaded; `RolloutError` where no candidate finished a task.
    """
    selection = _check(workflow_func, judge_func, train_dataset, candidate_models, max_threads, settings)
    with contextlib.closing(Display(0, sys.stdout)) as display:
        candidates = []
        for position, name in enumerate(selection.names):
            measured = await _measure(selection, position, display)
            candidates.append(Candidate(position=position, name=name, measured=measured))
        ranking = rank(candidates, selection.config.rollout.max_excluded_share)
        for line in ranking.lines():
            display.message(line)
    return candidate_models[ranking.best.position], _figures(ranking)


def _check(
    workflow: Callable[..., Any],
    judge: Callable[..., Any],
    dataset: DatasetConfig,
    models: Sequence[Any],
    max_threads: int,
    settings: Mapping[str, Any] | None,
) -> _Selection:
    trial_workflow = TrialWorkflow(workflow, ("task", "model"), "workflow_func")
    trial_judge = TrialJudge(judge, with_metrics=True)
    if isinstance(models, str) or not isinstance(models, Sequence) or len(models) < 2:
        came = f"{len(models)} came" if isinstance(models, Sequence) and not isinstance(models, str) else repr(models)
        raise ConfigError(f"candidate_models must be a list of at least two models to choose from, but {came}")
    if isinstance(max_threads, bool) or not isinstance(max_threads, int) or max_threads < 1:
        raise ConfigError(f"max_threads must be a number of workflows, at least 1, got {max_threads!r}")
    given: dict[str, Any] = {"rollout.max_concurrent_rollouts": max_threads, **(settings or {})}
    jobs: dict[int, Job[Recipe]] = {}
    placeholder = TunerModelConfig(model_path="-", max_model_len=2)
    config = resolve(None, given, {"train_dataset": dataset, "model": placeholder}).config
    refuse_policies(config, "a choice of a model, which trains nothing")
    for position, model in enumerate(models):
        if isinstance(model, TunerModelConfig):
            served = resolve(None, given, {"train_dataset": dataset, "model": model}).config
            _check_one_machine(served)
            jobs[position] = decide_evaluation(served, trial_workflow, trial_judge)
    return _Selection(
        workflow=trial_workflow,
        judge=trial_judge,
        tasks=load_tasks(dataset)[: dataset.total_steps],
        models=models,
        names=distinct([_name(model) for model in models]),
        jobs=jobs,
        config=config,
    )


def _check_one_machine(config: RunConfig) -> None:
    if config.rollout.isolation != "none":
        raise ConfigError("rollout.isolation is process, but candidates are tried in one process: leave it out")
    if config.uses_ray:
        raise ConfigError("execution is ray, but candidates are served on one machine: leave execution out")


def _name(model: Any) -> str:
    if isinstance(model, TunerModelConfig):
        return model.model_path
    name = getattr(model, "model_name", None) or getattr(model, "model", None)
    return name if isinstance(name, str) else model if isinstance(model, str) else type(model).__name__


def _figures(ranking: Ranking) -> dict[str, float]:
    """Return the figures of the best candidate."""
    measured, rewards = ranking.best.measured, ranking.rewards[ranking.best.position]
    figures = {f"{name}_avg": value for name, value in measured.metrics().items()}
    figures |= {
        "reward": ranking.mean(ranking.best),
        "num_tasks": float(len(rewards)),
        "num_failed": float(len(measured.failed)),
        "num_left_out": float(len(measured.left_out)),
    }
    if len(ranking.ordered) > 1:
        found = ranking.difference(ranking.ordered[1])
        figures |= {"difference": found.difference, "low": found.low, "high": found.high}
    return figures


async def _measure(selection: _Selection, position: int, display: Display) -> Measured:
    """Run one candidate on all tasks."""
    async with contextlib.AsyncExitStack() as stack:
        job = selection.jobs.get(position)
        if job is None:
            config = selection.config
            functions = UserFunctions(
                selection.workflow,
                selection.judge,
                config.workflow_args,
                model_exceptions=config.rollout.model_exceptions,
            )
            place = OnCallersLoop(functions, config.rollout.timeout_s, asyncio.get_running_loop())
            opens = with_own_models({"model": selection.models[position]})
            runner = RolloutRunner(place, opens, config.rollout, 1, config.seed)
            stack.push_async_callback(asyncio.to_thread, runner.close)
        else:
            serving = await asyncio.to_thread(start_serving, job)
            stack.push_async_callback(asyncio.to_thread, serving.close)
            display.message(f"{selection.names[position]}: {serving.line}")
            open_models = serving.modes[job.config.evaluation.decided_by]
            assert callable(open_models)
            opens, runner = with_served_model(open_models, {}), serving.runner
        name, done, total = selection.names[position], 0, len(selection.tasks)

        def count(_: object) -> None:
            nonlocal done
            done += 1
            if done < total:
                display.evaluation(name, done, total)

        measured = await asyncio.to_thread(measure, runner, selection.tasks, opens, count)
        display.evaluation(name, total, total)
        return measured


# Built-in judges that reward low cost instead of right answers. Less is better, so rewards are negative.


async def avg_time_judge(task: Mapping[str, Any], response: Any) -> JudgeOutput:
    """Return minus the workflow's duration in seconds as reward, and the duration as the metric `avg_time_seconds`."""
    metrics = _metrics(response)
    if "execution_time" not in metrics:
        raise ValueError("avg_time_judge needs 'execution_time' in response['metrics']")
    seconds = float(metrics["execution_time"])
    return JudgeOutput(reward=-seconds, metrics={"avg_time_seconds": seconds})


async def avg_token_consumption_judge(task: Mapping[str, Any], response: Any) -> JudgeOutput:
    """Return minus the tokens that the workflow used (prompts and answers) as reward, and the tokens as the metric
    `token_consumed`. If `usage` has no `total_tokens`, its `output_tokens` count."""
    usage = _metrics(response).get("usage")
    if not isinstance(usage, Mapping):
        raise ValueError(
            "avg_token_consumption_judge needs to know how many tokens were used, and the model does not say: it is "
            "known for models of AgentScope and for models served here; else write a judge that reads it elsewhere"
        )
    tokens = usage.get("total_tokens")
    if tokens is None:
        tokens = usage.get("output_tokens")
    if tokens is None:
        raise ValueError(f"usage has neither total_tokens nor output_tokens, but {', '.join(usage) or 'nothing'}")
    return JudgeOutput(reward=-float(tokens), metrics={"token_consumed": float(tokens)})


def _metrics(response: Any) -> Mapping[str, Any]:
    metrics = response.get("metrics") if isinstance(response, Mapping) else None
    if not isinstance(metrics, Mapping):
        raise ValueError(f"response must be a dict with 'response' and 'metrics', but is {type(response).__name__}")
    return metrics
