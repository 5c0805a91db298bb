"""vLLM on GPUs: new weights that its workers read where the trainer has them, or get by NCCL on GPUs of their own."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sharpen.contracts import GenerateRequest, Generation
from sharpen.engine.routing import Replicas
from sharpen.errors import EngineLostError
from sharpen.placement.serving import ServingThread
from sharpen.types import Sampling

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
PROMPT = [506, 70, 80, 90]
pytestmark = pytest.mark.vllm


def start(thread: ServingThread, **settings: Any) -> Any:
    from sharpen.engine.vllm.engine import VLLMEngine

    settings = {"max_model_len": 256, "max_slots": 8, "kv_cache_mb": 256, "dtype": "float32", **settings}
    return thread.call(VLLMEngine.start(str(MODEL), stop_decoder=str, **settings))


def changed(device: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval().requires_grad_(False).to(device)
    generator = torch.Generator(device).manual_seed(7)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator, device=device) * 0.02)
    return model


def weights(model: Any) -> Mapping[str, torch.Tensor]:
    return dict(model.named_parameters())


async def check(engine: Any, model: Any, version: int) -> None:
    """The engine samples from this model."""
    request = GenerateRequest(prompt_ids=np.asarray(PROMPT, np.int32), sampling=Sampling(max_tokens=16), noise=3)
    found: Generation = await engine.generate(request)
    ids = torch.tensor([[*PROMPT, *found.ids.tolist()]], device=model.device)
    logprobs = torch.log_softmax(model(ids).logits[0, len(PROMPT) - 1 : -1].float(), -1)
    expected = logprobs.gather(1, ids[0, len(PROMPT) :, None])[:, 0].cpu().numpy()
    np.testing.assert_allclose(found.logprobs, expected, atol=1e-2)
    assert set(found.versions.tolist()) == {version}


def test_new_weights_are_read_from_the_trainers_gpu() -> None:
    """Twice, since the first time is preceded by a trial."""
    thread = ServingThread()
    engine = start(thread)
    model = changed("cuda:0")
    for version in (1, 2):
        thread.call(engine.load(version, weights(model)))
        thread.call(check(engine, model, version))
    assert engine._loader.ways == ["ipc"]
    thread.call(engine.close())
    thread.close()


@pytest.mark.two_gpus
def test_a_replica_on_another_gpu_gets_its_weights_by_nccl() -> None:
    """The one on the trainer's GPU reads them there, at the same time."""
    thread = ServingThread()
    engines = [start(thread, replica=(number, 2)) for number in range(2)]
    model = changed("cuda:0")
    both = Replicas(engines)
    for version in (1, 2):
        thread.call(both.load(version, weights(model)))
        for engine in engines:
            thread.call(check(engine, model, version))
    assert [engine._loader.ways for engine in engines] == [["ipc"], ["nccl"]]
    for engine in engines:
        thread.call(engine.close())
    thread.close()


@pytest.mark.two_gpus
def test_tensor_parallel() -> None:
    """One worker is on the trainer's GPU, the other is not: they take the same weights by two ways."""
    thread = ServingThread()
    engine = start(thread, tensor_parallel_size=2)
    model = changed("cuda:0")
    for version in (1, 2):
        thread.call(engine.load(version, weights(model)))
        thread.call(check(engine, model, version))
    assert engine._loader.ways == ["ipc", "nccl"]
    thread.call(asyncio.wait_for(engine.close(), 60))
    thread.close()


@pytest.mark.two_gpus
def test_a_worker_that_dies_in_the_midst_of_a_broadcast_hangs_nothing() -> None:
    """A kernel on the trainer's GPU waits for it then, until the trainer leaves the group."""
    from sharpen.engine.vllm.loading import Loader

    thread = ServingThread()
    engine = start(thread, replica=(1, 2))

    class KillsIt(Loader):
        def _send(self, tensors: Any, layout: Any) -> None:
            super()._send(tensors, layout[:2])
            for process in multiprocessing.active_children():
                process.kill()
            super()._send(tensors, layout[2:])

    engine._loader = KillsIt(engine._llm, chunk_bytes=2**20)
    with pytest.raises(EngineLostError):
        thread.call(engine.load(1, weights(changed("cuda:0"))), timeout_s=120)
    assert engine._loader.ways == ["nccl"]
    thread.call(asyncio.wait_for(engine.close(), 60))
    assert torch.ones(3, device="cuda:0").sum().item() == 3
    thread.close()
