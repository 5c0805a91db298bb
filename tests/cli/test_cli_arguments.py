"""What all commands have in common: RUN, --json, one line on stderr, exit codes."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sharpen.cli.arguments import add_run, print_json, run_of
from sharpen.cli.list_runs import age
from sharpen.cli.main import BAD_INPUT, COMMANDS, build_parser, main
from sharpen.errors import ConfigError
from sharpen.run.lock import locked

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "commands.md"
ANSWERS_NOTHING = {"record", "serve", "view"}
"""Commands without `--json`."""


def make_run(root: Path, name: str, *, written: float = 0.0, **summary) -> Path:
    run = root / "Project" / name
    run.mkdir(parents=True)
    settings = {"algorithm.algorithm_type": {"value": "grpo"}, "model.model_path": {"value": "org/base"}}
    (run / "resolved.json").write_text(json.dumps(settings))
    (run / "metrics.jsonl").write_text(f'{{"step": 1, "time": {written}, "reward/mean": 0.5}}\n{{"step": 2, "rew')
    if summary:
        (run / "summary.json").write_text(json.dumps(summary))
    return run


def parsed(root: Path, *argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_run(parser)
    return parser.parse_args([*argv, "--root", str(root)])


def test_a_run_is_a_directory_a_name_a_beginning_or_the_latest(tmp_path: Path, capsys):
    old, new = make_run(tmp_path, "old-run", written=1000.0), make_run(tmp_path, "new-run", written=2000.0)
    assert run_of(parsed(tmp_path, str(old))) == old
    assert run_of(parsed(tmp_path, "old-run")) == old
    assert run_of(parsed(tmp_path, "Project/new-run")) == new
    assert run_of(parsed(tmp_path, "ne")) == new
    assert capsys.readouterr().err == ""
    assert run_of(parsed(tmp_path)) == new
    assert str(new) in capsys.readouterr().err


def test_a_run_that_is_not_there_is_named_with_what_is(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no run below.*--root"):
        run_of(parsed(tmp_path))
    make_run(tmp_path, "lesson-1"), make_run(tmp_path, "lesson-2")
    with pytest.raises(ConfigError, match=r"'lessen-1'.*2 runs.*lesson-1"):
        run_of(parsed(tmp_path, "lessen-1"))
    with pytest.raises(ConfigError, match=r"2 runs.*'lesson'"):
        run_of(parsed(tmp_path, "lesson"))


def test_ls_tells_running_stopped_and_done_runs_apart(tmp_path: Path, capsys):
    results = {"before": {"sampled": {"accuracy": 0.25}}, "after": {"sampled": {"accuracy": 0.75}}}
    make_run(tmp_path, "done", written=1000.0, **results, verdict={"kind": "better"})
    make_run(tmp_path, "stopped", written=2000.0)
    make_run(tmp_path, "damaged", written=2500.0)
    (tmp_path / "Project" / "damaged" / "resolved.json").write_text('{"cut off')
    with locked(make_run(tmp_path, "running", written=3000.0)):
        assert main(["ls", "--root", str(tmp_path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert main(["ls", "--root", str(tmp_path)]) == 0
    states = {run["name"]: (run["state"], run["step"], run["before"], run["after"], run["verdict"]) for run in found}
    assert states == {
        "Project/done": ("done", 1, 0.25, 0.75, "better"),
        "Project/stopped": ("stopped", 1, None, None, None),
        "Project/damaged": ("stopped", 1, None, None, None),
        "Project/running": ("running", 1, None, None, None),
    }
    table = capsys.readouterr().out.splitlines()
    assert "0.250 -> 0.750" in next(line for line in table if "Project/done" in line)


@pytest.mark.parametrize("content", ["[]", "5", '{"verdict": 5, "model.model_path": 3, "before": [], "held_out": 1}'])
def test_ls_leaves_empty_what_is_damaged(tmp_path: Path, capsys, content):
    """Red where an object is taken for granted: no run is listed because of one that is damaged."""
    run = make_run(tmp_path, "damaged")
    for name in ("resolved.json", "summary.json"):
        (run / name).write_text(content)
    make_run(tmp_path, "whole")
    assert main(["ls", "--root", str(tmp_path), "--json"]) == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["Project/damaged"] | {"written": 0} == {
        **dict.fromkeys(("model", "algorithm", "before", "after", "verdict", "error")),
        "name": "Project/damaged",
        "run_dir": str(run),
        "state": "stopped",
        "step": 1,
        "written": 0,
    }
    assert found["Project/whole"]["model"] == "org/base"


def test_a_process_that_was_killed_does_not_work_any_more(tmp_path: Path, capsys):
    """Red where whatever the lock's file says is believed."""
    run = make_run(tmp_path, "killed")
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    with locked(run):
        holder = json.loads((run / "run.lock").read_text())
    (run / "run.lock").write_text(json.dumps({**holder, "pid": done.pid}))
    main(["ls", "--root", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)[0]["state"] == "stopped"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_documented_with_its_flags_and_answers_in_json(name):
    """The same flag has the same metavar and the same words in each command; what answers has `--json`."""
    (commands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    flags = {flag: action for action in commands.choices[name]._actions for flag in action.option_strings}
    assert ("--json" in flags) == (name not in ANSWERS_NOTHING)
    page = DOCUMENT.read_text()
    assert f"\n## sharpen {name}\n" in page
    for flag in ("--json", "--root", "--stage"):
        for other in commands.choices.values():
            same = {flag: action for action in other._actions for flag in action.option_strings}
            if flag in flags and flag in same:
                assert (flags[flag].metavar, flags[flag].help) == (same[flag].metavar, same[flag].help)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in {"algorithms", "doctor", "ls"}])
