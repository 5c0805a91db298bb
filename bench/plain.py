"""The plain loop: the quickstart's work done with transformers and PyTorch alone, without Sharpen.

Role: the other side of `bench-step`, and the proof that the quickstart's targets can be reached. It is written as a
competent engineer would without a framework: `generate` on a left-padded batch for each call of the agent (the whole
prompt again at each call), the calculator in Python, then GRPO on right-padded batches. Group-normalized advantages,
token-mean PPO-clip loss, one update a step, no KL, AdamW, fp32.
In: a model directory and the quickstart's tasks. Out: steps, their seconds, accuracies.

Left out: prefix sharing, continuous batching, packing, retries, checkpoints, staleness (rollouts are on-policy).

    python bench/plain.py --steps 30 --seed 0
"""

import argparse
import json
import math
import random
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"
sys.path.insert(0, str(QUICKSTART))
from agent import MAX_CALLS, MAX_TOKENS, SYSTEM, TOOLS, calculator, last_number  # noqa: E402

Task = dict[str, str]
TOOL_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The recipe."""

    num_tasks: int = 16
    group_size: int = 8
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    final_lr: float = 0.1  # share of `lr` left at the end of a linear decay
    max_grad_norm: float = 1.0
    clip: float = 0.2
    micro_batch: int = 32


@dataclass(slots=True, kw_only=True)
class Rollout:
    """One run of the agent on one task: everything it read and said, in one sequence."""

    task: Task
    ids: list[int]
    said: list[bool]
    response: str | None = None
    is_done: bool = False
    num_calls: int = 0

    @property
    def reward(self) -> float:
        return float(last_number(self.response) == last_number(self.task["answer"]))


@dataclass(slots=True, kw_only=True)
class StepReport:
    """What one step did, and how long its two halves took."""

    reward: float
    rollout_s: float
    train_s: float
    num_sampled: int
    num_trained: int
    grad_norm: float = field(default=math.nan)


def load(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in fp32 and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval(), tokenizer


def load_tasks(name: str) -> list[Task]:
    """One of the quickstart's data files: 'train', 'test' or 'further'."""
    lines = (QUICKSTART / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, task: Task) -> list[int]:
    """The ids of the agent's first prompt."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["question"]}]
    text = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def rest_ids(tokenizer: PreTrainedTokenizerBase, results: Sequence[str]) -> list[int]:
    """The ids between the end token of a turn that called tools and the next sampled token."""
    messages: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    messages += [{"role": "tool", "content": result} for result in results]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer.encode(text.partition("<|im_end|>")[2], add_special_tokens=False)
    return ids


def tool_results(text: str) -> list[str]:
    """The results of the tool calls in a turn; a turn without a call that parses is an answer."""
    results = []
    for block in TOOL_CALL.findall(text):
        try:
            call = json.loads(block)
            results.append(calculator(json.dumps(call["arguments"])))
        except (KeyError, TypeError, ValueError):
            return []
    return results


@torch.inference_mode()
def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]], *, sample: bool
) -> list[list[int]]:
    """One turn for each prompt, the end token included."""
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    width = max(map(len, prompts))
    ids_BT = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask_BT = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    sampling: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}
    out_BT = model.generate(
        input_ids=ids_BT, attention_mask=mask_BT, max_new_tokens=MAX_TOKENS, do_sample=sample, **sampling
    )
    turns = out_BT[:, width:].tolist()
    return [turn[: turn.index(end) + 1] if end in turn else turn for turn in turns]


def roll_out(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task], *, sample: bool
) -> list[Rollout]:
    """One rollout for each task given, all at once."""
    rollouts = []
    for task in tasks:
        ids = prompt_ids(tokenizer, task)
        rollouts.append(Rollout(task=task, ids=ids, said=[False] * len(ids)))
    for _ in range(MAX_CALLS):
        running = [rollout for rollout in rollouts if not rollout.is_done]
        if not running:
            break
        turns = generate(model, tokenizer, [rollout.ids for rollout in running], sample=sample)
        for rollout, turn in zip(running, turns, strict=True):
            rollout.num_calls += 1
            rollout.ids += turn
            rollout.said += [True] * len(turn)
            text = tokenizer.decode(turn, skip_special_tokens=True)
            results = tool_results(text)
            if results and turn[-1] == tokenizer.eos_token_id and rollout.num_calls < MAX_CALLS:
                rest = rest_ids(tokenizer, results)
                rollout.ids += rest
                rollout.said += [False] * len(rest)
            else:
                rollout.is_done = True
                rollout.response = None if results else text
    return rollouts


def advantages(rewards: Sequence[float], group_size: int) -> list[float]:
    """GRPO: (reward - mean) / (unbiased std + 1e-6) within each group of neighbours."""
    rewards_GN = torch.tensor(rewards).view(-1, group_size)
    centred_GN = rewards_GN - rewards_GN.mean(dim=1, keepdim=True)
    return (centred_GN / (rewards_GN.std(dim=1, keepdim=True) + 1e-6)).flatten().tolist()


def train(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    rollouts: Sequence[Rollout],
    advantage_of: Sequence[float],
    settings: Settings,
    pad: int,
) -> float:
    """One update on all rollouts; the gradient's norm before clipping. Sequences of like length share a batch."""
    num_said = sum(sum(rollout.said) for rollout in rollouts)
    order = sorted(range(len(rollouts)), key=lambda index: len(rollouts[index].ids))
    optimizer.zero_grad(set_to_none=True)
    for start in range(0, len(order), settings.micro_batch):
        batch = order[start : start + settings.micro_batch]
        width = max(len(rollouts[index].ids) for index in batch)
        ids_BT = torch.full((len(batch), width), pad)
        said_BT = torch.zeros(len(batch), width, dtype=torch.bool)
        for row, index in enumerate(batch):
            ids_BT[row, : len(rollouts[index].ids)] = torch.tensor(rollouts[index].ids)
            said_BT[row, : len(rollouts[index].said)] = torch.tensor(rollouts[index].said)
        advantage_B = torch.tensor([advantage_of[index] for index in batch])
        # Padding is on the right, so causal attention alone keeps it out: no mask, the faster kernel.
        hidden_BTD = model.model(input_ids=ids_BT, use_cache=False).last_hidden_state[:, :-1]
        target_BT = said_BT[:, 1:]
        logits_NV = model.lm_head(hidden_BTD[target_BT])
        logprobs_N = logits_NV.log_softmax(dim=-1).gather(1, ids_BT[:, 1:][target_BT].unsqueeze(1)).squeeze(1)
        advantage_N = advantage_B.unsqueeze(1).expand_as(target_BT)[target_BT]
        ratio_N = (logprobs_N - logprobs_N.detach()).exp()  # one update a step: the sampling policy is this one
        clipped_N = ratio_N.clamp(1 - settings.clip, 1 + settings.clip)
        loss = -torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N).sum() / num_said
        torch.autograd.backward(loss)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
    optimizer.step()
    return float(norm)


