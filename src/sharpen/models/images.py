"""Reads images as a model's own processor does: into image tokens of a prompt, and into the tensors of its tower.

In: a checkpoint's folder; image files. Out: the text and token ids that stand for them, and the tensors that the tower
takes. Transformers' processors that compute with Pillow are used everywhere, so that engine and trainer, on whatever
machine, see the same pixels.
"""

from __future__ import annotations

import io
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sharpen.errors import ImageError, ModelError
from sharpen.models.configuration import load_tokenizer, reason_of
from sharpen.models.pieces import Piece, pieces_of
from sharpen.models.table import missing_images
from sharpen.types import IntArray, Picture, PictureSpan

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""The formats that are read; of a moving image its first frame."""
MAX_PIXELS = 64 * 2**20
"""Larger images are refused before they are unpacked: a file of a few kilobytes can hold gigabytes of pixels."""

MAX_SCANS = 64
"""Of a JPEG, which is drawn anew with each: cameras and programs make up to 10 or so, 95 bytes are one more."""

_MARKER = re.compile(rb"\xff+([\x01-\xcf\xd8-\xfe])")
_START_OF_SCAN, _END_OF_IMAGE, _WITHOUT_LENGTH = b"\xda", b"\xd9", (b"\x01", b"\xd8")
_CACHED_BYTES = 256 * 2**20
_KEPT_TEXTS = 256
Features = Mapping[str, "torch.Tensor"]
"""What a model's `get_image_features` takes for one image, by argument."""


def open_image(data: bytes) -> Image:
    """Return an image file's pixels as RGB, upright, on white where they are transparent. Raises `ImageError` if it
    cannot be read."""
    from PIL import ExifTags, Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise ImageError(f"an image of {image.width}x{image.height} pixels is too large: at most {MAX_PIXELS}")
        if _has_many_scans(data):
            raise ImageError(f"a JPEG of {len(data)} bytes has more than {MAX_SCANS} scans, each a copy of the whole")
        return _turned(_rgb(image), image.getexif().get(ExifTags.Base.Orientation))
    except ImageError:
        raise
    except UnidentifiedImageError:
        raise ImageError(f"a file of {len(data)} bytes is no image that is read here ({', '.join(FORMATS)})") from None
    except Exception as error:  # decoders raise many kinds of errors for files that are damaged
        raise ImageError(f"an image of {len(data)} bytes cannot be decoded: {error!r}") from error


def small_copy(data: bytes, side: int) -> bytes:
    """Return an image file with at most `side` pixels each way, as PNG or JPEG, whichever is smaller. Raises
    `ImageError` if the image cannot be read."""
    image = open_image(data)
    image.thumbnail((side, side))
    files = []
    for kind in ("PNG", "JPEG"):
        file = io.BytesIO()
        image.save(file, kind)
        files.append(file.getvalue())
    return min(files, key=len)


def size_of(data: bytes) -> tuple[int, int] | None:
    """Return the width and height that an image file says it has, before it is turned upright; None if it says none."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return image.size
    except Exception:  # as in `open_image`
        return None


def _has_many_scans(data: bytes) -> bool:
    """Whether the first image of a JPEG file has more than `MAX_SCANS` scans. Between the segments, each with its
    length (a few markers have none), is what was coded, in which no marker stands."""
    place, num_scans = 2, 0
    while data.startswith(b"\xff\xd8") and num_scans <= MAX_SCANS and (marker := _MARKER.search(data, place)):
        if marker[1] == _END_OF_IMAGE:
            break
        num_scans += marker[1] == _START_OF_SCAN
        place = marker.end()
        if marker[1] not in _WITHOUT_LENGTH:
            place += int.from_bytes(data[place : place + 2], "big")
    return num_scans > MAX_SCANS


def _rgb(image: Image) -> Image:
    """Return an image as 8 bits of red, green and blue. Pillow's own conversion cuts off greys of 16 bits, and shows
    colours that are transparent."""
    from PIL import Image

    if image.mode == "I" or image.mode.startswith("I;16"):
        grey = np.asarray(image).clip(0, 65535) // 257
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    colours = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", colours.size, "white"), colours).convert("RGB")


def _turned(image: Image, orientation: object) -> Image:
    """Return an image upright, by its EXIF's orientation. The rest of the EXIF, often damaged, is not looked at."""
    from PIL import Image

    turns = Image.Transpose
    flips = (turns.FLIP_LEFT_RIGHT, turns.ROTATE_180, turns.FLIP_TOP_BOTTOM, turns.TRANSPOSE)
    by_orientation = dict(enumerate((*flips, turns.ROTATE_270, turns.TRANSVERSE, turns.ROTATE_90), start=2))
    return image.transpose(by_orientation[orientation]) if orientation in by_orientation else image


