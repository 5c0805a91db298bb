"""docs/use/clients.md: its table names the versions that the tests install."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = ("clients", "agentscope1", "agentscope2")
ROW = re.compile(r"^\| [^|]*?\(`([^`]+)`\) \| ([^|]+?) \|")
NAMED = re.compile(r"^\| (Node|Python) `([^`]+)` \| ([^|]+?) \|")


def pinned():
    """From a package's name to the versions that the tests have of it; Node's packages and Python's apart."""
    node = json.loads((ROOT / "tests/clients/package.json").read_text())["dependencies"]
    found = {("Node", name): {version} for name, version in node.items()}
    for file in PYTHON:
        for line in (ROOT / f"requirements/{file}.txt").read_text().splitlines():
            name, equals, version = line.partition("==")
            if equals:
                found.setdefault(("Python", name.lower()), set()).add(version)
    return found


def rows():
    """The table's rows: (language or None, package, version)."""
    lines = (ROOT / "docs/use/clients.md").read_text().splitlines()
    named = [match.groups() for line in lines if (match := NAMED.match(line))]
    return [*named, *((None, *match.groups()) for line in lines if (match := ROW.match(line)))]


def test_the_versions_of_the_table_are_the_pinned_ones():
    known = pinned()
    wrong = []
    for language, package, version in rows():
        of_package = set().union(
            *(known.get((one, package), set()) for one in ([language] if language else ("Node", "Python")))
        )
        if version not in of_package:
            wrong.append((package, version, of_package))
    assert not wrong


def test_every_pinned_node_package_and_framework_has_a_row():
    packages = {package for _, package, _ in rows()}
    assert {package for language, package in pinned() if language == "Node"} <= packages
    assert len(rows()) >= 19
