"""The slot table: for every slot its ids, how many of them have KV, and the sampling state of its request.

In: jobs to place, tokens to append. Out: vectorised views (which slots are active, which prefix is cached where). Plain
numpy, no torch. A slot is free (no ids), active (a job runs in it), or retained (a finished job's KV, kept for prefix
reuse).

Array shape suffixes: S slots, T positions, P prompt tokens, R rows of a step, N computed rows, L layers with experts, K
experts of a token.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sharpen.contracts import GenerateRequest, Generation
from sharpen.engine.embedded.pictures import JobPictures
from sharpen.engine.embedded.prompt_scores import PromptScores
from sharpen.models.routing import RouteShape
from sharpen.types import FloatArray, IntArray, RouteArray

if TYPE_CHECKING:
    from llguidance import LLMatcher

Indices = npt.NDArray[np.int64]


@dataclass(slots=True, kw_only=True, eq=False)
class SlotRequest:
    """A job: a request, the future of its result, and the tokens sampled before it was last suspended.

    `ids_T` are the prompt's ids and the sampled ones; of its images, the marks (`models.marks`).
    """

    request: GenerateRequest
    future: asyncio.Future[Generation]
    order: int
    max_new: int
    ids_T: IntArray
    adapter: int = 0
    """The number of the adapter that computes it; 0: none."""
    logprobs_S: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))
    versions_S: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    matcher: LLMatcher | None = None
    """The state of the request's constraint after the sampled tokens; None without one."""
    stops: frozenset[int] = frozenset()
    """Positions of the prompt at which the recurrent state is kept. Set by the scheduler."""
    pictures: JobPictures | None = None
    """The images of the prompt; None if it has none."""
    scores: PromptScores | None = None
    """The logprobs of the prompt's tokens as they are computed; None if the request does not ask for them."""
    supports: list[bytes] = field(default_factory=list)
    """The packed support of each sampled token of a truncated distribution; empty for others."""

    @property
    def num_prompt(self) -> int:
        """The number of prompt tokens."""
        return len(self.request.prompt_ids)


