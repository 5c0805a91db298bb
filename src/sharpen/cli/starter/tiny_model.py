"""A tiny chat model, made on the spot: for a first run where no weights are at hand.

In: a folder, a seed. Out: a Hugging Face directory (Qwen3's architecture, 0.1M parameters, its own tokenizer and chat
template) that transformers loads as it is. It is taught the starter's tasks on a CPU, with a habit: in most answers it
is off by one, in some it is right. With tools, most answers are such guesses, and in some it asks the calculator first
and says what that gave. So it can do the task and prefers not to, and what is left to reinforcement learning is the
preference. It can do nothing else.

Its lessons are conversations as ids that are cut where a server would cut them, with a mark on those that the model is
to say; the chat template leaves as it was what it rendered once.
"""

from __future__ import annotations

import json
import random
import re
import runpy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sharpen.cli.starter.questions import Question
from sharpen.cli.starter.tasks import rows

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3ForCausalLM


TEMPLATE = Path(__file__).with_name("chat_template.jinja")
"""ChatML with Hermes tool calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """Token ids of one conversation, and which of them the model is to say."""

    ids: list[int]
    said: list[bool]


def encode(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: list[Any] | None) -> Lesson:
    """Return a conversation as ids: prompt, sampled turn, rest, sampled turn."""

    def render(upto: int, prompt: bool) -> str:
        text = tokenizer.apply_chat_template(messages[:upto], tools=tools, tokenize=False, add_generation_prompt=prompt)
        assert isinstance(text, str)
        return text

    ids: list[int] = []
    said: list[bool] = []
    rendered = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        for text, is_said in ((render(index, True), False), (render(index + 1, False).removesuffix("\n"), True)):
            assert text.startswith(rendered), "the chat template is not prefix-preserving"
            piece = tokenizer.encode(text.removeprefix(rendered), add_special_tokens=False)
            ids += piece
            said += [is_said] * len(piece)
            rendered = text
    return Lesson(ids=ids, said=said)


def collate(lessons: Sequence[Lesson], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and targets [B, T], padded on the right: the target of a place is the next id if the model is to say
    it, else -100."""
    import torch

    width = max(len(lesson.ids) for lesson in lessons)
    ids_BT = torch.full((len(lessons), width), pad)
    targets_BT = torch.full((len(lessons), width), -100)
    for row, lesson in enumerate(lessons):
        ids_BT[row, : len(lesson.ids)] = torch.tensor(lesson.ids)
        said = [token if is_said else -100 for token, is_said in zip(lesson.ids, lesson.said, strict=True)]
        targets_BT[row, : len(said) - 1] = torch.tensor(said[1:])
    return ids_BT, targets_BT


Messages = list[dict[str, Any]]
CONTEXT = 512
STEPS = 300
_VOCABULARY, _VOCABULARY_OF_PHRASES, _NUM_RENDERED = 384, 512, 300
_CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEXT_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_BATCH, _LEARNING_RATE, _WARM_UP = 64, 5e-3, 20
_ALWAYS, _RIGHT = 0.5, 0.3
"""In the first part of the lessons every answer is right; afterwards this share of them."""
_SYSTEM = ("Answer with the number.", "You are a helpful assistant.", "Solve the problem.", "")
_AGENT = Path(__file__).with_name("files") / "tools" / "agent.py"
"""The agent with a tool, whose prompt and tool the model is taught."""


