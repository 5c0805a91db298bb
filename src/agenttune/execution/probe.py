"""A few tokens of one fixed prompt, sampled right after a weight update: proof that the engine serves the new weights.

In: an engine, prompt ids. Out: an `Experience` that carries no loss. The trainer scores it and compares, where a step
holds no token of its own policy version; so rollouts that run ahead never go without the comparison.
"""

from __future__ import annotations

import numpy as np

from agenttune.inference.engine import Engine, GenerateRequest
from agenttune.types import Experience, IntArray, Sampling

NUM_TOKENS = 16


async def sample_probe(engine: Engine, prompt_ids_P: IntArray, *, temperature: float, noise: int) -> Experience:
    """Sample a probe. Raises `EngineError` as the engine does."""
    sampling = Sampling(temperature=temperature, max_tokens=NUM_TOKENS)
    found = await engine.generate(GenerateRequest(prompt_ids=prompt_ids_P, sampling=sampling, noise=noise))
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
