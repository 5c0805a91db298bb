"""Losses of rows by hand, their gradients against plain implementations, and what a step must keep."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from supervised_toys import PAIRS, ROWS, task, taught, tutor
from transformers import AutoModelForCausalLM

from sharpen.config.run import LossConfig
from sharpen.config.trainer import TrainerConfig
from sharpen.errors import CertificateError, ConfigError, DatasetError
from sharpen.evidence.certificate.checks import broken_sentences
from sharpen.learning.algorithm.supervised import SUPERVISED, cross_entropy, dpo, margins, resolve_supervised
from sharpen.learning.supervised.batches import split, weighted
from sharpen.learning.supervised.checks import check_step
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.reference import FrozenCopy
from sharpen.learning.trainer.trainer import Trainer
from sharpen.learning.trainer.work import Minibatch


def test_dpo_by_hand():
    """Log ratios: pair 0 chosen 0.3 + 0.1, rejected -0.2: m = 0.6; pair 1 chosen -1, rejected 0.5: m = -1.5."""
    now = torch.tensor([-1.0, -2.0, -3.0, -4.0, -0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.3, -2.1, -2.8, -3.0, -1.0], dtype=torch.float64)
    sides = torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    found = margins(now, reference, sides, torch.tensor([0, 0, 0, 1, 1]), 2)
    assert found.tolist() == pytest.approx([0.6, -1.5])
    losses = dpo(found, beta=0.5)
    assert losses.tolist() == pytest.approx([math.log(1 + math.exp(-0.3)), math.log(1 + math.exp(0.75))])
    losses.sum().backward()
    # -beta sigmoid(-beta m) on the better side, its negative on the other: equation 7's gradient
    a, b = 0.5 / (1 + math.exp(0.3)), 0.5 / (1 + math.exp(-0.75))
    assert now.grad.tolist() == pytest.approx([-a, -a, a, -b, b])


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=6), st.floats(0.01, 2.0))
def test_dpo_falls_with_the_margin_and_is_log_2_at_none(found, beta):
    losses = dpo(torch.tensor(found, dtype=torch.float64), beta=beta)
    raised = dpo(torch.tensor(found, dtype=torch.float64) + 0.1, beta=beta)
    assert (raised < losses).all()
    assert float(dpo(torch.zeros(1, dtype=torch.float64), beta=beta)) == pytest.approx(math.log(2))


def test_cross_entropy_by_hand():
    assert float(cross_entropy(torch.tensor([-1.0, -3.0]), torch.tensor([0.5, 0.5]))) == 2.0


def plain_model(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def make_trainer(folder: Path, algorithm, **config) -> Trainer:
    reference = None
    if algorithm.needs_reference:
        reference = TrainedModel(plain_model(folder), compute_dtype=torch.float64)
        reference.freeze()
    return Trainer(
        TrainedModel(plain_model(folder), compute_dtype=torch.float64),
        algorithm=algorithm,
        config=TrainerConfig(max_grad_norm=1e6, **config),
        learning_rate=1e-3,
        planned_updates=10,
        reference=reference,
    )


def gradient(trainer: Trainer, experiences) -> dict[str, torch.Tensor]:
    trainer.policy.module.zero_grad()
    trainer._loss.backward(
        trainer._loss.begin([Minibatch(experiences=experiences)], version=0, step=None, probe=())[0], 0
    )
    return {name: parameter.grad.clone() for name, parameter in trainer.policy.parameters()}


def logprobs(model, experience) -> torch.Tensor:
    """Logprobs of the loss tokens by the model's own forward pass over this sequence alone."""
    ids = torch.from_numpy(experience.ids_T.astype(np.int64))[None]
    scores = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    targets = np.flatnonzero(experience.loss_mask_T)
    return scores[targets - 1, experience.ids_T[targets]]


