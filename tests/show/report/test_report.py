"""The report of a run: what it says, that text of rollouts stays text, and damaged directories."""

import base64
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from picture_toys import draw
from PIL import Image
from reported_runs import make_run

from sharpen.cli.main import main
from sharpen.show.report.contents import MAX_POINTS, chart, most_changed, read_evaluated, read_report
from sharpen.show.report.render import fenced, html, markdown, plain
from sharpen.show.view.data.measures import Series

HOSTILE = "<script>alert(1)</script> ``` ````\n| a | <img src=x onerror=y> [link](http://x) @all \x1b[31m \u202e"
ANSWERS = {
    **{f"test/{n}": (("wrong", 0.0), ("right", 1.0)) for n in range(6)},
    "test/6": (("fine", 1.0), ("broken now", 0.0)),
    "test/7": ((HOSTILE, 0.0), (HOSTILE, 1.0)),
    "test/8": (("same", 1.0), ("same", 1.0)),
    "test/9": (("none", None), ("fine", 1.0)),
}


class Page(HTMLParser):
    """What a page consists of: its tags, the values of their attributes, its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.values, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.values += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        self.text += " "

    def handle_data(self, data):
        self.text += data


def test_it_says_what_the_run_did(tmp_path):
    page = Page(html(read_report(make_run(tmp_path, ANSWERS))))
    text = " ".join(page.text.split())
    for fact in (
        "Better than before",
        "held-out, sampled",
        "7 / 1 / 1",  # test/9 has no reward before
        "test/6 1 → 0",
        "broken now",
        "The certificate holds",
        "timeout 1 10.0%",
        "1,234",
        "2.0 GiB",
        "algorithm.algorithm_type grpo",
        "global_step_3",
    ):
        assert fact in text, fact
    assert "seed" not in text, "a default is no setting that somebody chose"


def test_text_of_rollouts_stays_text_and_nothing_is_loaded(tmp_path):
    answers = {f"test/{HOSTILE}": ((HOSTILE, 0.0), (HOSTILE, 1.0)), "test/1": (("a", 0.0), ("b", 0.0))}
    report = read_report(make_run(tmp_path, answers))
    page = Page(html(report))
    assert "<script>alert(1)</script>" in page.text
    assert not {"script", "img", "link", "iframe", "a", "object"} & set(page.tags)
    assert not [value for name, value in page.values if name.startswith("on") or name in ("src", "href", "style")]
    assert "default-src 'none'" in html(report)
    for text in (html(report), markdown(report)):
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "\\x1b" in text
    outside = re.sub(r"(?ms)^(`{3,})text\n.*?\n\1$", "", markdown(report))  # what is not within fences
    assert "<script" not in outside
    assert "<img" not in outside
    assert not re.search(r"(?<!\\)\]\(http", outside)


def test_a_changed_task_shows_small_copies_of_its_first_images(tmp_path):
    """Red when the whole files are put in. A file that is lost or damaged leaves its words."""
    large = [draw(seed, 320, 160) for seed in range(5)]
    run = make_run(tmp_path, {"test/1": (("a", 0.0), ("b", 1.0)), "test/2": (("a", 0.0), ("a", 0.0))}, pictures=large)
    (run / "images" / large[1].sha256).write_bytes(b"damaged")
    report = read_report(run)
    (task,) = report.evaluated.changed
    shown = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in task.pictures]
    assert [image.size for image in shown] == [(160, 80)] * 3
    page = html(report)
    assert page.count('<img src="data:image/') == 3
    assert "3 of 5 images" in page
    assert f"[image {large[1].sha256[:12]}]" in page
    assert len(page) < 200_000
    assert "<img" not in markdown(report)


def test_show_says_how_large_an_image_is(tmp_path, capsys):
    one, lost = draw(1, 40, 24), draw(2, 40, 24)
    run = make_run(tmp_path, {"test/1": (("a", 0.0), ("b", 1.0))}, pictures=[one, lost])
    (run / "images" / lost.sha256).unlink()
    assert main(["show", str(run), "--rollout", "before/held-out/sampled/test/1/0"]) == 0
    said = capsys.readouterr().out
    assert f"[image 40x24 {one.sha256[:12]}]" in said
    assert f"[image {lost.sha256[:12]}]" in said


def test_a_fence_is_longer_than_any_in_the_text():
    assert fenced("a ```` b") == "`````text\na ```` b\n`````"
    assert plain("a|b\n<i> [x](y) `z`") == r"a\|b &lt;i&gt; \[x\](y) \`z\`"


def test_the_tasks_that_changed_most():
    before = {f"t{n}": 0.0 for n in range(8)} | {"w1": 1.0, "w2": 1.0, "w3": 0.5}
    after = {f"t{n}": n / 8 for n in range(8)} | {"w1": 0.0, "w2": 0.5, "w3": 0.4}
    assert most_changed(before, after) == ["t7", "t6", "t5", "w1", "w2"]
    assert most_changed(before, after | {"w1": 1.0, "w2": 1.0, "w3": 0.5}) == ["t7", "t6", "t5", "t4", "t3"]
    only_worse = {"w1": 0.0, "w2": 0.5, "w3": 0.4}
    assert most_changed(before, only_worse) == ["w1", "w2", "w3"]
    assert most_changed(before, before) == []


def test_rewards_are_paired_by_task_and_the_deciding_mode_comes_first(tmp_path):
    run = make_run(tmp_path, ANSWERS)
    (one,) = read_evaluated(run / "evaluations.db").comparisons
    assert (one.moments, one.better, one.worse, one.same) == (("before", "after"), 7, 1, 1)
    assert one.difference.count == 9
    assert one.difference.value == pytest.approx(6 / 9)
    assert one.after.count == 10


@pytest.mark.parametrize("damage", ["nothing", "empty", "half", "other"])
def test_damaged_directories_give_a_report_that_says_what_is_missing(tmp_path, damage):
    run = make_run(tmp_path, ANSWERS)
    for name in ("summary.json", "certificate.json", "resolved.json", "metrics.jsonl", "evaluations.db"):
        path = run / name
        content = {"empty": b"", "half": path.read_bytes()[:50], "other": b"[1, 2]"}
        path.unlink()
        if damage != "nothing":
            path.write_bytes(content[damage])
    report = read_report(run)
    assert report.problems
    text = Page(html(report)).text
    assert "No verdict" in text
    assert all(" ".join(problem.split()) in " ".join(text.split()) for problem in report.problems)
    assert markdown(report)


def test_the_chart():
    rewards = Series(name="r", steps=(1, 2, 3), times=(), values=(0.0, None, 1.0))
    held_out = Series(name="h", steps=(0,), times=(), values=(0.5,), low=(0.25,), high=(0.75,))
    drawn = chart(rewards, [held_out])
    assert drawn.training.count("M") == 2, "a gap is not drawn over"
    (point,) = drawn.evaluations[0].points
    assert (point.x, point.low, point.y, point.high) == (0, 75, 50, 25)
    assert [tick.text for tick in drawn.y_ticks] == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]
    assert [tick.text for tick in drawn.x_ticks] == ["0", "1", "2", "3"]
    nothing = Series(name="r", steps=(), times=(), values=())
    assert chart(nothing, []) is None
    many = Series(name="r", steps=tuple(range(10_000)), times=(), values=(-5.0, 300.0) * 5000)
    long = chart(many, [])
    assert long.training.count("L") <= MAX_POINTS
    assert long.y_ticks[0].text == "0"
    assert [tick.text for tick in chart(replace(rewards, values=(-2.0, None, 1.0)), []).x_ticks] == ["1", "2", "3"]


def test_the_command_writes_prints_and_answers(tmp_path, capsys):
    run = make_run(tmp_path, ANSWERS)
    assert main(["report", str(run), "--price-per-hour", "40"]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert "1.000 at 40.0 an hour" in (run / "report.html").read_text()
    assert main(["report", "run", "--root", str(tmp_path), "--md"]) == 0
    assert "| held-out, sampled | 9 |" in capsys.readouterr().out
    assert main(["report", str(run), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["headline"] == "Better than before"
    assert answer["evaluated"]["changed"][0]["before"]["text"] == "wrong"
    assert main(["report", str(run), "--output", str(tmp_path / "no" / "such.html")]) == 2
    assert "--output" in capsys.readouterr().err
    assert main(["report", str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err


def test_a_run_that_was_only_explored_or_served_has_no_report_and_is_told_why(tmp_path, capsys):
    """Red when the command writes an empty report into the explorer's folder, or calls the run none."""
    explorer = tmp_path / "explored" / "explore"
    explorer.mkdir(parents=True)
    (explorer / "resolved.json").write_text("{}")
    for folder in (explorer, explorer.parent):
        assert main(["report", str(folder)]) == 2
        assert "mode: train" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*.html")] == []
    run = make_run(tmp_path, ANSWERS)
    explorer.rename(run / "explore")
    assert main(["report", str(run)]) == 0
    assert main(["report", str(run / "explore")]) == 2
    assert f"sharpen report {run}" in capsys.readouterr().err
