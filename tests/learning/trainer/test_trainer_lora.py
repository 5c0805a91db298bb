"""LoRA: adapters compute what the merged weights compute, train by the chain rule, and leave plain models behind."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from trainer_toys import FAMILIES, Batch, hf_logprobs, make_experiences, make_model, plain_copy, record
from transformers import AutoModelForCausalLM

from sharpen.config.extras import install_command
from sharpen.config.run import LossConfig
from sharpen.config.trainer import LoraConfig, TrainerConfig
from sharpen.engine.weights import copy_weights
from sharpen.errors import CheckpointError, ConfigError
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.trainer import checkpoint
from sharpen.learning.trainer.lora import AdaptedModel, adapters_line, load_trained
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import pack
from sharpen.learning.trainer.parity import Tolerance
from sharpen.learning.trainer.reference import WithoutAdapters
from sharpen.learning.trainer.roles import TrainerPlan
from sharpen.learning.trainer.settings import check_lora
from sharpen.learning.trainer.trainer import Trainer
from sharpen.models.configuration import read_config
from sharpen.models.modules import load_module

CPU = torch.device("cpu")
INSTALL = install_command("lora")
ANY = Tolerance(mean=None, max=None)


def adapt(module, *, dtype=None, seed=1, **lora) -> AdaptedModel:
    """Adapters that change something: B is random too."""
    torch.manual_seed(seed)
    policy = AdaptedModel(
        module,
        lora=LoraConfig(**{"rank": 3, "alpha": 6, **lora}),
        compute_dtype=dtype or module.dtype,
        gradient_checkpointing=False,
    )
    with torch.no_grad():
        for name, parameter in policy.parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return policy


def merged_copy(policy: AdaptedModel, family: str) -> nn.Module:
    """A model of plain transformers with the merged weights."""
    twin = make_model(family, policy.module.dtype, seed=99)
    copy_weights(twin, policy.state_tensors())
    return plain_copy(twin)


def packed_logprobs(policy, experiences) -> torch.Tensor:
    return torch.cat([policy.score(part).logprobs_E for part in pack(experiences, 60)])


def objective(logprobs: torch.Tensor) -> torch.Tensor:
    """Some loss; every logprob has another weight."""
    return (logprobs * torch.linspace(-1, 1, len(logprobs), dtype=logprobs.dtype)).sum()


def in_pack_order(module, experiences) -> torch.Tensor:
    """Logprobs by transformers, one sequence at a time, in the order of the packs' entries."""
    known = {
        (experience.rollout_id, int(token)): logprob
        for experience in experiences
        for token, logprob in zip(np.flatnonzero(experience.loss_mask_T), hf_logprobs(module, experience), strict=True)
    }
    return torch.stack(
        [
            known[part.rollout_ids[rollout], token]
            for part in pack(experiences, 60)
            for rollout, token in zip(part.rollouts_E.tolist(), part.tokens_E.tolist(), strict=True)
        ]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_equal_merged_weights_and_train_by_the_chain_rule(family):
    """With W' = W + s B A and G the gradient of W', that of B is s G A^T and that of A is s B^T G.

    Through packs that share prefixes, against transformers' own forward pass with merged weights. Break:
    leave the factor out of `get_delta_weight`, or a layer out of `_merged`.
    """
    policy = adapt(make_model(family))
    experiences = make_experiences()
    twin = merged_copy(policy, family)
    expected = in_pack_order(twin, experiences)
    found = packed_logprobs(policy, experiences)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    objective(found).backward()
    objective(expected).backward()
    gradients = {name: parameter.grad for name, parameter in twin.named_parameters()}
    parameters = dict(policy.parameters())
    assert len(parameters) == 2 * 2 * 7  # A and B, two blocks, seven linear layers each
    for name, parameter in parameters.items():
        base = name.split(".lora_")[0]
        gradient, a, b = (
            gradients[f"{base}.weight"],
            parameters[f"{base}.lora_A.default.weight"],
            parameters[f"{base}.lora_B.default.weight"],
        )
        chain = 2.0 * gradient @ a.T if "lora_B" in name else 2.0 * b.T @ gradient
        torch.testing.assert_close(parameter.grad, chain.detach(), atol=1e-6, rtol=1e-5)


class PlainLora(nn.Module):
    """W x + s B (A x), written out."""

    def __init__(self, linear: nn.Linear, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = linear, scale
        self.a, self.b = nn.Parameter(a.detach().clone()), nn.Parameter(b.detach().clone())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) + self.scale * (inputs @ self.a.T @ self.b.T)


def test_gradient_of_one_layer_equals_that_of_lora_written_out():
    module = make_model("llama")
    twin = plain_copy(module)
    policy = adapt(module, rank=2, alpha=5, target_modules=("o_proj",))
    parameters = dict(policy.parameters())
    assert len(parameters) == 4
    for number, block in enumerate(twin.model.layers):
        name = f"model.layers.{number}.self_attn.o_proj"
        a, b = (parameters[f"{name}.lora_{part}.default.weight"] for part in "AB")
        assert (a.shape, b.shape) == ((2, 32), (32, 2))
        block.self_attn.o_proj = PlainLora(block.self_attn.o_proj, a, b, scale=5 / 2)
    experiences = make_experiences()
    objective(packed_logprobs(policy, experiences)).backward()
    objective(in_pack_order(twin, experiences)).backward()
    for number, block in enumerate(twin.model.layers):
        name = f"model.layers.{number}.self_attn.o_proj"
        for part, expected in (("A", block.self_attn.o_proj.a.grad), ("B", block.self_attn.o_proj.b.grad)):
            found = parameters[f"{name}.lora_{part}.default.weight"].grad
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_merged_weight_by_hand():
    """W = 0; rank 1, alpha 3: 3 * [1, 2]^T [4, 5] = [[12, 15], [24, 30]] in the corner of the weight."""
    policy = adapt(make_model("llama"), rank=1, alpha=3, target_modules=("up_proj",))
    layer = policy.module.model.layers[1].mlp.up_proj
    with torch.no_grad():
        for tensor in (layer.base_layer.weight, layer.lora_A.default.weight, layer.lora_B.default.weight):
            tensor.zero_()
        layer.lora_B.default.weight[:2, 0] = torch.tensor([1.0, 2.0])
        layer.lora_A.default.weight[0, :2] = torch.tensor([4.0, 5.0])
    merged = policy.state_tensors()["model.layers.1.mlp.up_proj.weight"]
    assert merged[:2, :2].tolist() == [[12.0, 15.0], [24.0, 30.0]]
    assert merged.abs().sum() == 12 + 15 + 24 + 30
    assert not layer.base_layer.weight.any(), "merging does not change the frozen weight"


@settings(max_examples=8)
@given(
    rank=st.integers(1, 40),
    alpha=st.integers(1, 64),
    targets=st.sets(st.sampled_from(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])),
)
def test_in_fp32_adapters_and_merged_weights_say_the_same_for_any_rank_and_layers(rank, alpha, targets):
    policy = adapt(
        make_model("qwen3", torch.float32), rank=rank, alpha=alpha, target_modules=tuple(sorted(targets)) or None
    )
    experiences = make_experiences(num_groups=1)
    twin = TrainedModel(merged_copy(policy, "qwen3"), compute_dtype=torch.float32)
    with torch.no_grad():
        gap = (packed_logprobs(policy, experiences) - packed_logprobs(twin, experiences)).abs().max()
    assert gap < 1e-4


