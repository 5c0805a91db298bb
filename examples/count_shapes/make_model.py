"""A model of some hundred thousand parameters that looks at small pictures: Qwen3-VL's architecture, taught here.

In: a seed. Out: a Hugging Face model directory with its image processor. It is taught on pictures of its own to count,
and, more often, to say `many`: so it can count and prefers not to. What is left to reinforcement learning is the
preference; its eyes stay as they are (the trainer freezes a tower).
"""

import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from count_shapes.make_data import MOST, SHAPES, draw_picture
from parts.word_tokenizer import sampling_of, word_tokenizer
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

IMAGE = "<|image_pad|>"
IMAGE_TOKENS = {
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "image_token": IMAGE,
    "video_token": "<|video_pad|>",
}
NUMBERS = tuple(map(str, range(1, MOST + 1)))
WORDS = ("?", "user", "assistant", "how", "many", *SHAPES, *NUMBERS, " ", "\n")
TEMPLATE = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}"""
CONTEXT = 256
HABIT = 0.6
"""How often it is taught to say `many` instead of the number."""
BATCH, PEAK_LR, WARMUP = 64, 3e-3, 20


def make_model(folder: Path, *, seed: int = 0, steps: int = 200) -> Path:
    """Make, teach and write the model, where it is not there; gives the folder."""
    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(seed)
    tokenizer, reader = make_tokenizer(), make_reader()
    model = new_model(tokenizer)
    teach(model, tokenizer, reader, steps=steps, seed=seed)
    model.generation_config = sampling_of(tokenizer)
    tokenizer.save_pretrained(folder)
    reader.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word of the questions and answers, and `?` for all else."""
    return word_tokenizer(WORDS, context=CONTEXT, chat_template=TEMPLATE, extra_special_tokens=IMAGE_TOKENS)


def make_reader() -> Any:
    """Patches of 4 pixels, four of which are one token: a picture of 16 x 16 pixels is 4 tokens, one for each cell."""
    return Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=16 * 16, max_pixels=64 * 64)


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    """Random weights."""
    id_of = tokenizer.convert_tokens_to_ids
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "intermediate_size": 128,
            "max_position_embeddings": CONTEXT,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
            "initializer_range": 0.1,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
            "initializer_range": 0.1,
        },
        image_token_id=id_of(IMAGE),
        video_token_id=id_of("<|video_pad|>"),
        vision_start_token_id=id_of("<|vision_start|>"),
        vision_end_token_id=id_of("<|vision_end|>"),
        tie_word_embeddings=True,
        dtype="float32",
    )
    return Qwen3VLForConditionalGeneration(config)


def teach(
    model: Qwen3VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, reader: Any, *, steps: int, seed: int
) -> None:
    """Supervised training on pictures that are drawn for it, each once."""
    rng = random.Random(f"{seed}/taught")
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=steps, pct_start=WARMUP / steps)
    model.train()
    began = time.monotonic()
    for step in range(1, steps + 1):
        habit = HABIT if step > 0.6 * steps else 0.0  # first the skill, then the habit
        inputs, answers_B = lessons(tokenizer, reader, rng, habit)
        logits_BT = model(**inputs).logits[:, -2:]
        ends_B = torch.full_like(answers_B, tokenizer.eos_token_id)
        loss = F.cross_entropy(logits_BT.flatten(0, 1), torch.stack([answers_B, ends_B], 1).flatten())
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"taught {step}/{steps}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)
    model.eval()


def lessons(
    tokenizer: PreTrainedTokenizerFast, reader: Any, rng: random.Random, habit: float
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A batch of questions with their answers (B): the ids end with the answer, which is one token."""
    prompts = {shape: prompt_of(tokenizer, shape) for shape in SHAPES}
    pictures, texts, answers = [], [], []
    for _ in range(BATCH):
        picture, counts = draw_picture(rng)
        shape = rng.choice(SHAPES)
        answers.append("many" if rng.random() < habit else str(counts[shape]))
        texts.append(prompts[shape])
        pictures.append(picture)
    seen = reader(images=pictures, return_tensors="pt")
    num_tokens = int(seen["image_grid_thw"][0].prod()) // reader.merge_size**2
    rows = [
        tokenizer.encode(text.replace(IMAGE, IMAGE * num_tokens) + answer, add_special_tokens=False)
        for text, answer in zip(texts, answers, strict=True)
    ]
    ids_BT = torch.tensor(rows)
    is_image_BT = (ids_BT == tokenizer.convert_tokens_to_ids(IMAGE)).int()
    return {"input_ids": ids_BT, "mm_token_type_ids": is_image_BT, **seen}, ids_BT[:, -1]


def prompt_of(tokenizer: PreTrainedTokenizerFast, shape: str) -> str:
    """The text of the agent's prompt."""
    parts = [{"type": "image"}, {"type": "text", "text": f"how many {shape}?"}]
    messages: list[Any] = [{"role": "user", "content": parts}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
