"""The mails that Trinity's search agent looks through: a SQLite database with a full-text index.

In: the database that Trinity-RFT's preparation script makes (tables `emails`, `recipients`, `emails_fts`). Out: ids and
snippets of the mails that a search finds; mails. It is only read; each question opens it anew, in any thread.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from sharpen.errors import ConfigError

VARIABLE = "DEFAULT_EMAIL_DB_PATH"
MOST_FOUND = 10
_SEARCH = """
SELECT emails.message_id, snippet(emails_fts, -1, '<b>', '</b>', ' ... ', 15)
FROM emails_fts JOIN emails ON emails.id = emails_fts.rowid
WHERE emails_fts MATCH :words AND emails.date < :before AND (
    emails.from_address = :inbox
    OR EXISTS (SELECT 1 FROM recipients WHERE email_id = emails.id AND recipient_address = :inbox))
ORDER BY emails.date DESC LIMIT :most
"""
_MAIL = "SELECT id, message_id, date, subject, from_address, body, file_name FROM emails WHERE message_id = ?"
_RECIPIENTS = "SELECT recipient_type, recipient_address FROM recipients WHERE email_id = ?"


class Mailbox:
    """The mails of the database that the environment variable `DEFAULT_EMAIL_DB_PATH` names."""

    def __init__(self) -> None:
        """Raises `ConfigError` if there is no such database."""
        place = os.environ.get(VARIABLE, "")
        if not place or not Path(place).is_file():
            wrong = f"is {place!r}, where no file is" if place else "is not set"
            raise ConfigError(
                f"email_search_workflow: the environment variable {VARIABLE} {wrong}: it holds the path of the "
                "database of mails (Trinity-RFT's prepare_data.py makes it)"
            )
        self._uri = f"{Path(place).absolute().as_uri()}?mode=ro"

    def search(self, inbox: str, keywords: Sequence[str], day: str) -> list[dict[str, str]]:
        """The newest mails from or to `inbox`, until the end of `day` (YYYY-MM-DD), that hold all keywords: their
        `message_id` and a `snippet`. Raises `ValueError` for a bad day and without keywords."""
        words = [keywords] if isinstance(keywords, str) else list(keywords)
        if not words:
            raise ValueError("no keywords are given")
        before = f"{date.fromisoformat(day) + timedelta(days=1)} 00:00:00"
        quoted = " ".join('"' + str(word).replace('"', '""') + '"' for word in words)
        values = {"words": quoted, "before": before, "inbox": inbox, "most": MOST_FOUND}
        return [{"message_id": row[0], "snippet": row[1]} for row in self._rows(_SEARCH, values)]

    def read(self, message_id: str) -> dict[str, Any] | None:
        """A mail, with the addresses it went `to`, in `cc` and in `bcc`; None if there is none with this id."""
        found = self._rows(_MAIL, (message_id,))
        if not found:
            return None
        number, *fields = found[0]
        mail: dict[str, Any] = dict(
            zip(("message_id", "date", "subject", "from_address", "body", "file_name"), fields, strict=True)
        )
        recipients = self._rows(_RECIPIENTS, (number,))
        for kind in ("to", "cc", "bcc"):
            mail[f"{kind}_addresses"] = [address for its_kind, address in recipients if its_kind.lower() == kind]
        return mail

    def _rows(self, query: str, values: Any) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(self._uri, uri=True)) as connection:
            return connection.execute(query, values).fetchall()
