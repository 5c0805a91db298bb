"""Images in vLLM: what it samples is what transformers computes from the pixels, whatever is cached, and after updates.

Its prefix cache has blocks of 128 tokens, and an image here has up to 64.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from picture_toys import IMAGES, draw, make_seeing_checkpoint, own_logprobs
from transformers import AutoConfig, AutoModelForImageTextToText
from vllm_served import Served, begun, endless, frozen, generating, request, start

from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune
from sharpen.config.trainer import LoraConfig
from sharpen.contracts import GenerateRequest, Generation
from sharpen.errors import SamplingError
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.trainer.lora import AdaptedModel
from sharpen.learning.trainer.model import read_module
from sharpen.models.images import Eyes, eyes_of
from sharpen.types import Picture

QWEN = "qwen3_vl"
LONG = "a " * 45  # with an image behind it, the first block of the cache ends within the image


@dataclass(frozen=True)
class Seeing:
    """A checkpoint: its folder, its eyes, transformers' own model, and what its template writes for an image."""

    folder: Path
    eyes: Eyes
    own: Any
    image: str

    def asks(self, text: str, *pictures: Picture, max_tokens: int = 8, noise: int = 1) -> GenerateRequest:
        ids, spans = self.eyes.expand(text.replace("IMAGE", self.image), pictures)
        return replace(request(ids.tolist(), max_tokens=max_tokens, noise=noise), pictures=spans)

    def check(self, asked: Sequence[GenerateRequest], generations: Sequence[Generation], version: int = 0) -> None:
        for one, generation in zip(asked, generations, strict=True):
            assert set(generation.versions.tolist()) == {version}
            self.compare(one, generation, self.own)

    def compare(self, asked: GenerateRequest, generation: Generation, own: Any) -> None:
        """Up to a sampled image token, which transformers would count as an image's."""
        images = np.flatnonzero(generation.ids == self.eyes.image_token_id)
        count = int(images[0]) if len(images) else len(generation.ids)
        start = len(asked.prompt_ids)
        whole = np.concatenate([asked.prompt_ids, generation.ids[:count]])
        with torch.no_grad():
            expected = own_logprobs(own, self.eyes, whole, asked.pictures, range(start, len(whole)))
        np.testing.assert_allclose(generation.logprobs[:count], expected, atol=2e-4)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory, toy_model_dir: Path) -> Callable[[str], Seeing]:
    def get(kind: str) -> Seeing:
        folder = make_seeing_checkpoint(kind, tmp_path_factory.mktemp(kind), toy_model_dir, wide=True)
        own = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        eyes = eyes_of(folder, AutoConfig.from_pretrained(folder))
        assert eyes is not None
        return Seeing(folder, eyes, own, IMAGES[kind])

    return get


@pytest.fixture(scope="module")
def qwen(seeing: Callable[[str], Seeing]) -> Seeing:
    return seeing(QWEN)


@pytest.fixture(scope="module")
def served(qwen: Seeing) -> Iterator[Served]:
    served = start(model_path=str(qwen.folder), max_slots=128)
    yield served
    served.run(served.engine.close())
    served.thread.close()


def test_the_logprobs_are_those_of_transformers(served: Served, qwen: Seeing) -> None:
    """Red without `mm_device_do_normalize`, or `mrope_interleaved`, in `VLLMPictures.settings`."""
    asked = [
        qwen.asks("what is IMAGE, and IMAGE?", draw(1, 48, 16), draw(2, 16, 24)),
        qwen.asks("IMAGE", draw(3, 64, 64), noise=2),
        qwen.asks("no image", noise=3),
    ]
    qwen.check(asked, served.generate(*asked))


def test_the_same_text_with_another_image_shares_no_prefix(served: Served, qwen: Seeing) -> None:
    """Red when all images have one hash."""
    asked = [qwen.asks("IMAGE" + LONG + "?", draw(seed, 64, 64)) for seed in (4, 5, 4)]
    assert np.array_equal(asked[0].prompt_ids, asked[1].prompt_ids)
    assert len(asked[0].prompt_ids) > 128
    generations = [served.generate(one)[0] for one in asked]
    qwen.check(asked, generations)
    assert not np.array_equal(generations[0].logprobs, generations[1].logprobs)


def test_a_conversation_goes_on_behind_a_block_that_ends_within_an_image(served: Served, qwen: Seeing) -> None:
    first = qwen.asks(LONG + "IMAGE?", draw(6, 64, 64))
    (span,) = first.pictures
    assert span.start < 128 < span.stop
    (generation,) = served.generate(first)
    again = np.concatenate([first.prompt_ids, generation.ids, first.prompt_ids[-2:]])
    qwen.check([first], [generation])
    qwen.check([replace(first, prompt_ids=again)], served.generate(replace(first, prompt_ids=again)))


def test_no_prompt_is_cut_where_many_look_at_once(served: Served, qwen: Seeing) -> None:
    """One step goes on behind 64 blocks that end within images of 64 tokens each, all that vLLM's own encoder cache
    holds, and begins another prompt. Red (vLLM dies) without `WholePrompts`."""
    begin = [qwen.asks(LONG + "IMAGE", draw(100 + number, 64, 64), max_tokens=1) for number in range(128)]
    served.generate(*begin[:64])
    served.generate(*begin[64:])  # their images take the place of the first
    asked = [*begin[:64], qwen.asks("another IMAGE", draw(7, 64, 64))]

    async def at_once() -> list[Generation]:
        async with frozen(served.engine):
            calls = await begun(served.engine, *asked)
        return list(await asyncio.gather(*calls))

    qwen.check(asked, served.run(at_once()))


