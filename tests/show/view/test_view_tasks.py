"""Tasks, steps, comparisons: the numbers are those of the journal."""

import contextlib
import csv
import html
import io
import json
import math
import sqlite3
from statistics import fmean, pstdev

import pytest
from shop_runs import Maker, RunSize, make_run

from sharpen.learning.experience.reading import read_groups
from sharpen.show.monitor.statistics import paired_difference, student_quantile
from sharpen.show.view.data.compare import compare_page
from sharpen.show.view.data.run import reward_margins, reward_range, run_page
from sharpen.show.view.data.tasks import step_page, task_page, tasks_page
from sharpen.show.view.diagnoses import Diagnosis
from sharpen.show.view.entries import TRAINING
from sharpen.show.view.files import read_files
from sharpen.show.view.folders import Folder


@pytest.fixture
def index(run, library):
    return library(run).index(Folder.of(run), wait_s=120)


@pytest.fixture(scope="module")
def evaluated(run):
    """The rewards of the evaluations, by moment and mode and then by task."""
    found = {}
    for group in read_groups(run / "evaluations.db"):
        moment, _, mode, _ = group.id.split("/", 3)
        rewards = [one.reward for one in group.scored]
        if rewards:
            found.setdefault((moment, mode), {})[group.task.id] = fmean(rewards)
    return found


def test_the_heat_map_of_an_evaluation(index, evaluated):
    page = tasks_page(index, place="held-out/sampled", order="change")
    assert [column.label for column in page.columns] == ["before", "step-3", "after"]
    for row in page.rows:
        moments = ("before", "step-3", "after")
        assert list(row.cells) == [evaluated[moment, "sampled"].get(row.task) for moment in moments]
    changes = [row.change for row in page.rows if row.change is not None]
    assert changes == sorted(changes, reverse=True)
    assert (page.better, page.worse) == (sum(one > 0 for one in changes), sum(one < 0 for one in changes))
    worst = tasks_page(index, place="held-out/sampled", order="worse")
    assert worst.rows[0].change == min(changes)


def test_the_heat_map_of_the_training(index, run):
    page = tasks_page(index, place="training", order="name")
    cells = {row.task: row.cells for row in page.rows}
    for group in read_groups(run / "run.db"):
        step = int(group.id.split("/")[0].removeprefix("step-")) + 1
        assert cells[group.task.id][step - 1] == pytest.approx(fmean(one.reward for one in group.scored))
    assert [column.first for column in page.columns] == [1, 2, 3, 4, 5, 6]
    assert [row.task for row in page.rows][:3] == ["train/0", "train/1", "train/2"]


def test_many_steps_share_columns(tmp_path, library):
    size = RunSize(steps=130, batch_size=1, group_size=1, tasks=3, held_out=1, evaluations=())
    path = make_run(tmp_path / "long", Maker(size=size), ended=False)
    page = tasks_page(library(path).index(Folder.of(path), wait_s=120), place="training")
    assert [(column.first, column.last) for column in page.columns][:2] == [(1, 3), (4, 6)]
    assert page.columns[-1].last == 130
    assert all(len(row.cells) == len(page.columns) for row in page.rows)


def test_a_task_before_and_after(index, evaluated):
    page = task_page(index, "test/3")
    pairs = {pair.place: pair for pair in page.pairs}
    for mode in ("greedy", "sampled"):
        pair = pairs[f"held-out/{mode}"]
        assert (pair.before.moment, pair.after.moment) == ("before", "after")
        assert pair.before.mean == evaluated["before", mode].get("test/3")
        assert pair.after.mean == evaluated["after", mode].get("test/3")
        assert all(one.answer for one in (*pair.before.tries, *pair.after.tries))
    assert "shelf 3" in page.question
    assert task_page(index, "nothing") is None


