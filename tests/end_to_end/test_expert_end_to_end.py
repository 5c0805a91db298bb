"""An expert's rows beside the rollouts, through the whole line: which rows, what is noted of them, resume, refusals."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.agent.tasks.order import TaskOrder
from sharpen.cli.main import main
from sharpen.config.rows import load_tasks
from sharpen.config.run import LossConfig, SupervisedConfig
from sharpen.errors import ConfigError, DatasetError
from sharpen.evidence.certificate.certify import certify
from sharpen.gateway.render import Renderer
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.experience.draw import make_batch
from sharpen.learning.experience.reading import read_trained
from sharpen.learning.supervised.lessons import Tutor
from sharpen.learning.trainer.checkpoint import load, pointed
from sharpen.run.expert import SFT, ExpertRows

NUM_ROWS, ROWS_A_STEP = 7, 3


async def holds_letter(task, model):
    """One call of at most 4 tokens; reward 1 if the answer holds an 'e', else 0."""
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": task["question"]}], max_tokens=4
    )
    return WorkflowOutput(reward=float("e" in (reply.choices[0].message.content or "")))


async def never_right(task, model):
    await holds_letter(task, model)
    return WorkflowOutput(reward=0.0)


@pytest.fixture
def expert_rows(tmp_path: Path) -> Path:
    path = tmp_path / "expert.jsonl"
    rows = [{"prompt": f"question {i}", "response": "yes " * (i % 3 + 1) + str(i)} for i in range(NUM_ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(folder: Path, model: Path, dataset: Path, *, steps: int, algorithm="mix", workflow=holds_letter, settings=None):
    return tune(
        workflow_func=workflow,
        train_dataset=DatasetConfig(path=str(dataset), split="train", total_steps=steps),
        eval_dataset=DatasetConfig(path=str(dataset), split="test"),
        model=TunerModelConfig(model_path=str(model), max_model_len=128, max_tokens=8),
        algorithm=AlgorithmConfig(
            algorithm_type=algorithm, group_size=3, batch_size=4, learning_rate=1e-3, save_interval_steps=1
        ),
        project_name="P",
        experiment_name="fixed",
        settings={
            "checkpoint_root_dir": str(folder),
            "evaluation.before_and_after": False,
            "check.enabled": False,
            "rollout.failure_reward": 0.0,
            **(settings or {}),
        },
    )


def given(path: Path, **more) -> dict:
    return {"expert.dataset.path": str(path), "expert.batch_size": ROWS_A_STEP, **more}


def noted_rows(run_dir: Path) -> dict[int, list[int]]:
    """The expert's rows of each step by the journal, in the order they were trained."""
    found: dict[int, list[int]] = {}
    for call in read_trained(run_dir / "run.db"):
        if call.rollout_id.startswith("expert/"):
            found.setdefault(call.step, []).append(int(call.rollout_id.split("/")[-1]))
    return found


def metrics_of(run_dir: Path) -> list[dict]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [row for line in lines if "rollout/count" in (row := json.loads(line))]


