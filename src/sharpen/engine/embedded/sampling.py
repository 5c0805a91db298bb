"""Token sampling.

In: logits and per-row parameters. Out: token ids and the exact logprobs that they were drawn with. The token is the
inverse of the cumulative distribution at one uniform number per row, in float64 within a block of ids; the logprob is
the log-softmax, in fp32, of the same distribution: among the tokens that a constraint allows, after temperature, and
renormalized after truncation (top-k, then top-p). A greedy row (temperature 0) takes the largest logit and reports its
logprob at temperature 1.

Shape suffixes: R rows, C rows with a constraint, V vocabulary, W words of a mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sharpen.engine.embedded.batch import on_device
from sharpen.engine.token_masks import forbid

# Counter-based random numbers: one uniform number per (noise key, position), independent of other requests.
#
# In: 64-bit keys and positions. Out: uniforms in [0, 1) as float64, computed by two rounds of the splitmix64 finalizer.
#
# Array shape suffixes: R rows.

UInt64Array = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_ONE = np.uint64(1)


def uniforms(noise_R: UInt64Array, position_R: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return uniforms in [0, 1 - 2^-52], shape R, a pure function of each row's (key, position).

    They have 52 bits so that `u * total` stays below `total` in float64.
    """
    counter_R = (position_R.astype(np.uint64) + _ONE) * _GOLDEN
    bits_R = _mix(_mix(noise_R) + counter_R)
    uniform_R: npt.NDArray[np.float64] = (bits_R >> np.uint64(12)).astype(np.float64) * 2.0**-52
    return uniform_R


def _mix(bits_R: UInt64Array) -> UInt64Array:
    """Apply the splitmix64 finalizer (Steele, Lea and Flood, 2014)."""
    bits_R = (bits_R ^ (bits_R >> np.uint64(30))) * _MIX_A
    bits_R = (bits_R ^ (bits_R >> np.uint64(27))) * _MIX_B
    return bits_R ^ (bits_R >> np.uint64(31))


_CHUNK_ELEMENTS = {"cpu": 1_000_000, "cuda": 64_000_000}  # limits the scratch memory of large vocabularies

_BLOCK = 4096
"""Ids that are added up in float64 at a time."""

_LARGEST_UNIFORM = 1 - 2.0**-52


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """The parameters of each row, on the CPU: float64 uniforms, fp32 temperatures, top-p and min-p (1 and 0: off),
    int64 top-k (0: off).

    If some rows have a constraint, `constrained_C` are their numbers and `masks_CW` their masks (`token_masks`)."""

    uniform_R: torch.Tensor
    temperature_R: torch.Tensor
    top_p_R: torch.Tensor
    top_k_R: torch.Tensor
    min_p_R: torch.Tensor
    constrained_C: torch.Tensor | None = None
    masks_CW: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """The sampled ids and their logprobs, shape R, and the log-distribution they were drawn from, shape RV."""

    ids_R: torch.Tensor
    logprobs_R: torch.Tensor
    log_distribution_RV: torch.Tensor


class ScratchRV:
    """fp32 memory for R rows of V, used again for each step: the pages of fresh memory of this size take a CPU longer
    than what is computed in them. What was taken is overwritten by what is taken next."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def take(self, like_RV: torch.Tensor) -> torch.Tensor:
        """Return uninitialised memory of a tensor's shape."""
        if self._memory.numel() < like_RV.numel():
            self._memory = torch.empty(like_RV.numel(), device=like_RV.device)
        return self._memory[: like_RV.numel()].view(like_RV.shape)


def sample(logits_RV: torch.Tensor, rows: SamplingRows, out_RV: torch.Tensor | None = None) -> SampledRows:
    """Draw one token per row. `logits_RV` is fp32 and is not changed; the log-distribution is written to `out_RV`."""
    log_distribution_RV = _log_distribution(_constrained(logits_RV, rows), rows, out_RV)
    greedy_R = rows.temperature_R == 0
    if bool(greedy_R.all()):
        ids_R = log_distribution_RV.argmax(dim=-1)
    else:
        ids_R = _inverse_cdf(log_distribution_RV, on_device(rows.uniform_R, logits_RV.device))
        if bool(greedy_R.any()):
            ids_R = torch.where(on_device(greedy_R, ids_R.device), log_distribution_RV.argmax(dim=-1), ids_R)
    logprobs_R = log_distribution_RV.gather(1, ids_R.unsqueeze(1)).squeeze(1)
    return SampledRows(ids_R=ids_R, logprobs_R=logprobs_R, log_distribution_RV=log_distribution_RV)


