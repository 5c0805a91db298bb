"""Every key of a Trinity-RFT 0.6 file (and those of earlier versions that are still about), with its rule.

In: nothing. Out: `RULES`, from dotted key to rule; `[]` stands for the index of a list's item. A row names one key of
its section, or several that have the same rule.
"""

from __future__ import annotations

from sharpen.compat.trinity.yaml.correction import bypass_old_logprobs, rollout_correction
from sharpen.compat.trinity.yaml.expert import sample_strategy
from sharpen.compat.trinity.yaml.keys import (
    betas,
    environment_variables,
    exchange,
    model_to_train,
    of_ppo,
    or_for_ever,
    retries,
    target_modules,
    top_k,
    trainer_file,
)
from sharpen.compat.trinity.yaml.operators import on_experiences
from sharpen.compat.trinity.yaml.rows import RULES_OF_ROWS, TEMPLATE
from sharpen.compat.trinity.yaml.rules import (
    Rule,
    both,
    choice,
    expanded,
    flag,
    idle,
    later,
    mapping,
    number,
    refused,
    to,
    told,
    whole,
    word,
)
from sharpen.compat.trinity.yaml.selection import of_selector, selector_type

_ITSELF = idle("Trinity-RFT fills it in itself")
_VLLM = idle("a setting of vLLM's or SGLang's that has no counterpart (engine.*)")
_PARALLEL = idle("FSDP2 alone divides the model, over trainer.num_processes ranks (docs/use/distributed.md)")
_MOVES = idle("how weights move follows from where engines and trainer are (docs/use/ray.md)")
_JOURNAL = idle("every rollout is kept in the run's journal, run.db")
_ONCE = idle("a dataset is read once, without retries")
_RUNNER = idle("every rollout runs by itself, as many at once as rollout.max_concurrent_rollouts")
_RECORDED = idle("always so here: every call is recorded, and OpenAI clients work")
_LOGPROBS = idle("the logprob of every sampled token is recorded anyway")
_WAITS = "every step waits for all of its rollouts"
_NEVER_CUT = idle("prompts are never cut: one that leaves no room to answer ends its rollout")
_OF_ENDPOINT = idle("it belongs to a model behind an endpoint")
_EVALUATION = idle("evaluation runs each task once greedy and once as in training")
_SUPERVISED = idle("it belongs to supervised training")
_REPEATS = idle("algorithm.repeat_times says how often a task runs")
_NO_CODE = refused("code from a model's folder is never run here")
_NO_TEMPLATE = refused(TEMPLATE)
_NO_ROPE = refused("positions are the model's own: set it in the config.json of the model's folder")
_NO_WARM_UP = refused("supervised warm-up does not exist here yet: start from a model that had it")
_ONE_WORKFLOW = refused("one workflow and one reward function do all tasks of a run: leave it out")
_POLICY_ELSEWHERE = "a model behind an endpoint cannot be trained: leave it out"
_SAMPLING = "training needs tokens of the model's whole distribution: leave it out"
_OF_SAMPLING: dict[str, Rule] = {
    "top_k": top_k,
    "min_response_tokens": refused(_SAMPLING, unless=(0, 1)),
    "repetition_penalty": refused(_SAMPLING, unless=(1, 1.0)),
}

