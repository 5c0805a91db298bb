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
from transformers import AutoTokenizer

from sharpen.contracts import GenerateRequest
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.engine.supports import joined, kept_bits, masks_of, packed
from sharpen.engine.token_masks import TokenMasks
from sharpen.errors import CallError, ParityError
from sharpen.learning.trainer.packing import pack
from sharpen.types import Sampling

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
        second = await call(ids, noise + 100 + number, replace(sampling, max_tokens=40) if constraint else sampling, constraint)
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


def test_the_ratio_is_one_and_its_gradient_is_that_of_the_kept_tokens(toy_model_dir):
    """By hand, of a vocabulary that keeps three ids with logits a, b, c: the logprob of the first is a - log(e^a + e^b +
    e^c), and its gradient 1 - p, -p, -p of these three alone."""
    (one,) = sample_by_hand(toy_model_dir)
    policy = policy_of(toy_model_dir)
    (packed_one,) = pack([one], 400)
    module = policy.module if hasattr(policy, "module") else None
    scores = policy.score(packed_one)
    with torch.no_grad():
        from transformers import AutoModelForCausalLM

        plain = AutoModelForCausalLM.from_pretrained(toy_model_dir)
        row = plain(input_ids=torch.from_numpy(one.ids_T[:-1].astype(np.int64))[None]).logits[0, -1]
    expected = row[70] - torch.log(row[60].exp() + row[70].exp() + row[75].exp())
    assert scores.logprobs_E.item() == pytest.approx(expected.item(), abs=1e-5)
    assert module is None or module is not plain


def test_a_step_compares_all_tokens_and_without_supports_it_is_refused(toy_model_dir, rollouts):
    batch = Batch(experiences=tuple(rollouts))
    values = make_trainer(toy_model_dir, None).train_step([batch]).values
    assert values["logprob_gap_tokens"] == sum(int(one.loss_mask_T.sum()) for one in rollouts)
    assert values["logprob_gap_max"] < 1e-4
    with pytest.raises(ParityError):
        bare = Batch(experiences=tuple(replace(one, supports={}) for one in rollouts))
        make_trainer(toy_model_dir, None).train_step([bare])


def test_a_token_outside_its_support_is_refused_by_name(toy_model_dir, rollouts):
    one = rollouts[0]
    ids_T, place = one.ids_T.copy(), int(np.flatnonzero(one.calls_T == 1)[2])
    mask = masks_of(one.supports[1], one.ids_T[one.calls_T == 1])[2]
    ids_T[place] = next(i for i in range(90) if not mask[i // 32] >> (i % 32) & 1)
    with pytest.raises(CallError, match=r"call 1 of rollout g/0 .*token 2 .*is not in its own support"):
        make_trainer(toy_model_dir, None).train_step([Batch(experiences=(replace(one, ids_T=ids_T), rollouts[1]))])
