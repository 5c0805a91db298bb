"""Trainer and engine with one set of weights in memory: what is served, when it fails, and that nothing changes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sharpen import WorkflowOutput
from sharpen.config.load import resolve
from sharpen.config.run import LossConfig
from sharpen.config.trainer import TrainerConfig
from sharpen.contracts import GenerateRequest, Generation
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.errors import EngineError
from sharpen.learning.algorithm.resolve import resolve as resolve_algorithm
from sharpen.learning.trainer.checkpoint import STATE, pointed
from sharpen.learning.trainer.roles import TrainerPlan
from sharpen.learning.trainer.trainer import Trainer
from sharpen.placement.trainers import share_weights
from sharpen.run.assembly import open_loop
from sharpen.run.check import check_first
from sharpen.types import Sampling


def make_engine(folder: Path, dtype: Any = "float32") -> EmbeddedEngine:
    return EmbeddedEngine.from_pretrained(str(folder), max_model_len=64, device="cpu", dtype=dtype, max_slots=4)


def make_trainer(folder: Path) -> Trainer:
    plan = TrainerPlan(
        model_path=folder,
        algorithm=resolve_algorithm("grpo", LossConfig(kl="none"), 2),
        config=TrainerConfig(),
        learning_rate=1e-3,
        planned_updates=1,
    )
    return Trainer.load(plan, "cpu")


def request(max_tokens: int = 8) -> GenerateRequest:
    sampling = Sampling(temperature=1.0, max_tokens=max_tokens)
    return GenerateRequest(prompt_ids=np.arange(5, 25, dtype=np.int32), sampling=sampling, noise=3)


def change(trainer: Trainer) -> None:
    """As an optimizer does: in place."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in trainer.policy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def test_trap_14_and_29_what_the_trainer_changed_is_served_without_a_copy(toy_model_dir, write_toy_model, tmp_path):
    """The policy's own values come along; an update serves as in an engine that got copies, with no KV of before. Red
    when `copy_weights` copies nothing though the memory differs, or `load` leaves KV in place for shared weights."""
    trainer = make_trainer(write_toy_model(tmp_path / "other", seed=5))
    engine, copied = make_engine(toy_model_dir), make_engine(toy_model_dir)
    assert share_weights(engine, trainer)
    mine = {name: tensor.data_ptr() for name, tensor in trainer.state_tensors().items()}
    assert mine == {name: tensor.data_ptr() for name, tensor in engine.weights().items()}
    for version in (1, 2):

        async def serve(engine: EmbeddedEngine, version: int = version) -> Generation:
            await engine.load(version, trainer.state_tensors())
            return await engine.generate(request())

        found, expected = asyncio.run(serve(engine)), asyncio.run(serve(copied))
        assert found.ids.tolist() == expected.ids.tolist()
        np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
        assert set(found.versions.tolist()) == {version}
        change(trainer)
    assert copied.weights()["model.norm.weight"].data_ptr() not in mine.values()


def test_a_call_whose_weights_changed_under_it_fails(toy_model_dir):
    """Red when `load` lets calls go on that ran while the trainer wrote."""
    engine, trainer = make_engine(toy_model_dir), make_trainer(toy_model_dir)
    share_weights(engine, trainer)

    async def scenario() -> None:
        call = asyncio.create_task(engine.generate(request(max_tokens=40)))
        while not engine.stats.sampled_tokens:
            await asyncio.sleep(0)
        change(trainer)
        await engine.load(1, trainer.state_tensors())
        with pytest.raises(EngineError, match="the weights changed while the call ran"):
            await call

    asyncio.run(scenario())


def test_nothing_is_shared_where_types_differ_or_the_engine_is_another_one(toy_model_dir):
    trainer = make_trainer(toy_model_dir)
    before = {name: tensor.data_ptr() for name, tensor in trainer.state_tensors().items()}
    assert not share_weights(make_engine(toy_model_dir, "bfloat16"), trainer)
    assert not share_weights(object(), trainer)  # type: ignore[arg-type]
    assert before == {name: tensor.data_ptr() for name, tensor in trainer.state_tensors().items()}


