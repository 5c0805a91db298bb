"""What is refused in a Trinity-RFT file, what is said about it, and how wrong files are answered."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from sharpen.compat.files import load_config
from sharpen.compat.trinity.yaml.conversion import convert
from sharpen.compat.trinity.yaml.former import DROPPED, RENAMED, WITHOUT_EFFECT
from sharpen.compat.trinity.yaml.functions import ADVANTAGES, ALGORITHMS, KL, POLICY_LOSSES, SUPERVISED
from sharpen.compat.trinity.yaml.interpolation import interpolate
from sharpen.compat.trinity.yaml.table import RULES
from sharpen.config.load import resolve
from sharpen.config.public import AlgorithmConfig, TunerModelConfig
from sharpen.errors import ConfigError

FILE = """\
algorithm: {algorithm_type: grpo, repeat_times: 8}
model: {model_path: Qwen/Qwen3-0.6B, max_model_len: 2048, max_response_tokens: 1024}
buffer:
  batch_size: 16
  explorer_input:
    taskset: {path: sums.jsonl, default_workflow_type: math_workflow}
"""


PART = {"clip_range": 0.2}
WRITTEN, SEQUENCES = "seq-mean-token-mean", "sequence-mean-token-mean"
"""An aggregation as Trinity-RFT writes it, and as we do."""


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
        ("mode: bot", "'mode' must be both, bench, colocate, explore, train or serve, got 'bot'"),
        ("mode: bench", "'buffer.explorer_input.eval_tasksets' is empty, so that mode bench has nothing to evaluate"),
        ("stages: [{stage_name: rl, explorr: {}}]", "'stages[0].explorr' is no section of a stage; did you mean"),
        ("explorr: {}\ncluster: {}", "'explorr' is not a key of Trinity-RFT; did you mean 'explorer'?"),
        (
            "explorer: {rollout_model: {enable_histroy: true}}",
            "'explorer.rollout_model.enable_histroy' is not a key of Trinity-RFT; did you mean "
            "'explorer.rollout_model.enable_history'?",
        ),
        ("explorer: {tool_call_parser: hermes}", "did you mean 'explorer.rollout_model.tool_call_parser'"),
        ("explorer: 3", "'explorer' must be a section of settings, got 3"),
        ("explorer: {auxiliary_models: {a: 1}}", "'explorer.auxiliary_models' must be a list of sections"),
        ("explorer: {auxiliary_models: [1]}", "'explorer.auxiliary_models[0]' must be a section of settings, got 1"),
        ("explorer: {auxiliary_models: [{}]}", "is missing"),
        ("explorer: {max_timeout: soon}", "'rollout.timeout_s' must be a number, got 'soon' (f.yaml: explorer.m"),
        ("explorer: {max_retry_times: many}", "'explorer.max_retry_times' must be a whole number, got 'many'"),
        ("explorer: {rollout_model: {engine_type: external}}", "a model behind an endpoint cannot be trained"),
        ("explorer: {rollout_model: {dtype: float16}}", "is 'float16': use auto, bfloat16, bf16, float32"),
        ("explorer: {env_vars: {KEY: [1]}}", "'explorer.env_vars.KEY' must be a text or a number, got [1]"),
        ("monitor: {monitor_type: wandb, monitor_args: {base_url: x}}", "WANDB_BASE_URL"),
        ("monitor: {monitor_type: paper}", "got 'paper' (f.yaml: monitor.monitor_type)"),
        (
            "data_processor: {experience_pipeline: {operators: [{name: reward_shaping}]}}",
            "operators[0].name' is 'reward_shaping', which is no operator here; did you mean 'reward_shaping_mapper'?",
        ),
        ("synchronizer: {sync_style: sometimes}", "must be one of fixed, explorer_driven"),
        ("trainer: {trainer_config_path: verl.yaml}", "there is no such file here; Trinity-RFT dropped the key"),
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
        ({"advantage_fn": "clip"}, "'algorithm.advantage_fn' is 'clip', which does not exist here; did you mean 'clip"),
        ({"advantage_fn": "clipb", "advantage_fn_args": {"epsilon": 0.1}}, "it is 1e-06 here: leave it out"),
        ({"advantage_fn": "jsd"}, "'algorithm.advantage_fn' is 'jsd': it goes with algorithm_type: jsd"),
        ({"policy_loss_fn": "mixed"}, "'algorithm.policy_loss_fn' is 'mixed', which does not exist here"),
        ({"policy_loss_fn": "mix"}, "'algorithm.policy_loss_fn' is 'mix': it goes with algorithm_type: mix"),
        ({"policy_loss_fn_args": {"clip_rnge": 0.1}}, "is not an argument of 'ppo'; did you mean 'clip_range'?"),
        ({"policy_loss_fn_args": {"enable_sequence_masking": 3}}, "must be true or false, got 3"),
        ({"policy_loss_fn_args": {"fallback_to_policy_gradient": True}}, "it is False here: leave it out"),
        ({"policy_loss_fn_args": {"loss_agg_mode": "seq-sum"}}, "use token-mean, seq-mean-token-mean or seq-mean-to"),
        ({"advantage_fn_args": {"rank_penalty": 0.25}}, "'algorithm.advantage_fn_args.rank_penalty' is 0.25"),
        ({"advantage_fn_args": {"std_cal_level": "run"}}, "use group or batch"),
        ({"advantage_fn_args": 3}, "'algorithm.advantage_fn_args' must be a section of settings, got 3"),
        ({"kl_loss_fn": "k4"}, "use none, k1, k2, k3, low_var_kl, abs or corrected_k3"),
        ({"kl_loss_fn_args": {"adaptive": True}}, "'algorithm.kl_loss_fn_args.adaptive' is True"),
        ({"kl_penalty_fn": "k1"}, "Trinity-RFT charges it with ppo only"),
        ({"algorithm_type": "ppo", "kl_penalty_fn": "k1"}, "either in the reward or in the loss: set kl_loss_fn: none"),
        ({"algorithm_type": "ppo", "kl_penalty_fn": "k9", "kl_loss_fn": "none"}, "use none, k1, k2"),
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
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "use token-mean, seq-mean-token-mean or seq-mean-token-sum"),
        ({"sample_strategy": "mix"}, "an expert's rows are mixed in by algorithm_type mix or mix_chord: set that"),
        ({"sample_strategy": "newest"}, "use default, mix or staleness_control"),
        ({"optimizer": {"betas": 0.9}}, "must be two numbers, got 0.9"),
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
        ({"lora_configs": [{"name": "a", "path": "b"}]}, "model.lora_configs[0].path"),
        ({"lora_configs": [{"target_modules": ".*_proj"}]}, "model.lora_configs[0].target_modules"),
        ({"lora_configs": [{"lora_dtype": "bfloat16"}]}, "model.lora_configs[0].lora_dtype"),
        ({"lora_configs": [{"base_model_name": "other"}]}, "model.lora_configs[0].base_model_name"),
        ({"custom_chat_template": "x"}, "model.custom_chat_template"),
        ({"repetition_penalty": 1.1}, "model.repetition_penalty"),
        ({"min_response_tokens": 8}, "model.min_response_tokens"),
        ({"rope_scaling": {"factor": 2}}, "model.rope_scaling"),
        ({"trust_remote_code": True}, "model.trust_remote_code"),
        ({"tinker": {"enable": True, "train_mlp": False, "train_attn": False}}, "model.tinker.train_mlp"),
        ({"tinker": {"enable": True}, "lora_configs": [{}]}, "model.tinker.enable"),
        ({"external_model": {"enable": True}}, "model.external_model.enable"),
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
        ({"data_selector": {"selector_type": "hardest"}}, "use sequential, shuffle, random, offline_easy2hard or diff"),
        (
            {"data_selector": {"selector_type": "difficulty_based", "kwargs": {"tua": 1}}},
            "is no argument of difficulty",
        ),
        (
            {"data_selector": {"selector_type": "difficulty_based", "kwargs": 3}},
            "kwargs' must be a section of settings",
        ),
        ({"data_selector": {"selector_type": "offline_easy2hard"}}, "is None: offline_easy2hard needs one field here"),
        (
            {"data_selector": {"selector_type": "offline_easy2hard", "feature_keys": ["a", "b"]}},
            "feature_keys' is ['a', 'b']: offline_easy2hard needs one field here, whose greatest numbers are the",
        ),
        ({"format": {"workflow_key": "kind"}}, "one workflow and one reward function do all tasks of a run"),
        ({"format": {"system_prompt_key": "system"}}, "the system prompt is one for all tasks"),
        ({"workflow_args": ["a"]}, "workflow_args' must be a section of settings, got ['a']"),
    ],
)
def test_a_taskset_s_features_that_do_not_exist_are_refused(taskset, message):
    content = {"buffer": {"explorer_input": {"taskset": {"path": "x", **taskset}}}}
    assert message in refusal(content)
    content = {"buffer": {"explorer_input": {"tasksets": [{"path": "x", **taskset}]}}}
    assert "buffer.explorer_input.tasksets[0]." in refusal(content)


def test_the_name_of_agentscope_0_is_told_to_run_agentscope_1():
    name = "agentscopev0_react_math_workflow"
    found = convert_({"buffer": {"explorer_input": {"taskset": {"path": "x", "default_workflow_type": name}}}})
    assert found.settings["workflow"] == name
    (told,) = [notice for notice in found.notices if name in notice]
    assert "taskset.default_workflow_type" in told
    assert "AgentScope 1.x" in told


def test_a_name_that_an_example_registered_once_is_where_its_class_is():
    name = "learn2ask_workflow"
    content = {"buffer": {"explorer_input": {"taskset": {"path": "x", "default_workflow_type": name}}}}
    found = convert_(content)
    assert found.settings["workflow"] == "examples.learn_to_ask.workflow.workflow_learn2ask:Learn2AskWorkflow"
    assert any(name in notice and "does not register that name any more" in notice for notice in found.notices)


def test_one_run_has_one_taskset_and_each_evaluation_set_its_own_workflow_format_and_arguments():
    def with_(*evaluation: dict[str, Any], **more: Any) -> dict[str, Any]:
        training = {"path": "x", "default_workflow_type": "w", "format": {"prompt_key": "q"}, "workflow_args": {"a": 1}}
        return {"buffer": {"explorer_input": {"taskset": training, "eval_tasksets": list(evaluation), **more}}}

    same: dict[str, Any] = {"path": "y", "format": {"prompt_key": "q"}}
    assert "has 2 sets" in refusal({"buffer": {"explorer_input": {"tasksets": [{"path": "x"}, {"path": "y"}]}}})
    assert "is given beside taskset" in refusal(with_(tasksets=[{"path": "z"}]))
    assert "eval_tasksets[0].path' is missing" in refusal(with_({"format": {"prompt_key": "q"}}))
    assert "two evaluation sets have this name" in refusal(with_({**same, "name": "n"}, {**same, "name": "n"}))

    def own(*evaluation: dict[str, Any], **more: Any) -> Any:
        return convert_(with_(*evaluation, **more)).settings["evaluation"]["own"]

    reads = {"prompt_key": "q", "response_key": "response"}
    assert own(same) == {"held-out": {"workflow_args": {}}}  # as there: training's arguments are training's alone
    assert "workflow_args is not given: these tasks have none" in " ".join(convert_(with_(same)).notices)
    same["workflow_args"] = {"a": 1}
    assert "evaluation" not in convert_(with_(same, default_eval_workflow_type="w")).settings
    assert own({**same, "format": {}}) == {"held-out": {"task_args": {**reads, "prompt_key": "prompt"}}}
    assert own({**same, "default_workflow_type": "v"}) == {"held-out": {"workflow": "v"}}
    assert own(same, default_eval_workflow_type="m.v") == {"held-out": {"workflow": "m:v"}}
    assert own({**same, "workflow_args": {"a": 2}}) == {"held-out": {"workflow_args": {"a": 2}}}
    assert own(same, {**same, "name": "n", "default_reward_fn_type": "r", "reward_fn_args": {"x": 1}}) == {
        "n": {"task_args": {**reads, "reward_fn": "r", "reward_fn_args": {"x": 1}}}
    }


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
        ("${oc.env:NOT_SET}", "'model.model_path' needs the environment variable NOT_SET, which is not set"),
        ("${oc.env:}", "'' is no name of an environment variable"),
        ("${project}", "'model.model_path' refers to '${project}', which the file does not give"),
        ("${.max_model_len[0].a}", "'model.model_path' refers to '${.max_model_len[0].a}', which the file does not"),
        ("${...mode}", "'model.model_path' refers to '${...mode}', which is outside of the file"),
        ("${model.model_path}", "'model.model_path' refers to itself"),
        ("${model}", "'model.model_path' refers to itself"),
        ("${oc.select:a,b}", "'${oc.select:a,b}', which is not read here"),
        ("${oc.env:A", "has a '${' without its '}'"),
    ],
)
def test_other_interpolations_and_unset_variables_are_refused_by_name(text, message):
    assert message in refusal({"mode": "both", "model": {"model_path": text}})


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("${model.max_model_len}", 512),
        ("${.max_model_len}", 512),
        ("${..buffer.batch_size}", 4),
        ("${ buffer.lists.0 }", 7),
        ("${buffer.lists[1].size}", 9),
        ("${${buffer.which}}", 512),
        ("${oc.env:A,${buffer.batch_size}}", "4"),
        ("${oc.env:B,${buffer.batch_size}}", "b"),
        ("${buffer.nothing}", None),
        ("a${buffer.batch_size}b${buffer.nothing}", "a4bNone"),
        ("${buffer.inner}", {"far": 512, "near": 4}),
        (r"a\${model.max_model_len}", "a${model.max_model_len}"),
        (r"a\\${buffer.batch_size}", r"a\4"),
    ],
)
def test_keys_stand_for_one_another_as_in_omegaconf(written, value):
    """The expected values are those that OmegaConf 2.3 gave."""
    inner = {"far": "${model.max_model_len}", "near": "${..batch_size}"}
    buffer = {"batch_size": 4, "lists": [7, {"size": 9}], "which": "model.max_model_len", "nothing": None}
    content = {"model": {"max_model_len": 512, "found": written}, "buffer": {**buffer, "inner": inner}}
    found, problems = interpolate(content, {"B": "b"})
    assert (found["model"]["found"], problems) == (value, {})


def test_unset_variables_come_in_one_message_with_all_that_is_wrong():
    content = {
        "mode": "both",
        "model": {"model_path": "${oc.env:MODEL}", "max_model_len": "${oc.env:LENGTH}"},
        "buffer": {"batch_size": 0, "explorer_input": {"taskset": {"path": "${oc.env:TASKS}", "storage_type": "sql"}}},
        "explorer": {"max_timeout": "soon", "env_vars": {"TMPDIR": "${oc.env:TMPDIR}"}},
    }
    lines = refusal(content).splitlines()
    assert lines[0].endswith(": 7 problems")
    for number, name in enumerate(("MODEL", "LENGTH", "TASKS", "TMPDIR"), start=1):
        assert f"needs the environment variable {name}, which is not set" in lines[number]
    assert "'buffer.explorer_input.taskset.storage_type' is 'sql'" in lines[5]
    assert "'algorithm.batch_size' must be at least 1, got 0 (f.yaml: buffer.batch_size)" in "\n".join(lines)
    assert "'rollout.timeout_s' must be a number, got 'soon' (f.yaml: explorer.max_timeout)" in "\n".join(lines)


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


def test_a_teacher_and_an_expert_s_rows_beside_the_file_are_meant(tmp_path):
    (tmp_path / "big").mkdir()
    (tmp_path / "worked.jsonl").touch()
    mine = tmp_path / "f.yaml"
    model = {"model": {"model_path": "m", "max_model_len": 64}}
    tasks = {"taskset": {"path": "sums.jsonl", "default_workflow_type": "math_workflow"}}
    teacher = {"algorithm_type": "jsd", "repeat_times": 8}
    content = {**distilled(teacher), "buffer": {"batch_size": 8, "explorer_input": tasks}, **model}
    mine.write_text(json.dumps(content))
    assert resolve(load_config(mine)).config.distill.teacher_path == str(tmp_path / "big")
    content = {**mixed_file(), **model}
    content["buffer"]["explorer_input"] = tasks
    mine.write_text(json.dumps(content))
    found = resolve(load_config(mine)).config.expert.dataset
    assert found is not None
    assert found.path == str(tmp_path / "worked.jsonl")


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
    assert (resolved.config.model.tool_call_parser, resolved.config.model.max_tokens) == ("auto", 1024)
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
    from sharpen.learning.algorithm.advantages import ADVANTAGES as OUR_ADVANTAGES
    from sharpen.learning.algorithm.kl import ESTIMATORS as OUR_KL
    from sharpen.learning.algorithm.losses import POLICY_LOSSES as OUR_LOSSES
    from sharpen.learning.algorithm.presets import PRESETS
    from sharpen.learning.algorithm.supervised import SUPERVISED as OUR_SUPERVISED

    assert set(ALGORITHMS) <= set(PRESETS)
    assert set(SUPERVISED) == set(OUR_SUPERVISED)
    assert {function.name for function in ADVANTAGES.values()} <= set(OUR_ADVANTAGES)
    assert {function.name for function in POLICY_LOSSES.values()} <= set(OUR_LOSSES)
    assert set(KL) - {"none"} <= set(OUR_KL)
    for name, (advantage, loss) in ALGORITHMS.items():
        for chosen, functions, own in (
            (loss, POLICY_LOSSES, PRESETS[name].policy_loss),
            (advantage, ADVANTAGES, PRESETS[name].advantage),
        ):
            assert not chosen or (own != functions[chosen].name) == functions[chosen].differs, name


def test_the_notice_is_one_message_that_lists_each_key_once():
    content = {
        "cluster": {"total_gpu_num": 16, "explorer_gpu_num": 8},
        "log": {"level": "INFO"},
    }
    (notice,) = convert_(content).notices
    assert notice.splitlines() == [
        "f.yaml: without effect here:",
        "  cluster.{total_gpu_num, explorer_gpu_num}: Trinity-RFT fills it in itself",
        "  log.level: the run prints its own lines, no log files",
    ]
    assert not re.search(r"node_num.*node_num", notice)


@pytest.mark.parametrize(
    ("cluster", "settings"),
    [
        ({"node_num": 1, "gpu_per_node": 8}, {}),
        ({"node_num": 2}, {"execution": "ray", "cluster": {"ray_address": "auto"}}),
        ({"ray_address": "head:6379"}, {"execution": "ray", "cluster": {"ray_address": "head:6379"}}),
        (
            {"node_num": 2, "ray_address": "head:6379"},
            {"execution": "ray", "cluster": {"ray_address": "head:6379"}},
        ),
        ({"trainer_gpu_num": 4}, {"trainer": {"num_processes": 4}}),
    ],
)
def test_several_machines_are_a_ray_and_one_is_a_process(cluster, settings):
    found = convert_({"cluster": cluster}).settings
    for name in ("execution", "cluster", "trainer"):
        assert found.get(name) == settings.get(name), name


ENGINES = {"rollout_model": {"engine_num": 2, "tensor_parallel_size": 2}}
AWAY = {"engine_type": "external", "external_model_config": {"base_url_env": "URL", "model_name": "m"}}


@pytest.mark.parametrize(
    ("cluster", "explorer", "model", "ranks"),
    [
        ({"gpu_per_node": 8}, ENGINES, {}, None),  # one process
        ({"gpu_per_node": 8, "ray_address": "auto"}, ENGINES, (2, 2), 4),
        ({"gpu_per_node": 8, "node_num": 2}, ENGINES, (2, 2), 12),
        ({"gpu_per_node": 8, "node_num": 2}, {}, {}, 15),
        ({"node_num": 2}, ENGINES, (2, 2), None),
        ({"gpu_per_node": 8, "node_num": 2, "trainer_gpu_num": 5}, ENGINES, (2, 2), 5),
        (
            {"gpu_per_node": 8, "node_num": 2},
            {
                **ENGINES,
                "auxiliary_models": [{"model_path": "m", "max_model_len": 64, "tensor_parallel_size": 2}, AWAY],
            },
            (2, 2),
            10,
        ),
    ],
)
def test_on_ray_engines_have_their_gpus_and_the_trainer_the_rest(cluster, explorer, model, ranks):
    """As Trinity-RFT counts them: nodes x GPUs, less the engines of the policy and of auxiliary models. Red when
    `cluster._taken` leaves out those of auxiliary models."""
    found = convert_({"cluster": cluster, "explorer": explorer}, URL="http://judge.invalid/v1").settings
    engines = {} if not model else {"inference_engine_num": model[0], "tensor_parallel_size": model[1]}
    named = ("inference_engine_num", "tensor_parallel_size")
    assert {name: value for name, value in found.get("model", {}).items() if name in named} == engines
    assert found.get("trainer", {}).get("num_processes") == ranks


def test_gpus_of_rows_evaluation_and_one_gpu_for_both():
    on_ray = {"cluster": {"gpu_per_node": 8, "ray_address": "auto"}}
    rows = convert_({**on_ray, "mode": "train", "algorithm": {"algorithm_type": "sft"}, "explorer": ENGINES})
    assert rows.settings["trainer"] == {"num_processes": 8}
    assert "model" not in rows.settings
    evaluated = {"buffer": {"explorer_input": {"eval_tasksets": [{"path": "x"}]}}}
    bench = convert_({**on_ray, **evaluated, "mode": "bench", "explorer": ENGINES}).settings
    assert (bench["model"]["tensor_parallel_size"], bench.get("trainer")) == (2, None)
    shared = convert_({**on_ray, "mode": "colocate"}).settings
    assert (shared["cluster"]["colocate"], shared.get("trainer")) == (True, None)


def test_engines_that_leave_the_trainer_no_gpu_are_refused():
    explorer = {"rollout_model": {"engine_num": 8}}
    with pytest.raises(ConfigError, match="of 8 GPUs the engines need 8, so that none is left for the trainer"):
        convert_({"cluster": {"gpu_per_node": 8, "ray_address": "auto"}, "explorer": explorer})


def test_what_only_evaluation_does_with_its_samples_is_no_reason_to_refuse():
    taskset = {"path": "x", "rollout_args": {"top_k": 20, "top_p": 0.8, "n": 4}}
    found = convert_({"buffer": {"explorer_input": {"eval_tasksets": [taskset]}}, "mode": "both"})
    assert found.settings["task_args"]["rollout_args"] == {"top_p": 0.8, "top_k": 20}
    assert "rollout_args.n" in found.notices[0]


def test_an_evaluation_set_samples_by_its_own_rollout_args():
    """What it leaves out is training's. Red where a set's sampling is named as without effect."""
    training = {"path": "x", "rollout_args": {"temperature": 0.9, "max_tokens": 8}}
    sets = [{"path": "y", "name": "a", "rollout_args": {"top_p": 0.7, "top_k": 20}}, {"path": "z", "name": "b"}]
    found = convert_({"buffer": {"explorer_input": {"taskset": training, "eval_tasksets": sets}}})
    (name, own), *others = found.settings["evaluation"]["own"].items()
    assert (name, others) == ("held-out", [])
    assert own["task_args"]["rollout_args"] == {"temperature": 0.9, "max_tokens": 8, "top_p": 0.7, "top_k": 20}
    assert not any("rollout_args" in notice for notice in found.notices)


def test_top_k_is_a_setting_of_the_model_and_of_the_workflow():
    """The taskset's comes first; -1 stands for all tokens. The run decides whether its algorithm can train them."""
    taskset = {"path": "x", "rollout_args": {"top_k": 25, "top_p": 0.95}}
    found = convert_({"model": {"top_k": 9}, "buffer": {"explorer_input": {"taskset": taskset}}})
    assert found.settings["model"] == {"top_p": 0.95, "top_k": 25}
    assert found.settings["task_args"]["rollout_args"] == {"top_p": 0.95, "top_k": 25}
    taskset["rollout_args"]["top_k"] = -1
    assert convert_({"buffer": {"explorer_input": {"taskset": taskset}}}).settings["model"] == {"top_p": 0.95}
    assert "must be a whole number" in refusal({"model": {"top_k": "many"}})


