"""The checks at start see a wrong sliding window, though their few tokens are fewer than a window has."""

import copy

import pytest
import torch
import toy_engines
from expert_toys import make_experts
from trainer_toys import make_model

from sharpen.errors import ModelError
from sharpen.learning.trainer.model import TrainedModel
from sharpen.models.windows import SHORT_WINDOW, short_windows


def windows_of(model):
    return [layer.self_attn.sliding_window for layer in model.model.layers], model.config.sliding_window


def test_windows_are_short_inside_the_block_only():
    """Layers without a window stay without one."""
    model = toy_engines.make_model("gemma2")
    before = windows_of(model)
    assert None in before[0]
    with short_windows(model):
        assert windows_of(model) == ([window and SHORT_WINDOW for window in before[0]], SHORT_WINDOW)
    assert windows_of(model) == before


def test_chunks_and_steps_of_scales_are_short_too():
    """Break: leave one of them out of `_LENGTHS`: the checks would not see that one is not computed."""
    model = make_experts("llama4_text")
    model.config.attention_chunk_size = 8192
    with short_windows(model):
        assert model.config.attention_chunk_size == SHORT_WINDOW
        assert {layer.self_attn.floor_scale for layer in model.model.layers} == {SHORT_WINDOW}
    assert model.config.attention_chunk_size == 8192
    assert {layer.self_attn.floor_scale for layer in model.model.layers} == {7}


def with_a_wrong_window(model):
    """A layer that tells its attention of no window, where the model's own mask has one of 24 tokens."""
    layer = next(layer for layer in model.model.layers if layer.self_attn.sliding_window)
    layer.self_attn.sliding_window = None
    return model


def test_the_engine_refuses_a_wrong_window():
    """Break: no `short_windows` in the engine's check: its 12 tokens fit a window of 24."""
    toy_engines.make_engine(toy_engines.make_model("gemma2"))
    with pytest.raises(ModelError, match="differ"):
        toy_engines.make_engine(with_a_wrong_window(toy_engines.make_model("gemma2")))


def test_the_trainer_refuses_a_wrong_window():
    """Break: no `short_windows` around the trainer's probe."""
    model = toy_engines.make_model("gemma2")
    TrainedModel(copy.deepcopy(model), compute_dtype=torch.float32)
    with pytest.raises(ModelError, match="gemma2"):
        TrainedModel(with_a_wrong_window(model), compute_dtype=torch.float32)


def test_a_window_of_the_configuration_alone_is_short_too():
    """Mistral's layers read it there."""
    model = make_model("mistral")
    with short_windows(model):
        assert model.config.sliding_window == SHORT_WINDOW
    assert model.config.sliding_window == 9
