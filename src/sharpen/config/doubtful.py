"""Settings that are allowed and hardly meant: said once, before anything is loaded.

In: the configuration, and the size of the run. Out: a line for each.
"""

from __future__ import annotations

from collections.abc import Iterator

from sharpen.config.run import RunConfig

HIGH_RATE = 1e-2
"""AdamW moves a weight by about the learning rate in an update, and the weights of a language model are about 0.02."""


def doubtful(config: RunConfig, *, num_tasks: int, total_steps: int) -> Iterator[str]:
    """Yield what a run with so many training tasks (0: unknown) and steps would hardly be meant to do."""
    model, algorithm, trainer = config.model, config.algorithm, config.trainer
    if "max_tokens" in model.model_fields_set and model.max_tokens > model.max_model_len:
        yield (
            f"model.max_tokens is {model.max_tokens}, above model.max_model_len ({model.max_model_len}), which prompt "
            "and answer share: no answer becomes that long. Raise max_model_len, or lower max_tokens"
        )
    if 0 < num_tasks < algorithm.batch_size:
        yield (
            f"algorithm.batch_size is {algorithm.batch_size}, but there are {num_tasks} tasks: each step has some of "
            "them more than once. Lower it, or raise algorithm.group_size for more rollouts of a task"
        )
    if algorithm.learning_rate > HIGH_RATE:
        yield (
            f"algorithm.learning_rate is {algorithm.learning_rate:g}: an update moves each weight by about that, and "
            f"weights are about 0.02. Above {HIGH_RATE:g} a model is usually lost (1e-6 is the default; LoRA takes "
            "1e-5 to 1e-4)"
        )
    updates = total_steps * trainer.epochs * trainer.num_minibatches
    if trainer.warmup_steps >= updates > 0:
        yield (
            f"trainer.warmup_steps is {trainer.warmup_steps}, but the run has {updates} updates: the learning rate "
            "never reaches algorithm.learning_rate"
        )
