"""The table of families: what is refused, by every part that could load a model, before a weight is read (TRAPS 30)."""

import re
from pathlib import Path

import pytest
import torch
from tiny import SETTINGS, make_config
from transformers import (
    CONFIG_MAPPING,
    FalconH1Config,
    Gemma2Config,
    Gemma3Config,
    Gemma4TextConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    MambaConfig,
    NemotronHConfig,
    Phi3Config,
    Qwen3Config,
    Qwen3MoeConfig,
    StableLmConfig,
    T5Config,
)

from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.engine.vllm.start import not_started, read_skeleton, refuse_on_cpu
from sharpen.errors import ModelError
from sharpen.learning.trainer.model import TrainedModel
from sharpen.models.pieces import HAS, Piece, auto_class
from sharpen.models.table import FAMILIES, family_of, missing_of, needs_of, refuse_unsupported

PARTS = ("engine", "vllm", "trainer")


@pytest.mark.parametrize(
    ("config", "pieces"),
    [
        (Qwen3Config(), set()),
        (Phi3Config(), set()),
        (Gemma2Config(), {Piece.SOFT_CAPS}),
        (Gemma3Config(), {Piece.VISION}),
        (Gemma4TextConfig(), {Piece.HEAD_SIZES}),
        (Gemma4TextConfig(num_kv_shared_layers=10), {Piece.HEAD_SIZES, Piece.SHARED_KEYS}),
        (GptOssConfig(), {Piece.EXPERTS, Piece.SINKS}),
        (Lfm2Config(layer_types=["conv", "full_attention"], num_hidden_layers=2), {Piece.CONVOLUTION}),
        (GraniteMoeHybridConfig(num_local_experts=0), {Piece.RECURRENT}),
        (GraniteMoeHybridConfig(), {Piece.RECURRENT, Piece.EXPERTS}),
        (FalconH1Config(), {Piece.RECURRENT}),
        (JambaConfig(num_experts=1), {Piece.RECURRENT}),
        (NemotronHConfig(layers_block_type=["mamba", "attention", "mlp"]), {Piece.RECURRENT}),
        (NemotronHConfig(layers_block_type=["mamba", "attention", "moe"]), {Piece.RECURRENT, Piece.EXPERTS}),
        (Qwen3MoeConfig(), {Piece.EXPERTS}),
        (MambaConfig(), {Piece.RECURRENT, Piece.OTHER_LAYERS}),
    ],
)
def test_what_a_configuration_needs(config, pieces):
    assert needs_of(config) == pieces


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_rows_are_of_types_that_transformers_has_and_need_all_that_their_defaults_show(family):
    """Break: leave a piece out of a row."""
    for kind in family.types:
        config = CONFIG_MAPPING[kind]()
        assert family_of(config) is family
        assert needs_of(config) <= family.needs


def test_no_type_is_in_two_rows():
    kinds = [kind for family in FAMILIES for kind in family.types]
    assert len(set(kinds)) == len(kinds)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_refused_with_what_is_missing_and_only_then(family, part):
    config = CONFIG_MAPPING[family.types[0]]()
    missing = needs_of(config) - HAS[part]
    if not missing and (part != "vllm" or family.in_vllm):
        refuse_unsupported(config, "m", part)
        return
    with pytest.raises(ModelError) as raised:
        refuse_unsupported(config, "m", part)
    assert all(piece in str(raised.value) for piece in {*missing, family.name, config.model_type})


def test_a_family_without_a_row_is_refused_only_for_what_its_configuration_shows():
    """Break: refuse all that have no row."""
    refuse_unsupported(StableLmConfig(), "m", *PARTS)
    assert not family_of(StableLmConfig()).listed
    with pytest.raises(ModelError, match=r"^m .model type 'mamba'.: .*layers of a kind"):
        refuse_unsupported(MambaConfig(), "m", "trainer")
    assert "encoder-decoder" in missing_of(T5Config(), "engine")


def test_a_kind_of_layer_that_nobody_knows_is_refused():
    """Break: take every unknown kind for attention."""
    config = Qwen3Config()
    config.layer_types = ["something_new"] * config.num_hidden_layers
    assert needs_of(config) == {Piece.OTHER_LAYERS}
    assert all(missing_of(config, part) for part in ("engine", "trainer"))


def load_engine(folder: Path) -> None:
    EmbeddedEngine.from_pretrained(str(folder), max_model_len=64)


def load_vllm(folder: Path) -> None:
    read_skeleton(str(folder), 64)


def load_trainer(folder: Path) -> None:
    TrainedModel.load(folder, dtype="float32", device=torch.device("cpu"))


@pytest.mark.parametrize("load", [load_engine, load_vllm, load_trainer])
def test_trap_30_engines_and_trainer_refuse_them_by_the_configuration_alone(tmp_path, load):
    """There is not one weight in the folder. Break: drop `refuse_unsupported` from one of the three."""
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="encoder-decoder"):
        load(tmp_path)


