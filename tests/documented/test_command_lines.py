"""Each line of the documentation that starts `sharpen` runs, on a starter that was trained for a step: with its names
of runs, tasks and models exchanged for what is there, and nothing else changed. Those that need more are run elsewhere.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from lines import ROOT
from test_docs_commands import lines_of_blocks

from sharpen.cli.main import main
from sharpen.learning.experience.reading import read_groups

pytestmark = pytest.mark.documented
ELSEWHERE = {
    r"doctor": "tests/cli/doctor/test_doctor.py",
    r"export .*--for (hub|gguf)": "tests/cli",
    r"export record|show record": "tests/serve/record/test_record_command.py",
    r"init first$": "tests/documented/test_command_lines.py",  # makes the starter that the others run on
    r"judge (label|check) ": "tests/evidence/judges/test_judge_check.py",  # marks, a judge, and keys that are typed
    r"plan --run": "tests/run/plan/test_forecast.py",
    r"record ": "tests/serve/record/test_record_command.py",
    r"run --config (config|sft)\.yaml": "tests/learning/supervised/test_supervised_runs.py",
    r"(run|explain) --config (examples/.*/calculator|gsm8k)\.yaml": "tests/examples/test_example_trinity_workflow.py",
    r"run .*mode=": "tests/end_to_end/test_two_processes.py",
    r"seeds |sweep ": "tests/beyond/several",
    r"show .*--failed": "tests/evidence/diagnose/test_cli_show.py",
    r"serve ": "tests/serve/test_serve_command.py",
    r"view": "tests/show/view/test_view_command.py",
}
"""Lines that wait for others, need files that their page writes, or take many runs: the test of their command."""
PLACES = {line.partition("#")[0].strip(): place for place, line in lines_of_blocks()}
LINES = [(place, line) for line, place in PLACES.items() if not any(re.match(one, line) for one in ELSEWHERE)]
SMALL = {
    "train_dataset.total_steps": 2,
    "algorithm.batch_size": 2,
    "algorithm.group_size": 2,
    "evaluation.max_tasks": 20,
    "check.enabled": "false",
}


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder as `sharpen init` writes it, with the run `my_run`, and the same run by two other names."""
    folder = tmp_path_factory.mktemp("starter") / "first"
    assert main(["init", str(folder)]) == 0
    (folder / "judge.py").write_text((folder / "judge.py").read_text() + "\n\nstricter = judge\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        overrides = [f"--set={key}={value}" for key, value in SMALL.items()]
        assert main(["run", "--config", "run.yaml", "--set=name=my_run", *overrides]) == 0
        for name in ("first", "second"):
            shutil.copytree("checkpoints/Sharpen/my_run", f"checkpoints/Sharpen/{name}", symlinks=True)
        yield folder


def exchanged(line: str, folder: Path, out: Path) -> list[str]:
    """The words of a line, with what is there for what is not."""
    groups = list(read_groups(folder / "checkpoints/Sharpen/my_run/run.db"))
    rollout = groups[0].rollouts[0]
    names = {
        r"\bRUN\b": "my_run",
        r"checkpoints/Sharpen/Experiment-\d+": "checkpoints/Sharpen/my_run",
        r"checkpoints//run": "checkpoints/Sharpen/my_run",
        r"step[-_]\d+/train/3212/4": rollout.id,
        r"\b3212/4": rollout.id.split("/", 1)[1],
        r"--retrain 1 40": "--retrain 1 2",
        r"--step 12 --task train/3212": f"--step 1 --task {rollout.task_id}",
        r"(?<==)examples/": f"{ROOT}/examples/",
        r"/tmp/report.html": str(out / "report.html"),
        r"(--output|--to) ([a-z.]+)": rf"\1 {out}/\2",
        r"init second": f"init {out}/second",
    }
    for pattern, there in names.items():
        line = re.sub(pattern, there, line)
    words = shlex.split(line, comments=True)
    if words[0] == "run":
        words += [f"--set={key}={value}" for key, value in SMALL.items()]
    return words


@pytest.mark.parametrize(("place", "line"), LINES)
def test_it_does_its_work(place: str, line: str, starter: Path, tmp_path: Path) -> None:
    """Exit code 0, or 1 of a command that answers a question."""
    words = exchanged(line, starter, tmp_path)
    answers = words[0] in ("check", "compare", "diagnose", "plan")
    assert main(words) in ((0, 1) if answers else (0,)), place


def test_lines_that_are_run_elsewhere_have_a_test() -> None:
    for place in ELSEWHERE.values():
        assert (ROOT / place).exists()
    assert len(LINES) > 15
