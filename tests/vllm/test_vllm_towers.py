"""A checkpoint with eyes as a text agent behind vLLM: new weights arrive under the names that vLLM knows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText
from vllm_served import MODEL, request, scored, start

from sharpen.models.modules import text_parameters

TEXT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the smallest of vLLM's attention on a CPU
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": 2,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
EYES = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 4}
GEMMA: dict[str, Any] = {
    "text_config": {
        **TEXT,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 32,
    },
    "vision_config": {**EYES, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16},
}
ASKED = [request([7, 8, 9], noise=3), request([(7 * i + 3) % 500 for i in range(40)], max_tokens=8, temperature=0.7)]


def make(folder: Path) -> None:
    """A random checkpoint with eyes, and the quickstart's tokenizer."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING["gemma3"](**GEMMA)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    for file in MODEL.glob("*token*"):
        shutil.copyfile(file, folder / file.name)


def check(served: Any, module: Any, version: int) -> None:
    for one, generation in zip(ASKED, served.generate(*ASKED), strict=True):
        assert set(generation.versions.tolist()) == {version}
        np.testing.assert_allclose(generation.logprobs, scored(module, one, generation), atol=1e-4)


def test_new_weights_of_the_text_arrive_and_the_towers_get_none(tmp_path):
    """Red when the names of the plain text model are sent."""
    make(tmp_path)
    module = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    served = start(model_path=str(tmp_path))
    try:
        check(served, module, 0)
        with torch.no_grad():
            for _, parameter in text_parameters(module):
                parameter.add_(torch.randn_like(parameter) * 0.1)
        served.run(served.engine.load(1, dict(text_parameters(module))))
        check(served, module, 1)
    finally:
        served.run(served.engine.close())
        served.thread.close()
