"""`make fuzz-gateway`: requests of all kinds against a gateway over HTTP, whose model answers at once.

In: how many. Out: `N requests, 0 server errors`, with what was answered and what was left behind; exit code 1 for a
status of 500 or more, a request without an answer, a healthy client that was refused or had to wait, files or memory
that were not given back.

Bodies are valid requests in which one or two places hold anything (`malformed`), keys are right, wrong, foreign or
missing, headers odd; of ten requests one is broken on its way: cut, hung up, without an end, sent with others at once.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import http.client
import os
import resource
import socket
import statistics
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from malformed import BODIES, bodies
from scripted import ScriptedEngine, ServingLoop, toy_tokenizer

from sharpen.gateway.gateway import Gateway
from sharpen.gateway.session import Session

PATIENCE_S = 120.0
"""A request that is not answered within this time hangs."""
MAX_LATENCY_S = 10.0
"""The healthy client's slowest call. A bound for hangs, not a figure: other processes share the machine."""
MAX_MORE_MB = 50
CALLS_OF_ONE = 500
"""Requests of one rollout: what it is to continue later is remembered until it ends."""
ROUND = 500
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


class Attack:
    """Sends requests and counts what is answered. `answers` is by status, `errors` what should never come."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._session = self._open()
        host, _, port = self._session.model.base_url.removeprefix("http://").removesuffix("/v1").partition(":")
        self.address = host, int(port)
        ended = self._open()
        ended.close()
        self._other_keys = ("", "sk-owner", ended.model.api_key, "at-none", "at-\xff.x.y")
        self.answers: Counter[int | str] = Counter()
        self.errors: list[str] = []
        self._connection: http.client.HTTPConnection | None = None

    @property
    def num_requests(self) -> int:
        return sum(self.answers.values())

    def _open(self) -> Session:
        return self._gateway.open("fuzz/0", noise_seed=1, record=False)

    def send(self, data: st.DataObject) -> None:
        """Send one request, or several at once that are broken. Now and then as another rollout."""
        if self.num_requests % CALLS_OF_ONE == 0:
            self._session.close()
            self._session = self._open()
        path = data.draw(st.sampled_from(tuple(BODIES)))
        body = data.draw(bodies(path))
        key = data.draw(st.sampled_from((self._session.model.api_key,) * 12 + self._other_keys))
        if data.draw(st.integers(0, 9)) == 0:
            self._broken(data, path, body, key)
            return
        method = data.draw(st.sampled_from(METHODS))
        path = path if data.draw(st.integers(0, 9)) else data.draw(st.sampled_from(OTHER_PATHS))
        self._whole(method, path, body, {"x-api-key": key, **data.draw(st.sampled_from(HEADERS))})

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
        """Send bytes, and hang up; what comes back has no status of 500."""
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {key}\r\n".encode("latin-1")
        length = data.draw(st.sampled_from([len(body), len(body) + 7, max(len(body) - 7, 0), 0, 10**12, -1]))
        whole = head + b"content-length: %d\r\n\r\n" % length + body
        chunked = head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        wire = data.draw(st.sampled_from([whole, chunked, whole * 3, chunked + whole, head + chunked]))
        cut = data.draw(st.integers(0, len(wire)))
        parts = [wire[:cut], wire[cut:]] if data.draw(st.booleans()) else [wire[:cut]]
        self.answers[BROKEN] += 1
        with contextlib.suppress(OSError), socket.create_connection(self.address, timeout=PATIENCE_S) as client:
            for part in parts:
                client.sendall(part)
            if data.draw(st.booleans()):
                client.shutdown(socket.SHUT_WR)
                heard = b"".join(iter(lambda: client.recv(1 << 16), b""))
                if b"HTTP/1.1 5" in heard:
                    self.errors.append(f"{wire[:600]!r}: {heard[:200]!r}")

    def hang_up(self) -> None:
        """Close the connection that whole requests share."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """End the rollout."""
        self.hang_up()
        self._session.close()


class Healthy(threading.Thread):
    """A client that asks properly all the time: how long it waits, and what it is told but for 200."""

    def __init__(self, gateway: Gateway, address: tuple[str, int]) -> None:
        super().__init__()
        self._session, self._address = gateway.open("fuzz/healthy", noise_seed=2, record=False), address
        self._ended = threading.Event()
        self.seconds: list[float] = []
        self.refused: list[int] = []

    def run(self) -> None:
        body = b'{"model": "toy", "messages": [{"role": "user", "content": "hello"}]}'
        headers = {"x-api-key": self._session.model.api_key}
        while not self._ended.wait(0.02):
            began = time.monotonic()
            with contextlib.closing(http.client.HTTPConnection(*self._address, timeout=PATIENCE_S)) as client:
                client.request("POST", "/v1/chat/completions", body, headers)
                reply = client.getresponse()
                reply.read()
            self.seconds.append(time.monotonic() - began)
            self.refused += [reply.status] if reply.status != 200 else []

    def end(self) -> None:
        """Stop asking."""
        self._ended.set()
        self.join()
        self._session.close()


def fuzz(attack: Attack, num_requests: int, number: int) -> None:
    """Send so many more requests, or somewhat more, which `number` decides. In rounds: hypothesis remembers what it has
    tried in one, which took 55 MB for each 4,000 requests."""
    end = attack.num_requests + num_requests
    for round_ in range(num_requests):
        if attack.num_requests >= end:
            return
        _round(attack, min(ROUND, end - attack.num_requests), number * 1_000_003 + round_)


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


def files() -> int:
    """The files that this process has open (Linux)."""
    return len(os.listdir("/proc/self/fd"))


def memory_mb() -> float:
    """The memory of this process (Linux)."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / (1 << 20)


def main() -> int:
    """Attack, and say what came of it."""
    parser = argparse.ArgumentParser(description="requests of all kinds against the gateway")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    loop, tokenizer = ServingLoop(), toy_tokenizer()
    engine = ScriptedEngine(tokenizer, lambda request: "hi")
    engine.requests = deque(maxlen=1)  # type: ignore[assignment]
    gateway = Gateway(engine, tokenizer, model_name="toy", loop=loop.loop)
    attack = Attack(gateway)
    fuzz(attack, max(options.requests // 10, 50), options.seed)  # what the first ones load
    attack.hang_up()
    files_before, memory_before = files(), memory_mb()
    healthy = Healthy(gateway, attack.address)
    healthy.start()
    fuzz(attack, options.requests, options.seed + 1)
    healthy.end()
    attack.close()
    more_mb = memory_mb() - memory_before
    loop.run(gateway.close())
    more_files = files() - files_before
    loop.stop()
    slowest = max(healthy.seconds, default=0.0)
    problems = [
        *attack.errors,
        *(f"the healthy client was answered with {status}" for status in healthy.refused),
        *([f"the healthy client waited {slowest:.1f} s"] if slowest > MAX_LATENCY_S else []),
        *([f"{more_files} files were left open"] if more_files > 0 else []),
        *([f"{more_mb:.0f} MB were left"] if more_mb > MAX_MORE_MB else []),
    ]
    print("\n".join(problems[:20]))
    print("answers:", ", ".join(f"{status} {count}" for status, count in attack.answers.most_common()))
    median = statistics.median(healthy.seconds or [0.0])
    print(
        f"a healthy client: {len(healthy.seconds)} calls, median {median:.3f} s, slowest {slowest:.2f} s; "
        f"{more_mb:.0f} MB more, {more_files} files"
    )
    print(f"{attack.num_requests} requests, {len(attack.errors)} server errors")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
