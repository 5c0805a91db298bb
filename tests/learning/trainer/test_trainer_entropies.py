"""The entropy of each trained token, of the distribution that it was predicted from, with the call that it belongs to;
its ratio to the record in the last update on it, and whether that update clipped it.

The expected numbers come from transformers' own pass over each sequence alone, without packing.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from trainer_toys import Batch, hf_logprobs, make_experience, make_experiences, make_model, plain_copy, record

from sharpen.config.run import LossConfig
from sharpen.config.trainer import TrainerConfig
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.parity import Tolerance
from sharpen.learning.trainer.trainer import Trainer

PLACES = 5e-3
"""Half a step of float16 between 4 and 8 is 0.002."""
LARGE = 0.01
"""A learning rate with which one update moves ratios beyond each bound, and none beyond e^20, which is held there."""


@pytest.fixture
def module():
    """A model whose entropies differ widely: from 0.2 to 3.9 in the sequences below."""
    module = make_model("qwen2")
    with torch.no_grad():
        module.lm_head.weight *= 10
    return module


def train(module, *batches, learning_rate=0.05, **config):
    trainer = Trainer(
        TrainedModel(module, compute_dtype=module.dtype),
        algorithm=resolve("multi_step_grpo", LossConfig(kl="none"), 8),
        config=TrainerConfig(**{"max_tokens_per_micro_batch": 80, **config}),
        learning_rate=learning_rate,
        planned_updates=10,
        tolerance=Tolerance(),
    )
    metrics = trainer.train_step([Batch(experiences=tuple(batch)) for batch in batches])
    return metrics, {(one.rollout_id, one.call): one for one in metrics.entropies}


def own_entropies(model, experience, call):
    """The entropies of a call's tokens, by their places, from the distributions written out."""
    places = np.flatnonzero(experience.loss_mask_T & (experience.calls_T == call))
    ids = torch.from_numpy(experience.ids_T.astype(np.int64))[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, places - 1]
    weights = np.exp(logits.numpy() / experience.temperatures_T[places][:, None])
    chances = weights / weights.sum(axis=1, keepdims=True)
    return places, -(chances * np.log(chances)).sum(axis=1)


def expect(model, experiences, found):
    calls = [(one, int(call)) for one in experiences for call in np.unique(one.calls_T[one.loss_mask_T])]
    assert set(found) == {(one.rollout_id, call) for one, call in calls}
    for one, call in calls:
        places, entropies = own_entropies(model, one, call)
        assert found[one.rollout_id, call].places_S.tolist() == places.tolist()
        np.testing.assert_allclose(found[one.rollout_id, call].entropies_S, entropies, atol=PLACES)


def test_each_token_has_its_entropy_at_its_calls_temperature(module):
    """Nine rollouts of two calls at two temperatures in several packs: prompts and histories are shared."""
    twin = plain_copy(module)
    experiences = record(twin, make_experiences())
    metrics, found = train(module, experiences)
    assert all(one.entropies_S.dtype == np.float16 for one in metrics.entropies)
    expect(twin, experiences, found)
    means = np.concatenate([one.entropies_S for one in metrics.entropies]).astype(np.float64)
    assert np.ptp(means) > 2
    assert means.mean() == pytest.approx(metrics.values["entropy"], abs=PLACES)


def test_forks_that_share_tokens_keep_their_own():
    """Two forks of a history, the same ids sampled at two temperatures, and a token left out within a call."""
    module = make_model("qwen2")
    with torch.no_grad():
        module.lm_head.weight *= 10
    shared = [5, 9, 30, 31, 12, 44, 7, 8, 21, 3]
    forks = [
        make_experience("g0/0", [*shared, 4, 5, 3, 4, 40, 41, 5], [(10, 14), (16, 17)], advantage=1.0),
        make_experience("g0/1", [*shared, 4, 5, 3, 4, 40, 5], [(10, 14), (15, 16)], advantage=-1.0),
        make_experience("g0/2", [*shared, 4, 5, 3, 4], [(10, 14)], advantage=1.0, temperatures=(0.5,)),
        make_experience("g0/3", [*shared, 4, 5, 6], [(10, 13)], advantage=-1.0),
    ]
    for name in ("loss_mask_T", "advantages_T", "weights_T"):
        numbers_T = getattr(forks[3], name).copy()
        numbers_T[11] = 0
        forks[3] = replace(forks[3], **{name: numbers_T})
    twin = plain_copy(module)
    forks = record(twin, forks)
    _, found = train(module, forks)
    expect(twin, forks, found)
    assert found["g0/3", 0].places_S.tolist() == [10, 12]
    assert abs(found["g0/0", 0].entropies_S - found["g0/2", 0].entropies_S).min() > 0.1


