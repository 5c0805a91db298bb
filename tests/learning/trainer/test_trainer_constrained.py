"""Tokens that were sampled under a constraint are scored under it, by every model of the trainer.

Shape suffixes: E loss entries, S sampled tokens, V vocabulary.
"""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from trainer_toys import Batch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sharpen.config.run import LossConfig
from sharpen.config.trainer import TrainerConfig
from sharpen.contracts import GenerateRequest
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.engine.token_masks import TokenMasks
from sharpen.errors import CallError, ParityError
from sharpen.learning.algorithm.distill import Distill
from sharpen.learning.algorithm.resolve import resolve
from sharpen.learning.trainer.model import TrainedModel
from sharpen.learning.trainer.packing import pack
from sharpen.learning.trainer.trainer import Trainer
from sharpen.types import Constraint, Experience, Sampling

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}, "note": {"type": "string", "maxLength": 9}},
    "required": ["city", "note"],
    "additionalProperties": False,
}
ANSWER = Constraint(grammar=f"start: json\njson: %json {json.dumps(SCHEMA)}", origin="response_format")
PROMPT = [*range(60, 75)]


class NoMasks(TokenMasks):
    """The fault: every token counts as allowed."""

    def of_response(self, constraint, ids_S):
        return np.full_like(super().of_response(constraint, ids_S), -1)


def sample(folder, constraints, *, temperature=0.8):
    """One rollout of two calls for each constraint of the second call; the first is free."""
    engine = EmbeddedEngine.from_pretrained(
        str(folder), max_model_len=256, max_slots=8, device="cpu", tokenizer=AutoTokenizer.from_pretrained(folder)
    )

    async def call(ids, noise, constraint):
        sampling = Sampling(temperature=temperature, max_tokens=40 if constraint else 6)
        prompt_ids = np.array(ids, np.int32)
        return await engine.generate(
            GenerateRequest(prompt_ids=prompt_ids, sampling=sampling, noise=noise, constraint=constraint)
        )

    async def rollout(number, constraint):
        first = await call(PROMPT, number, None)
        ids = [*PROMPT, *first.ids.tolist(), 80, 81]
        second = await call(ids, 100 + number, constraint)
        return make_rollout(number, ids, first, second, constraint, temperature)

    async def run():
        return await asyncio.gather(*(rollout(number, one) for number, one in enumerate(constraints)))

    return asyncio.run(run())


def make_rollout(number, ids, first, second, constraint, temperature):
    ids_T = np.array([*ids, *second.ids.tolist()], np.int32)
    count, spans = len(ids_T), [(len(PROMPT), first), (len(ids), second)]
    fields = {"logprobs_T": np.zeros(count, "f4"), "versions_T": np.full(count, -1, "i4")}
    calls_T, mask_T, temperatures_T = np.full(count, -1, "i4"), np.zeros(count, np.bool_), np.ones(count, "f4")
    for call, (start, found) in enumerate(spans):
        at = slice(start, start + len(found.ids))
        fields["logprobs_T"][at], fields["versions_T"][at] = found.logprobs, found.versions
        calls_T[at], mask_T[at], temperatures_T[at] = call, True, temperature
    return Experience(
        rollout_id=f"g/{number}",
        group_id="g",
        task_id="g",
        ids_T=ids_T,
        loss_mask_T=mask_T,
        calls_T=calls_T,
        temperatures_T=temperatures_T,
        advantages_T=np.where(mask_T, np.float32((-1) ** number), 0).astype("f4"),
        weights_T=np.where(mask_T, 0.01, 0).astype("f4"),
        constraints={} if constraint is None else {1: constraint},
        **fields,
    )


@pytest.fixture(scope="module")
def rollouts(toy_model_dir):
    """Four with a constrained call, two without."""
    return sample(toy_model_dir, [ANSWER, ANSWER, None, ANSWER, None, ANSWER])


def policy_of(folder, max_logits=None):
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return TrainedModel(module, compute_dtype=torch.float32, max_logits=max_logits)


def packs_of(experiences, folder, masks=None):
    return pack(experiences, 400, masks=masks or TokenMasks.of_folder(folder))


def make_trainer(folder, masks):
    algorithm = resolve("grpo", LossConfig(kl="k3", kl_coef=0.1), 2)
    assert algorithm.needs_reference
    return Trainer(
        policy_of(folder),
        algorithm=algorithm,
        config=TrainerConfig(dtype="float32"),
        learning_rate=1e-3,
        planned_updates=4,
        masks=masks,
        reference=policy_of(folder),
    )


def allowed_of(folder, experience):
    """The allowed ids of each loss entry, by a matcher of its own; None for an entry without a constraint."""
    vocabulary = from_tokenizer(AutoTokenizer.from_pretrained(folder))
    matchers = {call: LLMatcher(vocabulary, one.grammar) for call, one in experience.constraints.items()}
    found = []
    for place in np.flatnonzero(experience.loss_mask_T):
        matcher = matchers.get(int(experience.calls_T[place]))
        if matcher is None:
            found.append(None)
            continue
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        found.append(np.flatnonzero(bits).tolist())
        assert matcher.consume_token(int(experience.ids_T[place]))
    return found


