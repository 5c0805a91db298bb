"""`sharpen run`, `check` and `eval` for real, on a toy model: what they print and their exit codes."""

import io
import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import http_here
import pytest
from processes import forked, wait_for

from sharpen.cli.main import main

AGENT = """
import asyncio
from sharpen import WorkflowOutput

async def answer(task, model):
    messages = [{"role": "user", "content": task["question"]}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=4)
    return WorkflowOutput(reward=float("e" in (reply.choices[0].message.content or "")))

async def constant(task, model):
    await answer(task, model)
    return WorkflowOutput(reward=0.0)

async def slow(task, model):
    await asyncio.sleep(0.2)
    return await answer(task, model)
"""


@pytest.fixture
def config(tmp_path: Path, toy_model_dir: Path, toy_dataset: Path) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    path = tmp_path / "run.yaml"
    path.write_text(
        "workflow: agent.py:answer\n"
        f"checkpoint_root_dir: {tmp_path / 'runs'}\n"
        f"train_dataset: {{path: {toy_dataset}, total_steps: 2}}\n"
        f"model: {{model_path: {toy_model_dir}, max_model_len: 64}}\n"
        "algorithm: {group_size: 4, batch_size: 2, learning_rate: 0.001}\n"
    )
    return path


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def test_check_says_ready_or_what_to_fix_and_a_terminal_how_far_it_is(config, capsys, monkeypatch):
    with monkeypatch.context() as at_a_terminal:
        at_a_terminal.setenv("TERM", "xterm")
        at_a_terminal.setattr(sys, "stderr", terminal := Terminal())
        assert main(["check", "--config", str(config), "--tasks", "6"]) == 0
        assert sys.stderr is terminal
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "ready"
    assert "loading the model" not in out
    for begun in ("loading libraries", "loading the model", "checking agent and judge 0/24"):
        assert begun in terminal.getvalue()
    assert "s for a step's at this pace" in out
    constant = f"workflow={config.parent / 'agent.py'}:constant"
    assert main(["check", "--config", str(config), "--set", constant]) == 1
    said = capsys.readouterr()
    assert "every reward is the same (0)" in said.out
    assert "checking agent and judge" not in said.err, "not a terminal"


def test_eval_of_a_checkpoint_agrees_with_the_run(config, tmp_path, capsys):
    assert main(["run", "--config", str(config), "--set", "name=first"]) == 0
    summary = json.loads((tmp_path / "runs/Sharpen/first/summary.json").read_text())
    model = tmp_path / "runs/Sharpen/first/latest"
    output = tmp_path / "rewards.json"
    options = ["--set", "algorithm.batch_size=2", "--output", str(output), "--model", str(model)]
    options += ["--transcripts", str(tmp_path / "kept")]
    assert main(["eval", "--config", str(config), *options]) == 0
    rewards = json.loads(output.read_text())["greedy"]
    assert len(rewards) == 40  # without eval_dataset all training tasks; the run held out four of them
    assert summary["after"]["greedy"]["num_tasks"] == 4
    assert "held-out greedy:" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "kept"), "--task", "7", "--mode", "greedy"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("model/held-out/greedy/")
    assert "no loss (temperature 0)" in shown
    assert "tokens are shown as ids" not in shown  # the settings beside it name the tokenizer


def test_a_run_ends_with_its_report_and_a_card_in_the_checkpoint(config, tmp_path, capsys):
    from sharpen.learning.trainer.checkpoint import is_whole

    assert main(["run", "--config", str(config), "--set", "name=told"]) == 0
    run = tmp_path / "runs/Sharpen/told"
    assert f"report:        {run / 'report.html'}" in capsys.readouterr().out
    assert "told" in (run / "report.html").read_text()
    assert "step 2" in (run / "latest" / "README.md").read_text()
    assert is_whole((run / "latest").resolve())
    assert main(["certify", str(run)]) == 0
    assert main(["run", "--config", str(config), "--set", "name=told", "--set", "train_dataset.total_steps=3"]) == 0


class Canned(BaseHTTPRequestHandler):
    """An OpenAI-compatible endpoint that always says 'here'."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "here"}}
        body = json.dumps(
            {"id": "1", "object": "chat.completion", "created": 1, "model": "canned", "choices": [choice]}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_eval_of_an_endpoint(config, capsys):
    with http_here.answering(Canned) as url:
        given = ["--base-url", f"{url}/v1", "--model-name", "canned", "--transcripts", str(config.parent / "kept")]
        assert main(["eval", "--config", str(config), *given]) == 0
    assert "held-out sampled: 1.000" in capsys.readouterr().out
    assert main(["show", str(config.parent / "kept"), "--task", "7"]) == 0
    assert "outcome ok   reward 1   calls 0" in capsys.readouterr().out  # its calls are not recorded


def test_bad_input_is_exit_code_2_and_failure_1(config, tmp_path, capsys):
    assert main(["run", "--config", str(config), "--set", "rolout.timeout_s=3"]) == 2
    assert "rollout" in capsys.readouterr().err
    (tmp_path / "unlucky.py").write_text("async def broken(task, model):\n    raise RuntimeError('no luck')\n")
    assert main(["run", "--config", str(config), "--set", f"workflow={tmp_path / 'unlucky.py'}:broken"]) == 1
    said = capsys.readouterr().err
    assert "no luck" in said
    assert "Traceback" not in said


def test_ctrl_c_saves_a_checkpoint_and_exits_130(config, tmp_path):
    workflow = f"workflow={tmp_path / 'agent.py'}:slow"
    settings = ["name=stopped", workflow, "train_dataset.total_steps=500", "evaluation.before_and_after=false"]
    command = ["-m", "sharpen.cli.main", "run", "--config", str(config)]
    command += [part for setting in settings for part in ("--set", setting)]
    run = tmp_path / "runs/Sharpen/stopped"
    metrics = run / "metrics.jsonl"
    with forked(*command) as process:
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2, process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=400)
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert (run / "latest" / "model.safetensors").exists()
    assert json.loads((run / "summary.json").read_text())["steps"] >= 2


def test_all_files_of_a_run_have_the_mode_that_the_umask_leaves(config: Path):
    """Red with weights as safetensors writes them (for their owner alone), and with a journal as SQLite makes it."""
    before = os.umask(0o002)
    try:
        assert (
            main(["run", "--config", str(config), "--set", "name=modes", "--set", "train_dataset.total_steps=1"]) == 0
        )
    finally:
        os.umask(before)
    run_dir = config.parent / "runs" / "Sharpen" / "modes"
    files = [path for path in run_dir.rglob("*") if path.is_file() and not path.is_symlink()]
    assert {path.suffix for path in files} >= {".safetensors", ".db", ".lock", ".json", ".jsonl", ".html"}
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files if path.stat().st_mode & 0o777 != 0o664} == {}
    assert {oct(path.stat().st_mode & 0o777) for path in run_dir.rglob("*") if path.is_dir()} == {"0o775"}
