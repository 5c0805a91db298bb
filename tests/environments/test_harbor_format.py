"""Task folders as Harbor's own package reads and writes them, and as they are read here."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import pytest
import typing_extensions

from sharpen.agent.environments import harbor_tasks
from sharpen.agent.environments.harbor_tasks import read_task, read_tasks
from sharpen.errors import DatasetError

TASKS = Path(__file__).parents[2] / "examples" / "task_folder" / "tasks"


@pytest.fixture(scope="module", autouse=True)
def python_3_12() -> Any:
    """The one name of Python 3.12 that its readers need."""
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override


def test_our_example_is_a_folder_of_theirs() -> None:
    from harbor.models.task.task import Task

    for ours in read_tasks(TASKS):
        theirs = Task(ours.folder)
        assert Task.is_valid_dir(ours.folder)
        assert (ours.name, ours.instruction) == (theirs.name, theirs.instruction.strip())
        assert ours.agent_s == theirs.config.agent.timeout_sec
        assert ours.verifier_s == theirs.config.verifier.timeout_sec


@pytest.mark.parametrize("mode", ["shared", "separate", None])
@pytest.mark.parametrize("no_pytest", [True, False])
def test_what_harbor_init_writes_is_read(tmp_path: Path, mode: str | None, no_pytest: bool) -> None:
    from harbor.cli.init import _init_task
    from harbor.models.task.config import VerifierEnvironmentMode
    from harbor.models.task.task import Task

    _init_task(
        "org/new",
        tmp_path,
        verifier_mode=None if mode is None else VerifierEnvironmentMode(mode),
        no_pytest=no_pytest,
        include_canary_strings=True,
        include_standard_metadata=True,
    )
    with pytest.raises(DatasetError, match=r"instruction.md is empty"):
        read_task(tmp_path / "new")
    with (tmp_path / "new" / "instruction.md").open("a") as file:
        file.write("Do it.\n")
    ours, theirs = read_task(tmp_path / "new"), Task(tmp_path / "new")
    assert (ours.name, ours.instruction) == ("org/new", theirs.instruction.strip()) == (theirs.name, "Do it.")
    assert (ours.agent_s, ours.verifier_s) == (600.0, 600.0)
    assert (ours.separate is None, ours.brings_tests) == (mode == "shared", mode != "shared")


def test_names_and_defaults_are_theirs() -> None:
    """A name that is new in Harbor is refused here until somebody decides what it means."""
    from harbor.models.task import config

    pairs = {
        harbor_tasks._TaskFile: config.TaskConfig,
        harbor_tasks._Place: config.EnvironmentConfig,
        harbor_tasks._Verifier: config.VerifierConfig,
        harbor_tasks._Phase: config.AgentConfig,
        harbor_tasks._Artifact: config.ArtifactConfig,
        harbor_tasks._Solution: config.SolutionConfig,
    }
    older = {"version", "allow_internet"}
    for ours, theirs in pairs.items():
        assert set(ours.model_fields) - older == set(theirs.model_fields) - older, theirs
    assert harbor_tasks._Verifier().timeout_sec == config.VerifierConfig().timeout_sec
    assert harbor_tasks._Phase().timeout_sec == config.AgentConfig().timeout_sec
    assert harbor_tasks._Place().build_timeout_sec == config.EnvironmentConfig().build_timeout_sec
