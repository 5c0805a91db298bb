"""The model object that a workflow receives: a recorded model behind genuine clients of OpenAI and Anthropic.

In: a rollout's key. Out: `client`, `sync_client`, `anthropic_client`; `base_url` and `api_key` for others, and
`environment()` for a command. What it shares with endpoints is `ModelObject`.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Never, Protocol, Self
from urllib.parse import urlsplit

from sharpen.agent.sandbox.command import Sandbox
from sharpen.agent.sandbox.commands import CommandResult, Commands, Request
from sharpen.agent.sandbox.local import Subprocess
from sharpen.gateway.caller import with_name, without_name
from sharpen.types import Call

if TYPE_CHECKING:
    from anthropic import Anthropic, AsyncAnthropic
    from openai import AsyncOpenAI, OpenAI


# The environment variables from which agents learn their model: where it is, its name, and the key.
#
# In: a base URL, a key, a model's name. Out: the variables, for a command that is started for one rollout.

OPENAI_URLS = ("OPENAI_BASE_URL", "OPENAI_API_BASE")
"""`OPENAI_API_BASE` is what older clients, and LiteLLM, read."""
ANTHROPIC_MODELS = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)
"""Claude Code asks for models by several names, for side calls and sub-agents too: all of them are the one model."""


def environment_of(base_url: str, key: str, name: str) -> dict[str, str]:
    """Return the variables for a model at `base_url` (which ends in `/v1`).

    Anthropic's clients add `/v1` themselves. Their key is `ANTHROPIC_API_KEY`, which all of them read;
    `ANTHROPIC_AUTH_TOKEN` is left out, since Claude Code complains if it finds both. The host is named in `NO_PROXY`,
    so that a proxy in the environment does not get the requests.
    """
    host = urlsplit(base_url).hostname or ""
    return {
        **dict.fromkeys(OPENAI_URLS, base_url),
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": name,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
        **dict.fromkeys(ANTHROPIC_MODELS, name),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "NO_PROXY": host,
        "no_proxy": host,
    }


class Address(Protocol):
    """Where a model is served."""

    def url(self, host: str | None = None) -> str:
        """Return the base URL, which ends in `/v1`: for agents here, or for those that know this machine as `host`."""


class ModelObject:
    """A model as one rollout sees it. Copying returns the same object, so that agents may copy objects holding it."""

    def __init__(self, *, name: str, api_key: str, address: Address) -> None:
        self.name = name
        self.api_key = api_key
        self._address = address
        self.commands = Commands(self.environment)
        """The commands of this rollout: ended with it."""

    @property
    def base_url(self) -> str:
        """The URL (ending in `/v1`) for other clients, to use with `api_key`. First use starts the HTTP server."""
        return self._address.url()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r})"

    def environment(self, host: str | None = None) -> dict[str, str]:
        """Return the environment variables from which agents learn where their model is, its name and its key.

        `host` is the name or address by which they reach this machine, if they run elsewhere (a container). Raises
        `ConfigError` if the gateway does not listen there (`gateway.host`).
        """
        return environment_of(self._address.url(host), self.api_key, self.name)

    async def run(
        self,
        arguments: Sequence[str | os.PathLike[str]],
        *,
        files: Mapping[str, str | bytes] | None = None,
        folder: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        pass_env: Sequence[str] = (),
        timeout_s: float | None = None,
        memory_mb: float | None = None,
        max_processes: int | None = None,
        output_bytes: int = 100_000,
        keep: bool = False,
        sandbox: Sandbox | None = None,
    ) -> CommandResult:
        """Run a command as the agent of this rollout, in any language, and wait for its end.

        It starts in a new folder with a copy of `folder` and with `files` (path to content), with a new HOME,
        `environment()` and nothing else of this process's environment but PATH and LANG; `pass_env` names variables
        to pass, `env` adds. Its standard input is closed. Whatever came from it ends with it, and it ends at the latest
        with the rollout. The limits: `timeout_s`; `memory_mb` of each process, and of all together; `max_processes`;
        `output_bytes` kept of standard output, and of standard error (head and tail). `keep` leaves the folder in place
        at the end of the rollout. `sandbox` is where it runs: a `Subprocess` of this machine, or a `Container`.

        Raises `CommandError` for a command that cannot be started. What it does is no error: see `CommandResult`.
        """
        request = Request(
            arguments=arguments,
            files=files or {},
            folder=folder,
            env=env or {},
            pass_env=pass_env,
            timeout_s=timeout_s,
            memory_mb=memory_mb,
            max_processes=max_processes,
            output_bytes=output_bytes,
            keep=keep,
            sandbox=sandbox or Subprocess(),
        )
        return await self.commands.run(request)

    def run_sync(self, arguments: Sequence[str | os.PathLike[str]], **options: Any) -> CommandResult:
        """As `run`, for blocking code in a thread of its own."""
        given = {name: value for name, value in options.items() if value is not None}
        return self.commands.run_sync(Request(arguments=arguments, **given))


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
        policies: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(name=name, api_key=api_key, address=server)
        self.recorded = recorded
        """Whether its calls are recorded: false for auxiliary models."""
        self.policies = policies
        """The agents (`named`) whose calls a policy of their own answers, which does not train."""
        self._shared: dict[str, Any] = {
            "server": server,
            "inside": inside,
            "calls": calls,
            "prompt_text": prompt_text,
            "count_tokens": count_tokens,
            "version": version,
            "policies": policies,
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