def expected_scores(module, experience, folder):
    """Logprobs and entropies of the loss entries by plain transformers, with gradients."""
    logits_TV = module(input_ids=torch.from_numpy(experience.ids_T.astype(np.int64))[None], use_cache=False).logits[0]
    logprobs, entropies = [], []
    places = np.flatnonzero(experience.loss_mask_T)
    for place, kept in zip(places, allowed_of(folder, experience), strict=True):
        row = logits_TV[place - 1] / float(experience.temperatures_T[place])
        kept = list(range(len(row))) if kept is None else [i for i in kept if i < len(row)]
        row = row[kept].log_softmax(-1)
        logprobs.append(row[kept.index(int(experience.ids_T[place]))])
        entropies.append(-(row.exp() * row).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@pytest.mark.parametrize("max_logits", [None, 2000], ids=["at once", "in chunks"])
def test_scores_and_gradients_are_those_of_the_allowed_tokens(toy_model_dir, rollouts, max_logits):
    """Break: leave `masks` out of `score_rows`, or rows of `rows_of` that differ by their mask only."""
    policy, plain = policy_of(toy_model_dir, max_logits), AutoModelForCausalLM.from_pretrained(toy_model_dir)
    expected = [expected_scores(plain, one, toy_model_dir) for one in rollouts]
    found = [policy.score(one, entropy_gradient=True) for one in packs_of(rollouts, toy_model_dir)]
    logprobs, entropy = (torch.cat([getattr(one, name) for one in found]) for name in ("logprobs_E", "entropy_E"))
    order = np.concatenate([one.rollouts_E for one in packs_of(rollouts, toy_model_dir)])
    expected_logprobs, expected_entropy = (
        torch.cat([expected[number][column] for number in dict.fromkeys(order.tolist())]) for column in (0, 1)
    )
    torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=1e-4)
    (logprobs.sum() + 0.3 * entropy.sum()).backward()
    (expected_logprobs.sum() + 0.3 * expected_entropy.sum()).backward()
    for (name, mine), (_, theirs) in zip(policy.parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(
            mine.grad, theirs.grad, atol=1e-4, rtol=1e-3, msg=lambda said, name=name: name + said
        )


def test_what_the_environment_answered_is_under_no_mask(toy_model_dir, rollouts):
    """Its two ids in each sequence, beside calls with one; the scores of these stay."""
    policy = policy_of(toy_model_dir)
    marked = [
        replace(one, shown_T=~one.loss_mask_T & (np.arange(len(one.ids_T)) > len(PROMPT)) & (one.ids_T >= 80))
        for one in rollouts
    ]
    for one in packs_of(marked, toy_model_dir):
        count, more = one.num_trained_tokens, one.with_echo()
        with torch.no_grad():
            own, both = policy.score(one).logprobs_E, policy.score(more).logprobs_E
            free = policy.score(replace(more, constrained=None)).logprobs_E
        assert len(both) == count + 2 * one.num_sequences
        torch.testing.assert_close(both[:count], own)
        torch.testing.assert_close(both[count:], free[count:])
        assert not torch.allclose(free[:count], own)


def test_engine_and_trainer_agree_and_without_the_mask_the_step_is_refused(toy_model_dir, rollouts):
    batch = Batch(experiences=tuple(rollouts))
    found = make_trainer(toy_model_dir, TokenMasks.of_folder(toy_model_dir)).train_step([batch])
    assert found.values["logprob_gap_max"] < 1e-4
    with pytest.raises(ParityError):
        make_trainer(toy_model_dir, NoMasks.of_folder(toy_model_dir)).train_step([batch])


def test_the_reference_is_under_the_same_mask(toy_model_dir, rollouts):
    """The reference has the policy's weights, so that the divergence is 0. Break: pack without masks for it."""
    trainer = make_trainer(toy_model_dir, TokenMasks.of_folder(toy_model_dir))
    values = trainer.train_step([Batch(experiences=tuple(rollouts))]).values
    assert values["kl_reference"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("divergence", ["forward", "reverse", "js"])
def test_a_divergence_over_the_vocabulary_is_one_over_the_allowed_tokens(toy_model_dir, rollouts, divergence):
    """A model does not diverge from itself, and nothing is NaN. Break: do not mask `other_RV`."""
    policy = policy_of(toy_model_dir)
    for one in packs_of(rollouts, toy_model_dir):
        with torch.no_grad():
            scores = policy.score(one, compared=policy.compare(one, Distill(divergence=divergence).divergences))
        torch.testing.assert_close(scores.divergence_E, torch.zeros_like(scores.divergence_E), atol=1e-5, rtol=0)


def test_few_masks_are_kept_and_computed_once(toy_model_dir, rollouts):
    calls = []

    class Counted(TokenMasks):
        def of_response(self, constraint, ids_S):
            calls.append(len(ids_S))
            return super().of_response(constraint, ids_S)

    policy, packs = policy_of(toy_model_dir), packs_of(rollouts, toy_model_dir, Counted.of_folder(toy_model_dir))
    assert calls == []
    for _ in range(2):
        for one in packs:
            policy.score(replace(one, advantages_E=-one.advantages_E))
    assert len(calls) == 4
    assert sum(len(one.constrained.masks_MW) for one in packs) < sum(calls)


def test_a_token_that_was_not_sampled_under_the_constraint_is_refused_by_name(toy_model_dir, rollouts):
    ids_T = rollouts[1].ids_T.copy()
    place = np.flatnonzero(rollouts[1].calls_T == 1)[2]
    ids_T[place] = 60
    trainer = make_trainer(toy_model_dir, TokenMasks.of_folder(toy_model_dir))
    with pytest.raises(CallError, match=r"call 1 of rollout g/1 .*token 2 .*id 60.*response_format"):
        trainer.train_step([Batch(experiences=(rollouts[0], replace(rollouts[1], ids_T=ids_T)))])


def test_a_trainer_without_masks_refuses_constrained_calls(toy_model_dir, rollouts):
    with pytest.raises(CallError, match=r"call 1 of rollout g/0 .*constraint"):
        make_trainer(toy_model_dir, None).train_step([Batch(experiences=tuple(rollouts))])
