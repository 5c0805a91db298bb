"""What `check_family` finds: nothing in families of ours (all of them: `make test-models`), and faults in others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_checkpoint, make_config
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from sharpen.config.functions import PREPARED
from sharpen.errors import ConfigError
from sharpen.models.table import Family, bring, family_of
from sharpen.testing import check_family


class ByPlaceConfig(LlamaConfig):
    """Of a model that is wrong in a cache and in a pack."""

    model_type = "by_place"


class ByPlaceForCausalLM(LlamaForCausalLM):
    """Looks at a token's place in the pass, which is its position in a whole sequence alone."""

    config_class = ByPlaceConfig

    def __init__(self, config: ByPlaceConfig) -> None:
        super().__init__(config)
        self.model.embed_tokens.register_forward_hook(
            lambda _, __, hidden: hidden + torch.linspace(0, 1, hidden.shape[1])[:, None]
        )


AutoConfig.register("by_place", ByPlaceConfig, exist_ok=True)
AutoModelForCausalLM.register(ByPlaceConfig, ByPlaceForCausalLM, exist_ok=True)
BY_PLACE = Family(name="By place", types=("by_place",))
NO_FAMILY = "by_place"


@pytest.mark.parametrize("kind", ["qwen3", "lfm2"])
def test_families_of_ours_keep_the_contract(kind: str, tmp_path: Path) -> None:
    check_family(family_of(make_config(kind)), make_checkpoint(kind, tmp_path))


def test_what_a_row_does_not_say_is_told(tmp_path: Path) -> None:
    folder = make_checkpoint("gemma2", tmp_path)
    gemma2 = family_of(make_config("gemma2"))
    with pytest.raises(AssertionError, match="shows soft-capped attention logits, which `needs` of Gemma 2 lacks"):
        check_family(replace(gemma2, needs=frozenset()), folder)
    with pytest.raises(AssertionError, match="has the model type 'gemma2', which Qwen3 does not name"):
        check_family(family_of(make_config("qwen3")), folder)
    with pytest.raises(AssertionError, match="is known as Gemma 2, not as Mine: name it in `families`"):
        check_family(replace(gemma2, name="Mine"), folder)


def test_a_model_that_is_computed_otherwise_in_parts_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    """The engine's own comparison at its start finds it."""
    monkeypatch.setenv(PREPARED, "[]")
    bring(f"{__name__}:BY_PLACE")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    ByPlaceForCausalLM(ByPlaceConfig(vocab_size=64, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(AssertionError, match=r"the embedded engine: .*logits differ from the model's own"):
        check_family(BY_PLACE, tmp_path)


def test_what_is_no_family_or_one_of_ours_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"families has .*:NO_FAMILY', which is 'by_place': it must be a Family"):
        bring(f"{__name__}:NO_FAMILY")
    with pytest.raises(ConfigError, match=r"whose model type 'qwen3' is one of Qwen3$"):
        bring(f"{__name__}:TAKEN")


TAKEN = replace(BY_PLACE, types=("mine", "qwen3"))
