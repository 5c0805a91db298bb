"""Supports of tokens that were sampled with top_p or top_k: packed, and read again.

Shape suffixes: R rows, B bytes of a bit mask, V vocabulary.
"""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharpen.engine.supports import joined, kept_bits, masks_of, packed
from sharpen.errors import SamplingError
from sharpen.evidence.certificate.constraints import support_mask


def supports_of(kept, vocab_size):
    """The supports of rows that keep these ids."""
    logprobs = torch.full((len(kept), vocab_size), -torch.inf)
    for row, ids in enumerate(kept):
        logprobs[row, list(ids)] = -1.0
    return joined([packed(bits_B) for bits_B in kept_bits(logprobs)], vocab_size)


def ids_of(masks_SW):
    return [np.flatnonzero(row).tolist() for row in np.unpackbits(masks_SW.view(np.uint8), axis=1, bitorder="little")]


def test_a_support_is_stored_as_differences_or_as_bits_by_hand():
    """Of 40 ids a bit mask takes 5 bytes: 3, 7 and 39 are the differences 3, 4 and 32, and ten ids are bits. 300 of a
    larger vocabulary is 300 = 2 * 128 + 44: its low seven bits first, with the sign that more follow."""
    first = supports_of([{3, 7, 39}, set(range(0, 20, 2))], 40)
    assert first.sizes_S.tolist() == [3, 5]
    assert list(first.packed) == [3, 4, 32, 0b01010101, 0b01010101, 0b0101, 0, 0]
    assert list(supports_of([{300}], 1000).packed) == [44 + 128, 2]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 70_000), st.data())
def test_supports_are_read_as_they_were_and_take_no_more_than_a_bit_an_id(vocab_size, data):
    """Break: write an id's difference instead of its lowest seven bits, or take the mask of `size` bytes for ids."""
    ids = st.integers(0, vocab_size - 1)
    kept = data.draw(
        st.lists(st.sets(ids, min_size=1, max_size=40) | st.just({*range(vocab_size)}), min_size=1, max_size=4)
    )
    found = supports_of(kept, vocab_size)
    assert ids_of(masks_of(found, np.array([min(row) for row in kept]))) == [sorted(row) for row in kept]
    assert [np.flatnonzero(row).tolist() for row in support_mask(found)] == [
        sorted(row) for row in kept
    ]  # certificate's
    assert found.sizes_S.max() <= -(-vocab_size // 8)


@pytest.mark.parametrize(
    ("changed", "ids", "words"),
    [
        ({}, [3, 9], "token 1 .id 9. is not in its own support"),
        ({}, [3, 1000], "token 1 .id 1000. is not in its own"),
        ({}, [3], "2 supports are recorded for 1 tokens"),
        ({"packed": b"\3"}, [3, 4], "or parts of them"),
        ({"packed": b"\3\x84"}, [3, 4], "damaged"),
        ({"packed": b"\3\x7f"}, [3, 4], "token 1 has the id 127, beyond"),
    ],
)
def test_what_no_engine_records_is_refused(changed, ids, words):
    found = dataclasses.replace(supports_of([{3}, {4}], 100), **changed)
    with pytest.raises(SamplingError, match=words):
        masks_of(found, np.array(ids))
