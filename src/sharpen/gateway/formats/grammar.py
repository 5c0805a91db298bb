"""A grammar of llguidance, written rule by rule: what a format describes its markup with.

In: a format's tags, the tools that may be called. Out: rules, and `Markup`: an answer of nothing but calls, and an
answer of any text in which each beginning of markup becomes a call.

llguidance reads text as the longest terminal that can still become whole. So a terminal of any text, next to others,
must not match what they match: it is either `lazy`, or leaves their texts out (`~`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TokenId = Callable[[str], int | None]
"""Returns the id of a token with this text that was added to the tokenizer, if there is one."""

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
ANY = r"(.|\n)"
"""A pattern: any character."""
SPACE = r"[\s\x1c-\x1f]*"
"""A pattern: what `\\s*` is in Python."""
ITEM_SEPARATOR, KEY_SEPARATOR = r"/,[ \n]?/", "/: ?/"
"""What stands between the items and after the keys of JSON."""
_JSON = {"whitespace_flexible": False, "item_separator": ",[ \n]?", "key_separator": ": ?"}
_TERMINALS = (rf"TEXT: /{ANY}*/", r"GAP: /\n{1,2}/")
_TAG = re.compile(r"(<[^<>]+>|\[[^\[\]]+\])")


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTool:
    """A tool that may be called: the schema of its arguments, None for any, and whether all of it must be enforced."""

    number: int
    name: str
    schema: Mapping[str, Any] | None
    strict: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Markup:
    """What stands for an answer in a rule: `forced` is nothing but calls, `free` any text in which each beginning of
    markup becomes a call."""

    forced: str
    free: str


class GrammarWriter:
    """Collects the rules of a grammar. Most methods add some, and return what stands for them in another rule.

    `notes` are what was asked for and cannot be enforced.
    """

    def __init__(self, token_id: TokenId) -> None:
        self.token_id = token_id
        self.notes: list[str] = []
        self._rules: dict[str, str] = {}

    def text(self, start: str) -> str:
        """Return the grammar."""
        return "\n".join([f"start: {start}", *self._rules.values(), *_TERMINALS, ""])

    def has(self, name: str) -> bool:
        """Whether there is a rule of this name."""
        return name in self._rules

    def add(self, name: str, rule: str, attributes: str = "") -> str:
        self._rules[name] = f"{name}{attributes}: {rule}"
        return name

    def json(self, name: str, schema: Mapping[str, Any], *, strict: bool) -> str:
        options = {**_JSON, "lenient": not strict}
        return self.add(name, f"%json {json.dumps({**schema, 'x-guidance': options})}")

    def arguments(self, tool: OfferedTool) -> str:
        """A tool's arguments as JSON."""
        return self.json(f"arguments_{tool.number}", tool.schema or ANY_OBJECT, strict=tool.strict)

    def markup(self, text: str) -> str:
        """A text, in which tags may be the tokenizer's own tokens."""
        found: list[str] = []
        for piece in filter(None, _TAG.split(text)):
            token = self.token_id(piece)
            found.append(literal(piece) if token is None else f"({literal(piece)} | <[{token}]>)")
        return " ".join(found)

    def up_to(self, name: str, tag: str, text: str = f"{ANY}*", *, lead: str = "", without: str | None = None) -> str:
        """A text of this pattern, `lead`, and the tag, which stands nowhere before. Texts that match `without` are not
        among them."""
        lead, closes = pattern(lead), pattern(tag)
        but = "" if without is None else f" & ~/{without}/"
        token = self.token_id(tag)
        upper = name.upper()
        whole = self.add(f"{upper}_AND_TAG", f"/{text}{lead}{closes}/ & ~/{ANY}*{closes}{ANY}+/{but}")
        lazy = self.add(f"{name}_text", whole, "[lazy]")
        if token is None:
            return self.add(name, lazy)
        before = self.add(f"{upper}_BEFORE", f"/{text}{lead}/ & ~/{ANY}*{closes}{ANY}*/{but}")
        return self.add(name, f"{lazy} | {before} <[{token}]>")

    def tagged(self, tag: str, call: str, between: str | None) -> Markup:
        """Calls that begin with a tag each. `call` is what follows it, `between` what may stand before a further one;
        None if there is none."""
        opens = self.markup(tag)
        more = "" if between is None else f" ({between} {opens} {call})*"
        return Markup(forced=f"{opens} {call}{more}", free=f"({self.up_to('opened', tag)} {call})* TEXT")

    def once(self, tag: str, calls: str, tags: Sequence[str]) -> Markup:
        """Calls behind a tag that an answer has once. `tags` stand in none of its text."""
        others = "|".join(pattern(other) for other in tags if other != tag)
        opened = self.up_to("opened", tag, without=f"{ANY}*({others}){ANY}*")
        rest = self.add("REST", f"/{ANY}*/ & ~/{ANY}*({others}|{pattern(tag)}){ANY}*/")
        return Markup(forced=f"{self.markup(tag)} {calls}", free=f"({opened} {calls})? {rest}")

    def whole(self, calls: str, *, beside_text: str, begins: str, tags: Sequence[str]) -> Markup:
        """Calls that are the whole answer. `beside_text` are the same calls, with a first terminal that ends where
        `begins`, a pattern, has shown that the answer is no other text. `tags` stand in no text."""
        plain = self.add("PLAIN", f"/{ANY}*/ & ~/({begins}|{ANY}*({'|'.join(map(pattern, tags))})){ANY}*/")
        return Markup(forced=calls, free=f"({beside_text} | {plain})")


def named_object(writer: GrammarWriter, tool: OfferedTool, key: str) -> str:
    """The members of the JSON object that names a tool and has its arguments under `key`, from behind `"name":`, with
    the spaces that JSON of a schema has."""
    name, arguments = literal(literal(tool.name)), literal(literal(key))
    return f"{name} {ITEM_SEPARATOR} {arguments} {KEY_SEPARATOR} {writer.arguments(tool)}"


def literal(text: str) -> str:
    """A text as a literal of JSON, and of grammars."""
    return json.dumps(text, ensure_ascii=False)


def pattern(text: str) -> str:
    """The pattern that matches a text, between two slashes."""
    return re.sub(r"([\\/.*+?()\[\]{}|^$])", r"\\\1", text).replace("\n", r"\n")


def one_of(choices: Sequence[str]) -> str:
    """A choice, as one piece of a rule."""
    return choices[0] if len(choices) == 1 else f"({' | '.join(choices)})"
