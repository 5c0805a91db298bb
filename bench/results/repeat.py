"""A result that anybody can repeat on a CPU: one task of docs/reference/results.md, by one command.

In: a task's name (`tasks.py`). Out: `build/results/`, with a tiny model that is made and taught on the spot and a run
for each seed; the task's part of the page, with every number that it shows; the exit code: 0 all runs ended and their
certificates hold, also where nothing was learned. Cut off and started again it goes on.

    python bench/results/repeat.py chain_sum                  # or gcd, frozen_lake
    python bench/results/repeat.py reverse_text --id PATH     # of verifiers' repository, where that is not installed
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from math import nan
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]  # as a script, and what benchmarks share

from report import machine  # noqa: E402
from tasks import SETTINGS, TASKS, Task  # noqa: E402

from sharpen.cli.starter.tiny_model import make_tiny_model  # noqa: E402
from sharpen.config.public import EnvironmentConfig  # noqa: E402
from sharpen.show.monitor.figures import number, with_ends  # noqa: E402

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "results.md"
SHARPEN = (sys.executable, "-m", "sharpen.cli.main")
PASSED, FAILED, BAD_INPUT = 0, 1, 2
INTRO = """\
# Results to repeat

Each part is written by the command in it, numbers and all: on a CPU, with three seeds, in some minutes a seed.

- **The model** has 0.1M parameters. It is made on the spot and taught the form of an answer, and what its part says
  beside; all seeds begin with the same one. So the parts show that learning by these environments works, not what a
  language model would make of them.
- **Held-out tasks** are in no lesson and train in no run, except where the part says otherwise.
- **Brackets** are 95% intervals: of a seed over its held-out tasks, paired, as of [any
  verdict](../start/guide.md#the-table-and-the-verdict-at-the-end); of the mean [over the
  seeds](../use/several-runs.md#several-seeds).
- **The certificate** is [computed again](../understand/certificate.md) from the records of each run, tokens, rewards
  and verdict.
- **Minutes** are of a run, on a machine with other work.

```bash
pip install 'reasoning-gym>=0.1.25' 'gymnasium>=1.4'
python bench/results/repeat.py chain_sum      # from the repository's root, at a commit
```
"""
"""The page, before it has a part."""
COLUMNS = ("seed", "greedy", "sampled", "difference of the sampled reward", "verdict", "certificate", "minutes")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="train a task with several seeds, and write its part of the page")
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--id", help="the environment by another name: the path of its folder")
    parser.add_argument("--seeds", default="0,1,2", help="(default %(default)s)")
    parser.add_argument("--steps", type=int, help="of training (default: the task's)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="other settings of the runs")
    parser.add_argument("--lessons", type=int, help="steps of teaching (default: the task's)")
    parser.add_argument("--page", type=Path, default=PAGE, help="page to write in (default: the documentation's)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "results", help="(default %(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.page == PAGE and arguments.set:
        parser.error("--set needs another --page: that of the documentation has the settings as they are")
    if arguments.page == PAGE and (changed := _git("status", "--porcelain", "--", ".", f":!{PAGE.relative_to(ROOT)}")):
        print(f"commit or remove these first: the page says what came out at a commit.\n{changed}", file=sys.stderr)
        return BAD_INPUT
    task, commit = TASKS[arguments.task], _git("rev-parse", "HEAD")
    folder = arguments.folder / f"{arguments.task}-{commit[:10]}"
    begin(task, folder, arguments)
    others = [f"--set={assignment}" for assignment in arguments.set]
    found = json.loads(_sharpen(folder, "seeds", "--config=run.yaml", f"--seeds={arguments.seeds}", "--json", *others))
    holds = {run["seed"]: _certified(folder, run) for run in found["runs"]}
    theirs = _git("rev-parse", "HEAD", at=arguments.id) if arguments.id else ""
    write(arguments.page, arguments.task, part(arguments.task, found, holds, commit, theirs))
    print(f"{arguments.page}: {arguments.task}")
    return PASSED if all(holds.values()) else FAILED


def begin(task: Task, folder: Path, arguments: argparse.Namespace) -> None:
    """Write the settings of the runs, and make the model, where they are not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**task.environment, **({"id": _absolute(arguments.id)} if arguments.id else {})}
    settings = {
        **SETTINGS,
        "algorithm": {
            **SETTINGS["algorithm"],
            "batch_size": task.batch_size,
            "learning_rate": task.learning_rate,
        },
        "environment": environment,
        "model": {"model_path": "model", "max_model_len": 512, "max_tokens": task.max_tokens},
        "train_dataset": {"total_steps": arguments.steps or task.steps},
    }
    (folder / "run.yaml").write_text(json.dumps(settings, indent=1), encoding="utf-8")  # JSON is YAML
    if not (folder / "model").exists():
        print(f"teaching a tiny model: {task.taught}", flush=True)
        lessons = task.lessons(EnvironmentConfig(**environment), folder)
        make_tiny_model(folder / "taught", steps=arguments.lessons or task.taught_steps, **lessons)
        (folder / "taught").rename(folder / "model")


