"""ReMax from `tune()` to the certificate: a greedy rollout beside each group."""

import json
from statistics import fmean

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.cli.show import read_rollout
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.experience.reading import read_groups, read_trained


async def prefers_letter(task, model):
    """The reward is the share of the letter 'e' in the answer. It asks for noise, which a baseline does without."""
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": task["question"]}], max_tokens=8, temperature=1.0
    )
    return WorkflowOutput(reward=(reply.choices[0].message.content or "").count("e") / 8)


def test_remax_compares_with_the_greedy_rollout_and_learns(tmp_path, toy_model_dir, toy_dataset):
    result = tune(
        workflow_func=prefers_letter,
        train_dataset=DatasetConfig(path=str(toy_dataset), split="train", total_steps=18),
        model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=128, max_tokens=8),
        algorithm=AlgorithmConfig(algorithm_type="remax", group_size=4, batch_size=8, learning_rate=2e-2),
        settings={
            "checkpoint_root_dir": str(tmp_path),
            "rollout.failure_reward": 0.0,
            "check.enabled": False,
            "evaluation.before_and_after": False,
            "certificate.retrain": "off",
        },
    )
    rewards_by_step = [
        json.loads(line)["reward/mean"] for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    assert fmean(rewards_by_step[-4:]) > 3 * fmean(rewards_by_step[:4]), rewards_by_step
    journal = result.run_dir / "run.db"
    groups = {group.id: group for group in read_groups(journal)}
    assert len(groups) == 18 * 8
    for group in groups.values():
        assert len(group.rollouts) == 4
        assert group.baseline is not None
        assert all(call.sampling.temperature == 0 for call in group.baseline.calls)
    rewards = {rollout.id: rollout.reward for group in groups.values() for rollout in group.rollouts}
    trained = read_trained(journal)
    assert {call.rollout_id for call in trained} == set(rewards)
    assert all(
        call.advantage == rewards[call.rollout_id] - groups[call.group_id].baseline.reward for call in trained
    )  # eighths are exact
    some = next(iter(groups.values())).baseline
    assert read_rollout(journal, some.id)[1].reward == some.reward
    certificate = certify(result.run_dir)
    assert certificate.holds, certificate.problems
    assert all("no checkpoint" in line for line in certificate.not_recomputed)
