"""The vLLM engine: its `AsyncLLM` runs in this process, its core and workers in separate processes.

In: `GenerateRequest`s, awaited on the serving loop, and `load` calls with new weights. Out: `Generation`s. Prompts are
passed as ids; logprobs are of the distribution sampled from (`processed_logprobs`). New weights are loaded by vLLM's
weight-transfer protocol while generation is paused (`loading`): running requests lose their KV, are recomputed from
their ids, and continue with the new weights; vLLM reports the version of each token.

With LoRA adapters, `load` takes only these (`adapters`): nothing is paused, and running requests keep their adapters.
Tested with the CPU build.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch

from sharpen.config.trainer import LoraConfig
from sharpen.contracts import GenerateRequest, Generation, PromptLogprobs
from sharpen.engine.families import end_token_ids
from sharpen.engine.requests import check_request, find_stop, no_adapter
from sharpen.engine.token_masks import check_grammar, with_end
from sharpen.engine.vllm.adapters import Adapter, Adapters, in_use, max_rank
from sharpen.engine.vllm.loading import Loader
from sharpen.engine.vllm.pictures import VLLMPictures
from sharpen.engine.vllm.start import MAX_TOP_LOGPROBS, make_folder, read_skeleton, start_llm
from sharpen.engine.weights import match_weights
from sharpen.errors import EngineError, EngineLostError, ModelError, SamplingError
from sharpen.models.checkpoint import published
from sharpen.models.experts import has_experts
from sharpen.models.pieces import text_config
from sharpen.models.routing import Routing, routing_of
from sharpen.types import FinishReason, FloatArray, IntArray, RouteArray

# The experts that vLLM returns, in the form in which Sharpen's own engine records them.
#
# In: a mixture of experts on the meta device; vLLM's array of a request. Out: `RouteArray`s.
#
# Shape suffixes: N tokens of prompt and continuation but the last, L layers with a router, K experts of a token; H
# hidden layers of the model, with a router or not.


class Routes:
    """Reads the experts of one model."""

    def __init__(self, routing: Routing) -> None:
        self._shape = routing.shape
        self._layers = routing.layers

    def read(self, returned: Any, num_tokens: int) -> RouteArray:
        """Return the experts of `num_tokens` tokens (N, L, K) out of `returned`, a shape of (at least N, H, K). What is
        before the last N is of tokens that were computed again later.

        Raises `EngineError` if some are missing: nothing is trained on a routing that is not known.
        """
        num_returned = 0 if returned is None else len(returned)
        if num_returned < num_tokens:
            raise EngineError(f"vLLM returned the experts of {num_returned} tokens, not of {num_tokens}")
        routes_NLK: RouteArray = returned[num_returned - num_tokens :, self._layers].astype(self._shape.dtype)
        return routes_NLK


MIN_TEMPERATURE = 0.01
"""vLLM silently raises lower temperatures to this."""
_STOP_SECONDS = 15.0
_POLL_SECONDS = 0.2  # between two checks whether vLLM's processes are alive
_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class VLLMEngine:
    """An `Engine` over vLLM. Made by `start`; every method runs on one event loop."""

    def __init__(
        self,
        llm: Any,
        skeleton: Any,
        *,
        max_model_len: int,
        version: int,
        stop_decoder: Callable[[list[int]], str],
        folder: Path,
        pictures: VLLMPictures,
        lora: LoraConfig | None = None,
    ) -> None:
        """`llm` is a started `AsyncLLM`, `skeleton` its model on the meta device; see `start`."""
        self._llm = llm
        self._skeleton = skeleton
        self._max_model_len = max_model_len
        self._version = version
        self._decode_text = stop_decoder
        self._folder = folder
        self._pictures = pictures
        self._loader = Loader(llm)
        routing = routing_of(skeleton)
        self._routes = None if routing is None else Routes(routing)
        self._adapters = None if lora is None else Adapters(folder, skeleton, lora, llm.model_config.dtype)
        self._adapter = None if self._adapters is None else self._adapters.zeros(version)
        self._end_ids = sorted(end_token_ids(skeleton))
        self._num_requests = 0
        self._calls: set[asyncio.Task[Generation]] = set()
        self._loading = asyncio.Lock()
        self._failure: EngineLostError | None = None

    @classmethod
    async def start(
        cls,
        model_path: str,
        *,
        max_model_len: int,
        stop_decoder: Callable[[list[int]], str],
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        max_slots: int = 256,
        kv_cache_mb: int | None = None,
        tensor_parallel_size: int = 1,
        replica: tuple[int, int] = (0, 1),
        lora: LoraConfig | None = None,
        version: int = 0,
    ) -> Self:
        """Start vLLM's processes with the model in a folder. Blocks the loop for several seconds.

        `stop_decoder` decodes sampled ids, for stop strings only. `dtype` "auto": bfloat16 on a GPU, float32 on the
        CPU. `max_slots` sequences run at the same time; `kv_cache_mb` bounds the KV cache (None: what they need, but at
        most a quarter of the free memory). `replica`: (number of this engine, number of engines); each takes the next
        `tensor_parallel_size` GPUs, or its share of the CPU's cores. With `lora`, `load` takes only adapters, which are
        zero at first. Raises `ModelError` for a model that cannot be served, `EngineError` if the processes do not
        start.
        """
        skeleton = read_skeleton(model_path, max_model_len, adapters=lora is not None)
        pictures = VLLMPictures(model_path, skeleton.config)
        folder = make_folder(tempfile.gettempdir())
        try:
            llm = start_llm(
                model_path,
                skeleton.config,
                folder,
                has_experts=has_experts(skeleton),
                pictures=pictures,
                max_model_len=max_model_len,
                dtype=dtype,
                max_slots=max_slots,
                kv_cache_mb=kv_cache_mb,
                tensor_parallel_size=tensor_parallel_size,
                replica=replica,
                max_lora_rank=None if lora is None else max_rank(lora),
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        engine = cls(
            llm,
            skeleton,
            max_model_len=max_model_len,
            version=version,
            stop_decoder=stop_decoder,
            folder=folder,
            pictures=pictures,
            lora=lora,
        )
        try:
            await engine._unless_dead(engine._prepare(model_path, version))
        except BaseException:
            await engine.close()
            raise
        return engine

    async def _prepare(self, model_path: str, version: int) -> None:
        """Prepare the workers (`engine.vllm.worker.WorkerExtension.sharpen_prepare`), and tell them the version."""
        answers = await self._llm.collective_rpc("sharpen_prepare", args=(self._routes is not None,))
        if failed := max(answers):
            raise ModelError(
                f"vLLM cannot return the experts of {model_path}, with which the trainer has to compute: {failed}; set "
                "engine.type to embedded"
            )
        await self._llm.update_weight_version(str(version))

    @property
    def takes_adapters(self) -> bool:
        """Whether `load` takes adapters only, instead of whole weights."""
        return self._adapters is not None

    @property
    def max_model_len(self) -> int:
        """The maximum of prompt plus sampled tokens of one request."""
        return self._max_model_len

    @property
    def version(self) -> int:
        """The policy version of the loaded weights."""
        return self._version

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one continuation; see `Engine.generate`.

        The same `noise` gives the same tokens if the logits are the same; they depend slightly on concurrent requests.
        Raises `ContextOverflowError` if the prompt leaves no room for a token, `SamplingError` for invalid parameters,
        ids or images, `ImageError` if an image cannot be read, `EngineError` if generation fails, `EngineLostError` if
        the engine is closed or dies.
        """
        self._check_open()
        vocab_size = text_config(self._skeleton.config).vocab_size
        max_new = check_request(request, max_model_len=self._max_model_len, vocab_size=vocab_size)
        if request.adapter:
            raise no_adapter(request.adapter)
        if request.constraint is not None:
            await asyncio.to_thread(check_grammar, request.constraint)
            self._check_open()
        prompt: Any = {"type": "token", "prompt_token_ids": request.prompt_ids.tolist()}
        if request.pictures:
            prompt = await asyncio.to_thread(self._pictures.input, request)
            self._check_open()
        call = asyncio.get_running_loop().create_task(self._sample(request, prompt, self._params(request, max_new)))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            return await call
        except asyncio.CancelledError:
            if self._failure is not None and not asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise self._failure from None
            raise

    def _params(self, request: GenerateRequest, max_new: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        sampling = request.sampling
        if 0.0 < sampling.temperature < MIN_TEMPERATURE:
            raise SamplingError(
                f"temperature {sampling.temperature:g} is below {MIN_TEMPERATURE:g}, the lowest that vLLM supports: "
                "use 0 (greedy), or more"
            )
        if request.top_logprobs > MAX_TOP_LOGPROBS:
            raise SamplingError(
                f"top_logprobs must be at most {MAX_TOP_LOGPROBS} with vLLM, not {request.top_logprobs}"
            )
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=max_new,
            seed=request.noise & (2**63 - 1),
            logprobs=request.top_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            stop=list(sampling.stop),
            stop_token_ids=self._end_ids,
            ignore_eos=True,  # only the ids above end a generation
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY if request.on_tokens is None else RequestOutputKind.CUMULATIVE,
            structured_outputs=None
            if request.constraint is None
            else StructuredOutputsParams(grammar=with_end(request.constraint, self._end_ids)),
        )

    async def _sample(self, request: GenerateRequest, prompt: Any, params: Any) -> Generation:
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        self._num_requests += 1
        number, adapter = str(self._num_requests), self._adapter
        lora = None if adapter is None else adapter.request
        num_told = 0
        try:
            with in_use(adapter):
                async for output in self._llm.generate(prompt, params, number, lora_request=lora):
                    if output.finished:
                        return self._generation(request, output, adapter)
                    if request.on_tokens is not None:
                        new = output.outputs[0].token_ids[num_told:]
                        num_told += len(new)
                        request.on_tokens(list(new))
        except EngineDeadError as error:
            raise self._fail(EngineLostError("vLLM's processes died while they were generating")) from error
        except EngineGenerateError as error:
            raise EngineError(f"vLLM failed to generate: {error.__cause__ or error}") from error
        except ValueError as error:
            raise SamplingError(f"vLLM refuses the request: {error}") from error
        raise EngineError("vLLM gave no output")

    def _generation(self, request: GenerateRequest, whole: Any, adapter: Adapter | None) -> Generation:
        output, text = whole.outputs[0], None
        if isinstance(output.stop_reason, str):
            # Our own text is preferred: vLLM's begins within the prompt if that ends inside a character.
            own_text = find_stop(list(output.token_ids), request.sampling.stop, self._decode_text)
            text = output.text if own_text is None else own_text
        found = _generation(output, text, request.top_logprobs, None if adapter is None else adapter.version)
        if request.prompt_logprobs is not None:
            found = replace(found, prompt_logprobs=_of_prompt(request, whole.prompt_logprobs))
        if self._routes is None:
            return found
        num_tokens = len(request.prompt_ids) + len(found.ids) - 1
        return replace(found, routes_NLK=self._routes.read(output.routed_experts, num_tokens))

    async def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load new weights (by Hugging Face parameter names); see `Engine.load`.

        Running requests are recomputed from their ids and continue with the new weights. With LoRA the tensors are
        adapters, by the names of peft's files: running requests keep theirs, and later ones get the new adapters.
        Raises `ModelError`, with nothing changed, unless names and shapes are exactly the model's, and
        `EngineLostError` if the transfer fails: the engine can then no longer be used.
        """
        self._check_open()
        matched = {} if self._adapters else published(self._skeleton, match_weights(self._skeleton, tensors))
        async with self._loading:
            self._check_open()
            adapter = None if self._adapters is None else self._adapters.write(version, tensors)
            try:
                if adapter is not None:
                    await self._unless_dead(self._adopt(adapter))
                else:
                    await self._unless_dead(self._loader.load(version, matched))
            except Exception as error:
                message = f"new weights could not be loaded into vLLM: {type(error).__name__}: {error}"
                raise self._fail(EngineLostError(message)) from error
            self._version = version

    async def _adopt(self, adapter: Adapter) -> None:
        """Use these adapters for new requests, and remove adapters that no request uses."""
        assert self._adapters is not None
        await self._llm.add_lora(adapter.request)
        self._adapter = adapter
        for unused in self._adapters.remove_unused(adapter):
            await self._llm.remove_lora(unused.request.lora_int_id)

    async def _unless_dead(self, exchange: Coroutine[Any, Any, None]) -> None:
        """Await `exchange`; raise `EngineLostError` if vLLM's processes die, since vLLM 0.32 then never answers."""
        task = asyncio.get_running_loop().create_task(exchange)
        try:
            while not (await asyncio.wait([task], timeout=_POLL_SECONDS))[0]:
                if self._llm.errored:
                    raise EngineLostError("its processes died")
        finally:
            task.cancel()
        task.result()

    async def close(self) -> None:
        """Fail running calls with `EngineError` and end vLLM's processes. May be called twice."""
        if self._llm is None:
            return
        self._fail(EngineLostError("the engine was closed"))
        await asyncio.gather(*self._calls, return_exceptions=True)
        llm, self._llm = self._llm, None
        if llm.output_handler is not None:
            llm.output_handler.cancel()  # it would report the end of the processes as a failure
        await asyncio.to_thread(llm.shutdown, timeout=_STOP_SECONDS)
        await asyncio.to_thread(self._loader.close)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _check_open(self) -> None:
        if self._llm is None:
            raise EngineLostError("the engine is closed")
        if self._failure is not None:
            raise EngineLostError(str(self._failure))

    def _fail(self, failure: EngineLostError) -> EngineLostError:
        """Fail all running and later calls. Returns the failure that is in effect: the first one."""
        if self._failure is None:
            self._failure = failure
            for call in self._calls:
                if call is not asyncio.current_task():
                    call.cancel()
        return self._failure


