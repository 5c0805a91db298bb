"""Constrained sampling by vLLM itself: the masks are those that the trainer computes."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from vllm_served import MODEL, request

from sharpen.engine.token_masks import TokenMasks, allowed
from sharpen.errors import ConstraintError
from sharpen.types import Constraint

pytestmark = pytest.mark.vllm
PROMPT = [506, 70, 80, 90, 100, 101]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}, "note": {"type": "string", "maxLength": 9}},
    "required": ["city", "note"],
    "additionalProperties": False,
}
ANSWER = Constraint(grammar=f"start: json\njson: %json {json.dumps(SCHEMA)}", origin="response_format")
CHOICE = Constraint(grammar='start: "yes" | "no"', origin="response_format")
CALLS = Constraint(
    grammar='start: (opened body)* TEXT\nopened: TEXT <[508]>\nbody: "{" /[0-9]{1,3}/ "}" <[509]>\nTEXT: /(.|\\n)*/',
    origin="tools",
)


def logprobs_of(model, one, generation):
    """By plain transformers, among the tokens that `TokenMasks` allows."""
    ids = [*one.prompt_ids.tolist(), *generation.ids.tolist()]
    with torch.no_grad():
        logits_SV = model(input_ids=torch.tensor([ids])).logits[0, len(one.prompt_ids) - 1 : -1].float()
    masks_SW = TokenMasks.of_folder(MODEL).of_response(one.constraint, generation.ids)
    kept_SV = allowed(torch.from_numpy(masks_SW), logits_SV.shape[1])
    logits_SV = (logits_SV / (one.sampling.temperature or 1.0)).masked_fill(~kept_SV, -torch.inf)
    ids_S = torch.from_numpy(generation.ids.astype(np.int64))
    return logits_SV.log_softmax(-1).gather(1, ids_S[:, None]).squeeze(1).numpy()


def test_logprobs_are_those_of_the_allowed_tokens(served, model):
    """Break: pass the grammar without its end tokens (`with_end`), or let vLLM choose its backend."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    asked = [
        replace(request(PROMPT, noise=noise, max_tokens=60, temperature=temperature), constraint=constraint)
        for constraint in (ANSWER, CALLS, CHOICE)
        for noise, temperature in enumerate((1.0, 0.7, 1.3, 0.0, 1.0))
    ]
    found = served.generate(*asked, request(PROMPT, noise=9))
    for one, generation in zip(asked, found, strict=False):
        np.testing.assert_allclose(generation.logprobs, logprobs_of(model, one, generation), atol=1e-4)
        if one.constraint is ANSWER and generation.finish_reason == "stop":
            answer = json.loads(tokenizer.decode(generation.ids.tolist(), skip_special_tokens=True))
            assert answer["city"] in ("Bern", "Oslo")
        if one.constraint is CHOICE:
            assert tokenizer.decode(generation.ids.tolist(), skip_special_tokens=True) in ("yes", "no")
            assert (generation.finish_reason, generation.logprobs[-1]) == ("stop", 0.0)


def test_a_grammar_that_cannot_be_compiled_is_refused(served):
    wrong = Constraint(grammar='start: json\njson: %json {"type": "odd"}', origin="response_format")
    with pytest.raises(ConstraintError, match=r"cannot be compiled.*odd"):
        served.generate(replace(request(PROMPT), constraint=wrong))
    assert len(served.generate(request(PROMPT))[0].ids)
