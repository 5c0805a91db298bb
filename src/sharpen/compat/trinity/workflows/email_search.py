"""Trinity's agent that answers questions by searching and reading mails: AgentScope's `ReActAgent` with two tools.

In: a row with a question, its answer, `inbox_address`, `query_date` and `message_ids` (the mail that holds the answer
comes first); a database of mails; an auxiliary model that judges. Out: the experiences of all the agent's
calls, with the sum of `accuracy` and `format` as reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sqlite3
from collections.abc import Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from sharpen.compat.trinity.experience import Experience
from sharpen.compat.trinity.model import ModelWrapper
from sharpen.compat.trinity.react import AgentScopeReActAgent, agentscope, sampling_of
from sharpen.compat.trinity.task import Task
from sharpen.compat.trinity.workflow import Workflow
from sharpen.errors import ConfigError

# The mails that Trinity's search agent looks through: a SQLite database with a full-text index.
#
# In: the database that Trinity-RFT's preparation script makes (tables `emails`, `recipients`, `emails_fts`). Out: ids
# and snippets of the mails that a search finds; mails. It is only read; each question opens it anew, in any thread.

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


SYSTEM = (
    "You answer a question of the user about their mails. Search the mails and read those that may hold the answer; if "
    "a search finds nothing, try other keywords. You have {max_turns} turns. In each, say what you see and what you do "
    "next. Once you know the answer, call `generate_response` with it; do not call it before.\n\n"
    "The user's address is {inbox_address}. Today is {query_date}."
)
JUDGE = (
    "You decide whether an answer is accepted. You are given a question, the reference answer and an assistant's "
    "answer. Accept it if it says all that the question asks for as the reference answer has it, in whatever words; "
    "more than that may be missing or added, as long as nothing contradicts the reference. Reply with one word, true "
    "or false."
)
UNKNOWN = "I don't know"


class FoundAnswer(BaseModel):
    """What the agent answers with."""

    answer: str = Field(description=f"The answer. If you cannot find it: {UNKNOWN}")
    sources: list[str] = Field(
        description="The message ids of the mails that hold the answer, usually one; an empty list if there is none."
    )


class EmailSearchAgent(AgentScopeReActAgent):
    """AgentScope's agent with the tools `search_emails` and `read_email`. `found` and `read` are ids of mails."""

    def __init__(self, **arguments: Any) -> None:
        self.mailbox = Mailbox()
        self.found: list[str] = []
        self.read: list[str] = []
        toolkit = agentscope("tool", "Toolkit")()
        toolkit.register_tool_function(self.search_emails)
        toolkit.register_tool_function(self.read_email)
        super().__init__(toolkit=toolkit, **arguments)

    async def search_emails(self, inbox_address: str, query_date: str, keywords: list[str], **_: Any) -> Any:
        """Search the user's mails. Returns the ids of up to ten mails that hold all keywords, with a snippet of each.

        Args:
            inbox_address (str):
                The user's address.
            query_date (str):
                The day of the question, as YYYY-MM-DD: later mails are not found.
            keywords (list[str]):
                The words to look for, in subject and text.
        """
        try:
            mails = await asyncio.to_thread(self.mailbox.search, inbox_address, keywords, query_date)
        except (ValueError, TypeError, sqlite3.Error) as error:
            return _shown(f"Error: the search failed: {error}")
        self.found += [mail["message_id"] for mail in mails]
        return _shown(json.dumps(mails))

    async def read_email(self, message_id: str, **_: Any) -> Any:
        """Read a mail.

        Args:
            message_id (str):
                The id of the mail.
        """
        try:
            mail = await asyncio.to_thread(self.mailbox.read, message_id)
        except sqlite3.Error as error:
            return _shown(f"Error: the mail cannot be read: {error}")
        self.read.append(message_id)
        return _shown(json.dumps(mail) if mail is not None else f"Error: there is no mail {message_id}.")


