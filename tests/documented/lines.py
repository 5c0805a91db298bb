"""The command lines of the documentation that start a script, and what makes each small.

In: the pages, the Makefile. Out: for each script that somebody is told to start, the options that make it small; or the
test that runs it elsewhere. A script that is in neither makes `test_inventory.py` fail.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

from pages import ROOT, blocks
from processes import forked

BENCHES = {
    "bench/async_tools.py": "--steps 1 --median-s 0.01 --no-evaluation",
    "bench/capacity.py": "--rollouts 8 --repeats 1 --ways raw --calls 1 --tokens 64 --in-flight 8 16 --workers",
    "bench/engine.py": "--repeats 1 --no-large --conversations 2 --longest 8 --draws 200",
    "bench/gateway.py": "--rollouts 4 --repeats 1",
    "bench/gateway_litellm.py": "--calls 8 --repeats 1",
    "bench/gateway_load.py": "--rollouts 4 --moves 1",
    "bench/gpu/run.py": "--smoke --only device,sync",
    "bench/algorithms.py": "--seeds 0 --steps 1 --held-out 16 --runs grpo",
    "bench/growth.py": "--repeats 1 --turns 1 2 --groups 2 --tasks 2 --prompts 100 --in-flight 8",
    "bench/install_size.py": "",
    "bench/long_prompt.py": "--tokens 600",
    "bench/memory.py": "--cases tiny-lora",
    "bench/plain.py": "--steps 1 --tasks 2",
    "bench/real.py": "--only tiny --repeats 1",
    "bench/step.py": "--repeats 1 --tasks 1",
    "bench/sync.py": "--repeats 1 --matrices 1",
    "bench/trainer.py": "--repeats 1 --sequences 2",
    "bench/tree.py": "--repeats 1 --calls 2",
    "bench/trl/compare.py": "--steps 6 --seeds 1 --tasks 4 --samples 1 --no-trials",
    "bench/view/measure.py": "--rollouts 256 --repeats 1",
}
"""Scripts of benchmarks; the other scripts in `bench/trl` are started by `compare.py`."""
ENVIRONMENTS = {"bench/gateway_litellm.py": "litellm", "bench/trl/compare.py": "trl"}
"""Those of them whose other side needs an environment of its own. CI makes none: `make test-documented-slow` does."""
EXAMPLES = {
    "examples/any_command/main.py": "tests/examples/test_example_any_command.py",
    "examples/ask_or_answer/main.py": "tests/examples/test_example_ask_or_answer.py",
    "examples/count_shapes/main.py": "tests/examples/test_example_count_shapes.py",
    "examples/email_search/main.py": "tests/examples/test_example_email_search.py",
    "examples/frozen_lake/main.py": "tests/examples/test_example_frozen_lake.py",
    "examples/langgraph_agent/main.py": "tests/examples/test_example_langgraph_agent.py",
    "examples/laptop/main.py": "tests/examples/test_example_laptop.py",
    "examples/one_file/loop.py": "tests/examples/test_example_one_file.py",
    "examples/prompt_then_rl/main.py": "tests/examples/test_example_prompt_then_rl.py",
    "examples/reasoning/main.py": "tests/environments/test_example_reasoning.py",
    "examples/task_folder/main.py": "tests/examples/test_example_task_folder.py",
    "examples/two_players/main.py": "tests/examples/test_example_two_players.py",
}
"""Scripts of examples, and the test that trains by each of their lines (`different`)."""
SMALLER = {"--steps", "--batch-size", "--group-size", "--max-tokens", "--max-model-len", "--learning-rate"}
"""Options that those tests set for themselves, so that a run is short."""
NOT_HERE = {"--model", "--data", "--lm", "--judge", "--judge-url", "--judge-key-env"}
"""Options that name what is not here: a model of billions, a dataset, a model that judges or proposes. The tests take
the example's own model and data, and its stand-in."""
ELSEWHERE = {
    "bench/agentscope_overhead.py": "tests/agentscope/test_agentscope_overhead.py",
    "bench/release_check.py": "tests/benches/test_release_check.py",
    "bench/results/repeat.py": "tests/environments/test_results.py",
    "bench/trl/evaluate.py": "bench/trl/compare.py",
    "bench/trl/micro_step.py": "bench/real.py",
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
"""Scripts of which CI starts parts only, since a run takes minutes by real clients: the file runs agents and judges."""
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


def run(script: str, options: str, folder: Path, python: Path | None = None) -> str:
    """Start a script as the documentation does, in a folder of its own; return what it printed. Targets of speed may be
    missed: then a benchmark ends with 1. A Python of another environment starts from nothing."""
    environment = {**os.environ, "BENCH_OUT": str(folder / "out"), "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    command = [str(ROOT / script), *shlex.split(options)]
    started: Any
    if python is None:
        started = forked(*command, cwd=folder, env=environment)
    else:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started = subprocess.Popen([str(python), *command], cwd=folder, env=environment, text=True, **pipes)
    with started as process:
        output, errors = process.communicate()
    assert "Traceback" not in errors, errors
    assert process.returncode in ((0, 1) if script in BENCHES else (0,)), output + errors
    return str(output)


def different(script: str) -> list[list[str]]:
    """Return the options of a script's documented lines, without those that name what is not here. Lines that differ in
    no more than what tests set for themselves are one, with the options of all of them."""
    found: dict[tuple[str, ...], list[str]] = {}
    for line in documented()[script]:
        given = [option for option in options_of(line) if option[0] not in NOT_HERE]
        own = tuple(word for option in given if option[0] not in SMALLER for word in option)
        found.setdefault(own, []).extend(word for option in given for word in option)
    return list(found.values())


def options_of(line: str) -> list[list[str]]:
    """Return the options of a line, each with its values."""
    found: list[list[str]] = []
    for word in shlex.split(line):
        if word.startswith("--"):
            found.append([word])
        else:
            found[-1].append(word)
    return found