def assert_same(found, module):
    expected = {name: parameter.grad for name, parameter in module.named_parameters()}
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("limit", [8192, 40])
def test_gradient_of_sft_equals_the_label_loss_of_transformers(toy_model_dir, limit):
    """Packed, prefix-shared, in any number of micro-batches: that of `F.cross_entropy` over all labels at once."""
    one, algorithm = tutor(toy_model_dir), SUPERVISED["sft"]
    experiences = weighted([one.lesson(row) for row in ROWS], algorithm)
    trainer = make_trainer(toy_model_dir, algorithm, max_tokens_per_micro_batch=limit)
    plain = plain_model(toy_model_dir)
    logits, labels = [], []
    for experience in experiences:
        ids = torch.from_numpy(experience.ids_T.astype(np.int64))
        logits.append(plain(input_ids=ids[None], use_cache=False).logits[0, :-1])
        labels.append(torch.where(torch.from_numpy(experience.loss_mask_T), ids, -100)[1:])
    loss = F.cross_entropy(torch.cat(logits), torch.cat(labels))
    loss.backward()
    measured = trainer.measure(experiences)
    assert measured.loss == pytest.approx(loss.item(), rel=1e-6)
    of_row = dict.fromkeys((experience.rollout_id for experience in experiences), 0.0)
    for experience, logits_TV, labels_T in zip(experiences, logits, labels, strict=True):
        part = F.cross_entropy(logits_TV, labels_T, reduction="sum") / sum(one.loss_mask_T.sum() for one in experiences)
        of_row[experience.rollout_id] += part.item()
    assert measured.rows == pytest.approx(of_row, rel=1e-6)
    assert_same(gradient(trainer, experiences), plain)


def test_a_large_reference_stays_for_the_next_held_out_rows_and_leaves_for_gradients(toy_model_dir):
    """Held-out rows are measured batch by batch, and it is not read again for each. Break: let go of it in `measure`,
    or not in `begin`."""
    algorithm = SUPERVISED["dpo"]
    trainer = make_trainer(toy_model_dir, algorithm)
    reference = FrozenCopy(toy_model_dir, torch.float32, torch.device("cpu"), large_copy=1)
    trainer._loss._reference = reference
    pairs = weighted([tutor(toy_model_dir, "pairs").lesson(row) for row in PAIRS], algorithm)
    trainer.measure(pairs)
    assert sum(one.numel() for one in reference.model.module.parameters()) > 0
    trainer.train_step([Minibatch(experiences=pairs)])
    assert sum(one.numel() for one in reference.model.module.parameters()) == 0


def test_label_smoothing_by_hand():
    """A quarter of the pairs is taken for exchanged: 3/4 log(1 + e^-0.3) + 1/4 log(1 + e^0.3)."""
    found = torch.tensor([0.6], dtype=torch.float64, requires_grad=True)
    loss = dpo(found, beta=0.5, label_smoothing=0.25)
    assert loss.item() == pytest.approx(0.75 * math.log1p(math.exp(-0.3)) + 0.25 * math.log1p(math.exp(0.3)))
    loss.backward()
    right = 1 / (1 + math.exp(-0.3))  # the probability of the better answer; it is pulled towards 3/4
    assert found.grad.item() == pytest.approx(0.5 * (right - 0.75))


_KL = {
    "k1": lambda x: x,
    "k2": lambda x: x**2 / 2,
    "k3": lambda x: torch.exp(-x) - 1 + x,
    "low_var_kl": lambda x: torch.exp(-x) - 1 + x,
    "abs": torch.abs,
}


@pytest.mark.parametrize("limit", [8192, 64, 1])
@pytest.mark.parametrize("kl", _KL)
def test_the_kl_term_of_dpo_is_the_mean_over_all_tokens_however_they_are_split(toy_model_dir, kl, limit):
    one = tutor(toy_model_dir, "pairs")
    algorithm = resolve_supervised("dpo", LossConfig(kl=kl, kl_coef=0.5))
    experiences = weighted([one.lesson(row) for row in PAIRS], algorithm)
    trainer = make_trainer(toy_model_dir, algorithm, max_tokens_per_micro_batch=limit)
    with torch.no_grad():
        for parameter in trainer.policy.module.parameters():
            parameter += 0.02 * torch.sin(torch.arange(parameter.numel(), dtype=torch.float64)).view_as(parameter)
    plain, reference = plain_model(toy_model_dir), plain_model(toy_model_dir)
    plain.load_state_dict(trainer.policy.module.state_dict())
    terms, margins_ = [], {experience.rollout_id: 0.0 for experience in experiences}
    for experience in experiences:
        with torch.no_grad():
            before = logprobs(reference, experience)
        above = logprobs(plain, experience) - before
        side = 1.0 if experience.advantages_T.max() > 0 else -1.0
        margins_[experience.rollout_id] = margins_[experience.rollout_id] + side * above.sum()
        terms.append(_KL[kl](above))
    pairs = sum(-F.logsigmoid(0.1 * margin) for margin in margins_.values()) / len(margins_)
    divergence = torch.cat(terms).mean()
    (pairs + 0.5 * divergence).backward()
    measured = trainer.measure(experiences)
    assert measured.kl_loss == pytest.approx(0.5 * divergence.item(), rel=1e-6)
    assert measured.loss == pytest.approx((pairs + 0.5 * divergence).item(), rel=1e-6)
    assert sum(measured.rows.values()) == pytest.approx(pairs.item(), rel=1e-6)  # rows are without the KL term
    assert_same(gradient(trainer, experiences), plain)
    values, _ = trainer._loss.end([])
    assert values["kl_loss"] == pytest.approx(0.5 * divergence.item(), rel=1e-6)
    assert values["kl_reference"] == pytest.approx(divergence.item(), rel=1e-6)