def test_trap_24_a_resumed_run_goes_on_at_the_right_expert_row(
    tmp_path, toy_model_dir, toy_dataset, expert_rows, capsys
):
    """Two steps, then three more by a second session: rows come as one unbroken order gives them, across an epoch's
    end, and every record agrees.

    Red when `_record` (loop.py) does not put the rows' position into the progress, or `_restore` (assembly.py) does
    not restore it.
    """
    settings = given(
        expert_rows, **{"trainer.num_minibatches": 2, "expert.mu": 0.4, "expert.mu_warmup_steps": 4, "loss.kl": "none"}
    )
    result = run(tmp_path, toy_model_dir, toy_dataset, steps=2, settings=settings)
    assert load(pointed(result.run_dir, "latest")).state["position"]["expert"]["position"] == 2 * ROWS_A_STEP
    result = run(tmp_path, toy_model_dir, toy_dataset, steps=5, settings=settings)
    order = TaskOrder(NUM_ROWS, 0, ROWS_A_STEP)
    assert noted_rows(result.run_dir) == {step: order.draw() for step in range(1, 6)}
    found = certify(result.run_dir)
    assert found.holds, found.problems
    assert any("expert" in line for line in found.not_recomputed)
    checks = {check.name: check.checked for check in found.checks}
    assert checks["rows"] == checks["rendered"] == 5 * ROWS_A_STEP
    assert checks["accounted"] == 5 * 4 * 3
    written = json.loads((result.run_dir / "certificate.json").read_text())
    assert written["holds"]
    assert {check["name"]: check["checked"] for check in written["checks"]} == checks
    assert main(["certify", str(result.run_dir)]) == 0
    capsys.readouterr()
    for row in metrics_of(result.run_dir):
        assert row["trainer/mu"] == pytest.approx(0.4 * min(row["step"] / 4, 1))
        assert row["batch/expert_rows"] == ROWS_A_STEP
        assert row["trainer/num_updates"] == 2
        assert row["trainer/expert_nll"] > 1
        assert row["trainer/logprob_gap_tokens"] > 0  # of the rollouts' tokens: the expert's have no engine's logprob
        everything = row["trainer/trained_tokens"] + row["trainer/skipped_tokens"]
        assert everything == row["batch/loss_tokens"] + row["batch/expert_tokens"]


def test_a_step_of_flat_groups_still_learns_from_the_expert(tmp_path, toy_model_dir, toy_dataset, expert_rows):
    """With `std_threshold` every group is dropped, so that updates hold nothing but the expert's rows.

    Red when `train` (rollouts.py) trains batches with `experiences` only.
    """
    settings = given(expert_rows, **{"loss.std_threshold": 0.0, "expert.mu": 1.0, "trainer.num_minibatches": 1})
    result = run(tmp_path, toy_model_dir, toy_dataset, steps=3, workflow=never_right, settings=settings)
    rows = metrics_of(result.run_dir)
    assert [row["trainer/version"] for row in rows] == [1, 2, 3]
    assert all(row["batch/groups"] == 0 and "trainer/entropy" not in row for row in rows)
    assert rows[-1]["trainer/expert_nll"] < rows[0]["trainer/expert_nll"]
    assert rows[0]["trainer/loss"] == pytest.approx(rows[0]["trainer/expert_nll"])
    assert certify(result.run_dir).holds


def test_mix_chord_runs_by_its_defaults_and_reads_conversations_by_the_section_supervised(
    tmp_path, toy_model_dir, toy_dataset
):
    path = tmp_path / "expert.jsonl"
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]
    path.write_text(json.dumps({"talk": said}) + "\n" + json.dumps({"talk": [*said, *said]}) + "\n")
    settings = {"expert.dataset.path": str(path), "supervised.messages_key": "talk", "trainer.epochs": 2}
    result = run(tmp_path, toy_model_dir, toy_dataset, steps=1, algorithm="mix_chord", settings=settings)
    (row,) = metrics_of(result.run_dir)
    assert row["batch/expert_rows"] == 4  # as many as tasks; two rows, each twice
    assert row["trainer/mu"] == pytest.approx(0.1)
    assert 0 < row["trainer/expert_loss"] < 0.1 * row["trainer/expert_nll"] / 4  # p (1 - p) is at most 1/4
    assert certify(result.run_dir).holds