def test_bad_input_is_exit_code_2_and_one_line_on_stderr(name, tmp_path: Path, capsys, monkeypatch):
    """Every command, with a run, a file or a model that is not there."""
    monkeypatch.chdir(tmp_path)
    (commands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    flags = [flag for action in commands.choices[name]._actions for flag in action.option_strings]
    if name == "init":  # writes none of the files that are there
        (tmp_path / "nowhere").mkdir()
        (tmp_path / "nowhere" / "run.yaml").touch()
    argv = ["--config", "nowhere.yaml"] if commands.choices[name].get_default("takes_default") else ["nowhere"]
    further = {"record": ["--upstream", "nowhere"], "export": ["nowhere", "--for", "sft", "--to", "x"]}
    further["seeds"], further["sweep"] = [*argv, "--seeds", "0"], [*argv, "--vary", "seed=0,1"]
    further["rescore"] = ["nowhere", "--judge", "judge.py:judge"]
    further["judge"] = ["check", "nowhere"]
    further["models"] = further["serve"] = ["./nowhere"]  # a path: a name is asked for on the hub
    argv = further.get(name, argv)
    assert main([name, *argv, *(["--json"] if "--json" in flags else [])]) == BAD_INPUT
    written = capsys.readouterr()
    assert written.out == ""
    assert re.fullmatch(r"sharpen: .*nowhere.*\n", written.err)


def test_json_has_no_number_that_json_lacks():
    out = io.StringIO()
    print_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": Path("x")}, out)
    assert json.loads(out.getvalue()) == {"a": None, "b": [None, 1.5], "c": "x"}


def test_the_reader_of_a_pipe_may_go(tmp_path: Path):
    """Red where the interpreter writes its last lines at exit: `Exception ignored ...`, and code 120."""
    command = f"{sys.executable} -m sharpen.cli.main algorithms; echo $? >&2"
    done = subprocess.run(["bash", "-c", f"{{ {command}; }} | true"], capture_output=True, text=True)
    assert done.stderr.split() in (["1"], ["0"])


def test_how_long_ago():
    assert [age(seconds) for seconds in (5, 150, 7300, 200_000)] == ["5 s ago", "2 min ago", "2 h ago", "2 days ago"]


def test_the_shell_is_answered_by_argcomplete(tmp_path: Path):
    """A stand-in for the package: it gets the whole parser, before anything else happens."""
    (tmp_path / "argcomplete.py").write_text(
        "def autocomplete(parser):\n    print(*parser._subparsers._group_actions[0].choices)\n    raise SystemExit(0)\n"
    )
    environment = {**os.environ, "_ARGCOMPLETE": "1", "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", "sharpen.cli.main"], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.split() == list(COMMANDS)
