"""`sharpen check`, `run`, `eval` and `explain`, and `tune()`, with a Trinity-RFT file, on a toy model."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sharpen import AlgorithmConfig, tune
from sharpen.cli.main import BAD_INPUT, main
from sharpen.errors import ConfigError

WORKFLOW = """
from sharpen.compat.trinity import Workflow

class Flow(Workflow):
    def __init__(self, *, task, model, auxiliary_models=None):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.client = model.get_openai_async_client()
        self.letter = task.workflow_args["letter"]
        self.question = task.raw_task.get(task.format_args.prompt_key)
        self.arguments = {"temperature": task.rollout_args.temperature, "max_tokens": task.rollout_args.max_tokens}

    async def run_async(self):
        assert self.letter == "e" and self.task.workflow_args["deep"] == {"rate": 0.001}
        assert self.arguments == {"temperature": 0.9, "max_tokens": 4}
        reply = await self.client.chat.completions.create(
            model=self.model.model_path, messages=[{"role": "user", "content": self.question}], **self.arguments
        )
        found = self.model.extract_experience_from_history()
        for experience in found:
            experience.reward = float(self.letter in (reply.choices[0].message.content or ""))
        return found
"""


@pytest.fixture
def config(tmp_path: Path, toy_model_dir: Path, toy_dataset: Path) -> Path:
    (tmp_path / "flow.py").write_text(WORKFLOW)
    taskset = {
        "path": str(toy_dataset),
        "format": {"prompt_key": "question", "response_key": "answer"},
        "rollout_args": {"temperature": 0.9, "max_tokens": 4},
        "workflow_args": {"letter": "e", "deep": {"rate": 0.001}},
        "default_workflow_type": "flow.py:Flow",
    }
    content = {
        "project": "Toy",
        "name": "first",
        "checkpoint_root_dir": str(tmp_path / "runs"),
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 8, "optimizer": {"lr": 0.001}},
        "model": {"model_path": str(toy_model_dir), "max_model_len": 64},
        "buffer": {"batch_size": 2, "total_steps": 2, "explorer_input": {"taskset": taskset}},
        "synchronizer": {"sync_style": "dynamic_by_explorer", "sync_interval": 2},
    }
    path = tmp_path / "toy.yaml"
    path.write_text(json.dumps(content))  # JSON is YAML
    return path


def bench(path: Path) -> Path:
    content = json.loads(path.read_text())
    taskset = content["buffer"]["explorer_input"].pop("taskset")
    content["buffer"]["explorer_input"]["eval_tasksets"] = [taskset]
    content["mode"] = "bench"
    evaluation = path.with_name("bench.yaml")
    evaluation.write_text(json.dumps(content))
    return evaluation


AHEAD = "rollouts run ahead of the training (sync.style dynamic_by_explorer, interval 2, offset 0)"


def test_a_trinity_file_is_checked_and_runs_and_goes_on(config, tmp_path, capsys):
    assert main(["check", "--config", str(config), "--tasks", "6"]) == 0
    capsys.readouterr()
    assert main(["run", "--config", str(config)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count(AHEAD) == 1
    run = tmp_path / "runs/Toy/first"
    assert (run / "global_step_2").is_dir()
    values = json.loads((run / "resolved.json").read_text())
    assert values["algorithm.batch_size"] == {"value": 2, "origin": "toy.yaml: buffer.batch_size"}
    assert values["workflow_args.letter"]["value"] == "e"
    assert (run / "config.yaml").read_text() == config.read_text()
    assert main(["run", "--config", str(config), "--set", "train_dataset.total_steps=3"]) == 0
    assert "continuing first after step 2" in " ".join(capsys.readouterr().out.split())


def test_a_file_of_rows_trains_without_rollouts(tmp_path, toy_model_dir, capsys):
    """Supervised fine-tuning of Trinity-RFT's: mode train, the rows in the experience buffer."""
    rows = [
        {"message": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes"}], "easy": i}
        for i in range(8)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    buffer = {
        "storage_type": "file",
        "path": "rows.jsonl",
        "data_selector": {"selector_type": "offline_easy2hard", "feature_keys": ["easy"]},
    }
    content = {
        "mode": "train",
        "name": "taught",
        "checkpoint_root_dir": str(tmp_path / "runs"),
        "algorithm": {"algorithm_type": "sft", "optimizer": {"lr": 0.01}},
        "model": {"model_path": str(toy_model_dir), "max_model_len": 64},
        "buffer": {"train_batch_size": 2, "total_steps": 3, "trainer_input": {"experience_buffer": buffer}},
        "synchronizer": {"sync_method": "checkpoint"},
    }
    path = tmp_path / "rows.yaml"
    path.write_text(json.dumps(content))
    assert main(["run", "--config", str(path), "--set", "evaluation.hold_out=false"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "synchronizer.sync_method: sft learns from rows, without rollouts" in printed
    run = tmp_path / "runs/Sharpen/taught"
    assert (run / "global_step_3").is_dir()
    values = json.loads((run / "resolved.json").read_text())
    assert values["supervised.turns"]["value"] == "last"
    assert values["sampling.curriculum_key"]["value"] == "-easy"


def test_an_expert_s_rows_are_learnt_beside_rollouts(config, tmp_path):
    """`mix` of Trinity-RFT's: an auxiliary buffer of conversations, a fifth of the trainer's batch."""
    rows = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "e"}] for i in range(6)]
    (tmp_path / "worked.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    content = json.loads(config.read_text())
    content["algorithm"] |= {"algorithm_type": "mix", "sample_strategy_args": {"expert_data_ratio": 0.2}}
    content["buffer"]["train_batch_size"] = 20
    expert = {"storage_type": "file", "path": "worked.jsonl", "format": {"messages_key": "messages"}}
    content["buffer"]["trainer_input"] = {"auxiliary_buffers": {"sft_dataset": expert}}
    config.write_text(json.dumps(content))
    assert main(["run", "--config", str(config)]) == 0
    values = json.loads((tmp_path / "runs/Toy/first/resolved.json").read_text())
    assert values["expert.batch_size"]["value"] == 4
    assert values["supervised.turns"]["value"] == "last"


def test_a_teacher_is_followed_in_trinity_s_own_workflow(config, tmp_path, toy_model_dir):
    content = json.loads(config.read_text())
    content["algorithm"] |= {"algorithm_type": "on_policy_distill", "repeat_times": 4}
    taskset = content["buffer"]["explorer_input"]["taskset"]
    taskset |= {"default_workflow_type": "on_policy_distill_workflow", "workflow_args": {"temperature": 1.0}}
    content["explorer"] = {"auxiliary_models": [{"name": "teacher", "model_path": str(toy_model_dir)}]}
    config.write_text(json.dumps(content))
    more = ["--set", "evaluation.before_and_after=false", "--set", "check.enabled=false"]
    assert main(["run", "--config", str(config), *more]) == 0
    values = json.loads((tmp_path / "runs/Toy/first/resolved.json").read_text())
    assert values["distill.teacher_path"]["value"] == str(toy_model_dir)


OTHER_WORKFLOW = """
from sharpen.compat.trinity import Workflow

class Other(Workflow):
    def __init__(self, *, task, model, auxiliary_models=None):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.client = model.get_openai_async_client()

    async def run_async(self):
        assert (self.task.workflow_args, self.task.format_args.prompt_key, self.task.is_eval) == ({}, "text", True)
        await self.client.chat.completions.create(
            model=self.model.model_path, messages=[{"role": "user", "content": self.task.task_desc}], max_tokens=4
        )
        found = self.model.extract_experience_from_history()
        for experience in found:
            experience.reward = 0.25
        return found
"""


def test_each_evaluation_set_has_its_own_workflow_format_and_arguments(config, tmp_path, capsys):
    """One set is evaluated as training is, the other by its own workflow, on other fields, without arguments."""
    (tmp_path / "other.py").write_text(OTHER_WORKFLOW)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": f"say {i}"}) + "\n" for i in range(3)))
    content = json.loads(config.read_text())
    tasks = content["buffer"]["explorer_input"]
    same = {name: tasks["taskset"][name] for name in ("path", "format", "workflow_args")}
    other = {"name": "texts", "path": "texts.jsonl", "format": {"prompt_key": "text"}}
    tasks["eval_tasksets"] = [same, other | {"default_workflow_type": "other.py:Other"}]
    content["buffer"]["total_steps"] = 1
    config.write_text(json.dumps(content))
    assert main(["run", "--config", str(config), "--set", "check.enabled=false"]) == 0
    assert "failed" not in capsys.readouterr().out
    summary = json.loads((tmp_path / "runs/Toy/first/summary.json").read_text())
    texts = summary["further"]["texts"]["after"]["sampled"]
    assert (texts["accuracy"], texts["num_tasks"]) == (0.25, 3)
    values = json.loads((tmp_path / "runs/Toy/first/resolved.json").read_text())
    assert values["evaluation.own.texts.workflow"]["value"] == f"{tmp_path / 'other.py'}:Other"


def test_mode_bench_evaluates_and_tune_says_so(config, tmp_path, capsys):
    path = bench(config)
    assert main(["run", "--config", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "mode = 'bench': the model is evaluated on the evaluation tasks" in printed
    assert re.search(r"held-out sampled: 0\.\d+ .*tasks\)", printed)
    assert not (tmp_path / "runs").exists()

    async def run(task, model):
        return 0.0

    with pytest.raises(ConfigError, match="mode is 'bench', which evaluates and does not train"):
        tune(workflow_func=run, config_path=path)


def test_a_function_takes_the_place_of_the_file_s_workflow(config, capsys):
    seen = []

    async def run(task, model, workflow_args):
        seen.append(workflow_args)
        reply = await model.client.chat.completions.create(
            model=model.name, messages=[{"role": "user", "content": task["question"]}], max_tokens=4
        )
        return float("e" in (reply.choices[0].message.content or ""))

    result = tune(
        workflow_func=run,
        config_path=config,
        experiment_name="mine",
        algorithm=AlgorithmConfig(group_size=4),
        settings={"train_dataset.total_steps": 1, "check.enabled": False, "evaluation.before_and_after": False},
    )
    assert result.steps == 1
    assert seen[0] == {"letter": "e", "deep": {"rate": 0.001}}
    printed = " ".join(capsys.readouterr().out.split())
    assert "override: algorithm.group_size = 4 (argument) instead of 8 (toy.yaml: algorithm.repeat_times)" in printed
    assert re.search(r"override: workflow = \S*run' \(argument\) instead of '\S*flow.py:Flow' \(toy.yaml: buf", printed)


def test_bad_files_are_bad_input(config, capsys):
    content = json.loads(config.read_text())
    content["explorer"] = {"rollout_modle": {}}
    config.write_text(json.dumps(content))
    for command in ("run", "check", "eval", "explain"):
        assert main([command, "--config", str(config)]) == BAD_INPUT
        assert "did you mean 'explorer.rollout_model'?" in capsys.readouterr().err


def test_explain_prints_every_value_and_its_origin_and_is_light(config):
    code = (
        "import sys; from sharpen.cli.main import main; code = main(sys.argv[1:])\n"
        "heavy = {'transformers', 'datasets', 'openai'} & set(sys.modules)\n"
        "assert not heavy, heavy\nsys.exit(code)"
    )
    command = [sys.executable, "-c", code, "explain", "--config", str(config), "--set", "seed=5"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "algorithm.batch_size = 2  [toy.yaml: buffer.batch_size]" in lines
    assert "workflow_args.deep.rate = 0.001  [toy.yaml: buffer.explorer_input.taskset.workflow_args]" in lines
    assert "seed = 5  [argument]" in lines
    assert "judge = null  [default]" in lines
    assert "sync.interval = 2  [toy.yaml: synchronizer.sync_interval]" in lines


def test_explain_fits_a_terminal(config):
    mine, theirs = pty.openpty()
    code = "import sys; from sharpen.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "explain", "--config", str(config)]
    with subprocess.Popen(command, stdout=theirs, env={**os.environ, "COLUMNS": "140", "TERM": "xterm"}) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                piece = os.read(mine, 65536)
            except OSError:  # how the end of a terminal looks on Linux
                break
            if not piece:
                break
            written += piece
    os.close(mine)
    assert process.returncode == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", written.decode()).replace("\r\n", "\n")
    table = plain.split("toy.yaml: synchronizer")[0].splitlines()
    assert max(map(len, table)) <= 100
    assert re.search(r"^setting +value +from \(toy\.yaml\)", table[0])
    assert re.search(r"^  batch_size +2 +buffer\.batch_size *$", plain, re.MULTILINE)


def test_the_file_s_environment_is_there_when_the_workflow_is_loaded_and_gone_after_the_run(config, tmp_path):
    """Red when `_loaded` imports the workflow outside of `environment`."""
    text = "import os\nFOUND = os.environ['FLOW_NEEDS']\n" + WORKFLOW.replace(
        "    async def run_async(self):\n",
        "    async def run_async(self):\n        assert os.environ['FLOW_NEEDS'] == FOUND == '3'\n",
    )
    (tmp_path / "flow.py").write_text(text)
    content = json.loads(config.read_text())
    content["explorer"] = {"env_vars": {"FLOW_NEEDS": 3}}
    content["buffer"]["total_steps"] = 1
    config.write_text(json.dumps(content))
    assert main(["check", "--config", str(config), "--tasks", "2"]) == 0
    assert "FLOW_NEEDS" not in os.environ