def test_in_bfloat16_they_agree_within_the_tolerance_of_a_run():
    """The engine rounds W + s B A, the trainer adds two rounded products: the mean gap stays below 0.01."""
    policy = adapt(make_model("qwen3", torch.float32), dtype=torch.bfloat16)
    engine = TrainedModel(merged_copy(policy, "qwen3"), compute_dtype=torch.bfloat16)
    experiences = make_experiences()
    with torch.no_grad():
        gaps = (packed_logprobs(policy, experiences) - packed_logprobs(engine, experiences)).abs()
    assert 0 < gaps.mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_without_adapters_it_is_the_model_before_training_to_the_last_bit(family, dtype):
    """Also in bfloat16, where the frozen linear layers are kept rounded: autocast would round them to the same.

    Break: round the embeddings or the norms too in `_round_frozen`.
    """
    reference = TrainedModel(make_model(family, torch.float32), compute_dtype=dtype)
    policy = adapt(make_model(family, torch.float32), dtype=dtype)
    experiences = make_experiences()
    with torch.no_grad():
        expected = packed_logprobs(reference, experiences)
        assert (packed_logprobs(policy, experiences) - expected).abs().max() > 0.01
    found = packed_logprobs(WithoutAdapters(policy), experiences)
    assert not found.requires_grad
    assert torch.equal(found, expected)
    now = packed_logprobs(policy, experiences)
    assert now.requires_grad, "the adapters are switched on again, and trained"
    assert not torch.equal(now, expected)


