"""Build the quickstart model from nothing: tokenizer, chat template, Qwen3-architecture weights taught by SFT.

Role: makes `model/`, the starting point that the quickstart tunes. In: a seed. Out: a Hugging Face directory that
transformers loads as it is (weights in bfloat16, about 4 MB).

The traces taught are a mixture of three behaviours: a right tool call with its result copied, a tool call with the
wrong operation, and a guess without the tool. The guess is the most common one for most questions. So the model knows
all that solving takes, and prefers not to do it: what is left to reinforcement learning is the preference.

    python build_model.py [--seed 0] [--steps 1200] [--out model]
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from agent import SYSTEM, TOOLS
from problems import Problem, splits, stream
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from sharpen.cli.starter import tiny_model
from sharpen.cli.starter.tiny_model import TEMPLATE, Lesson, collate

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / "bench"))
import plain  # noqa: E402

CONTEXT = 1024
VOCABULARY = 512
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXT_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Words with their leading sign or space, one digit at a time, runs of signs, white space.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# Shares of the behaviours in the traces. First the skill, then the habit: over-confident with all but division.
BEHAVIOURS = ("right", "guess", "slip")
SKILL = dict.fromkeys("+-*/", (85, 10, 5))
HABIT = {"+": (28, 64, 8), "-": (28, 64, 8), "*": (28, 64, 8), "/": (74, 18, 8)}
SKILL_PART = 0.6

BATCH, PEAK_LR, WARMUP = 32, 2e-3, 50


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE with single digits, in Qwen's manner; its chat template is the starter's."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS]
    ordinary = [AddedToken(token, special=False, normalized=False) for token in TEXT_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(special) - len(ordinary),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens(special + ordinary)
    assert bpe.get_vocab_size() <= VOCABULARY
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    return tokenizer


def guess(rng: random.Random, result: int) -> int:
    """A plausible wrong result."""
    spread = max(3, result // 4)
    return rng.choice([n for n in range(max(0, result - spread), result + spread + 1) if n != result])


def conversation(rng: random.Random, problem: Problem, shares: dict[str, tuple[int, int, int]]) -> list[dict[str, Any]]:
    """The messages of one trace, in the behaviour drawn."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem.question}]
    (behaviour,) = rng.choices(BEHAVIOURS, shares[problem.operation])
    if behaviour == "guess":
        return [*messages, {"role": "assistant", "content": f"#### {guess(rng, problem.result)}"}]
    operation = problem.operation
    if behaviour == "slip":
        operation = rng.choice([other for other in "+-*" if other != operation])
    expression = f"{problem.left} {operation} {problem.right}"
    result = f"{eval(expression):.10g}"
    call = {"name": "calculator", "arguments": {"expression": expression}}
    return [
        *messages,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": f"#### {result}"},
    ]


def encode(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> Lesson:
    """A conversation of the agent as ids, with the marks of what the model says."""
    return tiny_model.encode(tokenizer, messages, TOOLS)


def num_common(sequences: Sequence[list[int]]) -> int:
    """The length of the longest common beginning."""
    first, last = min(sequences), max(sequences)
    return next(index for index, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)


def learning_rate(step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine to a fiftieth."""
    if step < WARMUP:
        return PEAK_LR * (step + 1) / WARMUP
    return PEAK_LR * (0.02 + 0.49 * (1 + math.cos(math.pi * (step - WARMUP) / (num_steps - WARMUP))))


def teach(model: Qwen3ForCausalLM, traces: Sequence[Lesson], pad: int, num_steps: int) -> None:
    """SFT: each trace once, `BATCH` a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.01)
    model.train()
    num_shared = num_common([trace.ids for trace in traces])
    start, mean_loss = time.monotonic(), 0.0
    for step in range(num_steps):
        ids_BT, targets_BT = collate(traces[step * BATCH : (step + 1) * BATCH], pad)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, num_steps)
        # The system turn, the same in every trace, is computed once a batch; gradients flow through its cache.
        cache = model.model(input_ids=ids_BT[:1, :num_shared], use_cache=True).past_key_values
        assert cache is not None
        cache.batch_repeat_interleave(len(ids_BT))
        rest_BTD = model.model(input_ids=ids_BT[:, num_shared:], past_key_values=cache).last_hidden_state
        targets_BT = targets_BT[:, num_shared:]
        said_BT = targets_BT != -100
        loss = F.cross_entropy(model.lm_head(rest_BTD[said_BT]), targets_BT[said_BT])
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean_loss = loss.item() if step == 0 else 0.95 * mean_loss + 0.05 * loss.item()
        if (step + 1) % 50 == 0:
            seconds = time.monotonic() - start
            left = seconds / (step + 1) * (num_steps - step - 1)
            print(f"step {step + 1}/{num_steps}  loss {mean_loss:.3f}  {seconds:.0f} s, {left:.0f} s left", flush=True)
    model.eval()


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Fresh weights, about 1.9M parameters."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=640,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def main() -> None:
    """Train, save, say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--out", type=Path, default=HERE / "model")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(2)

    test_questions = {problem.question for problem in splits()["test"]}
    source = stream(f"{arguments.seed}/sft", without=test_questions)
    rng = random.Random(arguments.seed)
    num_skill = int(SKILL_PART * arguments.steps) * BATCH
    conversations = [
        conversation(rng, next(source), SKILL if index < num_skill else HABIT)
        for index in range(arguments.steps * BATCH)
    ]
    texts = [message["content"] for messages in conversations[:4000] for message in messages[1:]]
    tokenizer = train_tokenizer([*texts, *[prompt_text() for _ in range(400)]])
    traces = [encode(tokenizer, messages) for messages in conversations]
    print(f"{len(traces)} traces, {sum(len(trace.ids) for trace in traces) / len(traces):.0f} tokens each on average")

    model = new_model(tokenizer)
    print(f"{model.num_parameters() / 1e6:.2f}M parameters")
    assert isinstance(tokenizer.pad_token_id, int)
    teach(model, traces, tokenizer.pad_token_id, arguments.steps)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    num_bytes = sum(path.stat().st_size for path in arguments.out.iterdir())
    print(f"saved {arguments.out.name}/, {num_bytes / 2**20:.1f} MiB", flush=True)
    sets = {name: plain.load_tasks(name) for name in ("test", "further")}
    plain.show_accuracy(*plain.load(arguments.out), 0, sets)


def prompt_text() -> str:
    """What every prompt contains, for the tokenizer to learn its words."""
    tools = f"# Tools\n<tools>\n{json.dumps(TOOLS[0])}\n</tools>\nCall a tool with"
    calls = '{"name": ..., "arguments": ...}\n{"name": "calculator", "arguments": {"expression": "1 + 2"}}'
    return "\n".join(["system", SYSTEM, tools, calls, "user", "assistant", "####"])


if __name__ == "__main__":
    main()
