"""vLLM's core is killed in the middle of a run: one error, exit code 1, nothing left, and nothing trains twice."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import psutil
from processes import forked
from test_sync_end_to_end import check_accounted, rows
from vllm_forked import FORKED
from vllm_served import MODEL

from sharpen.cli.main import main
from sharpen.evidence.certificate.certify import certify
from sharpen.learning.trainer.checkpoint import load, pointed

AGENT = """
import asyncio, contextlib, os, signal, threading, time
from pathlib import Path
import psutil
from sharpen import WorkflowOutput

WHEN, METRICS = os.environ["KILL_WHEN"], Path(os.environ["METRICS"])
begun = answered = 0

def send(signal):
    (core,) = [one for one in psutil.Process().children() if one.name().startswith("VLLM::EngineCor")]
    core.send_signal(signal)

def target(number):
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{number}")
    return ""

def kill_as_weights_move():
    # They move as soon as the file in which they do is there; the core, which is stopped, cannot answer.
    while not any("sharpen-weights" in path for path in map(target, os.listdir("/proc/self/fd"))):
        time.sleep(0.01)
    time.sleep(0.2)
    send(signal.SIGKILL)

async def agent(task, model):
    global begun, answered
    begun += 1
    if WHEN == "generating" and begun == 25:  # in the third batch, which does not train without it
        while not METRICS.exists() or METRICS.read_text().count("rollout/count") < 2:
            await asyncio.sleep(0.01)
        send(signal.SIGSTOP)  # so that no call ends before it is killed
        threading.Timer(0.2, send, [signal.SIGKILL]).start()
    messages = [{"role": "user", "content": task["question"]}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=99)
    answered += 1
    if WHEN == "moving" and answered == 12:
        send(signal.SIGSTOP)
        threading.Thread(target=kill_as_weights_move, daemon=True).start()
    return WorkflowOutput(reward=len(reply.choices[0].message.content or "") % 7 / 7)
"""


def test_runs_whose_engine_is_killed_end_with_one_error_and_go_on_from_there(
    tmp_path, temporary, toy_dataset, monkeypatch
):
    """It dies while generating, in the next session while weights move. The steps that had trained are in the
    checkpoint, also the one whose weights were moving; the others train once, in the session that goes on. Red when
    `train` (run/rollouts.py) lets a failure behind the training pass: its step would not be recorded, and not be saved;
    or hangs when `load` (engine/vllm/engine.py) waits for vLLM's answer alone."""
    run_dir = tmp_path / "P" / "fixed"
    for done, (when, words) in enumerate(
        [
            ("generating", "vLLM's processes died while they were generating"),
            ("moving", "new weights could not be loaded into vLLM"),
        ],
        start=2,
    ):
        code, output, errors = run(tmp_path, temporary, toy_dataset, when)
        assert code == 1, errors
        assert words in errors.splitlines()[-1]
        assert "Traceback" not in errors
        assert f"; saving a checkpoint of step {done}, the last whole one" in output
        assert not left(temporary)
        assert not [path for path in temporary.iterdir() if "vllm" in path.name]
        assert len(rows(run_dir)) == done
        position = load(pointed(run_dir, "latest")).state["position"]
        assert position["step"] == done
    monkeypatch.setenv("KILL_WHEN", "never")
    monkeypatch.setenv("METRICS", "")
    assert main(["run", "--config", str(tmp_path / "run.yaml"), "--set", "engine.type=embedded"]) == 0
    recorded = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in recorded if "rollout/count" in row] == [1, 2, 3, 4]
    check_accounted(run_dir, 4, batch_size=3)
    certificate = certify(run_dir)
    assert certificate.holds, certificate.problems


def left(temporary: Path) -> list[psutil.Process]:
    """Processes of the run that do not end within a while."""
    deadline = time.monotonic() + 120
    while True:
        found = psutil.process_iter(["environ"])
        ours = [one for one in found if (one.info["environ"] or {}).get("TMPDIR", "").startswith(str(temporary))]
        if not ours or time.monotonic() > deadline:
            return ours
        time.sleep(0.2)


def run(folder: Path, temporary: Path, dataset: Path, when: str) -> tuple[int | None, str, str]:
    """`sharpen run`, in a process of its own, from which vLLM's are started as for users: exit code, output, errors."""
    (folder / "agent.py").write_text(AGENT)
    (folder / "run.yaml").write_text(
        f"workflow: agent.py:agent\nproject: P\nname: fixed\ncheckpoint_root_dir: {folder}\n"
        f"train_dataset: {{path: {dataset}, total_steps: 4}}\n"
        f"model: {{model_path: {MODEL}, max_model_len: 256}}\n"
        "algorithm: {group_size: 4, batch_size: 3, learning_rate: 1.0e-4, save_interval_steps: 99}\n"
        "evaluation: {before_and_after: false, hold_out: false}\ncheck: {enabled: false}\n"
        "engine: {type: vllm, kv_cache_mb: 64, max_slots: 24}\n"
    )
    metrics = folder / "P" / "fixed" / "metrics.jsonl"
    environment = {**os.environ, "TMPDIR": str(temporary), "KILL_WHEN": when, "METRICS": str(metrics)}
    environment.pop(FORKED)
    with forked("-m", "sharpen.cli.main", "run", "--config", str(folder / "run.yaml"), env=environment) as process:
        output, errors = process.communicate(timeout=600)
        return process.returncode, output, errors
