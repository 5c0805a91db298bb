"""A tiny model that speaks an agent's format: recorded conversations of the agent, learnt by heart.

Role: a model of 0.5M parameters that was never trained makes no tool call, so that there would be nothing to reinforce.
A real model needs none of this. In: a workflow, tasks, and behaviours: what a model might say. The agent is run against
an engine that says just that, and its conversations are recorded as in training. Out: a Hugging Face folder with a
tokenizer made for these texts, and weights taught by SFT to behave in the given shares.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from sharpen.cli.starter.tiny_model import TEMPLATE
from sharpen.contracts import GenerateRequest, Generation
from sharpen.gateway.gateway import Gateway
from sharpen.types import Call

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXT_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Words with their leading sign or space, one digit at a time, runs of signs, white space.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
VOCABULARY = 1024
AT_ONCE = 4
"""Agents that run at the same time while they are recorded."""

LAYERS, WINDOW = 2, 96
"""Each layer sees this many tokens. What stands further back in a long prompt (dates, names of folders) cannot be
learnt by heart, and need not be computed to teach what follows."""

Workflow = Callable[[dict[str, Any], Any], Coroutine[Any, Any, Any]]
Say = Callable[[str], str]
"""From the text of a prompt to what the model says to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A recorded conversation: its text in pieces, each with whether the model said it; and how often it is to be."""

    pieces: tuple[tuple[str, bool], ...]
    share: float


class ScriptedEngine:
    """An engine that says what it is told to."""

    def __init__(self, tokenizer: Any, say: Say) -> None:
        self.tokenizer, self.say = tokenizer, say
        self.max_model_len, self.version = 1 << 20, 0

    async def generate(self, request: GenerateRequest) -> Generation:
        said = self.say(self.tokenizer.decode(request.prompt_ids))
        ids = np.array([*self.tokenizer.encode(said), self.tokenizer.eos_token_id], np.int32)
        zeros = np.zeros(len(ids), np.int32)
        return Generation(ids=ids, logprobs=zeros.astype(np.float32), versions=zeros, finish_reason="stop")

    async def load(self, version: int, tensors: Mapping[str, Any]) -> None:
        """It has no weights."""

    async def close(self) -> None:
        """It holds nothing."""


def record(workflow: Workflow, behaviours: Sequence[tuple[dict[str, Any], Say, float]]) -> list[Conversation]:
    """Run the workflow once for each (task, what the model says, share), and return what was said in them."""
    tokenizer = new_tokenizer([])
    loop = asyncio.new_event_loop()
    serving = threading.Thread(target=loop.run_forever, daemon=True)
    serving.start()

    async def run(place: int) -> list[Conversation]:
        task, say, share = behaviours[place]
        gateway = Gateway(ScriptedEngine(tokenizer, say), tokenizer, model_name="agent", loop=loop)
        session = gateway.open(f"teach/{place}", place)
        await workflow(task, session.model)
        calls = session.close()
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(gateway.close(), loop))
        parents = {call.parent for call in calls}
        return [_conversation(tokenizer, calls, call, share) for call in calls if call.index not in parents]

    async def run_all() -> list[Conversation]:
        few = asyncio.Semaphore(AT_ONCE)

        async def one(place: int) -> list[Conversation]:
            async with few:
                return await run(place)

        found = await asyncio.gather(*(one(place) for place in range(len(behaviours))))
        return [conversation for conversations in found for conversation in conversations]

    try:
        return asyncio.run(run_all())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        serving.join()
        loop.close()


def _conversation(tokenizer: Any, calls: Sequence[Call], last: Call, share: float) -> Conversation:
    """The conversation that ends with a call: between what the model said is what it was given."""
    path = [last]
    while (parent := path[-1].parent) is not None:
        path.append(calls[parent])
    pieces: list[tuple[str, bool]] = []
    start = 0
    for call in reversed(path):
        pieces += [(tokenizer.decode(call.prompt_ids_P[start:]), False), (tokenizer.decode(call.sampled_ids_S), True)]
        start = len(call.prompt_ids_P) + len(call.sampled_ids_S)
    return Conversation(pieces=tuple(pieces), share=share)


def new_tokenizer(texts: Sequence[str], vocabulary: int = VOCABULARY) -> Any:
    """A byte-level BPE made for these texts, with the quickstart's chat template; of bytes alone without texts."""
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
    size = vocabulary - len(special) - len(ordinary) if texts else 256
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False))
    bpe.add_tokens(special + ordinary)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    return tokenizer


def new_model(tokenizer: Any, window: int = WINDOW) -> Qwen3ForCausalLM:
    """Fresh weights of the Qwen3 architecture, 0.5M parameters, whose layers see `window` tokens each."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=1 << 15,
        use_sliding_window=True,
        sliding_window=window,
        max_window_layers=0,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def teach(
    conversations: Sequence[Conversation], folder: Path, *, num_steps: int = 150, window: int = WINDOW, seed: int = 0
) -> Path:
    """Make the tokenizer and the model, teach it the conversations in their shares, and save both. Gives the folder."""
    torch.manual_seed(seed)
    tokenizer = new_tokenizer(["".join(text for text, _ in each.pieces) for each in conversations])
    sequences = [_encode(tokenizer, each, LAYERS * window) for each in conversations]
    model = new_model(tokenizer, window)
    share = torch.tensor([each.share for each in conversations])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=num_steps)
    for step in range(num_steps):
        loss = _loss(model, sequences, share / share.sum())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if (step + 1) % 50 == 0:
            print(f"teaching: step {step + 1}/{num_steps}, loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _encode(tokenizer: Any, conversation: Conversation, seen: int) -> tuple[list[int], list[bool]]:
    """Token ids, and which of them the model is to say; without what stands more than `seen` tokens before the first,
    which the model cannot see when it speaks."""
    ids: list[int] = []
    said: list[bool] = []
    for text, is_said in conversation.pieces:
        piece = tokenizer.encode(text, add_special_tokens=False)
        ids += piece
        said += [is_said] * len(piece)
    start = max(said.index(True) - seen, 0)
    return ids[start:], said[start:]


def _loss(model: Qwen3ForCausalLM, sequences: Sequence[tuple[list[int], list[bool]]], share: torch.Tensor) -> Any:
    """The mean loss of what is said, each conversation by its share."""
    width = max(len(ids) for ids, _ in sequences)
    ids_BT = torch.zeros((len(sequences), width), dtype=torch.long)
    targets_BT = torch.full((len(sequences), width), -100)
    for row, (ids, said) in enumerate(sequences):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        targets_BT[row, : len(ids) - 1] = torch.where(torch.tensor(said[1:]), ids_BT[row, 1 : len(ids)], -100)
    hidden_BTD = model.model(input_ids=ids_BT).last_hidden_state
    said_BT = targets_BT != -100
    losses = F.cross_entropy(model.lm_head(hidden_BTD[said_BT]), targets_BT[said_BT], reduction="none")
    return (losses * share[said_BT.nonzero()[:, 0]]).sum()