def test_vllm_refuses_towers_without_their_package(tmp_path):
    """torchvision is not installed here. Break: drop the check from `read_skeleton`."""
    for kind in ("gemma3", "qwen3_5_text"):
        make_config(kind).save_pretrained(tmp_path / kind)
        with pytest.raises(ModelError, match=rf"{kind}.* has towers, .* torchvision, which is not installed"):
            read_skeleton(str(tmp_path / kind), 64)


def test_vllm_refuses_gemma_3n_with_towers_without_timm(tmp_path, monkeypatch):
    """vLLM's worker would die of an ImportError. A folder stands in for torchvision, which is asked for first. Break:
    drop the check from `read_skeleton`."""
    (tmp_path / "packages" / "torchvision").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    make_config("gemma3n").save_pretrained(tmp_path / "whole")
    with pytest.raises(ModelError, match=r"gemma3n.* imports timm, .* not installed: install timm, .* embedded"):
        read_skeleton(str(tmp_path / "whole"), 64)
    make_config("gemma3n_text").save_pretrained(tmp_path / "text")
    read_skeleton(str(tmp_path / "text"), 64)


def test_an_engine_that_did_not_start_names_the_experts_where_vllm_records_them():
    """What raises in vLLM's own worker does not reach its message. Break: leave the hint out of `not_started`."""
    error = RuntimeError("Engine core initialization failed")
    with_experts = not_started(error, returns_experts=True)
    assert re.search(r"initialization failed .*recording experts may be .*engine\.type to embedded", with_experts)
    assert "experts" not in not_started(error, returns_experts=False)


def test_adapters_beside_a_mixture_of_experts_are_refused_behind_vllm(tmp_path):
    """vLLM's processes would die of the first request on a CPU. Break: drop the check from `read_skeleton`."""
    make_config("qwen3_moe").save_pretrained(tmp_path)
    read_skeleton(str(tmp_path), 64)
    with pytest.raises(ModelError, match=r"qwen3_moe.*trainer\.lora.*Triton.*engine\.type to embedded"):
        read_skeleton(str(tmp_path), 64, adapters=True)


def test_a_family_that_vllm_has_not_is_refused_before_it_starts(tmp_path):
    make_config("lfm3").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"LFM3.*vLLM.*does not serve.*engine\.type embedded"):
        read_skeleton(str(tmp_path), 64)
    assert not missing_of(make_config("lfm3"), "engine")


def test_gated_delta_nets_behind_vllm_on_a_cpu_need_bfloat16():
    """vLLM's processes die of the first request in float32 ("CPU GDN attention requires BF16")."""
    with pytest.raises(ModelError, match=r"qwen3_5_text.*only in bfloat16, not in float32: set engine\.dtype"):
        refuse_on_cpu(make_config("qwen3_5_text"), "m", "float32")
    refuse_on_cpu(make_config("qwen3_5_text"), "m", "bfloat16")
    refuse_on_cpu(make_config("lfm2"), "m", "float32")
    refuse_on_cpu(make_config("granitemoehybrid"), "m", "float32")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.not_on_cpu], ids=lambda family: family.name)
def test_families_that_vllms_build_for_cpus_cannot_serve_are_refused_there_with_the_reason(family):
    """Break: drop the check from `refuse_on_cpu`."""
    with pytest.raises(ModelError, match=rf"{family.name}.*on a CPU: .*{re.escape(family.not_on_cpu)}.*embedded"):
        refuse_on_cpu(CONFIG_MAPPING[family.types[0]](), "m", "bfloat16")


@pytest.mark.parametrize("kind", [kind for family in FAMILIES for kind in family.types])
def test_whatever_is_supported_has_a_tiny_model_in_the_suite_of_all_families(kind):
    """So that `make test-models` leaves none out. Break: take one out of `tiny.SETTINGS`."""
    supported = not any(missing_of(CONFIG_MAPPING[kind](), part) for part in ("engine", "trainer"))
    assert kind in SETTINGS or not supported
    if kind in SETTINGS:
        assert needs_of(make_config(kind)) <= family_of(make_config(kind)).needs


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"model_type": "qwen3"}', "AutoModelForCausalLM"),
        ('{"model_type": "qwen3_vl", "vision_config": {}}', "AutoModelForImageTextToText"),
        ('{"vision_config": null}', "AutoModelForCausalLM"),
        ("[]", "AutoModelForCausalLM"),
        ("{", "AutoModelForCausalLM"),
    ],
)
def test_the_class_that_loads_a_checkpoint_is_named_by_its_towers(tmp_path, content, expected):
    (tmp_path / "config.json").write_text(content)
    assert auto_class(tmp_path) == expected
    assert auto_class(tmp_path / "nowhere") == "AutoModelForCausalLM"