@pytest.mark.parametrize(
    ("correction", "loss"),
    [
        ({"bypass_mode": True, "rollout_is": "token"}, {"behaviour": "none"}),
        ({"bypass_mode": False}, {"behaviour": "unweighted"}),
        ({"bypass_mode": False, "rollout_is": "token"}, {"behaviour": "truncated"}),
        (
            {"bypass_mode": False, "rollout_is": "token", "rollout_is_threshold": 3.0, "rollout_rs": None},
            {"behaviour": "truncated", "behaviour_high": 3.0},
        ),
    ],
)
def test_verl_s_rollout_correction_is_a_correction_of_the_loss(correction, loss):
    """Where verl has it, and as a section of the algorithm."""
    in_verl = {"trainer": {"trainer_config": {"algorithm": {"rollout_correction": correction}}}}
    for found in (convert_(in_verl), convert_({"algorithm": {"rollout_correction": correction}})):
        assert found.settings["loss"] == loss


@pytest.mark.parametrize(
    ("correction", "message"),
    [
        ({"rollout_is": "sequence"}, "use token, or leave it out"),
        ({"rollout_is": "token", "rollout_is_threshold": "0.5_2"}, "bounds on two sides do not exist here"),
        ({"rollout_is": "token", "rollout_is_threshold": "two"}, "must be a number, got 'two'"),
        ({"rollout_is_batch_normalize": True}, "it is False here"),
        ({"rollout_rs": "token"}, "rejection sampling does not exist here"),
        ({"rollout_token_veto_threshold": 1e-4}, "a veto does not exist here"),
        ({"rollout_iz": "token"}, "did you mean 'rollout_is'?"),
    ],
)
def test_what_a_rollout_correction_cannot_have_is_refused_by_name(correction, message):
    in_verl = {"algorithm": {"rollout_correction": {"bypass_mode": False, **correction}}}
    assert message in refusal({"trainer": {"trainer_config": in_verl}})


