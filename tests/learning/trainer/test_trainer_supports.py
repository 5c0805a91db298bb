"""Tokens of a truncated distribution are scored among the ids that they were drawn from."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_trainer_constrained import ANSWER, PROMPT, make_rollout, make_trainer, policy_of
from trainer_toys import Batch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sharpen.contracts import GenerateRequest
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.engine.supports import joined, kept_bits, masks_of, packed
from sharpen.engine.token_masks import TokenMasks
from sharpen.errors import CallError, ParityError
from sharpen.learning.algorithm.token_baseline import sum_of_squares
from sharpen.learning.trainer.packing import pack
from sharpen.types import Experience, Sampling

ARRAYS = ("loss_mask_T", "logprobs_T", "versions_T", "calls_T", "advantages_T", "weights_T")
TRUNCATED = Sampling(temperature=0.8, top_p=0.7, max_tokens=12)


@pytest.fixture(scope="module")
def engine(toy_model_dir):
    """With fewer slots than rollouts, so that jobs wait and continue."""
    return EmbeddedEngine.from_pretrained(
        str(toy_model_dir),
        max_model_len=256,
        max_slots=3,
        device="cpu",
        tokenizer=AutoTokenizer.from_pretrained(toy_model_dir),
    )


def sample(engine, samplings, constraint=None, noise=0):
    """A rollout of two calls for each sampling, all at once; the second call may be constrained. Two rollouts each fork
    from a common first call."""

    async def call(ids, number, sampling, own):
        prompt_ids = np.array(ids, np.int32)
        return await engine.generate(
            GenerateRequest(prompt_ids=prompt_ids, sampling=sampling, noise=number, constraint=own)
        )

    async def rollout(number, sampling):
        first = await call(PROMPT, noise + number // 2, sampling, None)
        ids = [*PROMPT, *first.ids.tolist(), 80, 81]
        longer = replace(sampling, max_tokens=40) if constraint else sampling
        second = await call(ids, noise + 100 + number, longer, constraint)
        made = make_rollout(number, ids, first, second, constraint, sampling.temperature)
        supports = {index: one.supports for index, one in enumerate((first, second)) if one.supports is not None}
        assert set(supports) == (set() if sampling.full_support else {0, 1})
        return replace(made, supports=supports)

    async def run():
        return await asyncio.gather(*(rollout(number, one) for number, one in enumerate(samplings)))

    return asyncio.run(run())


def gaps(folder, experiences):
    """How far the engine's recorded logprobs are from the trainer's."""
    found = []
    with torch.no_grad():
        for one in pack(experiences, 400, masks=TokenMasks.of_folder(folder)):
            found.append(policy_of(folder).score(one).logprobs_E.numpy() - one.logprobs_E)
    return np.abs(np.concatenate(found))


@pytest.fixture(scope="module")
def rollouts(engine):
    return sample(engine, [TRUNCATED] * 4 + [replace(TRUNCATED, top_p=1.0, top_k=5)] * 2)


CUT = st.one_of(
    st.fixed_dictionaries({"top_p": st.floats(0.05, 0.999)}),
    st.fixed_dictionaries({"top_k": st.integers(1, 600)}),
    st.fixed_dictionaries({"top_p": st.floats(0.3, 0.99), "top_k": st.integers(1, 50)}),
    st.just({}),
)


@settings(max_examples=12, deadline=None)
@given(
    cuts=st.lists(st.tuples(CUT, st.floats(0.3, 3.0)), min_size=3, max_size=5),
    constrained=st.booleans(),
    noise=st.integers(0, 2**32),
)
def test_engine_and_trainer_agree(engine, toy_model_dir, cuts, constrained, noise):
    """Whatever is cut, at any temperature, in one batch, with forks, and under a constraint too. Break: pack without
    supports, or let the engine note those of another row."""
    samplings = [Sampling(temperature=temperature, max_tokens=8, **cut) for cut, temperature in cuts]
    found = sample(engine, samplings, ANSWER if constrained else None, noise)
    assert gaps(toy_model_dir, found).max() < 1e-5


def test_without_supports_they_do_not_agree(toy_model_dir, rollouts):
    assert gaps(toy_model_dir, [replace(one, supports={}) for one in rollouts]).max() > 0.1


def test_a_constraint_and_top_p_together(engine, toy_model_dir):
    """The constraint alone leaves too much. Break: take the constraint only of a call that has both."""
    found = sample(engine, [TRUNCATED] * 2, ANSWER)
    assert gaps(toy_model_dir, found).max() < 1e-5
    assert gaps(toy_model_dir, [replace(one, supports={}) for one in found]).max() > 0.1


def test_a_token_is_scored_and_pushed_among_its_support_alone(toy_model_dir, rollouts):
    """By hand: with the ids 60, 70 and 75 kept and the logits a, b, c at temperature 0.5, log p of 70 is
    2b - log(e^2a + e^2b + e^2c). Its gradient by these logits is 2 (-p_60, 1 - p_70, -p_75), and 0 by any other."""
    kept = torch.full((1, 290), -torch.inf)
    kept[0, [60, 70, 75]] = -1.0
    first = rollouts[0]
    end = len(PROMPT) + 1
    one = Experience(
        **{name: getattr(first, name)[:end] for name in ARRAYS},
        ids_T=np.array([*PROMPT, 70], np.int32),
        temperatures_T=np.full(end, 0.5, np.float32),
        supports={0: joined([packed(bits_B) for bits_B in kept_bits(kept)], 290)},
        rollout_id="g/0",
        group_id="g",
        task_id="g",
    )
    policy, (packed_one,) = policy_of(toy_model_dir), pack([one], 400)
    with torch.no_grad():
        squares = policy.score(packed_one, statistic=sum_of_squares).statistic_E
    logprob = policy.score(packed_one).logprobs_E
    logprob.sum().backward()
    plain = AutoModelForCausalLM.from_pretrained(toy_model_dir)
    logits_V = plain(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    logits_V.retain_grad()
    a, b, c = (2.0 * logits_V[i] for i in (60, 70, 75))
    expected = b - torch.log(a.exp() + b.exp() + c.exp())
    expected.backward()
    assert logits_V.grad.nonzero().flatten().tolist() == [60, 70, 75]
    assert logprob.item() == pytest.approx(expected.item(), abs=1e-5)
    assert squares.item() == pytest.approx(torch.stack([a, b, c]).softmax(0).square().sum().item(), abs=1e-5)
    for (name, mine), (_, theirs) in zip(policy.parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(
            mine.grad, theirs.grad, atol=1e-5, rtol=1e-3, msg=lambda said, name=name: name + said
        )


def test_a_step_compares_all_tokens_and_without_supports_it_is_refused(toy_model_dir, rollouts):
    batch = Batch(experiences=tuple(rollouts))
    values = make_trainer(toy_model_dir, None).train_step([batch]).values
    assert values["logprob_gap_tokens"] == sum(int(one.loss_mask_T.sum()) for one in rollouts)
    assert values["logprob_gap_max"] < 1e-4
    bare = Batch(experiences=tuple(replace(one, supports={}) for one in rollouts))
    with pytest.raises(ParityError):
        make_trainer(toy_model_dir, None).train_step([bare])


def test_a_token_outside_its_support_is_refused_by_name(toy_model_dir, rollouts):
    one = rollouts[0]
    ids_T, place = one.ids_T.copy(), int(np.flatnonzero(one.calls_T == 1)[2])
    mask = masks_of(one.supports[1], one.ids_T[one.calls_T == 1])[2]
    ids_T[place] = next(i for i in range(90) if not mask[i // 32] >> (i % 32) & 1)
    with pytest.raises(CallError, match=r"call 1 of rollout g/0 .*token 2 .*is not in its own support"):
        make_trainer(toy_model_dir, None).train_step([Batch(experiences=(replace(one, ids_T=ids_T), rollouts[1]))])
