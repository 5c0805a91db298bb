"""The gradient probe in a run and in `sharpen check`: said in a line; the end of a trainer that computes wrongly."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.agent.rollout.check import check_groups
from sharpen.cli.main import main
from sharpen.config.load import resolve
from sharpen.errors import GradientError
from sharpen.evidence.certificate.gradient_probe import GradientProbe
from sharpen.evidence.certificate.likeness import Gap
from sharpen.run.assembly import open_loop
from sharpen.run.check import check_first, with_gradients
from sharpen.show.view.data.run import gradients_sentence

AGENT = """
from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune

async def answer(task, model):
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": task["question"]}], max_tokens=4
    )
    return WorkflowOutput(reward=float(len(reply.choices[0].message.content or "")))
"""


async def no_agent(task: dict[str, Any], model: Any) -> WorkflowOutput:
    raise AssertionError("gradients are compared before the agent runs")


def test_a_run_whose_gradients_are_wrong_ends_before_anything_else(tmp_path: Path, toy_model_dir, toy_dataset):
    """Red when `check_first` only says what the probe found."""
    given = {
        "checkpoint_root_dir": str(tmp_path),
        "model.model_path": str(toy_model_dir),
        "model.max_model_len": 64,
        "train_dataset.path": str(toy_dataset),
        "train_dataset.total_steps": 1,
        "evaluation.before_and_after": False,
        "algorithm.group_size": 2,
    }
    with open_loop(resolve(settings=given), no_agent, None) as (loop, site):
        for name, parameter in loop.trainer.policy.parameters():
            if "layers.1.mlp.up_proj" in name:
                parameter.register_hook(lambda gradient: -gradient)
        with pytest.raises(GradientError, match=r"1 of 24 tensors .* model\.layers\.1\.mlp\.up_proj\.weight"):
            check_first(loop, site)
        assert loop.trainer.version == 0


@pytest.mark.parametrize("gradients", ["true", "false"])
def test_check_says_what_came_of_it(gradients, tmp_path: Path, toy_model_dir, toy_dataset, capsys):
    (tmp_path / "agent.py").write_text(AGENT)
    config = tmp_path / "run.yaml"
    config.write_text(
        "workflow: agent.py:answer\n"
        f"check: {{num_tasks: 1, gradients: {gradients}}}\n"
        f"train_dataset: {{path: {toy_dataset}, total_steps: 1}}\n"
        f"model: {{model_path: {toy_model_dir}, max_model_len: 64}}\n"
        "algorithm: {group_size: 4, batch_size: 2}\n"
    )
    main(["check", "--config", str(config)])
    said = " ".join(capsys.readouterr().out.split())
    assert ("gradients those of a plain loop in all tensors" in said) == (gradients == "true")


def test_gradients_that_differ_make_a_check_not_ready():
    report = check_groups([])
    wrong = GradientProbe(gaps=(Gap(name="layers.3.up_proj", distance=2.0, bound=1e-5),), compared=1.0, num_tokens=9)
    found = with_gradients(report, wrong)
    assert not found.ready
    assert "layers.3.up_proj" in found.findings[0]
    assert "check.gradients: false" in found.findings[0]
    assert found.to_json()["gradients"] == "not those of a plain loop"
    none = with_gradients(report, GradientProbe(not_probed="too large"))
    assert none.ready == report.ready
    assert none.gradients == "not probed: too large"


def train_rows(folder: Path, model: Path, steps: int) -> dict[str, Any]:
    """Train on rows until this step, and return the certificate."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"question {i}", "response": f"{i}"}) + "\n" for i in range(8)))
    result = tune(
        train_dataset=DatasetConfig(path=str(rows), total_steps=steps),
        model=TunerModelConfig(model_path=str(model), max_model_len=64),
        algorithm=AlgorithmConfig(algorithm_type="sft", batch_size=4, learning_rate=1e-3, save_interval_steps=1),
        settings={"checkpoint_root_dir": str(folder), "name": "run", "certificate.retrain": "off"},
    )
    found: dict[str, Any] = json.loads((result.run_dir / "certificate.json").read_text())
    return found | {"run_dir": result.run_dir}


def test_what_was_found_is_in_the_certificate_and_another_machine_compares_again(tmp_path, toy_model_dir, capsys):
    first = train_rows(tmp_path, toy_model_dir, 1)
    (found,) = first["gradients"]
    assert (found["step"], found["num_tensors"], found["part"]) == (0, 24, 1.0)
    assert 0 < found["share"] < 1
    assert found["furthest"].startswith("model.")
    assert "torch" in found["machine"]
    assert "before the first step: those of a plain loop in all tensors" in gradients_sentence(first)
    capsys.readouterr()
    assert len(train_rows(tmp_path, toy_model_dir, 2)["gradients"]) == 1
    assert "compared before step 1, on this machine as it is now" in " ".join(capsys.readouterr().out.split())
    with closing(sqlite3.connect(first["run_dir"] / "run.db")) as journal, journal:
        journal.execute("UPDATE gradients SET found = replace(found, 'torch', 'another torch')")
    both = train_rows(tmp_path, toy_model_dir, 3)
    assert [one["step"] for one in both["gradients"]] == [0, 2]
    assert all(0 < one["share"] < 1 for one in both["gradients"])
    assert "those of a plain loop" in " ".join(capsys.readouterr().out.split())


def test_why_gradients_were_not_compared_is_in_the_certificate_too():
    found = GradientProbe(not_probed="too large").to_json()
    assert gradients_sentence({"gradients": [{"step": 0, "machine": "", **found}]}).endswith(
        "before the first step: too large."
    )
    assert gradients_sentence({"gradients": [{"step": 0}, 3]}) == gradients_sentence({}) == ""
