"""A process without standard streams: no file of ours gets their place."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """\
import os, sys
from sharpen.show.monitor.stream import lasting_output, open_missing_streams
assert sys.stdout is None and sys.stderr is None
open_missing_streams()
with open(sys.argv[1], "w") as file, lasting_output(lambda: None):
    assert file.fileno() > 2
    print("a workflow prints")
    print("and complains", file=sys.stderr)
    assert not sys.stdout.isatty()
    os.system("echo a child prints")
"""


def test_a_process_without_streams_prints_nowhere(tmp_path: Path):
    """Red without `open_missing_streams`: the first file had descriptor 1, and what a child printed was in it."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(tmp_path / "file")]
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], env=environment, check=False)
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == ""
