"""The seconds of a step by the speed of this processor: the product's own trainer and engine on a copy of the model
with one layer, and with two.

In: a `Case`. Out: a `Speed`, which says how long a workload takes; None where that cannot be measured so. What the
second layer adds is taken times the number of layers; what is left of the first is that of the output layer. The
weights are all alike, but of the real shapes and types, read from a file as the run will read its own.

Measured is the model's computing alone. The agent's own time, updates of the weights and what stands around a call come
on top, so that models below `LEAST_PARAMETERS` get no such figure.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers.utils import logging

from sharpen.contracts import GenerateRequest
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.errors import ModelError
from sharpen.learning.recipe import RolloutRecipe
from sharpen.learning.trainer.lora import load_trained
from sharpen.learning.trainer.packing import pack
from sharpen.models.files import quiet_transformers
from sharpen.models.modules import skeleton
from sharpen.models.pieces import text_config
from sharpen.run.plan.case import Case
from sharpen.run.plan.live import blank, shallow
from sharpen.run.plan.memory import in_flight
from sharpen.run.plan.workload import Workload
from sharpen.types import Experience, Sampling

LEAST_PARAMETERS = 10_000_000
"""Of a smaller model, computing is the smaller part of a step."""
_TRAINED, _SCORED = 1024, 128
"""About how many tokens are trained to measure, and how many of them carry loss."""
_STEPS = 8
"""Decode steps to measure."""
_TURNS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Seconds of the processor: of the trainer for each computed token in all layers, and for each token with loss in
    the output layer; of the reference for both; of the engine for each token of a prompt, and for a step in which each
    of `rows` sequences gets a token. `took` to measure."""

    trained: float
    scored: float
    compared: tuple[float, float]
    prompt: float
    decode: float
    rows: int
    took: float

    def generating(self, work: Workload) -> float:
        """Return the seconds in which the engine computes the rollouts of a step. A prompt that a group shares is
        computed once."""
        if not work.generates:
            return 0.0
        prompts = max(0.0, work.computed_tokens - work.sequences * work.answer_tokens)
        waves = max(1.0, work.sequences / self.rows)
        return prompts * self.prompt + waves * work.answer_tokens * self.decode

    def training(self, work: Workload, epochs: int) -> float:
        """Return the seconds in which the trainer computes a step, and the reference if there is one."""
        once = work.computed_tokens * self.trained + work.loss_tokens * self.scored
        return epochs * once + work.computed_tokens * self.compared[0] + work.loss_tokens * self.compared[1]


def measure_speed(case: Case) -> Speed | None:
    """Measure; some seconds for a model of 0.6B. None for what is not measured: another machine, vLLM, several
    processes, models with experts, recurrent layers or towers, small ones, and runs that compute with further
    models. Raises `ModelError` where the copy cannot be written or computed: no room on the disk, no package for 4
    bits."""
    if not _can_measure(case):
        return None
    quiet_transformers()
    begun = time.perf_counter()
    sample = _sample_of(case)
    try:
        with _without_warnings():
            one, two = (_measure_copy(case, sample, depth) for depth in (1, 2))
    except (ImportError, OSError, RuntimeError, SafetensorError, ValueError) as error:  # no reason to end a run
        raise ModelError(f"a copy of two layers cannot be measured: {error}") from error
    of = {name: whole(one[name], two[name], case.models.policy.num_layers) for name in one}
    trained, scored = of["trained"]
    layers, output = of.get("compared", (0.0, 0.0))
    return Speed(
        trained=trained / sample.tokens,
        scored=scored / sample.loss,
        compared=(layers / sample.tokens, output / sample.loss),
        prompt=of["prompt"][0] / sample.context if "prompt" in of else 0.0,
        decode=sum(of.get("decode", ())),
        rows=_rows(case),
        took=time.perf_counter() - begun,
    )


def whole(one: float, two: float, num_layers: int) -> tuple[float, float]:
    """Return the seconds of all layers, and of what is no layer, from those of a model with one layer and with two. A
    layer takes no longer than a model with one: so much is certain where something else computed in between."""
    layer = min(max(0.0, two - one), one)
    return num_layers * layer, max(0.0, one - layer)


def _can_measure(case: Case) -> bool:
    config, sizes = case.config, case.models.policy
    here = case.hardware.name == "this machine's CPU" and case.engine in (None, "embedded")
    alone = not (config.uses_ray or config.trainer.has_ranks) and config.mode == "both"
    recipe = case.recipe
    further = isinstance(recipe, RolloutRecipe) and (recipe.algorithm.needs_teacher or recipe.algorithm.needs_critic)
    return here and alone and not further and sizes.is_dense and sizes.parameters >= LEAST_PARAMETERS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """What is computed to measure: sequences of this length, of which so many tokens carry loss, for the trainer; for
    the engine rows after so many tokens of context, half of an answer among them."""

    length: int
    sequences: int
    loss_of_each: int
    context: int

    @property
    def tokens(self) -> int:
        return self.length * self.sequences

    @property
    def loss(self) -> int:
        return self.loss_of_each * self.sequences


