"""A run that started when the parsers had names as defaults goes on with them, unless one is chosen now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sharpen.config.load import ResolvedConfig, resolve
from sharpen.run.former_formats import with_former_formats

TOOL, REASONING, OTHER = "model.tool_call_parser", "model.reasoning_parser", "auxiliary_models.a.reasoning_parser"


def now(folder: Path, **settings: Any) -> ResolvedConfig:
    given = {
        "train_dataset": {"path": "d"},
        "model": {"model_path": "m", "max_model_len": 64},
        "auxiliary_models": {"a": {"model_path": "m", "max_model_len": 64, "base_url": "http://host/v1"}},
        "project": "p",
        "name": "r",
        "checkpoint_root_dir": str(folder),
    }
    return resolve(None, settings, given)


def started(folder: Path, **entries: tuple[str | None, str]) -> None:
    recorded = {
        name.replace("__", "."): {"value": value, "origin": origin} for name, (value, origin) in entries.items()
    }
    (folder / "p" / "r").mkdir(parents=True)
    (folder / "p" / "r" / "resolved.json").write_text(json.dumps(recorded))


def test_former_defaults_stay(tmp_path: Path) -> None:
    started(
        tmp_path,
        model__tool_call_parser=("hermes", "default"),
        model__reasoning_parser=("deepseek_r1", "default"),
        auxiliary_models__a__reasoning_parser=("deepseek_r1", "default"),
    )
    kept = with_former_formats(now(tmp_path))
    assert (kept.config.model.tool_call_parser, kept.config.model.reasoning_parser) == ("hermes", "deepseek_r1")
    assert kept.config.auxiliary_models["a"].reasoning_parser == "deepseek_r1"
    assert kept.config.auxiliary_models["a"].tool_call_parser == "auto"
    assert not {"reasoning_parser"} & kept.config.auxiliary_models["a"].model_fields_set
    assert [notice.split(",")[0] for notice in kept.notices] == [
        f"{TOOL} stays hermes",
        f"{REASONING} stays deepseek_r1",
        f"{OTHER} stays deepseek_r1",
    ]


@pytest.mark.parametrize("recorded", [("auto", "default"), ("hermes", "argument")])
def test_what_was_chosen_or_found_is_compared_as_it_is(tmp_path: Path, recorded: tuple[str, str]) -> None:
    started(tmp_path, model__tool_call_parser=recorded)
    assert with_former_formats(now(tmp_path)) == now(tmp_path)


def test_what_is_chosen_now_wins(tmp_path: Path) -> None:
    started(tmp_path, model__tool_call_parser=("hermes", "default"))
    chosen = now(tmp_path, **{TOOL: "mistral"})
    assert with_former_formats(chosen).config.model.tool_call_parser == "mistral"


@pytest.mark.parametrize("content", [None, "{", "[]", '{"model.tool_call_parser": 1}'])
def test_no_record_or_an_unreadable_one_changes_nothing(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        started(tmp_path)
        (tmp_path / "p" / "r" / "resolved.json").write_text(content)
    assert with_former_formats(now(tmp_path)) == now(tmp_path)
