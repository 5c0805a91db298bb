"""Were the tokens of constrained calls sampled under their constraints, those of truncated ones from their supports?

In: the recorded calls and the model's folder. Out: a sentence for each call with a token that its constraint does not
allow, or that is not in its support. Each call is followed by a matcher of its own, token by token, and supports are
read by code of its own, as the repeated updates read them; masks, which engine and trainer use, play no part.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sharpen.types import Call, Experience, Rollout, Supports


def constraint_check(folder: Path) -> Callable[[Rollout, Call], str | None]:
    """Return a function that says what is wrong with a call's tokens, or None. The model's tokenizer is read when the
    first constrained call comes."""

    @functools.cache
    def vocabulary() -> Any:
        from llguidance.hf import from_tokenizer
        from transformers import AutoTokenizer

        return from_tokenizer(
            AutoTokenizer.from_pretrained(folder, trust_remote_code=False), eos_token=_end_ids(folder)
        )

    @functools.cache
    def compiled(grammar: str) -> Any:
        from llguidance import LLMatcher

        return LLMatcher(vocabulary(), grammar, log_level=0)

    @functools.cache
    def num_ids() -> int:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return int(config.get_text_config().vocab_size)

    def check(rollout: Rollout, call: Call) -> str | None:
        where = f"rollout {rollout.id}, call {call.index}"
        if call.supports is not None and (wrong := _wrong_support(call, call.supports, num_ids())):
            return f"{where}: {wrong}"
        if call.constraint is None:
            return None
        matcher = compiled(call.constraint.grammar).deep_copy()
        if matcher.is_error():
            return f"{where}: its constraint ({call.constraint.origin}) cannot be compiled"
        for place, token in enumerate(call.sampled_ids_S.tolist()):
            if not matcher.consume_token(token):
                return (
                    f"{where}: sampled token {place} (id {token}) is not allowed by its constraint "
                    f"({call.constraint.origin})"
                )
        return None

    return check


def _wrong_support(call: Call, supports: Supports, num_ids: int) -> str | None:
    """Say what is wrong with the supports of a call's tokens, if anything. `num_ids` are those of the model."""
    if supports.vocab_size != num_ids:
        return f"supports among {supports.vocab_size} ids are recorded, but the model has {num_ids}"
    sizes, num_bytes, at = supports.sizes_S.tolist(), -(-supports.vocab_size // 8), 0
    if len(sizes) != len(call.sampled_ids_S) or sum(sizes) != len(supports.packed) or min(sizes, default=1) < 1:
        return f"supports of {len(sizes)} tokens are recorded for {len(call.sampled_ids_S)}, or parts of them"
    for place, (token, size) in enumerate(zip(call.sampled_ids_S.tolist(), sizes, strict=True)):
        own, at = supports.packed[at : at + size], at + size
        if size == num_bytes:
            bits = int.from_bytes(own, "little")
            known, count = bool(bits >> token & 1), bits.bit_count()
        else:
            ids = _ids(own)
            known, count = token in ids and ids[-1] < supports.vocab_size, len(ids)
        if not known:
            return f"sampled token {place} (id {token}) is not in its recorded support"
        if 0 < call.sampling.top_k < count:
            return f"the support of sampled token {place} has {count} ids, but top_k is {call.sampling.top_k}"
    return None


def support_mask(supports: Supports) -> np.ndarray:
    """Return which ids each token was drawn from, bool of the shape (tokens, ids of the model). What is wrong with
    recorded supports is found by `constraint_check`."""
    num_ids, at = supports.vocab_size, 0
    mask_SV = np.zeros((len(supports.sizes_S), num_ids), dtype=np.bool_)
    for place, size in enumerate(supports.sizes_S.tolist()):
        own, at = supports.packed[at : at + size], at + size
        if size == -(-num_ids // 8):
            mask_SV[place] = np.unpackbits(np.frombuffer(own, np.uint8), count=num_ids, bitorder="little")
        else:
            mask_SV[place, [one for one in _ids(own) if one < num_ids]] = True
    return mask_SV


def _ids(own: bytes) -> list[int]:
    """Return the ids whose differences are given, seven bits a byte, the lowest first."""
    ids, number, shift, last = [], 0, 0, 0
    for byte in own:
        number, shift = number | (byte & 0x7F) << shift, shift + 7
        if byte < 0x80:
            last += number
            ids.append(last)
            number = shift = 0
    return [] if shift else ids


def _end_ids(folder: Path) -> list[int] | None:
    """The end tokens that the model's files name."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ids = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if ids is not None:
            return [ids] if isinstance(ids, int) else list(ids)
    return None


# Checks the recorded experts of a mixture of experts: that every trained call has them, and that they are possible.
#
# In: the trained calls as sequences, and how many experts the model has and chooses. Out: a sentence, or "".


class Experts(Protocol):
    """How a model routes: its layers with experts, the experts of each, and how many it chooses for a token."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...


def wrong_experts(sequences: Iterable[Experience], experts: Experts) -> str:
    """Return a sentence about the first sequence whose experts are missing or impossible."""
    for one in sequences:
        call = int(one.calls_T[-1])
        where = f"rollout {one.rollout_id}, call {call}"
        routes_NLK = one.routes_NLK
        if routes_NLK is None:
            return f"{where}: its experts were not recorded, so its logprobs cannot be computed again"
        if routes_NLK.shape != (len(one.ids_T) - 1, experts.num_layers, experts.top_k):
            return (
                f"{where}: experts of the shape {routes_NLK.shape} are recorded, for {len(one.ids_T)} tokens and a "
                f"model that chooses {experts.top_k} experts in {experts.num_layers} layers"
            )
        if routes_NLK.size and int(routes_NLK.max()) >= experts.num_experts:
            return f"{where}: expert {int(routes_NLK.max())} is recorded, but the model has {experts.num_experts}"
    return ""
