"""The input of a stored response, as `GET /v1/responses/{id}/input_items` gives it.

In: the `input` of a request, the query of a later one. Out: items with ids, page by page. They are those of that
request alone: what an earlier response brought by `previous_response_id` is in the input of that one. They are kept
with references in place of their images, since clients send these again with every request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from sharpen.gateway.requests import REFERENCE, ApiError, short_repr
from sharpen.types import Picture

Items = Sequence[Mapping[str, Any]]
MAX_LIMIT, DEFAULT_LIMIT = 100, 20


def input_items(given: Any, response_id: str) -> Items:
    """Return the items of a valid `input`, each with an id. A text is a message of the user."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    items = []
    for place, item in enumerate(given):
        item = {"id": f"in_{response_id.removeprefix('resp_')}_{place}", "type": "message", **item}
        if isinstance(item.get("content"), str) and item["type"] == "message":
            kind = "output_text" if item.get("role") == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": item["content"]}]
        items.append(item)
    return items


def with_urls(items: Any, change: Callable[[str], str]) -> Any:
    """Return items with the URL of each image changed. What is no list of items is returned as it is."""
    if not isinstance(items, list):
        return items

    def changed(part: Any) -> Any:
        if (
            not isinstance(part, dict)
            or part.get("type") != "input_image"
            or not isinstance(part.get("image_url"), str)
        ):
            return part
        return {**part, "image_url": change(part["image_url"])}

    return [
        {name: [changed(part) for part in value] if isinstance(value, list) else value for name, value in item.items()}
        for item in items
    ]


def input_page(items: Items, query: str, pictures: Mapping[str, Picture]) -> dict[str, Any]:
    """Return one page: the newest first, unless `order` is `asc`; from behind the item `after`; `limit` at most.
    `pictures` are those that references stand for, by hash.

    Raises `ApiError` for a value that cannot be, and for another parameter.
    """
    asked = dict(parse_qsl(query))
    order, after = asked.pop("order", "desc"), asked.pop("after", None)
    limit = asked.pop("limit", str(DEFAULT_LIMIT))
    if (unknown := next((name for name in asked if name not in ("include", "include[]")), None)) is not None:
        raise ApiError(f"Unknown parameter: '{unknown[:100]}'.", code="unknown_parameter", param=unknown[:100])
    if order not in ("asc", "desc"):
        raise ApiError(f"'order' is {short_repr(order)}; it must be 'asc' or 'desc'.", param="order")
    if not (limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= MAX_LIMIT):
        raise ApiError(f"'limit' is {short_repr(limit)}; it must be from 1 to {MAX_LIMIT}.", param="limit")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise ApiError(f"'after' is {short_repr(after)}; there is no such item.", param="after")
        ordered = ordered[places[0] + 1 :]

    def data_url(url: str) -> str:
        picture = pictures.get(url.removeprefix(REFERENCE))
        return url if picture is None else picture.data_url

    page = with_urls(ordered[: int(limit)], data_url)
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > len(page),
    }
