"""vLLM on GPUs: new weights that its workers read where the trainer has them, and replicas on GPUs of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agenttune.execution.serving import ServingThread
from agenttune.inference.engine import GenerateRequest, Generation
from agenttune.types import Sampling

MODEL = Path(__file__).parents[2] / "examples" / "quickstart" / "model"
PROMPT = [506, 70, 80, 90]
pytestmark = pytest.mark.vllm


def start(thread: ServingThread, **settings: Any) -> Any:
    from agenttune.inference.vllm import VLLMEngine

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
    assert engine._reads_gpu
    thread.call(engine.close())
    thread.close()


@pytest.mark.two_gpus
def test_a_replica_on_another_gpu_gets_its_weights_through_a_file() -> None:
    thread = ServingThread()
    engines = [start(thread, replica=(number, 2)) for number in range(2)]
    model = changed("cuda:0")
    for engine in engines:
        thread.call(engine.load(1, weights(model)))
        thread.call(check(engine, model, 1))
    assert [engine._reads_gpu for engine in engines] == [True, False]
    for engine in engines:
        thread.call(engine.close())
    thread.close()


@pytest.mark.two_gpus
def test_tensor_parallel() -> None:
    thread = ServingThread()
    engine = start(thread, tensor_parallel_size=2)
    model = changed("cuda:0")
    thread.call(engine.load(1, weights(model)))
    thread.call(check(engine, model, 1))
    thread.call(asyncio.wait_for(engine.close(), 60))
    thread.close()
