"""A tool that runs the Python code that a model writes: in a process of its own, on this machine.

In: code, and a time limit. Out: return code and what was printed, in the form of AgentScope's tool of that name. Unlike
with AgentScope's, the process ends with the rollout that started it, and may print more than a pipe holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sharpen.compat.trinity.react import agentscope

LIMIT_S = 300.0
MOST_BYTES = 200_000
"""Of each output. A program that prints more is ended: no context holds it."""
POLLED_EVERY_S = 0.02


async def execute_python_code(code: str, timeout: float = LIMIT_S) -> Any:
    """Execute Python code in a file of its own. Returns the return code, the standard output and the standard error;
    only what the code prints can be seen.

    Args:
        code (str):
            The Python code.
        timeout (float, defaults to 300):
            Seconds that it may take.
    """
    text = await run_python(code, min(float(timeout), LIMIT_S))
    block = agentscope("message", "TextBlock")(type="text", text=text)
    return agentscope("tool", "ToolResponse")(content=[block])


async def run_python(code: str, limit_s: float) -> str:
    """What came of the code: `<returncode>`, `<stdout>`, `<stderr>`."""
    with tempfile.TemporaryDirectory() as folder:
        program, printed = Path(folder, "code.py"), [Path(folder, "stdout"), Path(folder, "stderr")]
        program.write_text(code, encoding="utf-8")
        with printed[0].open("wb") as stdout, printed[1].open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-u", str(program)],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, "PYTHONUTF8": "1"},
                start_new_session=True,
            )
        try:
            remark = await _ended(process, printed, time.monotonic() + limit_s)
        finally:
            with contextlib.suppress(
                ProcessLookupError, PermissionError
            ):  # all of its group: it may have started others
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = [_beginning(path) for path in printed]
    returncode, said = (-1, f"{texts[1]}\n{remark}".strip()) if remark else (process.returncode, texts[1])
    return f"<returncode>{returncode}</returncode><stdout>{texts[0]}</stdout><stderr>{said}</stderr>"


async def _ended(process: subprocess.Popen[bytes], printed: Sequence[Path], deadline: float) -> str | None:
    """Wait for the end of a process; why it must be ended, if it must."""
    while process.poll() is None:
        if time.monotonic() > deadline:
            return "TimeoutError: the code took longer than it may."
        if any(path.stat().st_size > MOST_BYTES for path in printed):
            return f"It was ended: it printed more than {MOST_BYTES} bytes."
        await asyncio.sleep(POLLED_EVERY_S)
    return None


def _beginning(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(MOST_BYTES).decode(errors="replace")
