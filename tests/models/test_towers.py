"""Checkpoints with towers train as text agents: towers frozen, kept, written back byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from toy_engines import prompt_of, request, run_all, scored
from trainer_toys import Batch, hf_logprobs, make_experiences, record
from transformers import AutoConfig, AutoModelForImageTextToText, CLIPConfig, PreTrainedTokenizerFast

from sharpen.config.run import LossConfig
from sharpen.config.trainer import CriticConfig, LoraConfig, TrainerConfig
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.engine.weights import match_weights
from sharpen.errors import ModelError
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.trainer.critic import Critic
from sharpen.learning.trainer.lora import AdaptedModel
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import pack
from sharpen.learning.trainer.reference import load_reference
from sharpen.learning.trainer.roles import TrainerPlan
from sharpen.learning.trainer.trainer import Trainer
from sharpen.models.configuration import load_tokenizer
from sharpen.models.modules import class_for, decoder_of, text_parameters
from sharpen.models.stand_ins import with_stand_ins
from sharpen.run.plan.live import Pass, pass_bytes
from sharpen.run.plan.sizes import read_model_config, sizes_of

CPU = torch.device("cpu")
SEE = ("gemma3", "qwen3_vl", "gemma3n")
"""One whose files have other names than its module, and whose output layer is the embedding; one with rotary positions
in three dimensions; one whose towers are never loaded. `tests/models/every_family` has the others."""
EXTRA = "mtp.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module", params=SEE)
def source(request, tmp_path_factory) -> Path:
    """A checkpoint with towers in bfloat16, text in float32, a head that transformers does not load, and a processor's
    file."""
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, folder)
    text = {name for name, _ in text_parameters(plain(folder))}
    tensors = load_file(folder / "model.safetensors")
    eyes = [name for name in tensors if any(part in name for part in ("visual.", "vision", "audio", "projector"))]
    assert eyes
    assert len(tensors) - len(eyes) <= len(text)
    for name in eyes:
        tensors[name] = tensors[name].bfloat16()
    tensors[EXTRA] = torch.randn(3, 4).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "preprocessor_config.json").write_text('{"size": 16}')
    return folder


def plain(folder: Path) -> Any:
    """The checkpoint in plain transformers, in fp32."""
    config = with_stand_ins(AutoConfig.from_pretrained(folder))
    return AutoModelForImageTextToText.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def make_trainer(folder: Path, algorithm: str = "grpo", **config: Any) -> Trainer:
    plan = TrainerPlan(
        model_path=folder,
        algorithm=resolve(algorithm, LossConfig(kl="none"), 8),
        config=TrainerConfig(**config),
        learning_rate=0.01,
        planned_updates=8,
        seed=3,
    )
    return Trainer.load(plan, "cpu")


def step(trainer: Trainer, folder: Path) -> None:
    experiences = record(plain(folder), make_experiences())
    trainer.train_step([Batch(experiences=tuple(experiences))])


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                assert name not in found
                found[name] = file.get_tensor(name)
    return found


def test_the_engine_samples_what_transformers_computes(source: Path) -> None:
    engine = EmbeddedEngine.from_pretrained(str(source), max_model_len=128)
    prompts = [prompt_of(length, length) for length in (5, 30)]
    for prompt, generation in zip(prompts, run_all(engine, [request(p) for p in prompts]), strict=True):
        expected = scored(plain(source), prompt, generation)
        torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=1e-4, rtol=0)


def test_a_packed_tree_has_the_gradients_of_separate_sequences(source: Path) -> None:
    experiences = make_experiences(num_groups=2)
    (packed,) = pack(experiences, 10_000, min_shared_tokens=1)
    policy = TrainedModel.load(source, dtype="float32", device=CPU)
    scores = policy.score(packed)
    scores.logprobs_E.sum().backward()
    model = plain(source)
    total = torch.stack([hf_logprobs(model, experience).sum() for experience in experiences]).sum()
    total.backward()
    torch.testing.assert_close(scores.logprobs_E.sum(), total, atol=1e-2, rtol=1e-5)
    expected = dict(model.named_parameters())
    trained = dict(policy.parameters())
    assert trained.keys() == {name for name, _ in text_parameters(model)}
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.grad, expected[name].grad, atol=2e-3, rtol=1e-3)
    frozen = [parameter for name, parameter in policy.module.named_parameters() if name not in trained]
    assert frozen
    assert all(parameter.grad is None for parameter in frozen)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["full", "lora"])
def test_a_checkpoint_is_written_as_it_came(source: Path, tmp_path: Path, lora: LoraConfig | None) -> None:
    """Break: write the towers from the module (fp32), or leave out what transformers does not load."""
    trainer = make_trainer(source, lora=lora)
    step(trainer, source)
    written = tmp_path / "global_step_1"
    trainer.save(written, {"step": 1})
    before, after = tensors_of(source), tensors_of(written)
    assert after.keys() == before.keys()
    trained = 0
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        if tensor.dtype == torch.bfloat16:
            assert after[name].view(torch.uint8).equal(tensor.view(torch.uint8)), name
        else:
            trained += not after[name].equal(tensor)
    assert trained > 5
    config = json.loads((source / "config.json").read_text())
    assert json.loads((written / "config.json").read_text()) == config | {"dtype": "float32"}
    assert (written / "preprocessor_config.json").read_bytes() == (source / "preprocessor_config.json").read_bytes()
    reloaded = plain(written)
    state = trainer.policy.state_tensors()
    for name, parameter in text_parameters(reloaded):
        torch.testing.assert_close(parameter, state[name], atol=1e-6, rtol=0)


def test_a_checkpoint_of_a_checkpoint_is_the_same(source: Path, tmp_path: Path) -> None:
    """From several files with an index, too."""
    make_trainer(source).save(tmp_path / "global_step_0", {"step": 0})
    make_trainer(tmp_path / "global_step_0").save(tmp_path / "global_step_1", {"step": 1})
    first, second = (tensors_of(tmp_path / f"global_step_{step}") for step in (0, 1))
    assert first.keys() == second.keys() == tensors_of(source).keys()
    assert all(second[name].equal(tensor) and second[name].dtype == tensor.dtype for name, tensor in first.items())


def test_a_checkpoint_resumes(source: Path, tmp_path: Path) -> None:
    """Its files have other names than the module's parameters. Break: leave the weights beside it out."""
    trainer = make_trainer(source)
    step(trainer, source)
    trainer.save(tmp_path / "global_step_1", {"step": 1})
    resumed = make_trainer(source)
    resumed.restore(tmp_path / "global_step_1")
    for name, parameter in resumed.policy.parameters():
        assert parameter.equal(dict(trainer.policy.parameters())[name])


