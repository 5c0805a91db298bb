"""A model of 90,000 parameters that is taught the rules on the spot, and no more: it takes what it may, each as often.

In: a seed. Out: a Hugging Face model directory. Its vocabulary is the numbers of the game, what a chat needs, and one
token for every other word. A model that was never taught would lose by breaking the rules, and learn only them.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from parts.word_tokenizer import sampling_of, word_tokenizer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from two_players.game import MOST, sight
from two_players.make_data import LARGEST

WORDS = ("?", "system", "user", "assistant", "\n", *map(str, range(1, LARGEST + 1)))
CONTEXT = 256
LESSONS = 200


def make_model(folder: Path, seed: int = 0, lessons: int = LESSONS) -> Path:
    """Make, teach and write the model, where it is not there; gives the folder."""
    if (folder / "config.json").exists():
        return folder
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    model = new_model(tokenizer)
    teach(model, tokenizer, lessons)
    model.generation_config = sampling_of(tokenizer)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each number of the game, and `?` for all other words."""
    return word_tokenizer(WORDS, context=CONTEXT, pattern=r"[a-z]+|[0-9]+|[\s\S]")


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Random weights."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
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
    return Qwen3ForCausalLM(config)


def teach(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, lessons: int) -> None:
    """Supervised training on all heaps: each number that may be taken is as likely, then the end."""
    heaps = range(1, LARGEST + 1)
    prompts = [tokenizer.apply_chat_template(sight(heap), add_generation_prompt=True)["input_ids"] for heap in heaps]
    number = tokenizer.convert_tokens_to_ids([str(taken) for taken in range(1, MOST + 1)])
    ids_BT = torch.tensor([[*prompt, taken] for prompt in prompts for taken in number])
    target_BV = torch.zeros(len(ids_BT), len(tokenizer))
    for row, heap in enumerate(heap for heap in heaps for _ in number):
        target_BV[row, number[:heap]] = 1 / min(heap, MOST)
    ends_B = torch.full((len(ids_BT),), tokenizer.eos_token_id)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=lessons)
    for lesson in range(1, lessons + 1):
        logits_BTV = model(input_ids=ids_BT).logits[:, -2:]
        loss = F.cross_entropy(logits_BTV[:, 0], target_BV) + F.cross_entropy(logits_BTV[:, 1], ends_B)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        if lesson % 100 == 0:
            print(f"taught {lesson}/{lessons}: loss {loss.item():.3f}", flush=True)
    model.eval()
