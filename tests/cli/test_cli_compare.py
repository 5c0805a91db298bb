"""`sharpen compare`: which run is better, over which tasks, and what sets them apart."""

import json

import pytest
from reported_runs import make_run

from sharpen.cli.main import main


@pytest.fixture
def two(tmp_path, monkeypatch):
    """Twenty tasks: the first run solves 4 of them at the end, the second 18 and one more that the first lacks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = {"seed": {"value": 1, "origin": "file"}, "algorithm.learning_rate": {"value": 1e-6, "origin": "file"}}
    for name, solved, rate in (("a", 4, 1e-6), ("b", 18, 1e-5)):
        answers = {f"test/{n}": (("wrong", 0.0), ("x", float(n < solved))) for n in range(20 + (name == "b"))}
        resolved = settings | {"algorithm.learning_rate": {"value": rate, "origin": "file"}}
        make_run(tmp_path / name, answers, resolved=resolved).rename(tmp_path / name / "Project" / name)
    return [str(tmp_path / name / "Project" / name) for name in ("a", "b")]


def test_the_better_one_is_named_with_its_interval(two, capsys):
    assert main(["compare", *two]) == 0
    out = capsys.readouterr().out
    assert "held-out/sampled, B - A: +0.700 [+" in out
    assert "over 20 tasks: B is better" in out
    assert "0 of A, 1 of B" in out
    assert "algorithm.learning_rate  A: 1e-06  B: 1e-05" in out
    assert "seed" not in out
    assert main(["compare", *reversed(two)]) == 0
    assert "-0.700 [-" in (out := capsys.readouterr().out)
    assert "A is better" in out


def test_json(two, capsys):
    assert main(["compare", *two, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["differences"][0]["difference"]["value"] == pytest.approx(0.7)
    assert [run["run"]["name"] for run in answer["runs"]] == ["a", "b"]


def test_money_where_a_price_is_given(two, capsys):
    """Red when the price is not passed on."""
    assert main(["compare", *two, "--price-per-hour", "2"]) == 0
    assert capsys.readouterr().out.count("at 2.000 an hour") == 2
    assert main(["compare", *two]) == 0
    assert "an hour" not in capsys.readouterr().out


def test_one_run_is_not_enough(two, tmp_path, capsys):
    assert main(["compare", two[0], two[0]]) == 2
    assert "two different runs" in capsys.readouterr().err
    assert main(["compare", two[0], str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err
