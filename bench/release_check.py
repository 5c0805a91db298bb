"""What no change runs, run whole before a release: slow tests, hostile requests, soak, chaos, kills, benchmarks,
examples.

In: the repository at a commit; parts, each of which is a command. Out: `build/release-check/`, with what each part
printed and `state.json`; the page `docs/reference/release-check.md`: results and figures with commit and machine; the
exit code: 0 all parts passed, 1 one failed, 3 none failed but some are left.

It takes many hours, in turns: cut off, or after `--minutes`, and started again it goes on with the parts that have not
passed at this commit. A part that was cut off begins anew; at another commit, or on another machine, all do.

    .venv/bin/python bench/release_check.py [--minutes 60]     # or: make release-check [MINUTES=60]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from report import machine

ROOT = Path(__file__).parent.parent
PAGE = "docs/reference/release-check.md"
PASSED, FAILED, BAD_INPUT, LEFT = 0, 1, 2, 3
SHOWN = 16
"""Last lines of a part that the page shows: the table of a benchmark, the count of a suite."""
CLAUDE = '"$(realpath .venv-clients/node/node_modules/.bin/claude)"'
WITH_RAY = "BIN=.venv-ray/bin KILLED=\"--kind 'with Ray'\""

RESULTS = ".venv-environments/bin/python bench/results/repeat.py --page build/release-check/results.md"


@dataclass(frozen=True)
class Part:
    """One line of the page: its name, and the shell's command, run in the root of the repository."""

    name: str
    command: str


@dataclass
class Done:
    """How a part ended: its exit code, how long it took, when, how often it was tried, its last lines."""

    code: int
    seconds: float
    at: str
    tries: int
    last: list[str]


@dataclass
class State:
    """What was done at a commit on a machine."""

    commit: str
    machine: str
    done: dict[str, Done] = field(default_factory=dict)


def suite(target: str, more: str = "") -> Part:
    return Part(target, f"make {target} {more}".strip())


def example(name: str, start: str = ".venv/bin/python {}/main.py") -> Part:
    """An example as its page starts it, from a new folder in which it leaves what it writes."""
    folder = f"build/release-check/{name}"
    line = start.replace(".venv", "../../../.venv").format(f"../../../examples/{name}")
    return Part(f"examples/{name}", f"rm -rf {folder} && mkdir -p {folder} && cd {folder} && {line}")


BENCHES = (
    *("engine", "trainer", "gateway", "step", "tree", "sync", "long_prompt", "growth", "capacity", "real"),
    *("view", "async", "agentscope", "trl", "algorithms", "memory"),
)
EXAMPLES = (
    *("any_command", "ask_or_answer", "count_shapes", "email_search", "frozen_lake", "langgraph_agent"),
    *("prompt_then_rl", "task_folder", "two_players"),
)
PARTS = [
    suite("test-slow"),
    suite("test-agentscope-slow"),
    suite("test-documented-slow"),
    suite("test-older-openai"),
    suite("fuzz-gateway"),
    suite("soak"),
    suite("chaos"),
    suite("kills"),
    Part("kills, with Ray", f"make .venv-ray/installed && make kills {WITH_RAY}"),
    *(suite(f"bench-{name}") for name in BENCHES),
    suite("quickstart"),
    *(example(name) for name in EXAMPLES),
    Part("results", f"for task in chain_sum gcd frozen_lake; do {RESULTS} $task || exit; done"),
    example("reasoning", ".venv-environments/bin/python {}/main.py"),
    example("one_file", ".venv/bin/python {}/loop.py"),
    example("single_file", ".venv/bin/python {}/train.py"),
    example("laptop", ".venv/bin/python {}/main.py --model ../../../examples/quickstart/model --steps 20"),
    example("math_agent", ".venv-agentscope1/bin/python {}/main.py"),
    example("coding_agent", f"CLAUDE={CLAUDE} .venv/bin/python {{}}/main.py"),
    example("trinity_workflow", ".venv/bin/sharpen run --config {}/calculator.yaml"),
]
"""In the order in which they run, tests first. What needs a GPU is not among them."""


