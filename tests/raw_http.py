"""Requests that no HTTP client would send."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit


def raw(url: str, target: str, *headers: str, key: str, body: Any) -> bytes:
    """Send a POST to the server of `url` as these very bytes, and return its answer. `headers` stand in the place of
    the `Host` that the URL has."""
    address = urlsplit(url)
    content = json.dumps(body)
    lines = [
        f"POST {target} HTTP/1.1",
        *(headers or [f"Host: {address.netloc}"]),
        f"Authorization: Bearer {key}",
        f"Content-Length: {len(content)}",
        "Connection: close",
    ]
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall("\r\n".join([*lines, "", content]).encode())
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer
