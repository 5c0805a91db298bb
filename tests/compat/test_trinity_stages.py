"""Several stages in one Trinity-RFT file: one command, a run directory each, every stage on the model before it."""

import json
from pathlib import Path

import pytest

from sharpen import tune
from sharpen.cli.main import BAD_INPUT, main
from sharpen.errors import ConfigError

AGENT = """
from sharpen import WorkflowOutput

async def answer(task, model):
    messages = [{"role": "user", "content": task["question"]}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=4)
    return WorkflowOutput(reward=float("e" in (reply.choices[0].message.content or "")))
"""


@pytest.fixture
def content(tmp_path: Path, toy_model_dir: Path, toy_dataset: Path) -> dict:
    """Supervised fine-tuning on four rows, then rollouts."""
    (tmp_path / "agent.py").write_text(AGENT)
    row = {"messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "eee"}]}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4)
    rows = {"storage_type": "file", "path": "rows.jsonl", "format": {"messages_key": "messages"}}
    taskset = {"path": str(toy_dataset), "default_workflow_type": "agent.py:answer"}
    return {
        "project": "Toy",
        "name": "two",
        "checkpoint_root_dir": str(tmp_path / "runs"),
        "algorithm": {"algorithm_type": "grpo", "repeat_times": 4, "optimizer": {"lr": 0.001}},
        "model": {"model_path": str(toy_model_dir), "max_model_len": 64},
        "buffer": {"batch_size": 2, "total_steps": 1, "explorer_input": {"taskset": taskset}},
        "stages": [
            {
                "stage_name": "warmup",
                "mode": "train",
                "algorithm": {"algorithm_type": "sft", "optimizer": {"lr": 0.01}},
                "buffer": {"train_batch_size": 2, "total_steps": 2, "trainer_input": {"experience_buffer": rows}},
            },
            {"stage_name": "rft"},
        ],
    }


def written(folder: Path, content: dict) -> Path:
    path = folder / "two.yaml"
    path.write_text(json.dumps(content))
    return path


def run(path: Path, *further: str) -> int:
    return main(["run", "--config", str(path), "--set", "evaluation.hold_out=false", *further])


def resolved(run_dir: Path) -> dict:
    return json.loads((run_dir / "resolved.json").read_text())


def test_each_stage_trains_the_model_of_the_one_before(content, tmp_path, capsys):
    assert run(written(tmp_path, content)) == 0
    runs = tmp_path / "runs" / "Toy"
    assert resolved(runs / "two-rft")["model.model_path"]["value"] == str(runs / "two-warmup" / "global_step_2")
    assert (runs / "two-rft" / "global_step_1").is_dir()
    out = capsys.readouterr().out
    assert out.index("stage warmup") < out.index("stage rft")
    assert run(written(tmp_path, content)) == 0  # a finished file goes on from where it is: at its end
    assert "two-rft is complete: all 1 steps" in capsys.readouterr().out


def test_one_stage_can_be_chosen(content, tmp_path):
    assert run(written(tmp_path, content), "--stage", "rft") == 0
    assert [path.name for path in (tmp_path / "runs" / "Toy").iterdir()] == ["two-rft"]


def test_what_is_wrong_with_a_later_stage_is_said_before_the_first_one_begins(content, tmp_path, capsys):
    content["stages"][1]["algorithm"] = {"algorithm_type": "sppo", "policy_loss_fn": "gpro"}
    assert run(written(tmp_path, content)) == BAD_INPUT
    said = capsys.readouterr().err
    assert "stage rft" in said
    assert "'gpro'" in said
    assert not (tmp_path / "runs").exists()


def test_a_missing_agent_of_a_later_stage_is_said_before_the_first_one_begins(content, tmp_path, capsys):
    (tmp_path / "agent.py").write_text("")
    assert run(written(tmp_path, content)) == BAD_INPUT
    said = capsys.readouterr().err
    assert "stage rft" in said
    assert "'answer'" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (lambda stages: stages[1].update(stage_name="warmup"), ["two stages", "'warmup'"]),
        (lambda stages: stages[1].update(mode="explore"), ["'rft'", "'explore'"]),
        (lambda stages: stages[1].update(mode="bench"), ["'rft'", "'bench'"]),
        (lambda stages: stages.append(3), ["'stages'", "list"]),
        (lambda stages: stages[1].update(modle={}), ["'stages[0].modle'", "stage rft"]),
    ],
)
def test_stages_that_cannot_follow_each_other(content, tmp_path, capsys, change, facts):
    change(content["stages"])
    assert run(written(tmp_path, content)) == BAD_INPUT
    said = capsys.readouterr().err
    assert all(fact in said for fact in facts), said


def test_other_commands_and_tune_want_one_stage(content, tmp_path, capsys):
    path = written(tmp_path, content)
    assert main(["plan", "--config", str(path)]) == BAD_INPUT
    assert "warmup, rft" in capsys.readouterr().err
    assert main(["plan", "--config", str(path), "--stage", "rft"]) == 0
    with pytest.raises(ConfigError, match="warmup, rft"):
        tune(config_path=path)
    assert main(["explain", "--config", str(path)]) == 0
    out = capsys.readouterr().out
    assert '"two-warmup"' in out
    assert '"two-rft"' in out
    assert main(["explain", "--config", str(path), "--stage", "other"]) == BAD_INPUT
    assert "'other'" in capsys.readouterr().err
