"""The package builds a wheel that installs and runs from outside the repository."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from email import message_from_string
from pathlib import Path

import pytest

import sharpen

ROOT = Path(__file__).parents[2]


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed: the one that WHEEL names (`make dist`), or one built here of a copy."""
    folder = tmp_path_factory.mktemp("wheel")
    if given := os.environ.get("WHEEL"):
        shutil.copy(given, folder)
    else:
        shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, folder)
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), cwd=folder)
    (wheel,) = folder.glob("sharpen-*.whl")
    target = folder / "site"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target))
    run(*pip, str(wheel), cwd=folder)
    return target


def test_wheel_is_what_is_imported_and_is_typed(site: Path, tmp_path: Path):
    code = "import sharpen; print(sharpen.__file__, sharpen.tune.__module__)"
    place, module = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(site)).split()
    assert Path(place).parent.parent == site
    assert module == "sharpen.tuning"
    assert (site / "sharpen" / "py.typed").exists()


def test_the_version_has_one_place(site: Path):
    """Red when the wheel is of another version than the program says, or the changelog begins with another."""
    (metadata,) = site.glob("sharpen-*.dist-info/METADATA")
    assert message_from_string(metadata.read_text(encoding="utf-8"))["Version"] == sharpen.__version__
    (latest, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert latest == sharpen.__version__


def test_what_a_package_index_shows_of_the_wheel(site: Path):
    """Red when the README's links to files, or its pictures, would lead nowhere from there."""
    (metadata,) = site.glob("sharpen-*.dist-info/METADATA")
    shown = message_from_string(metadata.read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert shown["Summary"] == project["description"]
    assert shown["License-Expression"] == "Apache-2.0"
    assert shown["Description-Content-Type"] == "text/markdown"
    assert shown.get_all("Classifier") == project["classifiers"]
    assert shown["Keywords"].split(",") == project["keywords"]
    assert shown.get_all("Project-URL", []) == [f"{name}, {url}" for name, url in project.get("urls", {}).items()]
    text = str(shown.get_payload())
    assert "make quickstart" in text
    assert relative_links(text) == []


def test_links_and_pictures_of_an_index_lead_to_the_repository_once_it_has_an_address():
    page = runpy.run_path(str(ROOT / "setup.py"))["index_page"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(relative_links(readme)) > 10
    text = page(readme, "https://host.test/us/sharpen")
    assert relative_links(text) == []
    assert "](https://host.test/us/sharpen/raw/HEAD/docs/images/view-run.png)" in text
    assert "[Contributing](https://host.test/us/sharpen/blob/HEAD/CONTRIBUTING.md)" in text
    assert "(https://host.test/us/sharpen/blob/HEAD/docs/reference/benchmarks.md#against-hugging-face-trl)" in text
    without = page(readme, None)
    assert (relative_links(without), "![" in without, "Contributing" in without) == ([], False, True)


def relative_links(text: str) -> list[str]:
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not target.startswith(("https:", "#"))]


def test_an_extra_is_added_to_the_wheel_that_was_installed(site: Path, tmp_path: Path):
    code = "from sharpen.config.extras import install_command; print(install_command('vllm'))"
    (wheel,) = site.parent.glob("sharpen-*.whl")
    shown = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(site))
    assert shown.strip() == f"pip install 'sharpen[vllm] @ {wheel.as_uri()}'"


def test_wheel_trains_from_outside_the_repository(site: Path, tmp_path: Path, toy_model_dir: Path, toy_dataset: Path):
    (tmp_path / "agent.py").write_text(
        "from sharpen import WorkflowOutput\n\n\n"
        "async def answer(task, model):\n"
        "    messages = [{'role': 'user', 'content': task['question']}]\n"
        "    reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=4)\n"
        "    return WorkflowOutput(reward=float(len(reply.choices[0].message.content or '')))\n"
    )
    (tmp_path / "run.yaml").write_text(
        "workflow: agent.py:answer\n"
        f"train_dataset: {{path: {toy_dataset}, total_steps: 2}}\n"
        f"model: {{model_path: {toy_model_dir}, max_model_len: 64}}\n"
        "algorithm: {group_size: 4, batch_size: 2, learning_rate: 0.001}\n"
    )
    command = (sys.executable, "-m", "sharpen", "run", "--config", "run.yaml")
    output = run(*command, cwd=tmp_path, PYTHONPATH=str(site))
    last = output.splitlines()[-1]
    assert last.startswith(f"run directory: {tmp_path / 'checkpoints' / 'Sharpen' / 'Experiment-'}")
    assert (Path(last.removeprefix("run directory: ")) / "latest" / "model.safetensors").exists()


def test_init_writes_a_starter_from_the_wheel(site: Path, tmp_path: Path):
    command = ["-m", "sharpen", "init", "first", "--from", "langgraph", "--model", "some/model"]
    run(sys.executable, *command, cwd=tmp_path, PYTHONPATH=str(site))
    written = {path.name for path in (tmp_path / "first").rglob("*.*")}
    assert {"agent.py", "judge.py", "run.yaml", "test_agent.py", "train.jsonl", "requirements.txt"} <= written
