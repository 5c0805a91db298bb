"""Takes the pictures of `sharpen view`'s pages: `python docs/make_pictures.py [--runs FOLDER] [NAME ...]`.

In: a folder with two runs; without it, two are made from invented records (`bench/view/shop_runs.py`). They are served,
and opened in headless Chromium (/usr/bin/chromium, or the one that the variable CHROMIUM names). Out:
images/view-NAME.png, all or those that are named.

The pictures of the documentation are of two quickstarts, with learning rates of 3e-4 and 1e-4; that of the rollout is
of the made runs, which have tools:

    python docs/make_pictures.py --runs /srv/checkpoints runs run compare step
    python docs/make_pictures.py rollout
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / folder) for folder in ("bench/view", "tests/show/view/browser")]

from browsed_runs import TOKEN, Served, serving  # noqa: E402
from PIL import Image  # noqa: E402
from playwright.sync_api import Page, sync_playwright  # noqa: E402
from shop_runs import Maker, RunSize, make_run  # noqa: E402

SIZE = RunSize(steps=40, batch_size=8, group_size=8, tasks=64, held_out=64, evaluations=(10, 20, 30))
HEIGHTS = {"runs": 380, "run": 800, "compare": 800, "step": 640, "rollout": 760}


def address(name: str, served: Served) -> str:
    """Return the address of a picture's page."""
    run, other = (served.keys[name] for name in sorted(served.keys, reverse=True)[:2])
    return (
        served.address
        + {
            "runs": "/",
            "run": f"/run/{run}",
            "compare": f"/compare?run={run}&run={other}",
            "step": f"/run/{run}/step/20",
            "rollout": f"/run/{run}/rollout/t610?view=tokens",
        }[name]
    )


def take(page: Page, name: str, served: Served) -> None:
    """Write one picture."""
    page.set_viewport_size({"width": 1200, "height": HEIGHTS[name]})
    page.goto(address(name, served))
    page.wait_for_load_state("load")
    if name == "rollout":
        page.locator("#call-0 .as-tokens b").first.wait_for()
        page.locator("#measure").select_option("entropy")
        page.locator("#call-1 .as-tokens b").nth(3).hover()
    page.wait_for_timeout(800)  # curves are drawn
    path = HERE / "images" / f"view-{name}.png"
    page.screenshot(path=str(path))
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(256)
    small.save(path, optimize=True)


def main() -> None:
    """Make the runs if none are given, serve them, and take the pictures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=Path)
    parser.add_argument("names", nargs="*", choices=[[], *HEIGHTS], metavar="NAME")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = options.runs or Path(folder) / "runs"
        if options.runs is None:
            make_run(runs / "shop-grpo", Maker(size=SIZE))
            make_run(runs / "shop-flat", Maker(size=SIZE, seed=1, learns=False))
        with serving(runs, Path(folder) / "cache") as served, sync_playwright() as playwright:
            chromium = os.environ.get("CHROMIUM", "/usr/bin/chromium")
            browser = playwright.chromium.launch(executable_path=chromium, args=["--headless", "--no-sandbox"])
            context = browser.new_context()
            port = served.address.rpartition(":")[2]
            context.add_cookies([{"name": f"sharpen-view-{port}", "value": TOKEN, "url": served.address}])
            for name in options.names or HEIGHTS:
                take(context.new_page(), name, served)
            browser.close()


if __name__ == "__main__":
    main()
