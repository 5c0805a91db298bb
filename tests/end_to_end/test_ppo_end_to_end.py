"""PPO from `tune()` to the certificate on the toy task: the reward rises, the critic is measured, saved and resumed."""

import argparse
import io
import json

import pytest

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.cli.show import add_show, run_show
from sharpen.errors import ConfigError
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.experience.reading import read_groups
from sharpen.learning.trainer import checkpoint


async def prefers_letter(task, model):
    """Two calls; the reward is the share of the letter 'e' in both answers."""
    messages = [{"role": "user", "content": task["question"]}]
    text = ""
    for _ in range(2):
        reply = await model.client.chat.completions.create(
            model=model.name, messages=messages, max_tokens=4, stop=["\n\n"]
        )
        said = reply.choices[0].message.content or ""
        text += said
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    return WorkflowOutput(reward=text.count("e") / 8)


def run(folder, model, dataset, *, algorithm="ppo", group_size=4, batch_size=4, steps=10, settings=None, **options):
    return tune(
        workflow_func=prefers_letter,
        train_dataset=DatasetConfig(path=str(dataset), split="train", total_steps=steps),
        eval_dataset=DatasetConfig(path=str(dataset), split="test"),
        model=TunerModelConfig(model_path=str(model), max_model_len=128, max_tokens=4),
        algorithm=AlgorithmConfig(
            algorithm_type=algorithm,
            group_size=group_size,
            batch_size=batch_size,
            learning_rate=4e-2,
            save_interval_steps=1,
        ),
        settings={
            "checkpoint_root_dir": str(folder),
            "rollout.failure_reward": 0.0,
            "evaluation.before_and_after": False,
            "check.enabled": False,
            "certificate.retrain": "off",
            **(settings or {}),
        },
        **options,
    )


def shown(run_dir):
    """What `sharpen show` prints of the last group's first rollout with a reward."""
    *_, group = read_groups(run_dir / "run.db", last=1)
    parser, out = argparse.ArgumentParser(), io.StringIO()
    add_show(parser)
    best = max(group.rollouts, key=lambda rollout: rollout.reward)
    run_show(parser.parse_args([str(run_dir), "--rollout", best.id]), out)
    return out.getvalue()


def rows(result):
    return [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]


def test_ppo_learns_and_its_critic_shows(tmp_path, toy_model_dir, toy_dataset):
    settings = {"critic.learning_rate": 5e-3, "loss.kl": "none", "evaluation.before_and_after": True}
    result = run(tmp_path, toy_model_dir, toy_dataset, batch_size=8, settings=settings)
    before, after = sum(result.rewards_before.sampled.values()), sum(result.rewards_after.sampled.values())
    assert after > before + 3.0, (before, after)
    steps = [row for row in rows(result) if "trainer/value_loss" in row]
    assert len(steps) == 10
    assert steps[0]["trainer/value_mean"] == 0.0
    assert all(row["trainer/explained_variance"] <= 1.0 for row in steps)
    assert steps[-1]["trainer/value_mean"] > 0.3 * steps[-1]["trainer/return_mean"] > 0.1  # follows a moving target
    assert all(row["trainer/critic_grad_norm"] > 0 for row in steps)
    certificate = certify(result.run_dir)
    assert certificate.holds, certificate.problems
    exception, *_ = certificate.not_recomputed
    assert "critic's weights" in exception
    assert any("not recomputed" in line for line in certificate.lines())
    assert "reward for the critic" in shown(result.run_dir)
    assert "value_head.weight" in checkpoint.load(result.model_dir).further["critic"]


def test_a_group_of_one_is_enough_and_a_run_goes_on_with_its_critic(tmp_path, toy_model_dir, toy_dataset):
    """Two steps at once, and the same two in two sessions, end with the same critic."""
    options = {"project_name": "P", "group_size": 1, "settings": {"deterministic": True, "loss.kl": "none"}}
    whole = run(tmp_path, toy_model_dir, toy_dataset, steps=2, experiment_name="whole", **options)
    run(tmp_path, toy_model_dir, toy_dataset, steps=1, experiment_name="parts", **options)
    parts = run(tmp_path, toy_model_dir, toy_dataset, steps=2, experiment_name="parts", **options)
    critics = [checkpoint.load(result.model_dir).further["critic"] for result in (whole, parts)]
    assert all((tensor == critics[1][name]).all() for name, tensor in critics[0].items())
    assert rows(parts)[-1]["trainer/value_loss"] == rows(whole)[-1]["trainer/value_loss"]
    assert certify(parts.run_dir).holds


def test_kl_in_the_reward_and_an_adaptive_coefficient_in_a_run(tmp_path, toy_model_dir, toy_dataset):
    """A group method: the certificate recomputes the advantages before the penalty, and says so."""
    loss = {"loss.kl": "k2", "loss.kl_coef": 0.01, "loss.kl_in": "reward", "loss.kl_target": 0.1}
    settings = {**loss, "loss.kl_horizon": 32, "loss.behaviour": "truncated", "trainer.num_minibatches": 2}
    result = run(tmp_path, toy_model_dir, toy_dataset, algorithm="grpo", steps=3, settings=settings)
    steps = rows(result)
    # At the start nothing diverges: the error is held at -0.2, half a horizon of rollouts.
    assert [row["trainer/kl_coef"] for row in steps[:2]] == pytest.approx([0.01, 0.009])
    assert steps[0]["trainer/kl_penalty"] == pytest.approx(0.0, abs=1e-6)
    assert steps[-1]["trainer/kl_penalty"] > 0.0
    assert steps[0]["trainer/behaviour_weight_mean"] == pytest.approx(1.0, abs=1e-4)
    certificate = certify(result.run_dir)
    assert certificate.holds, certificate.problems
    exception, *_ = certificate.not_recomputed
    assert "KL penalty" in exception


def test_settings_of_a_critic_that_is_not_there_are_refused(tmp_path, toy_model_dir, toy_dataset):
    with pytest.raises(ConfigError, match="'grpo' has no critic"):
        run(tmp_path, toy_model_dir, toy_dataset, algorithm="grpo", settings={"critic.learning_rate": 1e-3})
