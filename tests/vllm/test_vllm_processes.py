"""vLLM's processes end with their owner when it is killed, and where their sockets are."""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path

from processes import ends, forked
from vllm_forked import FORKED
from vllm_served import MODEL

from sharpen.engine.vllm.start import make_folder

KILLED = f"""
import asyncio, os, signal, sys, psutil
from pathlib import Path

async def main():
    from sharpen.engine.vllm.engine import VLLMEngine
    before = dict(os.environ)
    model = {str(MODEL)!r}
    await VLLMEngine.start(model, stop_decoder=str, max_model_len=64, max_slots=4, kv_cache_mb=64)
    changed = {{name for name, _ in os.environ.items() ^ before.items()}} - {{"TORCHINDUCTOR_CACHE_DIR"}}  # torch's own
    assert not changed, changed
    Path(sys.argv[1]).write_text(" ".join(str(one.pid) for one in psutil.Process().children(recursive=True)))
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_nothing_stays_when_the_owner_is_killed(tmp_path, temporary):
    """Neither processes nor files. Red when the worker does not watch the owner (no thread in `vllm_worker`): vLLM's
    processes wait for ever."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    output = tmp_path / "pids"  # no pipe: what stays would hold it open
    environment = {**os.environ, "TMPDIR": str(temporary)}
    environment.pop(FORKED)  # vLLM's processes start as for users
    with forked(str(script), str(output), env=environment) as owner:
        assert owner.wait(600) == -signal.SIGKILL
    pids = [int(pid) for pid in output.read_text().split()]
    assert len(pids) >= 2
    left = [pid for pid in pids if not ends(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
    assert not [path for path in temporary.iterdir() if "vllm" in path.name]


def test_the_paths_of_sockets_are_short_whatever_the_temporary_folder_is(tmp_path):
    """Red when `make_folder` (engine/vllm/start.py) takes any: vLLM would not start in such a folder."""
    for length in (40, 47, 48, 200):
        parent = (tmp_path / ("x" * 200)).as_posix()[:length]
        Path(parent).mkdir(exist_ok=True)
        folder = make_folder(parent)
        assert len(f"{folder}/{uuid.uuid4()}") <= 107
        folder.rmdir()
