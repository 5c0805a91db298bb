"""Secrets, and what is written in their place.

In: settings, and texts that a run writes (errors, tracebacks, log lines). Out: the same with `***` where a secret was.

A value of a free setting (`workflow_args` and the like) is secret by its name: `password`, `api_key`, `client_secret`,
`Authorization`, anywhere below `secrets`. A name that ends in `key` or `token` alone may mean a field of the data, a
model or a mark in a text (`answer_key`, `model_key`, `stop_token`): its value is secret if it looks like one, 16
characters or more without a space, with letters and digits that are not words and numbers. What stands before the host
of a URL is always secret. Numbers that are counts (`max_tokens`) and names of environment variables (`api_key_env`,
`${oc.env:KEY}`) are not.

A hidden value can be compared with another by its `fingerprint`.

In texts the secrets of the settings and of the environment (there any name in `KEY` or `TOKEN` counts) are looked for
by value, from `SHORTEST` characters on.
Prompts, answers and rows of datasets are the run's data, and stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

HIDDEN = "***"
SHORTEST = 8
"""Characters of a secret that is looked for in texts: shorter ones are words of other texts too."""

_SURE = ("password", "passwd", "pwd", "passphrase", "secret", "credential", "authorization", "cookie", "apikey")
"""Words, and endings of words (`PGPASSWORD`), of names whose values are secret."""
_BEFORE_KEY = frozenset(["api", "access", "private", "auth", "bearer", "refresh", "account"])
_FOLDERS = ("PWD", "OLDPWD")
"""Where a shell is and was."""
_NO_SECRET = frozenset(
    [
        *("env", "variable", "file", "path", "folder", "dir", "name", "field", "column", "word", "prompt", "length"),
        *("count", "endpoint", "url", "host", "type", "mode"),
    ]
)
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_RANDOM = re.compile(r"(?=.*[A-Za-z])(?=.*\d)[\w.+/=:~-]{16,}", re.ASCII)
_SEPARATORS = re.compile(r"[^A-Za-z0-9]+")
_ORDINARY = re.compile(r".{0,7}|\d+|[A-Za-z]+\d{0,4}[A-Za-z]{0,2}")
"""Parts of names and paths: short ones, numbers, words, words with a number (`internlm2`, `Qwen2`)."""
_IN_URL = re.compile(r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]*://)(?P<user>[^\s/?#\"'<>]*)@")
_IN_QUERY = re.compile(r"(?P<name>[?&](?:password|passwd|sslpassword|api_?key|access_token|token|key)=)[^&\s\"'<>#]+")
_IN_ADDRESS = re.compile(
    r"\s*(?P<scheme>(?:https?|wss?)://(?=[^:/?#@]*:(?!\d*[/?#]))|(?!https?:|wss?:)[A-Za-z][A-Za-z0-9+.-]*://)"
    r"(?P<user>[^:/@]*:[^@]*(?:@[^\s/?#\"'<>@]*)*)@"
)
"""The beginning of a value that is a URL. Its password may have any character but `@`: clients of databases take it so.
In `https://host:8000/a@b` there is none."""

_SCHEME = re.compile(r"^(?:bearer|basic|token)\s+", re.IGNORECASE)
"""What stands before the key in a header."""
_MAYBE = ("key", "token")

_known: set[str] = set()
"""The secrets of the settings of this process's runs."""


def know(settings: Any, *, by_name: bool = True) -> None:
    """Remember the secrets of settings (a nested mapping), so that `hide` finds them in texts: those of URLs, those of
    the environment that are named, and `by_name` those whose names say it."""
    _known.update(_values(settings, by_name))


