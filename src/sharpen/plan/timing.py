"""How long a step takes: its arithmetic and its traffic, over what a device can do.

In: the sizes of a model, the lengths of a step, the device's peak rates. Out: seconds from the least to the most that
is likely. A multiplication with a matrix of P numbers is 2 P operations a token; attention is 4 x heads x head size x
keys a token and layer; a backward pass is twice a forward one (Kaplan et al. 2020, appendix B). A decode step reads all
weights and all keys and values once. How much of the peak is reached is assumed: `EFFICIENCIES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

from sharpen.config.run import RunConfig
from sharpen.plan.engine import rows_at_once
from sharpen.plan.hardware import Hardware
from sharpen.plan.memory import Models, Roles, computes_bfloat16, num_processes
from sharpen.plan.sizes import Sizes
from sharpen.plan.workload import Workload

EFFICIENCIES = {"cuda": (0.5, 0.1), "cpu": (1.0, 0.25)}
"""Shares of the peak rates: the most and the least that is likely. Public figures of training on GPUs are 0.1 to 0.4 of
the data sheet's; a CPU's peak is measured."""
_OPTIMIZER_BYTES = 28
"""Read: weight, gradient, two moments; written: weight, two moments; 4 bytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step at the peak rates, by part. What the agent's tools and the judge take is not in it."""

    generate_s: float
    train_s: float
    sync_s: float
    efficiencies: tuple[float, float]

    @property
    def at_peak_s(self) -> float:
        """The whole step, were the peaks reached."""
        return self.generate_s + self.train_s + self.sync_s

    @property
    def low_s(self) -> float:
        """The least that is likely."""
        return self.at_peak_s / self.efficiencies[0]

    @property
    def high_s(self) -> float:
        """The most that is likely."""
        return self.at_peak_s / self.efficiencies[1]

    @property
    def likely_s(self) -> float:
        """Between the two, in the same ratio to both."""
        return sqrt(self.low_s * self.high_s)


def forward_flops(sizes: Sizes, num_tokens: float, context: float, num_logits: float) -> float:
    """Operations of a forward pass over tokens that see `context` keys on the mean, `num_logits` of which are scored
    over the vocabulary."""
    attention = 4 * sizes.num_layers * sizes.num_heads * sizes.head_dim * context
    return (2 * sizes.block_linear + attention) * num_tokens + 2 * sizes.vocabulary * num_logits


def step_time(config: RunConfig, models: Models, hardware: Hardware, workload: Workload) -> StepTime | None:
    """None where the rates of the device are not known."""
    trains_in, serves_in = (computes_bfloat16(dtype, hardware) for dtype in (config.trainer.dtype, config.engine.dtype))
    train_rate, serve_rate = (
        hardware.bfloat16_flops if half else hardware.float32_flops for half in (trains_in, serves_in)
    )
    if train_rate is None or serve_rate is None or hardware.bandwidth is None:
        return None
    roles, sizes = Roles.of(config), models.policy
    itemsize = 2 if serves_in else 4
    trained = sizes.parameters if config.trainer.lora is None else sizes.lora_parameters(config.trainer.lora)
    updates = config.trainer.epochs * config.trainer.num_minibatches
    shares = num_processes(config) if hardware.kind == "cuda" else 1
    train_s = training_flops(config, models, roles, workload) / train_rate / shares
    train_s += updates * _OPTIMIZER_BYTES * trained / hardware.bandwidth / shares
    generate_s = 0.0
    if workload.generates:
        rows = rows_at_once(config, sizes, hardware, workload, itemsize)
        generate_s = generation_seconds(sizes, workload, rows, serve_rate, hardware.bandwidth, itemsize)
        if hardware.kind == "cuda":
            generate_s /= config.model.tensor_parallel_size * config.model.inference_engine_num
    sync_s = (4 + itemsize) * sizes.parameters / hardware.bandwidth if roles.engine else 0.0
    efficiencies = EFFICIENCIES[hardware.kind]
    return StepTime(generate_s=generate_s, train_s=train_s, sync_s=sync_s, efficiencies=efficiencies)


def training_flops(config: RunConfig, models: Models, roles: Roles, workload: Workload) -> float:
    """Operations of a step's training: policy, reference, critic, teacher."""
    context = (workload.prompt_tokens + workload.answer_tokens) / 2

    def forward(sizes: Sizes, *, scores: bool = True) -> float:
        return forward_flops(sizes, workload.computed_tokens, context, workload.loss_tokens if scores else 0.0)

    backward = 2.0 if config.trainer.lora is None else 1.0  # frozen weights have no gradient
    passes = config.trainer.epochs * (1.0 + backward + float(config.trainer.gradient_checkpointing))
    total = passes * forward(models.policy)
    if roles.reference:
        total += forward(models.policy)
    if roles.critic:
        again = 3.0 + float(config.trainer.gradient_checkpointing)
        total += (1.0 + config.trainer.epochs * again) * forward(models.policy, scores=False)
    if roles.teacher and models.teacher is not None:
        total += forward(models.teacher)
    return total


def generation_seconds(
    sizes: Sizes, workload: Workload, rows: int, flops: float, bandwidth: float, itemsize: int
) -> float:
    """A step's rollouts on one device: prompts at the rate of arithmetic, then waves of decode steps of `rows`
    sequences, each at the slower of arithmetic and reading."""
    prompts = workload.computed_tokens - workload.sequences * workload.answer_tokens
    prefill = forward_flops(sizes, max(prompts, 0.0), workload.prompt_tokens / 2, 0.0) / flops
    waves = ceil(workload.sequences / rows)
    context = workload.prompt_tokens + workload.answer_tokens / 2
    arithmetic = forward_flops(sizes, rows, context, rows) / flops
    reading = (itemsize * sizes.parameters + rows * context * sizes.kv_bytes(itemsize)) / bandwidth
    return prefill + waves * workload.answer_tokens * max(arithmetic, reading)
