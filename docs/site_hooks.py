"""Hooks of MkDocs: pages from outside docs/, and links that lead from one page to another on GitHub and on the site.

In: README.md, CHANGELOG.md, CONTRIBUTING.md and all of examples/ as git has them. Out: pages and files of the site, and
each link of a page's Markdown turned from its place in the repository to its place on the site. The link to the
repository is pyproject.toml's: `Repository` below `[project.urls]`.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
OUTSIDE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "examples")
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def on_config(config: Any) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if address := project.get("urls", {}).get("Repository"):
        config.repo_url, config.repo_name = address, address.removeprefix("https://").partition("/")[2]


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Leave the link to the repository a link: the theme would ask its host for stars and releases."""
    return output.replace(' data-md-component="source"', "")


def on_files(files: Files, config: Any) -> Files:
    listed = subprocess.run(["git", "ls-files", *OUTSIDE], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        files.append(File.generated(config, site_place(name), abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    here = repository_place(page.file.src_uri)

    def turn(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        if "://" in target or target.startswith("mailto:"):
            return match.group()
        place = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        if (ROOT / place).is_dir():
            place = posixpath.join(place, "README.md")
        return before + posixpath.relpath(site_place(place), posixpath.dirname(page.file.src_uri) or ".") + after

    return LINK.sub(turn, markdown)


def site_place(name: str) -> str:
    """Return where a file of the repository lies on the site: the two tables of contents are its first page."""
    if name in {"README.md", "docs/README.md"}:
        return "index.md"
    return name.removeprefix("docs/")


def repository_place(name: str) -> str:
    """Return where a file of the site lies in the repository."""
    if name == "index.md":
        return "README.md"
    return name if name.startswith(OUTSIDE) else f"docs/{name}"