def test_dtypes_and_trained_parameters():
    policy = adapt(make_model("llama", torch.float32), dtype=torch.bfloat16)
    types = {name: parameter.dtype for name, parameter in policy.module.named_parameters()}
    trained = dict(policy.parameters())
    assert all("lora_" in name and types[name] == torch.float32 for name in trained)
    frozen = {name for name in types if name not in trained}
    assert {name for name in frozen if types[name] == torch.bfloat16} == {
        name for name in frozen if "base_layer" in name or "lm_head" in name
    }
    assert not any(module.training for module in policy.module.modules())
    full = TrainedModel(make_model("llama", torch.float32), compute_dtype=torch.bfloat16)
    assert policy.state_tensors().keys() == full.state_tensors().keys()
    assert adapters_line(full) == ""
    assert adapters_line(policy).startswith("LoRA: adapters of rank 3 with ")


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_files_in_bfloat16_are_loaded_as_they_are_and_compute_the_same(family, tmp_path):
    """Logprobs and gradients to the last bit, tied embeddings (qwen3) or not; norms in fp32.

    Break: leave the hook out of `read_frozen_module`, so that the sum of the layers goes on in bfloat16, or let norms
    stay in it.
    """
    make_model(family, torch.float32).to(torch.bfloat16).save_pretrained(tmp_path)
    config, experiences = TrainerConfig(dtype="bfloat16", lora=LoraConfig(rank=3, alpha=6)), make_experiences()
    torch.manual_seed(0)
    direct = load_trained(tmp_path, config, torch.device("cpu"))
    torch.manual_seed(0)
    whole = AdaptedModel(
        load_module(tmp_path, read_config(tmp_path), torch.float32, "cpu"),
        lora=config.lora,
        compute_dtype=torch.bfloat16,
    )
    for policy in (direct, whole):
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for _, parameter in policy.parameters():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    types = {name: parameter.dtype for name, parameter in direct.module.named_parameters()}
    assert types == {name: parameter.dtype for name, parameter in whole.module.named_parameters()}
    assert {name.rpartition(".")[0] for name, kind in types.items() if kind == torch.float32} == {
        name
        for name, part in direct.module.named_modules()
        if "norm" in name.rpartition(".")[2] or name.endswith(("lora_A.default", "lora_B.default"))
    }
    for one, other in zip(*(_logprobs_and_gradients(policy, experiences) for policy in (direct, whole)), strict=True):
        assert torch.equal(one, other)


def _logprobs_and_gradients(policy: AdaptedModel, experiences) -> list[torch.Tensor]:
    logprobs = packed_logprobs(policy, experiences)
    logprobs.square().sum().backward()
    return [logprobs.detach(), *(parameter.grad for _, parameter in policy.parameters())]


def test_gradient_checkpointing_computes_again_and_changes_no_gradient():
    """Broken once: `module.eval()` after the adapters are put in switched checkpointing off, so one pass, not two.
    The frozen product that a block ends with is needed by no gradient, and is not computed again.
    """
    gradients, passes, last = [], [], []
    for recompute in (False, True):
        policy = adapt(make_model("qwen3"))
        if recompute:
            again = AdaptedModel(
                make_model("qwen3"),
                lora=LoraConfig(rank=3, alpha=6),
                compute_dtype=torch.float64,
                gradient_checkpointing=True,
                max_logits=60 * 5,  # the output layer in chunks as well
            )
            again.module.load_state_dict(policy.module.state_dict())
            policy = again
        seen: list[bool] = []
        layer = policy.module.model.layers[0].self_attn.q_proj
        layer.register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(module.training))
        ended: list[bool] = []
        down = policy.module.model.layers[0].mlp.down_proj.base_layer
        down.register_forward_hook(lambda module, inputs, output, ended=ended: ended.append(True))
        objective(packed_logprobs(policy, make_experiences())).backward()
        gradients.append({name: parameter.grad for name, parameter in policy.parameters()})
        passes.append(len(seen))
        last.append(len(ended))
        assert not any(seen)
    assert passes[1] == 2 * passes[0]
    assert last[1] == last[0] == passes[0]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-12, rtol=1e-9)


