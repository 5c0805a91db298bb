"""The configuration objects that users build in Python, with the names, fields and defaults of AgentScope's tuner.

In: keyword arguments. Out: validated pydantic objects. An unknown field is an error that names the nearest known one.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from sharpen.config.doors import PartName
from sharpen.config.explain import InvalidConfigError, explain

_NUMBERS = (int, float, int | None, float | None)


class Strict(BaseModel):
    """Base of every configuration object. Unknown fields are errors, and objects are immutable.

    Construction raises `ConfigError`, with a sentence for each wrong field and the nearest name for an unknown one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise InvalidConfigError.of(type(self).__name__, explain(type(self), error)) from None

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation in _NUMBERS:
            raise ValueError(f"must be a number, got {value}")
        return value


class DatasetConfig(Strict):
    """The location of tasks: a Hugging Face dataset, a folder, or a single file (JSONL, JSON, Parquet, CSV)."""

    path: str
    """Folder, file, dataset name on the Hugging Face hub, or a function that gives rows (docs/use/extending.md);
    `environment`: the tasks of the run's environment, if it has one."""
    name: str | None = None
    """Configuration of the dataset (for GSM8K: `main`)."""
    split: str | None = "train"
    """Split to use."""
    total_epochs: int = Field(default=1, ge=1)
    """Passes over the tasks."""
    total_steps: int | None = Field(default=None, ge=1)
    """Steps to run; overrides `total_epochs`."""

    def preview(self, n: int = 5) -> list[dict[str, Any]]:
        """Print the first `n` rows as JSON and return them."""
        rows = self._first_rows(n)
        _print_json(rows)
        return rows

    def _first_rows(self, n: int) -> list[dict[str, Any]]:
        from sharpen.config.rows import read_rows

        return [dict(row) for row in islice(read_rows(self), n)]


ENVIRONMENT = "environment"
"""The path of a dataset whose rows are the tasks of the run's environment."""
ENVIRONMENTS = ("reasoning-gym", "gymnasium", "textarena", "verifiers", "openenv", "harbor", "mixture")
"""The environments that come with Sharpen."""


class EnvironmentConfig(Strict):
    """Tasks and how they are attempted, of one of the field's environments (docs/use/environments.md)."""

    type: Annotated[str, AfterValidator(PartName("environments", ENVIRONMENTS))]
    """What kind of environment it is."""
    id: str | None = None
    """Which one of the kind: a generator, a game."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Its own settings, under its own names: difficulty, weights."""
    system_prompt: str | None = None
    """System message in place of the environment's own; empty is none."""
    train_tasks: int | None = Field(default=None, ge=1)
    """Tasks to train on. None is 1,000 where tasks are made up, and all where they are a list."""
    held_out_tasks: int | None = Field(default=None, ge=1)
    """Tasks to evaluate on; none of them trains. None is 200 where tasks are made up, and all where they are a list."""
    seed: int = Field(default=0, ge=0)
    """Seed of the tasks, apart from that of the run: runs with other seeds have the same tasks."""


class Dataset(DatasetConfig):
    """`DatasetConfig` under the name of AgentScope's first tuner, with a preview by column."""

    def preview(self, n: int = 5) -> dict[str, list[Any]]:  # type: ignore[override]
        """Print the first `n` rows as JSON, by column, and return them in this form (None for a missing value)."""
        rows = self._first_rows(n)
        columns = {
            name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)
        }
        _print_json(columns)
        return columns


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


MIN_TEMPERATURE = 0.01
"""The lowest sampling temperature above 0 (greedy): below it, rounding errors dominate an engine's logprobs."""


