"""What a person meant: a wrong name is answered with the nearest one, which works; what is left out is found."""

import json
import re
import shutil
from pathlib import Path

import pytest
from reported_runs import make_run

from sharpen.cli.main import main
from sharpen.config.recorded import STARTED

ANSWERED = {"test/0": (("a", 0.0), ("b", 1.0)), "test/1": (("a", 0.0), ("b", 1.0))}
CONFIG = (
    "train_dataset: {path: tasks.jsonl}\nmodel: {model_path: toy, max_model_len: 64}\nworkflow: agent.py:run_agent\n"
)
VERDICTS = {
    "worse": {"verdict": {"kind": "worse", "original": True, "model": "org/base", "text": "worse by 0.1"}},
    "unfinished": {"verdict": None},
}


def ended(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The exit code of a command line, and what it printed on both streams."""
    try:
        code = main(words)
    except SystemExit as exit_:  # argparse
        code = int(exit_.code or 0)
    printed = capsys.readouterr()
    return code, printed.out + printed.err


@pytest.mark.parametrize(
    ("wrong", "meant"), [("trian", "run"), ("certifi", "certify"), ("diagnos", "diagnose"), ("list", "ls")]
)
def test_a_wrong_command_is_answered_with_the_right_one(wrong: str, meant: str, capsys) -> None:
    code, text = ended(capsys, wrong)
    assert code == 2
    (found,) = re.findall(r"did you mean `sharpen (\w+)`\?", text)
    assert found == meant
    assert ended(capsys, found, "--help")[0] == 0


def test_a_command_like_no_other_is_answered_with_all(capsys) -> None:
    code, text = ended(capsys, "xyzzy")
    assert code == 2
    assert "there is no command 'xyzzy'; there are init, doctor, run" in text


@pytest.mark.parametrize("argv", [["explain"], ["plan", "--gpu", "H100"], ["check"], ["run"], ["eval"]])
def test_run_yaml_of_the_folder_is_the_configuration(argv: list[str], tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = ended(capsys, *argv)
    assert code == 2
    assert "there is no run.yaml in" in text
    (tmp_path / "run.yaml").write_text(f"{CONFIG}modle: 1\n")
    code, text = ended(capsys, *argv)
    assert "sharpen: --config run.yaml, of this folder\n" in text
    assert code == 2
    assert "modle" in text
    other = tmp_path / "other.yaml"
    other.write_text(f"{CONFIG}sede: 1\n")
    code, text = ended(capsys, *argv, "--config", str(other))
    assert "of this folder" not in text
    assert "sede" in text


def test_near_paths_of_models_datasets_and_files_are_named(
    tmp_path: Path, toy_model_dir: Path, toy_dataset: Path, capsys
) -> None:
    """Each answer is followed, and is right."""
    shutil.copytree(toy_model_dir, tmp_path / "my-model")
    shutil.copytree(toy_dataset, tmp_path / "data")
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG)

    def answered(*words: str) -> str:
        code, text = ended(capsys, *words)
        assert code == 2, text
        (near,) = re.findall(r"; did you mean '([^']*)'\?", text)
        return near

    model = answered("models", str(tmp_path / "my-modle"))
    assert ended(capsys, "models", model)[0] == 0
    assert answered("serve", str(tmp_path / "my_model")) == model
    assert answered("explain", "--config", str(tmp_path / "run.yml")) == str(config)
    (tmp_path / "agent.py").write_text("async def run_agent(task, model):\n    return 1.0\n")
    words = ["check", "--config", str(config), "--set", f"model.model_path={model}", "--set"]
    data = answered(*words, f"train_dataset.path={tmp_path / 'dta'}")
    assert data == str(tmp_path / "data")
    split = answered(*words, f"train_dataset.path={data}", "--set", "train_dataset.split=trian")
    assert split == "train"
    code, text = ended(capsys, "models", "Qwen 3")
    assert code == 2
    assert "Qwen3 is a family: give the folder of one" in text


def two_runs(root: Path) -> list[Path]:
    """Three runs, of which the last two are returned."""
    runs = []
    for place, name in enumerate(("c", "b", "a")):
        made = make_run(root / name, ANSWERED, resolved={STARTED: {"value": 100.0 + place, "origin": "derived"}})
        runs.append(made.rename(root / "Project" / name) if (root / "Project").mkdir(exist_ok=True) is None else made)
    return runs[1:]


def test_compare_takes_the_last_two_runs(tmp_path: Path, capsys) -> None:
    code, text = ended(capsys, "compare", "--root", str(tmp_path))
    assert code == 2
    assert "there are no two runs below" in text
    first, second = two_runs(tmp_path)
    code, text = ended(capsys, "compare", "--root", str(tmp_path))
    assert code == 0, text
    assert f"sharpen: the last two runs are {first} and {second}\n" in text
    assert ended(capsys, "compare", str(first), str(second))[1] in text
    assert ended(capsys, "compare", "a", "--root", str(tmp_path))[0] == 2


def test_no_failed_rollout_is_an_answer(tmp_path: Path, capsys) -> None:
    run = make_run(tmp_path, ANSWERED)
    (run / "evaluations.db").rename(run / "run.db")
    for words in (["--failed"], ["--failed", "--best"]):
        code, text = ended(capsys, "show", str(run), *words)
        assert code == 0, text
        assert "has failed" in text
    assert ended(capsys, "show", str(run), "--failed", "--json")[:2] == (0, "[]\n")
    code, text = ended(capsys, "show", str(run), "--failed", "--step", "99")
    assert code == 2
    assert "of step 99" in text


def with_model(root: Path, name: str, model: Path, **files: object) -> Path:
    run = make_run(root / "made", ANSWERED, **files).rename(root / name)
    shutil.copytree(model, run / "global_step_3")
    (run / "latest").symlink_to("global_step_3")
    return run


def test_a_run_is_a_model_by_its_name(tmp_path: Path, toy_model_dir: Path, toy_dataset: Path, capsys) -> None:
    """`eval` and `serve` take names of runs, as `show` does: the best checkpoint, or the latest."""
    root = tmp_path / "checkpoints"
    (root / "P").mkdir(parents=True)
    run = with_model(root / "P", "mine", toy_model_dir)
    (root / "Project").mkdir()
    with_model(root / "Project", "empty", toy_model_dir)
    (root / "Project" / "empty" / "latest").unlink()
    config, options = tmp_path / "run.yaml", ["--root", str(root)]
    config.write_text(CONFIG.replace("tasks.jsonl", str(toy_dataset)).replace("agent.py", str(tmp_path / "agent.py")))
    (tmp_path / "agent.py").write_text(
        "async def run_agent(task, model):\n"
        "    said = await model.client.chat.completions.create(\n"
        "        model=model.name, messages=[{'role': 'user', 'content': task['question']}], max_tokens=2\n"
        "    )\n"
        "    return float(len(said.choices))\n"
    )
    split = ["--dataset", str(toy_dataset), "--split", "test[:2]"]
    for name in ("mine", "P/mine", str(run)):
        code, text = ended(capsys, "eval", "--config", str(config), "--model", name, *options, *split)
        assert code == 0, text
        assert str(run / "global_step_3") in text
    for words in (["serve", "empty"], ["eval", "--config", str(config), *split, "--model", "empty"]):
        code, text = ended(capsys, *words, *options)
        assert code == 2
        assert "has no checkpoint yet" in text


@pytest.mark.parametrize("why", list(VERDICTS))
def test_export_names_the_switch_that_forces(
    why: str, tmp_path: Path, toy_model_dir: Path, monkeypatch, capsys
) -> None:
    root, target = tmp_path / "checkpoints" / "P", tmp_path / "model.gguf"
    root.mkdir(parents=True)
    run = with_model(root, "mine", toy_model_dir, summary=VERDICTS[why])
    converter = tmp_path / "convert_hf_to_gguf.py"
    converter.write_text("import sys\nopen(sys.argv[3], 'w').write(sys.argv[1])\n")
    converter.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    words = ["export", "mine", "--root", str(root.parent), "--for", "gguf", "--to", str(target)]
    code, text = ended(capsys, *words)
    assert code == 2
    (switch,) = re.findall(r"; (--\w+) exports global_step_3 all the same", text)
    assert ended(capsys, *words, switch)[0] == 0
    assert target.read_text() == str(run / "global_step_3")
    (run / "summary.json").write_text(json.dumps({"verdict": {"kind": "better", "model": "global_step_3"}}))
    target.write_text("before")
    code, text = ended(capsys, *words)
    assert code == 2
    (switch,) = re.findall(r"is there already: (--\w+) writes over it", text)
    assert ended(capsys, *words, switch)[0] == 0
    assert target.read_text() == str(run / "global_step_3")
    assert sorted(path.name for path in tmp_path.iterdir() if "gguf" in path.name) == [
        "convert_hf_to_gguf.py",
        "model.gguf",
    ]
    code, text = ended(capsys, *words[:5], "sft", "--to", str(target), "--force")
    assert code == 2
    assert "--force is for gguf and hub" in text
