"""The command line: what it takes, what it says, and its exit codes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from sharpen.cli.main import BAD_INPUT, DONE, FAILED, INTERRUPTED, build_parser, main
from sharpen.errors import ConfigError, DatasetError, EngineError, ModelError, SamplingError
from sharpen.machine import FILLING_GAPS

AGENT = "async def run_agent(task, model):\n    return None\n"
RUN = """\
workflow: agent.py:run_agent
train_dataset: {path: tasks.jsonl}
model: {model_path: model, max_model_len: 64}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path / "run.yaml"


def ending_with(error: BaseException):
    def command(arguments: Namespace) -> int:
        raise error

    return {"run": command}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("wrong"), BAD_INPUT),
        (DatasetError("wrong"), BAD_INPUT),
        (ModelError("wrong"), BAD_INPUT),
        (SamplingError("wrong"), BAD_INPUT),
        (EngineError("wrong"), FAILED),
        (KeyboardInterrupt(), INTERRUPTED),
    ],
)
def test_exit_codes_tell_the_truth_in_one_line(error, code, config: Path, capsys):
    assert main(["run", "--config", str(config)], ending_with(error)) == code
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err == ("sharpen: interrupted\n" if code == INTERRUPTED else "sharpen: wrong\n")


def test_done_is_zero(config: Path):
    assert main(["run", "--config", str(config)], {"run": lambda arguments: DONE}) == 0


def test_a_path_that_no_argument_names_keeps_its_traceback(config: Path, capsys):
    """Such as that of a checkpoint, once a run is under way."""
    for path in (config.parent / "runs" / "model.safetensors", "/nonexistent/model.safetensors", 3):
        with pytest.raises(FileNotFoundError):
            main(["run", "--config", str(config)], ending_with(FileNotFoundError(errno.ENOENT, "gone", path)))
    for path in (config, config.parent):
        error = FileNotFoundError(errno.ENOENT, "gone", str(path))
        assert main(["run", "--config", str(config)], ending_with(error)) == BAD_INPUT
        assert capsys.readouterr().err == f"sharpen: gone: {path}\n"


def test_a_bug_of_ours_keeps_its_traceback(config: Path):
    with pytest.raises(ZeroDivisionError):
        main(["run", "--config", str(config)], ending_with(ZeroDivisionError()))


def test_no_arguments_print_help_and_are_bad_input(capsys):
    assert main([]) == BAD_INPUT
    assert "usage: sharpen" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["train"],
        ["run", "--config"],
        ["check", "--config", "run.yaml", "--tasks", "0"],
        ["eval", "--config", "run.yaml", "--model", "m", "--base-url", "u"],
    ],
)
def test_a_wrong_command_line_is_bad_input(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == BAD_INPUT
    assert "usage: sharpen" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["run", "--config", "nowhere.yaml"], "cannot read the configuration file nowhere.yaml"),
        (["run", "--config", "CONFIG", "--set", "algorithm.group_sise=4"], "did you mean 'algorithm.group_size'?"),
        (["run", "--config", "CONFIG", "--set", "seed"], "key=value"),
        (["run", "--config", "CONFIG", "--set", "workflow=null"], "'workflow' is missing"),
        (["check", "--config", "CONFIG", "--set", "workflow=no_module_of_ours:run"], "no module 'no_module_of_ours'"),
        (["run", "--config", "CONFIG", "--set", "judge=CONFIG"], "a function is named"),
        (["eval", "--config", "CONFIG", "--base-url", "http://x"], "--base-url needs --model-name"),
        (["eval", "--config", "CONFIG", "--model-name", "x"], "--model-name belongs to --base-url"),
        (["eval", "--config", "CONFIG", "--split", "test"], "'eval_dataset.path' is missing"),
        (
            ["eval", "--config", "CONFIG", "--base-url", "u", "--model-name", "n", "--api-key-env", "NO_SUCH_VARIABLE"],
            "NO_SUCH_VARIABLE (--api-key-env) is not set",
        ),
    ],
)
def test_bad_input_is_one_clear_message(argv, message, config: Path, capsys):
    assert main([part.replace("CONFIG", str(config)) for part in argv]) == BAD_INPUT
    written = capsys.readouterr()
    assert message in written.err
    assert "Traceback" not in written.err


def test_eval_takes_a_model_directory_or_an_endpoint():
    parsed = build_parser().parse_args(
        ["eval", "--config", "c", "--model", "m", "--dataset", "d", "--output", "o.json"]
    )
    assert (parsed.model, parsed.dataset, parsed.output) == ("m", "d", Path("o.json"))


def test_import_and_help_are_light():
    """`import sharpen` loads no torch, transformers or pydantic, and `--help` no more than argparse."""
    code = (
        "import sys, json; import sharpen\n"
        "from sharpen.cli.main import build_parser; build_parser().format_help()\n"
        "heavy = [m for m in ('torch', 'transformers', 'pydantic', 'datasets', 'rich', 'yaml') if m in sys.modules]\n"
        "print(json.dumps(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_the_installed_command_answers():
    done = subprocess.run([sys.executable, "-m", "sharpen.cli.main", "--version"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("sharpen 0.")


def test_what_trains_starts_with_the_allocator_that_fills_gaps(config: Path):
    """`sharpen run` starts itself anew: the agent's code and all processes below find it set. Commands that do not
    train keep their environment. What comes after the agent's code is read, models and all, is left out."""
    says = "import os\nprint('GAPS', os.getenv('GLIBC_TUNABLES'), flush=True)\nos._exit(0)\n"
    (config.parent / "agent.py").write_text(says)
    (config.parent / "tasks.jsonl").write_text('{"question": "?"}\n')
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    for command, found in (("run", FILLING_GAPS), ("check", None)):
        words = [sys.executable, "-m", "sharpen", command, "--config", str(config)]
        done = subprocess.run(words, cwd=config.parent, capture_output=True, text=True, env=environment, timeout=120)
        assert f"GAPS {found}" in done.stdout + done.stderr
