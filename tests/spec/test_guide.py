"""The guide names only settings, metrics and files that exist, and its computed figures are what the code computes."""

import asyncio
import re
from pathlib import Path

import pytest

from sharpen.config.explain import settings_of
from sharpen.config.run import RunConfig
from sharpen.gateway.formats.format import QWEN3
from sharpen.gateway.formats.hermes import HERMES
from sharpen.gateway.formats.table import Formats
from sharpen.placement.model_formats import serve_options
from sharpen.show.monitor.display import usage_lines
from sharpen.show.monitor.statistics import wilson

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "start" / "guide.md").read_text(encoding="utf-8")


def named_settings() -> set[str]:
    sections = {place[0] for place in settings_of(RunConfig) if len(place) > 1}
    names = re.findall(r"`([a-z_]+\.[a-z_]+)(?:: [^`]*)?`", GUIDE)
    files = (".json", ".jsonl", ".yaml", ".db")
    return {name for name in names if name.split(".")[0] in sections and not name.endswith(files)}


def test_every_setting_of_the_guide_exists():
    known = {".".join(place) for place in settings_of(RunConfig)}
    named = named_settings()
    assert len(named) >= 12, named
    assert not {name for name in named if name not in known and not any(k.startswith(f"{name}.") for k in known)}


def test_every_metric_of_the_guide_is_logged():
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    for name in re.findall(r"`(?:gateway|rollout)/([a-z_]+)`", GUIDE):
        assert name in source, name


def test_the_intervals_are_those_of_the_table_at_the_end():
    (sentence,) = re.findall(r"near 50% is known to within (.*?)\.\n", GUIDE)
    rows = re.findall(r"(\d+)(?: points)? with (\d+)", sentence)
    assert len(rows) == 5
    for points, tasks in rows:
        low, high = (round(100 * bound) for bound in wilson(int(tasks) // 2, int(tasks)))
        assert (50 - low, high - 50) == (int(points), int(points)), tasks


def test_the_memory_of_all_weights_is_the_stated_arithmetic():
    text = " ".join(GUIDE.split())
    (found,) = re.findall(
        r"take (\d+) bytes for each parameter on a CPU.*?"
        r"So ([\d.]+) billion parameters take (\d+) GB, ([\d.]+) billion (\d+)\.",
        text,
    )
    each, *pairs = map(float, found)
    assert each == 24
    for billions, taken in zip(pairs[::2], pairs[1::2], strict=True):
        assert taken == pytest.approx(each * billions, rel=0.03)


@pytest.mark.parametrize(
    ("response", "reward"), [("It is 14.", 1.0), ("14 or 4", 0.0), ("4", 0.0), ("", 0.0), (None, 0.0), ("no idea", 0.0)]
)
def test_the_guides_judge_does_what_the_guide_says(response: str | None, reward: float):
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    assert asyncio.run(names["judge"]({"answer": "14"}, response)).reward == reward  # type: ignore[operator]


def test_the_last_lines_are_those_of_the_product():
    run_dir, options = Path("…"), serve_options(Formats(tool=HERMES, reasoning=QWEN3))
    printed = usage_lines(run_dir, run_dir / "global_step_40", run_dir / "reward_curve.png", True, options)
    for line in printed:
        assert line in GUIDE, line


def test_questions_are_few():
    questions = GUIDE.partition("## Questions")[2]
    assert 1 <= len(re.findall(r"^\*\*", questions, re.MULTILINE)) <= 10


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


PAGES = ["README.md", "CONTRIBUTING.md", "examples/README.md", *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_between_the_pages_lead_somewhere(page: str | Path):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        file, _, anchor = target.partition("#")
        if "://" in file:
            continue
        linked = (path.parent / file) if file else path
        assert linked.exists(), target
        if anchor and linked.suffix == ".md" and linked.name != "configuration.md":
            assert anchor in anchors(linked), target


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_files_that_the_pages_name_exist(page: str | Path):
    folders = "src|tests|bench|examples|docs|requirements"
    text = (ROOT / page).read_text(encoding="utf-8")
    ours = re.sub(
        r"<!-- made by tests/as_it_is/.*?<!-- until here -->", "", text, flags=re.DOTALL
    )  # theirs: files elsewhere
    named = re.findall(rf"`((?:{folders})/[\w./-]+)", ours)
    written = {"bench/out/"}  # by `make bench-NAME`
    missing = [name for name in named if not (ROOT / name).exists() and not name.startswith(tuple(written))]
    assert not missing, missing


def test_modules_that_contributing_names_exist():
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(named) > 9, named
    assert not [name for name in named if not (ROOT / name).exists() and not (ROOT / "src" / "sharpen" / name).exists()]
