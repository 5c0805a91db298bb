"""Search over the rollouts of a run.

In: its index, a `SearchQuery`. Out: a `SearchPage`: one page of hits with a piece of their text.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from typing import Any

from sharpen.agent.transcript import clean_for_page
from sharpen.errors import JournalError
from sharpen.learning.experience.opening import open_journal
from sharpen.show.view.entries import TRAINING, read_text
from sharpen.show.view.index import Index, IndexState, apart

PAGE = 50
ORDERS: Mapping[str, str] = {
    "newest": "rollouts.number DESC",
    "oldest": "rollouts.number",
    "reward": "rollouts.reward DESC, rollouts.number DESC",
    "lowest": "rollouts.reward IS NULL, rollouts.reward, rollouts.number DESC",
    "longest": "rollouts.tokens DESC",
    "slowest": "rollouts.seconds DESC",
    "calls": "rollouts.calls DESC",
    "rising": "rise DESC, rollouts.reward DESC, rollouts.number DESC",
}
SNIPPET_BEFORE, SNIPPET_AFTER = 60, 160
RECENT_SHARE = 0.25
"""The share of the last steps that count as lately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchQuery:
    """What is looked for. `text`: words that all occur, "a phrase" in quotes, a beginning with `*`. `outcome` is one
    of the outcomes, or `failed` for all but ok. `place` is `training` or an evaluation's `<dataset>/<mode>`, `moment`
    when that was. `noted` looks for rollouts with a thumb: `up`, `down` or `any`. `order` is one of `ORDERS`; `rising`
    are the answers with the highest reward of the last steps, those of tasks whose reward rose most first."""

    text: str = ""
    outcome: str = ""
    tool: str = ""
    task: str = ""
    place: str = ""
    moment: str = ""
    reward_low: float | None = None
    reward_high: float | None = None
    tokens_low: int | None = None
    tokens_high: int | None = None
    step_low: int | None = None
    step_high: int | None = None
    noted: str = ""
    order: str = "newest"
    page: int = 1

    @classmethod
    def of(cls, given: Mapping[str, str]) -> SearchQuery:
        """Read a query from an address; a value that is no number is left out."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            text = given.get(field.name, "").strip()
            if text and "float" in str(field.type):
                values[field.name] = _number(text)
            elif text and "int" in str(field.type):
                number = _number(text)
                values[field.name] = None if number is None else int(number)
            elif text:
                values[field.name] = text
        values["page"] = max(1, values.get("page") or 1)
        if values.get("order") not in ORDERS:
            values["order"] = "newest"
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A rollout in one line. `name` is its name in addresses. `snippet` is text in parts, (text, whether it was looked
    for). `rise` is how much its task's reward rose (order `rising` only)."""

    name: str
    id: str
    task: str
    place: str
    moment: str
    step: int | None
    kind: str
    attempt: int
    outcome: str
    reward: float | None
    calls: int
    tokens: int
    seconds: float
    tools: tuple[str, ...]
    question: str
    answer: str
    error: str
    snippet: tuple[tuple[str, bool], ...]
    rise: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facets:
    """What can be chosen in filters, with how many rollouts there are of each."""

    outcomes: tuple[tuple[str, int], ...]
    tools: tuple[tuple[str, int], ...]
    places: tuple[tuple[str, int], ...]
    moments: tuple[str, ...]
    steps: tuple[int, int] | None
    rewards: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPage:
    """One page of hits. `total` counts all of them. `problem` says what is wrong with the query."""

    query: SearchQuery
    hits: tuple[Hit, ...]
    total: int
    num_pages: int
    facets: Facets
    index: IndexState
    problem: str


KINDS = {0: "repeated attempt", 1: "rollout", 2: "baseline"}


