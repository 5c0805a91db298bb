"""Routing of requests to several engines of one policy: a rollout's calls go to the engine that caches its prefix.

In: `Engine`s with the same model and settings (replicas). Out: `Replicas`, which is itself an `Engine`. If a replica is
lost, the others take over its sessions and the calls it was serving, of which nothing was delivered yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from sharpen.contracts import Engine, GenerateRequest, Generation, OnTokens
from sharpen.errors import EngineError, EngineLostError

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")
logger = logging.getLogger(__name__)

MAX_SESSIONS = 65_536
"""How many sessions are remembered; the least recently used is forgotten first."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Replica:
    engine: Engine
    number: int
    running: int = 0


class Replicas:
    """An `Engine` made of replicas. Every method runs on the serving loop."""

    def __init__(self, engines: Sequence[Engine], *, max_sessions: int = MAX_SESSIONS) -> None:
        """`engines`: one or more, all with the same weights."""
        self._engines = tuple(engines)
        self._serving = [_Replica(engine=engine, number=number) for number, engine in enumerate(engines)]
        self._homes: OrderedDict[str, _Replica] = OrderedDict()
        self._max_sessions = max_sessions

    @property
    def max_model_len(self) -> int:
        """The maximum of prompt plus sampled tokens of one request."""
        return min(engine.max_model_len for engine in self._engines)

    @property
    def version(self) -> int:
        """The oldest policy version that a replica serves."""
        return min((replica.engine.version for replica in self._serving), default=self._engines[0].version)

    @property
    def takes_adapters(self) -> bool:
        """Whether `load` takes adapters only, instead of whole weights."""
        return all(getattr(engine, "takes_adapters", False) for engine in self._engines)

    @property
    def num_serving(self) -> int:
        """How many replicas are not lost."""
        return len(self._serving)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one continuation on the replica of the request's session; see `Engine.generate`.

        A session's first request, and a request without a session, goes to the replica with the fewest running
        requests. A request whose `on_tokens` was told of tokens is not repeated on another replica, which may sample
        others: `EngineError`. Raises `EngineLostError` if no replica is left.
        """
        told = _Told(request.on_tokens)
        request = request if request.on_tokens is None else replace(request, on_tokens=told)
        while True:
            replica = self._home(request.session)
            try:
                return await _generate(replica, request)
            except EngineLostError as error:
                self._lose(replica, error)
                if told.any:
                    raise EngineError(f"the replica that was sampling a streamed answer is lost: {error}") from error

    async def generate_each(self, request: GenerateRequest) -> list[Generation]:
        """Sample one continuation on every replica. Those lost in the meantime are left out.

        Raises `EngineLostError` if no replica is left.
        """
        replicas = self._remaining()
        outcomes = await asyncio.gather(*(_generate(one, request) for one in replicas), return_exceptions=True)
        return self._results(replicas, outcomes)

    async def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load new weights into every replica; see `Engine.load`. The loss of some replicas is tolerated.

        Raises `EngineLostError` if no replica is left.
        """
        replicas = self._remaining()
        loads = (replica.engine.load(version, tensors) for replica in replicas)
        self._results(replicas, await asyncio.gather(*loads, return_exceptions=True))

    async def close(self) -> None:
        """Close every replica, including lost ones."""
        self._serving.clear()
        await asyncio.gather(*(engine.close() for engine in self._engines))

    def _remaining(self) -> list[_Replica]:
        if not self._serving:
            raise EngineLostError("no replica of the engine is left")
        return list(self._serving)

    def _home(self, session: str) -> _Replica:
        home = self._homes.get(session)
        if home is None or home not in self._serving:
            home = min(self._remaining(), key=lambda replica: replica.running)
        if session:
            self._homes[session] = home
            self._homes.move_to_end(session)
            if len(self._homes) > self._max_sessions:
                self._homes.popitem(last=False)
        return home

    def _results(self, replicas: Sequence[_Replica], outcomes: Sequence[Result | BaseException]) -> list[Result]:
        """Remove lost replicas and return the results of the others. Raises any error other than a loss."""
        for replica, outcome in zip(replicas, outcomes, strict=True):
            if isinstance(outcome, EngineLostError):
                self._lose(replica, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    def _lose(self, replica: _Replica, error: EngineLostError) -> None:
        """Remove a replica. Raises `EngineLostError` if no other is left."""
        if replica in self._serving:
            self._serving.remove(replica)
            if self._serving:
                logger.error(
                    "replica %d of the engine is lost, %d of %d continue: %s",
                    replica.number,
                    len(self._serving),
                    len(self._engines),
                    error,
                )
        if not self._serving:
            raise error


class _Told:
    """Passes on sampled ids, and notes that it did."""

    def __init__(self, on_tokens: OnTokens | None) -> None:
        self.any = False
        self._on_tokens = on_tokens

    def __call__(self, ids: Sequence[int]) -> None:
        assert self._on_tokens is not None
        self.any = True
        self._on_tokens(ids)


async def _generate(replica: _Replica, request: GenerateRequest) -> Generation:
    replica.running += 1
    try:
        return await replica.engine.generate(request)
    finally:
        replica.running -= 1