def run_step(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: torch.optim.Optimizer,
    tasks: Sequence[Task],
    settings: Settings,
) -> StepReport:
    """One whole step: `group_size` rollouts of each task, one update."""
    start = time.perf_counter()
    repeated = [task for task in tasks for _ in range(settings.group_size)]
    rollouts = roll_out(model, tokenizer, repeated, sample=True)
    middle = time.perf_counter()
    rewards = [rollout.reward for rollout in rollouts]
    advantage_of = advantages(rewards, settings.group_size)
    assert isinstance(tokenizer.pad_token_id, int)
    norm = train(model, optimizer, rollouts, advantage_of, settings, tokenizer.pad_token_id)
    return StepReport(
        reward=sum(rewards) / len(rewards),
        rollout_s=middle - start,
        train_s=time.perf_counter() - middle,
        num_sampled=sum(sum(rollout.said) for rollout in rollouts),
        num_trained=sum(len(rollout.ids) for rollout in rollouts),
        grad_norm=norm,
    )


def make_optimizer(model: PreTrainedModel, settings: Settings) -> torch.optim.AdamW:
    """AdamW without weight decay."""
    return torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=0.0)


def accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task], *, sample: bool
) -> float:
    """Mean reward over the tasks, one rollout each, 256 at a time."""
    rewards: list[float] = []
    for start in range(0, len(tasks), 256):
        rollouts = roll_out(model, tokenizer, tasks[start : start + 256], sample=sample)
        rewards += [rollout.reward for rollout in rollouts]
    return sum(rewards) / len(rewards)


def show_accuracy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, step: int, sets: dict[str, list[Task]]
) -> None:
    """Print greedy and sampled accuracy on each set."""
    parts = []
    for name, tasks in sets.items():
        greedy, sampled = (accuracy(model, tokenizer, tasks, sample=sample) for sample in (False, True))
        parts.append(f"{name} ({len(tasks)}) greedy {greedy:.3f} sampled {sampled:.3f}")
    print(f"-- step {step}: {'; '.join(parts)}", flush=True)


def main() -> None:
    """Train and evaluate."""
    defaults = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=QUICKSTART / "model")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=defaults.lr)
    parser.add_argument("--beta2", type=float, default=defaults.betas[1])
    parser.add_argument("--final-lr", type=float, default=defaults.final_lr)
    parser.add_argument("--eval-every", type=int, default=10)
    parser.add_argument("--tasks", type=int, default=None, help="only the first so many held-out tasks")
    arguments = parser.parse_args()

    torch.set_num_threads(2)
    torch.manual_seed(arguments.seed)
    settings = Settings(lr=arguments.lr, betas=(0.9, arguments.beta2), final_lr=arguments.final_lr)
    model, tokenizer = load(arguments.model)
    optimizer = make_optimizer(model, settings)
    train_tasks = load_tasks("train")
    random.Random(arguments.seed).shuffle(train_tasks)
    test = {"test": load_tasks("test")[: arguments.tasks]}
    both = {**test, "further": load_tasks("further")[: arguments.tasks]}
    show_accuracy(model, tokenizer, 0, both)
    for step in range(arguments.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * (1 - (1 - settings.final_lr) * step / arguments.steps)
        start = step * settings.num_tasks
        tasks = [train_tasks[index % len(train_tasks)] for index in range(start, start + settings.num_tasks)]
        report = run_step(model, tokenizer, optimizer, tasks, settings)
        print(
            f"step {step + 1}: reward {report.reward:.3f}  rollout {report.rollout_s:.2f} s"
            f"  train {report.train_s:.2f} s  sampled {report.num_sampled}  sequences {report.num_trained}"
            f"  grad norm {report.grad_norm:.2f}",
            flush=True,
        )
        is_last = step + 1 == arguments.steps
        if is_last or (step + 1) % arguments.eval_every == 0:
            show_accuracy(model, tokenizer, step + 1, both if is_last else test)


if __name__ == "__main__":
    main()