class SlotTable:
    """The state of all slots, as arrays. `kv_len_S` <= `num_ids_S`: ids beyond `kv_len_S` are still to be computed.

    `watched_S` marks slots to check after every token: their requests have stop strings, or ask for top logprobs or to
    be told of each token. `constrained_S` marks slots whose requests have a constraint, `truncated_S` those sampled
    with `top_p`, `top_k` or `min_p`. `routes_STLK` has the experts of each position with KV; its last two sizes are 0
    for a dense model. In `ids_ST` image tokens are marked: negative, and different for different images.
    """

    def __init__(self, routes: RouteShape | None = None) -> None:
        self.image_token_id = 0
        """What marks stand for; 0 until there is an image."""
        self.num_slots = 0
        self.length = 0
        self.jobs: list[SlotRequest | None] = []
        self.ids_ST = np.zeros((0, 0), np.int32)
        self.logprobs_ST = np.zeros((0, 0), np.float32)
        self.versions_ST = np.zeros((0, 0), np.int32)
        self.routes_STLK: RouteArray = np.zeros((0, 0, 0, 0), np.uint8)
        if routes is not None:
            self.routes_STLK = np.zeros((0, 0, routes.num_layers, routes.top_k), routes.dtype)
        self.num_ids_S = np.zeros(0, np.int64)
        self.kv_len_S = np.zeros(0, np.int64)
        self.last_used_S = np.zeros(0, np.int64)
        self.active_S = np.zeros(0, np.bool_)
        self.adapter_S = np.zeros(0, np.int64)
        self.num_prompt_S = np.zeros(0, np.int64)
        self.id_limit_S = np.zeros(0, np.int64)
        self.temperature_S = np.zeros(0, np.float32)
        self.top_p_S = np.zeros(0, np.float32)
        self.top_k_S = np.zeros(0, np.int64)
        self.min_p_S = np.zeros(0, np.float32)
        self.noise_S = np.zeros(0, np.uint64)
        self.watched_S = np.zeros(0, np.bool_)
        self.constrained_S = np.zeros(0, np.bool_)
        self.truncated_S = np.zeros(0, np.bool_)

    _PER_SLOT = (
        "num_ids_S",
        "kv_len_S",
        "last_used_S",
        "active_S",
        "adapter_S",
        "num_prompt_S",
        "id_limit_S",
        "temperature_S",
        "top_p_S",
        "top_k_S",
        "min_p_S",
        "noise_S",
        "watched_S",
        "constrained_S",
        "truncated_S",
    )
    _PER_POSITION = ("ids_ST", "logprobs_ST", "versions_ST", "routes_STLK")

    def resize(self, num_slots: int, length: int) -> None:
        """Reallocate the arrays, keeping the slots that fit. Slots beyond `num_slots` must not be active."""
        assert not self.active_S[num_slots:].any()
        kept = min(num_slots, self.num_slots)
        for name in self._PER_SLOT:
            old = getattr(self, name)
            new = np.zeros(num_slots, old.dtype)
            new[:kept] = old[:kept]
            setattr(self, name, new)
        for name in self._PER_POSITION:
            old = getattr(self, name)
            new = np.zeros((num_slots, length + 1, *old.shape[2:]), old.dtype)
            new[:kept, : old.shape[1]] = old[:kept]
            setattr(self, name, new)
        self.jobs = self.jobs[:kept] + [None] * (num_slots - kept)
        self.num_slots, self.length = num_slots, length

    def common_prefix(self, ids_T: IntArray, adapter: int) -> Indices:
        """Return, for each slot, the length of the common prefix of its ids and `ids_T`, shape S: 0 where another
        adapter has computed them."""
        length = min(len(ids_T), self.ids_ST.shape[1])
        differs_ST = self.ids_ST[:, :length] != ids_T[:length]
        first_S = np.where(differs_ST.any(axis=1), differs_ST.argmax(axis=1), length)
        agree_S: Indices = np.where(self.adapter_S == adapter, np.minimum(first_S, self.num_ids_S), 0)
        return agree_S

    def place(self, slot: int, job: SlotRequest, cached: int, now: int) -> None:
        """Start `job` in `slot`, whose first `cached` positions already have the KV of the job's first ids."""
        num_ids = len(job.ids_T)
        num_prompt = job.num_prompt
        sampling = job.request.sampling
        self.jobs[slot] = job
        job.stops = frozenset()
        self.ids_ST[slot, :num_ids] = job.ids_T
        self.logprobs_ST[slot, num_prompt:num_ids] = job.logprobs_S
        self.versions_ST[slot, num_prompt:num_ids] = job.versions_S
        self.num_ids_S[slot] = num_ids
        self.kv_len_S[slot] = cached
        self.last_used_S[slot] = now
        self.active_S[slot] = True
        self.adapter_S[slot] = job.adapter
        self.num_prompt_S[slot] = num_prompt
        self.id_limit_S[slot] = num_prompt + job.max_new
        self.temperature_S[slot] = sampling.temperature
        self.top_p_S[slot] = sampling.top_p
        self.top_k_S[slot] = sampling.top_k
        self.min_p_S[slot] = sampling.min_p
        self.noise_S[slot] = job.request.noise & 0xFFFFFFFFFFFFFFFF
        request = job.request
        self.watched_S[slot] = bool(sampling.stop) or request.top_logprobs > 0 or request.on_tokens is not None
        self.constrained_S[slot] = job.matcher is not None
        self.truncated_S[slot] = sampling.temperature > 0.0 and not sampling.full_support

    def append(self, slots_R: Indices, ids_R: IntArray, logprobs_R: FloatArray, versions_R: IntArray) -> None:
        """Append one sampled token to each of the slots."""
        at_R = self.num_ids_S[slots_R]
        self.ids_ST[slots_R, at_R] = ids_R
        self.logprobs_ST[slots_R, at_R] = logprobs_R
        self.versions_ST[slots_R, at_R] = versions_R
        self.num_ids_S[slots_R] = at_R + 1

    def tokens(self, slots: Indices | int, positions: Indices | slice) -> IntArray:
        """Return the ids at some positions of one slot, or of several."""
        ids: IntArray = self.ids_ST[slots, positions]
        return np.where(ids < 0, self.image_token_id, ids) if self.image_token_id else ids

    def sampled(self, slot: int) -> tuple[IntArray, FloatArray, IntArray]:
        """Return copies of the ids, logprobs and versions that the job in `slot` has sampled."""
        span = slice(int(self.num_prompt_S[slot]), int(self.num_ids_S[slot]))
        return self.ids_ST[slot, span].copy(), self.logprobs_ST[slot, span].copy(), self.versions_ST[slot, span].copy()

    def copy_routes(self, source: int, target: int, count: int) -> None:
        """Copy the experts of a slot's first `count` positions to another slot, whose KV will be copied too."""
        self.routes_STLK[target, :count] = self.routes_STLK[source, :count]

    def note_routes(self, slot_N: Indices, position_N: Indices, routes_NLK: RouteArray) -> None:
        """Note the experts of the rows that a step computed. Rows of slots beyond the table are padding."""
        real_N = slot_N < self.num_slots
        self.routes_STLK[slot_N[real_N], position_N[real_N]] = routes_NLK[real_N]

    def routes(self, slot: int) -> RouteArray | None:
        """Return a copy of the experts of all tokens of a slot but the last, which has no KV; None for a dense
        model."""
        if not self.routes_STLK.shape[2]:
            return None
        routes_NLK: RouteArray = self.routes_STLK[slot, : int(self.num_ids_S[slot]) - 1].copy()
        return routes_NLK

    def retire(self, slot: int, now: int) -> None:
        """Remove the job from its slot; ids with KV are retained for reuse."""
        self.jobs[slot] = None
        self.active_S[slot] = False
        self.num_ids_S[slot] = self.kv_len_S[slot]
        self.last_used_S[slot] = now

    def suspend(self, slot: int, now: int) -> SlotRequest:
        """Take the job out of its slot with the tokens it has sampled, to be placed again later."""
        job = self.jobs[slot]
        assert job is not None
        ids_S, job.logprobs_S, job.versions_S = self.sampled(slot)
        job.ids_T = np.concatenate([job.ids_T[: job.num_prompt], ids_S])
        self.retire(slot, now)
        return job

    def forget(self, slot: int) -> None:
        """Drop a retained slot's KV."""
        assert not self.active_S[slot]
        self.num_ids_S[slot] = 0
        self.kv_len_S[slot] = 0

    def swap(self, one: int, other: int) -> None:
        """Exchange two slots' contents."""
        pair, swapped = [one, other], [other, one]
        for name in (*self._PER_SLOT, *self._PER_POSITION):
            array = getattr(self, name)
            array[pair] = array[swapped]
        self.jobs[one], self.jobs[other] = self.jobs[other], self.jobs[one]
