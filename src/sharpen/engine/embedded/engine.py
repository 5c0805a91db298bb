"""The embedded engine: continuous batching over one Hugging Face model in this process, on the CPU or one GPU.

In: `GenerateRequest`s, awaited on the serving loop, and `load` calls with new weights. Out: `Generation`s. A driver
task runs while there is work: it runs one step, yields to the loop, and repeats. A step admits jobs and makes one
forward pass, in which running jobs decode one token each and new jobs compute their prompts. Weights change only
between steps; then all KV and states are dropped, and running jobs are recomputed from their ids before they continue.

Deliberately left out: paged KV (slots are contiguous, so decoding reads them in place), speculative decoding, beam
search.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch

from sharpen.config.trainer import LoraConfig
from sharpen.contracts import ORIGINAL, GenerateRequest, Generation
from sharpen.engine.embedded.beside import BASE
from sharpen.engine.embedded.forward import FastForward, GenericForward, kv_layout
from sharpen.engine.embedded.graphs import CudaRecorder, DecodeGraphs
from sharpen.engine.embedded.kv import KVLayout, KVPool, default_budget_bytes
from sharpen.engine.embedded.matmul import DEFAULT, MatmulChoice, choose_float32_matmul, float32_matmul
from sharpen.engine.embedded.mixing import Mixing
from sharpen.engine.embedded.pictures import EnginePictures
from sharpen.engine.embedded.projections import own
from sharpen.engine.embedded.prompt_scores import PromptScores
from sharpen.engine.embedded.scheduler import Scheduler
from sharpen.engine.embedded.selfcheck import check_forward, reference_logits
from sharpen.engine.embedded.slots import SlotRequest
from sharpen.engine.embedded.states import SlotStates
from sharpen.engine.embedded.stepper import Stepper
from sharpen.engine.families import ModelShape, end_token_ids, inspect_model
from sharpen.engine.requests import check_request, no_adapter
from sharpen.engine.token_masks import TokenMasks, Vocabulary
from sharpen.engine.weights import copy_weights
from sharpen.errors import ConstraintError, EngineError, EngineLostError, ModelError, SamplingError
from sharpen.models.adapter_files import NamedAdapter
from sharpen.models.adapters import LowRank, adapted_layers, add_adapters, load_adapters, names_to_adapt
from sharpen.models.experts import experts_of
from sharpen.models.frozen import load_frozen
from sharpen.models.modules import load_module, text_parameters
from sharpen.models.recurrent import example_state, mixers_of
from sharpen.models.routing import Routing, routing_of
from sharpen.models.table import refuse_unsupported
from sharpen.types import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher

_LOOP_TURNS = 8
"""Turns of the event loop between steps: a finished call's follow-up request arrives only after several callbacks."""
_TRAINED = "trained"
"""The adapter that is trained, where the original weights are served beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the start. `computed_tokens` are prompt tokens that the model computed, `reused_tokens` those from
    the cache. `replayed_steps` are steps whose forward pass was a CUDA graph. `states_mb` is the memory of recurrent
    states, snapshots included."""

    steps: int
    computed_tokens: int
    reused_tokens: int
    sampled_tokens: int
    kv_cache_mb: float
    replayed_steps: int = 0
    states_mb: float = 0.0


