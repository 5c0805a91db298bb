"""A PostgreSQL server of the system's own package, for the time of a test session.

In: nothing; `initdb` and `pg_ctl` are looked for in PATH and where Debian keeps them. Out: the address of a server in a
temporary folder, which listens on a socket there and on no port. Root may not run it: then it runs as the user that the
package made.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

USER = "postgres"
HOW = "PostgreSQL's server is not installed: apt-get install postgresql"


@contextmanager
def running_server() -> Iterator[str]:
    """Run a server, and yield the address of an empty database."""
    programs = find_programs()
    folder = Path(tempfile.mkdtemp(prefix="sharpen-postgres-"))
    user: dict[str, Any] = {}
    if os.geteuid() == 0:
        account = pwd.getpwnam(USER)
        os.chown(folder, account.pw_uid, account.pw_gid)
        user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}

    def run(program: str, *arguments: str) -> None:
        words = [str(programs / program), "--pgdata", str(folder / "data"), *arguments]
        done = subprocess.run(words, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, **user)
        log = folder / "log"
        assert done.returncode == 0, done.stdout + done.stderr + (log.read_text() if log.exists() else "")

    try:
        run("initdb", "--username", USER, "--auth", "trust", "--no-sync", "--encoding", "UTF8", "--locale", "C")
        options = f"-c listen_addresses= -c fsync=off -c unix_socket_directories={folder}"
        run("pg_ctl", "--log", str(folder / "log"), "--options", options, "--wait", "--timeout", "300", "start")
        try:
            yield f"postgresql://{USER}:secret-word@/postgres?host={quote(str(folder), safe='')}"
        finally:
            run("pg_ctl", "--mode", "immediate", "--wait", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def find_programs() -> Path:
    """Return the folder of the server's programs; of several versions the newest."""
    if found := shutil.which("initdb"):
        return Path(found).parent
    versions = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    newest = max(versions, key=lambda path: float(path.parts[-3]), default=None)
    assert newest is not None, HOW
    return newest.parent
