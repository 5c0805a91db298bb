"""The formats of a model, from its files: what is found, what is said, and what vLLM is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sharpen.config.public import TunerModelConfig
from sharpen.errors import ConfigError, ModelError
from sharpen.placement.model_formats import check_formats, formats_line, model_formats, read_template, serve_options

HERMES = '<tool_call>{"name": , "arguments": }</tool_call><think>'


def model(folder: Path, **settings: Any) -> TunerModelConfig:
    return TunerModelConfig(model_path=str(folder), max_model_len=64, **settings)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", HERMES),
        ("chat_template.json", json.dumps({"chat_template": HERMES})),
        ("tokenizer_config.json", json.dumps({"chat_template": HERMES})),
        ("tokenizer_config.json", json.dumps({"chat_template": [{"name": "tool_use", "template": HERMES}]})),
    ],
)
def test_a_template_is_found_wherever_models_keep_it(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    formats = model_formats(model(tmp_path), tmp_path)
    assert (formats.tool and formats.tool.name, formats.reasoning and formats.reasoning.name) == ("hermes", "qwen3")
    assert serve_options(formats) == " --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3"
    line = formats_line(model(tmp_path), tmp_path)
    assert "hermes (found in the chat template)" in line
    assert "qwen3 (found in the chat template)" in line


def test_named_formats_win_and_none_is_none(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(HERMES)
    named = model(tmp_path, tool_call_parser="openai", reasoning_parser=None)
    formats = model_formats(named, tmp_path)
    assert formats.tool is not None
    assert (formats.tool.name, formats.reasoning) == ("harmony", None)
    assert serve_options(formats) == " --enable-auto-tool-choice --tool-call-parser openai"
    assert "harmony (as set), reasoning none (as set)" in formats_line(named, tmp_path)


def test_a_template_without_a_known_format(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert read_template(tmp_path) == ""
    assert serve_options(model_formats(model(tmp_path), tmp_path)) == ""
    assert "tool calls none (no known format in the chat template)" in formats_line(model(tmp_path), tmp_path)


def test_files_that_are_no_templates(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"chat template.*cannot be read"):
        read_template(tmp_path)


@pytest.mark.parametrize(
    "name", ["qwen3_xml", "openai", "llama4_json", "llama4_pythonic", "lfm2", "glm47", "kimi_k2", "deepseek_v31"]
)
def test_vllm_s_names_are_known(tmp_path: Path, name: str) -> None:
    check_formats(model(tmp_path, tool_call_parser=name))


@pytest.mark.parametrize(("setting", "value"), [("tool_call_parser", "json"), ("reasoning_parser", "hermes")])
def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path: Path, setting: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"auxiliary_models\.x\.{setting} is '{value}'.*'(harmony|qwen3)'"):
        check_formats(model(tmp_path, **{setting: value}), "auxiliary_models.x")
