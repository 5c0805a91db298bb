"""The whole configuration of a run: one immutable object that every stage reads its own section of.

In: YAML (`config.load`), keyword arguments of `tune()`. Out: `RunConfig`. Defaults are the vetted recipe.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Literal

from pydantic import Field, field_validator

from agenttune.config.public import AlgorithmConfig, DatasetConfig, MonitorType, Strict, TunerModelConfig

KLEstimator = Literal["none", "k1", "k2", "k3"]
Aggregation = Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "rollout-mean"]


class LossConfig(Strict):
    """Parts of the algorithm that differ from its preset; None takes the preset's value."""

    clip_low: float | None = Field(default=None, ge=0.0)
    """PPO clip below 1."""
    clip_high: float | None = Field(default=None, ge=0.0)
    """PPO clip above 1."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """Bound on the ratio where the advantage is negative."""
    kl: KLEstimator | None = None
    """Estimator of the divergence from the reference (the model before training)."""
    kl_coef: float | None = Field(default=None, ge=0.0)
    """Weight of the KL term."""
    entropy_coef: float | None = Field(default=None, ge=0.0)
    """Weight of the entropy bonus."""
    aggregation: Aggregation | None = None
    """How per-token losses become one number."""
    std_normalize: bool | None = None
    """Divide advantages by the group's standard deviation."""
    step_norm: bool | None = None
    """Divide a rollout's advantage by its number of calls (`multi_step_grpo`)."""
    std_threshold: float | None = Field(default=None, ge=0.0)
    """Groups whose reward deviation is at most this are dropped."""


class RolloutConfig(Strict):
    """How workflows run."""

    max_concurrent_rollouts: int = Field(default=256, ge=1)
    """Workflows that run at the same time."""
    timeout_s: float = Field(default=3600.0, gt=0.0)
    """Time limit of one attempt, the judge included."""
    max_attempts: int = Field(default=3, ge=1)
    """Attempts of a rollout that fails by something other than the model."""
    max_calls: int | None = Field(default=None, ge=1)
    """Model calls of one rollout, at most; None is no limit."""
    failure_reward: float | None = None
    """Reward of rollouts that fail by the model's own doing; None excludes them."""
    max_excluded_share: float = Field(default=0.5, ge=0.0, le=1.0)
    """The run stops when more than this share of a step's rollouts is excluded."""


class EngineConfig(Strict):
    """The embedded inference engine."""

    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:<number>`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type; `auto` is bfloat16 on a GPU and float32 on a CPU."""
    max_slots: int = Field(default=256, ge=1)
    """Sequences that decode at the same time."""
    kv_cache_mb: int | None = Field(default=None, ge=1)
    """Bound on the KV cache; None takes what `max_slots` needs, within a quarter of the free memory."""

    @field_validator("device")
    @classmethod
    def _is_device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
            raise ValueError(f"must be auto, cpu, cuda or cuda:<number>, but {value!r} came")
        return value


class TrainerConfig(Strict):
    """How weights are updated."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type over fp32 master weights; `auto` as in the engine."""
    max_tokens_per_micro_batch: int = Field(default=8192, ge=1)
    """Computed tokens of one forward and backward pass, at most (a longer sequence goes alone)."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a step's batch."""
    num_minibatches: int = Field(default=1, ge=1)
    """Updates of one pass."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """AdamW's decay of the mean gradient."""
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    """AdamW's decay of the mean squared gradient."""
    eps: float = Field(default=1e-8, gt=0.0)
    """AdamW's guard against division by zero."""
    weight_decay: float = Field(default=0.01, ge=0.0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Gradients are clipped to this norm."""
    warmup_steps: int = Field(default=0, ge=0)
    """Updates until the learning rate is reached."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up, over the planned updates."""
    min_lr_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """Where linear and cosine schedules end."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Checkpoints to keep besides the best and the latest."""


class EvaluationConfig(Strict):
    """Evaluation on held-out tasks."""

    hold_out: bool = True
    """Without an evaluation dataset, hold out a tenth of the tasks (at most 512); false trains on all of them."""
    max_tasks: int | None = Field(default=None, ge=1)
    """Evaluate on the first so many tasks only."""
    before_and_after: bool = True
    """Evaluate, greedy and sampled, before and after training."""
    further: dict[str, DatasetConfig] = Field(default_factory=dict)
    """Further datasets, by name, evaluated before and after and reported beside."""


class CheckConfig(Strict):
    """The pre-flight check."""

    enabled: bool = True
    """Check before training."""
    num_tasks: int = Field(default=4, ge=1)
    """Tasks that go through agent and judge."""
    stop_without_signal: bool = False
    """Stop, rather than warn, when every reward is the same."""


class RunConfig(Strict):
    """Everything that determines a run."""

    project: str = "AgentTune"
    """Folder of the project's runs, below `checkpoint_root_dir`."""
    name: str | None = None
    """A fixed name continues that run; None makes `Experiment-<timestamp>`."""
    checkpoint_root_dir: str = "checkpoints"
    """Folder of all runs."""
    workflow: str | None = None
    """`package.module:function` or `path/file.py:function`; in Python pass the function itself."""
    judge: str | None = None
    """As `workflow`; None where the workflow gives the reward."""
    train_dataset: DatasetConfig
    """Tasks to train on."""
    eval_dataset: DatasetConfig | None = None
    """Tasks to evaluate on; None holds out a part of the training tasks (`evaluation.hold_out`)."""
    model: TunerModelConfig
    """The model to tune."""
    auxiliary_models: dict[str, TunerModelConfig] = Field(default_factory=dict)
    """Further models that workflow and judge may call, by name; never trained."""
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    check: CheckConfig = Field(default_factory=CheckConfig)
    monitor_type: MonitorType = "tensorboard"
    """Where metrics go, besides `metrics.jsonl`."""
    time_limit_s: float | None = Field(default=None, gt=0.0)
    """Training stops after the step during which this much time has passed."""
    seed: int = Field(default=0, ge=0)
    """Seed of everything random in the run."""
    deterministic: bool = False
    """Fixed shapes in the engine: bitwise reproducible, slower."""

    @field_validator("project", "name")
    @classmethod
    def _is_folder_name(cls, value: str | None) -> str | None:
        if value is not None and (value in ("", ".", "..") or PurePath(value).name != value or "\\" in value):
            raise ValueError(f"must be the name of a folder, without separators, but {value!r} came")
        return value
