"""Models with recurrent and convolution layers through the whole line: sampled, trained, saved, certified."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hybrid_toys import HYBRIDS
from trainer_toys import SIZES
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.trainer.checkpoint import pointed


async def two_calls(task, model):
    """The second call goes on with the first one's answer. The reward is the share of the letter 'e' in both."""
    messages, text = [{"role": "user", "content": task["question"]}], ""
    for _ in range(2):
        reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=6)
        said = reply.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "again"}]
        text += said
    return WorkflowOutput(reward=text.count("e") / 12)


def make_model(folder: Path, toy_model_dir: Path, family: str) -> Path:
    """A random model of the family with the shared toy tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(toy_model_dir)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**SIZES, **HYBRIDS[family], **ends, "vocab_size": len(tokenizer)})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shutil.copy(toy_model_dir / "generation_config.json", folder)
    return folder


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_a_hybrid_model_is_trained_on_what_it_said(tmp_path, toy_model_dir, toy_dataset, family):
    """The logprobs of engine and trainer agree in each step, also after weights have been loaded."""
    model_dir = make_model(tmp_path / "model", toy_model_dir, family)
    result = tune(
        workflow_func=two_calls,
        train_dataset=DatasetConfig(path=str(toy_dataset), split="train", total_steps=2),
        model=TunerModelConfig(model_path=str(model_dir), max_model_len=256, max_tokens=8),
        algorithm=AlgorithmConfig(group_size=3, batch_size=2, learning_rate=1e-2, save_interval_steps=2),
        project_name="P",
        experiment_name="fixed",
        settings={
            "checkpoint_root_dir": str(tmp_path / "runs"),
            "evaluation.before_and_after": False,
            "check.enabled": False,
        },
    )
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "rollout/count" in row]
    assert len(steps) == 2
    for step in steps:
        assert step["trainer/logprob_gap_tokens"] > 0
        assert step["trainer/logprob_gap_max"] < 1e-4
    assert certify(result.run_dir).holds
    before, after = (
        dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
        for folder in (model_dir, pointed(result.run_dir, "latest"))
    )
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("conv" in name for name in moved)
