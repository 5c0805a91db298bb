"""The images of vLLM's requests: made into tensors by the model's own processor, and looked at by vLLM's tower.

In: a model's folder; requests with pictures. Out: the settings of a vLLM that is shown images, and its inputs. They go
in as vLLM's own processors would hand them on: ids with the image tokens written out, tensors, and the hash of each
image, by which vLLM keeps prefixes and what its tower saw apart. Its processors read no image themselves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sharpen.contracts import GenerateRequest
from sharpen.engine.requests import check_pictures
from sharpen.errors import ModelError, SamplingError
from sharpen.models.images import Eyes, eyes_of
from sharpen.models.pieces import Piece, pieces_of
from sharpen.models.table import missing_images_in_vllm
from sharpen.types import Picture, PictureSpan


class VLLMPictures:
    """How the model of one vLLM is shown images, or why it is not."""

    def __init__(self, model_path: str, config: Any) -> None:
        self._config = config
        self._eyes: Eyes | None = None
        self._lack = missing_images_in_vllm(config)
        if not self._lack:
            try:
                self._eyes = eyes_of(model_path, config)
            except ModelError as error:  # the folder has no processor
                self._lack = str(error)

    def settings(self, *, on_cpu: bool) -> dict[str, Any]:
        """Return vLLM's arguments. A model that is shown no images is loaded without its towers.

        The tensors have their mean and deviation already: vLLM 0.32 would by itself do that again. On a CPU a prompt
        must not be computed in parts, where vLLM's own encoder cache would cut it before an image.
        """
        if self._eyes is None:
            return {"language_model_only": bool(pieces_of(self._config) & {Piece.VISION, Piece.AUDIO})}
        return {
            "limit_mm_per_prompt": {"video": 0},
            "mm_device_do_normalize": False,
            "mm_processor_cache_gb": 0,
            "skip_mm_profiling": True,
            "hf_overrides": _overrides(self._config),
            **({"ec_manager_config": {"encoder_cache_manager_cls": _CACHE}} if on_cpu else {}),
        }

    def input(self, request: GenerateRequest) -> Any:
        """Return the input of a request with images, on any thread. Raises `SamplingError` if the model is shown none,
        or if they are not where the request's ids say, `ImageError` if one cannot be read."""
        eyes = self._eyes
        if eyes is None:
            raise SamplingError(f"the vLLM engine is given no images: {self._lack}")
        from vllm.inputs.engine import mm_input
        from vllm.multimodal.inputs import MultiModalKwargsItems

        check_pictures(request, eyes, both_ways=False)
        spans = request.pictures
        return mm_input(
            request.prompt_ids.tolist(),
            MultiModalKwargsItems({"image": [_tensors(eyes, span.picture) for span in spans]}),
            {"image": [span.picture.sha256 for span in spans]},
            {"image": [_place(request, span) for span in spans]},
        )


_CACHE = "sharpen.engine.vllm.encoder_cache.WholePrompts"


def _overrides(config: Any) -> dict[str, Any]:
    """Return what vLLM reads otherwise than transformers: whether the positions of an image's tokens in time, height
    and width take turns within a head. In transformers' Qwen3-VL they do, whatever the configuration says."""
    if config.model_type != "qwen3_vl":
        return {}
    return {"text_config": {"rope_parameters": {"mrope_interleaved": True}}}


def _tensors(eyes: Eyes, picture: Picture) -> Any:
    """Return the tensors of a picture as one item of vLLM's: patches in a row with their grid, or a whole image."""
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    features = eyes.features(picture)
    if "image_grid_thw" in features:
        fields = {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", features["image_grid_thw"].prod(-1)),
            "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }
    else:
        fields = {"pixel_values": MultiModalFieldConfig.batched("image")}
    (item,) = MultiModalKwargsItems.from_hf_inputs({name: features[name] for name in fields}, fields)["image"]
    return item


def _place(request: GenerateRequest, span: PictureSpan) -> Any:
    """Return where a picture is. Tokens between its image tokens (ends of rows) stay text."""
    import torch
    from vllm.multimodal.inputs import PlaceholderRange

    within = request.prompt_ids[span.start : span.stop]
    shown = within == within[0]
    return PlaceholderRange(
        offset=span.start,
        length=span.length,
        is_embed=None if shown.all() else torch.from_numpy(np.ascontiguousarray(shown)),
    )
