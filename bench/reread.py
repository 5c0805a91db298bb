"""What rereading costs: calls of a model as a teacher with another tokenizer reads them, per sampled token.

In: two tokenizers, trained here on this repository's pages and sources. Out: a table and `bench/out/reread.json`:
microseconds of one core for each sampled token, of answers of several lengths behind prompts of several; all rollouts
of a group have the same prompt, which is rendered and encoded once. The median of some repeats.

    .venv/bin/python bench/reread.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from report import finish
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from sharpen.learning.experience.reread import Policy, Reader
from sharpen.types import Call, CallStatus, Reread, Sampling

ROOT = Path(__file__).parent.parent
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GROUP = 8


def main() -> int:
    """Measure, print, write `bench/out/reread.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=8, help=f"prompts, of {GROUP} answers each")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    pages = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "docs").rglob("*.md")))
    sources = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "src").rglob("*.py"))[:200])
    with tempfile.TemporaryDirectory() as made:
        own = _written(Path(made) / "model", pages, 8000)
        other = _written(Path(made) / "teacher", sources, 16000)
        rows: list[list[object]] = []
        for prompt, answer in ((200, 100), (200, 1000), (2000, 1000)):
            times = [
                _measured(Path(made), own, pages, prompt, answer, options.groups, n) for n in range(options.repeats)
            ]
            micros, per_chunk = statistics.median(one for one, _ in times), times[0][1]
            rows.append([prompt, answer, micros, per_chunk])
        del other
    header = ["tokens of the prompt", "of the answer", "us a sampled token", "sampled tokens a chunk"]
    return finish(
        "reread", header=header, rows=rows, ratios={f"us, {one[0]} + {one[1]}": float(str(one[2])) for one in rows}
    )


def _written(folder: Path, text: str, size: int) -> PreTrainedTokenizerFast:
    """Write a byte-level tokenizer of this text, with the configuration of a model that has it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        text.splitlines(),
        trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", chat_template=TEMPLATE)
    fast.save_pretrained(folder)
    Qwen3Config(vocab_size=len(fast), eos_token_id=fast.eos_token_id).save_pretrained(folder)
    return fast


def _measured(made: Path, own: Any, text: str, prompt: int, answer: int, groups: int, seed: int) -> tuple[float, float]:
    """Return microseconds of rereading for each sampled token, and sampled tokens a chunk; all readers are new."""
    ids = own.backend_tokenizer.encode(text[: 40 * (prompt + answer) * groups]).ids
    draw = np.random.default_rng(seed)
    calls = []
    for _ in range(groups):
        asked = own.decode(ids[(start := int(draw.integers(len(ids) - prompt))) : start + prompt])
        for _ in range(GROUP):
            start = int(draw.integers(len(ids) - answer))
            calls.append(_call(own, asked, [*ids[start : start + answer - 1], own.eos_token_id]))
    reader = Reader(Policy(made / "model"), made / "teacher", {})
    began = time.process_time()
    read = [reader.read(call) for call in calls]
    took = time.process_time() - began
    found = [one for one in read if isinstance(one, Reread)]
    assert len(found) == len(calls), [one for one in read if isinstance(one, str)][:1]
    chunks = sum(int(one.chunks_S[-1]) + 1 for one in found)
    return 1e6 * took / (answer * len(calls)), answer * len(calls) / chunks


def _call(own: Any, asked: str, sampled: list[int]) -> Call:
    messages = ({"role": "user", "content": asked},)
    prompt = own.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    return Call(
        index=0,
        parent=None,
        prompt_ids_P=np.array(own(prompt)["input_ids"], np.int32),
        sampled_ids_S=np.array(sampled, np.int32),
        logprobs_S=np.zeros(len(sampled), np.float32),
        versions_S=np.zeros(len(sampled), np.int32),
        sampling=Sampling(),
        finish_reason="stop",
        status=CallStatus.USED,
        messages=messages,
        tools=(),
        response={},
    )


if __name__ == "__main__":
    sys.exit(main())
