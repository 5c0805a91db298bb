"""Whole runs of sft, cpt and dpo: what they leave, how they go on, what they refuse."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.cli.main import main
from sharpen.errors import ConfigError, DatasetError

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"


def write(folder: Path, name: str, rows: list[dict]) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def options(folder: Path, model: Path, data: Path, kind: str, **more):
    return {
        "train_dataset": DatasetConfig(path=str(data), total_steps=more.pop("steps", 12)),
        "model": TunerModelConfig(model_path=str(model), max_model_len=64, max_tokens=8),
        "algorithm": AlgorithmConfig(
            algorithm_type=kind, batch_size=4, learning_rate=1e-2, save_interval_steps=4, eval_interval_steps=6
        ),
        "settings": {"checkpoint_root_dir": str(folder / "runs"), **more.pop("settings", {})},
        **more,
    }


TEACHABLE = [
    {"messages": [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": "yes"}]}
    for i in range(20)
]


async def says_yes(task, model):
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": task["question"]}]
    )
    return WorkflowOutput(reward=float(reply.choices[0].message.content == "yes"))


def test_sft_teaches_the_agent_and_leaves_everything_in_the_run_directory(tmp_path, toy_model_dir, toy_dataset, capsys):
    """The workflow evaluates before and after, as in reinforcement learning: from nothing to (nearly) always right."""
    rows = [
        *TEACHABLE,
        {"messages": [{"role": "user", "content": "long " * 99}, {"role": "assistant", "content": "a"}]},
    ]
    result = tune(
        workflow_func=says_yes,
        eval_dataset=DatasetConfig(path=str(toy_dataset), split="test"),
        **options(tmp_path, toy_model_dir, write(tmp_path, "rows", rows), "sft", steps=20),
    )
    assert result.before["greedy"].accuracy == 0.0
    assert result.after["greedy"].accuracy > 0.9
    assert result.loss_after < 0.3 < result.loss_before
    assert (result.verdict.kind, result.verdict.measure) == ("better", "sampled accuracy")
    for name in ("config.yaml", "resolved.json", "run.db", "metrics.jsonl", "summary.json", "loss_curve.png"):
        assert (result.run_dir / name).stat().st_size > 0, name
    certificate = json.loads((result.run_dir / "certificate.json").read_text())
    assert certificate["holds"]
    assert {check["name"] for check in certificate["checks"]} == {"rows", "mask", "rendered"}
    assert certificate["logprob_gaps"] is None
    summary = json.loads((result.run_dir / "summary.json").read_text())
    assert summary["held_out"]["after"]["loss"] == result.loss_after
    metrics = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert sum(row.get("batch/rows_too_long", 0) for row in metrics) >= 1
    shown = capsys.readouterr().out
    assert "of 4 rows left out: longer than 64 tokens" in shown
    assert shown.count("engine: embedded (") == 1
    assert shown.splitlines()[-1] == f"run directory: {result.run_dir}"
    model = AutoModelForCausalLM.from_pretrained(result.model_dir)
    assert model.config.vocab_size
    assert main(["certify", str(result.run_dir)]) == 0
    assert "76 trained, 4 too long" in capsys.readouterr().out


def test_a_run_from_yaml_without_a_workflow_resumes(tmp_path, toy_model_dir, capsys):
    """Two sessions of 4 and 8 steps end with the very weights of one of 12."""
    write(tmp_path, "rows", TEACHABLE)
    content = {
        "train_dataset": {"path": "rows.jsonl", "total_steps": 12},
        "model": {"model_path": str(toy_model_dir), "max_model_len": 64},
        "algorithm": {"algorithm_type": "sft", "batch_size": 3, "learning_rate": 0.01},
        "checkpoint_root_dir": str(tmp_path / "runs"),
        "name": "whole",
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    assert main(["run", "--config", str(tmp_path / "run.yaml")]) == 0
    parts = ["run", "--config", str(tmp_path / "run.yaml"), "--set", "name=parts"]
    assert main([*parts, "--set", "train_dataset.total_steps=4"]) == 0
    assert main(parts) == 0
    assert "continuing parts after step 4" in capsys.readouterr().out
    assert main(parts) == 0
    said = capsys.readouterr().out
    assert "parts is complete: all 12 steps are trained" in said
    assert "continuing" not in said
    weights = [
        AutoModelForCausalLM.from_pretrained(tmp_path / "runs" / "Sharpen" / name / "global_step_12").state_dict()
        for name in ("whole", "parts")
    ]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    with pytest.raises(ConfigError, match=r"algorithm\.algorithm_type: 'sft' -> 'cpt'"):
        tune(
            config_path=tmp_path / "run.yaml",
            settings={"algorithm.algorithm_type": "cpt", "supervised.text_key": "text"},
            train_dataset=DatasetConfig(path=str(write(tmp_path, "texts", [{"text": "yes"}] * 3))),
        )


AGENT = """
from sharpen import JudgeOutput, WorkflowOutput


async def run_agent(task, model):
    messages = [{"role": "user", "content": task["question"]}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages)
    return WorkflowOutput(response=reply.choices[0].message.content)


