"""Guesses why the logprobs of trainer and engine differ.

In: both logprobs of the compared tokens, and their temperatures. Out: a clause for the error message. The clearest
patterns are tried first: a constant shift, another temperature, no correlation at all.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

MIN_TOKENS = 8
"""With fewer tokens, no pattern is looked for."""
NEAR_ROUNDING = 4.0
"""Up to this multiple of the limit, rounding is the likeliest cause."""


def likeliest_cause(
    now_K: Array, recorded_K: Array, temperatures_K: Array, *, rounding: float | None, at_start: bool
) -> str:
    """Return a clause that names the likeliest cause. `rounding` is in logits, or None for float32. `at_start` says
    that both sides should have the weights of the model's files."""
    finite_K = np.isfinite(now_K) & np.isfinite(recorded_K)
    if not finite_K.all():
        return f"{int((~finite_K).sum())} logprobs are not finite: the weights hold NaN or infinite numbers"
    if len(now_K) >= MIN_TOKENS:
        pattern = _shift(now_K, recorded_K) or _temperature(now_K, recorded_K) or _unrelated(now_K, recorded_K)
        if pattern:
            return pattern
    gap = float(np.median(np.abs(now_K - recorded_K) * np.minimum(temperatures_K, 1.0)))
    if rounding is not None and gap <= NEAR_ROUNDING * 8.0 * rounding:
        return (
            "the engine's rounding in bfloat16 is larger than measured, or its weights are slightly out of date. Set "
            "engine.dtype and trainer.dtype to float32: if the difference disappears, it was rounding"
        )
    if rounding is None and gap <= 0.05:
        return (
            "the engine rounds (bfloat16, or quantized weights) although float32 is configured, or it got only part "
            "of a weight update"
        )
    if at_start:
        return (
            "the engine serves a different model than the trainer trains (other files, another dtype), or its "
            "logprobs are not those of the distribution that it samples from (processed logprobs)"
        )
    return (
        "a weight update did not reach the engine, or only part of it did (an adapter or a tied output layer is "
        "missing), or the trained ids are not the sampled ones"
    )


def _shift(now_K: Array, recorded_K: Array) -> str:
    gaps_K = recorded_K - now_K
    if np.std(gaps_K) > 0.1 * abs(np.mean(gaps_K)):
        return ""
    return f"every recorded logprob is off by about {np.mean(gaps_K):+.3g}: the engine's logprobs have an offset"


def _temperature(now_K: Array, recorded_K: Array) -> str:
    """Detect another temperature: recorded logprobs are then linear in the trainer's, with small residuals."""
    spread = np.var(now_K)
    if spread < 1e-6:
        return ""
    slope = float(np.mean((now_K - now_K.mean()) * (recorded_K - recorded_K.mean())) / spread)
    rest_K = recorded_K - recorded_K.mean() - slope * (now_K - now_K.mean())
    if abs(slope - 1.0) < 0.05 or np.var(rest_K) > 0.05 * np.var(recorded_K):
        return ""
    way = "lower" if slope > 1.0 else "higher"
    return (
        f"the engine's temperature is {way} than the recorded one (its logprobs are {slope:.2f} times as far apart): "
        "either the engine or the trainer ignores the temperature or applies a wrong one"
    )


def _unrelated(now_K: Array, recorded_K: Array) -> str:
    if np.var(now_K) < 1e-6 or np.var(recorded_K) < 1e-6 or np.corrcoef(now_K, recorded_K)[0, 1] > 0.5:
        return ""
    return (
        "the two sets of logprobs are nearly unrelated: the token ids are not the sampled ones, the models differ, or "
        "the output layer is permuted or out of date"
    )
