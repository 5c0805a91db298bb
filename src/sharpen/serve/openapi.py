"""What a server answers, as an OpenAPI document.

In: the paths served beside the vendors' own. Out: the document. The bodies of the vendors' APIs are the vendors' to
describe: the document names them, and links there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sharpen.serve.feedback import MAX_TASK_ID

OPENAI, ANTHROPIC = "https://platform.openai.com/docs/api-reference", "https://docs.anthropic.com/en/api"
CALLS: Mapping[str, tuple[str, str]] = {
    "/v1/chat/completions": ("OpenAI's Chat Completions", f"{OPENAI}/chat"),
    "/v1/responses": ("OpenAI's Responses", f"{OPENAI}/responses"),
    "/v1/completions": ("OpenAI's Completions", f"{OPENAI}/completions"),
    "/v1/messages": ("Anthropic's Messages", f"{ANTHROPIC}/messages"),
    "/v1/messages/count_tokens": ("Anthropic's token count", f"{ANTHROPIC}/messages-count-tokens"),
}
"""The paths whose requests are calls of the model: whose API it is, and where that is described."""


RECORDED = ("/v1/chat/completions", "/v1/completions")
"""The paths whose requests are recorded by a recorder."""


def recorder_document(version: str) -> dict[str, Any]:
    """Return the document of a recorder, which passes all other paths through."""
    paths = {path: {"post": _call(*CALLS[path])} for path in RECORDED}
    return _document(version, {**paths, **_OWN_PATHS, **SESSION_PATHS})


def document(version: str, further: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the document; `further` are paths that this server has beside the usual ones."""
    paths: dict[str, Any] = {path: {"post": _call(*about)} for path, about in CALLS.items()}
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
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
        },
        "security": [{"bearer": []}, {"x-api-key": []}],
    }


def _call(title: str, url: str) -> dict[str, Any]:
    body = {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
    content = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}}
    return {**_operation(title, content), "requestBody": body, "externalDocs": {"url": url}}


def _operation(summary: str, content: Mapping[str, Any]) -> dict[str, Any]:
    content = content or {"application/json": {"schema": {"type": "object"}}}
    error = {"description": "An error", "content": {"application/json": {"schema": {"type": "object"}}}}
    return {"summary": summary, "responses": {"200": {"description": "OK", "content": content}, "default": error}}


def _json_call(
    summary: str, fields: Mapping[str, Any], answer: Mapping[str, Any], one_of: Sequence[str] = ()
) -> dict[str, Any]:
    """Describe a call with these fields, exactly one of `one_of` among them; without any its body may be missing."""
    schema: dict[str, Any] = {"type": "object", "properties": dict(fields), "additionalProperties": False}
    if one_of:
        schema["oneOf"] = [{"required": [name]} for name in one_of]
    body = {"required": bool(one_of), "content": {"application/json": {"schema": schema}}}
    answered = {"type": "object", "properties": dict(answer), "required": list(answer)}
    return {"post": {**_operation(summary, {"application/json": {"schema": answered}}), "requestBody": body}}


_TEXT, _NUMBER, _TRUTH = {"type": "string"}, {"type": "number"}, {"type": "boolean"}
SESSION_PATHS: Mapping[str, Any] = {
    "/sessions": _json_call(
        "Open a session: calls with its key belong together",
        {"task_id": {**_TEXT, "minLength": 1, "maxLength": MAX_TASK_ID}, "task": {"type": "object"}},
        {
            "id": _TEXT,
            "task_id": {"type": ["string", "null"]},
            "api_key": _TEXT,
            "base_url": _TEXT,
            "anthropic_base_url": _TEXT,
        },
    ),
    "/feedback": _json_call(
        "The reward of a session, or of one of its calls",
        {"session": _TEXT, "call": _TEXT, "reward": _NUMBER, "end": _TRUTH},
        {"session": _TEXT, "reward": {"type": ["number", "null"]}, "ended": _TRUTH},
        one_of=("session", "call"),
    ),
}
"""The paths of a server that has sessions."""
_OWN_PATHS: Mapping[str, Any] = {
    "/metrics": {"get": _operation("Counts for Prometheus", {"text/plain": {"schema": {"type": "string"}}})},
    "/health": {"get": {**_operation("Whether the model can be called", {}), "security": []}},
    "/openapi.json": {"get": {**_operation("This description", {}), "security": []}},
}