def test_old_logprobs_may_be_those_of_the_step_s_beginning():
    assert convert_({"algorithm": {"bypass_old_logprobs": False}}).settings["loss"] == {"behaviour": "unweighted"}
    assert "loss" not in convert_({"algorithm": {"bypass_old_logprobs": True}}).settings
    without = convert_({"algorithm": {"algorithm_type": "opmd", "bypass_old_logprobs": False}})
    assert "loss" not in without.settings
    assert "makes no use of old logprobs" in without.notices[-1]


@pytest.mark.parametrize(
    ("arguments", "loss"),
    [
        ({"iterative_hint_e2e_causal": False, "epsilon": 1e-6}, {"advantage": "step_wise_grpo"}),
        ({"std_cal_level": "none"}, {"advantage": "step_wise_grpo", "std_normalize": False}),
        ({"std_cal_level": "batch", "enable_step_norm": True}, {"advantage": "grpo_global_std", "step_norm": True}),
        ({"std_cal_level": "group", "std_threshold": 0.1}, {"advantage": "step_wise_grpo", "std_threshold": 0.1}),
    ],
)
def test_cod_without_hints_is_step_wise_grpo(arguments, loss):
    algorithm = {"algorithm_type": "rloo", "advantage_fn": "cod", "advantage_fn_args": arguments}
    assert convert_({"algorithm": algorithm}).settings["loss"] == loss


