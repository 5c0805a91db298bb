"""Workflows, forms, hooks and the container: nothing of it runs here, but what it names exists."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
USER_NAMESPACES = "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
"""Allows what root folders of commands need, as docs/use/environments.md says."""
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def loaded(path: str | Path) -> Any:
    return yaml.safe_load((ROOT / path).read_text("utf-8"))


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in loaded(workflow)["jobs"].values() for step in job["steps"]]


def targets() -> set[str]:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    return {*phony.split(), ".venv/installed"}


def suites() -> list[str]:
    (job,) = loaded(".github/workflows/ci.yml")["jobs"].values()
    named: list[str] = job["strategy"]["matrix"]["suite"]
    return named


def test_the_workflow_runs_what_ci_runs() -> None:
    """Red when a suite is added to one of them alone. Each machine there makes its own environments."""
    lines = (ROOT / ".ci" / "run").read_text("utf-8").splitlines()
    ran = [word for line in lines if line.startswith("make ") for word in line.split()[1:]]
    assert suites() == [word for word in ran if word in targets() - {"environments"}]
    assert "make ${{ matrix.suite }}" in [step.get("run") for step in steps(WORKFLOWS[0])]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_and_make_targets_exist(workflow: Path) -> None:
    """Red when an action is named by a tag, which its owner can move, or a target was renamed."""
    text = workflow.read_text("utf-8")
    assert len(steps(workflow)) >= 3
    for step in steps(workflow):
        if "uses" in step:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", step["uses"])
            assert re.search(rf"{re.escape(step['uses'])} # v\d+\.\d+\.\d+$", text, re.MULTILINE)
        elif step["run"] != USER_NAMESPACES:
            (target,) = re.findall(r"^make (\S.*)$", step["run"])
            assert target == "${{ matrix.suite }}" or target in targets()
    assert loaded(workflow)["permissions"] == {"contents": "read"}


def test_a_tag_publishes_what_was_built_and_tried_without_a_key() -> None:
    release = loaded(".github/workflows/release.yml")
    assert release[True]["push"]["tags"] == ["v*"]  # YAML reads the key `on` as true
    build, publish = release["jobs"]["build"], release["jobs"]["publish"]
    (made,) = [step for step in build["steps"] if step.get("run") == "make dist"]
    assert made["env"] == {"TAG": "${{ github.ref_name }}"}
    assert (publish["needs"], publish["permissions"], publish["environment"]) == (
        "build",
        {"id-token": "write"},
        "pypi",
    )
    assert publish["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert "with" not in publish["steps"][-1]
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text("utf-8")


@pytest.mark.parametrize("form", ["bug", "feature"])
def test_a_form_for_issues_is_one(form: str) -> None:
    found = loaded(f".github/ISSUE_TEMPLATE/{form}.yml")
    assert found.keys() >= {"name", "description", "body"}
    fields = [field for field in found["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert {field["type"] for field in fields} == {"textarea"}
    assert all(field["attributes"]["label"] for field in fields)


def test_hooks_are_the_steps_of_check_by_the_programs_of_the_environment() -> None:
    """Red when `make check` gets another step of the kind, or a hook brings a program of another version."""
    (repository,) = loaded(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    hooks = [hook["entry"].removesuffix(" --fix") for hook in repository["hooks"]]
    recipe = (ROOT / "Makefile").read_text("utf-8").partition("\ncheck: ")[2].partition("\n\n")[0]
    steps = re.findall(r"\$\(BIN\)/(ruff format|ruff check|mypy)", recipe)
    assert hooks == [f".venv/bin/{step}" for step in steps]


def test_the_container_makes_the_environment_of_the_makefile() -> None:
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text("utf-8"))
    (version,) = re.findall(r":(\d\.\d+)-", container["image"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert version in SpecifierSet(project["requires-python"])
    assert container["postCreateCommand"].split()[:2] == ["make", ".venv/installed"]


def test_the_editor_is_told_what_the_formatter_does() -> None:
    width = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["ruff"]["line-length"]
    assert f"max_line_length = {width}\n" in (ROOT / ".editorconfig").read_text("utf-8")
