"""A program of the page of frameworks is not to end in an ImportError: each section says what to install for it."""

import ast
import re

import pytest
from pages import ROOT

PACKAGES = {"agents": "openai-agents", "pydantic_ai": "pydantic-ai-slim", "llama_index": "llama-index-core"}
SECTIONS = re.findall(
    r"^## ([^\n]+)\n(.*?)```python\n(.*?)^```$",
    (ROOT / "docs/start/frameworks.md").read_text(encoding="utf-8"),
    re.MULTILINE | re.DOTALL,
)


def imported(program: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(program)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names} - {"sharpen", "__future__", "os", "json", "asyncio"}


def test_all_sections_are_looked_at():
    assert len(SECTIONS) >= 8


@pytest.mark.parametrize(("name", "prose", "program"), SECTIONS, ids=[name for name, _, _ in SECTIONS])
def test_what_a_program_imports_is_to_be_installed(name, prose, program):
    """Red when a section's `pip install` lacks a package, as `langchain` did."""
    (words,) = re.findall(r"`pip install ([^`]+)`", prose)
    packages = {re.split(r"[\[<>=]", word.strip('"'))[0] for word in words.split()}
    assert {PACKAGES.get(module, module.replace("_", "-")) for module in imported(program)} <= packages
