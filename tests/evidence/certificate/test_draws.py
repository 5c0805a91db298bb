"""Were the tokens drawn from the recorded distributions? Honest draws raise no alarm, whatever is selected of them;
planted faults of the sampler do, in the run and from its records."""

import math
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from experience_builders import make_call, make_group, make_rollout
from faulty_sampler import Draw, by_inverse, peaked, train

from sharpen import WorkflowOutput
from sharpen.errors import CertificateError
from sharpen.evidence.certificate.certificate import recorded_certificate
from sharpen.evidence.certificate.certify import certify
from sharpen.evidence.certificate.draws import FALSE_ALARMS, NOISE, REPEATS, SURPRISE, Draws, Sums, _freedman, sums_of
from sharpen.evidence.certificate.rules import Rules
from sharpen.learning.experience.entropies import EntropySums
from sharpen.types import Call, Group, Outcome, Sampling

GENERATOR = np.random.default_rng(0)
LENGTH, VOCABULARY, CONTEXTS = 24, 100, 64
SPREADS = GENERATOR.uniform(0.3, 4.0, (CONTEXTS, 1))
LOGITS = GENERATOR.normal(size=(CONTEXTS, VOCABULARY)) * SPREADS
PROBS = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
LOGPROBS = np.log(PROBS)
ENTROPIES = -(PROBS * LOGPROBS).sum(axis=1)
VARENTROPIES = (PROBS * LOGPROBS**2).sum(axis=1) - ENTROPIES**2
CDF = PROBS.cumsum(axis=1)
RULES = Rules(group_size=8)


def drawn(prompt: int, uniform_S: np.ndarray) -> tuple[Call, EntropySums]:
    """A call whose token at each place is of the context that its place and the ones before it lead to, and what a
    trainer measures of it."""
    ids, contexts, context = [], [], prompt % CONTEXTS
    for uniform in uniform_S:
        contexts.append(context)
        ids.append(min(int(np.searchsorted(CDF[context], uniform, side="right")), VOCABULARY - 1))
        context = (7 * context + ids[-1] + 1) % CONTEXTS
        if ids[-1] == 0 and len(ids) > 2:
            break
    at = contexts, ids
    call = make_call(
        0, [prompt], ids, logprobs_S=LOGPROBS[at].astype(np.float32), versions_S=np.zeros(len(ids), np.int32)
    )
    cumulative = float((CDF[at] - PROBS[at] / 2).sum())
    return call, EntropySums(
        len(ids), float(ENTROPIES[contexts].sum()), float(VARENTROPIES[contexts].sum()), cumulative
    )


def honest_step(generator: np.random.Generator, prompt: int) -> tuple[list[Group], dict[tuple[str, int], EntropySums]]:
    """Four groups of eight. Rewards say whether an answer is likely; the unlikeliest answers fail, and nothing is
    measured of them, nor of groups with equal rewards: all that is kept is kept for what it is."""
    groups, measured = [], {}
    for number in range(4):
        name, rollouts, known = f"g{prompt}-{number}", [], {}
        for index in range(8):
            call, sums = drawn(prompt + number, generator.random(LENGTH))
            likelihood = float(call.logprobs_S.mean())
            rollout = make_rollout([call], float(likelihood > -2.0), name, index)
            if likelihood < -2.7:
                rollout = replace(rollout, outcome=Outcome.TIMEOUT, reward=None)
            else:
                known[rollout.id, 0] = sums
            rollouts.append(rollout)
        groups.append(make_group(rollouts, name))
        if len({rollout.reward for rollout in rollouts} - {None}) > 1:
            measured |= known
    return groups, measured


def steps(generator: np.random.Generator) -> Iterator[tuple[int, list[Group], dict[tuple[str, int], EntropySums]]]:
    for step in count(1):
        yield step, *honest_step(generator, 4 * step)


def test_a_bound_is_passed_less_often_than_it_says() -> None:
    """5,000 sums of 50 to 200 honest terms against bounds with a chance of 1 in 4, 20 and 100."""
    generator = np.random.default_rng(1)
    contexts = generator.integers(CONTEXTS, size=(5_000, 200))
    uniform = generator.random(contexts.shape)
    surprise = np.empty(contexts.shape)
    for context in range(CONTEXTS):
        here = contexts == context
        ids = np.minimum(np.searchsorted(CDF[context], uniform[here], side="right"), VOCABULARY - 1)
        surprise[here] = -LOGPROBS[context, ids]
    lengths = generator.integers(50, 201, size=(5_000, 1))
    counts = np.arange(200) < lengths
    sums = ((surprise - ENTROPIES[contexts]) * counts).sum(axis=1)
    variances = (VARENTROPIES[contexts] * counts).sum(axis=1)
    largest = float(-LOGPROBS.min())
    for chance in (0.25, 0.05, 0.01):
        bounds = np.array([_freedman(variance, largest, math.log(1.0 / chance)) for variance in variances])
        assert (sums > bounds).mean() < chance
        assert (-sums > bounds).mean() < chance
    assert 1000 * FALSE_ALARMS < 1e-6


