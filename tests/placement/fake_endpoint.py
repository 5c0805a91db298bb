"""An OpenAI-compatible endpoint on a loopback port whose answers are scripted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sharpen.config.sections import GatewayConfig
from sharpen.gateway.listening import AppServer
from sharpen.placement.serving import ServingThread

Answer = Callable[[dict[str, Any]], Response]


def completion(text: str = "good", *, prompt: int = 10, sampled: int = 3, usage: bool = True) -> Response:
    body: dict[str, Any] = {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
    }
    if usage:
        body["usage"] = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    return JSONResponse(body)


def failure(status: int) -> Response:
    return JSONResponse({"error": {"message": f"scripted {status}", "type": "x", "code": None}}, status_code=status)


def stream(words: list[str], *, usage: int | None) -> Response:
    def events() -> Iterator[str]:
        for word in words:
            yield _event({"choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]})
        yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        if usage is not None:
            counts = {"prompt_tokens": usage - len(words), "completion_tokens": len(words), "total_tokens": usage}
            yield _event({"choices": [], "usage": counts})
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def _event(fields: dict[str, Any]) -> str:
    return (
        f"data: {json.dumps({'id': 'c', 'object': 'chat.completion.chunk', 'created': 0, 'model': 'm', **fields})}\n\n"
    )


class FakeEndpoint:
    """`answer` is called with each request's body, on a thread of its own; `bodies`, `headers` and `keys` keep what
    came, `others` the URLs and keys of requests to any other path."""

    def __init__(self) -> None:
        self.answer: Answer = lambda body: completion()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.keys: list[str] = []
        self.others: list[tuple[str, str]] = []
        chat = [Route(f"{base}/chat/completions", self._chat, methods=["POST"]) for base in ("/v1", "")]
        app = Starlette(routes=[*chat, Route("/{path:path}", self._other, methods=["GET", "POST"])])
        self._thread = ServingThread()
        self._server = self._thread.call(_served(app))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.port}/v1"

    def stop(self) -> None:
        self._thread.call(self._server.stop(read_s=0.0))
        self._thread.close()

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.keys.append(request.headers["authorization"].removeprefix("Bearer "))
        return await run_in_threadpool(self.answer, body)

    async def _other(self, request: Request) -> Response:
        self.others.append((str(request.url), request.headers.get("authorization", "")))
        return JSONResponse({"object": "list", "data": []})


async def _served(app: Starlette) -> AppServer:
    server = AppServer(app, GatewayConfig(), log_level="error", grace_s=1.0)
    await server.start()
    return server