def test_cod_with_hints_says_what_it_needs():
    algorithm = {"advantage_fn": "cod", "advantage_fn_args": {"iterative_hint_e2e_causal": True}}
    assert "task_rewards, exp_type, hint_idx" in refusal({"algorithm": algorithm})


def test_m2po_of_later_versions():
    algorithm = {"algorithm_type": "m2po", "policy_loss_fn_args": {"m2_threshold": 0.02, "log_ratio_clip": 20.0}}
    found = convert_({"algorithm": algorithm})
    assert found.settings["algorithm"]["algorithm_type"] == "m2po"
    assert found.settings["loss"] == {"policy_loss_args": {"threshold": 0.02}}
    algorithm["policy_loss_fn_args"]["log_ratio_clip"] = 5.0
    assert "it is 20.0 here" in refusal({"algorithm": algorithm})


def test_sequence_masking_with_trinitys_threshold_or_the_files():
    arguments: dict[str, Any] = {"clip_range": 0.2, "enable_sequence_masking": True}
    found = convert_({"algorithm": {"policy_loss_fn": "ppo", "policy_loss_fn_args": arguments}})
    assert found.defaults["loss"]["sequence_mask"] == 0.1
    arguments["delta_sequence_masking"] = 0.3
    found = convert_({"algorithm": {"bypass_old_logprobs": False, "policy_loss_fn_args": arguments}})
    assert found.settings["loss"]["sequence_mask"] == 0.3
    assert any("compared with their record" in notice for notice in found.notices)
    arguments["enable_sequence_masking"] = False
    assert "sequence_mask" not in convert_({"algorithm": {"policy_loss_fn_args": arguments}}).settings["loss"]


def test_raft_imitates_every_rollout():
    found = convert_({"algorithm": {"algorithm_type": "raft", "repeat_times": 1}})
    assert found.defaults["loss"] == {"advantage": "every_rollout"}
    assert "every rollout that the workflow returns" in found.notices[0]


def replay_file(train: int = 0, strategy: dict[str, Any] | None = None, **replay: Any) -> dict[str, Any]:
    return {
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 8, **(strategy or {})},
        "buffer": {
            "batch_size": 16,
            "train_batch_size": train,
            "trainer_input": {"experience_buffer": {"replay_buffer": replay}},
        },
    }


def test_a_second_use_is_the_share_by_which_the_trainer_takes_more_than_a_step_makes():
    once = convert_(replay_file(enable=True, reuse_cooldown_time=None))
    assert once.notices[0].endswith(
        "replay_buffer.enable = True: each step trains on its own rollouts, each of them once"
    )
    again = convert_(replay_file(160, enable=True, reuse_cooldown_time=10))
    assert again.settings["sampling"] == {"replay_share": 0.25}
    assert again.defaults["sampling"] == {"replay_priority": "recency", "order": "sequential"}
    assert "trainer" not in again.settings
    asked = convert_(replay_file(128, enable=True, reuse_cooldown_time=10))
    assert "sampling" not in asked.settings
    assert "for earlier ones, ask for more, or set sampling.replay_share" in asked.notices[0]
    off = convert_(replay_file(160, enable=False, reuse_cooldown_time=10))
    assert "sampling" not in off.settings
    assert "reuse_cooldown_time: the replay buffer is off" in off.notices[-1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (replay_file(160, enable=True, reuse_cooldown_time=1, priority_fn="newest"), "use linear_decay or decay_limit"),
        (
            replay_file(160, enable=True, reuse_cooldown_time=1, priority_fn_args={"decai": 1}),
            "did you mean 'decay'?",
        ),
        (
            replay_file(
                160,
                {"sample_strategy": "staleness_control", "sample_strategy_args": {"max_staleness": 0}},
                enable=True,
                reuse_cooldown_time=1,
            ),
            "must be a whole number of updates, 1 at least",
        ),
    ],
)
def test_what_replay_cannot_have_is_refused_by_name(content, message):
    assert message in refusal(content)


def test_a_bound_on_staleness_says_nothing_new_where_no_step_trains_an_earlier_one_s_rollouts():
    strategy = {"sample_strategy": "staleness_control", "sample_strategy_args": {"max_staleness": 2}}
    found = convert_({"algorithm": {"algorithm_type": "grpo", **strategy}})
    assert found.notices == (
        "f.yaml: algorithm.sample_strategy_args.max_staleness = 2: no rollout is older than sync.interval and "
        "sync.offset make it",
    )