def test_honest_runs_raise_no_alarm_whatever_is_selected_of_them() -> None:
    """200 steps of 32 rollouts. The same sums, without what is missing, are far beyond their bound: selection matters.
    ."""
    draws, naive, number = Draws(), Sums(), 0
    for step, groups, measured in steps(np.random.default_rng(2)):
        found = sums_of(groups, measured, {}, version=0, places=(), rules=RULES)
        check = draws.add(step, found)
        assert not check.broken, check.first
        for key in measured:
            call = next(one for group in groups for one in group.rollouts if one.id == key[0]).calls[0]
            excess = -float(call.logprobs_S.sum()) - measured[key].entropy
            naive = naive._replace(
                tokens=naive.tokens + len(call.logprobs_S),
                up=naive.up + excess,
                down=naive.down - excess,
                variance=naive.variance + measured[key].varentropy,
                largest=14.0,
            )
        number += check.checked
        if step == 200:
            break
    assert naive.share > 1.0
    assert number > 1_500
    surprise, noise, repeats = draws.tests()
    assert (surprise.name, noise.name, repeats.name) == (SURPRISE, NOISE, REPEATS)
    assert surprise.missing
    assert "were not measured, which widens this" in surprise.line


def test_a_repeated_answer_is_found_though_some_members_failed() -> None:
    """Two honest members, then four with the noise of the first one; of another group no answer came."""
    generator = np.random.default_rng(3)
    noises = [generator.random(LENGTH), generator.random(LENGTH)]
    draws, broken = Draws(), 0
    for step in range(1, 40):
        calls = [drawn(step, noise)[0] for noise in (noises[0], noises[1], *[noises[0]] * 4)]
        failed = make_rollout([make_call(0, [step], [])], None, f"g{step}", 6)
        rollouts = [make_rollout([call], 0.0, f"g{step}", index) for index, call in enumerate(calls)]
        group = make_group([*rollouts, failed], f"g{step}")
        check = draws.add(step, sums_of([group], {}, {}, version=0, places=(), rules=RULES))
        if check.broken:
            assert "drew the same tokens more often than these are probable" in str(check.first)
            broken = step
            break
    assert 0 < broken < 10


def one(call: Call, sums: EntropySums, *, version: int = 0, **metrics: float) -> int:
    """How many tokens of a group with one member count."""
    group = make_group([make_rollout([call], 1.0, "g", 0)], "g")
    measured = {(group.rollouts[0].id, 0): sums}
    return Draws().add(1, sums_of([group], measured, metrics, version=version, places=(), rules=RULES)).checked


def test_only_tokens_of_the_measured_distribution_count() -> None:
    call, sums = drawn(1, np.random.default_rng(4).random(LENGTH))
    whole = len(call.sampled_ids_S)
    assert one(call, sums) == whole
    assert one(replace(call, seeded=True), sums) == 0
    assert one(replace(call, sampling=Sampling(temperature=0.0)), sums) == 0
    assert one(replace(call, sampling=Sampling(top_p=0.9)), sums) == 0
    assert one(replace(call, sampling=Sampling(top_k=20)), sums) == 0
    assert one(call, sums, version=1) == 0
    assert one(call, sums._replace(num_tokens=whole - 1)) == 0
    assert one(call, sums, **{"sync/staleness_max": 0.0}) == 0


def test_a_prompt_that_is_asked_again_counts_once() -> None:
    """With a seed of its own, such a call would repeat its tokens."""
    call, sums = drawn(1, np.random.default_rng(5).random(LENGTH))
    again = replace(call, index=1)
    group = make_group([make_rollout([call, again], 1.0, "g", 0)], "g")
    measured = {(group.rollouts[0].id, index): sums for index in (0, 1)}
    found = sums_of([group], measured, {}, version=0, places=(), rules=RULES)
    assert found[SURPRISE, "of all members"].tokens == len(call.sampled_ids_S)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, toy_model_dir: Path) -> Path:
    return peaked(toy_model_dir, tmp_path_factory.mktemp("peaked") / "model")


def tempered(temperature: float) -> Draw:
    return lambda log_RV, uniform_R: by_inverse((log_RV / temperature).log_softmax(dim=-1), uniform_R)