def _generation(output: Any, text: str | None, top_logprobs: int, version: int | None) -> Generation:
    """Convert vLLM's output. `version` is that of the request's adapters, if it has any."""
    if output.finish_reason not in _FINISH_REASONS:
        raise EngineError(f"vLLM ended a request with {output.finish_reason!r}")
    ids: IntArray = np.asarray(output.token_ids, dtype=np.int32)
    entries = output.logprobs or []
    logprobs: FloatArray = np.asarray(
        [entry[token].logprob for entry, token in zip(entries, output.token_ids, strict=True)], dtype=np.float32
    )
    versions: IntArray = np.full(len(ids), -1 if version is None else version, dtype=np.int32)
    for span in (output.weight_versions or ()) if version is None else ():
        versions[span.start : span.end] = int(span.version)
    if (versions < 0).any():
        raise EngineError("vLLM did not report the version of every token")
    return Generation(
        ids=ids,
        logprobs=logprobs,
        versions=versions,
        finish_reason=_FINISH_REASONS[output.finish_reason],
        text=text,
        top_logprobs=tuple(_alternatives(entry, top_logprobs) for entry in entries) if top_logprobs else (),
    )


def _of_prompt(request: GenerateRequest, entries: Any) -> PromptLogprobs:
    """Convert vLLM's logprobs of a prompt, of which the first token has none."""
    tokens, scored, count = request.prompt_ids[1:].tolist(), entries[1:], request.prompt_logprobs or 0
    logprobs: FloatArray = np.asarray(
        [entry[token].logprob for entry, token in zip(scored, tokens, strict=True)], dtype=np.float32
    )
    return PromptLogprobs(logprobs=logprobs, top_logprobs=tuple(_alternatives(entry, count) for entry in scored))


def _alternatives(entry: Mapping[int, Any], count: int) -> tuple[tuple[int, float], ...]:
    """Return the likeliest (id, logprob) pairs, at most `count`, without those of probability zero."""
    ranked = sorted(entry.items(), key=lambda item: item[1].rank)
    pairs = [(int(token), float(other.logprob)) for token, other in ranked if other.logprob > float("-inf")]
    return tuple(pairs[:count])
