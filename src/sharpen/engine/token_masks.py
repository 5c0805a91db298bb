"""Which tokens a constraint allows at each place of a response, computed by llguidance.

In: a model's vocabulary, `Constraint`s, sampled ids. Out: masks over the vocabulary, one bit per id. Engine, trainer
and certificate compute them alike: masks are a function of the grammar and of the ids before, and never stored.

A grammar is compiled once and copied for each response. Where the grammar forces the text, only the tokens that the
tokenizer itself would choose are allowed.

Shape suffixes: R rows, C rows with a constraint, S sampled tokens of a response, V vocabulary, W words (32 bits) of a
mask.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch

from sharpen.errors import ConstraintError
from sharpen.types import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MaskArray = npt.NDArray[np.int32]
"""Masks of several places, shape (R, W): bit i % 32 of word i // 32 says whether id i is allowed."""

_GRAMMARS = 256
"""How many compiled grammars are kept; one takes some hundred kB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A fast tokenizer of transformers, the number of the model's logits, and the ids that end a response."""

    tokenizer: Any
    vocab_size: int
    end_ids: Sequence[int]


class TokenMasks:
    """The masks of one model. May be used from several threads; what `start` returns, by one at a time."""

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        """`load` is called when the first mask is needed. End ids are allowed where the grammar lets a response end."""
        self._load = load
        self._lock = threading.Lock()
        self._compile = functools.lru_cache(maxsize=_GRAMMARS)(self._compile_uncached)

    @classmethod
    def of_folder(cls, folder: str | Path) -> Self:
        """The masks of the model in a folder."""
        return cls(functools.partial(_read_vocabulary, folder))

    def start(self, constraint: Constraint) -> LLMatcher:
        """Return a matcher at the beginning of a response. It takes milliseconds for a new grammar, and a second for
        the first one of all. Raises `ConstraintError` for a grammar that llguidance cannot compile, or a tokenizer that
        it cannot read."""
        return self._compile(constraint.grammar).deep_copy()

    def next(self, matchers: Sequence[LLMatcher]) -> MaskArray:
        """Return the mask of the next token of each response, shape (R, W)."""
        from llguidance.numpy import fill_next_token_bitmask_par

        masks_RW = self._empty(len(matchers))
        fill_next_token_bitmask_par(_threads(), list(zip(matchers, range(len(matchers)), strict=True)), masks_RW)
        return masks_RW

    def of_response(self, constraint: Constraint, ids_S: npt.NDArray[np.integer[Any]]) -> MaskArray:
        """Return the masks under which the ids of a response were sampled, shape (S, W). Raises `ConstraintError` like
        `start`, and if an id is not allowed at its place."""
        from llguidance.numpy import fill_next_token_bitmask_par_with_draft_tokens

        masks_SW = self._empty(len(ids_S))
        drafts = [int(i) for i in ids_S[:-1]]
        fill_next_token_bitmask_par_with_draft_tokens(_threads(), [(self.start(constraint), 0, drafts)], masks_SW)
        words_S = masks_SW[np.arange(len(ids_S)), ids_S // 32]
        forbidden = np.flatnonzero((words_S >> (ids_S % 32)) & 1 == 0)
        if len(forbidden):
            first = int(forbidden[0])
            raise ConstraintError(
                f"token {first} of the response (id {int(ids_S[first])}) is not allowed by its constraint "
                f"({constraint.origin}): it was not sampled under it"
            )
        return masks_SW

    def _empty(self, num_rows: int) -> MaskArray:
        return np.zeros((num_rows, -(-self._tokenizer.vocab_size // 32)), np.int32)

    def _compile_uncached(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        with self._lock:
            tokenizer = self._tokenizer
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ConstraintError(f"it cannot be compiled: {first_line(matcher.get_error())}")
        return matcher

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        vocabulary = self._load()
        num_ids = max(vocabulary.vocab_size, len(vocabulary.tokenizer))
        try:
            return from_tokenizer(vocabulary.tokenizer, n_vocab=num_ids, eos_token=sorted(vocabulary.end_ids) or None)
        except ValueError as error:
            raise ConstraintError(f"llguidance cannot read this model's tokenizer: {first_line(str(error))}") from error


def _read_vocabulary(folder: str | Path) -> Vocabulary:
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return Vocabulary(
        tokenizer=AutoTokenizer.from_pretrained(folder, trust_remote_code=False),
        vocab_size=config.get_text_config().vocab_size,
        end_ids=_end_ids(folder, config),
    )


def _end_ids(folder: str | Path, config: Any) -> list[int]:
    """Return the ids that end a response, as `engine.families.end_token_ids` does for a loaded model."""
    from transformers import GenerationConfig

    with contextlib.suppress(OSError):  # without that file they are those of the configuration
        config = GenerationConfig.from_pretrained(folder)
    ids = config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def check_grammar(constraint: Constraint) -> None:
    """Raise `ConstraintError` for a grammar that llguidance cannot compile, whatever the tokenizer."""
    from llguidance import LLMatcher

    if message := LLMatcher.validate_grammar(constraint.grammar):
        raise ConstraintError(f"it cannot be compiled: {first_line(message)}")


def with_end(constraint: Constraint, end_ids: Sequence[int]) -> str:
    """Return the constraint's grammar with the end tokens in it, for an engine that knows only its tokenizer's own."""
    ends = " | ".join(f"<[{token}]>" for token in end_ids)
    answer = constraint.grammar.replace("start:", "whole_answer:", 1)
    return f"start: whole_answer ({ends})?\n{answer}"


def forbid(logits_RV: torch.Tensor, rows_C: torch.Tensor, masks_CW: torch.Tensor, value: float) -> torch.Tensor:
    """Return the logits with `value` where the masks of the rows `rows_C` do not allow a token."""
    forbidden_CV = ~allowed(masks_CW, logits_RV.shape[1])
    if len(rows_C) == len(logits_RV):
        return logits_RV.masked_fill(forbidden_CV, value)
    return logits_RV.index_copy(0, rows_C, logits_RV[rows_C].masked_fill(forbidden_CV, value))


def allowed(masks_RW: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return masks as booleans, shape (R, V); ids that the masks do not cover are not allowed."""
    bytes_RB = masks_RW.contiguous().view(torch.uint8)
    bits = torch.arange(8, dtype=torch.uint8, device=masks_RW.device)
    allowed_RV = ((bytes_RB.unsqueeze(-1) >> bits) & 1).flatten(1).bool()[:, :vocab_size]
    missing = vocab_size - allowed_RV.shape[1]
    return allowed_RV if missing == 0 else torch.nn.functional.pad(allowed_RV, (0, missing))


@functools.cache
def _threads() -> Any:
    """The threads that compute masks: not more than cores, which the engine needs too."""
    from llguidance import LLExecutor

    return LLExecutor(num_threads=max(1, min(8, len(os.sched_getaffinity(0)) // 2)))


def first_line(message: str) -> str:
    """Return the first line of one of llguidance's messages, which go on with the grammar's text."""
    return next(iter(message.strip().splitlines()), message)
