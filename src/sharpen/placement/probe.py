"""Probes: a few tokens that an engine samples, to compare its logprobs with the trainer's. They are not trained on.

In: an engine, prompt ids. Out: an `Experience` without loss from each replica. After a weight update a probe of one
fixed prompt shows that the engine serves the new weights. Rollouts that run ahead need it, since their step may contain
no token of the current policy version. At the start of a session, before the trainer is loaded, probes of prompts made
from the run's tasks measure the rounding (`trainer.rounding`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sharpen.contracts import Engine, GenerateRequest, Generation
from sharpen.engine.routing import Replicas
from sharpen.gateway.render import Renderer
from sharpen.gateway.requests import ApiError
from sharpen.learning.recipe import Job, Recipe
from sharpen.types import Experience, IntArray, Sampling, Task

NUM_TOKENS = 16
NUM_PROMPTS, MAX_CHARACTERS = 8, 200
"""The number of prompts at the start, and the characters of a task's row that each takes."""


async def sample_probes(
    engine: Engine, prompt_ids_P: IntArray, *, temperature: float, noise: int
) -> tuple[Experience, ...]:
    """Sample a probe on each replica. Raises `EngineError` as the engine does."""
    sampling = Sampling(temperature=temperature, max_tokens=NUM_TOKENS)
    request = GenerateRequest(prompt_ids=prompt_ids_P, sampling=sampling, noise=noise)
    found = await engine.generate_each(request) if isinstance(engine, Replicas) else [await engine.generate(request)]
    return tuple(_experience(prompt_ids_P, one, temperature) for one in found)


class Probed(Protocol):
    """What is asked for probes: a model's folder and its engines; see `placement.place.Serving`."""

    @property
    def folder(self) -> Path: ...
    def probe(self, prompt_ids_P: IntArray, *, noise: int, temperature: float) -> Future[tuple[Experience, ...]]: ...


def probe_at_start(job: Job[Recipe], serving: Probed, tasks: Sequence[Task]) -> tuple[Experience, ...]:
    """Sample probes of a few prompts with the original weights, on each replica; none if both engine and trainer
    compute in float32. Raises `EngineError` as the engine does."""
    if not _may_round(job):
        return ()
    from sharpen.models.configuration import load_tokenizer

    room = job.config.model.max_model_len - NUM_TOKENS
    renderer = Renderer(load_tokenizer(serving.folder))
    prompts = [_prompt(task, renderer)[: max(1, room)] for task in tasks[:NUM_PROMPTS]]
    begun = [serving.probe(prompt, noise=number, temperature=1.0) for number, prompt in enumerate(prompts)]
    return tuple(one for future in begun for one in future.result())


def _may_round(job: Job[Recipe]) -> bool:
    """Whether the engine or the trainer computes in bfloat16, or may (on Ray, where the machines are not known yet)."""
    config = job.config
    dtypes = {config.engine.dtype, config.trainer.dtype}
    if "auto" not in dtypes or "bfloat16" in dtypes:
        return "bfloat16" in dtypes
    if config.engine.device != "auto" or config.uses_ray:
        return config.engine.device != "cpu"
    import torch

    return torch.cuda.is_available()


def _prompt(task: Task, renderer: Renderer) -> IntArray:
    """Render the row's values as one message, or as plain text if the template refuses the message."""
    text = "\n".join(str(value) for value in task.row.values())[:MAX_CHARACTERS] or task.id
    message: dict[str, Any] = {"role": "user", "content": text}
    try:
        return renderer.encode(renderer.render([message], [], {}))
    except ApiError:
        return renderer.encode(text.encode("utf-8", "replace").decode())


def _experience(prompt_ids_P: IntArray, found: Generation, temperature: float) -> Experience:
    num_prompt = len(prompt_ids_P)
    ids_T = np.concatenate([prompt_ids_P, found.ids]).astype(np.int32, copy=False)
    count = len(ids_T)
    mask_T = np.arange(count) >= num_prompt
    logprobs_T, versions_T = np.zeros(count, np.float32), np.full(count, -1, np.int32)
    logprobs_T[mask_T], versions_T[mask_T] = found.logprobs, found.versions
    return Experience(
        rollout_id="probe",
        group_id="probe",
        task_id="probe",
        ids_T=ids_T,
        loss_mask_T=mask_T,
        logprobs_T=logprobs_T,
        versions_T=versions_T,
        calls_T=np.where(mask_T, 0, -1).astype(np.int32),
        temperatures_T=np.where(mask_T, temperature, 1.0).astype(np.float32),
        advantages_T=np.zeros(count, np.float32),
        weights_T=np.zeros(count, np.float32),
        routes_NLK=found.routes_NLK,
    )
