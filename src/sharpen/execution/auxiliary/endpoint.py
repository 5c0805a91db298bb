"""An OpenAI-compatible endpoint, as workflows and judges use it: through real OpenAI clients.

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

    The clients send through `async_transport` and `sync_transport`, if given, with the `client_key`, which the
    transport may replace. `base_url` and `api_key` are for other clients: those of the endpoint, or those of a
    `loopback` server that counts their tokens too. Through the loopback a streamed answer arrives all at once.
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
        """The URL for other clients, to use with `api_key`. The first use of a loopback starts its server."""
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
        """An `openai.OpenAI`. It blocks only the calling thread."""
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
    """Return the time limit of the openai package. Passing an `httpx` client would replace it by a shorter one."""
    from openai import DEFAULT_TIMEOUT

    return DEFAULT_TIMEOUT
