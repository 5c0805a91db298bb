"""Images, and tiny checkpoints that read them: with a processor, a chat template, and image tokens in the tokenizer.

In: a model type. Out: a folder with all that the real checkpoint has.
"""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tiny import make_module
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerFast

from sharpen.models.images import Eyes
from sharpen.types import Picture, PictureSpan

_CONTENT = (
    "{%- if message.content is string %}{{ message.content }}{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}IMAGE{%- else %}{{ part.text }}{%- endif %}{%- endfor %}{%- endif %}"
)
TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    + _CONTENT
    + "{{ '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
"""ChatML; IMAGE is what the family writes for an image."""

_QWEN_TOKENS = {
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
}
_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_GEMMA_TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
IMAGES = {
    **dict.fromkeys(("qwen3_vl", "qwen3_5", "qwen3_5_moe"), _QWEN_IMAGE),
    "gemma3": "<start_of_image>",
    "gemma4": "<image_soft_token>",
    "mistral3": "[IMG]",
}
"""What the chat template of each type writes for an image."""
SEEING = tuple(IMAGES)
"""The model types that `make_seeing_checkpoint` makes."""


def bomb(width: int, height: int) -> bytes:
    """A PNG of some 70 bytes that says it has so many pixels."""
    parts = {b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT": zlib.compress(b""), b"IEND": b""}
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(part)) + kind + part + struct.pack(">I", zlib.crc32(kind + part))
        for kind, part in parts.items()
    )


def with_scans(number: int) -> bytes:
    """A JPEG whose last scan follows so often."""
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (200, 10, 10)).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * number + data[-2:]


ENTITIES = b"""<?xml version="1.0"?><!DOCTYPE svg [<!ENTITY a "aaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>
<svg xmlns="http://www.w3.org/2000/svg"><text>&b;</text></svg>"""
"""An SVG whose text multiplies."""


def moving(num_frames: int) -> bytes:
    """A GIF of so many frames, the first of which is red."""
    frames = [Image.new("RGB", (20, 12), ((200, 10, 10), (10, 10, 200))[number % 2]) for number in range(num_frames)]
    frames[0].putpixel((0, 0), (10, 200, 10))
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


def draw(seed: int, width: int = 16, height: int = 16) -> Picture:
    """An image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return Picture.of(file.getvalue())


def make_seeing_checkpoint(kind: str, folder: Path, toy_model: Path, *, seed: int = 0, wide: bool = False) -> Path:
    """A tiny checkpoint of this type. Its tokenizer is that of `toy_model`, with the tokens of images. `wide`: with
    heads that vLLM serves."""
    tokenizer = _tokenizer(kind, toy_model)
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", IMAGES[kind])
    module = make_module(kind, seed, wide, **_fields(kind, tokenizer))
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.any():  # Gemma 3's projection: all images would be the same
                parameter.normal_(0, 0.2)
    module.to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _image_processor(kind).save_pretrained(folder)
    if kind in _PROCESSORS:
        (folder / "processor_config.json").write_text(json.dumps(_PROCESSORS[kind]))
    return folder


def _tokenizer(kind: str, toy_model: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(toy_model, extra_special_tokens=_tokens(kind))


_MISTRAL_TOKENS = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}


def _tokens(kind: str) -> dict[str, str]:
    if kind == "mistral3":
        return _MISTRAL_TOKENS
    return _QWEN_TOKENS if kind.startswith("qwen") else _GEMMA_TOKENS


def _fields(kind: str, tokenizer: Any) -> dict[str, Any]:
    """Return the configuration's fields about image tokens."""
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in _tokens(kind).items()}
    if kind.startswith("qwen"):
        return {f"{name}_id": number for name, number in ids.items()}
    if kind == "gemma4":
        return {"image_token_id": ids["image_token"]}
    if kind == "mistral3":
        return {"image_token_index": ids["image_token"], "spatial_merge_size": 2}
    return {"image_token_index": ids["image_token"], "mm_tokens_per_image": 16}


_PROCESSORS = {
    "gemma3": {"processor_class": "Gemma3Processor", "image_seq_length": 16},
}
"""What the types' `processor_config.json` says."""


def written(eyes: Eyes) -> str:
    """What the chat template of a model with these eyes writes for an image."""
    return next(text for text in IMAGES.values() if eyes.placeholder in text)


def _image_processor(kind: str) -> Any:
    """Qwen's: patches of 4 pixels, four of which are one token; an image of 16 x 16 pixels is 4 tokens."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    if kind == "mistral3":  # a token for 8 x 8 pixels, and one at the end of each row
        return PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size={"height": 4, "width": 4})
    if kind == "gemma3":
        return Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    if kind == "gemma4":
        return Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70)
    return Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=4096)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One batch; images of several sizes are padded, as Mistral 3's processor does."""
    if tensors[0].ndim != 4:
        return torch.cat(list(tensors))
    height, width = (max(one.shape[axis] for one in tensors) for axis in (2, 3))
    return torch.cat([pad(one, (0, width - one.shape[3], 0, height - one.shape[2])) for one in tensors])


def own_logprobs(
    own: Any, eyes: Eyes, ids_T: Any, pictures: Sequence[PictureSpan], targets: Sequence[int]
) -> torch.Tensor:
    """The logprobs of the ids at `targets` by transformers' own forward pass over the pixels."""
    ids = torch.from_numpy(np.asarray(ids_T).astype(np.int64))
    features = [eyes.features(span.picture) for span in pictures]
    kinds = (
        "token_type_ids" if own.config.model_type == "gemma3" else "mm_token_type_ids"
    )  # as its processor names them
    logits = own(
        input_ids=ids[None],
        **{kinds: (ids == eyes.image_token_id).int()[None]},
        **{name: _joined([one[name] for one in features]) for name in (features[0] if features else ())},
    ).logits[0]
    at = torch.tensor(list(targets), dtype=torch.long)
    return logits.log_softmax(-1)[at - 1, ids[at]]
