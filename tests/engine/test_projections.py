"""Fused linear layers: the same numbers as one by one, with adapters and biases, by rows and by columns."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from toy_engines import make_engine, make_model, prompt_of, request, run_all, scored

from sharpen.config.trainer import LoraConfig
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.engine.embedded.forward import FastForward, GenericForward
from sharpen.engine.embedded.matmul import are_columns_faster
from sharpen.engine.embedded.projections import Projection
from sharpen.models.adapters import adapted_layers, add_adapters, load_adapters


def adapters_of(model: object, seed: int) -> dict[str, torch.Tensor]:
    """Random adapters by the names of peft's files."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"base_model.model.{name}.{part}.weight": torch.randn(
            getattr(layer, part)["default"].weight.shape, generator=generator
        )
        * 0.3
        for name, layer in adapted_layers(model).items()
        for part in ("lora_A", "lora_B")
    }


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])  # with biases, without
@pytest.mark.parametrize("targets", [None, ["q_proj", "v_proj", "up_proj"]])
def test_fused_layers_with_adapters_compute_what_the_layers_do(family: str, targets: list[str] | None) -> None:
    """Adapters that are loaded later, too. Red when the adapters do not become views of the fused ones."""
    model = make_model(family)
    add_adapters(model, LoraConfig(rank=3, alpha=6, target_modules=targets))
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    groups = [[attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]
    fused = [Projection(group) for group in groups]
    load_adapters(model, adapters_of(model, 1))
    for layers, projection in zip(groups, fused, strict=True):
        x = torch.randn(5, layers[0].in_features)
        with torch.no_grad():
            expected = torch.cat([layer(x) for layer in layers], dim=-1)
            torch.testing.assert_close(projection.rows(x), expected)
            torch.testing.assert_close(projection.columns(x.t()).t(), expected)


def test_adapters_are_served_by_the_fast_forward_pass_and_follow_a_load() -> None:
    lora = LoraConfig(rank=3, alpha=6, base="shared")
    engine, model = make_engine(make_model("qwen2"), adapters=lora), make_model("qwen2")
    assert isinstance(engine._stepper._forward, FastForward)
    add_adapters(model, lora)
    for version in (1, 2):
        load_adapters(model, adapters_of(model, version))
        asyncio.run(engine.load(version, adapters_of(model, version)))
        (generation,) = run_all(engine, [request(prompt_of(20, 4), max_tokens=12)])
        expected = scored(model, prompt_of(20, 4), generation)
        torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=1e-4, rtol=0)


def test_the_deterministic_mode_computes_adapters_as_before() -> None:
    engine = make_engine(make_model("qwen3"), adapters=LoraConfig(rank=3, base="shared"), deterministic=True)
    assert isinstance(engine._stepper._forward, GenericForward)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_step_in_columns_gives_the_models_own_logprobs(family: str) -> None:
    """32 rows decode at once. Red when the output layer's logits are not turned back."""
    engine, model = make_engine(make_model(family), max_slots=32), make_model(family)
    engine._stepper._forward._columns_faster = True
    prompts = [prompt_of(6, seed) for seed in range(32)]
    for prompt, generation in zip(prompts, run_all(engine, [request(prompt) for prompt in prompts]), strict=True):
        torch.testing.assert_close(
            torch.tensor(generation.logprobs), scored(model, prompt, generation), atol=1e-4, rtol=0
        )


def test_products_in_fp32_stay_as_they_are() -> None:
    assert not are_columns_faster(torch.zeros(2048, 1024))
    assert not are_columns_faster(torch.zeros(64, 32, dtype=torch.bfloat16))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="mapped files are not listed")
def test_no_file_stays_mapped_beside_the_stacked_weights(tmp_path: Path) -> None:
    """Red when a weight that is not stacked remains a part of the file, which then stays whole in memory."""
    make_model("qwen3").save_pretrained(tmp_path)
    engine = EmbeddedEngine.from_pretrained(str(tmp_path), max_model_len=64, device="cpu")
    assert isinstance(engine._stepper._forward, FastForward)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
