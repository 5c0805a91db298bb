"""What is likeliest wrong where trainer and engine differ, from the two sets of logprobs alone.

In: both logprobs of the compared tokens, their temperatures. Out: a clause for the error. It is a guess, in the order
of how sure the signs are: a constant shift, another temperature, no relation at all, then what is left.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

MIN_TOKENS = 8
"""Of fewer tokens no pattern is looked for."""
NEAR_ROUNDING = 4.0
"""Times the limit up to which rounding is likelier than anything else."""


def likeliest_cause(
    now_K: Array, recorded_K: Array, temperatures_K: Array, *, rounding: float | None, at_start: bool
) -> str:
    """A clause; see the module. `rounding` is in logits, None where float32 was asked for."""
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
            "this engine's rounding in bfloat16 is larger than was measured, or its weights are a little old. Set "
            "engine.dtype and trainer.dtype to float32: if the difference goes away, it was rounding"
        )
    if rounding is None and gap <= 0.05:
        return (
            "the engine rounds (bfloat16, or quantized weights) while float32 is configured, or a weight update did "
            "not reach all of it"
        )
    if at_start:
        return (
            "the engine serves another model than the trainer trains (other files, another type of weights), or its "
            "logprobs are not those of the distribution that it samples from (processed logprobs)"
        )
    return (
        "a weight update did not reach the engine, or not all of it (an adapter, a tied output layer), or the trained "
        "ids are not those that were sampled"
    )


def _shift(now_K: Array, recorded_K: Array) -> str:
    gaps_K = recorded_K - now_K
    if np.std(gaps_K) > 0.1 * abs(np.mean(gaps_K)):
        return ""
    return f"every recorded logprob is off by about {np.mean(gaps_K):+.3g}: something is added to what the engine says"


def _temperature(now_K: Array, recorded_K: Array) -> str:
    """Another temperature stretches logprobs; what the line does not explain must be small."""
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
        "one of the two leaves the temperature out, or applies another"
    )


def _unrelated(now_K: Array, recorded_K: Array) -> str:
    if np.var(now_K) < 1e-6 or np.var(recorded_K) < 1e-6 or np.corrcoef(now_K, recorded_K)[0, 1] > 0.5:
        return ""
    return (
        "the two hardly have anything in common: other token ids than were sampled, another model, or an output layer "
        "that is permuted or was left stale"
    )