class Eyes:
    """How a model reads images. May be used by several threads."""

    def __init__(self, processor: Any, config: Any) -> None:
        self._processor = processor
        self._lock = threading.Lock()
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._features: OrderedDict[str, Features] = OrderedDict()
        self.placeholder: str = processor.image_token
        """What stands for one image in the text that the chat template writes."""
        self.image_token_id: int = config.image_token_id
        """The id that the tower's output replaces, token by token."""
        self._image_token: str = processor.tokenizer.convert_ids_to_tokens(self.image_token_id)

    def expand_text(self, text: str, pictures: Sequence[Picture]) -> str:
        """Replace each placeholder by what the processor writes for its picture. Raises `ImageError` unless there is
        one for each picture."""
        parts = text.split(self.placeholder)
        if len(parts) - 1 != len(pictures):
            raise ImageError(
                f"the rendered prompt has {len(parts) - 1} times {self.placeholder!r} for {len(pictures)} images: "
                "there must be one for each, so no message may contain it as text"
            )
        written = [self._text(picture) for picture in pictures]
        return "".join(part + text for part, text in zip(parts, [*written, ""], strict=True))

    def spans(self, ids: Sequence[int] | IntArray, pictures: Sequence[Picture]) -> tuple[PictureSpan, ...]:
        """Return where the tokens of the pictures lie in the ids of an expanded text. Raises `ImageError` if they do
        not hold exactly these."""
        at = np.flatnonzero(np.asarray(ids) == self.image_token_id)
        counts = [self.num_tokens(picture) for picture in pictures]
        if len(at) != sum(counts):
            raise ImageError(f"the prompt has {len(at)} image tokens, but its images are {sum(counts)}")
        found, first = [], 0
        for picture, count in zip(pictures, counts, strict=True):
            own = at[first : first + count]
            found.append(PictureSpan(picture=picture, start=int(own[0]), length=int(own[-1] - own[0]) + 1))
            first += count
        return tuple(found)

    def expand(self, text: str, pictures: Sequence[Picture]) -> tuple[IntArray, tuple[PictureSpan, ...]]:
        """Return the ids of a rendered prompt with its images, and where they lie."""
        expanded = self.expand_text(text, pictures)
        ids = np.array(self._processor.tokenizer(expanded, add_special_tokens=False)["input_ids"], np.int32)
        return ids, self.spans(ids, pictures)

    def num_tokens(self, picture: Picture) -> int:
        """Return how many image tokens stand for a picture. Raises `ImageError` if it cannot be read."""
        return self._text(picture).count(self._image_token)

    def features(self, picture: Picture) -> Features:
        """Return the tensors of a picture for the model's tower. Raises `ImageError` if it cannot be read."""
        with self._lock:
            if picture.sha256 in self._features:
                self._features.move_to_end(picture.sha256)
                return self._features[picture.sha256]
        return self._read(picture)[0]

    def _text(self, picture: Picture) -> str:
        with self._lock:
            text = self._texts.get(picture.sha256)
        return self._read(picture)[1] if text is None else text

    def _read(self, picture: Picture) -> tuple[Features, str]:
        """Read a picture, and keep its tensors and what stands for it in a text."""
        image = open_image(picture.data)
        tensors: Features
        try:
            tensors, (text,) = self._processor.read([image])
        except Exception as error:  # such as its shape
            raise ImageError(f"the model cannot read an image of {image.width}x{image.height}: {error}") from error
        with self._lock:
            self._texts[picture.sha256] = text
            while len(self._texts) > _KEPT_TEXTS:
                self._texts.popitem(last=False)
            self._features[picture.sha256] = tensors
            while len(self._features) > 1 and _num_bytes(self._features.values()) > _CACHED_BYTES:
                self._features.popitem(last=False)
        return tensors, text


