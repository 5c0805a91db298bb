"""Constrained sampling in the embedded engine: which tokens are sampled, and with which logprobs.

Shape suffixes: S sampled tokens, V vocabulary.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from toy_engines import full_logits, run_all
from transformers import AutoModelForCausalLM, AutoTokenizer

from sharpen.contracts import GenerateRequest, Generation
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.engine.token_masks import with_end
from sharpen.errors import SamplingError
from sharpen.types import Constraint, Sampling

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}, "days": {"type": "integer"}, "note": {"type": "string"}},
    "required": ["city", "days", "note"],
    "additionalProperties": False,
}
ANSWER = Constraint(grammar=f"start: json\njson: %json {json.dumps(SCHEMA)}", origin="response_format")
CHOICE = Constraint(grammar='start: "yes" | "no"', origin="response_format")
PROMPT = list(range(60, 90))


def make_engine(folder: Path, **settings: Any) -> EmbeddedEngine:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = {"max_model_len": 256, "max_slots": 8, "device": "cpu", "stop_decoder": tokenizer.decode, **settings}
    return EmbeddedEngine.from_pretrained(str(folder), **{"tokenizer": tokenizer, **given})


def request(constraint: Constraint | None, noise: int = 0, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        prompt_ids=np.array(PROMPT, np.int32),
        sampling=Sampling(**{"max_tokens": 60, **sampling}),
        noise=noise,
        constraint=constraint,
    )


class Judge:
    """Follows responses by a matcher of its own, and computes logprobs by plain transformers."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._vocabulary = from_tokenizer(self.tokenizer)

    def allowed(self, constraint: Constraint, ids: list[int]) -> list[list[int]]:
        """The ids that are allowed at each place."""
        matcher = LLMatcher(self._vocabulary, constraint.grammar)
        found = []
        for token in ids:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            found.append(np.flatnonzero(bits).tolist())
            assert matcher.consume_token(token)
        return found

    def logprobs(self, constraint: Constraint, found: Generation, temperature: float) -> list[float]:
        ids = found.ids.tolist()
        logits_SV = full_logits(self.model, [*PROMPT, *ids])[len(PROMPT) - 1 : -1] / temperature
        return [
            float(torch.log_softmax(row[kept], 0)[kept.index(token)])
            for row, kept, token in zip(logits_SV, self.allowed(constraint, ids), ids, strict=True)
        ]

    def text(self, found: Generation) -> str:
        return self.tokenizer.decode(found.ids.tolist(), skip_special_tokens=True)


@pytest.fixture(scope="module")
def judge(toy_model_dir: Path) -> Judge:
    return Judge(toy_model_dir)


@pytest.mark.parametrize("settings", [{}, {"deterministic": True}], ids=["fast", "deterministic"])
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_logprobs_are_those_of_the_allowed_tokens(
    toy_model_dir: Path, judge: Judge, temperature: float, settings: Mapping[str, Any]
) -> None:
    """Break: leave out `_constrained` in `sample`, mask after the softmax, or advance no matcher in `_advance`."""
    engine = make_engine(toy_model_dir, **settings)
    requests = [request(ANSWER, noise, temperature=temperature) for noise in range(5)]
    for found in run_all(engine, requests):
        expected = judge.logprobs(ANSWER, found, temperature)
        np.testing.assert_allclose(found.logprobs, expected, atol=1e-4)
        if found.finish_reason == "stop":
            answer = json.loads(judge.text(found))
            assert answer.keys() == {"city", "days", "note"}
            assert answer["city"] in ("Bern", "Oslo")


def test_every_answer_is_one_of_the_choices_and_ends_there(toy_model_dir: Path, judge: Judge) -> None:
    """The end token comes after the answer and has logprob 0, since nothing else is allowed."""
    found = run_all(make_engine(toy_model_dir), [request(CHOICE, noise) for noise in range(8)])
    assert {judge.text(one) for one in found} == {"yes", "no"}
    assert {one.finish_reason for one in found} == {"stop"}
    assert all(one.logprobs[-1] == 0 for one in found)


