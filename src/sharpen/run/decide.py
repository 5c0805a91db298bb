"""Makes a `Job` from a configuration and the user's functions, before anything is loaded.

In: a `RunConfig`, the workflow, the judge. Out: a `Job`. Raises `ConfigError`, `DatasetError` or `ModelError`, with all
problems at once: those of the settings (`sharpen.learning.recipe`), of the functions and of this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sharpen.agent.agentscope.model import imported_line
from sharpen.agent.operators.pipeline import ON_ROLLOUTS, ON_TASKS, Pipeline
from sharpen.agent.rollout.signature import judge_arguments, workflow_arguments
from sharpen.config.distill import setting_of_teacher
from sharpen.config.functions import import_function
from sharpen.config.problems import Problems, refuse
from sharpen.config.public import MONITORS, DatasetConfig, TunerModelConfig
from sharpen.config.rows import check_path
from sharpen.config.run import RunConfig
from sharpen.config.sections import ClusterConfig
from sharpen.config.trainer import LoraConfig
from sharpen.errors import ConfigError
from sharpen.gateway.caller import with_name
from sharpen.gateway.routes import Protocols
from sharpen.learning.algorithm.supervised import learns_from_rows
from sharpen.learning.experience.reread import Rereading
from sharpen.learning.recipe import (
    EngineChoice,
    Job,
    Recipe,
    RolloutRecipe,
    RowRecipe,
    TrainingJob,
    TrainingRecipe,
    check_settings,
    recipe_of,
    truncation_problems,
)
from sharpen.learning.trainer.settings import check_lora, check_optimizer
from sharpen.models.files import check_model_path, model_folder
from sharpen.models.table import bring
from sharpen.placement.auxiliary.settings import check_auxiliary_models, fetch_auxiliary_models
from sharpen.placement.engine_choice import (
    Machine,
    check_gpu,
    check_heads,
    check_towers,
    choose_engine,
    fit_auxiliary,
    fit_policy,
    own_engine,
    this_machine,
)
from sharpen.placement.model_formats import check_formats, formats_line
from sharpen.placement.teacher_files import check_teachers, teacher_folders
from sharpen.placement.trainers import check_trainer
from sharpen.show.monitor.metrics import monitor_of

Function = Callable[..., Any]


def decide(config: RunConfig, workflow: Function | None, judge: Function | None) -> TrainingJob:
    """Return the job of a run that trains."""
    if learns_from_rows(config.algorithm):
        return decide_rows(config, workflow, judge)
    return decide_rollouts(config, workflow, judge)


def check_before(config: RunConfig, workflow: Any = None, judge: Function | None = None) -> None:
    """Raise the problems of the settings, of functions that are there already, and of paths that do not exist, at once:
    before torch is imported, and before anything is said of a run that will not be."""
    problems = Problems()
    problems.check(imported_line)
    problems.check(_check_functions, workflow, None)
    problems.check(_check_functions, None, judge)
    if learns_from_rows(config.algorithm):
        problems.check(_check_evaluation_of_rows, config, workflow, judge, config.algorithm.algorithm_type)
    _recipe(problems, config)
    problems.check(check_auxiliary_models, config.auxiliary_models)
    problems.check(check_model_path, config.model.model_path)
    _check_datasets(problems, config)
    problems.raise_found()


_BY_ITSELF = "an evaluation by itself, which has one policy"


def decide_rollouts(config: RunConfig, workflow: Any, judge: Function | None) -> Job[RolloutRecipe]:
    """Return the job of a run that learns from rollouts. `workflow` may be any object, and is checked."""
    problems = Problems()
    problems.check(imported_line)
    serves = config.mode != "train"  # else the agent runs in the explorer's process
    if serves:
        problems.check(workflow_arguments, workflow)
    if judge is not None:
        problems.check(judge_arguments, judge)
    notices: tuple[str, ...] = ()
    engine = None
    if serves:
        config, notices, engine = _fit(problems, config)
    recipe = _recipe(problems, config)
    _check_machine(problems, config, serves=serves)
    problems.check(check_base, config, engine, serves=True)
    problems.check(check_policies, config, engine, recipe)
    problems.raise_found()
    assert isinstance(recipe, RolloutRecipe)
    if engine is not None:
        refuse(truncation_problems(recipe, engine.type))
    folder = _model_folders(config, serves=serves)
    _check_towers(config, engine, folder)
    notices += (formats_line(config.model, folder),) if serves else ()
    teachers = teacher_folders(config.distill, recipe.algorithm, folder)
    others = check_teachers(config.distill, recipe.algorithm, config.model, folder, teachers)
    reading = {name: teachers[name] for name in others}
    Rereading.of(recipe.algorithm.distill, folder, reading, config.model.enable_thinking)  # raises, if it cannot
    notices += tuple(
        f"{setting_of_teacher(name)}: other tokens than the model's ({difference}), which are compared chunk by chunk"
        for name, difference in others.items()
    )
    return Job(
        recipe=recipe,
        workflow=workflow if serves else None,
        judge=judge,
        folder=folder,
        teachers=teachers,
        read_anew=frozenset(others),
        engine=engine,
        adapters=served_adapters(config, engine, trains=True),
        notices=notices,
    )


def decide_rows(config: RunConfig, workflow: Function | None, judge: Function | None) -> Job[RowRecipe]:
    """Return the job of a run that learns from rows, in which a workflow only evaluates the agent."""
    problems, name = Problems(), config.algorithm.algorithm_type
    if workflow is not None and judge is None and config.judge is not None:
        judge = problems.check(import_function, config.judge)
    problems.check(_check_functions, workflow, judge)
    problems.check(_check_evaluation_of_rows, config, workflow, judge, name)
    notices: tuple[str, ...] = ()
    engine = None
    if workflow is not None:
        config, notices, engine = _fit(problems, config)
    recipe = _recipe(problems, config)
    _check_machine(problems, config, serves=workflow is not None)
    problems.check(check_base, config, engine, serves=workflow is not None)
    problems.check(refuse_policies, config, "a run that learns from rows")
    problems.raise_found()
    assert isinstance(recipe, RowRecipe)
    folder = _model_folders(config, serves=workflow is not None)
    notices += (formats_line(config.model, folder),) if workflow is not None else ()
    return Job(
        recipe=recipe,
        workflow=workflow,
        judge=judge,
        folder=folder,
        engine=engine,
        adapters=served_adapters(config, engine, trains=True),
        notices=notices,
    )


def decide_evaluation(config: RunConfig, workflow: Function, judge: Function | None) -> Job[Recipe]:
    """Return the job of an evaluation."""
    problems = Problems()
    problems.check(imported_line)
    problems.check(_check_functions, workflow, judge)
    problems.check(refuse_policies, config, _BY_ITSELF)
    return _without_training(problems, config, workflow, judge)


def decide_endpoint(config: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the settings of an endpoint's evaluation, with the auxiliary models that fit this machine, and notices."""
    refuse_policies(config, _BY_ITSELF)
    config, notices = fit_to_machine(config)
    check_auxiliary_models(config.auxiliary_models)
    return config, notices


