"""`make fuzz-gateway`: requests of all kinds against a gateway over HTTP, whose model answers at once.

In: how many. Out: `N requests, N server errors`, with what was answered and what was left behind; exit code 1 for a
status of 500 or more, a request without an answer, a healthy client that was refused (or that had to wait, with
`--latency`), files or memory that were not given back.

Bodies are valid requests in which one or two places hold anything (`malformed`), and what schemathesis makes of the
OpenAPI document, right and wrong; keys are right, wrong, foreign or missing, headers odd. Of ten requests one is broken
on its way: cut, hung up, without an end, sent with others at once, or so slow that it comes with those after it.

    this process: the attack ──► another: the gateway ◄── a third: a healthy client, in turns alone and under attack
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import http.client
import json
import logging
import multiprocessing
import os
import resource
import socket
import statistics
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from malformed import BODIES, bodies
from scripted import ScriptedEngine, ServingLoop, toy_tokenizer

from sharpen.gateway.gateway import Gateway
from sharpen.gateway.session import Session

PATIENCE_S = 120.0
"""A request that is not answered within this time hangs."""
MAX_TIMES_SLOWER = 3
MAX_MORE_MB = 50
CALLS_OF_ONE = 500
"""Requests of one rollout: what it is to continue later is remembered until it ends."""
ROUND, CALM = 500, 25
"""Requests in one go, and calls of the healthy client before each."""
DESCRIBED = 40
"""Of so many bodies one is schemathesis': each takes a tenth of a second to make."""
MAX_SLOW = 20
BROKEN = "broken"
METHODS = ("POST",) * 20 + ("GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH")
OTHER_PATHS = (
    *("/", "/v1", "/v1/models", "/v1/models/toy", "/v1/models/%ff", "/v1/responses/x", "/v1/responses/x/input_items"),
    *("/v1/responses/x/input_items?limit=" + "9" * 5000, "/health", "//v1//models", "/v1/../../etc", "/at-x/v1/models"),
    *("/v1/messages?beta=true", "/v1/embeddings", "/" + "a" * 5000, "/v1/%00", "/metrics", "/openapi.json"),
)
HEADERS: tuple[dict[str, str], ...] = (
    *({}, {"x-stainless-retry-count": "9" * 5000}, {"x-stainless-retry-count": "²"}, {"idempotency-key": "é" * 100}),
    *({"traceparent": "00-" + "f" * 32 + "-" + "f" * 16 + "-01"}, {"traceparent": "00-zz"}, {"anthropic-beta": "x"}),
    *({"content-type": "text/plain"}, {"content-encoding": "gzip"}, {"upgrade": "h2c", "connection": "upgrade"}),
    *({"origin": "https://site.example"}, {"host": "site.example"}, {"expect": "100-continue"}, {"x": "v" * 30_000}),
    *({"authorization": "Bearer"}, {"authorization": "Basic eDp5"}, {"x-forwarded-for": "192.0.2.1"}),
)
Address = tuple[str, int]


