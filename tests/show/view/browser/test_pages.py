"""Every page in every state: no error, no other host, nothing wider than a phone, readable in both themes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from browsed_runs import HOSTILE, Served
from conftest import NARROW, WIDE, Window, open_window

pytestmark = pytest.mark.browser
AXE = (Path(os.environ.get("NODE_MODULES", ".venv/node/node_modules")) / "axe-core" / "axe.min.js").absolute()
STATES = ("whole", "live", "huge", "empty", "broken")
PAGES = {
    "runs": "/",
    "run": "/run/{key}",
    "tasks": "/run/{key}/tasks",
    "training": "/run/{key}/tasks?of=training",
    "task": "/run/{key}/task?id=train/1",
    "step": "/run/{key}/step/2",
    "rollouts": "/run/{key}/rollouts",
    "search": "/run/{key}/rollouts?text=stock&outcome=failed",
    "rollout": "/run/{key}/rollout/t1",
    "compare": "/compare?run={key}&run={other}",
}
WITHOUT_ROLLOUTS = {"empty", "broken"}
NEEDS_ROLLOUTS = {"task", "step", "rollout"}
CASES = [
    (state, name)
    for state in STATES
    for name in PAGES
    if not (state in WITHOUT_ROLLOUTS and name in NEEDS_ROLLOUTS) and not (name == "runs" and state != "whole")
]


def path_of(served: Served, state: str, name: str) -> str:
    return PAGES[name].format(key=served.keys[state], other=served.keys["other"])


@pytest.mark.parametrize(("state", "name"), CASES)
def test_a_page_fits_and_does_not_complain(window: Window, served: Served, state: str, name: str):
    page = window.open(path_of(served, state, name))
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        for size in (WIDE, NARROW):
            page.set_viewport_size(size)
            assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], f"{theme}, {size}"
    assert page.locator("h1").count() == 1
    assert page.evaluate("window.broken") is None


@pytest.mark.parametrize(("state", "name"), [*(("whole", name) for name in PAGES), ("empty", "run"), ("broken", "run")])
def test_a_page_is_accessible(window: Window, served: Served, state: str, name: str):
    page = window.open(path_of(served, state, name))
    page.evaluate(AXE.read_text(encoding="utf-8"))  # not as a script of the page: its policy allows none
    page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true })")
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        seen = [
            (rule["id"], node["html"][:200], node["failureSummary"][:300]) for rule in found for node in rule["nodes"]
        ]
        assert seen == [], theme


@pytest.mark.parametrize("name", PAGES)
def test_a_page_reads_without_scripts(browser, served: Served, name: str):
    window = open_window(browser, served.address, java_script_enabled=False)
    page = window.open(path_of(served, "whole", name))
    assert len(page.locator("main").inner_text()) > 100
    if name == "run":
        assert page.locator("figure .still .plot").first.is_visible()
    page.context.close()
    assert window.complaints == []


def test_what_is_not_there_is_said_on_a_page(browser, served: Served):
    window = open_window(browser, served.address)
    page = window.page
    assert page.goto(f"{served.address}/run/{served.keys['whole']}/rollout/t99999").status == 404
    assert page.locator("h1").inner_text() == "This is not here"
    assert "rollout" in page.locator("main").inner_text()
    page.keyboard.press("u")
    page.wait_for_url(served.address + "/")
    page.context.close()


def test_what_an_agent_said_stays_text(window: Window, served: Served):
    page = window.open(f"/run/{served.keys['whole']}/rollouts?text=onerror")
    said = page.locator(".hit .said").first.text_content() or ""
    assert HOSTILE.split("\x1b")[0] in said
    assert "\x1b" not in said
    assert page.locator("main script:not([type='application/json']), main img, main style").count() == 0


def test_a_broken_run_says_what_is_missing(window: Window, served: Served):
    page = window.open(f"/run/{served.keys['broken']}")
    notice = page.locator(".notice").first.inner_text()
    assert all(name in notice for name in ("metrics.jsonl", "summary.json", "certificate.json"))
