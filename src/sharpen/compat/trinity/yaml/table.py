"""Every key of a Trinity-RFT 0.6 file (and those of earlier versions that are still about), with its rule.

In: nothing. Out: `RULES`, from dotted key to rule; `[]` stands for the index of a list's item. `later` marks keys that
other modules decide together.
"""

from __future__ import annotations

from sharpen.compat.trinity.yaml.cluster import rules as rules_of_cluster
from sharpen.compat.trinity.yaml.draft import Rule, idle, later, refused, to
from sharpen.compat.trinity.yaml.expert import sample_strategy
from sharpen.compat.trinity.yaml.rows import rules as rules_of_rows
from sharpen.compat.trinity.yaml.rules import (
    auto_tool_choice,
    betas,
    critic_model_path,
    critic_warmup,
    dtype,
    environment_variables,
    eval_on_startup,
    keep_checkpoints,
    lora,
    mapping_to,
    monitor_type,
    old_logprobs,
    operators,
    optimizer_type,
    over_rollout,
    retries,
    save_interval,
    storage_type,
    tool_parser,
)
from sharpen.compat.trinity.yaml.selection import of_selector, selector_type

ITSELF = idle("Trinity-RFT fills it in itself")
VLLM = idle("a setting of vLLM's or SGLang's that has no counterpart (engine.*)")
PARALLEL = idle("FSDP2 alone divides the model, over trainer.num_processes ranks (docs/use/distributed.md)")
MOVES = idle("how weights move follows from where engines and trainer are (docs/use/ray.md)")
JOURNAL = idle("every rollout is kept in the run's journal, run.db")
TEMPLATE = "chat templates are the tokenizer's: put it into the model's folder (chat_template.jinja)"
ROPE = "positions are the model's own: set it in the config.json of the model's folder"
SAMPLING = "training needs tokens of the model's whole distribution: leave it out"


def rules() -> dict[str, Rule]:
    """The whole table."""
    sections = {
        "algorithm": _ALGORITHM,
        "algorithm.optimizer": _OPTIMIZER,
        "model": _MODEL,
        "cluster": rules_of_cluster(),
        "buffer": _BUFFER,
        "buffer.explorer_input": _EXPLORER_INPUT,
        "buffer.explorer_input.taskset": _taskset(_TASKSET),
        "buffer.explorer_input.tasksets[]": _taskset(_TASKSET),
        "buffer.explorer_input.eval_tasksets[]": _taskset(_EVAL_TASKSET),
        "buffer.trainer_input": _TRAINER_INPUT,
        "buffer.trainer_input.experience_buffer": _EXPERIENCE_BUFFER,
        "data_processor": _DATA_PROCESSOR,
        "explorer": _EXPLORER,
        "explorer.rollout_model": {**_ENGINE, **_ROLLOUT_MODEL},
        "explorer.auxiliary_models[]": {**_ENGINE, **_AUXILIARY_MODEL},
        "synchronizer": _SYNCHRONIZER,
        "trainer": _TRAINER,
        "monitor": _MONITOR,
        "service": dict.fromkeys(_SERVICE, idle("no services: tasks are read as they are")),
        "log": dict.fromkeys(
            ("level", "group_by_node", "save_dir"), idle("the run prints its own lines, no log files")
        ),
    }
    return {**_TOP, **{f"{section}.{key}": rule for section, keys in sections.items() for key, rule in keys.items()}}


def _taskset(special: dict[str, Rule]) -> dict[str, Rule]:
    return {**_TASKSET_COMMON, **special}


