"""A server that answers as vLLM's does, from a script: what a recorder is tested with.

In: requests. Out: answers in OpenAI's words, with token ids if the request asks for them; what was received.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

FORMER = "a field that the client does not know"


def ids_of(text: str) -> list[int]:
    """A token for each character."""
    return [ord(letter) for letter in text]


END = 3


def rendered(messages: list[dict[str, Any]]) -> list[int]:
    """The prompt: each message with its role in front and an end token behind it, then the beginning of an answer."""
    ids = []
    for message in messages:
        ids += [*ids_of(f"{message['role'][0]}:{message.get('content') or ''}"), END]
    return [*ids, *ids_of("a:")]


@dataclass
class Fake:
    """`says` are the answers, one after the other. `knows_ids`: "yes", "ignores" (the fields have no effect), or
    "refuses" (a 400). `prompts` are those of the next request's choices. `gate`, if set, is waited for before each
    chunk but the first."""

    says: list[str] = field(default_factory=lambda: ["yes"])
    knows_ids: str = "yes"
    failures: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    key: str | None = None
    gate: asyncio.Event | None = None
    breaks_off: bool = False
    received: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    cancelled: int = 0
    prompts: list[str] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        await (await self.answer(request))(scope, receive, send)

    async def answer(self, request: Request) -> Response:
        body = await request.body()
        self.headers.append(dict(request.headers))
        self.paths.append(f"{request.method} {request.url.path}{f'?{request.url.query}' if request.url.query else ''}")
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "bad key", "code": 401}}, 401)
        if request.url.path not in ("/v1/chat/completions", "/v1/completions"):
            return Response(b"other", 203, {"x-other": "yes", "content-type": "text/odd"})
        try:
            given = json.loads(body)
        except ValueError:
            return JSONResponse({"error": {"message": "not JSON"}}, 400)
        self.received.append(given)
        if self.failures:
            status, content = self.failures.pop(0)
            return JSONResponse(content, status, {"x-request-id": "r1"})
        if self.knows_ids == "refuses" and "return_token_ids" in given:
            return JSONResponse({"error": {"message": "unknown field return_token_ids"}}, 400)
        chat = request.url.path.endswith("/chat/completions")
        if given.get("stream"):
            return StreamingResponse(self.stream(given, chat), media_type="text/event-stream")
        return JSONResponse(self.whole(given, chat), headers={"x-request-id": "r1"})

    def whole(self, given: dict[str, Any], chat: bool) -> dict[str, Any]:
        choices = []
        for index in range(given.get("n") or 1):
            text = self.says.pop(0) if len(self.says) > 1 else self.says[0]
            ids = [*ids_of(text), END]
            choice: dict[str, Any] = {"index": index, "finish_reason": "stop", "logprobs": None}
            if chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}
            else:
                choice["text"] = text
            self.add_tokens(choice, given, ids, chat)
            if not chat and self.gives(given):
                choice["prompt_token_ids"] = ids_of(self.prompts[index] if self.prompts else given["prompt"])
            choices.append(choice)
        whole = {"id": self.name, "object": "x", "created": 1, "model": "served", "choices": choices, "former": FORMER}
        if chat and self.gives(given):
            whole["prompt_token_ids"] = rendered(given["messages"])
        return {**whole, "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}

    async def stream(self, given: dict[str, Any], chat: bool) -> AsyncIterator[bytes]:
        text = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        head = {"id": self.name, "object": "x", "created": 1, "model": "served"}
        if chat:
            first = {**head, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
            if self.gives(given):
                first["prompt_token_ids"] = rendered(given["messages"])
            yield event(first)
        try:
            for number, letter in enumerate([*text, ""]):
                if self.gate is not None and number:
                    await self.gate.wait()
                    if self.breaks_off:
                        raise ConnectionError("broken off")
                last = letter == ""
                choice = {"index": 0, "logprobs": None, "finish_reason": "stop" if last else None}
                choice |= {"delta": {"content": letter}} if chat else {"text": letter}
                self.add_tokens(choice, given, [END] if last else ids_of(letter), chat)
                if not chat and number == 0 and self.gives(given):
                    choice["prompt_token_ids"] = ids_of(given["prompt"])
                yield event({**head, "choices": [choice]})
            yield b": a comment\n\n"
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    @property
    def name(self) -> str:
        return f"chatcmpl-{len(self.received)}"

    def gives(self, given: dict[str, Any]) -> bool:
        return self.knows_ids == "yes" and bool(given.get("return_token_ids"))

    def add_tokens(self, choice: dict[str, Any], given: dict[str, Any], ids: list[int], chat: bool) -> None:
        if self.gives(given):
            choice["token_ids"] = ids
        logprobs = [-0.5 * one for one in range(len(ids))]
        if chat and given.get("logprobs"):
            choice["logprobs"] = {"content": [{"token": "x", "logprob": one} for one in logprobs]}
        elif not chat and given.get("logprobs") is not None:
            choice["logprobs"] = {"tokens": ["x"] * len(ids), "token_logprobs": logprobs}


def event(chunk: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()