def test_they_are_those_of_the_first_update_on_a_token(module):
    """Two minibatches, two epochs: the second minibatch is computed after an update, the second epoch is left out."""
    experiences = record(plain_copy(module), make_experiences(num_groups=2))
    before = plain_copy(module)
    _, found = train(module, experiences[:3], experiences[3:], epochs=2)
    expect(before, experiences[:3], {key: one for key, one in found.items() if key[0].startswith("g0")})
    later = {key: one for key, one in found.items() if key[0].startswith("g1")}
    with pytest.raises(AssertionError):
        expect(before, experiences[3:], later)


def test_tokens_that_no_update_was_computed_on_have_none(module):
    experiences = record(plain_copy(module), make_experiences())
    flat = [replace(e, advantages_T=np.zeros_like(e.advantages_T)) if e.group_id == "g1" else e for e in experiences]
    _, found = train(module, flat)
    assert {rollout_id.split("/")[0] for rollout_id, _ in found} == {"g0", "g2"}


def own_ratios(model, experience, call):
    """The log ratios of a call's tokens, from a pass over its sequence alone, and which clip holds each: `high` and
    `low` (0.2), beyond which its advantage pushes the ratio, or `dual` (3)."""
    mask_T = experience.loss_mask_T
    own_E = experience.calls_T[mask_T] == call
    logs = (hf_logprobs(model, experience).detach().numpy() - experience.logprobs_T[mask_T])[own_E]
    advantages = experience.advantages_T[mask_T][own_E]
    ratios = np.exp(logs)
    up, down = advantages > 0, advantages < 0
    return logs, np.select(
        [up & (ratios > 1.2), down & (ratios < 0.8), down & (ratios > 3)], ["high", "low", "dual"], ""
    )


@pytest.mark.parametrize("max_tokens", [80, 10_000])
def test_each_token_has_its_ratio_and_clip_of_the_last_update_on_it(module, max_tokens):
    """Two epochs on nine rollouts, in several packs or in one. A plain copy takes the first update; the second sees its
    weights. Red with the first update's ratios, which are all 1, and when a part keeps the bits of another."""
    config = {"learning_rate": LARGE, "max_tokens_per_micro_batch": max_tokens}
    experiences = record(plain_copy(module), make_experiences())
    copy = plain_copy(module)
    _, first = train(copy, experiences, **config)
    assert all(abs(one.log_ratios_S).max() < 1e-5 and not one.clipped_S.any() for one in first.values())
    updated, kinds = plain_copy(copy), set()
    metrics, found = train(module, experiences, epochs=2, **config)
    for one in experiences:
        for call in np.unique(one.calls_T[one.loss_mask_T]):
            logs, clips = own_ratios(updated, one, call)
            kinds |= set(clips)
            np.testing.assert_allclose(found[one.rollout_id, call].log_ratios_S, logs, rtol=2e-3, atol=1e-4)
            assert found[one.rollout_id, call].clipped_S.tolist() == (clips != "").tolist()
    assert kinds == {"high", "low", "dual", ""}
    clipped = np.concatenate([one.clipped_S for one in found.values()])
    assert metrics.values["clip_fraction"] == pytest.approx(clipped.mean() / 2)  # of both epochs
    assert all(one.log_ratios_S.dtype == np.float16 for one in found.values())


def test_a_token_of_a_truncated_distribution_has_no_ratio(module):
    experiences = record(plain_copy(module), make_experiences(num_groups=1))
    experiences[0] = replace(experiences[0], truncated_calls=(1,))
    trainer = Trainer(
        TrainedModel(module, compute_dtype=module.dtype),
        algorithm=resolve("opmd", LossConfig(kl="none"), 8),
        config=TrainerConfig(),
        learning_rate=0.05,
        planned_updates=10,
        tolerance=Tolerance(),
    )
    metrics = trainer.train_step([Batch(experiences=tuple(experiences))])
    missing = {(one.rollout_id, one.call) for one in metrics.entropies if np.isnan(one.log_ratios_S).all()}
    assert missing == {("g0/0", 1)}
    assert not any(np.isnan(one.log_ratios_S).any() for one in metrics.entropies if one.rollout_id != "g0/0")
