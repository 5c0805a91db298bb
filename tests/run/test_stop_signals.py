"""Signals of a run: SIGTERM is Ctrl-C, a terminal or pipe that is closed costs the display alone."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from processes import line_of, python

from sharpen.cli.main import main
from sharpen.interrupts import deferred_interrupt, stop_signals

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


def handlers() -> list[object]:
    return [signal.getsignal(getattr(signal, name)) for name in NAMES]


def test_sigterm_interrupts_as_ctrl_c_and_waits_for_a_step_to_be_whole():
    before = handlers()
    done: list[str] = []

    def run() -> None:
        with deferred_interrupt():
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("the step")
        done.append("never")

    with stop_signals(), pytest.raises(KeyboardInterrupt):
        run()
    assert done == ["the step"]
    assert handlers() == before


def test_in_the_background_of_a_shell_ctrl_c_stays_ignored_and_sigterm_works():
    """There SIGINT is ignored, also what `deferred_interrupt` raises behind a step. Red without the handler for it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)

    def step(number: int) -> None:
        with deferred_interrupt():
            os.kill(os.getpid(), number)

    try:
        with stop_signals():
            os.kill(os.getpid(), signal.SIGINT)
            step(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                step(signal.SIGTERM)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_of_the_users_stays():
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with stop_signals(), stop_signals():
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


AGENT = """\
import os, signal
rollouts = 0

async def run_agent(task, model):
    global rollouts
    rollouts += 1
    if rollouts == 5:
        os.kill(os.getpid(), signal.SIGHUP)
    if rollouts == 17:
        os.kill(os.getpid(), signal.SIGTERM)
    reply = await model.client.chat.completions.create(
        model=model.name, messages=[{"role": "user", "content": task["question"]}], max_tokens=4
    )
    print("a workflow prints")
    return float((reply.choices[0].message.content or "").count("e"))
"""


def test_a_run_outlives_its_terminal_and_its_pipe_and_saves_on_sigterm(tmp_path: Path, toy_model_dir, toy_dataset):
    """One real process: SIGHUP in its first step, nobody reads its output from then on, SIGTERM in its third."""
    (tmp_path / "agent.py").write_text(AGENT)
    settings = {
        "workflow": "agent.py:run_agent",
        "name": "one",
        "checkpoint_root_dir": str(tmp_path),
        "train_dataset": {"path": str(toy_dataset), "split": "train", "total_steps": 20},
        "model": {"model_path": str(toy_model_dir), "max_model_len": 128, "max_tokens": 4},
        "algorithm": {"algorithm_type": "grpo", "group_size": 4, "batch_size": 2, "learning_rate": 1e-3},
        "evaluation": {"before_and_after": False, "hold_out": False},
        "check": {"enabled": False},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    with python("-m", "sharpen.cli.main", "run", "--config", "run.yaml", cwd=tmp_path) as process:
        line_of(process)
        process.stdout.close()
        code, errors = process.wait(400), process.stderr.read()
    assert code == 130, errors
    assert errors.endswith("sharpen: interrupted\n")
    run_dir = tmp_path / "Sharpen" / "one"
    assert (run_dir / "latest").resolve().name == "global_step_2"
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]


def test_a_run_without_rollouts_saves_on_sigterm_too(tmp_path: Path, toy_model_dir):
    rows = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}] * 4
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "name": "two",
        "checkpoint_root_dir": str(tmp_path),
        "train_dataset": {"path": "rows.jsonl", "total_steps": 400},
        "model": {"model_path": str(toy_model_dir), "max_model_len": 64},
        "algorithm": {"algorithm_type": "sft", "batch_size": 2, "save_interval_steps": 100_000},
        "evaluation": {"before_and_after": False, "hold_out": False},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    run_dir = tmp_path / "Sharpen" / "two"
    metrics = run_dir / "metrics.jsonl"

    def stop() -> None:
        while not metrics.exists() or metrics.read_text().count("\n") < 3:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    assert main(["run", "--config", str(tmp_path / "run.yaml")]) == 130
    thread.join()
    last = json.loads(metrics.read_text().splitlines()[-1])["step"]
    assert (run_dir / "latest").resolve().name == f"global_step_{last}"
