"""What teachers with other tokens say of the policy's, chunk by chunk.

In: sequences whose calls such a teacher has read anew (`Experience.rereads`), and its logprobs of its own tokens. Out:
for each loss entry of a pack the teacher's logprob of the entry's chunk, and the chunk's number. The teacher's
sequences are packed by themselves, a call each: what they share is computed once, as in any pack.

Shape suffixes: T tokens of a sequence, E loss entries of a pack, K chunks of a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from sharpen.learning.trainer.packing import IndexArray, Pack
from sharpen.types import Experience, Reread

_Key = tuple[str, int]
"""A rollout, and a call of it."""


class Readings:
    """The calls of some sequences, reread."""

    def __init__(self, experiences: Sequence[Experience]) -> None:
        """All calls with loss must have been reread."""
        self.sequences: list[Experience] = []
        self._read: dict[_Key, Reread] = {}
        self._said: dict[_Key, npt.NDArray[np.float64]] = {}
        self._dtype = torch.float32
        for one in experiences:
            for call in dict.fromkeys(one.calls_T[one.loss_mask_T].tolist()):
                assert call in one.rereads, f"call {call} of rollout {one.rollout_id} has no text for its teacher"
                self._read[one.rollout_id, call] = one.rereads[call]
                self.sequences.append(_as_read(one, call))

    def add(self, scored: Iterable[tuple[Pack, torch.Tensor]]) -> None:
        """Take the teachers' logprobs of packs of `sequences` (shape E of each)."""
        for pack, logprobs_E in scored:
            values_E, self._dtype = logprobs_E.double().cpu().numpy(), logprobs_E.dtype
            for key, entries in _calls(pack):
                said_K = np.bincount(self._read[key].chunks_R, values_E[entries])
                self._said[key] = said_K.astype(np.float64)

    def of(self, pack: Pack) -> tuple[torch.Tensor, IndexArray]:
        """Return the teacher's logprob of the chunk of each entry of a pack, and the numbers of the chunks (E)."""
        teacher_E, chunks_E, num_chunks = np.zeros(pack.num_trained_tokens), np.zeros(pack.num_trained_tokens, int), 0
        for key, entries in _calls(pack):
            own, said_K = self._read[key].chunks_S, self._said[key]
            teacher_E[entries], chunks_E[entries] = said_K[own], num_chunks + own
            num_chunks += len(said_K)
        return torch.from_numpy(teacher_E).to(self._dtype), chunks_E


def _calls(pack: Pack) -> Iterator[tuple[_Key, IndexArray]]:
    """Yield the calls of a pack, each with its entries in the order of their tokens."""
    numbers_E = pack.call_numbers_E
    order_E = np.lexsort((pack.tokens_E, numbers_E))
    for entries in np.split(order_E, np.flatnonzero(np.diff(numbers_E[order_E])) + 1):
        first = entries[0]
        yield (pack.rollout_ids[pack.rollouts_E[first]], int(pack.calls_E[first])), entries


def _as_read(one: Experience, call: int) -> Experience:
    """Return the teacher's sequence of a call. Its tokens are at the temperature that the policy's were sampled with;
    nothing else of them is recorded."""
    read = one.rereads[call]
    ids_T = np.concatenate([read.prompt_ids_P, read.answer_ids_R]).astype(np.int32)
    answer_T = np.arange(len(ids_T)) >= len(read.prompt_ids_P)
    nothing_T = np.zeros(len(ids_T), np.float32)
    temperature = one.temperatures_T[one.calls_T == call][0]
    return Experience(
        rollout_id=one.rollout_id,
        group_id=one.group_id,
        task_id=one.task_id,
        ids_T=ids_T,
        loss_mask_T=answer_T,
        logprobs_T=nothing_T,
        versions_T=np.full(len(ids_T), -1, np.int32),
        calls_T=np.where(answer_T, call, -1).astype(np.int32),
        temperatures_T=np.where(answer_T, temperature, 1.0).astype(np.float32),
        advantages_T=nothing_T,
        weights_T=nothing_T,
        teacher=one.teacher,
    )
