"""The images of a request: from the base64 text in its body to pictures that the model can look at.

In: data URLs and base64 texts, from the parsers of the protocols. Out: parts of messages that name a picture by its
content; the pictures themselves are in the rollout's memory. An image is an `ApiError` if the model's processor cannot
read it, if it is larger than the bounds, or if it has to be fetched: the gateway opens no address that an agent names.
"""

from __future__ import annotations

import base64
import string
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sharpen.errors import ImageError, ModelError
from sharpen.gateway.memory import Memory
from sharpen.gateway.render import Renderer
from sharpen.gateway.requests import IMAGE_ROLES, REFERENCE, ApiError, short_repr
from sharpen.types import IntArray, Picture, PictureSpan

MAX_IMAGES = 100
"""In one request: what Anthropic's API takes."""
MAX_IMAGE_BYTES = 20 << 20
"""As a file. How many pixels it may have is the bound of who decodes it (`models.images`)."""
_WITHOUT_SPACES = str.maketrans("", "", string.whitespace)
MARKS = (b'"image_url"', b'"input_image"', b'"image"')
"""One of them is in every body with an image: the type of its part."""


class Eyes(Protocol):
    """How a model looks at images (`models.images.Eyes`). From any thread. All raise `ImageError`."""

    def features(self, picture: Picture) -> Any:
        """Decode a picture, so that the other methods need not."""

    def expand_text(self, text: str, pictures: Sequence[Picture]) -> str:
        """Return a prompt's text with the text of each picture's tokens in the place of each placeholder."""

    def spans(self, ids: IntArray, pictures: Sequence[Picture]) -> tuple[PictureSpan, ...]:
        """Return where the tokens of the pictures are."""


class Album:
    """The pictures that requests to one model carry: one object for one content, as long as anybody holds it. From any
    thread.

    `eyes` are the model's; without, `lack` is why it looks at no images.
    """

    def __init__(self, eyes: Eyes | None = None, lack: str = "the model reads only text") -> None:
        self.eyes, self.lack = eyes, lack
        self._known: weakref.WeakValueDictionary[str, Picture] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()

    def picture(self, content: bytes) -> Picture:
        """Return the picture with this content. Raises `ImageError` if the model cannot look at it."""
        assert self.eyes is not None
        new = Picture.of(content)
        with self._lock:
            known = self._known.get(new.sha256)
        if known is not None:
            return known
        self.eyes.features(new)
        with self._lock:
            return self._known.setdefault(new.sha256, new)

    def sight(self, rendered: Sequence[Mapping[str, Any]], memory: Memory) -> Sight | None:
        """Return the pictures of messages that were read into a memory; None if they have none."""
        pictures = tuple(memory.pictures[name] for name in images_of(rendered))
        return Sight(eyes=self.eyes, pictures=pictures) if self.eyes is not None and pictures else None


def album_of(folder: Path) -> Album:
    """Return the album of the model in `folder`, which says of a model that looks at no images why."""
    from sharpen.models.configuration import read_config
    from sharpen.models.images import eyes_of

    try:
        eyes = eyes_of(folder, read_config(folder))
    except ModelError as error:
        return Album(lack=f"the model cannot look at it: {error}")
    return Album(eyes, lack=f"the model {folder} reads only text: it has no vision tower")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """The pictures of a request's messages, in their order, and how its model looks at them."""

    eyes: Eyes
    pictures: tuple[Picture, ...]

    def read(
        self, renderer: Renderer, text: str, first: int, last_id: int | None
    ) -> tuple[IntArray, tuple[PictureSpan, ...]]:
        """Return the ids of a text with the pictures from number `first` on, and where their tokens are. The text
        follows the token `last_id`, or begins a prompt. Raises `ImageError`."""
        pictures = self.pictures[first:]
        expanded = self.eyes.expand_text(text, pictures)
        ids_T = renderer.encode(expanded) if last_id is None else renderer.encode_after(last_id, expanded)
        return ids_T, self.eyes.spans(ids_T, pictures)


