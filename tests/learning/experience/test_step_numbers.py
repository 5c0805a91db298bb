"""Steps count from 1 in the ids of groups, as everywhere; those of earlier versions, which count the steps before, are
read."""

import json
from pathlib import Path

import pytest
from experience_builders import make_call, make_group, make_rollout

from sharpen.cli.main import main
from sharpen.learning.experience.journal import Journal
from sharpen.learning.experience.reading import read_last_groups
from sharpen.types import id_of_group, noise_name, step_of_group


@pytest.mark.parametrize("step", [1, 9, 10, 100])
def test_an_id_says_its_step(step: int) -> None:
    id_ = id_of_group(step, "refill-1/train/7")
    assert id_ == f"step_{step}/refill-1/train/7"
    former = f"step-{step - 1}/refill-1/train/7"
    assert step_of_group(id_) == step_of_group(former) == step_of_group(f"{id_}/0") == step
    assert noise_name(f"{id_}/0") == f"{former}/0"
    assert noise_name(former) == former


def test_other_ids_have_no_step() -> None:
    for id_ in ("eval/train/1", "before/held-out/sampled/1", "steps_1/a", "a step_1/a", "step_1a/b", "step_/a"):
        assert step_of_group(id_) is None
        assert noise_name(id_) == id_


def write(journal: Path, *ids: str) -> None:
    with Journal(journal) as opened:
        for id_ in ids:
            opened.add(make_group([make_rollout([make_call(0, [1], [2])], 1.0, id_, 0)], group=id_))


def test_a_step_that_an_earlier_version_began_is_repeated_whole(tmp_path: Path) -> None:
    """Red when only the number tells steps apart: the step had groups of both."""
    write(tmp_path / "run.db", "step-0/a", "step-0/b", "step-1/c", "step_2/d", "step_2/e", "step_3/c")
    assert read_last_groups(tmp_path / "run.db") == {1: [1, 2], 2: [4, 5], 3: [6]}


def test_a_step_is_asked_for_by_its_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red when `--step 2` printed `step-1/...` of a run of today."""
    write(tmp_path / "run.db", "step-0/a", "step_2/b", "step_10/c")
    for step, id_ in ((1, "step-0/a/0"), (2, "step_2/b/0"), (10, "step_10/c/0")):
        assert main(["show", str(tmp_path), "--step", str(step), "--json"]) == 0
        assert [one["id"] for one in json.loads(capsys.readouterr().out)] == [id_]
