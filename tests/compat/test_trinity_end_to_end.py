"""Trinity workflows trained for real on a toy model: from the command line, by name, and from Python."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from trinity_serving import talking_server

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, tune
from sharpen.cli.main import main
from sharpen.compat.trinity import AsyncStepWiseRewardWorkflow, Workflow
from sharpen.errors import ConfigError

FLOW = '''
from typing import List, Optional

from sharpen.compat.trinity import Experience, ModelWrapper, Task, Workflow, WORKFLOWS


@WORKFLOWS.register_module("NAME")
class GuessWorkflow(Workflow):
    """Two calls, of which the second is trained; the reward is whether it says an 'e'."""

    is_async: bool = True

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: Optional[List[ModelWrapper]] = None):
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.client = model.get_openai_async_client()
        self.query = task.raw_task.get(task.format_args.prompt_key)
        self.letter = task.workflow_args["letter"]

    async def run_async(self) -> List[Experience]:
        messages = [{"role": "user", "content": self.query}]
        for _ in range(2):
            reply = await self.client.chat.completions.create(
                model=self.client.model_path, messages=messages, max_tokens=4
            )
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            messages.append({"role": "user", "content": "again"})
        exps = self.model.extract_experience_from_history()[1:]
        for exp in exps:
            exp.reward = float(self.letter in exp.response_text)
            exp.metrics = {"is_eval": float(self.task.is_eval)}
        return exps
'''


@pytest.fixture
def config(tmp_path: Path, toy_model_dir: Path, toy_dataset: Path) -> Path:
    (tmp_path / "flow.py").write_text(FLOW.replace("NAME", tmp_path.name))  # each test registers its own
    path = tmp_path / "run.yaml"
    path.write_text(
        "workflow: flow.py:GuessWorkflow\n"
        "name: guess\n"
        "task_args: {prompt_key: question, response_key: answer}\n"
        "workflow_args: {letter: e}\n"
        f"checkpoint_root_dir: {tmp_path / 'runs'}\n"
        f"train_dataset: {{path: {toy_dataset}, total_steps: 2}}\n"
        f"eval_dataset: {{path: {toy_dataset}, split: test}}\n"
        f"model: {{model_path: {toy_model_dir}, max_model_len: 128}}\n"
        "algorithm: {group_size: 8, batch_size: 2, learning_rate: 0.001}\n"
    )
    return path


def test_a_workflow_class_is_trained_from_the_command_line(config: Path, tmp_path: Path, capsys):
    assert main(["run", "--config", str(config)]) == 0
    run = tmp_path / "runs/Sharpen/guess"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["workflow/is_eval"] for step in steps if "workflow/is_eval" in step] == [0.0, 0.0]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["after"]["greedy"]["num_tasks"] == 10
    with sqlite3.connect(run / "run.db") as journal:
        statuses = dict(journal.execute("select status, count(*) from calls group by status").fetchall())
    assert statuses["left_out"] == statuses["used"] > 0
    assert main(["check", "--config", str(config), "--tasks", "2"]) in (0, 1)
    assert main(["eval", "--config", str(config), "--model", str(run / "latest")]) == 0
    assert "held-out greedy" in capsys.readouterr().out


def test_a_run_goes_on_where_a_workflow_imitates_nothing(config: Path, tmp_path: Path, capsys):
    """As RAFT does with games that were lost: the check warns, each step says that it trained nothing, and the weights
    stay as they were. It ended after the check, though other tasks may be won."""
    flow = (tmp_path / "flow.py").read_text()
    (tmp_path / "flow.py").write_text(flow.replace("exp.metrics =", "exp.action_mask = [False]; exp.metrics ="))
    assert main(["run", "--config", str(config), "--set", "evaluation.before_and_after=false"]) == 0
    said = capsys.readouterr().out
    assert "! the workflow left all 64 calls out of training" in said
    assert said.count("no token was trained: the workflow left all 32 calls out") == 2
    run = tmp_path / "runs/Sharpen/guess"
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    before, after = (load_file(path / "model.safetensors") for path in (toy_model(config), run / "latest"))
    assert all(after[name].equal(tensor) for name, tensor in before.items())


def toy_model(config: Path) -> Path:
    return Path(yaml.safe_load(config.read_text())["model"]["model_path"])


def test_a_workflow_is_evaluated_against_an_endpoint(config: Path, capsys):
    with talking_server() as url:
        assert main(["eval", "--config", str(config), "--base-url", url, "--model-name", "m"]) == 0
    assert "held-out sampled: 1.000" in capsys.readouterr().out  # it says 'yes'


def test_mistakes_are_bad_input(config: Path, tmp_path: Path, capsys):
    (tmp_path / "judge.py").write_text("async def judge(task, response):\n    return 1.0\n")
    judge = f"judge={tmp_path / 'judge.py'}:judge"
    assert main(["run", "--config", str(config), "--set", judge]) == 2
    assert "GuessWorkflow is a Trinity Workflow, which sets the rewards itself" in capsys.readouterr().err
    assert main(["run", "--config", str(config), "--set", f"workflow={tmp_path.name}s"]) == 2
    assert f"there is no workflow '{tmp_path.name}s'; did you mean '{tmp_path.name}'?" in capsys.readouterr().err
    assert (
        main(["run", "--config", str(config), "--set", "workflow=math_workflow", "--set", "task_args.reward_fn=x"]) == 2
    )
    assert "there is no reward function 'x'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("workflow=math_workflw", "there is no workflow 'math_workflw'; did you mean 'math_workflow'?"),
        (
            "task_args.reward_fn=math_reward_fn",
            "there is no reward function 'math_reward_fn'; did you mean 'math_reward'?",
        ),
    ],
)
def test_explain_knows_the_names_that_a_run_knows(config: Path, capsys, setting: str, words: str):
    for command in ("explain", "run"):
        name = [] if setting.startswith("workflow") else ["--set", "workflow=math_workflow"]
        assert main([command, "--config", str(config), "--set", setting, *name]) == 2
        said = capsys.readouterr()
        assert words in said.err
        assert ("model.max_model_len = 128" in said.out) == (command == "explain")
    assert main(["explain", "--config", str(config), "--set", "workflow=nowhere.to_be:Found"]) == 0  # imports nothing


def test_explain_says_which_package_a_run_would_need(config: Path, capsys):
    assert main(["explain", "--config", str(config), "--set", "workflow=sciworld_workflow"]) == 0
    words = "needs the package scienceworld (and Java), which is not installed: pip install scienceworld"
    assert f"this run would be refused: the workflow 'sciworld_workflow' {words}" in capsys.readouterr().out
    assert main(["run", "--config", str(config), "--set", "workflow=sciworld_workflow"]) == 2
    assert words in capsys.readouterr().err


class Steps(AsyncStepWiseRewardWorkflow):
    """Two steps, each with its own reward."""

    max_step_num = 2

    async def step_async(self, step_num: int) -> bool:
        text = f"{self.task.task_desc} {step_num}"
        await self.model.chat_async([{"role": "user", "content": text}], max_tokens=4)
        return True

    async def reward_async(self, exps, step_num: int) -> float:
        return float("e" in exps[0].response_text) + step_num


def test_a_class_is_trained_from_python(tmp_path: Path, toy_model_dir: Path, toy_dataset: Path, caplog):
    result = tune(
        workflow_func=Steps,
        train_dataset=DatasetConfig(path=str(toy_dataset), total_steps=2),
        model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=64),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=4, batch_size=2),
        settings={
            "checkpoint_root_dir": str(tmp_path),
            "task_args.prompt_key": "question",
            "evaluation.before_and_after": False,
            "check.enabled": False,
        },
    )
    assert result.steps == 2
    assert [message for message in caplog.messages if "grpo trains all of them" in message] == [
        "workflow Steps rewards the calls of a rollout differently, but grpo trains all of them with the rollout's "
        "reward, that of its last call"
    ]


class Judged(Workflow):
    """A second model says how good the answer is."""

    is_async = True

    async def run_async(self):
        (answer,) = await self.model.chat_async([{"role": "user", "content": self.task.task_desc}], max_tokens=4)
        judge = self.auxiliary_models[0]
        messages = [{"role": "user", "content": f"Is {answer.response_text!r} good?"}]
        said = await judge.chat.completions.create(model=judge.model_path, messages=messages, max_tokens=4)
        answer.reward = float("e" in (said.choices[0].message.content or ""))
        return [answer]


def test_a_model_that_judges_is_counted_and_not_trained(tmp_path: Path, toy_model_dir: Path, toy_dataset: Path):
    result = tune(
        workflow_func=Judged,
        train_dataset=DatasetConfig(path=str(toy_dataset), total_steps=1),
        model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=64),
        auxiliary_models={"judge": TunerModelConfig(model_path=str(toy_model_dir), max_model_len=128)},
        algorithm=AlgorithmConfig(group_size=4, batch_size=2),
        settings={
            "checkpoint_root_dir": str(tmp_path),
            "task_args.prompt_key": "question",
            "evaluation.before_and_after": False,
            "check.enabled": False,
        },
    )
    (line,) = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["auxiliary/judge/calls"] == 1.0
    assert json.loads(line)["rollout/calls"] == 1.0


class Wrong(Workflow):
    def run(self):
        return self.model.chat([{"role": "user", "content": "?"}], max_tokens=2)[0]


def test_what_would_fail_every_rollout_stops_tune(tmp_path: Path, toy_model_dir: Path, toy_dataset: Path):
    with pytest.raises(ConfigError, match=r"workflow Wrong returned Experience\(reward=None"):
        tune(
            workflow_func=Wrong,
            train_dataset=DatasetConfig(path=str(toy_dataset), total_steps=1),
            model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=64),
            settings={"checkpoint_root_dir": str(tmp_path)},
        )
