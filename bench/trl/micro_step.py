"""One training step of TRL at a real model's size: the other side of `real.py`, in a process of its own.

In: a model's folder, sequences (JSON: ids, and how many of the first carry no loss). Out: on standard output the
median seconds of a step.

TRL's `SFTTrainer` does what a step of RL does once rollouts are there: forward, loss, backward and update of adapters
(rank 16, all linear layers), in bfloat16 with gradient checkpointing, all sequences padded to one batch. It computes
no ratio and no advantage, which favours it.

    .venv-trl/bin/python bench/trl/micro_step.py --model FOLDER --sequences FILE [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer


class Clock(TrainerCallback):  # type: ignore[misc]
    """Notes the seconds of each step."""

    def __init__(self) -> None:
        self._began = 0.0
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)


def tokenizer() -> PreTrainedTokenizerFast:
    """One that is asked for nothing but its padding."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="<eos>")


def main() -> int:
    """Train some steps on the same sequences, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--sequences", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    rows = json.loads(arguments.sequences.read_text(encoding="utf-8"))
    data = [
        {"input_ids": ids, "completion_mask": [int(place >= first) for place in range(len(ids))]} for ids, first in rows
    ]
    config = SFTConfig(
        output_dir=str(arguments.sequences.parent / "trainer"),
        max_steps=arguments.repeats + 1,
        per_device_train_batch_size=len(data),
        completion_only_loss=True,
        max_length=None,
        use_cpu=True,
        bf16=True,
        gradient_checkpointing=True,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    clock = Clock()
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16),
        args=config,
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    print(statistics.median(clock.seconds[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