def hide(text: str) -> str:
    """Return a text without the secrets of the settings and of the environment, and without what stands before the host
    of a URL."""
    environment = dict(os.environ)
    found = {*_known, *_values(environment, True)}
    found |= {value for name, value in environment.items() if _last_word(name) in _MAYBE}
    for secret in sorted((one for one in found if len(one) >= SHORTEST), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return hide_in_urls(text)


def hide_in_urls(text: str) -> str:
    """Return a text with the names, passwords and keys of its URLs hidden."""
    return _IN_QUERY.sub(rf"\g<name>{HIDDEN}", _IN_URL.sub(rf"\g<scheme>{HIDDEN}@", text))


def hide_in_value(value: str) -> str:
    """Return a value, which may be a URL as a whole, with the names, passwords and keys of its URLs hidden."""
    if found := _IN_ADDRESS.match(value):
        value = f"{found['scheme']}{HIDDEN}@{value[found.end() :]}"
    return hide_in_urls(value)


def hide_settings(settings: Any) -> Any:
    """Return settings (a nested mapping) with the secrets hidden."""
    return _hidden("", settings, False)


def fingerprint(value: Any, salt: str = "") -> str:
    """Return what tells a hidden value from another one, and does not tell the value: a slow hash with a salt, a new
    one unless it is given. `value` is of JSON's kinds."""
    salt = salt or secrets.token_hex(8)
    text, grains = json.dumps(value, sort_keys=True).encode(), salt.encode("utf-8", "backslashreplace")
    return f"{salt}:{hashlib.scrypt(text, salt=grains, n=1 << 14, r=8, p=1, dklen=16).hex()}"


def is_same(value: Any, recorded: str) -> bool:
    """Whether a value is the one of which a fingerprint was recorded."""
    return fingerprint(value, recorded.partition(":")[0]) == recorded


def hidden_names(settings: Any) -> list[str]:
    """Return the names of the settings whose value was hidden: what a run's folder holds is not enough to use them."""
    found = []
    for name, value, below in _leaves("", settings, False):
        alone = value == HIDDEN and (below or _is_sure(name) or _last_word(name) in _MAYBE)
        if alone or (isinstance(value, str) and f"://{HIDDEN}@" in value):
            found.append(name)
    return found


def _hidden(name: str, value: Any, below: bool) -> Any:
    if isinstance(value, Mapping):
        sure = below or _is_sure(name)
        return {key: _hidden(str(key), inner, sure) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(name, inner, below) for inner in value]
    if _is_secret(name, value, below):
        return HIDDEN
    return hide_in_value(value) if isinstance(value, str) else value


def _values(settings: Any, by_name: bool) -> Iterator[str]:
    """Yield the secrets of settings, also as they are within URLs, and those of the environment that they name."""
    for name, value, below in _leaves("", settings, False):
        if not isinstance(value, str):
            continue
        if by_name and _is_secret(name, value, below):
            yield value
            yield _SCHEME.sub("", value)
        if name.lower().endswith("_env") and (_last_word(name[:-4]) in _MAYBE or _is_sure(name[:-4])):
            yield os.environ.get(value, "")
        for found in (*_IN_URL.finditer(value), *filter(None, [_IN_ADDRESS.match(value)])):
            user, _, password = found["user"].partition(":")
            secret = password or user
            yield from {secret, unquote(secret)}


def _leaves(name: str, value: Any, below: bool) -> Iterator[tuple[str, Any, bool]]:
    """Yield (name, value, whether it is below a section of secrets)."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(str(key), inner, below or _is_sure(name))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(name, inner, below)
    else:
        yield name, value, below


def _is_secret(name: str, value: Any, below: bool) -> bool:
    if isinstance(value, bool) or not isinstance(value, str | int) or value in ("", HIDDEN):
        return False
    if str(value).startswith("${"):  # the name of a secret, not the secret
        return False
    if below or _is_sure(name):
        return True
    return isinstance(value, str) and _last_word(name) in _MAYBE and _is_random(value, words=not name.isupper())


def _is_random(value: str, *, words: bool) -> bool:
    """Whether a value looks like a key; one made of `words` and numbers does not."""
    if not _RANDOM.fullmatch(value):
        return False
    return not (words and all(map(_ORDINARY.fullmatch, _SEPARATORS.split(value))))


def _is_sure(name: str) -> bool:
    """Whether everything of this name is secret."""
    words = _words(name)
    if not words or words[-1] in _NO_SECRET or name in _FOLDERS:
        return False
    before = {*_BEFORE_KEY, *(("session", "service") if words[-1] == "token" else ())}
    qualified = len(words) > 1 and words[-1] in _MAYBE and words[-2] in before
    return qualified or words[-1] == "pw" or any(word.endswith(_SURE) for word in words)


def _words(name: str) -> list[str]:
    """Return the words of `client_secrets`, `clientSecret` or `CLIENT-SECRET` in the singular."""
    words = [word.lower() for word in _WORDS.findall(name)]
    return [word if word.endswith("ss") else word.removesuffix("s") for word in words]


def _last_word(name: str) -> str:
    return next(reversed(_words(name)), "")
