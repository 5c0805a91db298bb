"""Sizes of models: those of the models themselves, and by hand."""

import json
from pathlib import Path

import pytest
from plan_toys import FAMILIES, model_config, write_config
from transformers import AutoModelForCausalLM

from sharpen.config.trainer import LoraConfig
from sharpen.errors import ModelError
from sharpen.run.plan.sizes import read_model_config, sizes_of


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_real_model(family: str, tied: bool) -> None:
    config = model_config(family, tied=tied)
    model = AutoModelForCausalLM.from_config(config)
    sizes = sizes_of(config)
    assert sizes.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert sizes.tied == tied
    assert sizes.vocabulary == 500 * 64


def test_parameters_by_hand() -> None:
    """Llama, tied: embeddings 500 x 64; a block 64 x 64 twice (queries, output), 64 x 32 twice (keys, values), 64 x 160
    three times, two norms of 64; a last norm."""
    block_linear = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160
    sizes = sizes_of(model_config("llama"))
    assert sizes.block_linear == 3 * block_linear
    assert sizes.parameters == 500 * 64 + 3 * (block_linear + 2 * 64) + 64


def test_keys_and_values_by_hand() -> None:
    """2 (keys, values) x 3 layers x 2 heads x 16 numbers x 2 bytes = 384 bytes a position in bfloat16."""
    assert sizes_of(model_config()).kv_bytes(2) == 384
    assert sizes_of(model_config(head_dim=32)).kv_bytes(4) == 2 * 3 * 2 * 32 * 4


def test_adapters_by_hand_and_as_peft_makes_them() -> None:
    """Rank 8 on queries alone: 3 layers x 8 x (64 + 64)."""
    config, lora = model_config(), LoraConfig(rank=8)
    sizes = sizes_of(config)
    assert sizes.lora_parameters(LoraConfig(rank=8, target_modules=("q_proj",))) == 3 * 8 * (64 + 64)
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_config(config)
    names = sorted({name for name, _, _ in sizes.linears})
    peft.inject_adapter_in_model(peft.LoraConfig(r=8, target_modules=names, task_type="CAUSAL_LM"), model)
    adapters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert sizes.lora_parameters(lora) == adapters


def test_a_configuration_alone_is_enough(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", model_config())
    assert sizes_of(read_model_config(str(folder))).num_layers == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("{not json", "cannot be read"),
        (json.dumps({"model_type": "no such type"}), "cannot be read"),
        (json.dumps({"model_type": "t5"}), "encoder-decoder"),
        (json.dumps({"model_type": "clip"}), "'clip'"),
    ],
)
def test_a_model_that_cannot_be_read(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=said) as raised:
        read_model_config(str(tmp_path))
    assert str(tmp_path) in str(raised.value)
