"""Which test files of agent frameworks belong to which environment: `test_agentscope1_*` and `test_agentscope2_*` to
the one with that line of AgentScope, `test_frameworks_*` to where the others are, `test_agentscope_*` to both.

In: the versions of what is installed. Out: names of files.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "agentscope"
FRAMEWORKS = "openai-agents"
"""The other frameworks are where this one is."""


def installed() -> dict[str, str]:
    """The versions of the packages that tell an environment, as far as they are here."""
    found: dict[str, str] = {}
    for package in ("agentscope", FRAMEWORKS):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def belongs(name: str, packages: Mapping[str, str]) -> bool:
    """Whether a test file can run where these packages are."""
    if name.startswith("test_frameworks_"):
        return FRAMEWORKS in packages
    if "agentscope" not in packages:
        return False
    line = packages["agentscope"].split(".")[0]
    return name.startswith((f"test_agentscope{line}_", "test_agentscope_"))


def expected(names: set[str], packages: Mapping[str, str]) -> set[str]:
    """The files that must run; all of them where no framework is installed, so that nothing passes unseen."""
    return {name for name in names if belongs(name, packages)} if packages else names


def test_files() -> set[str]:
    """Every test file of an agent framework."""
    return {path.name for path in FOLDER.glob("test_*.py")}
