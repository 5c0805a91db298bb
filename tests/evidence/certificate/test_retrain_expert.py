"""Updates with an expert's rows beside the rollouts, made once more: right ones are found right, faults are found; rows
that are not those of the records any more are named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faulty_update import STEP, FaultyUpdate, make_run

from sharpen.config.run import ExpertConfig, RunConfig
from sharpen.evidence.certificate.certify import certify
from sharpen.evidence.certificate.plain.losses import PHI, ExpertLoss
from sharpen.evidence.certificate.plain.retrain import retrain
from sharpen.evidence.certificate.rules import PRESETS
from sharpen.learning.algorithm.expert import Expert

Kind = tuple[str, dict[str, Any]]

PLAIN: Kind = ("mix", {"expert.mu": 0.3})
WEIGHED: Kind = (
    "mix_chord",
    {"expert.mu": 0.6, "expert.mu_warmup_steps": 4, "trainer.num_minibatches": 2, "loss.aggregation": "rollout-mean"},
)


def changed(**changes: Any) -> Callable[[FaultyUpdate], None]:
    """Another expert loss than the settings say."""

    def plant(update: FaultyUpdate) -> None:
        loss = update.trainer._loss
        loss.algorithm = replace(loss.algorithm, expert=replace(loss.algorithm.expert, **changes))

    return plant


def a_row_is_dropped(update: FaultyUpdate) -> None:
    update.experts[0] = update.experts[0][1:]


def rows_of_another_update(update: FaultyUpdate) -> None:
    update.experts.reverse()


def rows_count_twice(update: FaultyUpdate) -> None:
    update.experts = [[replace(one, weights_T=2 * one.weights_T) for one in rows] for rows in update.experts]


def prompts_are_taught_too(update: FaultyUpdate) -> None:
    """Every token but the first carries loss."""

    def taught(one: Any) -> Any:
        mask = np.arange(len(one.ids_T)) > 0
        weight = float(one.weights_T[one.loss_mask_T].sum() / mask.sum())
        return replace(
            one, loss_mask_T=mask, weights_T=np.where(mask, np.float32(weight), np.float32(0)), calls_T=0 * one.calls_T
        )

    update.experts = [[taught(one) for one in rows] for rows in update.experts]


def rollouts_count_whole(update: FaultyUpdate) -> None:
    """The rollouts' part is not weighed by 1 - mu."""
    weight = 1.0 / (1.0 - update.trainer._loss.algorithm.expert.weight(STEP))
    update.loss_tokens("advantages_T", lambda of_one: np.float32(weight) * of_one)


FAULTS: dict[str, tuple[Kind, Callable[[FaultyUpdate], None]]] = {
    "the expert counts more": (PLAIN, changed(mu=0.4)),
    "the expert's tokens are weighed": (PLAIN, changed(phi=True)),
    "an expert's row is dropped": (PLAIN, a_row_is_dropped),
    "the expert's rows count twice": (PLAIN, rows_count_twice),
    "the expert's prompts are taught too": (PLAIN, prompts_are_taught_too),
    "rollouts count whole beside the expert": (PLAIN, rollouts_count_whole),
    "the expert's tokens are not weighed": (WEIGHED, changed(phi=False)),
    "the expert's part does not warm up": (WEIGHED, changed(mu_warmup_steps=0)),
    "the expert's rows of the other minibatch": (WEIGHED, rows_of_another_update),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "expert.jsonl"
    made = [{"prompt": f"question {i}", "response": "yes " * (i % 3 + 1) + str(i)} for i in range(7)]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


@pytest.fixture(scope="module")
def run_of(tmp_path_factory, rows, toy_model_dir, toy_dataset) -> Callable[[Kind], Path]:
    """Make a run with these settings, once."""
    made: dict[str, Path] = {}

    def make(kind: Kind) -> Path:
        if repr(kind) not in made:
            settings = {**kind[1], "expert.dataset.path": str(rows), "expert.batch_size": 3}
            made[repr(kind)] = make_run(tmp_path_factory.mktemp("run"), toy_model_dir, toy_dataset, kind[0], **settings)
        return made[repr(kind)]

    return make


@pytest.mark.parametrize("kind", [PLAIN, WEIGHED], ids=repr)
def test_steps_without_a_fault_are_found_right(kind, run_of):
    found = retrain(run_of(kind))
    assert [(one.first, one.last) for one in found.repeated] == [(step, step) for step in range(1, STEP + 1)]
    assert not found.problems
    assert not found.not_repeated
    assert certify(run_of(kind)).holds


@pytest.mark.parametrize("kind", [PLAIN, WEIGHED], ids=repr)
def test_a_step_trained_anew_is_found_right(kind, run_of, tmp_path):
    update = FaultyUpdate(run_of(kind), tmp_path / "run")
    update.train()
    assert not update.found().problems


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_experts_part_is_found(name, run_of, tmp_path):
    kind, plant = FAULTS[name]
    update = FaultyUpdate(run_of(kind), tmp_path / "run")
    plant(update)
    update.train()
    assert update.found().problems


def test_rows_that_changed_since_are_named_and_no_alarm(run_of, rows, tmp_path):
    run_dir = shutil.copytree(run_of(PLAIN), tmp_path / "run", symlinks=True)
    path = run_dir / "resolved.json"
    resolved = json.loads(path.read_text())
    other = tmp_path / "expert.jsonl"
    resolved["expert.dataset.path"]["value"] = str(other)
    path.write_text(json.dumps(resolved))
    for text, reason in ((rows.read_text().replace("yes", "no!"), "others than those that were recorded"), ("", "")):
        other.write_text(text)
        found = retrain(run_dir)
        assert not found.repeated
        assert not found.problems
        assert len(found.not_repeated) == STEP
        assert reason in found.not_repeated[0]


def test_the_experts_weight_is_that_of_the_trainer_and_of_the_formula():
    def config(**settings: Any) -> RunConfig:
        return RunConfig.model_construct(
            algorithm=RunConfig.model_fields["algorithm"]
            .get_default(call_default_factory=True)
            .model_copy(update={"algorithm_type": "mix_chord"}),
            expert=ExpertConfig.model_construct(**{"mu": 0.5, "phi": None, **settings}),
        )

    given = {"mu_warmup_steps": 4, "mu_decay_steps": 8, "mu_valley": 0.1}
    assert [ExpertLoss.of(config(**given), step).mu for step in (1, 4, 8, 12, 20)] == pytest.approx(
        [0.125, 0.5, 0.3, 0.1, 0.1]
    )
    theirs = Expert(mu=0.5, phi=True, **given)
    for step in range(1, 16):
        ours = ExpertLoss.of(config(**given), step)
        assert ours.mu == pytest.approx(theirs.weight(step))
        assert ours.losses(torch.tensor([-0.5, -2.0])).tolist() == pytest.approx(
            (theirs.weight(step) * theirs.token_losses(torch.tensor([-0.5, -2.0]))).tolist()
        )
    assert PHI.keys() == {name for name, preset in PRESETS.items() if preset.expert}
