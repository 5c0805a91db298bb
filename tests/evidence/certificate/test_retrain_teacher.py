"""Updates taught by another model, made once more: right ones are found right, faults in the teacher's part found."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_update import STEP, FaultyUpdate, make_run

from sharpen.evidence.certificate.plain.retrain import retrain
from sharpen.evidence.certificate.plain.teacher import TEACHINGS, Teaching
from sharpen.evidence.certificate.rules import PRESETS

Kind = tuple[str, dict[str, Any]]

SAMPLED: Kind = ("on_policy_distill", {"loss.kl": "k2", "loss.kl_coef": 0.02})
MIXTURE: Kind = ("jsd", {"distill.beta": 0.3, "trainer.num_minibatches": 2})
FORWARD: Kind = ("jsd", {"distill.divergence": "forward", "trainer.lora.rank": 4})
REVERSE: Kind = ("jsd", {"distill.divergence": "reverse", "distill.coef": 0.5})
ROUNDED: Kind = ("jsd", {"trainer.dtype": "bfloat16"})


def taught(**changes: Any) -> Callable[[FaultyUpdate], None]:
    """Another divergence than the settings say."""

    def plant(update: FaultyUpdate) -> None:
        loss = update.trainer._loss
        loss.algorithm = replace(loss.algorithm, distill=replace(loss.algorithm.distill, **changes))

    return plant


def teacher_is_the_policy(update: FaultyUpdate) -> None:
    update.trainer._loss._teachers.by_name[""].model = update.trainer.policy


def teacher_learns(update: FaultyUpdate) -> None:
    """Its weights move a little before the step."""
    with torch.no_grad():
        for parameter in update.trainer._loss._teachers.by_name[""].model.module.parameters():
            parameter.mul_(1.01)


FAULTS: dict[str, tuple[Kind, Callable[[FaultyUpdate], None]]] = {
    "the teacher counts twice": (SAMPLED, taught(coef=2.0)),
    "the teacher pushes away": (SAMPLED, taught(coef=-1.0)),
    "the policy teaches itself": (SAMPLED, teacher_is_the_policy),
    "the mixture has equal parts": (MIXTURE, taught(beta=0.5)),
    "the mixture's parts are swapped": (MIXTURE, taught(beta=0.7)),
    "the teacher's weights move": (MIXTURE, teacher_learns),
    "the divergence is turned around": (FORWARD, taught(divergence="reverse")),
    "the teacher's coefficient is forgotten": (REVERSE, taught(coef=1.0)),
    "in bfloat16, the policy teaches itself": (ROUNDED, teacher_is_the_policy),
}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory, write_toy_model, toy_model_dir, toy_dataset) -> Callable[[Kind], Path]:
    """Make a run with these settings and a teacher of other weights, once."""
    teacher = write_toy_model(tmp_path_factory.mktemp("teacher"), seed=7)
    made: dict[str, Path] = {}

    def make(kind: Kind) -> Path:
        if repr(kind) not in made:
            settings = {**kind[1], "distill.teacher_path": str(teacher)}
            made[repr(kind)] = make_run(tmp_path_factory.mktemp("run"), toy_model_dir, toy_dataset, kind[0], **settings)
        return made[repr(kind)]

    return make


@pytest.mark.parametrize("kind", [SAMPLED, MIXTURE, FORWARD, REVERSE, ROUNDED], ids=repr)
def test_steps_without_a_fault_are_found_right(kind, run_of):
    found = retrain(run_of(kind))
    assert [(one.first, one.last) for one in found.repeated] == [(step, step) for step in range(1, STEP + 1)]
    assert not found.problems
    assert not found.not_repeated


def test_another_teacher_in_its_folder_is_named_and_no_fault_of_the_update(tmp_path, write_toy_model, toy_dataset):
    """Red when the updates are made once more with it. A run of an earlier version did not record what it was."""
    teacher = write_toy_model(tmp_path / "teacher", seed=7)
    settings = {**SAMPLED[1], "distill.teacher_path": str(teacher)}
    run = make_run(tmp_path, write_toy_model(tmp_path / "model"), toy_dataset, SAMPLED[0], steps=1, **settings)
    write_toy_model(teacher, seed=8)
    found = retrain(run)
    assert not found.problems
    (reason,) = found.not_repeated
    assert f"the files in {teacher} (distill.teacher_path) are no longer those of the run's teacher" in reason
    recorded = json.loads((run / "resolved.json").read_text())
    del recorded["identity.teacher"]
    (run / "resolved.json").write_text(json.dumps(recorded))
    assert retrain(run).problems


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_teachers_part_is_found(name, run_of, tmp_path):
    kind, plant = FAULTS[name]
    update = FaultyUpdate(run_of(kind), tmp_path / "run")
    plant(update)
    update.train()
    assert update.found().problems


@pytest.mark.parametrize("algorithm", ["jsd", "on_policy_distill"])
def test_several_teachers_by_task(algorithm, tmp_path, toy_model_dir, write_toy_model):
    """Two tasks in each step, one of each teacher; made once more with the teachers of the rows, and found when they
    change places in training."""
    folders = {name: str(write_toy_model(tmp_path / name, seed=seed)) for name, seed in (("maths", 7), ("code", 8))}
    rows = [{"question": f"question {n}", "domain": ("maths", "code")[n % 2]} for n in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {"distill.teachers": folders, "distill.teacher_key": "domain", "evaluation.hold_out": False}
    run = make_run(tmp_path / "runs", toy_model_dir, tmp_path, algorithm, **settings)
    found = retrain(run)
    assert len(found.repeated) == STEP
    assert not found.problems
    assert not found.not_repeated
    update = FaultyUpdate(run, tmp_path / "copy")
    teachers = update.trainer._loss._teachers.by_name
    teachers["maths"], teachers["code"] = teachers["code"], teachers["maths"]
    update.train()
    assert update.found().problems
    write_toy_model(Path(folders["code"]), seed=9)
    assert any("(distill.teachers.code) are no longer those" in one for one in retrain(run).not_repeated)


def test_divergences_by_hand():
    """Policy (1/2, 1/2), teacher (1/4, 3/4): KL(teacher || policy) = 1/4 log 1/2 + 3/4 log 3/2. The policy has a third
    id, which the teacher does not have."""
    policy = torch.tensor([[0.25, 0.25, 0.5]]).double().log()
    teacher = torch.tensor([[0.25, 0.75]]).double().log()
    forward = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    reverse = 0.5 * math.log(2.0) + 0.5 * math.log(2.0 / 3.0)
    mixed = [0.3 * 0.25 + 0.7 * 0.5, 0.3 * 0.75 + 0.7 * 0.5]
    js = 0.3 * (0.25 * math.log(0.25 / mixed[0]) + 0.75 * math.log(0.75 / mixed[1]))
    js += 0.7 * (0.5 * math.log(0.5 / mixed[0]) + 0.5 * math.log(0.5 / mixed[1]))
    for name, value in (("forward", forward), ("reverse", reverse), ("js", js)):
        found = Teaching(divergence=name, coef=2.0, beta=0.3).losses(policy, teacher)
        assert found.tolist() == [pytest.approx(2.0 * value)], name


def test_both_tables_of_the_certificate_name_the_same_teachers():
    assert TEACHINGS.keys() == {name for name, preset in PRESETS.items() if preset.teacher}
