"""Our engines keep the contract of every engine; one that breaks it is told how.

The broken ones are the example's plain engine with one line of it wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sharpen.config.functions import import_object
from sharpen.contracts import Engine, EngineSettings, GenerateRequest, Generation, StartEngine
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.engine.routing import Replicas
from sharpen.errors import ContextOverflowError
from sharpen.testing import check_engine

PlainEngine: Any = import_object(f"{Path(__file__).parents[2] / 'examples' / 'extend' / 'engine.py'}:PlainEngine")


def embedded(settings: EngineSettings, **options: Any) -> EmbeddedEngine:
    return EmbeddedEngine.from_pretrained(
        str(settings.folder),
        max_model_len=settings.max_model_len,
        device=settings.device,
        dtype=settings.dtype,  # type: ignore[arg-type]
        max_slots=settings.max_slots,
        stop_decoder=settings.tokenizer.decode,
        tokenizer=settings.tokenizer,
        **options,
    )


async def one(settings: EngineSettings) -> Engine:
    return embedded(settings)


async def deterministic(settings: EngineSettings) -> Engine:
    return embedded(settings, deterministic=True)


async def two(settings: EngineSettings) -> Engine:
    return Replicas([embedded(settings), embedded(settings)])


@pytest.mark.parametrize("start", [one, deterministic, two])
def test_each_of_ours_keeps_the_contract(start: StartEngine, toy_model_dir: Path) -> None:
    check_engine(start, toy_model_dir)


class Untruncated(PlainEngine):  # type: ignore[misc]
    """The logprob of a token is that before top-p and top-k."""

    async def generate(self, request: GenerateRequest) -> Generation:
        found = await super().generate(request)
        whole = replace(request, sampling=replace(request.sampling, top_p=1.0, top_k=0))
        logprobs = [float(self._next(whole, found.ids.tolist()[:at])[1][id_]) for at, id_ in enumerate(found.ids)]
        return replace(found, logprobs=np.asarray(logprobs, np.float32))


class OneStream(PlainEngine):  # type: ignore[misc]
    """Randomness depends on how many requests came before."""

    count = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        self.count += 1
        return await super().generate(replace(request, noise=self.count))


class Deaf(PlainEngine):  # type: ignore[misc]
    """Randomness does not depend on `noise`."""

    async def generate(self, request: GenerateRequest) -> Generation:
        return await super().generate(replace(request, noise=0))


class KeepsStop(PlainEngine):  # type: ignore[misc]
    """The text has the stop string."""

    async def generate(self, request: GenerateRequest) -> Generation:
        found = await super().generate(request)
        return found if found.text is None else replace(found, text=found.text + request.sampling.stop[0])


class Cuts(PlainEngine):  # type: ignore[misc]
    """A prompt that is too long is cut."""

    async def generate(self, request: GenerateRequest) -> Generation:
        try:
            return await super().generate(request)
        except ContextOverflowError:
            return await super().generate(replace(request, prompt_ids=request.prompt_ids[-10:]))


class Leaks(PlainEngine):  # type: ignore[misc]
    """A cancelled request keeps its slot."""

    async def generate(self, request: GenerateRequest) -> Generation:
        try:
            return await super().generate(request)
        except asyncio.CancelledError:
            await self._slots.acquire()
            raise


class Free(PlainEngine):  # type: ignore[misc]
    """A constraint is left out in silence."""

    async def generate(self, request: GenerateRequest) -> Generation:
        return await super().generate(replace(request, constraint=None))


class OldMemory(PlainEngine):  # type: ignore[misc]
    """A request that runs while weights come is sampled to its end with the old ones, as from their KV."""

    async def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        old = {name: one.detach().clone() for name, one in self._model.named_parameters()}
        await super().load(version, tensors)
        new, plain_next = dict(tensors), self._next
        running = {id(task) for task in self._running}

        def remembered(request: GenerateRequest, ids: list[int]) -> Any:
            task = asyncio.current_task()
            weights = old if id(task) in running else new
            for name, parameter in self._model.named_parameters():
                parameter.data.copy_(weights[name])
            return plain_next(request, ids)

        self._next = remembered


class Waits(PlainEngine):  # type: ignore[misc]
    """Weights come when nothing runs."""

    async def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        await asyncio.gather(*self._running)
        await super().load(version, tensors)


class Lenient(PlainEngine):  # type: ignore[misc]
    """Weights that are missing stay as they were."""

    async def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        await super().load(version, {**dict(self._model.named_parameters()), **tensors})


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (Untruncated, r"top_p=0.6.*the logprobs .* are not those of a plain forward pass"),
        (OneStream, r"noise \d sampled .* alone, and .* beside other requests"),
        (Deaf, r"six different `noise` all sampled"),
        (KeepsStop, r"text before the stop string '(.)' of .* is .*\1'$"),
        (Cuts, r"a prompt of 96 ids, the whole context, was not refused"),
        (Free, r"constrained to yes or no"),
        (OldMemory, r"a token after a load may use nothing computed by older weights"),
        (Waits, r"no request ran on while weights were loaded"),
        (Lenient, r"weights without .* were loaded"),
    ],
)
def test_an_engine_that_breaks_the_contract_is_told_how(engine: Any, said: str, toy_model_dir: Path) -> None:
    with pytest.raises(AssertionError, match=said):
        check_engine(engine.start, toy_model_dir)


def test_a_part_of_the_contract_that_never_ends_is_told(toy_model_dir: Path) -> None:
    """Where a loaded machine takes as long for another part, a longer limit is tried."""
    for limit_s in (1.0, 4.0, 16.0, 300.0):
        with pytest.raises(AssertionError) as caught:
            check_engine(Leaks.start, toy_model_dir, limit_s=limit_s)
        if "Cancelled requests" in str(caught.value):
            break
    assert str(caught.value).startswith(f"after {limit_s:g} s this had not ended: Cancelled requests")