class ImageReader:
    """Reads the images of one request into the memory of its rollout. `where` is the place in the request."""

    def __init__(self, album: Album | None = None, memory: Memory | None = None) -> None:
        self._album = album or Album()
        self._memory = memory or Memory()
        self._num_images = 0
        self._references: dict[str, str] = {}

    def from_url(self, url: str, where: str) -> dict[str, Any]:
        """Return the part for a data URL."""
        self._admit(where)
        head, comma, text = url.partition(",")
        if head[:5].lower() != "data:" or not comma:
            raise ApiError(
                f"{where}: {short_repr(url)} is not a data URL. Images are not fetched: send the image itself, as "
                "'data:image/png;base64,...'.",
                code="invalid_image_url",
                param=where,
            )
        if not head.lower().endswith(";base64"):
            raise _invalid(f"{where}: the data URL must be in base64 ('data:image/png;base64,...').", where)
        part = self._part(text, where)
        self._references[url] = part["image_url"]["url"]
        return part

    def reference_of(self, url: str) -> str:
        """Return what stands for a data URL that was read; another URL as it is."""
        return self._references.get(url, url)

    def from_base64(self, text: str, where: str) -> dict[str, Any]:
        """Return the part for the content of an image in base64."""
        self._admit(where)
        return self._part(text, where)

    def _admit(self, where: str) -> None:
        if self._album.eyes is None:
            raise ApiError(f"{where} is an image, but {self._album.lack}.", code="image_not_supported", param=where)
        self._num_images += 1
        if self._num_images > MAX_IMAGES:
            raise ApiError(f"The request has more than {MAX_IMAGES} images.", code="too_many_images", param=where)

    def _part(self, text: str, where: str) -> dict[str, Any]:
        if len(text) > 2 * MAX_IMAGE_BYTES:  # base64 with line breaks is 1.4 times as long as its content
            raise _invalid(
                f"{where}: the image has {len(text)} characters of base64; {MAX_IMAGE_BYTES >> 20} MiB at most.", where
            )
        try:
            content = decoded(text)
        except ValueError as error:
            raise _invalid(f"{where}: the image is not valid base64: {error}.", where) from error
        if len(content) > MAX_IMAGE_BYTES:
            raise _invalid(f"{where}: the image has {len(content)} bytes; {MAX_IMAGE_BYTES >> 20} MiB at most.", where)
        try:
            picture = self._album.picture(content)
        except ImageError as error:
            raise _invalid(f"{where}: the image cannot be read: {error}.", where) from error
        self._memory.pictures[picture.sha256] = picture
        return reference(picture.sha256)


def decoded(text: str) -> bytes:
    """Return the content of a base64 text, which may have white space. Raises `ValueError`."""
    return base64.b64decode(text.translate(_WITHOUT_SPACES), validate=True)


def reference(sha256_hex: str) -> dict[str, Any]:
    """Return the part of a recorded message that stands for the picture with this hash."""
    return {"type": "image_url", "image_url": {"url": REFERENCE + sha256_hex}}


def with_references(message: Mapping[str, Any], position: int, images: ImageReader) -> Mapping[str, Any]:
    """Return a message of chat completions with references in place of its images. Raises `ApiError`."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = []
    for place, part in enumerate(content):
        if part["type"] == "image_url":
            where = f"messages[{position}].content[{place}]"
            if message["role"] not in IMAGE_ROLES:
                raise wrong_role(message["role"], where)
            source = part["image_url"]
            part = images.from_url(source["url"] if isinstance(source, dict) else source, where)
        parts.append(part)
    return {**message, "content": parts}


def wrong_role(role: Any, where: str) -> ApiError:
    """Return the error for an image in a message that can have none."""
    return ApiError(
        f"{where} is an image in a message of the role {short_repr(role)}; users' messages and tools' have images.",
        param=where,
    )


def images_of(rendered: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the hash of each image in messages as the template receives them, in order."""
    for message in rendered:
        if not isinstance(message["content"], str):
            yield from (part["sha256"] for part in message["content"] if part["type"] == "image")


def _invalid(message: str, where: str) -> ApiError:
    return ApiError(message, code="invalid_image", param=where)