EXPERT = {"sft_dataset": {"storage_type": "file", "path": "worked.jsonl", "format": {"prompt_type": "messages"}}}


def mixed_file(train: int = 0, buffers: Any = EXPERT, **algorithm: Any) -> dict[str, Any]:
    return {
        "algorithm": {"algorithm_type": "mix", "repeat_times": 8, **algorithm},
        "buffer": {"batch_size": 8, "train_batch_size": train, "trainer_input": {"auxiliary_buffers": buffers}},
    }


@pytest.mark.parametrize(
    ("train", "ratio", "rows", "minibatches"),
    [
        (80, 0.2, 16, None),  # 64 rollouts and 16 rows
        (40, 0.2, 16, 2),  # twice 32 rollouts and 8 rows
        (128, None, 64, None),  # a half unless the file says otherwise
        (65, 0.01, 1, None),  # rounded up
        (0, 0.25, 16, None),  # all rollouts of the step, which are 64, and a quarter of that many rows
    ],
)
def test_rows_of_an_expert_are_a_share_of_the_whole_batch(train, ratio, rows, minibatches):
    arguments = {} if ratio is None else {"sample_strategy_args": {"expert_data_ratio": ratio}}
    found = convert_(mixed_file(train, **arguments))
    assert found.settings["expert"] == {"dataset": {"path": "worked.jsonl"}, "batch_size": rows}
    assert found.settings.get("trainer", {}).get("num_minibatches") == minibatches
    assert found.defaults["supervised"] == {"messages_key": "message", "turns": "last"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (mixed_file(buffers={}), "must have a section 'sft_dataset' (sft_dataset_name) with the expert's rows"),
        (mixed_file(buffers={**EXPERT, "more": {}}), "auxiliary_buffers.more' is trained by nothing"),
        (mixed_file(buffers={"sft_dataset": {"pth": "x"}}), "is not a key of Trinity-RFT; did you mean 'path'?"),
        (mixed_file(buffers={"sft_dataset": {"format": {"promt_key": "x"}}}), "format.promt_key' is not a key of Trin"),
        (
            mixed_file(buffers={"sft_dataset": {"storage_type": "file"}}),
            "auxiliary_buffers.sft_dataset.path' is missing",
        ),
        (mixed_file(sample_strategy="default"), "an algorithm with an expert's rows mixes: leave it out"),
        (mixed_file(sample_strategy_args={"expert_data_ratio": 1.0}), "must leave rows and rollouts in a batch of 64"),
        (mixed_file(policy_loss_fn="ppo"), "this algorithm's own is mix: leave it out"),
        (mixed_file(policy_loss_fn_args={"mu_peak": 0.1}), "is not an argument of"),
        (
            mixed_file(policy_loss_fn_args={"sft_loss_agg_mode": "seq-mean-token-mean"}),
            "rollouts and an expert's rows have one: set algorithm.loss_agg_mode",
        ),
        (
            {"algorithm": {"algorithm_type": "grpo"}, "buffer": mixed_file()["buffer"]},
            "other data beside the rollouts is trained by algorithm_type mix and mix_chord only",
        ),
        (
            mixed_file(buffers={"sft_dataset": {"path": "x", "format": {"enable_thinking": True}}}),
            "rows and rollouts have it the same: set model.enable_thinking",
        ),
    ],
)
def test_what_an_expert_s_rows_cannot_be_is_refused_by_name(content, message):
    assert message in refusal(content)


def test_trinity_s_defaults_of_chord_hold_where_the_file_says_something_of_mu():
    """There the weight is at the valley at once, unless steps are given."""
    found = convert_(mixed_file(algorithm_type="mix_chord", policy_loss_fn_args={"mu_peak": 0.9}))
    assert found.settings["expert"]["mu"] == 0.9
    assert found.defaults["expert"] == {"mu_decay_steps": 0, "mu_valley": 0.1}
    assert "expert" not in convert_(mixed_file(algorithm_type="mix_chord")).defaults


def distilled(algorithm: dict[str, Any], *models: dict[str, Any]) -> dict[str, Any]:
    return {
        "algorithm": {"algorithm_type": "jsd", **algorithm},
        "explorer": {"auxiliary_models": list(models or [{"model_path": "big"}])},
    }


@pytest.mark.parametrize(
    ("weight", "distill"),
    [
        (0.5, {"teacher_path": "big", "beta": 0.5}),
        (0, {"teacher_path": "big", "divergence": "reverse"}),
        (1, {"teacher_path": "big", "divergence": "forward"}),
    ],
)
def test_the_weight_of_the_mixture_is_the_teacher_s_and_its_ends_are_the_pure_divergences(weight, distill):
    assert convert_(distilled({"advantage_fn_args": {"lambda_coef": weight}})).settings["distill"] == distill


def test_the_advantage_function_chooses_the_divergence():
    found = convert_(distilled({"advantage_fn": "on_policy_distill"}))
    assert found.settings["distill"] == {"divergence": "reverse_sampled", "teacher_path": "big"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"algorithm": {"algorithm_type": "jsd"}},
            "'explorer.auxiliary_models' is missing: its first model is the teac",
        ),
        (distilled({}, {"engine_type": "external", "model_path": "x"}), "is behind an endpoint, but the trainer needs"),
        (distilled({}, {"name": "teacher"}), "'explorer.auxiliary_models[0].model_path' is missing"),
        (distilled({"advantage_fn_args": {"temperature": 2.0}}), "it is 1.0 here: leave it out"),
        (distilled({"advantage_fn": "rloo"}), "this algorithm's own is jsd: leave it out"),
    ],
)
def test_what_distillation_cannot_have_is_refused_by_name(content, message):
    assert message in refusal(content)


def test_adapters_have_trinity_s_rank_unless_set():
    found = convert_({"model": {"lora_configs": [{"lora_rank": 4, "target_modules": "all-linear", "name": "x"}]}})
    assert found.settings["trainer"] == {"lora": {"rank": 4}}
    assert found.defaults["trainer"] == {"lora": {"alpha": 32}}
    one = convert_({"model": {"lora_configs": [{"target_modules": "q_proj"}]}})
    assert one.settings["trainer"] == {"lora": {"target_modules": ["q_proj"]}}
    two = refusal({"model": {"lora_configs": [{"name": "a"}, {"name": "b"}]}})
    assert "must be a list of one section of settings" in two


def test_environment_variables_of_workflows_are_texts():
    content = {"explorer": {"env_vars": {"TMPDIR": "${oc.env:TMPDIR,/tmp}", "SEED": 3}}}
    found = convert_(content, TMPDIR="/scratch")
    assert found.settings["rollout"]["env_vars"] == {"TMPDIR": "/scratch", "SEED": "3"}
    assert found.notices == ()


@pytest.mark.parametrize(
    ("algorithm", "argument"),
    [
        ({"advantage_fn": "step_wise_grpo", "advantage_fn_args": {"step_norm": True}}, "advantage_fn_args.step_norm"),
        (
            {"sample_strategy": "staleness_control", "sample_strategy_args": {"max_stalenes": 1}},
            "sample_strategy_args.max_stalenes",
        ),
    ],
)
def test_an_argument_that_trinity_takes_and_ignores_is_a_notice(algorithm, argument):
    notice = convert_({"algorithm": {"algorithm_type": "grpo", **algorithm}}).notices[-1]
    assert f"algorithm.{argument}: Trinity-RFT takes it and makes no use of it; did you mean '" in notice
    mixed = convert_(mixed_file(sample_strategy_args={"expert_ratio": 0.1})).notices[-1]
    assert "sample_strategy_args.expert_ratio: Trinity-RFT takes it and makes no use of it; did you mean 'exp" in mixed


