"""A tokenizer whose vocabulary is the words of one example, for the tiny models that the examples make themselves.

In: its words, the first of which stands for all others. Out: a tokenizer of transformers; how a model of it samples.
"""

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

END = "<|im_end|>"
CHAT = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}"""


def word_tokenizer(
    words: Sequence[str], *, context: int, pattern: str = r"[a-z]+|[\s\S]", chat_template: str = CHAT, **more: Any
) -> PreTrainedTokenizerFast:
    """One token for each of the words, and the first one for all else. `pattern` is what a word may be: small letters,
    or any one character."""
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<|endoftext|>", "<|im_start|>", END)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token="<|endoftext|>",
        unk_token=words[0],
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
        **more,
    )


def sampling_of(tokenizer: PreTrainedTokenizerFast) -> GenerationConfig:
    """It samples until the end token."""
    return GenerationConfig(do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
