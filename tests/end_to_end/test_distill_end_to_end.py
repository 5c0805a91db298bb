"""Distillation from `tune()` to the certificate, with a workflow that gives no reward, and without a judge."""

import argparse
import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.cli.show import add_show, run_show
from sharpen.errors import ConfigError, DatasetError, ModelError
from sharpen.evidence.certificate.certify import certify
from sharpen.evidence.certificate.plain.retrain import retrain
from sharpen.evidence.diagnose.diagnosis import diagnose, read_run
from sharpen.learning.experience.reading import read_groups, read_trained
from sharpen.types import Outcome


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory, write_toy_model) -> Path:
    """The toy model's tokenizer with other weights; read only."""
    return write_toy_model(tmp_path_factory.mktemp("teacher"), seed=7)


async def answers(task, model):
    """Two calls, and no reward; every fourth task's workflow breaks before it is done."""
    messages = [{"role": "user", "content": task["question"]}]
    for turn in range(2):
        reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=4)
        if turn == 0 and task["question"].endswith(("3", "7")):
            raise ValueError("a broken tool")
        messages += [{"role": "assistant", "content": reply.choices[0].message.content or "-"}]
        messages += [{"role": "user", "content": "more"}]
    return WorkflowOutput()


async def rewarded(task, model):
    await answers({"question": "0"}, model)
    return WorkflowOutput(reward=0.5)


def run(
    folder,
    model,
    teacher,
    dataset,
    *,
    workflow=answers,
    algorithm="jsd",
    group_size=1,
    steps=3,
    settings=None,
    **options,
):
    return tune(
        workflow_func=workflow,
        train_dataset=DatasetConfig(path=str(dataset), split="train", total_steps=steps),
        model=TunerModelConfig(model_path=str(model), max_model_len=128, max_tokens=4),
        algorithm=AlgorithmConfig(
            algorithm_type=algorithm, group_size=group_size, batch_size=4, learning_rate=5e-3, save_interval_steps=1
        ),
        settings={
            "checkpoint_root_dir": str(folder),
            "evaluation.hold_out": False,
            "certificate.retrain": "off",
            "rollout.max_attempts": 1,
            **({} if teacher is None else {"distill.teacher_path": str(teacher)}),
            **(settings or {}),
        },
        **options,
    )