_TOP: dict[str, Rule] = {
    "mode": later,
    "project": to("project"),
    "group": later,
    "name": later,
    "checkpoint_root_dir": to("checkpoint_root_dir"),
    "checkpoint_job_dir": ITSELF,
    "ray_namespace": idle("no actor of the run has a name"),
    "continue_from_checkpoint": later,
    "ignore_validator_suggestions": idle("there is no adviser on GPU memory to silence"),
}
_SERVICE = ("data_juicer.server_url", "data_juicer.auto_start", "data_juicer.port", "data_juicer.hostname")
_ALGORITHM: dict[str, Rule] = {
    **dict.fromkeys(
        ("algorithm_type", "advantage_fn", "advantage_fn_args", "add_strategy", "add_strategy_args"), later
    ),
    **dict.fromkeys(("policy_loss_fn", "policy_loss_fn_args", "kl_loss_fn", "kl_loss_fn_args"), later),
    **dict.fromkeys(("kl_penalty_fn_args", "entropy_loss_fn", "entropy_loss_fn_args", "loss_agg_mode"), later),
    "repeat_times": later,
    "kl_penalty_fn": later,
    "sample_strategy": sample_strategy,
    "sample_strategy_args": later,
    "enable_router_replay": refused("mixture-of-experts routing is not replayed here: leave it out"),
    "bypass_old_logprobs": old_logprobs,
    "rollout_correction": refused("training is on-policy, so there is nothing to correct: leave it out"),
    "use_token_level_loss": idle("a setting of supervised warm-up; the loss is that of loss_agg_mode"),
}
_OPTIMIZER: dict[str, Rule] = {
    "lr": to("algorithm.learning_rate"),
    "lr_warmup_steps": later,
    "lr_warmup_steps_ratio": later,
    "min_lr_ratio": to("trainer.min_lr_ratio"),
    "warmup_style": later,
    "lr_scheduler_type": later,
    "optimizer_type": optimizer_type,
    "betas": betas,
    "weight_decay": to("trainer.weight_decay"),
    "clip_grad": later,
}
_MODEL: dict[str, Rule] = {
    "model_path": to("model.model_path"),
    "trust_remote_code": refused("code from a model's folder is never run here"),
    "critic_model_path": critic_model_path,
    "custom_chat_template": refused(TEMPLATE),
    "chat_template_path": refused(TEMPLATE),
    "temperature": later,
    "top_p": later,
    "top_k": refused(SAMPLING, unless=(-1, 0)),
    "logprobs": idle("the logprob of every sampled token is recorded anyway"),
    **dict.fromkeys(("max_model_len", "max_prompt_tokens", "max_response_tokens", "enable_thinking"), later),
    "min_response_tokens": refused(SAMPLING, unless=(0, 1)),
    "enable_prompt_truncation": idle("prompts are never cut: one that leaves no room to answer ends its rollout"),
    "repetition_penalty": refused(SAMPLING, unless=(1, 1.0)),
    "lora_configs": lora,
    **dict.fromkeys(("fully_sharded_loras", "max_cpu_loras"), idle("the engine gets whole weights (trainer.lora)")),
    "rope_scaling": refused(ROPE),
    "rope_theta": refused(ROPE),
    "tinker.enable": refused("there is no hosted trainer: leave it out, training is local"),
    **{f"tinker.{key}": idle("it belongs to the hosted trainer Tinker") for key in ("rank", "seed", "base_url")},
    **{f"tinker.train_{key}": idle("it belongs to the hosted trainer Tinker") for key in ("mlp", "attn", "unembed")},
    "external_model.enable": refused(
        "a model behind an endpoint cannot be trained: name a model directory (to evaluate an endpoint: sharpen eval "
        "--base-url)"
    ),
    **{
        f"external_model.{key}": idle("it belongs to a model behind an endpoint")
        for key in ("base_url_env", "api_key_env", "model_name")
    },
}
_BUFFER: dict[str, Rule] = {
    "batch_size": later,
    "train_batch_size": later,
    "total_epochs": to("train_dataset.total_epochs"),
    "total_steps": later,
    **dict.fromkeys(("explorer_output", "tokenizer_path", "pad_token_id", "cache_dir"), ITSELF),
    **dict.fromkeys(("max_retry_times", "max_retry_interval"), idle("a dataset is read once, without retries")),
}
_EXPLORER_INPUT: dict[str, Rule] = {
    **dict.fromkeys(("default_workflow_type", "default_eval_workflow_type", "default_reward_fn_type"), later),
    "system_prompt": later,
    "reply_prefix": later,
}
_OTHER_TASKS = "one workflow and one reward function do all tasks of a run: leave it out"
_TASKSET_COMMON: dict[str, Rule] = {
    "storage_type": storage_type,
    "default_workflow_type": later,
    "default_reward_fn_type": later,
    "enable_progress_bar": idle("reading tasks shows no bar"),
    **dict.fromkeys(("max_retry_times", "max_retry_interval"), idle("a dataset is read once, without retries")),
    **dict.fromkeys(("index", "is_eval", "batch_size", "total_epochs", "total_steps", "ray_namespace"), ITSELF),
    **{f"{kind}_selector.selector_type": selector_type for kind in ("data", "task")},
    **{f"{kind}_selector.seed": idle("the run has one seed: seed") for kind in ("data", "task")},
    **{f"{kind}_selector.{key}": of_selector for kind in ("data", "task") for key in ("feature_keys", "kwargs")},
    "format.prompt_type": idle("tasks are rows; the workflow makes the messages"),
    "format.system_prompt_key": refused("the system prompt is one for all tasks: use system_prompt"),
    **{
        f"format.{key}": idle("the workflow gets the whole row")
        for key in ("messages_key", "tools_key", "image_key", "video_key", "chosen_key", "rejected_key")
    },
    "format.workflow_key": refused(_OTHER_TASKS),
    "format.reward_fn_key": refused(_OTHER_TASKS),
    "format.enable_concatenated_multi_turn": idle("it belongs to supervised training"),
    "format.chat_template": refused(TEMPLATE),
    "format.enable_thinking": idle("it belongs to supervised training; see explorer.rollout_model.enable_thinking"),
    "rollout_args.logprobs": idle("the logprob of every sampled token is recorded anyway"),
    "rollout_args.n": idle("algorithm.repeat_times says how often a task runs"),
}
_TASKSET: dict[str, Rule] = {
    "name": idle("the training tasks need no name"),
    "default_eval_workflow_type": idle("it belongs to eval_tasksets"),
    "path": to("train_dataset.path"),
    "split": to("train_dataset.split"),
    "subset_name": to("train_dataset.name"),
    "repeat_times": idle("algorithm.repeat_times says how often a task runs"),
    "workflow_args": mapping_to("workflow_args"),
    "reward_fn_args": mapping_to("taskset.reward_fn_args"),
    **{
        f"format.{key}": to(f"taskset.{key}") for key in ("prompt_key", "response_key", "system_prompt", "reply_prefix")
    },
    **{f"rollout_args.{key}": later for key in ("temperature", "top_p", "max_tokens")},
    "rollout_args.top_k": refused(SAMPLING, unless=(-1, 0)),
}
_EVAL_TASKSET: dict[str, Rule] = {
    **dict.fromkeys(("name", "path", "split", "subset_name", "workflow_args", "reward_fn_args"), later),
    "default_eval_workflow_type": later,
    "repeat_times": idle("evaluation runs each task once greedy and once as in training"),
    **{f"format.{key}": later for key in ("prompt_key", "response_key", "system_prompt", "reply_prefix")},
    **{f"rollout_args.{key}": later for key in ("temperature", "top_p", "max_tokens")},
    "rollout_args.top_k": idle("evaluation runs each task once greedy and once as in training"),
}
_TRAINER_INPUT: dict[str, Rule] = {
    "auxiliary_buffers": later,
    "sft_warmup_dataset": refused("supervised warm-up does not exist here yet: start from a model that had it"),
    "sft_warmup_steps": refused("supervised warm-up does not exist here yet: start from a model that had it"),
}
_EXPERIENCE_BUFFER: dict[str, Rule] = {
    **rules_of_rows(JOURNAL),
    **dict.fromkeys(("ray_namespace", "wrap_in_ray"), JOURNAL),
    **dict.fromkeys(("schema_type", "index", "batch_size", "tokenizer_path", "total_epochs", "total_steps"), ITSELF),
    **dict.fromkeys(("use_priority_queue", "reuse_cooldown_time", "replay_buffer_kwargs"), later),
    **{f"replay_buffer.{key}": later for key in ("enable", "priority_fn", "priority_fn_args", "reuse_cooldown_time")},
}
_DATA_PROCESSOR: dict[str, Rule] = {
    "task_pipeline.operators": operators,
    "task_pipeline.config_path": refused("Data-Juicer is not run here: process the tasks beforehand"),
    **{
        f"task_pipeline.{key}": idle("it belongs to the processing of tasks, which does not exist here yet")
        for key in ("num_process", "inputs", "output", "target_fields", "priority_weights", "top_k")
    },
    "experience_pipeline.operators": operators,
    **{f"experience_pipeline.{key}": JOURNAL for key in ("save_input", "input_save_path")},
    "experience_pipeline.inputs": refused("experiences come from the rollouts alone: leave it out"),
    "experience_pipeline.output": JOURNAL,
}
_SERVE = idle("it belongs to mode serve")
_RUNNER = idle("every rollout runs by itself, as many at once as rollout.max_concurrent_rollouts")
_EXPLORER: dict[str, Rule] = {
    "name": ITSELF,
    "runner_per_model": later,
    **dict.fromkeys(("runner_num", "runner_prepare_concurrency", "runner_prepare_max_retries"), _RUNNER),
    **dict.fromkeys(("concurrent_mode", "max_repeat_times_per_runner", "runner_state_report_interval"), _RUNNER),
    "max_timeout": to("rollout.timeout_s"),
    "max_retry_times": retries,
    "env_vars": environment_variables,
    "eval_interval": to("algorithm.eval_interval_steps"),
    "eval_on_startup": eval_on_startup,
    "bench_on_latest_checkpoint": refused(
        "name the checkpoint instead: sharpen eval --config <this file> --model <run directory>/global_step_<N>"
    ),
    **dict.fromkeys(("proxy_port", "listen_address", "service_status_check_interval"), _SERVE),
    **dict.fromkeys(("min_running_model_num", "db_url"), _SERVE),
    "over_rollout.ratio": over_rollout,
    "over_rollout.return_partial_tasks": over_rollout,
    "over_rollout.wait_after_min": idle("every step waits for all of its rollouts"),
    "dynamic_timeout.enable": over_rollout,
    **{
        f"dynamic_timeout.{key}": idle("the time limit is rollout.timeout_s, from max_timeout")
        for key in ("warmup_min_steps", "ratio")
    },
    "max_inflight_batches": idle("batches begin as far ahead as sync.max_staleness lets them"),
}
_RECORDED = idle("always so here: every call is recorded, and OpenAI clients work")
_ENGINE: dict[str, Rule] = {
    **dict.fromkeys(("engine_num", "tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size"), VLLM),
    **dict.fromkeys(("enable_expert_parallel", "extra_engine_args", "use_v1", "enforce_eager"), VLLM),
    **dict.fromkeys(("enable_prefix_caching", "enable_chunked_prefill", "gpu_memory_utilization"), VLLM),
    **dict.fromkeys(("enable_log_requests", "base_port", "api_key", "weight_sync_buffer_size", "nnodes"), VLLM),
    **dict.fromkeys(("enable_history", "enable_openai_client", "enable_openai_api"), _RECORDED),
    **dict.fromkeys(("gpu_per_engine", "node_rank", "bundle_indices", "engine_id", "ray_namespace"), ITSELF),
    **dict.fromkeys(("ray_actor_name", "sync_method", "checkpoint_job_dir", "cuda_visible_devices"), ITSELF),
    **dict.fromkeys(
        ("enable_runtime_lora_updating", "lora_modules", "lora_kwargs", "enable_return_routed_experts"), ITSELF
    ),
    "trust_remote_code": refused("code from a model's folder is never run here"),
    "top_k": refused(SAMPLING, unless=(-1, 0)),
    "logprobs": idle("the logprob of every sampled token is recorded anyway"),
    "min_response_tokens": refused(SAMPLING, unless=(0, 1)),
    "enable_prompt_truncation": idle("prompts are never cut: one that leaves no room to answer ends its rollout"),
    "repetition_penalty": refused(SAMPLING, unless=(1, 1.0)),
    "ignore_eos": refused("an answer ends where the model ends it"),
    "enable_multimodal": refused("models of text only"),
    "chat_template": refused(TEMPLATE),
    "enable_lora": idle("whether adapters are trained says model.lora_configs"),
    "rope_scaling": refused(ROPE),
    "rope_theta": refused(ROPE),
}
_EXTERNAL = ("enable", "base_url_env", "api_key_env", "model_name")
_ROLLOUT_MODEL: dict[str, Rule] = {
    **dict.fromkeys(("engine_num", "tensor_parallel_size"), later),
    "name": idle("the model to train needs no name"),
    "model_path": idle("model.model_path names the model to train"),
    "engine_type": refused(
        "a model behind an endpoint cannot be trained: leave it out",
        unless=("vllm", "vllm_async", "sglang"),
    ),
    "dtype": dtype,
    "seed": to("seed"),
    **dict.fromkeys(("temperature", "top_p", "max_model_len", "max_prompt_tokens", "max_response_tokens"), later),
    "enable_thinking": later,
    "enable_auto_tool_choice": auto_tool_choice,
    "tool_call_parser": tool_parser,
    "reasoning_parser": to("model.reasoning_parser"),
    "external_model_config.enable": refused("a model behind an endpoint cannot be trained: leave it out"),
    **{f"external_model_config.{key}": idle("it belongs to a model behind an endpoint") for key in _EXTERNAL[1:]},
}
_AUXILIARY_MODEL: dict[str, Rule] = {
    **dict.fromkeys(("name", "model_path", "engine_type", "temperature", "top_p", "max_model_len"), later),
    **dict.fromkeys(("max_response_tokens", "enable_thinking", "tool_call_parser", "reasoning_parser"), later),
    "max_prompt_tokens": idle("prompts are never cut: one that leaves no room to answer ends its rollout"),
    "enable_auto_tool_choice": idle("tool calls are read where tool_call_parser says how"),
    "dtype": idle("all models compute in engine.dtype"),
    "seed": idle("the run has one seed: seed"),
    **{f"external_model_config.{key}": later for key in _EXTERNAL},
}
_SYNCHRONIZER: dict[str, Rule] = {
    **dict.fromkeys(("sync_style", "sync_interval", "sync_offset"), later),
    **dict.fromkeys(("explorer_sync_interval", "trainer_sync_interval"), later),
    **dict.fromkeys(("sync_method", "sync_timeout", "group_name", "wait_for_checkpoint"), MOVES),
    **dict.fromkeys(("explorer_world_size", "ray_namespace"), ITSELF),
}
_TRAINER: dict[str, Rule] = {
    "name": ITSELF,
    "trainer_type": refused("training is local: leave it out", unless=("verl",)),
    "save_interval": save_interval,
    "total_steps": later,
    "grad_clip": later,
    "actor_grad_clip": later,
    "max_token_len_per_gpu": to("trainer.max_tokens_per_micro_batch"),
    "max_checkpoints_to_keep": keep_checkpoints,
    "trainer_config": later,
    "trainer_config_path": refused("Trinity-RFT dropped it too: write the keys themselves"),
    "trust_remote_code": refused("code from a model's folder is never run here"),
    "save_hf_checkpoint": idle("every checkpoint is a Hugging Face directory"),
    "enable_preview": idle("rollouts are in the run's journal, run.db"),
    "critic_warmup": critic_warmup,
    "use_dynamic_bsz": idle("micro-batches are always filled up to trainer.max_tokens_per_micro_batch"),
    "use_remove_padding": idle("batches are packed, there is no padding"),
    "fix_actor_microbatch_loss_scale": idle("the gradient never depends on the micro-batches"),
    **dict.fromkeys(("trainer_strategy", "balance_batch", "ulysses_sequence_parallel_size"), PARALLEL),
    **dict.fromkeys(
        ("param_offload", "optimizer_offload", "grad_offload", "offload_policy", "save_strategy"), PARALLEL
    ),
    **{
        f"megatron.{key}": PARALLEL
        for key in (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
            *("expert_model_parallel_size", "expert_tensor_parallel_size", "context_parallel_size"),
            "sequence_parallel",
        )
    },
}
_MONITOR: dict[str, Rule] = {
    "monitor_type": monitor_type,
    "monitor_args": refused(
        "address and key come from the environment: WANDB_BASE_URL and WANDB_API_KEY, or MLFLOW_TRACKING_URI"
    ),
    "detailed_stats": idle("evaluations always come with their intervals"),
    "enable_ray_timeline": idle("the run writes no timeline of Ray's"),
    "cache_dir": ITSELF,
}
RULES = rules()
