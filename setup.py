"""What pyproject.toml cannot say: README.md as a package index shows it.

In: README.md, and the address of the repository (`Repository` below `[project.urls]`), if it has one. Out: the same
text, whose links to files and whose pictures lead to the repository. Without an address such links are plain words, and
pictures are left out: an index has neither.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def index_page(readme: str, address: str | None) -> str:
    """Return the README with every link to a file of the repository as an address. A host must serve a file's page at
    `blob/HEAD/` and its bytes at `raw/HEAD/`, as GitHub does."""

    def turned(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        if address is None:
            return "" if picture else words
        return f"{picture}[{words}]({address}/{'raw' if picture else 'blob'}/HEAD/{target})"

    return LINK.sub(turned, readme)


if __name__ == "__main__":
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    setup(
        long_description=index_page(
            (HERE / "README.md").read_text(encoding="utf-8"), project.get("urls", {}).get("Repository")
        ),
        long_description_content_type="text/markdown",
    )
