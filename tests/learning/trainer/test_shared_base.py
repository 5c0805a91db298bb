"""Frozen weights that trainer and engine have in common, whole or in 4 bits, with adapters beside them."""

import asyncio
import json

import numpy as np
import pytest
import torch
from torch import nn
from trainer_toys import make_model, plain_copy
from transformers import AutoModelForCausalLM

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.config.run import EngineConfig, RunConfig
from sharpen.config.trainer import LoraConfig, TrainerConfig
from sharpen.contracts import GenerateRequest
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.errors import ConfigError, ModelError
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.recipe import EngineChoice
from sharpen.learning.trainer.checkpoint import pointed
from sharpen.learning.trainer.lora import AdaptedModel, load_trained
from sharpen.models.nf4 import NF4Linear
from sharpen.placement.trainers import publish_unmerged_adapters, served_weights
from sharpen.run.decide import check_base, served_adapters
from sharpen.types import Sampling

BASES = ("shared", "nf4")
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
    """The same policy as one that reads the files, to the last bit. Red when weights are copied, or left to chance;
    weights in 4 bits are not those of the files, which are then read."""
    make_model("qwen3", torch.bfloat16).save_pretrained(tmp_path)
    lora = LoraConfig(rank=3, base=base)
    engine = EmbeddedEngine.from_pretrained(
        str(tmp_path), max_model_len=64, kv_cache_mb=8, dtype="bfloat16", device="cpu", adapters=lora
    )
    settings = TrainerConfig(lora=lora, dtype="bfloat16")
    policies = []
    for served in (served_weights(engine), None):
        torch.manual_seed(3)
        policies.append(load_trained(tmp_path, settings, torch.device("cpu"), served))
    taken, read = ({name: own.data for name, own in policy.module.named_parameters()} for policy in policies)
    assert taken.keys() == read.keys()
    for name, own in taken.items():
        torch.testing.assert_close(own, read[name], rtol=0, atol=0)
    engines = {own.data_ptr() for own in served_weights(engine).values()}
    shared = {name for name, own in taken.items() if own.data_ptr() in engines}
    assert shared == (
        {name for name, own in taken.items() if own.dtype == torch.bfloat16} if base == "shared" else set()
    )
    for policy in policies:  # a checkpoint takes files from there
        assert policy.module.name_or_path == policy.module.config._name_or_path == str(tmp_path)
        assert policy.module.config.dtype == torch.bfloat16
        assert not policy.module.training
    assert served_weights(None) is None


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