def _constrained(logits_RV: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Return the logits with -inf for tokens that a row's constraint does not allow."""
    if rows.constrained_C is None or rows.masks_CW is None:
        return logits_RV
    device = logits_RV.device
    return forbid(logits_RV, on_device(rows.constrained_C, device), on_device(rows.masks_CW, device), -torch.inf)


def _log_distribution(logits_RV: torch.Tensor, rows: SamplingRows, out_RV: torch.Tensor | None) -> torch.Tensor:
    device = logits_RV.device
    divisor_R = torch.where(rows.temperature_R == 0, 1.0, rows.temperature_R)
    if not bool((divisor_R == 1.0).all()):
        logits_RV = logits_RV / on_device(divisor_R, device).unsqueeze(1)
    log_distribution_RV = torch.log_softmax(logits_RV, dim=-1, out=out_RV)
    sampled_R = rows.temperature_R != 0
    truncated_R = sampled_R & ((rows.top_p_R < 1.0) | (rows.top_k_R > 0) | (rows.min_p_R > 0.0))
    if bool(truncated_R.any()):
        index = truncated_R.nonzero().squeeze(1)
        device_index = on_device(index, device)
        top_p_T, top_k_T, min_p_T = (
            on_device(one_R[index], device) for one_R in (rows.top_p_R, rows.top_k_R, rows.min_p_R)
        )
        log_distribution_RV[device_index] = truncated_log_softmax(logits_RV[device_index], top_p_T, top_k_T, min_p_T)
    return log_distribution_RV


def truncated_log_softmax(
    logits_RV: torch.Tensor, top_p_R: torch.Tensor, top_k_R: torch.Tensor, min_p_R: torch.Tensor
) -> torch.Tensor:
    """Return the log-softmax over the kept tokens, -inf elsewhere.

    Kept are, of the `top_k` largest that are at least `min_p` times as likely as the largest, the smallest set with a
    mass of at least `top_p`: a token is kept while the mass of the likelier ones is below `top_p`, so at least one
    always is. Ties are broken by id. That is vLLM's order: `min_p`, `top_k`, `top_p`.
    """
    vocab_size = logits_RV.shape[1]
    sorted_RV, order_RV = torch.sort(logits_RV, dim=-1, descending=True, stable=True)
    limit_R = torch.where(top_k_R > 0, top_k_R, vocab_size)
    outside_RV = torch.arange(vocab_size, device=logits_RV.device) >= limit_R.unsqueeze(1)
    outside_RV |= sorted_RV < sorted_RV[:, :1] + min_p_R.log().unsqueeze(1)
    sorted_RV = sorted_RV.masked_fill(outside_RV, -torch.inf)
    mass_RV = torch.softmax(sorted_RV, dim=-1, dtype=torch.float64)
    likelier_RV = mass_RV.cumsum(dim=-1) - mass_RV
    beyond_RV = (likelier_RV >= top_p_R.to(torch.float64).unsqueeze(1)) & (top_p_R < 1.0).unsqueeze(1)
    beyond_RV[:, 0] = False
    sorted_RV = torch.log_softmax(sorted_RV.masked_fill(beyond_RV, -torch.inf), dim=-1)
    return torch.empty_like(sorted_RV).scatter_(1, order_RV, sorted_RV)


def _inverse_cdf(log_distribution_RV: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """Return the first id whose cumulative probability exceeds `uniform * total`; its probability is never zero."""
    num_rows, vocab_size = log_distribution_RV.shape
    elements = _CHUNK_ELEMENTS.get(log_distribution_RV.device.type, _CHUNK_ELEMENTS["cpu"])
    chunk = max(1, elements // vocab_size)
    ids = [
        _by_blocks(log_distribution_RV[start : start + chunk], uniform_R[start : start + chunk])
        for start in range(0, num_rows, chunk)
    ]
    return torch.cat(ids) if len(ids) > 1 else ids[0]


def _by_blocks(log_distribution_RV: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """Choose a block of ids by its mass, then one of its ids with what is left of the uniform number, so that only that
    block is computed in float64. A vocabulary of one block needs no choice."""
    vocab_size = log_distribution_RV.shape[1]
    if vocab_size <= _BLOCK:
        return _first_beyond(log_distribution_RV.double().exp_(), uniform_R)[0]
    whole = vocab_size // _BLOCK * _BLOCK
    masses = [log_distribution_RV[:, :whole].reshape(len(log_distribution_RV), -1, _BLOCK).exp().sum(-1)]
    if whole < vocab_size:
        masses.append(log_distribution_RV[:, whole:].exp().sum(-1, keepdim=True))
    block_R, rest_R = _first_beyond(torch.cat(masses, dim=1).double(), uniform_R)
    id_RB = block_R.unsqueeze(1) * _BLOCK + torch.arange(_BLOCK, device=block_R.device)
    within_RB = log_distribution_RV.gather(1, id_RB.clamp(max=vocab_size - 1))
    within_RB.masked_fill_(id_RB >= vocab_size, -torch.inf)
    within_R, _ = _first_beyond(within_RB.double().exp_(), rest_R)
    return (block_R * _BLOCK + within_R).clamp_(max=vocab_size - 1)  # more only in a row with NaN


def _first_beyond(mass_RV: torch.Tensor, uniform_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first index up to which the masses exceed `uniform * total`, and where in that index's own mass this
    is: a uniform number again. `mass_RV` is overwritten."""
    cdf_RV = mass_RV.cumsum_(dim=-1)
    target_R1 = (uniform_R * cdf_RV[:, -1]).unsqueeze(1)
    index_R1 = torch.searchsorted(cdf_RV, target_R1, right=True).clamp_(max=mass_RV.shape[1] - 1)
    before_R1 = cdf_RV.gather(1, (index_R1 - 1).clamp_(min=0)).masked_fill_(index_R1 == 0, 0.0)
    rest_R1 = (target_R1 - before_R1) / (cdf_RV.gather(1, index_R1) - before_R1)
    return index_R1.squeeze(1), rest_R1.squeeze(1).clamp_(0.0, _LARGEST_UNIFORM)