def eyes_of(checkpoint: str | Path, config: Any) -> Eyes | None:
    """Return how the model in a folder reads images; None if it has no vision tower. Raises `ModelError` if its images
    are not read here, or its processor's files are missing."""
    if Piece.VISION not in pieces_of(config):
        return None
    if missing := missing_images(config):
        raise ModelError(f"no images can be shown to {checkpoint}: {missing}; its text is served")
    return Eyes(_processor(Path(checkpoint), config), config)


class RowReader:
    """The processor of Mistral 3: an image token for each square of patches, and a token at the end of each row.
    Transformers' own cannot be imported without torchvision."""

    image_token, row_end, image_end = "[IMG]", "[IMG_BREAK]", "[IMG_END]"

    def __init__(self, images: Any, tokenizer: Any, side: int) -> None:
        """`images` is the image processor; `side` the pixels of a square."""
        self.tokenizer = tokenizer
        self._images, self._side = images, side

    def read(self, images: list[Image]) -> tuple[Features, list[str]]:
        """Return the tensors of images, and what stands for each in a text."""
        tensors = self._images(images, patch_size={"height": self._side, "width": self._side}, return_tensors="pt")
        return tensors, [self._text(*size) for size in tensors["image_sizes"].tolist()]

    def _text(self, height: int, width: int) -> str:
        row = self.image_token * (width // self._side)
        return self.row_end.join([row] * (height // self._side)) + self.image_end


def _processor(folder: Path, config: Any) -> Any:
    """Return a checkpoint's processor, for images alone: that of videos would need torchvision."""
    if config.model_type == "mistral3":
        side = config.vision_config.patch_size * config.spatial_merge_size
        return RowReader(_image_processor(folder), load_tokenizer(folder), side)
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    plain: Any = PROCESSOR_MAPPING[type(config)]
    if not hasattr(plain, "_process_images"):
        raise ModelError(
            f"images cannot be read with transformers {transformers.__version__}, whose processors are of an older "
            "kind: install a newer one"
        )

    class ImageReader(plain):  # type: ignore[misc]
        """The processor without the parts that are None."""

        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(name, argument)

        def read(self, images: list[Image]) -> tuple[Features, list[str]]:
            """Return the tensors of images, and what stands for each in a text."""
            settings = self._merge_kwargs(self.valid_processor_kwargs, return_tensors="pt")["images_kwargs"]
            tensors, texts = self._process_images(images, **settings)
            return {name: tensors[name] for name in tensors if name not in self.unused_input_names}, texts

    images = _image_processor(folder)
    has_settings = (folder / "processor_config.json").is_file()
    settings, _ = ImageReader.get_processor_dict(folder) if has_settings else ({}, {})
    parts = {"image_processor": images, "tokenizer": load_tokenizer(folder)}
    return ImageReader.from_args_and_dict([parts.get(name) for name in ImageReader.get_attributes()], settings)


def _image_processor(folder: Path) -> Any:
    """Return what makes tensors of images for a checkpoint. Raises `ModelError` if the folder has none."""
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
    except ImportError as error:
        raise ModelError(f"the image processor of {folder} needs packages that are not installed: {error}") from error
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{folder} holds no image processor ({type(error).__name__}: {reason_of(error)}): copy "
            "preprocessor_config.json, or processor_config.json, of the original model there"
        ) from error


def _num_bytes(cached: Any) -> int:
    return sum(tensor.numel() * tensor.itemsize for features in cached for tensor in features.values())
