"""The images in the rows of a dataset, however a row holds them.

In: a value of a row, or messages and the images that belong into them. Out: data URLs, and messages whose images are
parts with one, as chat completions take them.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sharpen.errors import DatasetError
from sharpen.types import Picture

TAG = "<image>"
"""Stands in a text for the next image of its row."""
_VALUES = ("image", "url", "path", "base64")
"""Keys of a part of the type `image` that may hold it, as transformers has them."""


def data_url(value: Any) -> str:
    """Return an image as a data URL: one of Pillow (as PNG), the bytes of a file, what the datasets library leaves
    undecoded (`bytes` and `path`), the path of a file, or a data URL as it is. Raises `DatasetError`."""
    if isinstance(value, str) and value[:5].lower() == "data:":
        return value
    return Picture.of(_content(value)).data_url


def _content(value: Any) -> bytes:
    from PIL import Image

    if isinstance(value, Image.Image):
        return _as_png(value)
    if isinstance(value, Mapping):
        value = value["path"] if value.get("bytes") is None and value.get("path") else value.get("bytes")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str | Path):
        raise DatasetError(f"an image is of the type {type(value).__name__}, but must be an image, bytes, or a path")
    if str(value).lower().startswith(("http://", "https://")):
        raise DatasetError(
            f"an image is the address {str(value)[:100]!r}: images are not fetched, so put it into a file"
        )
    try:
        return Path(value).expanduser().read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DatasetError(
            f"the image {str(value)[:200]!r} cannot be read: {reason} (seen from {Path.cwd()})"
        ) from error


def _as_png(image: Any) -> bytes:
    """Return an image of Pillow as a file. PNG has no other colours than these."""
    if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I"):
        image = image.convert("RGB")
    file = io.BytesIO()
    try:
        image.save(file, "PNG")
    except (OSError, ValueError) as error:
        raise DatasetError(f"an image of {image.width}x{image.height} pixels cannot be read: {error}") from error
    return file.getvalue()


def is_image(value: Any) -> bool:
    """Whether a value is an image itself, which is read from nowhere else."""
    from PIL import Image

    if isinstance(value, Mapping):
        value = value.get("bytes")
    is_data_url = isinstance(value, str) and value[:5].lower() == "data:"
    return is_data_url or isinstance(value, bytes | Image.Image)


def name_images(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Whether messages say where images belong that they do not hold."""
    return any(_names_image(message) for message in messages)


def _names_image(message: Mapping[str, Any]) -> bool:
    content, speaks = message.get("content"), message.get("role") == "assistant"
    if isinstance(content, str):
        return not speaks and TAG in content
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list | tuple) else []
    return any(
        _own_image(part) is None if part.get("type") == "image" else not speaks and TAG in str(part.get("text"))
        for part in parts
    )


def with_images(messages: Sequence[Mapping[str, Any]], images: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages with each image as a part of its own.

    Each `<image>` in a text of users and tools, and each part of the type `image` without one of its own, takes the
    next of `images`; those that are left begin the first message of a user. Without `images` a text stays as it is.
    Raises `DatasetError` if there are too few, or one cannot be read.
    """
    rest = iter(images)
    placed = [_placed(message, rest, tags=bool(images)) for message in messages]
    left = [_part(image) for image in rest]
    first = next((message for message in placed if message.get("role") == "user"), None)
    if left and first is None:
        raise DatasetError(f"there are {len(left)} images, but no message of a user that could have them")
    if left and first is not None:
        first["content"] = [*left, *_parts(first.get("content"))]
    return placed


def _placed(message: Mapping[str, Any], rest: Iterator[Any], *, tags: bool) -> dict[str, Any]:
    content, speaks = message.get("content"), message.get("role") == "assistant"
    if isinstance(content, str):
        split = tags and not speaks and TAG in content
        return {**message, "content": list(_split(content, rest))} if split else dict(message)
    if not isinstance(content, list | tuple) or not all(isinstance(part, Mapping) for part in content):
        return dict(message)
    parts: list[Any] = []
    for part in content:
        if part.get("type") == "image":
            parts.append(_part(_next(rest) if (own := _own_image(part)) is None else own))
        elif tags and not speaks and isinstance(part.get("text"), str):
            parts += _split(part["text"], rest)
        else:
            parts.append(part)
    return {**message, "content": parts}


def _own_image(part: Mapping[str, Any]) -> Any:
    """Return what a part holds of its own image; None if it only says that here is one."""
    key = next((key for key in _VALUES if part.get(key) is not None), "")
    return f"data:;base64,{part[key]}" if key == "base64" else part.get(key)


def _split(text: str, rest: Iterator[Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts of a text with an image at each tag."""
    for number, piece in enumerate(text.split(TAG)):
        if number:
            yield _part(_next(rest))
        if piece:
            yield {"type": "text", "text": piece}


def _next(rest: Iterator[Any]) -> Any:
    image = next(rest, None)
    if image is None:
        raise DatasetError(f"it has fewer images than its messages name ({TAG}, or a part of the type 'image')")
    return image


def _part(image: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(image)}}


def _parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []
