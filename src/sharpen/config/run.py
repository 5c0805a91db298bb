"""The whole configuration of a run: one immutable object, with a section for each stage.

In: YAML (`config.load`), keyword arguments of `tune()`. Out: `RunConfig`. The defaults are the recommended recipe.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, field_validator, model_validator

from sharpen.config.distill import DistillConfig
from sharpen.config.doors import PartName
from sharpen.config.public import (
    ENVIRONMENT,
    AlgorithmConfig,
    DatasetConfig,
    EnvironmentConfig,
    MonitorType,
    Strict,
    TunerModelConfig,
)
from sharpen.config.secrets import hide_in_value
from sharpen.config.sections import ClusterConfig, GatewayConfig, JournalConfig, SyncConfig
from sharpen.config.trainer import CriticConfig, TrainerConfig

Section = TypeVar("Section", bound=Strict)

DEFAULT_PROJECT = "Sharpen"
"""The project of runs that name none."""
ENGINES = ("auto", "embedded", "vllm")
"""Our own engines, and the choice between them."""
HELD_OUT = "held-out"
"""The name of the evaluation set that decides whether the run made the model better."""
KLS = ("none", "k1", "k2", "k3", "low_var_kl", "abs", "corrected_k3")
"""Our own estimators of a divergence."""
KLEstimator = Annotated[str, AfterValidator(PartName("kls", KLS))]
KLPlace = Literal["loss", "reward"]
Behaviour = Literal["none", "plain", "unweighted", "truncated", "masked"]
AGGREGATIONS = (
    "token-mean",
    "sequence-mean-token-mean",
    "sequence-mean-token-sum",
    "rollout-mean",
    "constant-length",
)
"""Our own ways to average the losses of tokens."""
Aggregation = Annotated[str, AfterValidator(PartName("aggregations", AGGREGATIONS))]


class LossConfig(Strict):
    """Parts of the algorithm that differ from its preset; None takes the preset's value."""

    advantage: str | None = None
    """Advantage function (`sharpen algorithms` lists them)."""
    advantage_args: dict[str, Any] = Field(default_factory=dict)
    """Its other parameters."""
    policy_loss: str | None = None
    """Policy loss (`sharpen algorithms` lists them)."""
    policy_loss_args: dict[str, Any] = Field(default_factory=dict)
    """Its other parameters."""
    clip_low: float | None = Field(default=None, ge=0.0)
    """PPO clip below 1."""
    clip_high: float | None = Field(default=None, ge=0.0)
    """PPO clip above 1."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """Upper bound on the ratio of tokens with a negative advantage."""
    kl: KLEstimator | None = None
    """Estimator of the divergence from the reference (the model before training)."""
    kl_coef: float | None = Field(default=None, ge=0.0)
    """Weight of the KL term."""
    kl_in: KLPlace | None = None
    """Place of the KL term: in the loss, or as a penalty on the reward of each sampled token."""
    kl_target: float | None = Field(default=None, gt=0.0)
    """Target divergence in nats per token, to which `kl_coef` adapts after each step."""
    kl_horizon: int | None = Field(default=None, ge=1)
    """Rollouts over which `kl_coef` adapts with `kl_target`."""
    behaviour: Behaviour | None = None
    """Weighs tokens whose recorded logprob is not that of the weights at the start of the step
    (docs/reference/algorithms.md). None takes the algorithm's value, or `truncated` with `vespo` or a clip below
    0.05."""
    behaviour_low: float | None = Field(default=None, ge=0.0, le=1.0)
    """Weights below this become 0 (`masked`)."""
    behaviour_high: float | None = Field(default=None, ge=1.0)
    """Weights above this become 0 (`masked`), or this value (`truncated`)."""
    sequence_mask: float | None = Field(default=None, gt=0.0)
    """Leaves tokens with a negative advantage out of calls whose tokens have, in the mean, become less likely by more
    than this many nats since they were sampled."""
    entropy_coef: float | None = Field(default=None, ge=0.0)
    """Weight of the entropy bonus."""
    echo: float | None = Field(default=None, gt=0.0)
    """Weight of the cross-entropy of what the environment answered between two calls of a sequence, a mean over these
    tokens of an update."""
    aggregation: Aggregation | None = None
    """How per-token losses are averaged into one number."""
    constant_length: int | None = Field(default=None, ge=1)
    """Divisor of aggregation `constant-length`, in tokens; None takes `model.max_tokens`."""
    std_normalize: bool | None = None
    """Divide advantages by the group's standard deviation."""
    step_norm: bool | None = None
    """Divide a rollout's advantage by its number of calls (`multi_step_grpo`)."""
    std_threshold: float | None = Field(default=None, ge=0.0)
    """Groups whose reward deviation is at most this are dropped."""