def test_rows_that_are_too_long_are_left_out_and_said(tmp_path, toy_model_dir, toy_dataset, capsys):
    path = tmp_path / "expert.jsonl"
    rows = [{"prompt": "q", "response": "yes"}, {"prompt": "q", "response": "no " * 400}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run(tmp_path, toy_model_dir, toy_dataset, steps=1, settings={**given(path), "expert.batch_size": 2})
    (row,) = metrics_of(result.run_dir)
    assert (row["batch/expert_rows"], row["batch/expert_rows_too_long"]) == (1, 1)
    assert "1 expert rows left out: longer than model.max_model_len" in capsys.readouterr().out
    assert certify(result.run_dir, logprobs=False).holds


def test_a_steps_rows_are_split_evenly_over_its_updates_each_normalized_by_itself(toy_model_dir, expert_rows):
    """Eight rows drawn of seven, one of them twice, into three updates. Red when `join` (run/expert.py) weighs
    all rows of the step together."""
    algorithm = resolve("mix", LossConfig(aggregation="rollout-mean"), 4)
    tokenizer = AutoTokenizer.from_pretrained(toy_model_dir)
    rows = ExpertRows(
        rows=load_tasks(DatasetConfig(path=str(expert_rows))),
        order=TaskOrder(NUM_ROWS, 0, 8),
        tutor=Tutor(
            tokenizer=tokenizer,
            renderer=Renderer(tokenizer),
            end_ids=frozenset([tokenizer.eos_token_id]),
            max_model_len=128,
            data="conversations",
            fields=SupervisedConfig(),
        ),
        weighing=replace(SFT, aggregation=algorithm.aggregation),
    )
    batches, checks, _ = rows.join([make_batch((), algorithm)] * 3)
    assert [batch.num_expert_rows for batch in batches] == [2, 3, 3]
    names = [one.rollout_id for batch in batches for one in batch.experts]
    assert len(set(names)) == 8
    assert sum(name.endswith("#2") for name in names) == 1
    for batch in batches:
        of_rows = [float(one.weights_T.sum()) for one in batch.experts]
        assert of_rows == pytest.approx([1 / len(of_rows)] * len(of_rows))
        assert all((one.versions_T == -1).all() and not one.logprobs_T.any() for one in batch.experts)
    assert {check.name: (check.checked, check.broken) for check in checks} == dict.fromkeys(
        ("rows", "mask", "rendered"), (8, 0)
    )


def test_what_has_no_effect_or_is_missing_is_refused_by_name(tmp_path, toy_model_dir, toy_dataset, expert_rows):
    def refused(message, error=ConfigError, **options):
        with pytest.raises(error, match=message):
            run(tmp_path, toy_model_dir, toy_dataset, steps=1, **options)

    refused(
        "settings of expert have no effect: 'grpo' learns from rollouts", algorithm="grpo", settings=given(expert_rows)
    )
    refused("settings of expert have no effect: 'sft'", algorithm="sft", settings=given(expert_rows))
    refused("'mix' learns from an expert's rows too: set expert.dataset")
    refused("mu_decay_steps and mu_valley go together", settings=given(expert_rows, **{"expert.mu_valley": 0.1}))
    refused("total_steps have no effect here", settings=given(expert_rows, **{"expert.dataset.total_steps": 3}))
    refused("expert.batch_size is 3, but a step has 4", settings=given(expert_rows, **{"trainer.num_minibatches": 4}))
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"text": "?"}\n')
    refused("it has neither 'messages' nor 'prompt'", DatasetError, settings=given(wrong))
    assert not (tmp_path / "P").exists()


def test_an_expert_goes_together_with_replay_across_a_resume(tmp_path, toy_model_dir, toy_dataset, expert_rows):
    """What the journal notes of the expert's rows is not taken for groups that might train again."""
    settings = given(expert_rows, **{"sampling.replay_share": 0.5, "trainer.num_minibatches": 2})
    run(tmp_path, toy_model_dir, toy_dataset, steps=2, settings=settings)
    result = run(tmp_path, toy_model_dir, toy_dataset, steps=4, settings=settings)
    order = TaskOrder(NUM_ROWS, 0, ROWS_A_STEP)
    assert noted_rows(result.run_dir) == {step: order.draw() for step in range(1, 5)}
    found = certify(result.run_dir)
    assert found.holds, found.problems
