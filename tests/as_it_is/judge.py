"""A toy model that judges readably, in place of the large one that a file names.

In: what its prompts end with, and the reply to each. Out: a model whose next token depends on the last one alone: such
an ending is one token of its tokenizer, so is a reply, and after a reply comes the end. So a run says something about
the file and our judging workflows, and nothing about how well a toy model judges.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from pathlib import Path

_TURN = "<|im_end|>\n<|im_start|>assistant\n"
_SCORES = "list of {} scores in the solutions' order: [score of solution 1, ...]" + _TURN
_RATED = "{}\n</response>\n<rubrics>\nNone are given: rate the response as a whole.\n</rubrics>\nYour rating:" + _TURN
_RATING = '```json\n{{"rating": {}}}\n```'
REPLIES: Mapping[str, Mapping[str, str]] = {
    "math_ruler_workflow": {_SCORES.format(4): "[0, 1, 0, 1]", _SCORES.format(1): "[1]"},
    "agentscope_v1_react_search_workflow": {f"Correct answer: 7{_TURN}": "Correctness: YES"},
    "rubric_judge_workflow": {
        "\n": _RATING.format(3),
        **{_RATED.format(letter): _RATING.format(7) for letter in string.ascii_letters},
    },
}
"""By the workflow that asks the judge: what its prompts end with (an answer that ends with a letter), and the reply."""


def write_judge(make: Callable[..., Path], folder: Path, workflow: str) -> Path:
    """Write a judge for a workflow, made of the tests' toy model."""
    import torch
    from tokenizers import AddedToken
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made, replies = make(folder), REPLIES[workflow]
    tokenizer = AutoTokenizer.from_pretrained(made)
    said = list(dict.fromkeys(replies.values()))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (*replies, *said)])  # before its special ones
    model = AutoModelForCausalLM.from_pretrained(made)
    model.resize_token_embeddings(len(tokenizer))
    model.config.tie_word_embeddings, model.config.max_position_embeddings = False, 4096
    before, after = (torch.zeros(len(tokenizer), model.config.hidden_size) for _ in range(2))
    for place, reply in enumerate(said, 1):
        for ending in (ending for ending, its_reply in replies.items() if its_reply == reply):
            before[_last_token(tokenizer, ending), place] = 1.0
        (token,) = tokenizer.encode(reply, add_special_tokens=False)
        before[token, 0] = after[token, place] = 1.0
    after[tokenizer.eos_token_id, 0] = 1.0
    weights = {
        name: torch.zeros_like(value) if "_proj" in name else value for name, value in model.state_dict().items()
    }
    weights |= {"model.embed_tokens.weight": before, "lm_head.weight": 10 * after}
    model.save_pretrained(made, state_dict=weights)
    tokenizer.save_pretrained(made)
    return made


def _last_token(tokenizer: object, ending: str) -> int:
    return int(tokenizer.encode(ending, add_special_tokens=False)[-1])  # type: ignore[attr-defined]
