"""Kernels that are not installed: said once, by the names that pip knows, where there is a device to use them."""

import logging

import pytest
import torch
from hybrid_toys import make_hybrid
from trainer_toys import make_model
from transformers import AutoConfig

from sharpen.models.modules import _say_once, load_module, slower_way

FALLBACK = "falling back to its reference"


@pytest.mark.parametrize(
    ("family", "packages"),
    [
        ("qwen3_5_text", {"causal-conv1d", "flash-linear-attention"}),
        ("kimi_linear", {"causal-conv1d", "flash-linear-attention"}),
        ("bamba", {"causal-conv1d", "mamba-ssm"}),
        ("jamba", {"causal-conv1d", "mamba-ssm"}),
        ("lfm2", {"causal-conv1d"}),
    ],
)
def test_a_family_names_the_packages_it_has_a_use_for(family, packages):
    line = slower_way(make_hybrid(family), "cuda")
    assert "slower" in line
    assert set(line.partition("pip install ")[2].rstrip(")").split()) == packages


def test_nothing_is_missing_on_a_cpu_nor_without_such_layers():
    assert slower_way(make_hybrid("bamba"), "cpu") == ""
    assert slower_way(make_model("qwen3"), "cuda") == ""


def test_it_is_said_once(caplog):
    for _ in range(2):
        _say_once("a model: its layers are slower")
    assert [record.getMessage() for record in caplog.records] == ["a model: its layers are slower"]


def test_transformers_lines_for_each_function_are_left_out_once_a_model_is_loaded(tmp_path, caplog):
    """Its other messages are not. Break: no filter in `load_module`."""
    make_hybrid("lfm2").save_pretrained(tmp_path)
    load_module(tmp_path, AutoConfig.from_pretrained(tmp_path), torch.float32, "cpu")
    theirs = logging.getLogger("transformers.integrations.hub_kernels")
    theirs.warning("`causal_conv1d_fn` is %s PyTorch implementation", FALLBACK)
    theirs.warning("a kernel of the hub does not load")
    assert [r.getMessage() for r in caplog.records if r.name == theirs.name] == ["a kernel of the hub does not load"]
