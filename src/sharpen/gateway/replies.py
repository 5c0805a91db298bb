"""Whole replies: JSON bodies, and errors in the forms of the vendors.

In: bodies, errors. Out: `Reply`, and its ASGI messages.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.types import Message, Send

from sharpen.gateway.exchange import Exchange, Reply
from sharpen.gateway.requests import ApiError, PromptTooLongError

JSON_TYPE, EVENTS_TYPE = "application/json", "text/event-stream"
NO_THREADS = "thread_unsupported_request"
"""The code at which Anthropic's SDKs send the whole conversation from then on."""
_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def dump(value: Any) -> bytes:
    """Return a value as compact JSON."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def json_reply(body: Any, exchange: Exchange | None = None) -> Reply:
    """Return a successful reply."""
    return Reply(status=200, content_type=JSON_TYPE, body=dump(body), exchange=exchange)


def error_reply(error: ApiError) -> Reply:
    """Return the reply for an error in OpenAI's form (`routes.Protocols.refusal`: in that of the protocol spoken)."""
    return Reply(status=error.status, content_type=JSON_TYPE, body=dump(error.body()))


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Return an error's body as Anthropic's API has it. Agents compact a conversation by the words of its message."""
    message = str(error)
    if isinstance(error, PromptTooLongError):
        message = f"prompt is too long: {error.num_tokens} tokens > {error.limit} maximum"
    kind = _ANTHROPIC_KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    body: dict[str, Any] = {"type": kind, "message": message}
    if error.code == NO_THREADS:
        body["details"] = {"error_code": NO_THREADS, "unsupported": [error.param]}
    return {"type": "error", "error": body}


def rollout_ended() -> ApiError:
    """Return the error for a call whose rollout ended before it was answered."""
    return ApiError("The rollout has ended.", status=401, code="invalid_api_key", kind="authentication_error")


async def send_whole(send: Send, reply: Reply, *, close: bool) -> None:
    """Send a reply. `close`: the connection is closed after it.

    It is marked as delivered before the last byte, since the client may end its rollout as soon as it has that byte.
    """
    reply.delivered()
    await send(head_of(reply, [(b"content-length", b"%d" % len(reply.body))], close=close))
    await send({"type": "http.response.body", "body": reply.body})


def head_of(reply: Reply, headers: list[tuple[bytes, bytes]], *, close: bool) -> Message:
    """Return the message that begins an answer."""
    headers.append((b"content-type", reply.content_type.encode("latin-1")))
    if close:
        headers.append((b"connection", b"close"))
    return {"type": "http.response.start", "status": reply.status, "headers": headers}