class TunerModelConfig(Strict):
    """The model to tune (or an auxiliary one) and how it samples by default."""

    model_path: str
    """Folder with a Hugging Face model, or a model name on the hub."""
    max_model_len: int = Field(ge=2)
    """Most prompt plus sampled tokens of one call."""
    temperature: float = Field(default=1.0, ge=0.0)
    """Sampling temperature of calls that do not set their own: 0 (greedy), or at least 0.01 where it trains."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling (top-p) of calls that do not set their own."""
    top_k: int = Field(default=0, ge=0)
    """Sampling from the k likeliest tokens (top-k) for calls that do not set their own; 0 is all of them."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Sampling from the tokens at least this many times as likely as the likeliest one (min-p), for calls that do not
    set their own; 0 is all of them."""
    max_tokens: int = Field(default=8192, ge=1)
    """Most sampled tokens of calls that do not set their own limit."""
    enable_thinking: bool | None = None
    """Passed to the chat template (Qwen3)."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs of one engine (vLLM); without GPUs, worker processes with their own cores."""
    inference_engine_num: int = Field(default=1, ge=1)
    """Engines that serve this model."""
    tool_call_parser: str | None = "auto"
    """Format of tool calls in the sampled text, by name; "auto" is that of the chat template; None leaves calls in the
    text."""
    reasoning_parser: str | None = "auto"
    """Format of the reasoning in the sampled text, by name; "auto" is that of the chat template; None leaves it in the
    text."""

    @model_validator(mode="before")
    @classmethod
    def _no_hosted_training(cls, data: Any) -> Any:
        """Drop AgentScope's field for a hosted service if it is None; raise `ValueError` for any other value."""
        if not isinstance(data, dict) or "tinker_config" not in data:
            return data
        if data["tinker_config"] is not None:
            raise ValueError(
                "has a tinker_config, which is not part of Sharpen: it configures a hosted service, and Sharpen "
                "trains on your own machine; remove it"
            )
        return {name: value for name, value in data.items() if name != "tinker_config"}


class TunerChatModel(TunerModelConfig):
    """`TunerModelConfig` under its earlier name, which earlier workflows also use to annotate their `model`."""


class AlgorithmConfig(Strict):
    """The algorithm, and the data of each step."""

    algorithm_type: str = "multi_step_grpo"
    """Name of the algorithm."""
    learning_rate: float = Field(default=1e-6, ge=0.0, le=1.0)
    """Peak learning rate. Above 0.01 the run says that it is hardly meant."""
    group_size: int = Field(default=8, ge=1)
    """Rollouts of each task."""
    batch_size: int = Field(default=32, ge=1)
    """Tasks of each step."""
    save_interval_steps: int = Field(default=100, ge=1)
    """Steps between checkpoints (the last one is always saved)."""
    eval_interval_steps: int = Field(default=100, ge=1)
    """Steps between evaluations."""


class Algorithm(AlgorithmConfig):
    """`AlgorithmConfig` under its earlier name."""


def _not_text(value: Any) -> Any:
    """Refuse text that looks like a number: where it comes from the model or a file, it may be anything."""
    if isinstance(value, str | bytes):
        kind = type(value).__name__
        raise ValueError(f"a reward is a number, and {value[:80]!r} is text ({kind}): give float(...) of it")
    return value


class WorkflowOutput(BaseModel):
    """The result of a workflow: a reward, or a response for the judge. Metrics are logged; those that are not numbers
    are skipped with a warning.

    `call_rewards`, for several agents: the reward of each by its name (`model.named`); its calls are then compared with
    those of the same agent in the group's other rollouts. Agents without one have the rollout's reward. `train` are the
    names of the agents, or the indices of the calls (`model.calls()`), that train; None: all.
    """

    model_config = ConfigDict(extra="forbid")

    reward: float | None = None
    response: Any | None = None
    metrics: dict[str, Any] | None = None
    call_rewards: dict[str, Annotated[float, BeforeValidator(_not_text)]] | None = None
    train: list[str | int] | None = None

    _reward_is_no_text = field_validator("reward", mode="before")(_not_text)


class JudgeOutput(BaseModel):
    """The result of a judge. A reward that is not finite, or is text, counts as a failure of the judge."""

    model_config = ConfigDict(extra="forbid")

    reward: float
    metrics: dict[str, Any] | None = None

    _reward_is_no_text = field_validator("reward", mode="before")(_not_text)


MONITORS = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")
"""Our own monitors."""

MonitorType = Annotated[str, AfterValidator(PartName("monitors", MONITORS))]
"""Where metrics are written: one of `MONITORS`, or one of somebody else's (docs/use/extending.md)."""

WorkflowType = Callable[..., Awaitable[WorkflowOutput | float]]
"""`async def workflow(task, model)`; it may also have parameters named `auxiliary_models` and `logger`."""

JudgeType = Callable[..., Awaitable[JudgeOutput]]
"""`async def judge(task, response)`; it may also have parameters named `auxiliary_models` and `logger`."""
