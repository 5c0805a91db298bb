"""A call as a teacher with other tokens reads it, found a second time to repeat an update.

In: a recorded call, the folders of both models. Out: the teacher's ids, and the stretches of text that begin and end
between tokens of both. Texts are spelled by the bytes that llguidance reads in a tokenizer; nothing is shared with
`experience.reread` and `experience.alignment`. What a chat template makes of messages is taken from `gateway.render`,
which wrote the recorded prompts too.

Shape suffixes: T tokens of the teacher's sequence, R those of its answer, S sampled tokens of the call.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from sharpen.config.run import RunConfig
from sharpen.errors import CheckpointError
from sharpen.evidence.certificate.plain.model import PlainSequence
from sharpen.evidence.certificate.plain.teacher import Teaching, teacher_folders
from sharpen.gateway.render import Renderer
from sharpen.gateway.requests import ApiError, render_message
from sharpen.types import PROMPT_ROLE, Call

_THINKS = "<think>"
_NO_TEXT = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for bytes that are no text; several of them are read as one."""


def others(config: RunConfig, base: Path) -> dict[str, Path]:
    """Return the folders of the teachers whose tokens are not those of the model in `base`, by name."""
    teaching = Teaching.of(config)
    if teaching is None or not teaching.by_sample:
        return {}
    folders = teacher_folders(config)
    own = _vocabulary(base) if folders else None
    return {name: folder for name, folder in folders.items() if _vocabulary(folder) != own}


def _vocabulary(folder: Path) -> tuple[Mapping[str, int], Any, Any]:
    read = _tokenizer(folder)
    return read.get_vocab(), read.bos_token, read.eos_token


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


class PlainReader:
    """Reads calls of the model in `base` as the teacher in `folder` does."""

    def __init__(self, base: Path, folder: Path, thinking: bool | None) -> None:
        self._own, self._its = _tokenizer(base), _tokenizer(folder)
        self._own_spelling, self._its_spelling = _Spelling(self._own), _Spelling(self._its)
        self._own_ends, self._renderer = _end_ids(base), Renderer(self._its)
        self._kwargs = {} if thinking is None else {"enable_thinking": thinking}
        self._plain = copy.deepcopy(self._its.backend_tokenizer)
        self._plain.encode_special_tokens = True
        self._end = self._end_of_turn()

    def read(self, call: Call, own: PlainSequence) -> PlainSequence:
        """Return the call's sequence with the teacher's. Raises `CheckpointError` for a call that trained though no
        teacher can read it."""
        sampled = call.sampled_ids_S.tolist()
        over = call.finish_reason == "stop" and sampled[-1] in self._own_ends
        said = sampled[: len(sampled) - over]
        prompt = self._prompt(call)
        text, own_ends = self._own_spelling.text(said)
        ids = self._encoded(text)
        is_cut = not over and text.endswith(_NO_TEXT)
        if ids is None or is_cut or call.pictures or call.constraint or call.sampling.cuts:
            raise CheckpointError(f"call {call.index} of {own.owner} was trained, and its teacher cannot read it")
        its_ends = self._its_spelling.text(ids)[1]
        met = [0, *(end for end in sorted({*own_ends} & {*its_ends}) if end > 0)]
        stretches = [(_stretch(own_ends, *one), _stretch(its_ends, *one)) for one in pairwise(met)]
        if over:
            is_raw = call.messages[0].get("role") == PROMPT_ROLE
            stretches.append((slice(len(said), len(said) + 1), slice(len(ids), len(ids) + 1)))
            ids = [*ids, self._its.eos_token_id if is_raw else self._end]
        read = PlainSequence(
            owner=own.owner,
            ids_T=torch.tensor([*prompt, *ids]),
            places_S=torch.arange(len(prompt), len(prompt) + len(ids)),
            recorded_S=torch.zeros(len(ids)),
            weights_S=torch.zeros(len(ids)),
            temperature=own.temperature,
        )
        return replace(own, read=read, stretches=tuple(stretches))

    def _prompt(self, call: Call) -> list[int]:
        """The teacher's prompt. Reasoning that the policy's prompt opens is open for the teacher too."""
        first = call.messages[0]
        if first.get("role") == PROMPT_ROLE:
            return list(self._its(str(first["content"]))["input_ids"])
        before = str(self._own.decode(call.prompt_ids_P.tolist(), skip_special_tokens=False))
        messages = [render_message(one) for one in call.messages]
        last = messages[-1]
        goes_on = last["role"] == "assistant" and bool(last["content"])
        goes_on = goes_on and before.rstrip().endswith(str(last["content"]).rstrip()[-32:])
        text = self._renderer.render(messages, call.tools, self._kwargs, continue_final=goes_on)
        before, opened, after = before.rpartition(_THINKS)
        if opened and not after.strip() and not text.rstrip().endswith(_THINKS):
            text = f"{text}{opened}{after}"
        return [int(one) for one in self._renderer.encode(text)]

    def _encoded(self, text: str) -> list[int] | None:
        """The ids of a text behind a prompt: those of the text alone or, where these spell something else, those behind
        the end of a line."""
        alone, line, both = (
            list(self._plain.encode(one, add_special_tokens=False).ids) for one in (text, "\n", "\n" + text)
        )
        for ids in (alone, both[len(line) :]):
            if self._its_spelling.text(ids)[0] == text:
                return ids
        return None

    def _end_of_turn(self) -> int:
        """The first special token that the template writes behind an answer; else that which ends a text."""
        rows = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "Two!"}]
        try:
            behind = self._renderer.render(rows, (), self._kwargs, closed=True).split("Two!")[-1]
        except ApiError:
            behind = ""
        ids = [int(one) for one in self._renderer.encode(behind)]
        known = _special(self._its) | _end_ids(Path(self._its.name_or_path))
        return int(next((one for one in ids if one in known), self._its.eos_token_id))


class _Spelling:
    """A tokenizer's tokens as llguidance reads them."""

    def __init__(self, tokenizer: Any) -> None:
        from llguidance.hf import from_tokenizer

        self._tokens = from_tokenizer(tokenizer)

    def text(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """Return the text of ids, and for each the number of characters up to its end; -1 where no character ends, or
        one that is no text."""
        ends, so_far = list[int](), b""
        for one in ids:
            so_far += bytes(self._tokens.decode_bytes([one])) or b"\xff"  # for which it has nothing
            ends.append(-1 if _text(so_far).endswith(_NO_TEXT) else len(_text(so_far)))
        return _text(so_far), [*ends[:-1], len(_text(so_far))][: len(ends)]


def _text(spelt: bytes) -> str:
    text = spelt.decode(errors="replace")
    while 2 * _NO_TEXT in text:
        text = text.replace(2 * _NO_TEXT, _NO_TEXT)
    return text


def _stretch(ends: Sequence[int], begin: int, end: int) -> slice:
    """The tokens between two places of the text."""
    start = 0 if begin == 0 else ends.index(begin) + 1
    return slice(start, ends.index(end) + 1)


def _special(tokenizer: Any) -> frozenset[int]:
    return frozenset({*tokenizer.all_special_ids, *_added(tokenizer)})


def _added(tokenizer: Any) -> Iterator[int]:
    for number, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            yield number


def _end_ids(folder: Path) -> frozenset[int]:
    """The ids with which a model ends a generation, as its files say."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ids = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()
