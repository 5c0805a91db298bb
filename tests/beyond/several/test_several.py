"""`sharpen seeds` and `sharpen sweep`: what they train, what they say, and their exit codes."""

import json
import sys
from statistics import fmean

import pytest

from sharpen.beyond.several import Trained, spread, trainer
from sharpen.beyond.sweep import Range, parse_range, sweep
from sharpen.cli.main import build_parser, main
from sharpen.cli.seeds import run_seeds
from sharpen.cli.sweep import run_sweep
from sharpen.errors import ConfigError


@pytest.fixture
def config(tmp_path, toy_model_dir, toy_dataset):
    (tmp_path / "agent.py").write_text("async def run(task, model):\n    return 1.0\n")
    path = tmp_path / "run.yaml"
    path.write_text(
        f"workflow: agent.py:run\ntrain_dataset: {{path: {toy_dataset}, total_steps: 1}}\n"
        f"model: {{model_path: {toy_model_dir}, max_model_len: 64}}\n"
    )
    return path


def trained(name, settings, gain, code=0):
    verdict = {"text": f"better by {gain}", "difference": gain}
    modes = {"before": {"sampled": {"accuracy": 0.25}}, "after": {"sampled": {"accuracy": 0.25 + (gain or 0)}}}
    summary = {"verdict": verdict, "run_dir": f"runs/{name}", **modes}
    return Trained(name=name, settings=settings, code=code, summary={} if code else summary)


def test_the_interval_is_students():
    """By hand: mean 2, deviation 1, 4.302653 / sqrt(3) = 2.484138."""
    found = spread([1.0, 2.0, 3.0])
    assert (found.mean, found.deviation, found.count) == (2.0, 1.0, 3)
    assert found.low == pytest.approx(2 - 2.484138, abs=1e-6)
    assert spread([5.0]).low is None
    assert spread([]) is None
    many = [float(n % 2) for n in range(60)]
    assert spread(many).high - fmean(many) == pytest.approx(2.0010 * spread(many).deviation / 60**0.5, rel=1e-4)


def seeds_of(config, *more):
    return build_parser().parse_args(["seeds", "--config", str(config), "--seeds", "0,7", *more])


def test_seeds_are_trained_under_names_that_stay(config, capsys):
    seen = []

    def train(name, settings):
        seen.append((name, settings))
        return trained(name, settings, 0.1 if settings["seed"] else 0.3)

    assert run_seeds(seeds_of(config), train) == 0
    assert seen == [("run-seed-0", {"seed": 0}), ("run-seed-7", {"seed": 7})]
    out = capsys.readouterr().out
    assert "seed 7: better by 0.1  (runs/run-seed-7)" in out
    assert "gain: 0.200 [-1.071, 1.471] (2 runs, deviation 0.141)" in out
    assert "sampled after: 0.450 [" in out
    assert run_seeds(seeds_of(config, "--json"), train) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["spread"]["gain"]["mean"] == pytest.approx(0.2)
    assert [run["seed"] for run in answer["runs"]] == [0, 7]


def test_a_run_that_fails_is_said_and_the_others_count(config, capsys):
    assert run_seeds(seeds_of(config), lambda name, s: trained(name, s, 0.3, code=s["seed"] and 1)) == 1
    out = capsys.readouterr().out
    assert "seed 7: failed with exit code 1" in out
    assert "gain: 0.300 (one run has no interval)" in out
    with pytest.raises(ConfigError, match="exit code 1"):
        run_seeds(seeds_of(config), lambda name, s: trained(name, s, 0.3, code=1))


@pytest.mark.parametrize("seeds", ["", "a,b", "1,1"])
def test_seeds_that_are_none(config, seeds, capsys):
    with pytest.raises(SystemExit, match="2"):
        build_parser().parse_args(["seeds", "--config", str(config), "--seeds", seeds])
    assert "--seeds" in capsys.readouterr().err


