"""Checkpoints: whole or not there, loaded by plain transformers, and resumed to the last bit."""

import json
import resource
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_toys import Batch, make_experiences, plain_copy, record
from transformers import AutoModelForCausalLM, AutoTokenizer

from sharpen.config.run import LossConfig
from sharpen.config.trainer import TrainerConfig
from sharpen.errors import CheckpointError
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.trainer.checkpoint import (
    damage,
    is_whole,
    load,
    parts,
    point,
    pointed,
    prune,
    step_directory,
    write_directory,
)
from sharpen.learning.trainer.checksums import write_checksums
from sharpen.learning.trainer.roles import TrainerPlan
from sharpen.learning.trainer.trainer import Trainer


def make_trainer(folder, **config):
    plan = TrainerPlan(
        model_path=folder,
        algorithm=resolve("grpo", LossConfig(kl="none"), 8),
        config=TrainerConfig(schedule="linear", warmup_steps=2, **config),
        learning_rate=0.01,
        planned_updates=8,
        seed=3,
    )
    return Trainer.load(plan, "cpu")


def step(trainer):
    """A step on rollouts of the trainer's present weights, as they compute in fp32."""
    module = plain_copy(trainer.policy.module)
    experiences = [
        replace(e, versions_T=np.where(e.loss_mask_T, trainer.version, -1))
        for e in record(module, make_experiences(seed=trainer.version))
    ]
    trainer.train_step([Batch(experiences=tuple(experiences))])


