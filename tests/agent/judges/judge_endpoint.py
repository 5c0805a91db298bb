"""A scripted endpoint that judges ask."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from http_here import Server, running


class JudgeEndpoint(Server):
    """`answer` gets each request's body and returns the answer's text, or (text, finish reason); an integer is a status
    `bodies` keeps what came."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.answer: Callable[[dict[str, Any]], Any] = lambda body: "{}"
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"{self.address}/v1"

    def always(self, **members: Any) -> None:
        """Answer with the same verdict."""
        self.answer = lambda body: json.dumps(members)


class _Answer(BaseHTTPRequestHandler):
    server: JudgeEndpoint

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        self.server.keys.append(self.headers["authorization"])
        answer = self.server.answer(body)
        status, content = 200, {}
        if isinstance(answer, int):
            status, content = answer, {"error": {"message": "scripted", "type": "x", "code": None}}
        else:
            text, reason = answer if isinstance(answer, tuple) else (answer, "stop")
            content = {
                "id": "c",
                "object": "chat.completion",
                "created": 0,
                "model": "m",
                "choices": [{"index": 0, "finish_reason": reason, "message": {"role": "assistant", "content": text}}],
                "usage": {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25},
            }
        payload = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving() -> Iterator[JudgeEndpoint]:
    """Serve a scripted endpoint."""
    server = JudgeEndpoint()
    with running(server):
        yield server


def asked(body: dict[str, Any]) -> dict[str, Any]:
    """What a judge's user message holds."""
    content: dict[str, Any] = json.loads(body["messages"][-1]["content"])
    return content
