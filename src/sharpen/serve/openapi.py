"""What a server answers, as an OpenAPI document.

In: the paths served beside the vendors' own. Out: the document. The requests of the vendors' APIs are described by the
schemas that they are checked by (`gateway.door`); what the fields mean, and the answers, the vendors describe: the
document links there.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from sharpen.gateway.door import Door
from sharpen.gateway.protocols import chat, completions, messages, responses
from sharpen.serve.feedback import FEEDBACK, OPENING

OPENAI, ANTHROPIC = "https://platform.openai.com/docs/api-reference", "https://docs.anthropic.com/en/api"
CALLS: Mapping[str, tuple[str, str]] = {
    "/v1/chat/completions": ("OpenAI's Chat Completions", f"{OPENAI}/chat"),
    "/v1/responses": ("OpenAI's Responses", f"{OPENAI}/responses"),
    "/v1/completions": ("OpenAI's Completions", f"{OPENAI}/completions"),
    "/v1/messages": ("Anthropic's Messages", f"{ANTHROPIC}/messages"),
    "/v1/messages/count_tokens": ("Anthropic's token count", f"{ANTHROPIC}/messages-count-tokens"),
}
"""The paths whose requests are calls of the model: whose API it is, and where that is described."""

DOORS: Mapping[str, Door] = {
    "/v1/chat/completions": chat.DOOR,
    "/v1/responses": responses.DOOR,
    "/v1/completions": completions.DOOR,
    "/v1/messages": messages.DOOR,
    "/v1/messages/count_tokens": messages.COUNT_DOOR,
    "/sessions": OPENING,
    "/feedback": FEEDBACK,
}
"""What the bodies of requests are checked by."""
RECORDED = ("/v1/chat/completions", "/v1/completions")
"""The paths whose requests are recorded by a recorder."""


def recorder_document(version: str) -> dict[str, Any]:
    """Return the document of a recorder, which passes all other paths through."""
    paths = {path: {"post": _call(*CALLS[path], {"type": "object"})} for path in RECORDED}
    return _document(version, {**paths, **_OWN_PATHS, **SESSION_PATHS})


def document(version: str, further: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the document; `further` are paths that this server has beside the usual ones."""
    paths: dict[str, Any] = {path: {"post": _call(*about, _schemas()[0][path])} for path, about in CALLS.items()}
    id_: dict[str, Any] = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/responses/{id}/input_items"] = {
        "get": _operation("The input of a stored response", {}),
        "parameters": [id_],
    }
    paths["/v1/responses/{id}"] = {
        "get": _operation("A stored response", {}),
        "delete": _operation("Forget a stored response", {}),
        "parameters": [id_],
    }
    paths["/v1/models"] = {"get": _operation("The model that is served", {})}
    paths["/v1/models/{model}"] = {
        "get": _operation("The same by its name", {}),
        "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
    }
    return _document(version, {**paths, **_OWN_PATHS, **(further or {})})


def _document(version: str, paths: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {"title": "Sharpen", "version": version},
        "paths": dict(paths),
        "components": {
            "schemas": dict(_schemas()[1]),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"bearer": []}, {"x-api-key": []}],
    }


@functools.cache
def _schemas() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the schemas of requests by path, and by name those that they refer to."""
    described, named = TypeAdapter.json_schemas(
        [(path, "validation", door.adapter) for path, door in DOORS.items()],
        ref_template="#/components/schemas/{model}",
    )
    return {path: described[path, "validation"] for path in DOORS}, named["$defs"]


def _call(title: str, url: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    content = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}}
    return {**_operation(title, content), "requestBody": body, "externalDocs": {"url": url}}


def _operation(summary: str, content: Mapping[str, Any]) -> dict[str, Any]:
    content = content or {"application/json": {"schema": {"type": "object"}}}
    error = {"description": "An error", "content": {"application/json": {"schema": {"type": "object"}}}}
    return {"summary": summary, "responses": {"200": {"description": "OK", "content": content}, "default": error}}


def _json_call(summary: str, path: str, answer: Mapping[str, Any], *, required: bool) -> dict[str, Any]:
    """Describe a call of our own; unless its body is `required` it may be missing."""
    body = {"required": required, "content": {"application/json": {"schema": _schemas()[0][path]}}}
    answered = {"type": "object", "properties": dict(answer), "required": list(answer)}
    return {"post": {**_operation(summary, {"application/json": {"schema": answered}}), "requestBody": body}}


_TEXT, _TRUTH = {"type": "string"}, {"type": "boolean"}
SESSION_PATHS: Mapping[str, Any] = {
    "/sessions": _json_call(
        "Open a session: calls with its key belong together",
        "/sessions",
        {
            "id": _TEXT,
            "task_id": {"type": ["string", "null"]},
            "api_key": _TEXT,
            "base_url": _TEXT,
            "anthropic_base_url": _TEXT,
        },
        required=False,
    ),
    "/feedback": _json_call(
        "The reward of a session, or of one of its calls: one of them is named",
        "/feedback",
        {"session": _TEXT, "reward": {"type": ["number", "null"]}, "ended": _TRUTH},
        required=True,
    ),
}
"""The paths of a server that has sessions."""
_OWN_PATHS: Mapping[str, Any] = {
    "/metrics": {"get": _operation("Counts for Prometheus", {"text/plain": {"schema": {"type": "string"}}})},
    "/health": {"get": {**_operation("Whether the model can be called", {}), "security": []}},
    "/openapi.json": {"get": {**_operation("This description", {}), "security": []}},
}
