"""Models that are refused before a weight is read, by every part that could load one (TRAPS 30)."""

from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma3Config,
    LlavaConfig,
    MixtralConfig,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from sharpen.config.architectures import refuse_architecture
from sharpen.errors import ModelError
from sharpen.inference.embedded.engine import EmbeddedEngine
from sharpen.inference.vllm.start import read_skeleton
from sharpen.trainer.model import TrainedModel

SEES = (Qwen2VLConfig, Gemma3Config, LlavaConfig)
ROUTES = (MixtralConfig, Qwen3MoeConfig)


@pytest.mark.parametrize("kind", SEES)
def test_models_that_see_are_refused(kind):
    with pytest.raises(ModelError, match=r"vision-language models.* not supported yet"):
        refuse_architecture(kind(), "m")


@pytest.mark.parametrize("kind", ROUTES)
def test_trap_30_models_with_experts_are_refused(kind):
    """Break: drop a field from `_EXPERTS`."""
    with pytest.raises(ModelError, match=r"^m routes tokens to experts .num_\w*experts=\d+."):
        refuse_architecture(kind(), "m")


def test_text_models_are_not():
    refuse_architecture(Qwen3Config(), "m")


def load_engine(folder: Path) -> None:
    EmbeddedEngine.from_pretrained(str(folder), max_model_len=64)


def load_vllm(folder: Path) -> None:
    read_skeleton(str(folder), 64)


def load_trainer(folder: Path) -> None:
    TrainedModel.load(folder, dtype="float32", device=torch.device("cpu"))


@pytest.mark.parametrize("load", [load_engine, load_vllm, load_trainer])
@pytest.mark.parametrize(("kind", "says"), [(Qwen2VLConfig, "vision-language"), (Qwen3MoeConfig, "experts")])
def test_trap_30_engines_and_trainer_refuse_them_by_the_configuration_alone(tmp_path, load, kind, says):
    """There is not one weight in the folder. Break: drop `refuse_architecture` from one of the three."""
    kind().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=says):
        load(tmp_path)
