"""An engine in its own actor, and its client for other processes.

In: the settings of a model and its engine; weights as arrays in Ray's object store. Out: `EngineActor`, and
`EngineClient`, which satisfies `contracts.Engine` in any process.

Ray restarts an actor that died and repeats its pending calls. This is safe: a call depends on its request alone, and
none of it was recorded. A restarted actor answers no call until the coordinator has sent the current weights (`serve`).
A streamed call is not repeated: those that wait for its tokens may have seen some, and newer weights sample others.

Weights are plain numpy arrays in the object store, which readers share without a copy: Ray would pickle a dict of torch
tensors one by one, which takes forty times as long.
"""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sharpen.config.public import TunerModelConfig
from sharpen.config.run import EngineConfig
from sharpen.contracts import Engine, GenerateRequest, Generation, OnTokens
from sharpen.errors import EngineError, EngineLostError, SharpenError
from sharpen.gateway.meter import BusyClock
from sharpen.machine import let_idle_workers_sleep
from sharpen.models.files import model_folder, quiet_transformers
from sharpen.placement.engines import load_policy
from sharpen.placement.serving import ServingThread

if TYPE_CHECKING:
    import torch


Arrays = Mapping[str, tuple[npt.NDArray[np.uint8], str, tuple[int, ...]]]
"""Name -> (bytes, name of the torch dtype, shape)."""


def to_arrays(tensors: Mapping[str, torch.Tensor]) -> Arrays:
    """Return the bytes of each tensor, without a copy for tensors on the CPU."""
    import torch

    return {
        name: (
            tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy(),
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
        )
        for name, tensor in tensors.items()
    }