def _absolute(name: str) -> str:
    """Return a path as it holds in another folder; any other name as it is."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def _certified(folder: Path, run: Mapping[str, Any]) -> bool:
    """Return whether a run ended well and its certificate, computed again from its records, holds."""
    if run["exit_code"]:
        return False
    try:
        return bool(json.loads(_sharpen(folder, "certify", run["summary"]["run_dir"], "--json"))["holds"])
    except subprocess.CalledProcessError:
        return False


def part(name: str, found: Mapping[str, Any], holds: Mapping[int, bool], commit: str, theirs: str) -> str:
    """Return the task's part of the page. `theirs`: the commit of an environment's folder, if it has one."""
    task, here = TASKS[name], machine()
    packages = ", ".join(f"{one} {version(one)}" for one in (*task.packages, "torch", "transformers"))
    source = f", its folder at `{theirs}`" if theirs else ""
    rows = [_row(run, holds[run["seed"]]) for run in found["runs"]]
    lines = [
        f"## {task.title}\n",
        f"{task.about[0].upper()}{task.about[1:]}. The model: {task.taught}.\n",
        *([f"    {task.first}"] if task.first else []),
        f"    python bench/results/repeat.py {name}{task.option}\n",
        f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}",
        *(f"| {' | '.join(row)} |" for row in [*rows, _means(found["spread"])]),
        f"\nCommit `{commit}`, {datetime.now(UTC):%Y-%m-%d}; {packages}{source}; "
        f"{here['processor']}, {here['cores']} cores.",
    ]
    return "\n".join(lines)


def _row(run: Mapping[str, Any], holds: bool) -> list[str]:
    if run["exit_code"]:
        return [str(run["seed"]), *[""] * 3, f"failed with exit code {run['exit_code']}", "", ""]
    summary = run["summary"]
    verdict = summary["verdict"]
    accuracies = [
        " → ".join(number(summary[when][mode]["accuracy"]) for when in ("before", "after"))
        for mode in ("greedy", "sampled")
    ]
    ends = (verdict[end] if verdict[end] is not None else nan for end in ("low", "high"))
    return [
        str(run["seed"]),
        *accuracies,
        "not measured" if run["gain"] is None else with_ends(run["gain"], *ends, sign=True),
        verdict["kind"].replace("_", " "),
        "holds" if holds else "**does not hold**",
        f"{summary['seconds'] / 60:.1f}",
    ]


def _means(spread: Mapping[str, Any]) -> list[str]:
    """Return the row of the means over the seeds, with Student's interval over these."""
    means = [
        " → ".join(number(spread[f"{mode} {when}"]["mean"]) for when in ("before", "after"))
        for mode in ("greedy", "sampled")
    ]
    gain = spread["gain"]
    low, high = (nan if gain[end] is None else gain[end] for end in ("low", "high"))
    return [f"mean of {gain['count']}", *means, with_ends(gain["mean"], low, high, sign=True, unit="seed"), "", "", ""]


def write(page: Path, name: str, text: str) -> None:
    """Put the part in its place on the page, between its marks; at the end, if it has none yet."""
    before = page.read_text(encoding="utf-8") if page.exists() else INTRO
    begin, end = f"<!-- {name} -->", "<!-- end -->"
    whole = f"{begin}\n\n{text}\n\n{end}"
    after, found = re.subn(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: whole, before, flags=re.DOTALL)
    page.write_text(after if found else f"{before.rstrip()}\n\n{whole}\n".lstrip(), encoding="utf-8")


def _sharpen(folder: Path, *words: str) -> str:
    """Return what a command of `sharpen` prints; what it says of itself goes to stderr."""
    done = subprocess.run([*SHARPEN, *words], cwd=folder, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        raise SystemExit(f"sharpen {' '.join(words)} ended with exit code {done.returncode}: see the lines above")
    return done.stdout


def _git(*arguments: str, at: str | Path = ROOT) -> str:
    """Return what git says at a folder; "" where there is none of git's."""
    said = subprocess.run(["git", "-C", str(at), *arguments], capture_output=True, text=True, check=at == ROOT)
    return said.stdout.strip() if said.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
