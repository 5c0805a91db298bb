"""Which updates are made once more, and that what cannot be is named: never a traceback, never silence."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import shutil

import pytest
import torch
from faulty_update import STEP, make_run
from safetensors.torch import load_file, save_file

from sharpen.cli.main import main
from sharpen.config.run import RunConfig
from sharpen.errors import ConfigError, ModelError
from sharpen.evidence.certificate.certify import read_resolved
from sharpen.evidence.certificate.likeness import compare
from sharpen.evidence.certificate.plain.credit import Episodes, Tokens, assign
from sharpen.evidence.certificate.plain.loss_rules import PRESETS as LOSSES
from sharpen.evidence.certificate.plain.loss_rules import LossRules
from sharpen.evidence.certificate.plain.optimizers import Rates, State, adamw, moved_by
from sharpen.evidence.certificate.plain.retrain import retrain, why_not
from sharpen.evidence.certificate.rules import PRESETS
from sharpen.learning.algorithm.losses import POLICY_LOSSES
from sharpen.learning.recipe import algorithm_of


@pytest.fixture(scope="module")
def finished(tmp_path_factory, toy_model_dir, toy_dataset):
    return make_run(tmp_path_factory.mktemp("run"), toy_model_dir, toy_dataset)


@pytest.fixture
def run_dir(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run", symlinks=True)


def resolve(run_dir, **settings):
    """Change settings of a run as recorded."""
    path = run_dir / "resolved.json"
    recorded = json.loads(path.read_text())
    for name, value in settings.items():
        recorded[name]["value"] = value
    path.write_text(json.dumps(recorded))


def test_the_command_prints_each_step_and_its_exit_code_tells(run_dir, capsys):
    assert main(["certify", str(run_dir), "--retrain", "--no-logprobs"]) == 0
    said = capsys.readouterr()
    assert said.out.count(" repeated: cosine ") == STEP
    assert said.err.splitlines()[0].startswith("making updates once more")
    assert main(["certify", str(run_dir), "--retrain", "2", "--no-logprobs", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [(one["first"], one["last"]) for one in content["repeated"]] == [(2, 2)]
    assert content["repeated"][0]["share"] < 1
    file = run_dir / "global_step_2" / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] *= 1.001
    save_file(weights, file, metadata={"format": "pt"})
    assert main(["certify", str(run_dir), "--retrain", "2", "--no-logprobs"]) == 1
    assert "model.norm.weight" in capsys.readouterr().out


def test_a_step_that_the_run_has_not_is_bad_input(finished, capsys):
    assert main(["certify", str(finished), "--retrain", "7"]) == 2
    assert "the run has steps 1 to 2" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="steps 1 to 2"):
        retrain(finished, [0])


def test_steps_between_two_checkpoints_are_all_repeated(run_dir):
    shutil.rmtree(run_dir / "global_step_1")
    found = retrain(run_dir, [2])
    assert [(one.first, one.last) for one in found.repeated] == [(1, 2)]
    assert not found.problems
    assert not found.not_repeated


def test_steps_after_the_last_checkpoint_are_named(run_dir):
    shutil.rmtree(run_dir / "global_step_2")
    (run_dir / "latest").unlink()
    found = retrain(run_dir)
    assert [(one.first, one.last) for one in found.repeated] == [(1, 1)]
    assert found.not_repeated == ("the updates of steps 2: no checkpoint was saved after them",)


def test_too_little_memory_is_said_and_nothing_is_loaded(finished):
    found = retrain(finished, free=1000)
    assert not found.repeated
    assert len(found.not_repeated) == STEP
    assert "GiB of memory" in found.not_repeated[0]


def test_adapters_are_repeated_from_what_they_were_at_the_start(tmp_path, toy_model_dir, toy_dataset):
    """Others than those that trained are found; a run of an earlier version did not record them."""
    run_dir = make_run(tmp_path, toy_model_dir, toy_dataset, **{"trainer.lora.rank": 4})
    found = retrain(run_dir)
    assert [(one.first, one.last) for one in found.repeated] == [(1, 1), (2, 2)]
    assert not found.problems
    assert not found.not_repeated
    file = run_dir / "adapters_at_start.safetensors"
    adapters = load_file(file)
    first, second = (
        "model.layers.1.mlp.up_proj.lora_A.default.weight",
        "model.layers.0.mlp.up_proj.lora_B.default.weight",
    )
    save_file(adapters | {first: adapters[first].roll(1)}, file)
    (problem,) = retrain(run_dir, [1]).problems
    assert "step 1:" in problem
    save_file(adapters | {second: adapters[second] + 0.1}, file)
    (problem,) = retrain(run_dir, [1]).problems
    assert f"{second} is not 0 before the first update" in problem
    file.unlink()
    found = retrain(run_dir)
    assert found.not_repeated == ("the updates of steps 1: adapters begin at random, and this run did not record how",)
    assert [(one.first, one.last) for one in found.repeated] == [(2, 2)]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"trainer.train_towers": True}, "the vision tower is trained"),
        ({"algorithm.algorithm_type": "jsd", "loss.advantage": "gae"}, "a critic learns what a teacher gives"),
        ({"distill.teacher_path": "/nowhere"}, "distill.teacher_path"),
        (
            {"trainer.schedule": "linear", "train_dataset.total_steps": None},
            "how many updates the rate's schedule spans",
        ),
    ],
)
def test_what_the_loop_does_not_make_is_named(run_dir, settings, reason):
    resolve(run_dir, **settings)
    found = retrain(run_dir)
    assert not found.repeated
    assert not found.problems
    assert all(reason in one for one in found.not_repeated)
    assert len(found.not_repeated) == STEP


def test_a_checkpoint_that_cannot_be_read_is_a_problem(run_dir):
    (run_dir / "global_step_1" / "trainer_state" / "optimizer.safetensors").write_bytes(b"nothing")
    found = retrain(run_dir)
    assert len(found.problems) == 2
    assert "global_step_1 is damaged" in found.problems[0]
    assert "cannot be made once more" in found.problems[1]


@pytest.mark.parametrize("lost", ["state.json", "optimizer.safetensors", "a weight"])
def test_a_checkpoint_that_lacks_something_is_a_problem(run_dir, lost):
    """Without its optimizer the moments are 0."""
    folder = run_dir / ("global_step_1" if lost == "state.json" else "global_step_2")
    if lost == "a weight":
        weights = load_file(folder / "model.safetensors")
        del weights["model.norm.weight"]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        (folder / "trainer_state" / lost).unlink()
    (problem,) = retrain(run_dir, [2]).problems
    assert {"a weight": "it has no model.norm.weight", "state.json": "global_step_1 is damaged"}.get(
        lost, ""
    ) in problem


def test_a_disk_that_cannot_be_read_is_no_fault_of_the_checkpoint(run_dir):
    """Reading `/proc/self/mem` at 0 fails as a broken disk does. Red when every `OSError` counts as damage."""
    file = run_dir / "global_step_1" / "trainer_state" / "state.json"
    file.unlink()
    file.symlink_to("/proc/self/mem")
    found = retrain(run_dir)
    assert not found.problems
    assert len(found.not_repeated) == STEP
    assert all("this machine failed (OSError: [Errno 5]" in one for one in found.not_repeated)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "the memory of this machine did not suffice"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "the memory of this machine"),
        (
            RuntimeError("mat1 and mat2 do not fit\nmore"),
            "transformers' own forward pass fails: mat1 and mat2 do not fit",
        ),
        (OSError(28, "No space left on device"), "this machine failed (OSError: [Errno 28] No space left on device)"),
        (KeyError("heads"), "the plain loop fails (KeyError: 'heads')"),
        (ModelError("no such layer"), "no such layer"),
    ],
)
def test_what_is_not_the_checkpoints_fault_is_named(error, reason):
    assert why_not(error).startswith(reason)


def test_moments_that_are_no_numbers_are_a_problem(run_dir):
    file = run_dir / "global_step_2" / "trainer_state" / "optimizer.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight/exp_avg"][0] = math.nan
    save_file(tensors, file)
    (problem,) = retrain(run_dir, [2]).problems
    assert "model.norm.weight/exp_avg" in problem


def test_both_tables_of_the_certificate_know_the_same_algorithms():
    assert LOSSES.keys() == PRESETS.keys()


OVERRIDES = [
    {},
    {"clip_low": 0.01},
    {"policy_loss": "gspo"},
    {"policy_loss": "gspo", "clip_low": 0.1, "clip_high": 0.1},
    {"policy_loss": "sppo", "policy_loss_args": {"epsilon": 0.02}},
    {"policy_loss": "rec", "policy_loss_args": {"clip": "none", "clip_low": 0.01}},
    {"policy_loss": "dppo_tv", "policy_loss_args": {"high": 0.04}},
    {"policy_loss": "vespo", "policy_loss_args": {"k_pos": 1.0}},
    {"policy_loss": "cispo", "kl": "none"},
    {"kl": "k3", "kl_coef": 0.1, "kl_in": "reward", "kl_target": 0.2, "entropy_coef": 0.3},
    {"behaviour": "masked", "behaviour_low": 0.1},
    {"behaviour": "truncated"},
    {"behaviour": "none"},
    {"sequence_mask": 0.2},
    {"echo": 0.05},
]
"""Settings of the loss; an algorithm with which one of them has no effect refuses it."""


def test_the_certificates_table_of_losses_says_what_the_trainer_is_told() -> None:
    """Each algorithm with each override that it takes. Red with a wrong number in either table, or another default."""
    compared = 0
    for name, override in itertools.product(PRESETS, OVERRIDES):
        try:
            config = RunConfig.model_validate(
                {
                    "train_dataset": {"path": "tasks"},
                    "model": {"model_path": "toy", "max_model_len": 64},
                    "algorithm": {"algorithm_type": name},
                    "loss": override,
                    **({"distill": {"teacher_path": "teacher"}} if PRESETS[name].teacher else {}),
                    **({"expert": {"dataset": {"path": "rows"}}} if PRESETS[name].expert else {}),
                }
            )
            told = algorithm_of(config)
        except ConfigError:
            continue
        found, compared = LossRules.of(config), compared + 1
        assert found.policy_loss == told.policy_loss, (name, override)
        parameters = inspect.signature(POLICY_LOSSES[told.policy_loss].configured).parameters.values()
        usual = {one.name: one.default for one in parameters if one.kind == one.KEYWORD_ONLY}
        assert usual | found.arguments == usual | told.policy_loss_args, (name, override)
        assert (found.kl != "none") == told.needs_reference, (name, override)
        if told.needs_reference:
            assert (found.kl, found.kl_coef, found.kl_in_reward) == (told.kl, told.kl_coef, told.kl_in == "reward")
            assert (found.kl_target, found.kl_horizon) == (told.kl_target, told.kl_horizon)
        ours = (found.behaviour, found.behaviour_low, found.behaviour_high, found.entropy_coef)
        assert ours == (told.behaviour, told.behaviour_low, told.behaviour_high, told.entropy_coef), (name, override)
        assert found.sequence_mask == told.sequence_mask, (name, override)
        assert found.echo == (told.echo or 0.0), (name, override)
    assert compared > 200


def test_settings_of_the_loss_replace_those_of_the_algorithm(run_dir):
    resolve(run_dir, **{"loss.policy_loss": "cispo", "loss.kl": "none", "loss.behaviour": "masked"})
    rules = LossRules.of(read_resolved(run_dir / "resolved.json"))
    assert (rules.policy_loss, rules.arguments, rules.kl, rules.kl_coef) == ("cispo", {}, "none", 0.0)
    assert (rules.behaviour, rules.behaviour_low, rules.behaviour_high) == ("masked", 0.5, 5.0)


def test_adamw_by_hand():
    """Gradient (3, 4) of norm 5, clipped to 1: (0.6, 0.8). First update: m/(1-β₁) = g, v/(1-β₂) = g², so each weight
    moves by the rate, after a decay of rate times 0.5 (a matrix decays, a vector does not)."""
    rates = Rates(
        peak=0.1, warmup=0, schedule="constant", floor=0.0, planned=0, betas=(0.9, 0.99), eps=0.0, decay=0.5, max_norm=1
    )
    state = State(
        weights={"matrix": torch.ones(1, 1, dtype=torch.float64), "vector": torch.ones(1, dtype=torch.float64)}
    )
    adamw(state, {"matrix": torch.full((1, 1), 3.0).double(), "vector": torch.tensor([4.0]).double()}, rates)
    assert float(state.weights["matrix"]) == pytest.approx(1 - 0.05 - 0.1, abs=1e-6)
    assert float(state.weights["vector"]) == pytest.approx(1 - 0.1, abs=1e-6)
    assert float(state.moments["vector/exp_avg"]) == pytest.approx(0.08, abs=1e-6)
    assert float(state.moments["vector/exp_avg_sq"]) == pytest.approx(0.0064, abs=1e-6)
    assert state.version == 1


def test_rates_by_hand():
    def rate(update, schedule):
        return Rates(
            peak=1.0, warmup=2, schedule=schedule, floor=0.2, planned=10, betas=(0, 0), eps=0, decay=0, max_norm=1
        ).rate(update)

    assert [rate(update, "linear") for update in (0, 1, 2, 6, 10, 12)] == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2, 0.2])
    assert [rate(update, "cosine") for update in (2, 6, 10)] == pytest.approx([1.0, 0.6, 0.2])


def test_generalized_advantages_by_hand():
    """γ 0.5, λ 0.5; values 1, 2, then 4 in the second call; reward 1 after the first call, 8 after the second.
    δ₃ = 8 - 4 = 4; δ₂ = 1 + 0.5·4 - 2 = 1, A₂ = 1 + 0.25·4 = 2; δ₁ = 0.5·2 - 1 = 0, A₁ = 0.25·2 = 0.5."""
    none = torch.zeros(2, dtype=torch.float64)
    calls = [
        Tokens(owner="a", advantage=1.0, divergence_S=none, coefficient=0.0),
        Tokens(owner="a", advantage=8.0, divergence_S=none[:1], coefficient=0.0),
    ]
    values = [torch.tensor([1.0, 2.0]), torch.tensor([4.0])]
    first, second = assign(calls, values, Episodes(gamma=0.5, lam=0.5, whiten=False))
    assert first.advantages_S.tolist() == [0.5, 2.0]
    assert second.advantages_S.tolist() == [4.0]
    assert first.returns_S.tolist() == [1.5, 4.0]


def test_penalties_reach_back_to_all_tokens_before_them():
    """Advantage 1; divergences 1, 2 in the first call, 3 in the second, coefficient 0.1."""
    calls = [
        Tokens(owner="a", advantage=1.0, divergence_S=torch.tensor([1.0, 2.0]), coefficient=0.1),
        Tokens(owner="a", advantage=1.0, divergence_S=torch.tensor([3.0]), coefficient=0.1),
        Tokens(owner="b", advantage=2.0, divergence_S=torch.tensor([0.0]), coefficient=0.1),
    ]
    found = [credit.advantages_S.tolist() for credit in assign(calls, None, None)]
    assert found == [pytest.approx([0.4, 0.5]), pytest.approx([0.7]), pytest.approx([2.0])]


def test_a_weight_that_rounding_moves_either_way_is_no_fault_after_one_update():
    """The second of two weights has a gradient of 1e-9 in the repeated update, of -1e-9 in the trainer's: AdamW moves
    it by the whole rate, up or down. Red where the weights are held against the repeated ones."""
    rates = Rates(
        peak=0.1, warmup=0, schedule="constant", floor=0.0, planned=0, betas=(0.9, 0.99), eps=0, decay=0.0, max_norm=9.0
    )
    before = State(weights={"w": torch.zeros(2).double()})

    def updated(gradient):
        state = before.copy(torch.float64)
        adamw(state, {"w": torch.tensor([1.0, gradient]).double()}, rates)
        return state

    exact, rounded, found = updated(1e-9), updated(1.1e-9), updated(-1e-9)
    assert [float(one.weights["w"][1]) for one in (exact, found)] == pytest.approx([-0.1, 0.1])
    own = [moved_by(before, found, exact.counts, rates)] * 2
    assert not compare(before, found, exact, [rounded], own).wrong
    assert compare(before, found, exact, [rounded]).wrong
    found.weights["w"] = found.weights["w"] * 1.001
    assert [one.name for one in compare(before, found, exact, [rounded], own).wrong] == ["w"]


def test_a_difference_counts_against_what_rounding_makes():
    before = State(weights={"w": torch.zeros(4)})

    def state(*values):
        return State(weights={"w": torch.tensor(values)})

    exact, rounded = state(1.0, 1.0, 1.0, 1.0), state(1.0, 1.0, 1.0, 1.001)
    assert not compare(before, state(1.031, 1.0, 1.0, 1.0), exact, [rounded]).wrong  # 32 times 0.001
    assert [one.name for one in compare(before, state(1.033, 1.0, 1.0, 1.0), exact, [rounded]).wrong] == ["w"]
    lucky = state(1.0, 1.0, 1.0, 1.0001)  # small by chance: the largest of several measurements counts
    assert compare(before, state(1.031, 1.0, 1.0, 1.0), exact, [lucky]).wrong
    assert not compare(before, state(1.031, 1.0, 1.0, 1.0), exact, [lucky, rounded]).wrong
    opposite = compare(before, state(-1.0, -1.0, -1.0, -1.0), exact, [rounded])
    assert (opposite.cosine, opposite.length) == (pytest.approx(-1.0), pytest.approx(1.0))
