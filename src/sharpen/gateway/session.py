"""One rollout's access to the model: its key, its calls, and the reason for a failure.

In: what the gateway records while it answers. Out: `Call`s in order, `failure`, `metrics`. State is written on the
serving loop only, except for the `delivered` flags and `close`, which may be called from any thread and does not wait.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sharpen.contracts import Generation
from sharpen.errors import TokenCapError
from sharpen.gateway.caller import Caller
from sharpen.gateway.exchange import Exchange, RawRequest
from sharpen.gateway.history import History, Prompt
from sharpen.gateway.memory import Memory
from sharpen.gateway.meter import Tally
from sharpen.gateway.model import ChatModel
from sharpen.gateway.requests import CallRequest
from sharpen.types import PROMPT_ROLE, Call, CallStatus, Constraint, Outcome, Sampling


class TaskSet:
    """The tasks of one attempt on one loop. `closed`: they are being cancelled, and no more should be added."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.closed = False
        self._loop = loop
        self._tasks: set[asyncio.Task[Any]] = set()

    def add(self, task: asyncio.Task[Any]) -> None:
        """Add a task, to be cancelled by `close`. On the loop."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Cancel all tasks without waiting for them. From any thread, even if the loop is closed."""
        self.closed = True
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """A call in progress: the request, then the response. `generation` is set last.

    `first_choice` is the index of the request's first choice, if the request asked for several. `agent` and
    `asked_model` are the names of `Call`.
    """

    index: int
    exchange: Exchange
    prompt: Prompt
    request: CallRequest
    response: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    started: float | None = None
    generation: Generation | None = None
    first_choice: int | None = None
    constraint: Constraint | None = None
    agent: str = ""
    asked_model: str = ""

    @property
    def used(self) -> bool:
        """Whether the call produced a response and the agent received it."""
        return self.exchange.delivered and not self.exchange.abandoned and self.generation is not None

    def call(self) -> Call:
        """Return the record of this call.

        A call without a generation, or not delivered, is ABANDONED. A call from another rollout's code was refused, and
        is FOREIGN.
        """
        exchange, generation, used = self.exchange, self.generation, self.used
        if generation is None:
            none = np.zeros(0, np.int32)
            generation = Generation(ids=none, logprobs=none.astype(np.float32), versions=none, finish_reason="abort")
        return Call(
            index=self.index,
            parent=self.prompt.parent,
            prompt_ids_P=self.prompt.ids_P,
            sampled_ids_S=np.asarray(generation.ids, np.int32),
            logprobs_S=np.asarray(generation.logprobs, np.float32),
            versions_S=np.asarray(generation.versions, np.int32),
            sampling=self.request.sampling,
            finish_reason=generation.finish_reason,
            status=CallStatus.FOREIGN if exchange.foreign else CallStatus.USED if used else CallStatus.ABANDONED,
            messages=self.request.messages if self.request.prompt is None else self._prompt_message(),
            tools=self.request.tools,
            response=self.response,
            seconds=self._seconds(),
            started=self.started,
            request=self.first_choice,
            constraint=self.constraint,
            agent=self.agent,
            model=self.asked_model,
            routes_NLK=generation.routes_NLK,
            span=exchange.span,
            pictures=self.prompt.pictures,
            seeded=self.request.seed is not None,
            supports=generation.supports,
        )

    def _seconds(self) -> float:
        """Return how long the call took, or has taken if it is still running."""
        if self.seconds is None:
            return 0.0 if self.started is None else max(0.0, time.time() - self.started)
        return self.seconds

    def _prompt_message(self) -> tuple[Mapping[str, Any], ...]:
        return ({"role": PROMPT_ROLE, "content": self.prompt.text},)