def _sample_of(case: Case) -> _Sample:
    work, limit = case.workload, case.config.model.max_model_len
    length = max(2, min(limit, round(work.prompt_tokens + work.answer_tokens)))
    count = max(1, min(_TRAINED, case.config.trainer.max_tokens_per_micro_batch) // length)
    context = max(1, min(limit - _STEPS - 3, round(work.prompt_tokens + work.answer_tokens / 2)))
    return _Sample(
        length=length, sequences=count, loss_of_each=max(1, min(length - 1, _SCORED // count)), context=context
    )


def _rows(case: Case) -> int:
    """Return how many rollouts of a step the engine computes at the same time."""
    return min(in_flight(case), case.workload.sequences)


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Let transformers say nothing of a copy, for the time of a block: nobody has set what it warns of."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _measure_copy(case: Case, sample: _Sample, depth: int) -> dict[str, float]:
    """Return the seconds of what is computed, by name, of a copy with so many layers."""
    with tempfile.TemporaryDirectory(prefix="sharpen-") as name:
        folder = Path(name)
        write_copy(case.models.config, depth, folder)
        return {**_train(case, sample, folder), **({} if case.engine is None else _generate(case, sample, folder))}


def write_copy(config: Any, depth: int, folder: Path) -> None:
    """Write a model with this configuration but so many layers, all of whose weights and buffers are alike."""
    few = shallow(config, depth)
    module = skeleton(few, text_config(few).dtype or torch.float32).to_empty(device="cpu")
    for tensor in module.state_dict().values():
        tensor.fill_(0.01)
    module.tie_weights()
    module.save_pretrained(folder)


def _train(case: Case, sample: _Sample, folder: Path) -> dict[str, float]:
    model = load_trained(folder, case.config.trainer, torch.device("cpu"))

    def sequence(number: int) -> Experience:
        """One that has nothing in common with the others."""
        own = blank(sample.length, sample.loss_of_each, str(number))
        return replace(own, ids_T=own.ids_T + number + 1)

    packed = pack([sequence(number) for number in range(sample.sequences)], sample.tokens)
    algorithm = case.recipe.algorithm if isinstance(case.recipe, RolloutRecipe) else None
    by_entropy = algorithm is not None and algorithm.needs_entropy

    def train() -> None:
        for part in packed:
            scores = model.score(part, entropy_gradient=by_entropy)
            (scores.logprobs_E.sum() + scores.entropy_E.sum()).backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def compare() -> None:
        for part in packed:
            model.score(part)

    seconds = {"trained": fastest(train)}
    if algorithm is not None and algorithm.needs_reference:
        seconds["compared"] = fastest(compare)
    return seconds


def _generate(case: Case, sample: _Sample, folder: Path) -> dict[str, float]:
    config, rows = case.config, _rows(case)
    lora = config.trainer.lora
    engine = EmbeddedEngine.from_pretrained(
        str(folder),
        max_model_len=config.model.max_model_len,
        device="cpu",
        dtype=config.engine.dtype,
        max_slots=config.engine.max_slots,
        kv_cache_mb=config.engine.kv_cache_mb,
        adapters=lora if lora is not None and lora.base != "own" else None,
    )

    def generate(first: int, rows: int, new: int) -> None:
        """`rows` sequences with one prompt, which begins with `first`, and so many new tokens."""
        prompt = np.full(sample.context, 1, np.int32)
        prompt[0] = first

        async def everyone() -> None:
            sampling = Sampling(max_tokens=new)
            requests = [GenerateRequest(prompt_ids=prompt, sampling=sampling, noise=row) for row in range(rows)]
            await asyncio.gather(*(engine.generate(request) for request in requests))

        asyncio.run(everyone())

    firsts = iter(range(2, 2 + _TURNS))
    prompt_s = fastest(lambda: generate(next(firsts), 1, 1))
    few, many = (fastest(functools.partial(generate, 2, rows, new)) for new in (2, 2 + _STEPS))
    asyncio.run(engine.close())
    return {"prompt": prompt_s, "decode": max(0.0, many - few) / _STEPS}


def fastest(computed: Callable[[], object], *, long_s: float = 5.0) -> float:
    """Return the seconds of the faster of two turns; of the first alone where it took longer than `long_s`, so that a
    slow or busy machine begins its run in reasonable time."""
    seconds: list[float] = []
    while len(seconds) < _TURNS and sum(seconds) <= long_s:
        begun = time.perf_counter()
        computed()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)
