"""Where two tokenizations of one text meet: by hand, and for any text in any pieces."""

from hypothesis import given
from hypothesis import strategies as st

from sharpen.learning.experience.alignment import UNREADABLE, chunks, spelled


def meet(one: list[bytes], other: list[bytes]) -> tuple[list[int], list[int]]:
    """The chunks of the tokens of either."""
    (text, ends), (its_text, its_ends) = spelled(one), spelled(other)
    assert text == its_text
    own, its = chunks(ends, its_ends)
    return own.tolist(), its.tolist()


def found(one: str, other: str) -> tuple[list[int], list[int]]:
    """Those of two texts whose tokens are divided by bars."""
    own, its = ([piece.encode() for piece in side.split("|")] for side in (one, other))
    return meet(own, its)


def test_by_hand() -> None:
    assert found("the| answer| is", "the| answer| is") == ([0, 1, 2], [0, 1, 2])
    assert found("12|34|5", "1|23|4|5") == ([0, 0, 1], [0, 0, 0, 1])
    assert found("one token", "o|ne| tok|en") == ([0], [0, 0, 0, 0])
    assert found("a|b|c|d", "ab|cd") == ([0, 0, 1, 1], [0, 1])


def test_no_chunk_ends_within_a_character() -> None:
    """Both have a token's end in the middle of the four bytes of an emoji."""
    face = "\N{GRINNING FACE}".encode()
    assert spelled([b"a", face[:2], face[2:], b"b"])[1].tolist() == [1, -1, 2, 3]
    one, other = [b"a", face[:2], face[2:], b"b"], [b"a", face[:2], face[2:3], face[3:] + b"b"]
    assert meet(one, other) == ([0, 1, 1, 1], [0, 1, 1, 1])
    assert meet([face[:2], face[2:], b"b"], [face[:1], face[1:], b"b"]) == ([0, 0, 1], [0, 0, 1])


def test_bytes_that_are_no_text_are_one_character_behind_which_no_chunk_ends() -> None:
    text, ends = spelled([b"a", b"\xff", b"\xe6", b"\xe6", b"b", b"\xc3"])
    assert text == f"a{UNREADABLE}b{UNREADABLE}"
    assert ends.tolist() == [1, -1, -1, -1, 3, 4]
    its = [b"a", UNREADABLE.encode(), b"b", UNREADABLE.encode()]
    assert spelled(its)[1].tolist() == [1, -1, 3, 4]
    assert meet([b"a", b"\xff", b"\xe6", b"\xe6", b"b", b"\xc3"], its) == ([0, 1, 1, 1, 1, 2], [0, 1, 1, 2])


def test_nothing_has_no_chunks() -> None:
    assert spelled([])[0] == ""
    assert meet([], []) == ([], [])


TEXTS = st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from("aé本\U0001f600 \n")), max_size=30)


def split(draw: st.DrawFn, text: bytes) -> list[bytes]:
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=len(text))) - {len(text)})
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@st.composite
def two_tokenizations(draw: st.DrawFn) -> tuple[str, list[bytes], list[bytes]]:
    text = draw(TEXTS.filter(lambda one: one and UNREADABLE not in one))
    return text, split(draw, text.encode()), split(draw, text.encode())


@given(two_tokenizations())
def test_chunks_spell_the_same_text_and_are_the_smallest_that_do(case: tuple[str, list[bytes], list[bytes]]) -> None:
    """They rise by at most one, spell the same text on both sides, and no whole character's end is passed over at which
    tokens of both end."""
    text, one, other = case
    own, its = meet(one, other)
    assert spelled(one)[0] == text
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
    spelt = text.encode()
    assert ends == sorted(end for end in both if end == len(spelt) or spelt[end] & 0xC0 != 0x80)
    assert meet(other, one) == (its, own)


@given(st.data())
def test_any_bytes_have_a_text_that_other_tokens_spell(data: st.DataObject) -> None:
    """Every token has a chunk, of both; each chunk of tokens is the same text."""
    own = split(data.draw, data.draw(st.binary(min_size=1, max_size=20)))
    text, ends = spelled(own)
    other = split(data.draw, text.encode())
    first, second = meet(own, other)
    assert set(first) == set(second) == set(range(first[-1] + 1))
    assert [int(end) for end in ends if end >= 0] == sorted({int(end) for end in ends if end >= 0})
    for chunk in range(first[-1] + 1):
        mine, its = (
            spelled([piece for piece, number in zip(side, numbers, strict=True) if number == chunk])[0]
            for side, numbers in ((own, first), (other, second))
        )
        assert mine == its
