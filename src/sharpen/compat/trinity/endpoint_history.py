"""What an endpoint was asked and what it answered, for workflows that are evaluated against one.

In: an `Endpoint` (`base_url`, `name`, `api_key`, clients). Out: clients whose successful chat completions are kept, as
`Answer`s without token ids: an endpoint's tokens are not trained.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import httpx

from sharpen.compat.trinity.experience import Answer

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI


class EndpointHistory:
    """The answers of one rollout, numbered in the order they came. Both clients write to it, from any thread."""

    def __init__(self, endpoint: Any) -> None:
        self._endpoint = endpoint
        self._answers: dict[int, Answer] = {}
        self._indexes: dict[str, list[int]] = {}
        self._lock = threading.Lock()

    @cached_property
    def client(self) -> AsyncOpenAI:
        """The endpoint's asynchronous client, with every answer kept."""

        async def keep(response: httpx.Response) -> None:
            if _is_answer(response):
                self._keep(response.request.content, await response.aread())

        transport = self._endpoint.async_transport  # where calls are counted
        http_client: Any = httpx.AsyncClient(transport=transport, event_hooks={"response": [keep]}, timeout=None)
        client: AsyncOpenAI = self._endpoint.client.with_options(http_client=http_client)
        return client

    @cached_property
    def sync_client(self) -> OpenAI:
        """The endpoint's synchronous client, with every answer kept."""

        def keep(response: httpx.Response) -> None:
            if _is_answer(response):
                self._keep(response.request.content, response.read())

        transport = self._endpoint.sync_transport  # where calls are counted
        http_client: Any = httpx.Client(transport=transport, event_hooks={"response": [keep]}, timeout=None)
        client: OpenAI = self._endpoint.sync_client.with_options(http_client=http_client)
        return client

    def answers(self) -> dict[int, Answer]:
        """All answers so far, by number."""
        with self._lock:
            return dict(self._answers)

    def indexes_of(self, response_id: str) -> list[int]:
        """The numbers of a response's choices."""
        with self._lock:
            return list(self._indexes[response_id])

    def _keep(self, request: bytes, response: bytes) -> None:
        asked = json.loads(request)
        with self._lock:
            for response_id, choice in _choices(response):
                index = len(self._answers)
                self._answers[index] = Answer(
                    messages=tuple(asked["messages"]),
                    tools=tuple(asked.get("tools") or ()),
                    response=choice["message"],
                    finish_reason=str(choice.get("finish_reason")),
                )
                self._indexes.setdefault(response_id, []).append(index)


def _is_answer(response: httpx.Response) -> bool:
    return response.is_success and response.request.url.path.endswith("/chat/completions")


def _choices(response: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """(response id, choice) of a whole response or of a stream's events, whose text is put together."""
    if not response.lstrip().startswith(b"data:"):
        body = json.loads(response)
        yield from ((str(body.get("id")), choice) for choice in body["choices"])
        return
    merged: dict[int, dict[str, Any]] = {}
    response_id = ""
    for line in response.decode().splitlines():
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        event = json.loads(data)
        response_id = str(event.get("id"))
        for part in event["choices"]:
            choice = merged.setdefault(part["index"], {"message": {"role": "assistant", "content": ""}})
            choice["message"]["content"] += part["delta"].get("content") or ""
            choice["finish_reason"] = part.get("finish_reason") or choice.get("finish_reason")
    yield from ((response_id, merged[index]) for index in sorted(merged))
