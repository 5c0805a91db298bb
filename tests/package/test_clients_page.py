"""The table of docs/use/clients.md names the versions that are tested."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = ("clients", "agentscope2", "openai2")
LINES = {"AgentScope 1": "agentscope1", "AgentScope 2": "agentscope2"}


def pinned(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def test_each_version_is_the_pinned_one():
    """Red when a pin is raised and the page is not."""
    page = (ROOT / "docs" / "use" / "clients.md").read_text()
    rows = re.findall(r"^\| ([^|]+?) \| (\d[\d.]*) \|", page, re.MULTILINE)
    assert len(rows) >= 19
    node = json.loads((ROOT / "tests" / "clients" / "package.json").read_text())["dependencies"]
    named = []
    for client, version in rows:
        (package,) = re.findall(r"`([^`]+)`", client)
        line = LINES.get(client.partition(" (")[0])
        sources = [pinned(line)] if line else [node] if package in node else [pinned(name) for name in PYTHON]
        if client.startswith("Node"):
            sources = [node]
        elif client.startswith("Python"):
            sources = [pinned("clients")]
        (found, *_) = [source[package] for source in sources if package in source]
        assert version == found, client
        named.append(package)
    assert set(node) <= set(named)