class Target:
    """A gateway with its rollouts by their keys, and what its process holds."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._sessions: dict[str, Session] = {}

    def address(self) -> Address:
        """Where it listens."""
        url = next(iter(self._sessions.values())).model.base_url
        host, _, port = url.removeprefix("http://").removesuffix("/v1").partition(":")
        return host, int(port)

    def open(self) -> str:
        """Begin a rollout; returns its key."""
        session = self._gateway.open("fuzz/0", noise_seed=1, record=False)
        self._sessions[session.model.api_key] = session
        return session.model.api_key

    def end(self, key: str) -> None:
        """End a rollout."""
        self._sessions.pop(key).close()

    def holds(self) -> tuple[int, float]:
        """Files that are open, and megabytes of memory (Linux), without what the allocator keeps for later."""
        gc.collect()
        with contextlib.suppress(AttributeError):  # another C library than GNU's
            ctypes.CDLL(None).malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return len(os.listdir("/proc/self/fd")), pages * resource.getpagesize() / (1 << 20)


def new_target() -> Target:
    """Return a gateway with a model that always says the same. What has no effect is not told here."""
    logging.getLogger("sharpen").setLevel(logging.ERROR)
    loop, tokenizer = ServingLoop(), toy_tokenizer()
    engine = ScriptedEngine(tokenizer, lambda request: "hi")
    engine.requests = deque(maxlen=1)  # type: ignore[assignment]
    return Target(Gateway(engine, tokenizer, model_name="toy", loop=loop.loop))


class Healthy:
    """A client that asks properly all the time: how long it waits in each phase, and what it is told but for 200."""

    def __init__(self, address: Address, key: str) -> None:
        self._address, self._key = address, key
        self._phase = ""
        self._seconds: dict[str, list[float]] = {}
        self._refused: list[int] = []
        self._answered = threading.Condition()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def enter(self, phase: str, num_calls: int = 0) -> None:
        """Count calls for a phase from now on; returns after so many."""
        with self._answered:
            self._phase = phase
            seconds = self._seconds.setdefault(phase, [])
            enough = len(seconds) + num_calls
            self._answered.wait_for(lambda: len(seconds) >= enough or not self._thread.is_alive(), PATIENCE_S)

    def go_on_as(self, key: str) -> str:
        """Ask as another rollout from the next call on; returns the key until then."""
        self._key, before = key, self._key
        return before

    def end(self) -> tuple[dict[str, list[float]], list[int]]:
        """Stop asking."""
        self._ended.set()
        self._thread.join()
        return self._seconds, self._refused

    def _run(self) -> None:
        body = b'{"model": "toy", "messages": [{"role": "user", "content": "hello"}]}'
        while not self._ended.wait(0.02):
            phase, began = self._phase, time.monotonic()
            with contextlib.closing(http.client.HTTPConnection(*self._address, timeout=PATIENCE_S)) as client:
                client.request("POST", "/v1/chat/completions", body, {"x-api-key": self._key})
                reply = client.getresponse()
                reply.read()
            with self._answered:
                if phase == self._phase and phase:
                    self._seconds[phase].append(time.monotonic() - began)
                self._refused += [reply.status] if reply.status != 200 else []
                self._answered.notify_all()


class Processes(BaseManager):
    """Processes in which the others run."""


Processes.register("Target", new_target)
Processes.register("Healthy", Healthy)
Cases = Mapping[str, Sequence[st.SearchStrategy[Any]]]


def described_cases() -> Cases:
    """Return what schemathesis makes of the OpenAPI document for each path: requests that fit it, and that do not."""
    import schemathesis

    from sharpen.serve.openapi import document

    schema = schemathesis.openapi.from_dict(document("0"))
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    return {path: [schema[path]["POST"].as_strategy(generation_mode=mode) for mode in modes] for path in BODIES}


def one_in(data: st.DataObject, number: int) -> bool:
    """Whether it is this time's turn of what comes once in so many times: hypothesis prefers the ends of a range."""
    return bool(data.draw(st.integers(0, number)) == number // 2)


class Attack:
    """Sends requests and counts what is answered. `answers` is by status, `errors` what should never come."""

    def __init__(self, target: Any, cases: Cases | None = None) -> None:
        self._target, self._cases = target, cases
        self._key = target.open()
        self.address = tuple(target.address())
        ended = target.open()
        target.end(ended)
        self._other_keys = ("", "sk-owner", ended, "at-none", "at-\xff.x.y")
        self.answers: Counter[int | str] = Counter()
        self.errors: list[str] = []
        self._connection: http.client.HTTPConnection | None = None
        self._slow: deque[tuple[socket.socket, bytes]] = deque()

    @property
    def num_requests(self) -> int:
        return sum(self.answers.values())

    def send(self, data: st.DataObject) -> None:
        """Send one request, or several at once that are broken. Now and then as another rollout."""
        if self.num_requests % CALLS_OF_ONE == 0:
            self._target.end(self._key)
            self._key = self._target.open()
        self._feed_slow()
        path = data.draw(st.sampled_from(tuple(BODIES)))
        body = self._body(data, path)
        key = data.draw(st.sampled_from((self._key,) * 12 + self._other_keys))
        if one_in(data, 10):
            self._broken(data, path, body, key)
            return
        method = data.draw(st.sampled_from(METHODS))
        path = data.draw(st.sampled_from(OTHER_PATHS)) if one_in(data, 10) else path
        self._whole(method, path, body, {"x-api-key": key, **data.draw(st.sampled_from(HEADERS))})

    def _body(self, data: st.DataObject, path: str) -> bytes:
        if self._cases is None or not one_in(data, DESCRIBED):
            return data.draw(bodies(path))
        case = data.draw(data.draw(st.sampled_from(self._cases[path])))
        return case.body if isinstance(case.body, bytes) else json.dumps(case.body, default=str).encode()

    def _whole(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> None:
        status = self._ask(method, path, body, headers) or self._ask(method, path, body, headers)
        self.answers[status or "no answer"] += 1
        if status is None or status >= 500:
            self.errors.append(f"{method} {path[:80]} {str(headers)[:120]}: {status}\n  {body[:600]!r}")

    def _ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> int | None:
        """Return the answer's status; None if the server ended the connection before it said one, as it may end an idle
        one."""
        if self._connection is None:
            self._connection = http.client.HTTPConnection(*self.address, timeout=PATIENCE_S)
        try:
            encoded = {name: value.encode("utf-8") for name, value in headers.items()}
            self._connection.request(method, path, body, encoded)
            reply = self._connection.getresponse()
            reply.read()
            return reply.status
        except (OSError, http.client.HTTPException):
            self.hang_up()
            return None

    def _broken(self, data: st.DataObject, path: str, body: bytes, key: str) -> None:
        """Send bytes, and hang up. All is drawn before: hypothesis fails what draws by how the network was."""
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {key}\r\n".encode("latin-1")
        length = data.draw(st.sampled_from([len(body), len(body) + 7, max(len(body) - 7, 0), 0, 10**12, -1]))
        whole = head + b"content-length: %d\r\n\r\n" % length + body
        chunked = head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        wire = data.draw(st.sampled_from([whole, chunked, whole * 3, chunked + whole, head + chunked]))
        cut = data.draw(st.integers(0, len(wire)))
        two_parts, slow, heard = (data.draw(st.booleans()) for _ in range(3))
        self.answers[BROKEN] += 1
        self._send_broken(wire[:cut], wire[cut:] if two_parts else b"", slow, heard)

    def _send_broken(self, first: bytes, rest: bytes, slow: bool, heard: bool) -> None:
        """Send bytes in two parts, the second with the requests after this one if it is slow; what comes back has no
        status of 500."""
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            client = stack.enter_context(socket.create_connection(self.address, timeout=PATIENCE_S))
            client.sendall(first)
            if slow and rest and len(self._slow) < MAX_SLOW:
                stack.pop_all()
                self._slow.append((client, rest))
                return
            client.sendall(rest)
            if heard:
                self._hear(client)

    def _feed_slow(self) -> None:
        """Send the next bytes of a slow request, and hear what it is answered once it is whole."""
        if not self._slow:
            return
        client, rest = self._slow.popleft()
        try:
            client.sendall(rest[: len(rest) // 4 + 1])
            rest = rest[len(rest) // 4 + 1 :]
            if rest:
                self._slow.append((client, rest))
                return
            self._hear(client)
        except OSError:  # it was refused meanwhile
            pass
        client.close()

    def _hear(self, client: socket.socket) -> None:
        client.shutdown(socket.SHUT_WR)
        heard = b"".join(iter(lambda: client.recv(1 << 16), b""))
        if b"HTTP/1.1 5" in heard:
            self.errors.append(f"{heard[:600]!r}")

    def hang_up(self) -> None:
        """Close the connection that whole requests share."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """Hang up everywhere, in the midst of what is slow, and end the rollout."""
        self.hang_up()
        while self._slow:
            self._slow.pop()[0].close()
        self._target.end(self._key)


def fuzz(attack: Attack, num_requests: int, number: int) -> None:
    """Send so many more requests, or somewhat more, which `number` decides. In one go hypothesis remembers what it has
    tried, which took 55 MB for each 4,000 requests."""
    for round_ in range(-(-num_requests // ROUND)):
        _round(attack, min(ROUND, num_requests - round_ * ROUND), number * 1_000_003 + round_)


def _round(attack: Attack, num_requests: int, number: int) -> None:
    @seed(number)
    @settings(
        max_examples=num_requests,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def each(data: st.DataObject) -> None:
        attack.send(data)

    each()
    gc.collect()


def given_back(target: Any, files: int, memory_mb: float) -> tuple[int, float]:
    """Return how many more files and megabytes a target holds than before, once it has noticed that all hung up."""
    deadline = time.monotonic() + PATIENCE_S
    while (now := target.holds())[0] > files and time.monotonic() < deadline:
        time.sleep(0.1)
    return now[0] - files, now[1] - memory_mb


def attack_in_turns(num_requests: int, number: int, latency: bool) -> int:
    """Attack, with pauses in which the healthy client is alone; say what came of it. Returns the exit code."""
    spawn = multiprocessing.get_context("spawn")
    with Processes(ctx=spawn) as servers, Processes(ctx=spawn) as clients:
        target = servers.Target()  # type: ignore[attr-defined]
        attack = Attack(target, described_cases())
        healthy = clients.Healthy(attack.address, target.open())  # type: ignore[attr-defined]
        fuzz(attack, max(num_requests // 10, 50), number)  # what the first ones load
        attack.hang_up()
        before = target.holds()
        end, round_ = attack.num_requests + num_requests, 0
        while attack.num_requests < end:
            ended = healthy.go_on_as(target.open())
            healthy.enter("alone", CALM)
            target.end(ended)  # what its calls said is remembered until then
            healthy.enter("attacked")
            round_ += 1
            _round(attack, min(ROUND, end - attack.num_requests), (number + 1) * 1_000_003 + round_)
        seconds, refused = healthy.end()
        attack.close()
        more_files, more_mb = given_back(target, *before)
    slower = statistics.median(seconds["attacked"]) / statistics.median(seconds["alone"])
    problems = [
        *attack.errors,
        *(f"the healthy client was answered with {status}" for status in refused),
        *([f"the healthy client waited {slower:.1f} times as long"] if latency and slower > MAX_TIMES_SLOWER else []),
        *([f"{more_files} files were left open"] if more_files > 0 else []),
        *([f"{more_mb:.0f} MB were left"] if more_mb > MAX_MORE_MB else []),
    ]
    print("\n".join(problems[:20]))
    print("answers:", ", ".join(f"{status} {count}" for status, count in attack.answers.most_common()))
    for phase, waited in seconds.items():
        at = functools.partial(statistics.quantiles, waited, n=20)
        print(
            f"a healthy client {phase}: {len(waited)} calls, median {1e3 * statistics.median(waited):.1f} ms, "
            f"19 of 20 within {1e3 * at()[-1]:.1f} ms, slowest {1e3 * max(waited):.0f} ms"
        )
    print(f"left: {more_mb:.0f} MB, {more_files} files")
    print(f"{attack.num_requests} requests, {len(attack.errors)} server errors")
    return 1 if problems else 0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="requests of all kinds against the gateway")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--latency", action="store_true", help="fail if the healthy client waits: for a quiet machine")
    options = parser.parse_args()
    return attack_in_turns(options.requests, options.seed, options.latency)


if __name__ == "__main__":
    sys.exit(main())
