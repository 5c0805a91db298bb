"""The model object that a workflow receives: a recorded model behind genuine clients of OpenAI and Anthropic.

In: a rollout's key. Out: `client`, `sync_client`, `anthropic_client`; `base_url` and `api_key` for others, and
`environment()` for a command.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Never, Protocol
from urllib.parse import urlsplit

from sharpen.gateway.keys import with_name, without_name
from sharpen.gateway.model_object import Address, ModelObject
from sharpen.types import Call

if TYPE_CHECKING:
    from anthropic import Anthropic, AsyncAnthropic
    from openai import AsyncOpenAI, OpenAI


class Clients(Protocol):
    """Makes HTTP clients for the vendors' SDKs, whose requests go to the gateway. `url` is the SDKs' address of it,
    without `/v1`."""

    url: str

    def async_client(self, sdk: Any) -> Any: ...
    def sync_client(self, sdk: Any) -> Any: ...


class ChatModel(ModelObject):
    """The model that is trained, or a further one that is served here, as one rollout sees it.

    The clients do not retry (a retried call would be recorded twice, the first one as abandoned) and have no time limit
    of their own, since the rollout has one. Pass `timeout=` to a call to limit it.
    """

    def __init__(
        self,
        *,
        name: str,
        api_key: str,
        server: Address,
        inside: Clients,
        calls: Callable[[], tuple[Call, ...]],
        prompt_text: Callable[[int], str],
        count_tokens: Callable[[Sequence[Mapping[str, Any]]], Awaitable[int]],
        version: Callable[[], int],
        recorded: bool,
    ) -> None:
        super().__init__(name=name, api_key=api_key, address=server)
        self.recorded = recorded
        """Whether its calls are recorded: false for auxiliary models."""
        self._shared: dict[str, Any] = {
            "server": server,
            "inside": inside,
            "calls": calls,
            "prompt_text": prompt_text,
            "count_tokens": count_tokens,
            "version": version,
        }
        self._named: dict[str, ChatModel] = {}
        self._inside = inside
        self._calls = calls
        self._prompt_text = prompt_text
        self._count_tokens = count_tokens
        self._version = version

    def named(self, agent: str) -> ChatModel:
        """Return this model for one agent of several: its calls are recorded with the agent's name, whichever client
        makes them, so that they can have a reward of their own (`WorkflowOutput`). Raises `ConfigError` for a name with
        other characters than letters, digits, `-` and `_`."""
        if agent not in self._named:
            rollout_key, _ = without_name(self.api_key)
            key = with_name(rollout_key, agent)
            self._named[agent] = ChatModel(name=self.name, api_key=key, recorded=self.recorded, **self._shared)
        return self._named[agent]

    @cached_property
    def client(self) -> AsyncOpenAI:
        """An `openai.AsyncOpenAI` client, answered within this process."""
        import openai

        http_client = self._inside.async_client(openai)
        return openai.AsyncOpenAI(base_url=f"{self._inside.url}/v1", http_client=http_client, **self._options)

    @cached_property
    def sync_client(self) -> OpenAI:
        """An `openai.OpenAI` client, answered within this process. It blocks only the calling thread."""
        import openai

        http_client = self._inside.sync_client(openai)
        return openai.OpenAI(base_url=f"{self._inside.url}/v1", http_client=http_client, **self._options)

    @cached_property
    def anthropic_client(self) -> AsyncAnthropic:
        """An `anthropic.AsyncAnthropic` client, answered within this process. Needs the package `anthropic`."""
        import anthropic

        http_client = self._inside.async_client(anthropic)
        return anthropic.AsyncAnthropic(base_url=self._inside.url, http_client=http_client, **self._options)

    @cached_property
    def sync_anthropic_client(self) -> Anthropic:
        """An `anthropic.Anthropic` client, answered within this process. It blocks only the calling thread."""
        import anthropic

        http_client = self._inside.sync_client(anthropic)
        return anthropic.Anthropic(base_url=self._inside.url, http_client=http_client, **self._options)

    @property
    def _options(self) -> dict[str, Any]:
        return {"api_key": self.api_key, "max_retries": 0, "timeout": None}

    @property
    def keyed_url(self) -> str:
        """`base_url` with the key in its path, for clients that cannot be given a key."""
        address = urlsplit(self.base_url)
        return address._replace(path=f"/{self.api_key}{address.path}").geturl()

    def calls(self) -> tuple[Call, ...]:
        """Return the recorded calls of this rollout so far. From any thread."""
        return self._calls()

    def prompt_text(self, index: int) -> str:
        """Return the prompt of a call as the chat template rendered it. From any thread."""
        return self._prompt_text(index)

    async def count_tokens(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """The number of tokens of the prompt that these messages render to. On any loop. Raises `ConfigError` for what
        are no chat messages."""
        return await self._count_tokens(messages)

    @property
    def version(self) -> int:
        """The policy version of the weights served now."""
        return self._version()

    def __call__(self, *_: Any, **__: Any) -> Never:
        """Raise `TypeError`: AgentScope's agents call their model object, but this one cannot be called."""
        raise TypeError(
            "this is Sharpen's own model object, which cannot be called: agents use model.client. For AgentScope's "
            "agents, import agentscope at the top of the script, so that workflows receive its OpenAIChatModel"
        )
