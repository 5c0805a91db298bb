"""A browser (Debian's Chromium, driven by playwright) and a server over runs in every state."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browsed_runs import TOKEN, Served, make_states, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
WIDE = {"width": 1400, "height": 900}
NARROW = {"width": 360, "height": 740}


@pytest.fixture(scope="session")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs. Tests that change one of them make their own."""
    return make_states(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def served(states: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(states, tmp_path_factory.mktemp("cache")) as server:
        yield server


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Window:
    """A window of the browser. `complaints` has what a page did that it must not: errors of its scripts, of its policy,
    and requests to other hosts."""

    def __init__(self, context: BrowserContext, address: str) -> None:
        self.page: Page = context.new_page()
        self.address = address
        self.complaints: list[str] = []
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("request", self._asked)

    def open(self, path: str) -> Page:
        """Open a page, which must be there."""
        response = self.page.goto(self.address + path)
        assert response is not None
        assert response.status == 200, f"{path}: {response.status} {response.text()[:500]}"
        return self.page

    def _said(self, message: object) -> None:
        kind, text = getattr(message, "type", ""), getattr(message, "text", "")
        if kind in ("error", "warning"):
            self.complaints.append(f"{kind}: {text}")

    def _asked(self, request: object) -> None:
        url = str(getattr(request, "url", ""))
        if not url.startswith((self.address + "/", "data:")):
            self.complaints.append(f"request to {url}")


def until(page: Page, condition: str) -> None:
    """Wait until an expression holds in a page. Playwright's own way evaluates text in the page, which its policy
    forbids."""
    ending = time.monotonic() + 30
    while not page.evaluate(condition):
        assert time.monotonic() < ending, f"never came true: {condition}"
        page.wait_for_timeout(20)


def open_window(browser: Browser, address: str, **options: object) -> Window:
    """Open a window that has the token. Close its context."""
    context = browser.new_context(viewport=WIDE, **options)  # type: ignore[arg-type]
    port = address.rpartition(":")[2]
    context.add_cookies([{"name": f"sharpen-view-{port}", "value": TOKEN, "url": address}])
    return Window(context, address)


@pytest.fixture
def window(browser: Browser, served: Served) -> Iterator[Window]:
    """A window over the shared runs; whatever a page does in it, it must not complain."""
    window = open_window(browser, served.address)
    yield window
    window.page.context.close()
    assert window.complaints == []
