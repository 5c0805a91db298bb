"""The package builds a wheel that installs and runs from outside the repository."""

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
import tomllib
from email import message_from_string
from pathlib import Path

import httpx
import pytest

import sharpen

ROOT = Path(__file__).parents[2]
OUTSIDE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
"""The environment of a process, without the folders of tests."""


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, env=OUTSIDE, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages' folder of an empty environment with the wheel: the one that WHEEL names (`make dist`), or one built
    here of a copy. What the package depends on is seen in this environment, and nothing of the clone."""
    folder = tmp_path_factory.mktemp("wheel")
    if given := os.environ.get("WHEEL"):
        shutil.copy(given, folder)
    else:
        shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, folder)
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), cwd=folder)
    (wheel,) = folder.glob("sharpen-*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder / "env"), cwd=folder)
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    pip = (sys.executable, "-m", "pip", f"--python={folder / 'env' / 'bin' / 'python'}", "install", "--quiet")
    run(*pip, "--no-deps", "--no-index", str(wheel), cwd=folder)
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # no .pth in there is read: no clone
    return packages


def program(site: Path, name: str) -> str:
    """Return the path of a program of the environment."""
    return str(site.parents[2] / "bin" / name)


def test_wheel_is_what_is_imported_and_is_typed(site: Path, tmp_path: Path):
    code = "import sharpen; print(sharpen.__file__, sharpen.tune.__module__)"
    place, module = run(program(site, "python"), "-c", code, cwd=tmp_path).split()
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
    (wheel,) = site.parents[3].glob("sharpen-*.whl")
    shown = run(program(site, "python"), "-c", code, cwd=tmp_path)
    assert shown.strip() == f"pip install 'sharpen[vllm] @ {wheel.as_uri()}'"


@pytest.fixture(scope="module")
def trained(site: Path, tmp_path_factory: pytest.TempPathFactory, toy_model_dir: Path) -> Path:
    """What a newcomer has after `sharpen init` and `sharpen run`, outside of the clone: the folder of the starter. Its
    model is a toy, and it takes one step."""
    folder = tmp_path_factory.mktemp("newcomer")
    sharpen_ = program(site, "sharpen")
    run(sharpen_, "init", "first", "--model", str(toy_model_dir), cwd=folder)
    for name in ("train", "test"):
        rows = (folder / "first" / "tasks" / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (folder / "first" / "tasks" / f"{name}.jsonl").write_text("".join(rows[:4]))
    small = ("train_dataset.total_steps=1", "algorithm.batch_size=2", "algorithm.group_size=2", "model.max_tokens=4")
    small += ("model.max_model_len=128",)
    run(sharpen_, "run", *(word for one in small for word in ("--set", one)), cwd=folder / "first")
    return folder / "first"


def test_the_starter_of_the_wheel_is_trained(trained: Path):
    assert {path.name for path in trained.iterdir()} >= {"agent.py", "judge.py", "run.yaml", "test_agent.py", "tasks"}
    (run_dir,) = (trained / "checkpoints" / "Sharpen").iterdir()
    assert (run_dir / "latest" / "model.safetensors").exists()
    assert json.loads((run_dir / "certificate.json").read_text())["holds"] is True


def test_the_wheel_reports_the_run(site: Path, trained: Path):
    page = run(program(site, "sharpen"), "report", "--md", cwd=trained)
    assert "4 held-out tasks" in page
    run(program(site, "sharpen"), "report", "--output", "page.html", cwd=trained)
    assert "<svg" in (trained / "page.html").read_text(encoding="utf-8")  # its templates are in the wheel


def test_the_wheel_shows_the_run_in_a_browser_until_it_is_stopped(site: Path, trained: Path):
    command = [program(site, "sharpen"), "view", "--no-browser"]
    own = {"PYTHONUNBUFFERED": "1", "XDG_CACHE_HOME": str(trained / "cache")}
    with subprocess.Popen(command, cwd=trained, env=OUTSIDE | own, stdout=subprocess.PIPE, text=True) as view:
        try:
            assert view.stdout is not None
            ((address, token),) = re.findall(r"(http://\S+)/\?token=(\S+)", view.stdout.readline())
            headers = {"authorization": f"Bearer {token}"}
            with httpx.Client(base_url=address, headers=headers, timeout=60) as client:
                page = client.get("/")
                assert "Experiment-" in page.text
                files = re.findall(r'(?:href|src)="(/static/[^"]+)"', page.text)
                assert len(files) >= 2
                assert {client.get(one).status_code for one in files} == {200}
        finally:
            view.send_signal(signal.SIGINT)
    assert view.returncode == 0


def test_init_writes_a_starter_from_the_wheel(site: Path, tmp_path: Path):
    command = ["init", "first", "--from", "langgraph", "--model", "some/model"]
    run(program(site, "sharpen"), *command, cwd=tmp_path)
    written = {path.name for path in (tmp_path / "first").rglob("*.*")}
    assert {"agent.py", "judge.py", "run.yaml", "test_agent.py", "train.jsonl", "requirements.txt"} <= written