def test_a_steps_groups_with_their_spread(index, run):
    page = step_page(index, 2)
    recorded = {group.id: group for group in read_groups(run / "run.db") if group.id.startswith("step-1/")}
    assert {group.id for group in page.groups} == recorded.keys()
    for group in page.groups:
        rewards = [one.reward for one in recorded[group.id].scored]
        assert (group.mean, group.std) == (pytest.approx(fmean(rewards)), pytest.approx(pstdev(rewards)))
        assert (group.low, group.high) == (min(rewards), max(rewards))
    spreads = [group.std for group in page.groups]
    assert spreads == sorted(spreads, reverse=True)
    assert page.flat == sum(group.low == group.high for group in page.groups)
    assert (page.previous, page.next) == (1, 3)
    assert step_page(index, 99) is None


def test_two_runs_are_compared_by_their_tasks(run, evaluated, tmp_path, client, library):
    """The interval is that of the differences per task; tasks of one alone do not count."""
    size = RunSize(held_out=9, batch_size=4)
    other = make_run(tmp_path / "other", Maker(size=size, seed=5))
    rewards = {}
    for group in read_groups(other / "evaluations.db"):
        if group.id.startswith("after/held-out/sampled") and group.scored:
            rewards[group.task.id] = fmean(one.reward for one in group.scored)
    keys = [library(path).index(Folder.of(path), wait_s=120).folder.key for path in (run, other)]
    page = client(run, other).get("/compare", params={"run": keys, "format": "json"}).json()
    found = next(one for one in page["differences"] if one["place"] == "held-out/sampled")
    expected = paired_difference(evaluated["after", "sampled"], rewards)
    assert (found["first"], found["second"]) == tuple(keys)
    assert found["difference"]["value"] == pytest.approx(expected.difference)
    assert (found["difference"]["low"], found["difference"]["high"]) == pytest.approx((expected.low, expected.high))
    assert found["shared"] == expected.num_tasks <= 9
    assert found["only_first"] >= 3
    assert {row["name"]: row["values"] for row in page["settings"]}["seed"] == ["0", "5"]
    assert not page["incomplete"]


def test_money_is_compared_where_a_price_is_given(run, live, library):
    """Red when `compare_page` does not pass the price on, or the template shows none."""
    opened = library(run, live)
    runs = [(folder, opened.files(folder), opened.index(folder, wait_s=120)) for folder in opened.folders()]
    costs = [one.cost for one in compare_page(runs, price_per_hour=2.5).runs]
    assert all(one.money == 2.5 * one.hours for one in costs if one.hours is not None)
    assert any(one.money for one in costs)
    assert [one.cost.money for one in compare_page(runs).runs] == [None, None]


def test_money_stands_on_the_pages(run, live, client):
    keys = [Folder.of(path).key for path in (run, live)]
    assert "money, at 2.500 an hour" in client(run, live, price_per_hour=2.5).get("/compare", params={"run": keys}).text
    assert "money" not in client(run, live).get("/compare", params={"run": keys}).text


def test_tables_of_two_runs_fold_on_a_phone(run, live, client):
    """Where a row folds, each of its cells says whose it is."""
    keys = [Folder.of(path).key for path in (run, live)]
    text = client(run, live).get("/compare", params={"run": keys}).text
    tables = text.split("<table")[1:]
    assert tables
    assert all(table.startswith(' class="folding') for table in tables)
    bodies = [table[table.index("<tbody>") : table.index("</tbody>")] for table in tables]
    assert all(body.count("<td") == body.count("data-name=") > 0 for body in bodies)


def test_the_band_of_the_reward_is_the_interval_of_its_mean_over_the_tasks(index, run):
    """By hand, as the ratio of the sums of rewards and counts; red when rollouts are taken for independent."""
    groups = [one for one in read_groups(run / "run.db") if one.id.startswith("step-2/") and one.scored]
    counts = [len(group.scored) for group in groups]
    sums = [sum(one.reward for one in group.scored) for group in groups]
    mean = sum(sums) / sum(counts)
    errors = [total - mean * count for total, count in zip(sums, counts, strict=True)]
    size = len(groups)
    variance = sum(error**2 for error in errors) * size / (size - 1) / sum(counts) ** 2
    margins = reward_margins(index)
    assert margins[3] == pytest.approx(student_quantile(size - 1) * math.sqrt(variance))
    page = run_page(Folder.of(run), read_files(run), Diagnosis(), margins={3: 0.25})
    reward = dict(zip(page.learning.training.steps, page.learning.training.values, strict=True))
    band = dict(zip(page.learning.training.steps, page.learning.training.low, strict=True))
    assert (band[2], band[3]) == (None, reward[3] - 0.25)


