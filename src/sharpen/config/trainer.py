"""Settings of the trainer: how weights are updated.

In: YAML, keyword arguments. Out: sections of `RunConfig`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sharpen.config.public import Strict


class LoraConfig(Strict):
    """Low-rank adapters (LoRA), trained in place of all weights; needs the extra `lora`."""

    rank: int = Field(default=16, ge=1)
    """Rank of each adapter."""
    alpha: int = Field(default=32, ge=1)
    """Adapters are scaled by `alpha / rank`."""
    base: Literal["own", "shared", "nf4"] = "own"
    """Frozen weights: a copy for the trainer beside the engine's merged ones; or one copy for both; or that in 4 bits,
    with the extra `quant` (docs/use/lora.md). Left out, a run may share it (docs/use/plan.md)."""
    target_modules: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Last parts of the names of the linear layers that get an adapter (`q_proj`); None: all in the model's blocks."""
    experts: bool = False
    """Whether the experts of a mixture of experts get adapters too: one of this rank for each matrix of each expert.
    Routers never do."""


class TrainerConfig(Strict):
    """How weights are updated."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type over fp32 master weights; `auto` as in the engine."""
    max_tokens_per_micro_batch: int = Field(default=8192, ge=1)
    """Most computed tokens of one forward and backward pass (a longer sequence gets its own pass, with others that add
    at most a quarter). Left out, a run takes fewer where memory is short (docs/use/plan.md)."""
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "muon"] = "adamw"
    """How gradients become updates. The 8-bit ones need the extra `quant` and a quarter of AdamW's memory; `muon` needs
    half of it. All but `adamw` train in one process."""
    epochs: int = Field(default=1, ge=1)
    """Passes over a step's batch."""
    num_minibatches: int = Field(default=1, ge=1)
    """Updates of one pass."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """AdamW's decay of the mean gradient."""
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    """AdamW's decay of the mean squared gradient."""
    eps: float = Field(default=1e-8, gt=0.0)
    """AdamW's epsilon, against division by zero."""
    weight_decay: float = Field(default=0.01, ge=0.0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Gradients are clipped to this norm."""
    balance_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the loss that spreads tokens evenly over the experts of a mixture of experts; 0 leaves it out."""
    warmup_steps: int = Field(default=0, ge=0)
    """Updates until the learning rate is reached."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up, over the planned updates."""
    min_lr_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    """Final learning rate of linear and cosine schedules, as a share of the peak."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass. Left out, a run does where memory is short (docs/use/plan.md)."""
    offload_activations: bool = False
    """Keep the inputs of layers, which `gradient_checkpointing` holds until the backward pass, in CPU memory."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Checkpoints to keep besides the best and the latest."""
    num_processes: int = Field(default=1, ge=1)
    """Processes that train the model together, each with a shard of its weights (FSDP2), and with its own GPU if there
    are GPUs."""
    cpu_offload: bool = False
    """Keep weights and optimizer state in CPU memory, and on the GPU only the layer that computes."""
    train_towers: bool = False
    """Train the vision tower too, in place of keeping it as it came. Its output is then computed anew for each pass."""
    lora: LoraConfig | None = None
    """Train adapters in place of all weights; None trains all."""

    @property
    def updates(self) -> int:
        """Updates that a step makes."""
        return self.num_minibatches * self.epochs

    @property
    def has_ranks(self) -> bool:
        """Whether the trainer runs in processes of its own: with several, or with `cpu_offload`."""
        return self.num_processes > 1 or self.cpu_offload


class CriticConfig(Strict):
    """The critic of algorithms that have one (`ppo`): a copy of the model with a value head."""

    learning_rate: float = Field(default=1e-5, ge=0.0, le=1.0)
    """Peak learning rate; the schedule, betas and other settings are those of `trainer`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Updates until the learning rate is reached."""
    weight_decay: float = Field(default=0.01, ge=0.0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Gradients are clipped to this norm."""
    value_clip: float | None = Field(default=0.2, gt=0.0)
    """Most that an update may change a value before it is clipped, in units of reward; None is no limit."""
