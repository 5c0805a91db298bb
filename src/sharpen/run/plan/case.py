"""The case to plan: a run, the sizes of its models, the devices it is for, and the token counts of a step.

In: a recipe, and what was measured or chosen. Out: a `Case`, with the properties that follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sharpen.config.distill import setting_of_teacher
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError
from sharpen.learning.recipe import EngineType, RolloutRecipe, TrainingRecipe
from sharpen.models.pieces import text_config
from sharpen.models.table import bring
from sharpen.run.plan.hardware import Hardware
from sharpen.run.plan.sizes import Sizes, read_model_config, sizes_of
from sharpen.run.plan.workload import Workload, expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The models of a run: the tuned one, its teachers, and the auxiliary ones that are served here. `config` is the
    tuned model's Hugging Face configuration."""

    config: Any
    policy: Sizes
    teachers: Mapping[str, Sizes] = field(default_factory=dict)
    auxiliary: Mapping[str, Sizes] = field(default_factory=dict)


def read_models(recipe: TrainingRecipe) -> Models:
    """Read the sizes of every model that lies on the run's devices. Raises `ModelError`, `ConfigError`."""
    config, teachers = recipe.config, dict[str, Sizes]()
    bring(*config.families)
    own = read_model_config(config.model.model_path)
    if isinstance(recipe, RolloutRecipe) and recipe.algorithm.needs_teacher:
        if config.distill.own_weights == "start":
            teachers[""] = sizes_of(own)
        elif not (config.distill.models or config.distill.own_weights):
            raise ConfigError(f"{config.algorithm.algorithm_type!r} needs a teacher: set distill.teacher_path")
        for name, path in config.distill.models.items():
            teachers[name] = sizes_of(read_model_config(path, setting_of_teacher(name)))
    auxiliary = {
        name: sizes_of(read_model_config(model.model_path, f"auxiliary_models.{name}.model_path", "engine"))
        for name, model in config.auxiliary_models.items()
        if model.base_url is None
    }
    return Models(config=own, policy=sizes_of(own), teachers=teachers, auxiliary=auxiliary)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run on devices of one kind. `engine` is the engine that serves the model, None if none does."""

    recipe: TrainingRecipe
    models: Models
    hardware: Hardware
    workload: Workload
    engine: EngineType | None

    @property
    def config(self) -> RunConfig:
        """All settings."""
        return self.recipe.config

    @property
    def on_cpu(self) -> bool:
        """Whether everything is computed on the CPU, in the machine's own memory."""
        return self.hardware.kind == "cpu"

    @property
    def vllm(self) -> bool:
        """Whether vLLM serves the model."""
        return self.engine == "vllm"

    @property
    def num_trainers(self) -> int:
        """The number of processes that train together."""
        return self.config.trainer.num_processes

    @property
    def num_engines(self) -> int:
        """The number of devices of all engine replicas."""
        model = self.config.model
        return 0 if self.engine is None else model.tensor_parallel_size * model.inference_engine_num

    @property
    def trains_in_bfloat16(self) -> bool:
        """Whether the trainer computes in bfloat16; its weights are float32 in any case."""
        return self._is_bfloat16(self.config.trainer.dtype)

    @property
    def serves_in_bfloat16(self) -> bool:
        """Whether the engines hold their weights in bfloat16."""
        return self._is_bfloat16(self.config.engine.dtype)

    @property
    def num_trained(self) -> int:
        """The number of the policy's parameters that are trained."""
        sizes, trainer = self.models.policy, self.config.trainer
        if trainer.lora is not None:
            return sizes.lora_parameters(trainer.lora)
        return sizes.parameters + (sizes.towers if trainer.train_towers else 0)

    @property
    def num_in_tables(self) -> int:
        """Of these, the number of those in embeddings and the output layer."""
        return 0 if self.config.trainer.lora is not None else self.models.policy.tables

    @property
    def reads_rounded(self) -> bool:
        """Whether frozen weights are never in fp32 (`trainer.model.read_frozen_module`): those of a dense model, whose
        files, as its configuration says, are in the type that is computed in."""
        in_bfloat16 = str(text_config(self.models.config).dtype).endswith("bfloat16")
        return self.trains_in_bfloat16 and in_bfloat16 and self.models.policy.is_dense

    @property
    def reads_by_layers(self) -> bool:
        """Whether a frozen layer is put into 4 bits as soon as it is read (`models.frozen.load_frozen`)."""
        lora = self.config.trainer.lora
        return lora is not None and lora.base == "nf4" and self.models.policy.is_dense

    @property
    def is_synchronous(self) -> bool:
        """Whether rollouts and training take turns in one process."""
        one_process = not self.config.trainer.has_ranks and not self.config.uses_ray and self.config.mode == "both"
        return one_process and isinstance(self.recipe, RolloutRecipe) and not self.recipe.overlaps

    @property
    def num_in_base(self) -> int:
        """The number of frozen parameters in layers with an adapter; 0 if `trainer.lora.base` is `own`."""
        lora = self.config.trainer.lora
        return 0 if lora is None or lora.base == "own" else self.models.policy.adapted(lora)

    @property
    def is_offloaded(self) -> bool:
        """Whether the trained state is in the host's memory instead of the device's."""
        return self.config.trainer.cpu_offload and not self.on_cpu

    @property
    def is_colocated(self) -> bool:
        """Whether trainer and engine share devices. They do unless Ray places them."""
        return not self.config.uses_ray or self.config.cluster.colocate

    @property
    def shares_weights(self) -> bool:
        """Whether trainer and engine use the same weights in memory: one process, one type, never working at the same
        time."""
        config = self.config
        one_process = not config.trainer.has_ranks and self.num_engines == 1 and not self.vllm and not config.uses_ray
        trainer = config.trainer
        same_weights = trainer.lora is None and not trainer.train_towers and not self.serves_in_bfloat16
        return one_process and same_weights and isinstance(self.recipe, RolloutRecipe) and not self.recipe.overlaps

    @property
    def may_share_base(self) -> bool:
        """Whether trainer and engine may have one copy of the frozen weights: see `decide.check_base`."""
        config = self.config
        one_process = config.mode == "both" and not (config.uses_ray or config.trainer.has_ranks)
        one_process = one_process and not config.policies
        return self.engine == "embedded" and one_process and config.engine.dtype == config.trainer.dtype

    def changed(self, settings: Mapping[str, Any]) -> Case:
        """Return the case with other values for these settings, by dotted name. A smaller `model.max_model_len` makes
        the sequences shorter."""
        config, work = self.config.changed(settings), self.workload
        if config.model.max_model_len < work.longest:
            work = expected(config)
        return replace(self, recipe=replace(self.recipe, config=config), workload=work)

    def _is_bfloat16(self, dtype: str) -> bool:
        return dtype == "bfloat16" or (dtype == "auto" and not self.on_cpu)
