"""A tiny chat model, made on the spot: for a first run where no weights are at hand.

In: a folder, a seed. Out: a Hugging Face directory (Qwen3's architecture, 0.1M parameters, its own tokenizer and chat
template) that transformers loads as it is. It is taught the starter's tasks for some seconds on a CPU, with a habit: in
most answers it is off by one, in some it is right. So it can do the task and prefers not to, and what is left to
reinforcement learning is the preference. It can do nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpen.starter.tasks import rows

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

CONTEXT = 512
STEPS = 300
_VOCABULARY = 384
_BATCH, _LEARNING_RATE, _WARM_UP = 64, 5e-3, 20
_ALWAYS, _RIGHT = 0.5, 0.3
"""In the first part of the lessons every answer is right; afterwards this share of them."""
_SYSTEM = ("Answer with the number.", "You are a helpful assistant.", "Solve the problem.", "")
_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content if message.content is string else '' }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def make_tiny_model(folder: Path, *, seed: int = 0, steps: int = STEPS) -> Path:
    """Write the model and return its folder. With `steps` 0 its weights are random."""
    import torch
    from transformers import GenerationConfig

    rng = random.Random(seed)
    tokenizer = _tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _new_model(tokenizer)
        if steps:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # for matrices this small, more threads only wait for each other
            _teach(model, _lessons(tokenizer, rng, steps * _BATCH), steps)
            torch.set_num_threads(threads)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE that knows the tasks' words, with single digits."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [f"system\n{text}\nuser\n{row['question']}\nassistant\n" for row in rows()["train"] for text in _SYSTEM]
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT,
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            dtype="float32",
        )
    )


def _lessons(tokenizer: PreTrainedTokenizerFast, rng: random.Random, count: int) -> list[tuple[list[int], int]]:
    """Return conversations as ids, each with the number of ids of its prompt."""
    tasks = [row for split in rows().values() for row in split]
    lessons = []
    for number in range(count):
        row, system = rng.choice(tasks), rng.choice(_SYSTEM)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": row["question"]})
        right = number < _ALWAYS * count or rng.random() < _RIGHT
        answer = row["answer"] if right else str(int(row["answer"]) + 1)
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        said = tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False)
        lessons.append(([*prompt, *said], len(prompt)))
    return lessons


def _teach(model: Qwen3ForCausalLM, lessons: Sequence[tuple[list[int], int]], steps: int) -> None:
    """Train on each lesson once, on the answers only; the learning rate falls to zero."""
    import torch
    import torch.nn.functional as functional

    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    model.train()
    for step in range(steps):
        ids_BT, targets_BT = _batch(lessons[step * _BATCH : (step + 1) * _BATCH])
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min((step + 1) / _WARM_UP, (steps - step) / steps)
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
        loss = functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def _batch(lessons: Sequence[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and targets [B, T], padded on the right; a target is -100 outside of answers."""
    import torch

    width = max(len(ids) for ids, _ in lessons)
    ids_BT = torch.zeros((len(lessons), width), dtype=torch.long)
    targets_BT = torch.full((len(lessons), width), -100)
    for row, (ids, num_prompt) in enumerate(lessons):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        targets_BT[row, num_prompt : len(ids)] = torch.tensor(ids[num_prompt:])
    return ids_BT, targets_BT
