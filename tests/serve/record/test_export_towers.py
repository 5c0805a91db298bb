"""A trained model with towers on the hub: they arrive byte for byte, and transformers loads what was uploaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_hub import TOKEN, fake_hub
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint, tensors_of
from trainer_toys import Batch, make_experiences, record
from transformers import AutoModelForImageTextToText

from sharpen.config.run import LossConfig
from sharpen.config.trainer import LoraConfig, TrainerConfig
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.trainer.roles import TrainerPlan
from sharpen.learning.trainer.trainer import Trainer
from sharpen.models.modules import text_parameters
from sharpen.serve.record.model_export import to_hub


def plain(folder: Path):
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def trained(source: Path, folder: Path, lora: LoraConfig | None) -> Trainer:
    """A trainer after one step, saved in `folder`."""
    plan = TrainerPlan(
        model_path=source,
        algorithm=resolve("grpo", LossConfig(kl="none"), 8),
        config=TrainerConfig(lora=lora),
        learning_rate=0.01,
        planned_updates=8,
    )
    trainer = Trainer.load(plan, "cpu")
    trainer.train_step([Batch(experiences=tuple(record(plain(source), make_experiences())))])
    trainer.save(folder, {"step": 1})
    return trainer


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["full", "merged lora"])
def test_towers_arrive_byte_for_byte(tmp_path: Path, lora: LoraConfig | None) -> None:
    """Red when `write_checkpoint` writes them from the module, in fp32."""
    source = make_checkpoint("gemma3", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    towers = {name for name in tensors if "vision" in name or "projector" in name}
    save_file(
        {name: tensor.bfloat16() if name in towers else tensor for name, tensor in tensors.items()},
        source / "model.safetensors",
        metadata={"format": "pt"},
    )
    trainer = trained(source, tmp_path / "global_step_1", lora)
    with fake_hub(large=".none") as hub:
        to_hub(tmp_path / "global_step_1", "me/model", HfApi(hub.address, TOKEN))
        assert not any(name.startswith("trainer_state") for name in hub.files)
        arrived = tmp_path / "arrived"
        arrived.mkdir()
        for name, content in hub.files.items():
            if "/" not in name:
                (arrived / name).write_bytes(content)
    before, after = tensors_of(source), tensors_of(arrived)
    assert after.keys() == before.keys()
    assert len(towers) > 5
    for name in towers:
        assert after[name].dtype == torch.bfloat16
        assert after[name].view(torch.uint8).equal(before[name].view(torch.uint8)), name
    state = trainer.policy.state_tensors()
    for name, parameter in text_parameters(plain(arrived)):
        torch.testing.assert_close(parameter, state[name], atol=1e-6, rtol=0)
    assert any(not after[name].equal(before[name]) for name in before.keys() - towers)