async def letters(task, model):
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": task["question"]}], max_tokens=6
    )
    return WorkflowOutput(reward=(reply.choices[0].message.content or "").count("e") / 6)


def settings(folder: Path, model: Path, dataset: Path, **more: Any) -> dict[str, Any]:
    return {
        "checkpoint_root_dir": str(folder),
        "train_dataset": {"path": str(dataset), "split": "train", "total_steps": 3},
        "eval_dataset": {"path": str(dataset), "split": "test"},
        "model": {"model_path": str(model), "max_model_len": 128},
        "algorithm": {
            "algorithm_type": "grpo",
            "group_size": 4,
            "batch_size": 3,
            "learning_rate": 1e-2,
            "eval_interval_steps": 2,
        },
        "trainer.num_minibatches": 2,
        "deterministic": True,
        "check.enabled": False,
        **more,
    }


def shares(loop: Any) -> bool:
    engine = loop.serving.engine.weights()
    return all(tensor.data_ptr() == engine[name].data_ptr() for name, tensor in loop.trainer.state_tensors().items())


def test_trap_25_a_run_is_byte_for_byte_the_one_that_copies(tmp_path, toy_model_dir, toy_dataset):
    """Two updates a step and an evaluation between. Red when neither `rest` nor `load` drops KV of shared weights."""
    found = []
    for name in ("shared", "copied"):
        resolved = resolve(settings=settings(tmp_path / name, toy_model_dir, toy_dataset))
        with open_loop(resolved, letters, None) as (loop, site):
            assert shares(loop)
            if name == "copied":
                for _, parameter in loop.trainer.policy.parameters():
                    parameter.data = parameter.data.clone()
                assert not shares(loop)
            loop.run()
            assert shares(loop) == (name == "shared")
            assert loop.progress.after is not None
            latest = pointed(site.directory.path, "latest")
            assert latest is not None
            state = latest / STATE / "optimizer.safetensors"
            found.append(((latest / "model.safetensors").read_bytes(), state.read_bytes(), loop.progress.after))
    assert found[0] == found[1]


def test_rollouts_that_run_ahead_do_not_share(tmp_path, toy_model_dir, toy_dataset):
    """Red when `run.assembly` shares whatever the schedule says: weights would change under calls."""
    resolved = resolve(settings=settings(tmp_path, toy_model_dir, toy_dataset, **{"sync.offset": 1}))
    with open_loop(resolved, letters, None) as (loop, _):
        assert not shares(loop)


@pytest.mark.parametrize(("ahead", "rests"), [(0, True), (1, False)])
def test_the_engine_gives_its_cache_back_before_training_where_no_call_runs_then(
    tmp_path, toy_model_dir, toy_dataset, ahead, rests
):
    """Red when `RolloutSource.train` does not let the engine rest, or does so while rollouts run ahead."""
    resolved = resolve(settings=settings(tmp_path, toy_model_dir, toy_dataset, **{"sync.offset": ahead}))
    with open_loop(resolved, letters, None) as (loop, _):
        layer = loop.serving.engine._scheduler.pool.layers[0]
        before = layer.blocks[0].keys_SKDT.data_ptr()
        loop.step()
        assert (layer.blocks[0].keys_SKDT.data_ptr() != before) == rests


def test_what_a_check_and_an_evaluation_left_in_the_cache_is_gone_when_the_first_step_begins(
    tmp_path, toy_model_dir, toy_dataset
):
    """Red without `rest` in `check_first`, or in `RolloutSource.gather`."""
    found: list[int] = []

    async def notes(task, model):
        found.append(int(loop.serving.engine._scheduler.table.kv_len_S.sum()))
        return await letters(task, model)

    given = settings(tmp_path, toy_model_dir, toy_dataset, **{"check.enabled": True, "check.gradients": False})
    with open_loop(resolve(settings=given), notes, None) as (loop, site):
        for begin in (
            lambda: check_first(loop, site),
            loop._evaluate_before,
            lambda: loop.source.gather(loop.progress),
        ):
            start = len(found)
            begin()
            assert found[start] == 0
            assert loop.serving.engine.stats.sampled_tokens
