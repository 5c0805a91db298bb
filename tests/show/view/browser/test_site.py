"""The documentation's site, opened from the disk: what its search finds first, where it links, and that it fits
a phone."""

from __future__ import annotations

import os
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[4]
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
FIRST = {
    "learning rate": "reference/configuration.html#algorithm.learning_rate",
    "batch_size": "reference/configuration.html#algorithm.batch_size",
    "temperature": "reference/configuration.html#model.temperature",
    "timeout": "reference/configuration.html#rollout.timeout_s",
    "sharpen export": "reference/commands.html#sharpen-export",
    "out of memory": "use/memory.html",
    "ctrl-c": "use/resuming.html",
    "resume": "use/resuming.html",
    "reward is flat": "use/diagnose.html",
    "vllm": "use/vllm.html",
    "install": "start/install.html",
}
"""What a reader types, and the page or setting that must stand first."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert MKDOCS.exists(), "make .venv-docs/installed"
    folder = tmp_path_factory.mktemp("site")
    command = [str(MKDOCS), "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that complains of errors and of requests that leave the disk."""
    page, complaints = browser.new_page(), []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: request.url.startswith(("file:", "data:")) or complaints.append(request.url))
    yield page
    page.close()
    assert complaints == []


def test_the_search_works_from_the_disk_and_ranks_the_reference_first(site: Path, page: Page) -> None:
    """Red without the frame in the worker's place (nothing is found), and without the weights of the pages."""
    page.goto((site / "index.html").as_uri())
    box = page.locator("input[data-md-component=search-query]")
    box.click()
    found = {}
    for words in FIRST:
        box.fill(words)
        box.dispatch_event("keyup")
        # the links of a hit carry the words that were looked for
        mark = f".md-search-result__item a[href*='h={words.split()[0].split('_')[0].split('-')[0]}']"
        page.locator(mark).first.wait_for(state="attached", timeout=30_000)
        links = page.locator(".md-search-result__item").first.locator("a").evaluate_all("all => all.map(a => a.href)")
        found[words] = [link.removeprefix(site.as_uri() + "/") for link in links]
    plain = {words: [_without_words(link) for link in links] for words, links in found.items()}
    wrong = {words: plain[words][:3] for words, first in FIRST.items() if first not in plain[words][:2]}
    assert wrong == {}


def _without_words(link: str) -> str:
    """Return a hit's address without the words to highlight."""
    address, mark, anchor = link.partition("#")
    return address.partition("?")[0] + mark + anchor


def test_the_link_to_the_repository_is_the_packages_and_asks_its_host_nothing(site: Path, page: Page) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project.get("urls", {}).get("Repository")
    page.goto((site / "index.html").as_uri())
    links = page.locator("a.md-source").evaluate_all("all => all.map(a => a.getAttribute('href'))")
    assert set(links) == ({address} if address else set())
    assert page.locator("[data-md-component=source]").count() == 0


@pytest.mark.parametrize("path", ["index.html", "reference/configuration.html", "understand/trust.html"])
def test_a_page_fits_a_phone(site: Path, page: Page, path: str) -> None:
    page.set_viewport_size({"width": 420, "height": 900})
    page.goto((site / path).as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