def test_a_greedy_answer_is_the_likeliest_allowed_one(toy_model_dir: Path, judge: Judge) -> None:
    (found,) = run_all(make_engine(toy_model_dir), [request(CHOICE, temperature=0.0)])
    ids = found.ids.tolist()
    logits_SV = full_logits(judge.model, [*PROMPT, *ids])[len(PROMPT) - 1 : -1]
    best = [kept[int(row[kept].argmax())] for row, kept in zip(logits_SV, judge.allowed(CHOICE, ids), strict=True)]
    assert ids == best


def test_truncation_keeps_allowed_tokens_only(toy_model_dir: Path, judge: Judge) -> None:
    for found in run_all(
        make_engine(toy_model_dir), [request(CHOICE, noise, top_k=2, top_p=0.9) for noise in range(6)]
    ):
        assert judge.text(found) in ("yes", "no")
        assert np.isfinite(found.logprobs).all()


def test_rows_without_a_constraint_are_what_they_are_alone(toy_model_dir: Path) -> None:
    """Break: mask every row of a step that has a constrained one."""
    free = [request(None, noise, max_tokens=20) for noise in range(4)]
    alone = run_all(make_engine(toy_model_dir, deterministic=True), free)
    mixed = run_all(
        make_engine(toy_model_dir, deterministic=True),
        [one for pair in zip(free, [request(CHOICE)] * 4, strict=True) for one in pair],
    )
    for one, other in zip(alone, mixed[::2], strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.logprobs.tolist() == other.logprobs.tolist()


def test_a_constraint_goes_on_where_it_was_when_weights_are_loaded(toy_model_dir: Path, judge: Judge) -> None:
    """The request is suspended and computed again; its matcher stays with it."""

    async def run() -> list[Generation]:
        engine = make_engine(toy_model_dir)
        tasks = [asyncio.ensure_future(engine.generate(request(ANSWER, noise))) for noise in range(4)]
        while engine.stats.sampled_tokens < 12:
            await asyncio.sleep(0)
        await engine.load(1, {name: tensor.clone() for name, tensor in engine.weights().items()})
        return list(await asyncio.gather(*tasks))

    for found in asyncio.run(run()):
        assert set(found.versions.tolist()) == {0, 1}
        np.testing.assert_allclose(found.logprobs, judge.logprobs(ANSWER, found, 1.0), atol=1e-4)


def test_a_grammar_that_cannot_be_compiled_fails_its_request_alone(toy_model_dir: Path) -> None:
    engine = make_engine(toy_model_dir)
    wrong = Constraint(grammar='start: json\njson: %json {"type": "nothing of the kind"}', origin="response_format")

    async def run() -> list[Any]:
        requests = (request(wrong), request(CHOICE), request(None))
        return list(await asyncio.gather(*map(engine.generate, requests), return_exceptions=True))

    refused, *answered = asyncio.run(run())
    assert isinstance(refused, SamplingError)
    assert re.search("cannot be compiled.*nothing of the kind", str(refused))
    assert all(isinstance(one, Generation) for one in answered)


@pytest.mark.parametrize("constraint", [CHOICE, ANSWER])
def test_a_grammar_with_its_end_tokens_needs_no_others(judge: Judge, constraint: Constraint) -> None:
    """For vLLM, which knows its tokenizer's own end token alone: the masks are the same. Break: `with_end` without the
    end tokens."""
    tokenizer, ends = judge.tokenizer, [judge.tokenizer.eos_token_id, judge.tokenizer.pad_token_id]
    ours = LLMatcher(from_tokenizer(tokenizer, eos_token=ends), constraint.grammar)
    theirs = LLMatcher(from_tokenizer(tokenizer), with_end(constraint, ends))
    text = "yes" if constraint is CHOICE else '{"city": "Bern", "days": 12, "note": "x y"}'
    for token in [*tokenizer.encode(text, add_special_tokens=False), None]:
        assert ours.compute_bitmask() == theirs.compute_bitmask()
        if token is not None:
            assert ours.consume_token(token)
            assert theirs.consume_token(token)
    bits = np.unpackbits(np.frombuffer(theirs.compute_bitmask(), np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == sorted(ends)


def test_an_engine_without_a_tokenizer_refuses(toy_model_dir: Path) -> None:
    with pytest.raises(SamplingError, match="tokenizer"):
        run_all(make_engine(toy_model_dir, tokenizer=None), [request(CHOICE)])
