"""The command lines of the documentation that start a script, and what makes each small.

In: the pages, the Makefile. Out: for each script that somebody is told to start, the options that make it small; or the
test that runs it elsewhere. A script that is in neither makes `test_inventory.py` fail.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from pages import ROOT, blocks

BENCHES = {
    "bench/async_tools.py": "--steps 1 --median-s 0.01 --no-evaluation",
    "bench/engine.py": "--repeats 1 --no-large --conversations 2 --longest 16 --draws 200",
    "bench/gateway.py": "--rollouts 4 --repeats 1",
    "bench/gateway_litellm.py": "--calls 8 --repeats 1",
    "bench/gateway_load.py": "--rollouts 4 --moves 1",
    "bench/gpu/run.py": "--smoke --only device,sync",
    "bench/long_prompt.py": "--tokens 600",
    "bench/plain.py": "--steps 1 --tasks 2",
    "bench/step.py": "--repeats 1 --tasks 1",
    "bench/sync.py": "--repeats 1 --matrices 1",
    "bench/trainer.py": "--repeats 1 --sequences 2",
    "bench/tree.py": "--repeats 1 --calls 2",
    "bench/trl/compare.py": "--steps 6 --seeds 1 --tasks 4 --samples 1 --no-trials",
    "bench/view/measure.py": "--rollouts 256 --repeats 1",
}
"""Scripts of benchmarks; the other scripts in `bench/trl` are started by `compare.py`."""
ENVIRONMENTS = {"bench/trl/compare.py": "trl"}
"""Scripts that need another Python than the suite's."""
SMALL = "--steps 1 --batch-size 2 --group-size 2 --eval-tasks 2 --max-tokens 8 --learning-rate 1e-4"
EXAMPLES = {
    "examples/any_command/main.py": f"{SMALL} --max-model-len 512",
    "examples/ask_or_answer/main.py": f"{SMALL} --max-model-len 1024 --data DATA",
    "examples/count_shapes/main.py": f"{SMALL} --max-model-len 256 --data DATA",
    "examples/email_search/main.py": f"{SMALL} --max-model-len 1024 --data DATA",
    "examples/frozen_lake/main.py": f"{SMALL} --max-model-len 1024 --data DATA",
    "examples/langgraph_agent/main.py": f"{SMALL} --max-model-len 512",
    "examples/one_file/loop.py": "--steps 1 --held-out 4",
    "examples/prompt_then_rl/main.py": f"{SMALL} --max-model-len 512 --prompt-tasks 8",
}
"""Scripts of examples; DATA is a folder that the lines of an example share: what the first has made serves the next."""
ELSEWHERE = {
    "bench/agentscope_overhead.py": "tests/agentscope/test_agentscope_overhead.py",
    "bench/trl/evaluate.py": "bench/trl/compare.py",
    "bench/trl/ours.py": "bench/trl/compare.py",
    "bench/trl/peer.py": "bench/trl/compare.py",
    "examples/math_agent/gsm8k.py": "tests/agentscope/test_agentscope1_math_agent.py",
    "examples/quickstart/build_model.py": "tests/examples/other_families.py",
    "examples/quickstart/main.py": "Makefile",
    "examples/quickstart/problems.py": "tests/examples/other_families.py",
    "examples/single_file/train.py": "tests/examples/test_example_single_file.py",
}
"""What runs another script: the file names it."""
BY_HAND = {
    "examples/coding_agent/main.py": "tests/clients/test_example_coding_agent.py",
    "examples/math_agent/main.py": "tests/agentscope/test_agentscope1_math_agent.py",
}
"""Scripts that CI starts in parts only, since the whole takes minutes: the file runs their agents and judges."""
STARTED = re.compile(r"^(?:\S*bin/)?python3? (\S+\.py)\b")


def documented() -> dict[str, list[str]]:
    """Return each script that the documentation or a docstring tells to start, with the lines that start it."""
    found: dict[str, list[str]] = {}
    for block in blocks():
        for line in block.text.replace("\\\n", " ").splitlines() if block.language in {"", "sh", "bash"} else []:
            match = STARTED.match(line.strip().removeprefix("$ "))
            path = _script(match[1], block.page) if match else None
            if match and path:
                words = shlex.split(line, comments=True)
                found.setdefault(path, []).append(shlex.join(words[words.index(match[1]) + 1 :]))
    return found


def _script(name: str, page: str) -> str | None:
    """Return a script's path in the repository: it is named from the root, or from its page's folder."""
    for path in (ROOT / name, (ROOT / page).parent / name):
        if path.exists():
            return str(path.relative_to(ROOT))
    return None  # the reader's own


def scripts() -> set[str]:
    """Return every script of benchmarks and examples: what runs when it is started."""
    files = [path for folder in ("bench", "examples") for path in (ROOT / folder).rglob("*.py")]
    return {str(path.relative_to(ROOT)) for path in files if '__name__ == "__main__"' in path.read_text("utf-8")}


def made() -> set[str]:
    """Return the scripts that targets of the Makefile start, as `make` itself expands them."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    named = [name for name in phony.split() if name.startswith(("bench", "quickstart"))]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--dry-run", "--always-make", *named]
    done = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True, check=True)
    return set(re.findall(r"bin/python ((?:bench|examples)/\S+\.py)", done.stdout))


def run(script: str, options: str, folder: Path, python: Path | str = sys.executable) -> str:
    """Start a script as the documentation does, in a folder of its own; return what it printed. Targets of speed may be
    missed: then a benchmark ends with 1."""
    environment = {**os.environ, "BENCH_OUT": str(folder / "out"), "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    command = [str(python), str(ROOT / script), *shlex.split(options)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in ((0, 1) if script in BENCHES else (0,)), done.stdout + done.stderr
    return done.stdout


def lines_of(script: str) -> Iterator[str]:
    """Yield the options of each documented line of a script, once; none, if only its docstring has one."""
    yield from dict.fromkeys(documented().get(script, [""]))
