"""Which settings may change when a run continues: every setting is in one of two lists, with the reason.

In: dotted names of settings; `*` stands for the name of an auxiliary model or a further dataset. Out: `MAY_CHANGE` and
`FIXED`. A setting in neither list counts as fixed; a test requires a decision for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from sharpen.config.explain import settings_of
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError

ANOTHER_NAME = "another name (`name`, or experiment_name in Python)"
"""What to choose for a run that cannot go on under the one that it was given."""

MAY_CHANGE: Mapping[str, tuple[str, ...]] = {
    "where the run is stored": ("project", "name", "checkpoint_root_dir", "exchange"),
    "how long the run trains": ("train_dataset.total_epochs", "train_dataset.total_steps", "time_limit_s"),
    "how fast the run learns: it may have diverged, or made no progress": (
        *("algorithm.learning_rate", "trainer.warmup_steps", "trainer.schedule", "trainer.min_lr_ratio"),
        *("critic.learning_rate", "critic.warmup_steps"),
    ),
    "whether and how often the run is saved, checked and evaluated": (
        *("algorithm.save_interval_steps", "algorithm.eval_interval_steps", "trainer.keep_checkpoints"),
        *(
            "evaluation.before_and_after",
            "check.enabled",
            "check.num_tasks",
            "check.gradients",
            "check.stop_without_signal",
        ),
    ),
    "how the run is monitored, and when it gives up": (
        *("monitor_type", "monitor_rollouts", "certificate.on_violation", "certificate.retrain", "stall_report_s"),
        *("rollout.max_excluded_share", "evaluation.max_without_calls"),
        *("rollout.max_attempts", "rollout.timeout_s", "auxiliary_models.*.max_total_tokens"),
    ),
    "what the judge has to reach before a start": ("judge_floor.marks", "judge_floor.kappa", "judge_floor.good_from"),
    "where the run computes, and how much at once: every step is checked anyway": (
        *("execution", "cluster.ray_address", "cluster.num_workers", "cluster.rollouts_per_worker", "cluster.colocate"),
        *(
            "gateway.host",
            "gateway.port",
            "gateway.max_body_mb",
            "gateway.max_header_kb",
            "gateway.max_connections",
            "gateway.max_requests_per_key",
            "cluster.worker_output",
            "rollout.max_concurrent_rollouts",
            "rollout.isolation",
            "rollout.num_processes",
            "rollout.memory_mb",
            "rollout.env_vars",
        ),
        *("model.tensor_parallel_size", "model.inference_engine_num"),
        *("auxiliary_models.*.tensor_parallel_size", "auxiliary_models.*.inference_engine_num"),
        *("auxiliary_models.*.base_url", "auxiliary_models.*.api_key_env"),
        *("engine.type", "engine.device", "engine.max_slots", "engine.kv_cache_mb"),
        *("trainer.max_tokens_per_micro_batch", "trainer.gradient_checkpointing", "trainer.num_processes"),
        *("trainer.cpu_offload", "trainer.offload_activations"),
    ),
    "how long the run keeps what was said; what is dropped does not come back": ("journal.keep_steps",),
    "without effect there": (
        *("eval_dataset.total_epochs", "eval_dataset.total_steps"),
        *("expert.dataset.total_epochs", "expert.dataset.total_steps"),
        *("evaluation.further.*.total_epochs", "evaluation.further.*.total_steps"),
    ),
}
"""Settings that may change, by reason. A change is printed, and the earlier settings stay in the run directory."""

FIXED: Mapping[str, tuple[str, ...]] = {
    "the agent and its judge: else the rewards before and after could not be compared": (
        *("workflow", "judge", "workflow_args", "task_args", "gateway.protocols"),
        *("environment.type", "environment.id", "environment.args", "environment.system_prompt"),
        *("evaluation.own.*.workflow", "evaluation.own.*.workflow_args", "evaluation.own.*.task_args"),
        *(
            "rollout.max_calls",
            "rollout.failure_reward",
            "rollout.model_exceptions",
            "rollout.choices",
            "rollout.side_models",
        ),
        *("auxiliary_models.*.model_path", "auxiliary_models.*.max_model_len", "auxiliary_models.*.temperature"),
        *("auxiliary_models.*.top_p", "auxiliary_models.*.top_k", "auxiliary_models.*.min_p"),
        "auxiliary_models.*.max_tokens",
        *("auxiliary_models.*.enable_thinking", "auxiliary_models.*.tool_call_parser"),
        "auxiliary_models.*.reasoning_parser",
    ),
    "the data: the order of the tasks continues, and the first evaluation is kept": (
        *("train_dataset.path", "train_dataset.name", "train_dataset.split"),
        *("eval_dataset.path", "eval_dataset.name", "eval_dataset.split"),
        *("environment.train_tasks", "environment.held_out_tasks", "environment.seed"),
        *("evaluation.hold_out", "evaluation.max_tasks", "evaluation.decided_by"),
        *("evaluation.further.*.path", "evaluation.further.*.name", "evaluation.further.*.split"),
        *("expert.dataset.path", "expert.dataset.name", "expert.dataset.split", "expert.batch_size"),
    ),
    "the model, its sampling, and its compute type": (
        *("families", "model.model_path", "model.max_model_len", "model.temperature", "model.top_p", "model.top_k"),
        "model.min_p",
        *("model.max_tokens", "model.enable_thinking", "model.tool_call_parser", "model.reasoning_parser"),
        *("engine.dtype", "trainer.dtype", "trainer.lora.rank", "trainer.lora.alpha", "trainer.lora.target_modules"),
        *("trainer.lora.base", "trainer.lora.experts", "trainer.train_towers"),
    ),
    "the algorithm, with which the certificate recomputes every step": (
        *("algorithm.algorithm_type", "algorithm.group_size", "algorithm.batch_size"),
        *("loss.advantage", "loss.advantage_args", "loss.policy_loss", "loss.policy_loss_args", "loss.clip_low"),
        *("loss.clip_high", "loss.dual_clip", "loss.kl", "loss.kl_coef", "loss.kl_in", "loss.kl_target"),
        *("loss.kl_horizon", "loss.behaviour", "loss.behaviour_low", "loss.behaviour_high", "loss.sequence_mask"),
        *("loss.entropy_coef", "loss.aggregation", "loss.constant_length", "loss.std_normalize", "loss.step_norm"),
        *("loss.echo", "loss.std_threshold"),
        *("sampling.order", "sampling.curriculum_key", "sampling.difficulty_target", "sampling.difficulty_width"),
        *(
            "sampling.difficulty_floor",
            "sampling.difficulty_key",
            "sampling.max_refill",
            "sampling.reward_low",
            "sampling.reward_high",
        ),
        *("sampling.overlong_cache", "sampling.overlong_length", "sampling.overlong_penalty"),
        *("sampling.length_penalty", "sampling.turns_penalty"),
        *("sampling.overlong_filter", "sampling.replay_share", "sampling.replay_priority", "sampling.max_staleness"),
        *("sampling.operators.name", "sampling.operators.args"),
        *("sampling.task_operators.name", "sampling.task_operators.args"),
        *("sync.style", "sync.interval", "sync.offset", "sync.max_staleness", "mode"),
        *("expert.mu", "expert.mu_warmup_steps", "expert.mu_decay_steps", "expert.mu_valley", "expert.phi"),
        *(
            "distill.teacher_path",
            "distill.teachers",
            "distill.teacher_key",
            "distill.own_weights",
            "distill.context",
            "distill.divergence",
            "distill.beta",
            "distill.coef",
        ),
        *(
            "trainer.optimizer",
            "trainer.epochs",
            "trainer.num_minibatches",
            "trainer.beta1",
            "trainer.beta2",
            "trainer.eps",
        ),
        *("trainer.weight_decay", "trainer.max_grad_norm", "trainer.balance_coef"),
        *("critic.weight_decay", "critic.max_grad_norm", "critic.value_clip"),
        *("seed", "deterministic"),
    ),
    "which weights answer which agent": ("policies.*.follow", "policies.*.every"),
    "what is learned from a row": (
        *("supervised.messages_key", "supervised.tools_key", "supervised.prompt_key", "supervised.response_key"),
        *("supervised.chosen_key", "supervised.rejected_key", "supervised.text_key", "supervised.system_prompt"),
        *("supervised.turns", "supervised.too_long", "supervised.images_key"),
    ),
}
"""Settings that are fixed, by reason. A change is refused, with both values."""

_FREE = frozenset(name for names in MAY_CHANGE.values() for name in names)
_SETTINGS = tuple(".".join(place) for place in settings_of(RunConfig))


def setting_of(name: str) -> str | None:
    """Return the setting of a dotted name (`workflow_args` for `workflow_args.size`); None if there is none."""
    return next((s for s in _SETTINGS if fnmatchcase(name, s) or fnmatchcase(name, f"{s}.*")), None)


def may_change(name: str) -> bool:
    """Whether a run may continue with another value of this setting."""
    return setting_of(name) in _FREE


def recorded_settings(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings in a `resolved.json` by their dotted names, without derived values. Raises `ConfigError` if
    it is damaged."""
    settings = {}
    for name, entry in entries.items():
        if not isinstance(entry, Mapping) or not {"value", "origin"} <= entry.keys():
            raise ConfigError(f"resolved.json is damaged: {name!r} has no value and origin, but is {entry!r}")
        if entry["origin"] != "derived":
            settings[name] = entry["value"]
    return settings
