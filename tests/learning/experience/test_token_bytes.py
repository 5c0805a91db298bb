"""The bytes of tokens: joined they are the text, of byte-level tokens and of sentencepiece's; others are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from other_tokenizers import ascii_bpe, byte_bpe, fast, llama_like, word_piece

from sharpen.errors import ModelError
from sharpen.learning.experience.token_bytes import TokenBytes

BYTES = fast(byte_bpe(), eos="<eot>")
LLAMA = fast(llama_like(), eos="</s>")
TEXTS = st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from("the answer é本\U0001f600 \n▁Ġ<0x>")))


@given(TEXTS)
def test_the_bytes_of_byte_level_tokens_are_the_text(text: str) -> None:
    pieces = TokenBytes(BYTES).of(BYTES.backend_tokenizer.encode(text, add_special_tokens=False).ids)
    assert pieces is not None
    assert b"".join(pieces) == text.encode()


@given(TEXTS.filter(lambda text: text and "▁" not in text))
def test_the_bytes_of_tokens_with_a_mark_for_the_space_are_the_text_behind_one(text: str) -> None:
    """What is no mark in the text: those that are there become spaces in the tokenizer itself."""
    pieces = TokenBytes(LLAMA).of(LLAMA.backend_tokenizer.encode(text, add_special_tokens=False).ids)
    assert pieces is not None
    assert b"".join(pieces) == (text if text.startswith(" ") else f" {text}").encode()


def test_by_hand() -> None:
    tokens = TokenBytes(BYTES)
    vocabulary = BYTES.get_vocab()
    assert tokens.of([vocabulary["Ġ"], vocabulary["Ċ"], vocabulary["Ã"], vocabulary["<think>"]]) == [
        b" ",
        b"\n",
        b"\xc3",
        b"<think>",
    ]
    assert tokens.of([vocabulary["a"], vocabulary["<eot>"]]) == [b"a", b"<eot>"]
    assert tokens.of([10_000]) is None
    llama = TokenBytes(LLAMA)
    vocabulary = LLAMA.get_vocab()
    assert llama.of([vocabulary["<0xE6>"], vocabulary["▁"]]) == [b"\xe6", b" "]
    assert llama.special_ids == {vocabulary["<unk>"], vocabulary["<s>"], vocabulary["</s>"]}


def test_tokenizers_that_lose_something_of_a_text_are_refused() -> None:
    with pytest.raises(ModelError, match="WordPiece"):
        TokenBytes(fast(word_piece(), eos="[SEP]"))
    bare = ascii_bpe()
    bare.decoder = None
    with pytest.raises(ModelError, match="no decoder"):
        TokenBytes(fast(bare, eos="<|im_end|>"))
