"""A run that ends before its first step keeps its reason and the rollouts of the check, and says them first."""

import json
import shutil
from pathlib import Path

import pytest

from sharpen.cli.main import main
from sharpen.learning.experience.reading import read_groups, read_steps
from sharpen.show.view.data.run import run_page
from sharpen.show.view.diagnoses import diagnosed
from sharpen.show.view.files import read_files
from sharpen.show.view.folders import Folder

AGENT = """
from sharpen import WorkflowOutput

async def breaks(task, model):
    raise KeyError("no field colour")

async def answer(task, model):
    messages = [{"role": "user", "content": task["question"]}]
    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=4)
    return WorkflowOutput(reward=float("e" in (reply.choices[0].message.content or "")))
"""


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory, toy_model_dir: Path, toy_dataset: Path) -> Path:
    """The directory of a run whose agent raises in each rollout of the check."""
    folder = tmp_path_factory.mktemp("failed")
    (folder / "agent.py").write_text(AGENT)
    (folder / "run.yaml").write_text(
        f"workflow: {folder / 'agent.py'}:breaks\n"
        f"checkpoint_root_dir: {folder / 'runs'}\n"
        "name: one\n"
        f"train_dataset: {{path: {toy_dataset}, total_steps: 1}}\n"
        f"model: {{model_path: {toy_model_dir}, max_model_len: 64}}\n"
        "algorithm: {group_size: 2, batch_size: 2}\n"
        "rollout: {max_attempts: 1}\n"
    )
    assert main(["run", "--config", str(folder / "run.yaml")]) == 1
    return folder / "runs" / "Sharpen" / "one"


def said(capsys, *words: str) -> str:
    assert main(list(words)) == 0
    return " ".join(capsys.readouterr().out.split())


def test_its_summary_and_its_rollouts_are_kept(failed):
    error = json.loads((failed / "summary.json").read_text())["error"]
    assert error["kind"] == "RolloutError"
    assert error["message"].startswith("check: the first attempt of each of the 8 rollouts failed")
    groups = list(read_groups(failed / "evaluations.db"))
    assert [group.id.partition("/")[0] for group in groups] == ["check"] * 4
    assert sum(len(group.rollouts) for group in groups) == 8
    assert not list(read_groups(failed / "run.db")), "the check is no part of what may train"


def test_every_command_says_the_reason_first(failed, capsys):
    """Red when the error is not in the summary, or the rollouts of the check are not kept: they said 'no rollouts yet',
    'no cause found', 'stopped', and nothing."""
    reason = "RolloutError: check: the first attempt of each of the 8 rollouts failed"
    for words in (["show", str(failed)], ["show", str(failed), "--failed"]):
        text = said(capsys, *words)
        assert text.startswith(f"this run failed: {reason}")
        assert "check/" in text
        assert "workflow_error" in text
    assert "KeyError: 'no field colour'" in text
    assert len(json.loads(said(capsys, "show", str(failed), "--failed", "--json"))) == 8
    listed = said(capsys, "ls", "--root", str(failed.parent.parent))
    assert " failed " in listed
    assert f"! {reason}" in listed
    (line,) = json.loads(said(capsys, "ls", "--root", str(failed.parent.parent), "--json"))
    assert (line["state"], line["error"].startswith(reason)) == ("failed", True)
    first, *_ = json.loads(said(capsys, "diagnose", str(failed), "--json"))["findings"]
    assert first["name"] == "ended_by_an_error"
    assert first["quotes"][0] == reason.removeprefix("RolloutError: ") + "; by cause, with the first error of each:"
    assert first["examples"][0].startswith("check/")
    assert main(["report", str(failed)]) == 0
    report = (failed / "report.html").read_text()
    assert "Failed before the first step" in report
    assert "KeyError" in report


def test_its_page_says_it_and_nothing_that_it_could_not_have(failed):
    folder, files = Folder.of(failed), read_files(failed)
    page = run_page(folder, files, diagnosed(folder))
    assert page.run.state == "failed"
    assert page.run.error is not None
    assert page.run.error.text.startswith("RolloutError: check:")
    assert page.findings[0].name == "ended_by_an_error"
    assert [one.name for one in page.findings][1] == "excluded_rollouts"
    assert page.run.problems == ()


def test_started_again_it_forgets_the_reason_and_confuses_the_check_with_nothing(failed, tmp_path, capsys):
    """Red when a reader takes the check for an evaluation, or the next session leaves the old error."""
    folder = tmp_path / "again"
    shutil.copytree(failed.parents[2], folder)
    config, run = folder / "run.yaml", folder / "runs" / "Sharpen" / "one"
    settings = ["--set", f"workflow={folder / 'agent.py'}:answer", "--set", f"checkpoint_root_dir={folder / 'runs'}"]
    capsys.readouterr()
    assert main(["run", "--config", str(config), *settings, "--set", "model.max_tokens=65"]) == 0
    assert "model.max_tokens is 65, above model.max_model_len (64)" in capsys.readouterr().out
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["error"], summary["steps"], summary["verdict"] is None) == (None, 1, False)
    moments = [group.id.partition("/")[0] for group in read_groups(run / "evaluations.db")]
    assert moments == ["check"] * 8 + ["before"] * 8 + ["after"] * 8
    assert len(read_steps(run / "run.db")) == 1
    assert main(["certify", str(run)]) == 0
    capsys.readouterr()
    (folder / "judge.py").write_text("async def judge(task, response):\n    return 1.0\n")
    assert "check/" not in said(capsys, "show", str(run))
    rescored = folder / "rescored.json"
    said(capsys, "rescore", str(run), "--judge", f"{folder / 'judge.py'}:judge", "--output", str(rescored))
    assert '"check/' not in rescored.read_text()
    page = run_page(Folder.of(run), read_files(run), diagnosed(Folder.of(run)))
    assert (page.run.state, page.run.error) == ("ended", None)
    assert said(capsys, "ls", "--root", str(folder / "runs")).count("RolloutError") == 0


def test_a_model_that_cannot_be_loaded_is_the_reason_too(failed, toy_model_dir, tmp_path, capsys):
    """Before there is a journal, or a line of metrics. Red when only what ends the loop is noted."""
    broken = tmp_path / "model"
    shutil.copytree(toy_model_dir, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": 2 * config["intermediate_size"]}))
    options = ["--set", f"model.model_path={broken}", "--set", f"checkpoint_root_dir={tmp_path / 'runs'}"]
    with pytest.raises(RuntimeError, match="size"):
        main(["run", "--config", str(failed.parents[2] / "run.yaml"), *options])
    run = tmp_path / "runs" / "Sharpen" / "one"
    assert not (run / "run.db").exists()
    kept = json.loads((run / "summary.json").read_text())["error"]
    assert kept["kind"] == "RuntimeError"
    assert "Traceback" in kept["traceback"]
    capsys.readouterr()
    assert said(capsys, "show", str(run)).startswith("this run failed: RuntimeError: ")
    assert "ended_by_an_error" in said(capsys, "diagnose", str(run))
    page = run_page(Folder.of(run), read_files(run), diagnosed(Folder.of(run)))
    assert (page.run.state, page.run.problems, page.findings[0].name) == ("failed", (), "ended_by_an_error")