def top_20(log_RV: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    least_R1 = log_RV.topk(20).values[:, -1:]
    return by_inverse(torch.where(log_RV >= least_R1, log_RV, -torch.inf).log_softmax(dim=-1), uniform_R)


def the_same_for_all(log_RV: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    return by_inverse(log_RV, uniform_R[:1].expand_as(uniform_R))


def stale(log_RV: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """The seed never moves on: each step of the engine draws with the same numbers."""
    numbers_R = torch.rand(len(uniform_R), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return by_inverse(log_RV, numbers_R)


FAULTS: dict[str, tuple[Draw, str, int]] = {
    "tokens drawn at temperature 1.2, recorded as of 1": (
        tempered(1.2),
        "they are less probable than these make them",
        3000,
    ),
    "tokens drawn at temperature 0.8, recorded as of 1": (
        tempered(0.8),
        "they are more probable than these make them",
        3000,
    ),
    "a top-20 that nobody asked for": (top_20, "they are more probable than these make them", 1600),
    "the same noise for all rollouts": (
        the_same_for_all,
        "drew the same tokens more often than these are probable",
        1600,
    ),
    "biased noise": (
        lambda log_RV, uniform_R: by_inverse(log_RV, uniform_R**1.5),
        "biased noise: smaller ids",
        3000,
    ),
    "a seed that never moves on": (stale, "the tokens were|drew the same tokens more often", 1600),
}
"""How tokens are drawn, what is said of it (a pattern: time decides which rows meet in a step of the engine), and the
most tokens until then."""


@pytest.mark.parametrize(("draw", "found", "most_tokens"), FAULTS.values(), ids=FAULTS)
def test_a_fault_of_the_sampler_ends_the_run_and_is_found_from_its_records(
    tmp_path: Path, model: Path, toy_dataset: Path, draw: Draw, found: str, most_tokens: int
) -> None:
    """Logprobs, parity and all other checks are those of an honest run."""
    with pytest.raises(
        CertificateError, match="the run certificate is broken, and the step was trained on it"
    ) as error:
        train(tmp_path, model, toy_dataset, draw, steps=6)
    assert re.search(found, str(error.value))
    (run,) = tmp_path.glob("*/*")
    certificate = certify(run, logprobs=False)
    assert any(re.search(found, problem) for problem in certificate.problems)
    assert [check.name for check in certificate.checks if check.broken] == ["draws"]
    assert sum(check.checked for check in certificate.checks if check.name == "draws") < most_tokens
    assert not recorded_certificate(run).holds


def test_an_honest_run_says_how_small_a_deviation_it_excludes(tmp_path: Path, model: Path, toy_dataset: Path) -> None:
    run = train(tmp_path, model, toy_dataset, by_inverse, steps=2)
    certificate = certify(run, logprobs=False)
    assert certificate.holds, certificate.problems
    assert [test.name for test in certificate.draws] == [SURPRISE, NOISE, REPEATS]
    for test in certificate.draws:
        assert abs(test.off) < test.bound < 0.6 * test.tokens
    assert certificate.untested == ()
    with closing(sqlite3.connect(run / "run.db")) as connection, connection:
        connection.execute("UPDATE entropy_sums SET num_tokens = num_tokens + 1 WHERE step = 2")
    assert any("step 2: how 0 tokens were drawn can be tested" in one for one in certify(run, logprobs=False).problems)
    with closing(sqlite3.connect(run / "run.db")) as connection, connection:
        connection.execute("DROP TABLE entropy_sums")
        connection.execute("DROP TABLE call_seeds")
        connection.execute("DELETE FROM checks WHERE name = 'draws'")
    earlier = certify(run, logprobs=False)
    assert earlier.holds, earlier.problems
    assert any("steps 1 to 2" in line and "earlier version" in line for line in earlier.untested)
    assert any(line.startswith("  - not tested: whether the tokens") for line in earlier.lines())


def test_rollouts_that_run_ahead_are_named(tmp_path: Path, model: Path, toy_dataset: Path) -> None:
    run = train(tmp_path, model, toy_dataset, None, steps=2, **{"sync.offset": 1, "loss.behaviour": "truncated"})
    certificate = certify(run, logprobs=False)
    assert certificate.holds, certificate.problems
    (named,) = certificate.untested
    assert "ran ahead of the training" in named
    assert [test.name for test in certificate.draws] == [REPEATS]


def test_several_updates_count_what_is_in_the_first_one(tmp_path: Path, model: Path, toy_dataset: Path) -> None:
    run = train(tmp_path, model, toy_dataset, None, steps=1, **{"trainer.num_minibatches": 2})
    certificate = certify(run, logprobs=False)
    assert certificate.holds, certificate.problems
    trained = sum(check.checked for check in certificate.checks if check.name == "loss_mask")
    assert 0.2 * trained < certificate.draws[0].tokens < 0.8 * trained


async def seeded(task, model):
    """An agent whose calls ask for a seed: the calls of a rollout share their noise."""
    messages = [{"role": "user", "content": task["question"]}]
    for _ in range(2):
        reply = await model.client.chat.completions.create(model=model.name, messages=messages, max_tokens=4, seed=7)
        messages += [{"role": "assistant", "content": reply.choices[0].message.content or ""}]
        messages += [{"role": "user", "content": "more"}]
    return WorkflowOutput(reward=float("e" in str(messages)))


def test_calls_with_a_seed_of_their_own_are_named(tmp_path: Path, model: Path, toy_dataset: Path) -> None:
    run = train(tmp_path, model, toy_dataset, None, steps=1, workflow=seeded)
    certificate = certify(run, logprobs=False)
    assert certificate.holds, certificate.problems
    (named,) = certificate.untested
    assert "no call counts" in named
    assert "a seed of the request" in named