@pytest.mark.parametrize("limit", [8192, 64, 1])
def test_gradient_of_dpo_equals_a_plain_implementation_however_it_is_split(toy_model_dir, limit):
    one, algorithm = (
        tutor(toy_model_dir, "pairs"),
        resolve_supervised("dpo", LossConfig(policy_loss_args={"beta": 0.7})),
    )
    experiences = weighted([one.lesson(row) for row in PAIRS], algorithm)
    trainer = make_trainer(toy_model_dir, algorithm, max_tokens_per_micro_batch=limit)
    with torch.no_grad():
        for parameter in trainer.policy.module.parameters():
            parameter += 0.02 * torch.sin(torch.arange(parameter.numel(), dtype=torch.float64)).view_as(parameter)
    plain, reference = plain_model(toy_model_dir), plain_model(toy_model_dir)
    plain.load_state_dict(trainer.policy.module.state_dict())
    total, expected = 0.0, {}
    for row in PAIRS:
        chosen, rejected = (e for e in experiences if e.rollout_id == row.id)
        assert chosen.advantages_T.max() == 1.0
        assert rejected.advantages_T.min() == -1.0
        with torch.no_grad():
            before = [logprobs(reference, e).sum() for e in (chosen, rejected)]
        margin = (logprobs(plain, chosen).sum() - before[0]) - (logprobs(plain, rejected).sum() - before[1])
        expected[row.id] = margin.item()
        total = total - F.logsigmoid(0.7 * margin) / len(PAIRS)
    total.backward()
    measured = trainer.measure(experiences)
    assert measured.margins == pytest.approx(expected)
    parts = {row: math.log1p(math.exp(-0.7 * margin)) / len(PAIRS) for row, margin in expected.items()}
    assert measured.rows == pytest.approx(parts)
    assert measured.loss == pytest.approx(total.item(), rel=1e-6)
    assert_same(gradient(trainer, experiences), plain)
    assert len(trainer._loss._packs(experiences)) == {8192: 1, 64: 4, 1: 4}[limit]


def test_both_forms_of_pairs_teach_the_same(toy_model_dir):
    one = tutor(toy_model_dir, "pairs")
    user = {"role": "user", "content": "q"}
    by_prompt = one.lesson(task(prompt="q", chosen="yes", rejected="no"))
    sides = {name: [user, {"role": "assistant", "content": name}] for name in ("yes", "no")}
    whole = one.lesson(task(chosen=sides["yes"], rejected=sides["no"]))
    assert taught(one, by_prompt) == taught(one, whole) == ["yes<|im_end|>", "no<|im_end|>"]
    for first, second in zip(by_prompt.experiences, whole.experiences, strict=True):
        assert first.ids_T.tolist() == second.ids_T.tolist()
    with pytest.raises(DatasetError, match="'chosen' and 'rejected' are the same"):
        one.lesson(task(prompt="q", chosen="yes", rejected="yes"))


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean-token-mean", "rollout-mean"])
def test_weights_of_an_update_add_up_to_one_and_follow_the_unit(toy_model_dir, aggregation):
    one = tutor(toy_model_dir)
    algorithm = resolve_supervised("sft", LossConfig(aggregation=aggregation))
    lessons = [one.lesson(row) for row in ROWS]
    experiences = weighted(lessons, algorithm)
    assert sum(float(e.weights_T.sum()) for e in experiences) == pytest.approx(1.0)
    per_row = [float(e.weights_T.sum()) for e in experiences]
    if aggregation == "rollout-mean":
        assert per_row == pytest.approx([1 / 3] * 3)
    if aggregation == "sequence-mean-token-mean":  # four answers, two of them in the first row
        assert per_row == pytest.approx([1 / 2, 1 / 4, 1 / 4])


