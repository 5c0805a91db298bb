"""A few tokens of one fixed prompt, sampled right after a weight update: proof that the engine serves the new weights.

In: an engine, prompt ids. Out: an `Experience` that carries no loss, of each replica where there are several. The
trainer scores them and compares, where a step holds no token of its own policy version; so rollouts that run ahead
never go without the comparison.
"""

from __future__ import annotations

import numpy as np

from agenttune.inference.engine import Engine, GenerateRequest, Generation
from agenttune.inference.routing import Replicas
from agenttune.types import Experience, IntArray, Sampling

NUM_TOKENS = 16


async def sample_probes(
    engine: Engine, prompt_ids_P: IntArray, *, temperature: float, noise: int
) -> tuple[Experience, ...]:
    """Sample a probe on each replica. Raises `EngineError` as the engine does."""
    sampling = Sampling(temperature=temperature, max_tokens=NUM_TOKENS)
    request = GenerateRequest(prompt_ids=prompt_ids_P, sampling=sampling, noise=noise)
    found = await engine.generate_each(request) if isinstance(engine, Replicas) else [await engine.generate(request)]
    return tuple(_experience(prompt_ids_P, one, temperature) for one in found)


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
    )
