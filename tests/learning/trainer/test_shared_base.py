"""Frozen weights that trainer and engine have in common, whole or in 4 bits, with adapters beside them."""

import asyncio
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from bitsandbytes.functional import quantize_4bit
from safetensors.torch import save_file
from torch import nn
from trainer_toys import make_model, plain_copy
from transformers import AutoModelForCausalLM, Qwen3Config

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.config.run import EngineConfig, RunConfig
from sharpen.config.trainer import LoraConfig, TrainerConfig
from sharpen.contracts import GenerateRequest
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.errors import ConfigError, ModelError
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.recipe import EngineChoice
from sharpen.learning.trainer.checkpoint import pointed
from sharpen.learning.trainer.lora import AdaptedModel, adapters_line, load_trained
from sharpen.models.adapters import adapted_layers, add_adapters
from sharpen.models.configuration import read_config
from sharpen.models.frozen import is_plain, load_frozen
from sharpen.models.modules import load_module, skeleton
from sharpen.models.nf4 import NF4Linear
from sharpen.placement.trainers import publish_unmerged_adapters, served_parts
from sharpen.run.decide import check_base, served_adapters
from sharpen.types import Sampling

BASES = ("shared", "nf4")
PEAK = """
import re, sys
import bitsandbytes.functional, peft
from pathlib import Path
from sharpen.config.trainer import LoraConfig
from sharpen.models.configuration import read_config
from sharpen.models.frozen import load_frozen
config = read_config(Path(sys.argv[1]))
def most() -> str: return re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]
before = most()
load_frozen(sys.argv[1], config, config.dtype, "cpu", LoraConfig(rank=4, base="nf4"))
print(before, most())
"""
EMBEDDED, VLLM = EngineChoice(type="embedded", reason=""), EngineChoice(type="vllm", reason="")


def test_a_layer_in_4_bits_computes_with_the_rounded_weight_and_lets_gradients_through():
    torch.manual_seed(0)
    layer = nn.Linear(64, 96)
    small = NF4Linear(layer)
    x = torch.randn(5, 64, requires_grad=True)
    small(x).square().sum().backward()
    rounded = small.whole()
    expected = torch.nn.functional.linear(x.detach(), rounded, layer.bias).requires_grad_()
    torch.testing.assert_close(small(x), expected)
    torch.testing.assert_close(x.grad, 2 * expected.detach() @ rounded)
    assert small.weight.grad is None
    error = (rounded - layer.weight).abs().max() / layer.weight.abs().max()
    assert 0.01 < error.item() < 0.16  # half of the widest gap between the sixteen values
    assert small.num_bytes / layer.weight.numel() < 0.54
    assert len({float(value) for value in (rounded[0] / rounded[0].abs().max()).unique()}) <= 16


@pytest.mark.parametrize("width", [31, 32, 80, 96, 128])
def test_a_row_of_any_width_is_rounded_by_its_own_scales(width):
    """Each weight moves by at most half of the widest gap (0.152 of the largest of its block, whose scale in 8 bits is
    off by some percent). Red where blocks span two rows: the kernel took the scales of other blocks."""
    torch.manual_seed(0)
    layer = nn.Linear(width, 48)
    with torch.no_grad():
        layer.weight *= torch.linspace(0.2, 2.0, 48)[:, None]
    small = NF4Linear(layer)
    largest = layer.weight.abs().amax(1, keepdim=True)
    assert ((small.whole() - layer.weight).abs() / largest).max().item() < 0.2
    x = torch.randn(3, width)
    torch.testing.assert_close(small(x), nn.functional.linear(x, small.whole(), layer.bias))


@pytest.mark.parametrize(("outputs", "width"), [(3, 64), (700, 1000), (2, 2**18 + 64)])
def test_a_layer_is_rounded_in_parts_as_bitsandbytes_rounds_it_whole(outputs, width):
    """To the last bit. Red when scales are compressed part by part."""
    torch.manual_seed(0)
    layer = nn.Linear(width, outputs, bias=False).to(torch.bfloat16)
    small, padded = NF4Linear(layer), nn.functional.pad(layer.weight.detach(), (0, -width % 64))
    packed, state = quantize_4bit(padded, blocksize=64, quant_type="nf4", compress_statistics=True)
    torch.testing.assert_close(small.weight.data, packed, rtol=0, atol=0)
    for name, tensor in state.as_dict(packed=True).items():
        torch.testing.assert_close(small.state.as_dict(packed=True)[name], tensor, rtol=0, atol=0)


