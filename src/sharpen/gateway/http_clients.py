"""HTTP clients for the vendors' SDKs in another process than the gateway's.

In: the address of the gateway's server. Out: clients as `transport.InProcess` gives them, whose requests go by HTTP.
"""

from __future__ import annotations

from typing import Any

from sharpen.gateway.transport import library_of


class HttpClients:
    """Clients of a gateway at `url`. A connection serves one request, so that none is left open when the agent leaves
    its client open. Proxies of the environment are not asked: the gateway is on this machine."""

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