def test_plain_transformers_reproduces_the_trained_model(toy_model_dir: Path, tmp_path: Path):
    """Logits, tokenizer, chat template and generation config of a checkpoint, loaded without Sharpen."""
    trainer = make_trainer(toy_model_dir)
    step(trainer)
    trainer.save(tmp_path / "global_step_1", {"step": 1})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "global_step_1")
    assert loaded.dtype == torch.float32
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        expected = plain_copy(trainer.policy.module)(input_ids=ids).logits
        original = AutoModelForCausalLM.from_pretrained(toy_model_dir)(input_ids=ids).logits
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected, atol=1e-6, rtol=0)
    assert (expected - original).abs().max() > 1e-3
    tokenizer, source = (
        AutoTokenizer.from_pretrained(tmp_path / "global_step_1"),
        AutoTokenizer.from_pretrained(toy_model_dir),
    )
    messages = [{"role": "user", "content": "2+2?"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == source.apply_chat_template(
        messages, tokenize=False
    )
    for file in ("generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "global_step_1" / file).read_bytes() == (toy_model_dir / file).read_bytes()
    assert "attn_implementation" not in (tmp_path / "global_step_1" / "config.json").read_text()


def test_large_states_are_in_several_files(toy_model_dir: Path, tmp_path: Path):
    """Which are hashed at the same time. Red when only the first is read, or missed when it is gone."""
    trainer, folder = make_trainer(toy_model_dir), tmp_path / "global_step_1"
    step(trainer)
    trainer.save(folder, {"step": 1})
    whole = load_file(folder / "trainer_state" / "optimizer.safetensors")
    pieces = list(parts(whole, most=10_000))
    assert len(pieces) > 2
    assert [name for piece in pieces for name in piece] == [*whole]
    sizes = [sum(tensor.nbytes for tensor in piece.values()) for piece in pieces]
    assert all(size <= 10_000 or len(piece) == 1 for size, piece in zip(sizes, pieces, strict=True))
    for number, piece in enumerate(pieces, 1):
        save_file(piece, folder / "trainer_state" / f"optimizer{'' if number == 1 else f'.{number}'}.safetensors")
    write_checksums(folder)
    found = load(folder)
    assert found.optimizer_tensors.keys() == whole.keys()
    assert all(torch.equal(found.optimizer_tensors[name], tensor) for name, tensor in whole.items())
    assert found.further == {}
    assert is_whole(folder)
    assert make_trainer(toy_model_dir).restore(folder) == {"step": 1}
    (folder / "trainer_state" / "optimizer.2.safetensors").unlink()
    assert damage(folder) == "whose trainer_state/optimizer.2.safetensors changed since it was written"


def test_nothing_is_a_file_too():
    assert list(parts({})) == [{}]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_goes_on_to_the_last_bit(toy_model_dir: Path, tmp_path: Path, dtype: str):
    trainer = make_trainer(toy_model_dir, dtype=dtype)
    for _ in range(2):
        step(trainer)
    position = {"step": 2, "order": [3, 1, 2], "note": "é"}
    trainer.save(tmp_path / "global_step_2", position)
    expected_random = torch.rand(3)
    for _ in range(2):
        step(trainer)

    resumed = make_trainer(toy_model_dir, dtype=dtype)
    assert resumed.restore(tmp_path / "global_step_2") == position
    assert resumed.version == 2
    assert torch.equal(torch.rand(3), expected_random)
    for _ in range(2):
        step(resumed)
    for name, tensor in trainer.state_tensors().items():
        assert torch.equal(resumed.state_tensors()[name], tensor), name


def test_bfloat16_runs_store_the_model_that_was_evaluated_and_the_masters_beside(toy_model_dir: Path, tmp_path: Path):
    trainer = make_trainer(toy_model_dir, dtype="bfloat16")
    step(trainer)
    trainer.save(tmp_path / "c", {})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "c")
    assert loaded.dtype == torch.bfloat16
    for name, tensor in loaded.named_parameters():
        assert torch.equal(tensor, trainer.state_tensors()[name].bfloat16()), name


class Limit:
    """No file may grow beyond so many bytes, as on a disk that is nearly full."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def __enter__(self):
        self.handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.num_bytes, self.limits[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)
        signal.signal(signal.SIGXFSZ, self.handler)


@pytest.mark.parametrize("num_bytes", [20_000, 150_000])
def test_a_full_disk_leaves_the_earlier_checkpoint_and_no_remains(toy_model_dir: Path, tmp_path: Path, num_bytes: int):
    """The limit is met while writing the weights (small) or the optimizer state (larger)."""
    trainer = make_trainer(toy_model_dir)
    trainer.save(tmp_path / "global_step_0", {"step": 0})
    step(trainer)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for name in ("global_step_0", "global_step_1"):
        with Limit(num_bytes), pytest.raises(CheckpointError, match=name):
            trainer.save(tmp_path / name, {"step": 1})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    trainer.save(tmp_path / "global_step_0", {"step": 1})
    assert make_trainer(toy_model_dir).restore(tmp_path / "global_step_0") == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_0"]


def test_no_space_left_is_a_checkpoint_error(tmp_path: Path):
    def write(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left on device"):
        write_directory(tmp_path / "c", write)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_checkpoint_of_this_model_is_refused(toy_model_dir: Path, tmp_path: Path):
    trainer = make_trainer(toy_model_dir)
    with pytest.raises(CheckpointError, match="cannot resume"):
        trainer.restore(tmp_path / "nothing")
    trainer.save(tmp_path / "c", {})
    (tmp_path / "c" / "trainer_state" / "optimizer.safetensors").write_bytes(b"\0" * 10)
    with pytest.raises(CheckpointError, match="cannot resume"):
        trainer.restore(tmp_path / "c")


def test_pointers_and_pruning(tmp_path: Path):
    for number in (1, 2, 3, 10, 11):
        write_directory(
            step_directory(tmp_path, number), lambda d: (d / "state.json").write_text(json.dumps({})) and None
        )
    assert pointed(tmp_path, "latest") is None
    point(tmp_path, "best", step_directory(tmp_path, 1))
    for number in (10, 11):
        point(tmp_path, "latest", step_directory(tmp_path, number))
    assert pointed(tmp_path, "latest") == step_directory(tmp_path, 11)
    assert (tmp_path / "latest" / "state.json").exists()
    prune(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.glob("global_step_*")) == [
        "global_step_1",
        "global_step_10",
        "global_step_11",
    ]
    (tmp_path / "best").unlink()
    (tmp_path / "best").write_text("global_step_10\n")  # as on a file system without links
    assert pointed(tmp_path, "best") == step_directory(tmp_path, 10)
    point(tmp_path, "best", step_directory(tmp_path, 11))
    assert pointed(tmp_path, "best") == step_directory(tmp_path, 11)
