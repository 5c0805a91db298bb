"""The page of Python names has each public name, where it is."""

from __future__ import annotations

import importlib
import re
import tomllib

from pages import ROOT

import sharpen


def test_each_public_name_is_on_the_page() -> None:
    """Red when a name is added to `sharpen` and not to docs/reference/api.md."""
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    listed = dict(reversed(place.rsplit(".", 1)) for place in re.findall(r"^::: (\S+)$", page, re.MULTILINE))
    assert set(sharpen._HOMES) == set(listed) - {"ChatModel"}
    for name, home in listed.items():
        assert hasattr(importlib.import_module(home), name), f"{home}.{name}"


def test_each_page_is_in_the_sites_contents() -> None:
    """Red when a page is written that no reader of the site finds (`make docs` refuses it too)."""
    listed = set(re.findall(r"- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    found = (path.relative_to(ROOT) for path in (ROOT / "examples").rglob("README.md"))
    examples = {str(path) for path in found if "data" not in path.parts}  # made by an example that was run
    assert listed == pages | examples | {"index.md", "CHANGELOG.md", "CONTRIBUTING.md"}


def test_the_two_tables_of_contents_ask_the_same() -> None:
    """Red when a page moves to another question on the site and not in docs/README.md, or the other way round."""
    site = (
        (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("  - Use:\n")[2].partition("  - Understand:\n")[0]
    )
    asked: dict[str, set[str]] = {}
    for line in site.splitlines():
        if line.endswith(".md"):
            asked[list(asked)[-1]].add(line.split()[-1])
        else:
            asked[line.strip(" -:")] = set()
    contents = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([^|]+) \| (.*use/.*) \|$", contents, re.MULTILINE))
    assert {question: set(re.findall(r"\((use/\S+\.md)\)", row)) for question, row in rows.items()} == asked


def test_each_claim_of_trust_names_tests_that_there_are() -> None:
    """Red when a sentence promises what no test holds, or its test has moved."""
    page = (ROOT / "docs" / "understand" / "trust.md").read_text(encoding="utf-8")
    rows = [row for row in page.splitlines() if row.startswith("| **")]
    assert len(rows) >= 8
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)`", row.rstrip("| ").rpartition("|")[2])
        assert named, row
        assert [name for name in named if not (ROOT / name).exists()] == [], row


def test_each_extra_is_on_the_page_of_installation() -> None:
    """Red when an extra is added and nobody is told what it is for."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    rows = re.findall(
        r"^\| (`.*`) \|", (ROOT / "docs" / "start" / "install.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == extras.keys() - {"dev"}


def test_each_page_that_the_program_names_exists() -> None:
    """Red when a message sends its reader to a page that is not there."""
    named = {
        (page, path.name)
        for path in (ROOT / "src").rglob("*.py")
        for page in re.findall(r"docs/[\w/-]+\.md", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    assert [one for one in sorted(named) if not (ROOT / one[0]).exists()] == []