class EmbeddedEngine:
    """An `Engine` over a model in this process, which it takes over. Every method runs on one event loop."""

    def __init__(
        self,
        model: Any,
        *,
        max_model_len: int,
        max_slots: int = 256,
        kv_cache_mb: int | None = None,
        deterministic: bool = False,
        alone: bool = True,
        version: int = 0,
        stop_decoder: Callable[[list[int]], str] | None = None,
        tokenizer: Any = None,
        adapters: LoraConfig | None = None,
    ) -> None:
        """Take over a loaded causal language model (its parameters become views of fused storage).

        `max_model_len` bounds prompt plus sampled tokens; `kv_cache_mb` bounds KV and recurrent states (None: what
        `max_slots` needs, but at most a quarter of the free memory). `alone`: nothing else in this process computes at
        the same time. `stop_decoder` decodes sampled ids, for stop strings only; `tokenizer` is the model's, for
        constraints only. With `adapters` the weights stay as they are, and `load` takes adapters. Raises `ModelError`
        for a model that cannot be served.
        """
        self._adapters = adapters
        shape = inspect_model(_prepared(model, adapters), max_model_len)
        self.matmul = _choose_matmul(model, fixed=deterministic or not alone)
        self._model, self._pictures = model, EnginePictures(model, deterministic=deterministic)
        self._max_model_len = max_model_len
        self._vocab_size = shape.vocab_size
        self._decode_text = stop_decoder
        end_ids = sorted(end_token_ids(model))
        self._masks = _masks(tokenizer, shape.vocab_size, end_ids)
        reference_PV = reference_logits(model, max_model_len)
        layout = kv_layout(model, shape)
        budget_bytes = _budget_bytes(kv_cache_mb, model.device)
        states, mixing = _take_over_mixers(model, budget_bytes, deterministic=deterministic)
        pool = _new_pool(
            model, layout, states, max_slots=max_slots, max_length=max_model_len, budget_bytes=budget_bytes
        )
        forward = _new_forward(model, shape, max_model_len, deterministic=deterministic, adapted=adapters is not None)
        routing = _routing(model, deterministic=deterministic)
        self._scheduler = Scheduler(pool, routes=None if routing is None else routing.shape, states=states)
        check_forward(model, forward, pool, reference_PV, routing, mixing)
        self._stepper = Stepper(
            forward=forward,
            scheduler=self._scheduler,
            device=model.device,
            deterministic=deterministic,
            end_ids=end_ids,
            vocab_size=shape.vocab_size,
            version=version,
            decode_text=stop_decoder,
            graphs=None if deterministic else _decode_graphs(model, forward, pool),
            masks=self._masks,
            routing=routing,
            mixing=mixing,
            pictures=self._pictures,
        )
        self._driver: asyncio.Task[None] | None = None
        self._num_requests, self._trained, self._snapshots = 0, BASE, dict[str, int]()
        self._closed = False

    @classmethod
    def from_pretrained(
        cls,
        model_path: str,
        *,
        max_model_len: int,
        device: str = "auto",
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        max_slots: int = 256,
        kv_cache_mb: int | None = None,
        deterministic: bool = False,
        alone: bool = True,
        version: int = 0,
        stop_decoder: Callable[[list[int]], str] | None = None,
        tokenizer: Any = None,
        adapters: LoraConfig | None = None,
    ) -> Self:
        """Load a Hugging Face model directory. `auto`: CUDA if available; bfloat16 on CUDA, float32 on the CPU."""
        from sharpen.models.configuration import read_config

        config = read_config(model_path)
        refuse_unsupported(config, model_path, "engine")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if dtype == "auto":
            dtype = "bfloat16" if device.startswith("cuda") else "float32"
        kind = getattr(torch, dtype)
        if adapters is None:
            model = load_module(model_path, config, kind, device)
        else:
            model = load_frozen(model_path, config, kind, device, adapters)
        return cls(
            model,
            max_model_len=max_model_len,
            max_slots=max_slots,
            kv_cache_mb=kv_cache_mb,
            deterministic=deterministic,
            alone=alone,
            version=version,
            stop_decoder=stop_decoder,
            tokenizer=tokenizer,
            adapters=adapters,
        )

    @property
    def max_model_len(self) -> int:
        """The maximum of prompt plus sampled tokens of one request."""
        return self._max_model_len

    @property
    def version(self) -> int:
        """The policy version of the loaded weights."""
        return int(self._stepper.versions_A[self._trained])

    @property
    def stats(self) -> EngineStats:
        """Counters since the start."""
        return EngineStats(
            steps=self._stepper.steps,
            computed_tokens=self._stepper.computed_tokens,
            reused_tokens=self._scheduler.reused_tokens,
            sampled_tokens=self._stepper.sampled_tokens,
            kv_cache_mb=self._scheduler.pool.num_bytes / 2**20,
            replayed_steps=0 if self._stepper.graphs is None else self._stepper.graphs.replays,
            states_mb=0.0 if self._scheduler.states is None else self._scheduler.states.num_bytes / 2**20,
        )

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one continuation; see `Engine.generate`.

        Raises `ContextOverflowError` if the prompt leaves no room for a token, `SamplingError` for invalid parameters,
        ids, images or constraints, `ImageError` if an image cannot be read, `EngineError` if the engine is closed or a
        step fails.
        """
        self._check_open()
        job = self._new_job(request)
        if request.pictures:
            job.pictures = await asyncio.to_thread(self._pictures.read, request)
            self._check_open()
            assert job.pictures is not None
            job.ids_T = job.pictures.ids_P
            self._scheduler.table.image_token_id = self._pictures.image_token_id
        if request.constraint is not None:
            job.matcher = await self._matcher(request.constraint)
            self._check_open()
        self._scheduler.waiting.append(job)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())
        try:
            return await job.future
        except asyncio.CancelledError:
            self._scheduler.remove(job)
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise EngineLostError("the engine is closed")

    async def _matcher(self, constraint: Constraint) -> LLMatcher:
        """Return the matcher of a new response. Compiling its grammar does not hold up the loop."""
        if self._masks is None:
            raise ConstraintError("constraints need an engine with a tokenizer")
        return await asyncio.to_thread(self._masks.start, constraint)

    def _new_job(self, request: GenerateRequest) -> SlotRequest:
        max_new = check_request(request, max_model_len=self._max_model_len, vocab_size=self._vocab_size)
        if request.sampling.stop and self._decode_text is None:
            raise SamplingError("stop strings need an engine with a stop_decoder")
        adapter = self._number_of(request.adapter)
        self._num_requests += 1
        return SlotRequest(
            request=request,
            future=asyncio.get_running_loop().create_future(),
            order=self._num_requests,
            max_new=max_new,
            ids_T=request.prompt_ids.astype(np.int32),
            adapter=adapter,
            scores=None
            if request.prompt_logprobs is None
            else PromptScores(request.prompt_ids, request.prompt_logprobs),
        )

    def _number_of(self, adapter: str) -> int:
        beside = self._stepper.adapters
        if self._trained != BASE and adapter in ("", ORIGINAL):
            return BASE if adapter else self._trained
        if adapter and beside is None:
            raise no_adapter(adapter)
        return BASE if beside is None else beside.number(adapter)

    async def _drive(self) -> None:
        """Run steps while there is work. If a step fails, every job in flight fails with `EngineError`."""
        try:
            while self._scheduler.busy:
                with float32_matmul(self.matmul.precision):
                    self._stepper.step()
                for _ in range(_LOOP_TURNS):
                    await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._fail_all(EngineError("the engine's loop was shut down"))
            raise
        except Exception as error:
            failure = EngineError(f"a step of the engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._fail_all(failure)
            self._scheduler.clear()

    def _fail_all(self, failure: EngineError) -> None:
        scheduler = self._scheduler
        jobs = [*scheduler.waiting, *(job for _, job in scheduler.running())]
        for job in jobs:
            scheduler.remove(job)
            if not job.future.done():
                job.future.set_exception(failure)

    async def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load new weights (by Hugging Face parameter names) between two steps; see `Engine.load`.

        Raises `ModelError`, with nothing changed, unless names and shapes are exactly the model's (a tied output layer
        may be left out, or equal to the embedding). Tensors that are `weights()` themselves are not copied; then calls
        still running fail, since their weights changed while they ran.
        """
        self._check_open()
        if self._trained != BASE:
            await self._load_trained(version, tensors)
            return
        if self._adapters is not None:
            load_adapters(self._model, tensors)
        elif not copy_weights(self._model, tensors) and version != self.version:
            self._fail_all(EngineError("the weights changed while the call ran"))
        if self._adapters is None and tensors.keys() - self.weights().keys():  # a trained tower's
            self._pictures.forget()
        if self._stepper.graphs is not None:
            self._stepper.graphs.check_addresses()
        self._scheduler.suspend_all()
        self._stepper.versions_A[BASE] = version

    def serve_beside(self, adapters: Sequence[NamedAdapter]) -> int:
        """Serve adapters by name (`GenerateRequest.adapter`) beside the model's own weights, in the same steps; return
        the bytes that they take. They fit the model (`adapter_files.check_fit`). Once, before the first request; not
        with adapters that are trained."""
        assert self._adapters is None
        return self._stepper.take(adapters, self._model)

    def train_beside(self, lora: LoraConfig, snapshots: Mapping[str, int] | None = None) -> None:
        """Keep the model's own weights for requests for `ORIGINAL`, and answer all others with an adapter beside them,
        which has no effect yet: `load` takes its weights, by the names of peft's files. `snapshots` are further
        adapters: each has the weights of an earlier `load`, and gets those that are replaced once they are at least so
        many versions newer. Once, before the first request. Raises `ConfigError` for target modules that the model does
        not have."""
        layers: dict[str, LowRank] = {}
        for name in names_to_adapt(self._model, lora):
            weight = self._model.get_submodule(name).weight
            layers[name] = LowRank(
                down_AC=weight.new_zeros(lora.rank, weight.shape[1]),
                up_OA=weight.new_zeros(weight.shape[0], lora.rank),
                scale=lora.alpha / lora.rank,
            )
        self._snapshots = dict(snapshots or {})
        names = (_TRAINED, *self._snapshots)
        self.serve_beside([NamedAdapter(name=name, folder=Path(), base="", layers=layers) for name in names])
        self._stepper.versions_A[:] = self._stepper.version
        self._trained = self._stepper.adapters.number(_TRAINED) if self._stepper.adapters is not None else BASE

    def adapter(self, name: str) -> tuple[int, dict[str, torch.Tensor]]:
        """Return the version of an adapter and a copy of its weights, by the names of peft's files. Not while one is
        loaded. Raises `ModelError` for a name that there is not."""
        beside = self._stepper.adapters
        if beside is None:
            raise ModelError(f"there is no adapter {name!r}: this engine serves none by name")
        tensors = {key: tensor.clone() for key, tensor in beside.tensors(name).items()}
        return int(self._stepper.versions_A[beside.numbers[name]]), tensors

    async def _load_trained(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        assert self._stepper.adapters is not None
        numbers, versions_A = self._stepper.adapters.numbers, self._stepper.versions_A
        due = [name for name, every in self._snapshots.items() if self.version - versions_A[numbers[name]] >= every]
        served, replaced = self.adapter(_TRAINED) if due else (0, {})
        await self.load_adapter(_TRAINED, version, tensors)
        for name in due:
            await self.load_adapter(name, served, replaced)

    async def load_adapter(self, name: str, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load new weights of one adapter, by the names of peft's files, between two steps; the others go on. Then no
        token of it is computed from the KV of its older weights, and new ones have `version`.

        Raises `ModelError`, with nothing changed, for a name that there is not or for other names or shapes.
        """
        self._check_open()
        beside = self._stepper.adapters
        if beside is None:
            raise ModelError(f"there is no adapter {name!r}: this engine serves none by name")
        beside.load(name, tensors)
        number = beside.numbers[name]
        self._scheduler.suspend_adapter(number)
        self._stepper.versions_A[number] = version

    async def rest(self) -> None:
        """Give back the memory of the KV, which nothing will need: the next calls come after the next `load`. With
        calls running, do nothing."""
        scheduler = self._scheduler
        if not (self._closed or scheduler.waiting or any(scheduler.running())):
            scheduler.forget_all()
            scheduler.pool.release()
            self._stepper.rest()

    @property
    def takes_adapters(self) -> bool:
        """Whether `load` takes adapters by the names of peft's files, in place of weights."""
        return self._adapters is not None or self._trained != BASE

    @property
    def shares_base(self) -> bool:
        """Whether a trainer in this process may compute with the frozen layers that have the adapters."""
        return self._adapters is not None

    def adapted_layers(self) -> dict[str, Any]:
        """Return the layers with an adapter by name, for a trainer in this process that shares their frozen part."""
        return adapted_layers(self._model)

    def experts(self) -> dict[str, torch.nn.Module]:
        """Return the parts with the weights of experts by name, for a trainer in this process that shares them."""
        return experts_of(self._model)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the engine's own weights of the text by Hugging Face parameter name, for a trainer in this process
        that shares their memory. It may write to them only while no call runs, and must `load` before the next call."""
        return {name: parameter.detach() for name, parameter in text_parameters(self._model)}

    async def close(self) -> None:
        """Fail running calls with `EngineError` and free memory. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._fail_all(EngineLostError("the engine was closed"))
        driver, self._driver = self._driver, None
        if driver is not None and not driver.done():
            await asyncio.wait([driver])
        self._scheduler.pool.layers.clear()
        if self._scheduler.states is not None:
            self._scheduler.states.release()
        self._model = None
        del self._pictures
        self._stepper.release()


def _prepared(model: Any, adapters: LoraConfig | None) -> Any:
    """Return the model for inference, with adapters if it shall have some."""
    if adapters is not None:
        add_adapters(model, adapters)
        if adapters.base == "nf4":
            own(one for one in model.parameters() if one.is_floating_point())
    return model.eval().requires_grad_(False)


def _take_over_mixers(
    model: Any, budget_bytes: int, *, deterministic: bool
) -> tuple[SlotStates, Mixing] | tuple[None, None]:
    """Take over the recurrent and convolution layers of a model that has some."""
    mixers = mixers_of(model)
    if not mixers:
        return None, None
    if deterministic:
        raise ModelError(
            f"{type(model).__name__} has recurrent or convolution layers, whose results depend on how a prompt is cut "
            "into steps: set deterministic to false"
        )
    states = SlotStates.within(budget_bytes, example_state(mixers, model))
    return states, Mixing(mixers, states.pool, model.device)


def _new_pool(
    model: Any, layout: KVLayout, states: SlotStates | None, *, max_slots: int, max_length: int, budget_bytes: int
) -> KVPool:
    """Return the KV pool of a model. Its states and their snapshots are within the same budget."""
    return KVPool(
        layout=layout,
        dtype=model.dtype,
        device=model.device,
        max_slots=max_slots,
        max_length=max_length,
        budget_bytes=budget_bytes - (states.snapshot_bytes if states else 0),
        state_bytes=states.pool.bytes_per_slot if states else 0,
    )


def _new_forward(
    model: Any, shape: ModelShape, max_model_len: int, *, deterministic: bool, adapted: bool
) -> FastForward | GenericForward:
    """Return the forward pass. In the deterministic mode adapters stay apart: fused, they would round otherwise."""
    if shape.fast and not (deterministic and adapted):
        return FastForward(model, shape, max_model_len, exact=deterministic)
    return GenericForward(model)


def _decode_graphs(model: Any, forward: FastForward | GenericForward, pool: KVPool) -> DecodeGraphs | None:
    """Return graphs of decoding steps by our own forward pass on a GPU; None elsewhere."""
    if model.device.type != "cuda" or not isinstance(forward, FastForward):
        return None
    return DecodeGraphs(
        forward=forward,
        pool=pool,
        parameters=model.parameters,
        device=model.device,
        record=CudaRecorder(model.device),
    )


def _budget_bytes(kv_cache_mb: int | None, device: torch.device) -> int:
    return kv_cache_mb * 2**20 if kv_cache_mb is not None else default_budget_bytes(device)


def _masks(tokenizer: Any, vocab_size: int, end_ids: Sequence[int]) -> TokenMasks | None:
    if tokenizer is None:
        return None
    vocabulary = Vocabulary(tokenizer=tokenizer, vocab_size=vocab_size, end_ids=end_ids)
    return TokenMasks(lambda: vocabulary)


def _routing(model: Any, *, deterministic: bool) -> Routing | None:
    """Return the routing of a mixture of experts; None for a dense model. In the deterministic mode each token meets
    its experts by itself: in a product of all tokens of an expert, rounding could depend on who the others are."""
    routing = routing_of(model)
    if routing is not None and deterministic:
        model.set_experts_implementation("batched_mm")
    return routing


def _choose_matmul(model: Any, *, fixed: bool) -> MatmulChoice:
    """Choose the fp32 matrix product, which is possible only on the CPU.

    `fixed` keeps PyTorch's default: the deterministic mode must not depend on timing, and the setting would also apply
    to a trainer that computes at the same time.
    """
    if model.device.type != "cpu" or model.dtype != torch.float32 or fixed:
        return DEFAULT
    linear = (module.weight for module in model.modules() if isinstance(module, torch.nn.Linear))
    weights = [weight for weight in linear if weight.is_floating_point()]
    return choose_float32_matmul([(int(weight.shape[0]), int(weight.shape[1])) for weight in weights])