_MODEL: dict[str, Rule] = {
    **_OF_SAMPLING,
    "model_path": to("model.model_path"),
    "trust_remote_code": _NO_CODE,
    "critic_model_path": of_ppo(model_to_train("the critic starts from model.model_path here: leave it out")),
    "custom_chat_template chat_template_path": _NO_TEMPLATE,
    "max_model_len max_prompt_tokens max_response_tokens": whole,
    "temperature top_p enable_thinking": later,
    "logprobs": _LOGPROBS,
    "enable_prompt_truncation": _NEVER_CUT,
    "fully_sharded_loras max_cpu_loras": idle("the engine gets whole weights (trainer.lora)"),
    "rope_scaling rope_theta": _NO_ROPE,
    "tinker.enable tinker.train_mlp tinker.train_attn tinker.train_unembed": flag,
    "tinker.rank tinker.seed": whole,
    "tinker.base_url": later,
    "external_model.enable": flag,
    "external_model.base_url_env external_model.api_key_env external_model.model_name": word,
}
_ADAPTER: dict[str, Rule] = {
    "name is_dummy": idle("the one adapter that is trained needs no name, and is no dummy"),
    "lora_rank": to("trainer.lora.rank"),
    "lora_alpha": to("trainer.lora.alpha"),
    "target_modules": target_modules,
    "path": refused("a run begins with new adapters: leave it out"),
    "base_model_name": model_to_train("adapters are those of model.model_path: leave it out"),
    "lora_dtype": refused("adapters are float32: leave it out", unless=("auto", "float32")),
    "exclude_modules": refused("name those that get an adapter (target_modules)"),
}
_BUFFER: dict[str, Rule] = {
    "batch_size train_batch_size total_steps": whole,
    "total_epochs": to("train_dataset.total_epochs"),
    "explorer_output tokenizer_path pad_token_id cache_dir": _ITSELF,
    "max_retry_times max_retry_interval": _ONCE,
    "explorer_input.default_workflow_type explorer_input.default_eval_workflow_type "
    "explorer_input.default_reward_fn_type": word,
    "explorer_input.system_prompt explorer_input.reply_prefix": later,
    "trainer_input.auxiliary_buffers": mapping,
    "trainer_input.sft_warmup_dataset trainer_input.sft_warmup_steps": _NO_WARM_UP,
}
_SELECTOR: dict[str, Rule] = {
    "selector_type": selector_type,
    "seed": idle("the run has one seed: seed"),
    "feature_keys kwargs": of_selector,
}
_FORMAT: dict[str, Rule] = {
    "prompt_key response_key system_prompt reply_prefix image_key video_key": later,
    "prompt_type": idle("tasks are rows; the workflow makes the messages"),
    "system_prompt_key": refused("the system prompt is one for all tasks: use system_prompt"),
    "messages_key tools_key chosen_key rejected_key": idle("the workflow gets the whole row"),
    "workflow_key reward_fn_key": _ONE_WORKFLOW,
    "enable_concatenated_multi_turn": _SUPERVISED,
    "chat_template": _NO_TEMPLATE,
    "enable_thinking": idle("it belongs to supervised training; see explorer.rollout_model.enable_thinking"),
}
_ANY_TASKSET: dict[str, Rule] = {
    "storage_type": refused(
        "tasks are read from files or the Hugging Face hub: export them to JSONL and use file", unless=("file",)
    ),
    "path split subset_name": later,
    "workflow_args reward_fn_args": mapping,
    "default_workflow_type default_reward_fn_type": word,
    "enable_progress_bar": idle("reading tasks shows no bar"),
    "max_retry_times max_retry_interval": _ONCE,
    "index is_eval batch_size total_epochs total_steps ray_namespace": _ITSELF,
    **expanded(_SELECTOR, "data_selector."),
    **expanded(_SELECTOR, "task_selector."),
    **expanded(_FORMAT, "format."),
    "rollout_args.temperature rollout_args.top_p rollout_args.max_tokens": later,
    "rollout_args.logprobs": _LOGPROBS,
    "rollout_args.n": _REPEATS,
}
_TASKSET: dict[str, Rule] = {
    **_ANY_TASKSET,
    "name": idle("the training tasks need no name"),
    "default_eval_workflow_type": idle("it belongs to eval_tasksets"),
    "repeat_times": _REPEATS,
    "rollout_args.top_k": top_k,
}
_EVAL_TASKSET: dict[str, Rule] = {
    **_ANY_TASKSET,
    "name default_eval_workflow_type": word,
    "repeat_times": _EVALUATION,
    "rollout_args.top_k": later,
}
_EXPLORER: dict[str, Rule] = {
    "name": _ITSELF,
    "runner_per_model": whole,
    "max_repeat_times_per_runner": both(_RUNNER, whole),
    "runner_num runner_prepare_concurrency runner_prepare_max_retries concurrent_mode runner_state_report_interval": (
        _RUNNER
    ),
    "max_timeout": to("rollout.timeout_s"),
    "max_retry_times": retries,
    "env_vars": environment_variables,
    "eval_interval": to("algorithm.eval_interval_steps"),
    "eval_on_startup": both(
        to("evaluation.before_and_after"),
        told("nothing is evaluated before training, nor after it (evaluation.before_and_after)", unless=(True,)),
    ),
    "bench_on_latest_checkpoint": flag,
    "proxy_port listen_address service_status_check_interval min_running_model_num db_url": idle(
        "it belongs to mode serve"
    ),
    "over_rollout.ratio over_rollout.return_partial_tasks dynamic_timeout.enable": told(_WAITS),
    "over_rollout.wait_after_min": idle(_WAITS),
    "dynamic_timeout.warmup_min_steps dynamic_timeout.ratio": idle(
        "the time limit is rollout.timeout_s, from max_timeout"
    ),
    "max_inflight_batches": idle("batches begin as far ahead as sync.max_staleness lets them"),
}
_ENGINE: dict[str, Rule] = {
    **_OF_SAMPLING,
    "data_parallel_size pipeline_parallel_size enable_expert_parallel extra_engine_args use_v1 enforce_eager "
    "enable_prefix_caching enable_chunked_prefill gpu_memory_utilization enable_log_requests base_port api_key "
    "weight_sync_buffer_size nnodes": _VLLM,
    "enable_history enable_openai_client enable_openai_api": _RECORDED,
    "gpu_per_engine node_rank bundle_indices engine_id ray_namespace ray_actor_name sync_method checkpoint_job_dir "
    "cuda_visible_devices enable_runtime_lora_updating lora_modules lora_kwargs enable_return_routed_experts": _ITSELF,
    "trust_remote_code": _NO_CODE,
    "logprobs": _LOGPROBS,
    "enable_prompt_truncation": _NEVER_CUT,
    "ignore_eos": refused("an answer ends where the model ends it"),
    "enable_multimodal": refused("models of text only"),
    "chat_template": _NO_TEMPLATE,
    "enable_lora": idle("whether adapters are trained says model.lora_configs"),
    "rope_scaling rope_theta": _NO_ROPE,
}
_DTYPES = {"auto": "auto", "bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "float": "float32"}
_ROLLOUT_MODEL: dict[str, Rule] = {
    **_ENGINE,
    "engine_num tensor_parallel_size max_model_len max_prompt_tokens max_response_tokens": whole,
    "temperature top_p enable_thinking tool_call_parser reasoning_parser": later,
    "enable_auto_tool_choice": flag,
    "name": idle("the model to train needs no name"),
    "model_path": idle("model.model_path names the model to train"),
    "engine_type": refused(_POLICY_ELSEWHERE, unless=("vllm", "vllm_async", "sglang")),
    "dtype": choice({word: {"engine.dtype": ours, "trainer.dtype": ours} for word, ours in _DTYPES.items()}),
    "seed": to("seed"),
    "external_model_config.enable": refused(_POLICY_ELSEWHERE),
    "external_model_config.base_url_env external_model_config.api_key_env external_model_config.model_name": (
        _OF_ENDPOINT
    ),
}
_AUXILIARY_MODEL: dict[str, Rule] = {
    **_ENGINE,
    "engine_num tensor_parallel_size": whole,
    "name engine_type external_model_config.base_url_env external_model_config.api_key_env": word,
    "external_model_config.enable": flag,
    "model_path temperature top_p max_model_len max_response_tokens enable_thinking tool_call_parser reasoning_parser "
    "external_model_config.model_name": later,
    "max_prompt_tokens": _NEVER_CUT,
    "enable_auto_tool_choice": idle("tool calls are read where tool_call_parser says how"),
    "dtype": idle("all models compute in engine.dtype"),
    "seed": idle("the run has one seed: seed"),
}
_TRAINER: dict[str, Rule] = {
    "name": _ITSELF,
    "trainer_type": told("training is on this machine", unless=("verl",)),
    "save_interval": or_for_ever("algorithm.save_interval_steps", "only the last step is saved"),
    "max_checkpoints_to_keep": or_for_ever("trainer.keep_checkpoints", "every checkpoint is kept"),
    "total_steps": whole,
    "grad_clip actor_grad_clip trainer_config": later,
    "max_token_len_per_gpu": to("trainer.max_tokens_per_micro_batch"),
    "trainer_config_path": trainer_file,
    "trust_remote_code": _NO_CODE,
    "save_hf_checkpoint": idle("every checkpoint is a Hugging Face directory"),
    "enable_preview": idle("rollouts are in the run's journal, run.db"),
    "critic_warmup": of_ppo(refused("policy and critic are trained together from the first step: leave it out")),
    "use_dynamic_bsz": idle("micro-batches are always filled up to trainer.max_tokens_per_micro_batch"),
    "use_remove_padding": idle("batches are packed, there is no padding"),
    "fix_actor_microbatch_loss_scale": idle("the gradient never depends on the micro-batches"),
    "trainer_strategy balance_batch ulysses_sequence_parallel_size param_offload optimizer_offload grad_offload "
    "offload_policy save_strategy megatron.tensor_model_parallel_size megatron.pipeline_model_parallel_size "
    "megatron.virtual_pipeline_model_parallel_size megatron.expert_model_parallel_size "
    "megatron.expert_tensor_parallel_size megatron.context_parallel_size megatron.sequence_parallel": _PARALLEL,
}
_SECTIONS: dict[str, dict[str, Rule]] = {
    "": {
        "mode group name": word,
        "project": to("project"),
        "checkpoint_root_dir": to("checkpoint_root_dir"),
        "checkpoint_job_dir": _ITSELF,
        "ray_namespace": idle("no actor of the run has a name"),
        "continue_from_checkpoint": flag,
        "ignore_validator_suggestions": idle("there is no adviser on GPU memory to silence"),
    },
    "algorithm.": {
        "algorithm_type advantage_fn add_strategy policy_loss_fn kl_loss_fn kl_penalty_fn entropy_loss_fn "
        "loss_agg_mode": word,
        "advantage_fn_args add_strategy_args policy_loss_fn_args kl_loss_fn_args kl_penalty_fn_args "
        "entropy_loss_fn_args sample_strategy_args": mapping,
        "repeat_times": whole,
        "sample_strategy": sample_strategy,
        "enable_router_replay": refused("mixture-of-experts routing is not replayed here: leave it out"),
        "bypass_old_logprobs": bypass_old_logprobs,
        "rollout_correction": rollout_correction,
        "use_token_level_loss": idle("a setting of supervised warm-up; the loss is that of loss_agg_mode"),
    },
    "algorithm.optimizer.": {
        "lr": to("algorithm.learning_rate"),
        "lr_warmup_steps": whole,
        "lr_warmup_steps_ratio": number,
        "min_lr_ratio": to("trainer.min_lr_ratio"),
        "warmup_style lr_scheduler_type clip_grad": later,
        "optimizer_type": refused("the optimizer is AdamW", unless=("adam", "adamw")),
        "betas": betas,
        "weight_decay": to("trainer.weight_decay"),
    },
    "model.": _MODEL,
    "model.lora_configs[].": _ADAPTER,
    "cluster.": {
        "ray_address": later,
        "node_num gpu_per_node trainer_gpu_num": whole,
        "total_gpu_num rollout_gpu_num auxiliary_model_gpu_num explorer_gpu_num trainer_node_num "
        "trainer_gpu_num_per_node": _ITSELF,
    },
    "buffer.": _BUFFER,
    "buffer.explorer_input.taskset.": _TASKSET,
    "buffer.explorer_input.tasksets[].": _TASKSET,
    "buffer.explorer_input.eval_tasksets[].": _EVAL_TASKSET,
    "buffer.trainer_input.experience_buffer.": {
        "ray_namespace wrap_in_ray": _JOURNAL,
        "schema_type index batch_size tokenizer_path total_epochs total_steps": _ITSELF,
        "use_priority_queue replay_buffer.enable": flag,
        "reuse_cooldown_time replay_buffer.reuse_cooldown_time": later,
        "replay_buffer.priority_fn": word,
        "replay_buffer_kwargs replay_buffer.priority_fn_args": mapping,
    },
    "data_processor.task_pipeline.": {
        "operators config_path inputs output target_fields": later,
        "num_process top_k": whole,
        "priority_weights": mapping,
    },
    "data_processor.experience_pipeline.": {
        "operators": on_experiences,
        "save_input input_save_path output": _JOURNAL,
        "inputs": refused("experiences come from the rollouts alone: leave it out"),
    },
    "explorer.": _EXPLORER,
    "explorer.rollout_model.": _ROLLOUT_MODEL,
    "explorer.auxiliary_models[].": _AUXILIARY_MODEL,
    "synchronizer.": {
        "sync_style": word,
        "sync_interval sync_offset explorer_sync_interval trainer_sync_interval": whole,
        "sync_method sync_timeout group_name wait_for_checkpoint": _MOVES,
        "explorer_world_size ray_namespace": _ITSELF,
    },
    "trainer.": _TRAINER,
    "monitor.": {
        "monitor_type": to("monitor_type"),
        "monitor_args": refused(
            "address and key come from the environment: WANDB_BASE_URL and WANDB_API_KEY, MLFLOW_TRACKING_URI, or "
            "SWANLAB_API_KEY"
        ),
        "detailed_stats": idle("evaluations always come with their intervals"),
        "enable_ray_timeline": idle("the run writes no timeline of Ray's"),
        "cache_dir": _ITSELF,
    },
    "service.data_juicer.": {
        "server_url auto_start port hostname": idle("Data-Juicer runs within the run, without a server")
    },
    "log.": {"level group_by_node save_dir": idle("the run prints its own lines, no log files")},
}
RULES: dict[str, Rule] = {
    **dict.fromkeys(RULES_OF_ROWS, _JOURNAL),
    "buffer.trainer_input.experience_buffer.path": exchange,
    **{key: rule for section, rows in _SECTIONS.items() for key, rule in expanded(rows, section).items()},
}
