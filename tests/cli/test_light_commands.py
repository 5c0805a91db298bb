"""Commands that only read, and settings that are wrong, are answered without torch: loading it takes seconds."""

import json
import subprocess
import sys

import pytest
from shop_runs import Maker, RunSize, make_run

CODE = """
import json, sys
from sharpen.cli.main import main
code = main(json.loads(sys.argv[1]))
heavy = [name for name in ("torch", "transformers", "vllm", "ray") if name in sys.modules]
assert (code, heavy) == (int(sys.argv[2]), []), (code, heavy)
"""


def answered(code, *words):
    """What a command says in a process of its own, without torch; it must end with this code."""
    run = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(words), str(code)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder, size = tmp_path_factory.mktemp("runs"), RunSize(steps=2, batch_size=1, group_size=2, tasks=2, held_out=2)
    return [str(make_run(folder / name, Maker(size=size))) for name in ("a", "b")]


def test_reading_commands_do_without_torch(runs):
    """Red while `compare`, `report` and `diagnose` imported it for a name. In one process: the second would not hide
    what the first has loaded."""
    commands = [["compare", *runs], *([name, runs[0]] for name in ("report", "diagnose", "show"))]
    code = CODE.replace("code = main(json.loads(sys.argv[1]))", "code = max(map(main, json.loads(sys.argv[1])))")
    run = subprocess.run(
        [sys.executable, "-c", code, json.dumps([*commands, ["algorithms"]]), "0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"algorithm": {"algorithm_type": "grop"}}, "grop"),
        ({"algorithm": {"algorithm_type": "grpo", "group_size": 1}}, "group_size"),
        ({"model": {"temperature": 0}}, "temperature"),
    ],
)
def test_wrong_settings_are_said_before_anything_is_promised(settings, said, tmp_path, toy_model_dir, toy_dataset):
    """Red while they came after torch was loaded, and after a directory was named that is never made."""
    model = {"model_path": str(toy_model_dir), "max_model_len": 64, **settings.pop("model", {})}
    (tmp_path / "agent.py").write_text("async def run(task, model):\n    return 1.0\n")
    tree = {"workflow": f"{tmp_path}/agent.py:run", "train_dataset": {"path": str(toy_dataset), "split": "train"}}
    tree |= {"model": model, "checkpoint_root_dir": str(tmp_path / "runs"), **settings}
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    run = answered(2, "run", "--config", str(tmp_path / "run.yaml"))
    assert said in run.stderr
    assert run.stdout == ""
    assert not (tmp_path / "runs").exists()
