"""What a message tells its reader to type or to set exists: messages are documentation too.

In: the texts in `src/`, without docstrings; what a text is given later is "\\0".
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache

import pytest
from pages import ROOT

from sharpen import tune
from sharpen.cli.main import build_parser
from sharpen.config.explain import settings_of
from sharpen.config.load import resolve
from sharpen.config.resuming import ANOTHER_NAME, setting_of
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError
from sharpen.gateway.model import ChatModel

OF_OTHERS = {"--head", "--logdir", "--mmproj", "--enable-auto-tool-choice", "--tool-call-parser", "--reasoning-parser"}
"""Options of Ray, TensorBoard, llama.cpp and vLLM."""
NO_VALUES = {"a", "at", "it", "limit", "one"}
"""Words behind a setting in sentences that name no value: "set loss.advantage to one without a critic"."""
SETTINGS = [".".join(place) for place in settings_of(RunConfig)]
SECTIONS = {name.partition(".")[0] for name in SETTINGS if "." in name}
NO_SETTINGS = {"model.api_key", "trainer.trainer_config_path"}
"""What the model object of a workflow has, and a key of Trinity-RFT's."""
LEAST = {"name": "x", "train_dataset.path": "x", "model.model_path": "x", "model.max_model_len": 2}


@cache
def messages() -> list[tuple[str, str]]:
    """Return each text of several words with its place. Trinity-RFT's own keys are the concern of `tests/compat`."""
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if "compat/trinity" not in name:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found += [(f"{name}:{line}", text) for line, text in _texts(tree) if " " in text.strip()]
    assert len(found) > 2000
    return found


def _texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    nodes = list(ast.walk(tree))
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    inside |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(one.value if isinstance(one, ast.Constant) else "\0" for one in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.lineno, node.value


def commands(parser: argparse.ArgumentParser | None = None) -> dict[str, argparse.ArgumentParser]:
    """The commands, and what is said behind one's name (`record import`), by their names."""
    found = [one for one in (parser or build_parser())._actions if isinstance(one, argparse._SubParsersAction)]
    named = {name: choice for action in found for name, choice in action.choices.items()}
    inner = {f"{name} {one}": choice for name in named for one, choice in commands(named[name]).items()}
    return named | inner


def test_each_command_in_a_message_is_one_with_the_options_behind_it() -> None:
    known, seen = commands(), 0
    for place, text in messages():
        for name, rest in re.findall(r"\bsharpen ([a-z][a-z-]+)((?: [^\s,;:)`]+)*)", text):
            assert name in known, f"{place}: 'sharpen {name}' is no command"
            for option in re.findall(r" (--[a-z-]+)", rest):
                assert option in known[name]._option_string_actions, f"{place}: sharpen {name} has no {option}"
            seen += 1
    assert seen > 20


def test_each_option_in_a_message_belongs_to_a_command() -> None:
    known = {option for parser in commands().values() for option in parser._option_string_actions} | OF_OTHERS
    named = [(place, one) for place, text in messages() for one in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)]
    assert len(named) > 60
    assert [one for one in named if one[1] not in known] == []


def test_each_setting_in_a_message_is_one() -> None:
    """Its whole name, or that of its section; what the model object of a workflow has is named in the same way."""
    wrong, seen = [], 0
    for place, text in messages():
        for name in re.findall(r"(?<![\w./-])[a-z_]+(?:\.[a-z_]+)+(?![\w/(])", text):
            if name.partition(".")[0] in SECTIONS:
                seen += 1
                is_section = any(one.startswith(f"{name}.") for one in SETTINGS)
                if setting_of(name) is None and not is_section and not _of_the_model(name):
                    wrong.append((place, name))
    assert seen > 200
    assert wrong == []


def _of_the_model(name: str) -> bool:
    return name in NO_SETTINGS or (name.startswith("model.") and hasattr(ChatModel, name.split(".")[1]))


def test_each_value_in_a_message_is_one_that_the_setting_takes() -> None:
    told = [
        (place, name, value)
        for place, text in messages()
        for name, value in re.findall(r"(?:[Ss]et |\(|[;,] (?:or )?)([a-z_.]+)(?:: | to )(\w+)(?=[\s,;.)]|$)", text)
        if setting_of(name) is not None and value not in NO_VALUES
    ]
    assert len(told) > 25
    for place, name, value in told:
        try:
            resolve(None, {**LEAST, name: {"true": True, "false": False}.get(value, value)})
        except ConfigError as error:
            pytest.fail(f"{place}: {name}: {value}: {error}")


@pytest.mark.parametrize(("argument", "key"), [("experiment_name", "name"), ("project_name", "project")])
def test_an_argument_of_python_is_named_beside_its_setting(argument: str, key: str) -> None:
    """Red while "choose another experiment_name" was refused by who followed it in a file, where it is `name`."""
    assert argument in inspect.signature(tune).parameters
    assert key in RunConfig.model_fields
    assert argument not in RunConfig.model_fields
    alone = [
        (place, text)
        for place, text in messages()
        if argument in text and not re.search(rf"(?<![\w.]){key}(?!\w)", text.replace(argument, ""))
    ]
    assert alone == []


def test_a_run_gets_another_name_by_both() -> None:
    assert "experiment_name" in ANOTHER_NAME
    assert resolve(None, {**LEAST, "name": "another"}).config.name == "another"
