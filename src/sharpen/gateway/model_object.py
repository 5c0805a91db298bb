"""What every model object offers to agents that are no Python code: its address, and the environment of a command.

In: the address, name and key of a model. Out: `ModelObject`, the base of `ChatModel` and of endpoints.
"""

from __future__ import annotations

from typing import Any, Protocol, Self

from sharpen.gateway.environment import environment_of


class Address(Protocol):
    """Where a model is served."""

    def url(self) -> str:
        """Return the base URL, which ends in `/v1`."""


class ModelObject:
    """A model as one rollout sees it. Copying returns the same object, so that agents may copy objects holding it."""

    def __init__(self, *, name: str, api_key: str, address: Address) -> None:
        self.name = name
        self.api_key = api_key
        self._address = address

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

    def environment(self) -> dict[str, str]:
        """Return the environment variables from which agents learn where their model is, its name and its key."""
        return environment_of(self.base_url, self.api_key, self.name)