def search_page(index: Index, query: SearchQuery, noted: Mapping[str, str]) -> SearchPage:
    """Return a page of hits. `noted` has the thumbs, by a rollout's name."""
    state = index.state()
    with index.reading() as connection:
        facets = _facets(connection)
        try:
            hits, total, problem = *_hits(connection, query, noted, facets), ""
        except sqlite3.OperationalError as error:
            if not query.text:  # no fault of what is looked for
                raise
            hits, total, problem = (), 0, f"the search cannot be made: {error}"
    if query.text:
        hits = _with_snippets(index, hits, query.text)
    return SearchPage(
        query=query,
        hits=hits,
        total=total,
        num_pages=max(1, -(-total // PAGE)),
        facets=facets,
        index=state,
        problem=problem,
    )


def snippet(text: str, wanted: str) -> tuple[tuple[str, bool], ...]:
    """Return the text around the first place where something that is looked for occurs, in parts: (text, whether it was
    looked for). Words are found as the index finds them, whole and in any case, but accents must be as they are."""
    terms = [quoted or word for quoted, word in re.findall(r'"([^"]*)"|(\S+)', wanted)]
    patterns = [_term_pattern(term) for term in terms if re.search(r"\w", term)]
    if not patterns:
        return ()
    pattern = re.compile("|".join(patterns), re.IGNORECASE)
    first = pattern.search(text)
    if first is None:
        return ()
    start, end = max(0, first.start() - SNIPPET_BEFORE), first.start() + SNIPPET_AFTER
    shown = " ".join(text[start:end].split())
    parts: list[tuple[str, bool]] = [("… ", False)] if start else []
    place = 0
    for found in pattern.finditer(shown):
        parts += [(shown[place : found.start()], False), (found.group(), True)]
        place = found.end()
    parts.append((shown[place:] + (" …" if end < len(text) else ""), False))
    return tuple((clean_for_page(part), marked) for part, marked in parts if part)


def _term_pattern(term: str) -> str:
    """A pattern of a term of a query: its words, with anything but letters and digits between them."""
    words = re.findall(r"\w+", term)
    ending = r"\w*" if term.endswith("*") else r"(?!\w)"
    inner = r"\W+".join(map(re.escape, words))
    return inner if apart(inner) != inner else rf"(?<!\w){inner}{ending}"


def _with_snippets(index: Index, hits: Sequence[Hit], text: str) -> tuple[Hit, ...]:
    """Return the hits with their snippets; without, where the journal cannot be read any more."""
    found = []
    journals = (index.folder.journal, index.folder.evaluations)
    with contextlib.ExitStack() as stack:
        sources: dict[int, sqlite3.Connection] = {}
        for hit in hits:
            number = number_of(hit.name)
            assert number is not None, "a hit's name is made of its number"
            try:
                if number % 2 not in sources:
                    sources[number % 2] = stack.enter_context(closing(open_journal(journals[number % 2])))
                found.append(replace(hit, snippet=snippet(read_text(sources[number % 2], number // 2), text)))
            except (JournalError, sqlite3.Error):
                found.append(hit)
    return tuple(found)


def name_of(number: int) -> str:
    """Return a rollout's name in addresses: `t` or `e`, for training and evaluation, and its key in the journal."""
    return f"{'e' if number % 2 else 't'}{number // 2}"


def number_of(name: str) -> int | None:
    """Return the number of a rollout with this name; None if it is no name."""
    found = re.fullmatch(r"([te])(\d{1,15})", name)
    return None if found is None else 2 * int(found.group(2)) + (found.group(1) == "e")


def match_of(text: str) -> str:
    """Return a person's words as a query of SQLite's FTS5: all must occur, whatever characters they hold."""
    terms = []
    for quoted, word in re.findall(r'"([^"]*)"|(\S+)', text):
        term = apart(quoted or word.rstrip("*")).replace('"', " ").strip()
        if re.search(r"\w", term):
            terms.append(f'"{term}"' + ("*" if word.endswith("*") else ""))
    return " AND ".join(terms)


def _hits(
    connection: sqlite3.Connection, query: SearchQuery, noted: Mapping[str, str], facets: Facets
) -> tuple[tuple[Hit, ...], int]:
    conditions, values = _conditions(query, noted)
    source, rise, order = "rollouts", "NULL", ORDERS[query.order]
    counted = None
    if query.text and (match := match_of(query.text)):
        # The words first: CROSS JOIN keeps the order, which SQLite would choose by the number of rows alone.
        source = "texts CROSS JOIN rollouts ON rollouts.number = texts.rowid"
        order = order.replace("rollouts.number", "texts.rowid")
        counted = "texts" if not conditions and query.order != "rising" else None
        conditions.append("texts MATCH ?")
        values.append(match)
    if query.order == "rising":
        rise = _add_rise(connection, conditions, values, facets)
        source += " JOIN rises ON rises.task = rollouts.task"
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    total = connection.execute(f"SELECT COUNT(*) FROM {counted or source}{where}", values).fetchone()[0]
    chosen = connection.execute(
        f"SELECT rollouts.*, {rise} AS rise FROM {source}{where} ORDER BY {order} LIMIT ? OFFSET ?",
        [*values, PAGE, PAGE * (query.page - 1)],
    ).fetchall()
    return tuple(_hit(connection, row) for row in chosen), total


def _conditions(query: SearchQuery, noted: Mapping[str, str]) -> tuple[list[str], list[Any]]:
    """Return the conditions of a query in SQL, and their values."""
    wanted: list[tuple[str, Any]] = [
        ("rollouts.task = ?", query.task or None),
        ("rollouts.place = ?", query.place or None),
        ("rollouts.moment = ?", query.moment or None),
        ("rollouts.reward >= ?", query.reward_low),
        ("rollouts.reward <= ?", query.reward_high),
        ("rollouts.tokens >= ?", query.tokens_low),
        ("rollouts.tokens <= ?", query.tokens_high),
        ("rollouts.step >= ?", query.step_low),
        ("rollouts.step <= ?", query.step_high),
        ("EXISTS (SELECT 1 FROM tools WHERE tools.number = rollouts.number AND tool = ?)", query.tool or None),
        ("rollouts.outcome = ?", query.outcome if query.outcome != "failed" and query.outcome else None),
    ]
    conditions = [condition for condition, value in wanted if value is not None]
    values = [value for _, value in wanted if value is not None]
    if query.outcome == "failed":
        conditions.append("rollouts.outcome <> 'ok'")
    if query.noted:
        numbers = [number_of(name) for name, thumb in noted.items() if query.noted in ("any", thumb)]
        conditions.append(f"rollouts.number IN ({', '.join(str(number) for number in numbers if number is not None)})")
    return conditions, values


def _add_rise(connection: sqlite3.Connection, conditions: list[str], values: list[Any], facets: Facets) -> str:
    """Make a table with how much each task's training reward rose lately, keep only rollouts of the last steps, and
    return the column. A task that was not seen before is compared with the mean of all tasks before."""
    first, last = facets.steps or (0, 0)
    since = last - round((last - first) * RECENT_SHARE)
    connection.execute("PRAGMA query_only = 0")
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute(
        "CREATE TEMP TABLE rises AS SELECT late.task, late.mean - COALESCE(early.mean, (SELECT AVG(mean) FROM groups"
        " WHERE place = :place AND step < :since), late.mean) AS rise"
        " FROM (SELECT task, AVG(mean) AS mean FROM groups WHERE place = :place AND step >= :since GROUP BY task) late"
        " LEFT JOIN (SELECT task, AVG(mean) AS mean FROM groups WHERE place = :place AND step < :since GROUP BY task)"
        " early ON early.task = late.task",
        {"place": TRAINING, "since": since},
    )
    connection.execute("CREATE INDEX temp.rises_task ON rises (task)")
    conditions += ["rollouts.place = ?", "rollouts.step >= ?", "rollouts.reward IS NOT NULL", "rises.rise > 0"]
    values += [TRAINING, since]
    return "rises.rise"


def _hit(connection: sqlite3.Connection, row: sqlite3.Row) -> Hit:
    words = connection.execute("SELECT * FROM words WHERE number = ?", (row["number"],)).fetchone()
    tools = connection.execute("SELECT tool FROM tools WHERE number = ? ORDER BY tool", (row["number"],)).fetchall()
    return Hit(
        name=name_of(row["number"]),
        tools=tuple(tool for (tool,) in tools),
        kind=KINDS.get(row["kind"], ""),
        question=words["question"],
        answer=words["answer"],
        error=words["error"],
        snippet=(),
        rise=row["rise"],
        **{name: row[name] for name in _COLUMNS},
    )


_COLUMNS = ("id", "task", "place", "moment", "step", "attempt", "outcome", "reward", "calls", "tokens", "seconds")


def _facets(connection: sqlite3.Connection) -> Facets:
    def counted(sql: str) -> tuple[tuple[str, int], ...]:
        return tuple((name, count) for name, count in connection.execute(sql))

    steps = connection.execute(
        "SELECT MIN(step), MAX(step) FROM groups WHERE place = ? AND step IS NOT NULL", (TRAINING,)
    ).fetchone()
    rewards = connection.execute("SELECT MIN(low), MAX(high) FROM groups").fetchone()
    moments = connection.execute("SELECT moment FROM groups WHERE moment <> '' GROUP BY moment ORDER BY MIN(number)")
    return Facets(
        outcomes=counted("SELECT outcome, COUNT(*) FROM rollouts GROUP BY outcome ORDER BY 2 DESC"),
        tools=counted("SELECT tool, COUNT(*) FROM tools GROUP BY tool ORDER BY 2 DESC LIMIT 50"),
        places=counted("SELECT place, COUNT(*) FROM rollouts GROUP BY place ORDER BY 2 DESC"),
        moments=tuple(moment for (moment,) in moments),
        steps=None if steps[0] is None else (steps[0], steps[1]),
        rewards=None if rewards[0] is None else (rewards[0], rewards[1]),
    )


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) < 1e15 else None
