"""The scripts of the pages are typed: TypeScript checks them, strictly, by their comments."""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser
NODE = Path(os.environ.get("NODE_MODULES", ".venv/node/node_modules"))


def test_the_types_of_the_scripts_hold():
    project = Path(__file__).parents[1] / "tsconfig.json"
    checked = subprocess.run([NODE / ".bin" / "tsc", "-p", project], capture_output=True, text=True, check=False)
    assert checked.stdout == ""
    assert checked.returncode == 0
