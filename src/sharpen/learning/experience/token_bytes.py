"""The bytes that each token of a tokenizer stands for.

In: a fast tokenizer of transformers. Out: the bytes of ids, which joined are the text, whatever they are joined with.
Parts of characters have bytes too, though they have no text; special tokens have those of their names. Known are
byte-level tokens (GPT-2 and most since) and those of sentencepiece (a mark for the space, bytes as `<0x0A>`);
tokenizers that lose something of a text are refused.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sharpen.errors import ModelError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_HARMLESS = frozenset({"ByteLevel", "ByteFallback", "Metaspace", "Replace", "Fuse", "Strip"})
"""The steps of decoding with which a token has the same bytes everywhere. `Strip` takes a space off the beginning."""


class TokenBytes:
    """The tokens of one tokenizer, some of which are special."""

    def __init__(self, tokenizer: Any) -> None:
        """Raises `ModelError` for a tokenizer whose tokens have no bytes of their own."""
        backend = tokenizer.backend_tokenizer
        steps = _steps(backend.decoder)
        unknown = sorted(step["type"] for step in steps if not _is_harmless(step))
        if not steps or unknown:
            kind = ", ".join(unknown) or "no decoder"
            raise ModelError(f"its tokens do not spell texts byte by byte ({type(tokenizer).__name__}: {kind})")
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset({id_ for id_, one in added.items() if one.special} | {*tokenizer.all_special_ids})
        self._added: Mapping[int, str] = {id_: one.content for id_, one in added.items()}
        self._backend = backend
        self._is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
        self._has_bytes = any(step["type"] == "ByteFallback" for step in steps)
        self._replaced = [pair for step in steps if (pair := _replaced(step)) is not None]
        self._of = functools.cache(self._uncached)

    def of(self, ids: Sequence[int]) -> list[bytes] | None:
        """Return the bytes of each id; None if one of them has none, or is none of the tokenizer's."""
        found = []
        for id_ in ids:
            piece = self._of(id_)
            if not piece:
                return None
            found.append(piece)
        return found

    def _uncached(self, id_: int) -> bytes | None:
        if (added := self._added.get(id_)) is not None:
            return added.encode()
        token = self._backend.id_to_token(id_)
        if token is None:
            return None
        if self._is_byte_level:
            numbers = [_BYTE_OF.get(character) for character in token]
            return token.encode() if None in numbers else bytes(one for one in numbers if one is not None)
        if self._has_bytes and (byte := _BYTE.fullmatch(token)) is not None:
            return bytes([int(byte[1], 16)])
        for pattern, content in self._replaced:
            token = token.replace(pattern, content)
        return str(token).encode()


def _steps(decoder: Any) -> list[dict[str, Any]]:
    """Return the steps of decoding."""
    if decoder is None:
        return []
    state: dict[str, Any] = json.loads(decoder.__getstate__())
    found = state["decoders"] if state["type"] == "Sequence" else [state]
    return [*found]


def _is_harmless(step: Mapping[str, Any]) -> bool:
    return step["type"] in _HARMLESS and (step["type"] != "Replace" or bool(step["pattern"].get("String")))


def _replaced(step: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what a step replaces in a token, and by what."""
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    if step["type"] == "Replace":
        return step["pattern"]["String"], step["content"]
    return None


def _byte_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level token stands for: those that can be seen for themselves, the
    others in order from the 256th on (GPT-2)."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_BYTE_OF = _byte_characters()