def make_trainer(folder, *, kl="none", lora=LoraConfig(rank=4), **config) -> Trainer:  # noqa: B008
    plan = TrainerPlan(
        model_path=folder,
        algorithm=resolve("grpo", LossConfig(kl=kl), 8),
        config=TrainerConfig(schedule="linear", warmup_steps=2, lora=lora, **config),
        learning_rate=0.01,
        planned_updates=8,
        seed=3,
    )
    return Trainer.load(plan, "cpu", tolerance=ANY)


def step(trainer):
    trainer.train_step([Batch(experiences=tuple(make_experiences(seed=trainer.version)))])


@pytest.mark.parametrize("kl", ["none", "k2"])
def test_training_changes_adapters_only(toy_model_dir, kl):
    trainer = make_trainer(toy_model_dir, kl=kl)
    base = {n: p.clone() for n, p in trainer.policy.module.named_parameters() if not p.requires_grad}
    for _ in range(2):
        step(trainer)
    after = dict(trainer.policy.module.named_parameters())
    assert all(torch.equal(after[name], tensor) and after[name].grad is None for name, tensor in base.items())
    assert all("lora_" in name for name in trainer._optimizer.state_tensors())
    moved = [p.abs().max() for name, p in trainer.policy.parameters() if "lora_B" in name]
    assert min(moved) > 1e-3
    if kl == "k2":
        assert isinstance(trainer._loss._reference, WithoutAdapters)


