"""`tune_prompt()`: propose system prompts, try them on tasks, and compare the best one with the initial one on held-out
tasks.

In: the user's functions, a prompt, datasets. Out: a prompt and figures. Workflows run on the rollout runner, with its
time limit; `trials.ranking` says how failures count.

    train_dataset ─► to propose from (a fifth) ─► optimizer ─► prompts ─┐
                └──► to validate on ◄── each prompt on each task once ◄─┘ ─► the best of them
    eval_dataset ──► the initial prompt and the best one, paired by task
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from sharpen.agent.agentscope.console import silent_agents
from sharpen.agent.rollout.attempt import UserFunctions
from sharpen.agent.rollout.in_process import InProcess, OpenModels
from sharpen.agent.rollout.runner import RolloutRunner
from sharpen.beyond.prompt_tune.comparison import PromptAttempts, compare, text_of_task
from sharpen.beyond.prompt_tune.settings import PromptTuneConfig
from sharpen.beyond.trials.models import TrialJudge, TrialWorkflow, with_own_models, with_served_model
from sharpen.beyond.trials.ranking import Candidate, Ranking, rank
from sharpen.config.extras import install_command
from sharpen.config.load import resolve
from sharpen.config.public import DatasetConfig, TunerModelConfig
from sharpen.config.rows import load_tasks
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError, DatasetError
from sharpen.learning.recipe import Job, Recipe
from sharpen.placement.local import start_serving
from sharpen.run.decide import decide_evaluation, refuse_policies
from sharpen.show.monitor.display import Display
from sharpen.show.monitor.statistics import is_binary
from sharpen.types import Task

PACKAGES = {"miprov2": ("dspy", "optuna"), "gepa": ("dspy", "gepa")}
"""The packages that each optimizer needs. Both call the proposing model through DSPy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The checked arguments. `job` serves the model; None if the workflow has its own."""

    workflow: TrialWorkflow
    judge: TrialJudge
    prompt: str
    training: Sequence[Task]
    validation: Sequence[Task]
    held_out: Sequence[Task]
    tuning: PromptTuneConfig
    config: RunConfig
    job: Job[Recipe] | None


def tune_prompt(
    *,
    workflow: Callable[..., Any],
    init_system_prompt: str,
    judge_func: Callable[..., Any],
    train_dataset: DatasetConfig,
    eval_dataset: DatasetConfig | None = None,
    config: PromptTuneConfig | None = None,
    model: TunerModelConfig | None = None,
    settings: Mapping[str, Any] | None = None,
) -> tuple[str, dict[str, float]]:
    """Return the best system prompt that was found, and what it is worth.

    `workflow` is `async def (task, system_prompt)` with a model of its own, or with `model`, which is served here,
    `async def (task, system_prompt, model)`; `judge_func` is `async def (task, response)`. Four fifths of
    `train_dataset` say which prompt is best, the others are what prompts are proposed from; `total_steps` bounds the
    number of tasks. `settings` holds settings of `docs/reference/configuration.md`, such as
    `{"rollout.timeout_s": 60}`.

    With `eval_dataset` the best prompt is compared with the initial one on those tasks, and where it is shown to be
    worse the initial one is returned. The figures: `validation_before`, `validation_after`, `num_prompts`; of the
    comparison `before`, `after`, `difference`, `low`, `high` (95%, paired by task), `num_tasks`, and as AgentScope's
    `valset_improvement` the difference in percent of `before`.

    Works in a script, a notebook, and under a running event loop, which it blocks. Raises `ConfigError` or
    `DatasetError` for bad input, before anything is loaded; `RolloutError` where the initial prompt gives no result.
    """
    plan = _check(workflow, init_system_prompt, judge_func, train_dataset, eval_dataset, config, model, settings)
    lm = _proposing_model(plan.tuning)
    with contextlib.ExitStack() as stack:
        display = stack.enter_context(contextlib.closing(Display(0, sys.stdout)))
        stack.enter_context(silent_agents())
        runner, opens_for = _start(plan, stack, display)
        attempts = PromptAttempts(runner, opens_for, plan.prompt, plan.validation)
        attempts.begin()
        _search(plan, attempts, lm)
        ranking = _rank(attempts, plan.config.rollout.max_excluded_share)
        for line in _lines(ranking, attempts, plan):
            display.message(line)
        found = compare(attempts, ranking.best.name, plan.held_out, both=plan.tuning.compare_performance)
        for line in found.lines(plan.tuning.eval_display_table, display.columns):
            display.message(line)
        return found.prompt, {**_figures(ranking, attempts), **found.figures()}


def _check(
    workflow: Callable[..., Any],
    prompt: str,
    judge: Callable[..., Any],
    train_dataset: DatasetConfig,
    eval_dataset: DatasetConfig | None,
    tuning: PromptTuneConfig | None,
    model: TunerModelConfig | None,
    settings: Mapping[str, Any] | None,
) -> _Plan:
    tuning = tuning or PromptTuneConfig()
    needed = ("task", "system_prompt") if model is None else ("task", "system_prompt", "model")
    trial_workflow, trial_judge = TrialWorkflow(workflow, needed, "workflow"), TrialJudge(judge, with_metrics=False)
    if not isinstance(prompt, str):
        raise ConfigError(f"init_system_prompt must be a string, got {prompt!r} ({type(prompt).__name__})")
    if not prompt.strip():
        raise ConfigError("init_system_prompt is empty: give the prompt that the agent has now, if only one sentence")
    _check_packages(tuning)
    given: dict[str, Any] = {"rollout.max_concurrent_rollouts": tuning.eval_num_threads, **(settings or {})}
    shown = model if model is not None else TunerModelConfig(model_path="-", max_model_len=2)
    config = resolve(None, given, {"train_dataset": train_dataset, "model": shown}).config
    if config.rollout.isolation != "none":
        raise ConfigError("rollout.isolation is process, but prompts are tuned in one process: leave it out")
    if config.uses_ray:
        raise ConfigError("execution is ray, but prompts are tuned on one machine: leave execution out")
    refuse_policies(config, "a search for a prompt, which trains nothing")
    job = None if model is None else decide_evaluation(config, trial_workflow, trial_judge)
    tasks = load_tasks(train_dataset)[: train_dataset.total_steps]
    training, validation = _split(tasks, tuning, train_dataset.path)
    return _Plan(
        workflow=trial_workflow,
        judge=trial_judge,
        prompt=prompt,
        training=training,
        validation=validation,
        held_out=() if eval_dataset is None else load_tasks(eval_dataset)[: eval_dataset.total_steps],
        tuning=tuning,
        config=config,
        job=job,
    )


def _check_packages(tuning: PromptTuneConfig) -> None:
    if missing := [name for name in PACKAGES[tuning.optimizer] if find_spec(name) is None]:
        raise ConfigError(
            f"optimizer {tuning.optimizer!r} needs the package {' and '.join(missing)}: {install_command('prompts')}"
        )
    lm = tuning.lm_model_name
    is_lm = any(kind.__name__ == "BaseLM" and kind.__module__.split(".")[0] == "dspy" for kind in type(lm).__mro__)
    if not is_lm and not (isinstance(lm, str) and lm.strip()):
        raise ConfigError(
            f"lm_model_name must be a model's name as DSPy takes it (provider/model) or a dspy.LM, got {lm!r}"
        )


def _split(tasks: Sequence[Task], tuning: PromptTuneConfig, path: str) -> tuple[list[Task], list[Task]]:
    """Return the tasks to propose from, and those to validate on."""
    if len(tasks) < 2:
        raise DatasetError(
            f"train_dataset {path!r} has {len(tasks)} task, which leaves none to validate prompts on: at least 2 are "
            "needed, one to propose from and one to validate on"
        )
    count = min(tuning.size.num_validation, int(len(tasks) * 0.8))
    order = random.Random(f"{tuning.seed}/prompts").sample(range(len(tasks)), len(tasks))
    return [tasks[index] for index in sorted(order[count:])], [tasks[index] for index in sorted(order[:count])]


def _start(
    plan: _Plan, stack: contextlib.ExitStack, display: Display
) -> tuple[RolloutRunner, Callable[[str], OpenModels]]:
    """Start what runs workflows. Return the runner, and the opener of a prompt's models; `stack` closes all of it."""
    if plan.job is not None:
        serving = start_serving(plan.job)
        stack.callback(serving.close)
        display.message(serving.line)
        open_models = serving.modes[plan.config.evaluation.decided_by]
        assert callable(open_models)
        return serving.runner, lambda prompt: with_served_model(open_models, {"system_prompt": prompt})
    rollout = plan.config.rollout
    functions = UserFunctions(
        plan.workflow, plan.judge, plan.config.workflow_args, model_exceptions=rollout.model_exceptions
    )
    first = with_own_models({"system_prompt": plan.prompt})
    runner = RolloutRunner(InProcess(functions, rollout.timeout_s), first, rollout, 1, plan.config.seed)
    stack.callback(runner.close)
    return runner, lambda prompt: with_own_models({"system_prompt": prompt})


