"""The environments that the Makefile makes by hand have what the package depends on."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
HAND_MADE = ("agentscope1", "agentscope2", "clients", "environments", "openai2", "ray", "trl", "vllm")


def test_these_are_the_environments_that_install_without_dependencies() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    named = re.findall(r"requirements/([\w$*]+)\.txt --editable \.$", "\n".join(lines), re.MULTILINE)
    assert {name.replace("agentscope$*", "agentscope1") for name in named} == {*HAND_MADE} - {"agentscope2"}


@pytest.mark.parametrize("environment", HAND_MADE)
def test_each_dependency_is_pinned_there(environment: str) -> None:
    """Red where a new dependency is added to `pyproject.toml` alone: `pip check` would refuse the environment."""
    text = (ROOT / "requirements" / f"{environment}.txt").read_text()
    pins = dict(re.findall(r"^([\w.-]+)(?:\[[\w,]+\])?==(\S+)", text, re.MULTILINE))
    versions = {_plain(name): version for name, version in pins.items()}
    for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        needed = Requirement(line)
        assert versions.get(_plain(needed.name), "none") in needed.specifier, needed


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