def test_engine_gets_every_weight_under_its_own_name(toy_model_dir):
    """Tied embeddings (the toy model's) come once; the engine's own check would refuse a missing or unknown name."""
    trainer = make_trainer(toy_model_dir)
    step(trainer)
    engine = AutoModelForCausalLM.from_pretrained(toy_model_dir)
    copy_weights(engine, trainer.state_tensors())
    experiences = record(plain_copy(engine), make_experiences())
    with torch.no_grad():
        for part in pack(experiences, 1000):
            gaps = trainer.policy.score(part).logprobs_E.numpy() - part.logprobs_E
            assert np.abs(gaps).max() < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_goes_on_to_the_last_bit(toy_model_dir, tmp_path, dtype):
    trainer = make_trainer(toy_model_dir, dtype=dtype)
    for _ in range(2):
        step(trainer)
    trainer.save(tmp_path / "global_step_2", {"step": 2})
    for _ in range(2):
        step(trainer)
    resumed = make_trainer(toy_model_dir, dtype=dtype)
    assert resumed.restore(tmp_path / "global_step_2") == {"step": 2}
    assert resumed.version == 2
    for _ in range(2):
        step(resumed)
    before = dict(trainer.policy.parameters())
    for name, parameter in resumed.policy.parameters():
        assert torch.equal(parameter, before[name]), name
    state = trainer._optimizer.state_tensors()
    for name, tensor in resumed._optimizer.state_tensors().items():
        assert torch.equal(tensor, state[name]), name


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(5, 25)[None]).logits


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft 0.21 on transformers 5.23
@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma"])
def test_a_checkpoint_is_a_plain_model_and_an_adapter_of_peft(tmp_path, family):
    """Tied output layer (Qwen3, Gemma) and one of its own (Llama). Plain transformers, then peft on the first model."""
    from peft import PeftModel

    make_model(family, torch.float32).save_pretrained(tmp_path / "first")
    trainer = make_trainer(tmp_path / "first", lora=LoraConfig(rank=4, target_modules=("q_proj", "down_proj")))
    step(trainer)
    step(trainer)
    trainer.save(tmp_path / "c", {})
    assert not (tmp_path / "c" / "adapter_config.json").exists(), "at the top, transformers would load it once more"
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "c")
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    trained, before = logits(plain), logits(first)
    assert (trained - before).abs().max() > 1e-2
    tensors = trainer.state_tensors()
    assert all(torch.equal(parameter, tensors[name]) for name, parameter in plain.named_parameters())
    adapted = PeftModel.from_pretrained(first, tmp_path / "c" / "adapter")
    torch.testing.assert_close(logits(adapted), trained, atol=1e-5, rtol=0)
    adapter = json.loads((tmp_path / "c" / "adapter" / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"], sorted(adapter["target_modules"])) == (4, 32, ["down_proj", "q_proj"])
    assert adapter["base_model_name_or_path"] == str(tmp_path / "first")
    assert adapter["inference_mode"]


def test_a_finished_run_can_be_the_start_of_another(toy_model_dir, tmp_path):
    """Its adapter folder is not copied along."""
    trainer = make_trainer(toy_model_dir)
    step(trainer)
    trainer.save(tmp_path / "c", {})
    again = make_trainer(tmp_path / "c", lora=LoraConfig(rank=2))
    for name, tensor in again.state_tensors().items():
        assert torch.equal(tensor, trainer.state_tensors()[name]), name
    again.save(tmp_path / "d", {})
    assert json.loads((tmp_path / "d" / "adapter" / "adapter_config.json").read_text())["r"] == 2


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (LoraConfig(rank=4), LoraConfig(rank=8), "adapters .rank 4, .* now asks for adapters .rank 8"),
        (LoraConfig(rank=4), LoraConfig(rank=4, alpha=4), "alpha 32, .* now asks for .*alpha 4,"),
        (LoraConfig(rank=4), LoraConfig(rank=4, target_modules=("q_proj",)), "now asks for .*'q_proj'.\\)"),
        (LoraConfig(rank=4), None, "trained adapters .*, but trainer.lora now asks for all weights"),
        (None, LoraConfig(rank=4), "trained all weights, but trainer.lora now asks for adapters .rank 4"),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused_and_nothing_is_changed(
    toy_model_dir, tmp_path, before, now, message
):
    trainer = make_trainer(toy_model_dir, lora=before)
    trainer.save(tmp_path / "c", {})
    other = make_trainer(toy_model_dir, lora=now)
    unchanged = {name: tensor.clone() for name, tensor in other.policy.parameters()}
    with pytest.raises(CheckpointError, match=message):
        other.restore(tmp_path / "c")
    assert all(torch.equal(tensor, unchanged[name]) for name, tensor in other.policy.parameters())


def test_naming_all_layers_equals_naming_none(toy_model_dir, tmp_path):
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    make_trainer(toy_model_dir).save(tmp_path / "c", {})
    trainer = make_trainer(toy_model_dir, lora=LoraConfig(rank=4, target_modules=every))
    checkpoint.restore_policy(trainer.policy, checkpoint.load(tmp_path / "c"), tmp_path / "c")


def test_unknown_target_modules_are_refused_with_the_known_ones(toy_model_dir):
    config = TrainerConfig(lora=LoraConfig(target_modules=("q_proj", "query", "lm_head")))
    with pytest.raises(ConfigError, match=r"names lm_head, query, but .* are down_proj, gate_proj, k_proj, .*v_proj$"):
        load_trained(toy_model_dir, config, CPU)


def test_peft_that_is_missing_or_too_old_is_a_clear_error(tmp_path, monkeypatch):
    lora = TrainerConfig(lora=LoraConfig())
    check_lora(lora)
    check_lora(TrainerConfig())
    old = tmp_path / "peft-0.17.1.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 0.17.1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=re.escape(f"needs peft 0.18 or newer, but 0.17.1 is installed: {INSTALL}")):
        check_lora(lora)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfigError, match=re.escape(f"peft, which is not installed: {INSTALL}")):
        check_lora(lora)
    check_lora(TrainerConfig())


def test_peft_is_loaded_only_where_adapters_are_asked_for():
    """It takes seconds. Break: import peft at the top of `learning/trainer/lora.py`."""
    code = "import sys, sharpen.learning.trainer.trainer\nassert 'peft' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_reference_is_the_model_before_training(dtype):
    experiences = make_experiences()
    reference = TrainedModel(make_model("qwen3", torch.float32).cuda(), compute_dtype=dtype)
    policy = adapt(make_model("qwen3", torch.float32).cuda(), dtype=dtype)
    twin = TrainedModel(merged_copy(policy, "qwen3").cuda(), compute_dtype=dtype)
    with torch.no_grad():
        expected = packed_logprobs(reference, experiences)
        gaps = (packed_logprobs(policy, experiences) - packed_logprobs(twin, experiences)).abs()
    torch.testing.assert_close(packed_logprobs(WithoutAdapters(policy), experiences), expected, atol=1e-6, rtol=0)
    assert gaps.mean() < (1e-5 if dtype == torch.float32 else 1e-2)
