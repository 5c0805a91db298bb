"""The agent's two tools: search an inbox and read an email, in a SQLite database that is opened for reading only.

In: the database's path, the arguments of a tool call as the model wrote them. Out: text for the model; what is wrong
with its arguments comes back as text too.
"""

import contextlib
import re
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_RESULTS = 8


class SearchInbox(BaseModel):
    """Search the inbox. Gives id, date, sender and subject of the emails that fit best."""

    model_config = ConfigDict(extra="forbid")
    words: str = Field(min_length=1, description="words that all occur in the email")
    sender: str | None = Field(default=None, description="part of the sender's address")


class ReadEmail(BaseModel):
    """Read one email."""

    model_config = ConfigDict(extra="forbid")
    id: int = Field(ge=1, le=2**31, description="the email's id")


def search_inbox(database: Path, arguments: SearchInbox) -> str:
    """One line for each hit, the best first; newer ones first among equals."""
    words = re.findall(r"\w+", arguments.words)
    if not words:
        return "error: words must hold at least one word"
    pattern = " ".join(f'"{word}"' for word in words)  # quoted: no word is an operator of the query language
    part = re.sub(r"([\\%_])", r"\\\1", arguments.sender or "")
    found = _query(
        database,
        "SELECT emails.id, emails.sent, emails.sender, emails.subject FROM emails_text "
        "JOIN emails ON emails.id = emails_text.rowid "
        "WHERE emails_text MATCH ? AND emails.sender LIKE ? ESCAPE '\\' ORDER BY rank, emails.sent DESC LIMIT ?",
        (pattern, f"%{part}%", MAX_RESULTS),
    )
    return "\n".join(f"{number} | {sent} | {sender} | {subject}" for number, sent, sender, subject in found) or "none"


def read_email(database: Path, arguments: ReadEmail) -> str:
    """The whole email."""
    found = _query(database, "SELECT sent, sender, subject, body FROM emails WHERE id = ?", (arguments.id,))
    if not found:
        return f"error: there is no email {arguments.id}"
    sent, sender, subject, body = found[0]
    return f"From: {sender}\nDate: {sent}\nSubject: {subject}\n\n{body}"


def _query(database: Path, statement: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        return connection.execute(statement, values).fetchall()


TOOLS: Mapping[str, tuple[type[BaseModel], Callable[[Path, Any], str]]] = {
    "search_inbox": (SearchInbox, search_inbox),
    "read_email": (ReadEmail, read_email),
}
"""Arguments and function of each tool."""


def tool_schemas() -> list[Any]:
    """The tools as a chat completion's `tools`."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": arguments.__doc__,
                "parameters": {
                    key: value for key, value in arguments.model_json_schema().items() if key != "description"
                },
            },
        }
        for name, (arguments, _) in TOOLS.items()
    ]


def use_tool(database: Path, name: str, arguments: str) -> str:
    """Run a tool call: JSON arguments in, text out."""
    if name not in TOOLS:
        return f"error: there is no tool {name!r}; there are {', '.join(TOOLS)}"
    kind, function = TOOLS[name]
    try:
        return function(database, kind.model_validate_json(arguments))
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors())
        return f"error: {'; '.join(problems)}"
