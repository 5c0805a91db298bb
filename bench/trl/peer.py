"""One run of Hugging Face TRL's `GRPOTrainer` with its own tool support, on the quickstart's model and tasks.

Role: the other side of `bench-trl`, in a process of its own. In: a seed, the number of steps, TRL's settings that
decide how fast it is on a CPU. Out: `RUN/run.json` (`runs.Run`), the model after every step in `RUN/steps/N`.

What is taught is what `examples/quickstart/main.py` teaches: the same prompts, tool and judge, batch, group, learning
rate, betas, no weight decay, no KL, fp32, token-mean over the batch (TRL calls it `dapo`), at most 48 tokens a call and
three calls. The tokenizer is told how tool calls look in its template, in TRL's own words for Qwen3, as TRL's error
message asks for; nothing of TRL is replaced.

    .venv-trl/bin/python bench/trl/peer.py --out /tmp/trl-0 --seed 0 --steps 3
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import runs
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from transformers.utils.logging import disable_progress_bar
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

sys.path.insert(0, str(Path(__file__).parents[1]))  # what the benchmarks share

import plain
from agent import MAX_CALLS, MAX_TOKENS, SYSTEM, TOOLS, calculator, last_number

# Of a whole rollout: three calls and two results of the tool. A call has MAX_TOKENS.
MAX_COMPLETION = 512


class CalculatorTool(dict[str, Any]):
    """The agent's tool for TRL: to be called, and rendered with the very schema that the model was taught.

    TRL would make a schema from a function's docstring, with words in it that this model never saw.
    """

    __name__ = "calculator"

    def __call__(self, **arguments: Any) -> str:
        return calculator(json.dumps(arguments))


def judge(completions: Sequence[Sequence[dict[str, Any]]], answer: Sequence[str], **_: Any) -> list[float]:
    """Reward 1 for the right number in the last thing said, unless that is one more call of the tool."""
    said = [None if messages[-1].get("tool_calls") else str(messages[-1]["content"]) for messages in completions]
    return [float(last_number(text) == last_number(truth)) for text, truth in zip(said, answer, strict=True)]


class Recorder(TrainerCallback):  # type: ignore[misc]
    """Notes when each step ended and what it logged, and keeps its weights, which is not counted in the time."""

    def __init__(self, out: Path, rollouts: int) -> None:
        self._out = out
        self._rollouts = rollouts
        self._began = 0.0
        self._ends: list[float] = []
        self.steps: list[runs.Step] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, _: Any, state: Any, __: Any, model: Any = None, **___: Any) -> None:
        now = time.perf_counter()
        self._ends.append(now - self._began)
        model.save_pretrained(self._out / "steps" / str(state.global_step))
        self._began += time.perf_counter() - now

    def on_log(self, _: Any, state: Any, __: Any, logs: dict[str, float] | None = None, **___: Any) -> None:
        if logs is None or "reward" not in logs:
            return
        step = runs.Step(
            reward=logs["reward"],
            end_s=self._ends[-1],
            trained_tokens=round(logs["completions/mean_length"] * self._rollouts),
        )
        self.steps.append(step)
        print(f"step {state.global_step}: reward {step.reward:.3f}  {step.end_s:.1f} s", flush=True)


def make_config(arguments: argparse.Namespace) -> GRPOConfig:
    """The recipe of the quickstart in TRL's names, and the settings to be tried for speed."""
    recipe = plain.Settings()
    rollouts = recipe.num_tasks * recipe.group_size
    return GRPOConfig(
        output_dir=str(arguments.out / "trainer"),
        seed=arguments.seed,
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.micro_batch,
        gradient_accumulation_steps=rollouts // arguments.micro_batch,
        num_generations=recipe.group_size,
        learning_rate=recipe.lr,
        lr_scheduler_type="constant",
        adam_beta1=recipe.betas[0],
        adam_beta2=recipe.betas[1],
        adam_epsilon=1e-8,
        weight_decay=0.0,
        max_grad_norm=recipe.max_grad_norm,
        beta=0.0,
        epsilon=recipe.clip,
        loss_type="dapo",
        scale_rewards="group",
        temperature=1.0,
        max_completion_length=MAX_COMPLETION,
        generation_kwargs={"max_new_tokens": MAX_TOKENS},
        max_tool_calling_iterations=MAX_CALLS - 1,
        cache_implementation=arguments.cache,
        use_transformers_continuous_batching=arguments.continuous_batching,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_num_workers=arguments.workers,
        dataloader_pin_memory=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> int:
    """Train, and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs.add_run_arguments(parser)
    parser.add_argument("--precision", choices=("highest", "high", "medium"), default="highest", help="fp32 products")
    parser.add_argument("--cache", choices=("dynamic", "static"), default=None, help="KV cache of generate")
    parser.add_argument("--continuous-batching", action="store_true", help="transformers' continuous batching")
    parser.add_argument("--micro-batch", type=int, default=128, help="sequences of one forward and backward pass")
    parser.add_argument("--workers", type=int, default=0, help="processes of the data loader")
    arguments = parser.parse_args()
    disable_progress_bar()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(runs.NUM_THREADS)
    torch.set_float32_matmul_precision(arguments.precision)
    tokenizer = AutoTokenizer.from_pretrained(plain.QUICKSTART / "model")
    tokenizer.response_template = qwen3_template
    rows = [
        {"prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["question"]}], **task}
        for task in plain.load_tasks("train")
    ]
    tool = CalculatorTool(TOOLS[0])
    prompt = tokenizer.apply_chat_template(
        rows[0]["prompt"], tools=[tool], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert prompt == plain.prompt_ids(tokenizer, plain.load_tasks("train")[0]), "TRL's prompt is another one"
    config = make_config(arguments)
    recorder = Recorder(arguments.out, config.generation_batch_size)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(plain.QUICKSTART / "model", dtype=torch.float32),
        reward_funcs=judge,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[recorder],
        tools=[tool],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    runs.write_run(arguments.out, side="trl", seed=arguments.seed, steps=recorder.steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