class AuxiliaryModelConfig(TunerModelConfig):
    """A further model that workflow and judge may call, served by its own engine or by an endpoint."""

    base_url: str | None = None
    """URL of an OpenAI-compatible endpoint that serves the model named `model_path`; None serves the model here."""
    api_key_env: str | None = None
    """Environment variable that holds the endpoint's key."""
    max_total_tokens: int | None = Field(default=None, ge=1)
    """Most prompt plus sampled tokens of the whole run; the next call stops it."""


class PolicyConfig(Strict):
    """A further policy over the same model, for the calls of the agent of its name (docs/use/policies.md)."""

    follow: Literal["original", "trained"] = "original"
    """Whose weights it has: `original` is the model before training, `trained` a snapshot of the policy that is
    trained. It never trains. In evaluations it is the original."""
    every: int | None = Field(default=None, ge=1)
    """With `trained`: after how many policy versions the snapshot is renewed, which is 1 to so many versions old."""

    @model_validator(mode="after")
    def _every_is_for_snapshots(self) -> Self:
        if (self.follow == "trained") != (self.every is not None):
            raise ValueError(
                "follow: trained needs every, the policy versions after which its snapshot is renewed, and "
                f"follow: original has none; got follow: {self.follow}, every: {self.every}"
            )
        return self


class JudgeFloorConfig(Strict):
    """How far the judge must agree with its owner's marks before a run starts (docs/use/judges.md)."""

    marks: str
    """File of marked answers, as `sharpen judge label` writes it."""
    kappa: float = Field(default=0.6, ge=-1.0, le=1.0)
    """Least Cohen's kappa: agreement beyond chance. Below it the run does not start."""
    good_from: float = 0.5
    """The reward from which the judge calls an answer good."""


class RolloutConfig(Strict):
    """How workflows run."""

    max_concurrent_rollouts: int = Field(default=256, ge=1)
    """Workflows that run at the same time."""
    timeout_s: float = Field(default=3600.0, gt=0.0)
    """Time limit of one attempt, the judge included."""
    isolation: Literal["none", "process"] = "none"
    """Whether each attempt, with its judge, runs in a process of its own (docs/use/isolation.md)."""
    num_processes: int | None = Field(default=None, ge=1)
    """Processes of `isolation: process`; None is four for each core, at most `max_concurrent_rollouts`."""
    memory_mb: int | None = Field(default=None, ge=64)
    """Most memory of such a process with what it has started, in MB."""
    max_attempts: int = Field(default=3, ge=1)
    """Most attempts of a rollout, if something other than the model makes it fail."""
    max_calls: int | None = Field(default=None, ge=1)
    """Most model calls of one rollout."""
    model_exceptions: tuple[str, ...] = ()
    """Exceptions that the model's answer causes, as `package.Class` (subclasses too), beside those of known frameworks
    (docs/use/failures.md)."""
    env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables of workflow and judge, set before their code is loaded. The run's folder keeps them, with
    `***` in place of secret ones (docs/understand/security.md)."""
    choices: Literal["used", "all"] = "used"
    """Which answers to a request with `n` > 1 train: the one that the agent used, or all, for agents that vote."""
    side_models: tuple[str, ...] = ()
    """Names of models (patterns such as `*haiku*`) whose calls, such as titles and summaries, are answered but do not
    train."""
    failure_reward: float | None = None
    """Reward of rollouts that the model made fail; None excludes them."""
    max_excluded_share: float = Field(default=0.5, ge=0.0, le=1.0)
    """The run stops when more than this share of a step's rollouts is excluded, or replaced by a retry with other
    answers."""

    @model_validator(mode="after")
    def _is_isolated(self) -> Self:
        given = [f"{name} ({value})" for name in ("num_processes", "memory_mb") if (value := getattr(self, name))]
        if given and self.isolation == "none":
            raise ValueError(f"{' and '.join(given)} are for isolation: process: set it, or leave them out")
        return self

    @field_validator("model_exceptions")
    @classmethod
    def _are_exceptions(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", name):
                raise ValueError(f"must name exceptions as package.Class (builtins.ValueError), got {name!r}")
            package, _, kind = name.partition(".")
            if package == "builtins" and not _is_exception(getattr(builtins, kind, None)):
                raise ValueError(f"{name!r} is not an exception of Python")
            if name in ("builtins.Exception", "builtins.BaseException"):
                raise ValueError(
                    f"{name!r} covers every failure, also those that the model did not cause: name specific exceptions"
                )
        return value


class EngineConfig(Strict):
    """The inference engine."""

    type: Annotated[str, AfterValidator(PartName("engines", ENGINES))] = "auto"
    """`embedded` is Sharpen's own engine, in this process; `vllm` needs vLLM; `auto` takes vLLM if it is installed and
    there is a GPU."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:<number>`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type; `auto` is bfloat16 on a GPU, and float32 on a CPU unless a run that trains computes faster in
    bfloat16 (docs/use/plan.md)."""
    max_slots: int = Field(default=256, ge=1)
    """Sequences that decode at the same time."""
    kv_cache_mb: int | None = Field(default=None, ge=1)
    """Most memory of KV cache and recurrent states in MB; None: what `max_slots` needs, up to a quarter of the free, or
    less where memory is short (docs/use/plan.md)."""

    @field_validator("device")
    @classmethod
    def _is_device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
            raise ValueError(f"must be auto, cpu, cuda or cuda:<number>, got {value!r}")
        return value


class TaskSetConfig(Strict):
    """What the tasks of one evaluation set have in place of the run's; None is the run's."""

    workflow: str | None = None
    """As the run's `workflow`, for Trinity `Workflow` classes alone."""
    workflow_args: dict[str, Any] | None = None
    """As the run's `workflow_args`, in place of all of them."""
    task_args: dict[str, Any] | None = None
    """As the run's `task_args`, in place of all of them."""