class EmailSearchWorkflow(Workflow):
    """`workflow_args`: `max_turns` (10). `reward_fn_args`: `llm_as_a_judge` (true); without it the answer is compared.

    Without an answer `accuracy` is 0 and `format` -1. A wrong one has the accuracy -1, and as format 0.1 each for the
    right mail among those found, those read and those named; a right one 1, and as format 1, 0.3 for the right mail
    named, 0.1 over the number of mails named, and up to 0.1 for turns to spare.
    """

    is_async = True

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        row = task.raw_task
        self.query, self.truth = row[task.format_args.prompt_key], row[task.format_args.response_key]
        self.wanted = [str(message_id) for message_id in row["message_ids"]][:1]
        self.max_turns = int(task.workflow_args.get("max_turns", 10))
        self.judged = bool(task.reward_fn_args.get("llm_as_a_judge", True))
        if self.judged and not self.auxiliary_models:
            raise ConfigError(
                "EmailSearchWorkflow needs a judge: give an auxiliary model (auxiliary_models; in a Trinity-RFT file "
                "explorer.auxiliary_models), or set task_args.reward_fn_args.llm_as_a_judge to false"
            )
        day = str(row["query_date"])[:10]  # of a date with a time, the date
        self.agent = EmailSearchAgent(
            openai_client=model.get_openai_async_client(),
            model_name=model.model_path,
            system_prompt=SYSTEM.format(max_turns=self.max_turns, inbox_address=row["inbox_address"], query_date=day),
            generate_kwargs=sampling_of(task),
            response_structure=FoundAnswer,
            max_iters=self.max_turns,
        )

    async def run_async(self) -> list[Experience]:
        """Search, answer, be judged; every call gets the reward. Metrics: the scores, and `actual_turns`."""
        reply = await self.agent.reply(self.query)
        experiences = self.model.extract_experience_from_history()
        scores = await self.calculate_reward(reply, len(experiences))
        for experience in experiences:
            experience.reward = sum(scores.values())
            experience.metrics |= {**scores, "actual_turns": len(experiences)}
        return experiences

    async def calculate_reward(self, reply: dict[str, Any], turns: int) -> dict[str, float]:
        """The scores of an answer (empty without one). Raises `ValueError` if the judgement cannot be read."""
        answer, sources = reply.get("answer"), reply.get("sources") or []
        if answer is None:
            return {"accuracy": 0.0, "format": -1.0}
        if not self.judged:
            return {"accuracy": float(answer.lower() in str(self.truth).lower()), "format": 0.0}
        right = await self._is_accepted(answer)
        known = [bool(self.wanted) and self.wanted[0] in ids for ids in (self.agent.found, self.agent.read, sources)]
        if not right:
            return {"accuracy": -1.0, "format": 0.1 * sum(known)} if answer else {"accuracy": 0.0, "format": 0.0}
        if answer == UNKNOWN:
            return {"accuracy": 0.0, "format": 0.1 * sum(known)}
        few = 0.1 / len(sources) if sources else 0.0
        return {"accuracy": 1.0, "format": 1 + 0.3 * known[2] + few + 0.1 * (1 - turns / self.max_turns)}

    async def _is_accepted(self, answer: str) -> bool:
        assert self.auxiliary_models
        judge = self.auxiliary_models[0]
        question = f"Question: {self.query}\nReference answer: {self.truth}\nAnswer: {answer}"
        messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": question}]
        completion = await judge.chat.completions.create(model=judge.model_path, messages=messages)
        said = completion.choices[0].message.content or ""
        found = {word.lower() for word in re.findall(r"\b(?:true|false)\b", said, re.IGNORECASE)}
        if not found:
            raise ValueError(f"the judge's reply says neither true nor false: {said[:120]!r}")
        return "true" in found


def _shown(text: str) -> Any:
    """What a tool gives back."""
    return agentscope("tool", "ToolResponse")(content=[agentscope("message", "TextBlock")(type="text", text=text)])