def _proposing_model(tuning: PromptTuneConfig) -> Any:
    """Return DSPy's object for the proposing model. No request is made yet."""
    if not isinstance(tuning.lm_model_name, str):
        return tuning.lm_model_name
    import dspy

    return dspy.LM(tuning.lm_model_name)


def _search(plan: _Plan, attempts: PromptAttempts, lm: Any) -> None:
    """Run the optimizer. Raises `attempts.broken`, which the optimizer may have ignored."""
    tuning = plan.tuning
    given = {"num_candidates": tuning.size.num_candidates, "seed": tuning.seed}
    with contextlib.nullcontext() if tuning.eval_display_progress else _silence():
        if tuning.optimizer == "miprov2":
            from sharpen.beyond.prompt_tune import mipro

            mipro.search(attempts, plan.training, lm, num_threads=tuning.eval_num_threads, **given)
        else:
            from sharpen.beyond.prompt_tune import reflection

            binary = is_binary(attempts.measure(plan.prompt, plan.validation).given)
            reflection.search(
                attempts, plan.training, lm, binary=binary, progress=tuning.eval_display_progress, **given
            )
    if attempts.broken is not None:
        raise attempts.broken


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Suppress what DSPy and GEPA print, and their log lines below warnings."""
    logger = logging.getLogger("dspy")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


def _rank(attempts: PromptAttempts, max_excluded_share: float) -> Ranking:
    """Rank the prompts that were tried on all validation tasks."""
    measured = enumerate(attempts.measured())
    return rank(
        [Candidate(position=position, name=prompt, measured=one) for position, (prompt, one) in measured],
        max_excluded_share,
    )


def _figures(ranking: Ranking, attempts: PromptAttempts) -> dict[str, float]:
    """Return the validation rewards of the initial prompt (if it is eligible) and of the best one."""
    means = {one.name: ranking.mean(one) for one in ranking.ordered}
    figures = {"validation_after": means[ranking.best.name], "num_prompts": float(attempts.num_prompts)}
    if attempts.initial in means:
        figures["validation_before"] = means[attempts.initial]
    return figures


def _lines(ranking: Ranking, attempts: PromptAttempts, plan: _Plan) -> list[str]:
    figures = _figures(ranking, attempts)
    lines = [
        f"{attempts.num_prompts} prompts tried, {len(ranking.ordered) + len(ranking.excluded)} of them on all "
        f"{len(plan.validation)} validation tasks: reward {figures.get('validation_before', float('nan')):.3f} of the "
        f"initial prompt, {figures['validation_after']:.3f} of the best",
        *ranking.best.measured.lines(ranking.floor),
    ]
    if not plan.held_out:
        lines.append("no eval_dataset: the best was chosen on these very tasks, so that its reward is too high")
        return lines
    known = {text_of_task(task) for task in (*plan.training, *plan.validation)}
    if again := sum(text_of_task(task) in known for task in plan.held_out):
        lines.append(f"{again} of {len(plan.held_out)} tasks of eval_dataset are in train_dataset, too: not held out")
    return lines