class EvaluationConfig(Strict):
    """Evaluation on held-out tasks."""

    hold_out: bool = True
    """Without `eval_dataset`, hold out a tenth of the tasks (at most 512); false trains on all of them."""
    max_tasks: int | None = Field(default=None, ge=1)
    """Evaluate only on this many tasks, the first ones."""
    before_and_after: bool = True
    """Evaluate, greedy and sampled, before and after training."""
    decided_by: Literal["sampled", "greedy"] = "sampled"
    """Which evaluation decides the verdict and the checkpoint `best`; `greedy` is at temperature 0."""
    max_without_calls: float = Field(default=0.1, ge=0.0, le=1.0)
    """An evaluation is void if more than this share of its rollouts made no model call."""
    further: dict[str, DatasetConfig] = Field(default_factory=dict)
    """Further datasets, by name, evaluated before and after training and reported separately."""
    own: dict[str, TaskSetConfig] = Field(default_factory=dict)
    """What an evaluation set has of its own, by its name in `further`; `held-out` is `eval_dataset`."""

    @model_validator(mode="after")
    def _sets_exist(self) -> Self:
        if HELD_OUT in self.further:
            raise ValueError(f"further has a dataset {HELD_OUT!r}, which is the name of eval_dataset: give it another")
        for name in self.own:
            if name not in (HELD_OUT, *self.further):
                sets = ", ".join((HELD_OUT, *self.further))
                raise ValueError(f"own has {name!r}, which is no evaluation set: there are {sets}")
        return self


class CheckConfig(Strict):
    """The check before training."""

    enabled: bool = True
    """Run the check."""
    num_tasks: int = Field(default=4, ge=1)
    """Tasks to run through agent and judge."""
    gradients: bool = True
    """Compare the trainer's gradient of a small batch with a plain loop's; a run that differs ends."""
    stop_without_signal: bool = False
    """Stop, instead of warning, when all rewards are equal."""


class CertificateConfig(Strict):
    """The run certificate, whose checks run in every step."""

    on_violation: Literal["stop", "warn"] = "stop"
    """Stop before the update, or only warn and record it."""
    retrain: Literal["auto", "off"] = "auto"
    """Make some steps' updates once more, as far as free memory and 5% of the time allow, and compare every weight
    (docs/understand/certificate.md)."""


