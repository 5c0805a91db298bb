"""Several engines that serve one policy, behind one: the calls of a rollout go where its prefix is cached.

In: `Engine`s with the same model and settings (replicas). Out: `Replicas`, an `Engine` too. A replica that is lost
leaves its sessions, and the calls it was serving, to the others; nothing of those calls was delivered yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from sharpen.errors import EngineLostError
from sharpen.inference.engine import Engine, GenerateRequest, Generation

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")
logger = logging.getLogger(__name__)

MOST_SESSIONS = 65_536
"""Sessions that are remembered; beyond it the one that has asked for nothing for the longest time is forgotten."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Replica:
    engine: Engine
    number: int
    running: int = 0


class Replicas:
    """Satisfies `Engine`. Every method runs on the serving loop."""

    def __init__(self, engines: Sequence[Engine], *, most_sessions: int = MOST_SESSIONS) -> None:
        """Of one engine or more, all with the same weights."""
        self._engines = tuple(engines)
        self._serving = [_Replica(engine=engine, number=number) for number, engine in enumerate(engines)]
        self._homes: OrderedDict[str, _Replica] = OrderedDict()
        self._most_sessions = most_sessions

    @property
    def max_model_len(self) -> int:
        """Prompt plus sampled tokens of one request, at most."""
        return min(engine.max_model_len for engine in self._engines)

    @property
    def version(self) -> int:
        """The oldest policy version that a replica serves."""
        return min((replica.engine.version for replica in self._serving), default=self._engines[0].version)

    @property
    def takes_adapters(self) -> bool:
        """Whether `load` takes adapters alone, not whole weights."""
        return all(getattr(engine, "takes_adapters", False) for engine in self._engines)

    @property
    def num_serving(self) -> int:
        """Replicas that are not lost."""
        return len(self._serving)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one continuation, on the replica of the request's session; see `Engine.generate`. A session's first
        request, and one without session, goes to the replica with the fewest requests running.

        Raises `EngineLostError` when no replica is left.
        """
        while True:
            replica = self._home(request.session)
            try:
                return await _generate(replica, request)
            except EngineLostError as error:
                self._lose(replica, error)

    async def generate_each(self, request: GenerateRequest) -> list[Generation]:
        """The continuation that each replica samples; of those that are lost meanwhile there is none.

        Raises `EngineLostError` when no replica is left.
        """
        replicas = self._left()
        ended = await asyncio.gather(*(_generate(one, request) for one in replicas), return_exceptions=True)
        return self._whole(replicas, ended)

    async def load(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load new weights into every replica; see `Engine.load`. A replica that is lost in doing so is left behind.

        Raises `EngineLostError` when no replica is left.
        """
        replicas = self._left()
        loads = (replica.engine.load(version, tensors) for replica in replicas)
        self._whole(replicas, await asyncio.gather(*loads, return_exceptions=True))

    async def close(self) -> None:
        """Close every replica, lost ones too."""
        self._serving.clear()
        await asyncio.gather(*(engine.close() for engine in self._engines))

    def _left(self) -> list[_Replica]:
        if not self._serving:
            raise EngineLostError("no replica of the engine is left")
        return list(self._serving)

    def _home(self, session: str) -> _Replica:
        home = self._homes.get(session)
        if home is None or home not in self._serving:
            home = min(self._left(), key=lambda replica: replica.running)
        if session:
            self._homes[session] = home
            self._homes.move_to_end(session)
            if len(self._homes) > self._most_sessions:
                self._homes.popitem(last=False)
        return home

    def _whole(self, replicas: Sequence[_Replica], ended: Sequence[Result | BaseException]) -> list[Result]:
        """What the replicas gave that did not fail. Raises what one raised that is not lost."""
        for replica, outcome in zip(replicas, ended, strict=True):
            if isinstance(outcome, EngineLostError):
                self._lose(replica, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in ended if not isinstance(outcome, BaseException)]

    def _lose(self, replica: _Replica, error: EngineLostError) -> None:
        """Send nothing more to this replica. Raises `EngineLostError` if no other is left."""
        if replica in self._serving:
            self._serving.remove(replica)
            if self._serving:
                logger.error(
                    "replica %d of the engine is lost, %d of %d go on: %s",
                    replica.number,
                    len(self._serving),
                    len(self._engines),
                    error,
                )
        if not self._serving:
            raise error


async def _generate(replica: _Replica, request: GenerateRequest) -> Generation:
    replica.running += 1
    try:
        return await replica.engine.generate(request)
    finally:
        replica.running -= 1