def test_images_that_are_not_where_the_ids_say_are_refused(served: Served, qwen: Seeing) -> None:
    asked = qwen.asks("IMAGE?", draw(1, 16, 16))
    (span,) = asked.pictures
    for wrong in (replace(span, start=span.start + 1), replace(span, picture=draw(1, 48, 16))):
        with pytest.raises(SamplingError, match=r"the image tokens .* of a prompt of \d+ are"):
            served.generate(replace(asked, pictures=(wrong,)))


def test_new_weights_with_the_tower(served: Served, qwen: Seeing) -> None:
    """What the tower saw with its old weights is not kept, and a request in flight is shown its image again. Comes
    last: the weights are others then."""
    old = copy.deepcopy(qwen.own)
    asked = [qwen.asks("IMAGE IMAGE?", draw(1, 64, 16), draw(2)), qwen.asks("no image")]
    qwen.check(asked, served.generate(*asked))
    long = qwen.asks("IMAGE, then?", draw(8, 32, 32), max_tokens=300)

    async def change() -> Generation:
        with endless(served.engine):
            (running,) = await generating(served.engine, long)
            with torch.no_grad():
                for parameter in qwen.own.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
            await served.engine.load(1, dict(qwen.own.named_parameters()))
            return await running

    torch.manual_seed(0)
    running = served.run(change())
    assert set(running.versions.tolist()) == {0, 1}
    count = int((running.versions == 0).sum())
    before, after = (
        replace(running, ids=running.ids[part], logprobs=running.logprobs[part])
        for part in (slice(count), slice(count, None))
    )
    qwen.compare(long, before, old)
    if qwen.eyes.image_token_id not in before.ids:
        qwen.compare(replace(long, prompt_ids=np.concatenate([long.prompt_ids, before.ids])), after, qwen.own)
    qwen.check(asked, served.generate(*asked), 1)


def test_a_model_with_ends_of_rows_between_its_image_tokens(seeing: Callable[[str], Seeing]) -> None:
    """Also under new weights, with the tower's. Red when what the tower saw is kept (`reset_encoder_cache`)."""
    mistral = seeing("mistral3")
    served = start(model_path=str(mistral.folder))
    try:
        asked = [mistral.asks("what is IMAGE, and IMAGE?", draw(1, 48, 16), draw(2, 16, 24))]
        mistral.check(asked, served.generate(*asked))
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in mistral.own.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
        served.run(served.engine.load(1, dict(mistral.own.named_parameters())))
        mistral.check(asked, served.generate(*asked), 1)
    finally:
        served.run(served.engine.close())
        served.thread.close()


def test_adapters_beside_images(seeing: Callable[[str], Seeing]) -> None:
    """Under the names that vLLM knows, for a text agent too."""
    qwen, lora = seeing(QWEN), LoraConfig(rank=4, alpha=8)
    policy = AdaptedModel(read_module(qwen.folder, torch.device("cpu")), lora=lora, compute_dtype=torch.float32)
    served = start(model_path=str(qwen.folder), lora=lora)
    try:
        with torch.no_grad():
            for _, parameter in policy.parameters():
                parameter.normal_(std=0.1)
        asked = [qwen.asks("IMAGE" + LONG + "?", draw(1, 64, 64)), qwen.asks("no image", noise=2)]
        qwen.check(asked, served.generate(*asked))
        qwen.own.load_state_dict(policy.state_tensors(), strict=False)
        policy.alone = True
        served.run(served.engine.load(1, policy.state_tensors()))
        qwen.check(asked, served.generate(*asked), 1)
    finally:
        served.run(served.engine.close())
        served.thread.close()


async def looks(task: dict[str, Any], model: Any) -> WorkflowOutput:
    """Shows one of two images, then another; the reward is the share of vowels."""
    content = [{"type": "text", "text": task["question"]}, shown(len(task["question"]))]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    text = ""
    for turn in range(2):
        reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=8)
        answer = reply.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": [shown(turn)]}]
        text += answer
    return WorkflowOutput(reward=sum(letter in "aeiou" for letter in text) / 16)


def shown(seed: int) -> dict[str, Any]:
    data = base64.b64encode(draw(seed % 2, 16, 24).data).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


@pytest.mark.parametrize("train_towers", [False, True])
def test_two_steps_of_an_agent_that_looks(
    seeing: Callable[[str], Seeing], toy_dataset: Path, tmp_path: Path, train_towers: bool
) -> None:
    """The trainer's logprobs equal vLLM's before and after an update."""
    folder = seeing(QWEN).folder
    result = tune(
        workflow_func=looks,
        train_dataset=DatasetConfig(path=str(toy_dataset), split="train", total_steps=2),
        model=TunerModelConfig(model_path=str(folder), max_model_len=400, max_tokens=8),
        algorithm=AlgorithmConfig(algorithm_type="grpo", group_size=4, batch_size=2, learning_rate=1e-3),
        settings={
            "checkpoint_root_dir": str(tmp_path),
            "engine": {"type": "vllm", "kv_cache_mb": 128, "max_slots": 32},
            "trainer.train_towers": train_towers,
            "rollout.failure_reward": 0.0,
            "evaluation.before_and_after": False,
            "evaluation.hold_out": 0,
        },
    )
    assert certify(result.run_dir).holds
    metrics = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    gaps = [step["trainer/logprob_gap_max"] for step in metrics if "trainer/logprob_gap_max" in step]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4
