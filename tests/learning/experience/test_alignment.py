"""Where two tokenizations of one text meet: by hand, and for any text in any pieces."""

from hypothesis import given
from hypothesis import strategies as st

from sharpen.learning.experience.alignment import chunks


def found(one: str, other: str) -> tuple[list[int], list[int]]:
    """The chunks of two texts whose tokens are divided by bars."""
    own, its = chunks(*([piece.encode() for piece in side.split("|")] for side in (one, other)))
    return own.tolist(), its.tolist()


def test_by_hand() -> None:
    assert found("the| answer| is", "the| answer| is") == ([0, 1, 2], [0, 1, 2])
    assert found("12|34|5", "1|23|4|5") == ([0, 0, 1], [0, 0, 0, 1])
    assert found("one token", "o|ne| tok|en") == ([0], [0, 0, 0, 0])
    assert found("a|b|c|d", "ab|cd") == ([0, 0, 1, 1], [0, 1])


def test_no_chunk_ends_within_a_character() -> None:
    """Both have a token's end in the middle of the four bytes of an emoji, and at the end of its second half."""
    face = "\N{GRINNING FACE}".encode()
    own, its = chunks([b"a", face[:2], face[2:], b"b"], [b"a", face[:2], face[2:3], face[3:] + b"b"])
    assert own.tolist() == [0, 1, 1, 1]
    assert its.tolist() == [0, 1, 1, 1]
    own, its = chunks([face[:2], face[2:], b"b"], [face[:1], face[1:], b"b"])
    assert (own.tolist(), its.tolist()) == ([0, 0, 1], [0, 0, 1])


def test_nothing_has_no_chunks() -> None:
    assert [side.tolist() for side in chunks([], [])] == [[], []]


TEXTS = st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from("aé本\U0001f600 \n")), max_size=30)


@st.composite
def two_tokenizations(draw: st.DrawFn) -> tuple[bytes, list[bytes], list[bytes]]:
    text = draw(TEXTS.filter(bool)).encode()
    sides = []
    for _ in range(2):
        cuts = sorted(draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=len(text))) - {len(text)})
        sides.append([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    return text, *sides


@given(two_tokenizations())
def test_chunks_spell_the_same_text_and_are_the_smallest_that_do(case: tuple[bytes, list[bytes], list[bytes]]) -> None:
    """They rise by at most one, spell the same text on both sides, and no whole character's end is passed over at which
    tokens of both end."""
    text, one, other = case
    own, its = (side.tolist() for side in chunks(one, other))
    assert set(own) == set(its) == set(range(own[-1] + 1))
    assert own == sorted(own)
    assert its == sorted(its)
    ends = []
    for chunk in range(own[-1] + 1):
        first, second = (
            b"".join(piece for piece, number in zip(side, numbers, strict=True) if number == chunk)
            for side, numbers in ((one, own), (other, its))
        )
        assert first == second
        assert first.decode()
        ends.append((ends[-1] if ends else 0) + len(first))
    both = {sum(map(len, one[: n + 1])) for n in range(len(one))} & {
        sum(map(len, other[: n + 1])) for n in range(len(other))
    }
    assert ends == sorted(end for end in both if end == len(text) or text[end] & 0xC0 != 0x80)
    assert [side.tolist() for side in chunks(other, one)] == [its, own]
