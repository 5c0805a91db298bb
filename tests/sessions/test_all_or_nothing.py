"""`make test-agentscope` fails when a test there is skipped, or a file of that environment is left out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import environments
import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("import pytest\n\n\n@pytest.mark.skip\ndef test_it(): ...\n", "::test_it: skipped"),
        ("import pytest\n\npytest.importorskip('no_such_package')\n", "test_one.py: skipped"),
        ("def test_it(): ...\n", "test_agentscope1_react.py: no test was collected"),
    ],
)
def test_what_did_not_run_is_a_failure(tmp_path: Path, body: str, line: str) -> None:
    (tmp_path / "test_one.py").write_text(body)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "all_or_nothing", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(HERE)},
    )
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED, ran.stdout + ran.stderr
    assert line in ran.stdout, ran.stdout


def test_each_file_belongs_to_an_environment() -> None:
    names = environments.test_files()
    first = environments.expected(names, {"agentscope": "1.0.21"})
    second = environments.expected(names, {"agentscope": "2.0.10", "openai-agents": "0.24.0"})
    assert first | second == names
    assert first & second == {"test_agentscope_model.py", "test_agentscope_overhead.py"}
    assert environments.expected(names, {}) == names
    assert not any(environments.belongs(name, {}) for name in names)
    assert environments.expected(names, {"openai-agents": "0.24.0"}) <= second
