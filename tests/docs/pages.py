"""The documentation as tests see it. In: the Markdown files of the repository. Out: their blocks of code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "AGENTS.md", "examples", "docs", "skills"]
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^    .*\n)+", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of code: the page's path in the repository, the line its text begins at, its language and its text."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@cache
def blocks(language: str | None = None) -> list[Block]:
    """Return the blocks of every page; indented ones have the language ""."""
    return [block for path in pages() for block in _blocks(path) if language in (None, block.language)]


def pages() -> list[Path]:
    """Return the README, what coding agents read, the examples' pages and the documentation."""
    found = [
        path for place in PAGES for path in ([ROOT / place] if place.endswith(".md") else (ROOT / place).rglob("*.md"))
    ]
    return sorted(found)


def inline_code() -> Iterator[tuple[str, str]]:
    """Yield each piece of code within a sentence, with its page."""
    for path in pages():
        prose = FENCED.sub("", path.read_text(encoding="utf-8"))
        for text in re.findall(r"`([^`]+)`", prose):
            yield str(path.relative_to(ROOT)), " ".join(text.split())


def _blocks(path: Path) -> Iterator[Block]:
    content = path.read_text(encoding="utf-8")
    name = str(path.relative_to(ROOT))
    for match in FENCED.finditer(content):
        yield Block(name, content.count("\n", 0, match.start(3)) + 1, match[2], match[3])
    blank = FENCED.sub(lambda match: "\n" * match.group().count("\n"), content)
    for match in INDENTED.finditer(blank):
        yield Block(name, blank.count("\n", 0, match.start()) + 1, "", match.group())