@pytest.mark.parametrize(
    ("algorithm", "aggregation"),
    [
        ({"algorithm_type": "grpo"}, None),
        ({"algorithm_type": "grpo", "loss_agg_mode": "seq-mean-token-mean"}, "sequence-mean-token-mean"),
        # given in part, they leave the loss its own
        ({"algorithm_type": "grpo", "loss_agg_mode": "seq-mean-token-mean", "policy_loss_fn_args": PART}, "token-mean"),
        ({"algorithm_type": "gspo", "policy_loss_fn_args": PART}, "sequence-mean-token-mean"),
        ({"algorithm_type": "gspo", "loss_agg_mode": "token-mean", "policy_loss_fn_args": PART}, SEQUENCES),
        ({"algorithm_type": "grpo", "policy_loss_fn": "gspo", "policy_loss_fn_args": PART}, SEQUENCES),
        # one among them gives way to that of the algorithm, token-mean unless the file sets it
        ({"algorithm_type": "grpo", "policy_loss_fn_args": {**PART, "loss_agg_mode": WRITTEN}}, "token-mean"),
        ({"algorithm_type": "gspo", "policy_loss_fn_args": {**PART, "loss_agg_mode": WRITTEN}}, "token-mean"),
        (
            {
                "algorithm_type": "grpo",
                "loss_agg_mode": WRITTEN,
                "policy_loss_fn_args": {**PART, "loss_agg_mode": "token-mean"},
            },
            SEQUENCES,
        ),
    ],
)
def test_the_loss_s_arguments_given_in_part_keep_trinity_s_rule_of_aggregation(algorithm, aggregation):
    found = convert_({"algorithm": algorithm})
    merged = found.defaults.get("loss", {}) | found.settings.get("loss", {})
    assert merged.get("aggregation") == aggregation
    if "loss_agg_mode" in algorithm and aggregation == "token-mean":
        assert (
            "algorithm.loss_agg_mode = 'seq-mean-token-mean': as there, the loss ppo has token-mean" in found.notices[0]
        )
    if "loss_agg_mode" in algorithm.get("policy_loss_fn_args", {}):
        assert "takes its place, as there" in " ".join(found.notices)


def test_tau_0_nearly_ranks_and_pass_rates_need_no_operator():
    selector = {"selector_type": "difficulty_based", "feature_keys": ["a"], "kwargs": {"tau": 0, "target_reward": 0.5}}
    operators = {"experience_pipeline": {"operators": [{"name": "pass_rate_calculator"}]}}
    found = convert_({**one_taskset(data_selector=selector), "data_processor": operators})
    assert found.settings["sampling"] == {"order": "difficulty", "difficulty_target": 0.5, "difficulty_width": 0.05}
    assert "kwargs.tau = 0: the tasks nearest to the target come first there" in found.notices[0]
    assert "data_processor.experience_pipeline.operators: the mean reward of each task is always" in found.notices[-1]
    operators["experience_pipeline"]["operators"].append({"name": "other"})
    assert "operators[1].name' is 'other', which is no operator here" in refusal(
        {**one_taskset(data_selector=selector), "data_processor": operators}
    )


def one_taskset(**more: Any) -> dict[str, Any]:
    return {"buffer": {"explorer_input": {"taskset": {"path": "x", **more}}}}


@pytest.mark.parametrize(
    ("selector", "order"),
    [("sequential", "sequential"), ("shuffle", "shuffled"), ("random", "shuffled"), (None, "sequential")],
)
def test_tasks_come_in_trinity_s_order(selector, order):
    given = {} if selector is None else {"data_selector": {"selector_type": selector}}
    tasks, rows = convert_(one_taskset(**given)), convert_(rows_file({"algorithm_type": "sft"}, given))
    for found in (tasks, rows):
        merged = found.defaults.get("sampling", {}) | found.settings.get("sampling", {})
        assert merged["order"] == order
    evaluated = convert_({"buffer": {"explorer_input": {"eval_tasksets": [{"path": "x", **given}]}}, "mode": "bench"})
    assert "sampling" not in evaluated.settings


def test_the_latest_checkpoint_is_read_where_trinity_reads_it(tmp_path):
    evaluation = {
        "buffer": {"explorer_input": {"eval_tasksets": [{"path": "x"}]}},
        "checkpoint_root_dir": str(tmp_path),
    }
    content = {**evaluation, "project": "P", "name": "r", "explorer": {"bench_on_latest_checkpoint": True}}
    assert "bench_on_latest_checkpoint: it belongs to mode bench" in convert_(content).notices[-1]
    content |= {"mode": "bench", "model": {"model_path": "m"}}
    assert f"there is no checkpoint at {tmp_path}/P/r/latest" in refusal(content)
    (tmp_path / "P/r/latest").mkdir(parents=True)
    found = convert_(content)
    assert found.settings["model"]["model_path"] == f"{tmp_path}/P/r/latest"
    assert "model.model_path: bench_on_latest_checkpoint comes first" in found.notices[-1]
    assert "name says which run's checkpoint it is" in refusal({**content, "name": None})


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


