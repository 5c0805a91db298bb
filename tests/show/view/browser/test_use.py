"""What a person does: keys, sorting, filtering, choosing, following a run."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from browsed_runs import SIZE, Served, hold, serving, train_on
from conftest import NARROW, Window, open_window, until
from shop_runs import Maker, make_run

pytestmark = pytest.mark.browser


def test_the_runs_are_gone_through_by_keys(window: Window, served: Served):
    page = window.open("/?sort=name&order=up")
    names = page.locator("tbody tr [data-open]").all_inner_texts()
    assert names == sorted(names)
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("j")
    focused = page.locator("tr:focus")
    assert focused.locator("[data-open]").inner_text() == names[1]
    assert focused.evaluate("(row) => getComputedStyle(row).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/run/{served.keys[names[1]]}")
    page.keyboard.press("u")
    page.wait_for_url(served.address + "/")


def test_the_first_tab_leads_past_the_navigation(window: Window, served: Served):
    page = window.open(f"/run/{served.keys['whole']}")
    page.keyboard.press("Tab")
    skip = page.locator(".skip")
    assert skip.evaluate("(link) => link === document.activeElement && link.getBoundingClientRect().top >= 0")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


def test_what_has_the_focus_can_be_seen(window: Window, served: Served):
    page = window.open(f"/run/{served.keys['whole']}")
    for _ in range(25):
        page.keyboard.press("Tab")
        style = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert style == "solid", page.evaluate("document.activeElement.outerHTML")


def test_the_keys_are_told(window: Window):
    page = window.open("/")
    page.keyboard.press("?")
    assert page.locator("dialog[open]").inner_text().startswith("Keys")
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("other")
    until(page, "document.querySelectorAll('tbody tr').length === 1")
    assert page.locator("tbody [data-open]").inner_text() == "other"
    assert page.evaluate("document.activeElement.name") == "text", "typing goes on in the field"


def test_the_table_is_sorted_without_leaving_the_page(window: Window):
    page = window.open("/")
    page.evaluate("window.stayed = true")
    page.locator("#table thead").get_by_text("Run", exact=True).click()
    until(page, "new URLSearchParams(location.search).get('sort') === 'name'")
    names = page.locator("tbody [data-open]").all_inner_texts()
    assert names == sorted(names)
    assert page.locator("th[aria-sort='ascending']").inner_text().startswith("Run")
    assert page.evaluate("window.stayed")


def test_two_chosen_runs_are_compared(window: Window, served: Served):
    page = window.open("/")
    assert page.locator("#compare").is_disabled()
    page.get_by_label("Compare whole").check()
    page.get_by_label("Compare other").check()
    page.locator("#compare").click()
    page.wait_for_url("**/compare?**")
    assert page.locator(".difference").count() == 2, "held-out tasks in two modes"
    assert "12 tasks in both" in page.locator(".difference").first.inner_text()
    assert "seed" in page.locator("section[aria-labelledby=settings]").inner_text()


def test_a_metric_is_found_and_opened(window: Window, served: Served):
    page = window.open(f"/run/{served.keys['whole']}")
    page.locator("#metric-search").fill("entropy")
    shown = page.locator("[data-metric]:visible")
    assert shown.count() == 1
    shown.get_by_role("button").click()
    page.wait_for_selector("[data-metric='trainer/entropy'] canvas")
    shown.get_by_role("button").click()
    assert page.locator("[data-metric] canvas").count() == 0


def test_the_curve_says_its_numbers_and_goes_over_time(window: Window, served: Served):
    page = window.open(f"/run/{served.keys['whole']}")
    plot = page.locator("[data-chart=course]")
    assert not plot.locator(".still").is_visible(), "the live curve takes the place of the still one"
    plot.locator(".u-over").hover()
    until(page, "document.querySelector('.readout').textContent.includes('training reward')")
    plot.get_by_role("button", name="over time").click()
    assert plot.get_by_role("button", name="over time").get_attribute("aria-pressed") == "true"


def test_what_is_still_being_made_arrives(window: Window, served: Served):
    page = window.open(f"/run/{served.keys['other']}")
    until(page, "!document.querySelector('[data-pending]')")
    assert "being made" not in page.locator("#findings").inner_text()


def test_the_theme_is_chosen_and_kept(window: Window):
    page = window.open("/")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_the_search_filters_as_one_types(window: Window, served: Served):
    page = window.open(f"/run/{served.keys['whole']}/rollouts")
    before = page.locator(".presets strong").inner_text()
    page.locator("[name=text]").fill("onerror")
    until(page, f"document.querySelector('.presets strong').textContent !== '{before}'")
    page.locator("#filters summary").click()
    page.locator("[name=place]").select_option("held-out/greedy")
    until(page, "document.querySelector('.presets strong').textContent === '0'")
    assert "place=held-out" in page.url


def test_tokens_are_coloured_by_the_chosen_number(window: Window, served: Served):
    page = window.open(f"/run/{served.keys['whole']}/rollout/t2?view=tokens")
    tokens = page.locator("#call-0 .as-tokens b")
    tokens.first.wait_for()
    colours = {}
    for measure in ("advantage", "logprob", "entropy", "ratio", "weight", "version"):
        page.locator("#measure").select_option(measure)
        colours[measure] = [tokens.nth(place).get_attribute("class") for place in range(tokens.count())]
        if measure == "advantage":
            assert "all advantages are 0" in page.locator("#scale").inner_text()
        else:
            ends = page.locator("#scale span:not(.clipped)")
            assert ends.count() == 2, f"{measure}: the scale has its lowest and highest"
    assert len(set(colours["entropy"])) > 1
    # The entropies of these runs rise as the probability falls: both go from pale to dark the same way.
    assert colours["entropy"] == colours["logprob"]
    tokens.first.hover()
    assert "entropy 0." in page.locator("#token").inner_text()


def test_ratios_go_both_ways_from_1_and_clipped_tokens_are_struck_through(window: Window, served: Served):
    """In these runs log ratios are -0.3 to 0.3, and those of 0.3 are clipped."""
    page = window.open(f"/run/{served.keys['whole']}/rollout/t2?view=tokens")
    tokens = page.locator("#call-0 .as-tokens b")
    tokens.first.wait_for()
    page.locator("#measure").select_option("ratio")
    assert page.locator("#scale span").all_inner_texts() == ["0.741", "1.35", "clipped"]
    found = set()
    for place in range(tokens.count()):
        token = tokens.nth(place)
        token.hover()
        said = page.locator("#token").inner_text()
        ratio = float(said.split("ratio ")[1].split()[0])
        classes = (token.get_attribute("class") or "").split()
        side = "up" if ratio > 1 else "down" if ratio < 1 else ""
        assert [one.split("-")[0] for one in classes if one != "clipped"] == [side] * bool(side)
        struck = "line-through" in token.evaluate("one => getComputedStyle(one).textDecorationLine")
        assert (ratio > 1.3) == ("clipped" in classes) == ("not clipped" not in said) == struck
        found.add((side, struck))
    assert {("up", True), ("up", False), ("down", False)} <= found
    page.locator("#measure").select_option("entropy")
    assert page.locator(".strip .clipped").count() == 0


def test_a_page_follows_its_run(browser, tmp_path: Path):
    run = make_run(tmp_path / "runs" / "growing", Maker(size=SIZE), until=3, ended=False)
    hold(run)
    with serving(tmp_path / "runs", tmp_path / "cache") as served:
        window = open_window(browser, served.address)
        with closing(window.page.context):
            page = window.open(f"/run/{served.keys['growing']}")
            page.set_viewport_size(NARROW)
            page.locator("#group-time > summary").click()
            page.locator("[id='open-time/step_s']").focus()
            train_on(run, 4)
            until(page, "document.getElementById('head').textContent.includes('step 4')")
            assert page.evaluate("document.activeElement.id") == "open-time/step_s"
            assert page.locator("#group-time").get_attribute("open") is not None
            page.locator("#metric-search").fill("sync")
            place = page.evaluate("document.getElementById('metric-search').getBoundingClientRect().top")
            train_on(run, 5)
            until(page, "document.getElementById('head').textContent.includes('step 5')")
            assert page.evaluate("document.activeElement.id") == "metric-search"
            assert page.evaluate("document.getElementById('metric-search').value") == "sync"
            now = page.evaluate("document.getElementById('metric-search').getBoundingClientRect().top")
            assert now == pytest.approx(place, abs=2)
            assert page.locator("[data-metric]:visible").count() == 1
            assert page.locator("#following").is_visible()
        assert window.complaints == []
