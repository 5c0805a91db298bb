"""A random model of 125,000 parameters whose whole vocabulary is this game: what the example tunes where no other model
is named.

In: a seed. Out: a Hugging Face model directory. It has 17 tokens: the map's letters, the four moves, what a chat needs,
and one for every other word (so that the rules of the game are noise to it). It knows nothing, but it says a move now
and then, which is enough to begin with.
"""

from pathlib import Path

import torch
from parts.word_tokenizer import sampling_of, word_tokenizer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

WORDS = ("?", "system", "user", "assistant", "left", "down", "right", "up", "\n", "P", "S", "F", "H", "G")
CONTEXT = 8192


def make_model(folder: Path, seed: int = 0) -> Path:
    """Write the model; gives the folder."""
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        intermediate_size=128,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = sampling_of(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word of the game, for each letter of a map, and `?` for all else."""
    return word_tokenizer(WORDS, context=CONTEXT)