def rows_file(algorithm: dict[str, Any], buffer: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A file that trains on rows."""
    return {
        "mode": "train",
        "algorithm": algorithm,
        "buffer": {"trainer_input": {"experience_buffer": {"path": "rows.jsonl", **(buffer or {})}}},
        **more,
    }


@pytest.mark.parametrize(
    ("algorithm", "buffer", "message"),
    [
        ({"algorithm_type": "sft", "policy_loss_fn": "ppo"}, {}, "the loss of sft is sft: leave it out"),
        ({"algorithm_type": "cpt"}, {}, "is messages, but cpt reads plain texts: use plaintext"),
        ({"algorithm_type": "sft", "kl_loss_fn": "k2"}, {}, "'algorithm.kl_loss_fn' is 'k2': sft has no kl term here"),
        ({"algorithm_type": "dpo", "kl_loss_fn": "k4"}, {}, "'algorithm.kl_loss_fn' is 'k4': use none, k1, k2"),
        (
            {"algorithm_type": "sft", "entropy_loss_fn": "default", "entropy_loss_fn_args": {"entropy_coef": 0.1}},
            {},
            "no",
        ),
        ({"algorithm_type": "dpo", "policy_loss_fn_args": {"bta": 0.1}}, {}, "did you mean 'beta'?"),
        ({"algorithm_type": "sft", "loss_agg_mode": "mean"}, {}, "use token-mean, seq-mean-token-mean or seq-mean-to"),
        (
            {"algorithm_type": "sft", "policy_loss_fn_args": {"loss_agg_mode": "x"}},
            {},
            "use token-mean, seq-mean-token",
        ),
        ({"algorithm_type": "sft"}, {"storage_type": "sql"}, "rows are read from files or the Hugging Face hub"),
        ({"algorithm_type": "sft"}, {"format": {"prompt_type": "pairs"}}, "use messages or plaintext"),
        ({"algorithm_type": "sft"}, {"format": {"video_key": "film"}}, "is 'film': videos are not read here"),
        ({"algorithm_type": "sft"}, {"format": {"system_prompt_key": "s"}}, "write the system message into the rows"),
        ({"algorithm_type": "sft"}, {"format": {"chat_template": "x"}}, "chat templates are the tokenizer's"),
        (
            {"algorithm_type": "sft"},
            {"data_selector": {"selector_type": "difficulty_based"}},
            "it goes by rewards, and",
        ),
    ],
)
def test_what_a_file_of_rows_cannot_have_is_refused_by_name(algorithm, buffer, message):
    assert message in refusal(rows_file(algorithm, buffer))


@pytest.mark.parametrize(
    ("given", "kl", "coefficient"),
    [
        ({}, "k2", 0.001),
        ({"kl_loss_fn": "none"}, "k2", 0.001),
        ({"kl_loss_fn": "k1", "kl_loss_fn_args": {"kl_coef": 0.1}}, "k1", 0.1),
        ({"kl_loss_fn": "abs"}, "abs", 0.001),
        ({"kl_loss_fn": "corrected_k3", "kl_loss_fn_args": {"kl_coef": 0.1}}, "k3", 0.1),
        ({"kl_loss_fn": "k1", "kl_loss_fn_args": {"kl_coef": 0.0}}, None, None),
    ],
)
def test_dpo_has_trinity_s_kl_term(given, kl, coefficient):
    found = convert_(rows_file({"algorithm_type": "dpo", **given}))
    loss = found.defaults.get("loss", {}) | found.settings.get("loss", {})
    assert (loss.get("kl"), loss.get("kl_coef")) == (kl, coefficient)


def test_label_smoothing_of_dpo_is_passed_on():
    found = convert_(rows_file({"algorithm_type": "dpo", "policy_loss_fn_args": {"label_smoothing": 0.1}}))
    assert found.settings["loss"] == {"policy_loss_args": {"label_smoothing": 0.1}}


def test_an_expert_s_rows_are_refused_where_only_rows_are_trained():
    content = rows_file({"algorithm_type": "sft"})
    content["buffer"]["trainer_input"]["auxiliary_buffers"] = EXPERT
    assert "'buffer.trainer_input.auxiliary_buffers' is {'sft_dataset'" in refusal(content)


@pytest.mark.parametrize("mode", ["both", "explore", "colocate", "serve"])
def test_rows_are_trained_in_mode_train_only_and_rollouts_never(mode):
    content = rows_file({"algorithm_type": "sft"})
    assert f"'mode' is '{mode}': sft learns from rows, without rollouts: use train" in refusal(
        {**content, "mode": mode}
    )
    assert convert_({key: value for key, value in content.items() if key != "mode"}).settings["train_dataset"]


def test_a_file_that_serves_is_an_explorer_for_sharpen_serve():
    """Red when `draft.in_two_processes` leaves mode serve out."""
    found = convert_({"mode": "serve", "algorithm": {"algorithm_type": "grpo"}})
    assert found.settings["mode"] == "explore"
    assert any("sharpen serve --config FILE" in notice for notice in found.notices)


@pytest.mark.parametrize(
    ("mode", "loss"),
    [
        (None, {}),
        ("token-mean", {"aggregation": "token-mean"}),
        ("seq-mean-token-mean", {"aggregation": "rollout-mean"}),
        ("seq-mean-token-sum", {"aggregation": "constant-length", "constant_length": 1}),
    ],
)
def test_a_sequence_of_trinity_s_is_a_row_of_ours(mode, loss):
    found = convert_(rows_file({"algorithm_type": "sft", "loss_agg_mode": mode}))
    assert found.settings.get("loss", {}) == loss


def test_only_the_last_turn_is_taught_unless_the_file_says_so():
    one = convert_(rows_file({"algorithm_type": "sft"}))
    assert one.defaults["supervised"] == {"messages_key": "message", "turns": "last"}
    every = convert_(rows_file({"algorithm_type": "sft"}, {"format": {"enable_concatenated_multi_turn": True}}))
    assert every.defaults["supervised"] == {"messages_key": "message"}
    pairs = convert_(rows_file({"algorithm_type": "dpo"}))
    assert pairs.defaults["supervised"] == {"prompt_key": "message"}


def test_a_row_s_batch_is_the_trainer_s_and_its_steps_are_updates():
    content = rows_file({"algorithm_type": "sft", "repeat_times": 4}, trainer={"total_steps": 7})
    content["buffer"] |= {"train_batch_size": 24, "batch_size": 96}
    found = convert_(content)
    assert found.settings["algorithm"] == {"algorithm_type": "sft", "batch_size": 24}
    assert found.settings["train_dataset"] == {"path": "rows.jsonl", "total_steps": 7}
    assert "buffer.batch_size: a step has train_batch_size rows" in found.notices[-1]


def test_missing_rows_are_named_where_their_file_has_them(tmp_path):
    base = "mode: train\nalgorithm: {algorithm_type: sft}\nmodel: {model_path: m, max_model_len: 64}\nbuffer: {}\n"
    message = error_of(write(tmp_path, base=base))
    assert "'train_dataset' is missing (f.yaml: buffer.trainer_input.experience_buffer)" in message


def test_the_older_name_of_a_selector_wins_as_there():
    selectors = {
        "task_selector": {"selector_type": "offline_easy2hard", "feature_keys": ["rate"]},
        "data_selector": {"selector_type": "difficulty_based"},
    }
    found = convert_({"buffer": {"explorer_input": {"taskset": {"path": "x", **selectors}}}})
    assert found.settings["sampling"] == {"order": "curriculum", "curriculum_key": "-rate"}


def test_trinity_s_defaults_of_a_choice_by_difficulty_hold():
    selector = {"data_selector": {"selector_type": "difficulty_based", "feature_keys": ["a", "b"]}}
    found = convert_({"buffer": {"explorer_input": {"taskset": {"path": "x", **selector}}}})
    assert found.settings["sampling"] == {"order": "difficulty"}
    assert found.defaults["sampling"] == {"difficulty_target": 1.0, "difficulty_width": 1.0}


@pytest.mark.parametrize(
    ("synchronizer", "sync"),
    [
        ({"sync_style": "fixed"}, {"style": "fixed"}),
        ({"sync_interval": 2, "sync_offset": 1}, {"interval": 2, "offset": 1}),
        ({"sync_style": "EXPLORER_DRIVEN", "sync_interval": 3}, {"style": "dynamic_by_explorer", "interval": 3}),
        ({"sync_style": "trainer_driven", "sync_offset": 2}, {"style": "dynamic_by_trainer", "offset": 2}),
        ({"sync_style": "fixed", "sync_interval": 4, "explorer_sync_interval": 2}, {"style": "fixed", "interval": 2}),
        ({"sync_style": "fully_async", "sync_offset": 0}, {"style": "fully_async"}),
    ],
)
def test_the_synchronizer_becomes_sync(synchronizer, sync):
    assert convert_({"synchronizer": synchronizer}).settings["sync"] == sync


def test_the_trainers_interval_is_in_updates():
    """Two updates make a step here: three of them are two steps, since weights move between steps."""
    content = {
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 8},
        "buffer": {"batch_size": 16, "train_batch_size": 64},
        "synchronizer": {"sync_style": "fully_async", "trainer_sync_interval": 3, "sync_interval": 5, "sync_offset": 1},
    }
    found = convert_(content)
    assert found.settings["sync"] == {"style": "fully_async", "interval": 2}
    said = "\n".join(found.notices)
    assert "trainer_sync_interval = 3: that many updates are 2 steps of 2 (sync.interval)" in said
    assert "synchronizer.sync_interval: weights move after the steps that synchronizer.trainer_sync_interval" in said
    assert "synchronizer.sync_offset: with fully_async nobody waits" in said


def test_a_bound_on_staleness_holds_rollouts_back_where_they_run_ahead():
    strategy = {"sample_strategy": "staleness_control", "sample_strategy_args": {"max_staleness": 2}}
    content = {"algorithm": {"algorithm_type": "grpo", **strategy}, "synchronizer": {"sync_style": "fully_async"}}
    assert convert_(content).settings["sync"] == {"style": "fully_async", "max_staleness": 2}
    strategy["sample_strategy_args"] = {"max_staleness": 0.5}
    content["algorithm"] = {"algorithm_type": "grpo", **strategy}
    assert "must be a whole number of updates, 1 at least" in refusal(content)


def test_a_file_for_a_cluster_runs_on_this_machine_where_ray_is_not_installed():
    """Red where AgentScope's werewolves are refused: `ray_address: auto`, four machines, and no Ray."""
    cluster = {"node_num": 4, "gpu_per_node": 8, "ray_address": "auto", "trainer_gpu_num": 16}
    explorer = {"rollout_model": {"engine_num": 16, "tensor_parallel_size": 2}}
    content = {**yaml.safe_load(FILE), "cluster": cluster, "explorer": explorer}
    alone = convert(content, "f.yaml", environment={}, has_ray=False)
    assert not {"execution", "cluster", "trainer"} & alone.settings.keys()
    assert "inference_engine_num" not in alone.settings["model"]
    (line,) = [line for line in alone.notices if "Ray is not installed" in line]
    assert "cluster.ray_address = 'auto'" in line
    assert "cluster.trainer_gpu_num = 16" in line
    assert convert(content, "f.yaml", environment={}).settings["execution"] == "ray"


def test_a_hosted_trainer_s_adapters_are_trained_here():
    found = convert_({"model": {"model_path": "m", "tinker": {"enable": True, "base_url": "x", "train_mlp": False}}})
    assert found.settings["trainer"]["lora"] == {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    assert found.defaults["trainer"]["lora"] == {"rank": 16}
    assert "model.tinker.enable = True: there is no hosted trainer: adapters are trained on this" in " ".join(
        found.notices
    )
    assert "base_url}: it belongs to the hosted trainer Tinker" in found.notices[-1]
    given = convert_({"model": {"model_path": "m", "tinker": {"enable": True, "rank": 4}}})
    assert given.settings["trainer"]["lora"] == {"rank": 4}
    assert "training is on this machine" in " ".join(convert_({"trainer": {"trainer_type": "tinker"}}).notices)


def test_the_model_behind_an_endpoint_is_evaluated_by_mode_bench():
    external = {"enable": True, "base_url_env": "URL", "api_key_env": "KEY", "model_name": "big"}
    content = {
        "mode": "bench",
        "model": {"model_path": "m", "external_model": external},
        "buffer": {"explorer_input": {"eval_tasksets": [{"path": "x"}]}},
    }
    assert convert_(content, URL="http://e/v1", KEY="k").endpoint == {
        "base_url": "http://e/v1",
        "api_key": "k",
        "model_name": "big",
    }
    assert "names the environment variable URL, which is not set" in refusal(content)
    assert "cannot be trained: name a model directory, or use mode bench" in refusal({**content, "mode": "both"})
    assert convert_({"model": {"external_model": {**external, "enable": False}}}).endpoint is None


def test_explorer_and_trainer_are_two_processes_of_one_run():
    trainer = {"trainer_input": {"experience_buffer": {"path": "postgresql://u@h/d"}}, "train_batch_size": 64}
    content = {
        "mode": "train",
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 8},
        "buffer": trainer,
        "synchronizer": {"sync_style": "fixed", "sync_interval": 10, "sync_offset": 1},
    }
    found = convert_(content)
    assert found.settings["algorithm"]["batch_size"] == 8
    assert found.settings["sync"] == {"interval": 10}
    assert (found.settings["mode"], found.settings["exchange"]) == ("train", "postgresql://u@h/d")
    assert (found.defaults["project"], found.defaults["name"]) == ("Trinity-RFT", "rft")
    assert "synchronizer.{sync_style, sync_offset}: the explorer takes the newest weights" in found.notices[-1]
    assert "must be a multiple of algorithm.repeat_times (8)" in refusal(
        {**content, "buffer": {**trainer, "train_batch_size": 60}}
    )
    trainer["trainer_input"]["experience_buffer"]["path"] = "sqlite:///x.db"
    explorer = convert_({**content, "mode": "explore", "buffer": {**trainer, "batch_size": 8}, "name": "r"})
    assert (explorer.settings["mode"], explorer.settings["name"]) == ("explore", "r")
    assert "exchange" not in explorer.settings
    assert "experience_buffer.path: explorer and trainer share the run's folder" in explorer.notices[-1]


def test_keys_of_earlier_versions_are_read_under_their_names_of_today():
    former = {
        "global_config": {"total_epochs": 2, "batch_size": 6},
        "model": {"model_path": "m", "max_prompt_tokens": 16, "max_response_tokens": 8, "checkpoint_path": "runs"},
        "data": {"dataset_path": "x", "train_split": "train", "format_config": {"prompt_key": "q"}, "subset_name": ""},
        "buffer": {"train_dataset": {"name": "b", "storage_type": "queue", "path": "sqlite:///b.db"}},
        "explorer": {"engine_num": 2, "repeat_times": 8, "dtype": "bfloat16", "temperature": 0.9, "use_ray": False},
        "synchronizer": {"sync_iteration_interval": 3},
        "trainer": {"eval_interval": 7, "ppo_max_token_len_per_gpu": 99, "sft_warmup_iteration": 0},
        "monitor": {"project": "P", "name": "r", "cache_root_dir": ""},
    }
    found = convert_(former)
    settings = found.settings
    assert (settings["project"], settings["name"], settings["checkpoint_root_dir"]) == ("P", "r", "runs")
    assert settings["train_dataset"] == {"path": "x", "split": "train", "total_epochs": 2}
    assert settings["task_args"]["prompt_key"] == "q"
    assert settings["algorithm"] == {"batch_size": 6, "group_size": 8, "eval_interval_steps": 7}
    assert (settings["model"]["temperature"], settings["engine"]["dtype"]) == (0.9, "bfloat16")
    assert (settings["sync"]["interval"], settings["trainer"]["max_tokens_per_micro_batch"]) == (3, 99)
    said = " ".join(found.notices)
    assert "explorer.engine_num = 2: it is called explorer.rollout_model.engine_num today" in said
    assert "explorer.use_ray" in found.notices[-1]
    assert "Trinity-RFT dropped it" in found.notices[-1]
    both = {**former, "name": "s"}
    assert "'monitor.name' is called name today, which is given too: keep one of them" in refusal(both)


def test_what_became_of_a_former_key_without_a_name_of_today_is_said():
    content = {
        "data": {"dataset_path": "x", "eval_split": "test"},
        "trainer": {"algorithm_type": "ppo"},
        "data_processor": {"source_data_path": "y", "db_url": ""},
        "algorithm": {"mu": 0.2},
    }
    text = refusal(content)
    assert "'trainer.algorithm_type' is 'ppo': it is algorithm.algorithm_type now" in text
    assert "'data.eval_split' is 'test': evaluation has datasets of its own now" in text
    assert "'data_processor.source_data_path' is 'y': Trinity-RFT dropped it: its processing of data is a list" in text
    assert "'algorithm.mu' is 0.2: it is algorithm.policy_loss_fn_args.mu now" in text
    assert text.splitlines()[0].endswith(": 4 problems")


def test_former_keys_are_none_of_today_s():
    assert not {*RENAMED, *DROPPED, *WITHOUT_EFFECT} & RULES.keys()
    for now in RENAMED.values():
        assert now in DROPPED or any(
            key == now or key.startswith(f"{now}.") or now.startswith(f"{key}.") for key in RULES
        )


def test_a_trainer_s_own_file_is_read_where_it_is_named(tmp_path):
    (tmp_path / "verl.yaml").write_text(
        "actor_rollout_ref:\n  actor: {ppo_epochs: 2, grad_clip: 0.5}\n"
        "  model: {x: '${actor_rollout_ref.actor.ppo_epochs}'}\n"
        "trainer: {max_actor_ckpt_to_keep: 3}\n"
    )
    file = load_config(write(tmp_path, "trainer: {trainer_config_path: scripts/verl.yaml}"))
    assert file.settings["trainer"] == {"epochs": 2, "max_grad_norm": 0.5, "keep_checkpoints": 3}
    assert (
        "trainer_config_path = 'scripts/verl.yaml': its settings are those of trainer.trainer_config" in file.notices[0]
    )
    assert "is a configuration of verl's trainer, which trainer.trainer_config_path named" in error_of(
        tmp_path / "verl.yaml"
    )
    recipe = write(tmp_path, base="project_name: p\nprocess: [{a: {}}]\nnp: 4\n")
    assert "is a recipe of Data-Juicer's" in error_of(recipe)


def test_an_expert_s_rows_were_once_those_of_the_warm_up():
    content = mixed_file(
        policy_loss_fn_args={"mu": 0.2, "use_token_level_loss_in_sft": False, "read_batch_size_usual": 8}
    )
    buffers = content["buffer"]["trainer_input"].pop("auxiliary_buffers")
    rows = {**buffers["sft_dataset"], "algorithm_type": "sft"}
    content["buffer"]["trainer_input"]["sft_warmup_dataset"] = rows
    found = convert_(content)
    assert found.settings["expert"]["dataset"]["path"] == rows["path"]
    assert found.settings["expert"]["mu"] == 0.2
