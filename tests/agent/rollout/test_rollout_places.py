"""Where an error happened: in the owner's own code, wherever libraries and the working folder are."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripted_serving import MakeRunner, make_task

from sharpen.agent.rollout.places import MAX_TRACEBACK, causes, describe, traceback_of
from sharpen.types import Outcome


@pytest.fixture
def in_a_folder(tmp_path: Path) -> Iterator[Path]:
    """A working folder that the test may lose."""
    before = Path.cwd()
    (tmp_path / "work").mkdir()
    os.chdir(tmp_path / "work")
    yield tmp_path / "work"
    os.chdir(before)


def test_a_deleted_working_folder_does_not_end_the_run(make_runner: MakeRunner, in_a_folder: Path) -> None:
    """Red when `_short` (places.py) asks for the working folder without expecting that it is gone."""

    async def workflow(task: Any, model: Any) -> float:
        model.call()
        if in_a_folder.exists():
            in_a_folder.rmdir()
        raise KeyError("x")

    (group,) = make_runner(workflow, max_attempts=1).run([make_task()], group_ids=["g"])
    assert [rollout.outcome for rollout in group.rollouts] == [Outcome.WORKFLOW_ERROR] * 2
    assert f"KeyError: 'x' ({__file__}:" in str(group.rollouts[0].error)


def load(path: Path, text: str) -> ModuleType:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("folder", ["home/.local/lib/python3.12/site-packages", "other/lib/python3/dist-packages"])
def test_the_owners_own_line_is_named_not_that_of_an_installed_package(tmp_path: Path, folder: str) -> None:
    """Red when `is_user_code` (places.py) knows this environment's packages alone."""
    framework = load(tmp_path / folder / "framework.py", "def run(step):\n    raise ValueError('no answer')\n")
    agent = load(tmp_path / "agent.py", "def run_agent(framework):\n    framework.run(1)\n")
    with pytest.raises(ValueError, match="no answer") as caught:
        agent.run_agent(framework)
    agents_own = caught.value.with_traceback(caught.tb.tb_next)
    assert describe(agents_own) == f"ValueError: no answer ({tmp_path / 'agent.py'}:2 in run_agent)"


def test_causes_are_walked_once_and_in_order() -> None:
    first, second, third = ValueError("1"), KeyError("2"), OSError("3")
    first.__cause__, second.__cause__ = second, first
    second.__context__ = third
    group = ExceptionGroup("both", [first, third])
    assert list(causes(group)) == [group, first, second, third]
    alone = RuntimeError("0")
    alone.__context__ = third
    assert list(causes(alone)) == [alone]
    assert list(causes(alone, implicit=True)) == [alone, third]
    alone.__suppress_context__ = True
    assert list(causes(alone, implicit=True)) == [alone]


AGENT = """
KEY_OF_MINE = 1
def look(shelf):
    return {}[shelf]["sk-0123456789abcdef0123"]
def run_agent():
    try:
        look("top")
    except KeyError as error:
        raise ValueError("the shelf is not there") from error
"""


def test_a_traceback_has_the_owners_lines_and_causes_but_not_ours(tmp_path: Path, make_runner: MakeRunner) -> None:
    """Red when `traceback_of` (places.py) leaves our frames in, or is not passed on with the ending."""
    agent = load(tmp_path / "agent.py", AGENT)

    async def workflow(task: Any, model: Any) -> float:
        agent.run_agent()
        return 1.0

    (group,) = make_runner(workflow, max_attempts=1, group_size=1).run([make_task()], group_ids=["g"])
    text = group.rollouts[0].traceback
    lines = text.splitlines()
    assert "the direct cause" in text
    assert [line.split(", ", 1)[1] for line in lines if line.startswith("  File")] == [
        "line 7, in run_agent",
        "line 4, in look",
        f"line {workflow.__code__.co_firstlineno + 1}, in workflow",
        "line 9, in run_agent",
    ]
    assert lines[-1] == "ValueError: the shelf is not there"
    assert "sharpen/agent/rollout/attempt.py" not in text


def test_a_traceback_does_not_give_away_a_key_in_the_code(tmp_path: Path) -> None:
    """Red when `_take_out_ours` (places.py) keeps lines of code as they are."""
    agent = load(tmp_path / "agent.py", AGENT)
    with pytest.raises(ValueError, match="not there") as caught:
        agent.run_agent()
    assert "sk-0123" not in traceback_of(caught.value)
    assert "return {}[shelf]" in traceback_of(caught.value)


def test_a_long_traceback_lacks_its_middle(tmp_path: Path) -> None:
    """Red when `traceback_of` (places.py) does not cut."""
    agent = load(tmp_path / "agent.py", "def run_agent(said):\n    raise ValueError(f'begin {said} end')\n")
    with pytest.raises(ValueError, match="begin") as caught:
        agent.run_agent("x" * 50_000)
    text = traceback_of(caught.value)
    assert len(text) < MAX_TRACEBACK + 100
    assert text.endswith("end")
    assert "42," in text  # thousand characters that are left out


def test_an_error_of_ours_alone_has_no_traceback() -> None:
    """Red when `traceback_of` (places.py) does not look whether a frame is left."""
    assert traceback_of(ValueError("never raised")) is None