def decide_serving(config: RunConfig) -> Job[Recipe]:
    """Return the job of a server, which runs no functions of the user's."""
    return _without_training(Problems(), config, None, None)


def _without_training(
    problems: Problems, config: RunConfig, workflow: Function | None, judge: Function | None
) -> Job[Recipe]:
    config, notices, engine = _fit(problems, config)
    problems.check(check_auxiliary_models, config.auxiliary_models)
    problems.check(check_model_path, config.model.model_path)
    problems.check(check_formats, config.model)
    problems.raise_found()
    folder = _model_folders(config, serves=True)
    return Job(
        recipe=Recipe(config=config),
        workflow=workflow,
        judge=judge,
        folder=folder,
        engine=engine,
        adapters=served_adapters(config, engine, trains=False),
        notices=(*notices, formats_line(config.model, folder)),
    )


def decide_learning_server(config: RunConfig) -> Job[RolloutRecipe]:
    """Return the job of a server that learns from its use, with the algorithm of a trainer in another process."""
    problems = Problems()
    config, notices, engine = _fit(problems, config)
    recipe = _recipe(problems, config)
    _check_machine(problems, config, serves=True, has_tasks=False)
    problems.check(check_base, config.model_copy(update={"mode": "train"}), engine, serves=True)
    problems.check(_check_learns_from_use, config, recipe)
    problems.check(refuse_policies, config, "a server that learns from its use")
    problems.raise_found()
    assert isinstance(recipe, RolloutRecipe)
    folder = _model_folders(config, serves=True)
    _check_towers(config, engine, folder)
    notices += (formats_line(config.model, folder),)
    return Job(
        recipe=recipe,
        workflow=None,
        judge=None,
        folder=folder,
        engine=engine,
        adapters=served_adapters(config, engine, trains=False),
        notices=notices,
    )