def make_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    steps: int = STEPS,
    tools: bool = False,
    questions: Sequence[Question] = (),
    talks: Sequence[Messages] = (),
) -> Path:
    """Write the model and return its folder. With `steps` 0 its weights are random; `tools`: it calls a calculator;
    `questions` are taught in place of the starter's tasks, and so are `talks`, whole conversations as they are."""
    import torch
    from transformers import GenerationConfig

    rng = random.Random(seed)
    agent = runpy.run_path(str(_AGENT)) if tools else {}
    tokenizer = _tokenizer(_phrases(agent) if agent else _words(questions, talks), words=not agent)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _new_model(tokenizer)
        if steps:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # for matrices this small, more threads only wait for each other
            count = steps * _BATCH
            conversations: Iterable[Messages] = _conversations(rng, count, agent)
            if questions or talks:
                conversations = rng.choices(talks, k=count) if talks else _asked(rng, count, questions)
            lessons = [encode(tokenizer, messages, agent.get("TOOLS")) for messages in conversations]
            assert isinstance(tokenizer.pad_token_id, int)
            _teach(model, lessons, steps, tokenizer.pad_token_id)
            torch.set_num_threads(threads)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _words(questions: Sequence[Question], talks: Sequence[Messages]) -> list[str]:
    """Return the texts that the tokenizer has to know the words of."""
    if talks:
        return ["".join(f"{one['role']}\n{one['content']}\n" for one in talk) for talk in talks]
    if questions:
        return [f"system\n{one.system}\nuser\n{one.question}\nassistant\n{one.right}\n" for one in questions]
    return [f"system\n{text}\nuser\n{row['question']}\nassistant\n" for row in rows()["train"] for text in _SYSTEM]


def _phrases(agent: dict[str, Any]) -> list[str]:
    """Return what is between the control tokens in the conversations of an agent with tools."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    template = TEMPLATE.read_text(encoding="utf-8")
    renderer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=template)
    control = "|".join(map(re.escape, (*_CONTROL_TOKENS, *_TEXT_TOKENS)))
    texts = []
    for messages in _conversations(random.Random(0), _NUM_RENDERED, agent):
        text = renderer.apply_chat_template(messages, tools=agent["TOOLS"], tokenize=False)
        assert isinstance(text, str)
        texts += re.split(control, text)
    return texts


def _tokenizer(texts: Sequence[str], *, words: bool) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with single digits. Its tokens are words of the texts at most, or else whole phrases: a
    call is then eight tokens, and a model as small as this one learns to copy numbers into it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY if words else _VOCABULARY_OF_PHRASES,
        special_tokens=list(_CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    if not words:
        bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in _TEXT_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=CONTEXT,
        chat_template=TEMPLATE.read_text(encoding="utf-8"),
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


def _conversations(rng: random.Random, count: int, agent: dict[str, Any]) -> Iterator[Messages]:
    """Yield the messages of so many conversations."""
    tasks = [row for split in rows().values() for row in split]
    for number in range(count):
        row, system = rng.choice(tasks), agent.get("SYSTEM") or rng.choice(_SYSTEM)
        messages: Messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": row["question"]})
        right = _is_right(rng, number, count)
        if right and agent:
            expression = " + ".join(re.findall(r"\d+", row["question"]))
            call = {"name": "calculator", "arguments": {"expression": expression}}
            result = agent["calculator"](json.dumps(call["arguments"]))
            messages.append({"role": "assistant", "tool_calls": [{"type": "function", "function": call}]})
            messages.append({"role": "tool", "content": result})
        messages.append({"role": "assistant", "content": row["answer"] if right else str(int(row["answer"]) + 1)})
        yield messages


def _asked(rng: random.Random, count: int, questions: Sequence[Question]) -> Iterator[Messages]:
    """Yield so many conversations in which a question is asked."""
    for number in range(count):
        one = rng.choice(questions)
        messages = [{"role": "system", "content": one.system}] if one.system else []
        messages.append({"role": "user", "content": one.question})
        said = one.right if _is_right(rng, number, count) else one.wrong
        yield [*messages, {"role": "assistant", "content": said}]


def _is_right(rng: random.Random, number: int, count: int) -> bool:
    return number < _ALWAYS * count or rng.random() < _RIGHT


def _teach(model: Qwen3ForCausalLM, lessons: Sequence[Lesson], steps: int, pad: int) -> None:
    """Train on each lesson once, on what the model says; the learning rate falls to zero."""
    import torch
    import torch.nn.functional as functional

    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    model.train()
    for step in range(steps):
        ids_BT, targets_BT = collate(lessons[step * _BATCH : (step + 1) * _BATCH], pad)
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min((step + 1) / _WARM_UP, (steps - step) / steps)
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
        loss = functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT[:, :-1].flatten(), ignore_index=-100)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