class Session:
    """One rollout's key to the gateway. `model` is what the workflow receives."""

    def __init__(
        self,
        *,
        rollout_id: str,
        noise_seed: int,
        sampling: Sampling,
        greedy: bool,
        max_calls: int | None,
        record: bool,
        model: ChatModel,
        revoke: Callable[[], object],
        loop: asyncio.AbstractEventLoop,
        owner: Caller | None = None,
        tally: Tally | None = None,
        policies: Mapping[str, str] | None = None,
    ) -> None:
        self.rollout_id = rollout_id
        self.owner = owner
        """The attempt that it serves; None for a gateway without rollouts."""
        self.model = model
        self.sampling, self.greedy = sampling, greedy
        self.max_calls = max_calls
        self.tally = tally
        """Counts the calls and tokens of an auxiliary model, and may refuse calls."""
        self.policies = policies or {}
        """The adapters that answer agents, by the agent's name."""
        self.history = History()
        self.memory = Memory()
        self.arrival = asyncio.Lock()
        """Requests are read one after the other: that with many images is no later call than the next one."""
        self.failure: Outcome | None = None
        """Why a call failed: the model (context overflow, call limit) or infrastructure; None if no call failed."""
        self.failure_reason: str | None = None
        """One line about the failure."""
        self.tasks = TaskSet(loop)
        """The tasks that answer its calls."""
        self.seeds = noise_seed
        """What the noise of a request with a seed of its own is made of, beside that seed."""
        self._noise_seed = noise_seed
        self._record = record
        self._entries: list[Entry] = []
        self._exchanges: list[Exchange] = []
        self._counts = {"prompt_tokens": 0, "sampled_tokens": 0, "tool_parse_errors": 0, "forks": 0}
        self._revoke = revoke
        self._lock = threading.Lock()
        self._calls: tuple[Call, ...] | None = None

    def close(self) -> tuple[Call, ...]:
        """Revoke the key, abort calls in flight (which become ABANDONED) and return all calls in order.

        From any thread; does not wait for the engine. Later calls return the same tuple. Empty with `record=False`.
        """
        self.model.commands.stop()
        with self._lock:
            if self._calls is None:
                self._revoke()
                self.tasks.close()
                self._calls = tuple(entry.call() for entry in list(self._entries)) if self._record else ()
            return self._calls

    def discard(self) -> None:
        """Remove the folders of its commands: nobody looks at them any more. From any thread."""
        self.model.commands.remove()

    def allow(self, num_rollouts: int) -> None:
        """Let as many calls be made as so many rollouts may make, which one attempt makes. Before the first call."""
        if self.max_calls is not None:
            self.max_calls *= num_rollouts

    def snapshot(self) -> tuple[Call, ...]:
        """Return the calls so far, in order, as `close` would return them now. From any thread."""
        return tuple(entry.call() for entry in list(self._entries))

    def prompt_text(self, index: int) -> str:
        """Return the rendered prompt of a call. From any thread."""
        return self._entries[index].prompt.text

    @property
    def metrics(self) -> dict[str, float]:
        """Counts so far: calls, prompt and sampled tokens, malformed tool calls, forks (later calls with no parent)."""
        return {"num_calls": float(len(self._entries)), **{name: float(n) for name, n in self._counts.items()}}

    @property
    def counts(self) -> dict[str, float]:
        """The counts reported per rollout: malformed tool calls and forks; for an auxiliary model, calls and tokens."""
        if self.tally is not None:
            return self.tally.counts
        return {name: float(self._counts[name]) for name in ("tool_parse_errors", "forks")}

    @property
    def exhausted(self) -> TokenCapError | None:
        """The error of a call that was refused because the run has used up the model's tokens."""
        return None if self.tally is None else self.tally.refused

    @property
    def num_answers(self) -> int:
        """How many answers the agent has received so far, recorded or not."""
        return sum(entry.used for entry in list(self._entries))

    @property
    def cut(self) -> bool:
        """Whether the last answer that the agent received stopped at its token limit."""
        last = next((entry.generation for entry in reversed(list(self._entries)) if entry.used), None)
        return last is not None and last.finish_reason == "length"

    # The gateway calls what follows, on the serving loop.

    def fail(self, outcome: Outcome, reason: str) -> None:
        """Note why a call failed. The first cause is kept, but an infrastructure failure replaces the model's own."""
        if self.failure is None or (outcome == Outcome.INFRASTRUCTURE and self.failure != outcome):
            self.failure, self.failure_reason = outcome, reason

    def admits(self, num_choices: int) -> bool:
        """Whether `num_choices` more calls are within the limit."""
        return self.max_calls is None or len(self._entries) + num_choices <= self.max_calls

    def exchange(self, raw: RawRequest) -> Exchange:
        """Return the exchange of an admitted request. If it is a client's retry, the tries it repeats are abandoned."""
        if self.tally is not None:
            self.tally.add(calls=1)
        return self._arrived(raw)

    def cancelled(self, raw: RawRequest) -> None:
        """Note a request that was cancelled before it became a call: a retry repeats it, and no equal call that was
        answered."""
        self._arrived(raw).ended = True

    def _arrived(self, raw: RawRequest) -> Exchange:
        body = hashlib.blake2b(raw.body, digest_size=16).digest()
        exchange = Exchange(
            body=body,
            retry=raw.retry,
            idempotency_key=raw.idempotency_key,
            certain=raw.in_process,
            span=raw.span,
        )
        if raw.retry > 0:
            self._abandon_repeated(exchange)
        self._exchanges.append(exchange)
        return exchange

    def _abandon_repeated(self, retry: Exchange) -> None:
        """Abandon the earlier tries that a retry repeats: the agent did not receive, or dropped, their responses.

        Of several equal requests made at the same time only one is repeated, and the body does not tell which. With an
        idempotency key, it is the tries with the same key. Without one, it is a try that failed (cancelled, timed out),
        which is abandoned anyway. If there is none, the client disconnected at the moment of the response, or its try
        never arrived here. Then all earlier tries whose delivery is uncertain are abandoned, so that no response is
        trained that the agent may not have received.
        """
        earlier = [
            one for one in self._exchanges if one.body == retry.body and one.retry < retry.retry and not one.repeated
        ]
        if retry.idempotency_key:
            repeated = [one for one in earlier if one.idempotency_key == retry.idempotency_key]
        else:
            earlier = [one for one in earlier if not one.idempotency_key]
            failed = [one for one in earlier if one.ended and not one.delivered]
            repeated = failed[:1] or [one for one in earlier if not one.certain]
        for one in repeated:
            one.repeated = one.abandoned = True

    def entry(
        self,
        exchange: Exchange,
        prompt: Prompt,
        request: CallRequest,
        agent: str = "",
        constraint: Constraint | None = None,
    ) -> Entry:
        """Add a new entry with the next index, and return it. `agent` is the name of the agent that asks."""
        asked_model = "" if request.model == self.model.name else request.model
        entry = Entry(
            index=len(self._entries),
            exchange=exchange,
            prompt=prompt,
            request=request,
            constraint=constraint,
            agent=agent,
            asked_model=asked_model,
        )
        self._entries.append(entry)
        return entry

    def count(self, name: str, number: int = 1) -> None:
        """Add to a metric."""
        self._counts[name] += number
        if self.tally is not None and name in ("prompt_tokens", "sampled_tokens"):
            self.tally.add(tokens=number)

    def noise(self, index: int, choice: int, seed: int | None) -> int:
        """Return a call's noise key: made from its index, or from the request's own seed (then equal seeds in this
        rollout repeat)."""
        if seed is None:
            digest = self._digest(f"call/{index}")
        else:
            digest = _digest(self.seeds, f"seed/{seed}/{choice}")
        return int.from_bytes(digest[:8], "little") >> 1  # 63 bits: fits a signed integer too

    def name(self, index: int) -> str:
        """Return a call's unique name, which is the same in every run of the same seed."""
        return self._digest(f"name/{index}").hex()

    def _digest(self, what: str) -> bytes:
        return _digest(self._noise_seed, what)


def _digest(seed: int, what: str) -> bytes:
    return hashlib.blake2b(f"{seed}/{what}".encode(), digest_size=11).digest()