def rows(result):
    return [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("algorithm", ["on_policy_distill", "jsd"])
def test_a_workflow_without_rewards_is_distilled(tmp_path, toy_model_dir, teacher_dir, toy_dataset, algorithm, capsys):
    """Rollouts that ended well train, though they have no reward; those that failed never do.

    Break: let `Rollout.scored` be true for every outcome, or let `_check_failure` ask for a reward.
    """
    result = run(tmp_path, toy_model_dir, teacher_dir, toy_dataset, algorithm=algorithm)
    printed = capsys.readouterr().out
    assert "no reward" in printed
    assert "nothing to learn from" not in printed
    steps = rows(result)
    assert len(steps) == 3
    assert all(row["trainer/distill_divergence"] != 0.0 and row["trainer/grad_norm"] > 0 for row in steps)
    assert all(row["trainer/skipped_tokens"] == 0 for row in steps)
    assert not any("reward" in name and "flat" not in name for row in steps for name in row)
    rollouts = [rollout for group in read_groups(result.run_dir / "run.db") for rollout in group.rollouts]
    ended_well = {rollout.id for rollout in rollouts if rollout.outcome == Outcome.OK}
    assert all(rollout.reward is None for rollout in rollouts)
    assert 0 < len(ended_well) < len(rollouts)
    assert {call.rollout_id for call in read_trained(result.run_dir / "run.db")} == {
        id_ for id_ in ended_well if id_.startswith("step_")
    }
    certificate = certify(result.run_dir)
    assert certificate.holds, certificate.problems
    (failures,) = (check for check in certificate.checks if check.name == "failures")
    assert failures.checked > 0
    assert failures.broken == 0
    exception, *_ = certificate.not_recomputed
    assert "teacher" in exception
    assert {finding.name for finding in diagnose(read_run(result.run_dir))} <= {"excluded_rollouts"}
    assert (result.run_dir / "reward_curve.png").exists()
    parser, out = argparse.ArgumentParser(), io.StringIO()
    add_show(parser)
    (one, *_) = (id_ for id_ in sorted(ended_well) if id_.startswith("step_"))
    run_show(parser.parse_args([str(result.run_dir), "--rollout", one]), out)
    shown = " ".join(out.getvalue().split())
    assert "reward none" in shown
    assert "trained, advantage without the teacher's +0" in shown


def test_a_flat_group_trains_and_a_run_goes_on_with_the_same_teacher_only(
    tmp_path, toy_model_dir, teacher_dir, toy_dataset, write_toy_model
):
    """Equal rewards of 0.5 everywhere. Two steps at once, and the same in two sessions, end with the same weights."""
    options = {"workflow": rewarded, "settings": {"deterministic": True, "check.enabled": False}, "project_name": "P"}
    places = (tmp_path, toy_model_dir, teacher_dir, toy_dataset)
    whole = run(*places, steps=2, experiment_name="whole", **options)
    run(*places, steps=1, experiment_name="parts", **options)
    parts = run(*places, steps=2, experiment_name="parts", **options)
    assert rows(parts)[-1]["trainer/distill_divergence"] == rows(whole)[-1]["trainer/distill_divergence"]
    assert rows(whole)[0]["reward/mean"] == 0.5
    assert rows(whole)[0]["trainer/grad_norm"] > 0
    assert rows(whole)[0]["batch/loss_tokens_zero_variance"] == 0
    named, renamed = (write_toy_model(tmp_path / place, seed=8) for place in ("another", f"there/{teacher_dir.name}"))
    for other, message in ((named, r"distill\.teacher_path"), (renamed, "what teacher holds: .*digest")):
        with pytest.raises(ConfigError, match=message):
            run(tmp_path, toy_model_dir, other, toy_dataset, steps=3, experiment_name="parts", **options)


def test_a_run_with_several_teachers_goes_on_with_the_same_ones_only(
    tmp_path, toy_model_dir, teacher_dir, write_toy_model
):
    """Each task names its teacher; one that names none is refused before anything is loaded. A teacher that has moved
    is the same one."""
    second = write_toy_model(tmp_path / "second", seed=8)
    rows_of = [{"question": f"question {n}", "domain": ("maths", "code")[n % 2]} for n in range(8)]
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text("\n".join(map(json.dumps, rows_of)))

    def go_on(steps, code):
        teachers = {"maths": str(teacher_dir), "code": str(code)}
        settings = {"distill.teachers": teachers, "distill.teacher_key": "domain", "check.enabled": False}
        options = {"workflow": rewarded, "settings": settings, "project_name": "P", "experiment_name": "one"}
        return run(tmp_path, toy_model_dir, None, data, steps=steps, **options)

    assert rows(go_on(1, second))[0]["trainer/distill_divergence"] > 0
    moved = write_toy_model(tmp_path / "moved", seed=8)
    assert certify(go_on(2, moved).run_dir).holds
    with pytest.raises(ConfigError, match=r"distill\.teachers\.code"):
        go_on(3, write_toy_model(tmp_path / "other", seed=9))
    (data / "train.jsonl").write_text(json.dumps({"question": "question 0", "domain": "law"}))
    settings = {"distill.teachers": {"maths": str(teacher_dir)}, "distill.teacher_key": "domain"}
    with pytest.raises(DatasetError, match="task train/0 has 'law' there"):
        run(tmp_path, toy_model_dir, None, data, settings=settings, experiment_name="two")


@pytest.mark.parametrize("weights", ["start", "current"])
def test_the_model_teaches_itself_what_only_the_teacher_is_told(tmp_path, toy_model_dir, toy_dataset, weights):
    """Every sequence that trains follows the teacher's own prompt, in which the answer stands; the plain loop says that
    it does not repeat this."""
    settings = {
        "distill.own_weights": weights,
        "distill.context": "{prompt}\nThe answer is {answer}.",
        "rollout.failure_reward": 0.0,
        "check.enabled": False,
    }
    result = run(tmp_path, toy_model_dir, None, toy_dataset, workflow=rewarded, steps=2, settings=settings)
    assert all(row["trainer/distill_divergence"] > 0 for row in rows(result))
    certificate = certify(result.run_dir)
    assert certificate.holds, certificate.problems
    assert any("distill.context" in one for one in retrain(result.run_dir).not_repeated)
    if weights == "current":
        with pytest.raises(ConfigError, match=r"own_weights is 'current' with trainer\.num_processes 2"):
            run(tmp_path, toy_model_dir, None, toy_dataset, settings=settings | {"trainer.num_processes": 2})
        with pytest.raises(ConfigError, match=r"loss\.echo is 0\.1 with distill\.context"):
            run(tmp_path, toy_model_dir, None, toy_dataset, settings=settings | {"loss.echo": 0.1})
    settings["distill.context"] = "{prompt} {solution}"
    with pytest.raises(DatasetError, match=r"\{solution\}, but task train/"):
        run(tmp_path / "other", toy_model_dir, None, toy_dataset, workflow=rewarded, settings=settings)


@pytest.mark.parametrize("lora", [{"rank": 2, "alpha": 4}, None])
def test_the_moving_average_of_the_model_teaches_it_and_a_run_goes_on_with_it(
    tmp_path, toy_model_dir, toy_dataset, lora
):
    """Each checkpoint's average is half of the one before and half of its weights, and two sessions end with the same.

    Break: leave it out of `RolloutLoss.state_tensors` or `restore`.
    """
    settings = {
        "distill.own_weights": "current",
        "distill.own_decay": 0.5,
        "distill.context": "{prompt}\nThe answer is {answer}.",
        "rollout.failure_reward": 0.0,
        "check.enabled": False,
        "deterministic": True,
        "trainer.lora": lora,
    }

    def go(name, steps):
        options = {"settings": settings, "project_name": "P", "experiment_name": name}
        return run(tmp_path, toy_model_dir, None, toy_dataset, workflow=rewarded, steps=steps, **options).run_dir

    whole = go("whole", 2)
    inner = [whole / f"global_step_{step}" / "trainer_state" for step in (1, 2)]
    first, second = (load_file(one / "teacher.safetensors") for one in inner)
    own = load_file(inner[1] / "weights.safetensors" if lora else inner[1].parent / "model.safetensors")
    for name, average in second.items():
        torch.testing.assert_close(average, 0.5 * first[name] + 0.5 * own[name])
    assert any(not torch.equal(average, own[name]) for name, average in second.items())
    go("parts", 1)
    parts = load_file(go("parts", 2) / "global_step_2" / "trainer_state" / "teacher.safetensors")
    assert all(torch.equal(average, second[name]) for name, average in parts.items())
    certificate = certify(whole)
    assert certificate.holds, certificate.problems
    assert any("distill.context" in one for one in retrain(whole).not_repeated)
    settings["distill.own_weights"] = "start"
    with pytest.raises(ConfigError, match="own_decay makes an average of the weights that train"):
        go("other", 1)


def test_evaluation_without_rewards_is_refused_with_the_way_out(tmp_path, toy_model_dir, teacher_dir, toy_dataset):
    settings = {"evaluation.hold_out": True, "check.enabled": False}
    with pytest.raises(ConfigError, match=r"evaluation needs rewards.*evaluation.hold_out: false"):
        run(tmp_path, toy_model_dir, teacher_dir, toy_dataset, settings=settings)


def test_a_workflow_without_rewards_is_still_refused_where_they_are_needed(tmp_path, toy_model_dir, toy_dataset):
    with pytest.raises(ConfigError, match="returned no reward and there is no judge_func"):
        run(tmp_path, toy_model_dir, None, toy_dataset, algorithm="reinforce")


def test_teachers_that_cannot_judge_the_model_are_refused_before_anything_is_loaded(
    tmp_path, toy_model_dir, teacher_dir, toy_dataset, write_toy_model
):
    def refused(teacher, message, error=ConfigError, **changes):
        with pytest.raises(error, match=message):
            run(tmp_path / "runs", toy_model_dir, teacher, toy_dataset, **changes)

    refused(None, "'jsd' learns from a teacher: set distill.teacher_path")
    refused("nowhere/at/all", "distill.teacher_path 'nowhere/at/all' does not exist", ModelError)
    refused(teacher_dir, "'rloo' has no teacher", algorithm="rloo", group_size=2)
    other = write_toy_model(tmp_path / "other", seed=7)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    (first, last) = (token for token, id_ in vocabulary.items() if id_ in (20, 200))
    vocabulary[first], vocabulary[last] = 200, 20
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(
        other, rf"another vocabulary than the model .*: id 20 is '{first}' in the model and '{last}' in the teacher"
    )
    ends = write_toy_model(tmp_path / "ends", seed=7)
    settings = json.loads((ends / "tokenizer_config.json").read_text())
    (ends / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<|endoftext|>"}))
    refused(ends, "the eos_token is '<|im_end|>' in the model and '<|endoftext|>' in the teacher")
    short = write_toy_model(tmp_path / "short", seed=7)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    refused(short, "the teacher in distill.teacher_path reads at most 64 tokens")
    assert not (tmp_path / "runs").exists()
