"""Small tokenizers of several kinds, and toy models that have them: a policy's, whose tokens are all ASCII, so that
what a random model samples is text; and teachers' with other tokens."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

from toy_model import CHATML, write_model

TURNS = """{{ bos_token or '' }}{%- for message in messages -%}
<turn>{{ message.role }}: {{ message.content or '' }}<end>
{% endfor -%}
{%- if add_generation_prompt -%}<turn>assistant: {% endif -%}"""
"""Another template than ChatML."""

WORDS = ["user assistant system tool question answer yes no", "the question is 12345 + 678 = 13023", "ea ae een nee"]


def ascii_bpe(size: int = 70) -> Any:
    """Byte-level BPE of few characters, with ChatML's special tokens."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return _byte_level(WORDS, [*string.ascii_lowercase, *string.digits, " ", "\n", ":", "<"], size, special)


def byte_bpe(size: int = 900) -> Any:
    """Byte-level BPE of all bytes with other merges (of many pairs of letters: whatever a random model says has some),
    other special tokens, and one added that is text."""
    from tokenizers import AddedToken, pre_tokenizers

    pairs = [one + two for one in string.ascii_lowercase for two in string.ascii_lowercase]
    text = ["stionque swer answers quest ion 123 456 ab ba", "\N{SNOWMAN} é ü 本 日本 \U0001f600", "1".join(pairs)]
    made = _byte_level(text, pre_tokenizers.ByteLevel.alphabet(), size, ["<bos>", "<end>", "<turn>", "<eot>"])
    made.add_tokens([AddedToken("<think>", special=False)])
    return made


def _byte_level(words: list[str], alphabet: list[str], size: int, special: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if len(alphabet) < 256:
        alphabet = [pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(one)[0][0] for one in alphabet]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(words * 4, trainer)
    return made


def llama_like(size: int = 420, scheme: str = "first") -> Any:
    """As Llama's: a mark for the space, put before a text, and bytes for what is not in the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    made.train_from_iterator(
        WORDS * 4, trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    )
    made = _with_special(made, ["<unk>", "<s>", "</s>"])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def _with_special(made: Any, names: list[str]) -> Any:
    """The same tokenizer with these special tokens alone: bytes are none."""
    import json

    from tokenizers import Tokenizer

    state = json.loads(made.to_str())
    state["added_tokens"] = [one for one in state["added_tokens"] if one["content"] in names]
    return Tokenizer.from_str(json.dumps(state))


def word_piece() -> Any:
    """As BERT's: case and spaces are lost."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(
        WORDS * 4, trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    )
    return made


def fast(made: Any, *, eos: str, bos: str | None = None, template: str | None = CHATML) -> Any:
    """A tokenizer of transformers."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=eos, bos_token=bos, pad_token=eos, chat_template=template
    )


def policy_model(folder: Path, *, seed: int = 0) -> Path:
    """A model that samples ASCII."""
    return write_model(folder, fast(ascii_bpe(), eos="<|im_end|>"), seed=seed)


def other_teacher(folder: Path, *, seed: int = 7) -> Path:
    """A model with other tokens and another template."""
    return write_model(folder, fast(byte_bpe(), eos="<eot>", bos="<bos>", template=TURNS), seed=seed)
