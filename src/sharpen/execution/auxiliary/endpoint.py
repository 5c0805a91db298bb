"""Any OpenAI-compatible endpoint, as a workflow or judge sees it: genuine OpenAI clients.

In: a base URL, a model name, a key. Out: `Endpoint` with `client`, `sync_client`, `base_url` and `api_key`. Retries and
time limits are those of the openai package.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import httpx

from sharpen.gateway.server import Server

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI


class Endpoint:
    """A model at an endpoint, as one attempt sees it. Copies are the same object.

    Requests of the clients go through `async_transport` and `sync_transport`, where they are given; there they have the
    `client_key`, which the transport may replace. `api_key` belongs to `base_url`: the endpoint's own, or that of a
    `loopback`, so that what other clients use is counted too; there a streamed answer comes all at once.
    """

    def __init__(
        self,
        *,
        base_url: str,
        name: str,
        api_key: str,
        client_key: str | None = None,
        async_transport: httpx.AsyncBaseTransport | None = None,
        sync_transport: httpx.BaseTransport | None = None,
        loopback: Server | None = None,
    ) -> None:
        self.name = name
        self.async_transport, self.sync_transport = async_transport, sync_transport
        self.api_key = api_key
        self._url, self._key = base_url, client_key or api_key
        self._loopback = loopback

    @property
    def base_url(self) -> str:
        """A URL for other clients, with `api_key`. The first use of a loopback starts its server."""
        return self._url if self._loopback is None else self._loopback.url()

    @cached_property
    def client(self) -> AsyncOpenAI:
        """An `openai.AsyncOpenAI`."""
        from openai import AsyncOpenAI

        http_client: Any = None
        if self.async_transport is not None:
            http_client = httpx.AsyncClient(transport=self.async_transport, follow_redirects=True)
        return AsyncOpenAI(base_url=self._url, api_key=self._key, http_client=http_client, timeout=_time_limit())

    @cached_property
    def sync_client(self) -> OpenAI:
        """An `openai.OpenAI`; it blocks only the thread that calls it."""
        from openai import OpenAI

        http_client: Any = None
        if self.sync_transport is not None:
            http_client = httpx.Client(transport=self.sync_transport, follow_redirects=True)
        return OpenAI(base_url=self._url, api_key=self._key, http_client=http_client, timeout=_time_limit())

    def __copy__(self) -> Endpoint:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Endpoint:
        return self

    def __repr__(self) -> str:
        return f"Endpoint(name={self.name!r})"


def _time_limit() -> Any:
    """That of the openai package, which a client of one's own would replace by a shorter one."""
    from openai import DEFAULT_TIMEOUT

    return DEFAULT_TIMEOUT