def test_lessons_are_split_over_minibatches_whole():
    assert [list(part) for part in split([1, 2, 3, 4, 5], 2)] == [[1, 2], [3, 4, 5]]
    assert [list(part) for part in split([1], 3)] == [[1]]


def test_the_certificate_names_what_is_broken(toy_model_dir):
    """Each damage is found by the check that is there for it, and an undamaged step breaks none."""
    one, algorithm = tutor(toy_model_dir), SUPERVISED["sft"]
    lessons = [one.lesson(row) for row in ROWS]
    good = weighted(lessons, algorithm)
    assert {check.name: check.broken for check in check_step(lessons, [good], one)} == {
        "rows": 0,
        "mask": 0,
        "rendered": 0,
    }
    first = good[0]
    shifted = replace(first, loss_mask_T=np.roll(first.loss_mask_T, -1), weights_T=np.roll(first.weights_T, -1))
    ids_T = first.ids_T.copy()
    ids_T[3] += 1
    for damaged, name in (
        ([shifted, *good[1:]], "mask"),
        ([replace(first, ids_T=ids_T), *good[1:]], "rendered"),
        ([replace(first, weights_T=np.zeros_like(first.weights_T)), *good[1:]], "mask"),
        (list(good[1:]), "rows"),
    ):
        broken = {check.name: check.first for check in check_step(lessons, [damaged], one) if check.broken}
        assert name in broken, broken
        with pytest.raises(CertificateError, match=f"{name}: .*train/0"):  # as the loop stops
            broken_sentences(check_step(lessons, [damaged], one), stop=True)
        assert "train/0" in broken[name]
    pairs = [tutor(toy_model_dir, "pairs").lesson(PAIRS[0])]
    half = weighted(pairs, SUPERVISED["dpo"])[:1]
    broken = {check.name for check in check_step(pairs, [half], tutor(toy_model_dir, "pairs")) if check.broken}
    assert broken == {"pairs"}
    (line,) = broken_sentences(check_step(pairs, [half], tutor(toy_model_dir, "pairs")), stop=False)
    assert line.startswith("pairs: ")


def test_a_coefficient_of_zero_switches_the_kl_term_of_dpo_off():
    assert resolve_supervised("dpo", LossConfig(kl="k2", kl_coef=0.0)) == SUPERVISED["dpo"]
    assert resolve_supervised("dpo", LossConfig(kl="none")) == SUPERVISED["dpo"]


@pytest.mark.parametrize(
    ("name", "loss", "words"),
    [
        ("sft", {"advantage": "rloo"}, "loss.advantage has no effect in 'sft'"),
        ("sft", {"kl_coef": 0.1}, "loss.kl_coef has no effect"),
        ("dpo", {"aggregation": "token-mean"}, "loss.aggregation has no effect in 'dpo'"),
        ("dpo", {"policy_loss_args": {"bta": 1}}, "its loss takes beta"),
        ("dpo", {"policy_loss_args": {"label_smoothing": 0.5}}, "label_smoothing is 0.5"),
        ("dpo", {"kl": "k2"}, "loss.kl is 'k2' and loss.kl_coef 0: "),
        ("dpo", {"kl_coef": 0.1}, "loss.kl is 'none' and loss.kl_coef 0.1: "),
        ("dpo", {"kl": "corrected_k3", "kl_coef": 0.1}, "learns from rows: use 'k3'"),
        ("dpo", {"policy_loss_args": {"beta": "much"}}, r"much.*must be numbers"),
        ("cpt", {"constant_length": 4}, "go together"),
    ],
)
def test_settings_without_effect_are_refused(name, loss, words):
    with pytest.raises(ConfigError, match=words):
        resolve_supervised(name, LossConfig(**loss))
