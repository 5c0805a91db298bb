"""The models of an attempt in a worker process: calls go to the gateway of the run by HTTP, all else is asked there.

In: `ModelCard`s and a function that asks the run. Out: `RolloutModels`, as in the run's own process.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import Any

from sharpen.agent.agentscope.model import present
from sharpen.agent.rollout.models import Access, RolloutModels
from sharpen.errors import TokenCapError
from sharpen.gateway.model import ChatModel, ModelObject
from sharpen.gateway.transport import library_of
from sharpen.placement.auxiliary.endpoint import Endpoint
from sharpen.placement.isolated.messages import POLICY, ModelCard
from sharpen.types import Call, Outcome

Ask = Callable[..., Any]
"""(name of the model, what, arguments) -> the answer; blocks the calling thread for a moment."""


def card_of(access: Access) -> ModelCard:
    """Return the card of a model. May start the HTTP server, so not on the serving loop."""
    model = access.model
    return ModelCard(
        name=model.name,
        api_key=model.api_key,
        base_url=model.base_url,
        recorded=getattr(model, "recorded", False),
        served=isinstance(model, ChatModel),
        policies=getattr(model, "policies", frozenset()),
    )


def models_of(cards: Mapping[str, ModelCard], ask: Ask) -> RolloutModels:
    """Return an attempt's models. User code that uses AgentScope receives AgentScope's objects."""
    access = {name: AskedAccess(card, functools.partial(ask, name)) for name, card in cards.items()}
    return RolloutModels(access.pop(POLICY), access, present)


class AskedAccess:
    """Satisfies `rollout.models.Access`: what the run's own access says."""

    def __init__(self, card: ModelCard, ask: Ask) -> None:
        self._ask = ask
        self.model: ModelObject
        if card.served:
            self.model = ChatModel(
                name=card.name,
                api_key=card.api_key,
                server=_Address(card.base_url, ask),
                inside=HttpClients(card.base_url.removesuffix("/v1")),
                calls=lambda: tuple(ask("calls")),
                prompt_text=lambda index: str(ask("prompt_text", index)),
                count_tokens=lambda messages: asyncio.to_thread(ask, "count_tokens", messages),
                version=lambda: int(ask("version")),
                recorded=card.recorded,
                policies=card.policies,
            )
        else:
            self.model = Endpoint(base_url=card.base_url, name=card.name, api_key=card.api_key)

    @property
    def failure(self) -> Outcome | None:
        """See `Access`."""
        found: Outcome | None = self._ask("failure")
        return found

    @property
    def failure_reason(self) -> str | None:
        """See `Access`."""
        found: str | None = self._ask("failure_reason")
        return found

    @property
    def counts(self) -> Mapping[str, float]:
        """See `Access`."""
        found: Mapping[str, float] = self._ask("counts")
        return found

    @property
    def num_answers(self) -> int | None:
        """See `Access`."""
        found: int | None = self._ask("num_answers")
        return found

    @property
    def cut(self) -> bool:
        """See `Access`."""
        return bool(self._ask("cut"))

    @property
    def exhausted(self) -> TokenCapError | None:
        """See `Access`."""
        found: TokenCapError | None = self._ask("exhausted")
        return found

    def allow(self, num_rollouts: int) -> None:
        """See `Access`."""
        self._ask("allow", num_rollouts)

    def close(self) -> tuple[Call, ...]:
        """See `Access`."""
        self.model.commands.stop()
        found: tuple[Call, ...] = self._ask("close")
        return found

    def discard(self) -> None:
        """Remove the folders of commands, which are this process's."""
        self.model.commands.remove()


class _Address:
    """Where the model is served, as the run's server says for other hosts."""

    def __init__(self, base_url: str, ask: Ask) -> None:
        self._base_url, self._ask = base_url, ask

    def url(self, host: str | None = None) -> str:
        return self._base_url if host is None else str(self._ask("url", host))


def answer_of(access: Access, what: str, arguments: tuple[Any, ...]) -> Any:
    """Answer a question of `AskedAccess` in the run's process; an awaitable for `count_tokens`."""
    match what:
        case "failure" | "failure_reason" | "counts" | "num_answers" | "cut" | "exhausted":
            return getattr(access, what)
        case "close" | "allow":
            return getattr(access, what)(*arguments)
        case "version":
            return access.model.version
        case "calls" | "prompt_text" | "count_tokens":
            return getattr(access.model, what)(*arguments)
        case "url":
            return access.model.environment(*arguments)["OPENAI_BASE_URL"]
    raise ValueError(f"there is no question {what!r}")


class HttpClients:
    """Clients for the vendors' SDKs, as `gateway.transport.InProcess` gives them, whose requests go by HTTP to the
    gateway at `url`. A connection serves one request, so that none is left open when the agent leaves its client open.
    Proxies of the environment are not asked: the gateway is on this machine."""

    def __init__(self, url: str) -> None:
        self.url = url

    def async_client(self, sdk: Any) -> Any:
        """Return an asynchronous HTTP client for a vendor's SDK."""
        library = library_of(sdk)
        return library.AsyncClient(timeout=None, trust_env=False, limits=_limits(library))

    def sync_client(self, sdk: Any) -> Any:
        """Return a blocking HTTP client for a vendor's SDK."""
        library = library_of(sdk)
        return library.Client(timeout=None, trust_env=False, limits=_limits(library))


def _limits(library: Any) -> Any:
    return library.Limits(max_connections=None, max_keepalive_connections=0)