class OperatorConfig(Strict):
    """A function over tasks or rollouts."""

    name: str
    """A built-in operator, or `package.module:function` or `path/file.py:function`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Its keyword arguments."""


class SamplingConfig(Strict):
    """Which tasks are drawn, and which rollouts and groups train."""

    order: Literal["shuffled", "sequential", "curriculum", "difficulty"] = "shuffled"
    """Order of the tasks: `shuffled` anew for each epoch; `sequential`; `curriculum`, from easy to hard by
    `curriculum_key`; `difficulty`, preferring a mean reward near `difficulty_target`."""
    curriculum_key: str | None = None
    """Field of the row with a task's difficulty, a number. A leading `-` means that greater numbers are easier
    (`-pass_rate`)."""
    difficulty_target: float = 0.5
    """Mean reward of the tasks that `difficulty` prefers."""
    difficulty_width: float = Field(default=0.25, gt=0.0)
    """Distance of a task's mean reward from the target beyond which it is rarely drawn."""
    difficulty_floor: float = Field(default=0.05, gt=0.0, le=1.0)
    """Weight of the least suitable task; a task at the target, or not drawn yet, has weight 1."""
    difficulty_key: str | None = None
    """Field of the row: tasks with the same value share one mean reward (`environment`: each part of a mixture has
    one)."""
    max_refill: float | None = Field(default=None, ge=0.0)
    """Most further tasks of a step in place of dropped groups, as a multiple of `algorithm.batch_size`; 0 replaces
    none, None takes the algorithm's value (4 for `dapo`)."""
    reward_low: float | None = None
    """Groups with a mean reward below this are dropped."""
    reward_high: float | None = None
    """Groups with a mean reward above this are dropped."""
    overlong_cache: int | None = Field(default=None, ge=1)
    """Tokens below `overlong_length` over which the penalty grows linearly; None is no penalty."""
    overlong_length: int | None = Field(default=None, ge=1)
    """Sampled tokens of one call from which on the full penalty applies; None takes `model.max_tokens`."""
    overlong_penalty: float = Field(default=1.0, gt=0.0)
    """The full penalty."""
    length_penalty: float | None = Field(default=None, gt=0.0)
    """What the longest rollout of a group loses, as a share of the group's mean reward; others by their sampled tokens
    (docs/use/sampling.md)."""
    turns_penalty: float | None = Field(default=None, gt=0.0)
    """The same by trained calls."""
    overlong_filter: bool = False
    """Exclude rollouts that a token limit cut from statistics and update."""
    task_operators: list[OperatorConfig] = Field(default_factory=list)
    """Operators on the training tasks, applied in order before the run (docs/use/operators.md)."""
    operators: list[OperatorConfig] = Field(default_factory=list)
    """Operators on the rollouts of a step, applied in order before they train."""
    replay_share: float = Field(default=0.0, ge=0.0)
    """Replayed groups of earlier steps, as a multiple of the step's tasks; 0 is no replay."""
    replay_priority: Literal["signal", "recency"] = "signal"
    """`recency` prefers groups trained recently and rarely, `signal` also large advantages."""
    max_staleness: int | None = Field(default=None, ge=1)
    """Greatest age of a replayed group's oldest token, in policy versions (updates). None is the updates of four steps,
    plus those by which rollouts run ahead."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.reward_low is not None and self.reward_high is not None and self.reward_low > self.reward_high:
            raise ValueError(f"reward_low ({self.reward_low:g}) must be at most reward_high ({self.reward_high:g})")
        if (self.order == "curriculum") != (self.curriculum_key is not None):
            raise ValueError("order curriculum and curriculum_key go together: give both, or neither")
        if self.difficulty_key is not None and self.order != "difficulty":
            raise ValueError(f"difficulty_key belongs to order difficulty, and order is {self.order}")
        return self


class SupervisedConfig(Strict):
    """The fields of the rows of `sft`, `cpt` and `dpo`, and which of their tokens train."""

    messages_key: str = "messages"
    """Field with a conversation (`sft`) in the format of OpenAI's API: a list, or its JSON text."""
    tools_key: str = "tools"
    """Field with the tools of the conversation: a list, or its JSON text."""
    prompt_key: str = "prompt"
    """Field with the prompt, text or messages (`dpo`, and `sft` without messages)."""
    response_key: str = "response"
    """Field with the answer to the prompt (`sft`)."""
    chosen_key: str = "chosen"
    """Field with the better answer, text or messages (`dpo`)."""
    rejected_key: str = "rejected"
    """Field with the worse answer (`dpo`)."""
    text_key: str = "text"
    """Field with plain text (`cpt`)."""
    images_key: str | None = None
    """Field with the images of the messages (`sft`, `dpo`). None is `images`, where the messages say where images are,
    or it holds images themselves."""
    system_prompt: str | None = None
    """System message for conversations without one."""
    turns: Literal["all", "last"] = "all"
    """Which of the assistant's turns train (`sft`); the others are context."""
    too_long: Literal["drop", "refuse"] = "drop"
    """Rows longer than `model.max_model_len`: `drop` and count them, or stop. Texts (`cpt`) are cut into pieces."""


