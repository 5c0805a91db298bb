"""One step of the engine: admit jobs, lay out rows, run the model, sample, append tokens, finish jobs. Synchronous.

In: the scheduler's slots. Out: ids appended to them, and finished jobs' futures resolved.

Shape suffixes: N rows of the step, R rows that are sampled from, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sharpen.contracts import Generation
from sharpen.engine.embedded.attention import FixedShapeAttention, SlotAttention, StepAttention
from sharpen.engine.embedded.batch import (
    FIXED_ROWS,
    StepBatch,
    collect_work,
    lay_out,
    lay_out_fixed,
    on_device,
    padded_rows,
)
from sharpen.engine.embedded.beside import BASE, Adapters
from sharpen.engine.embedded.forward import FastForward, Forward
from sharpen.engine.embedded.graphs import DecodeGraphs
from sharpen.engine.embedded.mixing import Mixing
from sharpen.engine.embedded.pictures import EnginePictures
from sharpen.engine.embedded.sampling import SampledRows, SamplingRows, ScratchRV, sample, uniforms
from sharpen.engine.embedded.scheduler import Scheduler
from sharpen.engine.embedded.slots import Indices, SlotRequest
from sharpen.engine.requests import find_stop
from sharpen.engine.supports import joined, kept_bits, packed
from sharpen.engine.token_masks import TokenMasks, first_line
from sharpen.errors import ConstraintError, EngineError
from sharpen.models.adapter_files import NamedAdapter
from sharpen.models.routing import Routing, recording, to_array
from sharpen.models.sight import View, showing
from sharpen.types import BoolArray, FinishReason, IntArray

if TYPE_CHECKING:
    from llguidance import LLMatcher

_PROMPT_TOKENS_PER_STEP = {"cpu": 2048, "cuda": 8192}
"""Enough for large products, but few enough that decoding jobs do not wait long."""
_SCORED_LOGITS = 64_000_000
"""The most logits of prompts that are scored in one step: a quarter of a gigabyte."""


class Stepper:
    """Runs steps, and holds the policy version of new tokens."""

    def __init__(
        self,
        *,
        forward: Forward,
        scheduler: Scheduler,
        device: torch.device,
        deterministic: bool,
        end_ids: Sequence[int],
        vocab_size: int,
        version: int,
        decode_text: Callable[[list[int]], str] | None,
        graphs: DecodeGraphs | None = None,
        masks: TokenMasks | None = None,
        routing: Routing | None = None,
        mixing: Mixing | None = None,
        pictures: EnginePictures | None = None,
    ) -> None:
        """`graphs` compute the steps that they support; None: all steps are computed eagerly. `masks` are needed for
        requests with a constraint, `mixing` for recurrent and convolution layers. `routing` is that of a mixture of
        experts, whose choices are noted, `pictures` of jobs with images."""
        self.versions_A = np.array([version], np.int32)
        """The policy versions of new tokens: of the model alone, then of each adapter by its number."""
        self.adapters: Adapters | None = None
        """The adapters by name, if the engine serves some."""
        self.graphs = graphs
        self.steps = 0
        self.computed_tokens = 0
        self.sampled_tokens = 0
        self.prompt_tokens_per_step = _PROMPT_TOKENS_PER_STEP.get(device.type, _PROMPT_TOKENS_PER_STEP["cpu"])
        self._scored_tokens_per_step = max(1, _SCORED_LOGITS // vocab_size)
        self._forward = forward
        self._scheduler = scheduler
        self._device = device
        self._deterministic = deterministic
        # in the fixed layout several batches are sampled from before the first is accepted
        self._scratch = (ScratchRV(), ScratchRV()) if device.type == "cpu" and not deterministic else None
        """Of the logits, and of the log-distribution."""
        self._decode_text = decode_text
        self._masks = masks
        self._routing = routing
        self._mixing = mixing
        self._pictures = pictures
        self._is_end_V = np.zeros(vocab_size, np.bool_)
        self._is_end_V[[end_id for end_id in end_ids if end_id < vocab_size]] = True

    def take(self, named: Sequence[NamedAdapter], model: Any) -> int:
        """Compute rows with these adapters of the model from now on; return the bytes that they take."""
        assert self.adapters is None
        fused = self._forward.projections() if isinstance(self._forward, FastForward) else []
        self.adapters = adapters = Adapters(named, model, fused, whole=self._deterministic)
        self.versions_A = np.append(self.versions_A, np.zeros(len(named), np.int32))
        if self.graphs is not None:
            self.graphs.adapters = adapters
        if self._mixing is not None:
            self._mixing.adapters = adapters
        return adapters.num_bytes

    @property
    def version(self) -> int:
        """The policy version of the model's own weights."""
        return int(self.versions_A[BASE])

    def release(self) -> None:
        """Drop all references to the weights. No step may follow."""
        del self._forward, self._routing, self._mixing, self._pictures, self.adapters
        if self.graphs is not None:
            self.graphs.release()

    @torch.inference_mode()
    def step(self) -> None:
        """Compute one token for every decoding slot and a share of the waiting prompts, and resolve finished jobs."""
        scheduler, table = self._scheduler, self._scheduler.table
        scheduler.admit()
        scheduler.reserve()
        scheduler.compact()
        work = collect_work(
            table, self.prompt_tokens_per_step, self._scored_tokens_per_step, stateful=self._mixing is not None
        )
        scratch = scheduler.pool.scratch
        if self._deterministic:
            batches = lay_out_fixed(table, work, scratch)
        else:
            batches = [lay_out(table, work, scratch, scheduler.pool.worth_sharing)]
        self.steps += 1
        self.computed_tokens += sum(end - start for _, start, end in work.spans)
        sampled = [(batch, self._run(batch)) for batch in batches]
        for batch, rows in sampled:
            for slot, num_computed in batch.computed:
                scheduler.computed(slot, num_computed)
            if rows is not None:
                self._accept(batch.slots_R, rows)

    def _run(self, batch: StepBatch) -> SampledRows | None:
        """Run the forward pass and sampling of one batch. Returns None if no row is sampled from."""
        if self.graphs is not None and (logits_NV := self.graphs.logits(batch)) is not None:
            return self._sample(self._in_fp32(self._select_rows(logits_NV, batch.rows_R)), batch)
        token_N, position_N, slot_N = (
            on_device(array, self._device) for array in (batch.token_N, batch.position_N, batch.slot_N)
        )
        pool = self._scheduler.pool
        attention: StepAttention
        if self._deterministic:
            attention = FixedShapeAttention(pool, slot_M=slot_N, position_M=position_N, kv_length=batch.kv_length)
            rows = np.arange(FIXED_ROWS)
        else:
            attention = SlotAttention(
                pool,
                slot_N=slot_N,
                position_N=position_N,
                num_decode=batch.num_decode,
                kv_length=batch.kv_length,
                segments=batch.segments,
                shared=batch.shared,
                both_ways=self._pictures.both_ways if self._pictures is not None else "",
            )
            wanted = np.concatenate([batch.rows_R, *(scored.row_X for scored in batch.scored)])
            rows = np.zeros(padded_rows(max(1, len(wanted))), np.int64)
            rows[: len(wanted)] = wanted
        if self.adapters is not None:
            self.adapters.lay_out(batch.adapter_N, self._device)
        if self._mixing is not None:
            self._mixing.lay_out(batch.decoding, batch.segments)
        with recording(self._routing) as recorded, showing(self._view(batch)):
            logits = self._in_fp32(self._forward.logits(token_N, position_N, attention, on_device(rows, self._device)))
            if recorded is not None and self._routing is not None:
                routes_NLK = to_array(recorded.routes_NLK, self._routing.shape)
                self._scheduler.table.note_routes(batch.slot_N, batch.position_N, routes_NLK)
        self._score(batch, logits)
        if not len(batch.rows_R):
            return None
        if self._deterministic:
            logits_RV = logits[on_device(batch.rows_R, self._device)]
        else:
            logits_RV = logits[: len(batch.rows_R)]
        return self._sample(logits_RV, batch)

    def _in_fp32(self, logits: torch.Tensor) -> torch.Tensor:
        if self._scratch is None or (logits.dtype == torch.float32 and logits.is_contiguous()):
            return logits.to(torch.float32, memory_format=torch.contiguous_format)
        return self._scratch[0].take(logits).copy_(logits)

    def _sample(self, logits_RV: torch.Tensor, batch: StepBatch) -> SampledRows:
        out_RV = None if self._scratch is None else self._scratch[1].take(logits_RV)
        return sample(logits_RV, self._sampling_rows(batch.slots_R), out_RV)

    def rest(self) -> None:
        """Forget the memory that steps use again."""
        self._scratch = None if self._scratch is None else (ScratchRV(), ScratchRV())

    def _score(self, batch: StepBatch, logits: torch.Tensor) -> None:
        """Note the logprobs of prompts that are scored. In the fixed layout every row has its logits; else they are
        behind those that are sampled from."""
        first = len(batch.rows_R)
        for scored in batch.scored:
            job = self._scheduler.table.jobs[scored.slot]
            assert job is not None
            assert job.scores is not None
            end = first + len(scored.row_X)
            its = on_device(scored.row_X, self._device) if self._deterministic else slice(first, end)
            job.scores.note(scored.position_X, logits[its])
            first = end

    def _view(self, batch: StepBatch) -> View | None:
        """Return the images that a batch computes; None if no job of its slots has any."""
        if self._pictures is None:
            return None
        jobs = {slot: job.pictures for slot, job in self._scheduler.running() if job.pictures is not None}
        return self._pictures.view(jobs, batch.slot_N, batch.position_N)

    def _select_rows(self, logits_NV: torch.Tensor, rows_R: Indices) -> torch.Tensor:
        """Return the rows that are sampled from. Usually these are the first ones, which needs no copy."""
        if rows_R[-1] == len(rows_R) - 1:
            return logits_NV[: len(rows_R)]
        return logits_NV.index_select(0, on_device(rows_R, self._device))

    def _sampling_rows(self, slots_R: Indices) -> SamplingRows:
        table = self._scheduler.table
        position_R = table.num_ids_S[slots_R] - table.num_prompt_S[slots_R]
        constrained_C = np.flatnonzero(table.constrained_S[slots_R])
        return SamplingRows(
            uniform_R=torch.from_numpy(uniforms(table.noise_S[slots_R], position_R)),
            temperature_R=torch.from_numpy(table.temperature_S[slots_R]),
            top_p_R=torch.from_numpy(table.top_p_S[slots_R]),
            top_k_R=torch.from_numpy(table.top_k_S[slots_R]),
            min_p_R=torch.from_numpy(table.min_p_S[slots_R]),
            **(self._row_masks(slots_R, constrained_C) if len(constrained_C) else {}),
        )

    def _row_masks(self, slots_R: Indices, constrained_C: Indices) -> dict[str, torch.Tensor]:
        """Return the masks of the rows with a constraint. On a GPU they are computed while it makes the forward
        pass."""
        assert self._masks is not None
        masks_CW = self._masks.next([self._matcher(int(slots_R[row])) for row in constrained_C])
        return {"constrained_C": torch.from_numpy(constrained_C), "masks_CW": torch.from_numpy(masks_CW)}

    def _matcher(self, slot: int) -> LLMatcher:
        job = self._scheduler.table.jobs[slot]
        assert job is not None
        assert job.matcher is not None
        return job.matcher

    def _accept(self, slots_R: Indices, rows: SampledRows) -> None:
        """Append the sampled tokens, and finish the jobs that end with them."""
        table = self._scheduler.table
        ids_R = rows.ids_R.cpu().numpy().astype(np.int32)
        logprobs_R = rows.logprobs_R.cpu().numpy()
        table.append(slots_R, ids_R, logprobs_R, self.versions_A[table.adapter_S[slots_R]])
        self.sampled_tokens += len(slots_R)
        ended_R = self._is_end_V[ids_R]
        full_R = table.num_ids_S[slots_R] >= table.id_limit_S[slots_R]
        bad_R = ~np.isfinite(logprobs_R)
        stuck_R = self._advance(slots_R, ids_R)
        self._note_supports(slots_R, rows)
        alternatives = self._alternatives(slots_R, rows)
        for row in np.flatnonzero(ended_R | full_R | bad_R | stuck_R | table.watched_S[slots_R]):
            slot = int(slots_R[row])
            job = table.jobs[slot]
            assert job is not None
            if bad_R[row]:
                self._fail(slot, job)
                continue
            if stuck_R[row]:
                self._refuse(job)
                continue
            if job.request.top_logprobs:
                job.top_logprobs.append(alternatives[int(row)])
            text = None if ended_R[row] else self._text_before_stop(slot, job)
            if ended_R[row] or text is not None:
                self._finish(slot, job, "stop", text)
            elif full_R[row]:
                self._finish(slot, job, "length", None)
            elif job.request.on_tokens is not None:
                job.request.on_tokens([int(ids_R[row])])

    def _advance(self, slots_R: Indices, ids_R: IntArray) -> BoolArray:
        """Move the constraints past the sampled tokens. Return the rows whose constraint failed."""
        stuck_R = np.zeros(len(slots_R), np.bool_)
        for row in np.flatnonzero(self._scheduler.table.constrained_S[slots_R]):
            matcher = self._matcher(int(slots_R[row]))
            matcher.consume_token(int(ids_R[row]))
            stuck_R[row] = matcher.is_error()
        return stuck_R

    def _note_supports(self, slots_R: Indices, rows: SampledRows) -> None:
        """Note which ids the tokens of truncated distributions were drawn from."""
        truncated = np.flatnonzero(self._scheduler.table.truncated_S[slots_R])
        if not len(truncated):
            return
        for row, bits_B in zip(
            truncated, kept_bits(rows.log_distribution_RV[on_device(truncated, self._device)]), strict=True
        ):
            job = self._scheduler.table.jobs[int(slots_R[row])]
            assert job is not None
            job.supports.append(packed(bits_B))

    def _alternatives(self, slots_R: Indices, rows: SampledRows) -> dict[int, tuple[tuple[int, float], ...]]:
        """Return the likeliest (id, logprob) pairs of each row whose request wants them, without those of probability
        zero. They are copied from the device once for all rows."""
        counts = {}
        for row in np.flatnonzero(self._scheduler.table.watched_S[slots_R]):
            job = self._scheduler.table.jobs[int(slots_R[row])]
            if job is not None and job.request.top_logprobs:
                counts[int(row)] = job.request.top_logprobs
        if not counts:
            return {}
        log_distribution_RV = rows.log_distribution_RV[on_device(np.array([*counts]), self._device)]
        logprobs, ids = log_distribution_RV.topk(min(max(counts.values()), log_distribution_RV.shape[1]))
        return {
            row: tuple(pair for pair in [*zip(*likeliest, strict=True)][:count] if pair[1] > float("-inf"))
            for (row, count), *likeliest in zip(counts.items(), ids.tolist(), logprobs.tolist(), strict=True)
        }

    def _text_before_stop(self, slot: int, job: SlotRequest) -> str | None:
        stop = job.request.sampling.stop
        if not stop or self._decode_text is None:
            return None
        table = self._scheduler.table
        ids = table.ids_ST[slot, int(table.num_prompt_S[slot]) : int(table.num_ids_S[slot])].tolist()
        return find_stop(ids, stop, self._decode_text)

    def _finish(self, slot: int, job: SlotRequest, reason: FinishReason, text: str | None) -> None:
        ids_S, logprobs_S, versions_S = self._scheduler.table.sampled(slot)
        routes_NLK = self._scheduler.table.routes(slot)
        supports = joined(job.supports, len(self._is_end_V)) if self._scheduler.table.truncated_S[slot] else None
        self._scheduler.remove(job)
        if not job.future.done():
            job.future.set_result(
                Generation(
                    ids=ids_S,
                    logprobs=logprobs_S,
                    versions=versions_S,
                    finish_reason=reason,
                    text=text,
                    top_logprobs=tuple(job.top_logprobs),
                    routes_NLK=routes_NLK,
                    prompt_logprobs=None if job.scores is None else job.scores.result(),
                    supports=supports,
                )
            )

    def _refuse(self, job: SlotRequest) -> None:
        """Fail a job whose constraint exceeded llguidance's limits while its tokens were sampled."""
        self._scheduler.remove(job)
        if not job.future.done():
            assert job.matcher is not None
            job.future.set_exception(
                ConstraintError(f"the response cannot be constrained further: {first_line(job.matcher.get_error())}")
            )

    def _fail(self, slot: int, job: SlotRequest) -> None:
        """Fail a job whose logits are not finite, and discard its KV so that no NaN stays in the cache."""
        self._scheduler.discard(slot)
        if not job.future.done():
            position, version = len(job.ids_T), self.versions_A[job.adapter]
            job.future.set_exception(
                EngineError(f"the model's logits are not finite (prompt of {position} tokens, version {version})")
            )