def test_only_the_text_moves_to_the_engine(source: Path) -> None:
    engine = EmbeddedEngine.from_pretrained(str(source), max_model_len=128)
    trainer = make_trainer(source)
    moved = trainer.policy.state_tensors()
    names = {name for name, _ in trainer.policy.module.named_parameters()}
    assert moved.keys() == engine.weights().keys() < names
    match_weights(engine._model, moved)
    eye = next(iter(names - moved.keys()))
    with pytest.raises(ModelError, match="missing"):
        match_weights(engine._model, dict(list(moved.items())[1:]))
    with_eye = {**moved, eye: dict(engine._model.named_parameters())[eye]}  # of a trained tower
    assert match_weights(engine._model, with_eye).keys() == with_eye.keys()
    assert trainer.policy.move_weights_into(engine.weights())


def test_adapters_are_on_the_text_alone(source: Path) -> None:
    """The towers have layers of the same names. Break: give peft the last parts of the names."""
    policy = make_trainer(source, lora=LoraConfig(rank=2)).policy
    assert isinstance(policy, AdaptedModel)
    decoder = {id(parameter) for parameter in decoder_of(policy.module).parameters()}
    assert all(id(parameter) in decoder for _, parameter in policy.parameters())
    assert all("lora" in name for name, _ in policy.parameters())


def test_reference_and_critic_have_towers_too(source: Path) -> None:
    (packed,) = pack(make_experiences(num_groups=1), 10_000)
    policy = TrainedModel.load(source, dtype="float32", device=CPU)
    reference = load_reference(policy, source, TrainerConfig(), CPU)
    with torch.no_grad():
        torch.testing.assert_close(reference.score(packed).logprobs_E, policy.score(packed).logprobs_E)
    critic = Critic.load(source, config=CriticConfig(), trainer_config=TrainerConfig(), planned_updates=1, device=CPU)
    assert not critic.values(packed).any()
    trained = {name for name, _ in critic.parameters()}
    assert {"value_head.weight", "value_head.bias"} <= trained
    assert trained - {"value_head.weight", "value_head.bias"} <= {name for name, _ in policy.parameters()}


def test_a_tower_without_a_class_that_generates_is_refused() -> None:
    with pytest.raises(ModelError, match="'clip'"):
        class_for(CLIPConfig())


def test_the_processors_chat_template_is_found(tmp_path: Path) -> None:
    """Break: look for the tokenizer's own template only."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")), unk_token="a")
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).chat_template is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "x{{ messages }}"}')
    assert load_tokenizer(tmp_path).chat_template == "x{{ messages }}"
    (tmp_path / "chat_template.json").write_text("[]")
    with pytest.raises(ModelError, match=r"chat_template\.json"):
        load_tokenizer(tmp_path)


def test_a_plan_counts_what_is_held_and_what_is_trained(source: Path) -> None:
    """Break: count all parameters as trained."""
    sizes = sizes_of(read_model_config(str(source)))
    module = plain(source)
    text = sum(parameter.numel() for _, parameter in text_parameters(module))
    assert (sizes.parameters, sizes.held) == (text, sum(parameter.numel() for parameter in module.parameters()))
    assert sizes.num_layers == module.config.get_text_config().num_hidden_layers
    linears = [name for name, part in decoder_of(module).named_modules() if isinstance(part, torch.nn.Linear)]
    assert sorted(name for name, _, _ in sizes.linears) == sorted(name.rpartition(".")[2] for name in linears)
    traced = Pass(num_tokens=40, num_loss_tokens=8, bfloat16=False, checkpointing=False, entropy_gradient=False)
    assert pass_bytes(read_model_config(str(source)), traced) > 0
