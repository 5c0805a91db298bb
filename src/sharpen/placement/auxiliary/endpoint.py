"""An OpenAI-compatible endpoint, as workflows and judges use it: through real OpenAI clients.

In: a base URL, a model name, a key. Out: `Endpoint` with `client`, `sync_client`, `base_url` and `api_key`. Retries and
time limits are those of the openai package.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import httpx

from sharpen.gateway.model import ModelObject
from sharpen.gateway.server import Server

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI


@dataclass(frozen=True, slots=True)
class Fixed:
    """The address of an endpoint."""

    base_url: str

    def url(self, host: str | None = None) -> str:
        """Return it: an endpoint has the same address everywhere."""
        return self.base_url


class Endpoint(ModelObject):
    """A model at an endpoint, as one attempt sees it.

    The clients send through `async_transport` and `sync_transport`, if given, which may replace the `api_key`.
    `base_url` and `api_key` are for other clients: those of the endpoint, or those of a `loopback` server that sends
    for them, so that they need not have the endpoint's key. Through it a streamed answer arrives all at once.
    """

    def __init__(
        self,
        *,
        base_url: str,
        name: str,
        api_key: str,
        async_transport: httpx.AsyncBaseTransport | None = None,
        sync_transport: httpx.BaseTransport | None = None,
        loopback: Server | None = None,
    ) -> None:
        super().__init__(name=name, api_key=api_key, address=loopback or Fixed(base_url))
        self.async_transport, self.sync_transport = async_transport, sync_transport
        self._url, self._key = base_url, api_key

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


def _time_limit() -> Any:
    """Return the time limit of the openai package. Passing an `httpx` client would replace it by a shorter one."""
    from openai import DEFAULT_TIMEOUT

    return DEFAULT_TIMEOUT
