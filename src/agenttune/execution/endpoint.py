"""Any OpenAI-compatible endpoint in place of our own engine, for evaluation. Nothing is recorded token-exactly there.

In: a base URL, a model name, a key. Out: sessions with the same model object as the gateway's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from agenttune.types import Call, Outcome

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI


@dataclass(frozen=True)
class Endpoint:
    """What a workflow receives as `model`: plain OpenAI clients of the endpoint."""

    base_url: str
    name: str
    api_key: str

    @cached_property
    def client(self) -> AsyncOpenAI:
        """An asynchronous client."""
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=self.base_url, api_key=self.api_key)

    @cached_property
    def sync_client(self) -> OpenAI:
        """A synchronous client."""
        from openai import OpenAI

        return OpenAI(base_url=self.base_url, api_key=self.api_key)


@dataclass(frozen=True, slots=True)
class EndpointSession:
    """A rollout's use of an endpoint."""

    model: Endpoint
    failure: Outcome | None = None
    failure_reason: str | None = None

    @property
    def counts(self) -> dict[str, float]:
        """Nothing was noticed."""
        return {}

    def close(self) -> tuple[Call, ...]:
        """Nothing was recorded."""
        return ()
