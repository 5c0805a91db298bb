"""Runs with adapters on the toy model: rewards rise, engine and trainer agree, a stopped run goes on."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.errors import ConfigError
from sharpen.evidence.certificate.certify import certify

ALL = "LoRA: adapters of rank 16"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, toy_model_dir) -> Path:
    """The toy model with a larger last norm: beneath frozen embeddings its logits could otherwise not leave zero."""
    folder = tmp_path_factory.mktemp("lora") / "model"
    shutil.copytree(toy_model_dir, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight.mul_(8)
    model.save_pretrained(folder)
    return folder


async def prefers_vowels(task, model):
    """One call; the reward is the share of vowels in the answer."""
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": task["question"]}], max_tokens=8, stop=["\n\n"]
    )
    text = reply.choices[0].message.content or ""
    return WorkflowOutput(reward=sum(letter in "aeiou" for letter in text) / 8)


def run(folder: Path, model: Path, dataset: Path, *, algorithm="grpo", steps=10, settings=None, **options):
    return tune(
        workflow_func=prefers_vowels,
        train_dataset=DatasetConfig(path=str(dataset), split="train", total_steps=steps),
        eval_dataset=DatasetConfig(path=str(dataset), split="test"),
        model=TunerModelConfig(model_path=str(model), max_model_len=128, max_tokens=8),
        algorithm=AlgorithmConfig(algorithm_type=algorithm, group_size=8, batch_size=4, learning_rate=5e-3),
        settings={
            "checkpoint_root_dir": str(folder),
            "rollout.failure_reward": 0.0,
            "trainer.lora.rank": 16,
            "certificate.retrain": "off",
            **(settings or {}),
        },
        **options,
    )


def rows(result):
    return [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]


def test_grpo_learns_with_adapters_and_engine_and_certificate_agree(tmp_path, model_dir, toy_dataset, capsys):
    """With KL (the preset's): the reference is the policy without its adapters, so the first divergence is 0."""
    result = run(tmp_path, model_dir, toy_dataset)
    assert ALL in capsys.readouterr().out
    before, after = sum(result.rewards_before.sampled.values()), sum(result.rewards_after.sampled.values())
    assert after > before + 3.0, (before, after)
    steps = [row for row in rows(result) if "trainer/logprob_gap_max" in row]
    assert len(steps) == 10
    assert max(row["trainer/logprob_gap_max"] for row in steps) < 1e-4
    assert abs(steps[0]["trainer/kl_loss"]) < 1e-9 < steps[-1]["trainer/kl_loss"]
    assert certify(result.run_dir).holds, "recomputed with the adapters of the checkpoint"
    merged = AutoModelForCausalLM.from_pretrained(result.model_dir).state_dict()
    first = AutoModelForCausalLM.from_pretrained(model_dir).state_dict()
    changed = {name for name, tensor in merged.items() if not torch.equal(tensor, first[name])}
    assert changed == {name for name in first if name.endswith("_proj.weight")}
    assert (result.model_dir / "adapter" / "adapter_model.safetensors").stat().st_size > 0


QUIET = {"evaluation.before_and_after": False, "check.enabled": False}


def test_a_run_in_two_sessions_goes_on_with_its_adapters_and_refuses_others(tmp_path, model_dir, toy_dataset):
    whole = run(tmp_path / "a", model_dir, toy_dataset, steps=2, settings={**QUIET, "deterministic": True})
    parts = {"settings": {**QUIET, "deterministic": True}, "experiment_name": "parts"}
    run(tmp_path / "b", model_dir, toy_dataset, steps=1, **parts)
    with pytest.raises(ConfigError, match=r"trainer\.lora\.rank: 16 -> 8"):
        run(
            tmp_path / "b",
            model_dir,
            toy_dataset,
            steps=3,
            experiment_name="parts",
            settings={**QUIET, "deterministic": True, "trainer.lora.rank": 8},
        )
    result = run(tmp_path / "b", model_dir, toy_dataset, steps=2, **parts)
    expected = AutoModelForCausalLM.from_pretrained(whole.model_dir).state_dict()
    found = AutoModelForCausalLM.from_pretrained(result.model_dir).state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_ppo_has_adapters_and_a_whole_critic(tmp_path, model_dir, toy_dataset):
    settings = {**QUIET, "critic.learning_rate": 5e-3}
    result = run(tmp_path, model_dir, toy_dataset, algorithm="ppo", steps=2, settings=settings)
    assert len([row for row in rows(result) if "trainer/value_loss" in row]) == 2
    from safetensors.torch import load_file

    critic = load_file(result.model_dir / "trainer_state" / "critic.safetensors")
    assert "value_head.weight" in critic
    assert not any("lora" in name for name in critic)
    adapters = load_file(result.model_dir / "trainer_state" / "weights.safetensors")
    assert all("lora" in name for name in adapters)


TAUGHT = {
    "sft": [{"prompt": f"question {i}", "response": "yes yes"} for i in range(8)],
    "dpo": [{"prompt": f"question {i}", "chosen": "yes", "rejected": "no no"} for i in range(8)],
}


@pytest.mark.parametrize("algorithm", TAUGHT)
def test_sft_and_dpo_learn_with_adapters(tmp_path, model_dir, algorithm, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in TAUGHT[algorithm]))
    result = tune(
        train_dataset=DatasetConfig(path=str(path), total_steps=12),
        eval_dataset=DatasetConfig(path=str(path)),
        model=TunerModelConfig(model_path=str(model_dir), max_model_len=64),
        algorithm=AlgorithmConfig(algorithm_type=algorithm, batch_size=8, learning_rate=1e-2),
        settings={"checkpoint_root_dir": str(tmp_path), "trainer.lora": {}, "certificate.retrain": "off"},
    )
    assert ALL in capsys.readouterr().out
    if algorithm == "dpo":
        assert result.loss_before == pytest.approx(0.6931, abs=1e-4), "the reference is the model before training"
    assert result.loss_after < 0.7 * result.loss_before
    assert AutoModelForCausalLM.from_pretrained(result.model_dir).config.vocab_size
    assert (result.model_dir / "adapter" / "adapter_config.json").exists()


def test_layers_that_are_not_there_stop_the_run_before_training(tmp_path, model_dir, toy_dataset):
    with pytest.raises(ConfigError, match=r"target_modules names query_key_value, but .* are down_proj"):
        run(
            tmp_path,
            model_dir,
            toy_dataset,
            settings={**QUIET, "trainer.lora.target_modules": ["query_key_value"]},
        )


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_a_peft_that_is_too_old_is_refused_before_anything_is_made(
    tmp_path, model_dir, toy_dataset, algorithm, monkeypatch
):
    old = tmp_path / "site" / "peft-0.17.1.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 0.17.1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(ConfigError, match=r"trainer\.lora needs peft"):
        run(tmp_path / "runs", model_dir, toy_dataset, algorithm=algorithm)
    assert not (tmp_path / "runs").exists()
