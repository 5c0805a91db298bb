"""Keys of earlier versions of Trinity-RFT: under which name they are read, and what became of the others.

In: a draft and the content of a file. Out: the content with today's keys; a line, a notice or a problem for each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sharpen.compat.trinity.yaml.draft import OFF, Draft, is_one_of
from sharpen.compat.trinity.yaml.functions import MIXED

_TASKSET = "buffer.explorer_input.taskset"
_ENGINE = (
    *("engine_type", "engine_num", "tensor_parallel_size", "enable_prefix_caching", "enforce_eager", "dtype", "seed"),
    *("temperature", "top_p", "top_k", "logprobs", "gpu_memory_utilization", "enable_chunked_prefill"),
)
RENAMED: Mapping[str, str] = {
    "global_config.total_epochs": "buffer.total_epochs",
    "global_config.batch_size": "buffer.batch_size",
    "global_config.eval_interval": "explorer.eval_interval",
    "global_config.algorithm_type": "trainer.algorithm_type",
    "monitor.project": "project",
    "monitor.name": "name",
    "model.checkpoint_path": "checkpoint_root_dir",
    "model.max_token_len": "model.max_model_len",
    "data.dataset_path": f"{_TASKSET}.path",
    "data.subset_name": f"{_TASKSET}.subset_name",
    "data.train_split": f"{_TASKSET}.split",
    "data.format_config": f"{_TASKSET}.format",
    "data.default_workflow_type": "buffer.explorer_input.default_workflow_type",
    "data.default_reward_fn_type": "buffer.explorer_input.default_reward_fn_type",
    "data.total_epoch": "buffer.total_epochs",
    "data.total_epochs": "buffer.total_epochs",
    "data.batch_size": "buffer.batch_size",
    "buffer.train_dataset.path": "buffer.trainer_input.experience_buffer.path",
    "buffer.train_dataset.name": "buffer.trainer_input.experience_buffer.name",
    "buffer.train_dataset.storage_type": "buffer.trainer_input.experience_buffer.storage_type",
    "buffer.train_dataset.kwargs": "buffer.trainer_input.experience_buffer.format",
    "buffer.explore_batch_size": "buffer.batch_size",
    "buffer.expert_data_ratio": "algorithm.sample_strategy_args.expert_data_ratio",
    f"{_TASKSET}.subset": f"{_TASKSET}.subset_name",
    f"{_TASKSET}.rollout_args.repeat_times": "algorithm.repeat_times",
    **{f"explorer.{name}": f"explorer.rollout_model.{name}" for name in _ENGINE},
    "explorer.enable_chunked_prefil": "explorer.rollout_model.enable_chunked_prefill",  # as it was spelled
    "explorer.repeat_times": "algorithm.repeat_times",
    "synchronizer.sync_iteration_interval": "synchronizer.sync_interval",
    "trainer.eval_interval": "explorer.eval_interval",
    "trainer.ppo_max_token_len_per_gpu": "trainer.max_token_len_per_gpu",
    "trainer.sft_warmup_iteration": "buffer.trainer_input.sft_warmup_steps",
    "trainer.sft_warmup_steps": "buffer.trainer_input.sft_warmup_steps",
    "trainer.actor_kl_loss_coef": "algorithm.kl_loss_fn_args.kl_coef",
}
"""Former keys, by what they are called now."""
_PROCESSING = (
    "Trinity-RFT dropped it: its processing of data is a list of operators now "
    "(data_processor.task_pipeline.operators, experience_pipeline.operators)"
)
_ACTIVE = (
    *("dj_process_desc", "agent_model_name", "agent_model_config", "clean_strategy", "db_url", "source_data_path"),
    *("data_processor_url", "dj_config_path", "input_buffers", "output_buffer", "format", "reward_shaping"),
)
DROPPED: Mapping[str, str] = {
    "trainer.algorithm_type": "it is algorithm.algorithm_type now, whose name says what verl's adv_estimator said then "
    "(ppo with adv_estimator grpo is grpo): set that",
    "trainer.actor_use_kl_loss": "it is algorithm.kl_loss_fn now (k2, or none): set that",
    "algorithm.rft_sft_mix_ratio": "an expert's rows are mixed in by algorithm_type mix now (sample_strategy_args)",
    "algorithm.mu": "it is algorithm.policy_loss_fn_args.mu now: set that",
    "buffer.sft_batch_size": "it is the share algorithm.sample_strategy_args.expert_data_ratio now: set that",
    "data.eval_split": "evaluation has datasets of its own now (buffer.explorer_input.eval_tasksets): name one",
    **{f"data_processor.{name}": _PROCESSING for name in _ACTIVE},
    **{f"data_processor.task_pipeline.{name}": _PROCESSING for name in _ACTIVE},
    **{f"data_processor.experience_pipeline.{name}": _PROCESSING for name in (*_ACTIVE, "clean_strategy")},
}
"""Former keys that meant something, and what became of them."""
WITHOUT_EFFECT = (
    *(
        "explorer.use_ray",
        "explorer.backend",
        "explorer.max_pending_requests",
        "explorer.max_waiting_steps",
        "monitor.cache_root_dir",
    ),
    *("buffer.train_dataset.algorithm_type", "model.load_checkpoint"),
    *(f"data.{name}" for name in _ACTIVE),
)
"""Former keys that mean nothing any more."""


def read_former(draft: Draft, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content under today's keys, and tell what became of each former one."""
    found: dict[str, Any] = _copy(content)
    renamed = dict(RENAMED)
    if _value(found, "algorithm.algorithm_type") in MIXED:  # once, warm-up and an expert's rows had one place
        renamed["buffer.trainer_input.sft_warmup_dataset"] = "buffer.trainer_input.auxiliary_buffers.sft_dataset"
    for former, now in renamed.items():
        value = _take(found, former)
        if value is None:
            continue
        draft.given[former] = value
        if is_one_of(value, OFF) and former.startswith(("data.", "explorer.", "model.", "trainer.sft")):
            draft.say(f"{former} is off: it is called {now} today")
            draft.get(former)
        elif _put(found, now, value):
            draft.say(f"it is called {now} today, and is read as that", former)
        else:
            draft.wrong(former, f"is called {now} today, which is given too: keep one of them")
    for former, became in DROPPED.items():
        value = _take(found, former)
        if value is not None:
            draft.given[former] = value
            if is_one_of(value, OFF):
                draft.idle("Trinity-RFT dropped it", former)
            else:
                draft.refuse(former, became)
    for former in WITHOUT_EFFECT:
        value = _take(found, former)
        if value is not None:
            draft.given[former] = value
            draft.idle("Trinity-RFT dropped it", former)
    return found


def _copy(value: Any) -> Any:
    return {name: _copy(inner) for name, inner in value.items()} if isinstance(value, Mapping) else value


def _value(content: Mapping[str, Any], key: str) -> Any:
    """The value of a key, None where it is not given."""
    found: Any = content
    for name in key.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _take(content: dict[str, Any], key: str) -> Any:
    """Remove a key, with the sections that it leaves empty; return its value, None where it is not given."""
    name, _, rest = key.partition(".")
    inner = content.get(name)
    if rest and isinstance(inner, dict):
        value = _take(inner, rest)
        if value is not None and not inner:
            del content[name]
        return value
    return None if rest else content.pop(name, None)


def _put(content: dict[str, Any], key: str, value: Any) -> bool:
    """Set a key, unless it is given with another value."""
    *sections, name = key.split(".")
    for section in sections:
        if content.get(section) is None:
            content[section] = {}
        content = content[section]
        if not isinstance(content, dict):
            return False
    if content.get(name, value) != value:
        return False
    content[name] = value
    return True
