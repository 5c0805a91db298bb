"""The images of a sequence, as transformers' own model takes them, to repeat an update.

In: image files and the ids of a sequence. Out: the arguments of the model's forward pass beside the ids: pixels by the
checkpoint's own image processor, and which ids stand for images. Nothing is shared with `models.images` and
`models.sight`.
"""

from __future__ import annotations

import functools
import inspect
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from sharpen.errors import ModelError
from sharpen.types import PictureSpan

Tensor = torch.Tensor

_TOKENS = ("image_token_id", "image_token_index")
_MARKS = ("mm_token_type_ids", "token_type_ids")
"""What models call the argument that says which ids stand for images: 1 there, else 0."""


class Pictures:
    """How a model takes images."""

    def __init__(self, folder: Path, module: Any) -> None:
        """Raises `ModelError` if the model says no id of image tokens."""
        config = module.config
        found = [value for name in _TOKENS if isinstance(value := getattr(config, name, None), int)]
        if not found:
            raise ModelError(f"{config.model_type} says no id of its image tokens")
        self._token = found[0]
        self._takes = inspect.signature(module.forward).parameters
        self._folder = folder

    @functools.cached_property
    def _processor(self) -> Any:
        from transformers import AutoImageProcessor

        try:
            return AutoImageProcessor.from_pretrained(self._folder, backend="pil", trust_remote_code=False)
        except (OSError, ValueError, ImportError) as error:
            raise ModelError(f"{self._folder} has no image processor that transformers can load: {error}") from error

    def arguments(self, ids_T: Tensor, spans: Sequence[PictureSpan], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the arguments for a sequence with these images. Raises `ModelError` if it has tokens of images outside
        of them: transformers would take these for images too."""
        shows_T = torch.zeros_like(ids_T, dtype=torch.int)
        for span in spans:
            shows_T[span.start : span.stop] = (ids_T[span.start : span.stop] == self._token).int()
        if spans and int(shows_T.sum()) != int((ids_T == self._token).sum()):
            raise ModelError("a token that stands for an image was sampled, where there is none")
        marks = {name: shows_T[None] for name in _MARKS if name in self._takes}
        read = [self._processor(images=[_opened(span.picture.data)], return_tensors="pt") for span in spans]
        names = [name for name in (read[0] if read else ()) if name in self._takes]
        tensors = {name: _joined([one[name] for one in read]) for name in names}
        return marks | {name: one.to(dtype) if one.is_floating_point() else one for name, one in tensors.items()}


def _opened(data: bytes) -> Any:
    """The first picture of a file, upright, in RGB, on white where it is transparent."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if image.mode == "I" or image.mode.startswith("I;16"):
        raise ModelError("an image has greys of 16 bits, which the plain loop does not read")
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """One batch; pixels of several sizes are padded to the largest."""
    if tensors[0].ndim != 4:
        return torch.cat(list(tensors))
    height, width = (max(one.shape[axis] for one in tensors) for axis in (2, 3))
    return torch.cat([pad(one, (0, width - one.shape[3], 0, height - one.shape[2])) for one in tensors])
