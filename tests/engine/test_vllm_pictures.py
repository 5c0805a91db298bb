"""Which models vLLM is given no images of, and why."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from picture_toys import draw
from tiny import make_config

from sharpen.contracts import GenerateRequest
from sharpen.engine.vllm.pictures import VLLMPictures
from sharpen.errors import SamplingError
from sharpen.types import PictureSpan, Sampling


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("gemma3", r"both ways in Gemma 3, .*vLLM 0\.32.*engine\.type to embedded"),
        ("qwen3_5", r"those of Qwen3\.5 are not tested with vLLM"),
        ("qwen3_vl", "holds no image processor"),
        ("qwen3", "it has no vision tower"),
    ],
)
def test_they_are_served_without_towers_and_images_are_refused_by_name(tmp_path: Path, kind: str, why: str) -> None:
    """The third has no processor in its folder. Red when the row of a family says that it is shown images."""
    config = make_config(kind)
    config.save_pretrained(tmp_path)
    pictures = VLLMPictures(str(tmp_path), config)
    assert pictures.settings(on_cpu=True) == {"language_model_only": kind != "qwen3"}
    span = PictureSpan(picture=draw(1), start=0, length=1)
    asked = GenerateRequest(prompt_ids=np.zeros(2, np.int32), sampling=Sampling(), noise=0, pictures=(span,))
    with pytest.raises(SamplingError, match=why):
        pictures.input(asked)