def to_tensors(arrays: Arrays) -> dict[str, torch.Tensor]:
    """Return tensors that view the same bytes. They must not be written to."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {
            name: torch.from_numpy(bytes_).view(getattr(torch, dtype)).reshape(shape)
            for name, (bytes_, dtype, shape) in arrays.items()
        }


MAX_RESTARTS = 5
"""The number of times that an engine may die in a run."""


class EngineActor:
    """An actor that serves the trained model, or an `auxiliary` one, with a single engine of the chosen type."""

    def __init__(
        self,
        model: TunerModelConfig,
        config: EngineConfig,
        num_threads: int,
        *,
        auxiliary: bool,
        deterministic: bool,
        alone: bool,
    ) -> None:
        self._model, self._config, self._num_threads = model, config, num_threads
        self._auxiliary, self._deterministic, self._alone = auxiliary, deterministic, alone
        self._thread = ServingThread()
        self._engine: Engine | None = None
        self._serves = asyncio.Event()
        self._busy = BusyClock()
        self._loading = asyncio.Lock()

    async def serve(self, version: int, arrays: Arrays | None) -> int:
        """Start the engine if needed, load these weights unless it has them or newer ones, and return its
        `max_model_len`. None stands for the weights of the model's folder. Raises what loading the engine raises."""
        async with self._loading:
            if self._engine is None:
                self._engine = await asyncio.to_thread(self._start)
            if arrays is not None and version > self._engine.version:
                load = self._engine.load(version, to_tensors(arrays))
                await asyncio.wrap_future(self._thread.start(load))
            self._serves.set()
            return self._engine.max_model_len

    async def serves(self) -> bool:
        """Whether the engine has weights; False after a restart."""
        return self._serves.is_set()

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Engine.generate`. Waits until the engine has weights."""
        await self._serves.wait()
        assert self._engine is not None
        with self._busy:
            return await asyncio.wrap_future(self._thread.start(self._engine.generate(request)))

    async def stream(self, request: GenerateRequest) -> AsyncIterator[list[int] | Generation]:
        """As `generate`, but yield before it the ids for which `on_tokens` is called, those of each decode step as soon
        as they are sampled; of several steps together if their reader is slower."""
        loop = asyncio.get_running_loop()
        steps: asyncio.Queue[list[int]] = asyncio.Queue()

        def note(ids: Sequence[int]) -> None:
            loop.call_soon_threadsafe(steps.put_nowait, list(ids))

        sampling = loop.create_task(self.generate(replace(request, on_tokens=note)))
        sampling.add_done_callback(lambda _: steps.put_nowait([]))
        try:
            while not (sampling.done() and steps.empty()):
                ids = await steps.get()
                while not steps.empty():
                    ids += steps.get_nowait()
                if ids:
                    yield ids
            yield await sampling
        finally:
            sampling.cancel()

    async def busy_s(self) -> float:
        """Return the seconds since the actor's start in which it had a request."""
        return self._busy.seconds()

    async def close(self) -> None:
        """Close the engine and its processes, if it has any."""
        if self._engine is not None:
            await asyncio.wrap_future(self._thread.start(self._engine.close()))

    def _start(self) -> Engine:
        let_idle_workers_sleep()
        quiet_transformers()
        import torch

        torch.set_num_threads(self._num_threads)
        model, config, folder = self._model, self._config, model_folder(self._model.model_path)
        assert config.type != "auto", "the coordinator has chosen the type"
        type_ = "embedded" if self._auxiliary and config.type != "vllm" else config.type
        return load_policy(
            model, config, folder, self._thread, type=type_, deterministic=self._deterministic, alone=self._alone
        )[1]


class EngineClient:
    """The client of an engine in an actor. `version` is the last version that the coordinator set."""

    def __init__(self, actor: Any, *, max_model_len: int) -> None:
        self._actor = actor
        self._max_model_len = max_model_len
        self.version = 0

    @property
    def max_model_len(self) -> int:
        """The most prompt plus sampled tokens of one request."""
        return self._max_model_len

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Engine.generate`. Raises `EngineLostError` if the actor is gone for good, and `EngineError` if it ended
        within a streamed call, although it may be started again."""
        if request.on_tokens is not None:
            return await self._stream(request, request.on_tokens)
        found: Generation = await answer(self._actor.generate.remote(request))
        return found

    async def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `Engine.load`. The weights travel through the object store."""
        await answer(self._actor.serve.remote(version, to_arrays(tensors)))
        self.version = version

    async def _stream(self, request: GenerateRequest, on_tokens: OnTokens) -> Generation:
        options = {"num_returns": "streaming", "max_task_retries": 0}
        parts = self._actor.stream.options(**options).remote(replace(request, on_tokens=None))
        try:
            async for reference in parts:
                part = await answer(reference)
                if isinstance(part, Generation):
                    return part
                on_tokens(part)
        except EngineLostError as error:
            raise EngineError(str(error)) from error
        except asyncio.CancelledError:
            _cancel(parts)
            raise
        raise EngineError("the engine ended a streamed call without an answer")

    async def close(self) -> None:
        """Do nothing: the owner of the actor ends it."""


async def answer(reference: Any) -> Any:
    """Await the result of a call to an engine's actor, on any loop. Cancelling the awaiting task cancels the call.

    Raises a `SharpenError` of the actor unchanged, `EngineError` for its other errors, `EngineLostError` if the actor
    is gone for good.
    """
    from ray.exceptions import RayActorError, RayTaskError

    try:
        return await reference
    except asyncio.CancelledError:
        _cancel(reference)
        raise
    except RayTaskError as error:
        if isinstance(error.cause, SharpenError):
            raise error.cause from None
        raise EngineError(f"the engine failed: {error.cause!r}") from error
    except RayActorError as error:
        raise EngineLostError(f"the engine's process is gone: {first_line(error)}") from error


def _cancel(call: Any) -> None:
    """Stop a call of an actor: of its result, or of the iterator of what it yields."""
    import ray
    from ray.exceptions import RayError

    with contextlib.suppress(RayError):
        ray.cancel(call)


def first_line(error: BaseException) -> str:
    """Return the first line of an error, since Ray's messages are long."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
