"""Trinity-RFT's configuration files: what each of our examples becomes, line by line, and what is said about it.

`yaml/<name>.txt` was written beside `yaml/<name>.yaml`: every setting that is not our own default with where it comes
from, then the lines and the notice that are printed.
"""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from sharpen.cli.explain import explain
from sharpen.compat.files import load_config
from sharpen.config.load import ResolvedConfig, resolve
from sharpen.config.public import DatasetConfig, TunerModelConfig
from sharpen.learning.algorithm.supervised import SUPERVISED, resolve_supervised
from sharpen.learning.recipe import RolloutRecipe, recipe_of

FILES = sorted((Path(__file__).parent / "yaml").glob("*.yaml"))
PARTS = {path for path in FILES if path.stem.startswith("fragment") or path.stem == "agentscope_tuner"}
"""Files that leave dataset and model to the arguments of `tune()`."""
ENVIRONMENT = {
    "RUN_NUMBER": "7",
    "MAX_MODEL_LEN": "4096",
    "HOME": "/home/me",
    "JUDGE_URL": "http://judge.invalid/v1",
}
UNSET = ("TRINITY_CHECKPOINT_ROOT_DIR", "TRINITY_MODEL_PATH", "TRINITY_TASKSET_PATH", "PROJECT", "REPEAT", "BATCH_SIZE")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in UNSET:
        monkeypatch.delenv(name, raising=False)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def resolved(path: Path) -> ResolvedConfig:
    arguments = {}
    if path in PARTS:
        arguments = {
            "train_dataset": DatasetConfig(path="tasks.jsonl"),
            "model": TunerModelConfig(model_path="m", max_model_len=512),
        }
    return resolve(load_config(path, has_ray=True), None, arguments)


def test_there_are_at_least_fifteen_files():
    assert len(FILES) >= 15


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.usefixtures("environment")
def test_a_file_means_what_is_written_beside_it(path: Path):
    out = io.StringIO()
    explain(found := resolved(path), out)
    lines = [line for line in out.getvalue().splitlines() if found.origins.get(line.split(" = ")[0]) != "default"]
    assert lines == path.with_suffix(".txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.usefixtures("environment")
def test_the_algorithm_of_a_file_can_be_had(path: Path):
    """What the file says of the algorithm is a preset of ours with parts that it takes."""
    config = resolved(path).config
    if config.algorithm.algorithm_type in SUPERVISED:
        resolve_supervised(config.algorithm.algorithm_type, config.loss)
    else:
        recipe = recipe_of(config)
        assert isinstance(recipe, RolloutRecipe)
        assert (recipe.replay is not None) == (path.stem == "replay")