async def judge(task, response):
    return JudgeOutput(reward=float(response == "yes"))
"""


def test_workflow_and_judge_of_the_file_evaluate_the_agent(tmp_path, toy_model_dir, toy_dataset):
    write(tmp_path, "rows", TEACHABLE)
    (tmp_path / "agent.py").write_text(AGENT)
    content = {
        "workflow": "agent.py:run_agent",
        "judge": "agent.py:judge",
        "train_dataset": {"path": "rows.jsonl", "total_steps": 1},
        "eval_dataset": {"path": str(toy_dataset), "split": "test"},
        "model": {"model_path": str(toy_model_dir), "max_model_len": 64, "max_tokens": 8},
        "algorithm": {"algorithm_type": "sft", "batch_size": 3},
        "checkpoint_root_dir": str(tmp_path / "runs"),
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    result = tune(config_path=tmp_path / "run.yaml")
    assert result.before["greedy"].num_tasks == result.after["sampled"].num_tasks == 10


def test_cpt_and_dpo_learn(tmp_path, toy_model_dir, capsys):
    texts = write(tmp_path, "texts", [{"body": "yes no " * 6} for _ in range(9)] + [{"body": ""}])
    result = tune(
        **options(tmp_path, toy_model_dir, texts, "cpt", settings={"supervised.text_key": "body", "time_limit_s": 600})
    )
    assert result.loss_after < 0.5 * result.loss_before
    assert "1 of 4 rows have no token to train on" in capsys.readouterr().out
    rows = [{"prompt": f"question {i}", "chosen": "yes", "rejected": "no"} for i in range(100)]
    result = tune(**options(tmp_path, toy_model_dir, write(tmp_path, "pairs", rows), "dpo"))
    assert result.loss_before == pytest.approx(math.log(2))
    assert result.loss_after < 0.5
    assert (result.verdict.kind, result.verdict.num_tasks) == ("better", 10)
    assert result.verdict.difference == pytest.approx(result.loss_before - result.loss_after)
    assert "(held-out loss, 10 held-out rows)" in capsys.readouterr().out
    summary = json.loads((result.run_dir / "summary.json").read_text())
    assert summary["held_out"]["after"]["accuracy"] == 1.0
    certificate = json.loads((result.run_dir / "certificate.json").read_text())
    assert {check["name"] for check in certificate["checks"]} == {"rows", "mask", "rendered", "pairs"}


def test_a_bad_row_late_in_the_data_stops_the_run_with_a_checkpoint_to_go_on_from(tmp_path, toy_model_dir):
    rows = TEACHABLE * 5
    path = write(tmp_path, "rows", [*rows[:80], {"messages": [{"role": "user", "content": "?"}]}, *rows[81:]])
    given = options(tmp_path, toy_model_dir, path, "sft", steps=25, experiment_name="late")
    given["settings"] |= {"evaluation.hold_out": False}
    with pytest.raises(DatasetError, match=r"row rows/80: .*no message of the assistant"):
        tune(**given)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = tune(**given)
    assert result.steps == 25
    metrics = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics if "trainer/loss" in row] == list(range(1, 26))
    assert result.loss_before is None


def test_the_time_limit_ends_a_run_with_a_checkpoint(tmp_path, toy_model_dir):
    data = write(tmp_path, "rows", TEACHABLE)
    result = tune(**options(tmp_path, toy_model_dir, data, "sft", settings={"time_limit_s": 1e-3}))
    assert result.steps == 1
    assert result.model_dir.exists()


@pytest.mark.parametrize(
    ("more", "kind", "words"),
    [
        ({"workflow_func": says_yes}, ConfigError, "on the tasks of eval_dataset"),
        ({"judge_func": says_yes}, ConfigError, "give both, or neither"),
        (
            {
                "workflow_func": says_yes,
                "eval_dataset": DatasetConfig(path="./no/such/data"),
            },
            DatasetError,
            "./no/such/data",
        ),
        ({"settings": {"sampling.order": "difficulty"}}, ConfigError, "needs rewards"),
        (
            {"settings": {"supervised.messages_key": "chat", "supervised.prompt_key": "p"}},
            DatasetError,
            "neither 'chat'",
        ),
        ({"model": 4}, DatasetError, "fits the model"),
        ({"settings": {"evaluation.hold_out": False}, "model": 4}, DatasetError, "none of the 4 rows of step 1"),
    ],
)
def test_wrong_arguments_are_one_sentence(tmp_path, toy_model_dir, more, kind, words):
    data = write(tmp_path, "rows", TEACHABLE)
    given = options(tmp_path, toy_model_dir, data, "sft")
    given["settings"] |= more.get("settings", {})
    if "model" in more:
        given["model"] = TunerModelConfig(model_path=str(toy_model_dir), max_model_len=more["model"])
    more = {name: value for name, value in more.items() if name not in ("settings", "model")}
    with pytest.raises(kind, match=words):
        tune(**given, **more)


@pytest.mark.slow
def test_sft_then_grpo_trains_the_quickstarts_agent(tmp_path, monkeypatch):
    """A few right traces raise the agent, and GRPO from that checkpoint raises it further."""
    monkeypatch.syspath_prepend(str(QUICKSTART))
    import agent

    data = str(QUICKSTART / "data")
    lines = (QUICKSTART / "data" / "train.jsonl").read_text().splitlines()[:48]
    traces = write(tmp_path, "traces", [right_trace(json.loads(line), agent) for line in lines])
    common = {
        "workflow_func": agent.run_agent,
        "judge_func": agent.judge,
        "eval_dataset": DatasetConfig(path=data, split="test"),
    }
    settings = {
        "checkpoint_root_dir": str(tmp_path / "runs"),
        "trainer": {"beta2": 0.95, "weight_decay": 0.0},
        "evaluation.max_tasks": 256,
    }
    taught = tune(
        train_dataset=DatasetConfig(path=str(traces), total_steps=6),
        model=TunerModelConfig(model_path=str(QUICKSTART / "model"), max_model_len=512),
        algorithm=AlgorithmConfig(algorithm_type="sft", batch_size=16, learning_rate=1e-4),
        settings=settings,
        **common,
    )
    assert taught.loss_after < taught.loss_before
    assert taught.after["sampled"].accuracy > taught.before["sampled"].accuracy + 0.05
    tuned = tune(
        train_dataset=DatasetConfig(path=data, split="train", total_steps=8),
        model=TunerModelConfig(model_path=str(taught.model_dir), max_model_len=512),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=8, batch_size=16, learning_rate=3e-4),
        settings={**settings, "loss.kl": "none"},
        **common,
    )
    assert tuned.before["greedy"].accuracy == pytest.approx(taught.after["greedy"].accuracy, abs=0.03)  # bfloat16 files
    assert tuned.after["sampled"].accuracy > tuned.before["sampled"].accuracy + 0.1
    del sys.modules["agent"]


@pytest.mark.slow
def test_an_expert_beside_the_rollouts_trains_the_quickstarts_agent(tmp_path, monkeypatch):
    """`mix` with a few right traces as the expert's rows: the agent learns from both at once."""
    monkeypatch.syspath_prepend(str(QUICKSTART))
    import agent

    data = str(QUICKSTART / "data")
    lines = (QUICKSTART / "data" / "train.jsonl").read_text().splitlines()[:48]
    traces = write(tmp_path, "traces", [right_trace(json.loads(line), agent) for line in lines])
    tuned = tune(
        workflow_func=agent.run_agent,
        judge_func=agent.judge,
        train_dataset=DatasetConfig(path=data, split="train", total_steps=12),
        eval_dataset=DatasetConfig(path=data, split="test"),
        model=TunerModelConfig(model_path=str(QUICKSTART / "model"), max_model_len=512),
        algorithm=AlgorithmConfig(algorithm_type="mix", group_size=8, batch_size=16, learning_rate=3e-4),
        settings={
            "checkpoint_root_dir": str(tmp_path / "runs"),
            "trainer": {"beta2": 0.95, "weight_decay": 0.0},
            "loss.kl": "none",
            "expert": {"dataset": {"path": str(traces)}, "batch_size": 16},
            "evaluation.max_tasks": 256,
        },
    )
    assert tuned.after["greedy"].accuracy > tuned.before["greedy"].accuracy + 0.2
    assert tuned.after["sampled"].accuracy > tuned.before["sampled"].accuracy + 0.2
    del sys.modules["agent"]