def test_a_layer_in_4_bits_computes_in_autocasts_type():
    small, x = NF4Linear(nn.Linear(64, 64)), torch.randn(3, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert small(x).dtype == torch.bfloat16
    assert small(x).dtype == torch.float32


class Pair:
    """A trainer's policy and an engine over one base."""

    def __init__(self, base: str) -> None:
        lora = LoraConfig(rank=3, alpha=6, base=base)
        torch.manual_seed(1)
        self.policy = AdaptedModel(make_model("qwen3", torch.float32), lora=lora, compute_dtype=torch.float32)
        self.engine = EmbeddedEngine(make_model("qwen3", torch.float32), max_model_len=64, kv_cache_mb=8, adapters=lora)

    def publish(self, version: int) -> None:
        asyncio.run(self.engine.load(version, self.policy.state_tensors()))

    def generation(self):
        request = GenerateRequest(
            prompt_ids=np.arange(3, 20, dtype=np.int32), noise=7, sampling=Sampling(max_tokens=12, temperature=1.0)
        )

        async def sampled():
            return await self.engine.generate(request)

        return request.prompt_ids, asyncio.run(sampled())


class Holder:
    """What `publish_unmerged_adapters` takes for a trainer."""

    def __init__(self, policy: AdaptedModel) -> None:
        self.policy = policy


def logprobs_of(module, prompt_ids, generation) -> torch.Tensor:
    ids = torch.from_numpy(np.concatenate([prompt_ids, generation.ids])).long()
    with torch.no_grad():
        logits = module(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
    at = torch.arange(len(prompt_ids) - 1, len(ids) - 1)
    return logits[at, ids[at + 1]]


@pytest.mark.parametrize("base", BASES)
def test_all_frozen_weights_are_counted(base):
    """Red when a byte, which holds two of them, counts as one."""
    policy = Pair(base).policy
    layers = sum(layer.in_features * layer.out_features for layer in policy._layers.values())
    said, _, apart = adapters_line(policy).partition(" frozen ones")
    frozen = int(said.rpartition(" on ")[2].replace(",", ""))
    assert frozen == sum(one.numel() for one in make_model("qwen3", torch.float32).parameters())
    assert apart == (f", {layers:,} of them in 4 bits" if base == "nf4" else "")


@pytest.mark.parametrize("base", BASES)
def test_the_base_exists_once_and_the_engine_serves_the_new_adapters(base):
    """The engine's logprobs are those of the merged model, before and after an update. Red when `load` keeps the old
    adapters, when the base is not shared, when merging takes the packed weight."""
    pair = Pair(base)
    assert publish_unmerged_adapters(pair.engine, Holder(pair.policy))
    served = pair.engine.adapted_layers()
    for name, layer in pair.policy._layers.items():
        assert layer.base_layer is served[name].base_layer
        assert isinstance(layer.base_layer, NF4Linear) == (base == "nf4")
    mine, engines = pair.policy.module.get_input_embeddings().weight, pair.engine.weights()
    assert mine.data_ptr() == engines["model.embed_tokens.weight"].data_ptr()
    said = []
    for version in (1, 2):
        with torch.no_grad():
            for name, parameter in pair.policy.parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.3)
        pair.publish(version)
        prompt_ids, generation = pair.generation()
        twin = plain_copy(make_model("qwen3", torch.float32))
        merged = dict(pair.policy.merge_adapters(pair.policy.module.named_parameters()))
        twin.load_state_dict({name: tensor.detach() for name, tensor in merged.items()}, strict=False)
        expected = logprobs_of(twin, prompt_ids, generation)
        np.testing.assert_allclose(generation.logprobs, expected.numpy(), atol=1e-4)
        said.append(tuple(generation.ids))
    assert said[0] != said[1]


@pytest.mark.parametrize("base", BASES)
def test_a_trainer_takes_what_the_engine_has_in_place_of_reading_it_again(base, tmp_path):
    """The same policy as one that reads the files, to the last bit. Red when weights are copied, or left to chance, or
    layers in 4 bits are made anew."""
    make_model("qwen3", torch.bfloat16).save_pretrained(tmp_path)
    lora = LoraConfig(rank=3, base=base)
    engine = EmbeddedEngine.from_pretrained(
        str(tmp_path), max_model_len=64, kv_cache_mb=8, dtype="bfloat16", device="cpu", adapters=lora
    )
    settings = TrainerConfig(lora=lora, dtype="bfloat16")
    policies = []
    for served in (served_parts(engine), None):
        torch.manual_seed(3)
        policies.append(load_trained(tmp_path, settings, torch.device("cpu"), served))
    taken, read = ({name: own.data for name, own in policy.module.named_parameters()} for policy in policies)
    assert taken.keys() == read.keys()
    for name, own in taken.items():
        torch.testing.assert_close(own, read[name], rtol=0, atol=0)
    parts = served_parts(engine)
    engines = {own.data_ptr() for own in (*parts.weights.values(), *(one.weight for one in parts.in_4_bits.values()))}
    shared = {name for name, own in taken.items() if own.data_ptr() in engines}
    assert shared == {name for name, own in taken.items() if own.dtype in (torch.bfloat16, torch.uint8)}
    for name, layer in policies[0]._layers.items():
        assert (layer.base_layer is parts.in_4_bits.get(name)) == (base == "nf4")
    for policy in policies:  # a checkpoint takes files from there
        assert policy.module.name_or_path == policy.module.config._name_or_path == str(tmp_path)
        assert policy.module.config.dtype == torch.bfloat16
        assert not policy.module.training
    assert served_parts(None) is None


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_put_into_4_bits_as_they_are_read_are_those_of_a_model_that_was_read_whole(family, dtype, tmp_path):
    """Biases, tied and own output layers, files in another type: every tensor to the last bit. Red when a layer's bias
    is lost, when it is rounded in the files' type, when an output layer is quantized."""
    make_model(family, torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    lora, config = LoraConfig(rank=3, base="nf4"), read_config(tmp_path)
    found = []
    read_whole = load_module(tmp_path, config, dtype, "cpu")
    for module in (load_frozen(tmp_path, config, dtype, "cpu", lora), read_whole):
        torch.manual_seed(3)
        add_adapters(module, lora)
        found.append(module)
    by_layers, whole = ({name: one.detach() for name, one in module.named_parameters()} for module in found)
    assert by_layers.keys() == whole.keys()
    for name, one in by_layers.items():
        torch.testing.assert_close(one, whole[name], rtol=0, atol=0)
    for mine, other in zip(*(adapted_layers(module).values() for module in found), strict=True):
        assert isinstance(mine.base_layer, NF4Linear)
        torch.testing.assert_close(mine.base_layer.whole(), other.base_layer.whole(), rtol=0, atol=0)


def test_no_more_than_one_layer_is_whole_while_they_are_put_into_4_bits(tmp_path):
    """A process of its own, with a model whose layers are 300 MB: its peak is below half of them. Red when all layers
    are read before the first is quantized, or a file stays mapped."""
    config = Qwen3Config(
        vocab_size=64, hidden_size=1024, intermediate_size=4096, num_hidden_layers=10, num_attention_heads=8,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path)
    shapes = {name: one.shape for name, one in skeleton(config).named_parameters()}
    weights = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    told = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True)
    before, peak = map(int, told.stdout.split())
    assert (tmp_path / "model.safetensors").stat().st_size > 300 << 20
    assert (peak - before) << 10 < 150 << 20


def test_files_that_are_quantized_already_are_transformers_to_read():
    """Their tensors have the names of weights, and mean nothing without their scales."""
    module = make_model("qwen3")
    assert is_plain(module)
    module.config.quantization_config = {"quant_method": "fp8"}
    assert not is_plain(module)


def test_files_that_cannot_be_read_are_named_also_layer_by_layer(tmp_path):
    make_model("qwen3", torch.bfloat16).save_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    config, lora = read_config(tmp_path), LoraConfig(rank=3, base="nf4")
    (tmp_path / "model.safetensors").write_bytes(whole[:-1000])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_frozen(tmp_path, config, torch.bfloat16, "cpu", lora)


def test_adapters_of_other_names_or_shapes_are_refused_and_nothing_is_changed():
    pair = Pair("shared")
    pair.policy.alone = True
    good = pair.policy.state_tensors()
    name = next(name for name in good if "lora_B" in name)
    before = pair.generation()[1].logprobs
    wrong = {name: tensor + 1 for name, tensor in good.items()}
    for bad in (
        {**wrong, name: wrong[name][:1]},
        {**wrong, "x": wrong[name]},
        {n: t for n, t in wrong.items() if n != name},
    ):
        with pytest.raises(ModelError, match=r"do not match this model and trainer.lora"):
            asyncio.run(pair.engine.load(1, bad))
    np.testing.assert_allclose(pair.generation()[1].logprobs, before, atol=1e-5)


def config(**changes) -> RunConfig:
    trainer = {"lora": LoraConfig(base="nf4"), **changes.pop("trainer", {})}
    return RunConfig.model_construct(
        **{
            "trainer": TrainerConfig(**trainer),
            "engine": EngineConfig(),
            "execution": "local",
            "mode": "both",
            **changes,
        }
    )


def test_what_cannot_share_is_refused_by_name():
    check_base(config(), EMBEDDED, serves=True)
    check_base(config(trainer={"lora": LoraConfig()}, mode="train"), VLLM, serves=True)
    for settings, engine in (
        (config(mode="train"), EMBEDDED),
        (config(execution="ray"), None),
        (config(), VLLM),
        (config(trainer={"num_processes": 2}), EMBEDDED),
        (config(trainer={"cpu_offload": True}), EMBEDDED),
    ):
        with pytest.raises(ConfigError, match=r"trainer.lora.base is 'nf4'.*in one process.*or base to own"):
            check_base(settings, engine, serves=True)
    with pytest.raises(ConfigError, match=r"trainer\.dtype is bfloat16 and engine\.dtype auto"):
        check_base(config(trainer={"dtype": "bfloat16"}), EMBEDDED, serves=True)
    check_base(config(trainer={"dtype": "bfloat16"}), None, serves=False)  # rows: there is no engine


async def says_e(task, model):
    messages = [{"role": "user", "content": task["question"]}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=6)
    return WorkflowOutput(reward=(reply.choices[0].message.content or "").count("e") / 6)


@pytest.mark.parametrize("base", BASES)
def test_a_run_trains_on_one_base_and_leaves_the_model_that_it_served(tmp_path, toy_model_dir, toy_dataset, base):
    result = tune(
        workflow_func=says_e,
        train_dataset=DatasetConfig(path=str(toy_dataset), split="train", total_steps=2),
        model=TunerModelConfig(model_path=str(toy_model_dir), max_model_len=128, max_tokens=8),
        algorithm=AlgorithmConfig(group_size=3, batch_size=2, learning_rate=1e-2, save_interval_steps=1),
        project_name="P",
        experiment_name=base,
        settings={
            "checkpoint_root_dir": str(tmp_path / "runs"),
            "evaluation.before_and_after": False,
            "check.enabled": False,
            "trainer.lora": {"rank": 2, "base": base},
        },
    )
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["trainer/logprob_gap_max"] for row in rows if "rollout/count" in row]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4
    assert certify(result.run_dir, logprobs=True).holds
    saved = AutoModelForCausalLM.from_pretrained(pointed(result.run_dir, "latest"))
    original = AutoModelForCausalLM.from_pretrained(toy_model_dir)
    layer = "model.layers.0.self_attn.q_proj.weight"
    gap = (saved.get_parameter(layer) - original.get_parameter(layer)).abs().max()
    assert gap.item() > (1e-3 if base == "nf4" else 0)


def test_which_adapters_an_engine_serves_beside_the_models_own_weights():
    """Red as an engine that is given merged weights where it was to share the frozen ones, or the other way round."""
    shared, own, wide = LoraConfig(base="nf4"), LoraConfig(), LoraConfig(rank=1024)

    def served(lora, engine, trains=True, **changes):
        trainer = {"lora": lora, **changes.pop("trainer", {})}
        return served_adapters(config(trainer=trainer, **changes), engine, trains=trains)

    assert served(shared, EMBEDDED) is shared
    assert served(own, VLLM) is own
    assert served(own, VLLM, trains=False) is own
    assert [
        served(own, EMBEDDED),
        served(shared, EMBEDDED, trains=False),
        served(wide, VLLM),
        served(own, VLLM, trainer={"num_processes": 2}),
        served(own, VLLM, mode="explore"),
        served(own, None),
        served(None, VLLM),
    ] == [None] * 7
