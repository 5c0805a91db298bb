"""vLLM's core is killed in the middle of a run: one error, exit code 1, nothing left, and nothing trains twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from test_sync_end_to_end import check_accounted, rows
from vllm_served import MODEL

from agenttune.certify import certify
from agenttune.trainer.checkpoint import load, pointed

AGENT = """
import asyncio, contextlib, os, signal, threading, time
from pathlib import Path
import psutil
from agenttune import WorkflowOutput

WHEN, METRICS = os.environ["KILL_WHEN"], Path(os.environ["METRICS"])
answered = 0

def send(signal):
    (core,) = [one for one in psutil.Process().children() if one.name().startswith("VLLM::EngineCor")]
    core.send_signal(signal)

def target(number):
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{number}")
    return ""

def kill_as_weights_move():
    # They move as soon as the file in which they do is there; the core, which is stopped, cannot answer.
    while not any("agenttune-weights" in path for path in map(target, os.listdir("/proc/self/fd"))):
        time.sleep(0.01)
    time.sleep(0.2)
    send(signal.SIGKILL)

async def agent(task, model):
    global WHEN, answered
    messages = [{"role": "user", "content": task["question"]}]
    asked = model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=99)
    call = asyncio.ensure_future(asked)
    if WHEN == "generating" and METRICS.exists() and METRICS.read_text().count("rollout/count") == 2:
        WHEN = ""
        await asyncio.sleep(0.05)
        send(signal.SIGKILL)
    reply = await call
    answered += 1
    if WHEN == "moving" and answered == 12:
        send(signal.SIGSTOP)
        threading.Thread(target=kill_as_weights_move, daemon=True).start()
    return WorkflowOutput(reward=len(reply.choices[0].message.content or "") % 7 / 7)
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The temporary folder of a run, whose path is short enough for sockets in it."""
    with tempfile.TemporaryDirectory(prefix="at-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("when", "style", "words"),
    [
        ("generating", "fully_async", "vLLM's processes died while they were generating"),
        ("moving", "fixed", "new weights could not be loaded into vLLM"),
    ],
)
def test_a_run_whose_engine_is_killed_ends_with_one_error_and_goes_on_from_there(
    tmp_path, temporary, toy_dataset, when, style, words
):
    """The steps that had trained are in the checkpoint, also the one whose weights were moving; the others train once,
    in the session that goes on. Red when `SAVED_ON` (loop.py) lacks `EngineError`, and when `_train` lets it pass: the
    checkpoint would have the weights of a step more than it tells; or when `open` (gateway/gateway.py) does not look:
    every rollout would be tried again, and the error would be another one; or hangs when `load` (inference/vllm.py)
    waits for vLLM's answer alone."""
    ran = run(tmp_path, temporary, toy_dataset, style, when)
    assert ran.returncode == 1, ran.stderr
    error = ran.stderr.splitlines()[-1]
    assert words in error
    assert "Traceback" not in ran.stderr
    assert "failed: saving a checkpoint" in ran.stdout
    assert not left(temporary)
    assert not list(temporary.glob("agenttune-*"))
    run_dir = tmp_path / "P" / "fixed"
    done = len(rows(run_dir))
    assert done == (2 if when == "generating" else 1)
    position = load(pointed(run_dir, "latest")).state["position"]
    assert position["step"] == done
    ran = run(tmp_path, temporary, toy_dataset, style, "never", "--set", "engine.type=embedded")
    assert ran.returncode == 0, ran.stderr
    recorded = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in recorded if "rollout/count" in row] == [1, 2, 3, 4]
    check_accounted(run_dir, 4)
    certificate = certify(run_dir)
    assert certificate.holds, certificate.problems


def left(temporary: Path) -> list[psutil.Process]:
    """Processes of the run that do not end within a while."""
    deadline = time.monotonic() + 20
    while True:
        found = psutil.process_iter(["environ"])
        ours = [one for one in found if (one.info["environ"] or {}).get("TMPDIR") == str(temporary)]
        if not ours or time.monotonic() > deadline:
            return ours
        time.sleep(0.2)


def run(
    folder: Path, temporary: Path, dataset: Path, style: str, when: str, *more: str
) -> subprocess.CompletedProcess[str]:
    """`agenttune run`, in a process of its own."""
    (folder / "agent.py").write_text(AGENT)
    (folder / "run.yaml").write_text(
        f"workflow: agent.py:agent\nproject: P\nname: fixed\ncheckpoint_root_dir: {folder}\n"
        f"train_dataset: {{path: {dataset}, total_steps: 4}}\n"
        f"model: {{model_path: {MODEL}, max_model_len: 256}}\n"
        "algorithm: {group_size: 4, batch_size: 3, learning_rate: 1.0e-4, save_interval_steps: 99}\n"
        "evaluation: {before_and_after: false, hold_out: false}\ncheck: {enabled: false}\n"
        f"sync: {{style: {style}}}\nengine: {{type: vllm, kv_cache_mb: 64, max_slots: 24}}\n"
    )
    command = [sys.executable, "-m", "agenttune.cli.main", "run", "--config", str(folder / "run.yaml"), *more]
    metrics = folder / "P" / "fixed" / "metrics.jsonl"
    environment = {**os.environ, "TMPDIR": str(temporary), "KILL_WHEN": when, "METRICS": str(metrics)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
