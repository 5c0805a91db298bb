"""What every model object offers to agents that are no Python code: its address, and the environment of a command.

In: the address, name and key of a model. Out: `ModelObject`, the base of `ChatModel` and of endpoints.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

from sharpen.agent.sandbox.command import Sandbox
from sharpen.agent.sandbox.commands import CommandResult, Commands, Request
from sharpen.agent.sandbox.local import Subprocess

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
