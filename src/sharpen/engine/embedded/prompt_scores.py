"""The logprobs of a prompt's own tokens, for a request that asks for them.

In: the logits at positions of the prompt, in any number of pieces. Out: `PromptLogprobs`. A prompt that is computed
again, since its weights changed, writes over what it had.

Shape suffixes: X positions of the prompt, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from sharpen.contracts import PromptLogprobs
from sharpen.types import IntArray


class PromptScores:
    """Collects the scores of one prompt."""

    def __init__(self, prompt_ids: IntArray, num_top: int) -> None:
        """`num_top` likeliest tokens are kept in the place of each."""
        self._ids, self._num_top = prompt_ids.astype(np.int64), num_top
        self._logprobs = np.zeros(len(prompt_ids) - 1, np.float32)
        self._top: list[tuple[tuple[int, float], ...]] = [()] * (len(prompt_ids) - 1)

    def note(self, position_X: npt.NDArray[np.int64], logits_XV: torch.Tensor) -> None:
        """Note the logits at some positions, each of which has a token of the prompt after it."""
        log_XV = torch.log_softmax(logits_XV, dim=-1)
        next_X1 = torch.from_numpy(self._ids[position_X + 1]).to(log_XV.device).unsqueeze(1)
        self._logprobs[position_X] = log_XV.gather(1, next_X1).squeeze(1).cpu().numpy()
        if not self._num_top:
            return
        values, ids = log_XV.topk(min(self._num_top, log_XV.shape[1]))
        for position, *likeliest in zip(position_X, ids.tolist(), values.tolist(), strict=True):
            self._top[position] = tuple(zip(*likeliest, strict=True))

    def result(self) -> PromptLogprobs:
        """Return the scores, once all positions have been noted."""
        return PromptLogprobs(logprobs=self._logprobs.copy(), top_logprobs=tuple(self._top))
