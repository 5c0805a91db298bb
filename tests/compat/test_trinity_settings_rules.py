"""What is refused in a Trinity-RFT file, what is said about it, and how wrong files are answered."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from agenttune.compat.trinity.settings import convert
from agenttune.compat.trinity.settings_algorithm_names import ADVANTAGES, ALGORITHMS, KL, POLICY_LOSSES, REFUSED
from agenttune.config.load import load_config, resolve
from agenttune.config.public import AlgorithmConfig, TunerModelConfig
from agenttune.errors import ConfigError

FILE = """\
algorithm: {algorithm_type: grpo, repeat_times: 8}
model: {model_path: Qwen/Qwen3-0.6B, max_model_len: 2048, max_response_tokens: 1024}
buffer:
  batch_size: 16
  explorer_input:
    taskset: {path: sums.jsonl, default_workflow_type: math_workflow}
"""


def write(folder: Path, *more: str, base: str = FILE) -> Path:
    path = folder / "f.yaml"
    path.write_text("\n".join([base, *more]))
    return path


def error_of(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(load_config(path))
    return str(caught.value)


def convert_(content: dict[str, Any], **environment: str):
    return convert(content, "f.yaml", environment=environment)


def refusal(content: dict[str, Any], **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        convert_(content, **environment)
    return str(caught.value)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("mode: explore", "'mode' is 'explore': sampling alone is `agenttune eval` or `agenttune check`"),
        ("mode: train", "'mode' is 'train': training on stored experiences does not exist here yet: use mode both"),
        ("mode: serve", "'mode' is 'serve': serve a checkpoint with any server"),
        ("mode: bot", "'mode' must be both, bench, colocate, explore, train or serve, but 'bot' came"),
        ("mode: bench", "'buffer.explorer_input.eval_tasksets' is empty, so that mode bench has nothing to evaluate"),
        ("stages: [{stage_name: sft}, {stage_name: rl}]", "'stages' has 2 (sft, rl), but a run has one"),
        ("stages: [{stage_name: rl, explorr: {}}]", "'stages[0].explorr' is no section of a stage; did you mean"),
        ("explorr: {}\ncluster: {}", "'explorr' is not a key of Trinity-RFT; did you mean 'explorer'?"),
        (
            "explorer: {rollout_model: {enable_histroy: true}}",
            "'explorer.rollout_model.enable_histroy' is not a key of Trinity-RFT; did you mean "
            "'explorer.rollout_model.enable_history'?",
        ),
        ("explorer: {tool_call_parser: hermes}", "did you mean 'explorer.rollout_model.tool_call_parser'"),
        ("explorer: 3", "'explorer' must be a section of settings, but 3 came"),
        ("explorer: {auxiliary_models: {a: 1}}", "'explorer.auxiliary_models' must be a list of sections"),
        ("explorer: {auxiliary_models: [1]}", "'explorer.auxiliary_models[0]' must be a section of settings, but 1"),
        ("explorer: {auxiliary_models: [{}]}", "is missing"),
        ("explorer: {max_timeout: soon}", "'rollout.timeout_s' must be a number, but 'soon' came (f.yaml: explorer.m"),
        ("explorer: {max_retry_times: many}", "'explorer.max_retry_times' must be a number, but 'many' came"),
        ("explorer: {rollout_model: {engine_type: external}}", "a model behind an endpoint cannot be trained"),
        ("explorer: {rollout_model: {dtype: float16}}", "is 'float16': use auto, bfloat16 or float32"),
        ("explorer: {bench_on_latest_checkpoint: true}", "name the checkpoint instead: agenttune eval"),
        ("explorer: {env_vars: {KEY: 1}}", "are set by the shell that starts the run, before it does: export KEY=1"),
        ("monitor: {monitor_type: swanlab}", "there is no SwanLab sink: use tensorboard, wandb or mlflow"),
        ("monitor: {monitor_type: wandb, monitor_args: {base_url: x}}", "WANDB_BASE_URL"),
        ("monitor: {monitor_type: paper}", "'paper' came (f.yaml: monitor.monitor_type)"),
        (
            "data_processor: {experience_pipeline: {operators: [{name: reward_shaping}]}}",
            "has the operators reward_shaping, but data processing does not exist here yet",
        ),
        ("synchronizer: {sync_style: sometimes}", "must be one of fixed, explorer_driven"),
        ("trainer: {trainer_type: tinker}", "'trainer.trainer_type' is 'tinker': training is local"),
        ("trainer: {trainer_config_path: verl.yaml}", "Trinity-RFT dropped it too"),
        (
            "trainer: {trainer_config: {actor_rollout: {}}}",
            "is no section of verl's; did you mean 'actor_rollout_ref'?",
        ),
        (
            "trainer: {max_checkpoints_to_keep: 2, trainer_config: {trainer: {max_actor_ckpt_to_keep: 3}}}",
            "says the same as trainer.max_checkpoints_to_keep: keep one of them",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path, more, message):
    assert message in error_of(write(tmp_path, more))


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"algorithm_type": "grp"}, "which is no algorithm of Trinity-RFT's; did you mean 'grpo'?"),
        ({"advantage_fn": "clipb"}, "'algorithm.advantage_fn' is 'clipb', which does not exist here"),
        ({"policy_loss_fn": "mix"}, "'algorithm.policy_loss_fn' is 'mix', which does not exist here"),
        ({"policy_loss_fn_args": {"clip_rnge": 0.1}}, "is not an argument of 'ppo'; did you mean 'clip_range'?"),
        ({"policy_loss_fn_args": {"enable_sequence_masking": True}}, "it is False here: leave it out"),
        ({"policy_loss_fn_args": {"loss_agg_mode": "seq-mean-token-sum"}}, "takes algorithm.loss_agg_mode instead"),
        ({"advantage_fn_args": {"rank_penalty": 0.25}}, "'algorithm.advantage_fn_args.rank_penalty' is 0.25"),
        ({"advantage_fn_args": {"std_cal_level": "run"}}, "use group or batch"),
        ({"advantage_fn_args": 3}, "'algorithm.advantage_fn_args' must be a section of settings, but 3 came"),
        ({"kl_loss_fn": "k4"}, "use one of none, k1, k2, k3, low_var_kl, abs, corrected_k3"),
        ({"kl_loss_fn_args": {"adaptive": True}}, "'algorithm.kl_loss_fn_args.adaptive' is True"),
        ({"kl_penalty_fn": "k1"}, "Trinity-RFT charges it with ppo only"),
        ({"algorithm_type": "ppo", "kl_penalty_fn": "k1"}, "either in the reward or in the loss: set kl_loss_fn: none"),
        ({"algorithm_type": "ppo", "kl_penalty_fn": "k9", "kl_loss_fn": "none"}, "use one of none, k1, k2"),
        (
            {
                "algorithm_type": "ppo",
                "kl_penalty_fn": "k1",
                "kl_loss_fn": "none",
                "kl_penalty_fn_args": {"adaptive": True, "horizon": 100},
            },
            "with adaptive must have target_kl and horizon",
        ),
        ({"entropy_loss_fn": "mix"}, "use default or none"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "use token-mean, seq-mean-token-mean, seq-mean-token-sum"),
        ({"sample_strategy": "mix"}, "older or mixed experiences are not trained here yet"),
        ({"rollout_correction": {"rollout_is": "token"}}, "training is on-policy"),
        ({"optimizer": {"betas": 0.9}}, "must be two numbers, but 0.9 came"),
        ({"optimizer": {"lr_warmup_steps_ratio": 0.1}}, "a share needs buffer.total_steps too"),
        ({"optimizer": {"optimizer_type": "sgd"}}, "the optimizer is AdamW"),
        ({"add_strategy": "grpo", "advantage_fn": "grpo"}, "advantage_fn is given too: leave add_strategy out"),
    ],
)
def test_parts_of_an_algorithm_that_do_not_exist_are_refused_by_name(algorithm, message):
    assert message in refusal({"algorithm": {"algorithm_type": "grpo", **algorithm}})


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ({"lora_configs": [{"name": "a"}]}, "model.lora_configs"),
        ({"custom_chat_template": "x"}, "model.custom_chat_template"),
        ({"top_k": 20}, "model.top_k"),
        ({"repetition_penalty": 1.1}, "model.repetition_penalty"),
        ({"min_response_tokens": 8}, "model.min_response_tokens"),
        ({"rope_scaling": {"factor": 2}}, "model.rope_scaling"),
        ({"trust_remote_code": True}, "model.trust_remote_code"),
        ({"tinker": {"enable": True}}, "model.tinker.enable"),
        ({"external_model": {"enable": "true"}}, "model.external_model.enable"),
    ],
)
def test_features_of_the_model_are_refused_and_their_off_values_accepted(model, key):
    assert f"'{key}' is " in refusal({"model": model})
    off = {"model": {"lora_configs": None, "top_k": -1, "repetition_penalty": 1, "tinker": {"enable": "false"}}}
    assert convert_(off).notices == ()


@pytest.mark.parametrize(
    ("taskset", "message"),
    [
        ({"storage_type": "sql"}, "tasks are read from files or the Hugging Face hub"),
        ({"data_selector": {"selector_type": "difficulty_based"}}, "tasks are not chosen by difficulty here yet"),
        ({"format": {"workflow_key": "kind"}}, "one workflow and one reward function do all tasks of a run"),
        ({"format": {"system_prompt_key": "system"}}, "the system prompt is one for all tasks"),
        ({"rollout_args": {"top_k": 5}}, "training needs tokens of the model's whole distribution"),
        ({"workflow_args": ["a"]}, "workflow_args' must be a section of settings, but ['a'] came"),
    ],
)
def test_a_taskset_s_features_that_do_not_exist_are_refused(taskset, message):
    content = {"buffer": {"explorer_input": {"taskset": {"path": "x", **taskset}}}}
    assert message in refusal(content)
    content = {"buffer": {"explorer_input": {"tasksets": [{"path": "x", **taskset}]}}}
    assert "buffer.explorer_input.tasksets[0]." in refusal(content)


def test_one_run_has_one_taskset_and_evaluation_does_as_training():
    def with_(*evaluation: dict[str, Any], **more: Any) -> dict[str, Any]:
        training = {"path": "x", "default_workflow_type": "w", "format": {"prompt_key": "q"}, "workflow_args": {"a": 1}}
        return {"buffer": {"explorer_input": {"taskset": training, "eval_tasksets": list(evaluation), **more}}}

    same = {"path": "y", "format": {"prompt_key": "q"}}
    assert "has 2 sets" in refusal({"buffer": {"explorer_input": {"tasksets": [{"path": "x"}, {"path": "y"}]}}})
    assert "is given beside taskset" in refusal(with_(tasksets=[{"path": "z"}]))
    assert "eval_tasksets[0].path' is missing" in refusal(with_({"format": {"prompt_key": "q"}}))
    assert "is 'prompt' (Trinity-RFT's default), but taskset has 'q'" in refusal(with_({"path": "y"}))
    assert "is 'v': but taskset has 'w'" in refusal(with_({**same, "default_workflow_type": "v"}))
    assert "is {'a': 2}: but taskset has {'a': 1}" in refusal(with_({**same, "workflow_args": {"a": 2}}))
    assert "two evaluation sets have this name" in refusal(with_({**same, "name": "n"}, {**same, "name": "n"}))
    assert "default_eval_workflow_type' is 'v'" in refusal(with_(same, default_eval_workflow_type="v"))
    assert convert_(with_(same, default_eval_workflow_type="w")).settings["eval_dataset"] == {"path": "y"}


@pytest.mark.parametrize(
    ("text", "environment", "value"),
    [
        ("${oc.env:A}", {"A": "x"}, "x"),
        ("${oc.env:A,y}", {}, "y"),
        ("${oc.env:A, y }", {}, "y"),
        ("${oc.env:A,'a, b'}", {}, "a, b"),
        ("${oc.env:A,}", {}, ""),
        ("${oc.env:A,null}", {}, None),
        ("${oc.env:A,${oc.env:B,z}}/c", {"B": "b"}, "b/c"),
        ("pre-${oc.env:A,x}-${oc.env:B,y}-post", {"B": "b"}, "pre-x-b-post"),
        ("no $ALONE and {braces}", {}, "no $ALONE and {braces}"),
    ],
)
def test_the_environment_is_read_as_omegaconf_reads_it(text, environment, value):
    found = convert_({"mode": "both", "buffer": {"explorer_input": {"taskset": {"path": text}}}}, **environment)
    assert found.settings.get("train_dataset", {}).get("path") == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("${oc.env:NOT_SET}", "f.yaml: 'model.model_path' needs the environment variable NOT_SET, which is not set"),
        ("${oc.env:}", "'' is no name of an environment variable"),
        ("${project}", "has the interpolation '${project}', which is not read here"),
        ("${oc.select:a,b}", "'${oc.select:a,b}', which is not read here"),
        ("${oc.env:A", "has a '${' without its '}'"),
    ],
)
def test_other_interpolations_and_unset_variables_are_refused_by_name(text, message):
    assert message in refusal({"mode": "both", "model": {"model_path": text}})


def test_layouts_are_told_apart_and_do_not_mix(tmp_path):
    mixed = write(tmp_path, "workflow: agent.py:run", "loss: {}")
    assert error_of(mixed) == (
        f"{mixed} mixes two layouts: buffer of Trinity-RFT's, loss, workflow of our own; keep to one of them"
    )
    ours = write(tmp_path, base="train_dataset: {path: x}\nmodel: {model_path: m, max_model_len: 64}\n")
    assert load_config(ours).origins == {}
    shared = write(tmp_path, base="model: {model_path: m, max_model_len: 64}\nalgorithm: {algorithm_type: grpo}\n")
    assert load_config(shared).origins == {}
    mixed = write(tmp_path, base="algorithm: {group_size: 4}\ntrainer: {total_steps: 4}\n")
    assert "mixes two layouts: trainer.total_steps of Trinity-RFT's, algorithm.group_size of our own" in error_of(mixed)
    mixed = write(tmp_path, base="algorithm: {group_size: 4}\nbuffer: {}\n")
    assert "'algorithm.group_size' is not a key of Trinity-RFT, but a setting of our own layout" in error_of(mixed)
    theirs = write(tmp_path, base="model: {model_path: m, max_model_len: 64}\nalgorithm: {repeat_times: 4}\n")
    assert load_config(theirs).settings["algorithm"]["group_size"] == 4


def test_paths_beside_the_file_are_meant(tmp_path):
    (tmp_path / "sums.jsonl").touch()
    (tmp_path / "flows.py").touch()
    config = resolve(load_config(write(tmp_path, base=FILE.replace("math_workflow", "flows.py:Flow")))).config
    assert config.train_dataset.path == str(tmp_path / "sums.jsonl")
    assert config.workflow == f"{tmp_path / 'flows.py'}:Flow"
    assert config.model.model_path == "Qwen/Qwen3-0.6B"


def test_missing_settings_are_named_as_the_file_s_owner_knows_them(tmp_path):
    message = error_of(write(tmp_path, base="buffer: {batch_size: 4}\nmodel: {model_path: m}\n"))
    assert "'train_dataset' is missing (f.yaml: buffer.explorer_input.taskset)" in message
    assert "'model.max_model_len' is missing (f.yaml: model.max_model_len)" in message


def test_a_run_that_exists_is_left_alone_when_it_is_not_to_continue(tmp_path):
    run = tmp_path / "P" / "first"
    run.mkdir(parents=True)
    content = {
        "project": "P",
        "name": "first",
        "checkpoint_root_dir": str(tmp_path),
        "continue_from_checkpoint": False,
        "cluster": {},
    }
    assert convert_(content).settings["name"] == "first"  # an empty folder is no run
    (run / "run.db").touch()
    found = convert(content, "f.yaml", environment={}, now=datetime(2026, 1, 2, 3, 4, 5))
    assert found.settings["name"] == "first_20260102030405"
    assert found.notices == (
        "f.yaml: continue_from_checkpoint = False: the run first exists, so this one is named first_20260102030405",
    )
    assert convert_({**content, "continue_from_checkpoint": True}).settings["name"] == "first"


def test_trinity_s_defaults_hold_unless_an_argument_replaces_their_section(tmp_path):
    path = write(tmp_path)
    resolved = resolve(load_config(path), {"rollout": {"timeout_s": 5}})
    assert resolved.config.model.tool_call_parser is None
    assert resolved.config.rollout.timeout_s == 5
    assert (
        resolved.origins["model.tool_call_parser"] == "Trinity-RFT's default of explorer.rollout_model.tool_call_parser"
    )
    model = TunerModelConfig(model_path="m", max_model_len=64)
    algorithm = AlgorithmConfig(group_size=2)
    resolved = resolve(load_config(path), None, {"model": model, "algorithm": algorithm})
    assert (resolved.config.model.tool_call_parser, resolved.config.model.max_tokens) == ("hermes", 1024)
    assert resolved.config.algorithm.batch_size == 16
    assert "override: algorithm.group_size = 2 (argument) instead of 8 (f.yaml: algorithm.repeat_times)" in (
        resolved.overrides
    )


def test_arguments_keep_their_types(tmp_path):
    """Numbers written as `1e-3` are numbers, also where nobody says which type is meant."""
    more = "cluster: {}"
    base = FILE.replace("math_workflow}", "math_workflow, workflow_args: {rate: 1e-3, name: 1e, deep: {x: -2.5E+2}}}")
    args = resolve(load_config(write(tmp_path, more, base=base))).config.workflow_args
    assert args == {"rate": 0.001, "name": "1e", "deep": {"x": -250.0}}


def test_every_algorithm_name_of_trinity_is_known_and_its_parts_exist():
    from agenttune.algorithm.advantages import ADVANTAGES as OUR_ADVANTAGES
    from agenttune.algorithm.kl import ESTIMATORS as OUR_KL
    from agenttune.algorithm.losses import POLICY_LOSSES as OUR_LOSSES
    from agenttune.algorithm.presets import PRESETS

    assert set(ALGORITHMS) <= set(PRESETS)
    assert not set(ALGORITHMS) & set(REFUSED)
    assert {function.name for function in ADVANTAGES.values()} <= set(OUR_ADVANTAGES)
    assert {function.name for function in POLICY_LOSSES.values()} <= set(OUR_LOSSES)
    assert set(KL) - {"none"} <= set(OUR_KL)
    for name, (advantage, loss) in ALGORITHMS.items():
        assert PRESETS[name].policy_loss == POLICY_LOSSES[loss].name, name
        assert not advantage or PRESETS[name].advantage == ADVANTAGES[advantage].name, name


def test_the_notice_is_one_message_that_lists_each_key_once():
    content = {
        "cluster": {"node_num": 2, "gpu_per_node": 8},
        "log": {"level": "INFO"},
        "synchronizer": {"sync_interval": 2},
    }
    line, notice = convert_(content).notices
    assert line == (
        "f.yaml: synchronizer.sync_interval = 2: weights move after every step (runs are synchronous until the "
        "asynchronous mode exists)"
    )
    assert notice.splitlines() == [
        "f.yaml: without effect here:",
        "  cluster.{node_num, gpu_per_node}: one machine, whose devices are found (engine.device)",
        "  log.level: the run prints its own lines, no log files",
    ]
    assert not re.search(r"node_num.*node_num", notice)


def test_what_only_evaluation_does_with_its_samples_is_no_reason_to_refuse():
    taskset = {"path": "x", "rollout_args": {"top_k": 20, "top_p": 0.8, "n": 4}}
    found = convert_({"buffer": {"explorer_input": {"eval_tasksets": [taskset]}}, "mode": "both"})
    assert "top_k" in found.notices[0]


def test_priorities_are_said_and_a_second_use_is_refused():
    def with_(**replay: Any) -> dict[str, Any]:
        return {"buffer": {"trainer_input": {"experience_buffer": {"replay_buffer": replay}}}}

    (line,) = convert_(with_(enable=True, reuse_cooldown_time=None)).notices
    assert line.endswith("replay_buffer.enable = True: each step trains on its own rollouts, each of them once")
    assert "are not trained a second time here yet" in refusal(with_(enable=True, reuse_cooldown_time=10))


def test_environment_variables_of_workflows_must_be_set_already():
    content = {"explorer": {"env_vars": {"TMPDIR": "${oc.env:TMPDIR,/tmp}", "SEED": 3}}}
    assert "export SEED=3" in refusal(content, TMPDIR="/scratch")
    assert convert_(content, TMPDIR="/scratch", SEED="3").notices == ()


@pytest.mark.parametrize(
    ("explorer", "total"),
    [
        ({"runner_per_model": 8}, 8),
        ({"runner_per_model": 8, "rollout_model": {"engine_num": 4}}, 32),
        ({"runner_per_model": 8, "concurrent_mode": "asynchronous"}, 128),
        ({"runner_per_model": 8, "concurrent_mode": "asynchronous", "max_repeat_times_per_runner": 2}, 16),
    ],
)
def test_as_many_rollouts_run_at_once_as_there(explorer, total):
    found = convert_({"explorer": explorer, "algorithm": {"algorithm_type": "grpo", "repeat_times": 16}})
    assert found.settings["rollout"] == {"max_concurrent_rollouts": total}


@pytest.mark.parametrize(
    ("train", "steps", "minibatches", "said"),
    [
        (0, 100, None, ""),
        (128, 100, None, ""),
        (32, 25, 4, "each step's 128 rollouts make 4 updates of 32"),
        (100, 100, None, "each step trains on all rollouts of its tasks (batch_size x repeat_times)"),
        (256, 100, None, "each step trains on all rollouts of its tasks (batch_size x repeat_times)"),
    ],
)
def test_a_smaller_training_batch_makes_several_updates_of_a_step(train, steps, minibatches, said):
    found = convert_(
        {
            "algorithm": {"algorithm_type": "grpo", "repeat_times": 8},
            "buffer": {"batch_size": 16, "train_batch_size": train},
            "trainer": {"total_steps": 100},
        }
    )
    assert found.settings["train_dataset"] == {"total_steps": steps}
    assert found.settings.get("trainer", {}).get("num_minibatches") == minibatches
    assert said in "\n".join(found.notices)
    assert bool(said) == bool(found.notices)


def test_ppo_and_its_kl_penalty_are_ours():
    content = {
        "algorithm": {
            "algorithm_type": "ppo",
            "advantage_fn_args": {"gamma": 0.99},
            "kl_loss_fn": "none",
            "kl_penalty_fn": "k1",
            "kl_penalty_fn_args": {"kl_coef": 0.02, "adaptive": True, "target_kl": 0.1, "horizon": 1000},
        },
        "model": {"model_path": "m", "critic_model_path": "m"},
        "trainer": {"critic_warmup": 0},
    }
    found = convert_(content)
    assert found.settings["algorithm"]["algorithm_type"] == "ppo"
    assert found.settings["loss"] == {
        "advantage_args": {"gamma": 0.99},
        "kl": "k1",
        "kl_in": "reward",
        "kl_coef": 0.02,
        "kl_target": 0.1,
        "kl_horizon": 1000,
    }
    assert "critic" in "".join(found.notices)
    assert "'trainer.critic_warmup' is 5: policy and critic" in refusal({**content, "trainer": {"critic_warmup": 5}})
    other = {**content, "model": {"model_path": "m", "critic_model_path": "n"}}
    assert "the critic starts from model.model_path" in refusal(other)
