"""A run that starts a Ray of its own: from a script, interrupted, with nothing left behind; and addresses of others."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import psutil
import pytest
from processes import python, wait_for

from sharpen.config.sections import ClusterConfig
from sharpen.errors import ConfigError
from sharpen.placement.cluster.connect import Connection

SCRIPT = """
import asyncio
import ray
from sharpen import AlgorithmConfig, DatasetConfig, TunerModelConfig, WorkflowOutput, tune

async def workflow(task, model):
    messages = [{{"role": "user", "content": task["question"]}}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=8)
    await asyncio.sleep(0.2)
    return WorkflowOutput(reward=(reply.choices[0].message.content or "").count("e") / 8)

if __name__ == "__main__":
    try:
        tune(
            workflow,
            train_dataset=DatasetConfig(path={data!r}, total_steps=1000),
            model=TunerModelConfig(model_path={model!r}, max_model_len=128, max_tokens=8),
            algorithm=AlgorithmConfig(group_size=4, batch_size=2, learning_rate=1e-3),
            settings={{
                "execution": "ray",
                "cluster.num_workers": 1,
                "checkpoint_root_dir": {out!r},
                "check.enabled": False,
                "evaluation": {{"before_and_after": False, "hold_out": False}},
            }},
        )
    finally:
        print("in Ray after the run:", ray.is_initialized())
"""


def ray_of(pid: int) -> list[psutil.Process]:
    """The processes of the Ray that this process has started: its daemons, by the name of the session, and actors."""
    lines = {one: " ".join(one.info["cmdline"] or []) for one in psutil.process_iter(["cmdline"])}
    daemons = [one for one, line in lines.items() if f"_{pid}/" in line]
    raylets = {str(one.pid) for one in daemons}
    return daemons + [
        one
        for one, line in lines.items()
        if line.startswith("ray::") and one.environ().get("RAY_RAYLET_PID") in raylets
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_the_actors_and_the_ray_that_the_run_started(
    number, tmp_path, toy_model_dir, toy_dataset
):
    """The workflow is the script's own. Red when `Connection.close` does not leave: Ray's processes stay until the
    script ends; SIGTERM also when Ray's own handler for it stays, which saves nothing."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(data=str(toy_dataset), model=str(toy_model_dir), out=str(tmp_path)))
    shown = tmp_path / "shown.txt"
    with shown.open("w") as file, python(str(script), stdout=file, stderr=subprocess.STDOUT) as run:
        wait_for(lambda: "   2/1000" in shown.read_text(), run, within_s=600)
        family = ray_of(run.pid)
        run.send_signal(number)
        run.wait(300)
    text = shown.read_text()
    assert "execution: ray (started here), 1 engine(s) (embedded) and 1 rollout worker(s)" in text, text
    assert "interrupted; saving a checkpoint" in text, text
    assert "KeyboardInterrupt" in text
    assert "in Ray after the run: False" in text
    assert list(tmp_path.rglob("latest/model.safetensors"))
    assert len(family) > 4
    _, left = psutil.wait_procs(family, timeout=120)
    left = [one for one in left if one.status() != psutil.STATUS_ZOMBIE]
    for process in left:
        process.kill()
    assert not left


JOIN = f"""
from {Connection.__module__} import Connection
from {ClusterConfig.__module__} import ClusterConfig
from {ConfigError.__module__} import ConfigError

for address in ("127.0.0.1:1", "ray://somewhere:10001", "somewhere"):
    try:
        Connection(ClusterConfig(ray_address=address), 1)
    except ConfigError as error:
        print(error)
"""


def test_a_ray_that_is_not_there_is_one_clear_error():
    """In a process that has joined none."""
    ran = subprocess.run([sys.executable, "-c", JOIN], capture_output=True, text=True, check=False)
    nothing, *wrong = ran.stdout.splitlines()
    assert re.search("no Ray could be joined there: .*refused.* `ray start --head` starts one", nothing), ran.stderr
    assert len(wrong) == 2
    assert all("give `auto` or host:port" in line for line in wrong)


def test_a_ray_that_cannot_be_started_is_one_clear_error():
    """Red before: a traceback, as when Ray's processes do not answer within 30 seconds on a busy machine."""
    code = f"from {Connection.__module__} import Connection, ClusterConfig\nConnection(ClusterConfig(), 1)"
    environment = {**os.environ, "RAY_TMPDIR": "/dev/null"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    *_, last = ran.stderr.splitlines()
    assert re.search(r"ConfigError: Ray could not be started on this machine: .*/dev/null.*`ray start --head`", last)


def test_another_ray_than_the_one_that_the_script_joined_is_refused(cluster):
    with pytest.raises(ConfigError, match=r"is '127.0.0.1:1', but this process has joined the Ray at"):
        Connection(ClusterConfig(ray_address="127.0.0.1:1"), 1)


def test_what_the_cluster_has_not_got_is_refused_before_anything_is_placed(cluster):
    connection = Connection(ClusterConfig(), 1)
    with pytest.raises(ConfigError, match=r"the run needs 3 GPUs \(3 for engines\), but the Ray cluster has 0 on 1"):
        connection.reserve({"engine": [{"CPU": 1, "GPU": 3}]})
    connection.close()