def test_a_process_is_started_with_the_options_and_its_answer_read():
    code = "import sys, json; print(json.dumps({'run_dir': ' '.join(sys.argv[1:])}))"
    found = trainer(["--config", "f.yaml", "--set", "a=1"], (sys.executable, "-c", code))("n", {"seed": 3})
    assert found.run_dir == 'run --config f.yaml --set a=1 --json --set seed=3 --set name="n"'
    failed = trainer([], (sys.executable, "-c", "raise SystemExit(2)"))("n", {})
    assert (failed.code, failed.gain, failed.run_dir) == (2, None, "")
    with pytest.raises(KeyboardInterrupt):
        trainer([], (sys.executable, "-c", "raise SystemExit(130)"))("n", {})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a.b=4,8", Range(setting="a.b", values=(4, 8))),
        ("a=1e-6,x,true", Range(setting="a", values=(1e-6, "x", True))),
        ("a=1e-6:1e-4:log", Range(setting="a", low=1e-6, high=1e-4, log=True)),
    ],
)
def test_ranges(text, found):
    assert repr(parse_range(text)) == repr(found)


@pytest.mark.parametrize("text", ["a", "a=", "=1", "a=1:x", "a=2:1", "a=0:1:log", "a=1:2:lin"])
def test_ranges_that_are_none(text):
    with pytest.raises(ConfigError, match="--vary"):
        parse_range(text)


def test_a_sweep_finds_the_best_and_is_the_same_again():
    """The gain is greatest at 0.3, on a curve."""
    ranges = [Range(setting="a", low=0.0, high=0.9), Range(setting="b", values=("x", "y"))]

    def train(name, settings):
        gain = -((settings["a"] - 0.3) ** 2) - (settings["b"] == "x")
        return trained(name, settings, None if name.endswith("-3") else gain)

    done = sweep(ranges, train, base="run", trials=12, seed=0)
    assert [one.gain for one in done[:-1]] == sorted((one.gain for one in done[:-1]), reverse=True)
    assert done[0].settings["b"] == "y"
    assert done[-1].gain is None
    again = sweep(ranges, train, base="run", trials=12, seed=0)
    assert [one.settings for one in again] == [one.settings for one in done]


def test_whole_numbers_stay_whole():
    done = sweep([Range(setting="n", low=2.0, high=4.0)], lambda n, s: trained(n, s, 0.1), base="run", trials=4, seed=0)
    assert {type(one.settings["n"]) for one in done} == {int}


def test_the_sweeps_command_says_what_to_do_next(config, capsys):
    words = ["sweep", "--config", str(config), "--trials", "2", "--vary", "algorithm.group_size=4,8"]
    parsed = build_parser().parse_args(words)
    assert run_sweep(parsed, lambda name, s: trained(name, s, s["algorithm.group_size"] / 10)) == 0
    out = capsys.readouterr().out
    assert f"sharpen seeds --config {config} --set algorithm.group_size=" in out
    assert "partly by luck" in out
    assert run_sweep(parsed, lambda name, s: trained(name, s, None)) == 1
    assert "eval_dataset" in capsys.readouterr().out
    assert main(["sweep", "--config", str(config), "--vary", "algorithm.group_siz=4,8"]) == 2
    assert "group_size" in capsys.readouterr().err


@pytest.mark.slow
def test_two_seeds_for_real(tmp_path, capsys):
    from sharpen.cli.starter.folder import write_starter
    from sharpen.cli.starter.tiny_model import make_tiny_model

    write_starter(tmp_path, "openai", None)
    make_tiny_model(tmp_path / "model")
    options = ["--config", str(tmp_path / "run.yaml"), "--set", f"checkpoint_root_dir={tmp_path / 'runs'}"]
    assert main(["seeds", *options, "--seeds", "0,1", "--set", "train_dataset.total_steps=4", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [run["summary"]["steps"] for run in answer["runs"]] == [4, 4]
    assert answer["spread"]["sampled after"]["count"] == 2
