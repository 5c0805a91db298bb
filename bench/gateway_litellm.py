"""Calls per second of the gateway, and of LiteLLM's proxy in front of the same scripted answers.

In: `.venv-litellm` with LiteLLM's proxy. Out: a table and `bench/out/gateway_litellm.json` with `calls_per_second`, the
gateway's over the proxy's (target 5), and `server_cpu`, the proxy's CPU time of a call over the gateway's.

Both are asked for the same chat completion over 64 connections by the same raw client, in turns. The gateway renders
the prompt, tokenizes, and records every call; its engine answers at once. The proxy forwards to a server that writes
the gateway's own answer, in the client's process. Each side is one process of its own, with one worker.

    python bench/gateway_litellm.py [--calls 2000] [--repeats 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import gateway as shared
import httpx
from report import finish

from sharpen.gateway.gateway import Gateway

CONNECTIONS, KEYS, START_S = 64, 200, 180.0
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
"""The least CPU time that the system counts."""
MASTER_KEY = f"sk-{secrets.token_hex(32)}"
PROXY = Path(__file__).parent.parent / ".venv-litellm" / "bin" / "litellm"
MESSAGES: Any = [{"role": "system", "content": shared.SYSTEM}, {"role": "user", "content": "What is 12 * (3 + 4)?"}]
BODY = json.dumps({"model": "m", "messages": MESSAGES, "tools": [shared.TOOL], "max_tokens": 48}).encode()


def serve() -> None:
    """The gateway in this process: print its URL and its rollouts' keys, and serve until the input is closed."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    tokenizer = shared.make_tokenizer(shared.questions())
    gateway = Gateway(shared.NullEngine(tokenizer, shared.Crowd(1)), tokenizer, model_name="m", loop=loop)
    models = [gateway.open(f"g/{number}", noise_seed=number).model for number in range(KEYS)]
    print(json.dumps([models[0].base_url, [model.api_key for model in models]]), flush=True)
    sys.stdin.read()


def request(key: str) -> bytes:
    """One call, as it goes over the wire."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
    return f"{head}content-type: application/json\r\ncontent-length: {len(BODY)}\r\n\r\n".encode() + BODY


async def load(port: int, keys: list[str], num_calls: int) -> float:
    """Make the calls, and return the seconds that they took. Raises `RuntimeError` for an answer that is none."""
    left = iter(range(num_calls))

    async def connection() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for number in left:
            writer.write(request(keys[number % len(keys)]))
            head = await reader.readuntil(b"\r\n\r\n")
            lines = dict(line.split(": ", 1) for line in head.decode().lower().split("\r\n")[1:-2])
            body = await reader.readexactly(int(lines["content-length"]))
            if not head.startswith(b"HTTP/1.1 200") or b"calculator" not in body:
                raise RuntimeError(f"{head!r} {body[:500]!r}")
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(connection() for _ in range(CONNECTIONS)))
    return time.perf_counter() - began


def cpu_s(process: subprocess.Popen[Any]) -> float:
    """CPU seconds of a process so far, those of its own (Linux)."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


async def start_proxy(folder: Path, answer: bytes) -> tuple[subprocess.Popen[bytes], int]:
    """LiteLLM's proxy in front of a server that gives this answer."""
    server = await asyncio.get_running_loop().create_server(lambda: shared.NullServer([answer] * 2), "127.0.0.1", 0)
    behind = server.sockets[0].getsockname()[1]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    params = {"model": "openai/m", "api_base": f"http://127.0.0.1:{behind}/v1", "api_key": "k"}
    config = folder / "config.yaml"
    config.write_text(json.dumps({"model_list": [{"model_name": "m", "litellm_params": params}]}))
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
    environment["LITELLM_MASTER_KEY"] = MASTER_KEY
    command = [str(PROXY), "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}/health/liveliness"
    async with asyncio.timeout(START_S), httpx.AsyncClient(trust_env=False) as client:
        while True:
            try:
                if (await client.get(url)).status_code == 200:
                    return process, port
            except httpx.TransportError:
                if process.poll() is not None:
                    raise RuntimeError((folder / "log").read_text()[-3000:]) from None
            await asyncio.sleep(0.5)


async def measure(num_calls: int, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """For each side and repeat: calls per second, and the server's CPU milliseconds of a call."""
    ours = subprocess.Popen(
        [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert ours.stdout is not None
    assert ours.stdin is not None
    url, keys = json.loads(ours.stdout.readline())
    headers = {"authorization": f"Bearer {keys[0]}", "content-type": "application/json"}
    answer = httpx.post(f"{url}/chat/completions", content=BODY, headers=headers, trust_env=False).content
    with tempfile.TemporaryDirectory() as folder:
        proxy, port = await start_proxy(Path(folder), answer)
        sides: dict[str, tuple[subprocess.Popen[Any], int | None, list[str]]] = {
            "gateway": (ours, httpx.URL(url).port, keys),
            "litellm": (proxy, port, [MASTER_KEY]),
        }
        measured: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        try:
            for repeat in range(repeats + 1):
                for name, (process, at, own_keys) in sides.items():
                    before = cpu_s(process)
                    seconds = await load(int(at or 0), own_keys, num_calls)
                    if repeat > 0:  # the first one warms up
                        used = max(cpu_s(process) - before, TICK_S)  # a few calls may take none
                        measured[name].append((num_calls / seconds, used / num_calls * 1e3))
        finally:
            ours.stdin.close()
            proxy.terminate()
            proxy.wait()
            ours.wait()
    return measured


def main() -> int:
    """Measure, print, write; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description="The gateway against LiteLLM's proxy")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--serve", action="store_true")
    options = parser.parse_args()
    if options.serve:
        serve()
        return 0
    measured = asyncio.run(measure(options.calls, options.repeats))
    rows = [
        (name, *(statistics.median(column) for column in zip(*seen, strict=True))) for name, seen in measured.items()
    ]
    (_, ours, our_cpu), (_, theirs, their_cpu) = rows
    return finish(
        "gateway_litellm",
        header=("side", "calls/s", "server cpu ms/call"),
        rows=rows,
        ratios={"calls_per_second": ours / theirs, "server_cpu": their_cpu / our_cpu},
        at_least={"calls_per_second": 5.0},
        extra={"measured": measured},
    )


if __name__ == "__main__":
    sys.exit(main())