def main(argv: Sequence[str] | None = None, parts: Sequence[Part] = PARTS, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="run what no change runs, in turns, and write its page")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no part after so many (no limit)")
    arguments = parser.parse_args(argv)
    if changed := _git(root, "status", "--porcelain", "--", ".", f":!{PAGE}"):
        print(f"commit or remove these first: the page says what passed at a commit.\n{changed}", file=sys.stderr)
        return BAD_INPUT
    folder = root / "build" / "release-check"
    folder.mkdir(parents=True, exist_ok=True)
    state = _begin(folder / "state.json", _git(root, "rev-parse", "HEAD"), _machine())
    _turn(parts, state, root, folder, arguments.minutes)
    left = [part.name for part in parts if part.name not in state.done]
    failed = [part.name for part in parts if part.name in state.done and state.done[part.name].code != 0]
    print(f"{len(parts) - len(left) - len(failed)} of {len(parts)} passed; {PAGE}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    if left:
        print(f"left: {', '.join(left)}: start it again to go on")
    return FAILED if failed else LEFT if left else PASSED


def _turn(parts: Sequence[Part], state: State, root: Path, folder: Path, minutes: float) -> None:
    """Run what has not passed, first what was not tried yet; after each part the state and the page are written."""
    begun = time.monotonic()
    todo = [part for part in parts if part.name not in state.done]
    todo += [part for part in parts if part.name in state.done and state.done[part.name].code != 0]
    _write(parts, state, root, folder)
    for part in todo:
        if time.monotonic() - begun >= minutes * 60:
            return
        print(f"{part.name}: {part.command}", flush=True)
        tries = state.done[part.name].tries if part.name in state.done else 0
        state.done[part.name] = _run(part, root, folder, tries + 1)
        print(f"  {_result(state.done[part.name])}, {_duration(state.done[part.name].seconds)}", flush=True)
        _write(parts, state, root, folder)


STOPS = (signal.SIGINT, signal.SIGTERM)


def _run(part: Part, root: Path, folder: Path, tries: int) -> Done:
    """Run a part to its end. If this process is told to stop, so are the part and all that it started."""
    log = folder / f"{part.name.replace('/', '-').replace(', ', '-').replace(' ', '-')}.log"
    begun, at = time.monotonic(), datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    told: list[int] = []  # a signal within `Popen` would leave the part running, of which nobody knew yet
    with log.open("wb") as output:
        before = {one: signal.signal(one, lambda number, _: told.append(number)) for one in STOPS}
        try:
            process = subprocess.Popen(
                ["bash", "-c", part.command],
                cwd=root,
                env=outside,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)
        try:
            if told:
                raise KeyboardInterrupt
            code = process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line.rstrip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return Done(code, time.monotonic() - begun, at, tries, lines[-SHOWN:])


def _begin(path: Path, commit: str, here: str) -> State:
    """Return the state to go on with: that of the file if it is of this commit and machine, else an empty one."""
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if (kept["commit"], kept["machine"]) == (commit, here):
            print(f"going on: {len(kept['done'])} parts were run at {commit[:10]}")
            return State(commit, here, {name: Done(**one) for name, one in kept["done"].items()})
        print(f"anew: what was run is of {kept['commit'][:10]} on {kept['machine']}; this is {commit[:10]} on {here}")
    return State(commit, here)


def _write(parts: Sequence[Part], state: State, root: Path, folder: Path) -> None:
    """Write the state, whole or not at all, and the page."""
    new = folder / "state.json.new"
    new.write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
    new.replace(folder / "state.json")
    (root / PAGE).parent.mkdir(parents=True, exist_ok=True)
    (root / PAGE).write_text(page(parts, state), encoding="utf-8")


def page(parts: Sequence[Part], state: State) -> str:
    """Return the page: a row for each part that was run, the names of the others, and what each printed last."""
    left = [part.name for part in parts if part.name not in state.done]
    passed = sum(part.name in state.done and state.done[part.name].code == 0 for part in parts)
    rows, printed = [], []
    for part in parts:
        done = state.done.get(part.name)
        if done:
            rows.append(_row(part.name, done))
            shown = "\n".join(line.replace("```", "'''") for line in done.last)
            printed.append(f"## {part.name}\n\n```text\n{shown}\n```\n")
    return (
        "\n".join(
            [
                "# Before a release\n",
                "<!-- Written by bench/release_check.py. -->\n",
                "What no change runs, run whole by `make release-check`: slow tests, 100,000 hostile",
                "requests, soak, chaos, kills, benchmarks and examples. It takes many hours and may be cut off:",
                "started again it goes on. What needs a GPU is not among it.\n",
                f"Commit `{state.commit}`, on {state.machine}: **{passed} of {len(parts)} passed**.\n",
                "| part | result | time | begun |\n|---|---|---|---|",
                *rows,
                "",
                *([f"Not run yet: {'; '.join(left)}.\n"] if left else []),
                *printed,
            ]
        ).rstrip("\n")
        + "\n"
    )


def _row(name: str, done: Done) -> str:
    return f"| {name} | {_result(done)} | {_duration(done.seconds)} | {done.at} |"


def _result(done: Done) -> str:
    result = "passed" if done.code == 0 else f"**failed** (exit code {done.code})"
    return result if done.tries == 1 else f"{result}, try {done.tries}"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 100 else f"{minutes} min" if minutes < 100 else f"{seconds / 3600:.1f} h"


def _machine() -> str:
    here = machine()
    return f"{here['processor']}, {here['cores']} cores, Python {here['python']}, torch {here['torch']}"


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
