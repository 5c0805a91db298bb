"""Makes a `Job` of a configuration and the user's functions. What is wrong with the settings, their recipe says; what
is wrong with the functions, or on this machine, is found here, before anything is loaded.

In: a `RunConfig`, the workflow, the judge. Out: a `Job`, or `ConfigError` and its kin.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sharpen.algorithm.supervised import learns_from_rows
from sharpen.compat.agentscope import imported_line
from sharpen.config.cluster import ClusterConfig
from sharpen.config.functions import import_function
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError
from sharpen.execution.auxiliary.settings import check_auxiliary_models
from sharpen.execution.engine_choice import check_heads, choose_engine
from sharpen.execution.model_files import model_folder
from sharpen.execution.teacher_files import check_teacher, teacher_folder
from sharpen.execution.trainers import check_trainer
from sharpen.monitor.metrics import check_monitor
from sharpen.recipe import EngineChoice, Job, Recipe, RolloutRecipe, RowRecipe, TrainingJob, check_settings, recipe_of
from sharpen.rollout.signature import judge_arguments, workflow_arguments
from sharpen.trainer.lora_settings import check_lora

Function = Callable[..., Any]


def decide(config: RunConfig, workflow: Function | None, judge: Function | None) -> TrainingJob:
    """The job of a run that trains."""
    if learns_from_rows(config):
        return decide_rows(config, workflow, judge)
    return decide_rollouts(config, workflow, judge)


def decide_rollouts(config: RunConfig, workflow: Any, judge: Function | None) -> Job[RolloutRecipe]:
    """The job of a run that learns from rollouts. `workflow` is whatever the user gave for one."""
    imported_line()
    recipe = recipe_of(config)
    assert isinstance(recipe, RolloutRecipe)
    check_settings(recipe)
    serves = config.mode != "train"
    if serves:
        workflow_arguments(workflow)
    _check_functions(None, judge)
    engine, folder = _check_machine(config, serves=serves)
    teacher = teacher_folder(config, recipe.algorithm)
    if teacher is not None:
        check_teacher(config, folder, teacher)
    agent = workflow if serves else None  # in mode train the agent runs in the explorer's process
    return Job(recipe=recipe, workflow=agent, judge=judge, folder=folder, teacher=teacher, engine=engine)


def decide_rows(config: RunConfig, workflow: Function | None, judge: Function | None) -> Job[RowRecipe]:
    """The job of a run that learns from rows; a workflow is there to evaluate the agent."""
    recipe = recipe_of(config)
    assert isinstance(recipe, RowRecipe)
    check_settings(recipe)
    if workflow is not None and judge is None and config.judge is not None:
        judge = import_function(config.judge)
    if workflow is None and judge is not None:
        raise ConfigError("judge_func judges what a workflow says, and there is none: give both, or neither")
    _check_functions(workflow, judge)
    if workflow is not None and config.eval_dataset is None:
        raise ConfigError(
            f"with {recipe.algorithm.name!r} the workflow is there to evaluate the agent, on the tasks of "
            "eval_dataset: give that too, or leave the workflow out"
        )
    if workflow is None and config.evaluation.further:
        raise ConfigError("evaluation.further needs a workflow: without one only rows of one dataset are held out")
    engine, folder = _check_machine(config, serves=workflow is not None)
    return Job(recipe=recipe, workflow=workflow, judge=judge, folder=folder, engine=engine)


def decide_evaluation(config: RunConfig, workflow: Function, judge: Function | None) -> Job[Recipe]:
    """The job of an evaluation alone."""
    imported_line()
    _check_functions(workflow, judge)
    check_auxiliary_models(config)
    engine, folder = check_engine(config), model_folder(config.model.model_path)
    check_heads(config.model, folder)
    return Job(recipe=Recipe(config=config), workflow=workflow, judge=judge, folder=folder, engine=engine)


def check_engine(config: RunConfig, *, serves: bool = True) -> EngineChoice | None:
    """The engine, if one `serves`; None on Ray. Raises `ConfigError` for an engine or a Ray that cannot be had, as far
    as that is known before anything starts."""
    if not config.uses_ray:
        if config.cluster != ClusterConfig():
            raise ConfigError(
                "the settings of cluster have no effect with execution: local: set it to ray, or remove them"
            )
        return choose_engine(config) if serves else None
    if (device := config.engine.device).startswith("cuda:"):
        raise ConfigError(f"engine.device is {device}, but Ray gives GPUs out: set it to cuda")
    from sharpen.execution.cluster.connect import check_ray

    check_ray()
    return None


def _check_functions(workflow: Function | None, judge: Function | None) -> None:
    if workflow is not None:
        workflow_arguments(workflow)
    if judge is not None:
        judge_arguments(judge)


def _check_machine(config: RunConfig, *, serves: bool) -> tuple[EngineChoice | None, Path]:
    """The engine and the model's folder; what else this machine must have is there."""
    check_auxiliary_models(config)
    engine = check_engine(config, serves=serves)
    check_monitor(config.monitor_type)
    check_lora(config.trainer)
    check_trainer(config)
    folder = model_folder(config.model.model_path)
    if serves:
        check_heads(config.model, folder)
    return engine, folder
