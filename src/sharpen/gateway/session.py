"""One rollout's access to the model: its key, its calls, and why it failed, if it did.

In: what the gateway records while it answers. Out: `Call`s in order, `failure`, `metrics`. All but `close` and the
`delivered` flags is written on the serving loop only; `close` may be called from any thread and does not wait.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sharpen.errors import TokenCapError
from sharpen.gateway.caller import Caller
from sharpen.gateway.exchange import Exchange, RawRequest
from sharpen.gateway.history import History, Prompt
from sharpen.gateway.meter import Tally
from sharpen.gateway.model import ChatModel
from sharpen.gateway.requests import ChatRequest
from sharpen.gateway.tasks import TaskSet
from sharpen.inference.engine import Generation
from sharpen.types import Call, CallStatus, Outcome, Sampling


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """A call being made: what was asked, then what came. `generation` is set last. `first`: the index of the first of
    the choices that were asked for together, where there are several."""

    index: int
    exchange: Exchange
    prompt: Prompt
    asked: ChatRequest
    response: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    generation: Generation | None = None
    first: int | None = None

    @property
    def used(self) -> bool:
        """Whether something came of it that the agent was handed."""
        return self.exchange.delivered and not self.exchange.abandoned and self.generation is not None

    def call(self) -> Call:
        """The record. A call that nothing came of, or that was not delivered, is ABANDONED; one that came from within
        another rollout was not made, and is FOREIGN."""
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
            sampling=self.asked.sampling,
            finish_reason=generation.finish_reason,
            status=CallStatus.FOREIGN if exchange.foreign else CallStatus.USED if used else CallStatus.ABANDONED,
            messages=self.asked.messages,
            tools=self.asked.tools,
            response=self.response,
            seconds=self.seconds,
            request=self.first,
        )


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
    ) -> None:
        self.rollout_id = rollout_id
        self.owner = owner
        """The attempt that it serves; None where there are no rollouts."""
        self.model = model
        self.sampling, self.greedy = sampling, greedy
        self.max_calls = max_calls
        self.tally = tally
        """Where calls and tokens are counted besides, and may be refused (auxiliary models)."""
        self.history = History()
        self.failure: Outcome | None = None
        """Why a call failed: by the model (context overflow, call limit) or by infrastructure; None if none did."""
        self.failure_reason: str | None = None
        """One line about the failure."""
        self.tasks = TaskSet(loop)
        """What answers its calls."""
        self._noise_seed = noise_seed
        self._record = record
        self._entries: list[Entry] = []
        self._exchanges: list[Exchange] = []
        self._counts = {"prompt_tokens": 0, "sampled_tokens": 0, "tool_parse_errors": 0, "forks": 0}
        self._revoke = revoke
        self._lock = threading.Lock()
        self._calls: tuple[Call, ...] | None = None

    def close(self) -> tuple[Call, ...]:
        """Revoke the key, abort what is in flight (those calls are ABANDONED) and return the calls in order.

        From any thread; does not wait for the engine. Again: the same calls. Empty with `record=False`.
        """
        with self._lock:
            if self._calls is None:
                self._revoke()
                self.tasks.close()
                self._calls = tuple(entry.call() for entry in list(self._entries)) if self._record else ()
            return self._calls

    def snapshot(self) -> tuple[Call, ...]:
        """The calls recorded so far, in order, as they would be if the session closed now. From any thread."""
        return tuple(entry.call() for entry in list(self._entries))

    def prompt_text(self, index: int) -> str:
        """The rendered prompt of a call. From any thread."""
        return self._entries[index].prompt.text

    @property
    def metrics(self) -> dict[str, float]:
        """Counts so far: calls, prompt and sampled tokens, malformed tool calls, forks (later calls with no parent)."""
        return {"num_calls": float(len(self._entries)), **{name: float(n) for name, n in self._counts.items()}}

    @property
    def counts(self) -> dict[str, float]:
        """What deserves a look, per rollout: tool calls that did not parse, and forks; of a model whose use is counted,
        its calls and tokens."""
        if self.tally is not None:
            return self.tally.counts
        return {name: float(self._counts[name]) for name in ("tool_parse_errors", "forks")}

    @property
    def exhausted(self) -> TokenCapError | None:
        """The error of a call that came after the run had used up the model's tokens."""
        return None if self.tally is None else self.tally.refused

    @property
    def num_answers(self) -> int:
        """How many answers the agent was handed so far, recorded or not."""
        return sum(entry.used for entry in list(self._entries))

    @property
    def cut(self) -> bool:
        """Whether the last answer that the agent was handed stopped at its token limit."""
        last = next((entry.generation for entry in reversed(list(self._entries)) if entry.used), None)
        return last is not None and last.finish_reason == "length"

    # What follows is the gateway's, on the serving loop.

    def fail(self, outcome: Outcome, reason: str) -> None:
        """Note why a call failed. The first cause stays, but infrastructure outweighs what the model did."""
        if self.failure is None or (outcome == Outcome.INFRASTRUCTURE and self.failure != outcome):
            self.failure, self.failure_reason = outcome, reason

    def admits(self, num_choices: int) -> bool:
        """Whether so many more calls are within the limit."""
        return self.max_calls is None or len(self._entries) + num_choices <= self.max_calls

    def exchange(self, raw: RawRequest) -> Exchange:
        """A new exchange; what it repeats, if it is a client's retry, is abandoned (see `_abandon_repeated`)."""
        body = hashlib.blake2b(raw.body, digest_size=16).digest()
        exchange = Exchange(body=body, retry=raw.retry, idempotency_key=raw.idempotency_key, certain=raw.in_process)
        if raw.retry > 0:
            self._abandon_repeated(exchange)
        self._exchanges.append(exchange)
        if self.tally is not None:
            self.tally.add(calls=1)
        return exchange

    def _abandon_repeated(self, retry: Exchange) -> None:
        """Abandon the attempts that a retry repeats: the agent has not got, or has dropped, what they were answered.

        Of equal requests that were made at the same time only one is repeated, and a body does not say which. Where the
        client sends an idempotency key, those with its key are. Else it is one that came to nothing (cancelled, timed
        out, failed), which is abandoned anyway. If there is none, the client went away in the moment of the answer, or
        its attempt was lost on the way here: then it cannot be told which of the others the agent has not got, and none
        that its client may have dropped is trained.
        """
        earlier = [
            one for one in self._exchanges if one.body == retry.body and one.retry < retry.retry and not one.repeated
        ]
        if retry.idempotency_key:
            repeated = [one for one in earlier if one.idempotency_key == retry.idempotency_key]
        else:
            earlier = [one for one in earlier if not one.idempotency_key]
            nothing = [one for one in earlier if one.ended and not one.delivered]
            repeated = nothing[:1] or [one for one in earlier if not one.certain]
        for one in repeated:
            one.repeated = one.abandoned = True

    def entry(self, exchange: Exchange, prompt: Prompt, asked: ChatRequest) -> Entry:
        """A new entry, with the next index."""
        entry = Entry(index=len(self._entries), exchange=exchange, prompt=prompt, asked=asked)
        self._entries.append(entry)
        return entry

    def count(self, name: str, number: int = 1) -> None:
        """Add to a metric."""
        self._counts[name] += number
        if self.tally is not None and name in ("prompt_tokens", "sampled_tokens"):
            self.tally.add(tokens=number)

    def noise(self, index: int, choice: int, seed: int | None) -> int:
        """The noise key of a call: of its index, or of the request's own seed (which repeats within this rollout)."""
        digest = self._digest(f"call/{index}" if seed is None else f"seed/{seed}/{choice}")
        return int.from_bytes(digest[:8], "little") >> 1  # 63 bits: fits a signed integer too

    def name(self, index: int) -> str:
        """A name for a call that no other call has, and that is the same in every run of the same seed."""
        return self._digest(f"name/{index}").hex()

    def _digest(self, what: str) -> bytes:
        return hashlib.blake2b(f"{self._noise_seed}/{what}".encode(), digest_size=11).digest()
