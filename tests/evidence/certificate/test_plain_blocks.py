"""A plain model that is read block by block: the same numbers, and no more in memory than a block."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_toys import make_hybrid
from trainer_toys import make_model
from transformers import LlamaConfig, LlamaForCausalLM

from sharpen.evidence.certificate.plain.blocks import _ROWS, Files
from sharpen.evidence.certificate.plain.model import PlainModel, PlainSequence

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma")
HYBRIDS = ("qwen3_5_text", "lfm2", "bamba")
TENSORS = ("embed_tokens", "layers.0.", "norm")


def a_sequence(start: int, length: int) -> PlainSequence:
    """Ids in a row, of which the last three carry loss."""
    return PlainSequence(
        owner="a",
        ids_T=torch.arange(start, start + length),
        places_S=torch.arange(length - 3, length),
        recorded_S=torch.zeros(3),
        weights_S=torch.ones(3),
    )


def computed(
    folder: Path, *, by_blocks: bool, trained: tuple[str, ...], kind: Any = PlainModel, together: bool = True
) -> tuple[list[torch.Tensor], Any]:
    """Logprobs of two sequences and the gradients of their sum; computed `together` or each by itself."""
    model = kind(folder, rounded=False, dtype=torch.float64, adapter_scale=None, by_blocks=by_blocks)
    own = {name: one for name, one in model.module.named_parameters() if any(part in name for part in trained)}
    weights = {name: one.detach().double().requires_grad_() for name, one in own.items()}
    two = [a_sequence(10, 12), a_sequence(20, 7)]
    groups = model.groups(two) if together else [[one] for one in two]
    assert len(groups) == (1 if together else 2)
    found = [one_S for some in groups for one_S, _ in model.logprobs(some, weights)]
    torch.cat(found).sum().backward()
    return [*found, *(one.grad for one in weights.values() if one.grad is not None)], model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_block_by_block_a_model_computes_what_it_computes_whole(family, dtype, tmp_path):
    """Two sequences of different lengths at once, beside each by itself. Red when padding is before the tokens, or when
    buffers are in the type of the files. Some families compute parts in float32, whatever the rest is in."""
    model = make_hybrid(family) if family in HYBRIDS else make_model(family, torch.float32)
    model.to(dtype).save_pretrained(tmp_path)
    for trained in (TENSORS, ("layers.1.",)):
        alone, _ = computed(tmp_path, by_blocks=False, trained=trained, together=False)
        whole, _ = computed(tmp_path, by_blocks=False, trained=trained)
        parts, read = computed(tmp_path, by_blocks=True, trained=trained)
        assert not read.is_whole
        assert len(alone) == len(whole) == len(parts) > 2
        for one, *others in zip(alone, whole, parts, strict=True):
            assert all((one - other).norm() <= 1e-6 * one.norm() for other in others)


def test_the_logits_of_a_large_vocabulary_come_in_parts(tmp_path):
    """Red when the last rows are left out."""
    config = LlamaConfig(
        vocab_size=_ROWS + 100, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    whole, _ = computed(tmp_path, by_blocks=False, trained=("layers.0.",))
    parts, _ = computed(tmp_path, by_blocks=True, trained=("layers.0.",))
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


class Watched(PlainModel):
    """Notes what is made of each block's weights, and of how many blocks there are weights at once."""

    def _made(self, name, own, of_pass):
        weight = super()._made(name, own, of_pass)
        if "layers" in name:
            self.made = [*getattr(self, "made", []), (name.split(".")[2], weakref.ref(weight))]
            self.most = max(getattr(self, "most", 0), len({block for block, one in self.made if one() is not None}))
        return weight


def test_a_blocks_weights_are_there_only_while_it_computes(tmp_path):
    """In the backward pass, too, for which they are made again. Red when it keeps what the forward pass made."""
    make_model("qwen3", torch.float32).to(torch.bfloat16).save_pretrained(tmp_path)
    _, model = computed(tmp_path, by_blocks=True, trained=("embed_tokens",), kind=Watched)
    assert {block for block, _ in model.made} == {"0", "1"}
    assert model.most == 1
    num_weights = sum("layers" in name for name, _ in model.module.named_parameters())
    assert len(model.made) == 2 * num_weights
    assert not any(one() is not None for _, one in model.made)


def test_a_file_of_several_types_or_other_names_is_loaded_whole(tmp_path):
    model = make_model("llama", torch.float32).to(torch.bfloat16)
    model.model.norm.float()
    model.save_pretrained(tmp_path)
    assert Files(tmp_path).dtype is None
    assert PlainModel(tmp_path, rounded=False, dtype=torch.float64, adapter_scale=None, by_blocks=True).is_whole