def _check_learns_from_use(config: RunConfig, recipe: TrainingRecipe | None) -> None:
    name = config.algorithm.algorithm_type
    if recipe is not None and not isinstance(recipe, RolloutRecipe):
        raise ConfigError(f"algorithm.algorithm_type is {name!r}, which learns from rows: a server has sessions alone")
    if recipe is not None and recipe.algorithm.needs_baseline:
        raise ConfigError(
            f"algorithm.algorithm_type is {name!r}, which compares with a further greedy rollout of each task: a "
            "server cannot ask an application for one"
        )
    if config.uses_ray:
        raise ConfigError("execution is ray, but a server that learns serves on this machine: leave execution out")


def fit_to_machine(config: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the configuration with the engines that fit this machine, and notices about the changes. Unchanged on
    Ray."""
    return (config, ()) if config.uses_ray else fit_engines(config, this_machine())


def fit_engines(config: RunConfig, machine: Machine) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the configuration with the engines that fit a machine, and a line for each model whose numbers do not
    apply."""
    model, lines = fit_policy(config.model, config.engine, machine, deterministic=config.deterministic)
    auxiliary, others = fit_auxiliary(config.auxiliary_models)
    if not (lines or others):
        return config, ()
    return config.model_copy(update={"model": model, "auxiliary_models": auxiliary}), (*lines, *others)


def check_engine(config: RunConfig) -> EngineChoice | None:
    """Choose the engine; None on Ray. Raises `ConfigError` if the engine or Ray is not available, as far as this can be
    checked before anything starts."""
    if config.uses_ray and (device := config.engine.device).startswith("cuda:"):
        raise ConfigError(f"engine.device is {device}, but Ray assigns the GPUs: set it to cuda")
    check_place(config)
    if config.uses_ray:
        own_engine(config.engine, deterministic=config.deterministic)
        return None
    check_gpu(config.engine.device)
    return choose_engine(
        config.engine,
        this_machine(),
        deterministic=config.deterministic,
        width=config.model.tensor_parallel_size,
    )


def check_place(config: RunConfig) -> None:
    """Raise `ConfigError` for `cluster` settings without effect, or if Ray is needed and not installed."""
    if config.uses_ray:
        if config.rollout.isolation != "none":
            raise ConfigError(
                "rollout.isolation is process, but on Ray workflows run in workers, which are processes already: "
                "remove the setting (cluster.rollouts_per_worker: 1 gives each attempt a worker of its own)"
            )
        from sharpen.placement.cluster.connect import check_ray

        check_ray()
        if config.gateway.port:
            raise ConfigError(
                f"gateway.port is {config.gateway.port}, but on Ray each rollout worker has a server of its own: "
                "remove the setting"
            )
    elif config.cluster != ClusterConfig():
        raise ConfigError("the settings of cluster have no effect with execution: local: set it to ray, or remove them")


def check_base(config: RunConfig, engine: EngineChoice | None, *, serves: bool) -> None:
    """Raise `ConfigError` if the frozen weights cannot be shared as `trainer.lora.base` says. `serves`: the run has an
    engine, `engine` if it is known."""
    lora = config.trainer.lora
    if lora is None or lora.base == "own":
        return
    apart = config.uses_ray or config.mode != "both" or (engine is not None and engine.type != "embedded")
    if config.trainer.has_ranks or (serves and apart):
        raise ConfigError(
            f"trainer.lora.base is {lora.base!r}, for which trainer and embedded engine must be in one "
            "process: leave execution and mode out, set engine.type to embedded and trainer.num_processes to 1 "
            "without trainer.cpu_offload, or base to own"
        )
    if serves and config.engine.dtype != config.trainer.dtype:
        raise ConfigError(
            f"trainer.lora.base is {lora.base!r}, one copy of the frozen weights for trainer and "
            f"engine, but trainer.dtype is {config.trainer.dtype} and engine.dtype {config.engine.dtype}: set them to "
            "the same"
        )


def check_policies(config: RunConfig, engine: EngineChoice | None, recipe: Recipe | None) -> None:
    """Raise `ConfigError` if the engine cannot serve `policies` beside the trained one, as adapters over one base; for
    a name that is none, or an auxiliary model's; or if it is not known which snapshot answers beside which version."""
    if not config.policies:
        return
    for name in config.policies:
        with_name("", name)
        if name in config.auxiliary_models:
            raise ConfigError(f"policies and auxiliary_models both have {name!r}: give one of them another name")
    lora, given = config.trainer.lora, f"policies has {', '.join(config.policies)}"
    if lora is None:
        raise ConfigError(
            f"{given}, which are served beside the trained policy over one base, but trainer.lora is not set: all "
            "weights would train, and the original ones be gone; set trainer.lora"
        )
    apart = config.uses_ray or config.mode != "both" or config.trainer.has_ranks
    if apart or (engine is not None and engine.type != "embedded"):
        raise ConfigError(
            f"{given}, for which trainer and embedded engine must be in one process: leave execution and mode out, set "
            "engine.type to embedded and trainer.num_processes to 1 without trainer.cpu_offload"
        )
    if lora.base != "own" or lora.experts:
        wrong = f"base is {lora.base!r}" if lora.base != "own" else "experts is true"
        raise ConfigError(f"{given}, but trainer.lora.{wrong}, which leaves no original beside it: leave that out")
    if any(policy.every is not None for policy in config.policies.values()) and isinstance(recipe, RolloutRecipe):
        _check_snapshots(config, recipe)


def _check_snapshots(config: RunConfig, recipe: RolloutRecipe) -> None:
    """Raise `ConfigError` unless all rollouts of a step have one version, and the next step has the next."""
    wrong = ""
    if recipe.overlaps:
        wrong = "sync lets rollouts run ahead of the trainer, so that no version of them is one opponent's"
    elif config.trainer.updates > 1:
        wrong = "trainer.epochs and trainer.num_minibatches make several versions of each step"
    elif recipe.algorithm.needs_baseline:
        wrong = f"{config.algorithm.algorithm_type} compares with greedy rollouts, which are against the original"
    if wrong:
        raise ConfigError(f"policies has follow: trained, but {wrong}: leave that out, or follow: original")


def refuse_policies(config: RunConfig, what: str) -> None:
    """Raise `ConfigError` if there are `policies`, since this is `what`, which answers all agents alike."""
    if config.policies:
        raise ConfigError(f"policies has {', '.join(config.policies)}, but this is {what}: leave policies out")


def served_adapters(config: RunConfig, engine: EngineChoice | None, *, trains: bool) -> LoraConfig | None:
    """Return the LoRA settings if the engine serves the adapters beside the model's own weights: the embedded one where
    it shares these with a trainer; vLLM where it supports their rank and the trainer is in this process."""
    lora = config.trainer.lora
    if lora is None or engine is None:
        return None
    if engine.type == "embedded":
        return lora if trains and lora.base != "own" else None
    if engine.type != "vllm" or config.trainer.has_ranks or config.uses_ray or config.mode != "both":
        return None
    from sharpen.engine.vllm.adapters import RANKS

    return lora if lora.rank <= max(RANKS) else None


def _check_towers(config: RunConfig, engine: EngineChoice | None, folder: Path) -> None:
    """See `check_towers`; without a choice of the engine (on Ray, in a trainer alone) the setting is taken."""
    if config.trainer.train_towers:
        check_towers(config.engine.type if engine is None else engine.type, folder)


def _fit(problems: Problems, config: RunConfig) -> tuple[RunConfig, tuple[str, ...], EngineChoice | None]:
    """Return the configuration fitted to this machine, notices about the changes, and the engine."""
    problems.check(bring, *config.families)
    problems.check(Protocols, config.gateway.protocols)
    config, notices = fit_to_machine(config)
    return config, notices, problems.check(check_engine, config)


def _recipe(problems: Problems, config: RunConfig) -> TrainingRecipe | None:
    problems.check(bring, *config.families)
    recipe: TrainingRecipe | None = problems.check(recipe_of, config)
    if recipe is not None:
        problems.check(check_settings, recipe)
    return recipe


def check_arguments(problems: Problems, arguments: Mapping[str, Any], workflow: Any, judge: Function | None) -> None:
    """Check the arguments of `tune()` one by one, for when they give no valid configuration. `workflow` may also be a
    class or a name, which are not checked here."""
    if workflow is not None and not isinstance(workflow, type | str):
        problems.check(workflow_arguments, workflow)
    if judge is not None:
        problems.check(judge_arguments, judge)
    monitor = arguments["monitor_type"]
    if isinstance(monitor, str) and (monitor in MONITORS or ":" in monitor):
        problems.check(monitor_of, monitor)
    models = [arguments["model"], *(arguments["auxiliary_models"] or {}).values()]
    for model in models:
        if isinstance(model, TunerModelConfig) and getattr(model, "base_url", None) is None:
            problems.check(check_model_path, model.model_path)
    for dataset in (arguments["train_dataset"], arguments["eval_dataset"]):
        if isinstance(dataset, DatasetConfig):
            problems.check(check_path, dataset)


def _check_functions(workflow: Function | None, judge: Function | None) -> None:
    if workflow is not None:
        workflow_arguments(workflow)
    if judge is not None:
        judge_arguments(judge)


def _check_evaluation_of_rows(
    config: RunConfig, workflow: Function | None, judge: Function | None, algorithm: str
) -> None:
    """Raise `ConfigError` if a run that learns from rows has only some of what evaluating an agent needs."""
    if workflow is None and judge is not None:
        raise ConfigError(
            "the judge scores the response of a workflow, but there is no workflow: give both, or neither"
        )
    if workflow is not None and config.eval_dataset is None:
        raise ConfigError(
            f"with {algorithm!r} the workflow only evaluates the agent, on the tasks of eval_dataset: give that too, "
            "or leave the workflow out"
        )
    if workflow is None and config.evaluation.further:
        raise ConfigError("evaluation.further needs a workflow: without one only rows of a single dataset are held out")


def _model_folders(config: RunConfig, *, serves: bool) -> Path:
    """Return the model's folder, after downloading the files of all models. Raises `ModelError`."""
    fetch_auxiliary_models(config.auxiliary_models)
    folder = model_folder(config.model.model_path)
    if serves:
        check_heads(config.model, folder)
    return folder


def _check_machine(problems: Problems, config: RunConfig, *, serves: bool, has_tasks: bool = True) -> None:
    """Check what else the run needs on this machine, as far as possible without the network."""
    problems.check(check_place, config)
    problems.check(check_auxiliary_models, config.auxiliary_models)
    problems.check(monitor_of, config.monitor_type, config.monitor_rollouts)
    problems.check(Pipeline.of, config.sampling.task_operators, ON_TASKS)
    problems.check(Pipeline.of, config.sampling.operators, ON_ROLLOUTS)
    problems.check(check_lora, config.trainer)
    problems.check(check_optimizer, config.trainer)
    if not config.uses_ray:  # else checked later, against the cluster's GPUs
        problems.check(check_trainer, config.trainer, config.engine.device)
    problems.check(check_model_path, config.model.model_path)
    problems.check(check_formats, config.model)
    if has_tasks:
        _check_datasets(problems, config)


def _check_datasets(problems: Problems, config: RunConfig) -> None:
    datasets = (config.train_dataset, config.eval_dataset, *config.evaluation.further.values())
    for dataset in datasets if config.mode != "train" else ():  # the tasks are the explorer's
        if dataset is not None:
            problems.check(check_path, dataset)