def right_trace(row: dict[str, str], agent) -> dict[str, object]:
    """The question, the right call of the calculator with its result, and the answer."""
    expression, result = row["answer"].split(" = ")[0], row["answer"].rpartition("#### ")[2]
    call = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    messages = [
        {"role": "system", "content": agent.SYSTEM},
        {"role": "user", "content": row["question"]},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "a", "content": result},
        {"role": "assistant", "content": f"#### {result}"},
    ]
    return {"messages": messages, "tools": json.dumps(agent.TOOLS)}


def test_algorithms_are_listed_with_formula_source_and_defaults(capsys):
    assert main(["algorithms"]) == 0
    shown = capsys.readouterr().out
    for words in ("sft\n", "cpt\n", "dpo\n", "arXiv 2305.18290", "beta 0.1", "mean over pairs"):
        assert words in shown


def test_settings_of_one_kind_of_run_are_not_ignored_in_the_other(tmp_path, toy_model_dir, toy_dataset, capsys):
    given = options(tmp_path, toy_model_dir, toy_dataset, "grpo", settings={"supervised.text_key": "body"})
    with pytest.raises(ConfigError, match="the settings of supervised have no effect: 'grpo' learns from rollouts"):
        tune(says_yes, **given)
    rows = write(tmp_path, "rows", TEACHABLE)
    tune(
        **options(
            tmp_path, toy_model_dir, rows, "sft", steps=1, settings={"rollout.timeout_s": 3, "check.num_tasks": 1}
        )
    )
    assert "without effect in sft: rollout.timeout_s, check.num_tasks" in capsys.readouterr().out