def test_the_band_does_not_leave_the_rewards(index, run):
    """Red for a band above 1 where rewards are 0 and 1."""
    low, high = reward_range(index)
    rewards = [one.reward for group in read_groups(run / "run.db") for one in group.scored]
    assert (low, high) == (min(rewards), max(rewards))
    margins = dict.fromkeys(range(1, 7), 5.0)
    page = run_page(Folder.of(run), read_files(run), Diagnosis(), margins=margins, rewards=(low, high))
    assert set(page.learning.training.low) == {low}
    assert set(page.learning.training.high) == {high}


def test_tasks_have_their_questions_and_are_found_by_them(index, client, run):
    page = tasks_page(index, place="training", order="name")
    assert all(row.question for row in page.rows)
    wanted = page.rows[1]
    found = tasks_page(index, place="training", text=wanted.question.upper())
    assert wanted.task in [row.task for row in found.rows]
    assert all(wanted.question in row.question for row in found.rows)
    assert [row.task for row in tasks_page(index, place="training", text="train/2").rows] == ["train/2"]
    text = client(run).get(f"/run/{Folder.of(run).key}/tasks", params={"of": "training", "text": "no such thing"}).text
    assert "No task has “no such thing”" in text


def test_a_curve_as_csv(client, run):
    answer = client(run).get(f"/run/{Folder.of(run).key}/curve.csv")
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    lines = list(csv.DictReader(io.StringIO(answer.text)))
    recorded = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    rewards = {int(line["step"]): float(line["training reward"]) for line in lines if line["training reward"]}
    assert rewards == {row["step"]: row["reward/mean"] for row in recorded if "reward/mean" in row}
    assert {"held-out sampled", "held-out sampled low", "held-out sampled high"} <= lines[0].keys()


def test_every_check_has_a_sentence(run, client):
    """Red for a check that is only a name, on the page too."""
    checks = run_page(Folder.of(run), read_files(run), Diagnosis()).soundness.checks
    assert checks
    assert all(check.meaning for check in checks)
    text = client(run).get(f"/run/{Folder.of(run).key}").text
    assert all(html.escape(check.meaning[1:]) in text.replace("&#39;", "&#x27;") for check in checks)


def test_a_run_that_nobody_named_has_a_name_for_people(tmp_path):
    (tmp_path / "Experiment-20261124150409").mkdir()
    assert Folder.of(tmp_path / "Experiment-20261124150409").title == "Run of 2026-11-24, 15:04:09"
    assert Folder.of(tmp_path / "Experiment-2").title == "Experiment-2"


class Groups:
    """An index of nothing but groups: step, rollouts with a reward, their mean."""

    def __init__(self, *rows: tuple[int, int, float]) -> None:
        self._rows = rows

    @contextlib.contextmanager
    def reading(self):
        with contextlib.closing(sqlite3.connect(":memory:")) as connection:
            connection.execute("CREATE TABLE groups (number, id, place, step, scored, mean)")
            rows = [(number, str(number), TRAINING, *row) for number, row in enumerate(self._rows)]
            connection.executemany("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?)", rows)
            yield connection


def test_a_step_whose_tasks_all_do_alike_has_no_band():
    """Red where step 2 has a band of width 0, as if its mean were known. By hand: 0.2 and 0.4, deviation 0.141421, half
    width 12.706205 * 0.141421 / sqrt(2)."""
    margins = reward_margins(Groups((1, 4, 0.2), (1, 4, 0.4), (2, 8, 0.3), (2, 4, 0.1 + 0.2), (3, 4, 1.0)))
    assert margins == {1: pytest.approx(1.2706205)}


def test_one_run_alone_is_no_comparison(run, client):
    key = Folder.of(run).key
    assert client(run).get(f"/compare?run={key}&run={key}").status_code == 404