class ExpertConfig(Strict):
    """The expert rows of `mix` and `mix_chord`, which train together with rollouts. `supervised` sets how they are
    read."""

    dataset: DatasetConfig | None = None
    """Conversations in the format of `sft`, repeated for as long as the run lasts."""
    batch_size: int | None = Field(default=None, ge=1)
    """Expert rows of each step; None takes `algorithm.batch_size`."""
    mu: float | None = Field(default=None, ge=0.0, le=1.0)
    """Weight of the expert's loss (default 0.1); the rollouts' weight is 1 - `mu`. The peak of a changing weight."""
    mu_warmup_steps: int | None = Field(default=None, ge=0)
    """Steps over which the weight rises to `mu`."""
    mu_decay_steps: int | None = Field(default=None, ge=0)
    """Steps after the warm-up over which the weight falls to `mu_valley`, along a cosine."""
    mu_valley: float | None = Field(default=None, ge=0.0, le=1.0)
    """Final weight after the decay."""
    phi: bool | None = None
    """Weight each expert token by p (1 - p), with p its probability; None is true for `mix_chord`."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.mu_decay_steps is None) != (self.mu_valley is None):
            raise ValueError("mu_decay_steps and mu_valley go together: give both, or neither")
        if self.dataset is not None and (self.dataset.total_epochs != 1 or self.dataset.total_steps is not None):
            raise ValueError("dataset.total_epochs and total_steps have no effect here: set them in train_dataset")
        return self


class RunConfig(Strict):
    """Everything that determines a run."""

    project: str = DEFAULT_PROJECT
    """Folder of the project's runs, below `checkpoint_root_dir`."""
    name: str | None = None
    """Name of the run; an existing run of this name continues. None makes `Experiment-<timestamp>`."""
    checkpoint_root_dir: str = "checkpoints"
    """Folder of all runs."""
    workflow: str | None = None
    """`package.module:function` or `path/file.py:function` (or a Trinity `Workflow` class, or its registered name); in
    Python pass the function itself."""
    judge: str | None = None
    """As `workflow`; None if the workflow returns the reward."""
    judge_floor: JudgeFloorConfig | None = None
    """None starts without a look at the judge."""
    workflow_args: dict[str, Any] = Field(default_factory=dict)
    """Passed to workflow and judge: as `workflow_args`, if they have that parameter, and as `task["workflow_args"]`, if
    the dataset has no such field."""
    task_args: dict[str, Any] = Field(default_factory=dict)
    """Passed to a workflow class with each task, in addition to the row (docs/use/trinity.md)."""
    environment: EnvironmentConfig | None = None
    """Where tasks, workflow and judge come from, as far as they are not given."""
    train_dataset: DatasetConfig
    """Tasks to train on."""
    eval_dataset: DatasetConfig | None = None
    """Tasks to evaluate on; None holds out some of the training tasks (`evaluation.hold_out`)."""
    model: TunerModelConfig
    """The model to tune."""
    families: tuple[Annotated[str, AfterValidator(PartName("families", ()))], ...] = ()
    """Families of models of your own, by import path or announced name (docs/use/extending.md)."""
    auxiliary_models: dict[str, AuxiliaryModelConfig] = Field(default_factory=dict)
    """Further models that workflow and judge may call, by name, never trained."""
    policies: dict[str, PolicyConfig] = Field(default_factory=dict)
    """Further policies over the trained model, by the name of the agent whose calls they answer: an opponent."""
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    supervised: SupervisedConfig = Field(default_factory=SupervisedConfig)
    expert: ExpertConfig = Field(default_factory=ExpertConfig)
    distill: DistillConfig = Field(default_factory=DistillConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    gateway: GatewayConfig = Field(default_factory=GatewayConfig)
    sync: SyncConfig = Field(default_factory=SyncConfig)
    mode: Literal["both", "explore", "train"] = "both"
    """`both` is the whole run; `explore` only rolls out, `train` only trains, on what an explorer of the same name
    rolls out (docs/use/two-processes.md)."""
    exchange: str | None = None
    """Where explorer and trainer exchange rollouts and weights: a folder, or a database, `postgresql://...`. None is
    `exchange` in the run's folder."""
    execution: Literal["local", "ray"] | None = None
    """Whether the run's parts are actors of Ray (docs/use/ray.md); None is `ray` if anything is set in `cluster`, else
    `local`."""
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    check: CheckConfig = Field(default_factory=CheckConfig)
    certificate: CertificateConfig = Field(default_factory=CertificateConfig)
    journal: JournalConfig = Field(default_factory=JournalConfig)
    monitor_type: MonitorType = "tensorboard"
    """Where metrics go, besides `metrics.jsonl`."""
    monitor_rollouts: int = Field(default=0, ge=0)
    """How many rollouts of each step go there as a table, with prompts and answers (not to `tensorboard`)."""
    time_limit_s: float | None = Field(default=None, gt=0.0)
    """Training stops after the step in which this time has passed."""
    stall_report_s: float | None = Field(default=600.0, gt=0.0)
    """Seconds without any finished call (not on Ray), rollout or step after which the run says, once, what waits
    where."""
    seed: int = Field(default=0, ge=0)
    """Seed of everything random in the run."""
    deterministic: bool = False
    """Use fixed shapes in the engine: bitwise reproducible, but slower."""

    @property
    def uses_ray(self) -> bool:
        """Whether the run's parts live in actors of Ray: by `execution`, or because anything is set in `cluster`."""
        return self.execution == "ray" or (self.execution is None and self.cluster != ClusterConfig())

    def changed(self, settings: Mapping[str, Any]) -> Self:
        """Return the configuration with other values for these settings, by dotted name; they are not checked. What
        counts as given (`model_fields_set`) stays as it is."""
        config = self
        for name, value in settings.items():
            config = _changed(config, name.split("."), value)
        return config

    @model_validator(mode="before")
    @classmethod
    def _takes_tasks_of_environment(cls, data: Any) -> Any:
        """Let the tasks be the environment's where no dataset is named."""
        if not isinstance(data, dict) or data.get("environment") is None:
            return data
        evaluation = data.get("evaluation")
        holds_out = not isinstance(evaluation, dict) or evaluation.get("hold_out", True) is not False
        splits = {"train_dataset": "train"} | ({"eval_dataset": "test"} if holds_out else {})
        theirs = {}
        for name, split in splits.items():
            given = data.get(name) or {}
            if isinstance(given, dict) and given.get("path") is None:
                theirs[name] = {"path": ENVIRONMENT, "split": split} | given
        return data | theirs

    @model_validator(mode="after")
    def _has_two_halves(self) -> Self:
        if self.mode == "both" and self.exchange is not None:
            raise ValueError(
                f"exchange ({hide_in_value(self.exchange)!r}) needs mode explore or train, but mode is 'both': remove "
                "it, or set mode"
            )
        if self.mode != "both" and self.name is None:
            raise ValueError(f"mode {self.mode!r} needs a name, by which explorer and trainer find each other")
        return self

    @field_validator("project", "name")
    @classmethod
    def _is_folder_name(cls, value: str | None) -> str | None:
        if value is not None and (value in ("", ".", "..") or PurePath(value).name != value or "\\" in value):
            raise ValueError(f"must be the name of a folder, without separators, got {value!r}")
        return value


def _changed(section: Section, place: Sequence[str], value: Any) -> Section:
    name, rest = place[0], place[1:]
    inner = _changed(getattr(section, name), rest, value) if rest else value
    return type(section).model_construct(set(section.model_fields_set), **{**dict(section), name: inner})


def _is_exception(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)
