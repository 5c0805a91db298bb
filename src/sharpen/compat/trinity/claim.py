"""An experience that a workflow constructed: which recorded calls it claims to be.

In: the tokens, prompt length, logprobs and mask that it was constructed with. Out: the indices of the recorded calls
with exactly these tokens. Nothing of what was given is trained: the record is.

Shape suffixes: T all tokens, R those after the prompt, P the prompt's, S the sampled ones of a call.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from sharpen.errors import ConfigError
from sharpen.types import BoolArray, Call, FloatArray, IntArray

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What was given. `tokens_T` is None where an endpoint answered, whose answers have no tokens."""

    tokens_T: IntArray | None
    prompt_length: int
    logprobs_R: FloatArray | None
    mask_R: BoolArray | None
    response_text: str

    @classmethod
    def of(cls, tokens: Any, prompt_length: int, logprobs: Any, action_mask: Any, response_text: str) -> Self:
        """From tensors, arrays or lists."""
        return cls(
            tokens_T=None if tokens is None else np.asarray(tokens, np.int32).reshape(-1),
            prompt_length=int(prompt_length),
            logprobs_R=None if logprobs is None else np.asarray(logprobs, np.float32).reshape(-1),
            mask_R=None if action_mask is None else np.asarray(action_mask, np.bool_).reshape(-1),
            response_text=response_text,
        )

    def tensor(self) -> Tensor | None:
        """The tokens as a tensor."""
        if self.tokens_T is None:
            return None
        import torch

        return torch.from_numpy(self.tokens_T.copy())

    def calls(self, name: str, recorded: Mapping[int, Call], taken: Collection[int]) -> list[int]:
        """The indices of the calls that it stands for, in order: one whose prompt and answer are these tokens, and
        those before it in the same sequence from `prompt_length` on. Of equal ones, one that is not `taken` yet.

        Raises `ConfigError` where no call has these tokens, or what was given contradicts the record.
        """
        found = [index for index, call in recorded.items() if np.array_equal(_ids(call), self._tokens(name))]
        if not found:
            raise ConfigError(
                f"workflow {name} constructed an Experience of {len(self._tokens(name))} tokens, which are not those "
                "of any recorded call: construct it of exp.tokens as they are, or return exp itself with its reward set"
            )
        last = next((index for index in found if index not in taken), found[0])
        chain = [last]
        while (parent := recorded[chain[0]].parent) is not None:
            chain.insert(0, parent)
        within = [index for index in chain if len(recorded[index].prompt_ids_P) >= self.prompt_length]
        if not within or len(recorded[within[0]].prompt_ids_P) != self.prompt_length:
            begins = ", ".join(str(len(recorded[index].prompt_ids_P)) for index in chain)
            raise ConfigError(
                f"workflow {name} constructed an Experience with prompt_length {self.prompt_length}, but the answers "
                f"in its tokens begin at {begins}: pass prompt_length=exp.prompt_length"
            )
        self._check(name, [recorded[index] for index in within])
        return within

    def leaves_out(self) -> bool:
        """Whether its mask is all false: it counts, and is not trained."""
        return self.mask_R is not None and not self.mask_R.any()

    def _tokens(self, name: str) -> IntArray:
        if self.tokens_T is None:
            raise ConfigError(
                f"workflow {name} constructed an Experience without tokens: take those of model.chat() or "
                "model.extract_experience_from_history(), so that what was sampled is trained, and set their reward"
            )
        return self.tokens_T

    def _check(self, name: str, calls: list[Call]) -> None:
        """Raise `ConfigError` for a mask or logprobs that differ from the record, which would have no effect."""
        logprobs_R, mask_R = _recorded(calls)
        if self.mask_R is not None and self.mask_R.any() and not np.array_equal(self.mask_R, mask_R):
            raise ConfigError(
                f"workflow {name} constructed an Experience whose action_mask is a part of what was sampled: pass "
                "exp.action_mask, or all false to leave it out of training"
            )
        given = self.logprobs_R
        if given is not None and not (len(given) == len(mask_R) and np.allclose(given[mask_R], logprobs_R[mask_R])):
            raise ConfigError(
                f"workflow {name} constructed an Experience with logprobs other than the recorded ones: pass "
                "exp.logprobs; what was recorded is what is trained"
            )


def _ids(call: Call) -> IntArray:
    return np.concatenate([call.prompt_ids_P, call.sampled_ids_S])


def _recorded(calls: list[Call]) -> tuple[FloatArray, BoolArray]:
    """Logprobs and mask of the tokens after the first prompt."""
    start, end = len(calls[0].prompt_ids_P), len(_ids(calls[-1]))
    logprobs_R, mask_R = np.zeros(end - start, np.float32), np.zeros(end - start, np.bool_)
    for call in calls:
        span = slice(len(call.prompt_ids_P) - start, len(_ids(call)) - start)
        logprobs_R[span], mask_R[span] = call.logprobs_S, True
    return logprobs_R, mask_R
