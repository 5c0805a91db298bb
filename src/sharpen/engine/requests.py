"""Validation of requests, shared by all engines.

In: a `GenerateRequest`, the engine's context and vocabulary sizes, how its model reads images. Out: the number of
tokens to sample, or an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sharpen.contracts import GenerateRequest
from sharpen.errors import ContextOverflowError, SamplingError
from sharpen.models.marks import image_tokens

if TYPE_CHECKING:
    from sharpen.models.images import Eyes


def check_request(request: GenerateRequest, *, max_model_len: int, vocab_size: int) -> int:
    """Return the maximum number of tokens to sample: `max_tokens`, cut to what fits the context.

    Raises `ContextOverflowError` if the prompt leaves no room for one token, `SamplingError` for invalid parameters or
    ids.
    """
    _check_sampling(request)
    num_prompt = len(request.prompt_ids)
    if num_prompt >= max_model_len:
        raise ContextOverflowError(
            f"the prompt has {num_prompt} tokens, which leaves no room for one more within max_model_len "
            f"{max_model_len}: shorten the conversation or raise max_model_len"
        )
    if num_prompt == 0 or request.prompt_ids.min() < 0 or request.prompt_ids.max() >= vocab_size:
        raise SamplingError(f"prompt ids must be 1 or more ids in 0 .. {vocab_size - 1}")
    return min(request.sampling.max_tokens, max_model_len - num_prompt)


def no_adapter(name: str, names: Collection[str] = ()) -> SamplingError:
    """Return the error of a request for an adapter that the engine does not have."""
    return SamplingError(f"there is no adapter {name!r}: this engine serves {', '.join(names) or 'none by name'}")


def check_pictures(request: GenerateRequest, eyes: Eyes, *, both_ways: bool) -> None:
    """Check that the images of a request are where its ids say: one behind the other, each on as many image tokens as
    the processor makes of it. `both_ways`: the tokens of an image attend to later ones of it too, so that none may be
    the prompt's last, which is computed by itself where the rest is cached.

    Raises `SamplingError` if they are not there, `ImageError` if one cannot be read.
    """
    ids_P, end = request.prompt_ids, 0
    last = len(ids_P) - both_ways
    for span in request.pictures:
        where = f"the image tokens {span.start} .. {span.stop - 1} of a prompt of {len(ids_P)}"
        if span.length < 1 or span.start < end or span.stop > last or ids_P[span.start] != eyes.image_token_id:
            raise SamplingError(f"{where} are not where an image may be")
        found, expected = len(image_tokens(ids_P, span)), eyes.num_tokens(span.picture)
        if found != expected:
            raise SamplingError(f"{where} are {found}, but those of their image are {expected}")
        end = span.stop


def _check_sampling(request: GenerateRequest) -> None:
    sampling = request.sampling
    if not (0.0 <= sampling.temperature < float("inf")):
        raise SamplingError(f"temperature must be 0 or more, not {sampling.temperature}")
    if sampling.temperature > 0.0 and np.float32(sampling.temperature) == 0.0:
        raise SamplingError(f"temperature {sampling.temperature:g} is too small to divide by: use 0 (greedy)")
    if not (0.0 < np.float32(sampling.top_p) <= 1.0):
        raise SamplingError(f"top_p must be above 0 and at most 1, not {sampling.top_p}")
    if not 0.0 <= sampling.min_p <= 1.0:
        raise SamplingError(f"min_p must be from 0 to 1, not {sampling.min_p}")
    if request.prompt_logprobs is not None and request.prompt_logprobs < 0:
        raise SamplingError(f"prompt_logprobs must be 0 or more, or None, not {request.prompt_logprobs}")
    if not 0 <= sampling.top_k < 2**31 or sampling.max_tokens < 1 or request.top_logprobs < 0:
        raise SamplingError(
            f"top_k must be from 0 to 2**31 - 1, max_tokens and top_logprobs at least 1 and 0; got {sampling.top_k}, "
            f"{sampling.max_tokens}, {request.top_logprobs}"
        )
    if "" in sampling.stop:
        raise SamplingError("a stop string must not be empty")
    for string in sampling.stop:
        try:
            string.encode()
        except UnicodeEncodeError:  # a lone surrogate would raise in the engine's loop and fail other requests
            raise SamplingError(f"a stop string must be text, not {string!a}") from None


# Detection of stop strings in the text of sampled ids.
#
# In: all sampled ids of a request, its stop strings, a decoder. Out: the text before the earliest stop string, or None.

_MARGIN_TOKENS = 16


def find_stop(ids: list[int], stop: Sequence[str], decode: Callable[[list[int]], str]) -> str | None:
    """Return the text before the first stop string, or None if there is none. To be called after each token.

    Only the tail is decoded, until it contains a stop string: a token is at least one byte, so a string of n bytes that
    the newest token completes lies within the last n tokens (a margin covers tokens that decode to nothing).
    """
    longest = max(len(string.encode()) for string in stop)
    tail = decode(ids[-(longest + _MARGIN_TOKENS) :])
    if not any(string in tail for string in stop):
        return None
    text = decode(ids)
    starts = [start for string in stop if (start := text.find(string)) >= 0]
    return text[: min(starts)] if starts else None
